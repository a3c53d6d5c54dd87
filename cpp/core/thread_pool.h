// A fixed set of threads that share one loop at a time. Decoding runs some hundreds of short loops a token, so
// a worker spins briefly for the next loop before it sleeps, and the caller works too instead of waiting. Who runs loops
// further apart, between answers of a GPU, keeps the workers awake for as long as that takes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace sharpi {

class ThreadPool {
public:
    // threads: how many run a loop, the caller included; at least 1.
    // Throws Error(OutOfMemory) when the system refuses a thread; those started before it are joined.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return static_cast<int>(_workers.size()) + 1; }

    // Calls body(task, worker) once for every task in [0, tasks), in any order, worker in [0, threads()).
    // Returns when all have run. The first exception that a body throws is rethrown here; the remaining
    // tasks are then skipped. Not reentrant: a body must not call run(), and only one thread may call it.
    // Give it a std::ref where making a std::function would allocate.
    void run(int64_t tasks, const std::function<void(int64_t task, int worker)>& body);

    // While one lives, workers wait for the next loop without sleeping, those asleep are woken: for loops some 100 us or a few ms
    // apart that must begin at once. The pool must outlive it.
    class Awake {
    public:
        explicit Awake(ThreadPool& pool) : _pool(pool) { _pool.stayAwake(); }
        ~Awake() { _pool._awake.fetch_sub(1, std::memory_order_relaxed); }
        Awake(const Awake&) = delete;
        Awake& operator=(const Awake&) = delete;

    private:
        ThreadPool& _pool;
    };

    // Workers that are asleep now.
    int sleeping() const { return _sleeping.load(std::memory_order_relaxed); }

private:
    void stayAwake();
    void wakeSleepers();
    void workerLoop(int worker);
    void drain(int worker);

    const uint64_t _forks;  // of this process when the threads were started
    std::vector<std::thread> _workers;
    std::mutex _mutex;
    std::condition_variable _wake;
    std::atomic<int> _sleeping{0};

    // In lines of their own: what waiting workers look at all the time, what a loop is, and what changes during one.
    static constexpr size_t kApart = 128;  // processors fetch lines of 64 bytes in pairs
    alignas(kApart) std::atomic<uint64_t> _generation{0};
    std::atomic<bool> _stop{false};
    std::atomic<int> _awake{0};  // guards
    alignas(kApart) const std::function<void(int64_t, int)>* _body = nullptr;
    int64_t _tasks = 0;
    std::atomic<bool> _failed{false};
    std::exception_ptr _error;
    alignas(kApart) std::atomic<int64_t> _next{0};
    alignas(kApart) std::atomic<int> _busy{0};
};

}  // namespace sharpi
