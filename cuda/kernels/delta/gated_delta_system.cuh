// The first kernel of the delta rule in chunks, which needs no state: it makes the triangular system of each chunk and
// solves it for the values and for the keys. gated_delta_chunks.cu has the equations and says why it is written so.
#pragma once

#include "kernels/delta/gated_delta_chunks.cuh"

namespace sharpi::cuda {

// The shared memory of one of its blocks.
template <class C> struct SystemBlock {
    uint32_t keys, queries;
    // The system in the form that the solution multiplies by: its 16 x 16 blocks below the diagonal with their signs
    // changed, and the inverses of those on it. In halves: kWeightBytes for the high halves, then the low halves.
    uint8_t* matrix;
    float* ratio;  // [kChunk, kSystemPitch]
    float *gain, *step, *decay;

    __device__ __forceinline__ explicit SystemBlock(uint8_t* memory)
        : keys(sharedAddress(memory)),
          queries(keys + C::kParts * C::kTileBytes),
          matrix(memory + 2 * C::kParts * C::kTileBytes),
          ratio(reinterpret_cast<float*>(matrix + 2 * C::kWeightBytes)),
          gain(ratio + kChunk * kSystemPitch),
          step(gain + kChunk),
          decay(step + kChunk) {}

    // Block b of the diagonal before it is inverted, in rows of kSystemPitch. It uses the part of `ratio` that has no
    // ratios.
    __device__ __forceinline__ float* diagonal(int b) const {
        return ratio + (b < 3 ? b * 16 * kSystemPitch + b * 16 + 16 : 32);
    }
    // The address of element s of row t; of two neighbouring elements if s is even.
    __device__ __forceinline__ uint8_t* at(int t, int s) const {
        return matrix + chunkAt<2 * kChunk>(t, s / 8) + s % 8 * 2;
    }
};

// Makes ratio(t, s) for all s <= t, and the gains.
template <class C> __device__ __forceinline__ void makeRatios(const SystemBlock<C>& system) {
    for (int s = threadIdx.x; s <= kChunk; s += C::kThreads) {
        float product = 1.0f;
        if (s == kChunk) {
#pragma unroll 16
            for (int t = 0; t < kChunk; t++) system.gain[t] = product *= system.decay[t];
            continue;
        }
#pragma unroll 16
        for (int t = 0; t < kChunk; t++) {
            product *= t > s ? system.decay[t] : 1.0f;
            system.ratio[t * kSystemPitch + s] = t < s ? 0.0f : product;
        }
    }
}

// One of eight jobs for the warps: 16 rows of the products of the keys, or of the queries, with the keys, up to the
// diagonal's blocks. Those of the keys become the system's matrix, those of the queries the weights of D. Later rows
// take more work, so warps j and j + 4, which share a scheduler, have 80 columns together.
template <class C>
__device__ __forceinline__ void multiplyRows(const SystemBlock<C>& system, int job, uint8_t* weights) {
    const int lane = threadIdx.x & 31;
    const bool isKeys = job < 4;
    const int row = (isKeys ? job : 7 - job) * 16;
    const uint32_t left = isKeys ? system.keys : system.queries;
    float sums[kChunk / 8][4] = {};
#pragma unroll
    for (int column = 0; column < C::kDim; column += 16) {
        uint32_t aHi[4], aLo[4];
        loadLeft<C::kRowBytes>(aHi, left, row, column);
        if constexpr (C::kSplit) loadLeft<C::kRowBytes>(aLo, left + C::kTileBytes, row, column);
        const auto load = [&](uint32_t (&b)[4], uint32_t tile, int p) {
            loadRight<C::kRowBytes>(b, tile, p * 16, column);
        };
        multiplyPairs<C::kSplit, 0, 4>(sums, row / 16 + 1, aHi, aLo, system.keys, C::kTileBytes, load);
    }
#pragma unroll
    for (int n = 0; n < kChunk / 8; n++) {
        if (n * 8 > row + 8) break;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = row + lane / 4 + half * 8, s = n * 8 + lane % 4 * 2;
            const float2 ratio = *reinterpret_cast<const float2*>(system.ratio + t * kSystemPitch + s);
            const float x = sums[n][2 * half] * ratio.x, y = sums[n][2 * half + 1] * ratio.y;
            if (!isKeys) {
                storePair<C::kSplit>(weights + (t * kChunk + s) * 2, C::kWeightBytes, x, y);
                continue;
            }
            const float step = system.step[t];
            if (n * 8 < row) storePair<true>(system.at(t, s), C::kWeightBytes, -(x * step), -(y * step));
            else
                *reinterpret_cast<float2*>(system.diagonal(job) + (t - row) * kSystemPitch + (s - row)) = {x * step,
                                                                                                           y * step};
        }
    }
}

// Inverts 1 + the part below the diagonal in each of the diagonal's blocks, with a thread for each column.
template <class C> __device__ __forceinline__ void invertBlocks(const SystemBlock<C>& system) {
    for (int i = threadIdx.x; i < kChunk; i += C::kThreads) {
        const int first = i & ~15, column = i & 15;
        const float* rows = system.diagonal(i / 16);
        float x[16];
#pragma unroll
        for (int t = 0; t < 16; t++) {
            float sum = t == column ? 1.0f : 0.0f;
#pragma unroll
            for (int s = 0; s < t; s++) sum = fmaf(-rows[t * kSystemPitch + s], x[s], sum);
            x[t] = sum;
        }
#pragma unroll
        for (int t = 0; t < 16; t++) {
            const HalfPair pair = splitHalf(x[t]);
            auto* to = reinterpret_cast<uint16_t*>(system.at(first + t, i));
            to[0] = pair.hi;
            to[C::kWeightBytes / 2] = pair.lo;
        }
    }
}

// Solves for columns of U or W, given the right sides: x[n][2 h + i] is row 8 n + 2 (lane % 4) + i of column
// lane / 4 + 8 h. A step finishes rows 16 kStep and on, and then subtracts their part from the rows behind them.
template <class C, int kStep = 0>
__device__ __forceinline__ void solve(const SystemBlock<C>& system, float (&x)[kChunk / 8][4]) {
    constexpr int kPairs = kChunk / 16;
    const auto load = [&](uint32_t (&b)[4], uint32_t tile, int p) {
        loadRight<2 * kChunk>(b, tile, p * 16, kStep * 16);
    };
    const uint32_t matrix = sharedAddress(system.matrix);
    const LeftOperand<true> rest(x[2 * kStep], x[2 * kStep + 1]);
#pragma unroll
    for (int i = 0; i < 4; i++) x[2 * kStep][i] = x[2 * kStep + 1][i] = 0.0f;
    multiplyPairs<true, kStep, kStep + 1>(x, kPairs, rest.hi, rest.lo, matrix, C::kWeightBytes, load);
    if constexpr (kStep + 1 < kPairs) {
        const LeftOperand<true> solved(x[2 * kStep], x[2 * kStep + 1]);
        multiplyPairs<true, kStep + 1, kPairs>(x, kPairs, solved.hi, solved.lo, matrix, C::kWeightBytes, load);
        solve<C, kStep + 1>(system, x);
    }
}

// Calls each(value, row, column) for the values of 16 columns, the first of which is `column`.
template <typename Each>
__device__ __forceinline__ void forEachSolved(float (&x)[kChunk / 8][4], int column, Each each) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < kChunk / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) each(x[n][i], n * 8 + lane % 4 * 2 + (i & 1), column + lane / 4 + (i >> 1) * 8);
}

// Stores W in halves. Two lanes with neighbouring columns exchange values, so that each has both columns of one of
// their two rows.
template <class C>
__device__ __forceinline__ void storeSolved(const float (&x)[kChunk / 8][4], int column, uint8_t* w) {
    const int lane = threadIdx.x & 31, odd = lane >> 2 & 1;
    const int row = lane % 4 * 2 + odd, first = column + lane / 4 - odd;
#pragma unroll
    for (int n = 0; n < kChunk / 8; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float even = x[n][2 * h], other = x[n][2 * h + 1];
            const float got = __shfl_xor_sync(kWholeWarp, odd ? even : other, 4);
            storePair<C::kSplit>(w + ((n * 8 + row) * C::kDim + first + h * 8) * 2, C::kTileBytes, odd ? got : even,
                                 odd ? other : got);
        }
}

// Chunk blockIdx.y of value head blockIdx.x.
template <class C> __global__ void __launch_bounds__(C::kThreads, C::kDim >= 128 ? 2 : 1) systemKernel(ChunkWork work) {
    extern __shared__ __align__(128) uint8_t memory[];
    allowNext();
    waitForPrevious();
    const int64_t begin = work.tiles.begin[blockIdx.y], end = work.tiles.end[blockIdx.y];
    if (begin >= end) return;
    const int head = blockIdx.x, count = static_cast<int>(end - begin);
    const SystemBlock<C> system(memory);
    copyHead<C, C::kThreads>(work, system.queries, begin, count, work.keyChannel(head));
    copyHead<C, C::kThreads>(work, system.keys, begin, count, work.keyWidth() + work.keyChannel(head));
    closeCopies();
    for (int t = threadIdx.x; t < kChunk; t += C::kThreads) {
        const int64_t at = (begin + t) * work.valueHeads + head;
        system.decay[t] = t < count ? work.decay[at] : 1.0f;
        system.step[t] = t < count ? work.step[at] : 0.0f;
    }
    __syncthreads();
    makeRatios(system);
    waitForCopies<0>();
    __syncthreads();

    uint8_t* left = work.left + (int64_t{blockIdx.y} * work.valueHeads + head) * C::kLeftBytes;
    for (int job = threadIdx.x >> 5; job < 8; job += C::kThreads / 32)
        multiplyRows(system, job, left + C::kParts * C::kTileBytes);
    auto* gains = reinterpret_cast<float*>(left + C::kParts * (C::kTileBytes + C::kWeightBytes));
    for (int t = threadIdx.x; t < kChunk; t += C::kThreads) {
        gains[t] = system.gain[t];
        gains[kChunk + t] = system.ratio[(kChunk - 1) * kSystemPitch + t];
    }
    // The right sides, from the values and from the keys.
    const int channels = static_cast<int>(work.channels());
    float* values = work.mixed + begin * channels + 2 * work.keyWidth() + int64_t{head} * work.dim;
    const float* keys = work.mixed + begin * channels + work.keyWidth() + work.keyChannel(head);
    const int column = (threadIdx.x >> 5) * 16;
    float u[kChunk / 8][4], w[kChunk / 8][4];
    const auto exists = [&](int t, int c) { return t < count && c < work.dim; };
    forEachSolved(u, column, [&](float& x, int t, int c) { x = exists(t, c) ? values[t * channels + c] : 0.0f; });
    forEachSolved(w, column, [&](float& x, int t, int c) { x = exists(t, c) ? keys[t * channels + c] : 0.0f; });
    if (head == 0 && threadIdx.x == 0) work.tileAt[begin] = {static_cast<int>(blockIdx.y), static_cast<int>(end)};
    __syncthreads();
    invertBlocks(system);
    forEachSolved(u, column, [&](float& x, int t, int) { x *= system.step[t]; });
    forEachSolved(w, column, [&](float& x, int t, int) { x *= system.step[t] * system.gain[t]; });
    __syncthreads();
    solve(system, u);
    forEachSolved(u, column, [&](float& x, int t, int c) {
        if (exists(t, c)) values[t * channels + c] = x;
    });
    solve(system, w);
    storeSolved<C>(w, column, left);
}

}  // namespace sharpi::cuda
