// For many tokens: a tile of rows is repacked once and then multiplied with every token of the call.
//
// One lane is one weight row (16 with AVX-512, 8 with AVX2). In the tile, four neighbouring quants of each row lie
// together, so that one broadcast of four activations meets all rows and block integers come out with no horizontal
// adds. Integer sub-scales and minima are kept as floats: their products with exact block integers stay below 2^24
// and are exact, and float units are less busy. A few tokens go through a group together, so each load of quants is
// used several times. The 32 accumulators of each row and token stay in the first-level cache; the tile, as long as a
// row, in the second.
#pragma once

#include "core/contract.h"
#include "cpu/kernels/internal.h"
#include "cpu/kernels/lanes.h"
#include "cpu/kernels/matmul/matmul_vector.h"

namespace sharpi::cpu::SHARPI_ISA {

constexpr int kTileTokens = 4;

constexpr int subCount(Sub sub) { return sub == Sub::PerHalf ? 16 : sub == Sub::PerBlock ? 8 : 0; }

// 256 elements of kTileRows rows.
template <class Block> struct alignas(64) TileGroup {
    using F = Format<Block>;
    static constexpr int kFloats = F::kElements < 256 ? 8 : 1;
    static constexpr int kScaleCount = subCount(F::kScales), kMinCount = subCount(F::kMins);
    uint8_t quant[64][kTileRows][4];
    float d[kFloats][kTileRows];
    float m[F::kHasSecond ? kFloats : 1][kTileRows];
    float scale[kScaleCount ? kScaleCount : 1][kTileRows];
    float min[kMinCount ? kMinCount : 1][kTileRows];
};

// What a group's products need of a token's sums, computed once for each tile: the start of each integer sum, which
// corrects the quants' offset, and the sums as floats.
struct TokenSums {
    int32_t start[16];  // per half block, or per block in the first 8
    float sum[16];      // likewise
};

template <class Block> static void readSums(const int16_t* sums, int64_t groups, TokenSums* out) {
    using F = Format<Block>;
    constexpr int offset = registerOffset<Block>();
    for (int64_t g = 0; g < groups; ++g) {
        const __m256i s = loadBytes(sums + g * 16);
        const __m256i even = evenOf(s), odd = oddOf(s);
        const __m256i both = _mm256_add_epi32(even, odd);
        const __m256i factor = _mm256_set1_epi32(-offset);
        if constexpr (F::kScales == Sub::PerHalf || F::kTwoFloats) {
            const __m256i low = _mm256_unpacklo_epi32(even, odd), high = _mm256_unpackhi_epi32(even, odd);
            const __m256i first = _mm256_permute2x128_si256(low, high, 0x20);
            const __m256i second = _mm256_permute2x128_si256(low, high, 0x31);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[g].start), _mm256_mullo_epi32(first, factor));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[g].start + 8), _mm256_mullo_epi32(second, factor));
            _mm256_storeu_ps(out[g].sum, _mm256_cvtepi32_ps(first));
            _mm256_storeu_ps(out[g].sum + 8, _mm256_cvtepi32_ps(second));
        } else {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[g].start), _mm256_mullo_epi32(both, factor));
            _mm256_storeu_ps(out[g].sum, _mm256_cvtepi32_ps(both));
        }
    }
}

// The scales of a tile, row by row, before they are transposed.
struct alignas(64) StagedScales {
    float row[kTileRows][16];
};

template <int count> static void storeColumns(const StagedScales& staged, float (*to)[kTileRows]) {
    if constexpr (count == 1) {
        for (int r = 0; r < kTileRows; ++r) to[0][r] = staged.row[r][0];
    } else {
        alignas(64) uint8_t columns[16][kTileRows][4];
        for (int k = 0; k < count; k += kTileRows)
            transposeWords(reinterpret_cast<const uint8_t*>(staged.row[0] + k), sizeof staged.row[0], columns + k);
        std::memcpy(to, columns, count * sizeof columns[0]);
    }
}

// 16 x int16 as floats: all 16, or the first of each pair.
template <Sub sub> SHARPI_INLINE void stageSubs(float* row, __m256i subs) {
    if constexpr (sub == Sub::PerHalf) {
        _mm256_store_ps(row, _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(subs))));
        _mm256_store_ps(row + 8, _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_extracti128_si256(subs, 1))));
    } else {
        _mm256_store_ps(row, _mm256_cvtepi32_ps(_mm256_srai_epi32(subs, 16)));
        _mm256_store_ps(row + 8, _mm256_setzero_ps());
    }
}

SHARPI_INLINE void stageFloats(float* row, __m256 floats) {
    _mm256_store_ps(row, floats);
    _mm256_store_ps(row + 8, _mm256_setzero_ps());
}

// Packs one group of `rows` rows; the tile's other rows become zero. blocks: of the file's format, in each row.
template <class Block>
static void packGroup(const uint8_t* first, size_t rowSize, int rows, int blocks, TileGroup<Block>& tile) {
    using F = Format<Block>;
    using T = TileGroup<Block>;
    constexpr int kPerGroup = 256 / F::kElements;
    alignas(64) uint8_t stage[kTileRows][256];
    StagedScales d, m, scale, min;
    for (int r = 0; r < kTileRows; ++r) {
        Block copy[kPerGroup];
        const Block* block = reinterpret_cast<const Block*>(first + static_cast<size_t>(r) * rowSize);
        if (r >= rows || blocks < kPerGroup) {
            std::memset(static_cast<void*>(copy), 0, sizeof copy);
            if (r < rows) std::memcpy(static_cast<void*>(copy), block, static_cast<size_t>(blocks) * sizeof(Block));
            block = copy;
        }
        Unpacked u;
        unpackVector(block, u);
        for (int b = 0; b < 8; ++b) _mm256_store_si256(reinterpret_cast<__m256i*>(stage[r] + 32 * b), u.quant[b]);
        stageFloats(d.row[r], u.d);
        if constexpr (F::kHasSecond) stageFloats(m.row[r], u.m);
        if constexpr (F::kScales != Sub::None) stageSubs<F::kScales>(scale.row[r], u.scale);
        if constexpr (F::kMins != Sub::None) stageSubs<F::kMins>(min.row[r], u.min);
    }
    for (int k = 0; k < 64; k += kTileRows) transposeWords(stage[0] + 4 * k, 256, tile.quant + k);
    storeColumns<T::kFloats>(d, tile.d);
    if constexpr (F::kHasSecond) storeColumns<T::kFloats>(m, tile.m);
    if constexpr (F::kScales != Sub::None) storeColumns<T::kScaleCount>(scale, tile.scale);
    if constexpr (F::kMins != Sub::None) storeColumns<T::kMinCount>(min, tile.min);
}

// Sums of the products of 4 * `fours` elements from `quant` on, one for each lane and token.
template <class Block, int fours>
SHARPI_INLINE void dotLanes(const uint8_t (*quant)[kTileRows][4], const int8_t* const* q, int64_t at, VecI* sums) {
#if defined(__AVX512VNNI__)
    for (int k = 0; k < fours; ++k) {
        const VecI w = loadI(quant[k]);
        for (int t = 0; t < kTileTokens; ++t)
            sums[t] = _mm512_dpbusd_epi32(sums[t], w, broadcastWord(q[t] + at + 4 * k));
    }
#else
    const VecI ones = _mm256_set1_epi16(1);
    if constexpr (Format<Block>::kWide) {
        for (int k = 0; k < fours; ++k) {
            const VecI w = loadI(quant[k]), magnitude = _mm256_abs_epi8(w);
            for (int t = 0; t < kTileTokens; ++t) {
                const VecI signedQ = _mm256_sign_epi8(broadcastWord(q[t] + at + 4 * k), w);
                sums[t] = addI(sums[t], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, signedQ), ones));
            }
        }
    } else {
        // This many 16-bit products are added before they are widened: no more can be sure not to overflow.
        constexpr int kFit = 32767 / (2 * 127 * Format<Block>::kLargest);
        constexpr int kChunk = kFit >= fours ? fours : kFit >= 4 ? 4 : 2;
        for (int begin = 0; begin < fours; begin += kChunk) {
            VecI pairs[kTileTokens];
            for (int k = begin; k < begin + kChunk; ++k) {
                const VecI w = loadI(quant[k]);
                for (int t = 0; t < kTileTokens; ++t) {
                    const VecI product = _mm256_maddubs_epi16(w, broadcastWord(q[t] + at + 4 * k));
                    pairs[t] = k == begin ? product : _mm256_add_epi16(pairs[t], product);
                }
            }
            for (int t = 0; t < kTileTokens; ++t) sums[t] = addI(sums[t], _mm256_madd_epi16(pairs[t], ones));
        }
    }
#endif
}

// The sums of the halves of block b of a group, with the quants' offset taken off.
template <class Block>
SHARPI_INLINE void halfIntegers(const TileGroup<Block>& w, int b, int64_t g, const int8_t* const* q,
                                const TokenSums* const* sums, VecI* first, VecI* second) {
    const int64_t at = g * 256 + b * 32;
    for (int t = 0; t < kTileTokens; ++t) first[t] = set1I(sums[t][g].start[2 * b]);
    dotLanes<Block, 4>(w.quant + 8 * b, q, at, first);
    for (int t = 0; t < kTileTokens; ++t) second[t] = set1I(sums[t][g].start[2 * b + 1]);
    dotLanes<Block, 4>(w.quant + 8 * b + 4, q, at + 16, second);
}

// J (and M) of block b of a group, as floats, for each token.
template <class Block>
SHARPI_INLINE void blockIntegers(const TileGroup<Block>& w, int b, int64_t g, const int8_t* const* q,
                                 const TokenSums* const* sums, VecF* dot, VecF* minimum) {
    using F = Format<Block>;
    if constexpr (F::kTwoFloats) {
        VecI first[kTileTokens], second[kTileTokens];
        halfIntegers(w, b, g, q, sums, first, second);
        for (int t = 0; t < kTileTokens; ++t) dot[t] = toFloat(first[t]), minimum[t] = toFloat(second[t]);
    } else if constexpr (F::kScales == Sub::PerHalf) {
        VecI first[kTileTokens], second[kTileTokens];
        halfIntegers(w, b, g, q, sums, first, second);
        const VecF scale0 = loadF(w.scale[2 * b]), scale1 = loadF(w.scale[2 * b + 1]);
        for (int t = 0; t < kTileTokens; ++t) dot[t] = fma(toFloat(first[t]), scale0, mul(toFloat(second[t]), scale1));
    } else {
        VecI all[kTileTokens];
        for (int t = 0; t < kTileTokens; ++t) all[t] = set1I(sums[t][g].start[b]);
        dotLanes<Block, 8>(w.quant + 8 * b, q, g * 256 + b * 32, all);
        for (int t = 0; t < kTileTokens; ++t) dot[t] = toFloat(all[t]);
        if constexpr (F::kScales == Sub::PerBlock) {
            const VecF scale = loadF(w.scale[b]);
            for (int t = 0; t < kTileTokens; ++t) dot[t] = mul(dot[t], scale);
        }
    }
    if constexpr (F::kMins == Sub::PerHalf) {
        const VecF min0 = loadF(w.min[2 * b]), min1 = loadF(w.min[2 * b + 1]);
        for (int t = 0; t < kTileTokens; ++t)
            minimum[t] = fma(set1F(sums[t][g].sum[2 * b]), min0, mul(set1F(sums[t][g].sum[2 * b + 1]), min1));
    } else if constexpr (F::kMins == Sub::PerBlock) {
        for (int t = 0; t < kTileTokens; ++t) minimum[t] = mul(set1F(sums[t][g].sum[b]), loadF(w.min[b]));
    } else if constexpr (F::kHasMin) {
        for (int t = 0; t < kTileTokens; ++t) minimum[t] = set1F(sums[t][g].sum[b]);
    }
}

// acc[t][phase][lane] over all groups of the tile.
template <class Block>
static void tileDots(const TileGroup<Block>* tile, int64_t cols, const TokenRow* tokens, const TokenSums* const* sums,
                     float (*acc)[kContractAccumulators][kTileRows]) {
    constexpr bool perBlock = TileGroup<Block>::kFloats == 8;
    const int8_t* q[kTileTokens];
    for (int t = 0; t < kTileTokens; ++t) q[t] = tokens[t].q;
    for (int64_t g = 0; g * 256 < cols; ++g) {
        const TileGroup<Block>& w = tile[g];
        const int blocks = cols - g * 256 < 256 ? static_cast<int>((cols - g * 256) / 32) : 8;
        for (int b = 0; b < blocks; ++b) {
            VecF dot[kTileTokens], minimum[kTileTokens];
            blockIntegers<Block>(w, b, g, q, sums, dot, minimum);
            const VecF d = loadF(w.d[perBlock ? b : 0]);
            for (int t = 0; t < kTileTokens; ++t) {
                float* target = acc[t][g % 4 * 8 + b];
                const VecF s = set1F(tokens[t].scale[g * 8 + b]);
                VecF sum = fma(mul(d, s), dot[t], loadF(target));
                if constexpr (Format<Block>::kHasSecond)
                    sum = fma(mul(loadF(w.m[perBlock ? b : 0]), s), minimum[t], sum);
                storeF(target, sum);
            }
        }
    }
}

// The end of the contract's sum for all lanes; then adds the bias and stores.
static void finishTile(float (*acc)[kTileRows], const float* bias, int rows, float* y) {
    for (int width = kContractAccumulators / 2; width >= 1; width /= 2)
        for (int i = 0; i < width; ++i) storeF(acc[i], addF(loadF(acc[i]), loadF(acc[i + width])));
    for (int r = 0; r < rows; ++r) y[r] = bias ? acc[0][r] + bias[r] : acc[0][r];
}

template <class Block>
static void matmulTiles(const MatmulArgs& args, int64_t rowBegin, int64_t rowEnd, void* scratch) {
    constexpr int kPerGroup = 256 / Format<Block>::kElements;
    const int64_t cols = args.w.cols, groups = (cols + 255) / 256;
    const int blocksOfRow = static_cast<int>(cols / Format<Block>::kElements);
    const size_t rowSize = static_cast<size_t>(blocksOfRow) * sizeof(Block);
    TileGroup<Block>* tile = static_cast<TileGroup<Block>*>(scratch);
    TokenSums* sumsBuffer = reinterpret_cast<TokenSums*>(tile + groups);
    alignas(64) float acc[kTileTokens][kContractAccumulators][kTileRows];
    for (int64_t r = rowBegin; r < rowEnd; r += kTileRows) {
        const int rows = rowEnd - r < kTileRows ? static_cast<int>(rowEnd - r) : kTileRows;
        const uint8_t* first = args.w.data + static_cast<size_t>(r) * rowSize;
        for (int64_t g = 0; g < groups; ++g) {
            const int left = blocksOfRow - static_cast<int>(g) * kPerGroup;
            packGroup<Block>(first + static_cast<size_t>(g) * kPerGroup * sizeof(Block), rowSize, rows,
                             left < kPerGroup ? left : kPerGroup, tile[g]);
        }
        for (int64_t begin = 0; begin < args.count; begin += kTileTokens) {
            TokenRow tokens[kTileTokens];
            const TokenSums* sums[kTileTokens];
            for (int t = 0; t < kTileTokens; ++t) {
                // Past the end the last token is computed again, and not stored.
                const int64_t token = begin + t < args.count ? begin + t : args.count - 1;
                tokens[t] = tokenRow(args, token);
                readSums<Block>(tokens[t].sums, groups, sumsBuffer + t * groups);
                sums[t] = sumsBuffer + t * groups;
            }
            std::memset(acc, 0, sizeof acc);
            tileDots<Block>(tile, cols, tokens, sums, acc);
            for (int t = 0; t < kTileTokens && begin + t < args.count; ++t)
                finishTile(acc[t], args.bias ? args.bias + r : nullptr, rows, args.y + (begin + t) * args.yStride + r);
        }
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
