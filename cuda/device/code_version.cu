// See code_version.h. All kernels are compiled for the same list, so one that does nothing tells for all.
#include "device/code_version.h"

#include <cuda_runtime.h>

namespace sharpi::cuda {

namespace {

__global__ void probe() {}

}  // namespace

int codeVersion() {
    cudaFuncAttributes attributes = {};
    if (cudaFuncGetAttributes(&attributes, probe) == cudaSuccess) return attributes.ptxVersion;
    cudaGetLastError();
    return 0;
}

}  // namespace sharpi::cuda
