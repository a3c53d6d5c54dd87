// How the thread that runs passes spends its time: it evaluates, or it does something else, which a device may hide.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>

namespace sharpi {

// Seconds since the backend was made. What is in neither is a thread's own work while no device has any: it is exposed.
struct HostTimes {
    double evaluating = 0;  // in which the thread computed, or waited for the device that did
    // In which it did something else after it had launched a pass, until it waited for that pass. A device that is done
    // sooner idles for a part of it, which nobody sees.
    double hidden = 0;
};

// Of one backend. The thread that has the model calls all but times(), which any thread may call.
class HostClock {
    using Clock = std::chrono::steady_clock;

public:
    // While one lives, the thread evaluates. One inside another changes nothing.
    class Evaluation {
    public:
        explicit Evaluation(HostClock& clock) : _clock(clock), _isOuter(!std::exchange(clock._evaluates, true)) {
            if (!_isOuter) return;
            const Clock::time_point before = std::exchange(_clock._from, Clock::now());
            if (_clock._deviceWorks) _clock._hidden += ticks(_clock._from - before);
        }
        ~Evaluation() {
            if (!_isOuter) return;
            const Clock::time_point before = std::exchange(_clock._from, Clock::now());
            _clock._evaluating += ticks(_clock._from - before);
            _clock._evaluates = false;
        }
        Evaluation(const Evaluation&) = delete;
        Evaluation& operator=(const Evaluation&) = delete;

    private:
        HostClock& _clock;
        const bool _isOuter;
    };

    // A device has work from now on.
    void launched() {
        if (!std::exchange(_deviceWorks, true)) _from = Clock::now();
    }
    // wait: waits for all that the device was given.
    template <typename Wait> void await(const Wait& wait) {
        {
            const Evaluation evaluation(*this);
            wait();
        }
        _deviceWorks = false;
    }
    HostTimes times() const { return {seconds(_evaluating), seconds(_hidden)}; }

private:
    static int64_t ticks(Clock::duration time) { return std::chrono::nanoseconds(time).count(); }
    static double seconds(int64_t ticks) { return 1e-9 * static_cast<double>(ticks); }

    std::atomic<int64_t> _evaluating{0}, _hidden{0};  // nanoseconds
    Clock::time_point _from;                          // when it began to evaluate, or the device to work
    bool _evaluates = false, _deviceWorks = false;
};

}  // namespace sharpi
