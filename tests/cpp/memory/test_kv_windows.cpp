// The KV cache of layers that do not see everything. A world writes every token into the pages of every layer, and
// before each row reads all that the row sees through the page tables: a page that was given back too early, or that
// two sequences have, shows as a wrong token.
#include <gtest/gtest.h>

#include <functional>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "memory/host_memory.h"
#include "memory/kv_cache.h"
#include "seed.h"

namespace {

using namespace sharpi;

constexpr int64_t kPage = KvCache::kPageTokens;
constexpr AttentionReach kAll = {};

AttentionReach window(int32_t tokens) { return {tokens, 0}; }
AttentionReach chunk(int32_t tokens) { return {0, tokens}; }

std::vector<KvLayerShape> layersOf(const std::vector<AttentionReach>& reaches) {
    std::vector<KvLayerShape> layers;
    for (const AttentionReach& reach : reaches) layers.push_back({1, 4, reach});
    return layers;
}

void expectOutOfMemory(const std::string& part, const std::function<void()>& call) {
    try {
        call();
        FAIL() << "no error about " << part;
    } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::OutOfMemory);
        EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
}

class World {
public:
    World(const std::vector<AttentionReach>& reaches, const KvRoom& room)
        : _allocator(_memory), _reaches(reaches), cache(_allocator, layersOf(reaches), KvType::F32, room) {}

    int32_t create(int64_t tokens = 0, int64_t step = kPage) {
        const int32_t sequence = cache.createSequence();
        texts[sequence] = {};
        while (tokens > 0) {
            this->step(sequence, std::min(step, tokens));
            tokens -= step;
        }
        return sequence;
    }

    // Computes more tokens.
    void step(int32_t sequence, int64_t tokens) {
        cache.extend(sequence, tokens);
        append(sequence, tokens);
        check(sequence, tokens);
        cache.commit(sequence);
    }

    // Writes the tokens that there is room for now.
    void append(int32_t sequence, int64_t tokens) {
        std::vector<float>& text = texts[sequence];
        for (; tokens > 0; --tokens) {
            text.push_back(static_cast<float>(++_written));
            for (size_t i = 0; i < _reaches.size(); ++i)
                *at(i, sequence, static_cast<int64_t>(text.size()) - 1) = text.back();
        }
    }

    // Reads all that the last `rows` tokens see.
    void check(int32_t sequence, int64_t rows) {
        const std::vector<float>& text = texts[sequence];
        const auto end = static_cast<int64_t>(text.size());
        for (size_t i = 0; i < _reaches.size(); ++i) {
            for (int64_t p = _reaches[i].first(static_cast<int32_t>(end - rows)); p < end; ++p)
                ASSERT_EQ(*at(i, sequence, p), text[static_cast<size_t>(p)]) << "layer " << i << ", position " << p;
        }
    }

    // Whether the token after the first `tokens` finds all pages.
    bool seesAll(int32_t sequence, int64_t tokens) const {
        for (size_t i = 0; i < _reaches.size(); ++i) {
            const PagePool& pool = cache.pool(cache.layer(i).list);
            for (int64_t p = _reaches[i].first(static_cast<int32_t>(tokens)) / kPage * kPage; p < tokens; p += kPage)
                if (!pool.holds(sequence, p)) return false;
        }
        return true;
    }

    // Rolls back, and checks that no more was given up than had to be.
    int64_t truncate(int32_t sequence, int64_t tokens) {
        int64_t most = tokens;
        while (!seesAll(sequence, most)) --most;
        const int64_t kept = cache.truncate(sequence, tokens);
        EXPECT_EQ(kept, most);
        EXPECT_EQ(cache.length(sequence), kept);
        texts[sequence].resize(static_cast<size_t>(kept));
        return kept;
    }

    // No page has two owners, and none is lost.
    void checkPages() const {
        for (int32_t list = 0; list < cache.lists(); ++list) {
            std::set<int32_t> seen;
            for (const auto& [sequence, text] : texts) {
                const int32_t* const table = cache.pageTable(sequence, list);
                for (int64_t p = 0; p < static_cast<int64_t>(text.size()); p += kPage) {
                    if (!cache.pool(list).holds(sequence, p)) continue;
                    ASSERT_TRUE(seen.insert(table[p / kPage]).second) << "two owners in list " << list;
                }
            }
            const int64_t pages = static_cast<int64_t>(seen.size()) + cache.pool(list).freePages();
            ASSERT_EQ(_pages.emplace(list, pages).first->second, pages) << "list " << list;
        }
    }

    std::map<int32_t, std::vector<float>> texts;

private:
    float* at(size_t layer, int32_t sequence, int64_t position) const {
        const KvPages& pages = cache.layer(layer);
        const int64_t page = cache.pageTable(sequence, pages.list)[position / kPage];
        return reinterpret_cast<float*>(pages.v) + (page * kPage + position % kPage) * 4;
    }

    HostMemory _memory;
    Allocator _allocator;
    std::vector<AttentionReach> _reaches;
    int64_t _written = 0;
    mutable std::map<int32_t, int64_t> _pages;

public:
    KvCache cache;
};

TEST(KvWindows, ALongSequenceLivesInItsWindow) {
    for (const AttentionReach reach :
         {window(1), window(2), window(64), window(65), window(100), chunk(64), chunk(100)}) {
        SCOPED_TRACE(std::to_string(reach.window) + " " + std::to_string(reach.chunk));
        const KvRoom room(200 * kPage, 1, 1);
        World world({kAll, reach}, room);
        ASSERT_EQ(world.cache.lists(), 2);
        EXPECT_LE(PagePool::pagesIn(room, reach), 6);
        const int32_t a = world.create();
        for (int64_t i = 0; i < 20 * kPage; ++i) {
            world.step(a, 1);
            if (HasFatalFailure()) return;
        }
        world.checkPages();
    }
}

TEST(KvWindows, PagesComeBackOldestFirstWhenOthersAreWanted) {
    const KvRoom room(40 * kPage, 2 * kPage, 2);
    World world({window(100), kAll}, room);
    const int32_t list = world.cache.layer(0).list;
    const int64_t pages = PagePool::pagesIn(room, window(100));
    EXPECT_EQ(world.cache.pool(list).freePages(), pages);
    const int32_t a = world.create(pages * kPage);
    EXPECT_EQ(world.cache.pool(list).freePages(), 0);
    for (int64_t page = 0; page < pages; ++page) EXPECT_TRUE(world.cache.pool(list).holds(a, page * kPage));
    world.step(a, 1);
    for (int64_t page = 0; page < pages; ++page)
        EXPECT_EQ(world.cache.pool(list).holds(a, page * kPage), page > 0) << page;
    world.create(kPage + 1);  // another sequence needs two
    for (int64_t page = 0; page < pages; ++page)
        EXPECT_EQ(world.cache.pool(list).holds(a, page * kPage), page > 2) << page;
    EXPECT_EQ(world.cache.freePages(), 40 - pages - 3);  // where everything is seen, nothing was given back
}

// As far as there are pages: far back if there is room, and always by some tokens.
TEST(KvWindows, RollsBackToWhereThePagesAre) {
    World world({kAll, window(100), chunk(128)}, KvRoom(100 * kPage, kPage, 1));
    const int32_t list = world.cache.layer(1).list;
    const int32_t a = world.create(3 * kPage);
    EXPECT_EQ(world.truncate(a, kPage + 3), kPage + 3) << "nothing was given back yet";
    world.step(a, kPage);
    for (int64_t length = world.cache.length(a); length < 30 * kPage;) {
        world.step(a, kPage);
        length += kPage;
        EXPECT_EQ(world.truncate(a, length - PagePool::kRollBackTokens), length - PagePool::kRollBackTokens);
        world.step(a, PagePool::kRollBackTokens);
    }
    EXPECT_FALSE(world.cache.pool(list).holds(a, 5 * kPage));
    EXPECT_EQ(world.truncate(a, 6 * kPage), 0) << "what its window saw is gone";
    world.step(a, kPage);
    world.checkPages();
}

TEST(KvWindows, AChunksBeginningSeesNothing) {
    World world({chunk(128), kAll}, KvRoom(100 * kPage, kPage, 1));
    const int32_t a = world.create(40 * kPage);
    EXPECT_EQ(world.truncate(a, 5 * kPage), 4 * kPage);
    world.step(a, kPage);
    EXPECT_EQ(world.truncate(a, 3 * kPage), 2 * kPage);
}

TEST(KvWindows, AFewTokensBackIsAlwaysPossible) {
    for (const int64_t length : {20 * kPage, 20 * kPage + 1, 20 * kPage + 50}) {
        World world({window(100), chunk(128), kAll}, KvRoom(300 * kPage, kPage, 2));
        const int32_t a = world.create(length), b = world.create();
        for (int i = 0; i < 60; ++i) world.step(b, kPage);
        const int64_t back = length - PagePool::kRollBackTokens;
        EXPECT_EQ(world.truncate(a, back), back) << "what others need is not taken from it";
        EXPECT_LT(world.truncate(a, back - 3 * kPage), back - 3 * kPage);
    }
}

TEST(KvWindows, WhatIsKeptIsTheLastToGo) {
    World world({window(100), kAll}, KvRoom(200 * kPage, kPage, 2));
    const int64_t prompt = 3 * kPage + 10;
    const int32_t a = world.create(prompt);
    world.cache.keepState(a, prompt);
    for (int i = 0; i < 40; ++i) world.step(a, kPage);
    EXPECT_TRUE(world.seesAll(a, prompt));
    EXPECT_FALSE(world.seesAll(a, prompt + kPage)) << "all else that no token sees was given back";
    EXPECT_EQ(world.truncate(a, prompt + kPage), 4 * kPage) << "the end of the last page that is kept";
    EXPECT_EQ(world.truncate(a, prompt), prompt);
    for (int i = 0; i < 40; ++i) world.step(a, kPage);
    // More sequences than there is room for need its pages.
    const int32_t b = world.create(40 * kPage);
    EXPECT_TRUE(world.seesAll(a, prompt));
    world.create(2 * kPage);
    EXPECT_TRUE(world.seesAll(b, 40 * kPage));
    EXPECT_FALSE(world.seesAll(a, prompt));
    EXPECT_TRUE(world.seesAll(a, world.cache.length(a)));
    world.checkPages();
}

// A later call replaces it, and so does rolling back beyond it.
TEST(KvWindows, OnlyOnePlaceIsKept) {
    World world({window(100), kAll}, KvRoom(200 * kPage, kPage, 1));
    const int32_t a = world.create(4 * kPage);
    world.cache.keepState(a, 4 * kPage);
    for (int i = 0; i < 10; ++i) world.step(a, kPage);
    EXPECT_TRUE(world.seesAll(a, 4 * kPage));
    world.cache.keepState(a, 14 * kPage);
    world.cache.keepState(a, 9 * kPage);    // gone
    world.cache.keepState(a, 100 * kPage);  // never there
    for (int i = 0; i < 10; ++i) world.step(a, kPage);
    EXPECT_FALSE(world.seesAll(a, 4 * kPage));
    EXPECT_TRUE(world.seesAll(a, 14 * kPage));
    EXPECT_EQ(world.truncate(a, 14 * kPage), 14 * kPage);
    EXPECT_EQ(world.truncate(a, 14 * kPage - 1), 14 * kPage - 1) << "within its pages";
    for (int i = 0; i < 20; ++i) world.step(a, kPage);
    EXPECT_FALSE(world.seesAll(a, 14 * kPage - 1));
}

TEST(KvWindows, ReservingTakesNothingThatIsKept) {
    World world({window(100), kAll}, KvRoom(200 * kPage, kPage, 1));
    const int32_t list = world.cache.layer(0).list;
    const int32_t a = world.create(2 * kPage);
    world.cache.keepState(a, 2 * kPage);
    int64_t most = 0;
    while (world.cache.reserve(a, most + kPage)) most += kPage;
    EXPECT_EQ(world.cache.pool(list).freePages(), 0);
    EXPECT_TRUE(world.seesAll(a, 2 * kPage));
    EXPECT_EQ(world.cache.truncate(a, 2 * kPage), 2 * kPage);
    for (int i = 0; i < 3; ++i) world.step(a, kPage);
    const int64_t free = world.cache.pool(list).freePages();
    EXPECT_FALSE(world.cache.reserve(a, (free + 1) * kPage)) << "only what is kept could be given back";
    EXPECT_EQ(world.cache.pool(list).freePages(), free);
    EXPECT_TRUE(world.seesAll(a, 2 * kPage));
    world.step(a, 2 * kPage);
    EXPECT_FALSE(world.seesAll(a, 2 * kPage)) << "a step goes before what is kept";
    world.checkPages();
}

TEST(KvWindows, ARefusedExtensionChangesNothing) {
    World world({kAll, window(200)}, KvRoom(200 * kPage, kPage, 1));
    const int32_t list = world.cache.layer(1).list;
    const int32_t a = world.create(12 * kPage), b = world.create();
    const auto state = [&] {
        std::vector<int64_t> numbers = {world.cache.length(a), world.cache.length(b), world.cache.freePages(),
                                        world.cache.pool(list).freePages()};
        for (int64_t p = 0; p < world.cache.length(a); p += kPage) {
            numbers.push_back(world.cache.pool(list).holds(a, p));
            numbers.push_back(world.cache.pageTable(a, list)[p / kPage]);
        }
        return numbers;
    };
    const auto before = state();
    const int64_t most = PagePool::pagesIn(KvRoom(200 * kPage, kPage, 1), window(200));
    expectOutOfMemory("window of 200 tokens", [&] { world.cache.extend(b, most * kPage); });
    EXPECT_EQ(state(), before);
    expectOutOfMemory("the KV cache is full", [&] { world.cache.extend(b, 190 * kPage); });
    EXPECT_EQ(state(), before);
    EXPECT_FALSE(world.cache.reserve(b, most * kPage));
    EXPECT_EQ(state(), before);
    world.check(a, 1);
}

// A step over several sequences has all their pages until it is done.
TEST(KvWindows, ABatchOfSequencesKeepsWhatItsRowsSee) {
    World world({window(70), chunk(128), kAll}, KvRoom(300 * kPage, 4 * kPage, 4));
    std::vector<int32_t> sequences;
    for (int i = 0; i < 4; ++i) sequences.push_back(world.create(10 * kPage + 13 * i));
    for (int round = 0; round < 20; ++round) {
        for (const int32_t s : sequences) world.cache.extend(s, kPage);
        for (const int32_t s : sequences) world.append(s, kPage);
        for (const int32_t s : sequences) world.check(s, kPage);
        if (HasFatalFailure()) return;
        for (const int32_t s : sequences) world.cache.commit(s);
    }
    world.checkPages();
}

struct RandomSteps {
    RandomSteps(unsigned seed, const std::vector<AttentionReach>& reaches)
        : random(testSeed(seed)),
          sequences(1 + number(4)),
          room(number(100) * kPage + 700, 1 + number(200), static_cast<int32_t>(sequences)),
          world(reaches, room) {}

    int64_t number(int64_t end) { return static_cast<int64_t>(random() % static_cast<unsigned>(end)); }

    // Within what the cache was made for, only the context may be too small.
    void extend(int32_t sequence) {
        const int64_t rows = 1 + number(room.rows), length = world.cache.length(sequence);
        const int64_t more = (length + rows + kPage - 1) / kPage - (length + kPage - 1) / kPage;
        if (more > world.cache.freePages()) {
            ++refused;
            return expectOutOfMemory("the KV cache is full", [&] { world.cache.extend(sequence, rows); });
        }
        if (number(10) == 0) {  // a step that fails
            world.cache.extend(sequence, rows);
            EXPECT_EQ(world.cache.truncate(sequence, length), length);
            return;
        }
        world.step(sequence, rows);
        if (number(4) == 0) world.cache.keepState(sequence, length + number(rows + 1));
        // Wrong drafts.
        if (number(4) == 0) {
            const int64_t kept = length + rows - number(std::min(rows, int64_t{PagePool::kRollBackTokens}));
            EXPECT_EQ(world.truncate(sequence, kept), kept);
        }
    }

    void step() {
        if (static_cast<int64_t>(world.texts.size()) < sequences && number(5) == 0) {
            world.create();
            return;
        }
        if (world.texts.empty()) return;
        const auto it = std::next(world.texts.begin(), number(static_cast<int64_t>(world.texts.size())));
        const int32_t sequence = it->first;
        const auto length = static_cast<int64_t>(it->second.size());
        const int64_t action = number(40);
        if (action == 0) {
            world.cache.releaseSequence(sequence);
            world.texts.erase(sequence);
        } else if (action <= 3) {
            const int64_t wanted = number(length + 1);
            lost += world.truncate(sequence, wanted) < wanted;
        } else {
            extend(sequence);
        }
    }

    std::mt19937 random;
    int64_t sequences;
    KvRoom room;
    World world;
    int refused = 0, lost = 0;
};

TEST(KvWindows, EveryRowFindsWhatItSeesUnderRandomUse) {
    const std::vector<std::vector<AttentionReach>> models = {
        {window(100), kAll}, {kAll, window(1), window(65)}, {chunk(128), window(64), kAll, window(64)}, {window(300)}};
    int refused = 0, lost = 0;
    for (unsigned seed = 0; seed < 40; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        RandomSteps steps(seed, models[seed % models.size()]);
        for (int i = 0; i < 400; ++i) {
            steps.step();
            if (i % 10 == 0) steps.world.checkPages();
            if (::testing::Test::HasFailure()) return;
        }
        refused += steps.refused;
        lost += steps.lost;
    }
    EXPECT_GT(refused, 0) << "no context was ever too small";
    EXPECT_GT(lost, 0) << "no rollback ever found its pages gone";
}

// What the pages of a window hold, and the bytes they take: those of layers that read others' keys are none.
TEST(KvWindows, TakesTheBytesItPredicts) {
    const KvRoom room(100 * kPage, 2 * kPage, 3);
    const std::vector<KvLayerShape> layers = {
        {2, 8, window(100)}, {1, 16, kAll}, {2, 8, window(100), 0}, {1, 16, kAll, 1}, {3, 8, chunk(256)}};
    // Of each sequence: 99 and 64 tokens, or 255 and 64, in pages at any place, and a page more in a shared batch.
    const int64_t ofWindow = 3 * (3 + 1 + 1) + 2, ofChunk = 3 * (5 + 1 + 1) + 2;
    const int64_t expected = 2 * 2 * kPage * (16 * ofWindow + 16 * 100 + 24 * ofChunk);
    HostMemory memory;
    Allocator allocator(memory);
    const KvCache cache(allocator, layers, KvType::BF16, room);
    EXPECT_EQ(cache.bytes(), static_cast<size_t>(expected));
    EXPECT_EQ(KvCache::bytesFor(layers, KvType::BF16, room), static_cast<size_t>(expected));
    EXPECT_EQ(KvCache::bytesFor(layers, KvType::BF16, 100 * kPage), static_cast<size_t>(2 * 2 * kPage * 56 * 100));
    EXPECT_EQ(cache.lists(), 3);
    EXPECT_EQ(cache.layer(2).k, cache.layer(0).k);
    EXPECT_EQ(cache.layer(2).list, cache.layer(0).list);
    EXPECT_EQ(cache.layer(3).v, cache.layer(1).v);
    // Neither gaps nor overlaps.
    EXPECT_EQ(cache.layer(0).v - cache.layer(0).k, 2 * 16 * kPage * ofWindow);
    EXPECT_EQ(cache.layer(1).k - cache.layer(0).v, 2 * 16 * kPage * ofWindow);
    EXPECT_EQ(cache.layer(4).k - cache.layer(1).v, 2 * 16 * kPage * 100);
}

TEST(KvWindows, NoPoolHasMorePagesThanTheContext) {
    HostMemory memory;
    Allocator allocator(memory);
    const std::vector<KvLayerShape> layers = layersOf({kAll, window(1000), chunk(8192), window(64)});
    for (const int64_t tokens : {int64_t{1}, kPage, 20 * kPage}) {
        const KvCache cache(allocator, layers, KvType::BF16, KvRoom(tokens, 512, 4));
        EXPECT_EQ(cache.bytes(), 4 * 2 * 2 * 4 * kPage * static_cast<size_t>((tokens + kPage - 1) / kPage));
        EXPECT_EQ(cache.lists(), 1) << "nothing is ever given back";
    }
    EXPECT_EQ(KvCache(allocator, layers, KvType::BF16, KvRoom(30 * kPage, 512, 4)).lists(), 2);
}

// A source's pages stay as long as any reader sees them.
TEST(KvWindows, KeysThatAreReadFromFartherAwayStay) {
    HostMemory memory;
    Allocator allocator(memory);
    const std::vector<KvLayerShape> layers = {{1, 4, window(64)}, {1, 4, window(64)}, {1, 4, kAll, 0}};
    const KvCache cache(allocator, layers, KvType::BF16, KvRoom(100 * kPage, 1, 1));
    EXPECT_EQ(cache.layer(0).list, 0);
    EXPECT_EQ(cache.layer(1).list, 1);
    EXPECT_EQ(cache.layer(2).list, 0);
}

}  // namespace
