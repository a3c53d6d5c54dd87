// See expert_profiler.h.
#include "experts/expert_profiler.h"

#include <algorithm>

#include "core/error.h"

namespace sharpi {

namespace {

void place(std::vector<uint64_t>& to, size_t at, const std::vector<uint64_t>& counts) {
    std::copy(counts.begin(), counts.end(), to.begin() + static_cast<std::ptrdiff_t>(at));
}

}  // namespace

int32_t ExpertAccessProfiler::addLayer(int32_t layer, int32_t experts) {
    if (experts <= 0)
        throw Error(ErrorKind::Internal, "a layer of " + std::to_string(experts) + " experts cannot be counted");
    const std::lock_guard<std::mutex> lock(_mutex);
    Layer added;
    added.layer = layer;
    added.experts = experts;
    added.uses.assign(static_cast<size_t>(experts), 0);
    added.events.fill(added.uses);
    _layers.push_back(std::move(added));
    return static_cast<int32_t>(_layers.size()) - 1;
}

ExpertAccessProfiler::Layer& ExpertAccessProfiler::layerOf(int32_t expertLayer, int32_t expert) {
    const bool known = expertLayer >= 0 && static_cast<size_t>(expertLayer) < _layers.size() && expert >= 0 &&
                       expert < _layers[static_cast<size_t>(expertLayer)].experts;
    if (!known)
        throw Error(ErrorKind::Internal, "there are no counts for expert " + std::to_string(expert) +
                                             " of expert layer " + std::to_string(expertLayer));
    return _layers[static_cast<size_t>(expertLayer)];
}

void ExpertAccessProfiler::count(int32_t expertLayer, int32_t expert, Event event, uint64_t times) {
    const std::lock_guard<std::mutex> lock(_mutex);
    layerOf(expertLayer, expert).events[static_cast<size_t>(event)][static_cast<size_t>(expert)] += times;
}

void ExpertAccessProfiler::addUse(int32_t expertLayer, int32_t expert, uint64_t times) {
    const std::lock_guard<std::mutex> lock(_mutex);
    layerOf(expertLayer, expert).uses[static_cast<size_t>(expert)] += times;
}

void ExpertAccessProfiler::addUses(const uint32_t* uses, int32_t stride) {
    const std::lock_guard<std::mutex> lock(_mutex);
    for (const Layer& layer : _layers) {
        if (layer.experts > stride)
            throw Error(ErrorKind::Internal, "uses of " + std::to_string(layer.experts) +
                                                 " experts do not fit a stride of " + std::to_string(stride));
    }
    for (Layer& layer : _layers) {
        for (size_t e = 0; e < layer.uses.size(); ++e) layer.uses[e] += uses[e];
        uses += stride;
    }
}

void ExpertAccessProfiler::addPrediction(const std::string& name, uint64_t named, uint64_t used, uint64_t wanted) {
    const std::lock_guard<std::mutex> lock(_mutex);
    auto found =
        std::find_if(_predictors.begin(), _predictors.end(), [&](const PredictorCounts& p) { return p.name == name; });
    if (found == _predictors.end()) found = _predictors.insert(found, PredictorCounts{name});
    found->named += named;
    found->used += used;
    found->wanted += wanted;
}

ExpertCounts ExpertAccessProfiler::counts() const {
    const std::lock_guard<std::mutex> lock(_mutex);
    ExpertCounts counts;
    counts.layers = static_cast<int32_t>(_layers.size());
    for (const Layer& layer : _layers) {
        counts.layer.push_back(layer.layer);
        counts.present.push_back(layer.experts);
        counts.experts = std::max(counts.experts, layer.experts);
    }
    const auto stride = static_cast<size_t>(counts.experts);
    const std::array<std::vector<uint64_t>*, kEvents> events = {&counts.hits, &counts.computed, &counts.fetched,
                                                                &counts.loads, &counts.evictions};
    counts.uses.assign(stride * _layers.size(), 0);
    for (std::vector<uint64_t>* all : events) *all = counts.uses;
    for (size_t l = 0; l < _layers.size(); ++l) {
        place(counts.uses, stride * l, _layers[l].uses);
        for (size_t i = 0; i < kEvents; ++i) place(*events[i], stride * l, _layers[l].events[i]);
    }
    counts.predictors = _predictors;
    return counts;
}

void ExpertAccessProfiler::clear() {
    const std::lock_guard<std::mutex> lock(_mutex);
    for (Layer& layer : _layers) {
        std::fill(layer.uses.begin(), layer.uses.end(), 0);
        layer.events.fill(layer.uses);
    }
    _predictors.clear();
}

}  // namespace sharpi
