// See thread_pool.h.
//
// A loop is its fields (_body, _tasks, _error) and two counters. run() writes the fields and _unfinished = tasks, then
// publishes the loop by storing _unclaimed = tasks (release). A thread can join in no other way:
//
// - A thread claims a task by subtracting 1 from _unclaimed (acquire). If the old value was above 0, the task is
//   `tasks - old value`, and it belongs to the loop that is published now: the value was stored by that loop, or left
//   by claims after it (one release sequence), so the fields are visible. If the old value was 0 or less, the thread
//   has no task and must not read the fields. The next loop's store overwrites what such a late claim subtracted.
// - A thread counts the tasks that it has done, and subtracts them from _unfinished at once (release), after its last
//   claim. Until then _unfinished is above 0. So while a thread holds a task of a loop, the loop cannot end, and no
//   field can change.
// - run() returns when it reads _unfinished == 0 (acquire), and so sees all that bodies wrote. No thread holds a task
//   then, so run() may write the fields again, whatever the workers are doing.
//
// So it does not matter which loop a worker believes it is in: a worker that slept through a thousand loops claims a
// task of the next one. _generation only tells waiting workers that it is worth looking.
#include "core/thread_pool.h"

#include <pthread.h>

#include <system_error>

#include "core/error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sharpi {

namespace {

// About 50 microseconds: longer than the gaps between the loops of one token, and too short to waste much power.
constexpr int kSpins = 4000;

std::atomic<uint64_t> forks{0};

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

}  // namespace

uint64_t forksSoFar() {
    static const int registered =
        pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
    (void)registered;
    return forks.load(std::memory_order_relaxed);
}

ThreadPool::ThreadPool(int threads) : _forks(forksSoFar()) {
    if (threads < 1) {
        throw Error(ErrorKind::InvalidArgument, "threads must be at least 1, got " + std::to_string(threads));
    }
    _workers.reserve(threads - 1);
    _beds.reset(new Bed[static_cast<size_t>(threads - 1)]);
    try {
        for (int worker = 1; worker < threads; ++worker) {
            _workers.emplace_back([this, worker] { workerLoop(worker); });
        }
    } catch (const std::system_error& e) {
        const size_t started = _workers.size();
        stopWorkers();
        throw Error(ErrorKind::OutOfMemory, "the system refused thread " + std::to_string(started + 2) + " of " +
                                                std::to_string(threads) + ": ask for fewer threads");
    }
}

ThreadPool::~ThreadPool() {
    if (_forks != forksSoFar()) {
        for (auto& thread : _workers) thread.detach();
        return;
    }
    stopWorkers();
}

void ThreadPool::stopWorkers() {
    _stop.store(true, std::memory_order_seq_cst);
    wakeSleepers();
    for (auto& thread : _workers) thread.join();
}

void ThreadPool::run(int64_t tasks, const std::function<void(int64_t, int)>& body) {
    if (tasks <= 0) return;
    if (_workers.empty() || tasks == 1) {
        for (int64_t task = 0; task < tasks; ++task) body(task, 0);
        return;
    }
    if (_forks != forksSoFar()) {
        throw Error(ErrorKind::InvalidArgument,
                    "a model cannot be used in a process that was forked after it was loaded: load it in that process");
    }
    _body = &body;
    _tasks = tasks;
    _error = nullptr;
    _unfinished.store(tasks, std::memory_order_relaxed);
    _unclaimed.store(tasks, std::memory_order_release);
    _generation.fetch_add(1, std::memory_order_seq_cst);
    wakeSleepers();
    drain(0);
    awaitTasks();
    if (_error) std::rethrow_exception(_error);
}

// Waits until the tasks that workers hold are done. A worker may have lost its core in the middle of a task: after a
// while the caller sleeps, so that the worker can have the caller's core.
void ThreadPool::awaitTasks() {
    for (int spins = 0; spins < kSpins; ++spins) {
        if (_unfinished.load(std::memory_order_acquire) == 0) return;
        relax();
    }
    // The thread that ended an earlier loop may post late. Then the caller wakes too soon, and sleeps again.
    for (;;) {
        _callerSleeps.store(true, std::memory_order_seq_cst);
        if (_unfinished.load(std::memory_order_seq_cst) == 0) break;
        _ended.wait();
    }
    _callerSleeps.store(false, std::memory_order_relaxed);
}

void ThreadPool::stayAwake() {
    _awake.fetch_add(1, std::memory_order_seq_cst);
    if (_forks == forksSoFar()) wakeSleepers();
}

// To be called after a change that ends the workers' sleep. A worker that is about to sleep either sees the change or
// is seen, and woken, here.
void ThreadPool::wakeSleepers() {
    if (_sleeping.load(std::memory_order_seq_cst) == 0) return;
    for (int worker = 1; worker < threads(); ++worker) {
        if (rise(worker)) _beds[worker - 1].wake.post();
    }
}

// Sleeps until there is something to look at, unless there is already.
void ThreadPool::sleep(int worker, uint64_t seen) {
    _sleeping.fetch_add(1, std::memory_order_seq_cst);
    _beds[worker - 1].taken.store(true, std::memory_order_seq_cst);
    const bool called = _generation.load(std::memory_order_seq_cst) != seen ||
                        _awake.load(std::memory_order_seq_cst) > 0 || _stop.load(std::memory_order_seq_cst);
    if (called && rise(worker)) return;
    _beds[worker - 1].wake.wait();
}

// Ends a worker's sleep. If several threads try at once, exactly one of them gets true.
bool ThreadPool::rise(int worker) {
    if (!_beds[worker - 1].taken.exchange(false, std::memory_order_seq_cst)) return false;
    _sleeping.fetch_sub(1, std::memory_order_relaxed);
    return true;
}

// Runs tasks until none is left to claim, then reports them.
void ThreadPool::drain(int worker) {
    int64_t done = 0;
    // Reads before it subtracts, so that threads that come late do not write.
    while (_unclaimed.load(std::memory_order_relaxed) > 0) {
        const int64_t left = _unclaimed.fetch_sub(1, std::memory_order_acquire);
        if (left <= 0) break;
        ++done;
        try {
            (*_body)(_tasks - left, worker);
        } catch (...) {
            // Tasks that have not begun are skipped: they count as done.
            const int64_t skipped = _unclaimed.exchange(0, std::memory_order_relaxed);
            if (skipped > 0) done += skipped;
            std::lock_guard<std::mutex> lock(_errorMutex);
            if (!_error) _error = std::current_exception();
        }
    }
    if (done == 0) return;
    // A caller that is about to sleep either sees that no task is left, or is seen, and woken, here.
    const bool last = _unfinished.fetch_sub(done, std::memory_order_seq_cst) == done;
    if (last && _callerSleeps.load(std::memory_order_seq_cst) &&
        _callerSleeps.exchange(false, std::memory_order_seq_cst)) {
        _ended.post();
    }
}

void ThreadPool::workerLoop(int worker) {
    uint64_t seen = 0;
    for (;;) {
        int spins = 0;
        while (_generation.load(std::memory_order_acquire) == seen && !_stop.load(std::memory_order_relaxed)) {
            if (++spins < kSpins) {
                relax();
                continue;
            }
            spins = 0;
            if (_awake.load(std::memory_order_relaxed) > 0) {
                std::this_thread::yield();  // if there are more threads than cores, one with work may run
                continue;
            }
            sleep(worker, seen);
        }
        if (_stop.load(std::memory_order_relaxed)) return;
        seen = _generation.load(std::memory_order_acquire);
        drain(worker);
    }
}

}  // namespace sharpi
