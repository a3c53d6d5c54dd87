// What the launches of tensor-core products share: which tile a block has, and what it prefetches.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/matvec/mma/mma_tile.cuh"
#include "kernels/matvec/mma/wide_tile.cuh"

namespace sharpi::cuda {

// Shared memory of a kernel besides its MmaTile.
constexpr int kMmaSpareShared = 5 * 1024;

// The tile of a launch, as an argument of a callable.
template <typename T> struct MmaShape {
    using Tile = T;
};

// What a wide tile costs beside others: its time for a row of weights and a column. Small tiles unpack and copy more
// for each product. Large ones read shorter pieces of memory, which takes longer the more planes a type has.
template <DType D, bool isLarge> constexpr double wideCost() {
    return !isLarge ? 1.16 : PlanesOf<D>::template kBytes<2> != 0 ? 1.25 : 1.0;
}

// Calls f(MmaShape<Tile>{}) with the wide tile whose rounds of blocks cost least, and returns true; or returns false,
// if none fits in the device's shared memory. fits(bytes, columns); count(n): how many tiles of n weight rows there
// are.
template <DType D, typename Fits, typename Count, typename F>
bool withWideTile(const Stream& stream, int rows, int cols, const Fits& fits, const Count& count, F&& f) {
    using Large = MmaWideTile<D, 2, 2>;
    using Small = MmaWideTile<D, 1, 1>;
    const int64_t atOnce = stream.device().multiprocessors;
    const auto cost = [&](auto shape, double factor) {
        using Tile = typename decltype(shape)::Tile;
        const int64_t tiles = count(Tile::kRows) * ((rows + Tile::kColumns - 1) / Tile::kColumns);
        return static_cast<double>((tiles + atOnce - 1) / atOnce) * (Tile::kRows * Tile::kColumns) * factor;
    };
    const bool canBeLarge = Large::takes(cols) && fits(Large::sharedBytes(cols), Large::kColumns),
               canBeSmall = Small::takes(cols) && fits(Small::sharedBytes(cols), Small::kColumns);
    if (canBeLarge && (!canBeSmall ||
                       cost(MmaShape<Large>{}, wideCost<D, true>()) <= cost(MmaShape<Small>{}, wideCost<D, false>()))) {
        f(MmaShape<Large>{});
        return true;
    }
    if (canBeSmall) f(MmaShape<Small>{});
    return canBeSmall;
}

// What a tile is chosen for.
struct MmaCall {
    int rows, cols;   // of activations
    bool canArrange;  // there is room for WideColumns
};

// Calls f(MmaShape<Tile>{}) with the tile for a call. Rare types, and rows that are no multiple of 256 elements, have
// no rings of weights, and rare types no wide tiles. Activations stay in shared memory where they fit. Devices with
// less shared memory have fewer tiles, and more blocks. sparePerColumn: bytes of shared memory that the kernel takes
// besides the tile's.
template <DType D, typename Count, typename F>
void withMmaTile(const Stream& stream, const MmaCall& call, size_t sparePerColumn, const Count& count, F&& f) {
    const int rows = call.rows, cols = call.cols;
    const auto most = static_cast<int64_t>(stream.device().sharedPerBlock);
    const auto fits = [&](int64_t bytes, int columns) {
        return bytes + static_cast<int64_t>(sparePerColumn) * columns <= most;
    };
    if constexpr (!isRareType(D)) {
        using ResidentOne = MmaTile<D, 1, true, kRingSteps>;
        using One = MmaTile<D, 1, false, kRingSteps>;
        using ResidentTwo = MmaTile<D, 2, true, kRingSteps>;
        using Two = MmaTile<D, 2, false, kRingSteps>;
        if (rows > kNarrowRows && call.canArrange && withWideTile<D>(stream, rows, cols, fits, count, f)) return;
        if (cols % kRingElements == 0) {
            if (rows > 8 && rows <= kNarrowRows && fits(ResidentTwo::sharedBytes(cols), 16))
                return f(MmaShape<ResidentTwo>{});
            if (rows > 8 && fits(Two::sharedBytes(cols), 16)) return f(MmaShape<Two>{});
            if (rows <= 8 && fits(ResidentOne::sharedBytes(cols), 8)) return f(MmaShape<ResidentOne>{});
            if (fits(One::sharedBytes(cols), 8)) return f(MmaShape<One>{});
        }
    } else {
        using Four = MmaTile<D, 4>;
        if (rows > 8 && fits(Four::sharedBytes(cols), 32)) return f(MmaShape<Four>{});
    }
    f(MmaShape<MmaTile<D, 1>>{});
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

// The units of each row that a block of a wide tile prefetches: the 16 * kGroups rows of all blocks that run at once
// share kAheadBytes.
inline int32_t mmaAhead(DType type, int64_t blocks, int rows) {
    const int64_t bytes = kAheadBytes / (blocks * rows);
    return static_cast<int32_t>(bytes / static_cast<int64_t>(rowBytes(type, 256)) * 8);
}

// Prefetches `units` units of each row of the first items in a group's place into the L2 cache: one lane for each row.
// Only wide tiles do: their blocks have less memory in flight. Narrow ones are slower with it, because the L1 cache
// queues each line of a prefetch as it does a load.
template <typename Tile, typename Place>
__device__ __forceinline__ void fetchRowsAhead(const Place& place, int items, int cols, int units) {
    if (!Tile::kIsWide || Tile::warp() >= Tile::kGroups || Tile::lane() >= kMmaRows) return;
    const int all = cols / kContractBlock;
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
