// What the attention kernels share: the size of a page, the types of the cache, and how neighbouring elements are
// read and written.
#pragma once

#include "core/error.h"
#include "kernels/attention/latent_shape.h"
#include "kernels/rows/device_rows.cuh"

namespace sharpi::cuda {

// Tokens of a page: two keys for each lane in decode, one tile of keys in prefill.
constexpr int kAttentionPage = 64;

inline void requireAttendable(const HeadShape& shape, const KvPages& pages) {
    requireHeads(shape);
    if (pages.pageTokens != kAttentionPage)
        throw Error(ErrorKind::Internal, "the attention kernels cannot read pages of this size");
}

inline void requireLatentAttendable(const HeadShape& shape, const KvPages& pages) {
    if (shape.kvHeads != 1 || shape.headDim != pages.headDim || pages.pageTokens != kAttentionPage)
        throw Error(ErrorKind::Internal, "the attention kernels cannot read these pages of latents");
    requireLatent({shape.heads, pages.valuePrefix, shape.headDim - pages.valuePrefix, 1});
}

// Stores two neighbouring elements at `at`, which is even, of the flat arrays.
__device__ __forceinline__ void storeHalfPair(const HalfRows& to, int64_t at, float first, float second) {
    const HalfPair a = splitHalf(first), b = splitHalf(second);
    reinterpret_cast<uint32_t*>(to.hi)[at / 2] = static_cast<uint32_t>(a.hi) | static_cast<uint32_t>(b.hi) << 16;
    if (to.lo)
        reinterpret_cast<uint32_t*>(to.lo)[at / 2] = static_cast<uint32_t>(a.lo) | static_cast<uint32_t>(b.lo) << 16;
}

template <KvType T> struct KvTag {
    static constexpr KvType kType = T;
};
// Calls f(KvTag<type>{}).
template <typename F> void withKvType(KvType type, const F& f) {
    switch (type) {
    case KvType::F32: return f(KvTag<KvType::F32>{});
    case KvType::BF16: return f(KvTag<KvType::BF16>{});
    case KvType::F16: return f(KvTag<KvType::F16>{});
    }
}

// --- elements ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float2 halvesToFloats(uint32_t word, KvType type) {
    if (type == KvType::BF16) return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

template <KvType kType> constexpr int kKvBytes = static_cast<int>(kvElementBytes(kType));

// Reads kCount <= 8 neighbouring elements. `at` is aligned to their size, at most to 16 bytes.
template <KvType kType, int kCount>
__device__ __forceinline__ void readElements(const uint8_t* at, float (&out)[kCount]) {
    if constexpr (kType == KvType::F32) {
        if constexpr (kCount == 2) {
            const float2 v = *reinterpret_cast<const float2*>(at);
            out[0] = v.x, out[1] = v.y;
        } else {
#pragma unroll
            for (int i = 0; i < kCount; i += 4) {
                const float4 v = reinterpret_cast<const float4*>(at)[i / 4];
                out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
            }
        }
    } else {
        uint32_t words[kCount / 2];
        if constexpr (kCount == 2) {
            words[0] = *reinterpret_cast<const uint32_t*>(at);
        } else if constexpr (kCount == 4) {
            const uint2 v = *reinterpret_cast<const uint2*>(at);
            words[0] = v.x, words[1] = v.y;
        } else {
            static_assert(kCount == 8);
            const uint4 v = *reinterpret_cast<const uint4*>(at);
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        }
#pragma unroll
        for (int i = 0; i < kCount / 2; i++) {
            const float2 pair = halvesToFloats(words[i], kType);
            out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
        }
    }
}

// Reads kCount floats, aligned to kCount * 4 bytes.
template <int kCount> __device__ __forceinline__ void readFloats(const float* at, float (&out)[kCount]) {
    readElements<KvType::F32, kCount>(reinterpret_cast<const uint8_t*>(at), out);
}

// The same for what other blocks wrote in this launch: the read bypasses the L1 cache.
template <int kCount> __device__ __forceinline__ void readWritten(const float* at, float (&out)[kCount]) {
    if constexpr (kCount == 2) {
        const float2 v = __ldcg(reinterpret_cast<const float2*>(at));
        out[0] = v.x, out[1] = v.y;
    } else {
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
            const float4 v = __ldcg(reinterpret_cast<const float4*>(at) + i / 4);
            out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
        }
    }
}

template <int kCount> __device__ __forceinline__ void writeFloats(float* to, const float (&values)[kCount]) {
    if constexpr (kCount == 2) {
        *reinterpret_cast<float2*>(to) = {values[0], values[1]};
    } else {
#pragma unroll
        for (int i = 0; i < kCount; i += 4)
            reinterpret_cast<float4*>(to)[i / 4] = {values[i], values[i + 1], values[i + 2], values[i + 3]};
    }
}

}  // namespace sharpi::cuda
