// The forms in which activations pass between kernels, and the kernels that make one from another.
#pragma once

#include <cstdint>

#include "device/stream.h"

namespace sharpi::cuda {

// Activations as core/contract.h section 1 quantizes them. cols is a multiple of 32, B = cols / 32.
struct QuantizedRows {
    int8_t* q = nullptr;     // [rows][2][B][16]: the first 16 elements of every block, then the last 16 of every block
    float* scale = nullptr;  // [rows][B]
    int32_t* sums =
        nullptr;  // [rows][B]: sum of the first 16 in the low half, of the last 16 in the high half (int16 each)
};

// Activations for the tensor cores: bf16 [rows][cols] (f16 on devices before 8.0, which have no bf16 units).
// lo, where present, is what rounding left: hi + lo carries 16 bits of the value. Both 16-byte aligned.
struct HalfRows {
    uint16_t* hi = nullptr;
    uint16_t* lo = nullptr;
};

// Every form that a kernel is to write; null ones are not written.
struct RowOutputs {
    float* floats = nullptr;  // [rows][cols]
    QuantizedRows quantized;
    HalfRows half;
};

// What an expert that every row goes through adds to the row's sum over its chosen experts: sigmoid(scale[t]) * y[t,
// :], by one fma. Nothing where y is null.
struct SharedAnswer {
    const float* y = nullptr;      // [rows, cols]
    const float* scale = nullptr;  // [rows]
};

// The same rows from row `row` on. Forms that are absent stay so. A row of halves keeps its alignment if cols is a
// multiple of 8.
inline QuantizedRows rowsFrom(const QuantizedRows& rows, int64_t row, int64_t cols) {
    QuantizedRows rest = rows;
    if (rest.q) rest.q += row * cols;
    if (rest.scale) rest.scale += row * (cols / 32);
    if (rest.sums) rest.sums += row * (cols / 32);
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
    if (rows.y) rest = {rows.y + row * cols, rows.scale + row};
    return rest;
}

size_t quantizedRowsBytes(int64_t rows, int64_t cols);
QuantizedRows quantizedRowsOver(void* buffer, int64_t rows, int64_t cols);  // 256-byte aligned buffer

// out row t = rmsNorm of x's row rowIndex ? rowIndex[t] : t (bits of the CPU's rmsNorm), with row t % weightRows of
// weight.
void rmsNorm(Stream& stream, const float* x, const int32_t* rowIndex, const float* weight, float eps, int64_t rows,
             int64_t cols, const RowOutputs& out, int32_t weightRows = 1);
// y[t] = weight . x[t, :], bits of the contract's float products.
void rowDots(Stream& stream, const float* x, const float* weight, int64_t rows, int64_t cols, float* y);
// Other forms of x [rows, cols] (out.floats is ignored).
void convertRows(Stream& stream, const float* x, int64_t rows, int64_t cols, const RowOutputs& out);
// silu(gate) * up (bits of the CPU's siluMul) in the forms asked for. gate, up: [rows, cols]; out.floats may be gate.
void siluMul(Stream& stream, const float* gate, const float* up, int64_t rows, int64_t cols, const RowOutputs& out);

}  // namespace sharpi::cuda
