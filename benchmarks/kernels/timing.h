// What the benchmarks of kernels share: the checks of CUDA's calls and the time of a captured step.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "device/stream.h"

namespace sharpi {

// Bytes a second that a kernel which only reads gets out of an H200's memory.
constexpr double kReadBytesPerSecond = 4559e9;
// Enough for data not to be in the second-level cache when it is read again.
constexpr size_t kBeyondCache = size_t{400} << 20;

// Throws std::runtime_error with CUDA's message.
inline void require(cudaError_t status) {
    if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// The median time, in seconds, of replaying what `body` launches.
inline double measure(cuda::Stream& stream, const std::function<void()>& body) {
    const std::unique_ptr<cuda::Graph> graph = stream.capture(body);
    cudaEvent_t begin, end;
    require(cudaEventCreate(&begin));
    require(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < 12; ++i) {
        require(cudaEventRecord(begin, stream.handle()));
        stream.replay(*graph);
        require(cudaEventRecord(end, stream.handle()));
        require(cudaEventSynchronize(end));
        float ms = 0;
        require(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 2) times.push_back(ms);
    }
    require(cudaEventDestroy(begin));
    require(cudaEventDestroy(end));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] / 1e3;
}

}  // namespace sharpi
