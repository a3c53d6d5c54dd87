// See page_pool.h.
#include "memory/pages/page_pool.h"

#include <algorithm>
#include <unordered_map>
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

int64_t PagePool::lacking(int32_t sequence, int64_t tokens) const {
    return std::max<int64_t>(pagesFor(tokens) - static_cast<int64_t>(at(sequence).table.size()), 0);
}

int64_t PagePool::room(bool evenKept) const {
    int64_t there = freePages();
    std::unordered_map<int32_t, int32_t> shared;  // by page: the sequences that have it and no longer see it
    for (const Sequence& s : _sequences) {
        forUnseen(s, [&](size_t number, bool kept) {
            const int32_t page = s.table[number], uses = _pages.uses(page);
            if (kept && !evenKept) return;
            if (uses == 1 || ++shared[page] == uses) ++there;
        });
    }
    return there;
}

bool PagePool::canHold(int32_t sequence, int64_t tokens, bool evenKept) const {
    const int64_t more = lacking(sequence, tokens);
    return more <= freePages() || more <= room(evenKept);
}

void PagePool::makeRoom(int64_t pages) {
    while (_pages.unwanted() < pages && evict(false)) {
    }
    while (freePages() < pages && evict(true)) {
    }
}

void PagePool::hold(int32_t sequence, int64_t tokens) {
    Sequence& s = at(sequence);
    const auto pages = static_cast<size_t>(pagesFor(tokens));
    if (pages <= s.table.size()) return;
    s.table.reserve(pages);
    s.taken.reserve(pages);
    makeRoom(static_cast<int64_t>(pages - s.table.size()));
    while (s.table.size() < pages) {
        s.table.push_back(_pages.take());
        s.taken.push_back(++_taken);
    }
}

// Gives back the page that was taken longest ago of those that no later token sees, if there is one. What a sequence is
// protected by is of no use without any of its pages, so the others lose their protection too.
bool PagePool::evict(bool evenKept) {
    Sequence* from = nullptr;
    size_t oldest = 0;
    bool oldestKept = true;
    for (Sequence& s : _sequences) {
        forUnseen(s, [&](size_t page, bool kept) {
            if (kept && !evenKept) return;
            if (from && std::pair(oldestKept, from->taken[oldest]) < std::pair(kept, s.taken[page])) return;
            from = &s;
            oldest = page;
            oldestKept = kept;
        });
    }
    if (!from) return false;
    if (oldestKept) from->kept = 0;
    from->taken[oldest] = 0;
    _pages.release(from->table[oldest]);
    return true;
}

void PagePool::settle(int32_t sequence, int64_t tokens) { at(sequence).begin = tokens; }

int64_t PagePool::whole(int32_t sequence, int64_t tokens) const {
    const Sequence& s = at(sequence);
    // The next token is written behind these.
    if (tokens % kPageTokens && holds(sequence, tokens) &&
        _pages.isShared(s.table[static_cast<size_t>(tokens / kPageTokens)]))
        tokens -= tokens % kPageTokens;
    while (true) {
        int64_t page = firstPage(tokens);
        while (page < pagesFor(tokens) && holds(sequence, page * kPageTokens)) ++page;
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

int64_t PagePool::share(int32_t sequence, const SaltedText& text) {
    std::vector<int32_t>& table = at(sequence).table;
    const int64_t pages = text.count / kPageTokens;
    int64_t number = pages;
    while (number > 0 && !_pages.index().has(table[static_cast<size_t>(number - 1)])) --number;
    int64_t common = 0;
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
            common = number + 1;
        }
    }
    return common;
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

void PagePool::forgetShared() { _pages.forget(); }

}  // namespace sharpi
