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
#include "core/half.h"
#include "cpu/kernels.h"

namespace reference {

using sharpi::DType;

inline const std::vector<DType>& quantizedTypes() {
    static const std::vector<DType> types = {DType::Q4_0,   DType::Q4_1,   DType::Q5_0, DType::Q5_1, DType::Q8_0,
                                             DType::Q2_K,   DType::Q3_K,   DType::Q4_K, DType::Q5_K, DType::Q6_K,
                                             DType::IQ4_NL, DType::IQ4_XS, DType::MXFP4};
    return types;
}

// The element's value is d * sub * quant + m * min.
struct Element {
    int sub = 1, quant = 0, min = 0;
    float d = 0, m = 0;
};

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
    default: {
        const auto& b = blockAt<BlockIQ4_XS>(row, i);
        e.d = floatFromF16(b.d);
        e.sub = (b.scalesLow[s / 2] >> s % 2 * 4 & 15) + (b.scalesHigh >> s * 2 & 3) * 16 - 32;
        e.quant = kIQ4Values[b.quants[s * 16 + l % 16] >> l / 16 * 4 & 15];
        break;
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

// Quantizes one block of 32: section 1 of the contract.
inline void quantizeBlock(const float* x, int8_t* q, float* scale, int16_t* sums) {
    float absmax = 0;
    bool finite = true;
    for (int i = 0; i < 32; ++i) {
        finite = finite && std::isfinite(x[i]);
        absmax = std::fmax(absmax, std::fabs(x[i]));
    }
    const bool zero = !finite || absmax < std::ldexp(1.0f, -100);
    *scale = !finite ? std::nanf("") : zero ? 0.0f : absmax / 127.0f;
    sums[0] = sums[1] = 0;
    for (int i = 0; i < 32; ++i) {
        const float inverse = zero ? 0.0f : 127.0f / absmax;
        q[i] = zero ? 0 : static_cast<int8_t>(std::nearbyint(x[i] * inverse));
        sums[i / 16] = static_cast<int16_t>(sums[i / 16] + q[i]);
    }
}

// Sections 2 and 4. `largest` receives the largest |J| or |M| met.
inline float dot(DType type, const uint8_t* row, int64_t cols, const int8_t* q, const float* scale, const float* bias,
                 int64_t* largest = nullptr) {
    float acc[32] = {};
    for (int64_t b = 0; b < cols / 32; ++b) {
        int64_t dotInteger = 0, minInteger = 0;
        Element e;
        for (int64_t i = b * 32; i < b * 32 + 32; ++i) {
            e = element(type, row, i);
            dotInteger += static_cast<int64_t>(e.sub) * e.quant * q[i];
            minInteger += static_cast<int64_t>(e.min) * q[i];
        }
        if (largest) *largest = std::max({*largest, std::abs(dotInteger), std::abs(minInteger)});
        const float ds = e.d * scale[b];
        acc[b % 32] = std::fma(ds, static_cast<float>(dotInteger), acc[b % 32]);
        if (!hasMin(type)) continue;
        const float ms = e.m * scale[b];
        acc[b % 32] = std::fma(ms, static_cast<float>(minInteger), acc[b % 32]);
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
    for (size_t at = 0; at < bytes.size(); at += format.blockBytes) {
        switch (type) {
        case DType::Q2_K:
            scale(at + 80);
            scale(at + 82);
            break;
        case DType::Q3_K: scale(at + 108); break;
        case DType::Q6_K: scale(at + 208); break;
        case DType::MXFP4: bytes[at] = static_cast<uint8_t>(120 + random() % 8); break;
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
