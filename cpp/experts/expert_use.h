// How experts that are not resident are to be used.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace sharpi {

struct ExpertUse {
    // Bytes per second at which the CPU computes experts and the GPU fetches them while both do: how a layer's misses
    // are shared between them. If the bus has no rate, the CPU gets all.
    double cpuRate = 0, busRate = 0;
    // (layer in the model, expert), most wanted first: what the slots hold from the beginning. Others follow as there
    // is room.
    std::vector<std::pair<int32_t, int32_t>> warm;
};

}  // namespace sharpi
