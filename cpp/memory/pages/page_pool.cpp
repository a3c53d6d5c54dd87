// See page_pool.h.
#include "memory/pages/page_pool.h"

#include <algorithm>
#include <utility>

namespace sharpi {

// A run of n tokens that begins anywhere lies in at most (n + kPageTokens - 2) / kPageTokens + 1 pages. The rows of a
// batch may be those of all sequences, and add a page to each beside their own.
int64_t PagePool::pagesIn(const KvRoom& room, AttentionReach reach) {
    const int64_t all = pagesFor(room.tokens);
    if (!reach.limited()) return all;
    const int64_t seen = int64_t{std::max(reach.window, reach.chunk)} - 1 + kRollBackTokens;
    const int64_t each = (seen + kPageTokens - 2) / kPageTokens + 2;
    return std::min(all, room.sequences * each + room.rows / kPageTokens);
}

PagePool::PagePool(AttentionReach reach, int64_t pages, PrefixIndex::Hash hash)
    : _reach(reach), _pages(pages, kPageTokens, hash) {}

const PagePool::Sequence& PagePool::at(int32_t sequence) const {
    static const Sequence none;
    return static_cast<size_t>(sequence) < _sequences.size() ? _sequences[static_cast<size_t>(sequence)] : none;
}

PagePool::Sequence& PagePool::at(int32_t sequence) {
    if (_sequences.size() <= static_cast<size_t>(sequence)) _sequences.resize(static_cast<size_t>(sequence) + 1);
    return _sequences[static_cast<size_t>(sequence)];
}

bool PagePool::holds(int32_t sequence, int64_t position) const {
    const auto page = static_cast<size_t>(position / kPageTokens);
    return page < at(sequence).taken.size() && at(sequence).taken[page] > 0;
}

// Calls body(page, kept) for the pages that no later token sees, as long as it is not rolled back far.
template <typename Body> void PagePool::forUnseen(const Sequence& s, const Body& body) const {
    const int64_t end = firstPage(std::max<int64_t>(s.begin - kRollBackTokens, 0));
    const int64_t keptBegin = firstPage(s.kept), keptEnd = pagesFor(s.kept);
    for (int64_t page = 0; page < end; ++page) {
        if (s.taken[static_cast<size_t>(page)]) body(static_cast<size_t>(page), page >= keptBegin && page < keptEnd);
    }
}

bool PagePool::canHold(int32_t sequence, int64_t tokens, bool evenKept) const {
    const int64_t more = pagesFor(tokens) - static_cast<int64_t>(at(sequence).table.size());
    int64_t there = freePages();
    if (more <= there) return true;
    for (const Sequence& s : _sequences) forUnseen(s, [&](size_t, bool kept) { there += !kept || evenKept; });
    return more <= there;
}

void PagePool::hold(int32_t sequence, int64_t tokens) {
    Sequence& s = at(sequence);
    const auto pages = static_cast<size_t>(pagesFor(tokens));
    if (pages <= s.table.size()) return;
    s.table.reserve(pages);
    s.taken.reserve(pages);
    while (s.table.size() < pages) {
        if (freePages() == 0) evict();
        s.table.push_back(_pages.take());
        s.taken.push_back(++_taken);
    }
}

std::vector<SharedPage> PagePool::evictedBy(int32_t sequence, int64_t tokens) const {
    return _pages.evictedBy(pagesFor(tokens) - static_cast<int64_t>(at(sequence).table.size()));
}

// What a sequence is protected by is of no use without any of its pages, so the others lose their protection too.
void PagePool::evict() {
    Sequence* from = nullptr;
    size_t oldest = 0;
    bool oldestKept = true;
    for (Sequence& s : _sequences) {
        forUnseen(s, [&](size_t page, bool kept) {
            if (from && std::pair(oldestKept, from->taken[oldest]) < std::pair(kept, s.taken[page])) return;
            from = &s;
            oldest = page;
            oldestKept = kept;
        });
    }
    if (oldestKept) from->kept = 0;
    from->taken[oldest] = 0;
    _pages.release(from->table[oldest]);
}

void PagePool::settle(int32_t sequence, int64_t tokens) { at(sequence).begin = tokens; }

int64_t PagePool::whole(int32_t sequence, int64_t tokens) const {
    const Sequence& s = at(sequence);
    // The next token is written behind these.
    if (tokens % kPageTokens && _pages.isShared(s.table[static_cast<size_t>(tokens / kPageTokens)]))
        tokens -= tokens % kPageTokens;
    while (true) {
        int64_t page = firstPage(tokens);
        while (page < pagesFor(tokens) && s.taken[static_cast<size_t>(page)]) ++page;
        if (page >= pagesFor(tokens)) return tokens;
        tokens = page * kPageTokens;
    }
}

void PagePool::cut(int32_t sequence, int64_t tokens) {
    Sequence& s = at(sequence);
    while (static_cast<int64_t>(s.table.size()) > pagesFor(tokens)) {
        if (s.taken.back()) _pages.release(s.table.back());
        s.table.pop_back();
        s.taken.pop_back();
    }
    s.begin = std::min(s.begin, tokens);
    if (s.kept > tokens) s.kept = 0;
}

void PagePool::keep(int32_t sequence, int64_t tokens) { at(sequence).kept = tokens; }

// --- shared pages ----------------------------------------------------------------------------------------------------

void PagePool::share(int32_t sequence, const SaltedText& text) {
    std::vector<int32_t>& table = at(sequence).table;
    const int64_t pages = text.count / kPageTokens;
    int64_t number = pages;
    while (number > 0 && !_pages.index().has(table[static_cast<size_t>(number - 1)])) --number;
    for (; number < pages; ++number) {
        int32_t& page = table[static_cast<size_t>(number)];
        const int32_t before = number ? table[static_cast<size_t>(number - 1)] : -1;
        const int32_t same = _pages.index().find(text, number, before);
        if (same < 0) {
            _pages.index().add(text, number, before, page);
        } else {
            _pages.use(same);
            _pages.release(page);
            page = same;
        }
    }
}

std::vector<PageName> PagePool::adoptable(int32_t sequence, int64_t held, const SaltedText& text) const {
    const int64_t first = held / kPageTokens;
    const int32_t before = first ? at(sequence).table[static_cast<size_t>(first - 1)] : -1;
    std::vector<PageName> names;
    for (const int32_t page : _pages.following(before, first, text)) names.push_back(_pages.index().nameOf(page));
    return names;
}

int64_t PagePool::adopt(int32_t sequence, int64_t held, const SaltedText& text) {
    Sequence& s = at(sequence);
    const int64_t first = held / kPageTokens;
    const int32_t before = first ? s.table[static_cast<size_t>(first - 1)] : -1;
    const std::vector<int32_t> pages = _pages.following(before, first, text);
    if (pages.empty()) return held;
    s.table.reserve(static_cast<size_t>(first) + pages.size());
    s.taken.reserve(static_cast<size_t>(first) + pages.size());
    cut(sequence, first * kPageTokens);
    for (const int32_t page : pages) {
        _pages.use(page);
        s.table.push_back(page);
        s.taken.push_back(++_taken);
    }
    return (first + static_cast<int64_t>(pages.size())) * kPageTokens;
}

int64_t PagePool::inUse(const SaltedText& text) const {
    const std::vector<int32_t> pages = _pages.following(-1, 0, text);
    return std::count_if(pages.begin(), pages.end(), [&](int32_t page) { return _pages.uses(page) > 0; });
}

void PagePool::forgetShared() { _pages.forget(); }

}  // namespace sharpi
