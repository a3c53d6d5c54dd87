// A fixed set of threads that share one loop at a time. Decoding runs some hundreds of short loops a token, so
// a worker spins briefly for the next loop before it sleeps, and the caller works too instead of waiting. A loop ends
// when its tasks are done, no matter which threads did them: a worker that the system does not schedule delays nobody,
// unless it holds a task. A caller whose loops are further apart, because it waits for a GPU in between, keeps the
// workers awake meanwhile (Awake).
#pragma once

#include <semaphore.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace sharpi {

// Forks of this process and of those that it was forked from. Threads do not survive a fork: in the child nobody may
// wait for threads that were started before it.
uint64_t forksSoFar();

class ThreadPool {
public:
    // threads: the number that run a loop, including the caller; at least 1.
    // Throws Error(OutOfMemory) if the system refuses a thread; the threads started before it are joined.
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return static_cast<int>(_workers.size()) + 1; }

    // Calls body(task, worker) once for every task in [0, tasks), in any order, worker in [0, threads()).
    // Tasks begin in ascending order, so a body may wait for a task with a lower number. A worker may get no task.
    // Returns when all tasks have run; no thread touches the body after that. The first exception that a body throws is
    // rethrown here, and tasks that have not begun by then are skipped. Not reentrant: a body must not call run(), and
    // only one thread may call it. Pass a std::ref if making a std::function would allocate.
    void run(int64_t tasks, const std::function<void(int64_t task, int worker)>& body);

    // While one exists, workers wait for the next loop without sleeping, and sleeping workers are woken: for loops that
    // must begin at once although they are 100 us to a few ms apart. The pool must outlive it.
    class Awake {
    public:
        explicit Awake(ThreadPool& pool) : _pool(pool) { _pool.stayAwake(); }
        ~Awake() { _pool._awake.fetch_sub(1, std::memory_order_relaxed); }
        Awake(const Awake&) = delete;
        Awake& operator=(const Awake&) = delete;

    private:
        ThreadPool& _pool;
    };

    // Within the life of an Awake: while one exists, workers may sleep. For a wait of milliseconds, such as for a disk.
    class Resting {
    public:
        explicit Resting(ThreadPool& pool) : _pool(pool) { _pool._awake.fetch_sub(1, std::memory_order_relaxed); }
        ~Resting() { _pool.stayAwake(); }
        Resting(const Resting&) = delete;
        Resting& operator=(const Resting&) = delete;

    private:
        ThreadPool& _pool;
    };

    // The number of workers that sleep. A worker that was woken no longer counts, even if it has no core yet.
    int sleeping() const { return _sleeping.load(std::memory_order_relaxed); }

private:
    // post() never waits. A condition variable would not do: notifying it may wait for a thread that was woken before
    // and is not scheduled.
    class Semaphore {
    public:
        Semaphore() { sem_init(&_semaphore, 0, 0); }
        ~Semaphore() { sem_destroy(&_semaphore); }
        Semaphore(const Semaphore&) = delete;
        Semaphore& operator=(const Semaphore&) = delete;
        void post() { sem_post(&_semaphore); }
        void wait() {
            while (sem_wait(&_semaphore) != 0) {
            }  // a signal interrupted it
        }

    private:
        sem_t _semaphore;
    };
    // Where one worker sleeps.
    struct Bed {
        std::atomic<bool> taken{false};
        Semaphore wake;
    };

    void stayAwake();
    void wakeSleepers();
    void workerLoop(int worker);
    void sleep(int worker, uint64_t seen);
    bool rise(int worker);
    void drain(int worker);
    void awaitTasks();
    void stopWorkers();

    const uint64_t _forks;  // of this process when the threads were started
    std::vector<std::thread> _workers;
    std::unique_ptr<Bed[]> _beds;  // one for each worker
    std::atomic<int> _sleeping{0};
    Semaphore _ended;  // wakes a caller that sleeps until the last task is done

    // Three groups in cache lines of their own: what waiting workers poll, what describes a loop, and what changes
    // during a loop.
    static constexpr size_t kApart = 128;                  // processors fetch lines of 64 bytes in pairs
    alignas(kApart) std::atomic<uint64_t> _generation{0};  // loops published so far
    std::atomic<bool> _stop{false};
    std::atomic<int> _awake{0};  // Awake objects
    // To be read only while holding a task; see thread_pool.cpp.
    alignas(kApart) const std::function<void(int64_t, int)>* _body = nullptr;
    int64_t _tasks = 0;
    std::mutex _errorMutex;
    std::exception_ptr _error;
    alignas(kApart) std::atomic<int64_t> _unclaimed{0};   // tasks that have not begun; 0 or less: none
    alignas(kApart) std::atomic<int64_t> _unfinished{0};  // tasks that are not yet reported as done
    std::atomic<bool> _callerSleeps{false};
};

}  // namespace sharpi
