// Products of packed weights with few rows, bit for bit as core/contract.h defines them: the kernels of decode.
#pragma once

#include <vector>

#include "core/matrix.h"
#include "kernels/rows/pair_groups.h"
#include "kernels/rows/rows.h"

namespace sharpi::cuda {

// The most rows that one call takes. More rows that follow the contract take several calls. A call is one launch for
// each type, unless the type is a float or the device lacks int8 tensor cores: then each eight rows take another.
// Before products on the int8 tensor cores, one more launch may arrange the rows as WideColumns.
constexpr int kMaxMatvecRows = kMostWideRows;

// The input of a product. Float weights read `floats` [rows, cols], quantized ones read `quantized`.
struct MatvecInput {
    const float* floats = nullptr;
    QuantizedRows quantized;
};

// The same input from row `row` on.
inline MatvecInput rowsFrom(const MatvecInput& x, int64_t row, int64_t cols) {
    return {x.floats ? x.floats + row * cols : nullptr, rowsFrom(x.quantized, row, cols)};
}

struct MatvecOutput {
    Matrix w;  // packed
    const float* bias = nullptr;
    float* y = nullptr;  // row t at y + t * stride
    int64_t stride = 0;  // 0: w.rows
};

// Whether products of `rows` rows with matrices of this type read the rows' columns, if there are any: then what writes
// the rows should write these.
bool readsColumns(const Stream& stream, DType type, int64_t rows);
// y = w x + bias for all outputs (same cols, any types), with one launch for each type.
void matvec(Stream& stream, const MatvecInput& x, int rows, const std::vector<MatvecOutput>& outputs);
// residual += w x + bias. Row t of residual is at residual + t * stride (0: w.rows).
void matvecAdd(Stream& stream, const MatvecInput& x, int rows, const Matrix& w, const float* bias, float* residual,
               int64_t stride = 0);
// activation(gate x, up x) in the requested forms (out.half is ignored). gate and up have the same type and shape. They
// are rows [begin, begin + gate.rows) of matrices with `hidden` rows (0: gate.rows); begin is a multiple of 32. out's
// rows have `hidden` columns, of which only these are written. join: without pairs; its biases are whole.
void matvecGated(Stream& stream, const MatvecInput& x, int rows, const Matrix& gate, const Matrix& up,
                 const RowOutputs& out, int64_t begin = 0, int64_t hidden = 0, const GatedJoin& join = {});

// A stack of expert matrices, each packed on its own.
using ExpertStack = MatrixStack;

// chosen: [rows, used], the experts of each row by rank; pair p = row * used + rank. expertGated and expertMatvec skip
// pairs whose chosen[p] is negative, and leave their outputs unchanged.
//
// groups: the same pairs, grouped by `chosen` (pair_groups.h), so that the pairs of an expert share its weights.
// Without groups, and for float weights, each pair reads them anew. The bits are the same.

// Whether enough pairs are likely to share an expert of this stack for groups to pay.
bool sharesExperts(const Stream& stream, const ExpertStack& w, int64_t rows, int32_t used);

// activation(gate x, up x) of every pair, with x the row of the pair, in the requested forms ([rows * used, hidden]).
// join.pairAt is not read.
void expertGated(Stream& stream, const MatvecInput& x, int rows, const ExpertStack& gate, const ExpertStack& up,
                 const int32_t* chosen, int32_t used, const RowOutputs& out, const GatedJoin& join = {},
                 const PairGroups& groups = {});
// y[p, :] = (expert chosen[p] of w) x[p or its row, :]. This is the general form, for stacks whose types differ.
// rowPerPair: x has a row for each pair; else it has one for each row.
void expertMatvec(Stream& stream, const MatvecInput& x, int rows, const ExpertStack& w, const int32_t* chosen,
                  int32_t used, bool rowPerPair, float* y, const PairGroups& groups = {});

// A plain product, straight from the file's layout (w.data: device memory, unpacked). The fast kernels are tested
// against it.
void matvecReference(Stream& stream, const MatvecInput& x, int rows, const Matrix& w, const float* bias, float* y);

}  // namespace sharpi::cuda
