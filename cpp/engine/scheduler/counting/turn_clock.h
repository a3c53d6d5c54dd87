// Times the thread's own work in its turns.
#pragma once

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/scheduler/counting/counts.h"
#include "operations/backend.h"

namespace sharpi {

class TurnClock {
public:
    explicit TurnClock(const Backend& backend) : _backend(backend), _times(backend.hostTimes()) {}

    // What was the thread's own work since the last lap. What another thread evaluates meanwhile is taken off too.
    HostSeconds lap() {
        const auto now = std::chrono::steady_clock::now();
        const double seconds = std::chrono::duration<double>(now - std::exchange(_from, now)).count();
        const HostTimes times = _backend.hostTimes(), before = std::exchange(_times, times);
        const double own = std::max(seconds - (times.evaluating - before.evaluating), 0.0);
        return {own, std::min(times.hidden - before.hidden, own)};
    }

private:
    const Backend& _backend;
    std::chrono::steady_clock::time_point _from = std::chrono::steady_clock::now();
    HostTimes _times;
};

}  // namespace sharpi
