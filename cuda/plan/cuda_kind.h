// CUDA's GPUs as a kind of device. No CUDA here: plans are made on machines without a GPU.
#pragma once

#include "operations/device_kind.h"

namespace sharpi {

const DeviceKind& cudaKind();

}  // namespace sharpi
