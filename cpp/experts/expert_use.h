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
    // (layer in the model, expert), most wanted first: what slots hold from the beginning, those in VRAM before those
    // in RAM. Others follow in VRAM as there is room.
    std::vector<std::pair<int32_t, int32_t>> warm;
};

// (layer of experts, expert)
using LayerExperts = std::vector<std::pair<int32_t, int32_t>>;

// What the slots of the layers of experts hold from the beginning. layers: (layer in the model, its experts). Names of
// experts that do not exist are left out.
inline LayerExperts warmExperts(const ExpertUse& use, const std::vector<std::pair<int32_t, int32_t>>& layers) {
    LayerExperts found;
    for (const auto& [layer, expert] : use.warm) {
        for (size_t i = 0; i < layers.size(); ++i) {
            if (layers[i].first == layer && expert >= 0 && expert < layers[i].second)
                found.emplace_back(static_cast<int32_t>(i), expert);
        }
    }
    return found;
}

}  // namespace sharpi
