// Packed weights as kernels read them: for every quantized type, how a block of 32 is loaded, and how its codes and
// scales are taken out of the loaded words.
//
// A file's block mixes scales and codes at odd addresses. A packed matrix has a plane for each kind of number
// (packed_shape.h), so that lanes with consecutive blocks n load consecutive whole words: 512 bytes of 4-bit codes for
// each warp. The order of bits within a word is the one that takes the fewest instructions to unpack:
//
// - Four-bit codes: 16 bytes. Byte i has element i (low nibble) and element 16 + i (high nibble), so an AND gives four
//   codes. Types with a table of values have in word k, from the lowest nibble on, elements 4k .. 4k + 3, then
//   16 + 4k .. 16 + 4k + 3. Sixteen bits are then the selector of a byte permutation, which looks up four values.
// - The fifth bit of Q5 or the third of Q3_K: one word. Bit 8 b + u belongs to element 4 u + b, so a shift moves four
//   bits to their place in word u of the codes.
// - Two-bit codes (Q2_K, Q3_K) or two more bits of a code (Q6_K): two words, for elements 0 .. 15 and 16 .. 31. Bits
//   8 b + 2 v and 8 b + 2 v + 1 belong to element 4 v + b of the word's half.
// - Q8_0: two planes, for elements 0 .. 15 and 16 .. 31.
// - Scales: each block has an f16 d, or a word with d in its low half and m in its high half. A superblock of a K-quant
//   has:
//     Q2_K    the file's bytes (scale | min << 4), two for each block; a word d | dmin
//     Q3_K    three words: byte j of the first two has the low nibbles of block j's two scales; nibble j of the third
//             has two upper bits for each of them; f16 d
//     Q4_K, Q5_K    four words: d | dmin; nibble j of the second has the upper two bits of block j's scale, then of its
//             min; byte j of the last two has the low nibbles of both
//     Q6_K    two int8 for each block; f16 d
//     IQ4_XS  two words: nibble j of the first has the low bits of block j's scale; the second has f16 d, and above it
//             two bits of each scale
//   MXFP4 has an exponent byte for each block.
// grid_formats.cuh has the formats with grids, ternary digits, NVFP4 and Q1_0.
#pragma once

#include "kernels/formats/grid_formats.cuh"

namespace sharpi::cuda {

// --- the formats -------------------------------------------------------------------------------------------------

struct NibbleBlock {
    uint4 codes;
    uint32_t scale;
};

template <> struct Format<DType::Q4_0> : FormatTraits<DType::Q4_0, false, false, 8, false> {
    using Raw = NibbleBlock;
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWords4(at.plane[0]), loadHalf(at.plane[1])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) { unpackNibbles(raw.codes, q); }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) { return {floatOfLowHalf(raw.scale)}; }
};

template <> struct Format<DType::Q4_1> : FormatTraits<DType::Q4_1, true, false, 0, false> {
    using Raw = NibbleBlock;
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWords4(at.plane[0]), loadWord(at.plane[1])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) { unpackNibbles(raw.codes, q); }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) {
        return {floatOfLowHalf(raw.scale), floatOfHighHalf(raw.scale), 1, 1, 1, 1};
    }
};

template <> struct Format<DType::IQ4_NL> : FormatTraits<DType::IQ4_NL, false, false, 0, true> {
    using Raw = NibbleBlock;
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int j) { return Format<DType::Q4_0>::loadAt(at, j); }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
        constexpr TableWords kTable = tableWords(kIQ4Values);
        unpackTable(raw.codes, kTable, q);
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) { return {floatOfLowHalf(raw.scale)}; }
};

template <> struct Format<DType::MXFP4> : FormatTraits<DType::MXFP4, false, false, 0, true> {
    using Raw = NibbleBlock;
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWords4(at.plane[0]), __ldg(at.plane[1])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
        constexpr TableWords kTable = tableWords(kMXFP4Values);
        unpackTable(raw.codes, kTable, q);
    }
    // 2^(e - 128): core/half.h's halfFromE8m0.
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) {
        return {__uint_as_float(raw.scale < 2 ? 0x00200000u << raw.scale : (raw.scale - 1) << 23)};
    }
};

struct FiveBitBlock {
    uint4 codes;
    uint32_t high, scale;
};

template <> struct Format<DType::Q5_0> : FormatTraits<DType::Q5_0, false, false, 16, false> {
    using Raw = FiveBitBlock;
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWords4(at.plane[0]), loadWord(at.plane[1]), loadHalf(at.plane[2])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
        unpackNibbles(raw.codes, q);
        insertBits<4>(raw.high, q);
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) { return {floatOfLowHalf(raw.scale)}; }
};

template <> struct Format<DType::Q5_1> : FormatTraits<DType::Q5_1, true, false, 0, false> {
    using Raw = FiveBitBlock;
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWords4(at.plane[0]), loadWord(at.plane[1]), loadWord(at.plane[2])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
        Format<DType::Q5_0>::codes(raw, q);
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) {
        return {floatOfLowHalf(raw.scale), floatOfHighHalf(raw.scale), 1, 1, 1, 1};
    }
};

template <> struct Format<DType::Q8_0> : FormatTraits<DType::Q8_0, false, false, 0, true> {
    struct Raw {
        uint4 first, second;
        uint32_t scale;
    };
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWords4(at.plane[0]), loadWords4(at.plane[1]), loadHalf(at.plane[2])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
        q[0] = raw.first.x, q[1] = raw.first.y, q[2] = raw.first.z, q[3] = raw.first.w;
        q[4] = raw.second.x, q[5] = raw.second.y, q[6] = raw.second.z, q[7] = raw.second.w;
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) { return {floatOfLowHalf(raw.scale)}; }
};

template <> struct Format<DType::Q2_K> : FormatTraits<DType::Q2_K, true, true, 0, false> {
    struct Raw {
        uint2 codes;
        uint32_t scale, ends;
    };
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWords2(at.plane[0]), loadHalf(at.plane[1]), loadWord(at.plane[2])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) { unpackPairs(raw.codes, q); }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) {
        return {floatOfLowHalf(raw.ends),
                -floatOfHighHalf(raw.ends),
                static_cast<int>(raw.scale & 15),
                static_cast<int>(raw.scale >> 8 & 15),
                static_cast<int>(raw.scale >> 4 & 15),
                static_cast<int>(raw.scale >> 12)};
    }
};

template <> struct Format<DType::Q3_K> : FormatTraits<DType::Q3_K, false, true, 4, false> {
    struct Raw {
        uint2 codes;
        uint32_t high, scaleLow, scaleHigh, d;
    };
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int j) {
        const uint8_t* scale = at.plane[2];
        return {loadWords2(at.plane[0]), loadWord(at.plane[1]), loadWord(scale + (j & 4)), loadWord(scale + 8),
                loadHalf(at.plane[3])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
        unpackPairs(raw.codes, q);
        insertBits<2>(raw.high, q);
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int j) {
        const uint32_t low = raw.scaleLow >> (8 * (j & 3)), high = raw.scaleHigh >> (4 * j);
        return {floatOfLowHalf(raw.d), 0.0f, static_cast<int>((low & 15) | (high << 4 & 0x30)) - 32,
                static_cast<int>((low >> 4 & 15) | (high << 2 & 0x30)) - 32};
    }
};

// The scales of block j from the four words of Q4_K or Q5_K.
__device__ __forceinline__ Scales sixBitScales(const uint4& words, int j) {
    const uint32_t low = permute(words.z, words.w, j), high = words.y >> (4 * j);
    const int sub = static_cast<int>((low & 15) | (high << 4 & 0x30));
    const int min = static_cast<int>((low >> 4 & 15) | (high << 2 & 0x30));
    return {floatOfLowHalf(words.x), -floatOfHighHalf(words.x), sub, sub, min, min};
}

template <> struct Format<DType::Q4_K> : FormatTraits<DType::Q4_K, true, false, 0, false> {
    struct Raw {
        uint4 codes, scale;
    };
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWords4(at.plane[0]), loadWords4(at.plane[1])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) { unpackNibbles(raw.codes, q); }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int j) { return sixBitScales(raw.scale, j); }
};

template <> struct Format<DType::Q5_K> : FormatTraits<DType::Q5_K, true, false, 0, false> {
    struct Raw {
        uint4 codes, scale;
        uint32_t high;
    };
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWords4(at.plane[0]), loadWords4(at.plane[2]), loadWord(at.plane[1])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
        unpackNibbles(raw.codes, q);
        insertBits<4>(raw.high, q);
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int j) { return sixBitScales(raw.scale, j); }
};

template <> struct Format<DType::Q6_K> : FormatTraits<DType::Q6_K, false, true, 32, false> {
    struct Raw {
        uint4 codes;
        uint2 high;
        uint32_t scale, d;
    };
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWords4(at.plane[0]), loadWords2(at.plane[1]), loadHalf(at.plane[2]), loadHalf(at.plane[3])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
        unpackNibbles(raw.codes, q);
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            q[v] |= pairsOf<4>(raw.high.x, v);
            q[4 + v] |= pairsOf<4>(raw.high.y, v);
        }
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int) {
        return {floatOfLowHalf(raw.d), 0.0f, static_cast<int8_t>(raw.scale & 255), static_cast<int8_t>(raw.scale >> 8)};
    }
};

template <> struct Format<DType::IQ4_XS> : FormatTraits<DType::IQ4_XS, false, false, 0, true> {
    struct Raw {
        uint4 codes;
        uint2 scale;
    };
    static __device__ __forceinline__ Raw loadAt(const Planes& at, int) {
        return {loadWords4(at.plane[0]), loadWords2(at.plane[1])};
    }
    static __device__ __forceinline__ void codes(const Raw& raw, uint32_t (&q)[8]) {
        constexpr TableWords kTable = tableWords(kIQ4Values);
        unpackTable(raw.codes, kTable, q);
    }
    static __device__ __forceinline__ Scales scales(const Raw& raw, int j) {
        const uint32_t low = raw.scale.x >> (4 * j) & 15, high = raw.scale.y >> (16 + 2 * j) & 3;
        const int sub = static_cast<int>(low | high << 4) - 32;
        return {floatOfLowHalf(raw.scale.y), 0.0f, sub, sub};
    }
};

// --- values ------------------------------------------------------------------------------------------------------

// What the elements of one half of a block share: value = scale * (code - kOffset) + min. Each product and the sum are
// rounded, as in the CPU's dequantizeRow.
struct HalfScale {
    float scale, min;
};
template <DType T> __device__ __forceinline__ HalfScale halfScale(const Scales& s, int half) {
    const int sub = half ? s.sub1 : s.sub0, min = half ? s.min1 : s.min0;
    const float d = Format<T>::kTwoFloats && half ? s.m : s.d;
    return {__fmul_rn(d, static_cast<float>(sub)), Format<T>::kHasMin ? __fmul_rn(s.m, static_cast<float>(min)) : 0.0f};
}

// The four values of one word of codes. A code in the low bits of 2^23's mantissa is the float 2^23 + code, which is
// cheaper than a conversion.
template <DType T> __device__ __forceinline__ void expandWord(uint32_t q, const HalfScale& s, float (&out)[4]) {
    using F = Format<T>;
    constexpr float kBias = 8388608.0f + F::kOffset + (F::kSigned ? 128 : 0);
    const uint32_t codes = F::kSigned ? q ^ 0x80808080u : q;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float code = __fsub_rn(__uint_as_float(permute(codes, 0x4b000000u, 0x7440 + i)), kBias);
        const float product = __fmul_rn(s.scale, code);
        out[i] = F::kHasMin ? __fadd_rn(product, s.min) : product;
    }
}

// --- from a type to its format -----------------------------------------------------------------------------------

template <DType T> struct Tag {
    static constexpr DType kType = T;
};

constexpr bool isFloatType(DType type) { return type == DType::F32 || type == DType::F16 || type == DType::BF16; }
template <DType T> constexpr bool kIsFloat = isFloatType(T);

constexpr bool isRareType(DType type) {
    switch (type) {
#define SHARPI_CASE(T) case DType::T:
        SHARPI_RARE_TYPES(SHARPI_CASE) return true;
#undef SHARPI_CASE
    default: return false;
    }
}
// As a template argument of kernels that find out the type as they run, this stands for every rare type. It is one of
// them, because nvcc takes only enumerators.
constexpr DType kAnyRare = DType::IQ2_XXS;

// Calls f(Tag<type>{}) for a rare type.
template <typename F> __device__ __forceinline__ void withRareType(DType type, const F& f) {
    switch (type) {
#define SHARPI_CASE(T) \
    case DType::T: return f(Tag<DType::T>{});
        SHARPI_RARE_TYPES(SHARPI_CASE)
#undef SHARPI_CASE
    default: return;
    }
}

// Calls f(Tag<type>{}) for a quantized type.
template <typename F> void withFormat(DType type, const F& f) {
    switch (type) {
#define SHARPI_CASE(T) \
    case DType::T: return f(Tag<DType::T>{});
        SHARPI_QUANTIZED_TYPES(SHARPI_CASE)
#undef SHARPI_CASE
    default: throw Error(ErrorKind::Internal, std::string("no packed format for ") + info(type).name);
    }
}

// The same for common types and kAnyRare.
template <typename F> void withCommonFormat(DType type, const F& f) {
    switch (type) {
#define SHARPI_CASE(T) \
    case DType::T: return f(Tag<DType::T>{});
        SHARPI_COMMON_TYPES(SHARPI_CASE)
#undef SHARPI_CASE
    default: return f(Tag<kAnyRare>{});
    }
}

// The types of tensor cores' products: common types, kAnyRare, and floats but F32, which is the only one that needs
// more than one 16-bit operand.
template <typename F> void withNarrowType(DType type, const F& f) {
    switch (type) {
    case DType::F16: return f(Tag<DType::F16>{});
    case DType::BF16: return f(Tag<DType::BF16>{});
    default: return withCommonFormat(type, f);
    }
}

// Every type by itself.
template <typename F> void withType(DType type, const F& f) {
    switch (type) {
    case DType::F32: return f(Tag<DType::F32>{});
    case DType::F16: return f(Tag<DType::F16>{});
    case DType::BF16: return f(Tag<DType::BF16>{});
    default: return withFormat(type, f);
    }
}

}  // namespace sharpi::cuda
