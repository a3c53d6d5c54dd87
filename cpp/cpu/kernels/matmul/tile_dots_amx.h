// The products of a tile with up to 16 tokens, on a processor with AMX: one instruction makes a block's integers for 16
// rows and all tokens. They pass through memory, and what follows is as in tile_dots.h. The integers of the next block
// are made while those of a block are added.
#pragma once

#include "cpu/kernels/matmul/tile_pack.h"
#include "cpu/kernels/matmul/token_groups.h"

namespace sharpi::cpu::SHARPI_ISA {

constexpr int kTileTokens = 16;
static_assert(kTileRows == 16, "a tile register's columns");

// [5] has the whole sums; see addToTree.
using TileSums = float[6][kTileTokens][kTileRows];
constexpr int64_t kSumStride = kTileTokens * kTileRows;
using BlockIntegers = int32_t[kTileTokens][kTileRows];

// The operand of ldtilecfg. Registers 0 and 1 have the integers of a block's parts, 2 and 3 the tokens' numbers, 4 and
// 5 the rows' quants.
struct alignas(64) TileConfig {
    uint8_t palette = 1, startRow = 0, reserved[14] = {};
    uint16_t rowBytes[16] = {};
    uint8_t rows[16] = {};
};

static_assert(sizeof(TileConfig) == 64, "what ldtilecfg reads");

template <class Shape> static TileConfig tileConfig(int count) {
    constexpr int kBytes = 32 / Shape::kParts;  // of a part, in each row and token
    TileConfig config;
    for (int part = 0; part < 2; ++part) {
        config.rows[part] = config.rows[2 + part] = static_cast<uint8_t>(count);
        config.rows[4 + part] = kBytes / 4;
        config.rowBytes[part] = config.rowBytes[4 + part] = 4 * kTileRows;
        config.rowBytes[2 + part] = kBytes;
    }
    return config;
}

#if defined(SHARPI_PLAIN_AMX)

// The same in plain code, for tests on processors without AMX.
template <class Shape> static void beginTiles(int) {}
static inline void endTiles() {}
template <class Shape, int count, int part>
static void partIntegers(const uint8_t (*quant)[kTileRows][4], const int8_t* q, BlockIntegers& to) {
    for (int t = 0; t < count; ++t)
        for (int r = 0; r < kTileRows; ++r) {
            to[t][r] = 0;
            for (int i = 0; i < 32 / Shape::kParts; ++i)
                to[t][r] += static_cast<int8_t>(quant[i / 4][r][i % 4]) *
                            q[static_cast<size_t>(t) * sizeof(TokenGroup) + static_cast<size_t>(i)];
        }
}

#else

// The registers stay configured until the end, since configuring takes long.
template <class Shape> static void beginTiles(int count) {
    const TileConfig config = tileConfig<Shape>(count);
    __asm__ volatile("" : : "r"(&config) : "memory");  // as below
    _tile_loadconfig(&config);
}
static inline void endTiles() { _tile_release(); }
template <class Shape, int count, int part>
SHARPI_INLINE void partIntegers(const uint8_t (*quant)[kTileRows][4], const int8_t* q, BlockIntegers& to) {
    __asm__ volatile("" : : : "memory");  // GCC's intrinsics do not say all that they read
    if constexpr (part == 0) {
        _tile_zero(0);
        _tile_loadd(2, q, sizeof(TokenGroup));
        _tile_loadd(4, quant, sizeof quant[0]);
        _tile_dpbssd(0, 2, 4);
        _tile_stored(0, to, sizeof to[0]);
    } else {
        _tile_zero(1);
        _tile_loadd(3, q, sizeof(TokenGroup));
        _tile_loadd(5, quant, sizeof quant[0]);
        _tile_dpbssd(1, 3, 5);
        _tile_stored(1, to, sizeof to[0]);
    }
}

#endif

// A block of a tile and of `count` tokens, in the order of sums.
template <class Shape, int count> struct BlockCursor {
    const TileBlock<Shape>* tile;
    const TokenGroup* groups;
    int64_t blocks, segments;
    int n = 0, place = 0;  // the block is of accumulator place = inSumOrder(n)
    int64_t b = 0;
    const TileBlock<Shape>* w = tile;
    const TokenGroup* tokens = groups;

    // To the next block of the same sum, or to the first one of a later sum.
    void next() {
        b += kContractAccumulators;
        ++w;
        tokens += kContractAccumulators / 8 * count;
        while (b >= blocks && ++n < kContractAccumulators) {
            b = place = inSumOrder(n);
            w = tile + n * segments;
            tokens = groups + place / 8 * count;
        }
    }
};

template <class Shape, int count>
SHARPI_INLINE void makeIntegers(const BlockCursor<Shape, count>& at, BlockIntegers* to) {
    constexpr int kFours = 8 / Shape::kParts;
    const int8_t* q = at.tokens->q + at.place % 8 * 32;
    partIntegers<Shape, count, 0>(at.w->quant, q, to[0]);
    if constexpr (Shape::kParts == 2) partIntegers<Shape, count, 1>(at.w->quant + kFours, q + 4 * kFours, to[1]);
}

template <class Shape, int count>
SHARPI_INLINE void addIntegers(const BlockCursor<Shape, count>& at, const BlockIntegers* integers, VecF* acc) {
    const TileBlock<Shape>& w = *at.w;
    const TokenGroup* tokens = at.tokens;
    const int b = at.place % 8;
    for (int part = 0; part < Shape::kParts; ++part) {
        const VecF factor = loadF(w.factor[part]);
#pragma GCC unroll 16
        for (int t = 0; t < count; ++t) {
            acc[t] = fma(factor, mul(set1F(tokens[t].scale[b]), toFloat(loadI(integers[part][t]))), acc[t]);
            // Keeps GCC from converting all integers first, for which there are not enough registers.
            __asm__ volatile("" : "+v"(acc[t])::"memory");
        }
    }
    for (int i = 0; i < Shape::kMins; ++i) {
        const VecF factor = loadF(w.factor[Shape::kParts + i]);
#pragma GCC unroll 16
        for (int t = 0; t < count; ++t) acc[t] = fma(factor, set1F(tokens[t].sum[8 * i + b]), acc[t]);
    }
}

// The sums of `count` tokens. Group g of token t is groups[g * count + t].
template <class Shape, int count>
static void tileDots(const TileBlock<Shape>* tile, int64_t blocks, const TokenGroup* groups, TileSums& sums) {
    const int64_t segments = (blocks + kContractAccumulators - 1) / kContractAccumulators;
    alignas(64) BlockIntegers integers[2][Shape::kParts];
    VecF acc[count];
    BlockCursor<Shape, count> at{tile, groups, blocks, segments};
    makeIntegers(at, integers[0]);
    int turn = 0;
    for (int n = 0; n < kContractAccumulators; ++n) {
#pragma GCC unroll 16
        for (VecF& v : acc) v = set1F(0);
        while (at.n == n) {
            BlockCursor<Shape, count> ahead = at;
            ahead.next();
            if (ahead.n < kContractAccumulators) makeIntegers(ahead, integers[1 - turn]);
            addIntegers(at, integers[turn], acc);
            at = ahead;
            turn = 1 - turn;
        }
#pragma GCC unroll 16
        for (int t = 0; t < count; ++t) addToTree(n, acc[t], sums[0][t], kSumStride);
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
