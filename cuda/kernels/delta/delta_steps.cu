// Alphas and betas that come from one product; see gated_delta.h.
#include "device/launch.cuh"
#include "kernels/delta/gated_delta.h"

namespace sharpi::cuda {

namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    splitKernel(const float* steps, int64_t rows, int32_t heads, int32_t group, float* alpha, float* beta) {
    allowNext();
    waitForPrevious();
    const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (i >= rows * heads) return;
    const int64_t row = i / heads, head = i % heads;
    const float* const own = steps + 2 * row * heads + 2 * (head / group) * group + head % group;
    beta[i] = own[0];
    alpha[i] = own[group];
}

}  // namespace

void splitDeltaSteps(Stream& stream, const float* steps, int64_t rows, const DeltaShape& shape, float* alpha,
                     float* beta) {
    const int64_t count = rows * shape.valueHeads;
    if (count == 0) return;
    launch(stream, splitKernel, dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)), dim3(kThreads), 0,
           steps, rows, shape.valueHeads, shape.valueHeads / shape.keyHeads, alpha, beta);
}

}  // namespace sharpi::cuda
