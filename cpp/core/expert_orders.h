// What the host and a device tell each other about the experts that a layer misses, in pinned memory. The device's side
// is kernels/experts/expert_cache.h, the host's cpu/share/host_share.h.
#pragma once

#include <cstdint>

namespace sharpi {

// The most experts that a device fetches for one layer, and the most that it fetches ahead for the next. A token misses
// a few, but a step of many rows may want nearly all experts of a layer.
constexpr int kMaxExpertFetches = 64, kMaxFetchesAhead = 8;

// An expert that the device fetches, from addresses that it can read, in the file's layout.
struct ExpertFetch {
    int32_t expert = -1;
    int32_t slot = -1;
    const uint8_t *gate = nullptr, *up = nullptr, *down = nullptr;  // without an up, its address is gate's
};

// What the host decides about a layer's misses. Demanded experts are for this layer; those ahead are for the next one,
// which will find them in its table.
struct ExpertOrders {
    int32_t demanded = 0, ahead = 0;
    ExpertFetch fetch[kMaxExpertFetches];      // the first `demanded`
    ExpertFetch aheadFetch[kMaxFetchesAhead];  // the first `ahead`
};

// What the host learns about a layer. Each layer has an area of its own, since the host may lag behind while nothing is
// missed.
struct HostChoices {
    int32_t* chosen = nullptr;     // [pairs]
    int32_t* slot = nullptr;       // [pairs]: -1 for a miss
    int32_t* predicted = nullptr;  // [pairs], or null: what the next layer's router makes of these rows
    float* weight = nullptr;       // [pairs], or null: the weights, if they multiply the experts' input
};

}  // namespace sharpi
