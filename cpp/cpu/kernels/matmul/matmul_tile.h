// For some tokens: a tile of rows is repacked once and then multiplied with every token of the call, a few at a time.
// The tile, as long as a row, stays in the second-level cache.
#pragma once

#include "cpu/kernels/matmul/tile_pack.h"
#if defined(SHARPI_AMX)
#include "cpu/kernels/matmul/tile_dots_amx.h"
#else
#include "cpu/kernels/matmul/tile_dots.h"
#endif

namespace sharpi::cpu::SHARPI_ISA {

// tileDots for a number of tokens that is known only now, at most `most`.
template <class Shape, int most = kTileTokens>
static void anyTileDots(int count, const TileBlock<Shape>* tile, int64_t blocks, const TokenGroup* groups,
                        TileSums& sums) {
    if constexpr (most > 1)
        if (count < most) return anyTileDots<Shape, most - 1>(count, tile, blocks, groups, sums);
    tileDots<Shape, most>(tile, blocks, groups, sums);
}

static void storeRows(const float* sums, const float* bias, int rows, float* y) {
    for (int r = 0; r < rows; ++r) y[r] = bias ? sums[r] + bias[r] : sums[r];
}

template <class Block>
static void matmulTiles(const MatmulArgs& args, int64_t rowBegin, int64_t rowEnd, void* scratch) {
    using Shape = ShapeOf<Block>;
    constexpr int kTiles = kMatmulTileRows / kTileRows;  // that share the preparation of tokens
    const int64_t cols = args.w.cols, blocks = cols / 32;
    const int64_t segments = (blocks + kContractAccumulators - 1) / kContractAccumulators;
    const int64_t tileBlocks = kContractAccumulators * segments;
    const size_t rowSize = rowBytes(args.w.type, cols);
    TileBlock<Shape>* tiles = static_cast<TileBlock<Shape>*>(scratch);
    TokenGroup* tokens = reinterpret_cast<TokenGroup*>(tiles + kTiles * tileBlocks);
    alignas(64) TileSums sums;
    const auto rowsAt = [&](int64_t r) { return static_cast<int>(rowEnd - r < kTileRows ? rowEnd - r : kTileRows); };
    // Tokens are divided evenly: no part is so small that its products wait for each other.
    const int64_t parts = (args.count + kTileTokens - 1) / kTileTokens;
    int begun = 0;
    for (int64_t first = rowBegin; first < rowEnd; first += kMatmulTileRows) {
        const int64_t last = rowEnd - first < kMatmulTileRows ? rowEnd : first + kMatmulTileRows;
        TileBlock<Shape>* tile = tiles;
        for (int64_t r = first; r < last; r += kTileRows, tile += tileBlocks)
            packTile<Block>(args.w.data + static_cast<size_t>(r) * rowSize, cols, rowsAt(r), segments,
                            kMatmulTileRows * rowSize, tile);
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t begin = args.count * part / parts, end = args.count * (part + 1) / parts;
            const int count = static_cast<int>(end - begin);
            if (parts > 1 || first == rowBegin)
                for (int64_t t = begin; t < end; ++t) readToken<Block>(args, t, tokens + (t - begin), count);
            if (count != begun) beginTiles<Shape>(begun = count);
            tile = tiles;
            for (int64_t r = first; r < last; r += kTileRows, tile += tileBlocks) {
                anyTileDots(count, tile, blocks, tokens, sums);
                for (int64_t t = begin; t < end; ++t)
                    storeRows(sums[5][t - begin], args.bias ? args.bias + r : nullptr, rowsAt(r),
                              args.y + t * args.yStride + r);
            }
        }
    }
    endTiles();
}

}  // namespace sharpi::cpu::SHARPI_ISA
