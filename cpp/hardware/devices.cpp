// See devices.h.
#include "hardware/devices.h"

#include "core/error.h"
#include "cpu/cpu_backend.h"
#include "cpu/cpu_kind.h"
#include "plan/cuda_kind.h"

#ifdef SHARPI_WITH_CUDA
#include "backend/cuda_backend.h"
#endif

namespace sharpi {

namespace {

#ifndef SHARPI_WITH_CUDA
[[noreturn]] void refuse() {
    throw Error(ErrorKind::InvalidArgument, "this build of Sharpi has no CUDA part (" SHARPI_CUDA_STATE ")");
}
#endif

std::unique_ptr<Backend> makeCudaBackend([[maybe_unused]] int ordinal, [[maybe_unused]] size_t memory,
                                         [[maybe_unused]] int threads) {
#ifdef SHARPI_WITH_CUDA
    return std::make_unique<CudaBackend>(ordinal, memory, threads);
#else
    refuse();
#endif
}

}  // namespace

const DeviceKind& deviceKind(const std::string& name) {
    for (const DeviceKind* kind : {&cpuKind(), &cudaKind()}) {
        if (name == kind->name()) return *kind;
    }
    throw Error(ErrorKind::InvalidArgument, "unknown device '" + name + "': known are cpu and cuda");
}

cuda::DeviceInfo findGpu([[maybe_unused]] int ordinal) {
#ifdef SHARPI_WITH_CUDA
    return cuda::findDevice(ordinal);
#else
    refuse();
#endif
}

std::unique_ptr<Backend> makeBackend(const Device& device, size_t memory, int threads) {
    if (device.kind == &cudaKind()) return makeCudaBackend(device.ordinal, memory, threads);
    if (device.kind == &cpuKind()) return std::make_unique<CpuBackend>(threads);
    throw Error(ErrorKind::Internal, "there is no backend for this kind of device");
}

}  // namespace sharpi
