// The bytes of every quantized format: what a block holds and how to read it.
//
// Source: the GGUF specification's tensor types and, for layouts it only names, the reference dequantization in
// Python that the gguf package publishes (gguf.quants), which tests/python/engine/test_dequantize.py compares with.
// MXFP4: "OCP Microscaling Formats (MX) Specification", version 1.0.
//
// `d`, `m`, `dmin` are f16. Structs have byte alignment, since rows in a file have none of their own.
#pragma once

#include <cstdint>

namespace sharpi {

#pragma pack(push, 1)

// 32 elements. Element i < 16 is the low nibble of quants[i], element 16 + i its high nibble.
struct BlockQ4_0 {  // d * (q - 8)
    uint16_t d;
    uint8_t quants[16];
};
struct BlockQ4_1 {  // d * q + m
    uint16_t d, m;
    uint8_t quants[16];
};
struct BlockIQ4_NL {  // d * kIQ4Values[q]
    uint16_t d;
    uint8_t quants[16];
};
struct BlockMXFP4 {  // 2^(e - 128) * kMXFP4Values[q]
    uint8_t e;
    uint8_t quants[16];
};

// As above, with bit i of `high` the fifth bit of element i.
struct BlockQ5_0 {  // d * (q - 16)
    uint16_t d;
    uint8_t high[4];
    uint8_t quants[16];
};
struct BlockQ5_1 {  // d * q + m
    uint16_t d, m;
    uint8_t high[4];
    uint8_t quants[16];
};

struct BlockQ8_0 {  // d * q
    uint16_t d;
    int8_t quants[32];
};

// 256 elements, in sub-blocks of 16 (j = i / 16) or 32 (j = i / 32).

// d * (scales[j] & 15) * q - dmin * (scales[j] >> 4), j = i / 16.
// Two bits: of elements n * 128 + s * 32 + (0..31), the bits 2s, 2s + 1 of quants[n * 32 + (0..31)].
struct BlockQ2_K {
    uint8_t scales[16];
    uint8_t quants[64];
    uint16_t d, dmin;
};

// d * (scale[j] - 32) * (q - 4), j = i / 16; q's low two bits as in Q2_K, its third is bit i / 32 of high[i % 32].
// scale[j]: low four bits from nibble j / 8 of scales[j % 8], upper two from bits 2 * (j / 4).. of scales[8 + j % 4].
struct BlockQ3_K {
    uint8_t high[32];
    uint8_t quants[64];
    uint8_t scales[12];
    uint16_t d;
};

// d * scale[j] * q - dmin * min[j], j = i / 32; q of elements n * 64 + (0..31) are the low nibbles of
// quants[n * 32 + (0..31)], of n * 64 + 32 + (0..31) the high ones.
// Six bits each: scale[j < 4] = scales[j] & 63, min[j < 4] = scales[4 + j] & 63; for j >= 4 the low four bits are
// the low (scale) and high (min) nibble of scales[4 + j], the upper two the top bits of scales[j - 4] and scales[j].
struct BlockQ4_K {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t quants[128];
};
// The same with a fifth bit: bit i / 32 of high[i % 32].
struct BlockQ5_K {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t high[32];
    uint8_t quants[128];
};

// d * scales[i / 16] * (q - 32). Of elements n * 128 + s * 32 + l: the low four bits are in low[n * 64 + (s % 2) * 32 +
// l], its low nibble for s < 2, else the high one; the upper two are bits 2s, 2s + 1 of high[n * 32 + l].
struct BlockQ6_K {
    uint8_t low[128];
    uint8_t high[64];
    int8_t scales[16];
    uint16_t d;
};

// d * (scale[j] - 32) * kIQ4Values[q], j = i / 32; quants of sub-block j in quants[j * 16 ..], nibbles as in Q4_0.
// scale[j]: low four bits nibble j % 2 of scalesLow[j / 2], upper two bits 2j, 2j + 1 of scalesHigh.
struct BlockIQ4_XS {
    uint16_t d;
    uint16_t scalesHigh;
    uint8_t scalesLow[4];
    uint8_t quants[128];
};

// The IQ1, IQ2 and IQ3 formats store the number of an entry of a grid (formats/grids.h), which has the magnitudes of
// several neighbours: of eight for IQ1 and IQ2, of four for IQ3. Group l has elements 8 l .. 8 l + 7, and bit i of its
// sign byte is set if its element i is negative. The sign byte may be stored without its highest bit, which then makes
// the number of set bits even.

// d / 8 * (2 * scale[j] + 1) * value, j = i / 32. Bytes 8 j .. of quants: the entries of block j's four groups; then a
// word with 7 bits of signs for each group, and above them scale[j].
struct BlockIQ2_XXS {
    uint16_t d;
    uint8_t quants[64];
};
// The same with j = i / 16. quants[l]: 9 bits of group l's entry, then 7 bits of signs. scale[j]: nibble j of scales.
struct BlockIQ2_XS {
    uint16_t d;
    uint16_t quants[32];
    uint8_t scales[8];
};
// The same with j = i / 16. The low 8 bits of group l's entry are in quants[l], the upper two are bits 2 (l % 4).. of
// high[l / 4].
struct BlockIQ2_S {
    uint16_t d;
    uint8_t quants[32];
    uint8_t signs[32];
    uint8_t high[8];
    uint8_t scales[8];
};

// d / 4 * (2 * scale[j] + 1) * value, j = i / 32. quants[k]: the entry of elements 4 k .. 4 k + 3. Word j of signs is
// as in IQ2_XXS.
struct BlockIQ3_XXS {
    uint16_t d;
    uint8_t quants[64];
    uint8_t signs[32];
};
// d * (2 * scale[j] + 1) * value, j = i / 32; scale[j]: nibble j of scales. The ninth bit of entry k is bit k % 8 of
// high[k / 8].
struct BlockIQ3_S {
    uint16_t d;
    uint8_t quants[64];
    uint8_t high[8];
    uint8_t signs[32];
    uint8_t scales[4];
};

// d / 8 * (2 * scale[j] + 1) * (8 * value + shift), j = i / 32. The low 8 bits of group l's entry are in quants[l], the
// upper three are bits 3 (l % 4).. of high[l / 4]. Bits 12 .. 14 of high[j] are scale[j]; shift is -1 if bit 15 is set,
// else 1.
struct BlockIQ1_S {
    uint16_t d;
    uint8_t quants[32];
    uint16_t high[8];
};
// The same with j = i / 16. Nibble l of high has the upper three bits of group l's entry; shift is -1 for the group if
// the nibble's fourth bit is set. scale[j]: bits 3 (j % 4).. of scales[j / 4], whose upper four bits are nibble j / 4
// of d.
struct BlockIQ1_M {
    uint8_t quants[32];
    uint8_t high[16];
    uint16_t scales[4];
};

// d * (q - 1). A byte has up to five digits q of base 3: digit n is (byte * 3^n mod 256) * 3 / 256. Element i is digit
// i / 32 of quants[i % 32] for i < 160; from there on digit n of quants[32 + k] is element 160 + 16 n + k, and digit n
// of high[k] is element 240 + 4 n + k.
struct BlockTQ1_0 {
    uint8_t quants[48];
    uint8_t high[4];
    uint16_t d;
};
struct BlockTQ2_0 {  // d * (q - 1), with q's two bits as in Q2_K
    uint8_t quants[64];
    uint16_t d;
};

// 64 elements, in sub-blocks of 16 (j = i / 16): d[j] * kMXFP4Values[q]. d[j] is half of the float that the byte
// means (half.h). Element i < 8 of a sub-block is the low nibble of quants[8 j + i], element 8 + i its high nibble.
struct BlockNVFP4 {
    uint8_t d[4];
    uint8_t quants[32];
};

// 128 elements: d if bit i of quants is set, else -d.
struct BlockQ1_0 {
    uint16_t d;
    uint8_t quants[16];
};

#pragma pack(pop)

static_assert(sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20 && sizeof(BlockIQ4_NL) == 18);
static_assert(sizeof(BlockMXFP4) == 17 && sizeof(BlockQ5_0) == 22 && sizeof(BlockQ5_1) == 24 &&
              sizeof(BlockQ8_0) == 34);
static_assert(sizeof(BlockQ2_K) == 84 && sizeof(BlockQ3_K) == 110 && sizeof(BlockQ4_K) == 144);
static_assert(sizeof(BlockQ5_K) == 176 && sizeof(BlockQ6_K) == 210 && sizeof(BlockIQ4_XS) == 136);
static_assert(sizeof(BlockIQ2_XXS) == 66 && sizeof(BlockIQ2_XS) == 74 && sizeof(BlockIQ2_S) == 82);
static_assert(sizeof(BlockIQ3_XXS) == 98 && sizeof(BlockIQ3_S) == 110);
static_assert(sizeof(BlockIQ1_S) == 50 && sizeof(BlockIQ1_M) == 56);
static_assert(sizeof(BlockTQ1_0) == 54 && sizeof(BlockTQ2_0) == 66);
static_assert(sizeof(BlockNVFP4) == 36 && sizeof(BlockQ1_0) == 18);

// The non-linear 4-bit values of the IQ4 formats.
static constexpr int8_t kIQ4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// E2M1, doubled.
static constexpr int8_t kMXFP4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace sharpi
