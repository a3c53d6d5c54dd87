// silu(gate x) * (up x), for a layer's two matrices or for the expert of each pair.
//
// A block owns 32 consecutive rows of both matrices, four of each a warp, so that what it computes is one block of the
// activations that the next product reads: it is quantized here, and the floats need never be written. A warp's pair of
// rows is one of gate and the same one of up; the lane that has gate's sum gets up's from its neighbour.
#pragma once

#include "kernels/device_rows.cuh"
#include "kernels/matvec_kernel.cuh"

namespace sharpi::cuda {

constexpr int kGatedRowsPerWarp = kContractBlock / kMatvecWarps;

struct GatedProduct {
    const uint8_t *gate = nullptr, *up = nullptr;
    PackedShape shape;  // of each
    int32_t hidden = 0, cols = 0;
    MatvecInput x;
    int32_t rows = 0;  // of activations
    RowOutputs out;
    // Experts: pair p = blockIdx.y reads row p / used of x and writes row p.
    const int32_t* chosen = nullptr;
    int64_t gateStride = 0, upStride = 0;
    int32_t used = 0;
};

template <DType D, int T, bool kShared>
__global__ void __launch_bounds__(kMatvecThreads, minBlocks(T)) gatedKernel(const __grid_constant__ GatedProduct p) {
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ float values[T][kContractBlock];
    using S = Steps<D>;
    allowNext();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int firstRow = static_cast<int>(blockIdx.x) * kContractBlock + warp * kGatedRowsPerWarp;
    const uint8_t *gate = p.gate, *up = p.up;
    const int units = p.cols / S::kUnitElements;
    const auto place = [&](int item) {
        const int64_t first = static_cast<int64_t>(firstRow + item) * units;
        return RowPair{{gate, up}, {first, first}};
    };
    Pipeline<D, T> pipeline(p.shape, p.cols, min(p.hidden - firstRow, kGatedRowsPerWarp));
    if (!p.chosen) pipeline.start(place);
    waitForPrevious();

    const int64_t pair = p.chosen ? blockIdx.y : 0;
    typename S::Input x = S::inGlobal(p.x, p.chosen ? pair / p.used : 0, p.cols);
    if (kShared) x = S::toShared(x, shared, p.rows, p.cols);
    if (p.chosen) {
        const int64_t expert = p.chosen[pair];
        gate += expert * p.gateStride;
        up += expert * p.upStride;
        pipeline.start(place);
    }
    if (kShared) finishCopies();

    constexpr int kLanesPerSum = 16 / T;
    const int t = lane / kLanesPerSum / 2;
    const bool writes = lane % (2 * kLanesPerSum) == 0 && t < p.rows;
    pipeline.run(x, place, [&](int, int t) { return T <= 2 ? t : min(t, p.rows - 1); }, [&](int item, float (&acc)[T][2]) {
        const float sum = sumAccumulators(acc, lane);
        const float upSum = __shfl_down_sync(0xffffffffu, sum, kLanesPerSum);
        if (!writes) return;
        const float value = siluTimes(sum, upSum);
        values[t][warp * kGatedRowsPerWarp + item] = value;
        if (p.out.floats) p.out.floats[(pair + t) * p.hidden + firstRow + item] = value;
    });

    if (!p.out.quantized.q) return;
    __syncthreads();
    if (warp < p.rows) quantizeLane(p.out.quantized, pair + warp, p.hidden / kContractBlock, blockIdx.x, values[warp][lane]);
}

template <DType D> void launchGated(Stream& stream, const GatedProduct& p, int64_t pairs) {
    const dim3 grid(static_cast<unsigned>((p.hidden + kContractBlock - 1) / kContractBlock), static_cast<unsigned>(pairs));
    const size_t bytes = Steps<D>::inputBytes(p.rows, p.cols);
    withVariant(p.rows, bytes, [&](auto variant) {
        using V = decltype(variant);
        launch(stream, gatedKernel<D, V::kRows, V::kShared>, grid, dim3(kMatvecThreads), V::kShared ? bytes : 0, p);
    });
}

extern template void launchGated<DType::F32>(Stream&, const GatedProduct&, int64_t);
extern template void launchGated<DType::F16>(Stream&, const GatedProduct&, int64_t);
extern template void launchGated<DType::BF16>(Stream&, const GatedProduct&, int64_t);

}  // namespace sharpi::cuda
