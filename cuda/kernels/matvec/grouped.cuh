// The products of pairs that are grouped by expert (kernels/experts/pair_groups.h), on the int8 tensor cores
// (mma_tile.cuh). The pairs of a group are the columns.
//
// A thread block belongs to a group and to some rows of its expert's matrix. Blocks of an expert's several groups are
// neighbours in the grid, so that they find its weights in the L2 cache. Blocks of groups that do not exist leave at
// once.
#pragma once

#include "kernels/matvec/mma_tile.cuh"
#include "kernels/rows/device_rows.cuh"

namespace sharpi::cuda {

struct GroupedWeights {
    // A stack; or those of gate and up, which have one shape.
    const uint8_t* data[2] = {};
    int64_t stride[2] = {};
    PackedShape shape;
    int32_t rows = 0, cols = 0;
    QuantizedRows x;
    const PairGroup* group = nullptr;
    int32_t perRow = 1;  // pairs that read the same row of x
};

// The block's group, in shared memory.
struct Group {
    int32_t element, count;
    const int32_t* pair;
    // Columns past the last pair repeat it.
    __device__ __forceinline__ int64_t pairOf(int column) const { return pair[min(column, count - 1)]; }
};

// Waits for the predecessor. False: there is no such group.
__device__ __forceinline__ bool findGroup(const GroupedWeights& p, int32_t (&pairs)[kPairGroup], Group& group) {
    waitForPrevious();
    const PairGroup& from = p.group[blockIdx.x];
    group = {from.element, from.count, pairs};
    if (group.element < 0) return false;
    if (static_cast<int>(threadIdx.x) < group.count) pairs[threadIdx.x] = from.pair[threadIdx.x];
    __syncthreads();
    return true;
}

template <DType D>
__device__ __forceinline__ typename Steps<D>::Base baseOf(const GroupedWeights& p, const Group& group, int which) {
    return Steps<D>::base(p.data[which] + group.element * p.stride[which], p.shape);
}

template <DType D, int kTiles> using GroupTile = MmaTile<D, kTiles>;
// Two blocks of the smaller tiles share a multiprocessor.
template <int kThreads> constexpr int kGroupBlocks = kThreads <= 256 ? 2 : 1;

// --- one stack -------------------------------------------------------------------------------------------------------

struct GroupedProduct {
    GroupedWeights w;
    int32_t items = 1;  // of a block: runs of kMmaRows rows for each of the tile's groups
    float* y = nullptr;
};

template <DType D, int kTiles>
__global__ void __launch_bounds__(GroupTile<D, kTiles>::kThreads, kGroupBlocks<GroupTile<D, kTiles>::kThreads>)
    groupedKernel(const __grid_constant__ GroupedProduct p) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ int32_t pairs[kPairGroup];
    using Tile = GroupTile<D, kTiles>;
    constexpr int kItemRows = Tile::kGroups * kMmaRows;
    allowNext();
    Group group;
    if (!findGroup(p.w, pairs, group)) return;
    const int firstRow = static_cast<int>(blockIdx.y) * p.items * kItemRows;
    const auto base = baseOf<D>(p.w, group, 0);
    const auto place = [&](int item) {
        return MmaRows<D>{base, firstRow + item * kItemRows + Tile::group() * kMmaRows, p.w.rows - 1};
    };
    Tile tile(shared, p.w.cols, min(p.items, (p.w.rows - firstRow + kItemRows - 1) / kItemRows));
    tile.start(place);
    tile.run(
        p.w.x, place, [&](int, int column) { return group.pairOf(column) / p.w.perRow; },
        [&](int item, int round) {
            tile.forValues(round, [&](int at, int column, int value) {
                const int row = place(item).row + at;
                if (row < p.w.rows && column < group.count)
                    p.y[group.pairOf(column) * p.w.rows + row] = tile.sumOf(Tile::group(), value);
            });
        });
}

// --- gate and up -----------------------------------------------------------------------------------------------------

struct GroupedGated {
    GroupedWeights w;
    RowOutputs out;
    GatedJoin join;
};

// A block has 32 rows of gate, in its first group of warps, and of up. So its results are one block of the activations
// that down reads.
template <DType D, int kTiles>
__global__ void __launch_bounds__(GroupTile<D, kTiles>::kThreads, kGroupBlocks<GroupTile<D, kTiles>::kThreads>)
    groupedGatedKernel(const __grid_constant__ GroupedGated p) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ int32_t pairs[kPairGroup];
    __shared__ float values[kPairGroup][kContractBlock + 1];
    using Tile = GroupTile<D, kTiles>;
    static_assert(Tile::kGroups == 2 && Tile::kColumns <= kPairGroup);
    allowNext();
    Group group;
    if (!findGroup(p.w, pairs, group)) return;
    const int firstRow = static_cast<int>(blockIdx.y) * kContractBlock;
    const auto base = baseOf<D>(p.w, group, Tile::group());
    const auto place = [&](int item) { return MmaRows<D>{base, firstRow + item * kMmaRows, p.w.rows - 1}; };
    Tile tile(shared, p.w.cols, kContractBlock / kMmaRows);
    tile.start(place);
    tile.run(
        p.w.x, place, [&](int, int column) { return group.pairOf(column) / p.w.perRow; },
        [&](int item, int round) {
            if (Tile::group() != 0) return;
            tile.forValues(round, [&](int at, int column, int value) {
                const int inBlock = item * kMmaRows + at, row = firstRow + inBlock;
                if (row >= p.w.rows || column >= group.count) return;
                const int64_t pair = group.pairOf(column);
                const GatedTerms terms(p.join, pair, p.w.rows);
                const float result = gatedValue(p.join.activation, terms.gate(tile.sumOf(0, value), row),
                                                terms.up(tile.sumOf(1, value), row));
                values[column][inBlock] = result;
                if (p.out.floats) p.out.floats[pair * p.w.rows + row] = result;
            });
        });
    if (!p.out.quantized.q) return;
    // run() ends with a barrier.
    for (int column = threadIdx.x / 32; column < group.count; column += Tile::kThreads / 32)
        quantizeLane(p.out.quantized, group.pairOf(column), p.w.rows / kContractBlock, blockIdx.y,
                     values[column][threadIdx.x % 32]);
}

// --- launching -------------------------------------------------------------------------------------------------------

// Whether pairs of this type can be multiplied in groups.
inline bool canGroup(const Stream& stream, DType type) {
    return !isFloatType(type) && stream.device().codeVersion >= 80;
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

// Only for types that canGroup() allows.
void launchGrouped(Stream& stream, DType type, GroupedProduct p, const PairGroups& groups);
void launchGroupedGated(Stream& stream, DType type, const GroupedGated& p, const PairGroups& groups);

}  // namespace sharpi::cuda
