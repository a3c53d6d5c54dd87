// This instruction set's widest vector of 32-bit lanes, under one set of names, for code in which a lane is a weight
// row.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/kernels/matmul/unpack_vector.h"

namespace sharpi::cpu::SHARPI_ISA {

#if defined(__AVX512VNNI__)

constexpr int kLaneRows = 16;
using VecF = __m512;
using VecI = __m512i;
SHARPI_INLINE VecF loadF(const float* p) { return _mm512_load_ps(p); }
SHARPI_INLINE void storeF(float* p, VecF v) { _mm512_store_ps(p, v); }
SHARPI_INLINE VecF set1F(float v) { return _mm512_set1_ps(v); }
SHARPI_INLINE VecF addF(VecF a, VecF b) { return _mm512_add_ps(a, b); }
SHARPI_INLINE VecF mul(VecF a, VecF b) { return _mm512_mul_ps(a, b); }
SHARPI_INLINE VecF fma(VecF a, VecF b, VecF c) { return _mm512_fmadd_ps(a, b, c); }
SHARPI_INLINE VecF toFloat(VecI v) { return _mm512_cvtepi32_ps(v); }
SHARPI_INLINE VecI loadI(const void* p) { return _mm512_load_si512(p); }
SHARPI_INLINE VecI set1I(int32_t v) { return _mm512_set1_epi32(v); }

SHARPI_INLINE VecI broadcastWord(const int8_t* p) {
    int32_t word;
    std::memcpy(&word, p, sizeof word);
    return _mm512_set1_epi32(word);
}

// 16 words of each of 16 rows, `stride` bytes apart: word k of row r goes to to[k] + 4 * r.
static inline void transposeWords(const uint8_t* from, size_t stride, uint8_t* const* to) {
    __m512i a[16], b[16];
    for (int r = 0; r < 16; ++r) a[r] = _mm512_load_si512(from + static_cast<size_t>(r) * stride);
    for (int r = 0; r < 16; r += 2) {
        b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
    for (int r = 0; r < 16; r += 4) {  // a[r + i]: word 4 * lane + i of four rows
        a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
        a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
        a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
        a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        const __m512i low01 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x44),
                      high01 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xee);
        const __m512i low23 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x44),
                      high23 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xee);
        _mm512_store_si512(to[i], _mm512_shuffle_i32x4(low01, low23, 0x88));
        _mm512_store_si512(to[4 + i], _mm512_shuffle_i32x4(low01, low23, 0xdd));
        _mm512_store_si512(to[8 + i], _mm512_shuffle_i32x4(high01, high23, 0x88));
        _mm512_store_si512(to[12 + i], _mm512_shuffle_i32x4(high01, high23, 0xdd));
    }
}

#else

constexpr int kLaneRows = 8;
using VecF = __m256;
using VecI = __m256i;
SHARPI_INLINE VecF loadF(const float* p) { return _mm256_load_ps(p); }
SHARPI_INLINE void storeF(float* p, VecF v) { _mm256_store_ps(p, v); }
SHARPI_INLINE VecF set1F(float v) { return _mm256_set1_ps(v); }
SHARPI_INLINE VecF addF(VecF a, VecF b) { return _mm256_add_ps(a, b); }
SHARPI_INLINE VecF mul(VecF a, VecF b) { return _mm256_mul_ps(a, b); }
SHARPI_INLINE VecF fma(VecF a, VecF b, VecF c) { return _mm256_fmadd_ps(a, b, c); }
SHARPI_INLINE VecF toFloat(VecI v) { return _mm256_cvtepi32_ps(v); }
SHARPI_INLINE VecI loadI(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }
SHARPI_INLINE VecI set1I(int32_t v) { return _mm256_set1_epi32(v); }
SHARPI_INLINE void storeI(void* p, VecI v) { _mm256_store_si256(static_cast<__m256i*>(p), v); }
SHARPI_INLINE VecI addI(VecI a, VecI b) { return _mm256_add_epi32(a, b); }

SHARPI_INLINE VecI broadcastWord(const int8_t* p) {
    int32_t word;
    std::memcpy(&word, p, sizeof word);
    return _mm256_set1_epi32(word);
}

// 8 words of each of 8 rows, `stride` bytes apart: word k of row r goes to to[k] + 4 * r.
static inline void transposeWords(const uint8_t* from, size_t stride, uint8_t* const* to) {
    __m256i a[8], b[8];
    for (int r = 0; r < 8; ++r) a[r] = loadBytes(from + static_cast<size_t>(r) * stride);
    for (int r = 0; r < 8; r += 2) {
        b[r] = _mm256_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm256_unpackhi_epi32(a[r], a[r + 1]);
    }
    for (int r = 0; r < 8; r += 4) {  // a[r + i]: word 4 * lane + i of four rows
        a[r] = _mm256_unpacklo_epi64(b[r], b[r + 2]);
        a[r + 1] = _mm256_unpackhi_epi64(b[r], b[r + 2]);
        a[r + 2] = _mm256_unpacklo_epi64(b[r + 1], b[r + 3]);
        a[r + 3] = _mm256_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        storeI(to[i], _mm256_permute2x128_si256(a[i], a[4 + i], 0x20));
        storeI(to[4 + i], _mm256_permute2x128_si256(a[i], a[4 + i], 0x31));
    }
}

#endif

}  // namespace sharpi::cpu::SHARPI_ISA
