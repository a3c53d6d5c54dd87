// The machine's own memory as a DeviceMemory: the CPU backend's, and the base of the tests' fake device.
// The system hands out pages on first touch, so a long context costs only what is used of it.
#pragma once

#include <cstdint>
#include <string>

#include "memory/device_memory.h"

namespace sharpi {

// The bytes that this process can still take without swapping: the least of what the machine has free and of what the
// process's control groups (a container's limits) leave. SIZE_MAX if the system does not say.
struct MemoryRoom {
    size_t available = SIZE_MAX;  // including cached pages of files, which the system can drop
    // For pages of mapped files: `available`, and the pages of files that exist in memory alone (shared memory), which
    // a mapping of such a file reads where they are.
    size_t forFiles = SIZE_MAX;
};
// The folders in which the system describes its processes and its control groups.
MemoryRoom memoryRoom(const std::string& processes = "/proc", const std::string& groups = "/sys/fs/cgroup");

class HostMemory : public DeviceMemory {
public:
    std::string name() const override { return "this machine"; }
    size_t granularity() const override;
    size_t freeBytes() const override;
    void* reserve(size_t bytes) override;
    void release(void* address, size_t bytes) noexcept override;
    bool commit(void* address, size_t bytes) override;
    bool commitsZeroes() const override { return true; }
    void decommit(void* address, size_t bytes) noexcept override;
    void upload(void* to, const void* host, size_t bytes) override;
    void download(void* host, const void* from, size_t bytes) override;
    void zero(void* address, size_t bytes) override;
};

}  // namespace sharpi
