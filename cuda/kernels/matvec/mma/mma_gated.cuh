// The gated products of matvec_gated.cuh on the int8 tensor cores (stream_tile.cuh, mma_tile.cuh), for several rows of
// activations.
//
// A block has p.groups runs of 32 rows of gate and of up. Of each two groups of a tile, the first has gate's rows and
// the second up's. An item of the tile is a half or a quarter of a run.
#pragma once

#include "kernels/matvec/matvec_gated.cuh"
#include "kernels/matvec/mma/mma_launch.cuh"
#include "kernels/rows/wide_columns.h"

namespace sharpi::cuda {

// The gap puts the columns of a fragment into different banks.
template <typename Tile> using MmaGatedValues = float[Tile::kColumns][kContractBlock + 4];

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    mmaGatedKernel(const __grid_constant__ GatedProduct p) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(128) uint8_t staged[];
    constexpr DType kType = Tile::kType;
    constexpr int kItemRows = Tile::kGroupRows * Tile::kPairs;
    constexpr int kItemsOfBlock = kContractBlock / kItemRows;  // quantized outputs have whole blocks
    static_assert(kItemsOfBlock * kItemRows == kContractBlock);
    __shared__ MmaGatedValues<Tile> values;
    allowNext();
    const int columnTiles = (p.rows + Tile::kColumns - 1) / Tile::kColumns;
    const int block = static_cast<int>(blockIdx.x) / columnTiles;
    const int firstColumn = (static_cast<int>(blockIdx.x) - block * columnTiles) * Tile::kColumns;
    const int firstRow = block * kContractBlock * p.groups;
    const int items = (min(kContractBlock * p.groups, p.hidden - firstRow) + kItemRows - 1) / kItemRows;
    const auto place = [&](int item, int group) {
        return MmaRows<kType>{Steps<kType>::base(group % 2 == 0 ? p.gate : p.up, p.shape),
                              firstRow + item * kItemRows + group / 2 * Tile::kGroupRows, p.hidden - 1};
    };
    Tile tile(staged, p.cols, items, p.room);
    tile.start(place);
    waitForPrevious();

    tile.run(
        p.x.quantized, place, [&](int, int column) { return min(firstColumn + column, p.rows - 1); },
        [&](int item, int round) {
            const GatedTerms terms(p.join, 0, p.hidden);
            tile.forPairs(round, [&](int pair, int row, int column, float gate, float up) {
                const int r = firstRow + item * kItemRows + pair * Tile::kGroupRows + row, t = firstColumn + column;
                if (r >= p.hidden || t >= p.rows) return;
                const float y = gatedValue(p.join.activation, terms.gate(gate, r), terms.up(up, r));
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
    const auto count = [&](int64_t groups) {
        return (p.hidden + kContractBlock * groups - 1) / (kContractBlock * groups);
    };
    // Rows of both matrices.
    const auto countRows = [&](int64_t rows) { return (2 * p.hidden + rows - 1) / rows; };
    withMmaTile<D>(stream, {p.rows, p.cols, p.x.quantized.wide.first, p.x.quantized.wide.codes != nullptr},
                   (kContractBlock + 4) * sizeof(float), countRows, [&](auto shape) {
                       using Tile = typename decltype(shape)::Tile;
                       const int64_t columnTiles = (p.rows + Tile::kColumns - 1) / Tile::kColumns,
                                     atOnce = int64_t{stream.device().multiprocessors} * Tile::kMinBlocks;
                       // Runs of 32 rows have this many items.
                       constexpr int kItems = kContractBlock / (Tile::kGroupRows * Tile::kPairs);
                       p.groups = Tile::kIsStream ? mmaItems(count, mmaMostItems(Tile::kIsStream) / kItems,
                                                             mmaStart(Tile::kIsStream) / kItems, columnTiles, atOnce)
                                                  : 1;
                       const int64_t blocks = count(p.groups);
                       if (Tile::kIsStream) arrangeColumns(stream, p.x.quantized, p.rows, p.cols);
                       p.room = shape.room;
                       launchMma<Tile>(stream, mmaGatedKernel<Tile>, blocks * columnTiles, p);
                   });
}

}  // namespace sharpi::cuda
