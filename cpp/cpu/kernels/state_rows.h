// What the kernels of recurrent layers share: a panel of 16 columns of a head's matrix, which stays in the first-level
// cache for all rows, and sums over its lines.
#pragma once

#include "cpu/kernels/internal.h"
#include "cpu/kernels/vec.h"

namespace sharpi::cpu::SHARPI_ISA {

constexpr int kSums = 8;

SHARPI_INLINE Vec some(const float* p, int lanes) { return lanes == kLanes ? vload(p) : vloadPart(p, lanes); }
SHARPI_INLINE void putSome(float* p, Vec a, int lanes) { lanes == kLanes ? vstore(p, a) : vstorePart(p, a, lanes); }

// Columns of a matrix of that many lines, each `stride` floats. from: nullptr: zeros.
SHARPI_INLINE void loadPanel(float* panel, const float* from, int32_t lines, int64_t stride, int lanes) {
    for (int32_t i = 0; i < lines; i++) vstore(panel + i * kLanes, from ? some(from + i * stride, lanes) : vzero());
}
SHARPI_INLINE void storePanel(const float* panel, float* to, int32_t lines, int64_t stride, int lanes) {
    for (int32_t i = 0; i < lines; i++) putSome(to + i * stride, vload(panel + i * kLanes), lanes);
}

SHARPI_INLINE Vec total(Vec* acc) {
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) acc[n] = vadd(acc[n], acc[n + 4]);
    acc[0] = vadd(acc[0], acc[2]);
    acc[1] = vadd(acc[1], acc[3]);
    return vadd(acc[0], acc[1]);
}

// The sum over i of fma(update(i), x[i], .), where update(i) changes line i of the panel and returns it. Element i goes
// to accumulator i mod 8.
template <class Update> SHARPI_INLINE Vec updateAndSum(const float* x, int32_t lines, Update update) {
    Vec acc[kSums];
#pragma GCC unroll 8
    for (int n = 0; n < kSums; n++) acc[n] = vzero();
    int32_t i = 0;
    for (; i + kSums <= lines; i += kSums) {
#pragma GCC unroll 8
        for (int n = 0; n < kSums; n++) acc[n] = vfma(update(i + n), vset(x[i + n]), acc[n]);
    }
    for (int n = 0; i + n < lines; n++) acc[n] = vfma(update(i + n), vset(x[i + n]), acc[n]);
    return total(acc);
}

}  // namespace sharpi::cpu::SHARPI_ISA
