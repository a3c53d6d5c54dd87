// unpack_scalar.h for the formats with grids, ternary digits and blocks of 64 and 128 elements.
#pragma once

#include "core/formats/grids.h"
#include "cpu/kernels/matmul/unpack_scalar.h"

namespace sharpi::cpu::SHARPI_ISA {

// The sign byte of group l of eight, from words with seven bits for each of four groups.
static inline int evenSigns(const uint8_t* words, size_t stride, int l) {
    uint32_t word;
    std::memcpy(&word, words + static_cast<size_t>(l / 4) * stride, sizeof word);
    const int seven = static_cast<int>(word >> (7 * (l % 4)) & 127);
    return seven | (__builtin_popcount(static_cast<unsigned>(seven)) & 1) << 7;
}
// The scale above those signs.
static inline int topNibble(const uint8_t* word) { return word[3] >> 4; }

static inline int signedLevel(int level, int signs, int i) { return signs >> i & 1 ? -level : level; }

// Elements 8 l .. 8 l + 7 of a format of the IQ2 family.
static inline void setEight(Group& g, int l, uint16_t entry, int signs) {
    for (int i = 0; i < 8; ++i)
        g.quant[8 * l + i] = static_cast<int8_t>(signedLevel(kIQ2Levels[entry >> (2 * i) & 3], signs, i));
}
// Elements 4 k .. 4 k + 3 of one of the IQ3 family. signs: those of the eight that hold them.
static inline void setFour(Group& g, int k, uint16_t entry, const int8_t* levels, int signs) {
    for (int i = 0; i < 4; ++i)
        g.quant[4 * k + i] = static_cast<int8_t>(signedLevel(levels[entry >> (4 * i) & 7], signs, k % 2 * 4 + i));
}
// Elements 8 l .. 8 l + 7 of one of the IQ1 family.
static inline void setShifted(Group& g, int l, uint16_t entry, int shift) {
    for (int i = 0; i < 8; ++i) g.quant[8 * l + i] = static_cast<int8_t>(8 * ((entry >> (2 * i) & 3) - 1) + shift);
}

// The scales of all half blocks from their stored numbers.
template <typename Stored> static inline void setOddScales(Group& g, const Stored& stored) {
    for (int h = 0; h < 16; ++h) g.scale[h] = static_cast<int16_t>(2 * stored(h) + 1);
}
static inline int nibbleAt(const uint8_t* bytes, int i) { return bytes[i / 2] >> (i % 2 * 4) & 15; }

static inline void unpack(const BlockIQ2_XXS* block, int, Group& g) {
    setGroupScales(g, floatFromF16(block->d) * 0.125f, 0);
    setOddScales(g, [&](int h) { return topNibble(block->quants + h / 2 * 8 + 4); });
    for (int l = 0; l < 32; ++l)
        setEight(g, l, kGridIQ2XXS[block->quants[l / 4 * 8 + l % 4]], evenSigns(block->quants + 4, 8, l));
}

static inline void unpack(const BlockIQ2_XS* block, int, Group& g) {
    setGroupScales(g, floatFromF16(block->d) * 0.125f, 0);
    setOddScales(g, [&](int h) { return nibbleAt(block->scales, h); });
    for (int l = 0; l < 32; ++l) {
        const int seven = block->quants[l] >> 9;
        setEight(g, l, kGridIQ2XS[block->quants[l] & 511], seven | (__builtin_popcount(seven) & 1) << 7);
    }
}

static inline void unpack(const BlockIQ2_S* block, int, Group& g) {
    setGroupScales(g, floatFromF16(block->d) * 0.125f, 0);
    setOddScales(g, [&](int h) { return nibbleAt(block->scales, h); });
    for (int l = 0; l < 32; ++l) {
        const int entry = block->quants[l] | (block->high[l / 4] >> (l % 4 * 2) & 3) << 8;
        setEight(g, l, kGridIQ2S[entry], block->signs[l]);
    }
}

static inline void unpack(const BlockIQ3_XXS* block, int, Group& g) {
    setGroupScales(g, floatFromF16(block->d) * 0.25f, 0);
    setOddScales(g, [&](int h) { return topNibble(block->signs + h / 2 * 4); });
    for (int k = 0; k < 64; ++k)
        setFour(g, k, kGridIQ3XXS[block->quants[k]], kIQ3XXSLevels, evenSigns(block->signs, 4, k / 2));
}

static inline void unpack(const BlockIQ3_S* block, int, Group& g) {
    setGroupScales(g, floatFromF16(block->d), 0);
    setOddScales(g, [&](int h) { return nibbleAt(block->scales, h / 2); });
    for (int k = 0; k < 64; ++k)
        setFour(g, k, kGridIQ3S[block->quants[k] | bit(block->high, k) << 8], kIQ3SLevels, block->signs[k / 2]);
}

static inline void unpack(const BlockIQ1_S* block, int, Group& g) {
    setGroupScales(g, floatFromF16(block->d) * 0.125f, 0);
    setOddScales(g, [&](int h) { return block->high[h / 2] >> 12 & 7; });
    for (int l = 0; l < 32; ++l) {
        const int high = block->high[l / 4];
        setShifted(g, l, kGridIQ1[block->quants[l] | (high >> (l % 4 * 3) & 7) << 8], high & 0x8000 ? -1 : 1);
    }
}

// The f16 whose nibbles are above the scales.
static inline uint16_t scatteredF16(const uint16_t (&scales)[4]) {
    return static_cast<uint16_t>(scales[0] >> 12 | (scales[1] >> 8 & 0xf0) | (scales[2] >> 4 & 0xf00) |
                                 (scales[3] & 0xf000));
}

static inline void unpack(const BlockIQ1_M* block, int, Group& g) {
    uint16_t scales[4];
    std::memcpy(scales, block->scales, sizeof scales);
    setGroupScales(g, floatFromF16(scatteredF16(scales)) * 0.125f, 0);
    setOddScales(g, [&](int h) { return scales[h / 4] >> (h % 4 * 3) & 7; });
    for (int l = 0; l < 32; ++l) {
        const int high = nibbleAt(block->high, l);
        setShifted(g, l, kGridIQ1[block->quants[l] | (high & 7) << 8], high & 8 ? -1 : 1);
    }
}

// Digit n of base 3, as stored.
static inline int8_t ternary(uint8_t byte, int n) {
    for (; n > 0; --n) byte = static_cast<uint8_t>(byte * 3);
    return static_cast<int8_t>((byte * 3 >> 8) - 1);
}

static inline void unpack(const BlockTQ1_0* block, int, Group& g) {
    setGroupFloat(g, floatFromF16(block->d));
    for (int i = 0; i < 160; ++i) g.quant[i] = ternary(block->quants[i % 32], i / 32);
    for (int i = 0; i < 80; ++i) g.quant[160 + i] = ternary(block->quants[32 + i % 16], i / 16);
    for (int i = 0; i < 16; ++i) g.quant[240 + i] = ternary(block->high[i % 4], i / 4);
}

static inline void unpack(const BlockTQ2_0* block, int, Group& g) {
    setGroupFloat(g, floatFromF16(block->d));
    for (int i = 0; i < 256; ++i)
        g.quant[i] = static_cast<int8_t>((block->quants[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3) - 1);
}

// `n` blocks of 64, at most 4.
static inline void unpack(const BlockNVFP4* blocks, int n, Group& g) {
    for (int b = 0; b < 2 * n; ++b) {
        const BlockNVFP4& block = blocks[b / 2];
        setBlockScales(g, b, halfFromUe4m3(block.d[b % 2 * 2]), halfFromUe4m3(block.d[b % 2 * 2 + 1]));
        for (int i = 0; i < 32; ++i) {
            const int byte = block.quants[b % 2 * 16 + i / 16 * 8 + i % 8];
            g.quant[b * 32 + i] = kMXFP4Values[i % 16 < 8 ? byte & 15 : byte >> 4];
        }
    }
}

// `n` blocks of 128, at most 2.
static inline void unpack(const BlockQ1_0* blocks, int n, Group& g) {
    for (int b = 0; b < 4 * n; ++b) setBlockScales(g, b, floatFromF16(blocks[b / 4].d), 0);
    for (int i = 0; i < 128 * n; ++i) g.quant[i] = static_cast<int8_t>(2 * bit(blocks[i / 128].quants, i % 128) - 1);
}

}  // namespace sharpi::cpu::SHARPI_ISA
