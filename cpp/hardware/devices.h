// Finds kinds of devices by name, and makes their backends, in builds with CUDA and without.
#pragma once

#include <memory>
#include <string>

#include "device/stream.h"
#include "operations/backend.h"
#include "operations/device_kind.h"

namespace sharpi {

// Throws Error(InvalidArgument) for an unknown name.
const DeviceKind& deviceKind(const std::string& name);

// The GPU with this number, as the driver counts them. Throws Error(InvalidArgument) with the reason if there is none:
// no CUDA in this build, no driver, no device.
cuda::DeviceInfo findGpu(int ordinal);

// memory: the most to take of the device's, in bytes; 0: all that is free. threads: the CPU's; for a GPU, of what the
// CPU computes meanwhile. Throws as findGpu() does.
std::unique_ptr<Backend> makeBackend(const Device& device, size_t memory, int threads);

}  // namespace sharpi
