// The pool that every operation runs on: each task exactly once, whatever the sizes, over many loops; exceptions
// come back to the caller; workers that have gone to sleep wake. Meant to be run under ThreadSanitizer too.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/thread_pool.h"

namespace {

using sharpi::Error;
using sharpi::ErrorKind;
using sharpi::ThreadPool;

// Runs one loop and returns how often each task ran. The counts are plain integers on purpose: the pool alone must
// order them, which ThreadSanitizer checks.
std::vector<int> countRuns(ThreadPool& pool, int64_t tasks) {
    std::vector<int> runs(tasks, 0);
    std::atomic<bool> workerInRange{true};
    pool.run(tasks, [&](int64_t task, int worker) {
        if (worker < 0 || worker >= pool.threads()) workerInRange = false;
        ++runs.at(task);
    });
    EXPECT_TRUE(workerInRange);
    return runs;
}

TEST(ThreadPool, RunsEveryTaskExactlyOnce) {
    for (const int threads : {1, 2, 3, 4, 8}) {
        ThreadPool pool(threads);
        EXPECT_EQ(pool.threads(), threads);
        for (const int64_t tasks : {0, 1, 2, 3, 7, 8, 9, 63, 64, 1000, 20000}) {
            EXPECT_EQ(countRuns(pool, tasks), std::vector<int>(tasks, 1)) << threads << " threads, " << tasks << " tasks";
        }
    }
}

TEST(ThreadPool, NegativeTaskCountsRunNothing) {
    ThreadPool pool(3);
    bool ran = false;
    pool.run(-5, [&](int64_t, int) { ran = true; });
    EXPECT_FALSE(ran);
}

// Loops so short that workers leave one while the next begins: a worker that mixes up two loops would lose a task,
// run one twice, or call a body that is gone.
TEST(ThreadPool, ManyLoopsBackToBack) {
    for (const int threads : {2, 4}) {
        ThreadPool pool(threads);
        std::mt19937 random(7);
        int64_t expected = 0;
        std::vector<int64_t> sums(threads, 0);  // plain: each worker adds to its own
        for (int loop = 0; loop < 20000; ++loop) {
            const int64_t tasks = 1 + random() % 6;
            expected += tasks * (tasks + 1) / 2;
            pool.run(tasks, [&sums](int64_t task, int worker) { sums[worker] += task + 1; });
        }
        int64_t total = 0;
        for (const int64_t sum : sums) total += sum;
        EXPECT_EQ(total, expected);
    }
}

TEST(ThreadPool, WritesOfOneLoopAreSeenByTheNext) {
    ThreadPool pool(4);
    std::vector<int64_t> values(257, 1), next(257);
    for (int loop = 0; loop < 500; ++loop) {
        const int64_t n = static_cast<int64_t>(values.size());
        pool.run(n, [&](int64_t i, int) { next[i] = (values[(i + 1) % n] + values[i]) % 9973; });
        std::swap(values, next);
    }
    int64_t one = 1;
    for (int loop = 0; loop < 500; ++loop) one = 2 * one % 9973;
    EXPECT_EQ(values, std::vector<int64_t>(257, one));
}

TEST(ThreadPool, RethrowsAndStaysUsable) {
    for (const int threads : {1, 2, 4}) {
        ThreadPool pool(threads);
        for (int round = 0; round < 200; ++round) {
            const int64_t thrower = round % 50;
            std::string caught;
            try {
                pool.run(50, [&](int64_t task, int) {
                    if (task == thrower) throw std::runtime_error("task " + std::to_string(task));
                });
            } catch (const std::runtime_error& e) {
                caught = e.what();
            }
            EXPECT_EQ(caught, "task " + std::to_string(thrower));
            EXPECT_EQ(countRuns(pool, 20), std::vector<int>(20, 1));
        }
    }
}

TEST(ThreadPool, OneOfManyExceptionsComesBackAndTheRestIsSkipped) {
    ThreadPool pool(4);
    std::atomic<int64_t> started{0};
    EXPECT_THROW(pool.run(1000000, [&](int64_t, int) {
        ++started;
        throw std::runtime_error("all fail");
    }), std::runtime_error);
    EXPECT_GE(started, 1);
    EXPECT_LE(started, 4);  // each thread leaves after its first failure
}

TEST(ThreadPool, SleepingWorkersWake) {
    ThreadPool pool(3);
    for (int round = 0; round < 5; ++round) {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));  // far longer than they spin
        // Tasks that wait for each other end only when all three threads take part.
        std::atomic<int> arrived{0};
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        std::atomic<bool> late{false};
        pool.run(3, [&](int64_t, int) {
            ++arrived;
            while (arrived < 3 && !late) {
                if (std::chrono::steady_clock::now() > deadline) late = true;
                std::this_thread::yield();
            }
        });
        ASSERT_FALSE(late) << "a sleeping worker did not wake";
    }
}

// Waits until that many workers sleep; false if they never do.
bool becomesAsleep(const ThreadPool& pool, int wanted) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (pool.sleeping() != wanted) {
        if (std::chrono::steady_clock::now() > deadline) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
}

TEST(ThreadPool, NobodySleepsWhileKeptAwake) {
    ThreadPool pool(3);
    for (int round = 0; round < 3; ++round) {
        ASSERT_TRUE(becomesAsleep(pool, 2)) << "workers without work did not go to sleep";
        {
            const ThreadPool::Awake outer(pool);
            ASSERT_TRUE(becomesAsleep(pool, 0)) << "sleeping workers were not woken";
            for (int look = 0; look < 20; ++look) {
                {
                    const ThreadPool::Awake inner(pool);
                    EXPECT_EQ(countRuns(pool, 9), std::vector<int>(9, 1));
                }
                std::this_thread::sleep_for(std::chrono::milliseconds(2));  // far longer than they spin otherwise
                ASSERT_EQ(pool.sleeping(), 0);
            }
        }
    }
    ASSERT_TRUE(becomesAsleep(pool, 2)) << "workers no longer kept awake did not go to sleep";
    EXPECT_EQ(countRuns(pool, 9), std::vector<int>(9, 1));
}

TEST(ThreadPool, AwakeComesAndGoesBetweenLoops) {
    for (const int threads : {1, 2, 4}) {
        ThreadPool pool(threads);
        std::mt19937 random(8);
        for (int loop = 0; loop < 3000; ++loop) {
            std::unique_ptr<ThreadPool::Awake> awake;
            if (random() % 2) awake = std::make_unique<ThreadPool::Awake>(pool);
            const int64_t tasks = 1 + random() % 6;
            ASSERT_EQ(countRuns(pool, tasks), std::vector<int>(tasks, 1));
            if (random() % 300 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
        }
    }
}

TEST(ThreadPool, EndsRightAfterBeingKeptAwake) {
    for (int round = 0; round < 50; ++round) {
        ThreadPool pool(3);
        const ThreadPool::Awake awake(pool);
        if (round % 2) countRuns(pool, 9);
    }
}

TEST(ThreadPool, EndsWhileSpinningAsleepAndUnused) {
    for (int round = 0; round < 50; ++round) {
        ThreadPool unused(3);
        ThreadPool spinning(3);
        countRuns(spinning, 9);
    }
    auto asleep = std::make_unique<ThreadPool>(3);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    asleep.reset();
}

TEST(ThreadPool, NeedsAtLeastOneThread) {
    for (const int threads : {0, -1, -100}) {
        try {
            ThreadPool pool(threads);
            FAIL() << threads << " threads were accepted";
        } catch (const Error& e) {
            EXPECT_EQ(e.kind(), ErrorKind::InvalidArgument);
            EXPECT_NE(std::string(e.what()).find(std::to_string(threads)), std::string::npos) << e.what();
        }
    }
}

}  // namespace
