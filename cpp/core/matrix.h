// A weight matrix as kernels see it. Kernels need not know where its bytes came from.
#pragma once

#include "core/dtype.h"

namespace sharpi {

struct Matrix {
    DType type = DType::F32;
    int64_t rows = 0;  // outputs
    int64_t cols = 0;  // inputs; blocks of the format run along a row
    // Row r starts at data + r * rowBytes(type, cols). A device may lay rows out otherwise: kernels/formats/packed.h.
    const uint8_t* data = nullptr;
};

// The bytes that it takes in a file.
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

// A layer's experts. Each computes down(activation(gate x, up x)). The three stacks may have different types. Experts
// without a gate have no `up`: it counts no matrices.
struct ExpertStacks {
    MatrixStack gate, up, down;
    bool gated() const { return up.count > 0; }
};

}  // namespace sharpi
