// Products of packed weights with many rows, on tensor cores: the kernels of prefill. Weight tiles are expanded to bf16
// in shared memory, never in device memory. F32 weights are multiplied in split form (hi hi + hi lo + lo hi), which
// keeps about 16 bits of each factor. So are F16 and BF16 weights if there is an x.lo. F32 matrices with few rows are
// multiplied as floats (matmul_narrow.h).
//
// The bits of a row of y do not depend on the number of rows, on its place among them or on the other rows, because
// every instance sums a row's products in the same order. If the number of columns is a multiple of 8, the rows of x
// and w must begin at multiples of 16 bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "core/matrix.h"
#include "kernels/matvec/by_head.h"
#include "kernels/matvec/matvec.h"
#include "kernels/rows/rows.h"

namespace sharpi::cuda {

enum class Store { Write, Add };

// y[t, :] (+)= w x[t, :] + bias. Row t of y at y + t * stride (0: w.rows). If w is a part of a matrix, stride is the
// rows of the whole: the bits depend on it.
void matmul(Stream& stream, const Matrix& w, const HalfRows& x, int64_t rows, const float* bias, float* y, Store store,
            int64_t stride = 0);
// The same for several matrices with the same number of columns. Their products can run at the same time.
void matmul(Stream& stream, const HalfRows& x, int64_t rows, const std::vector<MatvecOutput>& outputs, Store store);

// The products of matvecByHead() with many rows: x has rows * heads rows.
void matmulByHead(Stream& stream, const HeadRows& weights, const HalfRows& x, int64_t rows, float* y);

// Rows of several experts, grouped: the pairs (token, rank) of expert e are [begin[e], begin[e + 1]).
// All arrays are in device memory; router.h makes them.
struct ExpertGroups {
    const int32_t* begin = nullptr;       // [experts + 1]
    const int32_t* pairToken = nullptr;   // [pairs]: the row of x that a pair reads
    const int32_t* tileExpert = nullptr;  // [tiles]: the expert of a tile of tilePairs pairs, -1 past the end
    const int32_t* tileBegin = nullptr;   // [tiles]: its first pair
    int64_t pairs = 0;
    int64_t tiles = 0;      // the size of the tile arrays: maxExpertTiles(pairs, experts)
    int32_t tilePairs = 0;  // the most pairs of a tile: expertTilePairs()
};
// The most pairs of a tile for which the device's kernel is fastest, at least kSmallExpertTile.
constexpr int kSmallExpertTile = 128;
int32_t expertTilePairs(const DeviceInfo& device);
inline int64_t maxExpertTiles(int64_t pairs, int64_t experts) {
    return pairs / kSmallExpertTile + (pairs < experts ? pairs : experts) + 1;
}
// Whether experts have at most `most` pairs on average. That decides what their products wait for: for weights to be
// loaded and expanded, or for the tensor cores. An expert with more pairs than a tile has several tiles.
inline bool meanIsAtMost(int64_t most, const ExpertGroups& groups) {
    // An upper bound of the experts with pairs: see maxExpertTiles.
    const int64_t experts = groups.tiles - groups.pairs / kSmallExpertTile - 1;
    return groups.pairs <= most * experts;
}

// Expert e's matrix in a stack is element index[e] - first, if first <= index[e] < end. The stack does not hold other
// experts, and their rows of y do not change.
struct ExpertIndex {
    const int32_t* index = nullptr;  // [experts], in device memory; null: index[e] is e
    int32_t first = 0, end = INT32_MAX;
};

// y[p, :] = (expert of p) x[gather ? pairToken[p] : p, :] for all pairs. y: [pairs, w.first.rows] floats.
void matmulExperts(Stream& stream, const ExpertStack& w, const HalfRows& x, const ExpertGroups& groups, bool gather,
                   float* y, const ExpertIndex& which = {});

}  // namespace sharpi::cuda
