// Packed weights in shared memory, plane by plane as they lie in the matrix. They are read there as an mma.sync wants
// them, each lane four codes of a half of a block, so nothing is unpacked before.
#pragma once

#include "kernels/matvec/mma/mma_instructions.cuh"

namespace sharpi::cuda {

constexpr int kMmaRows = 16;    // weight rows of a tile
constexpr int kMmaColumns = 8;  // rows of activations of a tile

// A group of neighbouring rows of a matrix, from `row` on. Those past `last` repeat it: they are computed, and nobody
// asks for their sums.
template <DType D> struct MmaRows {
    typename Steps<D>::Base base;
    int row, last;
};

// The planes of a block in shared memory.
struct SharedPlanes {
    SharedBytes plane[PackedShape::kPlanes];
};

// What of a block of a common type one lane of a fragment has: words `word` and 4 + word of Format<D>::codes(), for
// word < 4.
template <DType D> struct CodeWords {
    uint32_t low, high;

    static __device__ __forceinline__ CodeWords load(const SharedPlanes& at, int word) {
        if constexpr (D == DType::Q8_0) {
            return {loadWord(at.plane[0] + 4 * word), loadWord(at.plane[1] + 4 * word)};
        } else if constexpr (D == DType::IQ4_NL || D == DType::IQ4_XS || D == DType::MXFP4) {
            constexpr TableWords kTable = tableWords(D == DType::MXFP4 ? kMXFP4Values : kIQ4Values);
            const uint32_t codes = loadWord(at.plane[0] + 4 * word), low = codes & 0x77777777u,
                           bank = ((codes >> 1) & 0x44444444u) | 0x32103210u;
            return {lookUp(kTable, low, bank), lookUp(kTable, low >> 16, bank >> 16)};
        } else if constexpr (D == DType::Q2_K || D == DType::Q3_K) {
            const uint2 codes = loadWords2(at.plane[0]);
            CodeWords c = {turned(codes.x, -2 * word) & 0x03030303u, turned(codes.y, -2 * word) & 0x03030303u};
            if constexpr (D == DType::Q3_K) c.insert<2>(loadWord(at.plane[1]), word);
            return c;
        } else {
            const uint32_t codes = loadWord(at.plane[0] + 4 * word);
            CodeWords c = {codes & 0x0f0f0f0fu, codes >> 4 & 0x0f0f0f0fu};
            if constexpr (D == DType::Q5_0 || D == DType::Q5_1 || D == DType::Q5_K)
                c.insert<4>(loadWord(at.plane[1]), word);
            if constexpr (D == DType::Q6_K) {
                const uint2 high = loadWords2(at.plane[1]);
                c.low |= turned(high.x, 4 - 2 * word) & 0x30303030u;
                c.high |= turned(high.y, 4 - 2 * word) & 0x30303030u;
            }
            return c;
        }
    }

private:
    // Rotated to the left. The bits that come in from the other end are masked by all who call it.
    static __device__ __forceinline__ uint32_t turned(uint32_t bits, int by) {
        return __funnelshift_l(bits, bits, static_cast<uint32_t>(by) & 31);
    }
    // insertBits() for these two words.
    template <int kBit> __device__ __forceinline__ void insert(uint32_t bits, int word) {
        low |= turned(bits, kBit - word) & (0x01010101u << kBit);
        high |= turned(bits, kBit - 4 - word) & (0x01010101u << kBit);
    }
};

// Format<D>::Raw without its codes, for floatScales().
template <DType D> __device__ __forceinline__ typename Format<D>::Raw loadScales(const SharedPlanes& at, int j) {
    typename Format<D>::Raw raw = {};
    const auto& plane = at.plane;
    if constexpr (D == DType::Q4_0 || D == DType::IQ4_NL) raw.scale = loadHalf(plane[1]);
    else if constexpr (D == DType::Q4_1) raw.scale = loadWord(plane[1]);
    else if constexpr (D == DType::MXFP4) raw.scale = loadByte(plane[1]);
    else if constexpr (D == DType::Q5_0 || D == DType::Q8_0) raw.scale = loadHalf(plane[2]);
    else if constexpr (D == DType::Q5_1) raw.scale = loadWord(plane[2]);
    else if constexpr (D == DType::Q2_K) raw.scale = loadHalf(plane[1]), raw.ends = loadWord(plane[2]);
    else if constexpr (D == DType::Q3_K)
        raw.scaleLow = loadWord(plane[2] + (j & 4)), raw.scaleHigh = loadWord(plane[2] + 8), raw.d = loadHalf(plane[3]);
    else if constexpr (D == DType::Q4_K) raw.scale = loadWords4(plane[1]);
    else if constexpr (D == DType::Q5_K) raw.scale = loadWords4(plane[2]);
    else if constexpr (D == DType::Q6_K) raw.scale = loadHalf(plane[2]), raw.d = loadHalf(plane[3]);
    else raw.scale = loadWords2(plane[1]);  // IQ4_XS
    return raw;
}

}  // namespace sharpi::cuda
