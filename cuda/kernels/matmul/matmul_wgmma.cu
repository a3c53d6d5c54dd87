// Launches the matrix products of prefill on Hopper.
#include "kernels/matmul/matmul_wgmma.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

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

// A large tile expands each weight for more rows, but small tiles leave fewer multiprocessors idle. The time of a tile
// is relative to that of 128 outputs and 256 rows.
MatmulTile chooseTile(int64_t rows, int64_t outputs, int64_t matrices, int multiprocessors) {
    struct Candidate {
        MatmulTile tile;
        double time;
    };
    constexpr Candidate kCandidates[] = {{{64, 64}, 0.165}, {{64, 128}, 0.28}, {{128, 256}, 1.0}};
    const auto roundedUp = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    const auto timeOf = [&](const Candidate& c) {
        const int64_t blocks = roundedUp(rows, c.tile.rows) * roundedUp(outputs, c.tile.outputs) * matrices;
        return static_cast<double>(roundedUp(blocks, multiprocessors)) * c.time;
    };
    const auto isSooner = [&](const Candidate& a, const Candidate& b) { return timeOf(a) < timeOf(b); };
    return std::min_element(std::begin(kCandidates), std::end(kCandidates), isSooner)->tile;
}

bool takesWarpgroups(const Stream& stream, const MatmulCall& call) {
    return runsByWarpgroups(stream.device()) && call.type != DType::F32 && call.aligned;
}

void matmulByWarpgroups(Stream& stream, const MatmulCall& call) {
    if (hasFewRows(call)) return matmulOfFewRows(stream, call);
    if (call.groups.begin)
        return withNarrowType(call.type,
                              [&](auto tag) { launchTiling<decltype(tag)::kType, ExpertTiling>(stream, call); });
    const MatmulTile tile =
        chooseTile(call.rows, call.by.rowsOf(call.shape), call.by.count, stream.device().multiprocessors);
    if (tile.outputs == 64) matmulInSmallTiles(stream, call, tile.rows);
    else withNarrowType(call.type, [&](auto tag) { launchTiling<decltype(tag)::kType, LargeTiling>(stream, call); });
}

}  // namespace sharpi::cuda
