// Launches the matrix products of prefill on Hopper.
#include "kernels/matmul/matmul_wgmma.h"

#include <cstdlib>
#include <cstring>

#include "kernels/matmul/matmul_tiles.h"
#include "kernels/matmul/matmul_wgmma.cuh"

namespace sharpi::cuda {

namespace {

bool isWanted() {
    const char* value = std::getenv("SHARPI_CUDA_WGMMA");
    return !value || std::strcmp(value, "0") != 0;
}

// Whether the device has Hopper's instructions and this build has code for them. Without such code the kernels are
// empty.
bool hasWarpgroups(const DeviceInfo& device) {
#ifdef SHARPI_HOPPER
    return device.major == 9;
#else
    (void)device;
    return false;
#endif
}

}  // namespace

bool runsByWarpgroups(const DeviceInfo& device) { return hasWarpgroups(device) && isWanted(); }

bool takesWarpgroups(const Stream& stream, const MatmulCall& call) {
    return runsByWarpgroups(stream.device()) && call.type != DType::F32 && call.aligned;
}

void matmulByWarpgroups(Stream& stream, const MatmulCall& call) {
    static_assert(SmallTiling::kTileN == 64 && SmallTiling::kTileT == 128 && LargeTiling::kTileN == 128 &&
                      LargeTiling::kTileT == 256,
                  "the tiles that chooseTile() knows");
    if (hasFewRows(call)) return matmulOfFewRows(stream, call);
    if (call.groups.begin)
        return withNarrowType(call.type,
                              [&](auto tag) { launchTiling<decltype(tag)::kType, ExpertTiling>(stream, call); });
    const MatmulTile tile =
        chooseTile(call.rows, call.by.rowsOf(call.shape), call.by.count, stream.device().multiprocessors);
    if (tile.outputs == SmallTiling::kTileN) matmulInSmallTiles(stream, call);
    else withNarrowType(call.type, [&](auto tag) { launchTiling<decltype(tag)::kType, LargeTiling>(stream, call); });
}

}  // namespace sharpi::cuda
