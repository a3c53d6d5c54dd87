// What sequences of a KvCache share: pages of beginnings that their texts have in common, and copies of the states
// after them. Shared pages that the device has to give up are copied to a PrefixStore, and brought back when a text
// continues with them.
//
// A text continues after a whole page if all pages before it are found in the list of layers that see everything, the
// window there in every other list (window_sharing.h), and a copy of the state, if layers have states.
#pragma once

#include "memory/kv_cache.h"

namespace sharpi {

// A view of a cache, made for a call or two.
class KvSharing {
public:
    explicit KvSharing(KvCache& kv) : _kv(kv) {}

    // The sequence holds at least this beginning of its text: other sequences can have its full pages. likely: lengths,
    // multiples of a page, after which other texts are likely to continue. The state there is copied if it is held, and
    // the windows there are kept longest.
    void share(int32_t sequence, const SaltedText& text, const std::vector<int64_t>& likely = {});
    // Lengthens a sequence that holds a beginning of the text by shared pages with the tokens that follow, and by pages
    // that were spilled, as far as there is room. Returns the number of tokens that it then holds: fewer than before if
    // a copy turns out to be damaged. What is found depends on what others have computed, but what is in it does not,
    // as long as a row's bits depend on its text alone. common: receives the tokens, in whole pages, with which others
    // have begun too; if it cannot continue there, because a state or a window is missing, they are more than it holds.
    int64_t adopt(int32_t sequence, const SaltedText& text, int64_t* common = nullptr);
    // Whether copies of states are kept.
    bool keepsStates() const { return _kv._states.any() && _kv._store.keepsState(_kv._states.stateBytes()); }
    // Where copies of pages and states are kept; nowhere at first. See PrefixStore::open(), which gives the number.
    uint64_t openStore(const SpillOptions& options) { return _kv._store.open(options); }
    SpillCounts storeCounts() const { return _kv._store.counts(); }
    // Makes `pages` pages of a list free. Copies the shared ones that are evicted; if there is no memory for that, they
    // are lost. There must be room (PagePool).
    void makeRoom(int32_t list, int64_t pages);
    size_t pageBytes(int32_t list = 0) const;
    // Pages that a new sequence adopts and other sequences have, so that they cost no room; of the first list.
    int64_t pagesInUse(const SaltedText& text) const;
    int64_t pages() const { return index().size(); }
    // Closes the store that openStore() gave this number. Never throws. Nothing is found any more of what was shared
    // until now, but for what another store keeps, or the same directory later: all that no sequence has at present.
    void forget(uint64_t store);

private:
    // The names of pages that follow what a sequence holds, from page `first` on.
    struct Following {
        int32_t sequence;  // -1: one that holds nothing
        int64_t first;
        std::vector<PageName> names;
        int64_t pages() const { return first + static_cast<int64_t>(names.size()); }
    };
    const PrefixIndex& index() const { return _kv._pools[0].pages().index(); }
    void spill(int32_t list, const std::vector<SharedPage>& pages);
    void copyState(int32_t sequence, int64_t tokens);
    Following found(int32_t sequence, const SaltedText& text) const;
    void cutToWindows(Following& following) const;
    bool isFound(int32_t list, const Following& following, int64_t number) const;
    CopiedBytes cutToWhole(Following& following) const;
    void restorePages(int32_t sequence, const SaltedText& text, const std::vector<PageName>& names);
    void restoreWindow(int32_t list, const Following& following);
    PageName copyName(int32_t list, const PageName& name) const;
    void upload(int32_t list, int32_t page, const CopiedBytes& copy) const;
    template <typename Body> void forParts(int32_t list, int32_t page, const Body& body) const;

    KvCache& _kv;
};

}  // namespace sharpi
