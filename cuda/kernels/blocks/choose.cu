// Which blocks a row sees: the topK with the best scores, in two launches.
//
// Scores. A block's score is a chain over heads of dot products that are chains over elements. Dot products of
// different heads do not wait for each other, so a block of threads takes 32 rows of blocks, one for each lane, and
// each of its warps eight heads; then one warp adds the dot products up in the rule's order. The rows lie in shared
// memory by element, so that lanes read neighbours, and all lanes read a query's elements at one address. A row that
// has no more blocks than it may see needs no scores.
//
// The choice. A block of threads takes a row of the batch. It finds the topK-th best key by its bits, eight at a time,
// and then writes the numbers of all better blocks and of as many equal ones as there is room for, lower numbers first.
// Every warp has a run of blocks, and counts what it will write before it writes.
#include "kernels/blocks/device_blocks.cuh"

#include "core/rules/routing_rule.h"

namespace sharpi::cuda {

namespace {

constexpr int kTile = 32;      // blocks of a tile: one for each lane
constexpr int kWarps = 8;      // that compute scores
constexpr int kWarpHeads = 8;  // heads of a warp at once
constexpr int kHeads = kWarps * kWarpHeads;
constexpr int kLine = kTile + 1;  // floats from one element of the tile's rows to the next
constexpr int kTilesAhead = 256;  // the most thread blocks of a row
constexpr int kChooseThreads = 1024, kChooseWarps = kChooseThreads / 32;
constexpr int kBins = 256;

struct Work {
    IndexRule rule;
    const float *queries, *weights;
    BatchRows batch;
    PagedRows blocks;
    float* scores;  // [rows, stride]
    int64_t stride;
    int32_t* chosen;
    // The blocks that are over at a row's token.
    __device__ __forceinline__ int over(int64_t row) const {
        return (batch.positions[row] + 1) / blocks.pages.rowTokens;
    }
};

// Shared memory of the scores' kernel, in floats.
struct Places {
    int keys, queries, dots, total;
    __host__ __device__ explicit Places(int dim)
        : keys(0), queries((dim * kLine + 3) / 4 * 4), dots(queries + kHeads * dim), total(dots + kHeads * kTile) {}
};

// A tile's rows of blocks, turned. Rows past the last one that is over repeat it.
__device__ __forceinline__ void loadTile(const Work& work, const int32_t* table, int first, int over, float* keys) {
    const KvPages& pages = work.blocks.pages;
    const int block = threadIdx.x / kWarps, part = threadIdx.x % kWarps;
    const int64_t at = pages.rowAt(table, min(first + block, over - 1));
    for (int d = part; d < pages.headDim; d += kWarps)
        keys[d * kLine + block] = cachedElement(pages.k, pages.type, at + d);
}

// The warp's queries, rotated. heads: those that there are from the warp's first on.
__device__ __forceinline__ void loadQueries(const Work& work, int64_t row, int firstHead, int heads, float* own) {
    const int dim = work.blocks.pages.headDim, lane = threadIdx.x % 32;
    const float* const from = work.queries + (row * work.rule.heads + firstHead) * dim;
    const int position = work.batch.positions[row];
    for (int i = lane; i < kWarpHeads * dim; i += 32) {
        const int head = i / dim;
        own[i] = head < heads ? rotatedElement(from + head * dim, i - head * dim, work.rule.rope, position) : 0.0f;
    }
    __syncwarp();
}

__global__ void __launch_bounds__(32 * kWarps) scoreKernel(const __grid_constant__ Work work) {
    extern __shared__ __align__(16) float memory[];
    allowNext();
    waitForPrevious();
    const int64_t row = blockIdx.y;
    const int over = work.over(row), dim = work.blocks.pages.headDim, heads = work.rule.heads;
    if (over <= work.rule.topK) return;
    const Places places(dim);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *const keys = memory + places.keys, *const dots = memory + places.dots;
    float* const own = memory + places.queries + warp * kWarpHeads * dim;
    const int32_t* const table = tableOf(work.blocks, work.batch, row);
    const bool once = heads <= kHeads;
    if (once) loadQueries(work, row, warp * kWarpHeads, heads - warp * kWarpHeads, own);
    for (int first = blockIdx.x * kTile; first < over; first += gridDim.x * kTile) {
        loadTile(work, table, first, over, keys);
        __syncthreads();
        float score = 0.0f;
        for (int base = 0; base < heads; base += kHeads) {
            const int head = base + warp * kWarpHeads;
            if (!once) loadQueries(work, row, head, heads - head, own);
            float dot[kWarpHeads] = {};
            for (int d = 0; d < dim; d += 4) {
                float key[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) key[i] = keys[(d + i) * kLine + lane];
#pragma unroll
                for (int h = 0; h < kWarpHeads; ++h) {
                    const float4 q = *reinterpret_cast<const float4*>(own + h * dim + d);
                    dot[h] = fmaf(q.w, key[3], fmaf(q.z, key[2], fmaf(q.y, key[1], fmaf(q.x, key[0], dot[h]))));
                }
            }
#pragma unroll
            for (int h = 0; h < kWarpHeads; ++h) dots[(warp * kWarpHeads + h) * kTile + lane] = dot[h];
            __syncthreads();
            if (warp == 0) {
                const float* const weights = work.weights + row * heads + base;
                const int count = min(kHeads, heads - base);
#pragma unroll 8
                for (int h = 0; h < count; ++h) {
                    const float all = dots[h * kTile + lane], positive = 0.0f > all ? 0.0f : all;
                    score = fmaf(positive, __fmul_rn(weights[h], work.rule.scale), score);
                }
            }
            __syncthreads();
        }
        if (warp == 0 && first + lane < over) work.scores[row * work.stride + first + lane] = score;
    }
}

struct Threshold {
    uint32_t key;  // of the topK-th best block
    int equals;    // blocks of that key that are chosen
};

// One warp finds the bin in which the need-th best of the counted keys is. bins: from the lowest up.
__device__ __forceinline__ void findBin(const int* bins, Threshold& found, int shift, int lane) {
    constexpr int kOwn = kBins / 32;
    int own = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) own += bins[kBins - 1 - lane * kOwn - i];
    int through = own;
#pragma unroll
    for (int width = 1; width < 32; width *= 2) {
        const int lower = __shfl_up_sync(kWholeWarp, through, width);
        if (lane >= width) through += lower;
    }
    int need = found.equals - (through - own);
    __syncwarp();
    if (need <= 0 || need > own) return;
    for (int i = 0; i < kOwn; ++i) {
        const int bin = kBins - 1 - lane * kOwn - i, count = bins[bin];
        if (need <= count) {
            found.key |= static_cast<uint32_t>(bin) << shift;
            found.equals = need;
            return;
        }
        need -= count;
    }
}

__global__ void __launch_bounds__(kChooseThreads) chooseKernel(const __grid_constant__ Work work) {
    __shared__ int bins[kBins];
    __shared__ int better[kChooseWarps], equal[kChooseWarps];
    __shared__ Threshold found;
    allowNext();
    waitForPrevious();
    const int64_t row = blockIdx.x;
    const int over = work.over(row), topK = work.rule.topK, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int32_t* const chosen = work.chosen + row * topK;
    if (over <= topK) {
        for (int i = threadIdx.x; i < over; i += kChooseThreads) chosen[i] = i;
        return;
    }
    const float* const scores = work.scores + row * work.stride;
    if (threadIdx.x == 0) found = {0, topK};
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < kBins; i += kChooseThreads) bins[i] = 0;
        __syncthreads();
        const uint32_t known = shift == 24 ? 0 : ~0u << (shift + 8), wanted = found.key;
        for (int i = threadIdx.x; i < over; i += kChooseThreads) {
            const uint32_t key = scoreKey(scores[i]);
            if ((key & known) == wanted) atomicAdd(&bins[key >> shift & (kBins - 1)], 1);
        }
        __syncthreads();
        if (warp == 0) findBin(bins, found, shift, lane);
        __syncthreads();
    }
    const uint32_t last = found.key;
    const int length = (over + kChooseThreads - 1) / kChooseThreads * 32, begin = warp * length;
    const int end = min(begin + length, over);
    // Calls body(block, isBetter, isEqual) for 32 blocks of the warp at a time.
    const auto forRun = [&](const auto& body) {
        for (int first = begin; first < end; first += 32) {
            const bool exists = first + lane < end;
            const uint32_t key = exists ? scoreKey(scores[first + lane]) : 0;
            body(first + lane, exists && key > last, exists && key == last);
        }
    };
    int betterHere = 0, equalHere = 0;
    forRun([&](int, bool isBetter, bool isEqual) {
        betterHere += __popc(__ballot_sync(kWholeWarp, isBetter));
        equalHere += __popc(__ballot_sync(kWholeWarp, isEqual));
    });
    if (lane == 0) better[warp] = betterHere, equal[warp] = equalHere;
    __syncthreads();
    int betterBefore = 0, equalBefore = 0;
    for (int i = 0; i < warp; ++i) betterBefore += better[i], equalBefore += equal[i];
    const uint32_t lower = (1u << lane) - 1;
    forRun([&](int block, bool isBetter, bool isEqual) {
        const uint32_t betters = __ballot_sync(kWholeWarp, isBetter), equals = __ballot_sync(kWholeWarp, isEqual);
        const int betterRank = betterBefore + __popc(betters & lower), equalRank = equalBefore + __popc(equals & lower);
        if (isBetter || (isEqual && equalRank < found.equals))
            chosen[betterRank + min(equalRank, found.equals)] = block;
        betterBefore += __popc(betters);
        equalBefore += __popc(equals);
    });
}

}  // namespace

void chooseBlocks(Stream& stream, const IndexRule& rule, const float* queries, const float* weights,
                  const BatchRows& batch, const PagedRows& blocks, void* scratch, size_t scratchBytes,
                  int32_t* chosen) {
    const int dim = blocks.pages.headDim;
    if (dim > kMostIndexDim || dim % 4 != 0)
        throw Error(ErrorKind::Internal, "chooseBlocks cannot read rows of " + std::to_string(dim) + " elements");
    const int64_t most = batch.listPages * kAttentionPage / blocks.pages.rowTokens;
    if (indexScoreBytes(batch.rows, most) > scratchBytes)
        throw Error(ErrorKind::Internal, "chooseBlocks has too little scratch");
    const int64_t tiles = std::min<int64_t>((most + kTile - 1) / kTile, kTilesAhead);
    const size_t shared = sizeof(float) * static_cast<size_t>(Places(dim).total);
    if (shared > 48 * 1024) allowShared(scoreKernel, shared);
    for (int64_t first = 0; first < batch.rows; first += kIndexedRows) {
        const int64_t rows = std::min(kIndexedRows, batch.rows - first);
        const Work work{rule,
                        queries + first * rule.heads * dim,
                        weights + first * rule.heads,
                        batch.from(first, rows),
                        blocks,
                        static_cast<float*>(scratch),
                        most,
                        chosen + first * rule.topK};
        if (most > rule.topK) {
            launch(stream, scoreKernel, dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(rows)),
                   dim3(32 * kWarps), shared, work);
        }
        launch(stream, chooseKernel, dim3(static_cast<unsigned>(rows)), dim3(kChooseThreads), 0, work);
    }
}

}  // namespace sharpi::cuda
