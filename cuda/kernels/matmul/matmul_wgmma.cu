// Launches the matrix products of prefill on Hopper.
#include "kernels/matmul/matmul_wgmma.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

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

// The blocks of a row that are prefetched: what the thread blocks that run at once prefetch stays in the cache.
int32_t blocksAhead(const MatmulCall& call, int64_t atOnce) {
    constexpr int64_t kBytes = 24 * 1024 * 1024;
    if (isFloatType(call.type)) return 0;
    const int64_t all = call.shape.cols / kContractBlock,
                  superblocks = kBytes / (atOnce * kWgmmaTileN * static_cast<int64_t>(rowBytes(call.type, 256)));
    return static_cast<int32_t>(std::min(all, superblocks * 8));
}

template <DType T, int kTileT> void launchTiles(Stream& stream, MatmulCall call) {
    static_assert(kTileT >= kExpertTile, "an expert's tile is one block's");
    const int64_t tilesT = call.groups.begin ? call.groups.tiles : (call.rows + kTileT - 1) / kTileT;
    const int64_t tilesN = call.by.tiles(call.shape, kWgmmaTileN);
    const int64_t atOnce = int64_t{stream.device().multiprocessors} * (256 / kTileT);
    call.ahead = blocksAhead(call, std::min(atOnce, (call.groups.begin ? tilesT * tilesN : tilesN) * call.by.count));
    const auto kernel = matmulWgmmaKernel<T, kTileT>;
    allowShared(kernel, wgmmaSharedBytes<kTileT>());
    launch(stream, kernel, dim3(static_cast<unsigned>(tilesT), static_cast<unsigned>(tilesN), call.by.grids()),
           dim3(kWgmmaThreads), wgmmaSharedBytes<kTileT>(), call);
}

// A large tile expands each weight for more rows, but with small tiles fewer multiprocessors idle at the end. Costs are
// in units of half a large tile's time.
template <DType T> void launchType(Stream& stream, const MatmulCall& call) {
    constexpr double kCostOfSmall = 1.45;
    const auto rounds = [&](int64_t tileT) {
        const int64_t blocks = (call.rows + tileT - 1) / tileT * call.by.tiles(call.shape, kWgmmaTileN) * call.by.count;
        const int64_t processors = stream.device().multiprocessors;
        return static_cast<double>((blocks + processors - 1) / processors);
    };
    const bool small = call.groups.begin || call.rows <= 128 || rounds(128) * kCostOfSmall < rounds(256) * 2;
    if (small) launchTiles<T, 128>(stream, call);
    else launchTiles<T, 256>(stream, call);
}

}  // namespace

bool matmulByWarpgroups(Stream& stream, const MatmulCall& call, DType type) {
    if (!hasWarpgroups(stream.device()) || type == DType::F32 || !call.aligned || !isWanted()) return false;
    if (matmulOfFewRows(stream, call, type)) return true;
    withNarrowType(type, [&](auto tag) { launchType<decltype(tag)::kType>(stream, call); });
    return true;
}

}  // namespace sharpi::cuda
