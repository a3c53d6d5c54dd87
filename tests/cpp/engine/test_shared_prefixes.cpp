// Requests whose prompts begin alike: the beginning is computed once, whoever comes first, and nobody's answer changes.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "answers.h"
#include "engine/scheduler/scheduler.h"
#include "memory/kv_sharing.h"
#include "two_arithmetics.h"

namespace {

using namespace sharpi;
using namespace tiny;

constexpr int64_t kBeginning = 3 * kPage;

// Runs something during a pass of the model.
class Interrupting : public TwoArithmetics {
public:
    Interrupting() : TwoArithmetics(1) {}
    std::function<void(const Batch& rows)> during;
    void begin(const Batch& batch, const KvCache& kv) override {
        if (during && batch.sources.empty()) during(batch);
        TwoArithmetics::begin(batch, kv);
    }
};

// Prompts that begin with the same tokens and end with 1, 2, 3 ... of their own.
std::vector<std::vector<int32_t>> prompts(const Model& model, int count, int64_t beginning = kBeginning) {
    const std::vector<int32_t> same = randomTokens(beginning, model.options().vocab, 77);
    std::vector<std::vector<int32_t>> all(static_cast<size_t>(count), same);
    for (int i = 0; i < count; ++i) {
        const auto own = randomTokens(i + 1, model.options().vocab, static_cast<unsigned>(i));
        all[static_cast<size_t>(i)].insert(all[static_cast<size_t>(i)].end(), own.begin(), own.end());
    }
    return all;
}

int64_t lengthOf(const std::vector<std::vector<int32_t>>& texts) {
    int64_t tokens = 0;
    for (const auto& text : texts) tokens += static_cast<int64_t>(text.size());
    return tokens;
}

std::vector<std::shared_ptr<Answer>> submitAtOnce(Engine& engine, Scheduler& scheduler,
                                                  const std::vector<Request>& requests) {
    const LockedModel locked = engine.runner().lock();
    std::vector<std::shared_ptr<Answer>> answers;
    for (const Request& request : requests) answers.push_back(scheduler.submit(request));
    return answers;
}

class SharedPrefixes : public testing::Test {
protected:
    static constexpr int kAnswer = 70;  // fills a page
    int answer = kAnswer;

    explicit SharedPrefixes(const Options& options = gpuVariants()[0], int64_t promptStep = 1)
        : model(modelOf(options, 8000)), step(promptStep) {}

    std::vector<int32_t> alone(const std::vector<int32_t>& prompt, bool oneArithmetic) {
        if (oneArithmetic) {
            Session session(engineOf(model, engineOptions(4000, 64, 2)));
            return generate(session, prompt, greedyParams(), answer);
        }
        const TwoArithmeticsEngine engine(model, engineOptions(4000, 64, 2), step);
        Session session(engine.engine);
        return generate(session, prompt, greedyParams(), answer);
    }
    // Serves a request for each of these prompts, all submitted before the first is looked at. Returns the tokens that
    // were reused.
    int64_t serve(Engine& engine, Scheduler& scheduler, const std::vector<std::vector<int32_t>>& texts,
                  bool oneArithmetic, const std::vector<int64_t>& marks = {}) {
        std::vector<Request> requests;
        for (const auto& text : texts) requests.push_back(requestOf(text, answer));
        for (Request& request : requests) request.marks = marks;
        const auto answers = submitAtOnce(engine, scheduler, requests);
        int64_t reused = 0;
        for (size_t i = 0; i < texts.size(); ++i) {
            const Whole whole = wait(*answers[i]);
            EXPECT_EQ(whole.tokens, alone(texts[i], oneArithmetic)) << "request " << i << whole.ending.error;
            reused += whole.ending.figures.reusedTokens;
        }
        return reused;
    }

    const Model model;
    const int64_t step;
};

// A model with recurrent layers: a prompt continues from a copy of their state.
class SharedStates : public SharedPrefixes {
protected:
    SharedStates() : SharedPrefixes(hybrids()[0], kPromptTile) {}
};

// Models with windows, and with blocks of tokens: a prompt continues where the windows are found.
class SharedWindows : public SharedPrefixes, public testing::WithParamInterface<Options> {
protected:
    SharedWindows() : SharedPrefixes(GetParam()) {}
    int32_t lists() const { return hasBlocks(model.options()) ? 4 : 2; }
};
INSTANTIATE_TEST_SUITE_P(Windows, SharedWindows, testing::Values(withWindows(), withBlocks()),
                         [](const auto& info) { return info.index ? "OfBlocks" : "OfTokens"; });

// Any model.
class SharedAnywhere : public SharedPrefixes, public testing::WithParamInterface<int> {
protected:
    static std::vector<Options> models() {
        return {gpuVariants()[0], latents()[0], withWindows(), withBlocks(),
                hybrids()[0],     mambas()[0],  mambas()[2],   mambas()[3]};
    }
    SharedAnywhere()
        : SharedPrefixes(models()[static_cast<size_t>(GetParam())], GetParam() >= 4 ? kPromptTile : int64_t{1}) {}
    bool hasStates() const { return GetParam() > 3; }
    // Other texts take the room of the states that the cache has: what is found then is found in RAM.
    void takeStates(Engine& engine, Scheduler& scheduler) {
        for (unsigned i = 0; hasStates() && i < 6; ++i)
            serve(engine, scheduler, {randomTokens(130, model.options().vocab, 90 + i)}, false);
    }
    // Calls body(engine, scheduler, texts) for several sizes of batches. Three texts begin alike and have ends of
    // several pages of their own.
    static constexpr int64_t kCommon = 500, kFound = 448;
    template <typename Body> void withParting(const Body& body) {
        auto texts = prompts(model, 3, kCommon);
        for (size_t i = 0; i < texts.size(); ++i) {
            const auto own = randomTokens(200, model.options().vocab, 200 + static_cast<unsigned>(i));
            texts[i].insert(texts[i].end(), own.begin(), own.end());
        }
        for (const int64_t batch : {64, 448, 1000}) {
            SCOPED_TRACE("batches of " + std::to_string(batch));
            const TwoArithmeticsEngine watched(model, engineOptions(4000, batch, 4), step);
            Scheduler scheduler(watched.engine, longQueue());
            answer = 5;
            takeStates(*watched.engine, scheduler);
            body(*watched.engine, scheduler, texts);
        }
    }
};
INSTANTIATE_TEST_SUITE_P(Models, SharedAnywhere, testing::Range(0, 8));

TEST_F(SharedPrefixes, AreComputedOnce) {
    for (const int64_t batch : {64, 96, 1000}) {
        SCOPED_TRACE("batches of " + std::to_string(batch));
        const TwoArithmeticsEngine watched(model, engineOptions(8000, batch, 8), 1);
        Scheduler scheduler(watched.engine, longQueue());
        const auto texts = prompts(model, 16);
        EXPECT_EQ(serve(*watched.engine, scheduler, texts, false), 15 * kBeginning);
        EXPECT_EQ(watched.rowsSeen().first, lengthOf(texts) - 15 * kBeginning);
        EXPECT_EQ(scheduler.counts().adoptedTokens, 15 * kBeginning);
        // What ended requests have left is found too.
        EXPECT_EQ(serve(*watched.engine, scheduler, texts, false), 16 * kBeginning);
        EXPECT_EQ(watched.rowsSeen().first, lengthOf(texts) - 16 * kBeginning);
        EXPECT_EQ(scheduler.counts().sharedPages, kBeginning / kPage);
    }
}

TEST_F(SharedStates, AreComputedOnce) {
    for (const int64_t batch : {64, 128, 1000}) {
        SCOPED_TRACE("batches of " + std::to_string(batch));
        const TwoArithmeticsEngine watched(model, engineOptions(8000, batch, 8), step);
        Scheduler scheduler(watched.engine, longQueue());
        const auto texts = prompts(model, 16);
        EXPECT_EQ(serve(*watched.engine, scheduler, texts, false), 15 * kBeginning);
        EXPECT_EQ(watched.rowsSeen().first, lengthOf(texts) - 15 * kBeginning);
        EXPECT_EQ(serve(*watched.engine, scheduler, texts, false), 16 * kBeginning);
        EXPECT_GT(scheduler.counts().spill.statesBytes, 0U);
    }
}

TEST_P(SharedWindows, AreComputedOnce) {
    for (const int64_t batch : {64, 96, 1000}) {
        SCOPED_TRACE("batches of " + std::to_string(batch));
        const TwoArithmeticsEngine watched(model, engineOptions(8000, batch, 8), step);
        ASSERT_EQ(watched.engine->runner().lock().kv().lists(), lists());
        Scheduler scheduler(watched.engine, longQueue());
        const auto texts = prompts(model, 16);
        EXPECT_EQ(serve(*watched.engine, scheduler, texts, false), 15 * kBeginning);
        EXPECT_EQ(watched.rowsSeen().first, lengthOf(texts) - 15 * kBeginning);
        EXPECT_GE(scheduler.counts().adoptedTokens, 7 * kBeginning) << "at first nobody has ended whose text is there";
        // What ended requests have left is found too, as a text or as pages.
        const int64_t reused = serve(*watched.engine, scheduler, texts, false);
        EXPECT_GE(reused, 16 * kBeginning);
        EXPECT_EQ(watched.rowsSeen().first, lengthOf(texts) - reused);
    }
}

// Long prompts of others go through the cache between requests with a beginning that no prompt of its own had.
TEST_P(SharedWindows, AreFoundWhereTextsWereSeenToPart) {
    const TwoArithmeticsEngine watched(model, engineOptions(8000, 64, 2), step);
    Scheduler scheduler(watched.engine, longQueue());
    auto texts = prompts(model, 4);
    for (auto& text : texts) text.resize(text.size() + 300, 5);
    int64_t reused = 0;
    for (unsigned i = 0; i < 4; ++i) {
        reused += serve(*watched.engine, scheduler, {texts[i]}, false);
        serve(*watched.engine, scheduler, {randomTokens(1500, model.options().vocab, 90 + i)}, false);
    }
    EXPECT_GE(reused, 2 * kBeginning) << "the second one shows where they part";
}

TEST_F(SharedStates, AreFoundByAPromptThatHasOnlyTheBeginning) {
    const TwoArithmeticsEngine watched(model, engineOptions(8000, 500, 8), step);
    Scheduler scheduler(watched.engine, longQueue());
    const std::vector<int32_t> first = randomTokens(2300, model.options().vocab, 3);
    EXPECT_EQ(serve(*watched.engine, scheduler, {first}, false), 0);
    std::vector<int32_t> same(first.begin(), first.begin() + 2200);
    same.push_back(1);
    // Another text takes the room of the first one's states in the cache.
    EXPECT_EQ(serve(*watched.engine, scheduler, {same, same}, false), 2048 + 2176)
        << "the copies are every 2,048 tokens "
           "and at a prompt's last full page";
}

// What is kept at a prompt's last page all the same needs no room of others: their texts can still be continued.
TEST_F(SharedStates, AMarkOnTheLastPageTakesNothingFromEndedTexts) {
    const auto engine = engineOf(model, engineOptions(8000, 1000, 4));
    Scheduler scheduler(engine, longQueue());
    std::vector<int32_t> first = randomTokens(700, model.options().vocab, 1);
    const auto ask = [&](const std::vector<int32_t>& text) {
        Request request = requestOf(text, answer);
        request.marks = {static_cast<int64_t>(text.size()) - 5};
        return wait(*scheduler.submit(request));
    };
    const std::vector<int32_t> said = ask(first).tokens;
    EXPECT_EQ(ask(randomTokens(700, model.options().vocab, 2)).ending.figures.reusedTokens, 0);
    first.insert(first.end(), said.begin(), said.end());
    const auto evaluated = static_cast<int64_t>(first.size()) - 1;
    first.resize(first.size() + 20, 3);
    EXPECT_EQ(ask(first).ending.figures.reusedTokens, evaluated);
}

// The cache has room for the states of two requests.
TEST_F(SharedStates, AreRestoredIfBothKindsOfRowsHaveTheSameBits) {
    const auto engine = engineOf(model, engineOptions(8000, 64, 2));
    Scheduler scheduler(engine, longQueue());
    const auto texts = prompts(model, 6);
    EXPECT_EQ(serve(*engine, scheduler, texts, true), 5 * kBeginning);
}

TEST_F(SharedStates, AreLimitedInBytes) {
    const TwoArithmeticsEngine watched(model, engineOptions(8000, 64, 8), step);
    SchedulerOptions options = longQueue();
    const size_t one = watched.engine->runner().lock().kv().states().stateBytes();
    for (const size_t states : {0, 1, 3}) {
        SCOPED_TRACE(states);
        options.statesBytes = states * one + one / 2;
        Scheduler scheduler(watched.engine, options);
        for (unsigned i = 0; i < 5; ++i)
            serve(*watched.engine, scheduler, {randomTokens(70, model.options().vocab, i)}, false);
        EXPECT_EQ(scheduler.counts().spill.statesBytes, states * one);
    }
    EXPECT_EQ(KvSharing(watched.engine->runner().lock().kv()).storeCounts().statesBytes, 0U)
        << "a scheduler that ends leaves none";
}

// Within a page, a window, and a block of 4 or 128 tokens: the whole pages before are found, and the rest is computed.
TEST_P(SharedAnywhere, TextsPartAnywhere) {
    const TwoArithmeticsEngine watched(model, engineOptions(4000, 64, 4), step);
    const std::vector<int32_t> first = randomTokens(260, model.options().vocab, 5);
    Scheduler scheduler(watched.engine, longQueue());
    answer = 5;
    EXPECT_EQ(serve(*watched.engine, scheduler, {first}, false), 0);
    EXPECT_EQ(watched.rowsSeen().first, 260);
    std::vector<std::vector<int32_t>> texts;
    int64_t pages = 0;
    for (const int64_t same : {63, 64, 65, 66, 127, 129, 130, 131, 191, 194, 195, 255, 257}) {
        texts.emplace_back(first.begin(), first.begin() + same);
        texts.back().push_back(first[static_cast<size_t>(same)] == 1 ? 2 : 1);
        texts.back().resize(texts.back().size() + static_cast<size_t>(same % 7), 3);
        pages += same / kPage;
    }
    const int64_t reused = serve(*watched.engine, scheduler, texts, false);
    EXPECT_EQ(watched.rowsSeen().first, lengthOf(texts) - reused);
    EXPECT_GE(reused, hasStates() ? kPage : pages * kPage) << "states are copied at the ends of prompts alone";
}

// A mark lies in a piece, at its end, and at its beginning, before which the page ends.
TEST_P(SharedAnywhere, MarksSayWhereTextsPart) {
    withParting([&](Engine& engine, Scheduler& scheduler, const auto& texts) {
        EXPECT_EQ(serve(engine, scheduler, {texts[0]}, false, {kCommon, 0, kCommon}), 0);
        EXPECT_EQ(serve(engine, scheduler, {texts[1]}, false, {kCommon}), kFound);
        takeStates(engine, scheduler);
        EXPECT_EQ(serve(engine, scheduler, {texts[2]}, false), kFound);
    });
}

TEST_P(SharedAnywhere, TheThirdTextContinuesWhereTwoWereSeenToPart) {
    withParting([&](Engine& engine, Scheduler& scheduler, const auto& texts) {
        EXPECT_EQ(serve(engine, scheduler, {texts[0]}, false), 0);
        takeStates(engine, scheduler);
        EXPECT_EQ(serve(engine, scheduler, {texts[1]}, false), hasStates() ? 0 : kFound);
        takeStates(engine, scheduler);
        EXPECT_EQ(serve(engine, scheduler, {texts[2]}, false), kFound);
    });
}

// Choices of one prompt: all but its end is computed once.
TEST_F(SharedPrefixes, OnePromptOfManyRequestsIsComputedOnce) {
    const TwoArithmeticsEngine watched(model, engineOptions(8000, 64, 8), 1);
    Scheduler scheduler(watched.engine, longQueue());
    const std::vector<std::vector<int32_t>> texts(8, randomTokens(kBeginning, model.options().vocab, 5));
    EXPECT_EQ(serve(*watched.engine, scheduler, texts, false), 7 * (kBeginning - kPage))
        << "the last token's pass gives the logits";
    EXPECT_EQ(watched.rowsSeen().first, kBeginning + 7 * kPage);
}

// A conversation's next prompt has the answer in it, as prompt rows.
TEST_F(SharedPrefixes, AnswersAreSharedOnlyIfTheirRowsHaveThePromptsBits) {
    std::vector<int32_t> text = randomTokens(kPage + 10, model.options().vocab, 9);
    for (const bool oneArithmetic : {false, true}) {
        SCOPED_TRACE(oneArithmetic);
        const TwoArithmeticsEngine two(model, engineOptions(8000, 64, 8), 1);
        const auto engine = oneArithmetic ? engineOf(model, engineOptions(8000, 64, 8)) : two.engine;
        Scheduler scheduler(engine, longQueue());
        const std::vector<int32_t> written = wait(*scheduler.submit(requestOf(text, kAnswer))).tokens;
        std::vector<int32_t> next = text;
        next.insert(next.end(), written.begin(), written.end());
        next.push_back(1);
        EXPECT_EQ(serve(*engine, scheduler, {next}, oneArithmetic), oneArithmetic ? 2 * kPage : kPage);
    }
}

TEST_F(SharedPrefixes, OtherSaltsShareNothing) {
    for (const Options& options :
         {gpuVariants()[0], hybrids()[0], withWindows(), withBlocks(), latents()[0], mambas()[0], mambas()[3]}) {
        SCOPED_TRACE(describe(options));
        const Model other = modelOf(options, 8000);
        Scheduler scheduler(engineOf(other, engineOptions(2000, 64, 8)), longQueue());
        Request request = requestOf(prompts(other, 1)[0], 3);
        const auto reused = [&](const std::string& salt) {
            request.salt = salt;
            return wait(*scheduler.submit(request)).ending.figures.reusedTokens;
        };
        EXPECT_EQ(reused("a"), 0);
        EXPECT_EQ(reused("b"), 0);
        EXPECT_EQ(reused(""), 0);
        for (const std::string salt : {"", "b", "a"}) EXPECT_EQ(reused(salt), kBeginning) << salt;
    }
}

// What a request has computed of its prompt before it is cancelled is there for others.
TEST_F(SharedPrefixes, ACancelledPromptLeavesWhatItHasComputed) {
    auto made = std::make_unique<Interrupting>();
    Interrupting& backend = *made;
    const auto engine =
        std::make_shared<Engine>(model.spec(), model.weights(), engineOptions(8000, 64, 8), std::move(made));
    Scheduler scheduler(engine, longQueue());
    std::shared_ptr<Answer> cancelled;
    int passes = 0;
    backend.during = [&](const Batch&) {
        if (++passes == 2) cancelled->cancel();
    };
    const auto texts = prompts(model, 2);
    {
        const LockedModel locked = engine->runner().lock();  // no pass before `cancelled` is there
        cancelled = scheduler.submit(requestOf(texts[0], kAnswer));
    }
    EXPECT_EQ(wait(*cancelled).ending.finish, Finish::Cancelled);
    EXPECT_EQ(passes, 2);
    EXPECT_EQ(serve(*engine, scheduler, {texts[1]}, false), 2 * kPage);
}

// A request that comes in mid-prompt and goes first takes what is there, and gives back what it computes.
TEST_F(SharedPrefixes, ARequestThatGoesFirstComputesForTheOther) {
    auto made = std::make_unique<Interrupting>();
    Interrupting& backend = *made;
    const auto engine =
        std::make_shared<Engine>(model.spec(), model.weights(), engineOptions(8000, 64, 8), std::move(made));
    Scheduler scheduler(engine, longQueue());
    const auto texts = prompts(model, 2);
    std::shared_ptr<Answer> urgent;
    int64_t promptRows = 0;
    backend.during = [&](const Batch& rows) {
        promptRows += rows.size() - rows.decodeRows;
        if (urgent) return;
        Request request = requestOf(texts[1], kAnswer);
        request.priority = 1;
        urgent = scheduler.submit(request);
    };
    const Whole first = wait(*scheduler.submit(requestOf(texts[0], kAnswer))), second = wait(*urgent);
    EXPECT_EQ(first.tokens, alone(texts[0], false));
    EXPECT_EQ(second.tokens, alone(texts[1], false));
    EXPECT_EQ(second.ending.figures.reusedTokens, kPage);
    EXPECT_EQ(first.ending.figures.reusedTokens, 2 * kPage);
    EXPECT_EQ(promptRows, kBeginning + 1 + 2);
}

// Pages that others have cost a request nothing, so that more requests have room beside each other.
TEST_F(SharedPrefixes, LeaveRoomForMoreRequests) {
    const auto engine = engineOf(model, engineOptions(8 * kPage, 64, 8));
    Scheduler scheduler(engine, longQueue());
    std::vector<Request> requests;
    for (const auto& text : prompts(model, 3, 4 * kPage)) requests.push_back(requestOf(text, 50));
    for (const auto& answer : submitAtOnce(*engine, scheduler, requests))
        EXPECT_EQ(wait(*answer).ending.finish, Finish::Length);
    const SchedulerCounts counts = scheduler.counts();
    EXPECT_EQ(counts.pauses, 0);
    EXPECT_LT(counts.steps, 60) << "3 answers of 50 tokens, one after the other, take 147";
}

// Whichever page is the one that is missing.
TEST_F(SharedPrefixes, AnswersStayTheSameHoweverFewPagesThereAre) {
    for (int64_t pages = 5; pages <= 16; ++pages) {
        SCOPED_TRACE(std::to_string(pages) + " pages");
        const TwoArithmeticsEngine few(model, engineOptions(pages * kPage, 64, 8), 1);
        Scheduler scheduler(few.engine, longQueue());
        auto texts = prompts(model, 4);
        for (const auto& text : prompts(model, 2, kPage)) texts.push_back(text);
        serve(*few.engine, scheduler, texts, false);
        serve(*few.engine, scheduler, texts, false);
        EXPECT_LE(scheduler.counts().sharedPages, pages);
    }
}

}  // namespace
