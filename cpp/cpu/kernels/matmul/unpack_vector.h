// Unpacks quantized blocks to registers: 256 elements as eight vectors of bytes in their natural order, one for each
// block of 32.
//
// Written once, in 256-bit vectors, for AVX2 and AVX-512: unpacking is a small part of the work of both, and a block of
// 32 is one such vector. Quants stay unsigned (see Format::kOffset), because x86's byte products take one unsigned
// operand. No load reads outside the given blocks.
#pragma once

// GCC 12 warns of the deliberately undefined operands inside its own AVX-512 intrinsics.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstring>

#include "core/half.h"
#include "cpu/kernels/formats.h"

namespace sharpi::cpu::SHARPI_ISA {

#define SHARPI_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512VNNI__)
// vpdpbusd cannot saturate, so full bytes are unsigned too, and 128 too large.
constexpr bool kWideSigned = false;
#else
// vpmaddubsw saturates on full unsigned bytes, so they stay signed.
constexpr bool kWideSigned = true;
#endif
constexpr int kWideFlip = kWideSigned ? 0 : 0x80;

// The amount by which the quants in registers are too large.
template <class Block> constexpr int registerOffset() {
    return Format<Block>::kWide && kWideSigned ? 0 : Format<Block>::kOffset;
}

struct Unpacked {
    __m256i quant[8];
    __m256i scale, min;  // 16 x int16, one for each half block, or 8 x int32; unset if the type has none
    __m256 d, m;         // 8 floats, one for each block; m unset if the type has none
};

// d * sub and m * min of eight blocks, the first halves' and the second halves'. [1] is unset if the halves are alike.
struct Factors {
    __m256 scale[2], min[2];
};

// 16 x int16 as int32: those at even places, and those at odd places.
SHARPI_INLINE __m256i evenOf(__m256i v) { return _mm256_srai_epi32(_mm256_slli_epi32(v, 16), 16); }
SHARPI_INLINE __m256i oddOf(__m256i v) { return _mm256_srai_epi32(v, 16); }

SHARPI_INLINE __m256 times(__m256 d, __m256i integers) { return _mm256_mul_ps(d, _mm256_cvtepi32_ps(integers)); }

template <Sub sub> SHARPI_INLINE void setFactors(__m256 d, __m256i integers, __m256* factors) {
    if constexpr (sub == Sub::PerHalf) {
        factors[0] = times(d, evenOf(integers));
        factors[1] = times(d, oddOf(integers));
    } else {
        factors[0] = sub == Sub::PerBlock ? times(d, integers) : d;
    }
}

template <class Block> SHARPI_INLINE Factors factorsOf(const Unpacked& u) {
    using F = Format<Block>;
    Factors factors;
    setFactors<F::kScales>(u.d, u.scale, factors.scale);
    if constexpr (F::kTwoFloats) factors.scale[1] = u.m;
    if constexpr (F::kHasMin) setFactors<F::kMins>(u.m, u.min, factors.min);
    return factors;
}

SHARPI_INLINE __m256i loadBytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
SHARPI_INLINE __m256i bytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }

// The low nibbles of 16 bytes, then their high nibbles.
SHARPI_INLINE __m256i nibbles(const uint8_t* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(raw), _mm_srli_epi16(raw, 4), 1);
    return _mm256_and_si256(both, bytes(15));
}

// Byte i is 0xff if bit i is set, 0 otherwise.
SHARPI_INLINE __m256i maskOfBits(uint32_t bits) {
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int32_t>(bits)),
                                               _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2,
                                                                2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
    const __m256i mask = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
    return _mm256_cmpeq_epi8(_mm256_and_si256(spread, mask), mask);
}

// 16 if the bit is set, 0 otherwise.
SHARPI_INLINE __m256i fifthBits(const uint8_t* p) {
    uint32_t word;
    std::memcpy(&word, p, sizeof word);
    return _mm256_and_si256(maskOfBits(word), bytes(16));
}

SHARPI_INLINE __m256i tableIQ4() {
    alignas(16) int8_t table[16];
    for (int i = 0; i < 16; ++i) table[i] = static_cast<int8_t>(kIQ4Values[i] ^ kWideFlip);
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}

SHARPI_INLINE __m256i tableMXFP4() {
    alignas(16) int8_t table[16];
    for (int i = 0; i < 16; ++i) table[i] = static_cast<int8_t>(kMXFP4Values[i] + Format<BlockMXFP4>::kOffset);
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}

// Eight f16, one from each block, at the byte offset `member`.
template <class Block> SHARPI_INLINE __m256 gatherF16(const Block* blocks, size_t member) {
    uint16_t v[8];
    for (int b = 0; b < 8; ++b) std::memcpy(&v[b], reinterpret_cast<const uint8_t*>(blocks + b) + member, sizeof v[b]);
    const __m128i packed = _mm_setr_epi16(static_cast<short>(v[0]), static_cast<short>(v[1]), static_cast<short>(v[2]),
                                          static_cast<short>(v[3]), static_cast<short>(v[4]), static_cast<short>(v[5]),
                                          static_cast<short>(v[6]), static_cast<short>(v[7]));
    return _mm256_cvtph_ps(packed);
}

SHARPI_INLINE __m256 broadcastF16(uint16_t half) { return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(half))); }

SHARPI_INLINE __m256 negative(__m256 v) { return _mm256_xor_ps(v, _mm256_set1_ps(-0.0f)); }

// Eight bytes to 8 x int32.
SHARPI_INLINE __m256i wordsOfBytes(uint64_t eight) {
    return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(eight)));
}

// Eight blocks of 32.
SHARPI_INLINE void unpackVector(const BlockQ4_0* blocks, Unpacked& u) {
    for (int b = 0; b < 8; ++b) u.quant[b] = nibbles(blocks[b].quants);
    u.d = gatherF16(blocks, 0);
}

SHARPI_INLINE void unpackVector(const BlockQ4_1* blocks, Unpacked& u) {
    for (int b = 0; b < 8; ++b) u.quant[b] = nibbles(blocks[b].quants);
    u.d = gatherF16(blocks, 0);
    u.m = gatherF16(blocks, 2);
}

SHARPI_INLINE void unpackVector(const BlockQ5_0* blocks, Unpacked& u) {
    for (int b = 0; b < 8; ++b) u.quant[b] = _mm256_or_si256(nibbles(blocks[b].quants), fifthBits(blocks[b].high));
    u.d = gatherF16(blocks, 0);
}

SHARPI_INLINE void unpackVector(const BlockQ5_1* blocks, Unpacked& u) {
    for (int b = 0; b < 8; ++b) u.quant[b] = _mm256_or_si256(nibbles(blocks[b].quants), fifthBits(blocks[b].high));
    u.d = gatherF16(blocks, 0);
    u.m = gatherF16(blocks, 2);
}

SHARPI_INLINE void unpackVector(const BlockQ8_0* blocks, Unpacked& u) {
    for (int b = 0; b < 8; ++b) u.quant[b] = _mm256_xor_si256(loadBytes(blocks[b].quants), bytes(kWideFlip));
    u.d = gatherF16(blocks, 0);
}

SHARPI_INLINE void unpackVector(const BlockIQ4_NL* blocks, Unpacked& u) {
    const __m256i table = tableIQ4();
    for (int b = 0; b < 8; ++b) u.quant[b] = _mm256_shuffle_epi8(table, nibbles(blocks[b].quants));
    u.d = gatherF16(blocks, 0);
}

SHARPI_INLINE void unpackVector(const BlockMXFP4* blocks, Unpacked& u) {
    const __m256i table = tableMXFP4();
    for (int b = 0; b < 8; ++b) u.quant[b] = _mm256_shuffle_epi8(table, nibbles(blocks[b].quants));
    const __m256i e = _mm256_setr_epi32(blocks[0].e, blocks[1].e, blocks[2].e, blocks[3].e, blocks[4].e, blocks[5].e,
                                        blocks[6].e, blocks[7].e);
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    const __m256i isTiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
    u.d = _mm256_castsi256_ps(_mm256_blendv_epi8(normal, tiny, isTiny));
}

// Numbers of two bits: byte i of each 32 bytes has those of elements i, 32 + i, 64 + i and 96 + i.
SHARPI_INLINE void unpackTwoBits(const uint8_t* quants, Unpacked& u) {
    for (int n = 0; n < 2; ++n) {
        const __m256i raw = loadBytes(quants + 32 * n);
        u.quant[4 * n] = _mm256_and_si256(raw, bytes(3));
        u.quant[4 * n + 1] = _mm256_and_si256(_mm256_srli_epi16(raw, 2), bytes(3));
        u.quant[4 * n + 2] = _mm256_and_si256(_mm256_srli_epi16(raw, 4), bytes(3));
        u.quant[4 * n + 3] = _mm256_and_si256(_mm256_srli_epi16(raw, 6), bytes(3));
    }
}

// One block of 256.
SHARPI_INLINE void unpackVector(const BlockQ2_K* block, Unpacked& u) {
    unpackTwoBits(block->quants, u);
    const __m256i both = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block->scales)));
    u.scale = _mm256_and_si256(both, _mm256_set1_epi16(15));
    u.min = _mm256_srli_epi16(both, 4);
    u.d = broadcastF16(block->d);
    u.m = negative(broadcastF16(block->dmin));
}

SHARPI_INLINE __m256i scalesQ3(const uint8_t* scales) {
    uint64_t low;
    uint32_t high;
    std::memcpy(&low, scales, sizeof low);
    std::memcpy(&high, scales + 8, sizeof high);
    const uint64_t fours = 0x0f0f0f0f0f0f0f0full, twos = 0x3030303030303030ull;
    const uint64_t first = (static_cast<uint64_t>(high) << 4 & 0xffffffffu) | static_cast<uint64_t>(high) << 34;
    const uint64_t second = static_cast<uint64_t>(high) | static_cast<uint64_t>(high >> 2) << 32;
    const __m128i packed = _mm_set_epi64x(static_cast<int64_t>((low >> 4 & fours) | (second & twos)),
                                          static_cast<int64_t>((low & fours) | (first & twos)));
    return _mm256_sub_epi16(_mm256_cvtepu8_epi16(packed), _mm256_set1_epi16(32));
}

SHARPI_INLINE void unpackVector(const BlockQ3_K* block, Unpacked& u) {
    const __m256i high = loadBytes(block->high);
    for (int n = 0; n < 2; ++n) {
        const __m256i raw = loadBytes(block->quants + 32 * n);
        const __m256i top = n == 0 ? high : _mm256_srli_epi16(high, 4);
        const __m256i four = bytes(4), three = bytes(3);
        u.quant[4 * n] =
            _mm256_or_si256(_mm256_and_si256(raw, three), _mm256_and_si256(_mm256_slli_epi16(top, 2), four));
        u.quant[4 * n + 1] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(raw, 2), three),
                                             _mm256_and_si256(_mm256_slli_epi16(top, 1), four));
        u.quant[4 * n + 2] =
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(raw, 4), three), _mm256_and_si256(top, four));
        u.quant[4 * n + 3] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(raw, 6), three),
                                             _mm256_and_si256(_mm256_srli_epi16(top, 1), four));
    }
    u.scale = scalesQ3(block->scales);
    u.d = broadcastF16(block->d);
}

SHARPI_INLINE void scales6(const uint8_t* scales, Unpacked& u) {
    uint32_t a, b, c;
    std::memcpy(&a, scales, sizeof a);
    std::memcpy(&b, scales + 4, sizeof b);
    std::memcpy(&c, scales + 8, sizeof c);
    const uint32_t scaleTop = (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u);
    const uint32_t minTop = (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u);
    u.scale = wordsOfBytes((a & 0x3f3f3f3fu) | static_cast<uint64_t>(scaleTop) << 32);
    u.min = wordsOfBytes((b & 0x3f3f3f3fu) | static_cast<uint64_t>(minTop) << 32);
}

SHARPI_INLINE void unpackVector(const BlockQ4_K* block, Unpacked& u) {
    for (int n = 0; n < 4; ++n) {
        const __m256i raw = loadBytes(block->quants + 32 * n);
        u.quant[2 * n] = _mm256_and_si256(raw, bytes(15));
        u.quant[2 * n + 1] = _mm256_and_si256(_mm256_srli_epi16(raw, 4), bytes(15));
    }
    scales6(block->scales, u);
    u.d = broadcastF16(block->d);
    u.m = negative(broadcastF16(block->dmin));
}

SHARPI_INLINE void unpackVector(const BlockQ5_K* block, Unpacked& u) {
    const __m256i high = loadBytes(block->high);
    for (int n = 0; n < 4; ++n) {
        const __m256i raw = loadBytes(block->quants + 32 * n);
        const __m256i even = n < 2 ? _mm256_slli_epi16(high, 4 - 2 * n) : _mm256_srli_epi16(high, 2 * n - 4);
        const __m256i odd = n < 2 ? _mm256_slli_epi16(high, 3 - 2 * n) : _mm256_srli_epi16(high, 2 * n - 3);
        u.quant[2 * n] = _mm256_or_si256(_mm256_and_si256(raw, bytes(15)), _mm256_and_si256(even, bytes(16)));
        u.quant[2 * n + 1] =
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(raw, 4), bytes(15)), _mm256_and_si256(odd, bytes(16)));
    }
    scales6(block->scales, u);
    u.d = broadcastF16(block->d);
    u.m = negative(broadcastF16(block->dmin));
}

SHARPI_INLINE void unpackVector(const BlockQ6_K* block, Unpacked& u) {
    for (int n = 0; n < 2; ++n) {
        const __m256i first = loadBytes(block->low + 64 * n), second = loadBytes(block->low + 64 * n + 32);
        const __m256i high = loadBytes(block->high + 32 * n);
        const __m256i four = bytes(15), two = bytes(0x30);
        u.quant[4 * n] =
            _mm256_or_si256(_mm256_and_si256(first, four), _mm256_and_si256(_mm256_slli_epi16(high, 4), two));
        u.quant[4 * n + 1] =
            _mm256_or_si256(_mm256_and_si256(second, four), _mm256_and_si256(_mm256_slli_epi16(high, 2), two));
        u.quant[4 * n + 2] =
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(first, 4), four), _mm256_and_si256(high, two));
        u.quant[4 * n + 3] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(second, 4), four),
                                             _mm256_and_si256(_mm256_srli_epi16(high, 2), two));
    }
    u.scale = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block->scales)));
    u.d = broadcastF16(block->d);
}

SHARPI_INLINE void unpackVector(const BlockIQ4_XS* block, Unpacked& u) {
    const __m256i table = tableIQ4();
    for (int b = 0; b < 8; ++b) u.quant[b] = _mm256_shuffle_epi8(table, nibbles(block->quants + 16 * b));
    int32_t low;
    std::memcpy(&low, block->scalesLow, sizeof low);
    const __m256i lows =
        _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(low), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28)),
                         _mm256_set1_epi32(15));
    const __m256i highs = _mm256_and_si256(
        _mm256_srlv_epi32(_mm256_set1_epi32(block->scalesHigh << 4), _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14)),
        _mm256_set1_epi32(0x30));
    u.scale = _mm256_sub_epi32(_mm256_or_si256(lows, highs), _mm256_set1_epi32(32));
    u.d = broadcastF16(block->d);
}

}  // namespace sharpi::cpu::SHARPI_ISA
