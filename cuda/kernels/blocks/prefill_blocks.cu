// Attention over blocks for many rows, on tensor cores: see KeyValueTile. The heads of a token see the same keys, and
// tokens see different ones. So a block's tile of query rows is the heads of one token, and its keys are gathered:
// first the rows of blocks that the token sees, then the keys of its window.
#include "kernels/blocks/device_blocks.cuh"
#include "kernels/prefill/prefill_columns.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kTurnWarps = 4;

struct Work {
    PrefillArgs args;
    SeenBlocks seen;
};

// Shared memory behind the tile's: where the keys of this tile and of the next are; nullptr: behind the last.
template <class T> constexpr size_t kPlacesBytes = 2 * T::kKeys * sizeof(const uint8_t*);

template <class T> struct GatheredKeys {
    const Work& work;
    int64_t row;
    SeenKeys keys;
    const uint8_t** places;
    int count, first, end;

    __device__ __forceinline__ GatheredKeys(const Work& w, int64_t r, uint8_t* shared)
        : work(w),
          row(r),
          keys(w.args.batch, w.args.reach, w.seen, r),
          places(reinterpret_cast<const uint8_t**>(shared + T::kSharedBytes)),
          count(keys.blocks + keys.position - keys.first + 1),
          first(0),
          end((count + T::kKeys - 1) / T::kKeys) {}

    __device__ __forceinline__ void find(int t) const {
        const int line = threadIdx.x, number = t * T::kKeys + line;
        if (line >= T::kKeys) return;
        places[t % 2 * T::kKeys + line] = number < count ? keyAt(number) : nullptr;
    }
    __device__ __forceinline__ const uint8_t* keyAt(int number) const {
        const PrefillArgs& args = work.args;
        const bool ofBlocks = number < keys.blocks;
        const KvPages& pages = ofBlocks ? work.seen.rows.pages : args.pages;
        const int32_t* const table = ofBlocks
                                         ? tableOf(work.seen.rows, args.batch, row)
                                         : args.batch.pageTables + args.batch.sequence[row] * args.batch.pagesPerTable;
        const int seen = !ofBlocks          ? keys.first + number - keys.blocks
                         : work.seen.chosen ? work.seen.chosen[row * work.seen.topK + number]
                                            : number;
        return pages.k + pages.rowAt(table, seen) * kKvBytes<T::kType>;
    }
    __device__ __forceinline__ void load(int t, uint32_t stage) const {
        const int dim = work.args.shape.headDim;
#pragma unroll 4
        for (int i = threadIdx.x; i < T::kKeys * T::kChunks; i += T::kThreads) {
            const int line = i / T::kChunks, chunk = i % T::kChunks;
            const uint8_t* const key = places[t % 2 * T::kKeys + line];
            const bool valid = key && chunk * 8 < dim;
            const uint8_t* const from = valid ? key + chunk * 8 * kKvBytes<T::kType> : work.args.pages.k;
            const uint32_t to = stage + chunkAt<T>(line, chunk);
            loadChunk<T>(to, to + T::kPartBytes, from, valid);
        }
    }
    __device__ __forceinline__ void mask(PrefillWarp<T>& w, int t) const {
        if ((t + 1) * T::kKeys <= count) return;
        const int column = t * T::kKeys + warpKey<T>() + threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < T::kWarpKeys / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (column + 8 * j + i % 2 >= count) w.scores[0][j][i] = __int_as_float(0xff800000);
    }
};

// Grid: rows, groups of T::kRows heads.
template <class T> __global__ void __launch_bounds__(T::kThreads) attendGathered(const __grid_constant__ Work work) {
    allowNext();
    waitForPrevious();
    extern __shared__ __align__(128) uint8_t shared[];
    const PrefillArgs& args = work.args;
    const int64_t row = blockIdx.x;
    const int heads = args.shape.heads, dim = args.shape.headDim, firstHead = static_cast<int>(blockIdx.y) * T::kRows;
    const uint32_t queries = sharedAddress(shared);
    for (int i = threadIdx.x; i < T::kRows * T::kChunks; i += T::kThreads) {
        const int line = i / T::kChunks, chunk = i % T::kChunks;
        const bool valid = firstHead + line < heads && chunk * 8 < dim;
        const int64_t at = valid ? (row * heads + firstHead + line) * dim + chunk * 8 : 0;
        copyChunk(queries + chunkAt<T>(line, chunk), args.q.hi + at, valid);
        if constexpr (T::kSplit) {
            const bool hasLow = valid && args.q.lo;
            copyChunk(queries + T::kQueryPartBytes + chunkAt<T>(line, chunk), hasLow ? args.q.lo + at : args.q.hi,
                      hasLow);
        }
    }
    const GatheredKeys<T> keys(work, row, shared);
    keys.find(0);
    __syncthreads();
    PrefillWarp<T> w;
    clearWarp<T>(w);
    attendKeyValues<T>(w, args, shared, keys);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if constexpr (!T::kSharesScores) joinLanes<T>(w, 0, r);
        const int head = firstHead + warpRow<T>() + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * r;
        if (head >= heads) continue;
        const int first = warpColumn<T>() * T::kWarpDim + static_cast<int>(threadIdx.x) % 4 * 2;
        storeRow<T>(w, 0, r, args, head, (row * heads + head) * dim + first);
    }
}

// Rotates a part of each head back, in place. A warp has a head; grid: rows, groups of kTurnWarps heads.
__global__ void __launch_bounds__(32 * kTurnWarps)
    turnBack(float* out, HeadShape shape, const __grid_constant__ RotatedPart back, const BatchRows batch) {
    allowNext();
    waitForPrevious();
    extern __shared__ float parts[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = static_cast<int>(blockIdx.y) * kTurnWarps + warp;
    const int64_t row = blockIdx.x;
    if (head >= shape.heads) return;
    float* const x = out + (row * shape.heads + head) * shape.headDim + back.first;
    float* const part = parts + warp * back.dims;
    for (int i = lane; i < back.dims; i += 32) part[i] = x[i];
    __syncwarp();
    RotatedPart whole = back;
    whole.first = 0;
    for (int i = lane; i < back.dims; i += 32) x[i] = rotatedElement(part, i, whole, batch.positions[row], -1.0f);
}

// The most that kPlacesBytes is of a tile.
constexpr size_t kMostPlaces = 2 * 64 * sizeof(const uint8_t*);

template <class T> void launchGathered(Stream& stream, const Work& work) {
    constexpr size_t kBytes = T::kSharedBytes + kPlacesBytes<T>;
    static_assert(kPlacesBytes<T> <= kMostPlaces && T::kSharedBytes % sizeof(const uint8_t*) == 0);
    if (kBytes > 48 * 1024) allowShared(attendGathered<T>, kBytes);
    const dim3 grid(static_cast<unsigned>(work.args.batch.rows),
                    static_cast<unsigned>((work.args.shape.heads + T::kRows - 1) / T::kRows));
    launch(stream, attendGathered<T>, grid, dim3(T::kThreads), kBytes, work);
}

}  // namespace

void prefillBlocks(Stream& stream, const HalfRows& q, const HeadShape& shape, const AttentionRule& rule,
                   const BatchRows& batch, const KvPages& pages, const SeenBlocks& seen, const RotatedPart& back,
                   float* out) {
    requireSeen(shape, pages, seen);
    if (rule.softcap > 0) throw Error(ErrorKind::Internal, "prefillBlocks knows no softcap");
    if (batch.rows == 0) return;
    const Work work{
        {q, shape, rule.scale * kLog2E, batch, {}, pages, {out, {}, {}}, shape.headDim, 0.0f, rule.reach, rule.sinks},
        seen};
    withPrefillForm(pages.type, q.lo != nullptr, [&](auto tag, auto split) {
        withKeyValueTile<decltype(tag)::kType, decltype(split)::value, kMostBlockDim, kMostBlockDim>(
            stream, kMostPlaces, [&](auto tile) { launchGathered<decltype(tile)>(stream, work); });
    });
    const dim3 grid(static_cast<unsigned>(batch.rows),
                    static_cast<unsigned>((shape.heads + kTurnWarps - 1) / kTurnWarps));
    launch(stream, turnBack, grid, dim3(32 * kTurnWarps), sizeof(float) * kTurnWarps * static_cast<size_t>(back.dims),
           out, shape, back, batch);
}

}  // namespace sharpi::cuda
