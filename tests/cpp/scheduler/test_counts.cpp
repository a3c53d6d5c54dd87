// What the scheduler counts of its own time, and of tokens that it evaluates again.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "answers.h"
#include "engine/scheduler/scheduler.h"
#include "operations/host_clock.h"
#include "scored_text.h"
#include "two_arithmetics.h"

namespace {

using namespace sharpi;
using namespace tiny;
using Milliseconds = std::chrono::milliseconds;

void sleepFor(int milliseconds) { std::this_thread::sleep_for(Milliseconds(milliseconds)); }

// Prompts with different numbers have nothing in common.
std::vector<int32_t> promptOf(const Model& model, int64_t tokens, int32_t number) {
    std::vector<int32_t> prompt = randomTokens(tokens, model.options().vocab, static_cast<unsigned>(number));
    prompt.front() = number;
    return prompt;
}

struct Tokens {
    int64_t lost, answers, cuts;
    bool operator==(const Tokens& b) const { return lost == b.lost && answers == b.answers && cuts == b.cuts; }
    friend std::ostream& operator<<(std::ostream& out, const Tokens& t) {
        return out << t.lost << " lost, " << t.answers << " of answers, " << t.cuts << " of cuts";
    }
};
Tokens againOf(const SchedulerCounts& counts) {
    return {counts.lost.tokens, counts.answers.tokens, counts.cuts.tokens};
}

int64_t rowsOf(const Watched& backend) {
    int64_t rows = 0;
    for (const auto& [pass, batch] : backend.seen) rows += batch.size();
    return rows;
}

// A prompt of 100 tokens, an answer of 41, the last of which is not evaluated, and 10 new tokens.
struct TwoTurns {
    explicit TwoTurns(std::shared_ptr<Engine> engine, const Model& model, const Watched& backend,
                      std::shared_ptr<Conversation> conversation = nullptr) {
        Scheduler scheduler(std::move(engine), longQueue());
        Request first = requestOf(promptOf(model, 100, 1), 41);
        first.conversation = conversation;
        Request second = first;
        const std::vector<int32_t> answer = wait(*scheduler.submit(first)).tokens;
        EXPECT_EQ(againOf(scheduler.counts()), (Tokens{0, 0, 0}));
        EXPECT_EQ(rowsOf(backend), 140);
        second.prompt.insert(second.prompt.end(), answer.begin(), answer.end());
        second.prompt.resize(151, 7);
        EXPECT_EQ(wait(*scheduler.submit(second)).tokens.size(), 41U);
        counts = scheduler.counts();
        rows = rowsOf(backend);
        const double seconds = counts.lost.seconds + counts.answers.seconds + counts.cuts.seconds;
        EXPECT_LE(seconds, counts.pieceSeconds);
        EXPECT_EQ(seconds > 0, !(againOf(counts) == Tokens{0, 0, 0}));
    }
    SchedulerCounts counts;
    int64_t rows = 0;  // of all passes
};
constexpr int64_t kEachOnce = 151 + 40;

TEST(Counts, ALaterTurnCountsTheAnswerBeforeIt) {
    const Model model = modelOf(gpuVariants()[0], 512);
    {
        const WatchedEngine one(model, engineOptions(512, 64, 4));
        const TwoTurns turns(one.engine, model, *one.backend);
        EXPECT_EQ(againOf(turns.counts), (Tokens{0, 12, 0})) << "all of the answer but its last page is shared";
        EXPECT_EQ(turns.rows, kEachOnce + 12);
    }
    {
        const TwoArithmeticsEngine two(model, engineOptions(512, 64, 4), 1);
        const TwoTurns turns(two.engine, model, *two.backend);
        EXPECT_EQ(againOf(turns.counts), (Tokens{0, 40, 36})) << "a page of the prompt is shared";
        EXPECT_EQ(turns.rows, kEachOnce + 40 + 36);
    }
}

TEST(Counts, AConversationKeepsItsText) {
    for (const Options& options : {gpuVariants()[0], hybrids()[0]}) {
        SCOPED_TRACE(describe(options));
        const Model model = modelOf(options, 512);
        const auto conversation = std::make_shared<Conversation>("");
        const WatchedEngine one(model, engineOptions(512, 64, 4));
        EXPECT_EQ(againOf(TwoTurns(one.engine, model, *one.backend, conversation).counts), (Tokens{0, 0, 0}));
        const int64_t step = promptStepOf(options);
        const TwoArithmeticsEngine two(model, engineOptions(512, 64, 4), step);
        const TwoTurns turns(two.engine, model, *two.backend, std::make_shared<Conversation>(""));
        const int64_t cut = 100 % step;
        EXPECT_EQ(againOf(turns.counts), (Tokens{0, 40, cut}));
        EXPECT_EQ(turns.rows, kEachOnce + 40 + cut);
    }
}

// Requests that begin alike, one after the other and at once, and one that shares nothing with them.
TEST(Counts, TheRestOfASharedPageIsACut) {
    const Model model = modelOf(gpuVariants()[0], 2000);
    const WatchedEngine watched(model, engineOptions(2000, 512, 8));
    Scheduler scheduler(watched.engine, longQueue());
    Request request = requestOf(promptOf(model, 100, 1), 1);
    wait(*scheduler.submit(request));
    EXPECT_EQ(againOf(scheduler.counts()), (Tokens{0, 0, 0}));
    wait(*scheduler.submit(request));
    EXPECT_EQ(againOf(scheduler.counts()), (Tokens{0, 0, 35})) << "but for the last, whose logits are wanted";
    request.prompt.resize(90);
    request.prompt.resize(120, 7);
    wait(*scheduler.submit(request));
    EXPECT_EQ(againOf(scheduler.counts()), (Tokens{0, 0, 35 + 26}));
    request.salt = "salt";
    wait(*scheduler.submit(request));
    request.extras.echo = true;
    wait(*scheduler.submit(request));
    EXPECT_EQ(againOf(scheduler.counts()), (Tokens{0, 0, 35 + 26})) << "who wants all scores asks for it";
    wait(*scheduler.submit(requestOf(promptOf(model, 100, 2), 1)));
    EXPECT_EQ(againOf(scheduler.counts()), (Tokens{0, 0, 35 + 26}));

    request = requestOf(promptOf(model, 100, 3), 40);
    Request unread = request;
    unread.ahead = 1;
    const auto first = scheduler.submit(std::move(unread));
    EXPECT_EQ(first->takeOne(kForever).tokens.size(), 1U);
    wait(*scheduler.submit(request));
    EXPECT_EQ(againOf(scheduler.counts()), (Tokens{0, 0, 35 + 26 + 35})) << "the first was still being written";
    wait(*first);
}

TEST(Counts, WhatAPauseLostIsCountedToTheToken) {
    for (const Options& options : {gpuVariants()[0], hybrids()[0]}) {
        SCOPED_TRACE(describe(options));
        const Model model = modelOf(options, 512);
        const WatchedEngine watched(model, engineOptions(512, 64, 20));
        SchedulerOptions crowded = longQueue();
        crowded.running = 8;
        Scheduler scheduler(watched.engine, crowded);
        constexpr int32_t kRequests = 6;
        std::vector<std::shared_ptr<Answer>> answers;
        {
            const LockedModel locked = watched.engine->runner().lock();
            for (int32_t i = 0; i < kRequests; ++i)
                answers.push_back(scheduler.submit(requestOf(promptOf(model, 100, i), 200)));
        }
        for (const auto& answer : answers) EXPECT_EQ(wait(*answer).tokens.size(), 200U);
        const SchedulerCounts counts = scheduler.counts();
        EXPECT_GT(counts.pauses, 0);
        EXPECT_GT(counts.lost.tokens, 0);
        EXPECT_EQ(againOf(counts), (Tokens{rowsOf(*watched.backend) - kRequests * (100 + 199), 0, 0}));
        EXPECT_GT(counts.lost.seconds, 0);
        EXPECT_LE(counts.lost.seconds, counts.pieceSeconds + counts.stepSeconds);
    }
}

TEST(Counts, AnOlderTextIsForgotten) {
    const Model model = modelOf(gpuVariants()[0], 512);
    const WatchedEngine watched(model, engineOptions(512, 64, 4));
    Scheduler scheduler(watched.engine, longQueue());
    const Request request = requestOf(promptOf(model, 40, 1), 1);
    wait(*scheduler.submit(request));
    for (int32_t i = 2; i < 300; ++i) wait(*scheduler.submit(requestOf({2 + i % 60, i / 60, 1}, 1)));
    const Tokens before = againOf(scheduler.counts());
    wait(*scheduler.submit(request));
    EXPECT_EQ(againOf(scheduler.counts()), before);
    wait(*scheduler.submit(request));
    EXPECT_EQ(againOf(scheduler.counts()).cuts, before.cuts + 39);
}

// A constraint that takes its time is the thread's own work, as handing tokens out is. A pass is not, nor is waiting
// for requests.
TEST(Counts, TheThreadsOwnTimeIsWhatIsNotEvaluation) {
    struct SlowConstraint : Thirds {
        explicit SlowConstraint(int64_t vocab) : Thirds(vocab, 1000, 0) {}
        bool mask(std::vector<uint32_t>& words) override {
            sleepFor(3);
            return Thirds::mask(words);
        }
    };
    struct SlowBackend : CpuBackend {
        SlowBackend() : CpuBackend(1) {}
        void region(sharpi::Pass pass, const std::function<void()>& body) override {
            CpuBackend::region(pass, [&] {
                sleepFor(2);
                body();
            });
        }
    };
    const Model model = modelOf(gpuVariants()[0], 512);
    const auto engine = std::make_shared<Engine>(model.spec(), model.weights(), engineOptions(512, 128, 4),
                                                 std::make_unique<SlowBackend>());
    Scheduler scheduler(engine, longQueue());
    for (const bool isSlow : {false, true}) {
        sleepFor(200);
        const SchedulerCounts before = scheduler.counts();
        const double evaluated = engine->backend().hostTimes().evaluating;
        const auto started = std::chrono::steady_clock::now();
        Request request = requestOf(promptOf(model, 100, isSlow), 20);
        if (isSlow) request.extras.constraint = std::make_shared<SlowConstraint>(model.options().vocab);
        wait(*scheduler.submit(std::move(request)));
        EXPECT_TRUE(scheduler.perform([] { return true; })->wait(kForever));  // the turn is over
        const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - started;
        const SchedulerCounts counts = scheduler.counts();
        const double step = counts.stepHost.all - before.stepHost.all;
        const double piece = counts.pieceHost.all - before.pieceHost.all;
        const double evaluating = engine->backend().hostTimes().evaluating - evaluated;
        EXPECT_GT(step, isSlow ? 19 * 0.003 : 0);
        EXPECT_GT(piece, isSlow ? 0.003 : 0);
        EXPECT_GT(evaluating, 20 * 0.002);
        EXPECT_LT(step + piece + evaluating, wall.count());
        EXPECT_EQ(counts.stepHost.hidden, 0) << "the thread is the device";
    }
}

// The thread's work behind a device: from the launch until it waits.
TEST(HostClock, TellsHiddenWorkFromEvaluation) {
    HostClock clock;
    const auto sleep = [](int milliseconds) { return [=] { sleepFor(milliseconds); }; };
    clock.await(sleep(4));
    sleepFor(4);
    EXPECT_EQ(clock.times().hidden, 0) << "the device had nothing to do";
    EXPECT_GE(clock.times().evaluating, 0.004);

    const double evaluated = clock.times().evaluating;
    const auto started = std::chrono::steady_clock::now();
    clock.launched();
    sleepFor(20);
    clock.launched();  // more of it
    {
        const HostClock::Evaluation own(clock);  // the device works on
        for (int i = 0; i < 2; ++i) {
            sleepFor(4);
            const HostClock::Evaluation inner(clock);
            sleepFor(4);
        }
    }
    sleepFor(10);
    clock.await(sleep(4));
    const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - started;
    EXPECT_GE(clock.times().hidden, 0.030);
    EXPECT_GE(clock.times().evaluating - evaluated, 0.020);
    EXPECT_LE(clock.times().hidden + clock.times().evaluating - evaluated, wall.count());

    const double hidden = clock.times().hidden;
    sleepFor(4);
    clock.await([] {});
    EXPECT_EQ(clock.times().hidden, hidden);
}

// Nobody knows whether a device that was never waited for is done: that cannot be more than the thread's own time.
TEST(HostClock, ALapHasNoMoreHiddenThanOwnTime) {
    struct Device : CpuBackend {
        Device() : CpuBackend(1) {}
        using CpuBackend::_clock;
    };
    Device device;
    TurnClock turns(device);
    device._clock.launched();
    sleepFor(4);
    HostSeconds own = turns.lap();
    EXPECT_GE(own.all, 0.004);
    EXPECT_EQ(own.hidden, 0);
    device._clock.await([] { sleepFor(100); });
    own = turns.lap();
    EXPECT_LT(own.all, 0.1);
    EXPECT_EQ(own.hidden, own.all);
}

}  // namespace
