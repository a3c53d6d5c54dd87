// Gated DeltaNet's delta rule of many rows, a chunk of up to 64 at a time, on tensor cores (the WY form of Yang et al., 2024,
// "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", with the decays of Gated DeltaNet).
//
// Of a chunk with rows 0 .. C - 1, state S before it, decays a, steps b, let ratio(t, s) = a[s + 1] .. a[t] and
// gain(t) = a[0] .. a[t]. What the rule adds to the state, d[t] by key k[t], solves a triangular system:
//   d[t] = b[t] (v[t] - gain(t) S' k[t] - sum over s < t of ratio(t, s) (k[t] . k[s]) d[s])
// Its solution is linear in S: D = U - W S, where U and W are the solutions for the values and for b[t] gain(t) k[t]. Then
//   o[t] = gain(t) S' q[t] + sum over s <= t of ratio(t, s) (q[t] . k[s]) d[s]
//   S    = gain(C - 1) S + sum over s of ratio(C - 1, s) k[s] d[s]'
//
// Two launches. The first knows no state and takes all chunks at once: a block makes the products of a chunk's keys and queries
// on tensor cores, and then a thread for each column of U and W solves the system in registers, in floats. Ratios are products, not
// quotients or differences of logarithms, so that nothing is lost where a decay is next to zero.
// The second walks through a sequence's chunks. A warp has 16 columns of a head's state in registers, turned (S', as
// accumulators of m16n8k16), which is how the next product wants its left operand: neither the state nor D ever leaves the
// registers, and warps do not meet. W, keys, queries and the weights of D pass through shared memory, those for
// D and S' q of the next chunk on their way while the rest of this one is computed. A third launch norms and gates.
//
// In split form every operand is the sum of two 16-bit numbers and a product is hi hi + hi lo + lo hi: about 16 bits of each
// factor. Sums and state are floats in both forms.
#include "kernels/attention.cuh"
#include "kernels/gated_delta.h"
#include "kernels/mma.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kChunk = kDeltaChunk;
constexpr int kMaxStateWarps = 4;      // 64 columns of a state a block
constexpr int kSystemPitch = kChunk + 4;

// kDim: dim padded with zeros to 16, 32, 64 or 128.
template <int kDim_, bool kSplit_> struct Chunks {
    static constexpr int kDim = kDim_;
    static constexpr bool kSplit = kSplit_;
    static constexpr int kParts = kSplit ? 2 : 1;
    static constexpr int kRowBytes = 2 * kDim, kRowChunks16 = kDim / 8;
    static constexpr int kTileBytes = kChunk * kRowBytes;     // keys, queries or W of a chunk, hi or lo
    static constexpr int kWeightBytes = kChunk * kChunk * 2;  // of D, hi or lo
    // What a chunk of a head leaves for the second kernel: W, the weights of D, gains and last ratios.
    static constexpr int kLeftBytes = kParts * (kTileBytes + kWeightBytes) + 2 * kChunk * 4;
    // The first kernel: a thread for each column of U and W.
    static constexpr int kThreads = 2 * kDim;
    static constexpr int kSystemBytes = 2 * kParts * kTileBytes + 2 * kChunk * kSystemPitch * 4 + 3 * kChunk * 4;
};

// The second kernel. kAhead: it has room for all that it uses of a chunk; where a device has less shared memory, keys
// and the weights of D take the place of W and queries once those are used.
template <int kDim, bool kSplit, bool kAhead_> struct StateChunks : Chunks<kDim, kSplit> {
    using Base = Chunks<kDim, kSplit>;
    static constexpr bool kAhead = kAhead_;
    static constexpr int kWarps = kDim / 16 < kMaxStateWarps ? kDim / 16 : kMaxStateWarps;
    static constexpr int kFirstBytes = Base::kParts * 2 * Base::kTileBytes;
    static constexpr int kSecondBytes = Base::kParts * (Base::kTileBytes + Base::kWeightBytes);
    static constexpr int kSecondAt = kAhead ? kFirstBytes : 0;
    static constexpr int kGainsAt = kAhead ? kFirstBytes + kSecondBytes : kFirstBytes > kSecondBytes ? kFirstBytes : kSecondBytes;
    static constexpr int kStateBytes = kGainsAt + 2 * kChunk * 4;
};

struct ChunkWork {
    float* mixed;  // the values become U
    const float *decay, *step;
    HalfRows queriesAndKeys;  // [rows, 2 * keyHeads * dim]
    int32_t keyHeads, valueHeads, dim;
    float* states;
    const int32_t *from, *to;
    RowRanges sequences, tiles;
    int2* tileAt;   // [rows]: where a tile begins, which it is and where it ends
    uint8_t* left;  // [tiles, valueHeads, kLeftBytes]
    float* out;     // [rows, valueHeads * dim]

    __device__ __forceinline__ int64_t keyWidth() const { return int64_t{keyHeads} * dim; }
    __device__ __forceinline__ int64_t channels() const { return 2 * keyWidth() + int64_t{valueHeads} * dim; }
};

// Where 16 bytes of a row of kBytes lie: exchanged so that eight rows' chunks of one column are in different banks.
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

// The right operand of a product by rows of shared memory, 16 (along n) x 16 (along k) at (row, column): b[0], b[1] for the
// first eight rows, b[2], b[3] for the next.
template <int kBytes> __device__ __forceinline__ void loadRight(uint32_t (&b)[4], uint32_t tile, int row, int column) {
    const int lane = threadIdx.x & 31;
    loadMatrices(b, tile + chunkAt<kBytes>(row + (lane & 7) + (lane >> 4) * 8, column / 8 + (lane >> 3 & 1)));
}

// The left operand, 16 x 16 at (row, column).
template <int kBytes> __device__ __forceinline__ void loadLeft(uint32_t (&a)[4], uint32_t tile, int row, int column) {
    const int lane = threadIdx.x & 31;
    loadMatrices(a, tile + chunkAt<kBytes>(row + (lane & 15), column / 8 + (lane >> 4)));
}

// The right operand where k runs along shared memory's rows: 16 (along k) x 16 (along n), b as in loadRight.
template <int kBytes> __device__ __forceinline__ void loadRightTurned(uint32_t (&b)[4], uint32_t tile, int row, int column) {
    const int lane = threadIdx.x & 31;
    loadMatricesTurned(b, tile + chunkAt<kBytes>(row + (lane & 15), column / 8 + (lane >> 4)));
}

// A left operand in registers, from the accumulators of two neighbouring 16 x 8 results.
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

// sums[2 p], sums[2 p + 1] += a b for right operands p of [kFirst, min(kEnd, end)); load(b, tile, p) reads one, the low parts lie
// partBytes behind. Each accumulator waits for its last product, so all take their turn before one has its next.
template <bool kSplit, int kFirst, int kEnd, typename Load>
__device__ __forceinline__ void multiplyPairs(float (*sums)[4], int end, const uint32_t (&aHi)[4], const uint32_t (&aLo)[4], uint32_t tile,
                                              int partBytes, Load load) {
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

// Starts the copies of `count` rows of a head's queries or keys; zeros where there is nothing.
template <class C>
__device__ __forceinline__ void copyHead(const ChunkWork& work, uint32_t to, int64_t firstRow, int count, int64_t firstColumn) {
    const int64_t stride = 2 * work.keyWidth();
    for (int i = threadIdx.x; i < kChunk * C::kRowChunks16; i += blockDim.x) {
        const int row = i / C::kRowChunks16, chunk = i % C::kRowChunks16;
        const bool valid = row < count && chunk * 8 < work.dim;
        const int64_t at = valid ? (firstRow + row) * stride + firstColumn + chunk * 8 : 0;
        copyChunk(to + chunkAt<C::kRowBytes>(row, chunk), work.queriesAndKeys.hi + at, valid);
        if constexpr (C::kSplit) copyChunk(to + C::kTileBytes + chunkAt<C::kRowBytes>(row, chunk), work.queriesAndKeys.lo + at, valid);
    }
}

// --- the first kernel ------------------------------------------------------------------------------------------------

// What a block of it has in shared memory.
template <class C> struct SystemBlock {
    uint32_t keys, queries;
    float *matrix, *ratio;  // [kChunk, kSystemPitch]
    float *gain, *step, *decay;

    __device__ __forceinline__ explicit SystemBlock(uint8_t* memory)
        : keys(sharedAddress(memory)), queries(keys + C::kParts * C::kTileBytes),
          matrix(reinterpret_cast<float*>(memory + 2 * C::kParts * C::kTileBytes)), ratio(matrix + kChunk * kSystemPitch),
          gain(ratio + kChunk * kSystemPitch), step(gain + kChunk), decay(step + kChunk) {}
};

// ratio(t, s) for all s <= t, and the gains.
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

// A warp's job of eight: 16 rows of the keys' or the queries' products with the keys. Of the keys they become the system's matrix,
// of the queries the weights of D. Later rows have more to do: warps j and j + 4, which share a scheduler, have 80 together.
template <class C> __device__ __forceinline__ void multiplyRows(const SystemBlock<C>& system, int job, uint8_t* weights) {
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
        multiplyPairs<C::kSplit, 0, 4>(sums, row / 16 + 1, aHi, aLo, system.keys, C::kTileBytes, [&](uint32_t (&b)[4], uint32_t tile, int p) {
            loadRight<C::kRowBytes>(b, tile, p * 16, column);
        });
    }
#pragma unroll
    for (int n = 0; n < kChunk / 8; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = row + lane / 4 + half * 8, s = n * 8 + lane % 4 * 2;
            const float2 ratio = *reinterpret_cast<const float2*>(system.ratio + t * kSystemPitch + s);
            const float x = sums[n][2 * half] * ratio.x, y = sums[n][2 * half + 1] * ratio.y;
            if (isKeys) {
                const float step = system.step[t];
                *reinterpret_cast<float2*>(system.matrix + t * kSystemPitch + s) = {x * step, y * step};
                continue;
            }
            auto* to = reinterpret_cast<uint32_t*>(weights + (t * kChunk + s) * 2);
            const uint32_t pair = packPair(x, y);
            *to = pair;
            if constexpr (C::kSplit) {
                const float2 kept = unpackPair(pair);
                to[C::kWeightBytes / 4] = packPair(x - kept.x, y - kept.y);
            }
        }
    }
}

// x[t] -= sum over s < t of matrix(t, s) x[s], t ascending.
__device__ __forceinline__ void solve(float (&x)[kChunk], const float* matrix) {
#pragma unroll
    for (int t = 1; t < kChunk; t++) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int s = 0; s < t; s += 4) {
            const float4 m = *reinterpret_cast<const float4*>(matrix + t * kSystemPitch + s);
            sum.x = fmaf(m.x, x[s], sum.x);
            if (s + 1 < t) sum.y = fmaf(m.y, x[s + 1], sum.y);
            if (s + 2 < t) sum.z = fmaf(m.z, x[s + 2], sum.z);
            if (s + 3 < t) sum.w = fmaf(m.w, x[s + 3], sum.w);
        }
        x[t] -= (sum.x + sum.y) + (sum.z + sum.w);
    }
}

// Chunk blockIdx.y of value head blockIdx.x.
template <class C> __global__ void __launch_bounds__(C::kThreads, C::kDim >= 128 ? 2 : 1) systemKernel(ChunkWork work) {
    extern __shared__ __align__(128) uint8_t memory[];
    allowNext();
    waitForPrevious();
    const int64_t begin = work.tiles.begin[blockIdx.y], end = work.tiles.end[blockIdx.y];
    if (begin >= end) return;
    const int head = blockIdx.x, keyHead = head % work.keyHeads, count = static_cast<int>(end - begin);
    const SystemBlock<C> system(memory);
    copyHead<C>(work, system.queries, begin, count, int64_t{keyHead} * work.dim);
    copyHead<C>(work, system.keys, begin, count, work.keyWidth() + int64_t{keyHead} * work.dim);
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
    for (int job = threadIdx.x >> 5; job < 8; job += C::kThreads / 32) multiplyRows(system, job, left + C::kParts * C::kTileBytes);
    auto* gains = reinterpret_cast<float*>(left + C::kParts * (C::kTileBytes + C::kWeightBytes));
    for (int t = threadIdx.x; t < kChunk; t += C::kThreads) {
        gains[t] = system.gain[t];
        gains[kChunk + t] = system.ratio[(kChunk - 1) * kSystemPitch + t];
    }
    // The right sides: a column of the values or of the keys.
    const bool isValue = threadIdx.x < C::kDim;
    const int column = isValue ? threadIdx.x : threadIdx.x - C::kDim;
    const int64_t firstColumn = isValue ? 2 * work.keyWidth() + int64_t{head} * work.dim : work.keyWidth() + int64_t{keyHead} * work.dim;
    float* lines = work.mixed + begin * work.channels() + firstColumn + column;
    const bool exists = column < work.dim;
    float x[kChunk];
#pragma unroll
    for (int t = 0; t < kChunk; t++) x[t] = exists && t < count ? lines[t * work.channels()] : 0.0f;
    if (head == 0 && threadIdx.x == 0) work.tileAt[begin] = {static_cast<int>(blockIdx.y), static_cast<int>(end)};
    __syncthreads();

#pragma unroll
    for (int t = 0; t < kChunk; t++) x[t] *= isValue ? system.step[t] : system.step[t] * system.gain[t];
    solve(x, system.matrix);
    auto* w = reinterpret_cast<uint16_t*>(left) + column;
#pragma unroll
    for (int t = 0; t < kChunk; t++) {
        if (isValue) {
            if (exists && t < count) lines[t * work.channels()] = x[t];
            continue;
        }
        const HalfPair pair = splitHalf(x[t]);
        w[t * C::kDim] = pair.hi;
        if constexpr (C::kSplit) w[C::kTileBytes / 2 + t * C::kDim] = pair.lo;
    }
}

// --- the second kernel -----------------------------------------------------------------------------------------------

struct Tile {
    int64_t begin;
    int index, count;

    __device__ __forceinline__ Tile(const ChunkWork& work, int64_t begin) : begin(begin) {
        const int2 at = work.tileAt[begin];
        index = at.x;
        count = static_cast<int>(at.y - begin);
    }
};

template <class C> struct StateBlock {
    uint32_t w, queries, keys, weights;
    float *gain, *last;

    __device__ __forceinline__ explicit StateBlock(uint8_t* memory)
        : w(sharedAddress(memory)), queries(w + C::kParts * C::kTileBytes), keys(w + C::kSecondAt), weights(keys + C::kParts * C::kTileBytes),
          gain(reinterpret_cast<float*>(memory + C::kGainsAt)), last(gain + kChunk) {}

    static __device__ __forceinline__ const uint8_t* left(const ChunkWork& work, const Tile& tile) {
        return work.left + (int64_t{tile.index} * work.valueHeads + blockIdx.x) * C::kLeftBytes;
    }

    // W and queries: one group.
    __device__ __forceinline__ void copyFirst(const ChunkWork& work, const Tile& tile) const {
        const uint8_t* from = left(work, tile);
        for (int i = threadIdx.x; i < C::kParts * kChunk * C::kRowChunks16; i += blockDim.x) {
            const int row = i / C::kRowChunks16;  // of hi, then of lo
            copyChunk(w + chunkAt<C::kRowBytes>(row, i % C::kRowChunks16), from + i * 16, true);
        }
        copyHead<C>(work, queries, tile.begin, tile.count, int64_t{blockIdx.x % work.keyHeads} * work.dim);
        closeCopies();
    }

    // The weights of D, and keys: another.
    __device__ __forceinline__ void copySecond(const ChunkWork& work, const Tile& tile) const {
        const uint8_t* from = left(work, tile) + C::kParts * C::kTileBytes;
        for (int i = threadIdx.x; i < C::kParts * kChunk * 8; i += blockDim.x) {
            copyChunk(weights + chunkAt<2 * kChunk>(i / 8, i % 8), from + i * 16, true);
        }
        copyHead<C>(work, keys, tile.begin, tile.count, work.keyWidth() + int64_t{blockIdx.x % work.keyHeads} * work.dim);
        closeCopies();
    }
};

// 16 columns of a head's state, turned: element (column lane / 4 + 8 h, line 8 n + 2 (lane % 4) + i) is state[n][2 h + i]. D and
// the output of a chunk lie alike, with rows of the chunk for lines.
template <class C> struct StateColumns {
    float state[C::kDim / 8][4];
    int column, line;  // of state[0][0]

    __device__ __forceinline__ StateColumns()
        : column((blockIdx.y * C::kWarps + (threadIdx.x >> 5)) * 16 + (threadIdx.x & 31) / 4), line(threadIdx.x % 4 * 2) {}

    // each(value, line, column) for those that exist.
    template <int kCount, typename Each>
    __device__ __forceinline__ void forEach(float (&values)[kCount][4], int lines, int columns, Each each) const {
#pragma unroll
        for (int n = 0; n < kCount; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int l = n * 8 + line + (i & 1), c = column + (i >> 1) * 8;
                if (l < lines && c < columns) each(values[n][i], l, c);
            }
    }

    // minusD = W S - U (given -U) and out = S' q.
    __device__ __forceinline__ void recall(const StateBlock<C>& block, float (&minusD)[kChunk / 8][4], float (&out)[kChunk / 8][4]) const {
#pragma unroll
        for (int k = 0; k < C::kDim / 16; k++) {
            const LeftOperand<C::kSplit> a(state[2 * k], state[2 * k + 1]);
            const auto load = [&](uint32_t (&b)[4], uint32_t tile, int p) { loadRight<C::kRowBytes>(b, tile, p * 16, k * 16); };
            multiplyPairs<C::kSplit, 0, kPairs>(minusD, kPairs, a.hi, a.lo, block.w, C::kTileBytes, load);
            multiplyPairs<C::kSplit, 0, kPairs>(out, kPairs, a.hi, a.lo, block.queries, C::kTileBytes, load);
        }
    }

    // out = gain * out + weights D.
    __device__ __forceinline__ void answer(const StateBlock<C>& block, const float (&d)[kChunk / 8][4], float (&out)[kChunk / 8][4]) const {
#pragma unroll
        for (int n = 0; n < kChunk / 8; n++) {
            const float2 gain = *reinterpret_cast<const float2*>(block.gain + n * 8 + line);
            out[n][0] *= gain.x, out[n][1] *= gain.y, out[n][2] *= gain.x, out[n][3] *= gain.y;
        }
        // Row s of D has no weight in rows before s.
        addWeighted<0>(block, d, out);
        addWeighted<1>(block, d, out);
        addWeighted<2>(block, d, out);
        addWeighted<3>(block, d, out);
    }

    // state = gain * state + (ratios * D) keys; d is changed.
    __device__ __forceinline__ void update(const StateBlock<C>& block, float (&d)[kChunk / 8][4]) {
        const float gain = block.gain[kChunk - 1];
#pragma unroll
        for (int n = 0; n < C::kDim / 8; n++) {
            state[n][0] *= gain, state[n][1] *= gain, state[n][2] *= gain, state[n][3] *= gain;
        }
#pragma unroll
        for (int n = 0; n < kChunk / 8; n++) {
            const float2 ratio = *reinterpret_cast<const float2*>(block.last + n * 8 + line);
            d[n][0] *= ratio.x, d[n][1] *= ratio.y, d[n][2] *= ratio.x, d[n][3] *= ratio.y;
        }
#pragma unroll
        for (int k = 0; k < kChunk / 16; k++) {
            const LeftOperand<C::kSplit> a(d[2 * k], d[2 * k + 1]);
            const auto load = [&](uint32_t (&b)[4], uint32_t tile, int p) { loadRightTurned<C::kRowBytes>(b, tile, k * 16, p * 16); };
            constexpr int kStatePairs = C::kDim / 16, kAtOnce = kStatePairs < 4 ? kStatePairs : 4;
            multiplyPairs<C::kSplit, 0, kAtOnce>(state, kAtOnce, a.hi, a.lo, block.keys, C::kTileBytes, load);
            if constexpr (kStatePairs > 4) {
                multiplyPairs<C::kSplit, 4, kStatePairs>(state, kStatePairs, a.hi, a.lo, block.keys, C::kTileBytes, load);
            }
        }
    }

private:
    static constexpr int kPairs = kChunk / 16;

    // out += what rows 16 kStep .. 16 kStep + 15 of D have in it.
    template <int kStep>
    __device__ __forceinline__ void addWeighted(const StateBlock<C>& block, const float (&d)[kChunk / 8][4], float (&out)[kChunk / 8][4]) const {
        const LeftOperand<C::kSplit> a(d[2 * kStep], d[2 * kStep + 1]);
        const auto load = [&](uint32_t (&b)[4], uint32_t tile, int p) { loadRight<2 * kChunk>(b, tile, p * 16, kStep * 16); };
        multiplyPairs<C::kSplit, kStep, kPairs>(out, kPairs, a.hi, a.lo, block.weights, C::kWeightBytes, load);
    }
};

// Value head blockIdx.x, columns of blockIdx.y, through the chunks of sequence blockIdx.z.
template <class C> __global__ void __launch_bounds__(C::kWarps * 32) stateKernel(ChunkWork work) {
    extern __shared__ __align__(128) uint8_t memory[];
    allowNext();
    const int64_t begin = work.sequences.begin[blockIdx.z], end = work.sequences.end[blockIdx.z];
    if (begin >= end) return waitForPrevious();
    const int head = blockIdx.x, dim = work.dim, channels = static_cast<int>(work.channels()), width = work.valueHeads * dim;
    const int64_t matrix = int64_t{dim} * dim, slot = matrix * work.valueHeads;
    float* states = work.states + head * matrix;
    const int from = work.from[begin];
    const StateBlock<C> block(memory);
    StateColumns<C> columns;
    columns.forEach(columns.state, C::kDim, C::kDim, [&](float& x, int line, int column) {
        x = from >= 0 && line < dim && column < dim ? states[from * slot + (line * dim + column)] : 0.0f;
    });
    waitForPrevious();

    Tile tile(work, begin);
    block.copyFirst(work, tile);
    if (C::kAhead) block.copySecond(work, tile);
    while (true) {
        const float* gains = reinterpret_cast<const float*>(StateBlock<C>::left(work, tile) + C::kParts * (C::kTileBytes + C::kWeightBytes));
        for (int t = threadIdx.x; t < 2 * kChunk; t += blockDim.x) block.gain[t] = gains[t];
        float d[kChunk / 8][4] = {}, out[kChunk / 8][4] = {};
        const float* u = work.mixed + tile.begin * work.channels() + 2 * work.keyWidth() + int64_t{head} * dim;
        columns.forEach(d, tile.count, dim, [&](float& x, int row, int column) { x = -u[row * channels + column]; });
        waitForCopies<C::kAhead ? 1 : 0>();
        __syncthreads();
        columns.recall(block, d, out);
#pragma unroll
        for (int n = 0; n < kChunk / 8; n++) d[n][0] = -d[n][0], d[n][1] = -d[n][1], d[n][2] = -d[n][2], d[n][3] = -d[n][3];
        // From here on what recall read may be overwritten, and what the rest reads is there.
        if (!C::kAhead) {
            __syncthreads();
            block.copySecond(work, tile);
        }
        waitForCopies<0>();
        __syncthreads();

        const int64_t next = tile.begin + tile.count;
        const Tile following(work, next < end ? next : tile.begin);
        if (C::kAhead && next < end) block.copyFirst(work, following);
        columns.answer(block, d, out);
        float* answers = work.out + tile.begin * width + int64_t{head} * dim;
        columns.forEach(out, tile.count, dim, [&](float& x, int row, int column) { answers[row * width + column] = x; });
        columns.update(block, d);
        const int to = work.to[next - 1];
        if (to >= 0) {
            float* kept = states + to * slot;
            columns.forEach(columns.state, dim, dim, [&](float& x, int line, int column) { kept[line * dim + column] = x; });
        }
        if (next >= end) return;
        __syncthreads();
        if (C::kAhead) block.copySecond(work, following);
        else block.copyFirst(work, following);
        tile = following;
    }
}

template <class C> void launchState(Stream& stream, const ChunkWork& work) {
    allowShared(stateKernel<C>, C::kStateBytes);
    const auto columns = static_cast<unsigned>((work.dim + 16 * C::kWarps - 1) / (16 * C::kWarps));
    const dim3 grid(static_cast<unsigned>(work.valueHeads), columns, static_cast<unsigned>(work.sequences.count));
    launch(stream, stateKernel<C>, grid, dim3(C::kWarps * 32), C::kStateBytes, work);
}

// Whether the device has the shared memory.
template <int kDim, bool kSplit> bool launchChunks(Stream& stream, const ChunkWork& work) {
    using System = Chunks<kDim, kSplit>;
    using Ahead = StateChunks<kDim, kSplit, true>;
    using Least = StateChunks<kDim, kSplit, Ahead::kStateBytes <= System::kSystemBytes>;
    const int shared = sharedBytesPerBlock();
    if (shared < System::kSystemBytes || shared < Least::kStateBytes) return false;
    allowShared(systemKernel<System>, System::kSystemBytes);
    const dim3 grid(static_cast<unsigned>(work.valueHeads), static_cast<unsigned>(work.tiles.count));
    launch(stream, systemKernel<System>, grid, dim3(System::kThreads), System::kSystemBytes, work);
    if (shared >= Ahead::kStateBytes) launchState<Ahead>(stream, work);
    else launchState<Least>(stream, work);
    return true;
}

template <bool kSplit> bool launchSize(Stream& stream, const ChunkWork& work) {
    if (work.dim <= 16) return launchChunks<16, kSplit>(stream, work);
    if (work.dim <= 32) return launchChunks<32, kSplit>(stream, work);
    if (work.dim <= 64) return launchChunks<64, kSplit>(stream, work);
    return launchChunks<128, kSplit>(stream, work);
}

}  // namespace

void deltaRuleInChunks(Stream& stream, const DeltaInputs& in, const HalfRows& queriesAndKeys, const DeltaParameters& parameters,
                       const DeltaShape& shape, const DeltaStates& states, const DeltaBatch& batch, const RowRanges& tiles, void* scratch,
                       float* attended, const RowOutputs& out) {
    requireDelta(shape);
    auto* bytes = static_cast<uint8_t*>(scratch);
    const ChunkWork work = {in.mixed, in.alpha, in.beta, queriesAndKeys, shape.keyHeads, shape.valueHeads, shape.dim, states.matrix,
                            batch.from, batch.to, batch.sequences, tiles, reinterpret_cast<int2*>(bytes),
                            bytes + deltaTileListBytes(batch.rows), attended};
    const bool fits = queriesAndKeys.lo ? launchSize<true>(stream, work) : launchSize<false>(stream, work);
    if (!fits) deltaRule(stream, {in.mixed, in.alpha, in.beta, nullptr}, DeltaParameters(), shape, states, batch, {attended, {}, {}});
    gatedNorm(stream, attended, in.gate, parameters, shape, batch.rows, out);
}

}  // namespace sharpi::cuda
