// See slot_memory.h.
#include "experts/cache/slot_memory.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "core/error.h"

namespace sharpi {

size_t ExpertSlotMemory::slotBytesOf(const ExpertStacks& file) const {
    size_t bytes = 0;
    for (const MatrixStack* stack : {&file.gate, &file.up, &file.down})
        bytes += Allocator::aligned(_layout.bytes(stack->first));
    return bytes;
}

int32_t ExpertSlotMemory::addLayer(const ExpertStacks& file) {
    const bool alike = (!file.gated() || file.up.count == file.gate.count) && file.down.count == file.gate.count;
    if (_taken || file.gate.count < 1 || !alike) {
        throw Error(ErrorKind::Internal, "a layer of " + std::to_string(file.gate.count) + ", " +
                                             std::to_string(file.up.count) + " and " + std::to_string(file.down.count) +
                                             " matrices cannot be added to the slots" +
                                             (_taken ? ", whose memory is taken" : ""));
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

// Landing slots come off the budget first; rest: what they leave. False: the budget is too small for them and one slot
// more, so there are none.
bool ExpertSlotMemory::cutLanding(const SlotBudget& budget, size_t* rest) {
    size_t landing = 0, least = SIZE_MAX, all = 0;
    for (const Pool& pool : _pools) all += pool.shape.slotBytes * static_cast<size_t>(pool.shape.experts);
    for (Pool& pool : _pools) {
        PoolShape& shape = pool.shape;
        const size_t slots = std::min(budget.bytes, all) * static_cast<size_t>(shape.experts) / all;
        shape.capacity = 0;
        const size_t ofToken = std::min({kLandingBytes / shape.slotBytes, slots / kSlotsForALanding, kLandingOfToken});
        const size_t ofRows = std::min(static_cast<size_t>(budget.stepRows), slots / kSlotsForMoreLanding);
        shape.landing = static_cast<int32_t>(std::clamp(std::max(ofToken, ofRows), size_t{1}, kMostLanding));
        landing += shape.slotBytes * static_cast<size_t>(shape.landing);
        least = std::min(least, shape.slotBytes);
    }
    if (!_pools.empty() && budget.bytes >= landing && budget.bytes - landing >= least) {
        *rest = budget.bytes - landing;
        return true;
    }
    for (Pool& pool : _pools) pool.shape.landing = 0;
    return false;
}

// Every pool gets the same part of its experts, in whole slots: first rounded down; then one more each, beginning with
// the pool that rounding cost the most, while the rest of the budget is enough for one.
void ExpertSlotMemory::cutBudget(const SlotBudget& budget) {
    size_t rest = 0, all = 0;
    if (!cutLanding(budget, &rest)) return;
    for (const Pool& pool : _pools) all += pool.shape.slotBytes * static_cast<size_t>(pool.shape.experts);
    const double part = std::min(1.0, static_cast<double>(rest) / static_cast<double>(all));
    std::vector<std::pair<double, PoolShape*>> byLoss;
    for (Pool& pool : _pools) {
        const double wanted = part * static_cast<double>(pool.shape.experts);
        const auto fitting = static_cast<double>(rest / pool.shape.slotBytes);
        pool.shape.capacity = static_cast<int32_t>(std::min(std::floor(wanted), fitting));
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

void ExpertSlotMemory::takeMemory(const SlotBudget& budget) {
    if (_taken) throw Error(ErrorKind::Internal, "the experts' slots cannot grow: captured steps may read them");
    cutBudget(budget);
    size_t bytes = 0;
    for (Pool& pool : _pools) {
        pool.offset = bytes;
        bytes += pool.shape.slotBytes * static_cast<size_t>(pool.shape.capacity + pool.shape.landing);
    }
    if (bytes > 0) _memory = Buffer(_allocator, bytes, "expert slots");
    _taken = true;
}

ExpertStacks ExpertSlotMemory::slots(int32_t layer) const {
    const ExpertStacks& file = layerAt(layer).file;
    const Pool& pool = _pools[static_cast<size_t>(layerAt(layer).pool)];
    ExpertStacks stacks;
    const uint8_t* at = _memory.as<uint8_t>();
    if (at) at += pool.offset;
    for (const auto& [from, to] :
         {std::pair{&file.gate, &stacks.gate}, {&file.up, &stacks.up}, {&file.down, &stacks.down}}) {
        if (from->count == 0) continue;
        to->first = from->first;
        to->first.data = at;
        to->stride = pool.shape.slotBytes;
        to->count = pool.shape.capacity + pool.shape.landing;
        if (at) at += Allocator::aligned(_layout.bytes(from->first));
    }
    return stacks;
}

size_t ExpertSlotMemory::expertBytes(int32_t layer) const {
    const ExpertStacks& stacks = file(layer);
    return fileBytes(stacks.gate.first) + fileBytes(stacks.up.first) + fileBytes(stacks.down.first);
}

int64_t ExpertSlotMemory::capacity() const {
    int64_t slots = 0;
    for (const Pool& pool : _pools) slots += pool.shape.capacity;
    return slots;
}

std::vector<ExpertSlotMemory::PoolShape> ExpertSlotMemory::pools() const {
    std::vector<PoolShape> shapes;
    for (const Pool& pool : _pools) shapes.push_back(pool.shape);
    return shapes;
}

ExpertKey ExpertSlotMemory::keyOf(int32_t layer, int32_t expert) const {
    const Layer& at = layerAt(layer);
    if (!_taken || expert < 0 || expert >= at.file.gate.count) {
        throw Error(ErrorKind::Internal, "the slots were asked for expert " + std::to_string(expert) + " of " +
                                             std::to_string(at.file.gate.count) +
                                             (_taken ? "" : " before their memory was taken"));
    }
    return {at.pool, at.firstKey + expert};
}

int32_t ExpertSlotMemory::layerOf(const ExpertKey& key) const {
    return _pools[static_cast<size_t>(key.pool)].layerOf[static_cast<size_t>(key.key)];
}

std::array<StreamPart, 3> ExpertSlotMemory::partsOf(int32_t layer, int32_t expert, int32_t slot) const {
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

}  // namespace sharpi
