// How every kernel is launched: counted, checked, and able to overlap its predecessor's end.
//
// A kernel's blocks may be started while the kernel before it is still running. So every kernel begins with
// allowNext() and, before it reads what another kernel wrote or writes anything that one may still read,
// waitForPrevious(). Only weights may be touched earlier: fetching the first of them there hides the gap between two
// kernels. Weights that are on their way while a pass runs are waited for by an event, and the kernel after such a wait
// is launched without the overlap (Stream::overlapsLaunches): it fetches nothing before they have come.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "core/error.h"
#include "device/stream.h"

namespace sharpi::cuda {

inline void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // a sticky-free error must not surface in a later, innocent call
    const ErrorKind kind = status == cudaErrorMemoryAllocation ? ErrorKind::OutOfMemory : ErrorKind::Internal;
    throw Error(kind, std::string("CUDA: ") + what + ": " + cudaGetErrorString(status));
}

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

// `cluster` neighbouring blocks of a row of the grid form a cluster (kernels/cluster.cuh); 1: there are none.
// sharedBytes: dynamic shared memory; past 48 KiB the kernel's limit must have been raised (allowShared).
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
    check(cudaLaunchKernelEx(&config, kernel, Parameters(std::forward<Arguments>(arguments))...), "a kernel launch");
    stream.countLaunch();
}

template <typename... Parameters, typename... Arguments>
void launch(Stream& stream, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t sharedBytes,
            Arguments&&... arguments) {
    launchClusters(stream, kernel, 1, grid, block, sharedBytes, std::forward<Arguments>(arguments)...);
}

// Lets `kernel` use more than 48 KiB of dynamic shared memory.
template <typename Kernel> void allowShared(Kernel kernel, size_t bytes) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
          "shared memory");
}

#endif

}  // namespace sharpi::cuda
