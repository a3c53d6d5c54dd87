// What sequences of a KvCache share: pages of beginnings that their texts have in common, and copies of the states
// after them. Shared pages that the device has to give up are copied to a PrefixStore, and brought back when a text
// continues with them.
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
    // Lengthens a sequence that holds a beginning of the text by shared pages with the tokens that follow, and by pages
    // that were spilled, as far as there is room. Returns the number of tokens that it then holds. What is found
    // depends on what others have computed, but what is in it does not, as long as a row's bits depend on its text
    // alone.
    int64_t adopt(int32_t sequence, const SaltedText& text);
    // Where copies of pages and states are kept; nowhere at first. See PrefixStore::open(), which gives the number.
    uint64_t openStore(const SpillOptions& options) { return _kv._store.open(options); }
    SpillCounts storeCounts() const { return _kv._store.counts(); }
    // Copies pages that are about to be evicted. If there is no memory for that, they are lost.
    void spill(const std::vector<SharedPage>& pages);
    size_t pageBytes() const;
    // Pages that a new sequence adopts and other sequences have, so that they cost no room.
    int64_t pagesInUse(const SaltedText& text) const;
    int64_t pages() const { return index().size(); }
    // Closes the store that openStore() gave this number. Never throws. Nothing is found any more of what was shared
    // until now, but for what another store keeps, or the same directory later: all that no sequence has at present.
    void forget(uint64_t store);

private:
    const PrefixIndex& index() const { return _kv._pools[0].pages().index(); }
    void copyState(int32_t sequence, int64_t tokens);
    std::vector<PageName> found(int32_t sequence, const SaltedText& text) const;
    bool restoreState(int32_t sequence, int64_t held, std::vector<PageName>& names);
    void restorePages(int32_t sequence, const SaltedText& text, const std::vector<PageName>& names);
    template <typename Body> void forParts(int32_t page, const Body& body) const;

    KvCache& _kv;
};

}  // namespace sharpi
