// unpack_vector.h for the formats with grids, ternary digits and blocks of 64 and 128 elements.
//
// A grid's entries are kept as bytes, in about 30 KiB of tables that stay in the first two levels of the cache. Four
// (or eight) entries make a block of 32, and its signs are one mask.
#pragma once

#include <cstddef>

#include "core/formats/grids.h"
#include "cpu/kernels/matmul/unpack_vector.h"

namespace sharpi::cpu::SHARPI_ISA {

template <typename Entry, int count> struct ByteGrid {
    Entry entry[count];
};

// kBits: of a code. Each code becomes the byte of its level.
template <typename Entry, int kBits, int count, int levelCount>
constexpr ByteGrid<Entry, count> byteGrid(const uint16_t (&codes)[count], const int8_t (&levels)[levelCount]) {
    ByteGrid<Entry, count> grid{};
    for (int n = 0; n < count; ++n)
        for (int i = 0; i < static_cast<int>(sizeof(Entry)); ++i)
            grid.entry[n] |= static_cast<Entry>(levels[codes[n] >> (kBits * i) & ((1 << kBits) - 1)]) << (8 * i);
    return grid;
}

constexpr int8_t kIQ1Levels[4] = {0, 8, 16, 0};  // 8 (c - 1), and 8 more
constexpr auto kBytesIQ2XXS = byteGrid<uint64_t, 2>(kGridIQ2XXS, kIQ2Levels);
constexpr auto kBytesIQ2XS = byteGrid<uint64_t, 2>(kGridIQ2XS, kIQ2Levels);
constexpr auto kBytesIQ2S = byteGrid<uint64_t, 2>(kGridIQ2S, kIQ2Levels);
constexpr auto kBytesIQ1 = byteGrid<uint64_t, 2>(kGridIQ1, kIQ1Levels);
constexpr auto kBytesIQ3XXS = byteGrid<uint32_t, 4>(kGridIQ3XXS, kIQ3XXSLevels);
constexpr auto kBytesIQ3S = byteGrid<uint32_t, 4>(kGridIQ3S, kIQ3SLevels);

template <typename Word> SHARPI_INLINE Word wordAt(const void* p) {
    Word word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

// The entries of four groups of eight, and those of eight groups of four.
template <int count>
SHARPI_INLINE __m256i eights(const ByteGrid<uint64_t, count>& grid, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    return _mm256_setr_epi64x(static_cast<int64_t>(grid.entry[a]), static_cast<int64_t>(grid.entry[b]),
                              static_cast<int64_t>(grid.entry[c]), static_cast<int64_t>(grid.entry[d]));
}
template <int count> SHARPI_INLINE __m256i fours(const ByteGrid<uint32_t, count>& grid, __m256i numbers) {
    return _mm256_i32gather_epi32(reinterpret_cast<const int*>(grid.entry), numbers, 4);
}

// Magnitudes with their signs, as the products take full bytes.
SHARPI_INLINE __m256i withSigns(__m256i magnitudes, uint32_t signs) {
#if defined(__AVX512VNNI__)
    const __m256i values = _mm256_mask_sub_epi8(magnitudes, signs, _mm256_setzero_si256(), magnitudes);
#else
    const __m256i mask = maskOfBits(signs);
    const __m256i values = _mm256_sub_epi8(_mm256_xor_si256(magnitudes, mask), mask);
#endif
    return _mm256_xor_si256(values, bytes(kWideFlip));
}

// The four sign bytes of each of eight blocks.
struct Signs {
    alignas(32) uint32_t word[8];
};

// From bytes without their highest bit: it makes the number of bits even.
SHARPI_INLINE Signs evenSigns(__m256i sevens) {
    __m256i parity = _mm256_xor_si256(sevens, _mm256_srli_epi32(sevens, 4));
    parity = _mm256_xor_si256(parity, _mm256_srli_epi32(parity, 2));
    parity = _mm256_xor_si256(parity, _mm256_srli_epi32(parity, 1));
    const __m256i last = _mm256_slli_epi32(_mm256_and_si256(parity, bytes(1)), 7);
    Signs signs;
    _mm256_store_si256(reinterpret_cast<__m256i*>(signs.word), _mm256_or_si256(sevens, last));
    return signs;
}
// From words with four times seven bits.
SHARPI_INLINE Signs packedSigns(__m256i words) {
    const auto part = [&](int shift, int mask) {
        return _mm256_and_si256(_mm256_slli_epi32(words, shift), _mm256_set1_epi32(mask));
    };
    return evenSigns(_mm256_or_si256(_mm256_or_si256(part(0, 0x7f), part(1, 0x7f00)),
                                     _mm256_or_si256(part(2, 0x7f0000), part(3, 0x7f000000))));
}

// 2 n + 1 of 16 x int16, and of 8 x int32.
SHARPI_INLINE __m256i oddScales(__m256i n) { return _mm256_add_epi16(_mm256_add_epi16(n, n), _mm256_set1_epi16(1)); }
SHARPI_INLINE __m256i oddWords(__m256i n) { return _mm256_add_epi32(_mm256_add_epi32(n, n), _mm256_set1_epi32(1)); }

// The nibbles of eight bytes, the low one of each first, as 16 x int16.
SHARPI_INLINE __m256i nibblesOfEight(const uint8_t* p) {
    const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const __m128i four = _mm_set1_epi8(15);
    return _mm256_cvtepu8_epi16(
        _mm_unpacklo_epi8(_mm_and_si128(raw, four), _mm_and_si128(_mm_srli_epi16(raw, 4), four)));
}

SHARPI_INLINE __m256 scaledF16(uint16_t half, float factor) {
    return _mm256_mul_ps(broadcastF16(half), _mm256_set1_ps(factor));
}

SHARPI_INLINE void unpackVector(const BlockIQ2_XXS* block, Unpacked& u) {
    // The second words of eight pairs.
    const __m256 low = _mm256_castsi256_ps(loadBytes(block->quants)),
                 high = _mm256_castsi256_ps(loadBytes(block->quants + 32));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd)), 0xd8);
    const Signs signs = packedSigns(words);
    for (int b = 0; b < 8; ++b) {
        const uint8_t* entry = block->quants + 8 * b;
        u.quant[b] = withSigns(eights(kBytesIQ2XXS, entry[0], entry[1], entry[2], entry[3]), signs.word[b]);
    }
    u.scale = oddWords(_mm256_srli_epi32(words, 28));
    u.d = scaledF16(block->d, 0.125f);
}

SHARPI_INLINE void unpackVector(const BlockIQ2_XS* block, Unpacked& u) {
    const auto* quants = reinterpret_cast<const uint8_t*>(block) + offsetof(BlockIQ2_XS, quants);
    const __m256i low = _mm256_srli_epi16(loadBytes(quants), 9), high = _mm256_srli_epi16(loadBytes(quants + 32), 9);
    const Signs signs = evenSigns(_mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xd8));
    for (int b = 0; b < 8; ++b) {
        const uint64_t four = wordAt<uint64_t>(quants + 8 * b);
        u.quant[b] = withSigns(eights(kBytesIQ2XS, four & 511, four >> 16 & 511, four >> 32 & 511, four >> 48 & 511),
                               signs.word[b]);
    }
    u.scale = oddScales(nibblesOfEight(block->scales));
    u.d = scaledF16(block->d, 0.125f);
}

SHARPI_INLINE void unpackVector(const BlockIQ2_S* block, Unpacked& u) {
    for (int b = 0; b < 8; ++b) {
        const uint8_t* low = block->quants + 4 * b;
        const uint32_t high = block->high[b];
        u.quant[b] = withSigns(eights(kBytesIQ2S, low[0] | (high << 8 & 0x300), low[1] | (high << 6 & 0x300),
                                      low[2] | (high << 4 & 0x300), low[3] | (high << 2 & 0x300)),
                               wordAt<uint32_t>(block->signs + 4 * b));
    }
    u.scale = oddScales(nibblesOfEight(block->scales));
    u.d = scaledF16(block->d, 0.125f);
}

SHARPI_INLINE __m256i entryNumbers(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}

SHARPI_INLINE void unpackVector(const BlockIQ3_XXS* block, Unpacked& u) {
    const __m256i words = loadBytes(block->signs);
    const Signs signs = packedSigns(words);
    for (int b = 0; b < 8; ++b)
        u.quant[b] = withSigns(fours(kBytesIQ3XXS, entryNumbers(block->quants + 8 * b)), signs.word[b]);
    u.scale = oddWords(_mm256_srli_epi32(words, 28));
    u.d = scaledF16(block->d, 0.25f);
}

SHARPI_INLINE void unpackVector(const BlockIQ3_S* block, Unpacked& u) {
    for (int b = 0; b < 8; ++b) {
        const __m256i high = _mm256_and_si256(
            _mm256_sllv_epi32(_mm256_set1_epi32(block->high[b]), _mm256_setr_epi32(8, 7, 6, 5, 4, 3, 2, 1)),
            _mm256_set1_epi32(0x100));
        const __m256i numbers = _mm256_or_si256(entryNumbers(block->quants + 8 * b), high);
        u.quant[b] = withSigns(fours(kBytesIQ3S, numbers), wordAt<uint32_t>(block->signs + 4 * b));
    }
    const uint32_t stored = wordAt<uint32_t>(block->scales);
    const __m256i nibble = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int32_t>(stored)),
                                                              _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28)),
                                            _mm256_set1_epi32(15));
    u.scale = oddWords(nibble);
    u.d = broadcastF16(block->d);
}

// Entries of IQ1, shifted: 9 more than their values.
SHARPI_INLINE __m256i shifted(__m256i entries, __m256i isDown) {
    return _mm256_add_epi8(entries, _mm256_andnot_si256(isDown, bytes(2)));
}

SHARPI_INLINE void unpackVector(const BlockIQ1_S* block, Unpacked& u) {
    for (int b = 0; b < 8; ++b) {
        const uint8_t* low = block->quants + 4 * b;
        const uint32_t high = block->high[b];
        const __m256i entries = eights(kBytesIQ1, low[0] | (high << 8 & 0x700), low[1] | (high << 5 & 0x700),
                                       low[2] | (high << 2 & 0x700), low[3] | (high >> 1 & 0x700));
        u.quant[b] = shifted(entries, bytes(high & 0x8000 ? -1 : 0));
    }
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block->high));
    const __m256i scale = _mm256_cvtepu16_epi32(_mm_and_si128(_mm_srli_epi16(high, 12), _mm_set1_epi16(7)));
    u.scale = oddWords(scale);
    u.d = scaledF16(block->d, 0.125f);
}

SHARPI_INLINE void unpackVector(const BlockIQ1_M* block, Unpacked& u) {
    for (int b = 0; b < 8; ++b) {
        const uint8_t* low = block->quants + 4 * b;
        const uint32_t high = wordAt<uint16_t>(block->high + 2 * b);
        const __m256i entries = eights(kBytesIQ1, low[0] | (high << 8 & 0x700), low[1] | (high << 4 & 0x700),
                                       low[2] | (high & 0x700), low[3] | (high >> 4 & 0x700));
        // Bit 3 of each nibble, in all bytes of its group.
        const __m256i isDown = _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(static_cast<int64_t>(high)),
                                                                   _mm256_setr_epi64x(8, 0x80, 0x800, 0x8000)),
                                                  _mm256_setr_epi64x(8, 0x80, 0x800, 0x8000));
        u.quant[b] = shifted(entries, isDown);
    }
    const uint64_t words = wordAt<uint64_t>(block->scales);
    // Word k of four, four times each, shifted by 0, 3, 6 and 9 bits: a product, of which bits 9 .. 11 are used.
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi64x(static_cast<int64_t>(words)),
                                               _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 4, 5, 4,
                                                                5, 4, 5, 4, 5, 6, 7, 6, 7, 6, 7, 6, 7));
    const __m256i moved =
        _mm256_mullo_epi16(spread, _mm256_setr_epi16(512, 64, 8, 1, 512, 64, 8, 1, 512, 64, 8, 1, 512, 64, 8, 1));
    u.scale = oddScales(_mm256_and_si256(_mm256_srli_epi16(moved, 9), _mm256_set1_epi16(7)));
    const uint64_t tops = words >> 12 & 0x000f000f000f000full;
    u.d = scaledF16(static_cast<uint16_t>(tops | tops >> 12 | tops >> 24 | tops >> 36), 0.125f);
}

// The first digit of each byte, and the bytes that have the other ones.
SHARPI_INLINE __m256i firstDigits(__m256i v) {
    const __m256i one = _mm256_cmpeq_epi8(_mm256_max_epu8(v, bytes(86)), v);
    const __m256i two = _mm256_cmpeq_epi8(_mm256_max_epu8(v, bytes(171)), v);
    return _mm256_sub_epi8(_mm256_setzero_si256(), _mm256_add_epi8(one, two));
}
SHARPI_INLINE __m256i threeTimes(__m256i v) { return _mm256_add_epi8(_mm256_add_epi8(v, v), v); }
SHARPI_INLINE uint32_t threeTimes(uint32_t v) {
    return ((v & 0x00ff00ffu) * 3 & 0x00ff00ffu) | ((v >> 8 & 0x00ff00ffu) * 3 & 0x00ff00ffu) << 8;
}

SHARPI_INLINE void unpackVector(const BlockTQ1_0* block, Unpacked& u) {
    __m256i v = loadBytes(block->quants);
    for (int b = 0; b < 5; ++b, v = threeTimes(v)) u.quant[b] = firstDigits(v);
    // Two digits of sixteen bytes make a block.
    const __m128i last = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block->quants + 32));
    const __m256i both = _mm256_broadcastsi128_si256(last);
    v = _mm256_blend_epi32(both, threeTimes(both), 0xf0);
    u.quant[5] = firstDigits(v);
    v = threeTimes(threeTimes(v));
    u.quant[6] = firstDigits(v);
    v = threeTimes(threeTimes(v));
    const uint32_t first = wordAt<uint32_t>(block->high), second = threeTimes(first), third = threeTimes(second);
    const __m128i high = _mm_setr_epi32(static_cast<int32_t>(first), static_cast<int32_t>(second),
                                        static_cast<int32_t>(third), static_cast<int32_t>(threeTimes(third)));
    u.quant[7] = firstDigits(_mm256_inserti128_si256(v, high, 1));
    u.d = broadcastF16(block->d);
}

SHARPI_INLINE void unpackVector(const BlockTQ2_0* block, Unpacked& u) {
    unpackTwoBits(block->quants, u);
    u.d = broadcastF16(block->d);
}

// Four blocks of 64.
SHARPI_INLINE void unpackVector(const BlockNVFP4* blocks, Unpacked& u) {
    const __m256i table = tableMXFP4();
    alignas(32) float d[8], second[8];
    for (int b = 0; b < 8; ++b) {
        const BlockNVFP4& block = blocks[b / 2];
        // Eight bytes have the low nibbles of eight elements, then the high ones of the next eight.
        const __m256i codes = _mm256_permute4x64_epi64(nibbles(block.quants + b % 2 * 16), 0xd8);
        u.quant[b] = _mm256_shuffle_epi8(table, codes);
        d[b] = halfFromUe4m3(block.d[b % 2 * 2]);
        second[b] = halfFromUe4m3(block.d[b % 2 * 2 + 1]);
    }
    u.d = _mm256_load_ps(d);
    u.m = _mm256_load_ps(second);
}

// Two blocks of 128.
SHARPI_INLINE void unpackVector(const BlockQ1_0* blocks, Unpacked& u) {
    for (int b = 0; b < 8; ++b)
        u.quant[b] = _mm256_and_si256(maskOfBits(wordAt<uint32_t>(blocks[b / 4].quants + b % 4 * 4)), bytes(2));
    u.d = _mm256_blend_ps(broadcastF16(blocks[0].d), broadcastF16(blocks[1].d), 0xf0);
}

}  // namespace sharpi::cpu::SHARPI_ISA
