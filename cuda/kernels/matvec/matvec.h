// Products of packed weights with few rows, to the bit as core/contract.h defines them: decode's kernels.
#pragma once

#include <vector>

#include "core/launch_rows.h"
#include "core/matrix.h"
#include "kernels/rows/rows.h"

namespace sharpi::cuda {

// The most rows that one call takes. More rows that follow the contract take several calls.
constexpr int kMaxMatvecRows = kExactLaunchRows;

// What a product reads: float weights read `floats` [rows, cols], quantized ones `quantized`.
struct MatvecInput {
    const float* floats = nullptr;
    QuantizedRows quantized;
};

// The same rows from row `row` on.
inline MatvecInput rowsFrom(const MatvecInput& x, int64_t row, int64_t cols) {
    return {x.floats ? x.floats + row * cols : nullptr, rowsFrom(x.quantized, row, cols)};
}

struct MatvecOutput {
    Matrix w;  // packed
    const float* bias = nullptr;
    float* y = nullptr;  // row t at y + t * stride
    int64_t stride = 0;  // 0: w.rows
};

// y = w x + bias for all outputs (same cols, any types), in as few launches as there are types.
void matvec(Stream& stream, const MatvecInput& x, int rows, const std::vector<MatvecOutput>& outputs);
// residual += w x + bias; row t of residual at + t * stride (0: w.rows)
void matvecAdd(Stream& stream, const MatvecInput& x, int rows, const Matrix& w, const float* bias, float* residual,
               int64_t stride = 0);
// silu(gate x) * (up x) in the forms asked for (out.half is ignored). gate and up have the same type and shape: rows
// [begin, begin + gate.rows) of matrices of `hidden` rows (0: gate.rows), begin a multiple of 32. out's rows have
// `hidden` columns, of which those are written.
void matvecGated(Stream& stream, const MatvecInput& x, int rows, const Matrix& gate, const Matrix& up,
                 const RowOutputs& out, int64_t begin = 0, int64_t hidden = 0);

// A stack of expert matrices, each packed by itself.
using ExpertStack = MatrixStack;

// chosen: [rows, used], the experts of each row by rank; pair p = row * used + rank. expertGated and expertMatvec pass
// over pairs whose chosen[p] is negative: their outputs stay as they were. expertDownAdd needs all of them. Pair p's
// silu(gate x) * (up x), x the row of the pair, in the forms asked for ([rows * used, hidden]).
void expertGated(Stream& stream, const MatvecInput& x, int rows, const ExpertStack& gate, const ExpertStack& up,
                 const int32_t* chosen, int32_t used, const RowOutputs& out);
// y[p, :] = (expert chosen[p] of w) x[p or its row, :]: the general form, for stacks whose types differ.
// rowPerPair: x has one row a pair, else one a row.
void expertMatvec(Stream& stream, const MatvecInput& x, int rows, const ExpertStack& w, const int32_t* chosen,
                  int32_t used, bool rowPerPair, float* y);
// residual[t, :] += sum over ranks k ascending of weight[t, k] * (down x[t * used + k, :]), the sum starting at +0 by
// fma; then the shared answer.
void expertDownAdd(Stream& stream, const MatvecInput& x, int rows, const ExpertStack& down, const int32_t* chosen,
                   const float* weight, int32_t used, float* residual, const SharedAnswer& shared = {});

// One thread a product, straight from the file's layout (w.data: device memory, unpacked): what the fast kernels are
// tested against.
void matvecReference(Stream& stream, const MatvecInput& x, int rows, const Matrix& w, const float* bias, float* y);

}  // namespace sharpi::cuda
