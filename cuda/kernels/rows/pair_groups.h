// Pairs of a row and an expert, grouped by expert: the rows of a group share one reading of the expert's weights.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/stream.h"

namespace sharpi::cuda {

// The most pairs of a group. An expert with more of them has several groups, one behind the other. If few pairs share
// an expert, groups are smaller, because their pairs take the time of full groups.
constexpr int kPairGroup = 16, kSmallPairGroup = 8;

struct alignas(16) PairGroup {
    int32_t element = -1;  // the matrix of the stack; -1: there is no such group
    int32_t count = 0;
    int32_t unused[2] = {};
    int32_t pair[kPairGroup] = {};  // `count` of them, ascending
};

// Groups in the order of their elements, then those that do not exist. Launches cover all `count`, so that no launch
// depends on what the router chose.
struct PairGroups {
    const PairGroup* group = nullptr;
    int64_t count = 0;  // 0: pairs are not grouped
    int most = 0;       // pairs of a group: kSmallPairGroup or kPairGroup
};

// The most groups that `pairs` pairs need if they choose among `elements` elements. Each element fills all of its
// groups but the last.
constexpr int64_t maxPairGroups(int64_t pairs, int64_t elements, int most = kSmallPairGroup) {
    const int64_t needed = pairs / most + elements;
    return pairs < needed ? pairs : needed;
}
constexpr size_t pairGroupsBytes(int64_t pairs, int64_t elements) {
    return sizeof(PairGroup) * static_cast<size_t>(maxPairGroups(pairs, elements));
}

// Groups pairs 0 .. pairs - 1 by element[p], below `elements`; a negative one belongs to no group. At most `distinct`
// different elements occur: a stack of slots holds more matrices than a layer has experts. to:
// pairGroupsBytes(pairs, distinct), of which every group that the result counts is written. One launch of one block.
PairGroups groupPairs(Stream& stream, const int32_t* element, int64_t pairs, int32_t elements, int32_t distinct,
                      void* to);

}  // namespace sharpi::cuda
