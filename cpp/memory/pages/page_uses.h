// Which pages of a pool are free, how many sequences have each of the others, and which of them are shared.
#pragma once

#include <cstdint>
#include <list>
#include <vector>

#include "memory/pages/prefix_index.h"

namespace sharpi {

// A shared page, by its number in the pool, and what it holds.
struct SharedPage {
    int32_t page = -1;
    PageName name{};
};

// A shared page stays in the index when no sequence has it any more, until its room is wanted and no page is free;
// those that have been unused longest go first. A page that is only *passing* goes before all others.
class PageUses {
public:
    PageUses(int64_t pages, int64_t pageTokens, PrefixIndex::Hash hash);
    PageUses(PageUses&&) = default;  // a copy would move nodes of the other's lists

    // Pages that no sequence has.
    int64_t count() const { return static_cast<int64_t>(_uses.size()); }
    int64_t free() const { return unwanted() + static_cast<int64_t>(_idle.size()); }
    // Those of them that are not shared, or are passing.
    int64_t unwanted() const { return static_cast<int64_t>(_free.size() + _passing.size()); }
    // A page for one sequence; -1 if all are in use.
    int32_t take();
    // The shared pages that no sequence has and that are not passing, the longest unused first.
    std::vector<SharedPage> idle() const;
    // Those of them that the next `count` calls of take() would remove from the index.
    std::vector<SharedPage> evictedBy(int64_t count) const;
    // One more sequence has the page.
    void use(int32_t page);
    // One sequence less has it. To be called for a sequence's last page first, so that none becomes idle before the
    // pages that follow it.
    void release(int32_t page);
    int32_t uses(int32_t page) const { return _uses[static_cast<size_t>(page)]; }
    // Of a page in the index. Pages are not passing until it is said.
    void setPassing(int32_t page, bool passing);
    // Whether other sequences have it, or may have it.
    bool isShared(int32_t page) const { return uses(page) > 1 || _index.has(page); }

    const PrefixIndex& index() const { return _index; }
    PrefixIndex& index() { return _index; }
    // The shared pages that hold the text from page `number` on, after the page `before` (-1: from its beginning).
    std::vector<int32_t> following(int32_t before, int64_t number, const SaltedText& text) const;
    // Empties the index. Pages stay with the sequences that have them.
    void forget();

private:
    std::vector<SharedPage> firstIdle(int64_t count) const;
    void freeFirst(std::list<int32_t>& unused);
    std::list<int32_t>& unusedLike(int32_t page) { return _isPassing[static_cast<size_t>(page)] ? _passing : _idle; }

    const int64_t _pageTokens;
    std::vector<int32_t> _free;
    std::vector<int32_t> _uses;  // [page]
    PrefixIndex _index;
    std::vector<bool> _isPassing;  // [page]
    // All pages: shared ones that no sequence has, in the order in which they were given back, those of them that are
    // passing, and the others. A page's node moves between the lists, so that giving a page back takes no memory.
    std::list<int32_t> _idle, _passing, _others;
    std::vector<std::list<int32_t>::iterator> _nodes;  // [page]
};

}  // namespace sharpi
