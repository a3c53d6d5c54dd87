// What both kernels of the delta rule in chunks (gated_delta_chunks.cu) share: the place of a chunk in memory, operands
// of tensor cores from shared memory and from registers, products in both forms, and copies of a chunk to shared
// memory. Mamba 2's kernels (mamba_chunks.cu) use all but the first.
#pragma once

#include "kernels/attention/attention.cuh"
#include "kernels/delta/gated_delta.h"
#include "kernels/matmul/mma.cuh"

namespace sharpi::cuda {

constexpr int kChunk = kDeltaChunk;
constexpr int kSystemPitch = kChunk + 4;  // floats of a row of ratios

// kDim: dim, padded with zeros to 16, 32, 64 or 128.
template <int kDim_, bool kSplit_> struct Chunks {
    static constexpr int kDim = kDim_;
    static constexpr bool kSplit = kSplit_;
    static constexpr int kParts = kSplit ? 2 : 1;
    static constexpr int kRowBytes = 2 * kDim, kRowChunks16 = kDim / 8;
    static constexpr int kTileBytes = kChunk * kRowBytes;     // keys, queries or W of a chunk, hi or lo
    static constexpr int kWeightBytes = kChunk * kChunk * 2;  // the weights of D, hi or lo
    // What the first kernel leaves for the second, for each chunk of a head: W, the weights of D, gains and last
    // ratios.
    static constexpr int kLeftBytes = kParts * (kTileBytes + kWeightBytes) + 2 * kChunk * 4;
    // The first kernel has a warp for each 16 columns of U and of W.
    static constexpr int kThreads = 2 * kDim;
    static constexpr int kSystemBytes =
        2 * (kParts * kTileBytes + kWeightBytes) + kChunk * kSystemPitch * 4 + 3 * kChunk * 4;
};

struct ChunkWork {
    float* mixed;  // the values become U
    const float *decay, *step;
    HalfRows queriesAndKeys;  // [rows, 2 * keyHeads * dim]
    int32_t keyHeads, valueHeads, headsPerKey, dim;
    float* states;
    const int32_t *from, *to;
    RowRanges sequences, tiles;
    int2* tileAt;   // [rows]: at the row where a tile begins, its number and its end
    uint8_t* left;  // [tiles, valueHeads, kLeftBytes]
    float* out;     // [rows, valueHeads * dim]

    __device__ __forceinline__ int64_t keyWidth() const { return int64_t{keyHeads} * dim; }
    // The first channel of the key, or of the query, that a value head reads.
    __device__ __forceinline__ int64_t keyChannel(int head) const {
        return int64_t{keyHeadOf(head, keyHeads, headsPerKey)} * dim;
    }
    __device__ __forceinline__ int64_t channels() const { return 2 * keyWidth() + int64_t{valueHeads} * dim; }
};

// The place of 16 bytes of a row of kBytes, swizzled so that the chunks of one column in eight rows are in different
// banks.
template <int kBytes> __device__ __forceinline__ uint32_t chunkAt(int row, int chunk) {
    constexpr int kChunks16 = kBytes / 16, kRowsALine = kBytes >= 128 ? 1 : 128 / kBytes;
    constexpr int kMask = (kChunks16 < 8 ? kChunks16 : 8) - 1;
    return static_cast<uint32_t>(row * kBytes + ((chunk ^ (row / kRowsALine & kMask)) << 4));
}

__device__ __forceinline__ void loadMatricesTurned(uint32_t (&out)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

// Loads the right operand of a product whose n runs along the rows of shared memory: 16 (along n) x 16 (along k) at
// (row, column). b[0], b[1] are for the first eight rows, b[2], b[3] for the next eight.
template <int kBytes> __device__ __forceinline__ void loadRight(uint32_t (&b)[4], uint32_t tile, int row, int column) {
    const int lane = threadIdx.x & 31;
    loadMatrices(b, tile + chunkAt<kBytes>(row + (lane & 7) + (lane >> 4) * 8, column / 8 + (lane >> 3 & 1)));
}

// Loads the left operand, 16 x 16 at (row, column).
template <int kBytes> __device__ __forceinline__ void loadLeft(uint32_t (&a)[4], uint32_t tile, int row, int column) {
    const int lane = threadIdx.x & 31;
    loadMatrices(a, tile + chunkAt<kBytes>(row + (lane & 15), column / 8 + (lane >> 4)));
}

// Loads the right operand of a product whose k runs along the rows of shared memory: 16 (along k) x 16 (along n), with
// b as in loadRight.
template <int kBytes>
__device__ __forceinline__ void loadRightTurned(uint32_t (&b)[4], uint32_t tile, int row, int column) {
    const int lane = threadIdx.x & 31;
    loadMatricesTurned(b, tile + chunkAt<kBytes>(row + (lane & 15), column / 8 + (lane >> 4)));
}

// Stores two neighbours in halves, the low halves partBytes behind the high ones.
template <bool kSplit> __device__ __forceinline__ void storePair(uint8_t* to, int partBytes, float x, float y) {
    const uint32_t pair = packPair(x, y);
    *reinterpret_cast<uint32_t*>(to) = pair;
    if constexpr (kSplit) {
        const float2 kept = unpackPair(pair);
        *reinterpret_cast<uint32_t*>(to + partBytes) = packPair(x - kept.x, y - kept.y);
    }
}

// A left operand in registers, made of the accumulators of two neighbouring 16 x 8 results.
template <bool kSplit> struct LeftOperand {
    uint32_t hi[4], lo[4];
    __device__ __forceinline__ LeftOperand(const float (&first)[4], const float (&second)[4]) {
        put(0, first[0], first[1]);
        put(1, first[2], first[3]);
        put(2, second[0], second[1]);
        put(3, second[2], second[3]);
    }

private:
    __device__ __forceinline__ void put(int i, float x, float y) {
        hi[i] = packPair(x, y);
        if constexpr (kSplit) {
            const float2 kept = unpackPair(hi[i]);
            lo[i] = packPair(x - kept.x, y - kept.y);
        }
    }
};

// sums[2 p], sums[2 p + 1] += a b for right operands p of [kFirst, min(kEnd, end)). load(b, tile, p) reads one; the low
// halves lie partBytes behind. Each accumulator waits for its last product, so the products go round all of them.
template <bool kSplit, int kFirst, int kEnd, typename Load>
__device__ __forceinline__ void multiplyPairs(float (*sums)[4], int end, const uint32_t (&aHi)[4],
                                              const uint32_t (&aLo)[4], uint32_t tile, int partBytes, Load load) {
    uint32_t b[kEnd - kFirst][4];
    const auto loadAll = [&](uint32_t from) {
#pragma unroll
        for (int p = kFirst; p < kEnd; p++)
            if (p < end) load(b[p - kFirst], from, p);
    };
    const auto multiplyAll = [&](const uint32_t (&a)[4]) {
#pragma unroll
        for (int p = kFirst; p < kEnd; p++) {
            if (p >= end) break;
            multiplyAdd(sums[2 * p], a, b[p - kFirst][0], b[p - kFirst][1]);
            multiplyAdd(sums[2 * p + 1], a, b[p - kFirst][2], b[p - kFirst][3]);
        }
    };
    loadAll(tile);
    multiplyAll(aHi);
    if constexpr (kSplit) {
        multiplyAll(aLo);
        loadAll(tile + partBytes);
        multiplyAll(aHi);
    }
}

// Starts the copies of kRows contiguous rows of kBytes. thread: of kThreads that do this.
template <int kThreads, int kBytes, int kRows>
__device__ __forceinline__ void copyRows(uint32_t to, const uint8_t* from, int thread) {
    constexpr int kChunks16 = kBytes / 16, kAtOnce = kThreads / kChunks16;
    static_assert(kThreads % kChunks16 == 0 && kRows % kAtOnce == 0, "a thread has a column of chunks");
    const int row = thread / kChunks16, chunk = thread % kChunks16;
    from += thread * 16;
#pragma unroll
    for (int i = 0; i < kRows; i += kAtOnce) copyChunk(to + chunkAt<kBytes>(row + i, chunk), from + i * kBytes, true);
}

// Starts the copies of `count` rows of a head's queries or keys. The rest of the chunk becomes zeros.
template <class C, int kThreads>
__device__ __forceinline__ void copyHead(const ChunkWork& work, uint32_t to, int64_t firstRow, int count,
                                         int64_t firstColumn) {
    constexpr int kAtOnce = kThreads / C::kRowChunks16;
    static_assert(kThreads % C::kRowChunks16 == 0 && kChunk % kAtOnce == 0, "a thread has a column of chunks");
    const int64_t stride = 2 * work.keyWidth();
    const int first = threadIdx.x / C::kRowChunks16, chunk = threadIdx.x % C::kRowChunks16;
    const int64_t begin = firstRow * stride + firstColumn, step = kAtOnce * stride;
    int64_t at = begin + first * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < kChunk; i += kAtOnce, at += step) {
        const int row = first + i;
        const bool valid = row < count && chunk * 8 < work.dim;
        const int64_t from = valid ? at : begin;
        copyChunk(to + chunkAt<C::kRowBytes>(row, chunk), work.queriesAndKeys.hi + from, valid);
        if constexpr (C::kSplit)
            copyChunk(to + C::kTileBytes + chunkAt<C::kRowBytes>(row, chunk), work.queriesAndKeys.lo + from, valid);
    }
}

}  // namespace sharpi::cuda
