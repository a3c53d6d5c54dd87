// What the host does beside one pass on a device, in the order of the pass's launches.
//
// Each run of a pass's launches fills an object of its own, which hands out the tickets that kernels and jobs wait for.
// So a captured pass owns its jobs and their tickets, and no other run can affect them.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace sharpi {

class HostWork {
public:
    using Job = std::function<void()>;
    enum class When {
        AtOnce,  // beside launches that run: add() runs the job
        Later,   // beside launches that are captured: run() runs all jobs at each replay
    };
    explicit HostWork(When when) : _when(when) {}

    // The kernels that the job waits for have been launched, or captured, before.
    void add(Job job) {
        if (_when == When::AtOnce) job();
        else _jobs.push_back(std::move(job));
    }
    void run() const {
        for (const Job& job : _jobs) job();
    }
    bool empty() const { return _jobs.empty(); }

    // The next ticket of each of HostShare's counters, which begin a pass at 0.
    uint32_t nextSent() { return ++_sent; }
    uint32_t nextInstructed() { return ++_instructed; }
    uint32_t nextReturned() { return ++_returned; }

private:
    When _when;
    std::vector<Job> _jobs;
    uint32_t _sent = 0, _instructed = 0, _returned = 0;
};

}  // namespace sharpi
