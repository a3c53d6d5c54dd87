// Finds pages by the tokens that they hold. A page is known by its own tokens and by the page before it, so the pages
// of a text form a chain, and two texts share the pages of their common beginning. Where pages before it may be gone, a
// page is known by its name instead.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/digest.h"

namespace sharpi {

// A text, or a beginning of it. Texts with different salts have no page in common.
struct SaltedText {
    const std::string& salt;
    const int32_t* tokens = nullptr;
    int64_t count = 0;
};

// Names what a page holds: a digest of the salt and of all tokens up to the page's end. It is the same wherever the
// page is, on any machine, so copies are found by it.
using PageName = Digest;
// What comes before the first page of a text.
PageName nameOfBeginning(const std::string& salt);
// Of the page with these tokens that comes after `before`.
PageName nameAfter(const PageName& before, const int32_t* tokens, int64_t count);

// Hashes only say where to look: the pages of a chain are compared token by token. An index has pages of one kind.
class PrefixIndex {
public:
    // Of a page's tokens and of the hash of all that comes before them.
    using Hash = uint64_t (*)(uint64_t before, const int32_t* tokens, int64_t count);
    static uint64_t hash(uint64_t before, const int32_t* tokens, int64_t count);

    explicit PrefixIndex(int64_t pageTokens, Hash hashOf = hash) : _pageTokens(pageTokens), _hash(hashOf) {}

    bool has(int32_t page) const { return _pages.count(page) > 0; }
    int64_t size() const { return static_cast<int64_t>(_pages.size()); }
    const PageName& nameOf(int32_t page) const { return _pages.at(page).name; }
    // The page that holds the text's tokens from number * pageTokens on, which must all be there, after the page
    // `before` (-1: it is the text's first). -1: there is none.
    int32_t find(const SaltedText& text, int64_t number, int32_t before) const;
    // The page now holds these tokens; find() must have found none. `before` must be in the index, and stay there as
    // long as this page does.
    void add(const SaltedText& text, int64_t number, int32_t before, int32_t page);
    // The same for pages that are known by their names.
    int32_t find(const PageName& name) const;
    void add(const PageName& name, int32_t page);
    void remove(int32_t page);

private:
    struct Page {
        PageName name{};
        uint64_t hash = 0;
        int32_t before = -1;
        std::vector<int32_t> tokens;
        std::string salt;  // of a first page
    };
    uint64_t hashAfter(const SaltedText& text, int64_t number, int32_t before) const;
    void insert(int32_t page, Page added);

    const int64_t _pageTokens;
    const Hash _hash;
    std::unordered_map<int32_t, Page> _pages;
    std::unordered_multimap<uint64_t, int32_t> _byHash;
};

}  // namespace sharpi
