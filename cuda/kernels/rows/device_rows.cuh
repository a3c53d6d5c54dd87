// Device code that writes activations in the forms of rows.h: the contract's int8 blocks, and 16-bit halves for the
// tensor cores. All kernels whose output the next product reads use it.
//
// Threads divide the work in one of two ways. A *quad* is four neighbouring elements in one thread, so that eight lanes
// hold a block of 32: loads and stores are whole words, and a warp does four blocks at once. The other way is one
// element for each lane and one block for each warp. It is for kernels that end with one value in each lane.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/contract.h"
#include "core/portable.h"
#include "device/launch.cuh"
#include "kernels/rows/rows.h"
#include "kernels/rows/wide_columns.cuh"

namespace sharpi::cuda {

constexpr unsigned kWholeWarp = 0xffffffffu;

// --- reductions --------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t warpMax(uint32_t value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(kWholeWarp, value);
#else
    for (int width = 16; width > 0; width /= 2) value = max(value, __shfl_xor_sync(kWholeWarp, value, width));
    return value;
#endif
}

__device__ __forceinline__ int32_t warpSum(int32_t value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(kWholeWarp, value);
#else
    for (int width = 16; width > 0; width /= 2) value += __shfl_xor_sync(kWholeWarp, value, width);
    return value;
#endif
}

// Finishes a sum over a row that has one accumulator in each lane: acc[i] += acc[i + 16], + 8, + 4, + 2, + 1. Every
// lane gets the result.
__device__ __forceinline__ float contractTree(float accumulator) {
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
        accumulator = __fadd_rn(accumulator, __shfl_xor_sync(kWholeWarp, accumulator, width));
    }
    return accumulator;
}

// --- elementwise -------------------------------------------------------------------------------------------------

__device__ __forceinline__ float overOnePlusExp(float x, float exponent) {
    return __fdiv_rn(x, __fadd_rn(1.0f, portableExp(exponent)));
}

__device__ __forceinline__ float siluTimes(float gate, float up) {
    return __fmul_rn(overOnePlusExp(gate, __fsub_rn(0.0f, gate)), up);
}

// What the last factor of the activation multiplies. core/rules/activation.h says in which order. The kind is the same
// for the whole grid.
__device__ __forceinline__ float activated(Activation activation, float gate) {
    if (activation.kind == ActivationKind::Silu) return overOnePlusExp(gate, __fsub_rn(0.0f, gate));
    if (activation.kind == ActivationKind::Gelu) {
        const float p = fmaf(__fmul_rn(gate, gate), kGeluCubic, 1.0f);
        return overOnePlusExp(gate, __fmul_rn(__fmul_rn(gate, p), kGeluExponent));
    }
    if (activation.kind == ActivationKind::ReluSquared) {
        const float r = 0.0f > gate ? 0.0f : gate;
        return __fmul_rn(r, r);
    }
    const float g = activation.limit < gate ? activation.limit : gate;
    const bool silu = activation.kind == ActivationKind::ClampedSilu;
    return overOnePlusExp(g, silu ? __fsub_rn(0.0f, g) : __fmul_rn(g, kSwigluExponent));
}

// The last factor, from `up`.
__device__ __forceinline__ float upFactor(Activation activation, float up) {
    const bool silu = activation.kind == ActivationKind::ClampedSilu;
    if (!silu && activation.kind != ActivationKind::ClampedSwiglu) return up;
    const float limit = activation.limit, least = __fsub_rn(0.0f, limit), below = limit < up ? limit : up;
    const float clamped = least > below ? least : below;
    return silu ? clamped : __fadd_rn(clamped, 1.0f);
}

__device__ __forceinline__ float gatedValue(Activation activation, float gate, float up) {
    return __fmul_rn(activated(activation, gate), upFactor(activation, up));
}

// What comes before the activation, for one row of gates and ups.
struct GatedTerms {
    const float *gateBias, *upBias;  // of the row's expert; null: none
    float factor;
    bool weighted;

    // pair: the row's number among those of the join. hidden: the width of the biases.
    __device__ __forceinline__ GatedTerms(const GatedJoin& join, int64_t pair, int64_t hidden)
        : gateBias(join.gateBias), upBias(join.upBias), factor(1.0f), weighted(join.weight != nullptr) {
        if (weighted) factor = join.weight[pair];
        if (!gateBias && !upBias) return;
        const int64_t first = join.expert ? join.expert[pair] * hidden : 0;
        if (gateBias) gateBias += first;
        if (upBias) upBias += first;
    }
    __device__ __forceinline__ float gate(float x, int64_t column) const { return finished(x, gateBias, column); }
    __device__ __forceinline__ float up(float x, int64_t column) const { return finished(x, upBias, column); }

private:
    __device__ __forceinline__ float finished(float x, const float* bias, int64_t column) const {
        if (weighted) x = __fmul_rn(x, factor);
        return bias ? __fadd_rn(x, bias[column]) : x;
    }
};

// --- int8 blocks: core/contract.h section 1 -------------------------------------------------------------------------

// absmax / 127, rounded once: a product with the rounded 1 / 127, then a correction. It is right for every absmax that
// blockScale divides.
__device__ __forceinline__ float over127(float absmax) {
    const float reciprocal = 0x1.020408p-7f;
    const float first = __fmul_rn(absmax, reciprocal);
    return fmaf(fmaf(-127.0f, first, absmax), reciprocal, first);
}

// The scale of a block, from the bits of its largest magnitude.
struct BlockScale {
    float scale, inverse;
    bool zero;  // all q are 0
};

__device__ __forceinline__ BlockScale blockScale(uint32_t largest) {
    const float absmax = __uint_as_float(largest);
    if (largest >= __float_as_uint(kHugeActivation)) return {__uint_as_float(0x7fc00000u), 0.0f, true};
    if (absmax < kTinyActivation) return {0.0f, 0.0f, true};
    const float scale = __uint_as_float(roundedUpScale(__float_as_uint(over127(absmax))));
    return {scale, __fdiv_rn(1.0f, scale), false};
}

// Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits. A conversion would run at a
// quarter of the rate.
__device__ __forceinline__ int32_t quantized(float x, const BlockScale& block) {
    const float shifted = __fadd_rn(__fmul_rn(x, block.inverse), 0x1.8p+23f);
    return block.zero ? 0 : static_cast<int32_t>(__float_as_uint(shifted) - 0x4b400000u);
}

// Turns first + 65536 * second, which adding up both halves at once gives, into the form that is stored.
__device__ __forceinline__ int32_t packedSums(int32_t both) {
    const int32_t first = static_cast<int16_t>(both & 0xffff);
    const int32_t second = (both - first) >> 16;
    return static_cast<int32_t>((static_cast<uint32_t>(second) << 16) | (static_cast<uint32_t>(first) & 0xffffu));
}

// Stores element lane & 31 of block `block` of row `row`. The whole warp calls it. blocks: cols / 32.
__device__ __forceinline__ void quantizeLane(const QuantizedRows& to, int64_t row, int64_t blocks, int64_t block,
                                             float x) {
    const int lane = threadIdx.x & 31;
    const BlockScale scale = blockScale(warpMax(__float_as_uint(x) & 0x7fffffffu));
    const int32_t q = quantized(x, scale);
    const int32_t both = warpSum(lane < 16 ? q : q * 65536);
    const int32_t sums = packedSums(both);
    to.q[((row * 2 + (lane >> 4)) * blocks + block) * 16 + (lane & 15)] = static_cast<int8_t>(q);
    if (lane == 0) {
        to.scale[row * blocks + block] = scale.scale;
        to.sums[row * blocks + block] = sums;
    }
    if (!to.wide.written) return;
    const WideBlock wide(to.wide, row, blocks, block);
    wide.half(lane >> 4)[lane & 15] = static_cast<uint8_t>(q);
    if (lane < WideColumns::kFields) wide.storeEnd(lane, scale.scale, sums);
}

// Stores elements column .. column + 3 of row `row`, in lanes with column / 4 mod 8 = lane mod 8. The whole warp calls
// it. Groups of eight lanes that are not `valid` write nothing.
__device__ __forceinline__ void quantizeQuad(const QuantizedRows& to, int64_t row, int64_t blocks, int64_t column,
                                             float4 x, bool valid) {
    const uint32_t a = __float_as_uint(x.x) & 0x7fffffffu, b = __float_as_uint(x.y) & 0x7fffffffu;
    const uint32_t c = __float_as_uint(x.z) & 0x7fffffffu, d = __float_as_uint(x.w) & 0x7fffffffu;
    uint32_t largest = max(max(a, b), max(c, d));
#pragma unroll
    for (int width = 4; width > 0; width /= 2) largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, width));
    const BlockScale scale = blockScale(largest);
    const int32_t q0 = quantized(x.x, scale), q1 = quantized(x.y, scale), q2 = quantized(x.z, scale),
                  q3 = quantized(x.w, scale);

    const int quad = threadIdx.x & 7;  // quad of the block: 0..3 are its first half
    const int32_t sum = q0 + q1 + q2 + q3;
    int32_t both = quad < 4 ? sum : sum * 65536;
#pragma unroll
    for (int width = 4; width > 0; width /= 2) both += __shfl_xor_sync(kWholeWarp, both, width);
    if (!valid) return;

    const int64_t block = column / kContractBlock;
    const uint32_t word = (q0 & 0xff) | (q1 & 0xff) << 8 | (q2 & 0xff) << 16 | static_cast<uint32_t>(q3) << 24;
    const int32_t sums = packedSums(both);
    int8_t* q = to.q + ((row * 2 + (quad >> 2)) * blocks + block) * 16 + (quad & 3) * 4;
    *reinterpret_cast<uint32_t*>(q) = word;
    if (quad == 0) {
        to.scale[row * blocks + block] = scale.scale;
        to.sums[row * blocks + block] = sums;
    }
    if (!to.wide.written) return;
    const WideBlock wide(to.wide, row, blocks, block);
    *reinterpret_cast<uint32_t*>(wide.half(quad >> 2) + (quad & 3) * 4) = word;
    if (quad < WideColumns::kFields) wide.storeEnd(quad, scale.scale, sums);
}

// --- halves for the tensor cores ----------------------------------------------------------------------------------

struct HalfPair {
    uint16_t hi, lo;
};

// hi is x, rounded; lo is the rounded remainder. If hi is not finite, lo is 0, so that their sum is hi.
__device__ __forceinline__ HalfPair splitHalf(float x) {
#if __CUDA_ARCH__ >= 800
    const __nv_bfloat16 hi = __float2bfloat16_rn(x);
    const float rest = __fsub_rn(x, __bfloat162float(hi));
    const uint16_t hiBits = __bfloat16_as_ushort(hi);
    const bool finite = (hiBits & 0x7f80u) != 0x7f80u;
    return {hiBits, finite ? __bfloat16_as_ushort(__float2bfloat16_rn(rest)) : static_cast<uint16_t>(0)};
#else
    // A number beyond f16's range becomes the largest f16, and lo holds as much of the rest as it can. A NaN stays a
    // NaN.
    const float bounded = fabsf(x) > 65504.0f ? copysignf(65504.0f, x) : x;
    const __half hi = __float2half_rn(bounded);
    const float rest = __fsub_rn(x, __half2float(hi));
    const float reachable = fabsf(rest) > 65504.0f ? copysignf(65504.0f, rest) : rest;
    return {__half_as_ushort(hi), __half_as_ushort(__float2half_rn(reachable))};
#endif
}

// Stores four neighbouring elements at `at` of the flat arrays. If `whole` is false, only the first `count` of them
// exist, and `at` need not be a multiple of 4.
__device__ __forceinline__ void storeHalves(const HalfRows& to, int64_t at, float4 x, bool whole, int64_t count) {
    const HalfPair a = splitHalf(x.x), b = splitHalf(x.y), c = splitHalf(x.z), d = splitHalf(x.w);
    if (!whole) {
        const HalfPair all[4] = {a, b, c, d};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i >= count) return;
            to.hi[at + i] = all[i].hi;
            if (to.lo) to.lo[at + i] = all[i].lo;
        }
        return;
    }
    const auto two = [](uint16_t low, uint16_t high) {
        return static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 16;
    };
    *reinterpret_cast<uint2*>(to.hi + at) = make_uint2(two(a.hi, b.hi), two(c.hi, d.hi));
    if (to.lo) *reinterpret_cast<uint2*>(to.lo + at) = make_uint2(two(a.lo, b.lo), two(c.lo, d.lo));
}

// --- all forms ----------------------------------------------------------------------------------------------------

// Stores four neighbouring elements in every requested form but floats. Lanes are as for quantizeQuad.
__device__ __forceinline__ void storeForms(const RowOutputs& out, int64_t row, int64_t cols, int64_t column, float4 x,
                                           bool valid) {
    if (out.quantized.q) quantizeQuad(out.quantized, row, cols / kContractBlock, column, x, valid);
    if (out.half.hi && valid) storeHalves(out.half, row * cols + column, x, cols % 4 == 0, cols - column);
}

// Loads the quad at p. If `whole` is false, only its first `count` elements exist (the others read as 0), and p may be
// unaligned.
__device__ __forceinline__ float4 loadQuad(const float* p, bool whole, int64_t count) {
    if (whole) return *reinterpret_cast<const float4*>(p);
    return make_float4(count > 0 ? p[0] : 0.0f, count > 1 ? p[1] : 0.0f, count > 2 ? p[2] : 0.0f,
                       count > 3 ? p[3] : 0.0f);
}

__device__ __forceinline__ void storeQuad(float* p, float4 x, bool whole, int64_t count) {
    if (whole) {
        *reinterpret_cast<float4*>(p) = x;
        return;
    }
    if (count > 0) p[0] = x.x;
    if (count > 1) p[1] = x.y;
    if (count > 2) p[2] = x.z;
    if (count > 3) p[3] = x.w;
}

}  // namespace sharpi::cuda
