// Exact scalar conversions between float and the 16-bit floats of GGUF files, and the 8-bit scales of MXFP4 and NVFP4.
// Everything is static: sources built for different instruction sets each keep their own copy.
#pragma once

#include <cstdint>
#include <cstring>

namespace sharpi {

static inline float floatFromBits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bitsFromFloat(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// IEEE 754 binary16. Exact; a NaN keeps its payload and becomes quiet, as in hardware.
static inline float floatFromF16(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 0x1fu;
    const uint32_t fraction = half & 0x3ffu;
    if (exponent == 0x1f) return floatFromBits(sign | 0x7f800000u | (fraction << 13) | (fraction ? 0x00400000u : 0u));
    if (exponent == 0) {  // fraction * 2^-24, a normal float or zero
        const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;
        return floatFromBits(sign | bitsFromFloat(magnitude));
    }
    return floatFromBits(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

// Rounds to nearest, ties to even; numbers that are too large become infinity.
static inline uint16_t f16FromFloat(float value) {
    const uint32_t bits = bitsFromFloat(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        // Adding 0.5 leaves multiples of 2^-24, the subnormal step, in the low bits, rounded by the addition.
        const float shifted = floatFromBits(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (bitsFromFloat(shifted) - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

static inline float floatFromBf16(uint16_t value) { return floatFromBits(static_cast<uint32_t>(value) << 16); }

// Rounds to nearest, ties to even; a NaN stays a (quiet) NaN.
static inline uint16_t bf16FromFloat(float value) {
    const uint32_t bits = bitsFromFloat(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Half of the power of two that an E8M0 byte means: 2^(e - 128). It is halved because MXFP4's values are stored
// doubled, so that they are integers. The two smallest results are subnormal floats.
static inline float halfFromE8m0(uint8_t e) {
    return floatFromBits(e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23);
}

// Half of what a UE4M3 byte means: four bits of exponent above three of fraction, without a sign (the highest bit is
// ignored). It is halved for the same reason. 0x7f is NaN in the format's definition; files mean 0 by it.
static inline float halfFromUe4m3(uint8_t byte) {
    const uint32_t exponent = (byte >> 3) & 15u, fraction = byte & 7u;
    if (byte == 0x7f) return 0.0f;
    if (exponent == 0) return static_cast<float>(fraction) * 0.0009765625f;  // 2^-10
    return floatFromBits(((exponent + 119u) << 23) | (fraction << 20));
}

}  // namespace sharpi
