// What the launches of tensor-core products share: which tile a block has, and how many items.
#pragma once

#include "kernels/matvec/mma/mma_tile.cuh"
#include "kernels/matvec/mma/stream_tile.cuh"

namespace sharpi::cuda {

// Shared memory of a kernel besides its MmaTile.
constexpr int kMmaSpareShared = 5 * 1024;

// The tile of a launch, as an argument of a callable.
template <typename T> struct MmaShape {
    using Tile = T;
    StreamRoom room = {};
};

// How a stream tile divides shared memory for rows of `cols` elements. Without slots, it does not fit.
template <typename Tile, typename Fits> StreamRoom streamRoom(int cols, const Fits& fits) {
    const int steps = Tile::steps(cols);
    for (const int stages : {steps, Tile::kStages})
        for (int slots = Tile::kMostSlots; stages <= steps && slots >= Tile::kFewestSlots; --slots)
            if (fits(Tile::sharedBytes({stages, slots}), Tile::kColumns)) return {stages, slots};
    return {};
}

// What a tile is chosen for.
struct MmaCall {
    int rows, cols;   // of activations
    int firstColumn;  // of the first row among WideColumns
    bool canArrange;  // there is room for WideColumns
};

// Whether tiles of `columns` columns read none that were not written: WideColumns end with a whole bundle.
inline bool haveColumns(const MmaCall& call, int columns) {
    const auto up = [](int n, int to) { return (n + to - 1) / to * to; };
    const int first = call.firstColumn % WideColumns::kBundle;
    return first + up(call.rows, columns) <= up(first + call.rows, WideColumns::kBundle);
}

// Calls f(MmaShape<Tile>{}) with the stream tile whose rounds of blocks cost least, and returns true; or returns false,
// if none fits in the device's shared memory. fits(bytes, columns); count(n): how many tiles of n weight rows there
// are.
template <DType D, typename Fits, typename Count, typename F>
bool withStreamTile(const Stream& stream, const MmaCall& call, const Fits& fits, const Count& count, F&& f) {
    const int rows = call.rows, cols = call.cols;
    if (!StreamTile<D, 1, 1>::takes(cols)) return false;
    const int64_t atOnce = stream.device().multiprocessors;
    // Visits the tiles, each with what a weight row costs in it, relative to the others (gate and up of an 8B, H200).
    const auto forTiles = [&](const auto& visit) {
        if (rows <= 8) {
            visit(MmaShape<StreamTile<D, 1, 1>>{}, 1.26);
            visit(MmaShape<StreamTile<D, 1, 2>>{}, 1.0);
        } else {
            visit(MmaShape<StreamTile<D, 2, 1>>{}, 1.54);
            visit(MmaShape<StreamTile<D, 2, 2>>{}, 1.25);
        }
        if (rows > 16) {
            if (haveColumns(call, StreamTile<D, 3, 2>::kColumns)) visit(MmaShape<StreamTile<D, 3, 2>>{}, 1.6);
            visit(MmaShape<StreamTile<D, 4, 1>>{}, 2.1);
        }
    };
    double least = 0;
    int best = -1, n = 0;
    forTiles([&](auto shape, double cost) {
        using Tile = typename decltype(shape)::Tile;
        const int64_t tiles = count(Tile::kRows) * ((rows + Tile::kColumns - 1) / Tile::kColumns);
        const double all = static_cast<double>((tiles + atOnce - 1) / atOnce * Tile::kRows) * cost;
        if (streamRoom<Tile>(cols, fits).slots > 0 && (best < 0 || all < least)) best = n, least = all;
        ++n;
    });
    n = 0;
    forTiles([&](auto shape, double) {
        if (n++ != best) return;
        shape.room = streamRoom<typename decltype(shape)::Tile>(cols, fits);
        f(shape);
    });
    return best >= 0;
}

// Calls f(MmaShape<Tile>{}) with the tile for a call. Rare types take an MmaTile. So do rows of which a plane does not
// begin at a multiple of StreamPlane::kPiece. sparePerColumn: bytes of shared memory that the kernel takes besides the
// tile's.
template <DType D, typename Count, typename F>
void withMmaTile(const Stream& stream, const MmaCall& call, size_t sparePerColumn, const Count& count, F&& f) {
    const auto most = static_cast<int64_t>(stream.device().sharedPerBlock);
    const auto fits = [&](int64_t bytes, int columns) {
        return bytes + static_cast<int64_t>(sparePerColumn) * columns <= most;
    };
    if constexpr (!isRareType(D))
        if (call.canArrange && withStreamTile<D>(stream, call, fits, count, f)) return;
    using Four = MmaTile<D, 4>;
    if (call.rows > 8 && fits(Four::sharedBytes(call.cols), Four::kColumns)) return f(MmaShape<Four>{});
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
// Blocks of stream tiles begin with copies of all activations.
constexpr int mmaMostItems(bool isStream) { return isStream ? 64 : 8; }
constexpr double mmaStart(bool isStream) { return isStream ? 1.0 : 0.25; }

template <typename Tile, typename Kernel, typename Arguments>
void launchMma(Stream& stream, Kernel kernel, int64_t blocks, const Arguments& arguments) {
    size_t bytes = 0;
    if constexpr (Tile::kIsStream) bytes = static_cast<size_t>(Tile::sharedBytes(arguments.room));
    else bytes = static_cast<size_t>(Tile::sharedBytes(arguments.cols));
    allowShared(kernel, bytes);
    launch(stream, kernel, dim3(static_cast<unsigned>(blocks)), dim3(Tile::kThreads), bytes, arguments);
}

}  // namespace sharpi::cuda
