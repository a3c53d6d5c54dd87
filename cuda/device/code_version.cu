// See code_version.h. All kernels are compiled for the same architectures, so asking about one of them, which does
// nothing, is enough.
#include "device/code_version.h"

#include <cuda_runtime.h>

namespace sharpi::cuda {

namespace {

__global__ void probe() {}

}  // namespace

int codeVersion(const char** problem) {
    cudaFuncAttributes attributes = {};
    const cudaError_t status = cudaFuncGetAttributes(&attributes, probe);
    if (status == cudaSuccess) return attributes.ptxVersion;
    cudaGetLastError();
    const bool isMissing = status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
                           status == cudaErrorUnsupportedPtxVersion;
    if (!isMissing) *problem = cudaGetErrorString(status);
    return 0;
}

}  // namespace sharpi::cuda
