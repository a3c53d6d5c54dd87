// How every kernel is launched: counted, checked, and able to overlap its predecessor's end.
//
// A kernel's blocks may start while the kernel before it is still running. So every kernel begins with allowNext(), and
// it calls waitForPrevious() before it reads what another kernel wrote, or writes what another kernel may still read.
// Only weights and a batch's numbers (BatchRows), which are uploaded before its first kernel, may be read earlier: that
// hides the gap between two kernels. If weights arrive while a pass runs, the stream waits for an event, and the kernel
// after such a wait is launched without the overlap (Stream::overlapsLaunches), so that it fetches nothing too early.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "core/error.h"
#include "device/stream.h"

namespace sharpi::cuda {

// The errors after which every further call of the process fails, by their descriptions in the CUDA Runtime API.
inline bool isLost(cudaError_t status) {
    switch (status) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorExternalDevice: return true;
    default: return false;
    }
}

// words: of the error after which the device is lost.
inline Error lostDevice(const std::string& words) {
    return {ErrorKind::DeviceLost, words + "; the GPU does nothing more in this process: start it again"};
}

inline void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // clears it, or a later call would report it
    const std::string words = std::string("CUDA: ") + what + ": " + cudaGetErrorString(status);
    if (isLost(status)) throw lostDevice(words);
    throw Error(status == cudaErrorMemoryAllocation ? ErrorKind::OutOfMemory : ErrorKind::Internal, words);
}

// Kernels that read the same inputs, launched one after the other, can run together. The first lets the next one start
// when its own inputs are there, and the later ones wait only at their end. So all are over when the last one is.
enum class Together : uint8_t { Alone, First, Later };

#ifdef __CUDACC__

__device__ __forceinline__ void waitForPrevious() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

__device__ __forceinline__ void allowNext() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// What a kernel that takes part in it calls at its beginning (instead of allowNext()), before it reads its inputs, and
// when it has written all of its outputs (instead of waitForPrevious()).
__device__ __forceinline__ void beginTogether(Together order) {
    if (order != Together::First) allowNext();
}
__device__ __forceinline__ void awaitTogether(Together order) {
    if (order != Together::Later) waitForPrevious();
    if (order == Together::First) allowNext();
}
__device__ __forceinline__ void endTogether(Together order) {
    if (order == Together::Later) waitForPrevious();
}

// `cluster` neighbouring blocks in a row of the grid form a cluster (kernels/delta/cluster.cuh); 1 means no clusters.
// sharedBytes: dynamic shared memory. More than 48 KiB needs allowShared() first.
template <typename... Parameters, typename... Arguments>
void launchClusters(Stream& stream, void (*kernel)(Parameters...), unsigned cluster, dim3 grid, dim3 block,
                    size_t sharedBytes, Arguments&&... arguments) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = sharedBytes;
    config.stream = stream.handle();
    cudaLaunchAttribute attributes[2] = {};
    config.attrs = attributes;
    if (stream.overlapsLaunches()) {
        cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
        overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        overlap.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        cudaLaunchAttribute& together = attributes[config.numAttrs++];
        together.id = cudaLaunchAttributeClusterDimension;
        together.val.clusterDim.x = cluster;
        together.val.clusterDim.y = together.val.clusterDim.z = 1;
    }
    check(cudaLaunchKernelEx(&config, kernel, Parameters(std::forward<Arguments>(arguments))...), "launching a kernel");
    stream.countLaunch();
}

template <typename... Parameters, typename... Arguments>
void launch(Stream& stream, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t sharedBytes,
            Arguments&&... arguments) {
    launchClusters(stream, kernel, 1, grid, block, sharedBytes, std::forward<Arguments>(arguments)...);
}

// Bytes of shared memory that the system takes for each resident block.
constexpr int kReservedShared = 1024;

// Lets `kernel` use this much dynamic shared memory, which may be more than 48 KiB. The limit belongs to the kernel on
// the calling thread's device, so it is set before each launch and never remembered: every device has its own, and
// another stream may have set a lower one.
template <typename Kernel> void allowShared(Kernel kernel, size_t bytes) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
          "raising a kernel's limit of shared memory");
}

#endif

}  // namespace sharpi::cuda
