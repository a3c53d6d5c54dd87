// What the benchmarks of the CPU's kernels share.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>

namespace sharpi::cpu {

// Memory as kernels take it; for std::free.
inline void* alignedBytes(size_t bytes) { return std::aligned_alloc(64, (bytes + 63) / 64 * 64); }

// Seconds of the best of the runs of `body` that begin within `budget` seconds, because others may use the machine.
template <class Body> double bestTime(double budget, const Body& body) {
    using Clock = std::chrono::steady_clock;
    const auto since = [](Clock::time_point begin) {
        return std::chrono::duration<double>(Clock::now() - begin).count();
    };
    const Clock::time_point start = Clock::now();
    double best = 1e9;
    do {
        const Clock::time_point begin = Clock::now();
        body();
        best = std::min(best, since(begin));
    } while (since(start) < budget);
    return best;
}

}  // namespace sharpi::cpu
