// The matrix product of prefill on Hopper, whose tensor cores reach full speed only with warpgroup instructions. The
// pipeline is that of matmul_kernel.cuh, with two differences. First, the products of a step are asynchronous: the
// threads start them and then expand the next step's weights, and one step's products may still run when the next
// step's start. Second, weights are the operand of 64 rows, and activations that of up to 256. So each expanded weight
// is multiplied by 256 rows of x, and a short tile uses the instruction for its number of rows.
//
// Tiles in shared memory at step s: the products of s - 1 and s may be reading theirs, while weights s + 1 and
// activations s + 1 and s + 2 are being written. That takes three tiles of weights and four of activations.
#pragma once

#include "core/contract.h"
#include "kernels/matmul/matmul_kernel.cuh"
#include "kernels/matmul/wgmma.cuh"

namespace sharpi::cuda {

constexpr int kWgmmaTileN = 128;  // rows of w a block takes: two warpgroups
constexpr int kWgmmaThreads = 256;
constexpr int kWgmmaStagesX = 4, kWgmmaStagesW = 3;

template <int kTileT> constexpr size_t wgmmaSharedBytes() {
    return static_cast<size_t>(kWgmmaStagesX * kTileT + kWgmmaStagesW * kWgmmaTileN) * kTileRowBytes;
}

#ifdef SHARPI_WGMMA

// Writes a block's sums of kN rows of x, as WarpgroupProduct leaves them in its threads, to y. They pass through `sums`
// in shared memory, which nothing else uses any more.
template <int kThreads, int kTileN, int kN>
__device__ __forceinline__ void storeSums(const MatmulCall& call, const TilePlace& place, float* sums,
                                          const float (&sum)[kN / 2]) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int j = 0; j < kN / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            sums[sumPlace<kTileN>(j * 8 + lane % 4 * 2 + i % 2, warp * 16 + lane / 4 + i / 2 * 8)] = sum[4 * j + i];
    __syncthreads();
    storeTile<kThreads, kTileN>(call, place, sums);
}

// Prefetches the beginning of the block's weights. A step's weights are loaded one step before they are needed, which
// is too late for memory if there are too few blocks to hide it.
template <DType T> __device__ __forceinline__ void fetchWeightsAhead(const MatmulCall& call, const TilePlace& place) {
    if constexpr (!kIsFloat<T>) {
        const int64_t row = place.firstRow + threadIdx.x;
        // Blocks with other rows of x multiply the same weights, unless they are an expert's.
        const bool isFirst = call.groups.begin || blockIdx.x == 0;
        if (!isFirst || call.ahead == 0 || threadIdx.x >= kWgmmaTileN || row >= call.shape.rows) return;
        const auto blocks = static_cast<uint32_t>(call.shape.cols / kContractBlock);
        PlanesOf<T>::fetchAhead(PlanesOf<T>::begin(place.w, call.shape), static_cast<uint32_t>(row) * blocks,
                                call.ahead);
    }
}

// kN: the rows of x that the block multiplies; its tiles have room for kTileT. sums: all of its shared memory.
template <DType T, int kTileT, int kN>
__device__ __forceinline__ void multiplyTile(const MatmulCall& call, const TilePlace& place, float* sums) {
    const uint32_t shared = sharedAddress(sums);
    const auto tileX = [&](int step) { return shared + step % kWgmmaStagesX * (kTileT * kTileRowBytes); };
    const auto tileW = [&](int step) {
        return shared + kWgmmaStagesX * (kTileT * kTileRowBytes) + step % kWgmmaStagesW * (kWgmmaTileN * kTileRowBytes);
    };
    const auto at = [](int step) { return Step{step, false, false}; };
    const int steps = static_cast<int>((call.shape.cols + kTileDepth - 1) / kTileDepth);
    static_assert(kWeightParts<kWgmmaThreads, kWgmmaTileN> == 1);

    typename WeightFeedOf<T, false, kWgmmaThreads, kWgmmaTileN>::Type weights(call, place.w, place.firstRow);
    weights.fetch(at(0), 0, true);
    weights.store(tileW(0), at(0), 0);
    if (steps > 1) weights.fetch(at(1), 0, true);

    waitForPrevious();
    const RowFeed<kWgmmaThreads, kN, false> rows(call, place);
    for (int step = 0; step < 2; ++step) {
        if (step < steps) rows.copy(tileX(step), at(step));
        closeCopies();
    }
    waitForCopies<1>();
    publishToTensorCores();
    __syncthreads();

    const uint32_t group = static_cast<uint32_t>(threadIdx.x) / 128 * (64 * kTileRowBytes);
    float sum[kN / 2] = {};
    for (int step = 0; step < steps; ++step) {
        beginProducts();
#pragma unroll
        for (int k = 0; k < kTileDepth / 16; ++k)
            WarpgroupProduct<kN>::add(sum, tileDescriptor(tileW(step) + group + k * 32),
                                      tileDescriptor(tileX(step) + k * 32));
        closeProducts();
        if (step + 2 < steps) rows.copy(tileX(step + 2), at(step + 2));
        closeCopies();
        if (step + 1 < steps) weights.store(tileW(step + 1), at(step + 1), 0);
        waitForCopies<1>();  // the next step's activations
        publishToTensorCores();
        if (step + 2 < steps) weights.fetch(at(step + 2), 0, true);  // not earlier: publishing may wait for loads
        waitForProducts<1>();  // the last step's, whose tiles are overwritten next
        __syncthreads();
    }
    waitForProducts<0>();
    __syncthreads();  // the sums overwrite the tiles
    storeSums<kWgmmaThreads, kWgmmaTileN, kN>(call, place, sums, sum);
}

#endif

// Without Hopper's own instructions the kernel is compiled empty.
template <DType T, int kTileT>
__global__ void __launch_bounds__(kWgmmaThreads, 256 / kTileT)
    matmulWgmmaKernel(const __grid_constant__ MatmulCall call) {
#ifdef SHARPI_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    allowNext();
    if (call.groups.begin) waitForPrevious();  // another kernel writes the tiles' arrays
    const TilePlace place = placeOf<kTileT, kWgmmaTileN>(call);
    if (place.begin >= place.end) return;
    fetchWeightsAhead<T>(call, place);
    float* tiles = reinterpret_cast<float*>(shared);
    const int64_t rows = place.end - place.begin;
    if (rows <= 64) multiplyTile<T, kTileT, 64>(call, place, tiles);
    else if (kTileT == 128 || rows <= 128) multiplyTile<T, kTileT, 128>(call, place, tiles);
    else multiplyTile<T, kTileT, kTileT>(call, place, tiles);
#endif
}

}  // namespace sharpi::cuda
