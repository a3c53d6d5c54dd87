// Parts of the mapped files, by how they are read: what a device pins before it fetches from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sharpi {

// Host memory.
struct HostRange {
    const uint8_t* begin = nullptr;
    size_t bytes = 0;
};

struct HostRanges {
    std::vector<HostRange> always;  // in every pass
    std::vector<HostRange> once;    // until all resident weights have arrived
    // In full passes (weight_group.h), and by kernels where they can reach them. May be larger than memory.
    std::vector<HostRange> optional;
};

}  // namespace sharpi
