// Arithmetic that the CPU and the GPU must do alike, written once for both compilers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define SHARPI_PORTABLE __host__ __device__ __forceinline__
#else
#define SHARPI_PORTABLE inline
#endif

namespace sharpi {

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

}  // namespace sharpi
