// A 16 x 16 transpose of 32-bit lanes held in Vecs, floats or pairs of 16-bit numbers: attention transposes a page's
// keys so that a vector holds one dimension of 16 keys. It only moves bits, so each instruction set may do it in its
// own way.
#pragma once

#include "cpu/kernels/vec.h"

namespace sharpi::cpu::SHARPI_ISA {

#if defined(__AVX512F__)

SHARPI_INLINE void storeTransposed(const Vec* rows, float* out, int64_t stride) {
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 8; i++) {
        a[2 * i] = _mm512_unpacklo_ps(rows[2 * i].v, rows[2 * i + 1].v);
        a[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i].v, rows[2 * i + 1].v);
    }
    // b[4g + j]: dimension j of each quarter, rows 4g .. 4g + 3.
#pragma GCC unroll 16
    for (int g = 0; g < 4; g++) {
        b[4 * g] = _mm512_shuffle_ps(a[4 * g], a[4 * g + 2], 0x44);
        b[4 * g + 1] = _mm512_shuffle_ps(a[4 * g], a[4 * g + 2], 0xee);
        b[4 * g + 2] = _mm512_shuffle_ps(a[4 * g + 1], a[4 * g + 3], 0x44);
        b[4 * g + 3] = _mm512_shuffle_ps(a[4 * g + 1], a[4 * g + 3], 0xee);
    }
#pragma GCC unroll 16
    for (int j = 0; j < 4; j++) {
        const __m512 even01 = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88);
        const __m512 odd01 = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);
        const __m512 even23 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88);
        const __m512 odd23 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
        _mm512_storeu_ps(out + j * stride, _mm512_shuffle_f32x4(even01, even23, 0x88));
        _mm512_storeu_ps(out + (4 + j) * stride, _mm512_shuffle_f32x4(odd01, odd23, 0x88));
        _mm512_storeu_ps(out + (8 + j) * stride, _mm512_shuffle_f32x4(even01, even23, 0xdd));
        _mm512_storeu_ps(out + (12 + j) * stride, _mm512_shuffle_f32x4(odd01, odd23, 0xdd));
    }
}

#elif defined(__AVX2__)

SHARPI_INLINE void storeTransposed8(const __m256* r, float* out, int64_t stride) {
    __m256 a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 8
    for (int g = 0; g < 2; g++) {
        b[4 * g] = _mm256_shuffle_ps(a[4 * g], a[4 * g + 2], 0x44);
        b[4 * g + 1] = _mm256_shuffle_ps(a[4 * g], a[4 * g + 2], 0xee);
        b[4 * g + 2] = _mm256_shuffle_ps(a[4 * g + 1], a[4 * g + 3], 0x44);
        b[4 * g + 3] = _mm256_shuffle_ps(a[4 * g + 1], a[4 * g + 3], 0xee);
    }
#pragma GCC unroll 8
    for (int j = 0; j < 4; j++) {
        _mm256_storeu_ps(out + j * stride, _mm256_permute2f128_ps(b[j], b[4 + j], 0x20));
        _mm256_storeu_ps(out + (4 + j) * stride, _mm256_permute2f128_ps(b[j], b[4 + j], 0x31));
    }
}

SHARPI_INLINE void storeTransposed(const Vec* rows, float* out, int64_t stride) {
    __m256 half[8];
    for (int top = 0; top < 16; top += 8) {
        for (int i = 0; i < 8; i++) half[i] = rows[top + i].lo;
        storeTransposed8(half, out + top, stride);
        for (int i = 0; i < 8; i++) half[i] = rows[top + i].hi;
        storeTransposed8(half, out + 8 * stride + top, stride);
    }
}

#else

SHARPI_INLINE void storeTransposed(const Vec* rows, float* out, int64_t stride) {
    for (int d = 0; d < kLanes; d++)
        for (int i = 0; i < kLanes; i++) out[d * stride + i] = rows[i].v[d];
}

#endif

}  // namespace sharpi::cpu::SHARPI_ISA
