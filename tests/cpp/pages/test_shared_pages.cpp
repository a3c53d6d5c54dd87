// Pages that several sequences have: found by their tokens, counted, and given up in the right order. Whatever happens
// to the sequences, each finds at every position what was written there after its own text.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "memory/host_memory.h"
#include "memory/kv_cache.h"
#include "memory/kv_sharing.h"
#include "memory/pages/page_pool.h"
#include "seed.h"

namespace {

using namespace sharpi;

constexpr int64_t kPage = PagePool::kPageTokens;
const std::string kNoSalt;

uint64_t alwaysTheSame(uint64_t, const int32_t*, int64_t) { return 7; }

std::vector<int32_t> textOf(const std::vector<int32_t>& blocks) {
    std::vector<int32_t> text;
    for (const int32_t block : blocks) text.insert(text.end(), kPage, block);
    return text;
}

SaltedText whole(const std::vector<int32_t>& text, const std::string& salt = kNoSalt) {
    return {salt, text.data(), static_cast<int64_t>(text.size())};
}

std::vector<int32_t> tableOf(const PagePool& pool, int32_t sequence, int64_t pages) {
    return {pool.table(sequence), pool.table(sequence) + pages};
}

// A sequence computes these blocks and shares them.
void compute(PagePool& pool, int32_t sequence, const std::vector<int32_t>& blocks) {
    const std::vector<int32_t> text = textOf(blocks);
    pool.hold(sequence, static_cast<int64_t>(text.size()));
    pool.share(sequence, whole(text));
}

int64_t adopted(PagePool& pool, int32_t sequence, const std::vector<int32_t>& blocks,
                const std::string& salt = kNoSalt) {
    return pool.adopt(sequence, 0, whole(textOf(blocks), salt)) / kPage;
}

// --- a plain model ---------------------------------------------------------------------------------------------------

// What a text is up to a position: its salt and its tokens.
using Prefix = std::pair<std::string, std::vector<int32_t>>;

// What the pool must do, by its rules: pages that are shared are known by their prefix, and each has an owner as long
// as a sequence has shared or adopted it.
class Rules {
public:
    struct Sequence {
        std::string salt;
        std::vector<int32_t> text;
        int64_t shared = 0;  // pages at the beginning

        Prefix prefix(int64_t pages) const { return {salt, {text.begin(), text.begin() + pages * kPage}}; }
        int64_t pages() const { return PagePool::pagesFor(static_cast<int64_t>(text.size())); }
    };
    explicit Rules(int64_t pages) : _pages(pages) {}
    std::map<int32_t, Sequence> sequences;

    int64_t users(const Prefix& prefix) const {
        const auto pages = static_cast<int64_t>(prefix.second.size()) / kPage;
        return std::count_if(sequences.begin(), sequences.end(), [&](const auto& one) {
            return one.second.shared >= pages && one.second.prefix(pages) == prefix;
        });
    }
    // Those that no sequence has, with the idle ones.
    int64_t free() const {
        int64_t used = 0;
        std::set<Prefix> inUse;
        for (const auto& [number, s] : sequences) {
            used += s.pages() - s.shared;
            for (int64_t p = 1; p <= s.shared; ++p) inUse.insert(s.prefix(p));
        }
        return _pages - used - static_cast<int64_t>(inUse.size());
    }
    bool knows(const Prefix& prefix) const { return _known.count(prefix) > 0; }
    int64_t known() const { return static_cast<int64_t>(_known.size()); }
    void learn(const Prefix& prefix) { _known.insert(prefix); }
    void forgetAll() {
        _known.clear();
        _idle.clear();
    }

    // Calls change() and then notices which shared pages became idle, the last of a text first.
    template <typename Change> void releasing(Sequence& s, int64_t keptPages, const Change& change) {
        std::vector<Prefix> left;
        for (int64_t p = s.shared; p > keptPages; --p) left.push_back(s.prefix(p));
        change();
        for (const Prefix& prefix : left)
            if (users(prefix) == 0) _idle.push_back(prefix);
    }
    void adopted(const Prefix& prefix) { _idle.erase(std::remove(_idle.begin(), _idle.end(), prefix), _idle.end()); }
    // Pages are about to be taken.
    void evictFor(int64_t more) {
        for (int64_t unknown = free() - static_cast<int64_t>(_idle.size()); unknown < more; ++unknown) {
            _known.erase(_idle.front());
            _idle.erase(_idle.begin());
        }
    }

private:
    int64_t _pages;
    std::set<Prefix> _known;
    std::vector<Prefix> _idle;  // the next to go first
};

// A pool beside the rules, and what was written to its pages.
class Fuzz {
public:
    Fuzz(unsigned seed, PrefixIndex::Hash hash)
        : _random(testSeed(seed)),
          _pages(3 + static_cast<int64_t>(_random() % 20)),
          _pool({}, _pages, hash),
          _rules(_pages),
          _written(static_cast<size_t>(_pages * kPage)) {}

    void step() {
        const auto number = static_cast<int32_t>(_random() % 5);
        const bool isNew = !_rules.sequences.count(number);
        Rules::Sequence& s = _rules.sequences[number];
        if (isNew) s.salt = _random() % 4 ? "" : "salt";
        switch (_random() % 9) {
        case 0: return cut(number, s, 0);
        case 1: return cut(number, s, static_cast<int64_t>(_random() % (s.text.size() + 1)));
        case 2:
        case 3: return share(number, s);
        case 4:
        case 5: return adopt(number, s);
        default: return extend(number, s);
        }
    }
    void check() const {
        ASSERT_EQ(_pool.freePages(), _rules.free());
        ASSERT_EQ(_pool.pages().index().size(), _rules.known());
        for (const auto& [number, s] : _rules.sequences) {
            uint64_t after = start(s.salt);
            for (size_t i = 0; i < s.text.size(); ++i) {
                after = next(after, s.text[i]);
                ASSERT_EQ(_written[slot(number, static_cast<int64_t>(i))], after)
                    << "sequence " << number << " does not find its own token " << i;
            }
        }
    }
    void end() {
        for (auto& [number, s] : _rules.sequences) cut(number, s, 0);
        EXPECT_EQ(_pool.freePages(), _pages);
        _pool.forgetShared();
        EXPECT_EQ(_pool.freePages(), _pages);
        EXPECT_EQ(_pool.pages().index().size(), 0);
        _pool.hold(0, _pages * kPage);
        const std::vector<int32_t> table = tableOf(_pool, 0, _pages);
        EXPECT_EQ(std::set<int32_t>(table.begin(), table.end()).size(), static_cast<size_t>(_pages));
    }
    int64_t refused = 0, adoptions = 0, evictions = 0;

private:
    static uint64_t start(const std::string& salt) { return salt.empty() ? 1 : 2; }
    static uint64_t next(uint64_t before, int32_t token) {
        return (before ^ static_cast<uint64_t>(token)) * 0x9E3779B97F4A7C15u + 1;
    }
    size_t slot(int32_t number, int64_t position) const {
        return static_cast<size_t>(_pool.table(number)[position / kPage] * kPage + position % kPage);
    }
    // A text that others are likely to have too. It differs from them in one token of a page, or in none.
    std::vector<int32_t> longer(const Rules::Sequence& s, int64_t tokens) {
        std::vector<int32_t> text = s.text;
        while (tokens-- > 0) {
            const bool fresh = text.size() % kPage == 0 || _random() % 200 == 0;
            text.push_back(fresh ? static_cast<int32_t>(_random() % 2) : 0);
        }
        return text;
    }
    void extend(int32_t number, Rules::Sequence& s) {
        const auto more = static_cast<int64_t>(_random() % (3 * kPage));
        const std::vector<int32_t> text = longer(s, more);
        const int64_t pages = PagePool::pagesFor(static_cast<int64_t>(text.size())) - s.pages();
        const bool fits = pages <= _rules.free();
        ASSERT_EQ(_pool.canHold(number, static_cast<int64_t>(text.size()), true), fits);
        if (!fits) {
            ++refused;
            return;
        }
        const int64_t known = _rules.known();
        _rules.evictFor(pages);
        evictions += known - _rules.known();
        _pool.hold(number, static_cast<int64_t>(text.size()));
        uint64_t after = start(s.salt);
        for (size_t i = 0; i < text.size(); ++i) {
            after = next(after, text[i]);
            if (i >= s.text.size()) _written[slot(number, static_cast<int64_t>(i))] = after;
        }
        s.text = text;
    }
    void share(int32_t number, Rules::Sequence& s) {
        const auto count = static_cast<int64_t>(_random() % (s.text.size() + 1));
        _pool.share(number, {s.salt, s.text.data(), count});
        for (; (s.shared + 1) * kPage <= count; ++s.shared) {
            _rules.learn(s.prefix(s.shared + 1));
            _rules.adopted(s.prefix(s.shared + 1));
        }
    }
    void adopt(int32_t number, Rules::Sequence& s) {
        const std::vector<int32_t> text = longer(s, static_cast<int64_t>(_random() % (4 * kPage)));
        const auto held = static_cast<int64_t>(s.text.size());
        Rules::Sequence wanted{s.salt, text, held / kPage};
        // What follows an own page that nobody else may have cannot be found.
        if (s.shared == wanted.shared)
            while ((wanted.shared + 1) * kPage <= static_cast<int64_t>(text.size()) &&
                   _rules.knows(wanted.prefix(wanted.shared + 1)))
                ++wanted.shared;
        const bool found = wanted.shared > held / kPage;
        ASSERT_EQ(_pool.adopt(number, held, whole(text, s.salt)), found ? wanted.shared * kPage : held);
        if (!found) return;
        ++adoptions;
        for (int64_t p = s.shared + 1; p <= wanted.shared; ++p) _rules.adopted(wanted.prefix(p));
        wanted.text.resize(static_cast<size_t>(wanted.shared * kPage));
        s = wanted;
    }
    void cut(int32_t number, Rules::Sequence& s, int64_t tokens) {
        const int64_t kept = tokens / kPage < s.shared ? tokens / kPage * kPage : tokens;
        ASSERT_EQ(_pool.whole(number, tokens), kept);
        _pool.cut(number, kept);
        _rules.releasing(s, kept / kPage, [&] {
            s.text.resize(static_cast<size_t>(kept));
            s.shared = std::min(s.shared, kept / kPage);
        });
    }

    std::mt19937 _random;
    int64_t _pages;
    PagePool _pool;
    Rules _rules;
    std::vector<uint64_t> _written;  // [page, position]: the text that the row comes after
};

void fuzz(PrefixIndex::Hash hash) {
    int64_t refused = 0, adoptions = 0, evictions = 0;
    for (unsigned seed = 0; seed < 20; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        Fuzz fuzz(seed, hash);
        for (int round = 0; round < 1000 && !testing::Test::HasFatalFailure(); ++round) {
            fuzz.step();
            fuzz.check();
        }
        if (testing::Test::HasFatalFailure()) return;
        fuzz.end();
        refused += fuzz.refused, adoptions += fuzz.adoptions, evictions += fuzz.evictions;
    }
    EXPECT_GT(refused, 100);
    EXPECT_GT(adoptions, 100);
    EXPECT_GT(evictions, 100);
}

TEST(SharedPages, FollowTheRulesUnderRandomUse) { fuzz(PrefixIndex::hash); }

// A hash only says where to look.
TEST(SharedPages, CollidingHashesChangeNothing) { fuzz(alwaysTheSame); }

// --- one thing at a time ---------------------------------------------------------------------------------------------

TEST(SharedPages, AreThoseOfTheLongestCommonBeginning) {
    PagePool pool({}, 20);
    compute(pool, 0, {1, 2, 3, 4});
    EXPECT_EQ(adopted(pool, 1, {1, 2, 9, 4}), 2) << "what comes before a page is part of it";
    EXPECT_EQ(tableOf(pool, 1, 2), tableOf(pool, 0, 2));
    EXPECT_EQ(adopted(pool, 2, {2, 3}), 0);
    EXPECT_EQ(adopted(pool, 3, {1, 2}, "salt"), 0);
    EXPECT_EQ(pool.freePages(), 16);
}

TEST(SharedPages, APageThatIsNotFullIsNotShared) {
    PagePool pool({}, 20);
    std::vector<int32_t> text = textOf({1, 2});
    text.pop_back();
    pool.hold(0, 2 * kPage);
    pool.share(0, whole(text));
    EXPECT_EQ(pool.pages().index().size(), 1);
    text.push_back(2);
    EXPECT_EQ(pool.adopt(1, 0, whole(text)), kPage);
    pool.share(0, whole(text));
    EXPECT_EQ(pool.adopt(2, 0, {kNoSalt, text.data(), 2 * kPage - 1}), kPage) << "the last token is to be computed";
}

// Two sequences have computed the same: one of the pages goes back.
TEST(SharedPages, AreHeldOnce) {
    PagePool pool({}, 20);
    const std::vector<int32_t> text = textOf({1, 2, 3});
    for (const int32_t sequence : {0, 1}) pool.hold(sequence, 3 * kPage);
    EXPECT_EQ(pool.freePages(), 14);
    for (const int32_t sequence : {0, 1}) pool.share(sequence, whole(text));
    EXPECT_EQ(pool.freePages(), 17);
    EXPECT_EQ(tableOf(pool, 0, 3), tableOf(pool, 1, 3));
    pool.cut(0, 0);
    EXPECT_EQ(pool.freePages(), 17);
    pool.cut(1, 0);
    EXPECT_EQ(pool.freePages(), 20);
}

TEST(SharedPages, TakeThePlaceOfAPageThatIsNotFull) {
    PagePool pool({}, 20);
    compute(pool, 0, {1, 2, 3});
    const std::vector<int32_t> text = textOf({1, 2, 3});
    pool.hold(1, kPage + 10);
    pool.share(1, {kNoSalt, text.data(), kPage});
    EXPECT_EQ(pool.freePages(), 16);
    EXPECT_EQ(pool.adopt(1, kPage + 10, whole(text)), 3 * kPage);
    EXPECT_EQ(tableOf(pool, 1, 3), tableOf(pool, 0, 3));
    EXPECT_EQ(pool.freePages(), 17);
}

TEST(SharedPages, AreNotWrittenAgain) {
    PagePool pool({}, 20);
    compute(pool, 0, {1, 2});
    EXPECT_EQ(pool.whole(0, kPage + 5), kPage) << "the token after it would be written to a shared page";
    pool.forgetShared();
    EXPECT_EQ(pool.whole(0, kPage + 5), kPage + 5) << "nobody else has the page";
    compute(pool, 0, {1, 2});
    EXPECT_EQ(adopted(pool, 1, {1, 2}), 2);
    pool.forgetShared();
    EXPECT_EQ(pool.whole(0, kPage + 5), kPage) << "another sequence has it";
}

TEST(SharedPages, GoThatHaveBeenUnusedLongest) {
    PagePool pool({}, 6);
    compute(pool, 0, {1, 2});
    compute(pool, 1, {3, 4});
    compute(pool, 2, {5, 6});
    for (const int32_t sequence : {0, 1, 2}) pool.cut(sequence, 0);
    EXPECT_EQ(adopted(pool, 0, {1, 2}), 2);
    pool.cut(0, 0);
    EXPECT_EQ(pool.freePages(), 6);
    pool.hold(3, kPage);  // the end of 3, 4
    EXPECT_EQ(adopted(pool, 0, {3, 4}), 1);
    pool.cut(0, 0);
    pool.hold(3, 3 * kPage);  // 5, 6
    EXPECT_EQ(adopted(pool, 0, {5, 6}), 0);
    EXPECT_EQ(adopted(pool, 0, {1, 2}), 2);
    EXPECT_EQ(adopted(pool, 1, {3, 4}), 1);
    EXPECT_FALSE(pool.canHold(3, 4 * kPage, true)) << "all pages are used";
}

// The end of a chain goes before its beginning, however the sequences that had it ended.
TEST(SharedPages, NoneGoesBeforeThoseThatFollowIt) {
    PagePool pool({}, 6);
    compute(pool, 0, {1, 2, 3});
    EXPECT_EQ(adopted(pool, 1, {1, 2}), 2);
    pool.cut(1, 0);
    pool.cut(0, 0);
    for (int64_t pages = 4; pages <= 6; ++pages) {
        pool.hold(2, pages * kPage);
        const int64_t left = 6 - pages;
        EXPECT_EQ(pool.pages().index().size(), left);
        EXPECT_EQ(adopted(pool, 1, {1, 2, 3}), left);
        pool.cut(1, 0);
    }
}

TEST(SharedPages, ASequenceSharesOnlyWhatItHolds) {
    HostMemory memory;
    Allocator allocator(memory);
    KvCache kv(allocator, {{1, 4}}, KvType::F32, 8 * kPage);
    const int32_t a = kv.createSequence();
    kv.extend(a, kPage);
    EXPECT_THROW(KvSharing(kv).share(a, whole(textOf({1, 2}))), Error);
}

}  // namespace
