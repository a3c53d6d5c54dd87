// See saved_states.h.
#include "memory/pages/saved_states.h"

namespace sharpi {

void SavedStates::setBudget(size_t bytes) {
    _budget = bytes;
    shrink(bytes);
}

const SavedStates::Bytes* SavedStates::find(uint64_t key) {
    const auto found = _byKey.find(key);
    if (found == _byKey.end()) return nullptr;
    _states.splice(_states.end(), _states, found->second);
    return &found->second->second;
}

void SavedStates::add(uint64_t key, Bytes state) {
    if (!takes(state.size()) || find(key)) return;
    shrink(_budget - state.size());
    _states.emplace_back(key, std::move(state));
    const auto added = std::prev(_states.end());
    try {
        _byKey.emplace(key, added);
    } catch (...) {
        _states.erase(added);
        throw;
    }
    _bytes += added->second.size();
}

void SavedStates::clear() { shrink(0); }

void SavedStates::shrink(size_t most) {
    while (_bytes > most) {
        _bytes -= _states.front().second.size();
        _byKey.erase(_states.front().first);
        _states.pop_front();
    }
}

}  // namespace sharpi
