// Who decides which of a layer's missed experts the GPU brings over, while the CPU computes the others: asked by
// HostShare in the middle of a step, with the GPU waiting. An order must therefore not take more than a few
// microseconds.
#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/expert_orders.h"

namespace sharpi {

// Pairs are rows and ranks: p = row * used + rank. chosen[p]: an expert of the layer. slot[p]: where the GPU has it, <
// 0 if it was missed. predicted[p]: what the next layer's router makes of these rows; null where nothing was predicted.
// All are HostShare's copies.
class MissPlan {
public:
    virtual ~MissPlan() = default;
    // Something was missed: which experts should the GPU fetch? Writes up to kMaxExpertFetches demanded fetches,
    // each of a missed expert, once, into a slot that no pair of the layer uses, and what to fetch ahead. orders:
    // empty.
    virtual void order(int32_t layer, const int32_t* chosen, const int32_t* slot, const int32_t* predicted,
                       int32_t pairs, ExpertOrders& orders) = 0;
    // Once for every layer, after the CPU's answers were given back: the bytes of the file that it read for them, in
    // how many seconds; 0 and 0 if nothing was left to it.
    virtual void done(int32_t layer, const int32_t* chosen, const int32_t* slot, const int32_t* predicted,
                      int32_t pairs, size_t bytes, double seconds) = 0;
    // The GPU asks about the next layer of the same step, `seconds` after the last layer's orders were out. Not called
    // if the CPU had other work in between, or was late to look.
    virtual void followed(double seconds) { (void)seconds; }
};

}  // namespace sharpi
