// Device code of norms: sums over a row in the order of core/rules/norm.h, and the results in all forms.
#pragma once

#include "kernels/rows/device_rows.cuh"

namespace sharpi::cuda {

// What the elements of a row add to an accumulator.
struct Squares {
    __device__ __forceinline__ float operator()(float accumulator, float x) const { return fmaf(x, x, accumulator); }
};
struct Sums {
    __device__ __forceinline__ float operator()(float accumulator, float x) const { return __fadd_rn(accumulator, x); }
};
struct Deviations {
    float mean;
    __device__ __forceinline__ float operator()(float accumulator, float x) const {
        const float d = __fsub_rn(x, mean);
        return fmaf(d, d, accumulator);
    }
};

// Continues the lane's accumulator over `count` elements that begin at a multiple of 32 of the row. The additions form
// a chain; meanwhile the next values are loaded.
template <typename Add>
__device__ __forceinline__ float addUp(const float* staged, int count, float accumulator, const Add& add) {
    constexpr int kDeep = 8;
    constexpr int kStep = kDeep * kContractAccumulators;
    const int lane = threadIdx.x & 31;
    const int groups = count / kStep;
    float ahead[kDeep];
    if (groups > 0) {
#pragma unroll
        for (int i = 0; i < kDeep; ++i) ahead[i] = staged[i * kContractAccumulators + lane];
    }
    for (int group = 0; group < groups; ++group) {
        const float* following = staged + min(group + 1, groups - 1) * kStep + lane;
        float now[kDeep];
#pragma unroll
        for (int i = 0; i < kDeep; ++i) {
            now[i] = ahead[i];
            ahead[i] = following[i * kContractAccumulators];
        }
#pragma unroll
        for (int i = 0; i < kDeep; ++i) accumulator = add(accumulator, now[i]);
    }
    for (int i = groups * kStep + lane; i < count; i += kContractAccumulators)
        accumulator = add(accumulator, staged[i]);
    return accumulator;
}

// 1 / sqrt(sum / width + eps)
__device__ __forceinline__ float inverseRoot(float sum, float eps, float width) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, width), eps)));
}

// The factor of a row of `width` elements. Every lane of the warp that holds the accumulators gets it.
__device__ __forceinline__ float inverseNorm(float accumulator, float eps, float width) {
    return inverseRoot(contractTree(accumulator), eps, width);
}

__device__ __forceinline__ float4 product(float4 a, float4 b) {
    return make_float4(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w));
}
__device__ __forceinline__ float4 product(float4 a, float b) {
    return make_float4(__fmul_rn(a.x, b), __fmul_rn(a.y, b), __fmul_rn(a.z, b), __fmul_rn(a.w, b));
}
__device__ __forceinline__ float4 sum(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}
__device__ __forceinline__ float4 difference(float4 a, float b) {
    return make_float4(__fsub_rn(a.x, b), __fsub_rn(a.y, b), __fsub_rn(a.z, b), __fsub_rn(a.w, b));
}

// Stores the quad at `column` in every form. The whole warp calls it.
__device__ __forceinline__ void storeAll(const RowOutputs& out, int64_t row, int64_t cols, int64_t column, bool whole,
                                         bool valid, float4 y) {
    if (out.floats && valid) storeQuad(out.floats + row * cols + column, y, whole, cols - column);
    storeForms(out, row, cols, column, y, valid);
}

// The same of (x * inverse) * w.
__device__ __forceinline__ void storeNormed(const RowOutputs& out, int64_t row, int64_t cols, int64_t column,
                                            bool whole, bool valid, float4 x, float inverse, float4 w) {
    storeAll(out, row, cols, column, whole, valid, product(product(x, inverse), w));
}

}  // namespace sharpi::cuda
