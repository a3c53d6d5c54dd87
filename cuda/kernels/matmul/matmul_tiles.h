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
// A multiprocessor computes up to `blocks` tiles at once. It takes `time` for each if it has as many, and at least
// `alone` for the last ones if they are fewer, because a few tiles do not keep it busy. Times are in any unit.
struct TileTime {
    MatmulTile tile;
    int blocks;
    double time, alone;
};

// The tile with which `matrices` matrices of `outputs` rows each are soonest multiplied by `rows` rows. Large tiles
// expand each weight for more rows, but small tiles leave fewer multiprocessors idle.
inline MatmulTile soonestTile(std::initializer_list<TileTime> candidates, int64_t rows, int64_t outputs,
                              int64_t matrices, int multiprocessors) {
    const auto roundedUp = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    const auto timeOf = [&](const TileTime& c) {
        const int64_t tiles = roundedUp(rows, c.tile.rows) * roundedUp(outputs, c.tile.outputs) * matrices;
        const int64_t most = roundedUp(tiles, multiprocessors), last = most % c.blocks;  // of a multiprocessor
        const double whole = static_cast<double>(most - last) * c.time;
        return last == 0 ? whole : whole + std::max(c.alone, static_cast<double>(last) * c.time);
    };
    const auto isSooner = [&](const TileTime& a, const TileTime& b) { return timeOf(a) < timeOf(b); };
    return std::min_element(candidates.begin(), candidates.end(), isSooner)->tile;
}

// With Hopper's instructions, for more than 128 rows.
inline MatmulTile chooseTile(int64_t rows, int64_t outputs, int64_t matrices, int multiprocessors) {
    return soonestTile({{{64, 128}, 1, 0.41, 0.41}, {{128, 256}, 1, 1.0, 1.0}}, rows, outputs, matrices,
                       multiprocessors);
}
// Without, for more than 64.
MatmulTile chooseTileOfWarps(int64_t rows, int64_t outputs, int64_t matrices, const DeviceInfo& device);

}  // namespace sharpi::cuda
