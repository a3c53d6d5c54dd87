// Device code that the kernels of blocks share: elements of the cache, and rotated parts of heads.
#pragma once

#include "kernels/attention/attention.cuh"
#include "kernels/blocks/blocks.h"

namespace sharpi::cuda {

__device__ __forceinline__ float cachedElement(const uint8_t* base, KvType type, int64_t at) {
    if (type == KvType::F32) return reinterpret_cast<const float*>(base)[at];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(base)[at];
    if (type == KvType::BF16) return __uint_as_float(static_cast<uint32_t>(bits) << 16);
    return __half2float(__ushort_as_half(bits));
}

__device__ __forceinline__ void storeCached(uint8_t* base, KvType type, int64_t at, float x) {
    if (type == KvType::F32) reinterpret_cast<float*>(base)[at] = x;
    else if (type == KvType::BF16) reinterpret_cast<__nv_bfloat16*>(base)[at] = __float2bfloat16_rn(x);
    else reinterpret_cast<__half*>(base)[at] = __float2half_rn(x);
}

// Element e of the head x, rotated. direction: -1 rotates back.
__device__ __forceinline__ float rotatedElement(const float* x, int e, const RotatedPart& part, int64_t position,
                                                float direction = 1.0f) {
    const int i = e - part.first, half = part.dims / 2;
    if (i < 0 || i >= part.dims) return x[e];
    const int angle = part.adjacent ? i >> 1 : i < half ? i : i - half;
    const bool isFirst = part.adjacent ? (i & 1) == 0 : i < half;
    const float* const head = x + part.first;
    const float a = head[part.adjacent ? 2 * angle : angle], b = head[part.adjacent ? 2 * angle + 1 : angle + half];
    const float cos = part.cos[position * half + angle], sin = __fmul_rn(direction, part.sin[position * half + angle]);
    return isFirst ? fmaf(a, cos, -__fmul_rn(b, sin)) : fmaf(a, sin, __fmul_rn(b, cos));
}

// The list of pages of a row's sequence.
__device__ __forceinline__ const int32_t* tableOf(const PagedRows& rows, const BatchRows& batch, int64_t row) {
    return rows.tables + batch.sequence[row] * batch.pagesPerTable;
}

// What a row sees: the keys [first, position], and a number of rows of blocks.
struct SeenKeys {
    int position, first, blocks;

    __device__ __forceinline__ SeenKeys(const BatchRows& batch, const AttentionReach& reach, const SeenBlocks& seen,
                                        int64_t row)
        : position(batch.positions[row]), first(reach.first(position)) {
        blocks = seen.rows.pages.k ? (position + 1) / seen.rows.pages.rowTokens : 0;
        if (seen.chosen) blocks = min(blocks, seen.topK);
    }
};

inline void requireSeen(const HeadShape& shape, const KvPages& pages, const SeenBlocks& seen) {
    requireAttendable(shape, pages);
    const KvPages& blocks = seen.rows.pages;
    const bool alike = !blocks.k || (blocks.type == pages.type && blocks.headDim == pages.headDim);
    if (shape.kvHeads == 1 && pages.valuePrefix == pages.headDim && pages.rowTokens == 1 && alike) return;
    throw Error(ErrorKind::Internal, "attention over blocks cannot read these pages");
}

}  // namespace sharpi::cuda
