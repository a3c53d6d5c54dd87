// The matrix product of prefill on Hopper, whose tensor cores run at full speed only by warpgroup instructions. The
// same pipeline as in matmul_kernel.cuh, with two differences. The products of a step run by themselves: the threads
// start them, then expand the next step's weights, and one step's products may still be under way when the next step's
// are started. And weights are the operand of 64 rows, activations that of up to 256: so each weight that is expanded
// meets 256 rows of x, and a short tile takes the instruction for its number of rows.
//
// Tiles in shared memory at step s: products s - 1 and s may be reading theirs, weights s + 1 and activations s + 1, s
// + 2 are being written: three tiles of weights, four of activations.
#pragma once

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

// A block's sums of kN rows of x, as WarpgroupProduct leaves them in its threads, to y by way of `sums` in shared
// memory, which nothing else uses any more.
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

// kN: rows of x that the block multiplies, of the kTileT that its tiles have room for. sums: all of its shared memory.
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
    const RowFeed<kWgmmaThreads, kN, false> rows(call, place.begin, place.end);
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
        if (step + 2 < steps) weights.fetch(at(step + 2), 0, true);  // not before: publishing may wait for loads
        waitForProducts<1>();                                        // the last step's, whose tiles are written next
        __syncthreads();
    }
    waitForProducts<0>();
    __syncthreads();  // the tiles give their room to the sums
    storeSums<kWgmmaThreads, kWgmmaTileN, kN>(call, place, sums, sum);
}

#endif

// Compiled without Hopper's own instructions it is empty.
template <DType T, int kTileT>
__global__ void __launch_bounds__(kWgmmaThreads, 256 / kTileT)
    matmulWgmmaKernel(const __grid_constant__ MatmulCall call) {
#ifdef SHARPI_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    allowNext();
    if (call.groups.begin) waitForPrevious();  // the tiles' arrays are another kernel's work
    const TilePlace place = placeOf<kTileT, kWgmmaTileN>(call);
    if (place.begin >= place.end) return;
    float* tiles = reinterpret_cast<float*>(shared);
    const int64_t rows = place.end - place.begin;
    if (rows <= 64) multiplyTile<T, kTileT, 64>(call, place, tiles);
    else if (kTileT == 128 || rows <= 128) multiplyTile<T, kTileT, 128>(call, place, tiles);
    else multiplyTile<T, kTileT, kTileT>(call, place, tiles);
#endif
}

}  // namespace sharpi::cuda
