// Which prompt is computed next: one of the client that has the fewest requests served; of these, the one that is done
// soonest, unless another has waited long.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "answers.h"
#include "engine/scheduler/scheduler.h"

namespace {

using namespace sharpi;
using namespace tiny;

constexpr int64_t kShort = 64, kLong = 640;

// Takes its time for each row of a prompt, and notes whose these are. A step waits until it is let go.
class Gated : public CpuBackend {
public:
    Gated() : CpuBackend(1) {}
    void begin(const Batch& batch, const KvCache& kv) override {
        if (batch.decodeRows > 0) {
            isAtGate = true;
            while (!isOpen) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(200) * batch.size());
            if (std::find(order.begin(), order.end(), batch.tokens[0]) == order.end()) order.push_back(batch.tokens[0]);
        }
        CpuBackend::begin(batch, kv);
    }
    std::atomic<bool> isAtGate{false}, isOpen{false};
    std::vector<int32_t> order;  // the tokens of prompts, each of which repeats one, as they were begun
};

// A scheduler that writes an answer, whose next step waits until finish() lets it go.
class Order : public testing::Test {
protected:
    // running: requests that have room beside each other, with the one that is written.
    void begin(int64_t running, int64_t answer) {
        auto made = std::make_unique<Gated>();
        backend = made.get();
        SchedulerOptions options = longQueue();
        options.running = running;
        scheduler = std::make_unique<Scheduler>(
            std::make_shared<Engine>(model.spec(), model.weights(), engineOptions(5000, 1000, 4), std::move(made)),
            options);
        submit(1, 2 * kShort, "a", answer);
        while (!backend->isAtGate) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    void submit(int32_t token, int64_t tokens, const std::string& key, int64_t answer = 1) {
        Request request = requestOf(std::vector<int32_t>(static_cast<size_t>(tokens), token), answer);
        request.key = key;
        answers.push_back(scheduler->submit(request));
    }
    // By what a long prompt takes longer than a short one, as far as the scheduler knows.
    std::chrono::duration<double> difference() const {
        return std::chrono::duration<double>(scheduler->counts().pieceSeconds / (2 * kShort) * (kLong - kShort));
    }
    std::vector<int32_t> finish() {
        backend->isOpen = true;
        for (const auto& answer : answers) EXPECT_EQ(wait(*answer).ending.finish, Finish::Length);
        return backend->order;
    }

    const Model model = modelOf(gpuVariants()[0], 5000);
    Gated* backend = nullptr;
    std::unique_ptr<Scheduler> scheduler;
    std::vector<std::shared_ptr<Answer>> answers;
};

TEST_F(Order, AClientWhoHasNothingServedGoesBeforeOneWhoHas) {
    begin(2, 50);
    submit(2, kShort, "a");
    submit(3, kShort, "a");
    submit(4, kLong, "b");
    EXPECT_EQ(finish()[1], 4) << "though it came last and takes longest";
}

TEST_F(Order, WhatIsSoonDoneGoesFirst) {
    begin(1, 2);
    submit(2, kLong, "b");
    submit(3, kShort, "b");
    EXPECT_EQ(finish(), std::vector<int32_t>({1, 3, 2}));
}

TEST_F(Order, WhatHasWaitedLongerThanItTakesGoesFirst) {
    begin(1, 2);
    submit(2, kLong, "b");
    std::this_thread::sleep_for(2 * difference());
    submit(3, kShort, "b");
    EXPECT_EQ(finish(), std::vector<int32_t>({1, 2, 3}));
}

}  // namespace
