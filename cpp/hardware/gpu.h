// The way to the GPU, for builds with CUDA and without.
#pragma once

#include <memory>

#include "device/stream.h"
#include "operations/backend.h"

namespace sharpi {

// Throws Error(InvalidArgument) with the reason where there is none: no CUDA in this build, no driver, no device.
cuda::DeviceInfo findGpu();

// Throws Error(InvalidArgument) saying what of this model the GPU's kernels do not have; the CPU runs it.
void requireGpuCanRun(const ModelSpec& spec);

// vram: the most to take of its memory, in bytes; 0: all that is free. threads: for what the CPU computes meanwhile.
// Throws as findGpu() does.
std::unique_ptr<Backend> makeGpuBackend(size_t vram, int threads);

}  // namespace sharpi
