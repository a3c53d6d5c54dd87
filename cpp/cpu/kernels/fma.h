// A float fused multiply-add that rounds once on every machine. contract.h is written in terms of it, so the table for
// processors without the instruction has to produce the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef SHARPI_ISA
#error "fma.h is for the per-instruction-set kernels"
#endif

namespace sharpi::cpu::SHARPI_ISA {

#if defined(__FMA__) || defined(__FP_FAST_FMAF)

static inline float fmaExact(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

#else

// The product of two floats is exact in a double. The sum is made in double and, if it is inexact, rounded to odd: 53
// bits are more than 2 * 24 + 1, so rounding that to float gives the correctly rounded result
// (S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd").
static inline float fmaExact(float a, float b, float c) {
    const double product = static_cast<double>(a) * static_cast<double>(b);
    const double addend = c;
    double sum = product + addend;
    const double back = sum - product;
    const double error = (product - (sum - back)) + (addend - back);
    if (error > 0.0 || error < 0.0) {  // false for NaN, which comes from infinities
        uint64_t bits;
        std::memcpy(&bits, &sum, sizeof bits);
        if ((bits & 1) == 0) {
            bits += (error > 0.0) == (sum > 0.0) ? 1 : static_cast<uint64_t>(-1);
            std::memcpy(&sum, &bits, sizeof sum);
        }
    }
    return static_cast<float>(sum);
}

#endif

}  // namespace sharpi::cpu::SHARPI_ISA
