// The GPU's memory as a DeviceMemory. Addresses are reserved, and memory is put behind them, by the driver's virtual
// memory management. cudaMalloc is not an option, because it rounds sizes up: 64 allocations of slightly more than
// 17 MiB waste 63 MiB. Copies and clearing go through the stream, in order with the kernels. No CUDA header.
#pragma once

#include <memory>

#include "device/stream.h"
#include "memory/device_memory.h"

namespace sharpi::cuda {

// If the driver refuses anything but memory, the call throws Error(Internal) with the driver's message. Any thread may
// use it, one at a time.
class CudaMemory : public DeviceMemory {
public:
    // The memory of the stream's device. Throws Error(InvalidArgument) if the device or its driver cannot manage
    // virtual memory.
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
    HostPages hostPages() const override;  // page-locked
    void upload(void* to, const void* host, size_t bytes) override;
    void download(void* host, const void* from, size_t bytes) override;
    void zero(void* address, size_t bytes) override;

private:
    struct Driver;  // the driver's entry points

    Stream& _stream;
    std::unique_ptr<Driver> _driver;
    size_t _granularity = 0;
};

}  // namespace sharpi::cuda
