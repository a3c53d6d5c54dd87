// The matrix product of prefill on Hopper for up to 16 rows: short prompts, and experts that few rows chose.
//
// A row has the bits that matmul_wgmma.cuh gives it: the same instructions along k in the same order, only that they
// take 16 rows. What differs is what such a product waits for, which is weights on their way: there are fewer tiles
// than multiprocessors, and a block that waits for memory once a step of 64 columns has little on its way. So a block
// is one warpgroup with 64 outputs, which makes twice as many blocks, and goes along k in strides of four steps, whose
// weights are on their way together, with one barrier each.
//
// Tiles in shared memory at stride i: products i read theirs, weights i + 1 are written, activations i + 1 have come
// and those of i + 2 are on their way: two tiles of weights, three of activations. Products of a stride are done before
// the next one's begin.
#include "kernels/matmul/matmul_wgmma.cuh"
#include "kernels/matmul/matmul_wgmma.h"

namespace sharpi::cuda {

namespace {

constexpr int kFew = 16;       // rows that a block multiplies at once
constexpr int kFewTileN = 64;  // outputs of a block: one warpgroup's product
constexpr int kFewThreads = 128;
constexpr int kStride = 4;                                                                     // steps
constexpr uint32_t kFewBytesX = kFew * kTileRowBytes, kFewBytesW = kFewTileN * kTileRowBytes;  // of a step
constexpr int kFewStagesX = 3, kFewStagesW = 2;
constexpr size_t kFewSharedBytes = kStride * (kFewStagesX * kFewBytesX + kFewStagesW * kFewBytesW);
static_assert(kFew * kFewTileN * sizeof(float) <= kFewSharedBytes, "the sums fit where the tiles were");

#ifdef SHARPI_WGMMA

// The block's outputs of the rows of `place`, at most kFew. isFirst: nothing has been read yet that the kernel before
// writes.
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
    const RowFeed<kFewThreads, kFew, false> rows(call, place.begin, place.end);
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
        fetch(stride + 2);  // not before: publishing may wait for loads
        waitForProducts<0>();
        __syncthreads();
    }
    storeSums<kFewThreads, kFewTileN, kFew>(call, place, sums, sum);
}

#endif

// Compiled without Hopper's own instructions it is empty.
template <DType T>
__global__ void __launch_bounds__(kFewThreads, 2) matmulFewKernel(const __grid_constant__ MatmulCall call) {
#ifdef SHARPI_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    allowNext();
    if (call.groups.begin) waitForPrevious();  // the tiles' arrays are another kernel's work
    const TilePlace place = placeOf<kExpertTile, kFewTileN>(call);
    bool isFirst = !call.groups.begin;
    for (TilePlace few = place; few.begin < place.end; few.begin += kFew) {
        few.end = min(few.begin + kFew, place.end);
        multiplyFew<T>(call, few, reinterpret_cast<float*>(shared), isFirst);
        isFirst = false;
        __syncthreads();  // the sums give their room to the next rows' tiles
    }
#endif
}

template <DType T> bool launchFew(Stream& stream, const MatmulCall& call) {
    static const bool built = [] {
        cudaFuncAttributes attributes;
        check(cudaFuncGetAttributes(&attributes, matmulFewKernel<T>), "a kernel's attributes");
        if (attributes.numRegs < 24) return false;  // compiled empty
        allowShared(matmulFewKernel<T>, kFewSharedBytes);
        return true;
    }();
    if (!built) return false;
    const int64_t tilesT = call.groups.begin ? call.groups.tiles : 1,
                  tilesN = (call.shape.rows + kFewTileN - 1) / kFewTileN;
    launch(stream, matmulFewKernel<T>, dim3(static_cast<unsigned>(tilesT), static_cast<unsigned>(tilesN)),
           dim3(kFewThreads), kFewSharedBytes, call);
    return true;
}

// Experts: those that few rows chose in the mean. More for one of them are taken 16 after 16.
bool isFew(const MatmulCall& call) {
    if (!call.groups.begin) return call.rows <= kFew;
    constexpr int64_t kMeanPairs = 4;
    const int64_t experts =
        call.groups.tiles - call.groups.pairs / kExpertTile - 1;  // with pairs, at most: see maxExpertTiles
    return call.groups.pairs <= kMeanPairs * experts;
}

}  // namespace

bool matmulOfFewRows(Stream& stream, const MatmulCall& call, DType type) {
    if (!isFew(call)) return false;
    switch (type) {
    case DType::F32: return false;
    case DType::F16: return launchFew<DType::F16>(stream, call);
    case DType::BF16: return launchFew<DType::BF16>(stream, call);
    default: return withFormat(type, [&](auto tag) { return launchFew<decltype(tag)::kType>(stream, call); });
    }
}

}  // namespace sharpi::cuda
