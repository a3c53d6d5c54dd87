// activation(gate x, up x), for a layer's two matrices or for the expert of each pair.
//
// A block owns 32 consecutive rows of both matrices, four of each for a warp. So its results are one block of the
// activations that the next product reads. It is quantized here, and the floats need not be written. A warp's pair of
// rows is one row of gate and the same row of up. The lane that has gate's sum gets up's from its neighbour.
#pragma once

#include "kernels/matvec/matvec_kernel.cuh"
#include "kernels/matvec/mma/stream_room.h"
#include "kernels/rows/device_rows.cuh"

namespace sharpi::cuda {

constexpr int kGatedRowsPerWarp = kContractBlock / kMatvecWarps;

struct GatedProduct {
    const uint8_t *gate = nullptr, *up = nullptr;
    PackedShape shape;  // of each matrix
    int32_t hidden = 0, cols = 0;
    int32_t width = 0;  // columns of out's rows, of which `hidden` are written
    MatvecInput x;
    int32_t rows = 0;    // rows of activations
    int32_t groups = 1;  // tensor cores: runs of 32 rows for each block
    StreamRoom room;     // tensor cores: how a tile divides shared memory
    int32_t ahead = 0;   // units that a warp prefetches (floats)
    RowOutputs out;
    GatedJoin join;
    // Experts: pair p = blockIdx.y reads row p / used of x and writes row p. A pair with chosen[p] < 0 is skipped.
    const int32_t* chosen = nullptr;
    int64_t gateStride = 0, upStride = 0;
    int32_t used = 0;
};

template <DType D, int T, bool kShared, bool kExperts>
__global__ void __launch_bounds__(kMatvecThreads, minBlocks(D, T)) gatedKernel(const __grid_constant__ GatedProduct p) {
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ float values[T][kContractBlock];
    using S = Steps<D>;
    allowNext();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int firstRow = static_cast<int>(blockIdx.x) * kContractBlock + warp * kGatedRowsPerWarp;
    using Index = typename S::Index;
    typename S::Base gate = S::base(p.gate, p.shape), up = S::base(p.up, p.shape);
    const int units = p.cols / S::kUnitElements;
    const auto place = [&](int item) {
        const Index first = static_cast<Index>(firstRow + item) * units;
        return RowPair<D>{{gate, up}, {first, first}};
    };
    const int items = min(p.hidden - firstRow, kGatedRowsPerWarp);
    Pipeline<D, T> pipeline(p.cols, items);
    const auto start = [&] {
        pipeline.start(place);
        const Index first = static_cast<Index>(firstRow) * units;
        const int64_t count = min(static_cast<int64_t>(items) * units, static_cast<int64_t>(p.ahead / 2));
        pipeline.fetchAhead(gate, first, count);
        pipeline.fetchAhead(up, first, count);
    };
    if (!kExperts) start();
    waitForPrevious();

    const int64_t pair = kExperts ? blockIdx.y : 0;
    const auto x = activations<S, kShared>(p.x, kExperts ? pair / p.used : 0, p.rows, p.cols, shared);
    if (kExperts) {
        const int64_t expert = p.chosen[pair];
        if (expert < 0) {  // no expert: skipped
            if (kShared) finishCopies();
            return;
        }
        gate = S::base(p.gate + expert * p.gateStride, p.shape);
        up = S::base(p.up + expert * p.upStride, p.shape);
        start();
    }
    if (kShared) finishCopies();

    constexpr int kLanesPerSum = 16 / T;
    const int t = lane / kLanesPerSum / 2;
    const bool writes = lane % (2 * kLanesPerSum) == 0 && t < p.rows;
    pipeline.run(
        x, place, [&](int, int t) { return T <= 2 ? t : min(t, p.rows - 1); },
        [&](int item, float (&acc)[T][2]) {
            const float sum = sumPairs(acc, lane);
            const float upSum = __shfl_down_sync(0xffffffffu, sum, kLanesPerSum);
            if (!writes) return;
            const GatedTerms terms(p.join, pair, p.hidden);
            const int row = firstRow + item;
            const float value = gatedValue(p.join.activation, terms.gate(sum, row), terms.up(upSum, row));
            values[t][warp * kGatedRowsPerWarp + item] = value;
            if (p.out.floats) p.out.floats[(pair + t) * p.width + row] = value;
        });

    if (!p.out.quantized.q) return;
    __syncthreads();
    if (warp < p.rows)
        quantizeLane(p.out.quantized, pair + warp, p.width / kContractBlock, blockIdx.x, values[warp][lane]);
}

// pairs: the pairs of rows and experts; 1 for a dense layer. Sets p.ahead.
template <DType D> void launchGated(Stream& stream, GatedProduct p, int64_t pairs) {
    const dim3 grid(static_cast<unsigned>((p.hidden + kContractBlock - 1) / kContractBlock),
                    static_cast<unsigned>(pairs));
    p.ahead = aheadUnits(stream, D, static_cast<int64_t>(grid.x) * pairs);
    const size_t bytes = Steps<D>::sharedBytes(p.rows, p.cols);
    withVariant<D>(p.rows, bytes, p.chosen != nullptr, [&](auto variant) {
        using V = decltype(variant);
        launch(stream, gatedKernel<D, V::kRows, V::kShared, V::kExperts>, grid, dim3(kMatvecThreads),
               V::kShared ? bytes : 0, p);
    });
}

extern template void launchGated<DType::F32>(Stream&, GatedProduct, int64_t);
extern template void launchGated<DType::F16>(Stream&, GatedProduct, int64_t);
extern template void launchGated<DType::BF16>(Stream&, GatedProduct, int64_t);

}  // namespace sharpi::cuda
