// For a few tokens: one row after another, straight from the file's bytes, at the speed of memory.
//
// Eight blocks of a row (256 elements) make one vector of eight block integers I, hence of eight of the contract's
// 32 accumulators: after unpacking, a token costs eight byte products, a tree of horizontal adds that leaves one
// integer per half block, and then one conversion, multiplication and fma for all eight blocks or halves. The group's
// place among the accumulators is its number mod 4, so no float is ever moved. The starts of integers, which take
// the offset of unsigned quants off, and the sums for minima come ready with the token.
#pragma once

#include "core/contract.h"
#include "cpu/kernels/internal.h"
#include "cpu/kernels/matmul/token_groups.h"
#include "cpu/kernels/matmul/unpack_vector_grids.h"

namespace sharpi::cpu::SHARPI_ISA {

// The most tokens of one call; for more, tiles are faster.
#if defined(__AVX512VNNI__)
constexpr int kVectorTokens = 2;
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

// Sums of neighbouring lanes of 16 bits, added to acc.
SHARPI_INLINE __m256i addPairs(__m256i acc, __m256i v) {
#if defined(__AVX512VNNI__)
    return _mm256_dpwssd_epi32(acc, v, _mm256_set1_epi16(1));
#else
    return _mm256_add_epi32(acc, _mm256_madd_epi16(v, _mm256_set1_epi16(1)));
#endif
}

// Sums of quant * q over the halves of blocks b .. b + 3, added to `start`: four first halves, then four second ones.
// The sums of fours are packed to 16 bits if they fit, since that takes fewer shuffles than horizontal adds.
template <class Block> SHARPI_INLINE __m256i dotHalves(const Unpacked& u, const int8_t* q, int b, __m256i start) {
    __m256i fours[4];
    for (int i = 0; i < 4; ++i) fours[i] = dotFours<Block>(u.quant[b + i], loadBytes(q + 32 * (b + i)));
    if constexpr (4 * Format<Block>::kLargest * 127 <= 32767) {
        const __m256 first = _mm256_castsi256_ps(_mm256_packs_epi32(fours[0], fours[1]));
        const __m256 second = _mm256_castsi256_ps(_mm256_packs_epi32(fours[2], fours[3]));
        const __m256i even = _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0x88));
        const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xdd));
        return addPairs(addPairs(start, even), odd);
    }
    return _mm256_add_epi32(
        start, _mm256_hadd_epi32(_mm256_hadd_epi32(fours[0], fours[1]), _mm256_hadd_epi32(fours[2], fours[3])));
}

// Eight integers times the blocks' scales times `factor`, added to the accumulators.
SHARPI_INLINE __m256 addProducts(__m256 factor, __m256 scales, __m256i integers, __m256 acc) {
    return _mm256_fmadd_ps(factor, times(scales, integers), acc);
}

// Group g of eight blocks for one token.
template <class Block>
SHARPI_INLINE __m256 addGroup(const Unpacked& u, const Factors& factors, const TokenGroup& x, __m256 acc) {
    using F = Format<Block>;
    const __m256 scales = _mm256_load_ps(x.scale);
    const auto start = [&](int at) {
        return registerOffset<Block>() == 0 ? _mm256_setzero_si256()
                                            : _mm256_load_si256(reinterpret_cast<const __m256i*>(x.start + at));
    };
    const __m256i low = dotHalves<Block>(u, x.q, 0, F::kHalves ? start(0) : _mm256_setzero_si256());
    const __m256i high = dotHalves<Block>(u, x.q, 4, F::kHalves ? start(8) : _mm256_setzero_si256());
    const __m256i first = _mm256_permute2x128_si256(low, high, 0x20);
    const __m256i second = _mm256_permute2x128_si256(low, high, 0x31);
    if constexpr (F::kHalves) {
        acc = addProducts(factors.scale[0], scales, first, acc);
        acc = addProducts(factors.scale[1], scales, second, acc);
    } else {
        const __m256i all = _mm256_add_epi32(_mm256_add_epi32(first, second), start(0));
        acc = addProducts(factors.scale[0], scales, all, acc);
    }
    if constexpr (F::kHasMin) acc = _mm256_fmadd_ps(factors.min[0], _mm256_load_ps(x.sum), acc);
    if constexpr (F::kMins == Sub::PerHalf) acc = _mm256_fmadd_ps(factors.min[1], _mm256_load_ps(x.sum + 8), acc);
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

// The last, incomplete group of a row whose format has blocks of less than 256 elements. Reading a whole group could
// run past the matrix, so the format's blocks are copied first. The accumulators of missing blocks of 32 keep their
// bits.
template <class Block>
static void addLastGroup(const Block* block, int blocks, int64_t group, const TokenGroup* const* tokens, int count,
                         float (*acc)[kContractAccumulators]) {
    Block copy[256 / Format<Block>::kElements] = {};
    const size_t held = static_cast<size_t>(blocks) * 32 / Format<Block>::kElements;
    std::memcpy(static_cast<void*>(copy), block, held * sizeof(Block));
    Unpacked u;
    unpackVector(copy, u);
    const Factors factors = factorsOf<Block>(u);
    for (int t = 0; t < count; ++t) {
        float* target = acc[t] + group % 4 * 8;
        alignas(32) float sum[8];
        _mm256_store_ps(sum, addGroup<Block>(u, factors, tokens[t][group], _mm256_load_ps(target)));
        for (int b = 0; b < blocks; ++b) target[b] = sum[b];
    }
}

template <class Block, int fixedCount>
static void rowDots(const uint8_t* row, int64_t cols, const TokenGroup* const* tokens, int anyCount, float* result) {
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
        const Factors factors = factorsOf<Block>(u);
        for (int t = 0; t < count; ++t) {
            float* target = acc[t] + g % 4 * 8;
            _mm256_store_ps(target, addGroup<Block>(u, factors, tokens[t][g], _mm256_load_ps(target)));
        }
    }
    if constexpr (kPerGroup > 1)
        if (cols % 256 != 0) addLastGroup(block, static_cast<int>(cols % 256 / 32), groups, tokens, count, acc);
    for (int t = 0; t < count; ++t) result[t] = sumTree(acc[t]);
}

template <class Block>
static void matmulVector(const MatmulArgs& args, int64_t rowBegin, int64_t rowEnd, void* scratch) {
    const int64_t cols = args.w.cols;
    const size_t rowSize = static_cast<size_t>(cols / Format<Block>::kElements) * sizeof(Block);
    const int count = static_cast<int>(args.count);
    const TokenGroup* tokens[kVectorTokens];
    for (int t = 0; t < count; ++t) {
        TokenGroup* token = static_cast<TokenGroup*>(scratch) + t * ((cols + 255) / 256);
        readToken<Block>(args, t, token, 1);
        tokens[t] = token;
    }
    for (int64_t r = rowBegin; r < rowEnd; ++r) {
        const uint8_t* row = args.w.data + static_cast<size_t>(r) * rowSize;
        float result[kVectorTokens];
        if (count == 1) rowDots<Block, 1>(row, cols, tokens, 1, result);
        else rowDots<Block, 0>(row, cols, tokens, count, result);
        for (int t = 0; t < count; ++t) args.y[t * args.yStride + r] = args.bias ? result[t] + args.bias[r] : result[t];
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
