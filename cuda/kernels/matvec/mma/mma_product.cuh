// The products of matvec_product.cuh on the int8 tensor cores (stream_tile.cuh, mma_tile.cuh), for several rows of
// activations.
//
// A block has the weight rows of a tile, and its columns; more columns are further blocks, neighbours in the grid, so
// that they find the weights in the L2 cache.
#pragma once

#include "kernels/matvec/matvec_product.cuh"
#include "kernels/matvec/mma/mma_launch.cuh"
#include "kernels/rows/wide_columns.h"

namespace sharpi::cuda {

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    mmaProductKernel(const __grid_constant__ Products p) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(128) uint8_t staged[];
    constexpr DType kType = Tile::kType;
    constexpr int kRows = Tile::kGroupRows * Tile::kGroups;
    beginTogether(p.order);
    const int columnTiles = (p.rows + Tile::kColumns - 1) / Tile::kColumns;
    const int rowBlock = static_cast<int>(blockIdx.x) / columnTiles;
    const int firstColumn = (static_cast<int>(blockIdx.x) - rowBlock * columnTiles) * Tile::kColumns;
    int index = 0;
    while (rowBlock >= p.product[index].endBlock) ++index;
    const Product& w = p.product[index];
    const int block = rowBlock - (index ? p.product[index - 1].endBlock : 0);
    const int firstRow = block * kRows * p.groups;
    const int items = min(p.groups, (w.rows - block * kRows * p.groups + kRows - 1) / kRows);
    const auto base = Steps<kType>::base(w.data, w.shape);
    const auto rowOf = [&](int item, int group) { return firstRow + item * kRows + group * Tile::kGroupRows; };
    const auto place = [&](int item, int group) { return MmaRows<kType>{base, rowOf(item, group), w.rows - 1}; };
    Tile tile(staged, p.cols, items, p.room);
    tile.start(place);
    awaitTogether(p.order);

    tile.run(
        p.x.quantized, place, [&](int, int column) { return min(firstColumn + column, p.rows - 1); },
        [&](int item, int round) {
            tile.forSums(round, [&](int group, int row, int column, float sum) {
                const int r = rowOf(item, group) + row, t = firstColumn + column;
                if (r >= w.rows || t >= p.rows) return;
                float* y = w.y + static_cast<int64_t>(t) * w.stride + r;
                if (w.bias) sum = __fadd_rn(sum, w.bias[r]);
                *y = p.add ? __fadd_rn(*y, sum) : sum;
            });
        });
    endTogether(p.order);
#endif
}

// If it arranges columns, p says so afterwards.
template <DType D> void launchMmaProducts(Stream& stream, Products& p) {
    const auto count = [&](int64_t rows) {
        int64_t all = 0;
        for (int i = 0; i < p.count; ++i) all += (p.product[i].rows + rows - 1) / rows;
        return all;
    };
    withMmaTile<D>(stream, {p.rows, p.cols, p.x.quantized.wide.first, p.x.quantized.wide.codes != nullptr}, 0, count,
                   [&](auto shape) {
                       using Tile = typename decltype(shape)::Tile;
                       constexpr int kRows = Tile::kGroupRows * Tile::kGroups;
                       const int64_t columnTiles = (p.rows + Tile::kColumns - 1) / Tile::kColumns;
                       const int64_t atOnce = int64_t{stream.device().multiprocessors} * Tile::kMinBlocks;
                       p.groups =
                           mmaItems([&](int64_t items) { return count(kRows * items); }, mmaMostItems(Tile::kIsStream),
                                    mmaStart(Tile::kIsStream), columnTiles, atOnce);
                       int64_t blocks = 0;
                       for (int i = 0; i < p.count; ++i) {
                           blocks += (p.product[i].rows + kRows * p.groups - 1) / (kRows * p.groups);
                           p.product[i].endBlock = static_cast<int32_t>(blocks);
                       }
                       if (Tile::kIsStream) arrangeColumns(stream, p.x.quantized, p.rows, p.cols);
                       p.room = shape.room;
                       launchMma<Tile>(stream, mmaProductKernel<Tile>, blocks * columnTiles, p);
                   });
}

}  // namespace sharpi::cuda
