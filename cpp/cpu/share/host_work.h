// What the host does beside one pass on a device, in the order of the pass's launches.
//
// Each run of a pass's launches fills an object of its own, which hands out the numbers that kernels and jobs meet by.
// So a captured pass owns its jobs and their numbers: nothing that another run did can be in them.
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
        AtOnce,  // beside launches that run: each job when it is added
        Later,   // beside launches that are captured: by run(), each time they are replayed
    };
    explicit HostWork(When when) : _when(when) {}

    // What the job waits for has been launched, or captured, before.
    void add(Job job) {
        if (_when == When::AtOnce) job();
        else _jobs.push_back(std::move(job));
    }
    void run() const {
        for (const Job& job : _jobs) job();
    }
    bool empty() const { return _jobs.empty(); }

    // The next value of each of HostShare's counters, which begin a pass at 0.
    uint32_t nextSent() { return ++_sent; }
    uint32_t nextInstructed() { return ++_instructed; }
    uint32_t nextReturned() { return ++_returned; }

private:
    When _when;
    std::vector<Job> _jobs;
    uint32_t _sent = 0, _instructed = 0, _returned = 0;
};

}  // namespace sharpi
