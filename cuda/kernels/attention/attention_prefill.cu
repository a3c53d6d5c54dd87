// Causal attention of many rows on tensor cores: flash attention over the paged cache.
//
// A block takes one tile of query rows of one head, or of two heads of a group, and runs over the keys from the first
// to the last that its last row sees. A warp owns 16 of the rows, with their outputs, maxima and sums in registers
// (m16n8k16 products, whose accumulators are laid out like the next product's left operand). With one head, a warp
// spends as long on reading keys and values from shared memory as on multiplying them; with two heads it reads them
// once for both. Tiles of keys and values lie in shared memory as rows of 16-bit elements. Their 16-byte chunks are
// swizzled by the row's number, so that ldmatrix uses every bank once. A bf16 cache is copied there unchanged
// (cp.async; the next tile arrives while this one is used), and other types are converted on the way. The last tiles of
// rows run first, since they have the most keys.
//
// In split form every operand, weights included, is the sum of two 16-bit numbers, and a product is hi hi + hi lo +
// lo hi. That keeps about 16 bits of each factor. A bf16 cache has no low half. Before compute capability 8.0 the
// 16-bit type is f16.
#include "kernels/attention/attention.cuh"
#include "kernels/matmul/mma.cuh"

namespace sharpi::cuda {

namespace {

// What a kernel is compiled for. kDim_: headDim padded with zeros to 32, 64, 128 or 256.
template <KvType kType_, int kDim_, bool kSplit_, int kHeads_, int kWarps_, int kKeys_, int kStages_> struct Tile {
    static constexpr KvType kType = kType_;
    static constexpr int kDim = kDim_, kHeads = kHeads_, kWarps = kWarps_, kKeys = kKeys_, kStages = kStages_;
    static constexpr bool kSplit = kSplit_;
    static constexpr bool kSplitKv = kSplit && kType != KvType::BF16;
    static constexpr int kRows = 16 * kWarps, kThreads = 32 * kWarps;
    static constexpr int kRowBytes = 2 * kDim, kChunks = kDim / 8;
    // Queries stay in registers if there is room. They pass through the last stage on their way there.
    static constexpr bool kKeepsQueries = !kSplit && kHeads == 1 && kDim <= 128 && kStages == 2 && kKeys >= kRows;
    static constexpr int kQueryPartBytes =
        kHeads * kRows * kRowBytes;  // hi or lo: the rows of one head, then those of the next
    static constexpr int kQueryBytes = kKeepsQueries ? 0 : kQueryPartBytes * (kSplit ? 2 : 1);
    static constexpr int kPartBytes = kKeys * kRowBytes;  // keys or values, hi or lo
    static constexpr int kStageBytes = kPartBytes * (kSplitKv ? 4 : 2);
    static constexpr int kSharedBytes = kQueryBytes + kStages * kStageBytes;
};

struct PrefillArgs {
    HalfRows q;
    HeadShape shape;
    float scale;  // times log2 e
    BatchRows batch;
    QueryTiles tiles;
    KvPages pages;
    RowOutputs out;
};

// What a block works on.
struct Place {
    int64_t firstRow;
    int rows, head, kvHead, lastPosition;
    const int32_t* table;
};

template <class T> __device__ __forceinline__ uint32_t chunkAt(int row, int chunk) {
    const int mixed = T::kChunks >= 8 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
    return static_cast<uint32_t>(row * T::kRowBytes + mixed * 16);
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

// --- into shared memory ------------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ void loadQueries(const PrefillArgs& args, const Place& place, uint32_t hi, uint32_t lo) {
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

// Loads keys and values firstKey .. firstKey + kKeys - 1. Past the last one that the tile sees it stores zeros, since
// the memory there may hold anything.
template <class T>
__device__ __forceinline__ void loadKeys(const PrefillArgs& args, const Place& place, int firstKey, uint32_t stage) {
    constexpr int kElement = kKvBytes<T::kType>;
#if __CUDA_ARCH__ >= 800
    constexpr bool kAsItIs = T::kType == KvType::BF16;
#else
    constexpr bool kAsItIs = false;
#endif
    constexpr int kParts = T::kSplitKv ? 2 : 1;
    const int dim = args.shape.headDim;
    const int64_t page = place.table[firstKey / kAttentionPage];
    const int64_t line = (page * args.shape.kvHeads + place.kvHead) * kAttentionPage + firstKey % kAttentionPage;
    const uint8_t *keys = args.pages.k + line * dim * kElement, *values = args.pages.v + line * dim * kElement;
    const uint32_t valueStage = stage + kParts * T::kPartBytes;
#pragma unroll 4
    for (int i = threadIdx.x; i < T::kKeys * T::kChunks; i += T::kThreads) {
        const int row = i / T::kChunks, chunk = i % T::kChunks;
        const bool valid = firstKey + row <= place.lastPosition && chunk * 8 < dim;
        const int at = valid ? (row * dim + chunk * 8) * kElement : 0;
        const uint32_t to = chunkAt<T>(row, chunk);
        if constexpr (kAsItIs) {
            copyChunk(stage + to, keys + at, valid);
            copyChunk(valueStage + to, values + at, valid);
        } else {
            convertChunk<T>(stage + to, stage + T::kPartBytes + to, keys + at, valid);
            convertChunk<T>(valueStage + to, valueStage + T::kPartBytes + to, values + at, valid);
        }
    }
}

// --- a warp's part -----------------------------------------------------------------------------------------------
// Of the warp's 16 rows of each head, a thread holds rows lane / 4 and lane / 4 + 8, with two of every 8 columns.

template <class T> struct Warp {
    float out[T::kHeads][T::kDim / 8][4];
    float scores[T::kHeads][T::kKeys / 8][4];
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
template <class T> __device__ __forceinline__ void multiplyKeys(Warp<T>& w, uint32_t queries, uint32_t keys) {
    const int lane = threadIdx.x % 32, firstRow = threadIdx.x / 32 * 16;
#pragma unroll
    for (int h = 0; h < T::kHeads; h++)
#pragma unroll
        for (int j = 0; j < T::kKeys / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) w.scores[h][j][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < T::kDim / 16; step++) {
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
        for (int j = 0; j < T::kKeys / 16; j++) {
            const uint32_t at = keys + chunkAt<T>(16 * j + lane / 16 * 8 + lane % 8, 2 * step + (lane >> 3 & 1));
            uint32_t b[4], bLo[4];
            loadMatrices(b, at);
            if constexpr (T::kSplitKv) loadMatrices(bLo, at + T::kPartBytes);
#pragma unroll
            for (int h = 0; h < T::kHeads; h++)
                multiplyPair<T>(w.scores[h][2 * j], w.scores[h][2 * j + 1], hi[h], lo[h], b, bLo);
        }
    }
}

template <class T> __device__ __forceinline__ void maskScores(Warp<T>& w, int firstKey) {
    const int column = firstKey + threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < T::kHeads; h++)
#pragma unroll
        for (int j = 0; j < T::kKeys / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (column + 8 * j + i % 2 > w.position[i / 2]) w.scores[h][j][i] = __int_as_float(0xff800000);
}

// Turns scores into weights, and rescales what the warp has so far to the new maxima.
template <class T> __device__ __forceinline__ void weighScores(Warp<T>& w, int h, float scale) {
    float kept[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = w.largest[h][r];
#pragma unroll
        for (int j = 0; j < T::kKeys / 8; j++)
            top = fmaxf(top, fmaxf(w.scores[h][j][2 * r], w.scores[h][j][2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(kWholeWarp, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kWholeWarp, top, 2));
        kept[r] = exp2Fast((w.largest[h][r] - top) * scale);
        w.largest[h][r] = top;
        const float shift = top * scale;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < T::kKeys / 8; j++)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++) {
                w.scores[h][j][i] = exp2Fast(fmaf(w.scores[h][j][i], scale, -shift));
                sum += w.scores[h][j][i];
            }
        w.sum[h][r] = fmaf(w.sum[h][r], kept[r], sum);
    }
    if (!__any_sync(kWholeWarp, kept[0] != 1.0f || kept[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < T::kDim / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) w.out[h][n][i] *= kept[i / 2];
}

// Makes the weights of 16 keys the left operand of a product.
template <class T>
__device__ __forceinline__ void packWeights(const Warp<T>& w, int h, int j, uint32_t (&hi)[4], uint32_t (&lo)[4]) {
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

// out += weights . values
template <class T> __device__ __forceinline__ void multiplyValues(Warp<T>& w, uint32_t values) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < T::kKeys / 16; j++) {
        uint32_t hi[T::kHeads][4], lo[T::kHeads][4];
#pragma unroll
        for (int h = 0; h < T::kHeads; h++) packWeights<T>(w, h, j, hi[h], lo[h]);
#pragma unroll
        for (int n = 0; n < T::kDim / 16; n++) {
            const uint32_t at = values + chunkAt<T>(16 * j + lane % 16, 2 * n + lane / 16);
            uint32_t b[4], bLo[4];
            loadMatricesTurned(b, at);
            if constexpr (T::kSplitKv) loadMatricesTurned(bLo, at + T::kPartBytes);
#pragma unroll
            for (int h = 0; h < T::kHeads; h++)
                multiplyPair<T>(w.out[h][2 * n], w.out[h][2 * n + 1], hi[h], lo[h], b, bLo);
        }
    }
}

template <class T>
__device__ __forceinline__ void storeRow(const Warp<T>& w, int h, int r, const PrefillArgs& args, int64_t at) {
    const float inverse = 1.0f / w.sum[h][r];
#pragma unroll
    for (int n = 0; n < T::kDim / 8; n++) {
        if (8 * n >= args.shape.headDim) break;
        const float first = w.out[h][n][2 * r] * inverse, second = w.out[h][n][2 * r + 1] * inverse;
        if (args.out.floats) *reinterpret_cast<float2*>(args.out.floats + at + 8 * n) = {first, second};
        if (args.out.half.hi) storeHalfPair(args.out.half, at + 8 * n, first, second);
    }
}

template <class T> __device__ __forceinline__ void store(Warp<T>& w, const PrefillArgs& args, const Place& place) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < T::kHeads; h++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            w.sum[h][r] += __shfl_xor_sync(kWholeWarp, w.sum[h][r], 1);
            w.sum[h][r] += __shfl_xor_sync(kWholeWarp, w.sum[h][r], 2);
            const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4 + 8 * r;
            if (row >= place.rows) continue;
            const int64_t head = (place.firstRow + row) * args.shape.heads + place.head + h;
            storeRow<T>(w, h, r, args, head * args.shape.headDim + lane % 4 * 2);
        }
    }
}

// --- a block -----------------------------------------------------------------------------------------------------

// The rows of a tile that this block computes. There may be none if the tile is short.
template <class T> __device__ __forceinline__ Place findPlace(const PrefillArgs& args) {
    Place place;
    const int64_t tile = args.tiles.count - 1 - blockIdx.y;
    place.firstRow = args.tiles.begin[tile] + static_cast<int>(blockIdx.z) * T::kRows;
    const int64_t left = args.tiles.end[tile] - place.firstRow;
    place.rows = static_cast<int>(left < T::kRows ? left : T::kRows);
    place.head = static_cast<int>(blockIdx.x) * T::kHeads;
    place.kvHead = place.head / (args.shape.heads / args.shape.kvHeads);
    if (place.rows <= 0) return place;
    place.lastPosition = args.batch.positions[place.firstRow + place.rows - 1];
    place.table = args.batch.pageTables + args.batch.sequence[place.firstRow] * args.batch.pagesPerTable;
    return place;
}

template <class T>
__device__ __forceinline__ void beginWarp(Warp<T>& w, const PrefillArgs& args, const Place& place, uint32_t queries) {
    const int lane = threadIdx.x % 32, firstRow = static_cast<int>(threadIdx.x) / 32 * 16;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = firstRow + lane / 4 + 8 * r;
        w.position[r] = args.batch.positions[place.firstRow + (row < place.rows ? row : place.rows - 1)];
    }
#pragma unroll
    for (int h = 0; h < T::kHeads; h++) {
#pragma unroll
        for (int r = 0; r < 2; r++) w.largest[h][r] = __int_as_float(0xff800000), w.sum[h][r] = 0.0f;
#pragma unroll
        for (int n = 0; n < T::kDim / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) w.out[h][n][i] = 0.0f;
    }
    if constexpr (T::kKeepsQueries) {
        waitForCopies<0>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < T::kDim / 16; step++)
            loadMatrices(w.queries[step], queries + leftAt<T>(firstRow, step));
        __syncthreads();
    }
}

template <class T> __global__ void __launch_bounds__(T::kThreads) attendTile(PrefillArgs args) {
    allowNext();
    waitForPrevious();
    extern __shared__ __align__(128) uint8_t shared[];
    const Place place = findPlace<T>(args);
    if (place.rows <= 0) return;
    const uint32_t base = sharedAddress(shared), stages = base + T::kQueryBytes;
    const uint32_t queries = T::kKeepsQueries ? stages + T::kStageBytes : base;
    loadQueries<T>(args, place, queries, queries + T::kQueryPartBytes);
    loadKeys<T>(args, place, 0, stages);
    closeCopies();
    Warp<T> w;
    beginWarp<T>(w, args, place, queries);
    const int firstPosition = args.batch.positions[place.firstRow], tiles = place.lastPosition / T::kKeys + 1;
    for (int t = 0; t < tiles; t++) {
        const uint32_t stage = stages + (T::kStages == 2 ? t % 2 : 0) * T::kStageBytes;
        if constexpr (T::kStages == 2) {
            if (t + 1 < tiles) loadKeys<T>(args, place, (t + 1) * T::kKeys, stages + (t + 1) % 2 * T::kStageBytes);
            closeCopies();
            waitForCopies<1>();
        } else {
            waitForCopies<0>();
        }
        __syncthreads();
        multiplyKeys<T>(w, queries, stage);
        if (t * T::kKeys + T::kKeys - 1 > firstPosition) maskScores<T>(w, t * T::kKeys);
#pragma unroll
        for (int h = 0; h < T::kHeads; h++) weighScores<T>(w, h, args.scale);
        multiplyValues<T>(w, stage + T::kPartBytes * (T::kSplitKv ? 2 : 1));
        __syncthreads();
        if constexpr (T::kStages == 1) {
            if (t + 1 < tiles) loadKeys<T>(args, place, (t + 1) * T::kKeys, stages);
            closeCopies();
        }
    }
    store<T>(w, args, place);
}

// --- launching ---------------------------------------------------------------------------------------------------

template <class T> void launchTiles(Stream& stream, const PrefillArgs& args) {
    if (T::kSharedBytes > 48 * 1024) allowShared(attendTile<T>, T::kSharedBytes);
    const dim3 grid(static_cast<unsigned>(args.shape.heads / T::kHeads), static_cast<unsigned>(args.tiles.count),
                    kQueryTile / T::kRows);
    launch(stream, attendTile<T>, grid, dim3(T::kThreads), T::kSharedBytes, args);
}

template <KvType kType, bool kSplit, int kDim> void chooseTile(Stream& stream, const PrefillArgs& args) {
    using Large = Tile<kType, kDim, kSplit, 1, 4, 64, kType == KvType::BF16 ? 2 : 1>;
    if constexpr (!kSplit && kDim <= 128) {  // where a warp has the registers for two heads
        using Twofold = Tile<kType, kDim, kSplit, 2, 4, 64, 2>;
        const bool isPaired = args.shape.heads / args.shape.kvHeads % 2 == 0;
        if (isPaired && Twofold::kSharedBytes <= stream.device().sharedPerBlock)
            return launchTiles<Twofold>(stream, args);
    }
    if constexpr (Large::kSharedBytes > 64 * 1024) {  // what every device has
        if (Large::kSharedBytes > stream.device().sharedPerBlock)
            return launchTiles<Tile<kType, kDim, kSplit, 1, 2, 16, 1>>(stream, args);
    }
    launchTiles<Large>(stream, args);
}

template <KvType kType, bool kSplit> void chooseDim(Stream& stream, const PrefillArgs& args) {
    if (args.shape.headDim <= 32) return chooseTile<kType, kSplit, 32>(stream, args);
    if (args.shape.headDim <= 64) return chooseTile<kType, kSplit, 64>(stream, args);
    if (args.shape.headDim <= 128) return chooseTile<kType, kSplit, 128>(stream, args);
    chooseTile<kType, kSplit, 256>(stream, args);
}

}  // namespace

void attentionPrefill(Stream& stream, const HalfRows& q, const HeadShape& shape, const AttentionRule& rule,
                      const BatchRows& batch, const QueryTiles& tiles, const KvPages& pages, const RowOutputs& out) {
    requireAttendable(shape, pages);
    const PrefillArgs args = {q, shape, rule.scale * 1.44269504088896341f, batch, tiles, pages, out};
    withKvType(pages.type, [&](auto tag) {
        constexpr KvType kType = decltype(tag)::kType;
        if constexpr (kType == KvType::BF16) {  // the operands' own type, which has no low half
            if (!q.lo) return chooseDim<kType, false>(stream, args);
        }
        chooseDim<kType, true>(stream, args);
    });
}

}  // namespace sharpi::cuda
