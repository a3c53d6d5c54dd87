// See kv_sharing.h.
#include "memory/kv_sharing.h"

#include <string>
#include <utility>

#include "core/error.h"

namespace sharpi {

void KvSharing::share(int32_t sequence, const SaltedText& text, const std::vector<int64_t>& states) {
    if (text.count > _kv.length(sequence))
        throw Error(ErrorKind::Internal, "sequence " + std::to_string(sequence) + " shares tokens that it lacks");
    if (!isPossible()) return;
    _kv._pools[0].share(sequence, text);
    for (const int64_t tokens : states)
        if (tokens > 0 && tokens <= text.count) copyState(sequence, tokens);
}

void KvSharing::copyState(int32_t sequence, int64_t tokens) {
    const uint64_t name = _kv._pools[0].nameOf(sequence, tokens / KvCache::kPageTokens - 1);
    if (!_kv._states.any() || !_kv._copies.takes(_kv._states.stateBytes()) || _kv._copies.find(name)) return;
    std::vector<uint8_t> state = _kv._states.copy(sequence, tokens);
    if (!state.empty()) _kv._copies.add(name, std::move(state));
}

int64_t KvSharing::adopt(int32_t sequence, const SaltedText& text) {
    int64_t& length = _kv.at(sequence).length;
    if (!isPossible()) return length;
    PagePool& pool = _kv._pools[0];
    SaltedText found = text;
    if (_kv._states.any()) {
        // Up to the last state that was copied.
        const std::vector<uint64_t> names = pool.adoptable(sequence, length, text);
        size_t pages = names.size();
        const SavedStates::Bytes* state = nullptr;
        while (pages > 0 && !(state = _kv._copies.find(names[pages - 1]))) --pages;
        found.count = (length / KvCache::kPageTokens + static_cast<int64_t>(pages)) * KvCache::kPageTokens;
        if (!state || !_kv._states.restore(sequence, found.count, *state)) return length;
    }
    try {
        length = pool.adopt(sequence, length, found);
    } catch (...) {
        _kv._states.truncate(sequence, length);
        throw;
    }
    pool.settle(sequence, length);
    return length;
}

int64_t KvSharing::pagesInUse(const SaltedText& text) const {
    return isPossible() && !_kv._states.any() ? _kv._pools[0].inUse(text) : 0;
}

void KvSharing::forget() {
    _kv._pools[0].forgetShared();
    _kv._copies.clear();
}

}  // namespace sharpi
