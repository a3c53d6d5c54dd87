// The products of pairs that are grouped by expert (kernels/rows/pair_groups.h), on the int8 tensor cores
// (mma_tile.cuh). The pairs of a group are the columns. Groups of one or two pairs are multiplied as a single row's
// products are (matvec_kernel.cuh), because that takes fewer instructions than tiles of mostly empty columns.
//
// A thread block belongs to a group and to some rows of its expert's matrix. Blocks of an expert's several groups are
// neighbours in the grid, so that they find its weights in the L2 cache. Blocks of groups that do not exist leave at
// once.
#pragma once

#include "kernels/matvec/mma/mma_launch.cuh"
#include "kernels/rows/device_rows.cuh"

namespace sharpi::cuda {

// The rows of a group up to which the kernels without tensor cores are the faster ones.
constexpr int kMatvecFewRows = 2;

struct GroupedWeights {
    // A stack; or those of gate and up, which have one shape.
    const uint8_t* data[2] = {};
    int64_t stride[2] = {};
    PackedShape shape;
    int32_t rows = 0, cols = 0;
    QuantizedRows x;
    const PairGroup* group = nullptr;
    int32_t perRow = 1;   // pairs that read the same row of x
    bool fewFit = false;  // kMatvecFewRows rows of x fit in the launch's shared memory
};

// The block's group, in shared memory.
struct Group {
    int32_t element, count;
    const int32_t* pair;
    // Columns past the last pair repeat it.
    __device__ __forceinline__ int64_t pairOf(int column) const { return pair[min(column, count - 1)]; }
};

// Waits for the predecessor, then finds what the block multiplies: up to `columns` pairs of a group. blockIdx.z says
// which. False: there are none.
__device__ __forceinline__ bool findGroup(const GroupedWeights& p, int columns, int32_t (&pairs)[kPairGroup],
                                          Group& group) {
    waitForPrevious();
    const PairGroup& from = p.group[blockIdx.x];
    const int skipped = static_cast<int>(blockIdx.z) * columns;
    group = {from.element, min(from.count - skipped, columns), pairs};
    if (group.element < 0 || group.count <= 0) return false;
    if (static_cast<int>(threadIdx.x) < group.count) pairs[threadIdx.x] = from.pair[skipped + threadIdx.x];
    __syncthreads();
    return true;
}

template <DType D>
__device__ __forceinline__ typename Steps<D>::Base baseOf(const GroupedWeights& p, const Group& group, int which) {
    return Steps<D>::base(p.data[which] + group.element * p.stride[which], p.shape);
}

// Whether the block multiplies its group without tensor cores.
__device__ __forceinline__ bool isFew(const GroupedWeights& p, const Group& group) {
    return group.count <= kMatvecFewRows && p.fewFit;
}

// The products of a group of up to T pairs. Each warp has `items` pairs of weight rows, which place() names, and done()
// receives their accumulators (see Pipeline). Ends with a barrier.
template <DType D, int T, typename Place, typename Done>
__device__ __forceinline__ void multiplyFew(const GroupedWeights& p, const Group& group, uint8_t* shared, int items,
                                            const Place& place, const Done& done) {
    using S = Steps<D>;
    Pipeline<D, T, 4> pipeline(p.cols, items);
    pipeline.start(place);
    const auto stage = [&](int t) {
        const int64_t row = group.pairOf(t) / p.perRow;
        return S::toShared(S::inGlobal({nullptr, p.x}, row, p.cols),
                           shared + t * ((p.cols + 1023) / 1024) * S::kStepBytes, 1, p.cols);
    };
    if constexpr (T == 2) stage(1);
    const auto x = stage(0);
    finishCopies();
    pipeline.run(x, place, [](int, int t) { return t; }, done);
    __syncthreads();
}

// --- one stack -------------------------------------------------------------------------------------------------------

struct GroupedProduct {
    GroupedWeights w;
    int32_t items = 1;  // of a block: runs of kMmaRows rows for each of the tile's groups
    float* y = nullptr;
};

// Of a block's p.items * itemRows rows.
template <DType D, int T, int kWarps>
__device__ __forceinline__ void fewRows(const GroupedProduct& p, const Group& group, int firstRow, int itemRows,
                                        uint8_t* shared) {
    const int lane = threadIdx.x % 32, ofWarp = p.items * itemRows / kWarps,
              begin = firstRow + static_cast<int>(threadIdx.x) / 32 * ofWarp, end = min(begin + ofWarp, p.w.rows);
    const auto units = static_cast<uint32_t>(p.w.cols / kContractBlock);
    const auto base = baseOf<D>(p.w, group, 0);
    const auto place = [&](int item) {
        const int row = begin + 2 * item;
        const uint32_t first = static_cast<uint32_t>(row) * units;
        return RowPair<D>{{base, base}, {first, row + 1 < end ? first + units : first}};
    };
    constexpr int kLanesPerSum = 16 / T;
    const int t = lane / kLanesPerSum / 2, odd = lane / kLanesPerSum % 2;
    float* const y = p.y + group.pairOf(t) * p.w.rows + odd;
    multiplyFew<D, T>(p.w, group, shared, (end - begin + 1) / 2, place, [&](int item, float (&acc)[T][2]) {
        const float sum = sumPairs(acc, lane);
        const int row = begin + 2 * item;
        if (lane % kLanesPerSum == 0 && row + odd < end) y[row] = sum;
    });
}

template <DType D, int kTiles>
__global__ void __launch_bounds__(MmaTile<D, kTiles>::kThreads, MmaTile<D, kTiles>::kMinBlocks)
    groupedKernel(const __grid_constant__ GroupedProduct p) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ int32_t pairs[kPairGroup];
    using Tile = MmaTile<D, kTiles>;
    constexpr int kItemRows = Tile::kGroups * kMmaRows;
    allowNext();
    Group group;
    if (!findGroup(p.w, MmaTile<D, kTiles>::kColumns, pairs, group)) return;
    const int firstRow = static_cast<int>(blockIdx.y) * p.items * kItemRows;
    if (isFew(p.w, group)) {
        if (group.count == 1) fewRows<D, 1, Tile::kThreads / 32>(p, group, firstRow, kItemRows, shared);
        else fewRows<D, 2, Tile::kThreads / 32>(p, group, firstRow, kItemRows, shared);
        return;
    }
    const auto base = baseOf<D>(p.w, group, 0);
    const auto place = [&](int item, int of) {
        return MmaRows<D>{base, firstRow + item * kItemRows + of * kMmaRows, p.w.rows - 1};
    };
    Tile tile(shared, p.w.cols, min(p.items, (p.w.rows - firstRow + kItemRows - 1) / kItemRows));
    tile.start(place);
    tile.run(
        p.w.x, place, [&](int, int column) { return group.pairOf(column) / p.w.perRow; },
        [&](int item, int round) {
            tile.forSums(round, [&](int of, int at, int column, float sum) {
                const int row = place(item, of).row + at;
                if (row < p.w.rows && column < group.count) p.y[group.pairOf(column) * p.w.rows + row] = sum;
            });
        });
#endif
}

// --- gate and up -----------------------------------------------------------------------------------------------------

struct GroupedGated {
    GroupedWeights w;
    RowOutputs out;
    GatedJoin join;
};

// The sums of gate and up for 32 rows of both: one block of the activations that down reads.
struct GatedSums {
    float of[2][kPairGroup][kContractBlock + 1];
};

template <DType D, int T, int kWarps>
__device__ __forceinline__ void fewGated(const GroupedGated& p, const Group& group, GatedSums& sums, uint8_t* shared) {
    constexpr int kOfWarp = kContractBlock / kWarps, kLanesPerSum = 16 / T;
    const int lane = threadIdx.x % 32, begin = static_cast<int>(threadIdx.x) / 32 * kOfWarp;
    const int firstRow = static_cast<int>(blockIdx.y) * kContractBlock + begin;
    const auto units = static_cast<uint32_t>(p.w.cols / kContractBlock);
    const auto gate = baseOf<D>(p.w, group, 0), up = baseOf<D>(p.w, group, 1);
    const auto place = [&](int item) {
        const uint32_t first = static_cast<uint32_t>(firstRow + item) * units;
        return RowPair<D>{{gate, up}, {first, first}};
    };
    float* const to = &sums.of[lane / kLanesPerSum % 2][lane / kLanesPerSum / 2][begin];
    multiplyFew<D, T>(p.w, group, shared, min(kOfWarp, p.w.rows - firstRow), place, [&](int item, float (&acc)[T][2]) {
        const float sum = sumPairs(acc, lane);
        if (lane % kLanesPerSum == 0) to[item] = sum;
    });
}

// The tile's first group of warps has rows of gate, the second those of up.
template <DType D, int kTiles>
__device__ __forceinline__ void tileGated(const GroupedGated& p, const Group& group, GatedSums& sums, uint8_t* shared) {
    using Tile = MmaTile<D, kTiles>;
    static_assert(Tile::kGroups == 2 && Tile::kColumns <= kPairGroup);
    const int firstRow = static_cast<int>(blockIdx.y) * kContractBlock;
    const auto place = [&](int item, int of) {
        return MmaRows<D>{baseOf<D>(p.w, group, of), firstRow + item * kMmaRows, p.w.rows - 1};
    };
    Tile tile(shared, p.w.cols, kContractBlock / kMmaRows);
    tile.start(place);
    tile.run(
        p.w.x, place, [&](int, int column) { return group.pairOf(column) / p.w.perRow; },
        [&](int item, int round) {
            tile.forSums(round, [&](int of, int row, int column, float sum) {
                sums.of[of][column][item * kMmaRows + row] = sum;
            });
        });
}

template <DType D, int kTiles>
__global__ void __launch_bounds__(MmaTile<D, kTiles>::kThreads, MmaTile<D, kTiles>::kMinBlocks)
    groupedGatedKernel(const __grid_constant__ GroupedGated p) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ int32_t pairs[kPairGroup];
    __shared__ GatedSums sums;
    static_assert(sizeof pairs + sizeof sums <= kMmaSpareShared);
    constexpr int kWarps = MmaTile<D, kTiles>::kThreads / 32;
    allowNext();
    Group group;
    if (!findGroup(p.w, MmaTile<D, kTiles>::kColumns, pairs, group)) return;
    if (!isFew(p.w, group)) tileGated<D, kTiles>(p, group, sums, shared);
    else if (group.count == 1) fewGated<D, 1, kWarps>(p, group, sums, shared);
    else fewGated<D, 2, kWarps>(p, group, sums, shared);

    // All of these end with a barrier. A warp joins the 32 values of a pair.
    const int lane = threadIdx.x % 32, row = static_cast<int>(blockIdx.y) * kContractBlock + lane;
    for (int column = threadIdx.x / 32; column < group.count; column += kWarps) {
        const int64_t pair = group.pairOf(column);
        float value = 0.0f;
        if (row < p.w.rows) {
            const GatedTerms terms(p.join, pair, p.w.rows);
            value = gatedValue(p.join.activation, terms.gate(sums.of[0][column][lane], row),
                               terms.up(sums.of[1][column][lane], row));
            if (p.out.floats) p.out.floats[pair * p.w.rows + row] = value;
        }
        if (p.out.quantized.q) quantizeLane(p.out.quantized, pair, p.w.rows / kContractBlock, blockIdx.y, value);
    }
#endif
}

// --- launching -------------------------------------------------------------------------------------------------------

// Calls f(std::integral_constant<int, tiles>{}) with the tiles of columns that a block has. Rare types, and devices
// with little shared memory, have one, and two blocks for a large group.
template <DType D, typename F> void withGroupTiles(const Stream& stream, const PairGroups& groups, F&& f) {
    if constexpr (!isRareType(D)) {
        const size_t bytes = MmaTile<D, 2>::sharedBytes(0) + kMmaSpareShared;
        if (groups.most > kMmaColumns && bytes <= stream.device().sharedPerBlock)
            return f(std::integral_constant<int, 2>{});
    }
    f(std::integral_constant<int, 1>{});
}

// The grid of a launch whose blocks have `rows` weight rows.
template <typename Tile> dim3 groupGrid(const GroupedWeights& w, const PairGroups& groups, int rows) {
    return {static_cast<unsigned>(groups.count), static_cast<unsigned>((w.rows + rows - 1) / rows),
            static_cast<unsigned>((groups.most + Tile::kColumns - 1) / Tile::kColumns)};
}

inline GroupedWeights groupedWeights(const MatvecInput& x, const ExpertStack& stack, const PairGroups& groups,
                                     int32_t perRow) {
    const Matrix& first = stack.first;
    checkShape(first);
    GroupedWeights w;
    w.data[0] = first.data;
    w.stride[0] = static_cast<int64_t>(stack.stride);
    w.shape = packedShape(first.type, first.rows, first.cols);
    w.rows = static_cast<int32_t>(first.rows);
    w.cols = static_cast<int32_t>(first.cols);
    w.x = x.quantized;
    w.group = groups.group;
    w.perRow = perRow;
    return w;
}

// Only for types that hasMma() allows.
void launchGrouped(Stream& stream, DType type, GroupedProduct p, const PairGroups& groups);
void launchGroupedGated(Stream& stream, DType type, GroupedGated p, const PairGroups& groups);

}  // namespace sharpi::cuda
