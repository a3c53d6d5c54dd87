// Measures the GPU and the way to it, with the kernels and copies that a model's steps are made of. See
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
    // Takes its memory, up to `most` bytes of pinned memory and about as much of the GPU's. Throws
    // Error(InvalidArgument) where there is no usable GPU, Error(OutOfMemory) where too little is free.
    explicit CudaProbe(size_t most);
    CudaProbe(const CudaProbe&) = delete;
    CudaProbe& operator=(const CudaProbe&) = delete;

    // Copies to the GPU, one after another without a gap, until `enough` says so, which is asked after every 64 MiB;
    // those given by then are waited for. For any thread: it sleeps while the copies run. At least one span.
    std::vector<Span> copies(const std::function<bool()>& enough);
    // One sample of each.
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
    Buffer _slots, _weights, _row, _rows, _results;
    size_t _count = 0;   // matrices
    int64_t _batch = 0;  // rows of a large product
};

}  // namespace sharpi
