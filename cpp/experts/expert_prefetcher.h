// Loads experts into slots before they are missed, beside the computation. Hints name experts that may be wanted; they
// wait in a bounded queue, from which a few loads are started before each pass. Hints come from predictors, whose
// accuracy is counted whether or not their hints are acted on.
//
// A prefetch never evicts what the running pass may still use (ExpertSlotManager sees to that). Loads yield to passes
// that fetch experts themselves, since those are known to be needed. After such a pass
// - the initial fill goes on with kLoadsPerPass loads, since it pays in all later passes;
// - hints wait, but for at most kPatience passes in a row; then one is loaded. So even if every pass fetches, an expert
//   that is missed again and again is loaded in the end, at little cost to the bus.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "experts/expert_profiler.h"
#include "experts/expert_slots.h"

namespace sharpi {

// The predictor whose hints are acted on.
enum class Prefetch {
    Off,        // none; predictors that cost nothing are counted
    Count,      // none, but both are counted
    NextToken,  // the next token will use the experts of a layer that this token uses
    NextLayer,  // the next layer will use the experts that its router chooses for this layer's rows
};
// SHARPI_EXPERT_PREFETCH=off|count|next-token|next-layer; throws Error(InvalidArgument) for anything else.
Prefetch prefetchWanted();

// Driven by the thread that drives passes.
class ExpertPrefetcher {
public:
    static constexpr size_t kQueue = 256;
    static constexpr int kLoadsPerPass = 4;
    static constexpr int kPatience = 4;
    // The most hints that are looked at before a pass: even one that loads nothing may cost a search for a victim.
    static constexpr int kTriesPerPass = 16;

    // slots: with all its layers.
    ExpertPrefetcher(ExpertSlotManager& slots, ExpertAccessProfiler& profiler, Prefetch mode);

    // The initial fill: (layer, expert) in the order of preference, of any length. Over the next passes, and before any
    // hint, it loads those that are not there; a layer is done when one of its experts is refused for good. Throws
    // Error(InvalidArgument) for an expert that does not exist, and keeps the fill that it had.
    void fill(std::vector<std::pair<int32_t, int32_t>> order);
    bool filling() const { return _nextFill < _fill.size(); }
    size_t hints() const { return _hints.size(); }

    // Starts loads. Between two passes: before ExpertSlotManager::beginPass(), and when the device has finished the
    // last pass, so that what it read may be overwritten and the next pass will not look for it. fetched: the number of
    // experts that the last pass fetched itself. Throws what a load throws; the load is tried again by the next call.
    void pump(int64_t fetched);

    // The rows of a step chose these experts of a layer (with repetitions); missed: those of them without a slot.
    // Counts the predictors' guesses. In the mode NextToken queues each missed expert once; if the queue is full, the
    // oldest hints are forgotten.
    void chosen(int32_t layer, const int32_t* experts, int32_t count, const int32_t* missed, int32_t missedCount);
    // What the layer's router chooses for the rows of the layer before. chosen() of the layer counts it as
    // "next-layer".
    void predicted(int32_t layer, const int32_t* experts, int32_t count);

private:
    using Expert = std::pair<int32_t, int32_t>;  // layer, expert
    struct Layer {
        std::vector<int32_t> last, predicted;  // ascending, none twice; empty: nothing is known
        bool full = false;                     // the initial fill is done with it
        std::vector<char> queued;              // by expert: whether a hint names it
    };
    Layer& layerOf(int32_t layer) { return _layers.at(static_cast<size_t>(layer)); }
    void pumpFill(int most);
    void pumpHints(int most);
    void queue(int32_t layer, int32_t expert);
    void dropOldest();
    void countGuess(const std::string& name, const std::vector<int32_t>& guess);

    ExpertSlotManager& _slots;
    ExpertAccessProfiler& _profiler;
    const Prefetch _mode;
    std::vector<Layer> _layers;
    std::vector<Expert> _fill;
    size_t _nextFill = 0;
    std::deque<Expert> _hints;   // oldest first
    int _waited = 0;             // passes for which hints have waited
    std::vector<int32_t> _used;  // the experts that chosen() names
};

}  // namespace sharpi
