// The matrix product of prefill: y = x w^T on tensor cores, with weights that stay packed in device memory.
//
// A thread block computes a tile of y. In a large tile, each of its warps multiplies 64 rows of x by 64 rows of w, in
// 128 accumulators for each thread: the larger a warp's tile, the fewer bytes it reads from shared memory for each
// multiplication. Few rows have small tiles, of which there are more. A block goes along k in steps of 64. While the
// tensor cores work on one step, the activations of the next steps are being copied, and the threads expand the next
// step's weights from packed blocks into shared memory (matmul_feed.cuh), a part between every few multiplications. One
// barrier for each step separates writing a tile from reading it. If several blocks share a multiprocessor, the
// expansion of one also fills the waits of another.
//
// Every element of y is one thread's sum in one order, whatever the number of rows: there are no atomic additions, and
// k is never split.
#pragma once

#include "device/launch.cuh"
#include "kernels/matmul/matmul_feed.cuh"

namespace sharpi::cuda {

// How a block's tile is divided: kWarpsT x kWarpsN warps, each of which multiplies kWarpT rows of x by kWarpN rows of
// w. kBlocks: how many blocks share a multiprocessor's registers. kFetched: steps between the fetch of a weight and its
// expansion. kSkips: whether groups of 16 rows of x past the tile's end are left out.
template <int kWarpsT_, int kWarpsN_, int kWarpT_, int kWarpN_, int kBlocks_, int kFetched_ = 1, bool kSkips_ = false>
struct TileLayout {
    static constexpr int kWarpsT = kWarpsT_, kWarpsN = kWarpsN_, kWarpT = kWarpT_, kWarpN = kWarpN_, kBlocks = kBlocks_,
                         kFetched = kFetched_;
    static constexpr bool kSkips = kSkips_;
    static constexpr int kThreads = kWarpsT * kWarpsN * 32;
    static constexpr int kTileT = kWarpsT * kWarpT, kTileN = kWarpsN * kWarpN;
};
using LargeLayout = TileLayout<2, 2, 64, 64, 2>;
// Half as many outputs: for products that have few large tiles, and for experts.
using HalfLayout = TileLayout<2, 2, 64, 32, 3>;
// Up to 64 rows. Their weights take most of the time: four warps expand them, and loads have two steps to arrive.
using FewLayout = TileLayout<1, 4, 64, 16, 4, 2, true>;

// The number of blocks that share a tile of ExpertGroups, if each takes up to kTileT of its pairs.
template <int kTileT> __host__ __device__ constexpr int blocksPerExpertTile(const ExpertGroups& groups) {
    return (groups.tilePairs + kTileT - 1) / kTileT;
}

// The rows of w of head `z` of the call's, or all if it has no heads, and where their outputs go.
__device__ __forceinline__ TilePlace headOf(const MatmulCall& call, int z) {
    TilePlace place;
    place.endRow = call.shape.rows;
    place.w = call.w;
    place.y = call.y;
    if (call.by.heads) {
        place.head = call.by.first + z;
        const int64_t from = static_cast<int64_t>(place.head) * call.by.rowsOfHead - call.by.begin;
        place.firstRow = max(from, int64_t{0});
        place.endRow = min(from + call.by.rowsOfHead, call.shape.rows);
        place.y += place.head * call.by.stride - from;
    }
    return place;
}

// The tile number `t` along the rows of x and `n` along those of w, of head `z`. A tile without rows is none.
template <int kTileT, int kTileN>
__device__ __forceinline__ TilePlace placeOf(const MatmulCall& call, int t, int n, int z) {
    TilePlace place = headOf(call, z);
    place.firstRow += static_cast<int64_t>(n) * kTileN;
    if (place.firstRow >= place.endRow) return place;
    if (!call.groups.begin) {
        place.begin = static_cast<int64_t>(t) * kTileT;
        place.end = min(place.begin + kTileT, call.rows);
        return place;
    }
    const int share = blocksPerExpertTile<kTileT>(call.groups);
    const int tile = t / share, part = t % share;
    const int expert = call.groups.tileExpert[tile];
    if (expert < 0) return place;  // past the end of the tiles
    const int element = call.which.index ? call.which.index[expert] : expert;
    if (element < call.which.first || element >= call.which.end) return place;
    const int begin = call.groups.tileBegin[tile],
              end = min(begin + call.groups.tilePairs, call.groups.begin[expert + 1]);
    place.begin = begin + part * kTileT;
    place.end = min(begin + (part + 1) * kTileT, end);
    place.w += static_cast<size_t>(element - call.which.first) * call.expertStride;
    return place;
}
// That of a block of a grid with these dimensions.
template <int kTileT, int kTileN> __device__ __forceinline__ TilePlace placeOf(const MatmulCall& call) {
    return placeOf<kTileT, kTileN>(call, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y),
                                   static_cast<int>(blockIdx.z));
}

// The place of the sum of row t and output n when a block's sums are gathered in shared memory. Groups of eight outputs
// are swizzled so that the lanes of either kernel, which have sums of several rows, write to different banks.
template <int kTileN> __device__ __forceinline__ int sumPlace(int t, int n) {
    return t * kTileN + (n ^ ((t ^ t >> 2) & 3) << 3);
}

// What has to be added to four outputs of a row: the old values of y, and the bias.
__device__ __forceinline__ float4 addends(const MatmulCall& call, const float* y, int64_t n, int valid, bool whole) {
    float4 sum = {};
    const auto add = [&](const float* from) {
        if (whole) {
            const float4 term = *reinterpret_cast<const float4*>(from);
            sum.x += term.x, sum.y += term.y, sum.z += term.z, sum.w += term.w;
        } else {
            if (valid > 0) sum.x += from[0];
            if (valid > 1) sum.y += from[1];
            if (valid > 2) sum.z += from[2];
            if (valid > 3) sum.w += from[3];
        }
    };
    if (call.bias) add(call.bias + n);
    if (call.add) add(y);
    return sum;
}

// Writes the block's sums from shared memory to y. A warp, or half of one, takes each row. `tile` must be complete,
// which takes a barrier.
template <int kThreads, int kTileN>
__device__ __forceinline__ void storeTile(const MatmulCall& call, const TilePlace& place, const float* tile) {
    static_assert(kTileN == 128 || kTileN == 64, "a lane has four outputs");
    constexpr int kLanes = kTileN / 4, kAbreast = kThreads / kLanes,
                  kBatch = 4;  // rows whose old values are loaded at once
    const int column = static_cast<int>(threadIdx.x) % kLanes * 4, rows = static_cast<int>(place.end - place.begin);
    const int64_t stride = call.stride, n = place.firstRow + column;
    const int valid = static_cast<int>(max(min(place.endRow - n, int64_t{4}), int64_t{0}));
    const bool aligned = valid == 4 && stride % 4 == 0 && reinterpret_cast<uintptr_t>(place.y + n) % 16 == 0 &&
                         (!call.bias || reinterpret_cast<uintptr_t>(call.bias + n) % 16 == 0);
    if (valid == 0) return;
    for (int first = static_cast<int>(threadIdx.x) / kLanes; first < rows; first += kAbreast * kBatch) {
        float* y = place.y + (place.begin + first) * stride + n;
        float4 value[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            value[i] =
                first + i * kAbreast < rows ? addends(call, y + i * kAbreast * stride, n, valid, aligned) : float4{};
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = first + i * kAbreast;
            if (row >= rows) break;
            const float4 sum = *reinterpret_cast<const float4*>(tile + sumPlace<kTileN>(row, column));
            const float4 result = {sum.x + value[i].x, sum.y + value[i].y, sum.z + value[i].z, sum.w + value[i].w};
            float* to = y + i * kAbreast * stride;
            if (aligned) {
                *reinterpret_cast<float4*>(to) = result;
            } else {
                to[0] = result.x;
                if (valid > 1) to[1] = result.y;
                if (valid > 2) to[2] = result.z;
                if (valid > 3) to[3] = result.w;
            }
        }
    }
}

// A warp's part of one step: kWarpT x kWarpN x 16 at a time.
template <typename Layout> class WarpProduct {
    static constexpr int kOfX = Layout::kWarpT / 16, kOfW = Layout::kWarpN / 16;  // of 16 rows each

public:
    // rowT, rowN: the warp's first rows in the block's tiles. rows: how many of x the block has.
    __device__ __forceinline__ WarpProduct(int rowT, int rowN, int rows) : _operands((rows - rowT + 15) / 16) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        // The matrices of x are rows 0-7 and 8-15 of the first 8 of k, then of the next 8. Those of w are the first 8
        // and the next 8 of k of rows 0-7, then of rows 8-15. This is the order of the instruction's operand registers.
        _x = tileOffset(rowT + lane % 16, lane / 16);
        _w = tileOffset(rowN + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    }

    // k: which 16 of the step's 64.
    __device__ __forceinline__ void multiply(uint32_t tileX, uint32_t tileW, int k) {
        uint32_t x[kOfX][4], w[kOfW][4];
        // Each step of two chunks along k changes the swizzled chunk number from its second-lowest bit up.
        const uint32_t atX = tileX + (_x ^ static_cast<uint32_t>(k) << 5),
                       atW = tileW + (_w ^ static_cast<uint32_t>(k) << 5);
#pragma unroll
        for (int i = 0; i < kOfX; ++i)
            if (has(i)) loadMatrices(x[i], atX + i * 16 * kTileRowBytes);
#pragma unroll
        for (int i = 0; i < kOfW; ++i) loadMatrices(w[i], atW + i * 16 * kTileRowBytes);
#pragma unroll
        for (int i = 0; i < kOfX; ++i) {
            if (!has(i)) continue;
#pragma unroll
            for (int j = 0; j < kOfW * 2; ++j)
                multiplyAdd(_sum[i][j], x[i], w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]);
        }
    }

    // rowT, rowN: as in the constructor.
    template <int kTileN> __device__ __forceinline__ void store(float* tile, int rowT, int rowN) const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
        for (int i = 0; i < kOfX * 2; ++i)
#pragma unroll
            for (int j = 0; j < kOfW * 2; ++j)
                *reinterpret_cast<float2*>(tile +
                                           sumPlace<kTileN>(rowT + lane / 4 + i * 8, rowN + lane % 4 * 2 + j * 8)) = {
                    _sum[i / 2][j][i % 2 * 2], _sum[i / 2][j][i % 2 * 2 + 1]};
    }

private:
    __device__ __forceinline__ bool has(int i) const { return !Layout::kSkips || i < _operands; }

    uint32_t _x, _w;
    int _operands;  // of x that have a row
    float _sum[kOfX][kOfW * 2][4] = {};
};

// The block's tiles in shared memory: `stages` of x, then two of w.
template <int kTileT, int kTileN> struct SharedTiles {
    static constexpr uint32_t kBytesX = kTileT * kTileRowBytes, kBytesW = kTileN * kTileRowBytes;
    static constexpr size_t bytes(int stages) { return static_cast<size_t>(stages) * kBytesX + 2 * kBytesW; }
    static_assert(kTileT * kTileN * sizeof(float) <= 2 * kBytesX + 2 * kBytesW, "the sums fit where the tiles were");

    uint32_t base;
    int stages;
    __device__ __forceinline__ uint32_t x(int stage) const { return base + stage * kBytesX; }
    __device__ __forceinline__ uint32_t w(int step) const { return base + stages * kBytesX + (step & 1) * kBytesW; }
};

template <DType T, bool kSplit, typename Layout>
__global__ void __launch_bounds__(Layout::kThreads, Layout::kBlocks)
    matmulKernel(const __grid_constant__ MatmulCall call) {
    constexpr int kThreads = Layout::kThreads, kParts = kWeightParts<kThreads, Layout::kTileN>,
                  kInner = kTileDepth / 16;
    // Rare types have a case each wherever weights are fetched or stored, so those places are kept few.
    constexpr int kUnroll = T == kAnyRare ? 1 : kInner;
    constexpr int kFetched = T == kAnyRare || T == DType::F32 ? 1 : Layout::kFetched;  // F32 would take many registers
    static_assert(kFetched == 1 || kParts == 1);
    extern __shared__ __align__(1024) uint8_t shared[];
    allowNext();
    if (call.groups.begin) waitForPrevious();  // another kernel writes the tiles' arrays
    const TilePlace place = placeOf<Layout::kTileT, Layout::kTileN>(call);
    if (place.begin >= place.end) return;

    const SharedTiles<Layout::kTileT, Layout::kTileN> tiles{sharedAddress(shared), call.stages};
    const int stepsPerPass = static_cast<int>((call.shape.cols + kTileDepth - 1) / kTileDepth),
              steps = stepsPerPass * call.passes.count;
    const auto at = [&](int step) { return stepAt<kSplit>(call, step, stepsPerPass); };

    using Feed = typename WeightFeedOf<T, kSplit, kThreads, Layout::kTileN>::Type;
    const Feed weights(call, place.w, place.firstRow, static_cast<int>(threadIdx.x));
    typename Feed::Loaded loaded[kFetched];  // step i's weights in number i % kFetched
#pragma unroll kUnroll
    for (int part = 0; part < kParts; ++part) {
        weights.fetch(loaded[0], at(0), part, call.aligned);
        weights.store(loaded[0], tiles.w(0), at(0), part);
    }
#pragma unroll
    for (int i = 1; i <= kFetched; ++i)
        if (i < steps) weights.fetch(loaded[i % kFetched], at(i), 0, call.aligned);

    waitForPrevious();
    const RowFeed<kThreads, Layout::kTileT, kIsFloat<T>, Layout::kSkips> rows(call, place);
    for (int step = 0; step < call.stages - 1; ++step) {
        if (step < steps) rows.copy(tiles.x(step), at(step));
        closeCopies();
    }

    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int rowT = warp % Layout::kWarpsT * Layout::kWarpT, rowN = warp / Layout::kWarpsT * Layout::kWarpN;
    WarpProduct<Layout> product(rowT, rowN, static_cast<int>(place.end - place.begin));
    int stage = 0, filled = call.stages - 1;  // the tile of x to multiply, and the next to fill
    // next: the weights of the step after.
    const auto multiplyStep = [&](int step, typename Feed::Loaded& next) {
        if (call.stages > 2) waitForCopies<1>();
        else waitForCopies<0>();
        __syncthreads();  // this step's tiles are complete, and no thread reads the last step's any more
        if (step + call.stages - 1 < steps) rows.copy(tiles.x(filled), at(step + call.stages - 1));
        closeCopies();
#pragma unroll kUnroll
        for (int k = 0; k < kInner; ++k) {
            constexpr int kEvery = kInner / kParts;
            const int part = k / kEvery;
            const bool isLast = part + 1 == kParts;
            if (k % kEvery == 0 && step + 1 < steps) {
                weights.store(next, tiles.w(step + 1), at(step + 1), part);
                const int fetched = step + 1 + (isLast ? kFetched : 0);
                if (!isLast || fetched < steps) weights.fetch(next, at(fetched), isLast ? 0 : part + 1, call.aligned);
            }
            product.multiply(tiles.x(stage), tiles.w(step), k);
        }
        stage = stage + 1 == call.stages ? 0 : stage + 1;
        filled = filled + 1 == call.stages ? 0 : filled + 1;
    };
    for (int step = 0; step < steps; step += kFetched)
#pragma unroll
        for (int i = 0; i < kFetched; ++i)
            if (i == 0 || step + i < steps) multiplyStep(step + i, loaded[(i + 1) % kFetched]);
    __syncthreads();  // the sums overwrite the tiles
    float* sums = reinterpret_cast<float*>(shared);
    product.template store<Layout::kTileN>(sums, rowT, rowN);
    __syncthreads();
    storeTile<kThreads, Layout::kTileN>(call, place, sums);
}

}  // namespace sharpi::cuda
