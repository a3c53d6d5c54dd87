// Prompts continue from what an earlier request computed, though the cache has given it up, or another process did it.
// The answers are those of a cold start, to the bit.
#include <gtest/gtest.h>

#include <cerrno>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "answers.h"
#include "engine/scheduler/scheduler.h"
#include "seed.h"
#include "temporary_folder.h"
#include "two_arithmetics.h"

namespace {

using namespace sharpi;
using namespace tiny;

constexpr int64_t kBeginning = 4 * kPage;
constexpr int64_t kCache = 8 * kPage;
constexpr int kAnswer = 20;

struct Kind {
    const char* name;
    Options options;
    int64_t step;
    int32_t sequences = 3;
    int64_t windowPages = 0;  // that a prompt's next token sees, where it does not see all
};

// Models whose layers see everything, with states, and with windows, for which a cache with more room would have no
// list.
std::vector<Kind> kinds() {
    return {{"plain", gpuVariants()[0], 1},
            {"latent", latents()[0], 1},
            {"hybrid", hybrids()[0], kPromptTile},
            {"mamba", mambas()[2], kPromptTile},
            {"mamba and attention", mambas()[0], kPromptTile},
            {"mamba beside attention", mambas()[3], kPromptTile},
            {"windows", withWindows(), 1, 1, 1},
            {"blocks", withBlocks(), 1, 1, 4}};
}

class World {
public:
    World(const Kind& kind, const SchedulerOptions& options, KvType type = KvType::BF16)
        : _step(kind.step), _model(modelOf(kind.options, kCache)), _options(engineOptions(kCache, 64, kind.sequences)) {
        _options.kvType = type;
        _watched = std::make_unique<TwoArithmeticsEngine>(_model, _options, kind.step);
        _scheduler = std::make_unique<Scheduler>(_watched->engine, options);
    }
    // Serves the prompt and compares with an engine that has seen nothing. Returns the tokens that were not computed.
    int64_t serve(const std::vector<int32_t>& prompt, const std::string& salt = "",
                  const std::vector<int64_t>& marks = {}) {
        const Whole here = answered(*_scheduler, prompt, salt, marks);
        const int64_t computed = _watched->rowsSeen().first;
        const TwoArithmeticsEngine cold(_model, _options, _step);
        Scheduler scheduler(cold.engine, longQueue());
        const Whole there = answered(scheduler, prompt, salt, {});
        EXPECT_EQ(here.ending.finish, Finish::Length) << here.ending.error;
        EXPECT_EQ(here.tokens, there.tokens);
        EXPECT_EQ(here.scores.size(), size_t{kAnswer});
        for (size_t i = 0; i < here.scores.size(); ++i) {
            EXPECT_EQ(here.scores[i].logProbability, there.scores[i].logProbability);
            for (size_t k = 0; k < here.scores[i].best.size(); ++k)
                EXPECT_EQ(here.scores[i].best[k].logProbability, there.scores[i].best[k].logProbability);
        }
        EXPECT_EQ(computed, static_cast<int64_t>(prompt.size()) - here.ending.figures.reusedTokens);
        return here.ending.figures.reusedTokens;
    }
    std::vector<int32_t> prompt(unsigned seed, int64_t more = 10, unsigned end = 0) const {
        std::vector<int32_t> tokens = randomTokens(kBeginning, _model.options().vocab, seed);
        const std::vector<int32_t> rest = randomTokens(more, _model.options().vocab, 1000 + end);
        tokens.insert(tokens.end(), rest.begin(), rest.end());
        return tokens;
    }
    SpillCounts counts() const { return _scheduler->counts().spill; }
    void close() { _scheduler.reset(); }

private:
    static Whole answered(Scheduler& scheduler, const std::vector<int32_t>& prompt, const std::string& salt,
                          const std::vector<int64_t>& marks) {
        Request request = requestOf(prompt, kAnswer);
        request.marks = marks;
        request.extras.best = 3;
        request.salt = salt;
        return wait(*scheduler.submit(request));
    }

    const int64_t _step;
    const Model _model;
    EngineOptions _options;
    std::unique_ptr<TwoArithmeticsEngine> _watched;
    std::unique_ptr<Scheduler> _scheduler;
};

class SpilledPrefixes : public testing::Test {
protected:
    SchedulerOptions onDisk() {
        SchedulerOptions options = longQueue();
        options.directory.path = folder.path();
        options.directory.mostBytes = size_t{1} << 30;
        options.directory.notice = [this](const std::string& line) { notices.push_back(line); };
        options.file = "a file";
        return options;
    }
    // Calls body(kind, options) for each kind of model, with all copies on the disk and with room for them in RAM. In
    // the end nothing was noticed.
    template <typename Body> void withDisk(const Body& body) {
        for (const Kind& kind : kinds()) {
            for (const size_t ram : {size_t{0}, size_t{1} << 30}) {
                SCOPED_TRACE(std::string(kind.name) + ", " + std::to_string(ram));
                SchedulerOptions options = onDisk();
                options.spillBytes = options.statesBytes = ram;
                options.file = kind.name + std::to_string(ram);
                body(kind, options);
                EXPECT_EQ(notices.size(), 0U);
            }
        }
    }
    TemporaryFolder folder;
    std::vector<std::string> notices;
};

TEST_F(SpilledPrefixes, ComeBackFromRam) {
    for (const Kind& kind : kinds()) {
        SCOPED_TRACE(kind.name);
        World world(kind, longQueue());
        for (const unsigned text : {1, 2, 3}) EXPECT_EQ(world.serve(world.prompt(text)), 0);
        EXPECT_GE(world.counts().spilledPages, kBeginning / kPage);
        EXPECT_EQ(world.counts().restoredPages, 0);
        EXPECT_GT(world.counts().pagesBytes, 0U);
        EXPECT_EQ(world.serve(world.prompt(1, 30, 7)), kBeginning);
        EXPECT_GE(world.counts().restoredPages, 1);
        EXPECT_EQ(world.counts().writtenCopies, 0);
    }
}

TEST_F(SpilledPrefixes, AreComputedAgainWithoutRoomInRam) {
    SchedulerOptions options = longQueue();
    options.spillBytes = 0;
    World world(kinds()[0], options);
    for (const unsigned text : {1, 2, 3}) EXPECT_EQ(world.serve(world.prompt(text)), 0);
    EXPECT_EQ(world.serve(world.prompt(1, 30, 7)), 0);
    EXPECT_EQ(world.counts().spilledPages, 0);
}

TEST_F(SpilledPrefixes, AreThereAfterARestart) {
    withDisk([](const Kind& kind, const SchedulerOptions& options) {
        {
            World world(kind, options);
            for (const unsigned text : {1, 2, 3}) EXPECT_EQ(world.serve(world.prompt(text)), 0);
        }
        {
            World world(kind, options);
            EXPECT_EQ(world.serve(world.prompt(1)), kBeginning) << "the same prompt";
            EXPECT_EQ(world.serve(world.prompt(2, 100, 5)), kBeginning) << "a longer one";
            EXPECT_EQ(world.counts().restoredPages, 2 * (kBeginning / kPage + kind.windowPages));
            EXPECT_EQ(world.serve(world.prompt(4)), 0) << "another one";
        }
        World world(kind, options);
        EXPECT_EQ(world.serve(world.prompt(2, 120, 5)), kBeginning + kPage) << "what the second process has computed";
    });
}

// What prompts need to continue at a mark is kept as what they need at an earlier prompt's end.
TEST_F(SpilledPrefixes, ContinueAtMarks) {
    withDisk([](const Kind& kind, const SchedulerOptions& options) {
        constexpr int64_t kOwn = 150;
        const std::vector<int64_t> marks{kBeginning};
        {
            World world(kind, options);
            EXPECT_EQ(world.serve(world.prompt(1, kOwn, 1), "", marks), 0);
            for (const unsigned text : {2, 3}) EXPECT_EQ(world.serve(world.prompt(text)), 0);
            EXPECT_EQ(world.serve(world.prompt(1, kOwn, 2), "", marks), kBeginning);
        }
        World world(kind, options);
        EXPECT_EQ(world.serve(world.prompt(1, kOwn, 3), "", marks), kBeginning);
    });
}

TEST_F(SpilledPrefixes, OfAnotherModelFormatArithmeticOrSaltAreNotUsed) {
    const Kind kind = kinds()[0];
    {
        World world(kind, onDisk());
        world.serve(world.prompt(1));
    }
    SchedulerOptions other = onDisk();
    other.file = "another file";
    {
        World world(kind, other);
        EXPECT_EQ(world.serve(world.prompt(1)), 0);
    }
    for (const KvType type : {KvType::F16, KvType::F32}) {
        World world(kind, onDisk(), type);
        EXPECT_EQ(world.serve(world.prompt(1)), 0);
    }
    {
        World world(kind, onDisk());
        EXPECT_EQ(world.serve(world.prompt(1), "salt"), 0);
        EXPECT_EQ(world.serve(world.prompt(1)), kBeginning);
    }
    // Prompts that are computed as answers are.
    const Model model = modelOf(kind.options, kCache);
    const auto engine = engineOf(model, engineOptions(kCache, 64, 3));
    Scheduler scheduler(engine, onDisk());
    World world(kind, longQueue());
    EXPECT_EQ(wait(*scheduler.submit(requestOf(world.prompt(1), kAnswer))).ending.figures.reusedTokens, 0);
    EXPECT_EQ(notices.size(), 0U);
}

TEST_F(SpilledPrefixes, ThatAreDamagedChangeNoAnswer) {
    std::mt19937 random(testSeed(1));
    int64_t reused = 0;
    for (int round = 0; round < watchedRuns(12); ++round) {
        for (const Kind& kind : kinds()) {
            SCOPED_TRACE(std::string(kind.name) + ", round " + std::to_string(round));
            World world(kind, onDisk());
            for (const unsigned text : {1, 2}) reused += world.serve(world.prompt(text));
            world.close();
            for (const auto& path : folder.files()) {
                const auto size = static_cast<int64_t>(std::filesystem::file_size(path));
                if (size == 0 || random() % 4) continue;
                if (random() % 3 == 0) {
                    std::filesystem::resize_file(path, random() % static_cast<uint64_t>(size));
                    continue;
                }
                std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
                const auto at = static_cast<std::streamoff>(random() % static_cast<uint64_t>(size));
                file.seekg(at);
                const int byte = file.get();
                file.seekp(at);
                file.put(static_cast<char>(byte ^ (1 + random() % 255)));
            }
        }
    }
    EXPECT_GT(notices.size(), 10U);
    EXPECT_GT(reused, 0);
}

TEST_F(SpilledPrefixes, AFullDiskCostsNoRequest) {
    SchedulerOptions options = onDisk();
    options.spillBytes = 0;
    int files = 0;
    options.directory.write = [&](int file, const void* data, size_t bytes) {
        if (++files <= 4) return CacheDirectoryOptions::writeFully(file, data, bytes);
        errno = ENOSPC;
        return false;
    };
    World world(kinds()[0], options);
    for (const unsigned text : {1, 2, 3, 1, 2}) world.serve(world.prompt(text));
    world.close();
    ASSERT_EQ(notices.size(), 1U);
    EXPECT_NE(notices[0].find("No space left on device"), std::string::npos);
    EXPECT_EQ(folder.files().size(), 2U);
}

TEST_F(SpilledPrefixes, StayWithinTheDirectorysLimit) {
    SchedulerOptions options = onDisk();
    uint64_t one = 0;
    {
        World world(kinds()[0], options);
        world.serve(world.prompt(1));
        world.close();
        one = std::filesystem::file_size(folder.files().front());
    }
    options.directory.mostBytes = 6 * one;
    World world(kinds()[0], options);
    for (const unsigned text : {2, 3, 4, 5}) world.serve(world.prompt(text));
    world.close();
    EXPECT_LE(folder.files().size(), 6U);
    World again(kinds()[0], options);
    EXPECT_EQ(again.serve(again.prompt(5)), kBeginning) << "the last one is there, and none of its pages is missing";
}

TEST_F(SpilledPrefixes, ADirectoryThatCannotBeUsedIsRefused) {
    SchedulerOptions options = onDisk();
    options.directory.path = "/dev/null/cache";
    try {
        World world(kinds()[0], options);
        FAIL() << "a directory in a device";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::InvalidArgument);
        EXPECT_NE(std::string(error.what()).find("/dev/null/cache"), std::string::npos);
    }
}

}  // namespace
