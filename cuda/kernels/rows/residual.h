// The residual stream between two products: what a part of a layer adds to it, and the norm of the sum that the next
// products read, in one launch and with the bits of the CPU (core/rules/norm.h).
#pragma once

#include "core/rules/norm.h"
#include "kernels/rows/rows.h"

namespace sharpi::cuda {

// x = (x + factor * norm(y)) * scale[0]. With a side, y = yNorm(y) + sideNorm(side) first. All norms are RMS norms.
struct PartTerms {
    float* y = nullptr;                                 // [rows, cols], not kept; null: there is no part
    const float* norm = nullptr;                        // [cols]; null: y stays as it is
    float* side = nullptr;                              // [rows, cols], not kept; null: none
    const float *yNorm = nullptr, *sideNorm = nullptr;  // [cols], with a side
    float eps = 0, factor = 1.0f;
    const float* scale = nullptr;  // [1]; null: 1
};

// What follows: nothing, the rows of x themselves in the requested forms, or their norm.
struct NextRows {
    enum class Kind : uint8_t { None, Copy, Rms, Layer };
    Kind kind = Kind::None;
    const float *weight = nullptr, *bias = nullptr;  // of a norm; the bias may be null
    float eps = 0;
};

// x: [rows, cols]. rowIndex: if it is not null, row t of `out` is that of row rowIndex[t] of x; only without a part.
// out.floats may be x if there is no rowIndex.
void addPart(Stream& stream, const PartTerms& part, float* x, const int32_t* rowIndex, const NextRows& next,
             int64_t rows, int64_t cols, const RowOutputs& out);

}  // namespace sharpi::cuda
