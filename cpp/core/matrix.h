// A weight matrix as kernels see it. Where the bytes came from is not a kernel's business.
#pragma once

#include "core/dtype.h"

namespace sharpi {

struct Matrix {
    DType type = DType::F32;
    int64_t rows = 0;            // outputs
    int64_t cols = 0;            // inputs; blocks of the format run along a row
    const uint8_t* data = nullptr;  // row r starts at data + r * rowBytes(type, cols)
};

}  // namespace sharpi
