// The matrix product of prefill on Hopper for up to 16 rows: short prompts, and experts that few rows chose.
//
// Such a product is bound by the latency of its weights: there are fewer tiles than multiprocessors, and a block that
// waits for memory after every step of 64 columns has few loads in flight. So a block is one warpgroup with 64 outputs.
// It goes along k in strides of four steps, whose weights are loaded together.
#include "kernels/matmul/matmul_wgmma.cuh"
#include "kernels/matmul/matmul_wgmma.h"

namespace sharpi::cuda {

namespace {

using FewTiling = WgmmaTiling<64, 16, 128, 4, 0, 1>;

// Without Hopper's own instructions the kernel is compiled empty.
template <DType T>
__global__ void __launch_bounds__(FewTiling::kThreads, FewTiling::kBlocksAtOnce)
    matmulFewKernel(const __grid_constant__ MatmulCall call) {
#ifdef SHARPI_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    allowNext();
    if (call.groups.begin) waitForPrevious();  // another kernel writes the tiles' arrays
    const TilePlace place = placeOf<kWarpgroupExpertTile, FewTiling::kTileN>(call);
    bool isFirst = !call.groups.begin;
    for (TilePlace few = place; few.begin < place.end; few.begin += FewTiling::kTileT) {
        few.end = min(few.begin + FewTiling::kTileT, place.end);
        multiplyTile<T, FewTiling, FewTiling::kTileT>(call, few, reinterpret_cast<float*>(shared), isFirst);
        isFirst = false;
        __syncthreads();  // the next rows' tiles overwrite the sums
    }
#endif
}

template <DType T> void launchFew(Stream& stream, const MatmulCall& call) {
    const int64_t tilesT = call.groups.begin ? call.groups.tiles : 1,
                  tilesN = call.by.tiles(call.shape, FewTiling::kTileN);
    allowShared(matmulFewKernel<T>, FewTiling::kSharedBytes);
    launch(stream, matmulFewKernel<T>,
           dim3(static_cast<unsigned>(tilesT), static_cast<unsigned>(tilesN), call.by.grids()),
           dim3(FewTiling::kThreads), FewTiling::kSharedBytes, call);
}

// For experts, the mean number of rows decides. An expert with more rows takes them 16 at a time.
bool isFew(const MatmulCall& call) {
    if (!call.groups.begin) return call.rows <= FewTiling::kTileT;
    constexpr int64_t kMeanPairs = 4;
    const int64_t experts = call.groups.tiles - call.groups.pairs / kSmallExpertTile -
                            1;  // an upper bound of those with pairs: see maxExpertTiles
    return call.groups.pairs <= kMeanPairs * experts;
}

}  // namespace

bool matmulOfFewRows(Stream& stream, const MatmulCall& call, DType type) {
    if (!isFew(call)) return false;
    withNarrowType(type, [&](auto tag) { launchFew<decltype(tag)::kType>(stream, call); });
    return true;
}

}  // namespace sharpi::cuda
