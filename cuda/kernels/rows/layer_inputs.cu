// See layer_inputs.h. A warp takes a part: its lanes are the accumulators of the contract's sum of squares.
#include "kernels/rows/layer_inputs.h"

#include "kernels/rows/device_rows.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kParts = 8;  // of a block

__global__ void __launch_bounds__(kParts * 32)
    joinKernel(float* inputs, const float* rows, int64_t parts, int64_t width, LayerInputFactors factors,
               const float* norm, float eps) {
    allowNext();
    waitForPrevious();
    const int64_t part = int64_t{blockIdx.x} * kParts + threadIdx.x / 32;
    if (part >= parts) return;
    const int lane = static_cast<int>(threadIdx.x % 32);
    float* const x = inputs + part * width;
    const float* const row = rows + part * width;
    float sum = 0.0f;
    for (int64_t i = lane; i < width; i += kContractAccumulators) {
        const float value = __fmul_rn(x[i], factors.projected);
        sum = fmaf(value, value, sum);
    }
    const float mean = __fdiv_rn(contractTree(sum), static_cast<float>(width));
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
    for (int64_t i = lane; i < width; i += kContractAccumulators) {
        const float normed = __fmul_rn(__fmul_rn(__fmul_rn(x[i], factors.projected), inverse), norm[i]);
        x[i] = joinedLayerInput(normed, row[i], factors);
    }
}

}  // namespace

void joinLayerInputs(Stream& stream, float* inputs, const float* rows, int64_t parts, int64_t width,
                     const LayerInputFactors& factors, const float* norm, float eps) {
    if (parts == 0) return;
    launch(stream, joinKernel, dim3(static_cast<unsigned>((parts + kParts - 1) / kParts)), dim3(kParts * 32), 0, inputs,
           rows, parts, width, factors, norm, eps);
}

}  // namespace sharpi::cuda
