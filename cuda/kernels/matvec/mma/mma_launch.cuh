// What the launches of tensor-core products share: how many columns a block has, and what it prefetches.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/matvec/mma/mma_tile.cuh"

namespace sharpi::cuda {

// Shared memory of a kernel besides its MmaTile.
constexpr int kMmaSpareShared = 5 * 1024;

constexpr int mmaMinBlocks(int tiles) { return tiles == 1 ? 2 : 1; }

// Template arguments of MmaTile.
template <int tiles, bool resident> struct MmaShape {
    static constexpr int kTiles = tiles;
    static constexpr bool kResident = resident;
};

// Calls f(MmaShape{}) with the tiles of eight columns that a block has for `rows` rows. Rare types have no kernels for
// two tiles, and no resident ones. Devices with less shared memory have fewer tiles, and more blocks.
template <DType D, typename F> void withMmaTiles(const Stream& stream, int rows, int cols, F&& f) {
    const auto fits = [&](int64_t bytes) {
        return bytes + kMmaSpareShared <= static_cast<int64_t>(stream.device().sharedPerBlock);
    };
    const bool fitsFour = fits(MmaTile<D, 4>::sharedBytes(cols));
    if constexpr (!isRareType(D)) {
        // Two blocks of one tile share a multiprocessor.
        const bool isSmall = 2 * (MmaTile<D, 1, true>::sharedBytes(cols) + kMmaSpareShared) <=
                             static_cast<int64_t>(stream.device().sharedPerMultiprocessor);
        if (rows <= 8 && isSmall && fits(MmaTile<D, 1, true>::sharedBytes(cols))) return f(MmaShape<1, true>{});
        if (rows > 8 && rows <= 16 && fits(MmaTile<D, 2, true>::sharedBytes(cols))) return f(MmaShape<2, true>{});
        if (rows > 16 && fits(MmaTile<D, 4, true>::sharedBytes(cols))) return f(MmaShape<4, true>{});
        if (rows > 8 && (rows <= 16 || !fitsFour) && fits(MmaTile<D, 2>::sharedBytes(cols)))
            return f(MmaShape<2, false>{});
    }
    if (rows > 8 && fitsFour) return f(MmaShape<4, false>{});
    f(MmaShape<1, false>{});
}

// The items of a block with which the rounds of blocks cost least. count(items) says how many blocks there are then.
// A block's beginning costs `start` items.
template <typename Count>
int mmaItems(const Count& count, int most, double start, int64_t columnTiles, int64_t atOnce) {
    int best = 1;
    double bestCost = 0;
    for (int items = 1; items <= most; ++items) {
        const int64_t rounds = (count(items) * columnTiles + atOnce - 1) / atOnce;
        const double cost = static_cast<double>(rounds) * (items + start);
        if (items == 1 || cost < bestCost) best = items, bestCost = cost;
    }
    return best;
}
// Resident tiles copy all activations at a block's beginning.
constexpr int mmaMostItems(bool isResident) { return isResident ? 64 : 8; }
constexpr double mmaStart(bool isResident) { return isResident ? 1.0 : 0.25; }

// The units of each row that a block prefetches: its own 16 * kGroups rows at once share kAheadBytes.
inline int32_t mmaAhead(DType type, int64_t blocks, int rows) {
    const int64_t bytes = kAheadBytes / (blocks * rows);
    return static_cast<int32_t>(bytes / static_cast<int64_t>(rowBytes(type, 256)) * 8);
}

// Prefetches `units` units of each row of the first items in a group's place into the L2 cache: one lane for each row.
// A resident tile prefetches the others.
template <typename Tile, typename Place>
__device__ __forceinline__ void fetchRowsAhead(const Place& place, int items, int cols, int units) {
    if (Tile::warp() >= Tile::kGroups || Tile::lane() >= kMmaRows) return;
    const int all = cols / kContractBlock;
    if (Tile::kResident) items = min(items, Tile::kItemsAhead), units = items * all;
    for (int item = 0; item < items && units > 0; ++item, units -= all) {
        const auto rows = place(item, Tile::warp());
        const uint32_t row = static_cast<uint32_t>(min(rows.row + Tile::lane(), rows.last));
        Tile::Weights::fetchAhead(rows.base, row * static_cast<uint32_t>(all), min(all, units));
    }
}

template <typename Tile, typename Kernel, typename Arguments>
void launchMma(Stream& stream, Kernel kernel, int64_t blocks, const Arguments& arguments) {
    const auto bytes = static_cast<size_t>(Tile::sharedBytes(arguments.cols));
    allowShared(kernel, bytes);
    launch(stream, kernel, dim3(static_cast<unsigned>(blocks)), dim3(Tile::kThreads), bytes, arguments);
}

}  // namespace sharpi::cuda
