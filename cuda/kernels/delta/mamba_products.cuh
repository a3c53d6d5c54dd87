// The first launch of Mamba 2's scan in chunks: what it makes of a batch without its states, for all chunks at once,
// and where the second launch finds it. See mamba_chunks.cu.
#pragma once

#include "kernels/delta/gated_delta.cuh"
#include "kernels/delta/gated_delta_chunks.cuh"
#include "kernels/delta/mamba.h"

namespace sharpi::cuda::mamba {

constexpr int kFirstLevel = 3, kLevels = 4;                   // blocks of 8, 16, 32 and 64 rows
constexpr int kTableFloats = (2 * kLevels + 1 + 8) * kChunk;  // of a head: see ScanTables
constexpr int kProductBytes = kChunk * kChunk * 4;            // of a group
constexpr int kFirstThreads = 256, kFirstHeads = kFirstThreads / 32;
constexpr int kConvertedPairs = 8;  // pairs of floats that a thread of the first kernel loads together

// kDim: stateDim, padded with zeros to 64, 128 or 256.
template <int kDim_> struct MambaChunks {
    static constexpr int kDim = kDim_;
    static constexpr int kRowBytes = 2 * kDim;
    static constexpr int kTileBytes = kChunk * kRowBytes;  // B or C of a chunk, hi or lo
    // What the first kernel leaves for each chunk of a group: B and C, the low halves behind the high ones; products.
    static constexpr int kGroupBytes = 4 * kTileBytes + kProductBytes;
};

struct MambaChunkWork {
    MambaInputs in;
    const float* skip;
    MambaShape shape;
    float* states;
    const int32_t *from, *to;
    RowRanges sequences, tiles;
    int2* tileAt;     // [rows]: at the row where a tile begins, its number and its end
    float* tables;    // [tiles, heads, kTableFloats]
    uint8_t* groups;  // [tiles, groups, kGroupBytes]
};

// A head's tables of a chunk.
struct ScanTables {
    float* at;
    // [kLevels, kChunk]: the products of the decays from the beginning of row t's block to t, and of those after t to
    // the end of the block.
    __device__ __forceinline__ float* prefix(int level) const { return at + (level - kFirstLevel) * kChunk; }
    __device__ __forceinline__ float* suffix(int level) const { return prefix(level) + kLevels * kChunk; }
    __device__ __forceinline__ float* gain() const { return prefix(kFirstLevel + kLevels - 1); }
    __device__ __forceinline__ float* last() const { return suffix(kFirstLevel + kLevels - 1); }
    __device__ __forceinline__ float* step() const { return at + 2 * kLevels * kChunk; }
    // [kChunk, 8]: the ratios of row t and the eight rows around it; 0 for those after t.
    __device__ __forceinline__ float* near(int t) const { return step() + kChunk + t * 8; }
};

// The place of the product of rows t and s: the first four of eight neighbours lie in the first half of a row, so that
// the high and low halves of all eight fit into the same 16 bytes twice.
__device__ __forceinline__ int productAt(int t, int s) {
    return t * kChunk + (s & 4) * (kChunk / 8) + s / 8 * 4 + (s & 3);
}

// Converts B (if kIsC, C) of a chunk into halves, in shared memory and where the second kernel finds them.
template <class C, bool kIsC>
__device__ __forceinline__ void convertGroup(const MambaChunkWork& work, int group, int64_t begin, int count,
                                             uint8_t* tile, uint8_t* left) {
    constexpr int kRowPairs = C::kDim / 2;
    static_assert(kChunk * kRowPairs % (kFirstThreads * kConvertedPairs) == 0, "whole rounds");
    const MambaShape& shape = work.shape;
    const int channels = static_cast<int>(shape.channels());
    const float* from =
        work.in.mixed + begin * channels + shape.width() + int64_t{(kIsC ? shape.groups : 0) + group} * shape.stateDim;
    const auto placeOf = [](int i) { return int2{i / kRowPairs, i % kRowPairs * 2}; };
#pragma unroll 1
    for (int first = threadIdx.x; first < kChunk * kRowPairs; first += kFirstThreads * kConvertedPairs) {
        float2 x[kConvertedPairs];
#pragma unroll
        for (int k = 0; k < kConvertedPairs; k++) {
            const auto [row, n] = placeOf(first + k * kFirstThreads);
            x[k].x = row < count && n < shape.stateDim ? from[row * channels + n] : 0.0f;
            x[k].y = row < count && n + 1 < shape.stateDim ? from[row * channels + n + 1] : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < kConvertedPairs; k++) {
            const auto [row, n] = placeOf(first + k * kFirstThreads);
            storePair<true>(tile + chunkAt<C::kRowBytes>(row, n / 8) + n % 8 * 2, C::kTileBytes, x[k].x, x[k].y);
            storePair<true>(left + (row * C::kDim + n) * 2, C::kTileBytes, x[k].x, x[k].y);
        }
    }
}

// Each two warps make 16 rows of the products, up to the diagonal's block, with every other 16 columns.
template <class C> __device__ __forceinline__ void multiplyGroup(uint32_t b, uint32_t c, float* products) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, odd = warp & 1, row = warp / 2 * 16;
    const int pairs = (row / 16 + 2 - odd) / 2;
    float sums[4][4] = {};
#pragma unroll
    for (int column = 0; column < C::kDim; column += 16) {
        uint32_t aHi[4], aLo[4];
        loadLeft<C::kRowBytes>(aHi, c, row, column);
        loadLeft<C::kRowBytes>(aLo, c + C::kTileBytes, row, column);
        const auto load = [&](uint32_t (&right)[4], uint32_t tile, int p) {
            loadRight<C::kRowBytes>(right, tile, (2 * p + odd) * 16, column);
        };
        multiplyPairs<true, 0, 2>(sums, pairs, aHi, aLo, b, C::kTileBytes, load);
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        if (n / 2 >= pairs) break;
        const int t = row + lane / 4, s = (2 * (n / 2) + odd) * 16 + n % 2 * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(products + productAt(t, s)) = {sums[n][0], sums[n][1]};
        *reinterpret_cast<float2*>(products + productAt(t + 8, s)) = {sums[n][2], sums[n][3]};
    }
}

// A warp makes a head's tables. Rows past the end of the chunk have decays of 1 and steps of 0.
__device__ __forceinline__ void makeTables(const MambaChunkWork& work, int head, int64_t begin, int count,
                                           const ScanTables& tables) {
    const int lane = threadIdx.x & 31;
    float prefix[2], suffix[2] = {1.0f, 1.0f};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int t = lane + half * 32;
        const int64_t at = (begin + t) * work.shape.heads + head;
        prefix[half] = t < count ? work.in.decays[at] : 1.0f;
        tables.step()[t] = t < count ? work.in.steps[at] : 0.0f;
        float near[8], ratio = 0.0f;
#pragma unroll
        for (int k = 7; k >= 0; k--) {
            const int s = (lane & ~7) + k;
            const float after = __shfl_sync(kWholeWarp, prefix[half], (s + 1) & 31);
            near[k] = ratio = s > lane ? 0.0f : s == lane ? 1.0f : ratio * after;
        }
        auto* to = reinterpret_cast<float4*>(tables.near(t));
        to[0] = {near[0], near[1], near[2], near[3]}, to[1] = {near[4], near[5], near[6], near[7]};
    }
#pragma unroll
    for (int level = 1; level < kFirstLevel + kLevels; level++) {
        // Two blocks become one: the last prefixes of either are the products of all its decays.
        if (level < 6) {
            const int first = lane >> level << level, middle = first + (1 << (level - 1)), end = first + (1 << level);
            const bool upper = lane >= middle;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float lowest = __shfl_sync(kWholeWarp, prefix[half], (middle - 1) & 31),
                            highest = __shfl_sync(kWholeWarp, prefix[half], (end - 1) & 31);
                if (upper) prefix[half] *= lowest;
                else suffix[half] *= highest;
            }
        } else {
            const float lowest = __shfl_sync(kWholeWarp, prefix[0], 31),
                        highest = __shfl_sync(kWholeWarp, prefix[1], 31);
            prefix[1] *= lowest, suffix[0] *= highest;
        }
        if (level < kFirstLevel) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            tables.prefix(level)[lane + half * 32] = prefix[half];
            tables.suffix(level)[lane + half * 32] = suffix[half];
        }
    }
}

// Chunk blockIdx.y. The first blocks take a group each, the others kFirstHeads heads.
template <class C> __global__ void __launch_bounds__(kFirstThreads) mambaProductsKernel(const MambaChunkWork work) {
    extern __shared__ __align__(128) uint8_t memory[];
    allowNext();
    waitForPrevious();
    const int64_t begin = work.tiles.begin[blockIdx.y], end = work.tiles.end[blockIdx.y];
    if (begin >= end) return;
    const int count = static_cast<int>(end - begin), groups = work.shape.groups, heads = work.shape.heads;
    if (blockIdx.x == 0 && threadIdx.x == 0) work.tileAt[begin] = {static_cast<int>(blockIdx.y), static_cast<int>(end)};
    const int group = blockIdx.x;
    if (group >= groups) {
        const int head = (group - groups) * kFirstHeads + static_cast<int>(threadIdx.x >> 5);
        if (head < heads)
            makeTables(work, head, begin, count, {work.tables + (int64_t{blockIdx.y} * heads + head) * kTableFloats});
        return;
    }
    uint8_t* left = work.groups + (int64_t{blockIdx.y} * groups + group) * C::kGroupBytes;
    convertGroup<C, false>(work, group, begin, count, memory, left);
    convertGroup<C, true>(work, group, begin, count, memory + 2 * C::kTileBytes, left + 2 * C::kTileBytes);
    __syncthreads();
    const uint32_t b = sharedAddress(memory);
    multiplyGroup<C>(b, b + 2 * C::kTileBytes, reinterpret_cast<float*>(left + 4 * C::kTileBytes));
}

}  // namespace sharpi::cuda::mamba
