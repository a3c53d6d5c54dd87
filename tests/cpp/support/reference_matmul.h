// A second implementation of the quantized formats and the matmul contract, as plain as it can be written: one element
// at a time, in the words of core/contract.h. Tests compare the kernels with it, bit for bit.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "core/blocks.h"
#include "core/dtype.h"
#include "core/formats/grids.h"
#include "core/half.h"
#include "cpu/kernels.h"

namespace reference {

using sharpi::DType;

inline const std::vector<DType>& quantizedTypes() {
    static const std::vector<DType> types = {DType::Q4_0,   DType::Q4_1,    DType::Q5_0,  DType::Q5_1,    DType::Q8_0,
                                             DType::Q2_K,   DType::Q3_K,    DType::Q4_K,  DType::Q5_K,    DType::Q6_K,
                                             DType::IQ4_NL, DType::IQ4_XS,  DType::MXFP4, DType::IQ2_XXS, DType::IQ2_XS,
                                             DType::IQ2_S,  DType::IQ3_XXS, DType::IQ3_S, DType::IQ1_S,   DType::IQ1_M,
                                             DType::TQ1_0,  DType::TQ2_0,   DType::NVFP4, DType::Q1_0};
    return types;
}

// The element's value is d * sub * quant + m * min.
struct Element {
    int sub = 1, quant = 0, min = 0;
    float d = 0, m = 0;
};

// --- formats with grids, ternary digits and blocks of 64 and 128 elements, as core/blocks.h says it -----------------

inline int setBits(int byte) {
    int count = 0;
    for (; byte; byte /= 2) count += byte % 2;
    return count;
}
// Sign `i` of eight, of which the last makes the number of negative ones even.
inline bool isNegative(int seven, int i) { return i < 7 ? seven >> i & 1 : setBits(seven) % 2; }
inline uint32_t wordOf(const uint8_t* p) { return p[0] | p[1] << 8 | p[2] << 16 | static_cast<uint32_t>(p[3]) << 24; }
inline int nibbleOf(const uint8_t* bytes, int i) { return i % 2 ? bytes[i / 2] / 16 : bytes[i / 2] % 16; }

inline Element elementOfIQ2(sharpi::DType type, const uint8_t* bytes, int k) {
    using namespace sharpi;
    const int l = k / 8, i = k % 8;
    Element e;
    int entry = 0;
    bool negative = false;
    if (type == DType::IQ2_XXS) {
        const auto& b = *reinterpret_cast<const BlockIQ2_XXS*>(bytes);
        const uint32_t word = wordOf(b.quants + k / 32 * 8 + 4);
        e.d = floatFromF16(b.d) / 8;
        e.sub = 2 * static_cast<int>(word >> 28) + 1;
        negative = isNegative(static_cast<int>(word >> (l % 4 * 7) & 127), i);
        entry = kGridIQ2XXS[b.quants[k / 32 * 8 + l % 4]];
    } else if (type == DType::IQ2_XS) {
        const auto& b = *reinterpret_cast<const BlockIQ2_XS*>(bytes);
        e.d = floatFromF16(b.d) / 8;
        e.sub = 2 * nibbleOf(b.scales, k / 16) + 1;
        negative = isNegative(b.quants[l] >> 9, i);
        entry = kGridIQ2XS[b.quants[l] & 511];
    } else {
        const auto& b = *reinterpret_cast<const BlockIQ2_S*>(bytes);
        e.d = floatFromF16(b.d) / 8;
        e.sub = 2 * nibbleOf(b.scales, k / 16) + 1;
        negative = b.signs[l] >> i & 1;
        entry = kGridIQ2S[b.quants[l] + (b.high[l / 4] >> l % 4 * 2 & 3) * 256];
    }
    const int level = kIQ2Levels[entry >> 2 * i & 3];
    e.quant = negative ? -level : level;
    return e;
}

inline Element elementOfIQ3(sharpi::DType type, const uint8_t* bytes, int k) {
    using namespace sharpi;
    Element e;
    int level = 0;
    bool negative = false;
    if (type == DType::IQ3_XXS) {
        const auto& b = *reinterpret_cast<const BlockIQ3_XXS*>(bytes);
        const uint32_t word = wordOf(b.signs + k / 32 * 4);
        e.d = floatFromF16(b.d) / 4;
        e.sub = 2 * static_cast<int>(word >> 28) + 1;
        negative = isNegative(static_cast<int>(word >> (k / 8 % 4 * 7) & 127), k % 8);
        level = kIQ3XXSLevels[kGridIQ3XXS[b.quants[k / 4]] >> k % 4 * 4 & 7];
    } else {
        const auto& b = *reinterpret_cast<const BlockIQ3_S*>(bytes);
        e.d = floatFromF16(b.d);
        e.sub = 2 * nibbleOf(b.scales, k / 32) + 1;
        negative = b.signs[k / 8] >> k % 8 & 1;
        level = kIQ3SLevels[kGridIQ3S[b.quants[k / 4] + (b.high[k / 32] >> k / 4 % 8 & 1) * 256] >> k % 4 * 4 & 7];
    }
    e.quant = negative ? -level : level;
    return e;
}

inline Element elementOfIQ1(sharpi::DType type, const uint8_t* bytes, int k) {
    using namespace sharpi;
    const int l = k / 8;
    Element e;
    int entry = 0;
    bool down = false;
    if (type == DType::IQ1_S) {
        const auto& b = *reinterpret_cast<const BlockIQ1_S*>(bytes);
        const int high = b.high[k / 32];
        e.d = floatFromF16(b.d) / 8;
        e.sub = 2 * (high >> 12 & 7) + 1;
        down = high >> 15;
        entry = b.quants[l] + (high >> l % 4 * 3 & 7) * 256;
    } else {
        const auto& b = *reinterpret_cast<const BlockIQ1_M*>(bytes);
        int d = 0;
        for (int n = 0; n < 4; ++n) d += (b.scales[n] >> 12) << 4 * n;
        e.d = floatFromF16(static_cast<uint16_t>(d)) / 8;
        e.sub = 2 * (b.scales[k / 64] >> k / 16 % 4 * 3 & 7) + 1;
        const int high = nibbleOf(b.high, l);
        down = high >= 8;
        entry = b.quants[l] + high % 8 * 256;
    }
    e.quant = 8 * ((kGridIQ1[entry] >> k % 8 * 2 & 3) - 1) + (down ? -1 : 1);
    return e;
}

inline Element elementOfTernary(sharpi::DType type, const uint8_t* bytes, int k) {
    using namespace sharpi;
    Element e;
    if (type == DType::TQ2_0) {
        const auto& b = *reinterpret_cast<const BlockTQ2_0*>(bytes);
        e.d = floatFromF16(b.d);
        e.quant = (b.quants[k / 128 * 32 + k % 32] >> k / 32 % 4 * 2 & 3) - 1;
        return e;
    }
    const auto& b = *reinterpret_cast<const BlockTQ1_0*>(bytes);
    const int past = k < 160 ? k : k < 240 ? k - 160 : k - 240, width = k < 160 ? 32 : k < 240 ? 16 : 4;
    const uint8_t* from = k < 160 ? b.quants : k < 240 ? b.quants + 32 : b.high;
    const int power[] = {1, 3, 9, 27, 81};
    e.d = floatFromF16(b.d);
    e.quant = from[past % width] * power[past / width] % 256 * 3 / 256 - 1;
    return e;
}

inline float halfOfUe4m3(int byte) {
    const int exponent = byte / 8 % 16, fraction = byte % 8;
    if (byte == 0x7f) return 0;
    return static_cast<float>(exponent == 0 ? std::ldexp(fraction, -10) : std::ldexp(8 + fraction, exponent - 11));
}

// Whether the two halves of a block of 32 have different floats.
inline bool hasTwoFloats(sharpi::DType type) { return type == sharpi::DType::NVFP4; }

// Element k of the block at `bytes`.
inline Element elementOfOthers(sharpi::DType type, const uint8_t* bytes, int k) {
    using namespace sharpi;
    switch (type) {
    case DType::IQ2_XXS:
    case DType::IQ2_XS:
    case DType::IQ2_S: return elementOfIQ2(type, bytes, k);
    case DType::IQ3_XXS:
    case DType::IQ3_S: return elementOfIQ3(type, bytes, k);
    case DType::IQ1_S:
    case DType::IQ1_M: return elementOfIQ1(type, bytes, k);
    case DType::TQ1_0:
    case DType::TQ2_0: return elementOfTernary(type, bytes, k);
    default: break;
    }
    Element e;
    if (type == DType::NVFP4) {
        const auto& b = *reinterpret_cast<const BlockNVFP4*>(bytes);
        e.d = halfOfUe4m3(b.d[k / 16]);
        e.quant = kMXFP4Values[b.quants[k / 16 * 8 + k % 8] >> k % 16 / 8 * 4 & 15];
    } else {
        const auto& b = *reinterpret_cast<const BlockQ1_0*>(bytes);
        e.d = floatFromF16(b.d);
        e.quant = b.quants[k / 8] >> k % 8 & 1 ? 1 : -1;
    }
    return e;
}

// --- the other formats ---------------------------------------------------------------------------------------------

template <class Block> const Block& blockAt(const uint8_t* row, int64_t i) {
    const int64_t elements = sizeof(Block) > 34 ? 256 : 32;
    return reinterpret_cast<const Block*>(row)[i / elements];
}

inline int sixBits(const uint8_t* scales, int j, bool min) {
    if (j < 4) return scales[min ? 4 + j : j] & 63;
    const int low = min ? scales[4 + j] >> 4 : scales[4 + j] & 15;
    return low + (scales[min ? j : j - 4] >> 6) * 16;
}

inline Element element32(DType type, const uint8_t* row, int64_t i) {
    using namespace sharpi;
    Element e;
    const int k = static_cast<int>(i % 32), byte = k % 16, shift = k / 16 * 4;
    switch (type) {
    case DType::Q4_0: {
        const auto& b = blockAt<BlockQ4_0>(row, i);
        e.d = floatFromF16(b.d);
        e.quant = (b.quants[byte] >> shift & 15) - 8;
        break;
    }
    case DType::Q4_1: {
        const auto& b = blockAt<BlockQ4_1>(row, i);
        e.d = floatFromF16(b.d);
        e.m = floatFromF16(b.m);
        e.min = 1;
        e.quant = b.quants[byte] >> shift & 15;
        break;
    }
    case DType::Q5_0: {
        const auto& b = blockAt<BlockQ5_0>(row, i);
        e.d = floatFromF16(b.d);
        e.quant = (b.quants[byte] >> shift & 15) + (b.high[k / 8] >> k % 8 & 1) * 16 - 16;
        break;
    }
    case DType::Q5_1: {
        const auto& b = blockAt<BlockQ5_1>(row, i);
        e.d = floatFromF16(b.d);
        e.m = floatFromF16(b.m);
        e.min = 1;
        e.quant = (b.quants[byte] >> shift & 15) + (b.high[k / 8] >> k % 8 & 1) * 16;
        break;
    }
    case DType::Q8_0: {
        const auto& b = blockAt<BlockQ8_0>(row, i);
        e.d = floatFromF16(b.d);
        e.quant = b.quants[k];
        break;
    }
    case DType::IQ4_NL: {
        const auto& b = blockAt<BlockIQ4_NL>(row, i);
        e.d = floatFromF16(b.d);
        e.quant = kIQ4Values[b.quants[byte] >> shift & 15];
        break;
    }
    default: {
        const auto& b = blockAt<BlockMXFP4>(row, i);
        e.d = static_cast<float>(std::ldexp(1.0, b.e - 128));
        e.quant = kMXFP4Values[b.quants[byte] >> shift & 15];
        break;
    }
    }
    return e;
}

inline Element element256(DType type, const uint8_t* row, int64_t i) {
    using namespace sharpi;
    Element e;
    const int k = static_cast<int>(i % 256), l = k % 32, s = k / 32;
    switch (type) {
    case DType::Q2_K: {
        const auto& b = blockAt<BlockQ2_K>(row, i);
        e.d = floatFromF16(b.d);
        e.m = -floatFromF16(b.dmin);
        e.sub = b.scales[k / 16] & 15;
        e.min = b.scales[k / 16] >> 4;
        e.quant = b.quants[s / 4 * 32 + l] >> s % 4 * 2 & 3;
        break;
    }
    case DType::Q3_K: {
        const auto& b = blockAt<BlockQ3_K>(row, i);
        const int j = k / 16;
        e.d = floatFromF16(b.d);
        e.sub = (b.scales[j % 8] >> j / 8 * 4 & 15) + (b.scales[8 + j % 4] >> j / 4 * 2 & 3) * 16 - 32;
        e.quant = (b.quants[s / 4 * 32 + l] >> s % 4 * 2 & 3) + (b.high[l] >> s & 1) * 4 - 4;
        break;
    }
    case DType::Q4_K: {
        const auto& b = blockAt<BlockQ4_K>(row, i);
        e.d = floatFromF16(b.d);
        e.m = -floatFromF16(b.dmin);
        e.sub = sixBits(b.scales, s, false);
        e.min = sixBits(b.scales, s, true);
        e.quant = b.quants[s / 2 * 32 + l] >> s % 2 * 4 & 15;
        break;
    }
    case DType::Q5_K: {
        const auto& b = blockAt<BlockQ5_K>(row, i);
        e.d = floatFromF16(b.d);
        e.m = -floatFromF16(b.dmin);
        e.sub = sixBits(b.scales, s, false);
        e.min = sixBits(b.scales, s, true);
        e.quant = (b.quants[s / 2 * 32 + l] >> s % 2 * 4 & 15) + (b.high[l] >> s & 1) * 16;
        break;
    }
    case DType::Q6_K: {
        const auto& b = blockAt<BlockQ6_K>(row, i);
        e.d = floatFromF16(b.d);
        e.sub = b.scales[k / 16];
        e.quant = (b.low[s / 4 * 64 + s % 2 * 32 + l] >> s % 4 / 2 * 4 & 15) +
                  (b.high[s / 4 * 32 + l] >> s % 4 * 2 & 3) * 16 - 32;
        break;
    }
    case DType::IQ4_XS: {
        const auto& b = blockAt<BlockIQ4_XS>(row, i);
        e.d = floatFromF16(b.d);
        e.sub = (b.scalesLow[s / 2] >> s % 2 * 4 & 15) + (b.scalesHigh >> s * 2 & 3) * 16 - 32;
        e.quant = kIQ4Values[b.quants[s * 16 + l % 16] >> l / 16 * 4 & 15];
        break;
    }
    default: {
        const DTypeInfo& format = info(type);
        return elementOfOthers(type, row + i / format.blockElements * format.blockBytes,
                               static_cast<int>(i % format.blockElements));
    }
    }
    return e;
}

inline Element element(DType type, const uint8_t* row, int64_t i) {
    return sharpi::info(type).blockElements == 32 ? element32(type, row, i) : element256(type, row, i);
}

inline bool hasMin(DType type) {
    return type == DType::Q4_1 || type == DType::Q5_1 || type == DType::Q2_K || type == DType::Q4_K ||
           type == DType::Q5_K;
}

// The least number of 16 significant bits that is not below a positive x.
inline float upTo16Bits(float x) {
    int exponent = 0;
    const float fraction = std::frexp(x, &exponent);  // 0.5 .. 1
    return std::ldexp(std::ceil(std::ldexp(fraction, 16)), exponent - 16);
}

// Quantizes one block of 32: section 1 of the contract.
inline void quantizeBlock(const float* x, int8_t* q, float* scale, int16_t* sums) {
    float absmax = 0;
    bool finite = true;
    for (int i = 0; i < 32; ++i) {
        finite = finite && std::fabs(x[i]) < std::ldexp(1.0f, 100);  // false for NaN
        absmax = std::fmax(absmax, std::fabs(x[i]));
    }
    const bool zero = !finite || absmax < std::ldexp(1.0f, -100);
    *scale = !finite ? std::nanf("") : zero ? 0.0f : upTo16Bits(absmax / 127.0f);
    sums[0] = sums[1] = 0;
    for (int i = 0; i < 32; ++i) {
        const float inverse = zero ? 0.0f : 1.0f / *scale;
        q[i] = zero ? 0 : static_cast<int8_t>(std::nearbyint(x[i] * inverse));
        sums[i / 16] = static_cast<int16_t>(sums[i / 16] + q[i]);
    }
}

// Whether each half of a block of 32 has its own sub or d.
inline bool hasHalves(DType type) {
    return hasTwoFloats(type) || type == DType::Q2_K || type == DType::Q3_K || type == DType::Q6_K ||
           type == DType::IQ2_XS || type == DType::IQ2_S || type == DType::IQ1_M;
}

// Sections 2 and 4. `largest` receives the largest magnitude met of an integer that is multiplied by the scale.
inline float dot(DType type, const uint8_t* row, int64_t cols, const int8_t* q, const float* scale, const float* bias,
                 int64_t* largest = nullptr) {
    float acc[32] = {};
    for (int64_t b = 0; b < cols / 32; ++b) {
        int64_t integers[2] = {}, sums[2] = {};
        for (int64_t i = b * 32; i < b * 32 + 32; ++i) {
            integers[i / 16 % 2] += element(type, row, i).quant * q[i];
            sums[i / 16 % 2] += q[i];
        }
        const auto add = [&](float factor, int64_t integer) {
            if (largest) *largest = std::max(*largest, std::abs(integer));
            const float product = scale[b] * static_cast<float>(integer);
            acc[b % 32] = std::fma(factor, product, acc[b % 32]);
        };
        const Element halves[2] = {element(type, row, b * 32), element(type, row, b * 32 + 16)};
        const auto scaleOf = [](const Element& e) { return e.d * static_cast<float>(e.sub); };
        const auto minOf = [](const Element& e) { return e.m * static_cast<float>(e.min); };
        if (hasHalves(type)) {
            for (int half = 0; half < 2; ++half) add(scaleOf(halves[half]), integers[half]);
        } else {
            add(scaleOf(halves[0]), integers[0] + integers[1]);
        }
        if (type == DType::Q2_K) {
            for (int half = 0; half < 2; ++half) add(minOf(halves[half]), sums[half]);
        } else if (hasMin(type)) {
            add(minOf(halves[0]), sums[0] + sums[1]);
        }
    }
    for (int width = 16; width >= 1; width /= 2)
        for (int i = 0; i < width; ++i) acc[i] = acc[i] + acc[i + width];
    return bias ? acc[0] + *bias : acc[0];
}

enum class Fill { Random, AllOnes, AllZeros };

// The bytes of random blocks: any quants and sub-scales, and f16 scales of a moderate size and either sign.
inline std::vector<uint8_t> randomWeights(DType type, int64_t rows, int64_t cols, Fill fill, std::mt19937& random) {
    using namespace sharpi;
    const DTypeInfo& format = info(type);
    std::vector<uint8_t> bytes(static_cast<size_t>(rows) * rowBytes(type, cols));
    for (uint8_t& byte : bytes)
        byte = fill == Fill::Random ? static_cast<uint8_t>(random()) : fill == Fill::AllOnes ? 0xff : 0;
    const auto scale = [&](size_t at) {
        const float magnitude =
            std::ldexp(1.0f + static_cast<float>(random() % 1024) / 1024.0f, static_cast<int>(random() % 8) - 10);
        const uint16_t half = f16FromFloat(random() % 2 ? magnitude : -magnitude);
        std::memcpy(&bytes[at], &half, sizeof half);
    };
    // IQ1_M's scale is in the upper nibbles of four words.
    const auto scatter = [&](size_t at) {
        const uint8_t kept[2] = {bytes[at], bytes[at + 1]};
        scale(at);
        const int half = bytes[at] | bytes[at + 1] << 8;
        std::memcpy(&bytes[at], kept, sizeof kept);
        for (size_t n = 0; n < 4; ++n) {
            uint8_t& byte = bytes[at + 2 * n + 1];
            byte = static_cast<uint8_t>((byte & 15) | (half >> 4 * n & 15) << 4);
        }
    };
    for (size_t at = 0; at < bytes.size(); at += format.blockBytes) {
        switch (type) {
        case DType::Q2_K:
            scale(at + 80);
            scale(at + 82);
            break;
        case DType::Q3_K: scale(at + 108); break;
        case DType::Q6_K: scale(at + 208); break;
        case DType::TQ1_0: scale(at + 52); break;
        case DType::TQ2_0: scale(at + 64); break;
        case DType::IQ1_M: scatter(at + 48); break;
        case DType::MXFP4: bytes[at] = static_cast<uint8_t>(120 + random() % 8); break;
        case DType::NVFP4:
            for (size_t j = 0; j < 4; ++j) bytes[at + j] = static_cast<uint8_t>(random() % 128);
            break;
        case DType::Q4_1:
        case DType::Q5_1:
        case DType::Q4_K:
        case DType::Q5_K:
            scale(at);
            scale(at + 2);
            break;
        default: scale(at); break;
        }
    }
    return bytes;
}

}  // namespace reference
