// Decides what becomes of the experts that a step misses: which of them the GPU fetches across PCIe, and into which
// slots, and which the CPU computes, so that both finish at about the same time (miss_share.h says how many). By
// core/contract.h the choice changes nothing but the speed.
#pragma once

#include <functional>
#include <vector>

#include "experts/expert_prefetcher.h"
#include "experts/expert_profiler.h"
#include "experts/expert_slots.h"
#include "experts/expert_use.h"
#include "experts/miss_plan.h"
#include "experts/miss_share.h"
#include "experts/ram_experts.h"

namespace sharpi {

class ExpertMisses : public MissPlan {
public:
    // The most experts that are fetched ahead of a layer: about what the bus brings while the GPU computes what lies
    // between the experts of two layers.
    static constexpr int32_t kMostAhead = 2;

    // reachable: where the GPU reads bytes of a file, or of RAM; or nullptr. ram: where the experts are if the model is
    // larger than RAM: the GPU fetches only what was in RAM when it was missed.
    using Reachable = std::function<const uint8_t*(const uint8_t* host, size_t bytes)>;
    ExpertMisses(ExpertSlotManager& slots, ExpertPrefetcher& prefetcher, ExpertAccessProfiler& profiler,
                 const ExpertUse& use, Prefetch mode, Reachable reachable, RamExperts* ram = nullptr);

    // How many of `missed` experts of `bytes` bytes each the GPU should fetch; order() may try another number. pairs:
    // of the step.
    int32_t share(int32_t missed, size_t bytes, int32_t pairs = 1) const {
        return _shares[sizeOf(pairs)].best(missed, bytes);
    }
    // The experts that the GPU was ordered to fetch since the last call, including those ahead: they kept the bus busy.
    int64_t takeFetched();

    void order(int32_t layer, const int32_t* chosen, const int32_t* slot, const int32_t* predicted, int32_t pairs,
               ExpertOrders& orders) override;
    void done(int32_t layer, const int32_t* chosen, const int32_t* slot, const int32_t* predicted, int32_t pairs,
              size_t bytes, double seconds) override;
    void followed(double seconds) override;

private:
    // The GPU's own part of a layer and the CPU's time for an expert grow with the rows of a step. So steps whose pairs
    // have different powers of two are measured apart: what one learns would mislead the others.
    static constexpr int32_t kSizes = 16;
    static size_t sizeOf(int32_t pairs);
    void findMissed(const int32_t* chosen, const int32_t* slot, int32_t pairs);
    bool inRam(int32_t expert) const { return !_ram || _ram->present(expert); }
    void orderAhead(int32_t layer, const int32_t* predicted, int32_t pairs, ExpertOrders& orders);
    bool fetch(int32_t layer, int32_t expert, bool ahead, ExpertFetch& to);

    ExpertSlotManager& _slots;
    ExpertPrefetcher& _prefetcher;
    ExpertAccessProfiler& _profiler;
    std::vector<MissShare> _shares;  // by the size of a step
    size_t _size = 0;                // of the step at work
    Prefetch _mode;
    Reachable _reachable;
    RamExperts* _ram;
    int64_t _fetched = 0;
    size_t _fetchedBytes = 0;       // for the layer at work
    bool _measurable = false;       // whether followed() measures nothing but the last layer's misses
    std::vector<int32_t> _missed;   // of the layer at work, each once; those of the most pairs first
    std::vector<int32_t> _pairsOf;  // by expert: the pairs that missed it, while findMissed() counts
    std::vector<int32_t> _ordered;  // the missed experts that the GPU fetches
};

}  // namespace sharpi
