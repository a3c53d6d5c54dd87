// Pages that the device gave up come back from RAM or from files with the bytes that they had.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fake_device.h"
#include "memory/allocator.h"
#include "memory/kv_sharing.h"
#include "seed.h"
#include "temporary_folder.h"

namespace {

using namespace sharpi;

constexpr int64_t kPage = KvCache::kPageTokens;
constexpr int64_t kPages = 8;
// A text of whole pages: page i has tokens text[i] alone.
using Text = std::vector<int32_t>;

std::vector<int32_t> tokensOf(const Text& text) {
    std::vector<int32_t> tokens;
    for (const int32_t page : text) tokens.insert(tokens.end(), kPage, page);
    return tokens;
}

// A cache whose pages and states say which text they are of. Layers have different shapes, one has no keys and values,
// and one reads those of another.
class World {
public:
    explicit World(const SpillOptions& options, bool states = false)
        : _kv(_allocator, {{1, 4}, {}, {2, 6}, {2, 6, {}, 2}, {1, 2}}, KvType::BF16, kPages * kPage,
              states ? RecurrentState(_allocator, {{}, {5, 70}, {}, {}, {}}, 6) : RecurrentState()) {
        _store = KvSharing(_kv).openStore(options);
    }
    KvCache& kv() { return _kv; }
    KvSharing sharing() { return KvSharing(_kv); }
    void close() { sharing().forget(_store); }
    SpillCounts counts() { return sharing().storeCounts(); }

    int32_t sequence() { return _kv.createSequence(); }
    // Computes what the sequence lacks of a text, shares it, and looks at all that it holds.
    void compute(int32_t sequence, const Text& text, const std::string& salt = "") {
        const std::vector<int32_t> tokens = tokensOf(text);
        for (int64_t page = _kv.length(sequence) / kPage; page < static_cast<int64_t>(text.size()); ++page) {
            _kv.extend(sequence, (page + 1) * kPage - _kv.length(sequence));
            each(sequence, page, text, salt, [](uint8_t& byte, uint8_t value) { byte = value; });
            writeState(sequence, hashOf(page, text, salt));
            _kv.commit(sequence);
            sharing().share(sequence, {salt, tokens.data(), (page + 1) * kPage}, {(page + 1) * kPage});
        }
        check(sequence, text, salt);
    }
    // Returns the number of pages that the sequence then holds.
    int64_t adopt(int32_t sequence, const Text& text, const std::string& salt = "") {
        const std::vector<int32_t> tokens = tokensOf(text);
        const int64_t length = sharing().adopt(sequence, {salt, tokens.data(), static_cast<int64_t>(tokens.size())});
        EXPECT_EQ(length, _kv.length(sequence));
        check(sequence, text, salt);
        return length / kPage;
    }
    void check(int32_t sequence, const Text& text, const std::string& salt = "") {
        for (int64_t page = 0; page < _kv.length(sequence) / kPage; ++page) {
            int64_t wrong = 0;
            each(sequence, page, text, salt, [&](uint8_t& byte, uint8_t value) { wrong += byte != value; });
            ASSERT_EQ(wrong, 0) << "bytes of page " << page;
        }
    }
    // The state that the next step of the sequence begins from is that after its pages.
    void checkState(int32_t sequence, const Text& text, const std::string& salt = "") {
        const int64_t pages = _kv.length(sequence) / kPage;
        _kv.extend(sequence, 1);
        const int32_t entry = _kv.states().steps(sequence).front().from;
        ASSERT_GE(entry, 0);
        const float value = stateOf(hashOf(pages - 1, text, salt));
        for (int64_t i = 0; i < 5; ++i) ASSERT_EQ(_kv.states().layer(1).convOf(entry)[i], value);
        for (int64_t i = 0; i < 70; ++i) ASSERT_EQ(_kv.states().layer(1).matrixOf(entry)[i], -value);
        _kv.truncate(sequence, pages * kPage);
    }
    void release(int32_t sequence) { _kv.releaseSequence(sequence); }
    // Makes the device give all pages up that no sequence has.
    void evictAll() {
        const int32_t all = sequence();
        _kv.extend(all, _kv.freePages() * kPage);
        _kv.commit(all);
        for (size_t layer = 0; layer < _kv.layers(); ++layer)
            for (int64_t page = 0; page < _kv.length(all) / kPage; ++page)
                for (uint8_t* part : {_kv.layer(layer).k, _kv.layer(layer).v})
                    std::memset(part + static_cast<size_t>(_kv.pageTable(all)[page]) * bytesOf(layer), 0xEE,
                                bytesOf(layer));
        release(all);
    }

private:
    static uint64_t hashOf(int64_t page, const Text& text, const std::string& salt) {
        uint64_t hash = salt.size();
        for (int64_t i = 0; i <= page; ++i)
            hash = (hash + static_cast<uint64_t>(text[static_cast<size_t>(i)]) + 1) * 0x9E3779B97F4A7C15u;
        return hash;
    }
    static float stateOf(uint64_t hash) { return static_cast<float>(hash >> 44); }
    size_t bytesOf(size_t layer) const {
        const KvPages& pages = _kv.layer(layer);
        return 2 * static_cast<size_t>(pages.kvHeads) * static_cast<size_t>(pages.headDim * kPage);
    }
    // Calls body(byte, what it is for this text) for all bytes of a page.
    template <typename Body>
    void each(int32_t sequence, int64_t page, const Text& text, const std::string& salt, const Body& body) {
        uint64_t hash = hashOf(page, text, salt);
        for (const size_t layer : {0, 1, 2, 4}) {
            const size_t bytes = bytesOf(layer);
            for (uint8_t* part : {_kv.layer(layer).k, _kv.layer(layer).v}) {
                uint8_t* at = part + static_cast<size_t>(_kv.pageTable(sequence)[page]) * bytes;
                for (size_t i = 0; i < bytes; ++i, hash = hash * 6364136223846793005u + 1442695040888963407u)
                    body(at[i], static_cast<uint8_t>(hash >> 56));
            }
        }
    }
    void writeState(int32_t sequence, uint64_t hash) {
        if (!_kv.states().any()) return;
        const int32_t entry = _kv.states().steps(sequence).back().to;
        std::fill_n(_kv.states().layer(1).convOf(entry), 5, stateOf(hash));
        std::fill_n(_kv.states().layer(1).matrixOf(entry), 70, -stateOf(hash));
    }

    FakeDevice _device{size_t{1} << 20, 1 << 12};
    Allocator _allocator{_device};
    KvCache _kv;
    uint64_t _store = 0;
};

const size_t kPageBytes = 2 * 2 * kPage * (4 + 12 + 2);

TEST(SpilledPages, ComeBackFromRamAsTheyWere) {
    World world({1 << 20, 0});
    EXPECT_EQ(world.sharing().pageBytes(), kPageBytes);
    const int32_t a = world.sequence();
    world.compute(a, {1, 2, 3});
    world.release(a);
    world.evictAll();
    EXPECT_EQ(world.sharing().pages(), 0);
    EXPECT_EQ(world.counts().spilledPages, 3);
    EXPECT_EQ(world.counts().pagesBytes, 3 * kPageBytes);
    const int32_t b = world.sequence();
    EXPECT_EQ(world.adopt(b, {1, 2, 9}), 2);
    EXPECT_EQ(world.counts().restoredPages, 2);
    EXPECT_EQ(world.counts().pagesBytes, kPageBytes) << "RAM need not keep what the device has";
    EXPECT_EQ(world.sharing().pages(), 2) << "others find them";
    const int32_t c = world.sequence();
    EXPECT_EQ(world.adopt(c, {1, 2, 3, 4}), 3);
    EXPECT_EQ(world.kv().freePages(), kPages - 3);
    world.compute(c, {1, 2, 3, 4});
    EXPECT_EQ(world.counts().spilledPages, 3);
}

TEST(SpilledPages, AreNotKeptWithoutRoomForThem) {
    for (const size_t budget : {size_t{0}, kPageBytes - 1}) {
        World world({budget, 0});
        const int32_t a = world.sequence();
        world.compute(a, {1, 2, 3});
        world.release(a);
        world.evictAll();
        EXPECT_EQ(world.counts().spilledPages, 0);
        EXPECT_EQ(world.adopt(world.sequence(), {1, 2, 3}), 0);
    }
}

// The end of a text goes first, so that what is left can be used.
TEST(SpilledPages, AreLimitedInBytes) {
    World world({2 * kPageBytes, 0});
    const int32_t a = world.sequence();
    world.compute(a, {1, 2, 3});
    world.release(a);
    world.evictAll();
    EXPECT_EQ(world.counts().pagesBytes, 2 * kPageBytes);
    EXPECT_EQ(world.adopt(world.sequence(), {1, 2, 3}), 2);
}

TEST(SpilledPages, OfAnotherSaltAreNotFound) {
    TemporaryFolder folder;
    SpillOptions options{1 << 20, 0};
    options.directory.path = folder.path();
    options.directory.mostBytes = 1 << 30;
    for (const size_t ram : {size_t{1} << 20, size_t{0}}) {
        options.pagesBytes = ram;
        World world(options);
        const int32_t a = world.sequence();
        world.compute(a, {1, 2}, "their");
        world.release(a);
        world.evictAll();
        for (const std::string salt : {"", "thei", "their "}) EXPECT_EQ(world.adopt(world.sequence(), {1, 2}, salt), 0);
        EXPECT_EQ(world.adopt(world.sequence(), {1, 2}, "their"), 2);
    }
}

TEST(SpilledPages, GoBehindThoseThatTheDeviceStillHas) {
    World world({1 << 20, 0});
    const int32_t a = world.sequence(), b = world.sequence();
    world.compute(a, {1, 2, 3, 4});
    world.compute(b, {1, 2});
    world.release(a);
    world.evictAll();
    EXPECT_EQ(world.sharing().pages(), 2);
    EXPECT_EQ(world.adopt(b, {1, 2, 3, 4, 5}), 4);
    EXPECT_EQ(world.adopt(world.sequence(), {1, 2, 3, 4, 5}), 4);
    EXPECT_EQ(world.counts().restoredPages, 2);
}

// A sequence that has computed a part of a page goes on with the whole one.
TEST(SpilledPages, TakeThePlaceOfAPageThatIsNotFull) {
    World world({1 << 20, 0});
    const int32_t a = world.sequence();
    world.compute(a, {1, 2, 3});
    world.release(a);
    world.evictAll();
    const int32_t b = world.sequence();
    world.kv().extend(b, 10);
    world.kv().commit(b);
    EXPECT_EQ(world.adopt(b, {1, 2, 3}), 3);
    EXPECT_EQ(world.kv().freePages(), kPages - 3);
}

TEST(SpilledPages, ComeBackAsFarAsThereIsRoom) {
    World world({1 << 20, 0});
    const int32_t a = world.sequence();
    world.compute(a, {1, 2, 3, 4});
    world.release(a);
    world.evictAll();
    const int32_t other = world.sequence();
    world.kv().extend(other, (kPages - 3) * kPage);
    world.kv().commit(other);
    const int32_t b = world.sequence();
    EXPECT_EQ(world.adopt(b, {1, 2, 3, 4}), 3);
    world.release(other);
    EXPECT_EQ(world.adopt(b, {1, 2, 3, 4}), 4);
}

TEST(SpilledPages, OfAHybridNeedTheStateAfterThem) {
    World world({1 << 20, 1 << 20}, true);
    const size_t state = world.kv().states().stateBytes();
    const int32_t a = world.sequence();
    world.compute(a, {1, 2, 3});
    world.release(a);
    world.evictAll();
    EXPECT_EQ(world.counts().statesBytes, 3 * state);
    const int32_t b = world.sequence();
    EXPECT_EQ(world.adopt(b, {1, 2, 9}), 2);
    world.checkState(b, {1, 2});
    World none({1 << 20, 0}, true);
    const int32_t c = none.sequence();
    none.compute(c, {1, 2});
    none.release(c);
    none.evictAll();
    EXPECT_EQ(none.adopt(none.sequence(), {1, 2}), 0) << "there are pages, but no state";
    EXPECT_EQ(none.counts().restoredPages, 0);
}

// A page that turns out to be damaged leaves the text where its last good page and state are.
TEST(SpilledPages, BehindADamagedOneAreNotUsed) {
    for (const bool states : {false, true}) {
        SCOPED_TRACE(states);
        TemporaryFolder folder;
        SpillOptions options;
        options.directory.path = folder.path();
        options.directory.mostBytes = 1 << 30;
        std::vector<std::string> notices;
        options.directory.notice = [&](const std::string& line) { notices.push_back(line); };
        const Text text = {1, 2, 3, 4};
        {
            World world(options, states);
            const int32_t a = world.sequence();
            world.compute(a, text);
            world.release(a);
            world.close();
            EXPECT_EQ(folder.files().size(), states ? 8U : 4U);
        }
        PageName third = nameOfBeginning("");
        for (int32_t i = 0; i < 3; ++i) third = nameAfter(third, tokensOf(text).data() + i * kPage, kPage);
        for (const auto& path : folder.files()) {
            if (path.filename() != hex(third) + ".page") continue;
            std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
            file.seekp(500);
            file.put(char(0x55)).put(char(0x55));
        }
        World world(options, states);
        const int32_t b = world.sequence();
        // With states, those after the second page were given up for the fourth's, and it begins anew.
        EXPECT_EQ(world.adopt(b, text), states ? 0 : 2);
        ASSERT_EQ(notices.size(), 1U);
        EXPECT_NE(notices[0].find("is damaged"), std::string::npos);
        EXPECT_EQ(world.adopt(b, text), 2) << "what is left is found";
        if (states) world.checkState(b, text);
        world.compute(b, text);
        world.release(b);
        world.close();
        World again(options, states);
        EXPECT_EQ(again.adopt(again.sequence(), text), 4) << "the damaged one was written anew";
        EXPECT_EQ(notices.size(), 1U);
    }
}

TEST(SpilledPages, AreThereAfterARestart) {
    TemporaryFolder folder;
    for (const size_t ram : {size_t{0}, kPageBytes, size_t{1} << 20}) {
        for (const bool states : {false, true}) {
            SCOPED_TRACE(std::to_string(ram) + (states ? " with states" : ""));
            SpillOptions options{ram, ram};
            options.directory.path = folder.path();
            options.directory.mostBytes = 1 << 30;
            options.directory.identity = {static_cast<uint8_t>(states), static_cast<uint8_t>(ram >> 8)};
            {
                World world(options, states);
                const int32_t a = world.sequence();
                world.compute(a, {1, 2, 3});
                world.release(a);
                world.evictAll();
                const int32_t b = world.sequence();
                world.compute(b, {1, 7});
                world.release(b);
                world.close();
                EXPECT_EQ(world.kv().freePages(), kPages);
                EXPECT_EQ(world.adopt(world.sequence(), {1, 2, 3}), 0) << "nothing is found any more";
            }
            World world(options, states);
            const int32_t a = world.sequence(), b = world.sequence();
            EXPECT_EQ(world.adopt(a, {1, 2, 3, 4}), 3);
            EXPECT_EQ(world.adopt(b, {1, 7, 8}), 2);
            EXPECT_EQ(world.counts().restoredPages, 4);
            if (states) {
                world.checkState(a, {1, 2, 3});
                world.checkState(b, {1, 7});
            }
            world.compute(a, {1, 2, 3, 4});
        }
    }
}

// While requests are served, what the disk is too slow for is left out; at the end all of it is waited for.
TEST(SpilledPages, AreAllWrittenAtTheEnd) {
    TemporaryFolder folder;
    SpillOptions options{1 << 20, 0};
    options.directory.path = folder.path();
    options.directory.mostBytes = 1 << 30;
    options.queueBytes = 1;  // one at a time
    {
        World world(options);
        for (const int32_t first : {1, 2, 3}) {
            const int32_t a = world.sequence();
            world.compute(a, {first, 4, 5, 6, 7});
            world.release(a);
        }
        world.close();
    }
    EXPECT_EQ(folder.files().size(), 15U);
    World world(options);
    for (const int32_t first : {1, 2, 3}) {
        const int32_t a = world.sequence();
        EXPECT_EQ(world.adopt(a, {first, 4, 5, 6, 7}), 5);
        world.release(a);
    }
}

TEST(SpilledPages, ThatWereReadCountAsUsed) {
    TemporaryFolder folder;
    SpillOptions options;
    options.directory.path = folder.path();
    options.directory.mostBytes = 4 * (kPageBytes + sizeof(SegmentHeader));
    {
        World world(options);
        const int32_t a = world.sequence();
        world.compute(a, {1, 2, 3});
        world.release(a);
        world.close();
    }
    CacheDirectory another(options.directory);
    ASSERT_TRUE(another.write({SegmentKind::Page, {1}}, CopyVector(kPageBytes)));
    World world(options);
    EXPECT_EQ(world.adopt(world.sequence(), {1, 2, 3}), 3);
    for (const uint8_t number : {2, 3})
        ASSERT_TRUE(another.write({SegmentKind::Page, {number}}, CopyVector(kPageBytes)));
    EXPECT_FALSE(another.has({SegmentKind::Page, {1}})) << "it went first";
    EXPECT_TRUE(another.has({SegmentKind::Page, {2}}));
    World again(options);
    EXPECT_EQ(again.adopt(again.sequence(), {1, 2, 3}), 2) << "then the text's end did";
}

// As when one scheduler of a model ends, and another goes on.
TEST(SpilledPages, OutliveAStoreThatWasReplaced) {
    TemporaryFolder folder;
    SpillOptions second{1 << 20, 0};
    second.directory.path = folder.path();
    second.directory.mostBytes = 1 << 30;
    World world({kPageBytes, 0});
    int32_t a = world.sequence();
    world.compute(a, {1, 2, 3});
    world.release(a);
    world.evictAll();
    const uint64_t number = world.sharing().openStore(second);
    EXPECT_EQ(world.counts().pagesBytes, kPageBytes);
    world.close();
    EXPECT_EQ(world.counts().pagesBytes, kPageBytes) << "the other one is open";
    a = world.sequence();
    EXPECT_EQ(world.adopt(a, {1, 2, 3}), 1);
    world.release(a);
    world.sharing().forget(number);
    EXPECT_EQ(world.counts().pagesBytes, 0U);
    World again(second);
    EXPECT_EQ(again.adopt(again.sequence(), {1, 2, 3}), 1);
}

// Whatever happens in which order, a page that a sequence adopts has the bytes that its text gives it.
TEST(SpilledPages, HaveTheRightBytesUnderRandomUse) {
    int64_t restored = 0, loaded = 0;
    for (uint32_t seed = 0; seed < 16; ++seed) {
        SCOPED_TRACE(seed);
        std::mt19937 random(testSeed(seed));
        TemporaryFolder folder;
        const bool states = seed % 2 == 1;
        SpillOptions options{seed % 4 < 2 ? 3 * kPageBytes : 0, 1000};
        if (seed % 8 < 6) {
            options.directory.path = folder.path();
            options.directory.mostBytes = 12 * kPageBytes;
        }
        for (int life = 0; life < 3; ++life) {
            World world(options, states);
            for (int round = 0; round < 150 && !testing::Test::HasFatalFailure(); ++round) {
                const int32_t sequence = world.sequence();
                Text text(1 + random() % 5);
                for (int32_t& page : text) page = static_cast<int32_t>(random() % 2);
                const std::string salt(random() % 5 == 0, 's');
                world.adopt(sequence, text, salt);
                if (states && world.kv().length(sequence) > 0) world.checkState(sequence, text, salt);
                world.compute(sequence, text, salt);
                world.release(sequence);
            }
            restored += world.counts().restoredPages;
            loaded += world.counts().loadedCopies;
            world.close();
        }
    }
    EXPECT_GT(restored, 100);
    EXPECT_GT(loaded, 100);
}

}  // namespace
