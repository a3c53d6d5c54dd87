// Launches the matrix products of prefill. matmul_kernel.cuh is the kernel and says how it works; here a call's types,
// sizes and device choose among its instances.
#include "kernels/matmul/matmul.h"

#include <algorithm>

#include "kernels/matmul/matmul_kernel.cuh"
#include "kernels/matmul/matmul_wgmma.h"

namespace sharpi::cuda {

namespace {

// Two stages of activations always fit. A third hides more of their latency, unless it costs a resident block.
template <typename Shared> int chooseStages() {
    int device = 0, perProcessor = 0, perBlock = 0;
    check(cudaGetDevice(&device), "the current device");
    check(cudaDeviceGetAttribute(&perProcessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
          "a device attribute");
    check(cudaDeviceGetAttribute(&perBlock, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "a device attribute");
    constexpr size_t kReserved = 1024;  // what the device keeps of each block
    const auto blocks = [&](int stages) {
        return static_cast<size_t>(perProcessor) / (Shared::bytes(stages) + kReserved);
    };
    return Shared::bytes(3) <= static_cast<size_t>(perBlock) && blocks(3) >= blocks(2) ? 3 : 2;
}

template <DType T, bool kSplit, int kWarpsT, int kWarpsN>
void launchTiles(Stream& stream, MatmulCall call, int64_t tilesT) {
    using Layout = TileLayout<kWarpsT, kWarpsN>;
    using Shared = typename Layout::Shared;
    const auto kernel = matmulKernel<T, kSplit, kWarpsT, kWarpsN>;
    static const int stages = [&] {
        const int chosen = chooseStages<Shared>();
        allowShared(kernel, Shared::bytes(chosen));
        return chosen;
    }();
    call.stages = stages;
    const int64_t tilesN = (call.shape.rows + Layout::kTileN - 1) / Layout::kTileN;
    launch(stream, kernel, dim3(static_cast<unsigned>(tilesT), static_cast<unsigned>(tilesN)), dim3(Layout::kThreads),
           Shared::bytes(stages), call);
}

template <DType T, bool kSplit> void launchLayout(Stream& stream, const MatmulCall& call) {
    // An expert has few rows, and rarely a whole number of large tiles.
    if (call.groups.begin)
        return launchTiles<T, kSplit, 1, 2>(stream, call, call.groups.tiles * kBlocksPerExpertTile<kWarpTile>);
    const auto tiles = [&](int64_t rows) { return (call.rows + rows - 1) / rows; };
    if (call.rows <= kWarpTile) return launchTiles<T, kSplit, 1, 2>(stream, call, tiles(kWarpTile));
    launchTiles<T, kSplit, 2, 2>(stream, call, tiles(2 * kWarpTile));
}

template <DType T> void launchFloat(Stream& stream, MatmulCall call) {
    if constexpr (T != DType::F32) {
        if (!call.x.lo) return launchLayout<T, false>(stream, call);
    }
    // bf16 weights have no low half, unless the operands are f16.
    const bool lowX = call.x.lo != nullptr, lowW = T != DType::BF16 || stream.device().major < 8;
    call.passes.count = 1 + lowX + lowW;
    call.passes.lowX = lowX ? 1u : 0u;
    call.passes.lowW = lowW ? 1u << (lowX ? 1 : 0) : 0u;
    launchLayout<T, true>(stream, call);
}

void launchType(Stream& stream, const MatmulCall& call, DType type) {
    if (call.shape.rows == 0) return;
    const bool split = type == DType::F32 || (info(type).isFloat && call.x.lo);
    if (!split && matmulByWarpgroups(stream, call, type)) return;
    switch (type) {
    case DType::F32: return launchFloat<DType::F32>(stream, call);
    case DType::F16: return launchFloat<DType::F16>(stream, call);
    case DType::BF16: return launchFloat<DType::BF16>(stream, call);
    default: withFormat(type, [&](auto tag) { launchLayout<decltype(tag)::kType, false>(stream, call); });
    }
}

// Whether rows begin at whole 16 bytes: a matter of the matrix's columns alone. An address must not decide it, since
// Hopper's instructions, which want such rows, round otherwise.
bool isAligned(const MatmulCall& call) {
    if (call.shape.cols % 8 != 0) return false;
    const auto whole = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
    if (whole(call.x.hi) && whole(call.x.lo) && whole(call.w) && call.expertStride % 16 == 0) return true;
    throw Error(ErrorKind::Internal,
                "matmul: rows of " + std::to_string(call.shape.cols) + " elements that do not begin at whole 16 bytes");
}

}  // namespace

void matmul(Stream& stream, const Matrix& w, const HalfRows& x, int64_t rows, const float* bias, float* y, Store store,
            int64_t stride) {
    if (stride != 0 && stride < w.rows)
        throw Error(ErrorKind::Internal,
                    "matmul: " + std::to_string(w.rows) + " outputs in rows of " + std::to_string(stride));
    MatmulCall call;
    call.w = w.data;
    call.shape = packedShape(w.type, w.rows, w.cols);
    call.x = x;
    call.rows = rows;
    call.bias = bias;
    call.y = y;
    call.stride = stride == 0 ? w.rows : stride;
    call.add = store == Store::Add;
    call.aligned = isAligned(call);
    launchType(stream, call, w.type);
}

void matmulExperts(Stream& stream, const ExpertStack& w, const HalfRows& x, const ExpertGroups& groups, bool gather,
                   float* y, const ExpertIndex& which) {
    const int64_t held = static_cast<int64_t>(which.first) + w.count;
    if (which.first < 0 || which.end < which.first || (which.end != INT32_MAX && which.end > held))
        throw Error(ErrorKind::Internal, "matmul: experts " + std::to_string(which.first) + " to " +
                                             std::to_string(which.end) + " of a stack of " + std::to_string(w.count));
    MatmulCall call;
    call.w = w.first.data;
    call.shape = packedShape(w.first.type, w.first.rows, w.first.cols);
    call.expertStride = w.stride;
    call.x = x;
    call.groups = groups;
    call.which = which;
    call.which.end = static_cast<int32_t>(std::min<int64_t>(which.end, held));
    call.gather = gather;
    call.rows = groups.pairs;
    call.y = y;
    call.stride = w.first.rows;
    call.aligned = isAligned(call);
    launchType(stream, call, w.first.type);
}

}  // namespace sharpi::cuda
