// Decides which of a layer's missed experts the GPU fetches, while the CPU computes the others. HostShare asks in the
// middle of a step, while the GPU waits, so order() must not take more than a few microseconds.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/expert_orders.h"

namespace sharpi {

// Layers are numbered among those with slots. A pair is a row and a rank: p = row * used + rank. chosen[p]: an expert
// of the layer. slot[p]: the slot where the GPU has it, below 0 if it was missed. predicted[p]: what the next layer's
// router chooses for these rows; nullptr if nothing was predicted. All are HostShare's copies.
class MissPlan {
public:
    virtual ~MissPlan() = default;
    // Something was missed. Writes what the GPU should fetch: up to kMaxExpertFetches demanded fetches, each of
    // another missed expert into a slot that no pair of the layer uses, and the fetches ahead. orders: empty.
    virtual void order(int32_t layer, const int32_t* chosen, const int32_t* slot, const int32_t* predicted,
                       int32_t pairs, ExpertOrders& orders) = 0;
    // Called once for every layer, after the CPU's answers were returned, with the bytes of the file that it read for
    // them and the seconds that it took; both 0 if nothing was left to the CPU.
    virtual void done(int32_t layer, const int32_t* chosen, const int32_t* slot, const int32_t* predicted,
                      int32_t pairs, size_t bytes, double seconds) = 0;
    // The GPU asked about the next layer of the same step, `seconds` after the last layer's orders were sent. Not
    // called if the CPU had other work in between, or looked too late to tell.
    virtual void followed(double seconds) { (void)seconds; }
};

}  // namespace sharpi
