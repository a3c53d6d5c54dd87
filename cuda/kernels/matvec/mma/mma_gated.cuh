// The gated products of matvec_gated.cuh on the int8 tensor cores (mma_tile.cuh), for several rows of activations.
//
// A block has p.groups runs of 32 rows of gate and of up, each as two items of 16: its first group has gate's rows, its
// second up's.
#pragma once

#include "kernels/matvec/matvec_gated.cuh"
#include "kernels/matvec/mma/mma_launch.cuh"

namespace sharpi::cuda {

template <DType D, int kTiles, bool kResident>
__global__ void __launch_bounds__(MmaTile<D, kTiles, kResident>::kThreads, mmaMinBlocks(kTiles))
    mmaGatedKernel(const __grid_constant__ GatedProduct p) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(128) uint8_t staged[];
    using Tile = MmaTile<D, kTiles, kResident>;
    static_assert(Tile::kGroups == 2);
    constexpr int kItemsOfBlock = kContractBlock / kMmaRows;  // quantized outputs have whole blocks
    // The gap puts the columns of a fragment into different banks.
    __shared__ float values[Tile::kColumns][kContractBlock + 4];
    allowNext();
    const int columnTiles = (p.rows + Tile::kColumns - 1) / Tile::kColumns;
    const int block = static_cast<int>(blockIdx.x) / columnTiles;
    const int firstColumn = (static_cast<int>(blockIdx.x) - block * columnTiles) * Tile::kColumns;
    const int firstRow = block * kContractBlock * p.groups;
    const int items = min(kContractBlock * p.groups, p.hidden - firstRow + kMmaRows - 1) / kMmaRows;
    const auto place = [&](int item, int group) {
        return MmaRows<D>{Steps<D>::base(group == 0 ? p.gate : p.up, p.shape), firstRow + item * kMmaRows,
                          p.hidden - 1};
    };
    Tile tile(staged, p.cols, items);
    tile.start(place);
    if (firstColumn == 0) fetchRowsAhead<Tile>(place, items, p.cols, p.ahead);
    waitForPrevious();

    tile.run(
        p.x.quantized, place, [&](int, int column) { return min(firstColumn + column, p.rows - 1); },
        [&](int item, int round) {
            const GatedTerms terms(p.join, 0, p.hidden);
            Tile::template forValues<1>(round, [&](int, int row, int column, int value) {
                const int r = firstRow + item * kMmaRows + row, t = firstColumn + column;
                if (r >= p.hidden || t >= p.rows) return;
                const float y = gatedValue(p.join.activation, terms.gate(tile.sumOf(0, value), r),
                                           terms.up(tile.sumOf(1, value), r));
                values[column][r % kContractBlock] = y;
                if (p.out.floats) p.out.floats[static_cast<int64_t>(t) * p.width + r] = y;
            });
            // The last part of a run of 32 rows. run() has a barrier before the next writes `values`.
            if (!p.out.quantized.q || item % kItemsOfBlock + 1 != kItemsOfBlock || round + 1 != Tile::kRounds) return;
            __syncthreads();
            const int columns = min(Tile::kColumns, p.rows - firstColumn);
            for (int column = static_cast<int>(threadIdx.x) / 32; column < columns; column += Tile::kThreads / 32)
                quantizeLane(p.out.quantized, firstColumn + column, p.width / kContractBlock,
                             block * p.groups + item / kItemsOfBlock, values[column][Tile::lane()]);
        });
#endif
}

template <DType D> void launchMmaGated(Stream& stream, GatedProduct p) {
    withMmaTiles<D>(stream, p.rows, p.cols, [&](auto shape) {
        using Shape = decltype(shape);
        using Tile = MmaTile<D, Shape::kTiles, Shape::kResident>;
        const int64_t columnTiles = (p.rows + Tile::kColumns - 1) / Tile::kColumns,
                      atOnce = int64_t{stream.device().multiprocessors} * mmaMinBlocks(Shape::kTiles);
        const auto count = [&](int64_t groups) {
            return (p.hidden + kContractBlock * groups - 1) / (kContractBlock * groups);
        };
        p.groups =
            Shape::kResident ? mmaItems(count, mmaMostItems(true) / 2, mmaStart(true) / 2, columnTiles, atOnce) : 1;
        const int64_t blocks = count(p.groups);
        p.ahead = mmaAhead(D, std::min(blocks, atOnce), kMmaRows * Tile::kGroups);
        launchMma<Tile>(stream, mmaGatedKernel<D, Shape::kTiles, Shape::kResident>, blocks * columnTiles, p);
    });
}

}  // namespace sharpi::cuda
