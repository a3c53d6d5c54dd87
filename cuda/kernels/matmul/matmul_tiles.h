// The choice among tiles of y in which the products of prefill are computed. All give the same bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "device/stream.h"

namespace sharpi::cuda {

struct MatmulTile {
    int outputs, rows;
};
// blocks: how many a multiprocessor computes at once. time: of one of them, if it has as many; in any unit.
struct TileTime {
    MatmulTile tile;
    int blocks;
    double time;
};

// The tile with which `matrices` matrices of `outputs` rows each are soonest multiplied by `rows` rows. Large tiles
// expand each weight for more rows, but small tiles leave fewer multiprocessors idle.
inline MatmulTile soonestTile(std::initializer_list<TileTime> candidates, int64_t rows, int64_t outputs,
                              int64_t matrices, int multiprocessors) {
    const auto roundedUp = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    const auto timeOf = [&](const TileTime& c) {
        const int64_t tiles = roundedUp(rows, c.tile.rows) * roundedUp(outputs, c.tile.outputs) * matrices;
        return static_cast<double>(roundedUp(tiles, int64_t{multiprocessors} * c.blocks)) * c.blocks * c.time;
    };
    const auto isSooner = [&](const TileTime& a, const TileTime& b) { return timeOf(a) < timeOf(b); };
    return std::min_element(candidates.begin(), candidates.end(), isSooner)->tile;
}

// With Hopper's instructions, for more than 128 rows.
inline MatmulTile chooseTile(int64_t rows, int64_t outputs, int64_t matrices, int multiprocessors) {
    return soonestTile({{{64, 128}, 1, 0.41}, {{128, 256}, 1, 1.0}}, rows, outputs, matrices, multiprocessors);
}
// Without, for more than 64.
MatmulTile chooseTileOfWarps(int64_t rows, int64_t outputs, int64_t matrices, const DeviceInfo& device);

}  // namespace sharpi::cuda
