// to += the weighted sum of the down products of a token's experts, each of its own activations.
//
// A block owns eight output rows of one token for all experts. An item is a pair of rows of one expert, and the warps
// take items in turn, so that the weights of several experts are in flight at once, however few blocks there are. The
// sums meet in shared memory, where one thread for each row adds them in the order of the ranks.
#pragma once

#include "core/portable.h"
#include "kernels/matvec/matvec_kernel.cuh"

namespace sharpi::cuda {

constexpr int kDownRows = 8;  // output rows of a block
// An expert's rows are short and there are few blocks: registers are better spent on loads than on warps.
constexpr int kDownStages = 4;

struct DownProduct {
    const uint8_t* data = nullptr;
    PackedShape shape;
    int64_t stride = 0;
    int32_t rows = 0, cols = 0;
    MatvecInput x;
    const int32_t* chosen = nullptr;
    const float* weight = nullptr;  // null: 1
    int32_t used = 0;
    SharedAnswer shared;
    const float* bias = nullptr;  // [experts, rows], or null
    float* to = nullptr;
    bool adds = true;
};

template <DType D, bool kShared>
__global__ void __launch_bounds__(kMatvecThreads, 2) downKernel(const __grid_constant__ DownProduct p) {
    // The sums [used][kDownRows], then the experts [used], then the activations.
    extern __shared__ __align__(16) uint8_t shared[];
    using S = Steps<D>;
    allowNext();
    float* sums = reinterpret_cast<float*>(shared);
    int32_t* experts = reinterpret_cast<int32_t*>(sums + p.used * kDownRows);
    uint8_t* staged = shared + (p.used * (kDownRows + 1) * 4 + 15) / 16 * 16;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int firstRow = static_cast<int>(blockIdx.x) * kDownRows;
    const int64_t token = blockIdx.y;
    waitForPrevious();

    for (int k = threadIdx.x; k < p.used; k += kMatvecThreads) experts[k] = p.chosen[token * p.used + k];
    const auto x = activations<S, kShared>(p.x, token * p.used, p.used, p.cols, staged);
    __syncthreads();

    constexpr int kPairs = kDownRows / 2;
    const int units = p.cols / S::kUnitElements;
    const auto itemOf = [&](int i) { return warp + i * kMatvecWarps; };
    const auto place = [&](int i) {
        const int item = itemOf(i);
        const typename S::Base base = S::base(p.data + experts[item / kPairs] * p.stride, p.shape);
        const int row = min(firstRow + item % kPairs * 2, p.rows - 1);
        const typename S::Index first = static_cast<typename S::Index>(row) * units;
        return RowPair<D>{{base, base}, {first, row + 1 < p.rows ? first + units : first}};
    };
    const int items = p.used * kPairs;
    Pipeline<D, 1, kDownStages> pipeline(p.cols, (items - warp + kMatvecWarps - 1) / kMatvecWarps);
    pipeline.start(place);
    const int row = firstRow + static_cast<int>(threadIdx.x);
    const bool writes = threadIdx.x < kDownRows && row < p.rows;
    float* to = p.to + token * p.rows + row;
    const float before = writes && p.adds ? *to : 0.0f;
    const bool isShared = p.shared.y != nullptr;
    const float sharedAnswer = writes && isShared ? p.shared.y[token * p.rows + row] : 0.0f;
    if (kShared) finishCopies();

    pipeline.run(
        x, place, [&](int i, int) { return itemOf(i) / kPairs; },
        [&](int i, float (&acc)[1][2]) {
            const float sum = sumPairs(acc, lane);
            const int item = itemOf(i);
            if (lane % 16 == 0) sums[item / kPairs * kDownRows + item % kPairs * 2 + lane / 16] = sum;
        });
    __syncthreads();
    if (!writes) return;
    float y = 0.0f;
    for (int k = 0; k < p.used; ++k) {
        float answer = sums[k * kDownRows + threadIdx.x];
        if (p.bias) answer = __fadd_rn(answer, p.bias[static_cast<int64_t>(experts[k]) * p.rows + row]);
        y = fmaf(p.weight ? p.weight[token * p.used + k] : 1.0f, answer, y);
    }
    if (isShared) y = fmaf(p.shared.scale ? portableSigmoid(p.shared.scale[token]) : 1.0f, sharedAnswer, y);
    *to = p.adds ? __fadd_rn(before, y) : y;
}

template <DType D> void launchDown(Stream& stream, const DownProduct& p, int64_t rows) {
    const dim3 grid(static_cast<unsigned>((p.rows + kDownRows - 1) / kDownRows), static_cast<unsigned>(rows));
    const size_t sums = static_cast<size_t>(p.used * (kDownRows + 1) * 4 + 15) / 16 * 16;
    const size_t bytes = sums + Steps<D>::sharedBytes(p.used, p.cols);
    if (bytes <= kMatvecSharedBytes) launch(stream, downKernel<D, true>, grid, dim3(kMatvecThreads), bytes, p);
    else launch(stream, downKernel<D, false>, grid, dim3(kMatvecThreads), sums, p);
}

extern template void launchDown<DType::F32>(Stream&, const DownProduct&, int64_t);
extern template void launchDown<DType::F16>(Stream&, const DownProduct&, int64_t);
extern template void launchDown<DType::BF16>(Stream&, const DownProduct&, int64_t);

}  // namespace sharpi::cuda
