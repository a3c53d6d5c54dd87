// The CPU as a kind of device.
#pragma once

#include "operations/device_kind.h"

namespace sharpi {

const DeviceKind& cpuKind();

}  // namespace sharpi
