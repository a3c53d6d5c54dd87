// What sequences share of the pages of layers that do not see everything: of a text's beginning only the pages that its
// next token sees there, its *window*. A page is known by its name, for those before it may be gone.
//
// Texts can go on after a page only if the window there is still found, in the lists of all layers. So windows at
// places where texts are likely to go on are kept longest, and copied when their pages are given up. All other pages
// are passing (page_uses.h): they are found as long as nobody wants their room.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/pages/page_pool.h"

namespace sharpi {

// A view of a pool, made for a call or two.
class WindowSharing {
public:
    explicit WindowSharing(PagePool& pool) : _pool(pool) {}

    // The window after `pages` pages begins with this one.
    int64_t begin(int64_t pages) const { return _pool.firstPage(pages * PagePool::kPageTokens); }
    // Lets others have what the sequence holds of its first `pages` pages. whole: the pool of layers that see
    // everything, where the sequence has shared them. If a page of that name is shared already, the sequence has that
    // one from now on.
    void share(int32_t sequence, int64_t pages, const PagePool& whole);
    // The window after `pages` pages is no longer passing, as far as the sequence holds it and has shared it.
    void keep(int32_t sequence, int64_t pages);
    // A page with this name that is shared; -1: there is none.
    int32_t find(const PageName& name) const { return _pool.pages().index().find(name); }

    // names: of the pages from `first` on, before which the sequence ends. It goes on behind them: it takes what is
    // shared of its window there.
    void adopt(int32_t sequence, int64_t first, const std::vector<PageName>& names);
    // A page for what is missing of it; there must be room. It is to be filled, and then added or released.
    int32_t take() { return _pool._pages.take(); }
    void release(int32_t page) { _pool._pages.release(page); }
    // The sequence's page of this number is that one from now on, and others find it under this name.
    void add(int32_t sequence, int64_t number, int32_t page, const PageName& name);

private:
    PagePool& _pool;
};

}  // namespace sharpi
