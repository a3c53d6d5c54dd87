// The scheduler: every request is answered as if it were alone, whatever comes beside it, before it and in its way.
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "crowd.h"
#include "engine/scheduler/scheduler.h"
#include "seed.h"
#include "two_arithmetics.h"
#include "varied_model.h"

namespace {

using namespace sharpi;
using namespace tiny;

std::vector<Options> models() {
    Options experts;
    experts.architecture = "qwen3moe";
    std::vector<Options> all{gpuVariants()[0], experts, hybrids()[0], predicting()[1], mambas()[2]};
    all.push_back(withWindows());
    return all;
}
// These, and two whose caches hold something else than keys and values of heads, which takes long under a sanitizer.
std::vector<Options> allModels() {
    std::vector<Options> all = models();
    if (kSanitized) return all;
    all.push_back(latents()[0]);
    all.push_back(withBlocks());
    return all;
}

// An engine for a few requests at once, and one whose cache is too small for them. With room for many requests a cache
// has no list for windows.
std::shared_ptr<Engine> roomyEngine(const Model& model) {
    const bool windows = seesWindows(model.options()), blocks = hasBlocks(model.options());
    const auto engine = engineOf(model, engineOptions(2000, 64, windows ? 4 : 12));
    EXPECT_EQ(engine->runner().lock().kv().lists(), blocks ? 4 : windows ? 2 : 1);
    return engine;
}
EngineOptions tight(const Model& model) {
    return seesWindows(model.options()) ? engineOptions(1024, 64, 3) : engineOptions(512, 64, 20);
}
// More requests than there is room for windows of.
SchedulerOptions crowded() {
    SchedulerOptions options = longQueue();
    options.running = 8;
    return options;
}

TEST(Scheduler, EveryRequestIsAnsweredAsAlone) {
    for (const Options& options : allModels()) {
        SCOPED_TRACE(describe(options));
        const Model model = modelOf(options, 2000);
        Crowd crowd(model, engineOf(model, engineOptions(600, 64, 12)), 1);
        const auto engine = roomyEngine(model);
        Scheduler scheduler(engine, longQueue());
        serve(scheduler, crowd, watchedRuns(40), 60, 30, false);
        serve(scheduler, crowd, watchedRuns(40), 60, 30, true);
        EXPECT_GT(scheduler.counts().adoptedTokens, 0);
    }
}

// Layers with a window of two pages, a chunk, all, and a window through another layer's keys, in a cache that has
// little more than two requests see: pages are given up, copied and brought back all the time.
TEST(Scheduler, RequestsShareWindowsAndAreAnsweredAsAlone) {
    const WindowedModel model;
    Crowd crowd(model, model.roomy(engineOptions(0, 64)), 1);
    int64_t restored = 0;
    for (const int32_t sequences : {2, 4}) {
        const auto engine = model.engine(engineOptions(0, 64), sequences);
        ASSERT_EQ(engine->runner().lock().kv().lists(), 3);
        Scheduler scheduler(engine, longQueue());
        serve(scheduler, crowd, 25, 60, 20, false);
        serve(scheduler, crowd, 25, 60, 20, true);
        const SchedulerCounts counts = scheduler.counts();
        EXPECT_GT(counts.adoptedTokens, 0);
        restored += counts.spill.restoredPages;
    }
    EXPECT_GT(restored, 0);
}

// Where memory ends, requests are paused: their texts stay the same.
TEST(Scheduler, APausedRequestGoesOnAsIfNothingHadHappened) {
    for (const Options& options : models()) {
        SCOPED_TRACE(describe(options));
        const Model model = modelOf(options, contextOf(options));
        Crowd crowd(model, engineOf(model, engineOptions(contextOf(options), 64, 12)), 2, 1);
        const auto engine = engineOf(model, tight(model));
        Scheduler scheduler(engine, crowded());
        serveAtOnce(*engine, scheduler, crowd, 40, 50, 220);
        EXPECT_GT(scheduler.counts().pauses, 0);
        EXPECT_GT(scheduler.counts().lost.seconds, 0);
    }
}

// With two arithmetics, answers stay the same only if every row keeps its kind, in a pause too.
TEST(Scheduler, RowsKeepTheirKinds) {
    for (const Options& options : models()) {
        SCOPED_TRACE(describe(options));
        const Model model = modelOf(options, contextOf(options));
        const int64_t step = promptStepOf(options);
        const TwoArithmeticsEngine alone(model, engineOptions(contextOf(options), 64, 12), step);
        const TwoArithmeticsEngine together(model, tight(model), step);
        Crowd crowd(model, alone.engine, 3, 1);
        Scheduler scheduler(together.engine, crowded());
        serveAtOnce(*together.engine, scheduler, crowd, 40, 50, 220);
        EXPECT_GT(scheduler.counts().pauses, 0);
        serve(scheduler, crowd, 20, 90, 120, true);
    }
}

TEST(Scheduler, AnswersAreWrittenTogether) {
    const Model model = modelOf(gpuVariants()[0], 4000);
    const WatchedEngine watched(model, engineOptions(4000, 96, 8));
    Scheduler scheduler(watched.engine, longQueue());
    std::vector<std::shared_ptr<Answer>> answers;
    for (int i = 0; i < 16; ++i)
        answers.push_back(
            scheduler.submit(requestOf(randomTokens(5, model.options().vocab, static_cast<unsigned>(i)), 100)));
    for (const auto& answer : answers) EXPECT_EQ(wait(*answer).tokens.size(), 100u);
    const SchedulerCounts counts = scheduler.counts();
    EXPECT_EQ(counts.stepTokens, 1600);
    EXPECT_LT(counts.steps, 200) << "16 answers of 100 tokens, begun one after the other";
    EXPECT_EQ(counts.finished, 16);
}

// Prompts that come together share passes over the weights, but none computes what another one of them does.
TEST(Scheduler, PromptsAreComputedTogether) {
    for (const Options& variant : {gpuVariants()[0], hybrids()[0]}) {
        SCOPED_TRACE(describe(variant));
        const Model model = modelOf(variant, 4000);
        const auto engine = engineOf(model, engineOptions(4000, 800, 12));
        SchedulerOptions options = longQueue();
        options.greatestGap = 1000;  // a slow machine does not cut passes
        const auto pieces = [&](const std::vector<std::vector<int32_t>>& prompts) {
            Scheduler scheduler(engine, options);
            std::vector<std::shared_ptr<Answer>> answers;
            {
                const LockedModel locked = engine->runner().lock();
                for (const auto& prompt : prompts) answers.push_back(scheduler.submit(requestOf(prompt, 3)));
            }
            for (const auto& answer : answers) EXPECT_EQ(wait(*answer).tokens.size(), 3u);
            return scheduler.counts().pieces;
        };
        std::vector<std::vector<int32_t>> different, alike;
        for (unsigned i = 0; i < 8; ++i) {
            different.push_back(randomTokens(90, model.options().vocab, i));
            alike.push_back(randomTokens(90, model.options().vocab, 0));
            alike.back().push_back(static_cast<int32_t>(i));
        }
        EXPECT_LE(pieces(different), 2) << "the first may begin before the others are there";
        EXPECT_LE(pieces(alike), 3);
        EXPECT_GE(pieces(alike), 2) << "seven wait for the page that they have in common";
    }
}

// Texts that have ended hold their states until others want them. Prompts that could share a pass must not wait for
// these one by one.
TEST(Scheduler, EndedTextsGiveTheirStatesToPromptsThatShareAPass) {
    const Model model = modelOf(hybrids()[0], 4000);
    const WatchedEngine watched(model, engineOptions(4000, 800, 10));
    SchedulerOptions options = longQueue();
    options.greatestGap = 1000;
    Scheduler scheduler(watched.engine, options);
    int64_t before = 0;
    for (unsigned round = 0; round < 3; ++round) {
        std::vector<std::shared_ptr<Answer>> answers;
        {
            const LockedModel locked = watched.engine->runner().lock();
            for (unsigned i = 0; i < 8; ++i)
                answers.push_back(
                    scheduler.submit(requestOf(randomTokens(90, model.options().vocab, 8 * round + i), 3)));
        }
        for (const auto& answer : answers) EXPECT_EQ(wait(*answer).tokens.size(), 3u);
        EXPECT_LE(scheduler.counts().pieces - before, 2) << round;
        before = scheduler.counts().pieces;
    }
}

// Prompts that cannot all have a state at a time take turns, and none undoes what another has computed.
TEST(Scheduler, PromptsThatCompeteForStatesAllEnd) {
    const Model model = modelOf(hybrids()[0], 4000);
    for (const int32_t states : {1, 2, 3, 5}) {
        EngineOptions room = engineOptions(4000, 100, states);
        const auto engine = engineOf(model, room);
        SchedulerOptions options = longQueue();
        options.running = 8;
        Scheduler scheduler(engine, options);
        std::vector<std::shared_ptr<Answer>> answers;
        {
            const LockedModel locked = engine->runner().lock();
            for (unsigned i = 0; i < 8; ++i)
                answers.push_back(scheduler.submit(requestOf(randomTokens(130, model.options().vocab, i), 20)));
        }
        for (const auto& answer : answers) EXPECT_EQ(wait(*answer).tokens.size(), 20u);
        EXPECT_LE(scheduler.counts().pieces, 8 * 2 * 3) << "a prompt has two pieces";
    }
}

// A conversation's next prompt finds what the turn before it has left.
TEST(Scheduler, APromptThatContinuesAnEarlierOneIsNotComputedAgain) {
    const Model model = modelOf(gpuVariants()[0], 1000);
    Scheduler scheduler(engineOf(model, engineOptions(1000, 64, 4)), longQueue());
    std::vector<int32_t> text = randomTokens(100, model.options().vocab, 1);
    EXPECT_EQ(wait(*scheduler.submit(requestOf(text, 5))).ending.figures.reusedTokens, 0);
    const Whole other = wait(*scheduler.submit(requestOf(randomTokens(50, model.options().vocab, 2), 5)));
    EXPECT_EQ(other.ending.figures.reusedTokens, 0);
    text.push_back(3);
    EXPECT_EQ(wait(*scheduler.submit(requestOf(text, 5))).ending.figures.reusedTokens, kPage) << "the full pages";
}

TEST(Scheduler, TheQueueIsBounded) {
    const Model model = modelOf(gpuVariants()[0], 1000);
    const auto engine = engineOf(model, engineOptions(1000, 64, 4));
    SchedulerOptions options;
    options.queue = 3;
    options.running = 1;
    Scheduler scheduler(engine, options);
    std::vector<std::shared_ptr<Answer>> answers;
    expectError(ErrorKind::Busy, "the queue has room for 3", [&] {
        for (int i = 0; i < 6; ++i) answers.push_back(scheduler.submit(requestOf({1, 2, 3}, 500)));
    });
    EXPECT_EQ(scheduler.counts().refused, 1);
    for (const auto& answer : answers) answer->cancel();
    for (const auto& answer : answers) EXPECT_EQ(wait(*answer).ending.finish, Finish::Cancelled);
    EXPECT_EQ(wait(*scheduler.submit(requestOf({1, 2, 3}, 5))).ending.finish, Finish::Length);
}

TEST(Scheduler, RefusesWhatCannotBeServed) {
    const Model model = modelOf(gpuVariants()[0], 100);
    Scheduler scheduler(engineOf(model, engineOptions(100, 64, 4)), {});
    const auto refused = [&](const std::string& part, const Request& request) {
        expectError(ErrorKind::InvalidArgument, part, [&] { scheduler.submit(request); });
    };
    refused("the prompt is empty", requestOf({}, 5));
    refused("the prompt has 101 tokens, the context holds 100", requestOf(std::vector<int32_t>(101, 1), 5));
    refused("outside the vocabulary", requestOf({1, static_cast<int32_t>(model.options().vocab)}, 5));
    refused("outside the vocabulary", requestOf({-1}, 5));
    refused("at least one token", requestOf({1}, 0));
    for (const int64_t mark : {-1, 3}) {
        Request marked = requestOf({1, 1}, 5);
        marked.marks = {0, 2, mark};
        refused("a mark after " + std::to_string(mark) + " tokens is outside the prompt, which has 2", marked);
    }
    Request scored = requestOf({1}, 5);
    scored.extras.best = 21;
    refused("a score names 0 to 20", scored);
    Request request = requestOf({1}, 5);
    request.params.topP = 2;
    refused("top-p", request);
    request = requestOf({1}, 5);
    request.drafts = drafts(Source::Prediction, 1);
    refused("no prediction layer", request);
    request = requestOf({1}, 5);
    request.seconds = 0;
    refused("more than 0 seconds", request);
    EXPECT_EQ(wait(*scheduler.submit(requestOf({1}, 1000))).ending.finish, Finish::Context);
}

TEST(Scheduler, ARequestEndsWhenItsTimeIsOver) {
    const Model model = modelOf(gpuVariants()[0], 100000);
    Scheduler scheduler(engineOf(model, engineOptions(100000, 64, 4)), {});
    Request request = requestOf({1, 2, 3}, 1000000);
    request.seconds = 0.05;
    const Whole whole = wait(*scheduler.submit(request));
    EXPECT_EQ(whole.ending.finish, Finish::TimeOut);
    EXPECT_GE(whole.ending.figures.seconds, 0.05);
}

// Requests of one client do not hold back another's.
TEST(Scheduler, HigherPrioritiesAndRarerClientsGoFirst) {
    const Model model = modelOf(gpuVariants()[0], 5000);
    SchedulerOptions options = longQueue();
    options.running = 1;
    Scheduler scheduler(engineOf(model, engineOptions(5000, 64, 4)), options);
    const auto first = scheduler.submit(requestOf({1, 2, 3}, 400));  // the others wait for it
    first->take(kForever);
    const auto low = scheduler.submit(requestOf({1, 2}, 1));
    Request request = requestOf({2, 3}, 1);
    request.priority = 1;
    const auto high = scheduler.submit(request);
    const double lowWaited = wait(*low).ending.figures.queuedSeconds,
                 highWaited = wait(*high).ending.figures.queuedSeconds;
    EXPECT_LT(highWaited, lowWaited);
}

// Also those that had no part in the pass that failed.
TEST(Scheduler, ALostDeviceEndsAllRequestsAndTakesNone) {
    const Model model = modelOf(gpuVariants()[0], 2000);
    const WatchedEngine watched(model, engineOptions(2000, 64, 8));
    SchedulerOptions options = longQueue();
    options.running = 1;
    Scheduler scheduler(watched.engine, options);
    EXPECT_EQ(wait(*scheduler.submit(requestOf({1, 2, 3}, 4))).ending.finish, Finish::Length);
    EXPECT_EQ(scheduler.counts().failure, "");
    watched.backend->failIn = 3;
    watched.backend->isLost = true;
    std::vector<std::shared_ptr<Answer>> answers;
    {
        const LockedModel locked = watched.engine->runner().lock();  // all are there before the first pass
        for (int i = 0; i < 3; ++i) answers.push_back(scheduler.submit(requestOf({1, 2, 3 + i}, 40)));
    }
    for (const auto& answer : answers) {
        const Ending ending = wait(*answer).ending;
        EXPECT_EQ(ending.finish, Finish::Failed);
        EXPECT_EQ(ending.kind, ErrorKind::DeviceLost);
        EXPECT_EQ(ending.error, "told to be lost");
    }
    EXPECT_EQ(scheduler.counts().failure, "told to be lost");
    expectError(ErrorKind::DeviceLost, "told to be lost", [&] { scheduler.submit(requestOf({1, 2, 3}, 4)); });
}

TEST(Scheduler, ALostDeviceIsNoticedByTasks) {
    const Model model = modelOf(gpuVariants()[0], 2000);
    Scheduler scheduler(engineOf(model, engineOptions(2000, 64, 8)), longQueue());
    const auto task = scheduler.perform([]() -> bool { throw Error(ErrorKind::DeviceLost, "told to be lost"); });
    expectError(ErrorKind::DeviceLost, "told to be lost", [&] { task->wait(kForever); });
    expectError(ErrorKind::DeviceLost, "told to be lost", [&] { scheduler.submit(requestOf({1, 2, 3}, 4)); });
}

// A step that fails ends the requests in it, and only these.
TEST(Scheduler, AFailedPassEndsItsRequestsAndNoOther) {
    const Model model = modelOf(gpuVariants()[0], 2000);
    const WatchedEngine watched(model, engineOptions(2000, 64, 8));
    Crowd crowd(model, engineOf(model, engineOptions(600, 64, 12)), 4);
    Scheduler scheduler(watched.engine, longQueue());
    int failed = 0, served = 0;
    for (int round = 0; round < 30; ++round) {
        std::vector<Crowd::Expected> drawn;
        for (int i = 0; i < 3; ++i) drawn.push_back(crowd.draw(60, 20));
        if (round % 2) watched.backend->failIn = 1 + static_cast<int>(crowd.random()() % 20);
        std::vector<Served> all;
        for (Crowd::Expected& expected : drawn) {
            const auto answer = scheduler.submit(expected.request);
            all.push_back({std::move(expected), answer});
        }
        for (const Served& one : all) {
            const Whole whole = wait(*one.answer);
            if (whole.ending.finish == Finish::Failed) {
                EXPECT_EQ(whole.ending.error, "told to fail");
                ++failed;
            } else {
                EXPECT_EQ(whole.tokens, one.expected.tokens);
                ++served;
            }
        }
        watched.backend->failIn = 0;
    }
    EXPECT_GT(failed, 0);
    EXPECT_GT(served, failed);
}

// A constraint that throws ends its own request only, wherever it throws.
TEST(Scheduler, AConstraintThatFailsEndsItsRequestAndNoOther) {
    const Model model = modelOf(gpuVariants()[0], 2000);
    Crowd crowd(model, engineOf(model, engineOptions(600, 64, 12)), 6);
    Scheduler scheduler(engineOf(model, engineOptions(2000, 64, 12)), longQueue());
    int failed = 0, served = 0;
    for (int round = 0; round < 20; ++round) {
        std::vector<Served> all;
        for (int i = 0; i < 4; ++i) {
            all.push_back({crowd.draw(60, 30), nullptr});
            auto* constraint = static_cast<Thirds*>(all.back().expected.request.extras.constraint.get());
            if (!constraint) continue;
            auto& failsAt = crowd.random()() % 2 ? constraint->failsAt : constraint->acceptFailsAt;
            failsAt = 1 + static_cast<int64_t>(crowd.random()() % 10);
        }
        for (Served& one : all) one.answer = scheduler.submit(one.expected.request);
        for (const Served& one : all) {
            const Whole whole = wait(*one.answer);
            if (whole.ending.finish == Finish::Failed) {
                EXPECT_EQ(whole.ending.error, "the answer's constraint failed: told to fail");
                EXPECT_TRUE(one.expected.request.extras.constraint);
                ASSERT_LE(whole.tokens.size(), one.expected.tokens.size());
                EXPECT_TRUE(std::equal(whole.tokens.begin(), whole.tokens.end(), one.expected.tokens.begin()));
                ++failed;
            } else {
                EXPECT_EQ(whole.tokens, one.expected.tokens);
                checkScores(whole, one.expected);
                ++served;
            }
        }
    }
    EXPECT_GT(failed, 5);
    EXPECT_GT(served, failed);
}

// Lacks memory for every third choice of more tokens than one text asks for, after its masks were made.
struct Forgetful : CpuBackend {
    Forgetful() : CpuBackend(1) {}
    std::vector<Chosen> sample(const std::vector<Choice>& choices) override {
        if (choices.size() > kMostDraftRows && ++samples % 3 == 0)
            throw Error(ErrorKind::OutOfMemory, "told to lack memory");
        return CpuBackend::sample(choices);
    }
    int samples = 0;
};

// A pass that is repeated asks a constraint again, as if the first time had not been.
TEST(Scheduler, AConstraintForgetsAPassThatFails) {
    const Model model = modelOf(gpuVariants()[0], 2000);
    const auto reference = engineOf(model, engineOptions(600, 64, 12));
    auto backend = std::make_unique<Forgetful>();
    const Forgetful* const made = backend.get();
    const auto engine =
        std::make_shared<Engine>(model.spec(), model.weights(), engineOptions(2000, 64, 12), std::move(backend));
    Scheduler scheduler(engine, longQueue());
    for (uint32_t salt = 0; salt < 60; ++salt) {
        std::vector<ScoredText> expected;
        std::vector<Request> requests;
        for (uint32_t i = 0; i < 3; ++i) {
            Request request = requestOf(repetitive(40, model.options().vocab, 3 * salt + i), 40);
            request.drafts = drafts(Source::NGram, 7);
            Thirds alone(model.options().vocab, 100, salt);
            expected.push_back(writeScored(reference, request.prompt, request.params, 40, 0, &alone));
            request.extras.constraint = std::make_shared<Thirds>(model.options().vocab, 100, salt);
            requests.push_back(std::move(request));
        }
        std::vector<std::shared_ptr<Answer>> answers;
        {
            const LockedModel locked = engine->runner().lock();  // all begin at once, however slow the machine is
            for (Request& request : requests) answers.push_back(scheduler.submit(std::move(request)));
        }
        for (size_t i = 0; i < answers.size(); ++i) {
            const Whole whole = wait(*answers[i]);
            EXPECT_EQ(whole.tokens, expected[i].tokens) << whole.ending.error;
        }
    }
    EXPECT_GT(made->samples, 30);
}

// Drafts after a forbidden guess, or after the end, do not confuse a constraint.
TEST(Scheduler, GuessesAreAcceptedAndRolledBack) {
    const Model model = modelOf(gpuVariants()[0], 2000);
    const auto reference = engineOf(model, engineOptions(600, 64, 12));
    Scheduler scheduler(engineOf(model, engineOptions(2000, 64, 12)), longQueue());
    int64_t rolledBack = 0, accepted = 0;
    for (uint32_t salt = 0; salt < 40; ++salt) {
        Request request = requestOf(repetitive(40, model.options().vocab, salt), 60);
        request.drafts = drafts(Source::NGram, 7);
        const size_t ends = 1 + salt;
        Thirds expected(model.options().vocab, ends, salt);
        const ScoredText text = writeScored(reference, request.prompt, request.params, 60, 3, &expected);
        const auto constraint = std::make_shared<Thirds>(model.options().vocab, ends, salt);
        request.extras.constraint = constraint;
        const Whole whole = wait(*scheduler.submit(request));
        EXPECT_EQ(whole.tokens, text.tokens);
        EXPECT_EQ(whole.ending.finish, Finish::EndToken) << whole.ending.error;
        EXPECT_EQ(constraint->accepted, text.tokens);
        rolledBack += constraint->rolledBack;
        accepted += whole.ending.figures.spent.drafts.accepted;
    }
    EXPECT_GT(rolledBack, 0);
    EXPECT_GT(accepted, 0);
}

// A request may ask for the scores of its prompt only.
TEST(Scheduler, APromptIsScoredWithoutAnAnswer) {
    for (const Options& options : models()) {
        SCOPED_TRACE(describe(options));
        const Model model = modelOf(options, 600);
        const auto engine = engineOf(model, engineOptions(600, 64, 12));
        Scheduler scheduler(engine, longQueue());
        for (const int64_t length : {1, 2, 70, 300}) {
            Request request = requestOf(randomTokens(length, model.options().vocab, 8), 0);
            request.extras.echo = true;
            request.extras.best = 4;
            for (int again = 0; again < 2; ++again) {
                const std::shared_ptr<Answer> answer = scheduler.submit(request);
                const Whole whole = wait(*answer);
                EXPECT_EQ(whole.ending.finish, Finish::Length) << whole.ending.error;
                EXPECT_TRUE(whole.tokens.empty());
                EXPECT_EQ(whole.ending.figures.reusedTokens, 0) << "the whole prompt is computed each time";
                EXPECT_EQ(answer->computedTokens(), length);
                const ScoredText text = writeScored(engineOf(model, engineOptions(600, 64, 12)), request.prompt,
                                                    request.params, 0, 4, nullptr);
                ASSERT_EQ(whole.promptScores.size(), static_cast<size_t>(length));
                for (size_t i = 1; i < text.prompt.size(); ++i) expectSame(whole.promptScores[i], text.prompt[i]);
            }
        }
    }
}

TEST(Scheduler, AnAnswerTellsHowFarItsPromptHasCome) {
    const Model model = modelOf(gpuVariants()[0], 1000);
    Scheduler scheduler(engineOf(model, engineOptions(1000, 64, 4)), longQueue());
    std::vector<int32_t> text = randomTokens(100, model.options().vocab, 1);
    const auto first = scheduler.submit(requestOf(text, 5));
    wait(*first);
    EXPECT_EQ(first->computedTokens(), 100);
    EXPECT_EQ(first->reusedTokens(), 0);
    text.resize(150, 7);
    const auto second = scheduler.submit(requestOf(text, 5));
    while (second->take(kForever).tokens.empty()) EXPECT_LE(second->computedTokens(), 150);
    EXPECT_EQ(second->computedTokens(), 150);
    EXPECT_EQ(second->reusedTokens(), 64) << "a whole page";
}

// Nothing is left behind, whatever was going on.
TEST(Scheduler, GivesEverythingBackAtItsEnd) {
    const Model model = modelOf(hybrids()[0], 2000);
    const auto engine = engineOf(model, engineOptions(2000, 64, 12));
    const auto room = [&] {
        const LockedModel locked = engine->runner().lock();
        return std::pair(locked.kv().freePages(), locked.kv().states().freeEntries());
    };
    const auto before = room();
    std::vector<std::shared_ptr<Answer>> answers;
    {
        Crowd crowd(model, engineOf(model, engineOptions(600, 64, 12)), 5);
        Scheduler scheduler(engine, longQueue());
        for (int i = 0; i < 20; ++i) answers.push_back(scheduler.submit(crowd.draw(60, 30).request));
        wait(*answers.front());
        EXPECT_NE(room(), before);
    }
    EXPECT_EQ(room(), before);
    for (size_t i = 1; i < answers.size(); ++i) {
        const Answer::News news = answers[i]->take(kForever);
        EXPECT_TRUE(news.ending) << i;
    }
}

TEST(Arrivals, NameTheAnswersWithNews) {
    const Model model = modelOf(gpuVariants()[0], 1000);
    Scheduler scheduler(engineOf(model, engineOptions(1000, 64, 4)), longQueue());
    const auto arrivals = std::make_shared<Arrivals>();
    EXPECT_TRUE(arrivals->drain().empty());
    const auto first = scheduler.submit(requestOf({1, 2, 3}, 20), arrivals);
    const auto second = scheduler.submit(requestOf({3, 2, 1}, 20), arrivals);
    wait(*first);
    wait(*second);
    std::vector<int64_t> numbers = arrivals->drain();
    std::sort(numbers.begin(), numbers.end());
    numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
    EXPECT_EQ(numbers, std::vector<int64_t>({first->number(), second->number()}));
    EXPECT_TRUE(arrivals->drain().empty());
}

// An answer that nobody holds any more is not named, wherever it was among the others.
TEST(Arrivals, ForgetAnswersThatAreGone) {
    const auto arrivals = std::make_shared<Arrivals>();
    const auto isReadable = [&] {
        pollfd readable{arrivals->descriptor(), POLLIN, 0};
        return poll(&readable, 1, 0) == 1;
    };
    for (const size_t gone : {0, 1, 2}) {
        std::vector<std::unique_ptr<Answer>> answers;
        std::vector<int64_t> expected;
        for (int64_t number = 0; number < 3; ++number) {
            answers.push_back(std::make_unique<Answer>(number, arrivals));
            for (int twice = 0; twice < 2; ++twice) answers.back()->add({Chosen{}}, {});
            if (number != static_cast<int64_t>(gone)) expected.push_back(number);
        }
        answers[gone].reset();
        answers.push_back(std::make_unique<Answer>(3, arrivals));
        answers.back()->end({});
        expected.push_back(3);
        EXPECT_TRUE(isReadable());
        EXPECT_EQ(arrivals->drain(), expected);
        EXPECT_FALSE(isReadable());
        answers.back()->add({Chosen{}}, {});
        answers.back()->announce();
        answers.clear();
        EXPECT_TRUE(isReadable()) << "it was, and may have woken its reader";
        EXPECT_TRUE(arrivals->drain().empty());
        EXPECT_FALSE(isReadable());
    }
}

// A thread that waits for many answers is woken once for the tokens of a step.
TEST(Arrivals, WakeOnceForManyAnswers) {
    const auto arrivals = std::make_shared<Arrivals>();
    const auto isReadable = [&] {
        pollfd readable{arrivals->descriptor(), POLLIN, 0};
        return poll(&readable, 1, 0) == 1;
    };
    std::vector<std::unique_ptr<Answer>> answers;
    for (int64_t number = 0; number < 3; ++number) {
        answers.push_back(std::make_unique<Answer>(number, arrivals));
        answers.back()->add({Chosen{}}, {});
        EXPECT_FALSE(isReadable());
    }
    answers[0]->announce();
    EXPECT_TRUE(isReadable());
    EXPECT_EQ(arrivals->drain(), (std::vector<int64_t>{0, 1, 2}));
    for (const size_t other : {1, 2}) {
        answers[other]->announce();
        EXPECT_FALSE(isReadable()) << "its news is known";
    }
    answers[2]->end({});
    EXPECT_TRUE(isReadable());
    EXPECT_EQ(arrivals->drain(), std::vector<int64_t>{2});
}

TEST(Pace, PiecesFitTheGap) {
    Pace pace(0.2, 2048, false);
    EXPECT_EQ(pace.pieceRows(false), 2048);
    EXPECT_LT(pace.pieceRows(true), 2048) << "nothing is known yet";
    for (int i = 0; i < 50; ++i) pace.countPiece(512, 0.512);  // a millisecond a row
    EXPECT_EQ(pace.pieceRows(true), 128) << "0.7 of the gap, in whole tiles";
    EXPECT_EQ(pace.pieceRows(false), 2048);
    for (int i = 0; i < 50; ++i) pace.countPiece(512, 51.2);
    EXPECT_EQ(pace.pieceRows(true), 64) << "no smaller than a tile";
    for (int i = 0; i < 100; ++i) pace.countPiece(512, 0.000512);
    EXPECT_EQ(pace.pieceRows(true), 2048);
    EXPECT_FALSE(pace.answersAreDue());
}

TEST(Pace, WhereWeightsAreStreamedAnswersGetHalfOfTheTime) {
    Pace pace(0.2, 2048, true);
    EXPECT_FALSE(pace.answersAreDue());
    pace.countPiece(2048, 1.5);
    EXPECT_EQ(pace.pieceRows(true), 2048);
    for (int i = 0; i < 3; ++i) {
        EXPECT_TRUE(pace.answersAreDue()) << i;
        pace.countStep(0.5);
    }
    EXPECT_FALSE(pace.answersAreDue());
}

}  // namespace
