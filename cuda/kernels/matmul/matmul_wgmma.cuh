// The matrix product of prefill on Hopper, whose tensor cores reach full speed only with warpgroup instructions. The
// pipeline is that of matmul_kernel.cuh, with two differences. First, the products of a stride are asynchronous: the
// threads start them and then expand the next stride's weights, and one stride's products may still run when the next
// stride's start. Second, weights are the operand of 64 rows, and activations that of up to 256. So each expanded
// weight is multiplied by all rows of x that the block has, and a short tile uses the instruction for its number of
// rows.
//
// Tilings differ in their sizes alone: every one adds a row's products in the same order. Large tiles expand a weight
// for more rows. Small ones keep more multiprocessors busy, which is what a short prompt waits for.
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/contract.h"
#include "kernels/matmul/matmul_kernel.cuh"
#include "kernels/matmul/matmul_wgmma.h"
#include "kernels/matmul/wgmma.cuh"

namespace sharpi::cuda {

// How a thread block goes through its tile: kTileN rows of w and up to kTileT of x.
//
// kStride: steps of kTileDepth between two barriers. Their weights are expanded by all threads, although only the first
// kTileN / 64 warpgroups multiply.
// kPending: strides whose products may run on while the next stride's have begun.
// kFetched: strides between the fetch of a weight and its expansion. With 2, its loads have the time of a whole stride,
// but take registers beside the weights that are expanded meanwhile.
//
// Tiles in shared memory at stride i: the products of strides i - kPending to i may be reading theirs, while weights i
// + 1 and activations i + 1 and i + 2 are being written.
template <int kTileN_, int kTileT_, int kThreads_, int kStride_, int kPending_, int kFetched_> struct WgmmaTiling {
    static constexpr int kTileN = kTileN_, kTileT = kTileT_, kThreads = kThreads_, kStride = kStride_,
                         kPending = kPending_, kFetched = kFetched_;
    static constexpr int kStagesX = kPending + 3, kStagesW = kPending + 2;
    static constexpr uint32_t kBytesX = kTileT * kTileRowBytes, kBytesW = kTileN * kTileRowBytes;  // of a step
    static constexpr size_t kSharedBytes = kStride * (kStagesX * kBytesX + kStagesW * kBytesW);
    // Hopper's multiprocessor has 228 KiB.
    static constexpr int kBlocksAtOnce = 2 * (kSharedBytes + kReservedShared) <= 228 * 1024 ? 2 : 1;
    // A step's weights take this many threads, and the threads take this many steps at once.
    static constexpr int kFeeder = kTileN * 2, kFeeders = kThreads / kFeeder, kStepsOfFeeder = kStride / kFeeders;
    static constexpr int kMultiplying = kTileN / 64 * 128;  // threads whose warpgroups multiply

    static_assert(kTileT * kTileN * sizeof(float) <= kSharedBytes, "the sums fit where the tiles were");
    static_assert(kMultiplying <= kThreads && kFeeders * kFeeder == kThreads && kStepsOfFeeder * kFeeders == kStride);
    static_assert(kFetched == 1 || kFetched == 2);
    // Whether a block goes on prefetching weights into the L2 cache as it comes to them, kStepsAhead at once.
    static constexpr bool kGoesOnAhead = kFetched == 2;
    static constexpr int kStepsAhead = 32;
};

// Long prompts.
using LargeTiling = WgmmaTiling<128, 256, 256, 1, 0, 2>;
// Experts. Two blocks share a multiprocessor, so that one expands while the other waits, and their tiles leave room for
// the L1 cache, through which all weights come.
using ExpertTiling = WgmmaTiling<128, kWarpgroupExpertTile, 256, 1, 0, 1>;
// Prompts for which large tiles make fewer blocks than there are multiprocessors.
using SmallTiling = WgmmaTiling<64, 128, 256, 2, 1, 2>;

#ifdef SHARPI_WGMMA

// Writes a block's sums of kN rows of x, as WarpgroupProduct leaves them in its threads, to y. They pass through `sums`
// in shared memory, which nothing else uses any more.
template <int kThreads, int kTileN, int kN>
__device__ __forceinline__ void storeSums(const MatmulCall& call, const TilePlace& place, float* sums,
                                          const float (&sum)[kN / 2]) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    if (warp * 16 < kTileN) {
#pragma unroll
        for (int j = 0; j < kN / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[sumPlace<kTileN>(j * 8 + lane % 4 * 2 + i % 2, warp * 16 + lane / 4 + i / 2 * 8)] = sum[4 * j + i];
    }
    __syncthreads();
    storeTile<kThreads, kTileN>(call, place, sums);
}

// Prefetches blocks [first, first + count) of each of the thread block's rows of w. A stride's weights are loaded one
// or two strides before they are needed, which is too late for memory if there are too few blocks to hide it. first is
// a multiple of 8.
template <DType T, int kTileN>
__device__ __forceinline__ void fetchWeightsAhead(const MatmulCall& call, const TilePlace& place, int first,
                                                  int count) {
    if constexpr (!kIsFloat<T>) {
        const int64_t row = place.firstRow + threadIdx.x;
        // Blocks with other rows of x multiply the same weights, unless they are an expert's.
        const bool isFirst = call.groups.begin || blockIdx.x == 0;
        if (!isFirst || threadIdx.x >= kTileN || row >= call.shape.rows) return;
        const int blocks = static_cast<int>(call.shape.cols / kContractBlock);
        count = min(count, blocks - first);
        if (count <= 0) return;
        fetchBlocksAhead<T>(call, place.w, static_cast<uint32_t>(row * blocks + first), count);
    }
}

// Computes the tile's outputs for the rows of `place`, at most kN. sums: all of the block's shared memory.
template <DType T, typename Tiling, int kN>
__device__ __forceinline__ void multiplyTile(const MatmulCall& call, const TilePlace& place, float* sums) {
    constexpr int kStride = Tiling::kStride;
    const uint32_t shared = sharedAddress(sums);
    const auto tileX = [&](int step) {
        return shared + (step / kStride % Tiling::kStagesX * kStride + step % kStride) * Tiling::kBytesX;
    };
    const auto tileW = [&](int step) {
        return shared + kStride * Tiling::kStagesX * Tiling::kBytesX +
               (step / kStride % Tiling::kStagesW * kStride + step % kStride) * Tiling::kBytesW;
    };
    const auto at = [](int step) { return Step{step, false, false}; };
    const int steps = static_cast<int>((call.shape.cols + kTileDepth - 1) / kTileDepth);
    static_assert(kWeightParts<Tiling::kFeeder, Tiling::kTileN> == 1);

    using Feed = typename WeightFeedOf<T, false, Tiling::kFeeder, Tiling::kTileN>::Type;
    struct Weights {
        typename Feed::Loaded step[Tiling::kStepsOfFeeder];
    } weights, ahead;  // those to store next, and those that are fetched for the stride after
    const int thread = static_cast<int>(threadIdx.x), feeder = thread / Tiling::kFeeder;
    const Feed feed(call, place.w, place.firstRow, thread % Tiling::kFeeder);
    // Steps past the last one: zeros are copied and stored, which nothing multiplies.
    const auto stepOf = [&](int stride, int i) { return stride * kStride + i * Tiling::kFeeders + feeder; };
    const auto fetch = [&](Weights& to, int stride) {
#pragma unroll
        for (int i = 0; i < Tiling::kStepsOfFeeder; ++i) feed.fetch(to.step[i], at(stepOf(stride, i)), 0, true);
    };
    const auto store = [&](int stride) {
#pragma unroll
        for (int i = 0; i < Tiling::kStepsOfFeeder; ++i)
            feed.store(weights.step[i], tileW(stepOf(stride, i)), at(stepOf(stride, i)), 0);
    };
    const auto exists = [&](int stride) { return stride * kStride < steps; };
    fetch(weights, 0);
    if (Tiling::kFetched == 2 && exists(1)) fetch(ahead, 1);
    store(0);
    if (Tiling::kFetched == 2) weights = ahead;
    else if (exists(1)) fetch(weights, 1);

    awaitTogether(call.order);
    const RowFeed<Tiling::kThreads, kN, false> rows(call, place);
    const auto copy = [&](int stride) {
#pragma unroll
        for (int i = 0; i < kStride; ++i) rows.copy(tileX(stride * kStride + i), at(stride * kStride + i));
    };
    copy(0);
    closeCopies();
    if (exists(1)) copy(1);
    closeCopies();
    waitForCopies<1>();
    publishToTensorCores();
    __syncthreads();

    float sum[kN / 2] = {};
    const uint32_t group = Tiling::kMultiplying == 128 ? 0 : static_cast<uint32_t>(thread) / 128 * (64 * kTileRowBytes);
    const auto multiply = [&](int step) {
        const uint64_t w = tileDescriptor(tileW(step) + group), x = tileDescriptor(tileX(step));
#pragma unroll
        for (int k = 0; k < kTileDepth / 16; ++k)
            WarpgroupProduct<kN>::add(sum, w + k * kNextProduct, x + k * kNextProduct);
    };
    const auto multiplyAll = [&](auto tag) {
        constexpr bool multiplies = decltype(tag)::value;
        const int whole = steps / kStride;
        for (int stride = 0; stride < whole; ++stride) {
            if (Tiling::kFetched == 2 && exists(stride + 2)) fetch(ahead, stride + 2);
            if (Tiling::kGoesOnAhead && stride * kStride % Tiling::kStepsAhead == 0)
                fetchWeightsAhead<T, Tiling::kTileN>(call, place, call.ahead + stride * kStride * 2,
                                                     Tiling::kStepsAhead * 2);
            if constexpr (multiplies) {
                beginProducts();
#pragma unroll
                for (int i = 0; i < kStride; ++i) multiply(stride * kStride + i);
                closeProducts();
            }
            if (exists(stride + 2)) copy(stride + 2);
            closeCopies();
            if (exists(stride + 1)) store(stride + 1);
            waitForCopies<1>();  // the next stride's activations
            publishToTensorCores();
            // Publishing waits for loads, so they begin right behind it, here or in the next turn.
            if (Tiling::kFetched == 2) weights = ahead;
            else if (exists(stride + 2)) fetch(weights, stride + 2);
            if constexpr (multiplies) waitForProducts<Tiling::kPending>();  // whose tiles are overwritten next
            __syncthreads();
        }
        if constexpr (multiplies) {
            for (int step = whole * kStride; step < steps; ++step) {
                beginProducts();
                multiply(step);
                closeProducts();
            }
            waitForProducts<0>();
        }
    };
    // Two loops, as the compiler makes products wait for each other in a branch that it cannot tell apart.
    if (Tiling::kMultiplying == Tiling::kThreads || __shfl_sync(~0u, thread / 128, 0) < Tiling::kMultiplying / 128)
        multiplyAll(std::true_type{});
    else if constexpr (Tiling::kMultiplying < Tiling::kThreads) multiplyAll(std::false_type{});
    __syncthreads();  // the sums overwrite the tiles
    storeSums<Tiling::kThreads, Tiling::kTileN, kN>(call, place, sums, sum);
}

#endif

// Without Hopper's own instructions the kernel is compiled empty.
template <DType T, typename Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, Tiling::kBlocksAtOnce)
    matmulWgmmaKernel(const __grid_constant__ MatmulCall call) {
#ifdef SHARPI_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    beginTogether(call.order);
    if (call.groups.begin) waitForPrevious();  // another kernel writes the tiles' arrays
    const TilePlace place = placeOf<Tiling::kTileT, Tiling::kTileN>(call);
    if (place.begin >= place.end) return;  // products that run together have no such tile
    fetchWeightsAhead<T, Tiling::kTileN>(call, place, 0, call.ahead);
    float* tiles = reinterpret_cast<float*>(shared);
    const int64_t rows = place.end - place.begin;
    // The instruction's number of rows: a short tile takes a shorter one.
    constexpr int kAll = Tiling::kTileT, kShort = 64;
    constexpr bool kHas96 = kAll == kWarpgroupExpertTile, kHas128 = kAll > 128;
    if (rows <= kShort) multiplyTile<T, Tiling, kShort>(call, place, tiles);
    else if (kHas96 && rows <= 96) multiplyTile<T, Tiling, kHas96 ? 96 : kAll>(call, place, tiles);
    else if (kHas128 && rows <= 128) multiplyTile<T, Tiling, kHas128 ? 128 : kAll>(call, place, tiles);
    else multiplyTile<T, Tiling, kAll>(call, place, tiles);
    endTogether(call.order);
#endif
}

// The blocks of a row that are prefetched: what the thread blocks that run at once prefetch stays in the cache.
inline int32_t blocksAhead(const MatmulCall& call, int64_t outputsAtOnce) {
    constexpr int64_t kBytes = 24 * 1024 * 1024;
    if (isFloatType(call.type)) return 0;
    const int64_t all = call.shape.cols / kContractBlock,
                  superblocks = kBytes / (outputsAtOnce * static_cast<int64_t>(rowBytes(call.type, 256)));
    return static_cast<int32_t>(std::min(all, superblocks * 8));
}

template <DType T, typename Tiling> void launchTiling(Stream& stream, MatmulCall call) {
    const int64_t tilesT = call.groups.begin ? call.groups.tiles : (call.rows + Tiling::kTileT - 1) / Tiling::kTileT;
    const int64_t tilesN = call.by.tiles(call.shape, Tiling::kTileN);
    const int64_t atOnce = int64_t{stream.device().multiprocessors} * Tiling::kBlocksAtOnce,
                  blocks = (call.groups.begin ? tilesT * tilesN : tilesN) * call.by.count;
    call.ahead = blocksAhead(call, std::min(atOnce, blocks) * Tiling::kTileN);
    const auto kernel = matmulWgmmaKernel<T, Tiling>;
    allowShared(kernel, Tiling::kSharedBytes);
    launch(stream, kernel, dim3(static_cast<unsigned>(tilesT), static_cast<unsigned>(tilesN), call.by.grids()),
           dim3(Tiling::kThreads), Tiling::kSharedBytes, call);
}

}  // namespace sharpi::cuda
