// Measures the GPU and the bus to it, with the kernels and copies that a model's steps consist of. See
// hardware_probe.h.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "core/matrix.h"
#include "device/cuda_memory.h"
#include "device/stream.h"
#include "hardware/hardware_probe.h"

namespace sharpi {

class CudaProbe {
public:
    // Takes up to `most` bytes of pinned memory and about as much of the GPU's. Throws Error(OutOfMemory) if too little
    // is free.
    CudaProbe(const cuda::DeviceInfo& gpu, size_t most);
    CudaProbe(const CudaProbe&) = delete;
    CudaProbe& operator=(const CudaProbe&) = delete;

    // Copies to the GPU without a gap until enough() is true, which it asks after every 64 MiB. It then waits for the
    // copies that it has started. Any thread may call it; it sleeps while the copies run. Returns at least one span.
    std::vector<Span> copies(const std::function<bool()>& enough);
    // These take one sample.
    double pcieBytesPerSecond();
    double vramBytesPerSecond();
    double kernelSeconds();
    double flops();

private:
    void takePinned(size_t bytes);
    void takeWeights(size_t most);
    void takeRows(size_t most);
    void fillFromPinned(const Buffer& buffer);
    Matrix matrix(size_t index) const;
    double secondsOf(const std::function<void()>& launch);
    double secondsOfGraph(const std::function<void()>& body);

    cuda::Stream _stream;
    cuda::CudaMemory _memory;
    Allocator _allocator;
    std::unique_ptr<cuda::PinnedBuffer> _pinned;
    size_t _copied = 0;  // pieces so far
    Buffer _ring, _weights, _row, _rows, _results;
    size_t _count = 0;   // matrices in _weights
    int64_t _batch = 0;  // rows of the products that flops() measures
};

}  // namespace sharpi
