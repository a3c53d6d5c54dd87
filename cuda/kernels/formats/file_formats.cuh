// Quantized blocks as they lie in a file, one element at a time. Packing starts from them, and the reference product
// reads them. The code is plain and slow. A file's rows have no alignment (core/blocks.h packs its structs to bytes),
// so it only reads single bytes.
#pragma once

#include "kernels/formats/file_grids.cuh"
#include "kernels/formats/formats.cuh"

namespace sharpi::cuda {

// A 6-bit scale, or a 6-bit min, of Q4_K and Q5_K.
__device__ __forceinline__ int sixBitsOf(const uint8_t* scales, int j, bool min) {
    if (j < 4) return scales[min ? 4 + j : j] & 63;
    const int low = min ? scales[4 + j] >> 4 : scales[4 + j] & 15;
    return low | scales[min ? j : j - 4] >> 6 << 4;
}

template <class B> struct NibbleFile {
    using Block = B;
    static constexpr int kBlocks = 1;
    static __device__ __forceinline__ int code(const Block& b, int, int i) { return nibbleOf(b.quants, i); }
};
template <class B> struct FiveBitFile {
    using Block = B;
    static constexpr int kBlocks = 1;
    static __device__ __forceinline__ int code(const Block& b, int, int i) {
        return nibbleOf(b.quants, i) | bitOf(b.high, i >> 3, i & 7) << 4;
    }
};

template <> struct FileFormat<DType::Q4_0> : NibbleFile<BlockQ4_0> {
    static __device__ Scales scales(const Block& b, int) { return {floatOfLowHalf(b.d)}; }
};
template <> struct FileFormat<DType::Q4_1> : NibbleFile<BlockQ4_1> {
    static __device__ Scales scales(const Block& b, int) {
        return {floatOfLowHalf(b.d), floatOfLowHalf(b.m), 1, 1, 1, 1};
    }
};
template <> struct FileFormat<DType::IQ4_NL> : NibbleFile<BlockIQ4_NL> {
    static __device__ Scales scales(const Block& b, int) { return {floatOfLowHalf(b.d)}; }
};
template <> struct FileFormat<DType::MXFP4> : NibbleFile<BlockMXFP4> {
    static __device__ Scales scales(const Block& b, int) {
        return {b.e < 2 ? __uint_as_float(0x00200000u << b.e) : __uint_as_float((b.e - 1u) << 23)};
    }
};
template <> struct FileFormat<DType::Q5_0> : FiveBitFile<BlockQ5_0> {
    static __device__ Scales scales(const Block& b, int) { return {floatOfLowHalf(b.d)}; }
};
template <> struct FileFormat<DType::Q5_1> : FiveBitFile<BlockQ5_1> {
    static __device__ Scales scales(const Block& b, int) {
        return {floatOfLowHalf(b.d), floatOfLowHalf(b.m), 1, 1, 1, 1};
    }
};
template <> struct FileFormat<DType::Q8_0> {
    using Block = BlockQ8_0;
    static constexpr int kBlocks = 1;
    static __device__ __forceinline__ int code(const Block& b, int, int i) { return static_cast<uint8_t>(b.quants[i]); }
    static __device__ Scales scales(const Block& b, int) { return {floatOfLowHalf(b.d)}; }
};

template <> struct FileFormat<DType::Q2_K> {
    using Block = BlockQ2_K;
    static constexpr int kBlocks = 8;
    static __device__ __forceinline__ int code(const Block& b, int j, int i) {
        return pairOf(b.quants, j / 4 * 32 + i, j % 4);
    }
    static __device__ Scales scales(const Block& b, int j) {
        const uint8_t first = b.scales[2 * j], second = b.scales[2 * j + 1];
        return {floatOfLowHalf(b.d), -floatOfLowHalf(b.dmin), first & 15, second & 15, first >> 4, second >> 4};
    }
};
template <> struct FileFormat<DType::Q3_K> {
    using Block = BlockQ3_K;
    static constexpr int kBlocks = 8;
    static __device__ __forceinline__ int code(const Block& b, int j, int i) {
        return pairOf(b.quants, j / 4 * 32 + i, j % 4) | bitOf(b.high, i, j) << 2;
    }
    // Scale h of the sixteen as stored, which is 32 too large.
    static __device__ __forceinline__ int stored(const Block& b, int h) {
        return (b.scales[h % 8] >> h / 8 * 4 & 15) | pairOf(b.scales, 8 + h % 4, h / 4) << 4;
    }
    static __device__ Scales scales(const Block& b, int j) {
        return {floatOfLowHalf(b.d), 0.0f, stored(b, 2 * j) - 32, stored(b, 2 * j + 1) - 32};
    }
};
template <> struct FileFormat<DType::Q4_K> {
    using Block = BlockQ4_K;
    static constexpr int kBlocks = 8;
    static __device__ __forceinline__ int code(const Block& b, int j, int i) {
        return b.quants[j / 2 * 32 + i] >> j % 2 * 4 & 15;
    }
    static __device__ Scales scales(const Block& b, int j) {
        const int sub = sixBitsOf(b.scales, j, false), min = sixBitsOf(b.scales, j, true);
        return {floatOfLowHalf(b.d), -floatOfLowHalf(b.dmin), sub, sub, min, min};
    }
};
template <> struct FileFormat<DType::Q5_K> {
    using Block = BlockQ5_K;
    static constexpr int kBlocks = 8;
    static __device__ __forceinline__ int code(const Block& b, int j, int i) {
        return (b.quants[j / 2 * 32 + i] >> j % 2 * 4 & 15) | bitOf(b.high, i, j) << 4;
    }
    static __device__ Scales scales(const Block& b, int j) {
        const int sub = sixBitsOf(b.scales, j, false), min = sixBitsOf(b.scales, j, true);
        return {floatOfLowHalf(b.d), -floatOfLowHalf(b.dmin), sub, sub, min, min};
    }
};
template <> struct FileFormat<DType::Q6_K> {
    using Block = BlockQ6_K;
    static constexpr int kBlocks = 8;
    static __device__ __forceinline__ int code(const Block& b, int j, int i) {
        const int low = b.low[j / 4 * 64 + j % 2 * 32 + i] >> j % 4 / 2 * 4 & 15;
        return low | pairOf(b.high, j / 4 * 32 + i, j % 4) << 4;
    }
    static __device__ Scales scales(const Block& b, int j) {
        return {floatOfLowHalf(b.d), 0.0f, b.scales[2 * j], b.scales[2 * j + 1]};
    }
};
template <> struct FileFormat<DType::IQ4_XS> {
    using Block = BlockIQ4_XS;
    static constexpr int kBlocks = 8;
    static __device__ __forceinline__ int code(const Block& b, int j, int i) { return nibbleOf(b.quants + j * 16, i); }
    static __device__ Scales scales(const Block& b, int j) {
        const int sub = ((b.scalesLow[j / 2] >> j % 2 * 4 & 15) | (b.scalesHigh >> 2 * j & 3) << 4) - 32;
        return {floatOfLowHalf(b.d), 0.0f, sub, sub};
    }
};

// The block of the format that holds block `block` of 32 elements of a file's row.
template <DType T>
__device__ __forceinline__ const typename FileFormat<T>::Block& fileBlock(const uint8_t* row, int64_t block) {
    return reinterpret_cast<const typename FileFormat<T>::Block*>(row)[block / FileFormat<T>::kBlocks];
}

// The number that a code represents.
template <DType T> __device__ __forceinline__ int quantOf(int code) {
    if constexpr (T == DType::IQ4_NL || T == DType::IQ4_XS) {
        constexpr TableWords kTable = tableWords(kIQ4Values);
        return static_cast<int8_t>(kTable.word[code >> 2] >> (code & 3) * 8);
    } else if constexpr (T == DType::MXFP4 || T == DType::NVFP4) {
        constexpr TableWords kTable = tableWords(kMXFP4Values);
        return static_cast<int8_t>(kTable.word[code >> 2] >> (code & 3) * 8);
    } else if constexpr (T == DType::Q8_0) {
        return static_cast<int8_t>(code);
    } else if constexpr (kIsGrid<T>) {
        return code;
    } else {
        return code - Format<T>::kOffset;
    }
}

}  // namespace sharpi::cuda
