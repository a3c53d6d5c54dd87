// See gpu.h.
#include "engine/gpu.h"

#include "core/error.h"

#ifdef SHARPI_WITH_CUDA
#include "device/stream.h"
#include "engine/cuda_backend.h"
#endif

namespace sharpi {

#ifdef SHARPI_WITH_CUDA

GpuInfo findGpu() {
    const cuda::DeviceInfo d = cuda::findDevice();
    return {d.name, d.index, d.major, d.minor, d.multiprocessors, d.totalBytes, d.freeBytes};
}

std::unique_ptr<Backend> makeGpuBackend(size_t vram) { return std::make_unique<CudaBackend>(vram); }

#else

namespace {

[[noreturn]] void refuse() {
    throw Error(ErrorKind::InvalidArgument, "this build of Sharpi has no CUDA part (" SHARPI_CUDA_STATE ")");
}

}  // namespace

GpuInfo findGpu() { refuse(); }
std::unique_ptr<Backend> makeGpuBackend(size_t) { refuse(); }

#endif

}  // namespace sharpi
