// The arithmetic of the delta rule for every kernel that goes row after row, bit for bit as in cpu/kernels/delta.cpp.
#pragma once

#include "kernels/delta/gated_delta.h"
#include "kernels/rows/device_rows.cuh"

namespace sharpi::cuda {

constexpr int kSums = 8;  // accumulators of a column's sum
constexpr int kWarpColumns = 16;

__device__ __forceinline__ float silu(float x) {
    return __fdiv_rn(x, __fadd_rn(1.0f, portableExp(__fsub_rn(0.0f, x))));
}

// As silu(), but with all exponentials before the first division. Division may branch, which would keep the
// exponentials from overlapping.
template <int kCount> __device__ __forceinline__ void siluOfAll(float (&x)[kCount]) {
    float below[kCount];
#pragma unroll
    for (int i = 0; i < kCount; i++) below[i] = __fadd_rn(1.0f, portableExp(__fsub_rn(0.0f, x[i])));
#pragma unroll
    for (int i = 0; i < kCount; i++) x[i] = __fdiv_rn(x[i], below[i]);
}

// Finishes the sums of four columns: acc[n] += acc[n + 4], then + 2, + 1. Every lane gets the totals of its columns.
__device__ __forceinline__ float4 columnTotals(float4 a) {
#pragma unroll
    for (int width = 16; width >= 4; width /= 2) {
        a.x = __fadd_rn(a.x, __shfl_xor_sync(kWholeWarp, a.x, width));
        a.y = __fadd_rn(a.y, __shfl_xor_sync(kWholeWarp, a.y, width));
        a.z = __fadd_rn(a.z, __shfl_xor_sync(kWholeWarp, a.z, width));
        a.w = __fadd_rn(a.w, __shfl_xor_sync(kWholeWarp, a.w, width));
    }
    return a;
}

__device__ __forceinline__ float4 times(float4 a, float b) {
    return make_float4(__fmul_rn(a.x, b), __fmul_rn(a.y, b), __fmul_rn(a.z, b), __fmul_rn(a.w, b));
}

// a * b + c
__device__ __forceinline__ float4 timesPlus(float4 a, float b, float4 c) {
    return make_float4(fmaf(a.x, b, c.x), fmaf(a.y, b, c.y), fmaf(a.z, b, c.z), fmaf(a.w, b, c.w));
}

// The lane's part of a head's matrix. kWhole: dim is 8 * kLines; else it is smaller.
template <int kLines, bool kWhole> struct MatrixPart {
    float4 lines[kLines];
    int count, n, column;
    bool exists;  // whether the matrix has the column

    // first: the block's first column.
    __device__ __forceinline__ explicit MatrixPart(int dim, int first = 0)
        : count(dim / kSums),
          n((threadIdx.x & 31) >> 2),
          column(first + (threadIdx.x >> 5) * kWarpColumns + (threadIdx.x & 3) * 4),
          exists(column < dim) {}

    __device__ __forceinline__ bool has(int m) const { return kWhole || m < count; }
    __device__ __forceinline__ void read(const float* matrix, int dim) {
#pragma unroll
        for (int m = 0; m < kLines; m++) {
            lines[m] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (matrix && exists && has(m))
                lines[m] = *reinterpret_cast<const float4*>(matrix + (n + kSums * m) * dim + column);
        }
    }
    __device__ __forceinline__ void write(float* matrix, int dim) const {
#pragma unroll
        for (int m = 0; m < kLines; m++)
            if (exists && has(m)) *reinterpret_cast<float4*>(matrix + (n + kSums * m) * dim + column) = lines[m];
    }

    // Advances the state by one row and returns the output of the lane's columns. k, q: this lane's elements, in shared
    // memory. v: the values of its columns.
    __device__ __forceinline__ float4 advance(const float* k, const float* q, float4 v, float decay, float step) {
        float4 recalled = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        forEachLine(k, [&](float4& line, float key) {
            line = times(line, decay);
            recalled = timesPlus(line, key, recalled);
        });
        recalled = columnTotals(recalled);
        const float4 delta =
            make_float4(__fmul_rn(__fsub_rn(v.x, recalled.x), step), __fmul_rn(__fsub_rn(v.y, recalled.y), step),
                        __fmul_rn(__fsub_rn(v.z, recalled.z), step), __fmul_rn(__fsub_rn(v.w, recalled.w), step));
        float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        forEachLine(k, [&](float4& line, float key) { line = timesPlus(delta, key, line); });
        forEachLine(q, [&](float4& line, float query) { out = timesPlus(line, query, out); });
        return columnTotals(out);
    }

private:
    // Calls each(line, its element of x) in ascending order of lines.
    template <typename Each> __device__ __forceinline__ void forEachLine(const float* x, Each each) {
#pragma unroll
        for (int m = 0; m < kLines; m += 4) {
            const float4 four = *reinterpret_cast<const float4*>(x + m);
            const float elements[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (has(m + i)) each(lines[m + i], elements[i]);
        }
    }
};

// Calls body(outputs) without the forms that a head alone cannot write. These are quantized blocks of 32 that span two
// heads; they are made from the floats afterwards.
template <typename Body>
void withForms(Stream& stream, const DeltaShape& shape, int64_t rows, const RowOutputs& out, Body body) {
    const bool apart = shape.dim % kContractBlock != 0 && out.quantized.q;
    if (apart && !out.floats)
        throw Error(ErrorKind::Internal, "heads of " + std::to_string(shape.dim) +
                                             " elements can only be quantized from floats, which were not asked for");
    body(RowOutputs{out.floats, apart ? QuantizedRows() : out.quantized, out.half});
    if (apart) convertRows(stream, out.floats, rows, shape.valueWidth(), {nullptr, out.quantized, {}});
}

}  // namespace sharpi::cuda
