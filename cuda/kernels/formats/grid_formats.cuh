// The packed formats with grids (IQ1, IQ2, IQ3), ternary digits (TQ1_0, TQ2_0), NVFP4 and Q1_0.
//
// A grid's entry is one word of nibbles, each the selector of a byte permutation: one permutation looks up four levels.
// The tables have 1 to 8 KiB, which stay in the L1 cache. The order of bits in the planes (see formats.cuh):
//
// - Entries: a byte for each group of eight elements (IQ1, IQ2) or four (IQ3), with the low 8 bits of its number. Upper
//   bits: of IQ2_XS above the signs, of IQ2_S and IQ3_S the file's byte, of IQ1 the file's two bytes.
// - Signs of IQ2: one word. Bit 4 i + g belongs to element i of group g, so a shift moves a group's signs into the
//   third bits of its nibbles, and they choose between the levels and the negative levels. The last sign of a group
//   that is not stored (IQ2_XXS, IQ2_XS) makes their number even. Its place has four other bits: IQ2_XXS's scale,
//   IQ2_XS's upper bits.
// - Signs of IQ3: one word. Bit 8 b + k belongs to element 4 k + b, so a shift moves four signs into the four bytes of
//   group k. In IQ3_XXS, bits 25, 27, 29 and 31 have the scale instead.
// - Scales: as in the file, a nibble each; IQ3_S has f16 d and four bytes of scales for each superblock; IQ1_M the
//   file's eight bytes. Other types have an f16 d for each superblock.
// - TQ1_0: bytes of five base-3 digits. Digit n of byte b of a block's word is element 4 n + b. The last twelve
//   elements of all eight blocks are digits of five more words: word k of the superblock's 24 (three for each block) is
//   digit k % 5 of word k / 5.
// - TQ2_0: pairs of bits as in Q2_K. NVFP4: selectors as in MXFP4, and two bytes of scales. Q1_0: a word of bits as the
//   fifth bits of Q5_0, and f16 d for each four blocks.
#pragma once

#include "core/formats/grids.h"
#include "kernels/formats/format_parts.cuh"

namespace sharpi::cuda {

// --- grids ---------------------------------------------------------------------------------------------------------

template <typename Entry, int count> struct Selectors {
    Entry entry[count];
};
// Two bits to a nibble each.
template <int count> constexpr Selectors<uint32_t, count> selectorsOf(const uint16_t (&codes)[count]) {
    Selectors<uint32_t, count> table{};
    for (int n = 0; n < count; ++n)
        for (int i = 0; i < 8; ++i) table.entry[n] |= static_cast<uint32_t>(codes[n] >> 2 * i & 3) << 4 * i;
    return table;
}
// Codes that are nibbles already.
template <int count> constexpr Selectors<uint16_t, count> nibblesOf(const uint16_t (&codes)[count]) {
    Selectors<uint16_t, count> table{};
    for (int n = 0; n < count; ++n) table.entry[n] = codes[n];
    return table;
}

static __device__ constexpr auto kEntriesIQ2XXS = selectorsOf(kGridIQ2XXS);
static __device__ constexpr auto kEntriesIQ2XS = selectorsOf(kGridIQ2XS);
static __device__ constexpr auto kEntriesIQ2S = selectorsOf(kGridIQ2S);
static __device__ constexpr auto kEntriesIQ1 = selectorsOf(kGridIQ1);
static __device__ constexpr auto kEntriesIQ3XXS = nibblesOf(kGridIQ3XXS);
static __device__ constexpr auto kEntriesIQ3S = nibblesOf(kGridIQ3S);

constexpr uint32_t bytesOf(int a, int b, int c, int d) {
    return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | static_cast<uint32_t>(d & 255) << 24;
}
constexpr uint32_t bytesOf(const int8_t (&levels)[8], int from) {
    return bytesOf(levels[from], levels[from + 1], levels[from + 2], levels[from + 3]);
}
// The levels of codes 0 .. 3: IQ2's with their signs, and IQ1's 8 (c - 1) + 1 and 8 (c - 1) - 1.
constexpr uint32_t kPositiveIQ2 = bytesOf(kIQ2Levels[0], kIQ2Levels[1], kIQ2Levels[2], 0),
                   kNegativeIQ2 = bytesOf(-kIQ2Levels[0], -kIQ2Levels[1], -kIQ2Levels[2], 0);
constexpr uint32_t kUpIQ1 = bytesOf(-7, 1, 9, 0), kDownIQ1 = bytesOf(-9, -1, 7, 0);
// IQ3's levels of codes 0 .. 3 and 4 .. 7.
constexpr uint32_t kLowIQ3XXS = bytesOf(kIQ3XXSLevels, 0), kHighIQ3XXS = bytesOf(kIQ3XXSLevels, 4);
constexpr uint32_t kLowIQ3S = bytesOf(kIQ3SLevels, 0), kHighIQ3S = bytesOf(kIQ3SLevels, 4);

__device__ __forceinline__ int byteOf(uint32_t word, int i) { return static_cast<int>(word >> 8 * i & 255); }

// Words 2 g and 2 g + 1 of a block. Selectors below 4 choose from `low`, others from `high`.
__device__ __forceinline__ void lookUpGroup(uint32_t selectors, uint32_t low, uint32_t high, int g, uint32_t (&q)[8]) {
    q[2 * g] = permute(low, high, selectors);
    q[2 * g + 1] = permute(low, high, selectors >> 16);
}

// IQ2's signs from a word that has other numbers in its upper four bits.
__device__ __forceinline__ uint32_t evenSigns(uint32_t word) {
    const uint32_t sevens = word & 0x0fffffffu;
    uint32_t parity = sevens ^ sevens >> 16;
    parity ^= parity >> 8;
    parity ^= parity >> 4;
    return sevens | parity << 28;
}
// entryOf(g): the number of group g's entry.
template <int count, typename EntryOf>
__device__ __forceinline__ void codesOfIQ2(const Selectors<uint32_t, count>& grid, uint32_t signs,
                                           const EntryOf& entryOf, uint32_t (&q)[8]) {
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        const uint32_t shifted = g <= 2 ? signs << (2 - g) : signs >> (g - 2);
        lookUpGroup(__ldg(&grid.entry[entryOf(g)]) | (shifted & 0x44444444u), kPositiveIQ2, kNegativeIQ2, g, q);
    }
}

__device__ __forceinline__ Scales oddScales(float d, int first, int second) {
    return {d, 0.0f, 2 * first + 1, 2 * second + 1};
}
// An f16 times 2^-3 or 2^-2, exactly.
__device__ __forceinline__ float eighthOf(uint32_t half) { return __fmul_rn(floatOfLowHalf(half), 0.125f); }
__device__ __forceinline__ float quarterOf(uint32_t half) { return __fmul_rn(floatOfLowHalf(half), 0.25f); }

struct GridBlock {
    uint2 codes;  // entries, signs
    uint32_t scale, d;
};

template <> struct Format<DType::IQ2_XXS> : FormatTraits<DType::IQ2_XXS, false, false, 0, true> {
    struct Raw {
        uint2 codes;
        uint32_t d;
    };
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWords2(at.plane[0]), loadHalf(at.plane[1])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
        codesOfIQ2(kEntriesIQ2XXS, evenSigns(raw.codes.y), [&](int g) { return byteOf(raw.codes.x, g); }, q);
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) {
        const int stored = static_cast<int>(raw.codes.y >> 28);
        return oddScales(eighthOf(raw.d), stored, stored);
    }
};

template <> struct Format<DType::IQ2_XS> : FormatTraits<DType::IQ2_XS, false, true, 0, true> {
    using Raw = GridBlock;
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWords2(at.plane[0]), __ldg(at.plane[1]), loadHalf(at.plane[2])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
        const auto entryOf = [&](int g) {
            return byteOf(raw.codes.x, g) | static_cast<int>(raw.codes.y >> (28 + g) & 1) << 8;
        };
        codesOfIQ2(kEntriesIQ2XS, evenSigns(raw.codes.y), entryOf, q);
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) {
        return oddScales(eighthOf(raw.d), static_cast<int>(raw.scale & 15), static_cast<int>(raw.scale >> 4 & 15));
    }
};

template <> struct Format<DType::IQ2_S> : FormatTraits<DType::IQ2_S, false, true, 0, true> {
    using Raw = GridBlock;  // scale: the upper bits' byte, then the scales'
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWords2(at.plane[0]), loadHalf(at.plane[1]), loadHalf(at.plane[2])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
        const auto entryOf = [&](int g) {
            return byteOf(raw.codes.x, g) | static_cast<int>(raw.scale >> 2 * g & 3) << 8;
        };
        codesOfIQ2(kEntriesIQ2S, raw.codes.y, entryOf, q);
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) {
        return oddScales(eighthOf(raw.d), static_cast<int>(raw.scale >> 8 & 15), static_cast<int>(raw.scale >> 12));
    }
};

// --- IQ3 -----------------------------------------------------------------------------------------------------------

// entryOf(k): the number of the entry of word k.
template <int count, typename EntryOf>
__device__ __forceinline__ void codesOfIQ3(const Selectors<uint16_t, count>& grid, uint32_t low, uint32_t high,
                                           uint32_t signs, const EntryOf& entryOf, uint32_t (&q)[8]) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        const uint32_t levels = permute(low, high, __ldg(&grid.entry[entryOf(k)]));
        // Negates the bytes whose sign is set: no level is 0, so no byte overflows into the next.
        const uint32_t ones = signs >> k & 0x01010101u;
        q[k] = (levels ^ ones * 255u) + ones;
    }
}

__device__ __forceinline__ int entryByte(const uint2& entries, int k) {
    return byteOf(k < 4 ? entries.x : entries.y, k & 3);
}

template <> struct Format<DType::IQ3_XXS> : FormatTraits<DType::IQ3_XXS, false, false, 0, true> {
    struct Raw {
        uint2 codes;
        uint32_t signs, d;
    };
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWords2(at.plane[0]), loadWord(at.plane[1]), loadHalf(at.plane[2])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
        // Bit k of the parity counts the signs of word k, then bit 2 g those of group g, whose last sign is bit 25 + 2
        // g.
        const uint32_t sevens = raw.signs & 0x55ffffffu;
        uint32_t parity = sevens ^ sevens >> 16;
        parity ^= parity >> 8;
        parity ^= parity >> 1;
        codesOfIQ3(
            kEntriesIQ3XXS, kLowIQ3XXS, kHighIQ3XXS, sevens | (parity & 0x55u) << 25,
            [&](int k) { return entryByte(raw.codes, k); }, q);
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) {
        uint32_t stored = raw.signs >> 25 & 0x55u;
        stored = (stored | stored >> 1) & 0x33u;
        stored = (stored | stored >> 2) & 0x0fu;
        return oddScales(quarterOf(raw.d), static_cast<int>(stored), static_cast<int>(stored));
    }
};

template <> struct Format<DType::IQ3_S> : FormatTraits<DType::IQ3_S, false, false, 0, true> {
    struct Raw {
        uint2 codes;
        uint32_t signs, high, scale, d;
    };
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int j) {
        return {loadWords2(at.plane[0]), loadWord(at.plane[1]), __ldg(at.plane[2]), __ldg(at.plane[3] + 2 + (j >> 1)),
                loadHalf(at.plane[3])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
        const auto entryOf = [&](int k) { return entryByte(raw.codes, k) | static_cast<int>(raw.high >> k & 1) << 8; };
        codesOfIQ3(kEntriesIQ3S, kLowIQ3S, kHighIQ3S, raw.signs, entryOf, q);
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int j) {
        const int stored = static_cast<int>(raw.scale >> (j & 1) * 4 & 15);
        return oddScales(floatOfLowHalf(raw.d), stored, stored);
    }
};

// --- IQ1 -----------------------------------------------------------------------------------------------------------

// isDown has bit 2 of each nibble set if the group's levels are shifted down.
__device__ __forceinline__ void codesOfIQ1(int entry, uint32_t isDown, int g, uint32_t (&q)[8]) {
    lookUpGroup(__ldg(&kEntriesIQ1.entry[entry]) | isDown, kUpIQ1, kDownIQ1, g, q);
}

template <> struct Format<DType::IQ1_S> : FormatTraits<DType::IQ1_S, false, false, 0, true> {
    struct Raw {
        uint32_t low, high, d;
    };
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWord(at.plane[0]), loadHalf(at.plane[1]), loadHalf(at.plane[2])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
        const uint32_t isDown = raw.high & 0x8000u ? 0x44444444u : 0u;
#pragma unroll
        for (int g = 0; g < 4; ++g)
            codesOfIQ1(byteOf(raw.low, g) | static_cast<int>(raw.high >> 3 * g & 7) << 8, isDown, g, q);
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) {
        const int stored = static_cast<int>(raw.high >> 12 & 7);
        return oddScales(eighthOf(raw.d), stored, stored);
    }
};

template <> struct Format<DType::IQ1_M> : FormatTraits<DType::IQ1_M, false, true, 0, true> {
    struct Raw {
        uint32_t low, high;
        uint2 scale;
    };
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWord(at.plane[0]), loadHalf(at.plane[1]), loadWords2(at.plane[2])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            const uint32_t nibble = raw.high >> 4 * g;
            codesOfIQ1(byteOf(raw.low, g) | static_cast<int>(nibble & 7) << 8, nibble & 8 ? 0x44444444u : 0u, g, q);
        }
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int j) {
        const uint32_t d = (raw.scale.x >> 12 & 15) | (raw.scale.x >> 28) << 4 | (raw.scale.y >> 12 & 15) << 8 |
                           (raw.scale.y >> 28) << 12;
        const uint32_t word = (j & 4 ? raw.scale.y : raw.scale.x) >> (j & 2) * 8 >> (j & 1) * 6;
        return oddScales(eighthOf(d), static_cast<int>(word & 7), static_cast<int>(word >> 3 & 7));
    }
};

// --- ternary digits ------------------------------------------------------------------------------------------------

// Digit n of each of four bytes.
__device__ __forceinline__ uint32_t digitsOf(uint32_t bytes, int n) {
    const uint32_t power = n == 4 ? 81u : 0x1b090301u >> 8 * n & 255u;
    const uint32_t even = (bytes & 0x00ff00ffu) * power & 0x00ff00ffu,
                   odd = (bytes >> 8 & 0x00ff00ffu) * power & 0x00ff00ffu;
    return (even * 3 >> 8 & 0x00030003u) | (odd * 3 & 0x03000300u);
}

template <> struct Format<DType::TQ1_0> : FormatTraits<DType::TQ1_0, false, false, 1, false> {
    struct Raw {
        uint32_t first, low, high, d, digit;  // digit: of `low`, the first of the last three words
    };
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int j) {
        const int begin = 3 * j / 5, end = (3 * j + 2) / 5;
        return {loadWord(at.plane[0]), loadWord(at.plane[1] + 4 * begin), loadWord(at.plane[1] + 4 * end),
                loadHalf(at.plane[2]), static_cast<uint32_t>(3 * j - 5 * begin)};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
#pragma unroll
        for (int n = 0; n < 5; ++n) q[n] = digitsOf(raw.first, n);
#pragma unroll
        for (int k = 0; k < 3; ++k) {
            const int n = static_cast<int>(raw.digit) + k;
            q[5 + k] = digitsOf(n < 5 ? raw.low : raw.high, n < 5 ? n : n - 5);
        }
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) { return {floatOfLowHalf(raw.d)}; }
};

template <> struct Format<DType::TQ2_0> : FormatTraits<DType::TQ2_0, false, false, 1, false> {
    struct Raw {
        uint2 codes;
        uint32_t d;
    };
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWords2(at.plane[0]), loadHalf(at.plane[1])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) { unpackPairs(raw.codes, q); }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) { return {floatOfLowHalf(raw.d)}; }
};

// --- NVFP4 and Q1_0 ------------------------------------------------------------------------------------------------

// core/half.h's halfFromUe4m3.
__device__ __forceinline__ float floatOfUe4m3(uint32_t byte) {
    const uint32_t exponent = byte >> 3 & 15, fraction = byte & 7;
    const float tiny = __fmul_rn(static_cast<float>(fraction), 0.0009765625f);  // 2^-10
    const float value = exponent == 0 ? tiny : __uint_as_float((exponent + 119) << 23 | fraction << 20);
    return byte == 0x7f ? 0.0f : value;
}

template <> struct Format<DType::NVFP4> : FormatTraits<DType::NVFP4, false, false, 0, true, true> {
    struct Raw {
        uint4 codes;
        uint32_t scale;
    };
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWords4(at.plane[0]), loadHalf(at.plane[1])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
        constexpr TableWords kTable = tableWords(kMXFP4Values);
        unpackTable(raw.codes, kTable, q);
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) {
        return {floatOfUe4m3(raw.scale & 255), floatOfUe4m3(raw.scale >> 8)};
    }
};

template <> struct Format<DType::Q1_0> : FormatTraits<DType::Q1_0, false, false, 1, false> {
    struct Raw {
        uint32_t bits, d;
    };
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWord(at.plane[0]), loadHalf(at.plane[1])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
#pragma unroll
        for (int k = 0; k < 8; ++k) q[k] = 0;
        insertBits<1>(raw.bits, q);
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) { return {floatOfLowHalf(raw.d)}; }
};

}  // namespace sharpi::cuda
