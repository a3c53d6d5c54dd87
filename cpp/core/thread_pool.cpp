// See thread_pool.h. A loop is published by raising _generation; it is over when every worker has left it, so
// that the next loop's fields can be written without a worker still reading this one's.
#include "core/thread_pool.h"

#include <pthread.h>

#include <system_error>

#include "core/error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sharpi {

namespace {

// About 50 microseconds: longer than the gaps between the loops of one token, shorter than a person notices as heat.
constexpr int kSpins = 4000;

// Threads do not survive a fork: a pool made before one must not be waited for after it.
std::atomic<uint64_t> forks{0};

uint64_t forksSoFar() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
    (void)registered;
    return forks.load(std::memory_order_relaxed);
}

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) : _forks(forksSoFar()) {
    if (threads < 1) {
        throw Error(ErrorKind::InvalidArgument, "threads must be at least 1, got " + std::to_string(threads));
    }
    _workers.reserve(threads - 1);
    try {
        for (int worker = 1; worker < threads; ++worker) {
            _workers.emplace_back([this, worker] { workerLoop(worker); });
        }
    } catch (const std::system_error& e) {
        const size_t started = _workers.size();
        {
            std::lock_guard<std::mutex> lock(_mutex);
            _stop = true;
        }
        _wake.notify_all();
        for (auto& thread : _workers) thread.join();
        throw Error(ErrorKind::OutOfMemory, "the system refused thread " + std::to_string(started + 2) + " of " +
                                                std::to_string(threads) + ": ask for fewer threads");
    }
}

ThreadPool::~ThreadPool() {
    if (_forks != forksSoFar()) {
        for (auto& thread : _workers) thread.detach();
        return;
    }
    {
        std::lock_guard<std::mutex> lock(_mutex);
        _stop = true;
    }
    _wake.notify_all();
    for (auto& thread : _workers) thread.join();
}

void ThreadPool::run(int64_t tasks, const std::function<void(int64_t, int)>& body) {
    if (tasks <= 0) return;
    if (_workers.empty() || tasks == 1) {
        for (int64_t task = 0; task < tasks; ++task) body(task, 0);
        return;
    }
    if (_forks != forksSoFar()) {
        throw Error(ErrorKind::InvalidArgument, "a model cannot be used in a process forked after it was loaded: load it there");
    }
    _body = &body;
    _tasks = tasks;
    _next.store(0, std::memory_order_relaxed);
    _failed.store(false, std::memory_order_relaxed);
    _error = nullptr;
    _busy.store(static_cast<int>(_workers.size()), std::memory_order_relaxed);
    _generation.fetch_add(1, std::memory_order_seq_cst);
    wakeSleepers();
    drain(0);
    for (int spins = 0; _busy.load(std::memory_order_acquire) > 0; ++spins) {
        if (spins < kSpins) relax();
        else std::this_thread::yield();
    }
    if (_error) std::rethrow_exception(_error);
}

void ThreadPool::stayAwake() {
    _awake.fetch_add(1, std::memory_order_seq_cst);
    if (_forks == forksSoFar()) wakeSleepers();
}

// To be called after a change that ends their sleep. Either the change is seen by who is about to sleep, or who sleeps by us.
void ThreadPool::wakeSleepers() {
    if (_sleeping.load(std::memory_order_seq_cst) == 0) return;
    std::lock_guard<std::mutex> lock(_mutex);
    _wake.notify_all();
}

void ThreadPool::drain(int worker) {
    for (;;) {
        const int64_t task = _next.fetch_add(1, std::memory_order_relaxed);
        if (task >= _tasks || _failed.load(std::memory_order_relaxed)) return;
        try {
            (*_body)(task, worker);
        } catch (...) {
            std::lock_guard<std::mutex> lock(_mutex);
            if (!_error) _error = std::current_exception();
            _failed.store(true, std::memory_order_relaxed);
        }
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
                std::this_thread::yield();  // where there are more threads than cores, to one with work
                continue;
            }
            std::unique_lock<std::mutex> lock(_mutex);
            _sleeping.fetch_add(1, std::memory_order_seq_cst);
            _wake.wait(lock, [&] {
                return _generation.load(std::memory_order_seq_cst) != seen || _awake.load(std::memory_order_seq_cst) > 0 || _stop;
            });
            _sleeping.fetch_sub(1, std::memory_order_relaxed);
        }
        if (_stop.load(std::memory_order_relaxed)) return;
        ++seen;  // run() waits for every worker, so generations are never skipped
        drain(worker);
        _busy.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace sharpi
