// The matrix product of prefill on Hopper for up to 16 rows: short prompts, and experts that few rows chose.
//
// A row gets the same bits as in matmul_wgmma.cuh: the instructions along k are the same, in the same order, except
// that they take 16 rows. But such a product is bound by the latency of its weights: there are fewer tiles than
// multiprocessors, and a block that waits for memory after every step of 64 columns has few loads in flight. So a block
// is one warpgroup with 64 outputs, which makes twice as many blocks. It goes along k in strides of four steps, whose
// weights are loaded together, with one barrier for each stride.
//
// Tiles in shared memory at stride i: the products of stride i read theirs, weights i + 1 are written, activations i +
// 1 have arrived, and those of i + 2 are in flight. That takes two tiles of weights and three of activations. The
// products of a stride finish before those of the next begin.
#include "kernels/matmul/matmul_wgmma.cuh"
#include "kernels/matmul/matmul_wgmma.h"

namespace sharpi::cuda {

namespace {

constexpr int kFew = 16;       // rows that a block multiplies at once
constexpr int kFewTileN = 64;  // outputs of a block: one warpgroup's product
constexpr int kFewThreads = 128;
constexpr int kStride = 4;                                                                     // steps
constexpr uint32_t kFewBytesX = kFew * kTileRowBytes, kFewBytesW = kFewTileN * kTileRowBytes;  // bytes of a step
constexpr int kFewStagesX = 3, kFewStagesW = 2;
constexpr size_t kFewSharedBytes = kStride * (kFewStagesX * kFewBytesX + kFewStagesW * kFewBytesW);
static_assert(kFew * kFewTileN * sizeof(float) <= kFewSharedBytes, "the sums fit where the tiles were");

#ifdef SHARPI_WGMMA

// Computes the block's outputs for the rows of `place`, at most kFew. isFirst: the block has not read anything yet that
// the kernel before writes.
template <DType T>
__device__ __forceinline__ void multiplyFew(const MatmulCall& call, const TilePlace& place, float* sums, bool isFirst) {
    const uint32_t shared = sharedAddress(sums);
    const auto tileX = [&](int step) {
        return shared + (step / kStride % kFewStagesX * kStride + step % kStride) * kFewBytesX;
    };
    const auto tileW = [&](int step) {
        return shared + kStride * kFewStagesX * kFewBytesX +
               (step / kStride % kFewStagesW * kStride + step % kStride) * kFewBytesW;
    };
    const auto at = [](int step) { return Step{step, false, false}; };
    const int steps = static_cast<int>((call.shape.cols + kTileDepth - 1) / kTileDepth),
              strides = (steps + kStride - 1) / kStride;
    static_assert(kWeightParts<kFewThreads, kFewTileN> == 1 && kStride == 4);
    using Feed = typename WeightFeedOf<T, false, kFewThreads, kFewTileN>::Type;
    const Feed feed(call, place.w, place.firstRow);
    Feed weights[kStride] = {feed, feed, feed, feed};
    const auto fetch = [&](int stride) {
#pragma unroll
        for (int i = 0; i < kStride; ++i)
            if (stride * kStride + i < steps) weights[i].fetch(at(stride * kStride + i), 0, true);
    };
    const auto store = [&](int stride) {
#pragma unroll
        for (int i = 0; i < kStride; ++i)
            if (stride * kStride + i < steps)
                weights[i].store(tileW(stride * kStride + i), at(stride * kStride + i), 0);
    };
    fetch(0);
    if (isFirst) waitForPrevious();
    const RowFeed<kFewThreads, kFew, false> rows(call, place);
    const auto copy = [&](int stride) {
#pragma unroll
        for (int i = 0; i < kStride; ++i)
            if (stride * kStride + i < steps) rows.copy(tileX(stride * kStride + i), at(stride * kStride + i));
        closeCopies();
    };
    copy(0);
    copy(1);
    store(0);
    waitForCopies<1>();
    publishToTensorCores();
    fetch(1);
    __syncthreads();

    float sum[kFew / 2] = {};
    for (int stride = 0; stride < strides; ++stride) {
        beginProducts();
#pragma unroll
        for (int i = 0; i < kStride; ++i) {
            const int step = stride * kStride + i;
            if (step >= steps) break;
#pragma unroll
            for (int k = 0; k < kTileDepth / 16; ++k)
                WarpgroupProduct<kFew>::add(sum, tileDescriptor(tileW(step) + k * 32),
                                            tileDescriptor(tileX(step) + k * 32));
        }
        closeProducts();
        copy(stride + 2);
        store(stride + 1);
        waitForCopies<1>();  // the next stride's activations
        publishToTensorCores();
        fetch(stride + 2);  // not earlier: publishing may wait for loads
        waitForProducts<0>();
        __syncthreads();
    }
    storeSums<kFewThreads, kFewTileN, kFew>(call, place, sums, sum);
}

#endif

// Without Hopper's own instructions the kernel is compiled empty.
template <DType T>
__global__ void __launch_bounds__(kFewThreads, 2) matmulFewKernel(const __grid_constant__ MatmulCall call) {
#ifdef SHARPI_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    allowNext();
    if (call.groups.begin) waitForPrevious();  // another kernel writes the tiles' arrays
    const TilePlace place = placeOf<kExpertTile, kFewTileN>(call);
    bool isFirst = !call.groups.begin;
    for (TilePlace few = place; few.begin < place.end; few.begin += kFew) {
        few.end = min(few.begin + kFew, place.end);
        multiplyFew<T>(call, few, reinterpret_cast<float*>(shared), isFirst);
        isFirst = false;
        __syncthreads();  // the next rows' tiles overwrite the sums
    }
#endif
}

template <DType T> void launchFew(Stream& stream, const MatmulCall& call) {
    const int64_t tilesT = call.groups.begin ? call.groups.tiles : 1, tilesN = call.by.tiles(call.shape, kFewTileN);
    allowShared(matmulFewKernel<T>, kFewSharedBytes);
    launch(stream, matmulFewKernel<T>,
           dim3(static_cast<unsigned>(tilesT), static_cast<unsigned>(tilesN), call.by.grids()), dim3(kFewThreads),
           kFewSharedBytes, call);
}

// For experts, the mean number of rows decides. An expert with more rows takes them 16 at a time.
bool isFew(const MatmulCall& call) {
    if (!call.groups.begin) return call.rows <= kFew;
    constexpr int64_t kMeanPairs = 4;
    const int64_t experts = call.groups.tiles - call.groups.pairs / kExpertTile -
                            1;  // an upper bound of those with pairs: see maxExpertTiles
    return call.groups.pairs <= kMeanPairs * experts;
}

}  // namespace

bool matmulOfFewRows(Stream& stream, const MatmulCall& call, DType type) {
    if (!isFew(call)) return false;
    withNarrowType(type, [&](auto tag) { launchFew<decltype(tag)::kType>(stream, call); });
    return true;
}

}  // namespace sharpi::cuda
