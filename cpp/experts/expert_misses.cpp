// See expert_misses.h.
#include "experts/expert_misses.h"

#include <algorithm>
#include <utility>

namespace sharpi {

namespace {

bool contains(const std::vector<int32_t>& list, int32_t expert) {
    return std::find(list.begin(), list.end(), expert) != list.end();
}

}  // namespace

ExpertMisses::ExpertMisses(ExpertSlotManager& slots, ExpertPrefetcher& prefetcher, ExpertAccessProfiler& profiler,
                           const ExpertUse& use, Prefetch mode, Reachable reachable, RamExperts* ram)
    : _slots(slots),
      _prefetcher(prefetcher),
      _profiler(profiler),
      _shares(kSizes, MissShare(use.cpuRate, use.busRate, slots.expertBytes(0))),
      _mode(mode),
      _reachable(std::move(reachable)),
      _ram(ram),
      _pairsOf(static_cast<size_t>(slots.experts())) {
    _missed.reserve(_pairsOf.size());
    _ordered.reserve(kMaxExpertFetches);
}

size_t ExpertMisses::sizeOf(int32_t pairs) {
    int32_t size = 0;
    while (size + 1 < kSizes && pairs >> (size + 1)) ++size;
    return static_cast<size_t>(size);
}

int64_t ExpertMisses::takeFetched() { return std::exchange(_fetched, 0); }

bool ExpertMisses::fetch(int32_t layer, int32_t expert, bool ahead, ExpertFetch& to) {
    // What is ahead is of another layer than that whose experts were looked for in RAM.
    if (_ram && (ahead || !_ram->present(expert))) return false;
    const ExpertStacks& file = _slots.file(layer);
    const auto reach = [&](const MatrixStack& stack, size_t which) {
        const uint8_t* const host = _ram ? _ram->matrix(expert, which).data : stack.at(expert).data;
        return _reachable(host, fileBytes(stack.first));
    };
    to.expert = expert;
    to.gate = reach(file.gate, 0);
    to.up = file.gated() ? reach(file.up, 1) : to.gate;
    to.down = reach(file.down, 2);
    if (!to.gate || !to.up || !to.down) return false;
    const auto place = _slots.getOrLoad(layer, expert, ahead);
    if (!place || !place->fill) return false;
    to.slot = place->slot;
    if (_ram && _slots.tryGet(layer, expert) >= 0) _ram->fetched(layer, expert);
    return true;
}

void ExpertMisses::order(int32_t layer, const int32_t* chosen, const int32_t* slot, const int32_t* predicted,
                         int32_t pairs, ExpertOrders& orders) {
    _slots.reached(layer, chosen, pairs);
    _ordered.clear();
    findMissed(chosen, slot, pairs);
    _size = sizeOf(pairs);
    const auto there = std::count_if(_missed.begin(), _missed.end(), [this](int32_t expert) { return inRam(expert); });
    const int32_t wanted = _shares[_size].choose(static_cast<int32_t>(there), _slots.expertBytes(layer));
    for (const int32_t expert : _missed) {
        if (orders.demanded == wanted) break;
        if (!fetch(layer, expert, false, orders.fetch[orders.demanded])) continue;
        ++orders.demanded;
        _ordered.push_back(expert);
    }
    if (_mode == Prefetch::NextLayer && predicted) orderAhead(layer + 1, predicted, pairs, orders);
    _fetched += orders.demanded + orders.ahead;
    _fetchedBytes = static_cast<size_t>(orders.demanded) * _slots.expertBytes(layer);
    _measurable = orders.ahead == 0;  // experts fetched ahead use the bus too
}

// An expert of many pairs costs the CPU more and the GPU hardly anything, so the GPU takes these first.
void ExpertMisses::findMissed(const int32_t* chosen, const int32_t* slot, int32_t pairs) {
    const auto pairsOf = [this](int32_t expert) -> int32_t& { return _pairsOf[static_cast<size_t>(expert)]; };
    _missed.clear();
    for (int32_t p = 0; p < pairs; ++p) {
        if (slot[p] < 0 && pairsOf(chosen[p])++ == 0) _missed.push_back(chosen[p]);
    }
    // Insertion, which keeps equal ones in their order and allocates nothing.
    for (size_t i = 1; i < _missed.size(); ++i) {
        for (size_t j = i; j > 0 && pairsOf(_missed[j - 1]) < pairsOf(_missed[j]); --j)
            std::swap(_missed[j - 1], _missed[j]);
    }
    for (const int32_t expert : _missed) pairsOf(expert) = 0;
}

void ExpertMisses::orderAhead(int32_t layer, const int32_t* predicted, int32_t pairs, ExpertOrders& orders) {
    for (int32_t p = 0; p < pairs && orders.ahead < kMostAhead; ++p) {
        if (_slots.tryGet(layer, predicted[p]) < 0 && fetch(layer, predicted[p], true, orders.aheadFetch[orders.ahead]))
            ++orders.ahead;
    }
}

void ExpertMisses::done(int32_t layer, const int32_t* chosen, const int32_t* slot, const int32_t* predicted,
                        int32_t pairs, size_t bytes, double seconds) {
    using Event = ExpertAccessProfiler::Event;
    const bool missed = std::any_of(slot, slot + pairs, [](int32_t s) { return s < 0; });
    if (!missed) {
        _slots.reached(layer, chosen, pairs);
        _missed.clear();
        _measurable = false;
    } else {
        _shares[_size].done(_fetchedBytes, bytes, seconds);
    }
    for (int32_t p = 0; p < pairs; ++p) {
        _profiler.count(layer, chosen[p],
                        slot[p] >= 0                    ? Event::Hit
                        : contains(_ordered, chosen[p]) ? Event::Fetched
                                                        : Event::Computed);
    }
    _slots.used(layer, chosen, pairs);
    if (_mode == Prefetch::NextToken) {  // an expert that was fetched to stay needs no hint
        const auto there = [&](int32_t expert) { return _slots.tryGet(layer, expert) >= 0; };
        _missed.erase(std::remove_if(_missed.begin(), _missed.end(), there), _missed.end());
    }
    _prefetcher.chosen(layer, chosen, pairs, _missed.data(), static_cast<int32_t>(_missed.size()));
    if (predicted) _prefetcher.predicted(layer + 1, predicted, pairs);
}

void ExpertMisses::followed(double seconds) {
    if (_measurable) _shares[_size].followed(seconds);
    _measurable = false;
}

}  // namespace sharpi
