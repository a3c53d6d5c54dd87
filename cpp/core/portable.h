// Arithmetic in which the CPU and the GPU must agree to the bit, written once for both compilers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define SHARPI_PORTABLE __host__ __device__ __forceinline__
#else
// Always inlined: the CPU's kernels must not share the linker's copy of a function (cpu/kernels/internal.h).
#define SHARPI_PORTABLE inline __attribute__((always_inline))
#endif

namespace sharpi {

// The bits of a positive float rounded up to 16 significant bits. The carry into the exponent is right: the float after
// the largest fraction is the next power of two.
SHARPI_PORTABLE uint32_t roundedUpScale(uint32_t bits) { return (bits + 0xffu) & ~0xffu; }

// The exponential of cpu/kernels/exp.h, operation for operation.
SHARPI_PORTABLE float portableExp(float x) {
    const float bounded = x > 88.0f ? 88.0f : x;
    const float magic = 0x1.8p+23f;
    const float t = fmaf(bounded, 0x1.715476p+0f, magic);
    const float n = t - magic;
    float r = fmaf(n, -0x1.62e4p-1f, bounded);
    r = fmaf(n, -0x1.7f7d1cp-20f, r);
    float p = 0x1.6d112cp-10f;
    p = fmaf(p, r, 0x1.120b90p-7f);
    p = fmaf(p, r, 0x1.55551ap-5f);
    p = fmaf(p, r, 0x1.5554dcp-3f);
    p = fmaf(p, r, 0.5f);
#if defined(__CUDA_ARCH__)
    p = fmaf(__fmul_rn(p, r), r, r);
    const float power = __uint_as_float((__float_as_uint(t) << 23) + 0x3f800000u);
    const float result = __fmul_rn(__fadd_rn(p, 1.0f), power);
#else
    const float pr = p * r;
    p = fmaf(pr, r, r);
    uint32_t bits;
    std::memcpy(&bits, &t, sizeof bits);
    bits = (bits << 23) + 0x3f800000u;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    const float result = (p + 1.0f) * power;
#endif
    return x < -87.0f ? 0.0f : result;
}

// The natural logarithm of a normal number above 0. With x = m * 2^e and m in (0.707, 1.415], log(m) = 2 atanh(s) with
// s = (m - 1) / (m + 1), |s| < 0.1716. The series of atanh is cut after s^21, where the rest is below 1e-18 of the sum.
// Within 3 units in the last place of the true value.
SHARPI_PORTABLE double portableLog(double x) {
#if defined(__CUDA_ARCH__)
    const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(x));
    double m = __longlong_as_double(static_cast<int64_t>((bits & 0xfffffffffffffull) | 0x3ff0000000000000ull));
#else
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint64_t fraction = (bits & 0xfffffffffffffull) | 0x3ff0000000000000ull;
    double m;
    std::memcpy(&m, &fraction, sizeof m);
#endif
    double e = static_cast<double>(static_cast<int32_t>(bits >> 52) - 1023);
    if (m > 0x1.6a09e667f3bcdp+0) {
        m = m * 0.5;
        e = e + 1.0;
    }
    const double s = (m - 1.0) / (m + 1.0);
    const double square = s * s;
    double p = 1.0 / 21.0;
    p = fma(p, square, 1.0 / 19.0);
    p = fma(p, square, 1.0 / 17.0);
    p = fma(p, square, 1.0 / 15.0);
    p = fma(p, square, 1.0 / 13.0);
    p = fma(p, square, 1.0 / 11.0);
    p = fma(p, square, 1.0 / 9.0);
    p = fma(p, square, 1.0 / 7.0);
    p = fma(p, square, 1.0 / 5.0);
    p = fma(p, square, 1.0 / 3.0);
    const double tail = 2.0 * s;
    const double log = fma(tail * square, p, tail);
    // ln 2 in two parts; the product of e and the first is exact.
    return fma(e, 0x1.62e42fefa3800p-1, fma(e, 0x1.ef35793c76730p-45, log));
}

// 1 / (1 + exp(0 - x))
SHARPI_PORTABLE float portableSigmoid(float x) { return 1.0f / (1.0f + portableExp(0.0f - x)); }

// log(1 + exp(x)) = max(x, 0) + log(1 + u) with u = exp(-|x|), and log(1 + u) = 2 atanh(s) with s = u / (2 + u) <= 1/3.
// The series of atanh is cut after s^13; the rest is below 2e-8 of the sum.
SHARPI_PORTABLE float portableSoftplus(float x) {
    const float u = portableExp(0.0f - fabsf(x));
    const float s = u / (2.0f + u);
    const float square = s * s;
    float p = 1.0f / 13.0f;
    p = fmaf(p, square, 1.0f / 11.0f);
    p = fmaf(p, square, 1.0f / 9.0f);
    p = fmaf(p, square, 1.0f / 7.0f);
    p = fmaf(p, square, 1.0f / 5.0f);
    p = fmaf(p, square, 1.0f / 3.0f);
    p = fmaf(p, square, 1.0f);
    const float tail = 2.0f * s;
    return fmaf(p, tail, x > 0.0f ? x : 0.0f);
}

// tanh(x) = 1 - 2 / (1 + exp(2 x))
SHARPI_PORTABLE float portableTanh(float x) { return 1.0f - 2.0f / (1.0f + portableExp(2.0f * x)); }

// cap * tanh(x / cap)
SHARPI_PORTABLE float portableSoftcap(float x, float cap) { return cap * portableTanh(x / cap); }

}  // namespace sharpi
