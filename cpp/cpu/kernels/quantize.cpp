// Activations to int8 blocks of 32, as section 1 of contract.h says.
//
// The largest magnitude is found by comparing the bits as integers, where NaN > infinity > every finite number, so the
// order of the comparisons does not matter. All loops are plain: compilers vectorize them, and every step is exact or
// rounds once, so each instruction set gives the same bits.
#include <cstring>

#include "core/contract.h"
#include "core/half.h"
#include "core/portable.h"
#include "cpu/kernels/internal.h"

namespace sharpi::cpu::SHARPI_ISA {

// rint for |value| <= 2^22: adding 1.5 * 2^23 leaves the rounded integer in the low bits.
static inline int32_t roundEven(float value) {
    return static_cast<int32_t>(bitsFromFloat(value + 12582912.0f)) - 0x4b400000;
}

static void quantizeBlock(const float* x, int8_t* q, float* scale, int16_t* sums) {
    uint32_t largest = 0;
    for (int i = 0; i < 32; ++i) {
        const uint32_t magnitude = bitsFromFloat(x[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const float absmax = floatFromBits(largest);
    const bool isHuge = largest >= bitsFromFloat(kHugeActivation);  // or NaN
    if (isHuge || absmax < kTinyActivation) {
        *scale = isHuge ? floatFromBits(0x7fc00000u) : 0.0f;
        std::memset(q, 0, 32);
        sums[0] = sums[1] = 0;
        return;
    }
    *scale = floatFromBits(roundedUpScale(bitsFromFloat(absmax / 127.0f)));
    const float inverse = 1.0f / *scale;
    for (int half = 0; half < 2; ++half) {
        int32_t sum = 0;
        for (int i = half * 16; i < half * 16 + 16; ++i) {
            const int32_t rounded = roundEven(x[i] * inverse);
            q[i] = static_cast<int8_t>(rounded);
            sum += rounded;
        }
        sums[half] = static_cast<int16_t>(sum);
    }
}

void quantizeRow(const float* x, int64_t cols, int8_t* q, float* scale, int16_t* sums) {
    const int64_t blocks = cols / 32;
    for (int64_t b = 0; b < blocks; ++b) quantizeBlock(x + b * 32, q + b * 32, scale + b, sums + b * 2);
    // The padding up to a whole group, which vector code reads.
    const size_t padding = static_cast<size_t>((blocks + 7) / 8 * 8 - blocks);
    std::memset(q + blocks * 32, 0, padding * 32);
    std::memset(scale + blocks, 0, padding * sizeof(float));
    std::memset(sums + blocks * 2, 0, padding * 2 * sizeof(int16_t));
}

}  // namespace sharpi::cpu::SHARPI_ISA
