// The few calls through which the engine touches a device's memory: CUDA's, the host's, or a test's fake.
//
// Addresses and memory are taken separately, as virtual memory works on both processors. So an allocation can begin in
// the granule in which the one before it ended, and nothing is lost to rounding.
#pragma once

#include <cstddef>
#include <string>

namespace sharpi {

// Where host memory comes from that copies to and from a device are fast with. take() returns nullptr if there is none
// to be had. Without take(), any memory will do. They outlive the device's memory.
struct HostPages {
    void* (*take)(size_t bytes) noexcept = nullptr;
    void (*give)(void* memory, size_t bytes) noexcept = nullptr;
};

class DeviceMemory {
public:
    virtual ~DeviceMemory() = default;

    virtual std::string name() const = 0;    // for error messages: "the GPU", "this machine"
    virtual size_t granularity() const = 0;  // commit works in multiples of this; a power of two
    virtual size_t freeBytes() const = 0;    // what can still be committed, as the device itself says

    // A range of addresses without memory; bytes is a multiple of the granularity. Throws Error(OutOfMemory).
    virtual void* reserve(size_t bytes) = 0;
    virtual void release(void* address, size_t bytes) noexcept = 0;
    // Puts memory behind a part of a reserved range. Returns false, and changes nothing, if there is not enough.
    virtual bool commit(void* address, size_t bytes) = 0;
    // Whether committed memory reads as zero; if not, its contents are undefined. If it does, nobody writes zeroes to
    // it, so a system that hands out pages on first touch spends none on memory that is never used.
    virtual bool commitsZeroes() const { return false; }
    // Gives back what exactly one commit took.
    virtual void decommit(void* address, size_t bytes) noexcept = 0;

    virtual HostPages hostPages() const { return {}; }
    virtual void upload(void* to, const void* host, size_t bytes) = 0;
    virtual void download(void* host, const void* from, size_t bytes) = 0;
    virtual void zero(void* address, size_t bytes) = 0;
};

}  // namespace sharpi
