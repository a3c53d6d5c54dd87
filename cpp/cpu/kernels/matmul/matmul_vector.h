// For a few tokens: one row after another, straight from the file's bytes, at the speed of memory.
//
// Eight blocks of a row (256 elements) make one vector of eight block integers J, hence of eight of the contract's
// 32 accumulators: after unpacking, a token costs eight byte products, a tree of horizontal adds that leaves one
// integer per block, and then one conversion, multiplication and fma for all eight. The group's place among
// the accumulators is its number mod 4, so no float is ever moved. Offsets of unsigned quants and the minima are one
// 16-bit multiply-add each with the sums that came with the activations.
#pragma once

#include "core/contract.h"
#include "cpu/kernels/internal.h"
#include "cpu/kernels/matmul/unpack_vector.h"
#include "cpu/kernels/matmul/unpack_vector_grids.h"

namespace sharpi::cpu::SHARPI_ISA {

// The most tokens of one call; for more, tiles are faster.
#if defined(__AVX512VNNI__)
constexpr int kVectorTokens = 3;
#else
constexpr int kVectorTokens = 4;
#endif

// Products of 32 quants and activations, summed in fours (which four stay within their half block).
template <class Block> SHARPI_INLINE __m256i dotFours(__m256i quant, __m256i activation) {
#if defined(__AVX512VNNI__)
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), quant, activation);
#else
    const __m256i pairs = Format<Block>::kWide
                              ? _mm256_maddubs_epi16(_mm256_abs_epi8(quant), _mm256_sign_epi8(activation, quant))
                              : _mm256_maddubs_epi16(quant, activation);
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

// Sums of neighbouring lanes, a's and b's in turn within each 128-bit half. If every lane is at most `largest`, and
// that fits 16 bits, packing and one multiply-add take a third of the shuffles of a horizontal add.
template <int largest> SHARPI_INLINE __m256i addPairs(__m256i a, __m256i b) {
    if constexpr (largest <= 32767) return _mm256_madd_epi16(_mm256_packs_epi32(a, b), _mm256_set1_epi16(1));
    else return _mm256_hadd_epi32(a, b);
}

// 16 x int16 as int32: those at even places, and those at odd places.
SHARPI_INLINE __m256i evenOf(__m256i v) { return _mm256_srai_epi32(_mm256_slli_epi32(v, 16), 16); }
SHARPI_INLINE __m256i oddOf(__m256i v) { return _mm256_srai_epi32(v, 16); }

// Sums of quant * q over the halves of eight blocks. The offset of unsigned quants is still in them.
struct HalfDots {
    __m256i first, second;
};
template <class Block> SHARPI_INLINE HalfDots dotHalves(const Unpacked& u, const int8_t* q) {
    using F = Format<Block>;
    __m256i fours[8];
    for (int b = 0; b < 8; ++b) fours[b] = dotFours<Block>(u.quant[b], loadBytes(q + 32 * b));
    // In each pair, lane 0 is the first half block's and lane 1 the second's.
    constexpr int four = 4 * F::kLargest * 127, eight = 2 * four;
    const __m256i low = addPairs<eight>(addPairs<four>(fours[0], fours[1]), addPairs<four>(fours[2], fours[3]));
    const __m256i high = addPairs<eight>(addPairs<four>(fours[4], fours[5]), addPairs<four>(fours[6], fours[7]));
    return {_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
}

// The block integers J of eight blocks.
template <class Block> SHARPI_INLINE __m256i dotBlocks(const Unpacked& u, const int8_t* q, __m256i sums) {
    using F = Format<Block>;
    const HalfDots halves = dotHalves<Block>(u, q);
    __m256i dot;
    if constexpr (F::kScales == Sub::PerHalf) {
        dot = _mm256_add_epi32(_mm256_mullo_epi32(halves.first, evenOf(u.scale)),
                               _mm256_mullo_epi32(halves.second, oddOf(u.scale)));
    } else {
        dot = _mm256_add_epi32(halves.first, halves.second);
        if constexpr (F::kScales == Sub::PerBlock) dot = _mm256_mullo_epi32(dot, oddOf(u.scale));
    }
    constexpr int offset = registerOffset<Block>();
    if constexpr (offset != 0) {
        __m256i weight = _mm256_set1_epi16(offset);
        if constexpr (F::kScales != Sub::None) weight = _mm256_mullo_epi16(u.scale, weight);
        dot = _mm256_sub_epi32(dot, _mm256_madd_epi16(sums, weight));
    }
    return dot;
}

// One group of eight blocks for one token.
template <class Block>
SHARPI_INLINE __m256 addGroup(const Unpacked& u, const int8_t* q, const float* scale, const int16_t* sums, __m256 acc) {
    const __m256i s = loadBytes(sums);
    const __m256 scales = _mm256_loadu_ps(scale);
    if constexpr (Format<Block>::kTwoFloats) {
        const HalfDots halves = dotHalves<Block>(u, q);
        const __m256i offset = _mm256_set1_epi32(registerOffset<Block>());
        const __m256i first = _mm256_sub_epi32(halves.first, _mm256_mullo_epi32(evenOf(s), offset));
        const __m256i second = _mm256_sub_epi32(halves.second, _mm256_mullo_epi32(oddOf(s), offset));
        acc = _mm256_fmadd_ps(_mm256_mul_ps(u.d, scales), _mm256_cvtepi32_ps(first), acc);
        return _mm256_fmadd_ps(_mm256_mul_ps(u.m, scales), _mm256_cvtepi32_ps(second), acc);
    }
    const __m256i dot = dotBlocks<Block>(u, q, s);
    acc = _mm256_fmadd_ps(_mm256_mul_ps(u.d, scales), _mm256_cvtepi32_ps(dot), acc);
    if constexpr (Format<Block>::kHasMin) {
        const __m256i min = Format<Block>::kMins == Sub::None ? _mm256_set1_epi16(1) : u.min;
        acc = _mm256_fmadd_ps(_mm256_mul_ps(u.m, scales), _mm256_cvtepi32_ps(_mm256_madd_epi16(s, min)), acc);
    }
    return acc;
}

// The end of the contract's sum, over 32 accumulators.
SHARPI_INLINE float sumTree(const float* acc) {
    const __m256 eight = _mm256_add_ps(_mm256_add_ps(_mm256_load_ps(acc), _mm256_load_ps(acc + 16)),
                                       _mm256_add_ps(_mm256_load_ps(acc + 8), _mm256_load_ps(acc + 24)));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

struct TokenRow {
    const int8_t* q;
    const float* scale;
    const int16_t* sums;
};

SHARPI_INLINE TokenRow tokenRow(const MatmulArgs& args, int64_t token) {
    const QuantizedRows& x = *args.xQuant;
    const int64_t row = args.rowIndex ? args.rowIndex[token] : token;
    return {x.q + row * x.qStride, x.scale + row * x.scaleStride, x.sums + row * x.sumStride};
}

// The last, incomplete group of a row whose format has blocks of less than 256 elements. Reading a whole group could
// run past the matrix, so the format's blocks are copied first. The accumulators of missing blocks of 32 keep their
// bits.
template <class Block>
static void addLastGroup(const Block* block, int blocks, int64_t group, const TokenRow* tokens, int count,
                         float (*acc)[kContractAccumulators]) {
    Block copy[256 / Format<Block>::kElements] = {};
    const size_t held = static_cast<size_t>(blocks) * 32 / Format<Block>::kElements;
    std::memcpy(static_cast<void*>(copy), block, held * sizeof(Block));
    Unpacked u;
    unpackVector(copy, u);
    for (int t = 0; t < count; ++t) {
        float* target = acc[t] + group % 4 * 8;
        const TokenRow& x = tokens[t];
        alignas(32) float sum[8];
        _mm256_store_ps(sum, addGroup<Block>(u, x.q + group * 256, x.scale + group * 8, x.sums + group * 16,
                                             _mm256_load_ps(target)));
        for (int b = 0; b < blocks; ++b) target[b] = sum[b];
    }
}

template <class Block, int fixedCount>
static void rowDots(const uint8_t* row, int64_t cols, const TokenRow* tokens, int anyCount, float* result) {
    constexpr int kPerGroup = 256 / Format<Block>::kElements;
    const int count = fixedCount ? fixedCount : anyCount;
    alignas(64) float acc[fixedCount ? fixedCount : kVectorTokens][kContractAccumulators] = {};
    const Block* block = reinterpret_cast<const Block*>(row);
    const int64_t groups = cols / 256;
    for (int64_t g = 0; g < groups; ++g, block += kPerGroup) {
        for (size_t line = 0; line < kPerGroup * sizeof(Block); line += 64)
            _mm_prefetch(reinterpret_cast<const char*>(block) + 4096 + line, _MM_HINT_T0);
        Unpacked u;
        unpackVector(block, u);
        for (int t = 0; t < count; ++t) {
            float* target = acc[t] + g % 4 * 8;
            const TokenRow& x = tokens[t];
            _mm256_store_ps(
                target, addGroup<Block>(u, x.q + g * 256, x.scale + g * 8, x.sums + g * 16, _mm256_load_ps(target)));
        }
    }
    if constexpr (kPerGroup > 1)
        if (cols % 256 != 0) addLastGroup(block, static_cast<int>(cols % 256 / 32), groups, tokens, count, acc);
    for (int t = 0; t < count; ++t) result[t] = sumTree(acc[t]);
}

template <class Block> static void matmulVector(const MatmulArgs& args, int64_t rowBegin, int64_t rowEnd) {
    const int64_t cols = args.w.cols;
    const size_t rowSize = static_cast<size_t>(cols / Format<Block>::kElements) * sizeof(Block);
    const int count = static_cast<int>(args.count);
    TokenRow tokens[kVectorTokens];
    for (int t = 0; t < count; ++t) tokens[t] = tokenRow(args, t);
    for (int64_t r = rowBegin; r < rowEnd; ++r) {
        const uint8_t* row = args.w.data + static_cast<size_t>(r) * rowSize;
        float result[kVectorTokens];
        if (count == 1) rowDots<Block, 1>(row, cols, tokens, 1, result);
        else rowDots<Block, 0>(row, cols, tokens, count, result);
        for (int t = 0; t < count; ++t) args.y[t * args.yStride + r] = args.bias ? result[t] + args.bias[r] : result[t];
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
