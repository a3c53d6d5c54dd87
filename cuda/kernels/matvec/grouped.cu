// Launches the products of grouped pairs with one stack (grouped.cuh).
#include "kernels/matvec/grouped.cuh"

namespace sharpi::cuda {

// The items of a block. More of them have more loads in flight across their ends; fewer make more blocks, which fill
// the device evenly.
static int32_t itemsOf(const Stream& stream, int64_t runs, int64_t groups) {
    const int64_t atOnce = 2 * static_cast<int64_t>(stream.device().multiprocessors);
    int32_t items = 1;
    while (items < 8 && runs * groups >= 4 * atOnce * items) items *= 2;
    return items;
}

void launchGrouped(Stream& stream, DType type, GroupedProduct p, const PairGroups& groups) {
    withFormat(type, [&](auto tag) {
        constexpr DType kType = decltype(tag)::kType;
        withGroupTiles<kType>(stream, groups, [&](auto tiles) {
            using Tile = MmaTile<kType, decltype(tiles)::value>;
            constexpr int kItemRows = Tile::kGroups * kMmaRows;
            p.items = itemsOf(stream, (p.w.rows + kItemRows - 1) / kItemRows, groups.count);
            p.w.fewFit =
                Steps<kType>::sharedBytes(kMatvecFewRows, p.w.cols) <= static_cast<size_t>(Tile::sharedBytes(p.w.cols));
            const auto kernel = groupedKernel<kType, decltype(tiles)::value>;
            allowShared(kernel, Tile::sharedBytes(p.w.cols));
            launch(stream, kernel, groupGrid<Tile>(p.w, groups, p.items * kItemRows), dim3(Tile::kThreads),
                   Tile::sharedBytes(p.w.cols), p);
        });
    });
}

}  // namespace sharpi::cuda
