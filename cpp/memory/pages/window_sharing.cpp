// See window_sharing.h.
#include "memory/pages/window_sharing.h"

#include <algorithm>

namespace sharpi {

void WindowSharing::share(int32_t sequence, int64_t pages, const PagePool& whole) {
    PagePool::Sequence& s = _pool.at(sequence);
    PageUses& uses = _pool._pages;
    auto number = static_cast<size_t>(pages);
    while (number > 0 && s.taken[number - 1] && !uses.index().has(s.table[number - 1])) --number;
    for (; number < static_cast<size_t>(pages); ++number) {
        int32_t& page = s.table[number];
        const PageName& name = whole.pages().index().nameOf(whole.table(sequence)[number]);
        const int32_t same = uses.index().find(name);
        if (same < 0) {
            uses.index().add(name, page);
            uses.setPassing(page, true);
        } else {
            uses.use(same);
            uses.release(page);
            page = same;
        }
    }
}

void WindowSharing::keep(int32_t sequence, int64_t pages) {
    for (int64_t number = begin(pages); number < pages; ++number) {
        if (!_pool.holds(sequence, number * PagePool::kPageTokens)) continue;
        const int32_t page = _pool.table(sequence)[number];
        if (_pool.pages().index().has(page)) _pool._pages.setPassing(page, false);
    }
}

void WindowSharing::adopt(int32_t sequence, int64_t first, const std::vector<PageName>& names) {
    PagePool::Sequence& s = _pool.at(sequence);
    const size_t pages = static_cast<size_t>(first) + names.size();
    s.table.reserve(pages);
    s.taken.reserve(pages);
    // Nothing reads the entries of pages that it lacks; they name one all the same.
    s.table.resize(pages);
    s.taken.resize(pages);
    for (int64_t number = std::max(first, begin(static_cast<int64_t>(pages))); number < static_cast<int64_t>(pages);
         ++number) {
        const int32_t page = find(names[static_cast<size_t>(number - first)]);
        if (page < 0) continue;
        _pool._pages.use(page);
        s.table[static_cast<size_t>(number)] = page;
        s.taken[static_cast<size_t>(number)] = ++_pool._taken;
    }
}

void WindowSharing::add(int32_t sequence, int64_t number, int32_t page, const PageName& name) {
    _pool._pages.index().add(name, page);
    PagePool::Sequence& s = _pool.at(sequence);
    s.table[static_cast<size_t>(number)] = page;
    s.taken[static_cast<size_t>(number)] = ++_pool._taken;
}

}  // namespace sharpi
