// Tokens with their logits as numbers of one order: the highest logit first, of equal ones the lowest id. A candidate's
// high half is the logit as an integer of the same order, and its low half is the inverted id. All candidates differ,
// and a larger one is better.
#pragma once

#include <cstdint>

#include "kernels/rows/device_rows.cuh"

namespace sharpi::cuda {

constexpr uint32_t kNothing = 0x007fffffu;  // the key of -infinity, which is never chosen

// An unsigned integer with the order of the floats. NaN counts as -infinity, and -0 as +0. Never 0.
__device__ __forceinline__ uint32_t keyOf(float logit) {
    if (isnan(logit)) return kNothing;
    const uint32_t bits = logit == 0.0f ? 0u : __float_as_uint(logit);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float logitOf(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ uint64_t candidateOf(float logit, int64_t id) {
    return static_cast<uint64_t>(keyOf(logit)) << 32 | ~static_cast<uint32_t>(id);
}
__device__ __forceinline__ uint32_t keyOf(uint64_t candidate) { return static_cast<uint32_t>(candidate >> 32); }
__device__ __forceinline__ int32_t idOf(uint64_t candidate) {
    return static_cast<int32_t>(~static_cast<uint32_t>(candidate));
}

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

// The largest value of the block, in thread 0.
template <int kThreads> __device__ __forceinline__ uint64_t blockMax(uint64_t value) {
    __shared__ uint64_t ofWarp[kThreads / 32];
    for (int width = 16; width > 0; width /= 2) value = larger(value, __shfl_xor_sync(kWholeWarp, value, width));
    if (threadIdx.x % 32 == 0) ofWarp[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < kThreads / 32; ++w) value = larger(value, ofWarp[w]);
    }
    return value;
}

}  // namespace sharpi::cuda
