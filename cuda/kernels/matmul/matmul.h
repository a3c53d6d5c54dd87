// Products of packed weights with many rows, on tensor cores: prefill's kernels. Weight tiles are expanded to bf16 in
// shared memory; nothing is expanded in device memory. F32 weights, and f16 and bf16 ones as well where x.lo is
// given, are multiplied in split form (hi hi + hi lo + lo hi), which keeps about 16 bits of each factor.
//
// A row of y has the same bits whatever the number of rows, wherever it stands among them and whatever the others are:
// every instance sums a row's products in one order. Rows of a multiple of 8 columns must begin at whole 16 bytes, in x
// and in w.
#pragma once

#include <cstdint>

#include "core/matrix.h"
#include "kernels/matvec/matvec.h"
#include "kernels/rows/rows.h"

namespace sharpi::cuda {

enum class Store { Write, Add };

// y[t, :] (+)= w x[t, :] + bias. Row t of y at y + t * stride (0: w.rows).
void matmul(Stream& stream, const Matrix& w, const HalfRows& x, int64_t rows, const float* bias, float* y, Store store,
            int64_t stride = 0);

// Rows of several experts, grouped: the pairs (token, rank) of expert e are [begin[e], begin[e + 1]).
// All arrays are in device memory; router.h makes them.
struct ExpertGroups {
    const int32_t* begin = nullptr;      // [experts + 1]
    const int32_t* pairToken = nullptr;  // [pairs]: the row of x that a pair reads
    const int32_t* tileExpert =
        nullptr;  // [tiles]: which expert the tile of kExpertTile pairs belongs to, -1 past the end
    const int32_t* tileBegin = nullptr;  // [tiles]: its first pair
    int64_t pairs = 0;
    int64_t tiles = 0;  // room in the tile arrays: maxExpertTiles(pairs, experts)
};
constexpr int kExpertTile = 128;
inline int64_t maxExpertTiles(int64_t pairs, int64_t experts) {
    return pairs / kExpertTile + (pairs < experts ? pairs : experts) + 1;
}

// Which matrix of a stack is expert e's: element index[e] - first, where first <= index[e] < end. The stack holds
// nothing of other experts: their rows of y are left alone.
struct ExpertIndex {
    const int32_t* index = nullptr;  // [experts], in device memory; null: e itself
    int32_t first = 0, end = INT32_MAX;
};

// y[p, :] = (expert of p) x[gather ? pairToken[p] : p, :] for all pairs. y: [pairs, w.first.rows] floats.
void matmulExperts(Stream& stream, const ExpertStack& w, const HalfRows& x, const ExpertGroups& groups, bool gather,
                   float* y, const ExpertIndex& which = {});

}  // namespace sharpi::cuda
