// See prefix_index.h.
#include "memory/pages/prefix_index.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace sharpi {

PageName nameOfBeginning(const std::string& salt) { return Sha256().add(salt).end(); }

PageName nameAfter(const PageName& before, const int32_t* tokens, int64_t count) {
    const size_t bytes = sizeof(int32_t) * static_cast<size_t>(count);
    return Sha256().add(before.data(), before.size()).add(tokens, bytes).end();
}

uint64_t PrefixIndex::hash(uint64_t before, const int32_t* tokens, int64_t count) {
    uint64_t hash = before;
    for (int64_t i = 0; i < count; ++i) {
        hash = (hash ^ static_cast<uint32_t>(tokens[i])) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    return hash;
}

uint64_t PrefixIndex::hashAfter(const SaltedText& text, int64_t number, int32_t before) const {
    const uint64_t start = before < 0 ? std::hash<std::string>()(text.salt) : _pages.at(before).hash;
    return _hash(start, text.tokens + number * _pageTokens, _pageTokens);
}

int32_t PrefixIndex::find(const SaltedText& text, int64_t number, int32_t before) const {
    if (before >= 0 && !has(before)) return -1;
    const int32_t* tokens = text.tokens + number * _pageTokens;
    const auto [begin, end] = _byHash.equal_range(hashAfter(text, number, before));
    const auto found = std::find_if(begin, end, [&](const auto& one) {
        const Page& page = _pages.at(one.second);
        return page.before == before && std::equal(page.tokens.begin(), page.tokens.end(), tokens) &&
               (before >= 0 || page.salt == text.salt);
    });
    return found == end ? -1 : found->second;
}

void PrefixIndex::add(const SaltedText& text, int64_t number, int32_t before, int32_t page) {
    const int32_t* tokens = text.tokens + number * _pageTokens;
    const PageName after = before < 0 ? nameOfBeginning(text.salt) : nameOf(before);
    Page added{nameAfter(after, tokens, _pageTokens),
               hashAfter(text, number, before),
               before,
               {tokens, tokens + _pageTokens},
               {}};
    if (before < 0) added.salt = text.salt;
    insert(page, std::move(added));
}

int32_t PrefixIndex::find(const PageName& name) const {
    const auto [begin, end] = _byHash.equal_range(DigestHash()(name));
    const auto found = std::find_if(begin, end, [&](const auto& one) { return _pages.at(one.second).name == name; });
    return found == end ? -1 : found->second;
}

void PrefixIndex::add(const PageName& name, int32_t page) {
    Page added;
    added.name = name;
    added.hash = DigestHash()(name);
    insert(page, std::move(added));
}

void PrefixIndex::insert(int32_t page, Page added) {
    const auto place = _byHash.emplace(added.hash, page);
    try {
        _pages.emplace(page, std::move(added));
    } catch (...) {
        _byHash.erase(place);
        throw;
    }
}

void PrefixIndex::remove(int32_t page) {
    const auto [begin, end] = _byHash.equal_range(_pages.at(page).hash);
    _byHash.erase(std::find_if(begin, end, [&](const auto& one) { return one.second == page; }));
    _pages.erase(page);
}

}  // namespace sharpi
