// What the kernels between projections and attention share: the norm of a head, its rotation, and where its elements
// go. A warp has a head: see heads.cu.
#pragma once

#include "kernels/attention/attention.cuh"

namespace sharpi::cuda::heads {

struct Inputs {
    float* q;
    const float *k, *v;
    HalfRows qHalf;
};

__device__ __forceinline__ float sumOfSquares(const float* x, int n, int lane) {
    float sum = 0.0f;
    for (int i = lane; i < n; i += 32) sum = fmaf(x[i], x[i], sum);
    return contractTree(sum);
}

__device__ __forceinline__ float inverseNorm(float sum, int n, float eps) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, static_cast<float>(n)), eps)));
}

// The rotation of a head of up to 64 * kSteps elements. A lane finishes the neighbours 2 * lane and 2 * lane + 1, and
// the same of the next 64 elements, and so on.
template <int kSteps, bool kAdjacent> struct Rotation {
    float cos[2 * kSteps], sin[2 * kSteps];

    // Which angle rotates element e < 2 * half, and whether e is the first of the two elements of that angle.
    static __device__ __forceinline__ bool isFirst(int e, int half) { return kAdjacent ? (e & 1) == 0 : e < half; }
    static __device__ __forceinline__ int angleOf(int e, int half) {
        return kAdjacent ? e >> 1 : e < half ? e : e - half;
    }

    __device__ __forceinline__ void read(const HeadPreparation& how, int64_t position, int lane) {
        const int half = how.ropeDims / 2;
        const float *rowCos = how.cos + position * half, *rowSin = how.sin + position * half;
#pragma unroll
        for (int i = 0; i < 2 * kSteps; i++) {
            const int e = 2 * lane + i / 2 * 64 + i % 2;
            if (e < how.ropeDims) cos[i] = rowCos[angleOf(e, half)], sin[i] = rowSin[angleOf(e, half)];
        }
    }

    // The lane's i-th element e of the head at `x` (normed, in shared memory), rotated.
    __device__ __forceinline__ float turned(const float* x, int e, int i, int ropeDims) const {
        if (e >= ropeDims) return x[e];
        const int half = ropeDims / 2, angle = angleOf(e, half);
        const float a = x[kAdjacent ? 2 * angle : angle], b = x[kAdjacent ? 2 * angle + 1 : angle + half];
        return isFirst(e, half) ? fmaf(a, cos[i], -__fmul_rn(b, sin[i])) : fmaf(a, sin[i], __fmul_rn(b, cos[i]));
    }
};

// Stores two neighbouring elements of the cache, at element `at`.
__device__ __forceinline__ void storePair(uint8_t* base, KvType type, int64_t at, float first, float second) {
    if (type == KvType::F32) {
        reinterpret_cast<float2*>(base)[at / 2] = {first, second};
    } else if (type == KvType::BF16) {
        reinterpret_cast<__nv_bfloat162*>(base)[at / 2] = __floats2bfloat162_rn(first, second);
    } else {
        reinterpret_cast<__half2*>(base)[at / 2] = __floats2half2_rn(first, second);
    }
}

__device__ __forceinline__ void storeQuery(const Inputs& in, int64_t at, float first, float second) {
    if (in.q) reinterpret_cast<float2*>(in.q)[at / 2] = {first, second};
    if (in.qHalf.hi) storeHalfPair(in.qHalf, at, first, second);
}

// The place of a row in its sequence's pages.
struct Place {
    int position, sequence;

    __device__ __forceinline__ Place(const BatchRows& batch, int64_t row)
        : position(static_cast<const volatile int32_t*>(batch.positions)[row]),
          sequence(static_cast<const volatile int32_t*>(batch.sequence)[row]) {}

    // The first element of its head in the cache.
    __device__ __forceinline__ int64_t inCache(const BatchRows& batch, const KvPages& pages, int head) const {
        const int64_t page = batch.pageTables[sequence * batch.pagesPerTable + position / kAttentionPage];
        return ((page * pages.kvHeads + head) * kAttentionPage + position % kAttentionPage) * pages.headDim;
    }
};

// The destination of a finished head: the queries (cache == nullptr) or the keys, and the element there.
struct Destination {
    uint8_t* cache;
    int64_t at;
};

// Rotates the head in `buffer` (normed, shared memory, written by this warp) and writes it, with kScaled times
// `factor`.
template <bool kScaled, int kSteps, bool kAdjacent>
__device__ __forceinline__ void writeRotated(const float* buffer, int dim, int ropeDims,
                                             const Rotation<kSteps, kAdjacent>& rotation, const Inputs& in,
                                             const Destination& to, KvType type, int lane, float factor = 1.0f) {
    __syncwarp();
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
        const int e = 2 * lane + step * 64;
        if (e >= dim) break;
        float first = rotation.turned(buffer, e, 2 * step, ropeDims),
              second = rotation.turned(buffer, e + 1, 2 * step + 1, ropeDims);
        if constexpr (kScaled) first = __fmul_rn(first, factor), second = __fmul_rn(second, factor);
        if (to.cache) {
            storePair(to.cache, type, to.at + e, first, second);
        } else {
            storeQuery(in, to.at + e, first, second);
        }
    }
}

// Loads a head in the order of the norm: lane, lane + 32, ... Volatile, so that the loads are issued here and not at
// the first use.
template <int kCount>
__device__ __forceinline__ void readStrided(const volatile float* from, int dim, int lane, float (&out)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) out[i] = lane + 32 * i < dim ? from[lane + 32 * i] : 0.0f;
}

// Normalizes a head whose elements the warp holds as readStrided() gives them. weight: nullptr: weights of 1.
template <int kCount>
__device__ __forceinline__ void normalize(float (&x)[kCount], const float* weight, int dim, float eps, int lane) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; i++) sum = fmaf(x[i], x[i], sum);
    const float inverse = inverseNorm(contractTree(sum), dim, eps);
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        x[i] = __fmul_rn(x[i], inverse);
        if (weight && lane + 32 * i < dim) x[i] = __fmul_rn(x[i], weight[lane + 32 * i]);
    }
}

template <int kCount>
__device__ __forceinline__ void writeStrided(const float (&x)[kCount], int dim, int lane, float* to) {
#pragma unroll
    for (int i = 0; i < kCount; i++)
        if (lane + 32 * i < dim) to[lane + 32 * i] = x[i];
}

}  // namespace sharpi::cuda::heads
