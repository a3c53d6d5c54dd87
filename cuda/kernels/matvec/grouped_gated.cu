// Launches gate and up of grouped pairs, with the activation and its quantization (grouped.cuh).
#include "kernels/matvec/grouped.cuh"

namespace sharpi::cuda {

namespace {

template <DType D, int kTiles> void launchTiles(Stream& stream, GroupedGated p, const PairGroups& groups) {
    using Tile = GroupTile<D, kTiles>;
    p.w.fewFit = Steps<D>::sharedBytes(kFewPairs, p.w.cols) <= Tile::kSharedBytes;
    const dim3 grid(static_cast<unsigned>(groups.count),
                    static_cast<unsigned>((p.w.rows + kContractBlock - 1) / kContractBlock));
    allowShared(groupedGatedKernel<D, kTiles>, Tile::kSharedBytes);
    launch(stream, groupedGatedKernel<D, kTiles>, grid, dim3(Tile::kThreads), Tile::kSharedBytes, p);
}

}  // namespace

void launchGroupedGated(Stream& stream, DType type, const GroupedGated& p, const PairGroups& groups) {
    withFormat(type, [&](auto tag) {
        constexpr DType kType = decltype(tag)::kType;
        if (groups.most <= kMmaColumns) launchTiles<kType, 1>(stream, p, groups);
        else launchTiles<kType, 2>(stream, p, groups);
    });
}

}  // namespace sharpi::cuda
