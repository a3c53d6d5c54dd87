// See expert_slots.h.
//
// There are two views of what is where: the present one (ExpertPool), which changes while a pass runs, and the pass's
// (_table), which is brought up to date between passes. While a pass runs nothing is allocated here: a kernel may be
// waiting.
#include "experts/expert_slots.h"

#include <string>
#include <utility>

#include "core/error.h"

namespace sharpi {

void ExpertSlotManager::take(const SlotBudget& budget, ExpertAccessProfiler* profiler) {
    takeMemory(budget);
    const std::lock_guard lock(_mutex);
    size_t keys = 0, slots = 0;
    for (const PoolShape& shape : pools()) {
        const auto count = static_cast<size_t>(shape.experts);
        _pools.push_back({ExpertPool(static_cast<int32_t>(shape.experts), shape.capacity, shape.landing),
                          std::vector<uint8_t>(count), std::vector<uint8_t>(count), std::vector<uint64_t>(count),
                          std::vector<uint64_t>(count)});
        keys += count;
        slots += static_cast<size_t>(shape.capacity);
    }
    _changed.reserve(keys);
    _placed.reserve(slots);
    _table.assign(static_cast<size_t>(experts()) * static_cast<size_t>(layers()), -1);
    _profiler = profiler;
}

void ExpertSlotManager::setReluctant() {
    const std::lock_guard lock(_mutex);
    for (Pool& pool : _pools) pool.slots.policy().setReluctant();
}

void ExpertSlotManager::setLoads(ExpertLoads* loads) {
    const std::lock_guard lock(_mutex);
    forgetLoads();
    _pending.setLoads(loads);
}

int64_t ExpertSlotManager::resident() const {
    const std::lock_guard lock(_mutex);
    return _resident;
}

// --- what changes ---

void ExpertSlotManager::tell(const ExpertKey& expert, ExpertAccessProfiler::Event event) {
    if (_profiler) _profiler->count(layerOf(expert), expertOf(expert), event);
}

void ExpertSlotManager::markChanged(const ExpertKey& expert) {
    uint8_t& changed = poolOf(expert).changed[static_cast<size_t>(expert.key)];
    if (!changed) _changed.push_back(expert);
    changed = 1;
}

// The version rises even if an expert came and went between two passes: the device's copy may show it.
void ExpertSlotManager::updateTable() {
    if (!_changed.empty()) ++_tableVersion;
    for (const ExpertKey& expert : _changed) {
        Pool& pool = poolOf(expert);
        const int64_t at = int64_t{layerOf(expert)} * experts() + expertOf(expert);
        _table[static_cast<size_t>(at)] = pool.slots.slotOf(expert.key);
        pool.changed[static_cast<size_t>(expert.key)] = 0;
    }
    _changed.clear();
}

// The three rules of the header.
bool ExpertSlotManager::mayLeave(const ExpertKey& expert) const {
    const Pool& pool = _pools[static_cast<size_t>(expert.pool)];
    const auto key = static_cast<size_t>(expert.key);
    const int32_t layer = layerOf(expert);
    return layer < _reached || (layer == _reached && pool.chosenIn[key] != _visit && pool.placedIn[key] != _pass);
}

// A slot to fill, with the expert that it held gone; nothing if there is none.
std::optional<int32_t> ExpertSlotManager::claim(const ExpertKey& expert) {
    const auto claimed = poolOf(expert).slots.claim(
        expert.key, [this, &expert](int32_t other) { return mayLeave({expert.pool, other}); });
    if (!claimed) return std::nullopt;
    if (claimed->evicted >= 0) {
        --_resident;
        markChanged({expert.pool, claimed->evicted});
        tell({expert.pool, claimed->evicted}, ExpertAccessProfiler::Event::Eviction);
    }
    return claimed->slot;
}

void ExpertSlotManager::place(const ExpertKey& expert, int32_t slot) {
    poolOf(expert).slots.place(expert.key, slot);
    ++_resident;
    markChanged(expert);
    tell(expert, ExpertAccessProfiler::Event::Load);
}

// --- passes ---

void ExpertSlotManager::beginPass() {
    const std::lock_guard lock(_mutex);
    _reached = -1;
    ++_pass;
    _placed.clear();
    hearOfLoads();
    for (const PendingLoads::Load& load : _pending.takeArrived()) {
        poolOf(load.expert).loading[static_cast<size_t>(load.expert.key)] = 0;
        place(load.expert, load.slot);
    }
    updateTable();
}

void ExpertSlotManager::passFailed() {
    const std::lock_guard lock(_mutex);
    _reached = -1;
    for (const ExpertKey& expert : _placed) {
        ExpertPool& slots = poolOf(expert).slots;
        if (slots.slotOf(expert.key) < 0) continue;
        slots.evict(expert.key);
        --_resident;
        markChanged(expert);
    }
    _placed.clear();
    updateTable();
}

void ExpertSlotManager::reached(int32_t layer, const int32_t* chosen, int32_t count) {
    const std::lock_guard lock(_mutex);
    if (layer <= _reached || layer >= layers()) {
        throw Error(ErrorKind::Internal, "a pass came to layer " + std::to_string(layer) + " of " +
                                             std::to_string(layers()) + " layers with slots after layer " +
                                             std::to_string(_reached));
    }
    for (int32_t i = 0; i < count; ++i) keyOf(layer, chosen[i]);  // throws before anything has changed
    Pool& pool = poolOf(keyOf(layer, 0));
    ++_visit;
    for (int32_t i = 0; i < count; ++i) pool.chosenIn[static_cast<size_t>(keyOf(layer, chosen[i]).key)] = _visit;
    _reached = layer;
    pool.slots.clearLanding();
}

void ExpertSlotManager::used(int32_t layer, const int32_t* chosen, int32_t count) {
    const std::lock_guard lock(_mutex);
    for (int32_t i = 0; i < count; ++i) {
        const ExpertKey expert = keyOf(layer, chosen[i]);
        poolOf(expert).slots.policy().used(expert.key);
    }
}

void ExpertSlotManager::addUses(int32_t layer, int32_t expert, float rows) {
    const std::lock_guard lock(_mutex);
    const ExpertKey what = keyOf(layer, expert);
    poolOf(what).slots.policy().used(what.key, rows);
}

void ExpertSlotManager::addWanted(const LayerExperts& wanted) {
    // What the first counts for. It is not more: others may turn out to be used more.
    constexpr float kMost = 4;
    for (size_t i = wanted.size(); i-- > 0;) {
        const float falling = 1 - static_cast<float>(i) / static_cast<float>(wanted.size());
        addUses(wanted[i].first, wanted[i].second, kMost * falling);
    }
}

void ExpertSlotManager::release(int32_t layer, int32_t expert) {
    const std::lock_guard lock(_mutex);
    const ExpertKey what = keyOf(layer, expert);
    ExpertPool& slots = poolOf(what).slots;
    if (slots.slotOf(what.key) < 0) return;
    slots.evict(what.key);
    --_resident;
    markChanged(what);
    tell(what, ExpertAccessProfiler::Event::Eviction);
}

int32_t ExpertSlotManager::tryGet(int32_t layer, int32_t expert) const {
    const std::lock_guard lock(_mutex);
    const ExpertKey what = keyOf(layer, expert);
    return _pools[static_cast<size_t>(what.pool)].slots.slotOf(what.key);
}

std::optional<ExpertSlotManager::Place> ExpertSlotManager::getOrLoad(int32_t layer, int32_t expert, bool ahead) {
    const std::lock_guard lock(_mutex);
    const ExpertKey what = keyOf(layer, expert);
    if (ahead ? layer <= _reached : layer != _reached) {
        throw Error(ErrorKind::Internal, "a pass in layer " + std::to_string(_reached) +
                                             " asks for a place for an expert of layer " + std::to_string(layer));
    }
    Pool& pool = poolOf(what);
    const auto key = static_cast<size_t>(what.key);
    if (const int32_t slot = pool.slots.slotOf(what.key); slot >= 0) return Place{slot, false};
    if (const int32_t slot = pool.slots.landedAt(what.key); !ahead && slot >= 0) return Place{slot, false};
    if (!pool.loading[key]) {
        if (const std::optional<int32_t> slot = claim(what)) {
            place(what, *slot);
            pool.placedIn[key] = _pass;
            _placed.push_back(what);
            return Place{*slot, true};
        }
    }
    const int32_t landing = ahead ? -1 : pool.slots.land(what.key);
    return landing < 0 ? std::nullopt : std::optional(Place{landing, true});
}

// --- loads in the background ---

// The device has failed, or the loads are no longer wanted: their slots are free again.
void ExpertSlotManager::forgetLoads() noexcept {
    for (const PendingLoads::Load& load : _pending.takeLost()) {
        Pool& pool = poolOf(load.expert);
        pool.loading[static_cast<size_t>(load.expert.key)] = 0;
        pool.slots.giveBack(load.slot);
    }
}

void ExpertSlotManager::hearOfLoads() {
    try {
        _pending.ask();
    } catch (...) {
        forgetLoads();
        throw;
    }
}

ExpertSlotManager::Preload ExpertSlotManager::preload(int32_t layer, int32_t expert) {
    const std::lock_guard lock(_mutex);
    const ExpertKey what = keyOf(layer, expert);
    Pool& pool = poolOf(what);
    const auto key = static_cast<size_t>(what.key);
    if (pool.slots.slotOf(what.key) >= 0 || pool.loading[key]) return Preload::Present;
    if (!_pending.canLoad()) return Preload::NotWorthIt;
    if (_pending.full()) hearOfLoads();
    if (_pending.full()) return Preload::Busy;
    const std::optional<int32_t> slot = claim(what);
    if (!slot) return Preload::NotWorthIt;
    try {
        _pending.start(what, *slot, partsOf(layer, expert, *slot));
    } catch (...) {
        pool.slots.giveBack(*slot);  // part of it may have been overwritten
        throw;
    }
    pool.loading[key] = 1;
    return Preload::Started;
}

}  // namespace sharpi
