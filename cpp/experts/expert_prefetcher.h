// Brings experts into slots before they are missed, behind the computation: a queue of bounded length of what might be
// wanted, from which a few loads are started before each pass. Hints come from predictors; each one's accuracy is
// counted whether or not it is acted on.
//
// A prefetch never drives out what the running pass may still use (ExpertSlotManager sees to that). Loads yield to
// passes that fetch experts themselves, since those are known to be needed: after such a pass
// - what is to be there from the beginning goes on with kLoadsPerPass loads; it pays in every pass to come;
// - hints wait, but for no more than kPatience passes one after another: then one is let through. Where every pass
// fetches,
//   what is missed again and again comes in at last, and the bus hardly sees it.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "experts/expert_profiler.h"
#include "experts/expert_slots.h"

namespace sharpi {

// Where hints come from. Off: they are counted where that costs nothing, and not acted on.
enum class Prefetch {
    Off,
    Count,      // both are counted, none is acted on
    NextToken,  // what this token uses in a layer, the next one will
    NextLayer,  // what the next layer's router makes of this layer's rows
};
// SHARPI_EXPERT_PREFETCH=off|count|next-token|next-layer; throws Error(InvalidArgument) for anything else.
Prefetch prefetchWanted();

// Driven by the thread that drives passes.
class ExpertPrefetcher {
public:
    static constexpr size_t kQueue = 256;
    static constexpr int kLoadsPerPass = 4;
    static constexpr int kPatience = 4;
    // Hints that are looked at before a pass: most of those that come to nothing have asked the policy for a victim.
    static constexpr int kTriesPerPass = 16;

    // slots: with all its layers.
    ExpertPrefetcher(ExpertSlotManager& slots, ExpertAccessProfiler& profiler, Prefetch mode);

    // What is to be there from the beginning, most wanted first: (layer, expert); not bounded by the queue. All that
    // fits and is not there is loaded by and by, before any hint: of each layer until one of its experts is refused for
    // good. Throws Error(InvalidArgument) for what there is not, and keeps what it had.
    void fill(std::vector<std::pair<int32_t, int32_t>> order);
    bool filling() const { return _nextFill < _fill.size(); }
    size_t hints() const { return _hints.size(); }

    // Between two passes, before ExpertSlotManager::beginPass() and when the device has done all of the last one: what
    // it read may be overwritten then, and the next one will not look for it. Starts loads. fetched: experts that the
    // last pass fetched itself. Throws what a load throws; it is then tried again.
    void pump(int64_t fetched);

    // The rows of a step chose these experts of a layer (with repetitions); missed: of them, those without a slot.
    // Counts the predictor "next-token", and in its mode queues what was missed, once; the oldest are forgotten where
    // there are too many.
    void chosen(int32_t layer, const int32_t* experts, int32_t count, const int32_t* missed, int32_t missedCount);
    // What the layer's router made of the rows of the layer before: counted as "next-layer" when chosen() comes for the
    // layer.
    void predicted(int32_t layer, const int32_t* experts, int32_t count);

private:
    using Expert = std::pair<int32_t, int32_t>;  // layer, expert
    struct Layer {
        std::vector<int32_t> last, predicted;  // ascending, none twice; empty: nothing is known
        bool full = false;                     // no more of it is filled in
        std::vector<char> queued;              // by expert: whether it is among the hints
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
    int _waited = 0;             // passes that hints have waited for
    std::vector<int32_t> _used;  // by the step, of the layer that chosen() is told of
};

}  // namespace sharpi
