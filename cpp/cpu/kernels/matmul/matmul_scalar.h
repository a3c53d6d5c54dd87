// The contract as plain code: the reference for every other version, and the fallback for processors without vectors.
#pragma once

#include "core/contract.h"
#include "cpu/kernels/fma.h"
#include "cpu/kernels/internal.h"
#include "cpu/kernels/matmul/unpack_scalar.h"
#include "cpu/kernels/matmul/unpack_scalar_grids.h"

namespace sharpi::cpu::SHARPI_ISA {

// Adds `blocks` blocks of 32, from block `first` of the row on.
template <class Block>
static void addGroup(const Group& g, int blocks, int64_t first, const int8_t* q, const float* scale,
                     const int16_t* sums, float* acc) {
    for (int b = 0; b < blocks; ++b) {
        using F = Format<Block>;
        float& target = acc[(first + b) % kContractAccumulators];
        const float s = scale[b];
        const auto add = [&](float factor, int32_t integer) {
            target = fmaExact(factor, s * static_cast<float>(integer), target);
        };
        int32_t dots[2] = {};
        for (int i = b * 32; i < b * 32 + 32; ++i) dots[i / 16 % 2] += g.quant[i] * q[i];
        const float d[2] = {g.d[b], F::kTwoFloats ? g.m[b] : g.d[b]};
        if (F::kHalves) {
            for (int half = 0; half < 2; ++half) add(d[half] * g.scale[2 * b + half], dots[half]);
        } else {
            add(g.d[b] * g.scale[2 * b], dots[0] + dots[1]);
        }
        if (F::kMins == Sub::PerHalf) {
            for (int half = 0; half < 2; ++half) add(g.m[b] * g.min[2 * b + half], sums[2 * b + half]);
        } else if (F::kHasMin) {
            add(g.m[b] * g.min[2 * b], sums[2 * b] + sums[2 * b + 1]);
        }
    }
}

template <class Block> static void matmulScalar(const MatmulArgs& args, int64_t rowBegin, int64_t rowEnd) {
    constexpr int kTokens = 8;  // that share one unpacking
    const int64_t cols = args.w.cols;
    const QuantizedRows& x = *args.xQuant;
    const size_t rowSize = static_cast<size_t>(cols / Format<Block>::kElements) * sizeof(Block);
    for (int64_t r = rowBegin; r < rowEnd; ++r) {
        for (int64_t begin = 0; begin < args.count; begin += kTokens) {
            const int tokens = args.count - begin < kTokens ? static_cast<int>(args.count - begin) : kTokens;
            float acc[kTokens][kContractAccumulators] = {};
            for (int64_t at = 0; at < cols; at += 256) {
                const int elements = cols - at < 256 ? static_cast<int>(cols - at) : 256;
                const Block* block = reinterpret_cast<const Block*>(args.w.data + static_cast<size_t>(r) * rowSize) +
                                     at / Format<Block>::kElements;
                Group g;
                unpack(block, elements / Format<Block>::kElements, g);
                for (int t = 0; t < tokens; ++t) {
                    const int64_t row = args.rowIndex ? args.rowIndex[begin + t] : begin + t;
                    addGroup<Block>(g, elements / 32, at / 32, x.q + row * x.qStride + at,
                                    x.scale + row * x.scaleStride + at / 32, x.sums + row * x.sumStride + at / 16,
                                    acc[t]);
                }
            }
            for (int t = 0; t < tokens; ++t) {
                for (int width = kContractAccumulators / 2; width >= 1; width /= 2)
                    for (int i = 0; i < width; ++i) acc[t][i] += acc[t][i + width];
                args.y[(begin + t) * args.yStride + r] = args.bias ? acc[t][0] + args.bias[r] : acc[t][0];
            }
        }
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
