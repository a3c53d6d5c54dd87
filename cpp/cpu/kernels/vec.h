// Sixteen floats as one value, the same on every instruction set, so that each float kernel is written once and
// gives the same bits everywhere: one __m512, two __m256, or a plain array.
//
// Sums over n elements are made in one order everywhere: 32 accumulators (Acc32) start at +0; element i is added to
// accumulator i mod 32, in ascending order, by one fma if it is a product; n is padded to a multiple of 32 with zeros;
// then acc[i] += acc[i + 16], += acc[i + 8], += acc[i + 4], += acc[i + 2], += acc[i + 1].
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/half.h"
#include "cpu/kernels/fma.h"

#if defined(__AVX512F__) || defined(__AVX2__)
// GCC 12 warns of the deliberately undefined operands inside its own AVX-512 intrinsics.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define SHARPI_INLINE static inline __attribute__((always_inline))

namespace sharpi::cpu::SHARPI_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512F__)

struct Vec {
    __m512 v;
};

SHARPI_INLINE Vec vset(float x) { return {_mm512_set1_ps(x)}; }
SHARPI_INLINE Vec vload(const float* p) { return {_mm512_loadu_ps(p)}; }
SHARPI_INLINE void vstore(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
SHARPI_INLINE __mmask16 firstLanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
SHARPI_INLINE Vec vloadPart(const float* p, int n) { return {_mm512_maskz_loadu_ps(firstLanes(n), p)}; }
SHARPI_INLINE void vstorePart(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, firstLanes(n), a.v); }
SHARPI_INLINE Vec vadd(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
SHARPI_INLINE Vec vsub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
SHARPI_INLINE Vec vmul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
SHARPI_INLINE Vec vdiv(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
SHARPI_INLINE Vec vfma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
SHARPI_INLINE Vec vmax(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
SHARPI_INLINE Vec vmin(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
// 2^n for the integer n in the low bits of each lane.
SHARPI_INLINE Vec vpow2FromLowBits(Vec t) {
    const __m512i e = _mm512_slli_epi32(_mm512_castps_si512(t.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(e, _mm512_set1_epi32(0x3f800000)))};
}
SHARPI_INLINE Vec vzeroWhereBelow(Vec x, float bound, Vec value) {
    const __mmask16 below = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(bound), _CMP_LT_OQ);
    return {_mm512_mask_mov_ps(value.v, below, _mm512_setzero_ps())};
}
SHARPI_INLINE Vec vfromBf16(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
SHARPI_INLINE Vec vfromF16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// vloadBits: sixteen lanes of 32 bits of any content. vlow...: the 16-bit floats in the lower halves of such lanes, as
// floats; vhigh...: those in the upper halves.
SHARPI_INLINE Vec vloadBits(const void* p) { return {_mm512_loadu_ps(p)}; }
SHARPI_INLINE Vec vlowBf16(Vec a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), 16))}; }
SHARPI_INLINE Vec vhighBf16(Vec a) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(-0x10000)))};
}
SHARPI_INLINE Vec vlowF16(Vec a) { return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_castps_si512(a.v)))}; }
SHARPI_INLINE Vec vhighF16(Vec a) {
    return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(a.v), 16)))};
}
SHARPI_INLINE float vlane0(Vec a) { return _mm512_cvtss_f32(a.v); }
SHARPI_INLINE Vec vhalve8(Vec a) { return {_mm512_shuffle_f32x4(a.v, a.v, 0x4e)}; }
SHARPI_INLINE Vec vhalve4(Vec a) { return {_mm512_shuffle_f32x4(a.v, a.v, 0xb1)}; }
SHARPI_INLINE Vec vhalve2(Vec a) { return {_mm512_permute_ps(a.v, 0x4e)}; }
SHARPI_INLINE Vec vhalve1(Vec a) { return {_mm512_permute_ps(a.v, 0xb1)}; }

#elif defined(__AVX2__)

struct Vec {
    __m256 lo, hi;
};

SHARPI_INLINE Vec vset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SHARPI_INLINE Vec vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SHARPI_INLINE void vstore(float* p, Vec a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
SHARPI_INLINE Vec vadd(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
SHARPI_INLINE Vec vsub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
SHARPI_INLINE Vec vmul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
SHARPI_INLINE Vec vdiv(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
SHARPI_INLINE Vec vfma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
SHARPI_INLINE Vec vmax(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
SHARPI_INLINE Vec vmin(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
SHARPI_INLINE __m256 pow2FromLowBits(__m256 t) {
    const __m256i e = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(e, _mm256_set1_epi32(0x3f800000)));
}
SHARPI_INLINE Vec vpow2FromLowBits(Vec t) { return {pow2FromLowBits(t.lo), pow2FromLowBits(t.hi)}; }
SHARPI_INLINE Vec vzeroWhereBelow(Vec x, float bound, Vec value) {
    const __m256 b = _mm256_set1_ps(bound);
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.lo, b, _CMP_LT_OQ), value.lo),
            _mm256_andnot_ps(_mm256_cmp_ps(x.hi, b, _CMP_LT_OQ), value.hi)};
}
SHARPI_INLINE __m256 fromBf16(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
SHARPI_INLINE Vec vfromBf16(const uint16_t* p) { return {fromBf16(p), fromBf16(p + 8)}; }
SHARPI_INLINE Vec vfromF16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
SHARPI_INLINE Vec vloadBits(const void* p) { return vload(static_cast<const float*>(p)); }
SHARPI_INLINE __m256 lowBf16(__m256 a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 16)); }
SHARPI_INLINE __m256 highBf16(__m256 a) { return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(-0x10000))); }
SHARPI_INLINE __m256 fromLowF16(__m256i lanes) {
    const __m256i packed = _mm256_packus_epi32(lanes, lanes);  // each half of the register holds its four numbers twice
    return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}
SHARPI_INLINE __m256 lowF16(__m256 a) {
    return fromLowF16(_mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0xffff)));
}
SHARPI_INLINE __m256 highF16(__m256 a) { return fromLowF16(_mm256_srli_epi32(_mm256_castps_si256(a), 16)); }
SHARPI_INLINE Vec vlowBf16(Vec a) { return {lowBf16(a.lo), lowBf16(a.hi)}; }
SHARPI_INLINE Vec vhighBf16(Vec a) { return {highBf16(a.lo), highBf16(a.hi)}; }
SHARPI_INLINE Vec vlowF16(Vec a) { return {lowF16(a.lo), lowF16(a.hi)}; }
SHARPI_INLINE Vec vhighF16(Vec a) { return {highF16(a.lo), highF16(a.hi)}; }
SHARPI_INLINE float vlane0(Vec a) { return _mm256_cvtss_f32(a.lo); }
SHARPI_INLINE Vec vhalve8(Vec a) { return {a.hi, a.lo}; }
SHARPI_INLINE Vec vhalve4(Vec a) {
    return {_mm256_permute2f128_ps(a.lo, a.lo, 1), _mm256_permute2f128_ps(a.hi, a.hi, 1)};
}
SHARPI_INLINE Vec vhalve2(Vec a) { return {_mm256_permute_ps(a.lo, 0x4e), _mm256_permute_ps(a.hi, 0x4e)}; }
SHARPI_INLINE Vec vhalve1(Vec a) { return {_mm256_permute_ps(a.lo, 0xb1), _mm256_permute_ps(a.hi, 0xb1)}; }

#else

struct Vec {
    float v[kLanes];
};

#define SHARPI_EACH_LANE(expression)                        \
    Vec r;                                                  \
    for (int i = 0; i < kLanes; i++) r.v[i] = (expression); \
    return r

SHARPI_INLINE Vec vset(float x) { SHARPI_EACH_LANE(x); }
SHARPI_INLINE Vec vload(const float* p) { SHARPI_EACH_LANE(p[i]); }
SHARPI_INLINE void vstore(float* p, Vec a) {
    for (int i = 0; i < kLanes; i++) p[i] = a.v[i];
}
SHARPI_INLINE Vec vadd(Vec a, Vec b) { SHARPI_EACH_LANE(a.v[i] + b.v[i]); }
SHARPI_INLINE Vec vsub(Vec a, Vec b) { SHARPI_EACH_LANE(a.v[i] - b.v[i]); }
SHARPI_INLINE Vec vmul(Vec a, Vec b) { SHARPI_EACH_LANE(a.v[i] * b.v[i]); }
SHARPI_INLINE Vec vdiv(Vec a, Vec b) { SHARPI_EACH_LANE(a.v[i] / b.v[i]); }
SHARPI_INLINE Vec vfma(Vec a, Vec b, Vec c) { SHARPI_EACH_LANE(fmaExact(a.v[i], b.v[i], c.v[i])); }
SHARPI_INLINE Vec vmax(Vec a, Vec b) { SHARPI_EACH_LANE(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
SHARPI_INLINE Vec vmin(Vec a, Vec b) { SHARPI_EACH_LANE(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
SHARPI_INLINE Vec vpow2FromLowBits(Vec t) {
    SHARPI_EACH_LANE(floatFromBits((bitsFromFloat(t.v[i]) << 23) + 0x3f800000u));
}
SHARPI_INLINE Vec vzeroWhereBelow(Vec x, float bound, Vec value) {
    SHARPI_EACH_LANE(x.v[i] < bound ? 0.0f : value.v[i]);
}
SHARPI_INLINE Vec vfromBf16(const uint16_t* p) { SHARPI_EACH_LANE(floatFromBf16(p[i])); }
SHARPI_INLINE Vec vfromF16(const uint16_t* p) { SHARPI_EACH_LANE(floatFromF16(p[i])); }
SHARPI_INLINE Vec vloadBits(const void* p) {
    Vec r;
    __builtin_memcpy(r.v, p, sizeof r.v);
    return r;
}
SHARPI_INLINE uint16_t low16(float a) { return static_cast<uint16_t>(bitsFromFloat(a)); }
SHARPI_INLINE uint16_t high16(float a) { return static_cast<uint16_t>(bitsFromFloat(a) >> 16); }
SHARPI_INLINE Vec vlowBf16(Vec a) { SHARPI_EACH_LANE(floatFromBf16(low16(a.v[i]))); }
SHARPI_INLINE Vec vhighBf16(Vec a) { SHARPI_EACH_LANE(floatFromBf16(high16(a.v[i]))); }
SHARPI_INLINE Vec vlowF16(Vec a) { SHARPI_EACH_LANE(floatFromF16(low16(a.v[i]))); }
SHARPI_INLINE Vec vhighF16(Vec a) { SHARPI_EACH_LANE(floatFromF16(high16(a.v[i]))); }
SHARPI_INLINE float vlane0(Vec a) { return a.v[0]; }
SHARPI_INLINE Vec vhalve8(Vec a) { SHARPI_EACH_LANE(a.v[i ^ 8]); }
SHARPI_INLINE Vec vhalve4(Vec a) { SHARPI_EACH_LANE(a.v[i ^ 4]); }
SHARPI_INLINE Vec vhalve2(Vec a) { SHARPI_EACH_LANE(a.v[i ^ 2]); }
SHARPI_INLINE Vec vhalve1(Vec a) { SHARPI_EACH_LANE(a.v[i ^ 1]); }

#undef SHARPI_EACH_LANE

#endif

#if !defined(__AVX512F__)
SHARPI_INLINE Vec vloadPart(const float* p, int n) {
    float lanes[kLanes] = {};
    for (int i = 0; i < n; i++) lanes[i] = p[i];
    return vload(lanes);
}
SHARPI_INLINE void vstorePart(float* p, Vec a, int n) {
    float lanes[kLanes];
    vstore(lanes, a);
    for (int i = 0; i < n; i++) p[i] = lanes[i];
}
#endif

SHARPI_INLINE Vec vzero() { return vset(0.0f); }

// Adds lanes i ^ 8, ^ 4, ^ 2, ^ 1 in turn: lane 0 gets the sum in the order of the opening comment.
SHARPI_INLINE float vsum(Vec a) {
    a = vadd(a, vhalve8(a));
    a = vadd(a, vhalve4(a));
    a = vadd(a, vhalve2(a));
    return vlane0(vadd(a, vhalve1(a)));
}

SHARPI_INLINE float vmaxLane(Vec a) {
    a = vmax(a, vhalve8(a));
    a = vmax(a, vhalve4(a));
    a = vmax(a, vhalve2(a));
    return vlane0(vmax(a, vhalve1(a)));
}

// How 16 consecutive elements of a stored type become floats; all conversions are exact.
struct ReadF32 {
    using Element = float;
    SHARPI_INLINE Vec load(const float* p) { return vload(p); }
};
struct ReadBf16 {
    using Element = uint16_t;
    SHARPI_INLINE Vec load(const uint16_t* p) { return vfromBf16(p); }
    SHARPI_INLINE Vec low(Vec pairs) { return vlowBf16(pairs); }
    SHARPI_INLINE Vec high(Vec pairs) { return vhighBf16(pairs); }
};
struct ReadF16 {
    using Element = uint16_t;
    SHARPI_INLINE Vec load(const uint16_t* p) { return vfromF16(p); }
    SHARPI_INLINE Vec low(Vec pairs) { return vlowF16(pairs); }
    SHARPI_INLINE Vec high(Vec pairs) { return vhighF16(pairs); }
};
// Two elements of 16 bits in each lane; low() and high() of ReadBf16 or ReadF16 convert them.
struct ReadPairs {
    using Element = uint32_t;
    SHARPI_INLINE Vec load(const uint32_t* p) { return vloadBits(p); }
};

// The first n (0..16) elements, zeros after them.
template <class Read> SHARPI_INLINE Vec loadFirst(const typename Read::Element* p, int64_t n) {
    if (n >= kLanes) return Read::load(p);
    typename Read::Element lanes[kLanes] = {};
    if (n > 0) __builtin_memcpy(lanes, p, static_cast<size_t>(n) * sizeof lanes[0]);
    return Read::load(lanes);
}

struct Acc32 {
    Vec lo, hi;
};

SHARPI_INLINE float sum32(Acc32 a) { return vsum(vadd(a.lo, a.hi)); }

}  // namespace sharpi::cpu::SHARPI_ISA
