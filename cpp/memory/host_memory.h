// The machine's own memory as a DeviceMemory: the CPU backend's, and the base of the fake device of the tests.
// The system hands pages out as they are first touched, so a long context costs what is used of it.
#pragma once

#include "memory/device_memory.h"

namespace sharpi {

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
