// What of the process' memory kernels may reach: allocations of the device, pinned host memory, mapped ranges.
//
// The device's memory is the host's. Allocations lie far apart, so that an access past the end of one hits none.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <shared_mutex>

namespace sharpi::emulator {

struct Range {
    uintptr_t begin = 0;
    size_t bytes = 0;
    bool readOnly = false;
};

class DeviceMemory {
public:
    static DeviceMemory& instance();

    // Uninitialized and aligned to 256 bytes; null if there is not so much.
    void* take(size_t bytes);
    // False if it was not taken, or already given back.
    bool release(void* address);

    // Memory that somebody else owns.
    bool add(const void* address, size_t bytes, bool readOnly = false);
    bool remove(const void* address);

    // The range with this address, or one of no bytes.
    Range find(uintptr_t address) const;

    size_t totalBytes() const { return _total; }
    size_t freeBytes() const;
    void countMapped(int64_t bytes) { _used += bytes; }

private:
    DeviceMemory();
    mutable std::shared_mutex _mutex;
    std::map<uintptr_t, Range> _ranges;
    size_t _total;
    std::atomic<int64_t> _used{0};
};

}  // namespace sharpi::emulator
