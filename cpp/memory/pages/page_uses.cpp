// See page_uses.h.
#include "memory/pages/page_uses.h"

namespace sharpi {

PageUses::PageUses(int64_t pages, int64_t pageTokens, PrefixIndex::Hash hash)
    : _pageTokens(pageTokens),
      _uses(static_cast<size_t>(pages)),
      _index(pageTokens, hash),
      _isPassing(static_cast<size_t>(pages)) {
    _free.reserve(static_cast<size_t>(pages));
    for (int64_t page = pages - 1; page >= 0; --page) _free.push_back(static_cast<int32_t>(page));
    for (int64_t page = 0; page < pages; ++page)
        _nodes.push_back(_others.insert(_others.end(), static_cast<int32_t>(page)));
}

int32_t PageUses::take() {
    if (free() == 0) return -1;
    if (_free.empty()) freeFirst(_passing.empty() ? _idle : _passing);
    const int32_t page = _free.back();
    use(page);
    _free.pop_back();
    return page;
}

void PageUses::use(int32_t page) {
    const auto index = static_cast<size_t>(page);
    if (_uses[index]++ == 0 && _index.has(page)) _others.splice(_others.end(), unusedLike(page), _nodes[index]);
}

void PageUses::release(int32_t page) {
    const auto index = static_cast<size_t>(page);
    if (--_uses[index] > 0) return;
    std::list<int32_t>& unused = unusedLike(page);
    if (_index.has(page)) unused.splice(unused.end(), _others, _nodes[index]);
    else _free.push_back(page);
}

void PageUses::setPassing(int32_t page, bool passing) {
    const auto index = static_cast<size_t>(page);
    std::list<int32_t>& before = unusedLike(page);
    _isPassing[index] = passing;
    std::list<int32_t>& after = unusedLike(page);
    if (uses(page) == 0 && &before != &after) after.splice(after.end(), before, _nodes[index]);
}

void PageUses::freeFirst(std::list<int32_t>& unused) {
    const int32_t page = unused.front();
    _index.remove(page);
    _isPassing[static_cast<size_t>(page)] = false;
    _others.splice(_others.end(), unused, unused.begin());
    _free.push_back(page);
}

std::vector<SharedPage> PageUses::idle() const { return firstIdle(static_cast<int64_t>(_idle.size())); }

std::vector<SharedPage> PageUses::evictedBy(int64_t count) const { return firstIdle(count - unwanted()); }

std::vector<SharedPage> PageUses::firstIdle(int64_t count) const {
    std::vector<SharedPage> pages;
    for (auto page = _idle.begin(); page != _idle.end() && count > 0; ++page, --count)
        pages.push_back({*page, _index.nameOf(*page)});
    return pages;
}

std::vector<int32_t> PageUses::following(int32_t before, int64_t number, const SaltedText& text) const {
    std::vector<int32_t> pages;
    for (; (number + 1) * _pageTokens <= text.count; ++number) {
        before = _index.find(text, number, before);
        if (before < 0) break;
        pages.push_back(before);
    }
    return pages;
}

void PageUses::forget() {
    for (std::list<int32_t>* unused : {&_passing, &_idle})
        while (!unused->empty()) freeFirst(*unused);
    for (size_t page = 0; page < _uses.size(); ++page)
        if (_index.has(static_cast<int32_t>(page))) _index.remove(static_cast<int32_t>(page));
    _isPassing.assign(_isPassing.size(), false);
}

}  // namespace sharpi
