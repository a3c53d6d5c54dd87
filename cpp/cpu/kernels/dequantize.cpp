// Rows of any element type to floats, rounded like the reference: (d * scale) * quant, then + (m * min).
#include <cstring>

#include "core/half.h"
#include "cpu/kernels/internal.h"
#include "cpu/kernels/matmul/unpack_scalar.h"
#include "cpu/kernels/matmul/unpack_scalar_grids.h"

namespace sharpi::cpu::SHARPI_ISA {

// Not inlined: GCC 12 at -O3 drops the stores when it vectorizes this together with the loops around it.
template <class Block> __attribute__((noinline)) static void valuesOfHalf(const Group& g, int half, float* out) {
    const float d = Format<Block>::kTwoFloats && half % 2 ? g.m[half / 2] : g.d[half / 2];
    const float scale = d * static_cast<float>(g.scale[half]);
    const float min = Format<Block>::kHasMin ? g.m[half / 2] * static_cast<float>(g.min[half]) : 0.0f;
    for (int i = 0; i < 16; ++i) {
        const float value = scale * static_cast<float>(g.quant[half * 16 + i]);
        out[i] = Format<Block>::kHasMin ? value + min : value;
    }
}

template <class Block> static void dequantizeBlocks(const void* row, int64_t cols, float* out) {
    using F = Format<Block>;
    const Block* block = static_cast<const Block*>(row);
    for (int64_t at = 0; at < cols; at += 256) {
        const int elements = cols - at < 256 ? static_cast<int>(cols - at) : 256;
        Group g;
        unpack(block, elements / F::kElements, g);
        block += elements / F::kElements;
        for (int half = 0; half < elements / 16; ++half) valuesOfHalf<Block>(g, half, out + at + half * 16);
    }
}

void dequantizeRow(DType type, const void* row, int64_t cols, float* out) {
    const bool quantized =
        withBlockOf(type, [&](auto tag) { dequantizeBlocks<typename decltype(tag)::Type>(row, cols, out); });
    if (quantized) return;
    if (type == DType::F32) {
        std::memcpy(out, row, static_cast<size_t>(cols) * sizeof(float));
        return;
    }
    const uint8_t* bytes = static_cast<const uint8_t*>(row);
    if (type == DType::I32) {
        for (int64_t i = 0; i < cols; ++i) {
            int32_t stored;
            std::memcpy(&stored, bytes + 4 * i, sizeof stored);
            out[i] = static_cast<float>(stored);
        }
        return;
    }
    for (int64_t i = 0; i < cols; ++i) {
        uint16_t stored;
        std::memcpy(&stored, bytes + 2 * i, sizeof stored);
        out[i] = type == DType::F16 ? floatFromF16(stored) : floatFromBf16(stored);
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
