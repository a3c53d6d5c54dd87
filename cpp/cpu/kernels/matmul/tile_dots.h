// The products of a tile with a few tokens.
//
// kTileVectors * count integer sums are made at once: each load of quants is used for all tokens, each broadcast of
// activations for all vectors, and the sums are enough to hide the products' latency. Then each integer is converted,
// multiplied by its token's scale and added to its accumulator with one fma; a minimum is one more.
#pragma once

#include "cpu/kernels/matmul/tile_pack.h"
#include "cpu/kernels/matmul/token_groups.h"

namespace sharpi::cpu::SHARPI_ISA {

// The most tokens whose sums fit the registers.
#if defined(__AVX512VNNI__)
constexpr int kTileTokens = 6;
#else
constexpr int kTileTokens = 4;
#endif

#if !defined(__AVX512VNNI__)
// GCC turns sums of integers into trees, for which there are not enough registers: so it must not see through these.
SHARPI_INLINE VecI opaque(VecI v) {
    __asm__("" : "+x"(v));
    return v;
}
SHARPI_INLINE void addTo(VecI& sum, VecI v) { sum = opaque(addI(sum, v)); }
#endif

// Adds the products of 4 * fours elements from `quant` on with each token's from `at` on.
template <int chunk, int fours, int count>
SHARPI_INLINE void dotLanes(const uint8_t (*quant)[kTileRows][4], const TokenGroup* tokens, int at,
                            VecI (*sums)[kTileVectors]) {
#if defined(__AVX512VNNI__)
    for (int k = 0; k < fours; ++k)
        for (int t = 0; t < count; ++t) {
            const VecI word = broadcastWord(tokens[t].q + at + 4 * k);
            for (int v = 0; v < kTileVectors; ++v)
                sums[t][v] = _mm512_dpbusd_epi32(sums[t][v], loadI(quant[k][v * kLaneRows]), word);
        }
#else
    const VecI ones = _mm256_set1_epi16(1);
    if constexpr (chunk == 0) {
        for (int k = 0; k < fours; ++k) {
            const VecI w = loadI(quant[k]), magnitude = _mm256_abs_epi8(w);
            for (int t = 0; t < count; ++t) {
                const VecI signedQ = _mm256_sign_epi8(broadcastWord(tokens[t].q + at + 4 * k), w);
                addTo(sums[t][0], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, signedQ), ones));
            }
        }
    } else {
        constexpr int kStep = chunk < fours ? chunk : fours;
        for (int begin = 0; begin < fours; begin += kStep) {
            VecI pairs[count];
            for (int k = begin; k < begin + kStep; ++k) {
                const VecI w = loadI(quant[k]);
                for (int t = 0; t < count; ++t) {
                    const VecI product = _mm256_maddubs_epi16(w, broadcastWord(tokens[t].q + at + 4 * k));
                    pairs[t] = k == begin ? product : opaque(_mm256_add_epi16(pairs[t], product));
                }
            }
            for (int t = 0; t < count; ++t) addTo(sums[t][0], _mm256_madd_epi16(pairs[t], ones));
        }
    }
#endif
}

// Block b of the tokens' groups, which is block w of the tile.
template <class Shape, int count>
SHARPI_INLINE void addBlock(const TileBlock<Shape>& w, const TokenGroup* tokens, int b, VecF (*acc)[kTileVectors]) {
    constexpr int kFours = 8 / Shape::kParts;
    for (int part = 0; part < Shape::kParts; ++part) {
        VecI sums[count][kTileVectors];
        for (int t = 0; t < count; ++t)
            for (int v = 0; v < kTileVectors; ++v)
                sums[t][v] = set1I(tokens[t].start[Shape::kParts == 2 ? startOf(b, part) : b]);
        dotLanes<Shape::kChunk, kFours, count>(w.quant + kFours * part, tokens, 32 * b + 4 * kFours * part, sums);
        for (int t = 0; t < count; ++t) {
            const VecF scale = set1F(tokens[t].scale[b]);
            for (int v = 0; v < kTileVectors; ++v)
                acc[t][v] = fma(loadF(w.factor[part] + v * kLaneRows), mul(scale, toFloat(sums[t][v])), acc[t][v]);
        }
    }
    for (int i = 0; i < Shape::kMins; ++i)
        for (int t = 0; t < count; ++t) {
            const VecF sum = set1F(tokens[t].sum[8 * i + b]);
            for (int v = 0; v < kTileVectors; ++v)
                acc[t][v] = fma(loadF(w.factor[Shape::kParts + i] + v * kLaneRows), sum, acc[t][v]);
        }
}

// For processors whose products need registers of tiles (tile_dots_amx.h).
template <class Shape> static void beginTiles(int) {}
static inline void endTiles() {}

// [5] has the whole sums; see addToTree.
using TileSums = float[6][kTileTokens][kTileRows];
constexpr int64_t kSumStride = kTileTokens * kTileRows;

// The sums of `count` tokens. Group g of token t is groups[g * count + t].
template <class Shape, int count>
static void tileDots(const TileBlock<Shape>* tile, int64_t blocks, const TokenGroup* groups, TileSums& sums) {
    constexpr int kGroups = kContractAccumulators / 8;  // of a segment
    const int64_t segments = (blocks + kContractAccumulators - 1) / kContractAccumulators;
    for (int n = 0; n < kContractAccumulators; ++n) {
        VecF acc[count][kTileVectors];
        for (auto& vectors : acc)
            for (VecF& v : vectors) v = set1F(0);
        const int place = inSumOrder(n);
        const TileBlock<Shape>* w = tile + n * segments;
        const TokenGroup* tokens = groups + place / 8 * count;
        for (int64_t b = place; b < blocks; b += kContractAccumulators, ++w, tokens += kGroups * count)
            addBlock<Shape, count>(*w, tokens, place % 8, acc);
        for (int t = 0; t < count; ++t)
            for (int v = 0; v < kTileVectors; ++v) addToTree(n, acc[t][v], sums[0][t] + v * kLaneRows, kSumStride);
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
