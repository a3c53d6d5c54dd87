// How a device keeps matrices.
#pragma once

#include <functional>

#include "core/matrix.h"

namespace sharpi {

struct DeviceLayout {
    std::function<size_t(const Matrix&)> bytes;  // what a matrix of this type and shape takes
    // Staging buffers on the device: rows pass through them as they are in the file, before they are rearranged.
    // 0: the device keeps the file's layout.
    int stages = 0;
};

}  // namespace sharpi
