// See expert_profiler.h.
#include "experts/expert_profiler.h"

#include <algorithm>

#include "core/error.h"

namespace sharpi {

namespace {

void place(std::vector<uint64_t>& to, size_t at, const std::vector<uint64_t>& row) {
    std::copy(row.begin(), row.end(), to.begin() + static_cast<std::ptrdiff_t>(at));
}

}  // namespace

int32_t ExpertAccessProfiler::addLayer(int32_t layer, int32_t experts) {
    if (experts <= 0) throw Error(ErrorKind::Internal, "a layer of " + std::to_string(experts) + " experts is counted");
    const std::lock_guard<std::mutex> lock(_mutex);
    Row row;
    row.layer = layer;
    row.experts = experts;
    row.uses.assign(static_cast<size_t>(experts), 0);
    row.events.fill(row.uses);
    _rows.push_back(std::move(row));
    return static_cast<int32_t>(_rows.size()) - 1;
}

ExpertAccessProfiler::Row& ExpertAccessProfiler::rowOf(int32_t row, int32_t expert) {
    const bool known = row >= 0 && static_cast<size_t>(row) < _rows.size() && expert >= 0 &&
                       expert < _rows[static_cast<size_t>(row)].experts;
    if (!known)
        throw Error(ErrorKind::Internal,
                    "nobody counts expert " + std::to_string(expert) + " of row " + std::to_string(row));
    return _rows[static_cast<size_t>(row)];
}

void ExpertAccessProfiler::count(int32_t row, int32_t expert, Event event, uint64_t times) {
    const std::lock_guard<std::mutex> lock(_mutex);
    rowOf(row, expert).events[static_cast<size_t>(event)][static_cast<size_t>(expert)] += times;
}

void ExpertAccessProfiler::addUse(int32_t row, int32_t expert, uint64_t times) {
    const std::lock_guard<std::mutex> lock(_mutex);
    rowOf(row, expert).uses[static_cast<size_t>(expert)] += times;
}

void ExpertAccessProfiler::addUses(const uint32_t* uses, int32_t stride) {
    const std::lock_guard<std::mutex> lock(_mutex);
    for (const Row& row : _rows) {
        if (row.experts > stride)
            throw Error(ErrorKind::Internal,
                        "uses of " + std::to_string(row.experts) + " experts in rows of " + std::to_string(stride));
    }
    for (Row& row : _rows) {
        for (size_t e = 0; e < row.uses.size(); ++e) row.uses[e] += uses[e];
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
    counts.layers = static_cast<int32_t>(_rows.size());
    for (const Row& row : _rows) {
        counts.layer.push_back(row.layer);
        counts.present.push_back(row.experts);
        counts.experts = std::max(counts.experts, row.experts);
    }
    const auto stride = static_cast<size_t>(counts.experts);
    const std::array<std::vector<uint64_t>*, kEvents> events = {&counts.hits, &counts.computed, &counts.fetched,
                                                                &counts.loads, &counts.evictions};
    counts.uses.assign(stride * _rows.size(), 0);
    for (std::vector<uint64_t>* all : events) *all = counts.uses;
    for (size_t r = 0; r < _rows.size(); ++r) {
        place(counts.uses, stride * r, _rows[r].uses);
        for (size_t i = 0; i < kEvents; ++i) place(*events[i], stride * r, _rows[r].events[i]);
    }
    counts.predictors = _predictors;
    return counts;
}

void ExpertAccessProfiler::clear() {
    const std::lock_guard<std::mutex> lock(_mutex);
    for (Row& row : _rows) {
        std::fill(row.uses.begin(), row.uses.end(), 0);
        row.events.fill(row.uses);
    }
    _predictors.clear();
}

}  // namespace sharpi
