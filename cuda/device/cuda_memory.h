// The GPU's memory as a DeviceMemory: addresses are reserved, and memory put behind them, with the driver's virtual
// memory management, which cudaMalloc's rounding makes necessary (64 allocations of 17 MiB and a little take 63 MiB
// too much). Copies and clearing go through the stream, in order with the kernels. No CUDA header.
#pragma once

#include <memory>

#include "device/stream.h"
#include "memory/device_memory.h"

namespace sharpi::cuda {

// The driver refusing anything but memory is Error(Internal) with its words. May be used by any thread, one at a time.
class CudaMemory : public DeviceMemory {
public:
    // Of the stream's device. Throws Error(InvalidArgument) when it or its driver cannot manage virtual memory.
    explicit CudaMemory(Stream& stream);
    ~CudaMemory() override;
    CudaMemory(const CudaMemory&) = delete;
    CudaMemory& operator=(const CudaMemory&) = delete;

    std::string name() const override { return "the GPU"; }
    size_t granularity() const override { return _granularity; }
    size_t freeBytes() const override;
    void* reserve(size_t bytes) override;
    void release(void* address, size_t bytes) noexcept override;
    bool commit(void* address, size_t bytes) override;
    // Waits for the stream: a kernel may still be reading there.
    void decommit(void* address, size_t bytes) noexcept override;
    void upload(void* to, const void* host, size_t bytes) override;
    void download(void* host, const void* from, size_t bytes) override;
    void zero(void* address, size_t bytes) override;

private:
    struct Driver;  // its entry points

    Stream& _stream;
    std::unique_ptr<Driver> _driver;
    size_t _granularity = 0;
};

}  // namespace sharpi::cuda
