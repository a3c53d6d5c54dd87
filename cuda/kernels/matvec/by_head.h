// Products with a matrix that has the same number of rows for each head, of which each reads its own piece of the
// input: bit for bit as core/contract.h defines them, for any number of rows.
#pragma once

#include "kernels/matvec/matvec.h"

namespace sharpi::cuda {

struct HeadRows {
    Matrix w;  // packed: rows [begin, begin + w.rows) of the whole, which may cut heads
    int64_t begin = 0;
    int64_t rowsOfHead = 0;  // of the whole
    int32_t heads = 0;
    int64_t stride = 0;  // of y
};

// Throws Error(Internal) if the rows do not fit the matrix.
void requireHeadRows(const HeadRows& weights);

// y[(t * heads + h) * stride + i] = row h * rowsOfHead + i of the whole times piece t * heads + h of x, for the rows
// that w has. x: [rows * heads, w.cols].
void matvecByHead(Stream& stream, const MatvecInput& x, int64_t rows, const HeadRows& weights, float* y);

}  // namespace sharpi::cuda
