// The products of matvec_product.cuh on the int8 tensor cores (mma_tile.cuh), for several rows of activations.
//
// A block has 32 weight rows and up to 32 columns; more columns are further blocks, neighbours in the grid, so that
// they find the weights in the L2 cache.
#pragma once

#include "kernels/matvec/matvec_product.cuh"
#include "kernels/matvec/mma/mma_launch.cuh"

namespace sharpi::cuda {

template <DType D, int kTiles, bool kResident>
__global__ void __launch_bounds__(MmaTile<D, kTiles, kResident>::kThreads, mmaMinBlocks(kTiles))
    mmaProductKernel(const __grid_constant__ Products p) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(128) uint8_t staged[];
    using Tile = MmaTile<D, kTiles, kResident>;
    constexpr int kRows = kMmaRows * Tile::kGroups;
    allowNext();
    const int columnTiles = (p.rows + Tile::kColumns - 1) / Tile::kColumns;
    const int rowBlock = static_cast<int>(blockIdx.x) / columnTiles;
    const int firstColumn = (static_cast<int>(blockIdx.x) - rowBlock * columnTiles) * Tile::kColumns;
    int index = 0;
    while (rowBlock >= p.product[index].endBlock) ++index;
    const Product& w = p.product[index];
    const int block = rowBlock - (index ? p.product[index - 1].endBlock : 0);
    const int firstRow = block * kRows * p.groups;
    const int items = min(p.groups, (w.rows - block * kRows * p.groups + kRows - 1) / kRows);
    const auto base = Steps<D>::base(w.data, w.shape);
    const auto rowOf = [&](int item, int group) { return firstRow + item * kRows + group * kMmaRows; };
    const auto place = [&](int item, int group) { return MmaRows<D>{base, rowOf(item, group), w.rows - 1}; };
    Tile tile(staged, p.cols, items);
    tile.start(place);
    if (firstColumn == 0) fetchRowsAhead<Tile>(place, items, p.cols, p.ahead);
    waitForPrevious();

    tile.run(
        p.x.quantized, place, [&](int, int column) { return min(firstColumn + column, p.rows - 1); },
        [&](int item, int round) {
            Tile::template forValues<Tile::kGroups>(round, [&](int group, int row, int column, int value) {
                const int r = rowOf(item, group) + row, t = firstColumn + column;
                if (r >= w.rows || t >= p.rows) return;
                float* y = w.y + static_cast<int64_t>(t) * w.stride + r;
                const float before = p.add ? *y : 0.0f;
                float sum = tile.sumOf(group, value);
                if (w.bias) sum = __fadd_rn(sum, w.bias[r]);
                *y = p.add ? __fadd_rn(before, sum) : sum;
            });
        });
#endif
}

template <DType D> void launchMmaProducts(Stream& stream, Products p) {
    withMmaTiles<D>(stream, p.rows, p.cols, [&](auto shape) {
        using Shape = decltype(shape);
        using Tile = MmaTile<D, Shape::kTiles, Shape::kResident>;
        constexpr int kRows = kMmaRows * Tile::kGroups;
        const int64_t columnTiles = (p.rows + Tile::kColumns - 1) / Tile::kColumns;
        const int64_t atOnce = int64_t{stream.device().multiprocessors} * mmaMinBlocks(Shape::kTiles);
        const auto blocksOf = [&](const Product& w, int64_t items) {
            return (w.rows + kRows * items - 1) / (kRows * items);
        };
        const auto count = [&](int items) {
            int64_t all = 0;
            for (int i = 0; i < p.count; ++i) all += blocksOf(p.product[i], items);
            return all;
        };
        p.groups = mmaItems(count, mmaMostItems(Shape::kResident), mmaStart(Shape::kResident), columnTiles, atOnce);
        int64_t blocks = 0;
        for (int i = 0; i < p.count; ++i) {
            blocks += blocksOf(p.product[i], p.groups);
            p.product[i].endBlock = static_cast<int32_t>(blocks);
        }
        p.ahead = mmaAhead(D, std::min(blocks, atOnce), kRows);
        launchMma<Tile>(stream, mmaProductKernel<D, Shape::kTiles, Shape::kResident>, blocks * columnTiles, p);
    });
}

}  // namespace sharpi::cuda
