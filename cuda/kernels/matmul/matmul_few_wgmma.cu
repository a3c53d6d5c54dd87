// Launches the products of few rows on Hopper.
#include <algorithm>

#include "kernels/matmul/matmul_few.cuh"
#include "kernels/matmul/matmul_wgmma.h"

namespace sharpi::cuda {

namespace {

using ShortTiling = FewTiling<64, 2, 6, 4, kMostFewItems>;
using TallTiling = FewTiling<128, 1, 9, 7, 128>;

template <typename Tiling> void launchFew(Stream& stream, const MatmulCall& call) {
    FewCall few;
    few.call = call;
    few.parts = call.groups.begin ? blocksPerExpertTile<Tiling::kTileT>(call.groups) : 1;
    few.tilesT = call.groups.begin ? static_cast<int32_t>(call.groups.tiles) * few.parts : 1;
    few.tilesN = static_cast<int32_t>(call.by.tiles(call.shape, Tiling::kTileN));
    // One block for each multiprocessor, or a multiple of that if a block would have more than kMostItems items.
    const int64_t items = int64_t{few.tilesT} * few.tilesN * call.by.count,
                  atOnce = int64_t{stream.device().multiprocessors} * Tiling::kMostItems,
                  blocks = (items + atOnce - 1) / atOnce * stream.device().multiprocessors;
    withNarrowType(call.type, [&](auto tag) {
        const auto kernel = matmulFewKernel<decltype(tag)::kType, Tiling>;
        allowShared(kernel, Tiling::kSharedBytes);
        launch(stream, kernel, dim3(static_cast<unsigned>(std::min(items, blocks))), dim3(Tiling::kThreads),
               Tiling::kSharedBytes, few);
    });
}

}  // namespace

bool hasFewRows(const MatmulCall& call) {
    constexpr int64_t kMostMean = 32;
    return call.groups.begin ? meanIsAtMost(kMostMean, call.groups) : call.rows <= TallTiling::kTileT;
}

void matmulOfFewRows(Stream& stream, const MatmulCall& call) {
    if (call.groups.begin || call.rows <= ShortTiling::kTileT) launchFew<ShortTiling>(stream, call);
    else launchFew<TallTiling>(stream, call);
}

}  // namespace sharpi::cuda
