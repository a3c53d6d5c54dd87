// Launches the products of grouped pairs with one stack (grouped.cuh).
#include "kernels/matvec/grouped.cuh"

namespace sharpi::cuda {

namespace {

// The items of a block. More of them have more loads in flight across their ends; fewer make more blocks, which fill
// the device evenly.
int32_t itemsOf(const Stream& stream, int64_t runs, int64_t groups) {
    const int64_t atOnce = 2 * static_cast<int64_t>(stream.device().multiprocessors);
    int32_t items = 1;
    while (items < 8 && runs * groups >= 4 * atOnce * items) items *= 2;
    return items;
}

template <DType D, int kTiles> void launchTiles(Stream& stream, GroupedProduct p, const PairGroups& groups) {
    using Tile = GroupTile<D, kTiles>;
    p.w.fewFit = Steps<D>::sharedBytes(kFewPairs, p.w.cols) <= Tile::kSharedBytes;
    constexpr int kItemRows = Tile::kGroups * kMmaRows;
    const int64_t runs = (p.w.rows + kItemRows - 1) / kItemRows;
    p.items = itemsOf(stream, runs, groups.count);
    const dim3 grid(static_cast<unsigned>(groups.count), static_cast<unsigned>((runs + p.items - 1) / p.items));
    allowShared(groupedKernel<D, kTiles>, Tile::kSharedBytes);
    launch(stream, groupedKernel<D, kTiles>, grid, dim3(Tile::kThreads), Tile::kSharedBytes, p);
}

}  // namespace

void launchGrouped(Stream& stream, DType type, GroupedProduct p, const PairGroups& groups) {
    withFormat(type, [&](auto tag) {
        constexpr DType kType = decltype(tag)::kType;
        if (groups.most <= kMmaColumns) launchTiles<kType, 1>(stream, p, groups);
        else launchTiles<kType, 2>(stream, p, groups);
    });
}

}  // namespace sharpi::cuda
