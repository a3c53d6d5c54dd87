// A tile: a few rows of weights, repacked for products with many tokens.
//
// One lane is one weight row. Four neighbouring quants of each row lie together, so that one broadcast of four
// activations meets all rows of a vector, and block integers come out with no horizontal adds. d * sub and m * min of a
// block or half block are one float for each row. The blocks of one of the contract's 32 accumulators follow each
// other, so that the accumulator stays in a register.
#pragma once

#include "core/contract.h"
#include "cpu/kernels/internal.h"
#include "cpu/kernels/lanes.h"
#include "cpu/kernels/matmul/unpack_vector_grids.h"

namespace sharpi::cpu::SHARPI_ISA {

#if defined(__AMX_INT8__) || defined(SHARPI_PLAIN_AMX)
#define SHARPI_AMX 1
#endif

#if defined(__AVX512VNNI__) && !defined(SHARPI_AMX)
constexpr int kTileVectors = 2;  // so that a broadcast serves two byte products
#else
constexpr int kTileVectors = 1;
#endif
constexpr int kTileRows = kTileVectors * kLaneRows;
static_assert(kMatmulTileRows % kTileRows == 0, "ranges of whole tiles");

// All that products with a tile must know of a type, so that types share code.
// kParts: the factors d * sub of a block, 1 or 2 (kHalves). kMins: its factors m * min. kChunk: the number of 16-bit
// products that are added before they are widened, more of which could overflow; 0 if quants are signed bytes. A
// processor whose byte products add to 32 bits needs no kChunk.
template <int parts, int mins, int chunk> struct TileShape {
    static constexpr int kParts = parts, kMins = mins, kFactors = parts + mins, kChunk = chunk;
};

template <class Block> constexpr int chunkOf() {
#if defined(__AVX512VNNI__)
    return 0;
#else
    constexpr int fit = 32767 / (2 * 127 * Format<Block>::kLargest);
    return Format<Block>::kWide ? 0 : fit >= 8 ? 8 : fit >= 4 ? 4 : 2;
#endif
}

template <class Block>
using ShapeOf = TileShape<Format<Block>::kHalves ? 2 : 1,
                          Format<Block>::kMins == Sub::PerHalf ? 2
                          : Format<Block>::kHasMin             ? 1
                                                               : 0,
                          chunkOf<Block>()>;

// 32 elements of kTileRows rows.
template <class Shape> struct alignas(64) TileBlock {
    uint8_t quant[8][kTileRows][4];
    float factor[Shape::kFactors][kTileRows];  // d * sub of the parts, then m * min
};

// The n-th accumulator in the order in which they are summed, and the other way round: the bits of n, reversed. So each
// sum of the contract's end follows soon after both its parts.
constexpr int inSumOrder(int n) { return (n & 1) << 4 | (n & 2) << 2 | (n & 4) | (n & 8) >> 2 | (n & 16) >> 4; }

// Block b is at tile[tilePlace(b, segments)]; segments: of 1024 elements, in a row.
constexpr int64_t tilePlace(int64_t b, int64_t segments) {
    return inSumOrder(static_cast<int>(b % kContractAccumulators)) * segments + b / kContractAccumulators;
}

// A vector of accumulator inSumOrder(n), for n = 0, 1, 2 .. 31 in turn, on its way through the contract's end: sums
// that wait for their other half are at level + i * stride, i < 5, and after the last the whole sum is at level + 5 *
// stride.
SHARPI_INLINE void addToTree(int n, VecF sum, float* level, int64_t stride) {
    for (; n & 1; n >>= 1, level += stride) sum = addF(loadF(level), sum);
    storeF(level, sum);
}

// 256 elements of the rows of a vector, before they are transposed.
template <class Shape> struct alignas(64) StagedGroup {
    static constexpr int kFloats = (8 * Shape::kFactors + kLaneRows - 1) / kLaneRows * kLaneRows;
    uint8_t quant[kLaneRows][256];
    float factor[kLaneRows][kFloats];  // [r][8 * i + b]: factor i of block b
};

// Row r of a group; a row of zeros if block is nullptr. count: blocks of the file's format.
template <class Block> static void stageRow(const Block* block, int count, int r, StagedGroup<ShapeOf<Block>>& to) {
    using Shape = ShapeOf<Block>;
    constexpr int kPerGroup = 256 / Format<Block>::kElements;
    Block copy[kPerGroup];
    if (!block || count < kPerGroup) {
        std::memset(static_cast<void*>(copy), 0, sizeof copy);
        if (block) std::memcpy(static_cast<void*>(copy), block, static_cast<size_t>(count) * sizeof(Block));
        block = copy;
    }
    Unpacked u;
    unpackVector(block, u);
#if defined(SHARPI_AMX)
    // Its products take signed bytes, so nothing has to be taken off integers.
    for (__m256i& quants : u.quant) quants = _mm256_sub_epi8(quants, bytes(Format<Block>::kOffset));
#endif
    for (int b = 0; b < 8; ++b) _mm256_store_si256(reinterpret_cast<__m256i*>(to.quant[r] + 32 * b), u.quant[b]);
    const Factors factors = factorsOf<Block>(u);
    for (int i = 0; i < Shape::kParts; ++i) _mm256_store_ps(to.factor[r] + 8 * i, factors.scale[i]);
    for (int i = 0; i < Shape::kMins; ++i) _mm256_store_ps(to.factor[r] + 8 * (Shape::kParts + i), factors.min[i]);
}

// Transposes a group to vector `vector` of its eight blocks.
template <class Shape>
static void placeGroup(const StagedGroup<Shape>& group, int vector, TileBlock<Shape>* const* to) {
    const int lane = vector * kLaneRows;
    for (int k = 0; k < 64; k += kLaneRows) {
        uint8_t* words[kLaneRows];
        for (int i = 0; i < kLaneRows; ++i) words[i] = to[(k + i) / 8]->quant[(k + i) % 8][lane];
        transposeWords(group.quant[0] + 4 * k, sizeof group.quant[0], words);
    }
    alignas(64) uint8_t unused[kLaneRows][4];
    for (int k = 0; k < 8 * Shape::kFactors; k += kLaneRows) {
        uint8_t* words[kLaneRows];
        for (int i = 0; i < kLaneRows; ++i) {
            const int factor = (k + i) / 8, b = (k + i) % 8;
            words[i] = factor < Shape::kFactors ? reinterpret_cast<uint8_t*>(to[b]->factor[factor] + lane) : unused[0];
        }
        transposeWords(reinterpret_cast<const uint8_t*>(group.factor[0] + k), sizeof group.factor[0], words);
    }
}

// Packs `rows` rows of `cols` elements; the tile's other rows become zero. Rows are read in turn, which memory is slow
// at: so the same bytes of the rows that are packed next, `ahead` bytes on, are fetched before they are needed.
template <class Block>
static void packTile(const uint8_t* first, int64_t cols, int rows, int64_t segments, size_t ahead,
                     TileBlock<ShapeOf<Block>>* tile) {
    constexpr int kPerGroup = 256 / Format<Block>::kElements;
    const int64_t blocks = cols / Format<Block>::kElements;
    const size_t rowSize = static_cast<size_t>(blocks) * sizeof(Block);
    StagedGroup<ShapeOf<Block>> staged = {};
    for (int64_t begin = 0; begin < blocks; begin += kPerGroup) {
        const int count = blocks - begin < kPerGroup ? static_cast<int>(blocks - begin) : kPerGroup;
        TileBlock<ShapeOf<Block>>* to[8];
        for (int b = 0; b < 8; ++b) to[b] = tile + tilePlace(begin / kPerGroup * 8 + b, segments);
        for (int vector = 0; vector < kTileVectors; ++vector) {
            for (int i = 0; i < kLaneRows; ++i) {
                const int r = vector * kLaneRows + i;
                const Block* row = reinterpret_cast<const Block*>(first + static_cast<size_t>(r) * rowSize) + begin;
                for (size_t line = 0; line < kPerGroup * sizeof(Block); line += 64)
                    _mm_prefetch(reinterpret_cast<const char*>(row) + ahead + line, _MM_HINT_T1);
                stageRow<Block>(r < rows ? row : nullptr, count, i, staged);
            }
            placeGroup(staged, vector, to);
        }
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
