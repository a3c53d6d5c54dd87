// Launches gate and up of grouped pairs, with the activation and its quantization (grouped.cuh).
#include "kernels/matvec/grouped.cuh"

namespace sharpi::cuda {

void launchGroupedGated(Stream& stream, DType type, GroupedGated p, const PairGroups& groups) {
    withFormat(type, [&](auto tag) {
        constexpr DType kType = decltype(tag)::kType;
        withGroupTiles<kType>(stream, groups, [&](auto tiles) {
            using Tile = MmaTile<kType, decltype(tiles)::value>;
            p.w.fewFit =
                Steps<kType>::sharedBytes(kMatvecFewRows, p.w.cols) <= static_cast<size_t>(Tile::sharedBytes(p.w.cols));
            const auto kernel = groupedGatedKernel<kType, decltype(tiles)::value>;
            allowShared(kernel, Tile::sharedBytes(p.w.cols));
            launch(stream, kernel, groupGrid<Tile>(p.w, groups, kContractBlock), dim3(Tile::kThreads),
                   Tile::sharedBytes(p.w.cols), p);
        });
    });
}

}  // namespace sharpi::cuda
