// The machine's own memory as a DeviceMemory: the CPU backend's, and the base of the fake device of the tests.
// The system hands pages out as they are first touched, so a long context costs what is used of it.
#pragma once

#include <cstdint>
#include <string>

#include "memory/device_memory.h"

namespace sharpi {

// Bytes that this process can still have without swapping: the least of what the machine has and of what the process's
// control groups (a container's limit) leave. SIZE_MAX where the system does not say.
struct MemoryRoom {
    size_t available = SIZE_MAX;  // with the pages of files that others can do without
    // For pages of mapped files: also those of files that are nowhere but in memory. They are there already, and not
    // `available`.
    size_t forFiles = SIZE_MAX;
};
// The folders: where the system tells of its processes and of control groups.
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
