// What sequences of a KvCache share: pages of beginnings that their texts have in common, and copies of the states
// after them.
#pragma once

#include "memory/kv_cache.h"

namespace sharpi {

// A view of a cache, made for a call or two. If some layers do not keep all keys and values, shared pages do not make a
// sequence whole: nothing is shared then, and the calls do nothing.
class KvSharing {
public:
    explicit KvSharing(KvCache& kv) : _kv(kv) {}

    bool isPossible() const { return _kv.lists() == 1; }
    // The sequence holds at least this beginning of its text: other sequences can have its full pages. If layers have
    // states, they can have them only up to where a state was copied. states: lengths, multiples of a page, after which
    // it is copied if it is held.
    void share(int32_t sequence, const SaltedText& text, const std::vector<int64_t>& states = {});
    // Lengthens a sequence that holds a beginning of the text by shared pages with the tokens that follow. Returns the
    // number of tokens that it then holds. What is found depends on what others have computed, but what is in it does
    // not, as long as a row's bits depend on its text alone.
    int64_t adopt(int32_t sequence, const SaltedText& text);
    // The bytes of RAM for copies of states, none at first, and those that are used.
    void setCopiedStates(size_t bytes) { _kv._copies.setBudget(bytes); }
    size_t copiedStates() const { return _kv._copies.bytes(); }
    // Pages that a new sequence adopts and other sequences have, so that they cost no room.
    int64_t pagesInUse(const SaltedText& text) const;
    int64_t pages() const { return _kv._pools[0].sharedPages(); }
    // Nothing is found any more of what was shared until now.
    void forget();

private:
    void copyState(int32_t sequence, int64_t tokens);

    KvCache& _kv;
};

}  // namespace sharpi
