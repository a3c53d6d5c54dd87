// See expert_pool.h.
#include "experts/cache/expert_pool.h"

#include <algorithm>
#include <string>

#include "core/error.h"

namespace sharpi {

ExpertPool::ExpertPool(int32_t keys, int32_t capacity, int32_t landing)
    : _capacity(capacity),
      _landing(landing),
      _policy(keys, capacity),
      _slotOf(static_cast<size_t>(keys), -1),
      _holds(static_cast<size_t>(capacity), kFree) {
    _free.reserve(static_cast<size_t>(capacity));
    for (int32_t slot = capacity; slot-- > 0;) _free.push_back(slot);
    _landed.reserve(static_cast<size_t>(landing));
}

void ExpertPool::requireState(int32_t slot, int32_t state, const char* action) const {
    if (slot >= 0 && slot < _capacity && _holds[static_cast<size_t>(slot)] == state) return;
    throw Error(ErrorKind::Internal, std::string(action) + " slot " + std::to_string(slot) + " of " +
                                         std::to_string(_capacity) + ", which is not " +
                                         (state == kClaimed ? "claimed"
                                          : state == kFree  ? "free"
                                                            : "the expert's"));
}

std::optional<ExpertPool::Claim> ExpertPool::claim(int32_t key, const std::function<bool(int32_t)>& mayLeave) {
    Claim claim;
    if (_free.empty()) {
        const int32_t victim = _policy.victim(mayLeave);
        if (victim < 0 || !_policy.admits(key, victim)) return std::nullopt;
        evict(victim);
        claim.evicted = victim;
    }
    claim.slot = _free.back();
    requireState(claim.slot, kFree, "an expert claims");
    _free.pop_back();
    _holds[static_cast<size_t>(claim.slot)] = kClaimed;
    return claim;
}

void ExpertPool::place(int32_t key, int32_t slot) {
    requireState(slot, kClaimed, "an expert is placed into");
    _policy.inserted(key);  // throws if the expert is in a slot already
    _slotOf[static_cast<size_t>(key)] = slot;
    _holds[static_cast<size_t>(slot)] = key;
}

void ExpertPool::giveBack(int32_t slot) {
    requireState(slot, kClaimed, "a caller gives back");
    _holds[static_cast<size_t>(slot)] = kFree;
    _free.push_back(slot);
}

void ExpertPool::evict(int32_t key) {
    int32_t& slot = _slotOf.at(static_cast<size_t>(key));
    requireState(slot, key, "an expert leaves");
    _policy.removed(key);
    _holds[static_cast<size_t>(slot)] = kFree;
    _free.push_back(slot);
    slot = -1;
}

int32_t ExpertPool::landedAt(int32_t key) const {
    const auto found = std::find(_landed.begin(), _landed.end(), key);
    return found == _landed.end() ? -1 : _capacity + static_cast<int32_t>(found - _landed.begin());
}

int32_t ExpertPool::land(int32_t key) {
    if (static_cast<int32_t>(_landed.size()) == _landing) return -1;
    _landed.push_back(key);
    return _capacity + static_cast<int32_t>(_landed.size()) - 1;
}

}  // namespace sharpi
