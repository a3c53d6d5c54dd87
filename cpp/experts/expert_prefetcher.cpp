// See expert_prefetcher.h.
#include "experts/expert_prefetcher.h"

#include <algorithm>
#include <climits>
#include <cstdlib>

#include "core/error.h"

namespace sharpi {

namespace {

void toSet(std::vector<int32_t>& set, const int32_t* experts, int32_t count) {
    set.assign(experts, experts + count);
    std::sort(set.begin(), set.end());
    set.erase(std::unique(set.begin(), set.end()), set.end());
}

}  // namespace

Prefetch prefetchWanted() {
    const char* value = std::getenv("SHARPI_EXPERT_PREFETCH");
    const std::string wanted = value ? value : "";
    if (wanted.empty() || wanted == "off") return Prefetch::Off;
    if (wanted == "count") return Prefetch::Count;
    if (wanted == "next-token") return Prefetch::NextToken;
    if (wanted == "next-layer") return Prefetch::NextLayer;
    throw Error(ErrorKind::InvalidArgument,
                "SHARPI_EXPERT_PREFETCH=" + wanted + " (known: off, count, next-token, next-layer)");
}

ExpertPrefetcher::ExpertPrefetcher(ExpertSlotManager& slots, ExpertAccessProfiler& profiler, Prefetch mode)
    : _slots(slots), _profiler(profiler), _mode(mode), _layers(static_cast<size_t>(slots.layers())) {
    for (size_t i = 0; i < _layers.size(); ++i)
        _layers[i].queued.resize(static_cast<size_t>(slots.file(static_cast<int32_t>(i)).gate.count));
}

void ExpertPrefetcher::fill(std::vector<Expert> order) {
    for (const auto& [layer, expert] : order) {
        if (layer < 0 || layer >= _slots.layers() || expert < 0 || expert >= _slots.file(layer).gate.count)
            throw Error(ErrorKind::InvalidArgument, "there is no expert " + std::to_string(expert) + " in layer " +
                                                        std::to_string(layer) + " of the layers with slots");
    }
    _fill = std::move(order);
    _nextFill = 0;
    for (Layer& layer : _layers) layer.full = false;
}

void ExpertPrefetcher::pump(int64_t fetched) {
    if (filling()) pumpFill(fetched > 0 ? kLoadsPerPass : INT_MAX);
    if (filling() || _hints.empty()) return;
    if (fetched > 0 && _waited < kPatience) {
        ++_waited;
        return;
    }
    _waited = 0;
    pumpHints(fetched > 0 ? 1 : kLoadsPerPass);
}

void ExpertPrefetcher::pumpFill(int most) {
    for (; filling() && most > 0; ++_nextFill) {
        const auto [layer, expert] = _fill[_nextFill];
        if (layerOf(layer).full) continue;
        const auto answer = _slots.preload(layer, expert);
        if (answer == ExpertSlotManager::Preload::Busy) return;
        if (answer == ExpertSlotManager::Preload::Started) --most;
        // Other layers may use other pools, which may not be full yet.
        if (answer == ExpertSlotManager::Preload::NotWorthIt) layerOf(layer).full = true;
    }
    if (filling()) return;
    _fill = {};
    _nextFill = 0;
}

void ExpertPrefetcher::pumpHints(int most) {
    for (int tries = kTriesPerPass; tries > 0 && most > 0 && !_hints.empty(); --tries) {
        const auto [layer, expert] = _hints.front();
        const auto answer = _slots.preload(layer, expert);
        if (answer == ExpertSlotManager::Preload::Busy) return;
        if (answer == ExpertSlotManager::Preload::Started) --most;
        dropOldest();
    }
}

void ExpertPrefetcher::dropOldest() {
    const auto [layer, expert] = _hints.front();
    layerOf(layer).queued[static_cast<size_t>(expert)] = 0;
    _hints.pop_front();
}

void ExpertPrefetcher::queue(int32_t layer, int32_t expert) {
    char& queued = layerOf(layer).queued.at(static_cast<size_t>(expert));
    if (queued) return;
    if (_hints.size() == kQueue) dropOldest();
    _hints.emplace_back(layer, expert);
    queued = 1;
}

// guess: ascending, as _used is.
void ExpertPrefetcher::countGuess(const std::string& name, const std::vector<int32_t>& guess) {
    if (guess.empty()) return;
    uint64_t right = 0;
    for (const int32_t expert : _used) right += std::binary_search(guess.begin(), guess.end(), expert);
    _profiler.addPrediction(name, guess.size(), right, _used.size());
}

void ExpertPrefetcher::chosen(int32_t layer, const int32_t* experts, int32_t count, const int32_t* missed,
                              int32_t missedCount) {
    Layer& known = layerOf(layer);
    if (count <= 0) return;
    toSet(_used, experts, count);
    countGuess("next-token", known.last);
    countGuess("next-layer", known.predicted);
    known.predicted.clear();
    known.last.swap(_used);
    if (_mode != Prefetch::NextToken) return;
    for (int32_t i = 0; i < missedCount; ++i) queue(layer, missed[i]);
}

void ExpertPrefetcher::predicted(int32_t layer, const int32_t* experts, int32_t count) {
    toSet(layerOf(layer).predicted, experts, count);
}

}  // namespace sharpi
