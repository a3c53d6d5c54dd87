// What the kernels of prefill's attention share: how a block finds its rows and keys, how tiles lie in shared memory,
// and what a warp does with one tile of keys.
//
// Tiles of keys and values lie in shared memory as rows of 16-bit elements. Their 16-byte chunks are swizzled by the
// row's number, so that ldmatrix uses every bank once. A bf16 cache is copied there unchanged (cp.async), and other
// types are converted on the way.
//
// In split form every operand, weights included, is the sum of two 16-bit numbers, and a product is hi hi + hi lo +
// lo hi. That keeps about 16 bits of each factor. A bf16 cache has no low half. Before compute capability 8.0 the
// 16-bit type is f16.
//
// A kernel is compiled for a tile T, which says: kType, kDim (headDim padded with zeros), kSplit, kSplitKv, kHeads,
// kRows (of a head), kKeys, kThreads; kRuled, whether the rule may have more than a scale; kColumns, the number of
// warps that share 16 rows, of which each has kWarpDim elements of the output; and kSharesScores, whether these warps
// also divide the keys of a tile, kWarpKeys for each, else each has the scores of all of them.
#pragma once

#include <type_traits>

#include "kernels/attention/attention.cuh"
#include "kernels/matmul/mma.cuh"

namespace sharpi::cuda {

constexpr float kLog2E = 1.44269504088896341f;

struct PrefillArgs {
    HalfRows q;
    HeadShape shape;
    float scale;  // of scores, times log2 e; with a softcap, of tanh's result
    BatchRows batch;
    QueryTiles tiles;
    KvPages pages;
    RowOutputs out;
    int32_t valueDim;  // elements of a head's output
    float intoTanh;    // what a dot product is multiplied by to become tanh's argument; 0: no softcap
    AttentionReach reach;
    const float* sinks;  // [heads] or nullptr
};

// All take any rule: the first for heads of up to 256 elements, the second for larger ones, the third for latents.
void prefillRuled(Stream& stream, const PrefillArgs& args);
void prefillWide(Stream& stream, const PrefillArgs& args);
void prefillLatent(Stream& stream, const PrefillArgs& args);

// Calls f with KvTag<the cache's type> and whether products are split. Only a bf16 cache can do without: it has the
// operands' own type, and thus no low half.
template <typename F> void withPrefillForm(KvType type, bool splitQueries, const F& f) {
    withKvType(type, [&](auto tag) {
        if constexpr (decltype(tag)::kType == KvType::BF16) {
            if (!splitQueries) return f(tag, std::false_type{});
        }
        f(tag, std::true_type{});
    });
}

// What a block works on.
struct PrefillPlace {
    int64_t firstRow;
    int rows, head, kvHead, lastPosition;
    int firstKey, firstKeyOfLast;  // the first keys that the first row and the last row see
    const int32_t* table;
};

// Where a 16-byte chunk lies in a tile whose rows have kChunks of them.
template <int kChunks> __device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
    const int mixed = kChunks >= 8 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
    return static_cast<uint32_t>(row * (kChunks * 16) + mixed * 16);
}

template <class T> __device__ __forceinline__ uint32_t chunkAt(int row, int chunk) {
    return swizzled<T::kChunks>(row, chunk);
}

__device__ __forceinline__ void loadMatricesTurned(uint32_t (&out)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ float exp2Fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh with a relative error of about 4e-7. Near zero, where 1 - 2 / (1 + exp(2 x)) cancels, it is x + x^3 p(x^2), with
// p fitted to |x| < 0.6.
__device__ __forceinline__ float tanhFast(float x) {
    const float size = fabsf(x), square = __fmul_rn(x, x);
    float p = 0x1.ff9814p-7f;
    p = fmaf(p, square, -0x1.abb810p-5f);
    p = fmaf(p, square, 0x1.10a712p-3f);
    p = fmaf(p, square, -0x1.555368p-2f);
    const float near = fmaf(__fmul_rn(p, square), size, size);
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + exp2Fast(size * (2.0f * kLog2E))));
    return copysignf(size < 0.6f ? near : fmaf(-2.0f, inverse, 1.0f), x);
}

// The warps of a block are numbered by rows first.
template <class T> __device__ __forceinline__ int warpRow() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    return (T::kColumns == 1 ? warp : warp % (T::kRows / 16)) * 16;
}
template <class T> __device__ __forceinline__ int warpColumn() {
    return T::kColumns == 1 ? 0 : static_cast<int>(threadIdx.x) / 32 / (T::kRows / 16);
}
// The warp's first key in a tile of them.
template <class T> __device__ __forceinline__ int warpKey() {
    return T::kSharesScores ? warpColumn<T>() * T::kWarpKeys : 0;
}

// --- a block's place ---------------------------------------------------------------------------------------------

// The rows of a tile that this block computes. There may be none if the tile is short.
template <class T> __device__ __forceinline__ PrefillPlace findPlace(const PrefillArgs& args) {
    PrefillPlace place;
    const int64_t tile = args.tiles.count - 1 - blockIdx.y;
    place.firstRow = args.tiles.begin[tile] + static_cast<int>(blockIdx.z) * T::kRows;
    const int64_t left = args.tiles.end[tile] - place.firstRow;
    place.rows = static_cast<int>(left < T::kRows ? left : T::kRows);
    place.head = static_cast<int>(blockIdx.x) * T::kHeads;
    place.kvHead = place.head / (args.shape.heads / args.shape.kvHeads);
    place.firstKey = place.firstKeyOfLast = 0;
    if (place.rows <= 0) return place;
    place.lastPosition = args.batch.positions[place.firstRow + place.rows - 1];
    place.table = args.batch.pageTables + args.batch.sequence[place.firstRow] * args.batch.pagesPerTable;
    if constexpr (T::kRuled) {
        place.firstKey = args.reach.first(args.batch.positions[place.firstRow]);
        place.firstKeyOfLast = args.reach.first(place.lastPosition);
    }
    return place;
}

// Whether some row does not see all keys of the tile that begins with key `first`.
template <class T> __device__ __forceinline__ bool needsMask(const PrefillPlace& place, int firstPosition, int first) {
    return first + T::kKeys - 1 > firstPosition || (T::kRuled && first < place.firstKeyOfLast);
}

// --- into shared memory ------------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ void loadQueries(const PrefillArgs& args, const PrefillPlace& place, uint32_t hi,
                                            uint32_t lo) {
    const int64_t stride = static_cast<int64_t>(args.shape.heads) * args.shape.headDim;
    for (int i = threadIdx.x; i < T::kHeads * T::kRows * T::kChunks; i += T::kThreads) {
        const int line = i / T::kChunks, chunk = i % T::kChunks, row = line % T::kRows,
                  head = place.head + line / T::kRows;
        const bool valid = row < place.rows && chunk * 8 < args.shape.headDim;
        const int64_t at = valid ? (place.firstRow + row) * stride + head * args.shape.headDim + chunk * 8 : 0;
        copyChunk(hi + chunkAt<T>(line, chunk), args.q.hi + at, valid);
        if constexpr (T::kSplit) {
            const bool hasLow = valid && args.q.lo;
            copyChunk(lo + chunkAt<T>(line, chunk), hasLow ? args.q.lo + at : args.q.hi, hasLow);
        }
    }
}

template <class T>
__device__ __forceinline__ void convertChunk(uint32_t hiTo, uint32_t loTo, const uint8_t* from, bool valid) {
    float x[8] = {};
    if (valid) readElements<T::kType, 8>(from, x);
    uint32_t hi[4], lo[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        hi[i] = packPair(x[2 * i], x[2 * i + 1]);
        const float2 kept = unpackPair(hi[i]);
        lo[i] = packPair(x[2 * i] - kept.x, x[2 * i + 1] - kept.y);
    }
    storeShared(hiTo, {hi[0], hi[1], hi[2], hi[3]});
    if constexpr (T::kSplitKv) storeShared(loTo, {lo[0], lo[1], lo[2], lo[3]});
}

// Loads eight neighbouring elements of the cache. One that has the operands' own type is copied, and others converted.
template <class T>
__device__ __forceinline__ void loadChunk(uint32_t hiTo, uint32_t loTo, const uint8_t* from, bool valid) {
#if __CUDA_ARCH__ >= 800
    constexpr bool kAsItIs = T::kType == KvType::BF16;
#else
    constexpr bool kAsItIs = false;
#endif
    if constexpr (kAsItIs) copyChunk(hiTo, from, valid);
    else convertChunk<T>(hiTo, loTo, from, valid);
}

// Which half of the cache loadTile() loads.
struct BothHalves {
    static constexpr bool kKeys = true, kValues = true;
};
struct KeysAlone {
    static constexpr bool kKeys = true, kValues = false;
};
struct ValuesAlone {
    static constexpr bool kKeys = false, kValues = true;
};

// Loads keys, values or both of positions firstKey .. firstKey + kKeys - 1, values kValuesAt bytes behind keys. Instead
// of what none of the block's rows sees it stores zeros, since the memory there may hold anything.
template <class T, class Half>
__device__ __forceinline__ void loadTile(const PrefillArgs& args, const PrefillPlace& place, int firstKey,
                                         uint32_t stage) {
    constexpr int kElement = kKvBytes<T::kType>;
    const int dim = args.shape.headDim;
    const int64_t page = place.table[firstKey / kAttentionPage];
    const int64_t line = (page * args.shape.kvHeads + place.kvHead) * kAttentionPage + firstKey % kAttentionPage;
    const uint8_t *keys = args.pages.k + line * dim * kElement, *values = args.pages.v + line * dim * kElement;
    const uint32_t valueStage = stage + T::kValuesAt;
#pragma unroll 4
    for (int i = threadIdx.x; i < T::kKeys * T::kChunks; i += T::kThreads) {
        const int row = i / T::kChunks, chunk = i % T::kChunks;
        const bool isSeen = !T::kRuled || firstKey + row >= place.firstKey;
        const bool valid = isSeen && firstKey + row <= place.lastPosition && chunk * 8 < dim;
        const int at = valid ? (row * dim + chunk * 8) * kElement : 0;
        const uint32_t to = chunkAt<T>(row, chunk);
        if constexpr (Half::kKeys) loadChunk<T>(stage + to, stage + T::kPartBytes + to, keys + at, valid);
        if constexpr (Half::kValues) loadChunk<T>(valueStage + to, valueStage + T::kPartBytes + to, values + at, valid);
    }
}

// --- a warp's part -----------------------------------------------------------------------------------------------
// Of the warp's 16 rows of each head, a thread holds rows lane / 4 and lane / 4 + 8, with two of every 8 columns.

template <class T> struct PrefillWarp {
    float out[T::kHeads][T::kWarpDim / 8][4];
    float scores[T::kHeads][T::kWarpKeys / 8][4];
    float largest[T::kHeads][2], sum[T::kHeads][2];
    int position[2];
    uint32_t queries[T::kKeepsQueries ? T::kDim / 16 : 1][4];
};

// c0, c1 (16 x 8 each) += a times two neighbouring right operands.
template <class T>
__device__ __forceinline__ void multiplyPair(float (&c0)[4], float (&c1)[4], const uint32_t (&hi)[4],
                                             const uint32_t (&lo)[4], const uint32_t (&b)[4],
                                             const uint32_t (&bLo)[4]) {
    multiplyAdd(c0, hi, b[0], b[1]);
    multiplyAdd(c1, hi, b[2], b[3]);
    if constexpr (T::kSplit) {
        multiplyAdd(c0, lo, b[0], b[1]);
        multiplyAdd(c1, lo, b[2], b[3]);
    }
    if constexpr (T::kSplitKv) {
        multiplyAdd(c0, hi, bLo[0], bLo[1]);
        multiplyAdd(c1, hi, bLo[2], bLo[3]);
    }
}

// The address from which ldmatrix reads the left operand: 16 rows from firstRow on, 16 columns from chunk 2 * step on.
template <class T> __device__ __forceinline__ uint32_t leftAt(int firstRow, int step) {
    const int lane = threadIdx.x % 32;
    return chunkAt<T>(firstRow + lane % 16, 2 * step + lane / 16);
}

// scores = queries . keys
template <class T> __device__ __forceinline__ void multiplyKeys(PrefillWarp<T>& w, uint32_t queries, uint32_t keys) {
    const int lane = threadIdx.x % 32, firstKey = warpKey<T>();
    const int firstRow = T::kColumns == 1 ? threadIdx.x / 32 * 16 : warpRow<T>();
#pragma unroll
    for (int h = 0; h < T::kHeads; h++)
#pragma unroll
        for (int j = 0; j < T::kWarpKeys / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) w.scores[h][j][i] = 0.0f;
    const auto multiplyStep = [&](int step) {
        uint32_t hi[T::kHeads][4], lo[T::kHeads][4];
#pragma unroll
        for (int h = 0; h < T::kHeads; h++) {
            if constexpr (T::kKeepsQueries) {
#pragma unroll
                for (int i = 0; i < 4; i++) hi[h][i] = w.queries[step][i];
            } else {
                const uint32_t at = queries + leftAt<T>(h * T::kRows + firstRow, step);
                loadMatrices(hi[h], at);
                if constexpr (T::kSplit) loadMatrices(lo[h], at + T::kQueryPartBytes);
            }
        }
#pragma unroll
        for (int j = 0; j < T::kWarpKeys / 16; j++) {
            const uint32_t at =
                keys + chunkAt<T>(firstKey + 16 * j + lane / 16 * 8 + lane % 8, 2 * step + (lane >> 3 & 1));
            uint32_t b[4], bLo[4];
            loadMatrices(b, at);
            if constexpr (T::kSplitKv) loadMatrices(bLo, at + T::kPartBytes);
#pragma unroll
            for (int h = 0; h < T::kHeads; h++)
                multiplyPair<T>(w.scores[h][2 * j], w.scores[h][2 * j + 1], hi[h], lo[h], b, bLo);
        }
    };
    if constexpr (T::kDim <= 256) {
#pragma unroll
        for (int step = 0; step < T::kDim / 16; step++) multiplyStep(step);
    } else {
#pragma unroll 4  // 128 bytes, after which the swizzle repeats
        for (int step = 0; step < T::kDim / 16; step++) multiplyStep(step);
    }
}

template <class T> __device__ __forceinline__ void capScores(PrefillWarp<T>& w, float intoTanh) {
#pragma unroll
    for (int h = 0; h < T::kHeads; h++)
#pragma unroll
        for (int j = 0; j < T::kWarpKeys / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) w.scores[h][j][i] = tanhFast(__fmul_rn(w.scores[h][j][i], intoTanh));
}

// first: the tile's first key.
template <class T>
__device__ __forceinline__ void maskScores(PrefillWarp<T>& w, const AttentionReach& reach, int first) {
    const int column = first + warpKey<T>() + threadIdx.x % 4 * 2;
    int firstSeen[2] = {};
    if constexpr (T::kRuled) {
#pragma unroll
        for (int r = 0; r < 2; r++) firstSeen[r] = reach.first(w.position[r]);
    }
#pragma unroll
    for (int h = 0; h < T::kHeads; h++)
#pragma unroll
        for (int j = 0; j < T::kWarpKeys / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = column + 8 * j + i % 2;
                if (key > w.position[i / 2] || (T::kRuled && key < firstSeen[i / 2]))
                    w.scores[h][j][i] = __int_as_float(0xff800000);
            }
}

// The row's largest score so far, of those that this warp has.
template <class T> __device__ __forceinline__ float largestScore(const PrefillWarp<T>& w, int h, int r) {
    float top = w.largest[h][r];
#pragma unroll
    for (int j = 0; j < T::kWarpKeys / 8; j++)
        top = fmaxf(top, fmaxf(w.scores[h][j][2 * r], w.scores[h][j][2 * r + 1]));
    top = fmaxf(top, __shfl_xor_sync(kWholeWarp, top, 1));
    return fmaxf(top, __shfl_xor_sync(kWholeWarp, top, 2));
}

// Turns the scores of a row into weights. Returns the factor that rescales what the warp has so far to the new maximum.
template <class T> __device__ __forceinline__ float weighRow(PrefillWarp<T>& w, int h, int r, float top, float scale) {
    const float kept = exp2Fast((w.largest[h][r] - top) * scale);
    w.largest[h][r] = top;
    const float shift = top * scale;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < T::kWarpKeys / 8; j++)
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; i++) {
            w.scores[h][j][i] = exp2Fast(fmaf(w.scores[h][j][i], scale, -shift));
            sum += w.scores[h][j][i];
        }
    w.sum[h][r] = fmaf(w.sum[h][r], kept, sum);
    return kept;
}

template <class T> __device__ __forceinline__ void rescale(PrefillWarp<T>& w, int h, const float (&kept)[2]) {
    if (!__any_sync(kWholeWarp, kept[0] != 1.0f || kept[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < T::kWarpDim / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) w.out[h][n][i] *= kept[i / 2];
}

// Makes the weights of 16 keys the left operand of a product.
template <class T>
__device__ __forceinline__ void packWeights(const PrefillWarp<T>& w, int h, int j, uint32_t (&hi)[4],
                                            uint32_t (&lo)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float first = w.scores[h][2 * j + i / 2][i % 2 * 2], second = w.scores[h][2 * j + i / 2][i % 2 * 2 + 1];
        hi[i] = packPair(first, second);
        if constexpr (T::kSplit) {
            const float2 kept = unpackPair(hi[i]);
            lo[i] = packPair(first - kept.x, second - kept.y);
        }
    }
}

// out += weights . values, for keys 16 j .. 16 j + 15.
template <class T>
__device__ __forceinline__ void multiplyValueStep(PrefillWarp<T>& w, uint32_t values, uint32_t weights, int j) {
    const int lane = threadIdx.x % 32, firstChunk = warpColumn<T>() * (T::kWarpDim / 8);
    uint32_t hi[T::kHeads][4], lo[T::kHeads][4];
    if constexpr (T::kSharesScores) {
        const uint32_t at = weights + swizzled<T::kKeys / 8>(warpRow<T>() + lane % 16, 2 * j + lane / 16);
        loadMatrices(hi[0], at);
        if constexpr (T::kSplit) loadMatrices(lo[0], at + T::kWeightPartBytes);
    } else {
#pragma unroll
        for (int h = 0; h < T::kHeads; h++) packWeights<T>(w, h, j, hi[h], lo[h]);
    }
#pragma unroll
    for (int n = 0; n < T::kWarpDim / 16; n++) {
        const uint32_t at = values + chunkAt<T>(16 * j + lane % 16, firstChunk + 2 * n + lane / 16);
        uint32_t b[4], bLo[4];
        loadMatricesTurned(b, at);
        if constexpr (T::kSplitKv) loadMatricesTurned(bLo, at + T::kPartBytes);
#pragma unroll
        for (int h = 0; h < T::kHeads; h++) multiplyPair<T>(w.out[h][2 * n], w.out[h][2 * n + 1], hi[h], lo[h], b, bLo);
    }
}

// out += weights . values. weights: where warps that share scores have put them, a tile of kRows by kKeys.
template <class T>
__device__ __forceinline__ void multiplyValues(PrefillWarp<T>& w, uint32_t values, uint32_t weights = 0) {
    if constexpr (T::kSharesScores) {
#pragma unroll 1
        for (int j = 0; j < T::kKeys / 16; j++) multiplyValueStep<T>(w, values, weights, j);
    } else {
#pragma unroll
        for (int j = 0; j < T::kKeys / 16; j++) multiplyValueStep<T>(w, values, weights, j);
    }
}

// --- the beginning and the end of a warp's work ------------------------------------------------------------------

template <class T> __device__ __forceinline__ void clearWarp(PrefillWarp<T>& w) {
    // A row that sees no key of a tile has the same maximum before and after it. It must be a number then, since the
    // difference of infinities is none.
    constexpr float kLowest = T::kRuled ? -0x1p100f : -INFINITY;
#pragma unroll
    for (int h = 0; h < T::kHeads; h++) {
#pragma unroll
        for (int r = 0; r < 2; r++) w.largest[h][r] = kLowest, w.sum[h][r] = 0.0f;
#pragma unroll
        for (int n = 0; n < T::kWarpDim / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) w.out[h][n][i] = 0.0f;
    }
}

template <class T>
__device__ __forceinline__ void beginWarp(PrefillWarp<T>& w, const PrefillArgs& args, const PrefillPlace& place,
                                          uint32_t queries) {
    const int lane = threadIdx.x % 32, firstRow = warpRow<T>();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = firstRow + lane / 4 + 8 * r;
        w.position[r] = args.batch.positions[place.firstRow + (row < place.rows ? row : place.rows - 1)];
    }
    clearWarp<T>(w);
    if constexpr (T::kKeepsQueries) {
        waitForCopies<0>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < T::kDim / 16; step++)
            loadMatrices(w.queries[step], queries + leftAt<T>(firstRow, step));
        __syncthreads();
    }
}

// The row's sum over the warp's keys, from those of four lanes.
template <class T> __device__ __forceinline__ void joinLanes(PrefillWarp<T>& w, int h, int r) {
    w.sum[h][r] += __shfl_xor_sync(kWholeWarp, w.sum[h][r], 1);
    w.sum[h][r] += __shfl_xor_sync(kWholeWarp, w.sum[h][r], 2);
}

// What outputs are multiplied by at the end. A sink is one more term of the sum, without a value. It may exceed all
// scores.
template <class T>
__device__ __forceinline__ float inverseSum(const PrefillWarp<T>& w, int h, int r, const PrefillArgs& args, int head) {
    if constexpr (T::kRuled) {
        if (args.sinks) {
            const float own = w.largest[h][r] * args.scale, sink = args.sinks[head] * kLog2E, top = fmaxf(own, sink);
            const float kept = exp2Fast(own - top);
            return kept / fmaf(w.sum[h][r], kept, exp2Fast(sink - top));
        }
    }
    return 1.0f / w.sum[h][r];
}

// at: the element of the output at which the row's part of this thread begins.
template <class T>
__device__ __forceinline__ void storeRow(const PrefillWarp<T>& w, int h, int r, const PrefillArgs& args, int head,
                                         int64_t at) {
    const float inverse = inverseSum<T>(w, h, r, args, head);
    const int firstDim = warpColumn<T>() * T::kWarpDim + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < T::kWarpDim / 8; n++) {
        if (firstDim + 8 * n >= args.valueDim) break;
        const float first = w.out[h][n][2 * r] * inverse, second = w.out[h][n][2 * r + 1] * inverse;
        if (args.out.floats) *reinterpret_cast<float2*>(args.out.floats + at + 8 * n) = {first, second};
        if (args.out.half.hi) storeHalfPair(args.out.half, at + 8 * n, first, second);
    }
}

// Warps that share scores have joined their sums already.
template <class T>
__device__ __forceinline__ void store(PrefillWarp<T>& w, const PrefillArgs& args, const PrefillPlace& place) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < T::kHeads; h++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if constexpr (!T::kSharesScores) joinLanes<T>(w, h, r);
            const int row = warpRow<T>() + lane / 4 + 8 * r;
            if (row >= place.rows) continue;
            const int64_t head = (place.firstRow + row) * args.shape.heads + place.head + h;
            const int first = warpColumn<T>() * T::kWarpDim + lane % 4 * 2;
            storeRow<T>(w, h, r, args, place.head + h, head * args.valueDim + first);
        }
    }
}

// --- launching ---------------------------------------------------------------------------------------------------

// A block for each tile of query rows and each T::kHeads heads.
template <class T> void launchPrefill(Stream& stream, void (*kernel)(PrefillArgs), const PrefillArgs& args) {
    if (T::kSharedBytes > 48 * 1024) allowShared(kernel, T::kSharedBytes);
    const dim3 grid(static_cast<unsigned>(args.shape.heads / T::kHeads), static_cast<unsigned>(args.tiles.count),
                    kQueryTile / T::kRows);
    launch(stream, kernel, grid, dim3(T::kThreads), T::kSharedBytes, args);
}

}  // namespace sharpi::cuda
