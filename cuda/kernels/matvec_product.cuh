// y = w x + bias, or y += w x + bias, for up to kMaxProducts matrices of one type at once, or for the expert of each pair.
//
// A block is eight warps with 2 * groups rows each, one pair of rows after the other. Queries, keys and values, or
// whatever else reads the same activations, are one launch: a block finds its matrix by its number.
#pragma once

#include "kernels/matvec_kernel.cuh"

namespace sharpi::cuda {

constexpr int kMaxProducts = 4;

struct Product {
    const uint8_t* data = nullptr;
    PackedShape shape;
    const float* bias = nullptr;
    float* y = nullptr;
    int32_t rows = 0;
    int32_t endBlock = 0;  // the first block past this matrix
};

struct Products {
    Product product[kMaxProducts];
    MatvecInput x;
    int32_t count = 0;
    int32_t rows = 0;    // of activations
    int32_t cols = 0;
    int32_t groups = 1;  // pairs of rows that a warp does
    int32_t ahead = 0;   // units that a warp fetches ahead
    bool add = false;
    // Experts: pair p = blockIdx.y reads row p (rowPerPair) or p / used of x and writes row p of y.
    const int32_t* chosen = nullptr;
    int64_t stride = 0;
    int32_t used = 0;
    bool rowPerPair = false;
};

template <DType D, int T, bool kShared>
__global__ void __launch_bounds__(kMatvecThreads, minBlocks(T)) productKernel(const __grid_constant__ Products p) {
    extern __shared__ __align__(16) uint8_t shared[];
    using S = Steps<D>;
    allowNext();
    int index = 0;
    while (static_cast<int>(blockIdx.x) >= p.product[index].endBlock) ++index;
    const Product& w = p.product[index];
    const int block = static_cast<int>(blockIdx.x) - (index ? p.product[index - 1].endBlock : 0);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int firstRow = (block * kMatvecWarps + warp) * 2 * p.groups;
    const int pairs = (w.rows - firstRow + 1) / 2;

    const uint8_t* data = w.data;
    const int units = p.cols / S::kUnitElements;
    const auto place = [&](int item) {
        const int row = firstRow + 2 * item;
        const int64_t first = static_cast<int64_t>(row) * units;
        return RowPair{{data, data}, {first, row + 1 < w.rows ? first + units : first}};
    };
    const int items = pairs < p.groups ? pairs : p.groups;
    Pipeline<D, T> pipeline(w.shape, p.cols, items);
    const auto start = [&] {
        pipeline.start(place);
        const int64_t rows = min(2 * items, w.rows - firstRow);
        pipeline.fetchAhead(data, static_cast<int64_t>(firstRow) * units, min(rows * units, static_cast<int64_t>(p.ahead)));
    };
    if (!p.chosen) start();
    waitForPrevious();

    int64_t inputRow = 0, outputRow = 0;
    if (p.chosen) {
        outputRow = blockIdx.y;
        inputRow = p.rowPerPair ? blockIdx.y : blockIdx.y / p.used;
    }
    const auto x = activations<S, kShared>(p.x, inputRow, p.rows, p.cols, shared);
    if (p.chosen) {
        data += p.chosen[outputRow] * p.stride;
        start();
    }

    // The lanes that write: their row of activations, and of weights within a pair.
    constexpr int kLanesPerSum = 16 / T;
    const int t = lane / kLanesPerSum / 2, odd = lane / kLanesPerSum % 2;
    float* y = w.y + (outputRow + t) * w.rows + firstRow + odd;
    const float* bias = w.bias ? w.bias + firstRow + odd : nullptr;
    const auto writes = [&](int item) { return lane % kLanesPerSum == 0 && t < p.rows && firstRow + 2 * item + odd < w.rows; };
    float before = p.add && writes(0) ? y[0] : 0.0f;

    if (kShared) finishCopies();
    pipeline.run(x, place, [&](int, int t) { return T <= 2 ? t : min(t, p.rows - 1); }, [&](int item, float (&acc)[T][2]) {
        float sum = sumPairs(acc, lane);
        if (!writes(item)) return;
        if (bias) sum = __fadd_rn(sum, bias[2 * item]);
        y[2 * item] = p.add ? __fadd_rn(before, sum) : sum;
        if (p.add && item + 1 < p.groups && writes(item + 1)) before = y[2 * item + 2];
    });
}

// How many pairs of rows a warp should do: as few as fill the device, and so that its last round of blocks is full.
inline int groupsFor(const Stream& stream, const Products& p, int64_t pairs) {
    const int64_t atOnce = static_cast<int64_t>(stream.device().multiprocessors) * minBlocks(p.rows);
    int best = 1;
    double bestCost = 0;
    for (int groups = 1; groups <= 8; ++groups) {
        int64_t blocks = 0;
        for (int i = 0; i < p.count; ++i) blocks += ((p.product[i].rows + 1) / 2 + kMatvecWarps * groups - 1) / (kMatvecWarps * groups);
        const int64_t rounds = (blocks * pairs + atOnce - 1) / atOnce;
        // Starting a block costs about half a pair's time.
        const double cost = static_cast<double>(rounds) * (groups + 0.5);
        if (groups == 1 || cost < bestCost) best = groups, bestCost = cost;
    }
    return best;
}

// pairs: of experts; 1 without. Fills in groups, ahead and endBlock.
template <DType D> void launchProducts(Stream& stream, Products p, int64_t pairs) {
    p.groups = groupsFor(stream, p, pairs);
    int32_t blocks = 0;
    for (int i = 0; i < p.count; ++i) {
        blocks += ((p.product[i].rows + 1) / 2 + kMatvecWarps * p.groups - 1) / (kMatvecWarps * p.groups);
        p.product[i].endBlock = blocks;
    }
    p.ahead = aheadUnits(stream, D, blocks * pairs, p.rows);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(pairs));
    const size_t bytes = Steps<D>::sharedBytes(p.rows, p.cols);
    withVariant(p.rows, bytes, [&](auto variant) {
        using V = decltype(variant);
        launch(stream, productKernel<D, V::kRows, V::kShared>, grid, dim3(kMatvecThreads), V::kShared ? bytes : 0, p);
    });
}

extern template void launchProducts<DType::F32>(Stream&, Products, int64_t);
extern template void launchProducts<DType::F16>(Stream&, Products, int64_t);
extern template void launchProducts<DType::BF16>(Stream&, Products, int64_t);

}  // namespace sharpi::cuda
