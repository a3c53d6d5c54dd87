// What becomes of the experts that a step misses: which of them the GPU fetches across PCIe, into which slots, and which the CPU
// computes, so that both are done at about the same time. How long the CPU takes shows while it runs; the bus is as it was
// measured. By core/contract.h the choice changes the speed alone.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "engine/backend.h"
#include "engine/miss_plan.h"
#include "memory/expert_prefetcher.h"

namespace sharpi {

// The seconds that bytes take: a line through what was seen of late. Neither its start nor its slope is ever negative.
class TimeLine {
public:
    // Before anything is seen: a start of so many seconds, and then so many bytes per second; around `bytes` > 0. A trace of that stays: it
    // gives the line its slope where all that was seen is of one size.
    TimeLine(double start, double rate, double bytes);
    void add(double bytes, double seconds);
    double seconds(double bytes) const;

private:
    void weigh(double bytes, double seconds, double weight);
    void weighExpected(double weight);
    double _start, _rate, _around;  // as expected
    // Weighted sums, of which older ones count less and less.
    double _weight = 0, _bytes = 0, _seconds = 0, _squares = 0, _products = 0;
};

class ExpertMisses : public MissPlan {
public:
    // Seconds that the CPU takes beside those for the bytes, before anything was seen: sharing a layer out to threads, and joining them.
    static constexpr double kCpuStart = 15e-6;
    // Those of fetches: the orders' way to the GPU, and the products that follow.
    static constexpr double kFetchStart = 20e-6;
    // Experts fetched ahead of a layer: about as many as the bus brings while the GPU does what lies between two layers' experts.
    static constexpr int32_t kMostAhead = 2;

    // reachable: where the GPU reads bytes of a file, or nullptr.
    using Reachable = std::function<const uint8_t*(const uint8_t* file, size_t bytes)>;
    ExpertMisses(ExpertSlotManager& slots, ExpertPrefetcher& prefetcher, ExpertAccessProfiler& profiler, const ExpertUse& use,
                 Prefetch mode, Reachable reachable);

    // How many of `missed` experts of so many bytes the GPU shall fetch: the slower of CPU and bus is done soonest then. Of several such
    // numbers the least: what is fetched may drive others out.
    int32_t share(int32_t missed, size_t bytes) const;
    int64_t takeFetched();  // experts that the GPU was ordered to fetch since the last call, those ahead too: the bus was busy

    void order(int32_t layer, const int32_t* chosen, const int32_t* slot, const int32_t* predicted, int32_t pairs,
               cuda::ExpertOrders& orders) override;
    void done(int32_t layer, const int32_t* chosen, const int32_t* slot, const int32_t* predicted, int32_t pairs, size_t bytes,
              double seconds) override;

private:
    void orderAhead(int32_t layer, const int32_t* predicted, int32_t pairs, cuda::ExpertOrders& orders);
    bool fetch(int32_t layer, int32_t expert, bool ahead, cuda::ExpertFetch& to);

    ExpertSlotManager& _slots;
    ExpertPrefetcher& _prefetcher;
    ExpertAccessProfiler& _profiler;
    std::optional<TimeLine> _cpu;  // none: all are the CPU's
    double _busRate;               // bytes per second
    Prefetch _mode;
    Reachable _reachable;
    int64_t _fetched = 0;
    std::vector<int32_t> _missed;   // of the layer at work, each once
    std::vector<int32_t> _ordered;  // of these: those that the GPU fetches
};

}  // namespace sharpi
