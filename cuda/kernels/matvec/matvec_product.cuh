// y = w x + bias, or y += w x + bias, for up to kMaxProducts matrices of one type at once, or for the expert of each
// pair. mma_product.cuh has the kernels for more rows.
//
// A block has eight warps (fewer if there are few rows). Each warp has 2 * groups rows and takes one pair of rows after
// the other. Matrices that read the same activations, such as those of queries, keys and values, share a launch: a
// block finds its matrix by the block's number.
#pragma once

#include "kernels/matvec/matvec_kernel.cuh"
#include "kernels/matvec/mma/stream_room.h"

namespace sharpi::cuda {

constexpr int kMaxProducts = 4;

struct Product {
    const uint8_t* data = nullptr;
    PackedShape shape;
    const float* bias = nullptr;
    float* y = nullptr;
    int32_t rows = 0;
    int32_t stride = 0;    // from a row of y to the next
    int32_t endBlock = 0;  // the first block past this matrix
};

struct Products {
    Product product[kMaxProducts];
    MatvecInput x;
    int32_t count = 0;
    int32_t rows = 0;  // rows of activations
    int32_t cols = 0;
    int32_t groups = 1;  // pairs of rows for each warp; tensor cores: items for each block
    int32_t ahead = 0;   // units that a warp prefetches (floats)
    StreamRoom room;     // tensor cores: how a tile divides shared memory
    bool add = false;
    Together order = Together::Alone;
    // Experts: pair p = blockIdx.y reads row p (rowPerPair) or p / used of x and writes row p of y. A pair with
    // chosen[p] < 0 is skipped.
    const int32_t* chosen = nullptr;
    int64_t stride = 0;
    int32_t used = 0;
    bool rowPerPair = false;
};

template <DType D, int T, bool kShared, bool kExperts>
__global__ void __launch_bounds__(kMatvecThreads, minBlocks(D, T)) productKernel(const __grid_constant__ Products p) {
    extern __shared__ __align__(16) uint8_t shared[];
    using S = Steps<D>;
    beginTogether(p.order);
    int index = 0;
    while (static_cast<int>(blockIdx.x) >= p.product[index].endBlock) ++index;
    const Product& w = p.product[index];
    const int block = static_cast<int>(blockIdx.x) - (index ? p.product[index - 1].endBlock : 0);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int firstRow = (block * static_cast<int>(blockDim.x / 32) + warp) * 2 * p.groups;
    const int items = min((w.rows - firstRow + 1) / 2, p.groups);
    const int units = p.cols / S::kUnitElements;
    using Index = typename S::Index;
    typename S::Base base = S::base(w.data, w.shape);
    const auto place = [&](int item) {
        const int row = firstRow + 2 * item;
        const Index first = static_cast<Index>(row) * units;
        return RowPair<D>{{base, base}, {first, row + 1 < w.rows ? first + units : first}};
    };
    Pipeline<D, T> pipeline(p.cols, items);
    const auto start = [&] {
        pipeline.start(place);
        const int64_t rows = min(2 * items, w.rows - firstRow);
        pipeline.fetchAhead(base, static_cast<Index>(firstRow) * units,
                            min(rows * units, static_cast<int64_t>(p.ahead)));
    };
    if (!kExperts) start();
    awaitTogether(p.order);

    int64_t inputRow = 0, outputRow = 0;
    if (kExperts) {
        outputRow = blockIdx.y;
        inputRow = p.rowPerPair ? blockIdx.y : blockIdx.y / p.used;
    }
    const auto x = activations<S, kShared>(p.x, inputRow, p.rows, p.cols, shared);
    if (kExperts) {
        const int64_t expert = p.chosen[outputRow];
        if (expert < 0) {  // no expert: skipped
            if (kShared) finishCopies();
            return;
        }
        base = S::base(w.data + expert * p.stride, w.shape);
        start();
    }

    // For the lanes that write: t is their row of activations, odd their row of weights within a pair.
    constexpr int kLanesPerSum = 16 / T;
    const int t = lane / kLanesPerSum / 2, odd = lane / kLanesPerSum % 2;
    float* y = w.y + (outputRow + t) * w.stride + firstRow + odd;
    const int end = lane % kLanesPerSum == 0 && t < p.rows ? min(w.rows - firstRow, 2 * items) - odd : 0;
    float before = p.add && end > 0 ? *y : 0.0f;

    if (kShared) finishCopies();
    pipeline.run(
        x, place, [&](int, int t) { return T <= 2 ? t : min(t, p.rows - 1); },
        [&](int item, float (&acc)[T][2]) {
            float sum = sumPairs(acc, lane);
            const int at = 2 * item;
            if (at >= end) return;
            if (w.bias) sum = __fadd_rn(sum, w.bias[firstRow + odd + at]);
            y[at] = p.add ? __fadd_rn(before, sum) : sum;
            if (p.add && at + 2 < end) before = y[at + 2];
        });
    endTogether(p.order);
}

// The pairs of rows for each warp, and the warps of a block.
struct ProductGrid {
    int groups = 1, warps = kMatvecWarps;
    int64_t blocksFor(int rows) const { return ((rows + 1) / 2 + warps * groups - 1) / (warps * groups); }
    int64_t blocks(const Products& p) const {
        int64_t sum = 0;
        for (int i = 0; i < p.count; ++i) sum += blocksFor(p.product[i].rows);
        return sum;
    }
};

// Takes the number of groups with which the rounds of blocks cost least, so that the last round is full. The few rows
// of a router are spread over as many multiprocessors as possible.
inline ProductGrid productGrid(const Stream& stream, DType type, const Products& p, int64_t pairs) {
    const int64_t multiprocessors = stream.device().multiprocessors, atOnce = multiprocessors * minBlocks(type, p.rows);
    ProductGrid best, grid;
    double bestCost = 0;
    for (grid.groups = 1; grid.groups <= 8; ++grid.groups) {
        const int64_t rounds = (grid.blocks(p) * pairs + atOnce - 1) / atOnce;
        // Starting a block costs about half a pair's time.
        const double cost = static_cast<double>(rounds) * (grid.groups + 0.5);
        if (grid.groups == 1 || cost < bestCost) best = grid, bestCost = cost;
    }
    while (best.warps > 1 && 2 * best.blocks(p) * pairs <= multiprocessors) best.warps /= 2;
    return best;
}

// pairs: the pairs of rows and experts; 1 for dense matrices. Sets groups, ahead and endBlock.
template <DType D> void launchProducts(Stream& stream, Products p, int64_t pairs) {
    const ProductGrid best = productGrid(stream, D, p, pairs);
    p.groups = best.groups;
    int32_t blocks = 0;
    for (int i = 0; i < p.count; ++i)
        p.product[i].endBlock = blocks += static_cast<int32_t>(best.blocksFor(p.product[i].rows));
    p.ahead = aheadUnits(stream, D, blocks * pairs);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(pairs)),
        block(static_cast<unsigned>(32 * best.warps));
    const size_t bytes = Steps<D>::sharedBytes(p.rows, p.cols);
    withVariant<D>(p.rows, bytes, p.chosen != nullptr, [&](auto variant) {
        using V = decltype(variant);
        launch(stream, productKernel<D, V::kRows, V::kShared, V::kExperts>, grid, block, V::kShared ? bytes : 0, p);
    });
}

extern template void launchProducts<DType::F32>(Stream&, Products, int64_t);
extern template void launchProducts<DType::F16>(Stream&, Products, int64_t);
extern template void launchProducts<DType::BF16>(Stream&, Products, int64_t);

}  // namespace sharpi::cuda
