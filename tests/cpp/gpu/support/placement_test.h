// The homes of weights, for tests of engines that hold only a part of a model in VRAM.
#pragma once

#include <algorithm>
#include <string>

#include "engine_test.h"
#include "planning/memory_plan.h"

namespace sharpi::cuda {

class PlacementTest : public EngineTest {
protected:
    static bool isStack(const TensorInfo& tensor) { return tensor.name.find("_exps.") != std::string::npos; }
    // The experts are in slots or resident. Everything else is resident.
    static Homes expertHomes(const tiny::Model& model, bool inSlots) {
        Homes made(model.tensors.size());
        for (size_t i = 0; i < made.size(); ++i) {
            if (inSlots && isStack(model.tensors[i])) made[i].home = Home::Slots;
        }
        return made;
    }
    // Tensors with a common home (a layer's gate and up, or all its experts) have a common name here. Others have their
    // own.
    static std::string groupOf(const std::string& tensor) {
        const std::string layer = tensor.substr(0, tensor.find("ffn_"));
        if (tensor.find("_exps.weight") != std::string::npos) return "experts";
        const bool isPair =
            tensor.find("ffn_gate.") != std::string::npos || tensor.find("ffn_up.") != std::string::npos;
        return isPair ? layer + "gate and up" : tensor;
    }
    // The first `resident` tensors stay on the device, each with the rest of its group. The CPU computes `share`
    // percent of the feed-forward rows of the others.
    static Homes homes(const tiny::Model& model, size_t resident, int share) {
        Homes made(model.tensors.size());
        for (size_t i = 0; i < made.size(); ++i) {
            const auto first = std::find_if(model.tensors.begin(), model.tensors.end(), [&](const TensorInfo& t) {
                return groupOf(t.name) == groupOf(model.tensors[i].name);
            });
            if (first - model.tensors.begin() < static_cast<std::ptrdiff_t>(resident)) continue;
            made[i].home = isStack(model.tensors[i]) ? Home::Slots : Home::Direct;
            made[i].cpuRows = isStack(model.tensors[i]) ? 0 : model.tensors[i].shape.back() * share / 100;
        }
        return made;
    }

    // The usual plan for experts that do not fit: everything else is resident, and slots hold as many experts as fit in
    // `bytes`. With a bus of this rate, the GPU fetches what a step misses, up to kMaxExpertFetches experts.
    static constexpr double kFastBus = 1e13;
    static EngineOptions inSlots(const tiny::Model& model, size_t bytes, double busRate = kFastBus) {
        EngineOptions o = options(true);
        o.homes = expertHomes(model, true);
        o.expertSlotBytes = bytes;
        o.expertUse.cpuRate = 1e9;
        o.expertUse.busRate = busRate;
        return o;
    }
    static size_t bytesOfAllExperts(const tiny::Model& model) {
        size_t bytes = 0;
        for (const auto& pool : expertPools(model.spec(), model.table(), inSlots(model, 0)))
            bytes += pool.slotBytes * static_cast<size_t>(pool.experts);
        return bytes;
    }
};

}  // namespace sharpi::cuda
