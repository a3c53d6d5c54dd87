// Rows of any element type to floats, with the roundings of the reference: (d * scale) * quant, then + (m * min).
#include <cstring>

#include "core/half.h"
#include "cpu/kernels/internal.h"
#include "cpu/kernels/unpack_scalar.h"

namespace sharpi::cpu::SHARPI_ISA {

template <class Block>
static void dequantizeBlocks(const void* row, int64_t cols, float* out) {
    using F = Format<Block>;
    const Block* block = static_cast<const Block*>(row);
    for (int64_t at = 0; at < cols; at += 256) {
        const int elements = cols - at < 256 ? static_cast<int>(cols - at) : 256;
        Group g;
        unpack(block, elements / F::kElements, g);
        block += elements / F::kElements;
        for (int half = 0; half < elements / 16; ++half) {
            const float scale = g.d[half / 2] * static_cast<float>(g.scale[half]);
            const float min = F::kHasMin ? g.m[half / 2] * static_cast<float>(g.min[half]) : 0.0f;
            for (int i = half * 16; i < half * 16 + 16; ++i) {
                const float value = scale * static_cast<float>(g.quant[i]);
                out[at + i] = F::kHasMin ? value + min : value;
            }
        }
    }
}

void dequantizeRow(DType type, const void* row, int64_t cols, float* out) {
    const bool quantized = withBlockOf(
        type, [&](auto tag) { dequantizeBlocks<typename decltype(tag)::Type>(row, cols, out); });
    if (quantized) return;
    if (type == DType::F32) {
        std::memcpy(out, row, static_cast<size_t>(cols) * sizeof(float));
        return;
    }
    const uint8_t* bytes = static_cast<const uint8_t*>(row);
    for (int64_t i = 0; i < cols; ++i) {
        uint16_t stored;
        std::memcpy(&stored, bytes + 2 * i, sizeof stored);
        out[i] = type == DType::F16 ? floatFromF16(stored) : floatFromBf16(stored);
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
