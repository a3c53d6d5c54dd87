// The products of by_head.h: those of latent attention, in which a matrix of some hundred rows and columns belongs to
// each head.
//
// A block belongs to a head and to some of its rows. Few rows of activations are multiplied as in matvec_kernel.cuh,
// more of them on the int8 tensor cores (mma_tile.cuh): the rows' pieces of the head are the columns. All of these
// stay in shared memory, because they are short. Blocks of a head that differ in columns alone are neighbours in the
// grid, so that they find the weights in the L2 cache.
#include <algorithm>

#include "kernels/matvec/by_head.h"
#include "kernels/matvec/mma/mma_launch.cuh"

namespace sharpi::cuda {

namespace {

// The most elements of a piece: their activations fit in every device's shared memory.
constexpr int64_t kMostHeadCols = 4096;

struct ByHead {
    const uint8_t* data = nullptr;
    PackedShape shape;
    MatvecInput x;
    float* y = nullptr;
    int64_t stride = 0;
    int32_t begin = 0, all = 0, rowsOfHead = 0;  // the part's first row in the whole, and its rows
    int32_t firstHead = 0, heads = 0;
    int32_t rows = 0, cols = 0;  // of activations
    int32_t items = 1;           // of a warp or a tile
    int32_t columnBlocks = 1;    // blocks with the same weights
};

// What a block multiplies: rows [first, end) of the part are those of its head.
struct HeadOfBlock {
    int head, first, end, rowBlock, columnBlock;

    __device__ __forceinline__ explicit HeadOfBlock(const ByHead& p)
        : head(p.firstHead + static_cast<int>(blockIdx.y)) {
        const int64_t from = static_cast<int64_t>(head) * p.rowsOfHead - p.begin;
        first = static_cast<int>(from < 0 ? 0 : from);
        end = static_cast<int>(min(from + p.rowsOfHead, static_cast<int64_t>(p.all)));
        rowBlock = static_cast<int>(blockIdx.x) / p.columnBlocks;
        columnBlock = static_cast<int>(blockIdx.x) - rowBlock * p.columnBlocks;
    }
    // The piece of a row of activations. Those past the last row repeat it.
    __device__ __forceinline__ int pieceOf(const ByHead& p, int row) const {
        return min(row, p.rows - 1) * p.heads + head;
    }
    // Where the product of a row of activations and of row `at` of the part goes.
    __device__ __forceinline__ float* output(const ByHead& p, int row, int at) const {
        const int64_t inHead = p.begin + at - static_cast<int64_t>(head) * p.rowsOfHead;
        return p.y + (static_cast<int64_t>(row) * p.heads + head) * p.stride + inHead;
    }
};

template <DType D, int T>
__global__ void __launch_bounds__(kMatvecThreads, minBlocks(D, T)) byHeadKernel(const __grid_constant__ ByHead p) {
    extern __shared__ __align__(16) uint8_t shared[];
    using S = Steps<D>;
    using Index = typename S::Index;
    constexpr bool kShared = T == 1;
    allowNext();
    const HeadOfBlock of(p);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int firstRow = of.first + (of.rowBlock * kMatvecWarps + warp) * 2 * p.items;
    const int units = p.cols / S::kUnitElements;
    const typename S::Base base = S::base(p.data, p.shape);
    const auto place = [&](int item) {
        const int row = firstRow + 2 * item;
        const Index first = static_cast<Index>(row) * units;
        return RowPair<D>{{base, base}, {first, row + 1 < of.end ? first + units : first}};
    };
    Pipeline<D, T> pipeline(p.cols, min((of.end - firstRow + 1) / 2, p.items));
    pipeline.start(place);
    waitForPrevious();

    const int firstColumn = of.columnBlock * T;
    const auto x = activations<S, kShared>(p.x, kShared ? of.pieceOf(p, firstColumn) : 0, 1, p.cols, shared);
    // For the lanes that write: t is their row of activations, odd their row of weights within a pair.
    constexpr int kLanesPerSum = 16 / T;
    const int t = lane / kLanesPerSum / 2, odd = lane / kLanesPerSum % 2;
    const bool writes = lane % kLanesPerSum == 0 && firstColumn + t < p.rows;
    if (kShared) finishCopies();
    pipeline.run(
        x, place, [&](int, int column) { return kShared ? 0 : of.pieceOf(p, firstColumn + column); },
        [&](int item, float (&acc)[T][2]) {
            const float sum = sumPairs(acc, lane);
            const int row = firstRow + 2 * item + odd;
            if (writes && row < of.end) *of.output(p, firstColumn + t, row) = sum;
        });
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks) mmaByHeadKernel(const __grid_constant__ ByHead p) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(128) uint8_t staged[];
    constexpr DType kType = Tile::kType;
    constexpr int kRows = kMmaRows * Tile::kGroups;
    allowNext();
    const HeadOfBlock of(p);
    const int firstColumn = of.columnBlock * Tile::kColumns, firstRow = of.first + of.rowBlock * kRows * p.items;
    const auto base = Steps<kType>::base(p.data, p.shape);
    const auto rowOf = [&](int item, int group) { return firstRow + item * kRows + group * kMmaRows; };
    const auto place = [&](int item, int group) { return MmaRows<kType>{base, rowOf(item, group), of.end - 1}; };
    Tile tile(staged, p.cols, min(p.items, (of.end - firstRow + kRows - 1) / kRows));
    tile.start(place);
    waitForPrevious();

    tile.run(
        p.x.quantized, place, [&](int, int column) { return of.pieceOf(p, firstColumn + column); },
        [&](int item, int round) {
            tile.forSums(round, [&](int group, int row, int column, float sum) {
                const int at = rowOf(item, group) + row, t = firstColumn + column;
                if (at < of.end && t < p.rows) *of.output(p, t, at) = sum;
            });
        });
#endif
}

// The items of a block, each of `rows` weight rows: as many as leave all multiprocessors work.
int32_t itemsOf(const ByHead& p, int64_t heads, int rows, int64_t atOnce, int most) {
    const int64_t runs = (p.rowsOfHead + rows - 1) / rows * heads * p.columnBlocks;
    return static_cast<int32_t>(std::clamp<int64_t>(runs / atOnce, 1, most));
}

dim3 gridOf(const ByHead& p, int64_t heads, int rows) {
    const int64_t blocks = (p.rowsOfHead + int64_t{rows} * p.items - 1) / (int64_t{rows} * p.items);
    return {static_cast<unsigned>(blocks * p.columnBlocks), static_cast<unsigned>(heads)};
}

template <DType D, int T> void launchPlain(Stream& stream, ByHead p, int64_t heads) {
    constexpr int kRows = 2 * kMatvecWarps;
    p.columnBlocks = (p.rows + T - 1) / T;
    p.items = itemsOf(p, heads, kRows, int64_t{stream.device().multiprocessors} * minBlocks(D, T), 8);
    const size_t bytes = T == 1 ? Steps<D>::sharedBytes(1, p.cols) : 0;
    launch(stream, byHeadKernel<D, T>, gridOf(p, heads, kRows), dim3(kMatvecThreads), bytes, p);
}

template <DType D, int kTiles> void launchTiles(Stream& stream, ByHead p, int64_t heads) {
    using Tile = MmaTile<D, kTiles, true>;
    constexpr int kRows = kMmaRows * Tile::kGroups;
    p.columnBlocks = (p.rows + Tile::kColumns - 1) / Tile::kColumns;
    p.items = itemsOf(p, heads, kRows, int64_t{stream.device().multiprocessors} * Tile::kMinBlocks, 16);
    const auto bytes = static_cast<size_t>(Tile::sharedBytes(p.cols));
    allowShared(mmaByHeadKernel<Tile>, bytes);
    launch(stream, mmaByHeadKernel<Tile>, gridOf(p, heads, kRows), dim3(Tile::kThreads), bytes, p);
}

template <DType D> void launchByHead(Stream& stream, const ByHead& p, int64_t heads) {
    if constexpr (kIsFloat<D>) {
        if (p.rows == 1) return launchPlain<D, 1>(stream, p, heads);
        return launchPlain<D, 8>(stream, p, heads);
    } else {
        if (usesMma(stream, D, p.rows)) {
            if constexpr (!isRareType(D)) {
                const int64_t bytes = MmaTile<D, 4, true>::sharedBytes(p.cols) + kMmaSpareShared;
                if (p.rows > kMmaColumns && bytes <= static_cast<int64_t>(stream.device().sharedPerBlock))
                    return launchTiles<D, 4>(stream, p, heads);
            }
            return launchTiles<D, 1>(stream, p, heads);
        }
        if constexpr (!isRareType(D))
            if (p.rows > 1) return launchPlain<D, 4>(stream, p, heads);
        launchPlain<D, 1>(stream, p, heads);
    }
}

}  // namespace

void requireHeadRows(const HeadRows& weights) {
    const Matrix& w = weights.w;
    checkShape(w);
    if (weights.heads < 1 || weights.rowsOfHead < 1 || weights.begin < 0 ||
        weights.begin + w.rows > weights.heads * weights.rowsOfHead || weights.stride < weights.rowsOfHead)
        throw Error(ErrorKind::Internal, "a product by head: " + std::to_string(weights.heads) + " heads of " +
                                             std::to_string(weights.rowsOfHead) + " rows do not fit the matrix");
}

void matvecByHead(Stream& stream, const MatvecInput& x, int64_t rows, const HeadRows& weights, float* y) {
    const Matrix& w = weights.w;
    if (rows == 0 || w.rows == 0) return;
    requireHeadRows(weights);
    if (rows * weights.heads * (w.cols / kContractBlock) * 2 > INT32_MAX || w.cols > kMostHeadCols)
        throw Error(ErrorKind::Internal, "matvecByHead has no kernel for " + std::to_string(rows) + " rows by " +
                                             std::to_string(weights.heads) + " heads of " + std::to_string(w.cols) +
                                             " columns");
    ByHead p;
    p.data = w.data;
    p.shape = packedShape(w.type, w.rows, w.cols);
    p.x = x;
    p.y = y;
    p.stride = weights.stride;
    p.begin = static_cast<int32_t>(weights.begin);
    p.all = static_cast<int32_t>(w.rows);
    p.rowsOfHead = static_cast<int32_t>(weights.rowsOfHead);
    p.firstHead = static_cast<int32_t>(weights.begin / weights.rowsOfHead);
    p.heads = weights.heads;
    p.rows = static_cast<int32_t>(rows);
    p.cols = static_cast<int32_t>(w.cols);
    const int64_t lastHead = (weights.begin + w.rows - 1) / weights.rowsOfHead;
    withType(w.type, [&](auto tag) { launchByHead<decltype(tag)::kType>(stream, p, lastHead - p.firstHead + 1); });
}

}  // namespace sharpi::cuda
