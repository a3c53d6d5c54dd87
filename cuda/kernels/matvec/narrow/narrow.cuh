// Products of F32 matrices with few rows, such as routers, and any number of rows of activations, in the contract's
// order: acc[i mod 32] of an output is a chain over the row, so a chain stays with one lane and is never divided.
//
// Where there are few outputs, few warps have chains to follow, and each would wait for memory at every step. So all
// threads of a block bring chunks of weights and activations to shared memory, some chunks ahead, and a warp follows
// the chains of kOwnRows rows of activations and kOwnOutputs rows of weights from there.
#pragma once

#include "kernels/matvec/matvec_product.cuh"

namespace sharpi::cuda {

// A matrix with at most this many rows is narrow.
constexpr int32_t kNarrowOutputs = 512;

// Rows of activations as floats, copied by cp.async.
struct FloatInput {
    struct Fetched {};
    static constexpr int kElements = 4;  // of a piece that a thread copies
    const float* x;
    __device__ __forceinline__ void fetch(float* to, int64_t at, bool valid, Fetched&) const {
        if (valid) copyToShared<16>(to, x + at);
        else *reinterpret_cast<float4*>(to) = {};
    }
    static __device__ __forceinline__ void put(float*, const Fetched&) {}
};

template <int kOwnRows_, int kOwnOutputs_, int kWarpsOfRows_, int kWarpsOfOutputs_, int kChunk_, int kStages_>
struct NarrowTile {
    static constexpr int kOwnRows = kOwnRows_, kOwnOutputs = kOwnOutputs_, kChunk = kChunk_, kStages = kStages_;
    static constexpr int kWarpsOfRows = kWarpsOfRows_, kWarpsOfOutputs = kWarpsOfOutputs_;
    static constexpr int kRows = kOwnRows * kWarpsOfRows, kOutputs = kOwnOutputs * kWarpsOfOutputs;
    static constexpr int kThreads = 32 * kWarpsOfRows * kWarpsOfOutputs;
    static constexpr int kStageFloats = (kRows + kOutputs) * kChunk;
    static constexpr size_t kSharedBytes = sizeof(float) * kStages * kStageFloats;
};

// Grid: outputs of all products, rows. cols is a multiple of Input::kElements.
template <class T, class Input>
__global__ void __launch_bounds__(T::kThreads)
    narrowKernel(const __grid_constant__ Products p, const __grid_constant__ Input input) {
    extern __shared__ __align__(16) float tiles[];
    constexpr int kPieces = T::kRows * T::kChunk / Input::kElements;
    constexpr int kFetched = (kPieces + T::kThreads - 1) / T::kThreads;  // pieces of a thread
    allowNext();
    int index = 0;
    while (static_cast<int>(blockIdx.x) >= p.product[index].endBlock) ++index;
    const Product& w = p.product[index];
    const int block = static_cast<int>(blockIdx.x) - (index ? p.product[index - 1].endBlock : 0);
    const int firstOutput = block * T::kOutputs, firstRow = static_cast<int>(blockIdx.y) * T::kRows, cols = p.cols;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunks = (cols + T::kChunk - 1) / T::kChunk;
    const auto* const weights = reinterpret_cast<const float*>(w.data);
    const auto stageOf = [&](int chunk) { return tiles + chunk % T::kStages * T::kStageFloats; };
    const auto loadWeights = [&](int chunk) {
        float* const to = stageOf(chunk) + T::kRows * T::kChunk;
        for (int i = threadIdx.x; i < T::kOutputs * T::kChunk / 4; i += T::kThreads) {
            const int output = i / (T::kChunk / 4), at = i % (T::kChunk / 4) * 4, column = chunk * T::kChunk + at;
            if (firstOutput + output < w.rows && column < cols)
                copyToShared<16>(to + output * T::kChunk + at,
                                 weights + static_cast<int64_t>(firstOutput + output) * cols + column);
        }
    };
    typename Input::Fetched fetched[kFetched];
    // Calls body(number of the piece, row, its first column in the chunk).
    const auto forPieces = [&](const auto& body) {
#pragma unroll
        for (int f = 0; f < kFetched; ++f) {
            const int piece = f * T::kThreads + static_cast<int>(threadIdx.x);
            constexpr int kPerRow = T::kChunk / Input::kElements;
            if (kPieces % T::kThreads == 0 || piece < kPieces)
                body(f, piece / kPerRow, piece % kPerRow * Input::kElements);
        }
    };
    const auto fetchRows = [&](int chunk) {
        forPieces([&](int f, int row, int at) {
            const int column = chunk * T::kChunk + at;
            const bool valid = firstRow + row < p.rows && column < cols;
            input.fetch(stageOf(chunk) + row * T::kChunk + at,
                        valid ? static_cast<int64_t>(firstRow + row) * cols + column : 0, valid, fetched[f]);
        });
    };
    const auto putRows = [&](int chunk) {
        forPieces([&](int f, int row, int at) { Input::put(stageOf(chunk) + row * T::kChunk + at, fetched[f]); });
    };

    for (int c = 0; c < T::kStages - 1; ++c)
        if (c < chunks) loadWeights(c);
    waitForPrevious();
    for (int c = 0; c < T::kStages - 1; ++c) {
        if (c < chunks) {
            fetchRows(c);
            putRows(c);
        }
        closeCopies();
    }
    float acc[T::kOwnRows][T::kOwnOutputs] = {};
    const int ownRow = warp / T::kWarpsOfOutputs * T::kOwnRows, ownOutput = warp % T::kWarpsOfOutputs * T::kOwnOutputs;
    for (int c = 0; c < chunks; ++c) {
        waitForCopies<T::kStages - 2>();
        __syncthreads();  // this chunk is there, and the one before it is used
        const int next = c + T::kStages - 1;
        if (next < chunks) {
            loadWeights(next);
            fetchRows(next);
        }
        closeCopies();
        const float* const x = stageOf(c) + ownRow * T::kChunk + lane;
        const float* const y = stageOf(c) + (T::kRows + ownOutput) * T::kChunk + lane;
        const auto step = [&](int k) {
            float own[T::kOwnRows], of[T::kOwnOutputs];
#pragma unroll
            for (int t = 0; t < T::kOwnRows; ++t) own[t] = x[t * T::kChunk + k];
#pragma unroll
            for (int n = 0; n < T::kOwnOutputs; ++n) of[n] = y[n * T::kChunk + k];
#pragma unroll
            for (int t = 0; t < T::kOwnRows; ++t)
#pragma unroll
                for (int n = 0; n < T::kOwnOutputs; ++n) acc[t][n] = fmaf(of[n], own[t], acc[t][n]);
        };
        const int left = cols - c * T::kChunk;
        if (left >= T::kChunk) {
#pragma unroll 4
            for (int k = 0; k < T::kChunk; k += 32) step(k);
        } else {
            int k = 0;
            for (; k + 32 <= left; k += 32) step(k);
            if (k + lane < left) step(k);
        }
        if (next < chunks) putRows(next);
    }
    constexpr int kLanes = 32 / T::kOwnOutputs;  // that get the sum of an output
    const int output = firstOutput + ownOutput + lane / kLanes;
#pragma unroll
    for (int t = 0; t < T::kOwnRows; ++t) {
        float sum = sumAccumulators(acc[t], lane);
        const int row = firstRow + ownRow + t;
        if (lane % kLanes != 0 || row >= p.rows || output >= w.rows) continue;
        if (w.bias) sum = __fadd_rn(sum, w.bias[output]);
        float* const to = w.y + static_cast<int64_t>(row) * w.stride + output;
        *to = p.add ? __fadd_rn(*to, sum) : sum;
    }
}

template <class T, class Input> void launchNarrowTile(Stream& stream, Products p, const Input& input) {
    int32_t blocks = 0;
    for (int i = 0; i < p.count; ++i)
        p.product[i].endBlock = blocks += (p.product[i].rows + T::kOutputs - 1) / T::kOutputs;
    const auto kernel = narrowKernel<T, Input>;
    if (T::kSharedBytes > kMatvecSharedBytes) allowShared(kernel, T::kSharedBytes);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>((p.rows + T::kRows - 1) / T::kRows));
    launch(stream, kernel, grid, dim3(T::kThreads), T::kSharedBytes, p, input);
}

// Large tiles read less often, small ones leave more multiprocessors work.
template <class Input> void launchNarrow(Stream& stream, const Products& p, const Input& input) {
    using One = NarrowTile<1, 1, 1, 2, 1024, 4>;
    using Few = NarrowTile<4, 1, 1, 2, 512, 4>;
    using Some = NarrowTile<4, 2, 2, 4, 256, 3>;
    using Many = NarrowTile<8, 8, 2, 4, 128, 2>;
    static_assert(Many::kSharedBytes <= kMatvecSharedBytes && One::kSharedBytes <= kMatvecSharedBytes);
    if (p.rows == 1) return launchNarrowTile<One>(stream, p, input);
    if (p.rows <= Few::kRows) return launchNarrowTile<Few>(stream, p, input);
    int64_t blocks = 0;
    for (int i = 0; i < p.count; ++i) blocks += (p.product[i].rows + Many::kOutputs - 1) / Many::kOutputs;
    blocks *= (p.rows + Many::kRows - 1) / Many::kRows;
    if (2 * blocks >= stream.device().multiprocessors) return launchNarrowTile<Many>(stream, p, input);
    launchNarrowTile<Some>(stream, p, input);
}

// Whether these kernels take the products. Rows must begin at multiples of 16 bytes.
inline bool isNarrow(const Products& p, int elements) {
    bool narrow = p.cols % elements == 0;
    for (int i = 0; i < p.count; ++i) narrow = narrow && p.product[i].rows <= kNarrowOutputs;
    return narrow;
}

}  // namespace sharpi::cuda
