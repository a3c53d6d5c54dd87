// Products as core/contract.h words them, from the file's own layout. The fast kernels are tested against them.
//
// A warp computes one product, and each lane one of the contract's 32 accumulators: lane b mod 32 takes block b,
// element by element. The only code shared with the fast kernels is the meaning of a file's blocks (file_formats.cuh).
#include "core/contract.h"
#include "device/launch.cuh"
#include "kernels/formats/file_formats.cuh"
#include "kernels/matvec/matvec.h"

namespace sharpi::cuda {
namespace {

constexpr int kWarps = 4;

// Section 4: the tree over the accumulators, then the bias.
__device__ void finish(float acc, const float* bias, int64_t row, float* y) {
#pragma unroll
    for (int width = kContractAccumulators / 2; width >= 1; width /= 2)
        acc = __fadd_rn(acc, __shfl_down_sync(0xffffffffu, acc, width));
    if (threadIdx.x == 0) *y = bias ? __fadd_rn(acc, bias[row]) : acc;
}

// Blocks are (32, kWarps): each warp has a row of w, and grid.y is the row of x.
template <DType T>
__global__ void quantizedKernel(const uint8_t* w, int64_t rows, int64_t cols, QuantizedRows x, const float* bias,
                                float* y) {
    using File = FileFormat<T>;
    allowNext();
    waitForPrevious();
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y, t = blockIdx.y,
                  blocks = cols / kContractBlock;
    if (row >= rows) return;
    const uint8_t* weights = w + row * (blocks / File::kBlocks) * static_cast<int64_t>(sizeof(typename File::Block));
    float acc = 0.0f;
    for (int64_t b = threadIdx.x; b < blocks; b += kContractAccumulators) {
        const auto& block = fileBlock<T>(weights, b);
        const int j = static_cast<int>(b % File::kBlocks);
        const Scales s = File::scales(block, j);
        int dots[2] = {};
        for (int i = 0; i < kContractBlock; ++i) {
            const int8_t q = x.q[((t * 2 + i / 16) * blocks + b) * 16 + i % 16];
            dots[i / 16] += quantOf<T>(File::code(block, j, i)) * q;
        }
        const float scale = x.scale[t * blocks + b];
        const auto add = [&](float weight, int sub, int sum) {
            acc = fmaf(__fmul_rn(weight, static_cast<float>(sub)), __fmul_rn(scale, static_cast<float>(sum)), acc);
        };
        if constexpr (Format<T>::kTwoFloats) {
            add(s.d, 1, dots[0]);
            add(s.m, 1, dots[1]);
        } else if constexpr (Format<T>::kTwoScales) {
            add(s.d, s.sub0, dots[0]);
            add(s.d, s.sub1, dots[1]);
        } else {
            add(s.d, s.sub0, dots[0] + dots[1]);
        }
        if constexpr (Format<T>::kHasMin) {
            const int32_t sums = x.sums[t * blocks + b], first = static_cast<int16_t>(sums & 0xffff),
                          second = static_cast<int16_t>(sums >> 16);
            if constexpr (Format<T>::kTwoScales) {
                add(s.m, s.min0, first);
                add(s.m, s.min1, second);
            } else {
                add(s.m, s.min0, first + second);
            }
        }
    }
    finish(acc, bias, row, y + t * rows + row);
}

template <DType T> __device__ float floatWeight(const uint8_t* w, int64_t i) {
    if constexpr (T == DType::F32) {
        return reinterpret_cast<const float*>(w)[i];
    } else {
        const uint16_t stored = reinterpret_cast<const uint16_t*>(w)[i];
        return T == DType::F16 ? floatOfLowHalf(stored) : __uint_as_float(static_cast<uint32_t>(stored) << 16);
    }
}

template <DType T>
__global__ void floatKernel(const uint8_t* w, int64_t rows, int64_t cols, const float* x, const float* bias, float* y) {
    allowNext();
    waitForPrevious();
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y, t = blockIdx.y;
    if (row >= rows) return;
    float acc = 0.0f;
    for (int64_t i = threadIdx.x; i < cols; i += kContractAccumulators)
        acc = fmaf(floatWeight<T>(w, row * cols + i), x[t * cols + i], acc);
    finish(acc, bias, row, y + t * rows + row);
}

}  // namespace

void matvecReference(Stream& stream, const MatvecInput& x, int rows, const Matrix& w, const float* bias, float* y) {
    const dim3 grid(static_cast<unsigned>((w.rows + kWarps - 1) / kWarps), static_cast<unsigned>(rows)),
        block(32, kWarps);
    withType(w.type, [&](auto tag) {
        constexpr DType kType = decltype(tag)::kType;
        if constexpr (kIsFloat<kType>)
            launch(stream, floatKernel<kType>, grid, block, 0, w.data, w.rows, w.cols, x.floats, bias, y);
        else launch(stream, quantizedKernel<kType>, grid, block, 0, w.data, w.rows, w.cols, x.quantized, bias, y);
    });
}

}  // namespace sharpi::cuda
