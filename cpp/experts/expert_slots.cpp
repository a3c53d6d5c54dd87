// See expert_slots.h.
//
// What is where is kept twice: as it is (slotOf, keyIn), which changes while a pass runs, and as the pass sees it
// (_table), which is brought up to date between passes. While a pass runs nothing is allocated here: a kernel may be
// waiting.
#include "experts/expert_slots.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "core/error.h"

namespace sharpi {

// --- loading
// ------------------------------------------------------------------------------------------------------------

size_t ExpertSlotManager::slotBytesOf(const ExpertStacks& file) const {
    size_t bytes = 0;
    for (const MatrixStack* stack : {&file.gate, &file.up, &file.down})
        bytes += Allocator::aligned(_layout.bytes(stack->first));
    return bytes;
}

int32_t ExpertSlotManager::addLayer(const ExpertStacks& file) {
    if (_taken || file.gate.count < 1 || file.up.count != file.gate.count || file.down.count != file.gate.count) {
        throw Error(ErrorKind::Internal, "a layer of " + std::to_string(file.gate.count) + ", " +
                                             std::to_string(file.up.count) + " and " + std::to_string(file.down.count) +
                                             " matrices cannot be added to the slots" +
                                             (_taken ? ", which have been taken" : ""));
    }
    const size_t slotBytes = slotBytesOf(file);
    auto pool =
        std::find_if(_pools.begin(), _pools.end(), [&](const Pool& p) { return p.shape.slotBytes == slotBytes; });
    if (pool == _pools.end()) {
        _pools.emplace_back();
        pool = std::prev(_pools.end());
        pool->shape.slotBytes = slotBytes;
    }
    const int32_t number = layers();
    _layers.push_back({file, static_cast<int32_t>(pool - _pools.begin()), static_cast<int32_t>(pool->shape.experts)});
    ++pool->shape.layers;
    pool->shape.experts += file.gate.count;
    pool->layerOf.insert(pool->layerOf.end(), static_cast<size_t>(file.gate.count), number);
    _experts = std::max(_experts, file.gate.count);
    return number;
}

// Every pool gets the same part of its experts, in whole slots: first rounded down, then one more each, in the order of
// what rounding took from them, as long as the rest is enough for one. What landing slots take goes off first.
void ExpertSlotManager::cutBudget(size_t budget) {
    size_t landing = 0, least = SIZE_MAX, all = 0;
    for (const Pool& pool : _pools) all += pool.shape.slotBytes * static_cast<size_t>(pool.shape.experts);
    for (Pool& pool : _pools) {
        PoolShape& shape = pool.shape;
        const size_t slots = std::min(budget, all) * static_cast<size_t>(shape.experts) / all;
        shape.capacity = 0;
        shape.landing = static_cast<int32_t>(
            std::clamp(std::min(kLandingBytes / shape.slotBytes, slots / kSlotsForALanding), size_t{1}, kMaxLanding));
        landing += shape.slotBytes * static_cast<size_t>(shape.landing);
        least = std::min(least, shape.slotBytes);
    }
    if (_pools.empty() || budget < landing || budget - landing < least) {
        for (Pool& pool : _pools) pool.shape.landing = 0;
        return;
    }
    size_t rest = budget - landing;
    const double part = std::min(1.0, static_cast<double>(rest) / static_cast<double>(all));
    std::vector<std::pair<double, PoolShape*>> byLoss;
    for (Pool& pool : _pools) {
        const double wanted = part * static_cast<double>(pool.shape.experts);
        const size_t fitting = rest / pool.shape.slotBytes;
        pool.shape.capacity = static_cast<int32_t>(std::min(std::floor(wanted), static_cast<double>(fitting)));
        rest -= pool.shape.slotBytes * static_cast<size_t>(pool.shape.capacity);
        byLoss.emplace_back(wanted - pool.shape.capacity, &pool.shape);
    }
    std::stable_sort(byLoss.begin(), byLoss.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    for (bool found = true; found;) {
        found = false;
        for (const auto& [loss, shape] : byLoss) {
            if (shape->slotBytes > rest || shape->capacity >= shape->experts) continue;
            ++shape->capacity;
            rest -= shape->slotBytes;
            found = true;
        }
    }
}

void ExpertSlotManager::take(size_t budget, ExpertAccessProfiler* profiler) {
    if (_taken)
        throw Error(ErrorKind::Internal, "the experts' slots cannot grow: steps that read them may be captured");
    cutBudget(budget);
    size_t bytes = 0;
    for (Pool& pool : _pools) {
        pool.offset = bytes;
        bytes += pool.shape.slotBytes * static_cast<size_t>(pool.shape.capacity + pool.shape.landing);
    }
    size_t keys = 0, slots = 0;
    for (Pool& pool : _pools) {
        const auto count = static_cast<size_t>(pool.shape.experts), capacity = static_cast<size_t>(pool.shape.capacity);
        pool.policy.emplace(static_cast<int32_t>(count), pool.shape.capacity);
        pool.slotOf.assign(count, -1);
        pool.loading.assign(count, 0);
        pool.changed.assign(count, 0);
        pool.chosenIn.assign(count, 0);
        pool.placedIn.assign(count, 0);
        pool.keyIn.assign(capacity, -1);
        pool.free.clear();
        for (int32_t slot = pool.shape.capacity; slot-- > 0;) pool.free.push_back(slot);
        pool.landed.reserve(static_cast<size_t>(pool.shape.landing));
        keys += count;
        slots += capacity;
    }
    _changed.reserve(keys);
    _placed.reserve(slots);
    _onTheWay.reserve(slots);
    _table.assign(static_cast<size_t>(_experts) * _layers.size(), -1);
    if (bytes > 0) _memory = Buffer(_allocator, bytes, "expert slots");
    _profiler = profiler;
    _taken = true;
}

void ExpertSlotManager::setLoads(ExpertLoads* loads) {
    const std::lock_guard lock(_mutex);
    forgetLoads();
    _loads = loads;
    _arrived = 0;
}

// --- what there is
// --------------------------------------------------------------------------------------------------------

ExpertStacks ExpertSlotManager::stacksFrom(const ExpertStacks& file, const Pool& pool) const {
    ExpertStacks stacks;
    const uint8_t* at = _memory.as<uint8_t>();
    if (at) at += pool.offset;
    for (const auto& [from, to] :
         {std::pair{&file.gate, &stacks.gate}, {&file.up, &stacks.up}, {&file.down, &stacks.down}}) {
        to->first = from->first;
        to->first.data = at;
        to->stride = pool.shape.slotBytes;
        to->count = pool.shape.capacity + pool.shape.landing;
        if (at) at += Allocator::aligned(_layout.bytes(from->first));
    }
    return stacks;
}

ExpertStacks ExpertSlotManager::slots(int32_t layer) const {
    const Layer& at = layerAt(layer);
    return stacksFrom(at.file, poolAt(at.pool));
}

size_t ExpertSlotManager::expertBytes(int32_t layer) const {
    const ExpertStacks& stacks = file(layer);
    return fileBytes(stacks.gate.first) + fileBytes(stacks.up.first) + fileBytes(stacks.down.first);
}

int64_t ExpertSlotManager::capacity() const {
    int64_t slots = 0;
    for (const Pool& pool : _pools) slots += pool.shape.capacity;
    return slots;
}

int64_t ExpertSlotManager::resident() const {
    const std::lock_guard lock(_mutex);
    return _resident;
}

std::vector<ExpertSlotManager::PoolShape> ExpertSlotManager::pools() const {
    std::vector<PoolShape> shapes;
    for (const Pool& pool : _pools) shapes.push_back(pool.shape);
    return shapes;
}

ExpertSlotManager::Key ExpertSlotManager::keyOf(int32_t layer, int32_t expert) const {
    const Layer& at = layerAt(layer);
    if (!_taken || expert < 0 || expert >= at.file.gate.count) {
        throw Error(ErrorKind::Internal, "the slots were asked for expert " + std::to_string(expert) + " of " +
                                             std::to_string(at.file.gate.count) +
                                             (_taken ? "" : ", and have not been taken"));
    }
    return {at.pool, at.firstKey + expert};
}

// --- what changes
// -----------------------------------------------------------------------------------------------------------

void ExpertSlotManager::tell(const Key& what, ExpertAccessProfiler::Event event) {
    if (!_profiler) return;
    const int32_t layer = poolAt(what.pool).layerOf[static_cast<size_t>(what.key)];
    _profiler->count(layer, what.key - layerAt(layer).firstKey, event);
}

void ExpertSlotManager::markChanged(const Key& what) {
    uint8_t& changed = poolAt(what.pool).changed[static_cast<size_t>(what.key)];
    if (!changed) _changed.push_back(what);
    changed = 1;
}

// The version rises even where an expert came and went between two passes: the device's copy may show it.
void ExpertSlotManager::updateTable() {
    if (!_changed.empty()) ++_tableVersion;
    for (const Key& what : _changed) {
        Pool& pool = poolAt(what.pool);
        const auto key = static_cast<size_t>(what.key);
        const int32_t layer = pool.layerOf[key];
        const int64_t place = int64_t{layer} * _experts + what.key - layerAt(layer).firstKey;
        _table[static_cast<size_t>(place)] = pool.slotOf[key];
        pool.changed[key] = 0;
    }
    _changed.clear();
}

// The three rules of the header.
bool ExpertSlotManager::mayLeave(const Pool& pool, int32_t key) const {
    const auto k = static_cast<size_t>(key);
    const int32_t layer = pool.layerOf[k];
    return layer < _reached || (layer == _reached && pool.chosenIn[k] != _visit && pool.placedIn[k] != _pass);
}

// A slot that is free, or whose expert may leave and is worth less; or -1.
int32_t ExpertSlotManager::roomFor(const Pool& pool, int32_t key) const {
    if (!pool.free.empty()) return pool.free.back();
    const int32_t victim = pool.policy->victim([this, &pool](int32_t other) { return mayLeave(pool, other); });
    return victim < 0 || !pool.policy->admits(key, victim) ? -1 : pool.slotOf[static_cast<size_t>(victim)];
}

// slot: as roomFor() gave it.
void ExpertSlotManager::vacate(const Key& forWhom, int32_t slot) {
    Pool& pool = poolAt(forWhom.pool);
    const int32_t key = pool.keyIn[static_cast<size_t>(slot)];
    if (key >= 0) {
        drop({forWhom.pool, key});
        tell({forWhom.pool, key}, ExpertAccessProfiler::Event::Eviction);
    }
    pool.free.pop_back();
}

// Its slot is the next free one.
void ExpertSlotManager::drop(const Key& what) {
    Pool& pool = poolAt(what.pool);
    int32_t& slot = pool.slotOf[static_cast<size_t>(what.key)];
    pool.policy->removed(what.key);
    pool.keyIn[static_cast<size_t>(slot)] = -1;
    pool.free.push_back(slot);
    slot = -1;
    --_resident;
    markChanged(what);
}

void ExpertSlotManager::settleIn(const Key& what, int32_t slot) {
    Pool& pool = poolAt(what.pool);
    pool.policy->inserted(what.key);
    pool.slotOf[static_cast<size_t>(what.key)] = slot;
    pool.keyIn[static_cast<size_t>(slot)] = what.key;
    ++_resident;
    markChanged(what);
    tell(what, ExpertAccessProfiler::Event::Load);
}

// --- passes
// -------------------------------------------------------------------------------------------------------------------

void ExpertSlotManager::beginPass() {
    const std::lock_guard lock(_mutex);
    _reached = -1;
    ++_pass;
    _placed.clear();
    hearOfLoads();
    auto next = _onTheWay.begin();
    for (; next != _onTheWay.end() && next->number <= _arrived; ++next) {
        poolAt(next->what.pool).loading[static_cast<size_t>(next->what.key)] = 0;
        settleIn(next->what, next->slot);
    }
    _onTheWay.erase(_onTheWay.begin(), next);
    updateTable();
}

void ExpertSlotManager::passFailed() {
    const std::lock_guard lock(_mutex);
    _reached = -1;
    for (const Key& what : _placed) {
        if (poolAt(what.pool).slotOf[static_cast<size_t>(what.key)] >= 0) drop(what);
    }
    _placed.clear();
    updateTable();
}

void ExpertSlotManager::reached(int32_t layer, const int32_t* chosen, int32_t count) {
    const std::lock_guard lock(_mutex);
    if (layer <= _reached || layer >= layers()) {
        throw Error(ErrorKind::Internal, "a pass came to layer " + std::to_string(layer) + " of " +
                                             std::to_string(layers()) + " of experts after layer " +
                                             std::to_string(_reached));
    }
    for (int32_t i = 0; i < count; ++i) keyOf(layer, chosen[i]);  // throws before anything has changed
    Pool& pool = poolAt(layerAt(layer).pool);
    ++_visit;
    for (int32_t i = 0; i < count; ++i) pool.chosenIn[static_cast<size_t>(keyOf(layer, chosen[i]).key)] = _visit;
    _reached = layer;
    pool.landed.clear();
}

void ExpertSlotManager::used(int32_t layer, const int32_t* chosen, int32_t count) {
    const std::lock_guard lock(_mutex);
    for (int32_t i = 0; i < count; ++i) {
        const Key what = keyOf(layer, chosen[i]);
        poolAt(what.pool).policy->used(what.key);
    }
}

void ExpertSlotManager::addUses(int32_t layer, int32_t expert, float rows) {
    const std::lock_guard lock(_mutex);
    const Key what = keyOf(layer, expert);
    poolAt(what.pool).policy->used(what.key, rows);
}

int32_t ExpertSlotManager::tryGet(int32_t layer, int32_t expert) const {
    const std::lock_guard lock(_mutex);
    const Key what = keyOf(layer, expert);
    return poolAt(what.pool).slotOf[static_cast<size_t>(what.key)];
}

std::optional<ExpertSlotManager::Place> ExpertSlotManager::getOrLoad(int32_t layer, int32_t expert, bool ahead) {
    const std::lock_guard lock(_mutex);
    const Key what = keyOf(layer, expert);
    if (ahead ? layer <= _reached : layer != _reached) {
        throw Error(ErrorKind::Internal, "a pass in layer " + std::to_string(_reached) +
                                             " of experts asks for a place in layer " + std::to_string(layer));
    }
    Pool& pool = poolAt(what.pool);
    const auto key = static_cast<size_t>(what.key);
    if (pool.slotOf[key] >= 0) return Place{pool.slotOf[key], false};
    const auto landed = std::find(pool.landed.begin(), pool.landed.end(), what.key);
    const auto landing = pool.shape.capacity + static_cast<int32_t>(landed - pool.landed.begin());
    if (!ahead && landed != pool.landed.end()) return Place{landing, false};
    const int32_t slot = pool.loading[key] ? -1 : roomFor(pool, what.key);
    if (slot >= 0) {
        vacate(what, slot);
        settleIn(what, slot);
        pool.placedIn[key] = _pass;
        _placed.push_back(what);
        return Place{slot, true};
    }
    if (ahead || landing == pool.shape.capacity + pool.shape.landing) return std::nullopt;
    pool.landed.push_back(what.key);
    return Place{landing, true};
}

// --- loads in the background
// ------------------------------------------------------------------------------------------------------

// The device has failed, or nobody wants them: what is on its way comes to nothing, once it no longer writes to the
// slots.
void ExpertSlotManager::forgetLoads() noexcept {
    if (!_onTheWay.empty()) {
        try {
            _loads->settle();
        } catch (...) {
            // A device that has failed writes nothing more; who called hears of it from the first failure.
        }
    }
    for (const Load& load : _onTheWay) {
        Pool& pool = poolAt(load.what.pool);
        pool.loading[static_cast<size_t>(load.what.key)] = 0;
        pool.free.push_back(load.slot);
    }
    _onTheWay.clear();
}

void ExpertSlotManager::hearOfLoads() {
    if (_onTheWay.empty()) return;
    try {
        _arrived = std::max(_arrived, _loads->finished());
    } catch (...) {
        forgetLoads();
        throw;
    }
}

bool ExpertSlotManager::busy() {
    const auto running = [&] {
        return std::count_if(_onTheWay.begin(), _onTheWay.end(),
                             [&](const Load& load) { return load.number > _arrived; });
    };
    if (running() < _loads->depth()) return false;
    hearOfLoads();
    return running() >= _loads->depth();
}

std::array<StreamPart, 3> ExpertSlotManager::partsOf(int32_t layer, int32_t expert, int32_t slot) const {
    const ExpertStacks &from = file(layer), to = slots(layer);
    std::array<StreamPart, 3> parts;
    size_t i = 0;
    for (const auto& [source, target] : {std::pair{&from.gate, &to.gate}, {&from.up, &to.up}, {&from.down, &to.down}}) {
        parts[i].to = target->at(slot);
        parts[i].rows = source->first.rows;
        parts[i].file = source->at(expert).data;
        ++i;
    }
    return parts;
}

ExpertSlotManager::Preload ExpertSlotManager::preload(int32_t layer, int32_t expert) {
    const std::lock_guard lock(_mutex);
    const Key what = keyOf(layer, expert);
    Pool& pool = poolAt(what.pool);
    const auto key = static_cast<size_t>(what.key);
    if (pool.slotOf[key] >= 0 || pool.loading[key]) return Preload::Present;
    if (!_loads) return Preload::NotWorthIt;
    if (busy()) return Preload::Busy;
    const int32_t slot = roomFor(pool, what.key);
    if (slot < 0) return Preload::NotWorthIt;
    vacate(what, slot);
    uint64_t number = 0;
    try {
        number = _loads->start(partsOf(layer, expert, slot));
    } catch (...) {
        pool.free.push_back(slot);  // part of it may have been overwritten
        throw;
    }
    pool.loading[key] = 1;
    _onTheWay.push_back({number, what, slot});
    return Preload::Started;
}

}  // namespace sharpi
