// Work that a client has done on the scheduler's thread, between passes.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>

namespace sharpi {

class Task {
public:
    // piece: called until it returns true. If it lacks memory, room is made and it is called again; anything else that
    // it throws ends the task.
    explicit Task(std::function<bool()> piece) : _piece(std::move(piece)) {}

    // Whether the task is over: nothing that `piece` names is used any more. Waits for it, up to `seconds`. Throws what
    // ended it.
    bool wait(double seconds) {
        std::unique_lock<std::mutex> lock(_mutex);
        if (!_changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return _isOver; })) return false;
        if (_error) std::rethrow_exception(_error);
        return true;
    }
    // No further piece is done; wait() says when the last one is.
    void cancel() { _isCancelled = true; }

    // For the scheduler's thread.
    bool isCancelled() const { return _isCancelled; }
    bool doPiece() { return _piece(); }
    void end(std::exception_ptr error = nullptr) {
        _piece = nullptr;
        {
            const std::lock_guard<std::mutex> lock(_mutex);
            _isOver = true;
            _error = std::move(error);
        }
        _changed.notify_all();
    }

private:
    std::function<bool()> _piece;  // the scheduler's thread's own
    std::atomic<bool> _isCancelled{false};
    std::mutex _mutex;  // guards the following
    std::condition_variable _changed;
    bool _isOver = false;
    std::exception_ptr _error;
};

}  // namespace sharpi
