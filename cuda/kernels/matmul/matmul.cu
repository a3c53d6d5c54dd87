// Launches the matrix products of prefill. This file chooses an instance of the kernel by a call's types and sizes and
// by the device. matmul_kernel.cuh has the kernel and says how it works.
#include "kernels/matmul/matmul.h"

#include <algorithm>
#include <vector>

#include "kernels/matmul/matmul_kernel.cuh"
#include "kernels/matmul/matmul_narrow.h"
#include "kernels/matmul/matmul_tiles.h"
#include "kernels/matmul/matmul_wgmma.h"

namespace sharpi::cuda {

namespace {

template <typename Layout> using SharedOf = SharedTiles<Layout::kTileT, Layout::kTileN>;

template <typename Layout> int blocksAtOnce(const DeviceInfo& device, int stages) {
    return static_cast<int>(device.sharedPerMultiprocessor / (SharedOf<Layout>::bytes(stages) + kReservedShared));
}

// Two stages of activations always fit. A third one hides more latency, unless it costs a resident block.
template <typename Layout> int chooseStages(const DeviceInfo& device) {
    const bool fits = SharedOf<Layout>::bytes(3) <= device.sharedPerBlock;
    return fits && blocksAtOnce<Layout>(device, 3) >= blocksAtOnce<Layout>(device, 2) ? 3 : 2;
}

template <DType T, bool kSplit, typename Layout> void launchTiles(Stream& stream, MatmulCall call) {
    const auto kernel = matmulKernel<T, kSplit, Layout>;
    call.stages = chooseStages<Layout>(stream.device());
    const size_t bytes = SharedOf<Layout>::bytes(call.stages);
    allowShared(kernel, bytes);
    const int64_t tilesT = call.groups.begin ? call.groups.tiles * blocksPerExpertTile<Layout::kTileT>(call.groups)
                                             : (call.rows + Layout::kTileT - 1) / Layout::kTileT,
                  tilesN = call.by.tiles(call.shape, Layout::kTileN);
    launch(stream, kernel, dim3(static_cast<unsigned>(tilesT), static_cast<unsigned>(tilesN), call.by.grids()),
           dim3(Layout::kThreads), bytes, call);
}

template <DType T, bool kSplit> void launchLayout(Stream& stream, const MatmulCall& call) {
    if (call.groups.begin) {
        // With more pairs for each expert, multiplying takes most of the time. Measured with 128 experts on an H200.
        constexpr int64_t kMostMean = 64;
        if (meanIsAtMost(kMostMean, call.groups)) return launchTiles<T, kSplit, FewLayout>(stream, call);
        return launchTiles<T, kSplit, HalfLayout>(stream, call);
    }
    if (call.rows <= FewLayout::kTileT) return launchTiles<T, kSplit, FewLayout>(stream, call);
    const MatmulTile tile = chooseTileOfWarps(call.rows, call.by.rowsOf(call.shape), call.by.count, stream.device());
    if (tile.outputs == HalfLayout::kTileN) launchTiles<T, kSplit, HalfLayout>(stream, call);
    else launchTiles<T, kSplit, LargeLayout>(stream, call);
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

bool isSplit(const MatmulCall& call) { return call.type == DType::F32 || (info(call.type).isFloat && call.x.lo); }

void launchCall(Stream& stream, const MatmulCall& call) {
    if (call.shape.rows == 0) return;
    if (!isSplit(call) && takesWarpgroups(stream, call)) return matmulByWarpgroups(stream, call);
    if (call.type == DType::F32 && matmulNarrow(stream, call)) return;
    if (call.type == DType::F32) return launchFloat<DType::F32>(stream, call);
    withNarrowType(call.type, [&](auto tag) {
        constexpr DType kType = decltype(tag)::kType;
        if constexpr (kIsFloat<kType>) launchFloat<kType>(stream, call);
        else launchLayout<kType, false>(stream, call);
    });
}

// Whether rows begin at multiples of 16 bytes. Only the number of columns decides it, never an address, because
// Hopper's instructions need such rows and round differently.
bool isAligned(const MatmulCall& call) {
    if (call.shape.cols % 8 != 0) return false;
    const auto whole = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
    if (whole(call.x.hi) && whole(call.x.lo) && whole(call.w) && call.expertStride % 16 == 0) return true;
    throw Error(ErrorKind::Internal, "matmul: rows of " + std::to_string(call.shape.cols) +
                                         " elements that do not begin at multiples of 16 bytes");
}

}  // namespace

MatmulTile chooseTileOfWarps(int64_t rows, int64_t outputs, int64_t matrices, const DeviceInfo& device) {
    // If a multiprocessor holds only one tile, that one is as fast as it gets. Times were measured on an H200.
    const auto timeOf = [&](auto layout, double time, double alone) {
        using Layout = decltype(layout);
        // On 7.5 nothing is reserved and a large tile takes all shared memory, so the division gives 0.
        const int blocks = std::clamp(blocksAtOnce<Layout>(device, chooseStages<Layout>(device)), 1, Layout::kBlocks);
        return TileTime{{Layout::kTileN, Layout::kTileT}, blocks, time, blocks > 1 ? alone : time};
    };
    return soonestTile({timeOf(LargeLayout{}, 1.0, 1.45), timeOf(HalfLayout{}, 0.52, 0.9)}, rows, outputs, matrices,
                       device.multiprocessors);
}

static MatmulCall callOf(const Matrix& w, const HalfRows& x, int64_t rows, float* y, int64_t stride) {
    MatmulCall call;
    call.type = w.type;
    call.w = w.data;
    call.shape = packedShape(w.type, w.rows, w.cols);
    call.x = x;
    call.rows = rows;
    call.y = y;
    call.stride = stride;
    return call;
}

void matmul(Stream& stream, const HalfRows& x, int64_t rows, const std::vector<MatvecOutput>& outputs, Store store) {
    std::vector<MatmulCall> calls;
    for (const MatvecOutput& output : outputs) {
        const Matrix& w = output.w;
        if (w.cols != outputs.front().w.cols)
            throw Error(ErrorKind::Internal, "matmul: matrices with different numbers of columns");
        if (output.stride != 0 && output.stride < w.rows)
            throw Error(ErrorKind::Internal, "matmul: " + std::to_string(w.rows) + " outputs do not fit in rows of " +
                                                 std::to_string(output.stride));
        MatmulCall call = callOf(w, x, rows, output.y, output.stride == 0 ? w.rows : output.stride);
        call.bias = output.bias;
        call.add = store == Store::Add;
        call.aligned = isAligned(call);
        if (w.rows > 0) calls.push_back(call);
    }
    const bool together = calls.size() > 1 && std::all_of(calls.begin(), calls.end(), [&](const MatmulCall& call) {
                              return !isSplit(call) && takesWarpgroups(stream, call);
                          });
    for (MatmulCall& call : calls) {
        if (together) call.order = &call == &calls.front() ? Together::First : Together::Later;
        launchCall(stream, call);
    }
}

void matmul(Stream& stream, const Matrix& w, const HalfRows& x, int64_t rows, const float* bias, float* y, Store store,
            int64_t stride) {
    matmul(stream, x, rows, {{w, bias, y, stride}}, store);
}

void matmulByHead(Stream& stream, const HeadRows& weights, const HalfRows& x, int64_t rows, float* y) {
    if (rows == 0 || weights.w.rows == 0) return;
    requireHeadRows(weights);
    MatmulCall call = callOf(weights.w, x, rows, y, weights.heads * weights.stride);
    call.by.heads = weights.heads;
    call.by.begin = static_cast<int32_t>(weights.begin);
    call.by.rowsOfHead = static_cast<int32_t>(weights.rowsOfHead);
    call.by.first = static_cast<int32_t>(weights.begin / weights.rowsOfHead);
    call.by.count = static_cast<int32_t>((weights.begin + weights.w.rows - 1) / weights.rowsOfHead) - call.by.first + 1;
    call.by.stride = weights.stride;
    call.aligned = isAligned(call);
    launchCall(stream, call);
}

int32_t expertTilePairs(const DeviceInfo& device) {
    return runsByWarpgroups(device) ? kWarpgroupExpertTile : kSmallExpertTile;
}

void matmulExperts(Stream& stream, const ExpertStack& w, const HalfRows& x, const ExpertGroups& groups, bool gather,
                   float* y, const ExpertIndex& which) {
    const int64_t held = static_cast<int64_t>(which.first) + w.count;
    if (which.first < 0 || which.end < which.first || (which.end != INT32_MAX && which.end > held))
        throw Error(ErrorKind::Internal, "matmul: experts " + std::to_string(which.first) + " to " +
                                             std::to_string(which.end) + " of a stack of " + std::to_string(w.count));
    MatmulCall call = callOf(w.first, x, groups.pairs, y, w.first.rows);
    call.expertStride = w.stride;
    call.groups = groups;
    call.which = which;
    call.which.end = static_cast<int32_t>(std::min<int64_t>(which.end, held));
    call.gather = gather;
    call.aligned = isAligned(call);
    launchCall(stream, call);
}

}  // namespace sharpi::cuda
