// The scheduler if memory, copies and passes fail: each of them in turn, while requests share, spill and restore pages
// and states, and are paused. A request may end with an error; whatever is answered is answered as alone, and nothing
// is lost.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "answers.h"
#include "engine/scheduler/scheduler.h"
#include "seed.h"
#include "temporary_folder.h"

namespace {

// One of the calls that other threads than the test's make from now on fails. 0: none.
std::atomic<int64_t> failingAllocation{0}, failingCall{0};
thread_local bool isTestThread = false;

bool failsNow(std::atomic<int64_t>& failing) { return !isTestThread && failing > 0 && --failing == 0; }

}  // namespace

// If it were inlined, compilers would warn that `new` is paired with free().
#define SHARPI_APART __attribute__((noinline))
SHARPI_APART void* operator new(size_t bytes) {
    void* const p = failsNow(failingAllocation) ? nullptr : std::malloc(bytes ? bytes : 1);
    if (!p) throw std::bad_alloc();
    return p;
}
// The standard library's algorithms take this one for what they can do without.
SHARPI_APART void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
    return failsNow(failingAllocation) ? nullptr : std::malloc(bytes ? bytes : 1);
}
SHARPI_APART void operator delete(void* p) noexcept { std::free(p); }
SHARPI_APART void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace {

using namespace sharpi;
using namespace tiny;

constexpr int64_t kBeginning = 3 * kPage;
constexpr int64_t kRuns = watchedRuns(watchedRuns(24)), kRounds = 24;
constexpr int64_t kMany = int64_t{1} << 40;
constexpr const char* kTold = "told to fail";

void mayFail() {
    if (failsNow(failingCall)) throw Error(ErrorKind::Internal, kTold);
}

// The copies of pages and states go through it.
class FailingMemory : public HostMemory {
public:
    void upload(void* to, const void* host, size_t bytes) override {
        mayFail();
        HostMemory::upload(to, host, bytes);
    }
    void download(void* host, const void* from, size_t bytes) override {
        mayFail();
        HostMemory::download(host, from, bytes);
    }
};

class FailingBackend : public CpuBackend {
public:
    FailingBackend() : CpuBackend(1, std::make_unique<FailingMemory>()) {}
    void region(sharpi::Pass pass, const std::function<void()>& body) override {
        mayFail();
        CpuBackend::region(pass, body);
        mayFail();
    }
    std::vector<Chosen> sample(const std::vector<Choice>& choices) override {
        mayFail();
        return CpuBackend::sample(choices);
    }
};

struct Room {
    std::vector<int64_t> pages;
    int32_t states = 0;
    size_t bytes = 0;
    bool operator==(const Room& other) const {
        return pages == other.pages && states == other.states && bytes == other.bytes;
    }
};

struct Kind {
    Options options;
    int64_t pages = 8;  // of the cache
    int32_t sequences = 4;
    int64_t longAnswer = 3 * kPage - 20;
    bool isShort = false;  // few requests, so that each of their calls can fail
};

// Requests that meet in a small cache, wave after wave.
class World {
public:
    World(const Kind& kind, SchedulerOptions scheduling)
        : _model(modelOf(kind.options, kind.pages * kPage)),
          _options(engineOptions(kind.pages * kPage, 64, kind.sequences)),
          _scheduling(std::move(scheduling)),
          _isShort(kind.isShort) {
        _engine =
            std::make_shared<Engine>(_model.spec(), _model.weights(), _options, std::make_unique<FailingBackend>());
        const auto add = [&](size_t wave, unsigned beginning, unsigned end, int64_t answer) {
            const int64_t begins = beginning ? kBeginning : 0;
            Request request = requestOf(randomTokens(begins, _model.options().vocab, beginning), answer);
            const std::vector<int32_t> rest = repetitive(10 + end, _model.options().vocab, end);
            request.prompt.insert(request.prompt.end(), rest.begin(), rest.end());
            request.extras.best = 1;
            if (end % 2) request.params = sampledParams(end);
            if (end % 3 == 0) request.drafts = drafts(Source::NGram, 4);
            request.extras.echo = end == 4;
            request.key = std::to_string(end);
            if (_waves.size() <= wave) _waves.resize(wave + 1);
            _waves[wave].push_back({request, alone(request)});
        };
        if (kind.isShort) {
            add(0, 0, 2, 1);
            add(1, 0, 1, 2);
            return;
        }
        add(0, 1, 1, 6);
        add(0, 1, 2, 6);
        add(1, 2, 3, 6);
        add(1, 3, 4, 6);
        for (const unsigned end : {5, 6, 7}) add(2, 0, end, kind.longAnswer);  // too long for all at once
        add(3, 1, 8, 3);
        add(4, 2, 9, 3);
    }

    // Serves all waves, and then the first one again with nothing failing. Returns the requests that failed. ahead: of
    // the reader in a conversation. If it is few tokens, what else happens depends on when that thread gets to run.
    int64_t serve(const std::string& error, int64_t ahead = kMany) {
        _ahead = ahead;
        const Room before = room();
        int64_t failed = 0;
        {
            Scheduler scheduler(_engine, _scheduling);
            _conversation = std::make_shared<Conversation>("");
            for (const auto& wave : _waves) failed += serve(scheduler, wave, error);
            const SchedulerCounts counts = scheduler.counts();
            pauses = counts.pauses;
            spilled = counts.spill.spilledPages;
            restored = counts.spill.restoredPages;
            const int64_t allocation = failingAllocation.exchange(0), call = failingCall.exchange(0);
            EXPECT_EQ(serve(scheduler, _waves[0], "nothing"), 0);
            EXPECT_EQ(scheduler.counts().writing + scheduler.counts().preparing + scheduler.counts().waiting, 0);
            failingAllocation = allocation;
            failingCall = call;
        }
        EXPECT_EQ(room(), before);
        return failed;
    }
    bool isShort() const { return _isShort; }
    int64_t pauses = 0, spilled = 0, restored = 0;

private:
    struct Wanted {
        Request request;
        Whole alone;
    };
    Whole alone(const Request& request) const {
        Scheduler scheduler(engineOf(_model, _options), longQueue());
        return wait(*scheduler.submit(request));
    }
    Room room() const {
        const LockedModel model = _engine->runner().lock();
        Room room{{}, model.kv().states().freeEntries(), model.backend().allocator().held()};
        for (int32_t list = 0; list < model.kv().lists(); ++list)
            room.pages.push_back(model.kv().pool(list).freePages());
        return room;
    }
    int64_t serve(Scheduler& scheduler, const std::vector<Wanted>& wave, const std::string& error) const {
        std::vector<std::shared_ptr<Answer>> answers;
        {
            const LockedModel locked = _engine->runner().lock();  // all begin at once, however slow the machine is
            for (const Wanted& wanted : wave) {
                Request request = wanted.request;
                if (answers.empty()) {
                    request.conversation = _conversation;
                    request.ahead = _ahead;
                }
                answers.push_back(scheduler.submit(std::move(request)));
            }
        }
        int64_t failed = 0;
        for (size_t i = 0; i < wave.size(); ++i) {
            const Whole whole = wait(*answers[i]), &alone = wave[i].alone;
            if (whole.ending.finish == Finish::Failed) {
                EXPECT_NE(whole.ending.error.find(error), std::string::npos) << whole.ending.error;
                EXPECT_LE(whole.tokens.size(), alone.tokens.size());
                ++failed;
            } else {
                EXPECT_EQ(whole.ending.finish, alone.ending.finish);
                EXPECT_EQ(whole.tokens.size(), alone.tokens.size());
                EXPECT_EQ(whole.promptScores.size(), alone.promptScores.size());
            }
            for (size_t k = 0; k < std::min(whole.tokens.size(), alone.tokens.size()); ++k) {
                EXPECT_EQ(whole.tokens[k], alone.tokens[k]) << k;
                EXPECT_EQ(whole.scores[k].logProbability, alone.scores[k].logProbability) << k;
            }
            for (size_t k = 1; k < std::min(whole.promptScores.size(), alone.promptScores.size()); ++k)
                EXPECT_EQ(whole.promptScores[k].logProbability, alone.promptScores[k].logProbability) << k;
        }
        return failed;
    }

    const Model _model;
    const EngineOptions _options;
    const SchedulerOptions _scheduling;
    const bool _isShort;
    std::shared_ptr<Engine> _engine;
    std::vector<std::vector<Wanted>> _waves;
    std::shared_ptr<Conversation> _conversation;  // that the first request of each wave continues
    int64_t _ahead = kMany;
};

class SchedulerFailures : public testing::Test {
protected:
    SchedulerFailures() { isTestThread = true; }
    ~SchedulerFailures() override { failingAllocation = failingCall = 0; }

    // A model whose layers see everything, one with states, and one with windows.
    static std::vector<Kind> kinds() {
        return {{gpuVariants()[0]}, {hybrids()[0]}, {withWindows(), 12, 2, 7 * kPage - 20}};
    }

    // Counts the calls of a run, then lets one fail in each run: SHARPI_FAILURES of them, evenly spread, or all if
    // there are fewer or the run is short. Most allocations cost no request: if none of those did, other calls are
    // tried, in up to kRounds.
    static void failEach(World& world, std::atomic<int64_t>& failing, const std::string& error) {
        failing = kMany;
        ASSERT_EQ(world.serve("nothing"), 0);
        const int64_t calls = kMany - failing.exchange(0);
        if (!world.isShort()) {
            EXPECT_GT(world.spilled, 0);
            EXPECT_GT(world.restored, 0);
            EXPECT_GT(world.pauses, 0);
        }
        const char* const wanted = std::getenv("SHARPI_FAILURES");
        const int64_t usual = world.isShort() ? watchedRuns(static_cast<int>(calls)) : kRuns;
        const int64_t runs = wanted ? std::max(std::atoll(wanted), 1LL) : usual;
        const int64_t step = std::max<int64_t>(calls / runs, 1);
        int64_t failed = 0;
        for (int64_t round = 0; round < kRounds && failed == 0; ++round) {
            const int64_t first = 1 + (testSeed(1) + round * step / kRounds) % step;
            for (int64_t call = first; call <= calls && !HasFailure(); call += step) {
                SCOPED_TRACE("call " + std::to_string(call) + " of " + std::to_string(calls));
                failing = call;
                failed += world.serve(error, 2);
                failing = 0;
            }
        }
        EXPECT_GT(failed, 0);
    }
};

TEST_F(SchedulerFailures, EachCopyAndEachPass) {
    for (const Kind& kind : kinds()) {
        SCOPED_TRACE(describe(kind.options));
        World world(kind, longQueue());
        failEach(world, failingCall, kTold);
    }
}

TEST_F(SchedulerFailures, EachAllocation) {
    for (const Kind& kind : kinds()) {
        SCOPED_TRACE(describe(kind.options));
        World world(kind, longQueue());
        failEach(world, failingAllocation, "memory");
    }
}

// Most allocations of a request are made once, so only a run for each of them finds those after which nothing may fail.
TEST_F(SchedulerFailures, EveryAllocationOfAFewRequests) {
    for (Kind kind : kinds()) {
        SCOPED_TRACE(describe(kind.options));
        kind.isShort = true;
        World world(kind, longQueue());
        failEach(world, failingAllocation, "memory");
    }
}

// What goes to a directory, and comes back from it.
class DirectoryFailures : public SchedulerFailures {
protected:
    SchedulerOptions onDisk() {
        SchedulerOptions options = longQueue();
        options.spillBytes = options.statesBytes = 0;
        options.directory.path = folder.path() + "/cache";
        options.directory.mostBytes = size_t{1} << 30;
        options.directory.notice = [this](const std::string& line) {
            const std::lock_guard<std::mutex> lock(mutex);
            notices.push_back(line);
        };
        return options;
    }
    void forget() {
        std::filesystem::remove_all(folder.path() + "/cache");
        notices.clear();
    }
    TemporaryFolder folder;
    std::mutex mutex;
    std::vector<std::string> notices;
};

TEST_F(DirectoryFailures, EachCopyEachPassAndEachAllocation) {
    for (const Kind& kind : kinds()) {
        SCOPED_TRACE(describe(kind.options));
        World world(kind, onDisk());
        failEach(world, failingCall, kTold);
        failEach(world, failingAllocation, "memory");
    }
}

// The disk is full, or can no longer be written to, from any write on.
TEST_F(DirectoryFailures, EachWriteCostsNoRequest) {
    std::vector<int> reasons{ENOSPC};
    if (!kSanitized) reasons.insert(reasons.end(), {EROFS, EIO});
    for (const Kind& kind : kinds()) {
        SCOPED_TRACE(describe(kind.options));
        for (const int reason : reasons) {
            SchedulerOptions scheduling = onDisk();
            std::atomic<int64_t> writes{kMany};
            scheduling.directory.write = [&](int file, const void* data, size_t bytes) {
                if (--writes >= 0) return CacheDirectoryOptions::writeFully(file, data, bytes);
                errno = reason;
                return false;
            };
            World world(kind, scheduling);
            EXPECT_EQ(world.serve(kTold), 0);
            const int64_t all = kMany - writes;
            EXPECT_GT(all, 10);
            for (int64_t good = 0; good < all; good += 1 + all / watchedRuns(10)) {
                SCOPED_TRACE("after " + std::to_string(good) + " writes");
                forget();
                writes = good;
                EXPECT_EQ(world.serve(kTold), 0);
                ASSERT_EQ(notices.size(), 1U);
                EXPECT_NE(notices[0].find(std::strerror(reason)), std::string::npos) << notices[0];
            }
            forget();
        }
    }
}

TEST_F(DirectoryFailures, ADirectoryThatGoesAwayCostsNoRequest) {
    for (const Kind& kind : kinds()) {
        for (const bool becomesFile : {false, true}) {
            SCOPED_TRACE(describe(kind.options) + (becomesFile ? ", a file in its place" : ""));
            forget();
            SchedulerOptions scheduling = onDisk();
            std::atomic<int64_t> writes{0};
            scheduling.directory.write = [&](int file, const void* data, size_t bytes) {
                if (++writes == 7) {
                    std::filesystem::remove_all(folder.path() + "/cache");
                    if (becomesFile) std::ofstream(folder.path() + "/cache") << "a file";
                }
                return CacheDirectoryOptions::writeFully(file, data, bytes);
            };
            World world(kind, scheduling);
            EXPECT_EQ(world.serve(kTold), 0);
            EXPECT_GT(writes, 7);
            ASSERT_EQ(notices.size(), 1U);
            EXPECT_NE(notices[0].find("nothing more is written to the cache directory"), std::string::npos);
        }
    }
}

}  // namespace
