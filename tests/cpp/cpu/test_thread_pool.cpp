// The pool that every operation runs on: each task runs exactly once, whatever the sizes, over many loops; exceptions
// come back to the caller; sleeping workers wake; no loop waits for a worker that the system does not schedule. Meant
// to be run under ThreadSanitizer too.
#include <gtest/gtest.h>

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
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
#include "seed.h"

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
            EXPECT_EQ(countRuns(pool, tasks), std::vector<int>(tasks, 1))
                << threads << " threads, " << tasks << " tasks";
        }
    }
}

TEST(ThreadPool, NegativeTaskCountsRunNothing) {
    ThreadPool pool(3);
    bool ran = false;
    pool.run(-5, [&](int64_t, int) { ran = true; });
    EXPECT_FALSE(ran);
}

// Loops so short that workers leave one while the next begins: a worker that confuses two loops would lose a task, run
// one twice, or call a body that is gone.
TEST(ThreadPool, ManyLoopsBackToBack) {
    for (const int threads : {2, 4}) {
        ThreadPool pool(threads);
        std::mt19937 random(sharpi::testSeed(7));
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
    EXPECT_THROW(pool.run(1000000,
                          [&](int64_t, int) {
                              ++started;
                              throw std::runtime_error("all fail");
                          }),
                 std::runtime_error);
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

TEST(ThreadPool, WorkersMaySleepWhileTheCallerRests) {
    ThreadPool pool(3);
    const ThreadPool::Awake awake(pool);
    for (int round = 0; round < 3; ++round) {
        ASSERT_TRUE(becomesAsleep(pool, 0));
        {
            const ThreadPool::Resting resting(pool);
            ASSERT_TRUE(becomesAsleep(pool, 2)) << "they were kept awake";
        }
        ASSERT_TRUE(becomesAsleep(pool, 0)) << "they were not woken";
        EXPECT_EQ(countRuns(pool, 9), std::vector<int>(9, 1));
    }
}

TEST(ThreadPool, AwakeComesAndGoesBetweenLoops) {
    for (const int threads : {1, 2, 4}) {
        ThreadPool pool(threads);
        std::mt19937 random(sharpi::testSeed(8));
        for (int loop = 0; loop < 3000; ++loop) {
            std::unique_ptr<ThreadPool::Awake> awake;
            if (random() % 2) awake = std::make_unique<ThreadPool::Awake>(pool);
            const int64_t tasks = 1 + random() % 6;
            ASSERT_EQ(countRuns(pool, tasks), std::vector<int>(tasks, 1));
            if (random() % 300 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
        }
    }
}

// Takes cores away from workers, as a busy machine does, but when the test says so: a signal handler holds a thread
// wherever it is until the test lets it go. It waits in a read from a pipe, which a handler is allowed to make.
class Held {
public:
    explicit Held(const std::vector<pthread_t>& threads) {
        if (pipe(_pipe.data()) != 0) throw std::runtime_error("no pipe");
        _read = _pipe[0];
        _count = 0;
        struct sigaction action{};
        action.sa_handler = &Held::hold;
        sigaction(SIGUSR1, &action, &_before);
        for (const pthread_t thread : threads) pthread_kill(thread, SIGUSR1);
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (_count != static_cast<int>(threads.size()) && std::chrono::steady_clock::now() < deadline)
            std::this_thread::yield();
        _all = _count == static_cast<int>(threads.size());
    }
    ~Held() {
        letGo();
        while (_count != 0) std::this_thread::yield();
        sigaction(SIGUSR1, &_before, nullptr);
        close(_pipe[0]);
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

    bool all() const { return _all; }
    // May be called from any thread, and twice.
    void letGo() {
        if (!_released.exchange(true)) close(_pipe[1]);
    }

private:
    static void hold(int) {
        ++_count;
        char byte;
        while (read(_read, &byte, 1) < 0) {
        }  // ends when the pipe's other end is closed
        --_count;
    }

    static std::atomic<int> _count, _read;
    std::array<int, 2> _pipe{};
    std::atomic<bool> _released{false};
    struct sigaction _before{};
    bool _all = false;
};
std::atomic<int> Held::_count{0}, Held::_read{-1};

// Lets held workers go if the test's thread waits for them: such a loop would never end.
class Watchdog {
public:
    explicit Watchdog(Held& held)
        : _thread([this, &held] {
              const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
              while (!_done && std::chrono::steady_clock::now() < deadline)
                  std::this_thread::sleep_for(std::chrono::milliseconds(5));
              if (!_done) {
                  _bit = true;
                  held.letGo();
              }
          }) {}
    ~Watchdog() { end(); }

    // Whether nothing has waited for the held workers so far.
    bool end() {
        _done = true;
        if (_thread.joinable()) _thread.join();
        return !_bit;
    }

private:
    std::atomic<bool> _done{false}, _bit{false};
    std::thread _thread;
};

// The pool's threads, without the caller's.
std::vector<pthread_t> workersOf(ThreadPool& pool) {
    std::vector<pthread_t> all(static_cast<size_t>(pool.threads()));
    std::atomic<int> arrived{0};
    pool.run(pool.threads(), [&](int64_t, int worker) {  // each waits for the others, so each thread gets one
        all[static_cast<size_t>(worker)] = pthread_self();
        ++arrived;
        while (arrived < pool.threads()) std::this_thread::yield();
    });
    all.erase(all.begin());
    return all;
}

TEST(ThreadPool, ALoopEndsWithoutWorkersThatAreNotScheduled) {
    for (const int threads : {2, 4}) {
        ThreadPool pool(threads);
        const std::vector<pthread_t> workers = workersOf(pool);
        ASSERT_TRUE(becomesAsleep(pool, threads - 1));
        Held held(workers);
        ASSERT_TRUE(held.all()) << "the workers cannot be stopped";
        Watchdog watchdog(held);
        for (int loop = 0; loop < 300; ++loop) {
            const int64_t tasks = 2 + loop % 7;
            // On the heap, and freed after each loop: a sanitizer would notice a worker that came back to it later.
            auto runs = std::make_unique<std::vector<int>>(tasks, 0);
            pool.run(tasks, [&](int64_t task, int worker) {
                EXPECT_EQ(worker, 0) << "a held worker ran a task";
                ++runs->at(task);
            });
            EXPECT_EQ(*runs, std::vector<int>(tasks, 1));
        }
        EXPECT_THROW(pool.run(5, [](int64_t, int) { throw std::runtime_error("fails"); }), std::runtime_error);
        EXPECT_TRUE(watchdog.end()) << "a loop waited for a worker that had no task";
    }
}

// One of three workers sleeps and wakes again and again while the others are held. Waking it must not wait for them.
TEST(ThreadPool, WakingAWorkerDoesNotWaitForOthers) {
    ThreadPool pool(4);
    std::vector<pthread_t> workers = workersOf(pool);
    ASSERT_TRUE(becomesAsleep(pool, 3));
    workers.pop_back();
    Held held(workers);
    ASSERT_TRUE(held.all()) << "the workers cannot be stopped";
    Watchdog watchdog(held);
    for (int round = 0; round < 5; ++round) {
        std::atomic<int> arrived{0};
        pool.run(2, [&](int64_t, int) {  // ends only if the free worker takes part
            ++arrived;
            while (arrived < 2) std::this_thread::yield();
        });
        ASSERT_TRUE(becomesAsleep(pool, 1));
    }
    EXPECT_TRUE(watchdog.end()) << "waking a worker waited for one that is not scheduled";
}

// Workers that come back while a later loop runs take tasks of that loop, whatever loop they were called for.
TEST(ThreadPool, WorkersThatComeBackTakePartInTheLoopOfThen) {
    ThreadPool pool(3);
    const std::vector<pthread_t> workers = workersOf(pool);
    for (int round = 0; round < 20; ++round) {
        ASSERT_TRUE(becomesAsleep(pool, 2));
        Held held(workers);
        ASSERT_TRUE(held.all()) << "the workers cannot be stopped";
        Watchdog watchdog(held);
        for (int loop = 0; loop < 1 + round % 3; ++loop) EXPECT_EQ(countRuns(pool, 9), std::vector<int>(9, 1));
        std::atomic<int> arrived{0};
        std::vector<int> runs(3, 0);
        pool.run(3, [&](int64_t task, int) {  // ends only when both are back
            ++runs[static_cast<size_t>(task)];
            if (task == 0) held.letGo();
            ++arrived;
            while (arrived < 3) std::this_thread::yield();
        });
        EXPECT_EQ(runs, std::vector<int>(3, 1));
        EXPECT_TRUE(watchdog.end()) << "a loop waited for a worker that had no task";
    }
}

// A loop waits for a worker that holds a task, however long the system keeps the worker from its core.
TEST(ThreadPool, ALoopDoesNotEndBeforeAHeldTask) {
    ThreadPool pool(2);
    for (int round = 0; round < 20; ++round) {
        std::atomic<int> started{0};
        std::atomic<bool> ended{false};
        const auto begin = std::chrono::steady_clock::now();
        pool.run(2, [&](int64_t, int worker) {
            ++started;
            while (started < 2) std::this_thread::yield();
            if (worker == 0) return;
            std::this_thread::sleep_for(std::chrono::milliseconds(round % 4));  // the caller spins, then sleeps
            ended = true;
        });
        EXPECT_TRUE(ended);
        EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(round % 4));
    }
}

TEST(ThreadPool, TasksBeginInAscendingOrder) {
    ThreadPool pool(4);
    for (int loop = 0; loop < 500; ++loop) {
        std::array<std::atomic<bool>, 24> done{};
        std::atomic<bool> stuck{false};
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        // Each task waits for the one four before it. If that one had not begun, all four threads could wait for ever.
        pool.run(24, [&](int64_t task, int) {
            while (task >= 4 && !done[static_cast<size_t>(task - 4)] && !stuck) {
                if (std::chrono::steady_clock::now() > deadline) stuck = true;
                std::this_thread::yield();
            }
            done[static_cast<size_t>(task)] = true;
        });
        ASSERT_FALSE(stuck);
    }
}

// Short loops, pauses, failures and Awake objects at random, while signals interrupt workers anywhere and for any time.
// What the bodies touch is freed after each loop.
TEST(ThreadPool, AnyMixOfLoopsAndInterruptions) {
    const unsigned seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed));
    for (const int threads : {2, 3, 5, 8}) {
        ThreadPool pool(threads);
        const std::vector<pthread_t> workers = workersOf(pool);
        std::atomic<bool> done{false};
        std::thread interrupter([&] {
            std::mt19937 random(seed + static_cast<unsigned>(threads));
            while (!done) {
                std::vector<pthread_t> some;
                for (const pthread_t worker : workers) {
                    if (random() % 2) some.push_back(worker);
                }
                if (some.empty()) continue;
                const Held held(some);
                std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
            }
        });
        std::mt19937 random(seed);
        for (int loop = 0; loop < 4000; ++loop) {
            std::unique_ptr<ThreadPool::Awake> awake;
            if (random() % 8 == 0) awake = std::make_unique<ThreadPool::Awake>(pool);
            const int64_t tasks = random() % 20, thrower = random() % 10 ? -1 : static_cast<int64_t>(random() % 20);
            auto runs = std::make_unique<std::vector<int>>(tasks, 0);
            bool thrown = false;
            try {
                pool.run(tasks, [&](int64_t task, int) {
                    ++runs->at(task);
                    if (task == thrower) throw std::runtime_error("task");
                });
            } catch (const std::runtime_error&) {
                thrown = true;
            }
            EXPECT_EQ(thrown, thrower >= 0 && thrower < tasks);
            for (int64_t task = 0; task < tasks; ++task) {
                if (!thrown || task <= thrower) EXPECT_EQ(runs->at(task), 1) << "task " << task << " of " << tasks;
                else EXPECT_LE(runs->at(task), 1);
            }
            if (random() % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
        done = true;
        interrupter.join();
    }
}

TEST(ThreadPool, AForkedProcessIsRefusedAndTheParentGoesOn) {
    ThreadPool pool(3);
    EXPECT_EQ(countRuns(pool, 9), std::vector<int>(9, 1));
    // The refusal is an exception, which the child allocates. A lock of the allocator (AddressSanitizer's, for one)
    // that another thread held during the fork would stay locked in the child for ever, so all others sleep.
    ASSERT_TRUE(becomesAsleep(pool, 2));
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        int status = 1;
        try {
            pool.run(2, [](int64_t, int) {});
        } catch (const Error& e) {
            status = e.kind() == ErrorKind::InvalidArgument ? 0 : 2;
        }
        _exit(status);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    EXPECT_EQ(countRuns(pool, 9), std::vector<int>(9, 1));
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
