// Launches the matrix products of prefill on Hopper.
#include "kernels/matmul/matmul_wgmma.h"

#include <cstdlib>
#include <cstring>

#include "kernels/matmul/matmul_wgmma.cuh"

namespace sharpi::cuda {

namespace {

bool isWanted() {
    const char* value = std::getenv("SHARPI_CUDA_WGMMA");
    return !value || std::strcmp(value, "0") != 0;
}

// The registers tell an instance with sums in them from one that was compiled empty.
template <DType T, int kTileT> bool isBuilt() {
    static const bool built = [] {
        cudaFuncAttributes attributes;
        check(cudaFuncGetAttributes(&attributes, matmulWgmmaKernel<T, kTileT>), "a kernel's attributes");
        if (attributes.numRegs < kTileT / 2) return false;
        allowShared(matmulWgmmaKernel<T, kTileT>, wgmmaSharedBytes<kTileT>());
        return true;
    }();
    return built;
}

template <DType T, int kTileT> bool launchTiles(Stream& stream, const MatmulCall& call) {
    if (!isBuilt<T, kTileT>()) return false;
    static_assert(kTileT >= kExpertTile, "an expert's tile is one block's");
    const int64_t tilesT = call.groups.begin ? call.groups.tiles : (call.rows + kTileT - 1) / kTileT;
    const int64_t tilesN = (call.shape.rows + kWgmmaTileN - 1) / kWgmmaTileN;
    launch(stream, matmulWgmmaKernel<T, kTileT>, dim3(static_cast<unsigned>(tilesT), static_cast<unsigned>(tilesN)),
           dim3(kWgmmaThreads), wgmmaSharedBytes<kTileT>(), call);
    return true;
}

// Large tiles expand each weight for more rows; small ones leave fewer multiprocessors without work at the end. In
// units of a small tile's time, a large one taking two.
template <DType T> bool launchType(Stream& stream, const MatmulCall& call) {
    constexpr double kCostOfSmall = 1.45;
    const auto rounds = [&](int64_t tileT) {
        const int64_t blocks = (call.rows + tileT - 1) / tileT * ((call.shape.rows + kWgmmaTileN - 1) / kWgmmaTileN);
        const int64_t processors = stream.device().multiprocessors;
        return static_cast<double>((blocks + processors - 1) / processors);
    };
    const bool small = call.groups.begin || call.rows <= 128 || rounds(128) * kCostOfSmall < rounds(256) * 2;
    return small ? launchTiles<T, 128>(stream, call) : launchTiles<T, 256>(stream, call);
}

}  // namespace

bool matmulByWarpgroups(Stream& stream, const MatmulCall& call, DType type) {
    if (stream.device().major != 9 || !call.aligned || !isWanted()) return false;
    if (matmulOfFewRows(stream, call, type)) return true;
    switch (type) {
    case DType::F32: return false;
    case DType::F16: return launchType<DType::F16>(stream, call);
    case DType::BF16: return launchType<DType::BF16>(stream, call);
    default: return withFormat(type, [&](auto tag) { return launchType<decltype(tag)::kType>(stream, call); });
    }
}

}  // namespace sharpi::cuda
