// file_formats.cuh for the formats of grid_formats.cuh. code() of a format with a grid is the element's level itself.
#pragma once

#include "kernels/formats/file_parts.cuh"
#include "kernels/formats/grid_formats.cuh"

namespace sharpi::cuda {

// The formats whose codes are numbers already.
template <DType T>
constexpr bool kIsGrid = T == DType::IQ2_XXS || T == DType::IQ2_XS || T == DType::IQ2_S || T == DType::IQ3_XXS ||
                         T == DType::IQ3_S || T == DType::IQ1_S || T == DType::IQ1_M;

// Seven bits of signs, and an eighth that makes their number even.
__device__ __forceinline__ uint32_t eightSigns(uint32_t seven) { return seven | (__popc(seven) & 1u) << 7; }
__device__ __forceinline__ uint32_t wordOf(const uint8_t* at) {
    return at[0] | at[1] << 8 | at[2] << 16 | static_cast<uint32_t>(at[3]) << 24;
}
// Those of group g in a word of IQ2_XXS or IQ3_XXS.
__device__ __forceinline__ uint32_t signsOf(uint32_t word, int g) { return eightSigns(word >> 7 * g & 127); }
__device__ __forceinline__ int nibbleAt(const uint8_t* bytes, int i) { return bytes[i >> 1] >> (i & 1) * 4 & 15; }

// Element i (0 .. 7) of a group, from its entry's selectors, or from those of the entry of half of the group.
__device__ __forceinline__ int levelOfIQ2(uint32_t entry, int i, uint32_t signs) {
    const int level = byteOf(kPositiveIQ2, static_cast<int>(entry >> 4 * i & 3));
    return signs >> i & 1 ? -level : level;
}
__device__ __forceinline__ int levelOfIQ3(uint32_t entry, int i, uint32_t low, uint32_t high, uint32_t signs) {
    const int level = byteOf(permute(low, high, entry), i & 3);
    return signs >> i & 1 ? -level : level;
}
__device__ __forceinline__ int levelOfIQ1(int entry, int i, bool isDown) {
    return 8 * (static_cast<int>(kEntriesIQ1.entry[entry] >> 4 * i & 15) - 1) + (isDown ? -1 : 1);
}

template <class B> struct SuperFile {
    using Block = B;
    static constexpr int kBlocks = 8;
};

template <> struct FileFormat<DType::IQ2_XXS> : SuperFile<BlockIQ2_XXS> {
    static __device__ __forceinline__ uint32_t word(const Block& b, int j) { return wordOf(b.quants + 8 * j + 4); }
    static __device__ __forceinline__ int code(const Block& b, int j, int i) {
        const int g = i / 8;
        return levelOfIQ2(kEntriesIQ2XXS.entry[b.quants[8 * j + g]], i % 8, signsOf(word(b, j), g));
    }
    static __device__ Scales scales(const Block& b, int j) {
        const int stored = static_cast<int>(word(b, j) >> 28);
        return oddScales(eighthOf(b.d), stored, stored);
    }
};
template <> struct FileFormat<DType::IQ2_XS> : SuperFile<BlockIQ2_XS> {
    static __device__ __forceinline__ int code(const Block& b, int j, int i) {
        const uint32_t both = b.quants[4 * j + i / 8];
        return levelOfIQ2(kEntriesIQ2XS.entry[both & 511], i % 8, eightSigns(both >> 9));
    }
    static __device__ Scales scales(const Block& b, int j) {
        return oddScales(eighthOf(b.d), b.scales[j] & 15, b.scales[j] >> 4);
    }
};
template <> struct FileFormat<DType::IQ2_S> : SuperFile<BlockIQ2_S> {
    static __device__ __forceinline__ int code(const Block& b, int j, int i) {
        const int entry = b.quants[4 * j + i / 8] | pairOf(b.high, j, i / 8) << 8;
        return levelOfIQ2(kEntriesIQ2S.entry[entry], i % 8, b.signs[4 * j + i / 8]);
    }
    static __device__ Scales scales(const Block& b, int j) {
        return oddScales(eighthOf(b.d), b.scales[j] & 15, b.scales[j] >> 4);
    }
};

template <> struct FileFormat<DType::IQ3_XXS> : SuperFile<BlockIQ3_XXS> {
    static __device__ __forceinline__ int code(const Block& b, int j, int i) {
        return levelOfIQ3(kEntriesIQ3XXS.entry[b.quants[8 * j + i / 4]], i % 8, kLowIQ3XXS, kHighIQ3XXS,
                          signsOf(wordOf(b.signs + 4 * j), i / 8));
    }
    static __device__ Scales scales(const Block& b, int j) {
        const int stored = b.signs[4 * j + 3] >> 4;
        return oddScales(quarterOf(b.d), stored, stored);
    }
};
template <> struct FileFormat<DType::IQ3_S> : SuperFile<BlockIQ3_S> {
    static __device__ __forceinline__ int code(const Block& b, int j, int i) {
        const int entry = b.quants[8 * j + i / 4] | bitOf(b.high, j, i / 4) << 8;
        return levelOfIQ3(kEntriesIQ3S.entry[entry], i % 8, kLowIQ3S, kHighIQ3S, b.signs[4 * j + i / 8]);
    }
    static __device__ Scales scales(const Block& b, int j) {
        return oddScales(floatOfLowHalf(b.d), nibbleAt(b.scales, j), nibbleAt(b.scales, j));
    }
};

template <> struct FileFormat<DType::IQ1_S> : SuperFile<BlockIQ1_S> {
    static __device__ __forceinline__ int code(const Block& b, int j, int i) {
        const int high = b.high[j], g = i / 8;
        return levelOfIQ1(b.quants[4 * j + g] | (high >> 3 * g & 7) << 8, i % 8, high >> 15 != 0);
    }
    static __device__ Scales scales(const Block& b, int j) {
        const int stored = b.high[j] >> 12 & 7;
        return oddScales(eighthOf(b.d), stored, stored);
    }
};
template <> struct FileFormat<DType::IQ1_M> : SuperFile<BlockIQ1_M> {
    static __device__ __forceinline__ int code(const Block& b, int j, int i) {
        const int high = nibbleAt(b.high, 4 * j + i / 8);
        return levelOfIQ1(b.quants[4 * j + i / 8] | (high & 7) << 8, i % 8, high >= 8);
    }
    static __device__ Scales scales(const Block& b, int j) {
        const uint32_t d =
            b.scales[0] >> 12 | b.scales[1] >> 12 << 4 | b.scales[2] >> 12 << 8 | b.scales[3] >> 12 << 12;
        const int both = b.scales[j / 2] >> j % 2 * 6;
        return oddScales(eighthOf(d), both & 7, both >> 3 & 7);
    }
};

template <> struct FileFormat<DType::TQ1_0> : SuperFile<BlockTQ1_0> {
    static __device__ __forceinline__ int code(const Block& b, int j, int i) {
        const int k = 32 * j + i;
        if (k < 160) return static_cast<int>(digitsOf(b.quants[i], j));
        if (k < 240) return static_cast<int>(digitsOf(b.quants[32 + i % 16], (k - 160) / 16));
        return static_cast<int>(digitsOf(b.high[i % 4], (k - 240) / 4));
    }
    static __device__ Scales scales(const Block& b, int) { return {floatOfLowHalf(b.d)}; }
};
template <> struct FileFormat<DType::TQ2_0> : SuperFile<BlockTQ2_0> {
    static __device__ __forceinline__ int code(const Block& b, int j, int i) {
        return pairOf(b.quants, j / 4 * 32 + i, j % 4);
    }
    static __device__ Scales scales(const Block& b, int) { return {floatOfLowHalf(b.d)}; }
};

template <> struct FileFormat<DType::NVFP4> {
    using Block = BlockNVFP4;
    static constexpr int kBlocks = 2;
    static __device__ __forceinline__ int code(const Block& b, int j, int i) {
        return b.quants[16 * j + i / 16 * 8 + i % 8] >> i / 8 % 2 * 4 & 15;
    }
    static __device__ Scales scales(const Block& b, int j) {
        return {floatOfUe4m3(b.d[2 * j]), floatOfUe4m3(b.d[2 * j + 1])};
    }
};
template <> struct FileFormat<DType::Q1_0> {
    using Block = BlockQ1_0;
    static constexpr int kBlocks = 4;
    static __device__ __forceinline__ int code(const Block& b, int j, int i) {
        return 2 * bitOf(b.quants, 4 * j + i / 8, i % 8);
    }
    static __device__ Scales scales(const Block& b, int) { return {floatOfLowHalf(b.d)}; }
};

}  // namespace sharpi::cuda
