// The forms in which activations pass between kernels, and the kernels that convert between them.
#pragma once

#include <cstdint>

#include "core/rules/activation.h"
#include "device/stream.h"

namespace sharpi::cuda {

// The fewest rows whose products are made on the int8 tensor cores, and the most of a launch.
constexpr int kMmaFromRows = 5, kMostWideRows = 512;

// Quantized rows as products on the int8 tensor cores read them: what a tile copies at once lies side by side. 32 rows
// ("columns") make a *bundle*. For each block of a bundle there are:
// - codes: the first halves of all columns' blocks, 16 bytes each, then the second halves;
// - ends, kFields for each column: their scales; then these times the blocks' sums; then times the sums of the first
//   halves; of the second.
// There are whole bundles. Columns past the last row may hold anything: what becomes of them is dropped.
struct WideColumns {
    static constexpr int kBundle = 32, kFields = 4, kCodeBytes = kBundle * 32, kEndFloats = kBundle * kFields;
    uint8_t* codes = nullptr;  // null: there is no room for them
    float* ends = nullptr;
    int32_t first = 0;  // the column of the first row
    // Whether what writes the rows writes their columns, too. Otherwise, products arrange them in one more launch.
    bool written = false;
};

// Activations, quantized as core/contract.h says in section 1. cols is a multiple of 32, B = cols / 32.
struct QuantizedRows {
    int8_t* q = nullptr;     // [rows][2][B][16]: the first 16 elements of every block, then the last 16 of every block
    float* scale = nullptr;  // [rows][B]
    // [rows][B]: the sum of the first 16 elements in the low half and of the last 16 in the high half (int16 each)
    int32_t* sums = nullptr;
    // Room for kMostWideRows rows, or for all; none if there are fewer than kMmaFromRows.
    WideColumns wide = {};
};

// Activations for the tensor cores: bf16 [rows][cols] (f16 on devices before 8.0, which lack bf16 units). lo, if it is
// not null, is the remainder of the rounding: hi + lo has 16 bits of the value. Both are 16-byte aligned.
struct HalfRows {
    uint16_t* hi = nullptr;
    uint16_t* lo = nullptr;
};

// The forms that a kernel writes. A null form is not requested.
struct RowOutputs {
    float* floats = nullptr;  // [rows][cols]
    QuantizedRows quantized;
    HalfRows half;
};

// The answer of a shared expert, which every row uses. It is added to the row's sum over its chosen experts, as
// sigmoid(scale[t]) * y[t, :] by one fma. If y is null, there is none.
struct SharedAnswer {
    const float* y = nullptr;      // [rows, cols]
    const float* scale = nullptr;  // [rows]; null: the factor is 1
};

// How the answers of a row's chosen experts are summed: += weight[p] * (answer[p, :] + bias[expert[p], :]).
struct AnswerTerms {
    const float* bias = nullptr;      // [experts, cols], or null
    const int32_t* expert = nullptr;  // by pair; needed with a bias
    bool adds = true;                 // the sum is added to the row; else it replaces the row
};

// What joins the gates and ups of a feed-forward part, in the order of core/rules/activation.h. Rows may be pairs of a
// row and an expert, whose numbers are `pairAt[row]`, or the row itself if that is null.
struct GatedJoin {
    Activation activation;
    const float *gateBias = nullptr, *upBias = nullptr;  // [hidden], or [experts, hidden]; null: none
    const int32_t* expert = nullptr;                     // by pair: the row of the biases; null: the first
    const float* weight = nullptr;                       // by pair: multiplies both products; null: 1
    const int32_t* pairAt = nullptr;
    // Of gatedActivation() alone:
    int64_t upStride = 0;  // from one row of `up` to the next; 0: as long as a row
    bool gated = true;     // false: there is no `up`
};

// The same rows from row `row` on. Absent forms stay absent. A row of halves keeps its alignment if cols is a multiple
// of 8.
inline QuantizedRows rowsFrom(const QuantizedRows& rows, int64_t row, int64_t cols) {
    QuantizedRows rest = rows;
    if (rest.q) rest.q += row * cols;
    if (rest.scale) rest.scale += row * (cols / 32);
    if (rest.sums) rest.sums += row * (cols / 32);
    rest.wide.first += static_cast<int32_t>(row);
    return rest;
}
inline HalfRows rowsFrom(const HalfRows& rows, int64_t row, int64_t cols) {
    HalfRows rest = rows;
    if (rest.hi) rest.hi += row * cols;
    if (rest.lo) rest.lo += row * cols;
    return rest;
}
inline RowOutputs rowsFrom(const RowOutputs& rows, int64_t row, int64_t cols) {
    RowOutputs rest;
    rest.floats = rows.floats ? rows.floats + row * cols : nullptr;
    rest.quantized = rowsFrom(rows.quantized, row, cols);
    rest.half = rowsFrom(rows.half, row, cols);
    return rest;
}
inline SharedAnswer rowsFrom(const SharedAnswer& rows, int64_t row, int64_t cols) {
    SharedAnswer rest;
    if (rows.y) rest = {rows.y + row * cols, rows.scale ? rows.scale + row : nullptr};
    return rest;
}

size_t quantizedRowsBytes(int64_t rows, int64_t cols);
QuantizedRows quantizedRowsOver(void* buffer, int64_t rows, int64_t cols);  // 256-byte aligned buffer

// out row t = rmsNorm of row (rowIndex ? rowIndex[t] : t) of x, with row t % weightRows of weight, and the bits of the
// CPU's rmsNorm. weight: null: weights of 1. Each weightRows of the rows are one row of int8 blocks.
void rmsNorm(Stream& stream, const float* x, const int32_t* rowIndex, const float* weight, float eps, int64_t rows,
             int64_t cols, const RowOutputs& out, int32_t weightRows = 1);
// x *= factor, over n elements.
void scaleRows(Stream& stream, float* x, int64_t n, float factor);
// x = portableSoftcap(x, cap), over n elements.
void softcap(Stream& stream, float* x, int64_t n, float cap);
// y[t] = weight . x[t, :], with the bits of the contract's float products.
void rowDots(Stream& stream, const float* x, const float* weight, int64_t rows, int64_t cols, float* y);
// Writes x [rows, cols] in the requested forms; out.floats may be x.
void convertRows(Stream& stream, const float* x, int64_t rows, int64_t cols, const RowOutputs& out);
// activation(gate, up) in the requested forms, with the bits of the CPU's gatedActivation. gate, up: [rows, cols]. If
// the join is not gated, `up` is not read. out.floats may be gate.
void gatedActivation(Stream& stream, const GatedJoin& join, const float* gate, const float* up, int64_t rows,
                     int64_t cols, const RowOutputs& out);

}  // namespace sharpi::cuda
