// Work that a client has done on the scheduler's thread, between passes.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace sharpi {

class Task {
public:
    // A long task's pieces may hold memory that the last one gives back. A short task holds none and has one piece.
    enum class Length { Long, Short };

    // piece: called until it returns true. If it lacks memory, room is made and it is called again; anything else that
    // it throws ends the task.
    Task(std::function<bool()> piece, Length length) : _piece(std::move(piece)), _length(length) {}

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
    bool isLong() const { return _length == Length::Long; }
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
    const Length _length;
    std::atomic<bool> _isCancelled{false};
    std::mutex _mutex;  // guards the following
    std::condition_variable _changed;
    bool _isOver = false;
    std::exception_ptr _error;
};
using Tasks = std::vector<std::shared_ptr<Task>>;

// The tasks that the scheduler's thread has taken. All of it is that thread's.
class TaskQueue {
public:
    // Takes them all, or throws and takes none.
    void take(Tasks& submitted) {
        _tasks.insert(_tasks.end(), submitted.begin(), submitted.end());
        submitted.clear();
    }
    bool isEmpty() const { return _tasks.empty(); }
    // Whether a long task has begun: its pieces so far may hold memory, which it gives back soon.
    bool isUnderWay() const { return _isUnderWay; }

    // Ends those that are cancelled, does the short ones, and a piece of the first long one: two of these at a time
    // might hold what neither can do without. Returns whether there was a task. makeRoom: whether a piece that threw
    // this may be done again.
    template <typename MakeRoom> bool doPieces(const MakeRoom& makeRoom) {
        const bool any = !_tasks.empty();
        bool isOccupied = false;  // a long task had its piece: the next one waits, also if that was the last
        for (size_t i = 0; i < _tasks.size();) {
            const std::shared_ptr<Task> task = _tasks[i];
            const bool waits = task->isLong() && isOccupied;
            bool isOver = task->isCancelled();
            std::exception_ptr failed;
            if (!isOver && !waits) {
                isOver = doPiece(*task, makeRoom, failed);
                isOccupied = isOccupied || task->isLong();
            }
            if (task->isLong() && !waits) _isUnderWay = !isOver;
            if (!isOver) {
                ++i;
                continue;
            }
            _tasks.erase(_tasks.begin() + static_cast<Tasks::difference_type>(i));
            task->end(failed);
        }
        return any;
    }
    void endAll(const std::exception_ptr& error) {
        for (const auto& task : _tasks) task->end(error);
        _tasks.clear();
    }

private:
    // Returns whether the task is over; failed: what ended it.
    template <typename MakeRoom> bool doPiece(Task& task, const MakeRoom& makeRoom, std::exception_ptr& failed) {
        for (;;) {
            try {
                return task.doPiece();
            } catch (const std::exception& error) {
                if (!task.isCancelled() && makeRoom(error)) continue;
                failed = std::current_exception();
                return true;
            }
        }
    }

    Tasks _tasks;  // in the order in which they came
    bool _isUnderWay = false;
};

}  // namespace sharpi
