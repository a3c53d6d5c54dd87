// For many tokens: a tile of rows is repacked once and then multiplied with every token of the call.
//
// One lane is one weight row (16 with AVX-512, 8 with AVX2). In the tile, four neighbouring quants of each row lie
// together, so that one broadcast of four activations meets all rows and block integers come out with no horizontal
// adds. d * sub and m * min of a block or half block are one float for each row. A few tokens go through a group
// together, so each load of quants is used several times. The 32 accumulators of each row and token stay in the
// first-level cache; the tile, as long as a row, in the second.
#pragma once

#include "core/contract.h"
#include "cpu/kernels/internal.h"
#include "cpu/kernels/lanes.h"
#include "cpu/kernels/matmul/token_rows.h"
#include "cpu/kernels/matmul/unpack_vector_grids.h"

namespace sharpi::cpu::SHARPI_ISA {

constexpr int kTileTokens = 4;

// 256 elements of kTileRows rows.
template <class Block> struct alignas(64) TileGroup {
    using F = Format<Block>;
    static constexpr int kScales = F::kHalves ? 16 : 8;  // of first halves and of second ones, or of blocks
    static constexpr int kMins = F::kMins == Sub::PerHalf ? 16 : F::kHasMin ? 8 : 0;
    uint8_t quant[64][kTileRows][4];
    float scale[kScales][kTileRows];          // d * sub
    float min[kMins ? kMins : 1][kTileRows];  // m * min
};

// The scales of a tile, row by row, before they are transposed.
struct alignas(64) StagedScales {
    float row[kTileRows][16];
};

template <int count> static void storeColumns(const StagedScales& staged, float (*to)[kTileRows]) {
    alignas(64) uint8_t columns[16][kTileRows][4];
    for (int k = 0; k < count; k += kTileRows)
        transposeWords(reinterpret_cast<const uint8_t*>(staged.row[0] + k), sizeof staged.row[0], columns + k);
    std::memcpy(to, columns, count * sizeof columns[0]);
}

// Packs one group of `rows` rows; the tile's other rows become zero. blocks: of the file's format, in each row.
template <class Block>
static void packGroup(const uint8_t* first, size_t rowSize, int rows, int blocks, TileGroup<Block>& tile) {
    using F = Format<Block>;
    using T = TileGroup<Block>;
    constexpr int kPerGroup = 256 / F::kElements;
    alignas(64) uint8_t stage[kTileRows][256];
    StagedScales scale, min;
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
        const Factors factors = factorsOf<Block>(u);
        for (int i = 0; i < T::kScales / 8; ++i) _mm256_store_ps(scale.row[r] + 8 * i, factors.scale[i]);
        for (int i = 0; i < T::kMins / 8; ++i) _mm256_store_ps(min.row[r] + 8 * i, factors.min[i]);
    }
    for (int k = 0; k < 64; k += kTileRows) transposeWords(stage[0] + 4 * k, 256, tile.quant + k);
    storeColumns<T::kScales>(scale, tile.scale);
    if constexpr (F::kHasMin) storeColumns<T::kMins>(min, tile.min);
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

// Part `part` of block b of group g: the integer sum, with the quants' offset taken off, times the token's scale, for
// each token.
template <class Block, int parts>
SHARPI_INLINE void products(const TileGroup<Block>& w, int b, int part, int64_t g, const TokenRow* tokens,
                            const VecF* scales, VecF* to) {
    constexpr int fours = 8 / parts;
    const int word = 8 * b + fours * part;
    const int8_t* q[kTileTokens];
    VecI integers[kTileTokens];
    for (int t = 0; t < kTileTokens; ++t) {
        q[t] = tokens[t].q;
        integers[t] = set1I(tokens[t].sums[g].start[parts == 2 ? startOf(b, part) : b]);
    }
    dotLanes<Block, fours>(w.quant + word, q, g * 256 + word * 4, integers);
    for (int t = 0; t < kTileTokens; ++t) to[t] = mul(scales[t], toFloat(integers[t]));
}

// acc[t][phase][lane] over all groups of the tile.
template <class Block>
static void tileDots(const TileGroup<Block>* tile, int64_t cols, const TokenRow* tokens,
                     float (*acc)[kContractAccumulators][kTileRows]) {
    using T = TileGroup<Block>;
    constexpr int parts = T::kScales / 8, mins = T::kMins / 8;
    for (int64_t g = 0; g * 256 < cols; ++g) {
        const T& w = tile[g];
        const int blocks = cols - g * 256 < 256 ? static_cast<int>((cols - g * 256) / 32) : 8;
        for (int b = 0; b < blocks; ++b) {
            VecF sum[kTileTokens], scales[kTileTokens], product[kTileTokens];
            for (int t = 0; t < kTileTokens; ++t) {
                sum[t] = loadF(acc[t][g % 4 * 8 + b]);
                scales[t] = set1F(tokens[t].scale[g * 8 + b]);
            }
            for (int part = 0; part < parts; ++part) {
                products<Block, parts>(w, b, part, g, tokens, scales, product);
                const VecF factor = loadF(w.scale[8 * part + b]);
                for (int t = 0; t < kTileTokens; ++t) sum[t] = fma(factor, product[t], sum[t]);
            }
            for (int part = 0; part < mins; ++part) {
                const VecF factor = loadF(w.min[8 * part + b]);
                for (int t = 0; t < kTileTokens; ++t)
                    sum[t] = fma(factor, set1F(tokens[t].sums[g].sum[8 * part + b]), sum[t]);
            }
            for (int t = 0; t < kTileTokens; ++t) storeF(acc[t][g % 4 * 8 + b], sum[t]);
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
    TokenSums* sums = reinterpret_cast<TokenSums*>(tile + groups);
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
            for (int t = 0; t < kTileTokens; ++t) {
                // Past the end the last token is computed again, and not stored.
                const int64_t token = begin + t < args.count ? begin + t : args.count - 1;
                tokens[t] = tokenRow<Block>(args, token, sums + t * groups);
            }
            std::memset(acc, 0, sizeof acc);
            tileDots<Block>(tile, cols, tokens, acc);
            for (int t = 0; t < kTileTokens && begin + t < args.count; ++t)
                finishTile(acc[t], args.bias ? args.bias + r : nullptr, rows, args.y + (begin + t) * args.yStride + r);
        }
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
