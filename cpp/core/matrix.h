// A weight matrix as kernels see it. Where the bytes came from is not a kernel's business.
#pragma once

#include "core/dtype.h"

namespace sharpi {

struct Matrix {
    DType type = DType::F32;
    int64_t rows = 0;  // outputs
    int64_t cols = 0;  // inputs; blocks of the format run along a row
    // Row r starts at data + r * rowBytes(type, cols); or, on a device, in the places of kernels/packed.h.
    const uint8_t* data = nullptr;
};

// What it takes in a file.
inline size_t fileBytes(const Matrix& m) { return rowBytes(m.type, m.cols) * static_cast<size_t>(m.rows); }

// Matrices of one shape, one after another: a layer's experts.
struct MatrixStack {
    Matrix first;
    size_t stride = 0;  // bytes from one matrix to the next
    int32_t count = 0;
    Matrix at(int32_t i) const {
        Matrix m = first;
        if (m.data) m.data += stride * static_cast<size_t>(i);
        return m;
    }
};

// A layer's experts: silu(gate x) * (up x) goes through down. Any of the three may be of a type of its own.
struct ExpertStacks {
    MatrixStack gate, up, down;
};

}  // namespace sharpi
