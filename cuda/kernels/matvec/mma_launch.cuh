// What the launches of tensor-core products share: how many columns a block has, and what it prefetches.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/matvec/mma_tile.cuh"

namespace sharpi::cuda {

// Shared memory of a kernel besides its MmaTile.
constexpr int kMmaSpareShared = 5 * 1024;

constexpr int mmaMinBlocks(int tiles) { return tiles == 1 ? 2 : 1; }

// Calls f(std::integral_constant<int, tiles>{}) with the tiles of eight columns that a block has for `rows` rows. Rare
// types have no kernels for two tiles. Devices with less shared memory have fewer tiles, and more blocks.
template <DType D, typename F> void withMmaTiles(const Stream& stream, int rows, F&& f) {
    const auto fits = [&](int bytes) { return static_cast<size_t>(bytes) <= stream.device().sharedPerBlock; };
    const bool fitsFour = fits(MmaTile<D, 4>::kSharedBytes + kMmaSpareShared);
    if constexpr (!isRareType(D)) {
        if (rows > 8 && (rows <= 16 || !fitsFour) && fits(MmaTile<D, 2>::kSharedBytes + kMmaSpareShared))
            return f(std::integral_constant<int, 2>{});
    }
    if (rows > 8 && fitsFour) return f(std::integral_constant<int, 4>{});
    f(std::integral_constant<int, 1>{});
}

// The units of each row that a block prefetches: its own 16 * kGroups rows at once share kAheadBytes.
inline int32_t mmaAhead(DType type, int64_t blocks, int rows) {
    const int64_t bytes = kAheadBytes / (blocks * rows);
    return static_cast<int32_t>(bytes / static_cast<int64_t>(rowBytes(type, 256)) * 8);
}

// Prefetches `units` units of each row of the items in a group's place into the L2 cache: one lane for each row.
template <typename Tile, typename Place>
__device__ __forceinline__ void fetchRowsAhead(const Place& place, int items, int cols, int units) {
    if (Tile::slice() != 0 || Tile::lane() >= kMmaRows) return;
    const int all = cols / kContractBlock;
    for (int item = 0; item < items && units > 0; ++item, units -= all) {
        const auto rows = place(item);
        const uint32_t row = static_cast<uint32_t>(min(rows.row + Tile::lane(), rows.last));
        Tile::Weights::fetchAhead(rows.base, row * static_cast<uint32_t>(all), min(all, units));
    }
}

template <typename Tile, typename Kernel, typename Arguments>
void launchMma(Stream& stream, Kernel kernel, int64_t blocks, const Arguments& arguments) {
    allowShared(kernel, Tile::kSharedBytes);
    launch(stream, kernel, dim3(static_cast<unsigned>(blocks)), dim3(Tile::kThreads), Tile::kSharedBytes, arguments);
}

}  // namespace sharpi::cuda
