// Sequences of a cache whose layers see windows and chunks, and begin alike: each continues where all lists have what
// its next token sees, and finds there what was written after its own text, however it came there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fake_device.h"
#include "memory/kv_sharing.h"
#include "seed.h"
#include "temporary_folder.h"

namespace {

using namespace sharpi;

constexpr int64_t kPage = KvCache::kPageTokens;
// A text of whole pages: page i has tokens text[i] alone.
using Text = std::vector<int32_t>;

std::vector<int32_t> tokensOf(const Text& text) {
    std::vector<int32_t> tokens;
    for (const int32_t page : text) tokens.insert(tokens.end(), kPage, page);
    return tokens;
}

// Pages first, first + 1 ... of a text.
Text count(int32_t pages, int32_t first = 1) {
    Text text;
    for (int32_t i = 0; i < pages; ++i) text.push_back(first + i);
    return text;
}

Text plus(Text text, const Text& more) {
    text.insert(text.end(), more.begin(), more.end());
    return text;
}

struct CacheShape {
    std::vector<KvLayerShape> layers;
    KvRoom room{0};
    bool states = false;
};

// Two windows, a chunk, a layer that sees everything and one that reads another's keys. A window of 100 tokens shows
// two pages at the end of a page, one of 200 four.
CacheShape mixed(int64_t pages = 40, int32_t sequences = 2) {
    return {{{1, 4, {100, 0}}, {}, {2, 6}, {2, 6, {}, 2}, {1, 2, {0, 128}}, {1, 4, {200, 0}}},
            KvRoom(pages * kPage, kPage, sequences),
            false};
}
// Every layer sees a window, so the pages of the first list hold nothing.
CacheShape windowsAlone() { return {{{1, 4, {100, 0}}, {2, 2, {100, 0}}}, KvRoom(40 * kPage, kPage, 2), false}; }
CacheShape hybrid() {
    CacheShape setup = mixed();
    setup.states = true;
    return setup;
}

const SpillOptions kNowhere;
const SpillOptions kRam{1 << 24, 1 << 24};

// Copying fails when it is told to.
class FailingDevice : public FakeDevice {
public:
    using FakeDevice::FakeDevice;
    void upload(void* to, const void* host, size_t bytes) override {
        mayFail();
        FakeDevice::upload(to, host, bytes);
    }
    void download(void* host, const void* from, size_t bytes) override {
        mayFail();
        FakeDevice::download(host, from, bytes);
    }
    int64_t failing = 0;  // the n-th copy from now on fails; 0: none

private:
    void mayFail() {
        if (failing > 0 && --failing == 0) throw Error(ErrorKind::Internal, "told to fail");
    }
};

// A cache whose pages and states say which text they are of.
class World {
public:
    World(const CacheShape& setup, const SpillOptions& options)
        : _shapes(setup.layers), _kv(_allocator, setup.layers, KvType::BF16, setup.room, statesOf(setup)) {
        _store = KvSharing(_kv).openStore(options);
        for (size_t i = 0; i < _kv.layers(); ++i)
            if (_kv.layer(i).kvHeads && _shapes[i].source < 0) _own.push_back(i);
    }
    KvCache& kv() { return _kv; }
    FailingDevice& device() { return _device; }
    KvSharing sharing() { return KvSharing(_kv); }
    void close() { sharing().forget(_store); }
    SpillCounts counts() { return sharing().storeCounts(); }
    int64_t free(int32_t list) const { return _kv.pool(list).freePages(); }

    int32_t sequence() { return _kv.createSequence(); }
    void release(int32_t sequence) { _kv.releaseSequence(sequence); }
    // Computes what the sequence lacks of a text, shares it, and looks at all that its next token sees. likely: numbers
    // of pages after which other texts may continue.
    void compute(int32_t sequence, const Text& text, const std::vector<int64_t>& likely = {},
                 const std::string& salt = "") {
        const std::vector<int32_t> tokens = tokensOf(text);
        for (int64_t page = _kv.length(sequence) / kPage; page < static_cast<int64_t>(text.size()); ++page) {
            _kv.extend(sequence, (page + 1) * kPage - _kv.length(sequence));
            each(sequence, page, text, salt, [](uint8_t& byte, uint8_t value) { byte = value; });
            writeState(sequence, hashOf(page, text, salt));
            _kv.commit(sequence);
            std::vector<int64_t> lengths;
            for (const int64_t pages : likely)
                if (pages == page + 1) lengths.push_back(pages * kPage);
            sharing().share(sequence, {salt, tokens.data(), (page + 1) * kPage}, lengths);
        }
        check(sequence, text, salt);
    }
    int32_t computed(const Text& text, const std::vector<int64_t>& likely = {}, const std::string& salt = "") {
        const int32_t made = sequence();
        compute(made, text, likely, salt);
        return made;
    }
    // Returns the number of pages that the sequence then holds.
    int64_t adopt(int32_t sequence, const Text& text, const std::string& salt = "") {
        const std::vector<int32_t> tokens = tokensOf(text);
        const int64_t length = sharing().adopt(sequence, {salt, tokens.data(), static_cast<int64_t>(tokens.size())});
        EXPECT_EQ(length, _kv.length(sequence));
        check(sequence, text, salt);
        return length / kPage;
    }
    // The same for a new sequence, which goes again.
    int64_t adopted(const Text& text, const std::string& salt = "") {
        const int32_t made = sequence();
        const int64_t pages = adopt(made, text, salt);
        release(made);
        return pages;
    }
    int64_t inUse(const Text& text) {
        const std::vector<int32_t> tokens = tokensOf(text);
        const std::string salt;
        return sharing().pagesInUse({salt, tokens.data(), static_cast<int64_t>(tokens.size())});
    }
    // The next token finds all that it sees, and all pages that the sequence holds are of its text.
    void check(int32_t sequence, const Text& text, const std::string& salt = "") {
        const int64_t length = _kv.length(sequence);
        for (int32_t list = 0; list < _kv.lists(); ++list) {
            const PagePool& pool = _kv.pool(list);
            for (int64_t page = pool.firstPage(length); page * kPage < length; ++page)
                ASSERT_TRUE(pool.holds(sequence, page * kPage)) << "list " << list << ", page " << page;
        }
        for (int64_t page = 0; page < length / kPage; ++page) {
            int64_t wrong = 0;
            each(sequence, page, text, salt, [&](uint8_t& byte, uint8_t value) { wrong += byte != value; });
            ASSERT_EQ(wrong, 0) << "bytes of page " << page;
        }
    }
    // The state that the next step of the sequence begins from is that after its pages.
    void checkState(int32_t sequence, const Text& text) {
        const int64_t pages = _kv.length(sequence) / kPage;
        if (!_kv.states().any() || pages == 0 || free(0) == 0) return;
        _kv.extend(sequence, 1);
        const int32_t entry = _kv.states().steps(sequence).front().from;
        ASSERT_GE(entry, 0);
        ASSERT_EQ(_kv.states().layer(0).convOf(entry)[0], stateOf(hashOf(pages - 1, text, "")));
        _kv.truncate(sequence, pages * kPage);
    }
    // Other texts take all the room of the lists that do not see everything, and end. likely: they leave none to other
    // windows that are kept.
    void flood(bool likely = false) {
        for (int i = 0; i < 3; ++i)
            release(computed(plus({++_floods}, Text(24, -1)),
                             likely ? std::vector<int64_t>{5, 9, 13, 17, 21, 25} : std::vector<int64_t>{}));
    }
    // Whether all lists have what the token after these pages sees.
    bool seesAll(int32_t sequence, int64_t pages) const {
        for (int32_t list = 0; list < _kv.lists(); ++list)
            for (int64_t page = _kv.pool(list).firstPage(pages * kPage); page < pages; ++page)
                if (!_kv.pool(list).holds(sequence, page * kPage)) return false;
        return true;
    }
    std::vector<int32_t> tableOf(int32_t sequence, int32_t list, int64_t begin, int64_t end) const {
        const int32_t* const table = _kv.pageTable(sequence, list);
        return {table + begin, table + end};
    }

private:
    RecurrentState statesOf(const CacheShape& setup) {
        return setup.states ? RecurrentState(_allocator, {{5, 7}}, 8) : RecurrentState();
    }
    static uint64_t hashOf(int64_t page, const Text& text, const std::string& salt) {
        uint64_t hash = salt.size();
        for (int64_t i = 0; i <= page; ++i)
            hash = (hash + static_cast<uint64_t>(text[static_cast<size_t>(i)]) + 1) * 0x9E3779B97F4A7C15u;
        return hash;
    }
    static float stateOf(uint64_t hash) { return static_cast<float>(hash >> 44); }
    // Calls body(byte, what it is for this text) for all bytes of a page, in the lists where the sequence holds it.
    template <typename Body>
    void each(int32_t sequence, int64_t page, const Text& text, const std::string& salt, const Body& body) {
        uint64_t hash = hashOf(page, text, salt);
        for (const size_t layer : _own) {
            const KvPages& pages = _kv.layer(layer);
            const size_t bytes = 2 * static_cast<size_t>(pages.kvHeads) * static_cast<size_t>(pages.headDim * kPage);
            if (!_kv.pool(pages.list).holds(sequence, page * kPage)) continue;
            uint64_t value = hash + layer;
            for (uint8_t* part : {pages.k, pages.v}) {
                uint8_t* at = part + static_cast<size_t>(_kv.pageTable(sequence, pages.list)[page]) * bytes;
                for (size_t i = 0; i < bytes; ++i, value = value * 6364136223846793005u + 1442695040888963407u)
                    body(at[i], static_cast<uint8_t>(value >> 56));
            }
        }
    }
    void writeState(int32_t sequence, uint64_t hash) {
        if (!_kv.states().any()) return;
        const int32_t entry = _kv.states().steps(sequence).back().to;
        std::fill_n(_kv.states().layer(0).convOf(entry), 5, stateOf(hash));
        std::fill_n(_kv.states().layer(0).matrixOf(entry), 7, -stateOf(hash));
    }

    FailingDevice _device{size_t{1} << 24, 1 << 12};
    Allocator _allocator{_device};
    const std::vector<KvLayerShape> _shapes;
    std::vector<size_t> _own;  // layers with keys and values of their own
    KvCache _kv;
    uint64_t _store = 0;
    int32_t _floods = 1000;
};

// --- what is adopted -------------------------------------------------------------------------------------------------

TEST(SharedWindows, AreWhatTheNextTokenSees) {
    World world(mixed(), kNowhere);
    ASSERT_EQ(world.kv().lists(), 4);
    const Text text = count(7);
    const int32_t a = world.computed(text);
    std::vector<int64_t> free;
    for (int32_t list = 0; list < 4; ++list) free.push_back(world.free(list));
    EXPECT_EQ(world.inUse(plus(text, {9})), 7);
    const int32_t b = world.sequence();
    EXPECT_EQ(world.adopt(b, plus(text, {9})), 7);
    for (int32_t list = 0; list < 4; ++list) {
        SCOPED_TRACE(list);
        EXPECT_EQ(world.free(list), free[static_cast<size_t>(list)]) << "b has a's pages";
        const int64_t begin = world.kv().pool(list).firstPage(7 * kPage);
        EXPECT_EQ(begin, (std::vector<int64_t>{0, 5, 6, 3})[static_cast<size_t>(list)]);
        EXPECT_EQ(world.tableOf(a, list, begin, 7), world.tableOf(b, list, begin, 7));
        for (int64_t page = 0; page < 7; ++page) EXPECT_EQ(world.kv().pool(list).holds(b, page * kPage), page >= begin);
    }
    world.compute(b, plus(text, {9, 10, 11}));
    world.compute(a, plus(text, {5, 6}));
    EXPECT_EQ(world.adopted(plus(text, {9, 10, 11, 12})), 10);
    EXPECT_EQ(world.adopted(text, "salt"), 0);
}

TEST(SharedWindows, OfOneTextAreHeldOnce) {
    World world(mixed(), kNowhere);
    const int32_t a = world.sequence(), b = world.sequence();
    for (int32_t pages = 1; pages <= 6; ++pages)
        for (const int32_t sequence : {a, b}) world.compute(sequence, count(pages));
    for (int32_t list = 0; list < world.kv().lists(); ++list) {
        EXPECT_EQ(world.tableOf(a, list, 4, 6), world.tableOf(b, list, 4, 6));
        EXPECT_EQ(world.free(list), world.kv().pool(list).pages().count() - 6) << list;
    }
}

// A sequence that is behind another goes on where that one is, again and again.
TEST(SharedWindows, AreAdoptedBehindOwnPages) {
    World world(mixed(), kNowhere);
    const int32_t a = world.sequence(), b = world.sequence();
    const Text text = count(20);
    for (int32_t pages = 3; pages <= 18; pages += 3) {
        world.compute(a, count(pages));
        EXPECT_EQ(world.adopt(b, text), pages);
    }
    world.kv().extend(b, 10);
    world.kv().commit(b);
    world.compute(a, count(19));
    EXPECT_EQ(world.adopt(b, text), 19) << "a page that is not full gives way";
    world.compute(b, text);
}

// One missing page in one of the lists is enough. It is found up to where no list has lost its window.
TEST(SharedWindows, ThatAreGoneAreNotAdopted) {
    World world(mixed(200), kNowhere);
    const int32_t a = world.computed(count(30));
    int64_t last = 0, places = 0;
    for (int32_t pages = 1; pages <= 30; ++pages) {
        if (world.seesAll(a, pages)) last = pages, ++places;
        EXPECT_EQ(world.adopted(count(pages)), last);
        EXPECT_EQ(world.inUse(count(pages)), last);
    }
    EXPECT_EQ(last, 30);
    EXPECT_GT(places, 5);
    EXPECT_LT(places, 20);
    world.release(a);
    world.flood();
    EXPECT_EQ(world.adopted(count(30)), 0);
}

// At a chunk's first token nothing is seen, so its list need not have a page.
TEST(SharedWindows, AChunksBeginningNeedsNone) {
    World world({{{1, 4}, {1, 4, {0, 256}}}, KvRoom(60 * kPage, kPage, 1), false}, kNowhere);
    world.computed(count(40));
    EXPECT_EQ(world.adopted(count(7)), 4);
    EXPECT_EQ(world.adopted(count(11)), 8);
    EXPECT_EQ(world.adopted(count(40)), 40);
}

TEST(SharedWindows, OfAModelWithNothingElse) {
    World world(windowsAlone(), kRam);
    ASSERT_EQ(world.sharing().pageBytes(0), 0U);
    world.release(world.computed(count(12), {12}));
    EXPECT_EQ(world.adopted(plus(count(12), {99})), 12);
    for (int i = 0; i < 3; ++i) world.flood(true);
    EXPECT_EQ(world.adopted(plus(count(12), {99})), 12) << "two pages come back, and nothing is missing of the others";
    EXPECT_EQ(world.counts().restoredPages, 2);
    EXPECT_EQ(world.adopted(count(11)), 0);
}

// --- what is kept ----------------------------------------------------------------------------------------------------

TEST(SharedWindows, AreKeptWhereOtherTextsAreLikelyToContinue) {
    World world(mixed(200), kNowhere);
    world.release(world.computed(count(10), {5}));
    const int32_t other = world.computed(plus({77}, count(6)));
    EXPECT_EQ(world.adopted(count(10)), 5) << "the other text took the room of passing pages";
    world.release(other);
    world.flood();
    EXPECT_EQ(world.adopted(count(10)), 5);
}

// As soon as a text goes on where another one did, others may too.
TEST(SharedWindows, AreKeptWhereTextsPart) {
    for (const bool adopts : {true, false}) {
        SCOPED_TRACE(adopts);
        World world(mixed(200), kNowhere);
        world.release(world.computed(count(10)));
        if (!adopts) world.flood();
        const int32_t b = world.sequence();
        EXPECT_EQ(world.adopt(b, plus(count(6), {50, 51})), adopts ? 6 : 0);
        world.compute(b, plus(count(6), {50, 51}));
        world.release(b);
        world.flood();
        EXPECT_EQ(world.adopted(plus(count(6), {60})), 6);
        EXPECT_EQ(world.adopted(plus(count(6), {50, 51})), 6);
    }
}

// Kept windows give way in turn, the one that was unused longest first.
TEST(SharedWindows, ThatWereUnusedLongestGoFirst) {
    World world(mixed(100), kNowhere);
    const auto textOf = [](int32_t number) { return plus({100 * number}, count(5)); };
    int32_t texts = 0;
    for (; texts < 30; ++texts) {
        world.release(world.computed(textOf(texts), {6}));
        EXPECT_EQ(world.adopted(textOf(0)), 6) << "it is used again and again, after " << texts;
    }
    int64_t found = 0;
    for (int32_t text = 0; text < texts; ++text) {
        const bool isThere = world.adopted(textOf(text)) == 6;
        EXPECT_TRUE(isThere || found <= 1) << "an earlier one is there, text " << text << " is not";
        found += isThere;
    }
    EXPECT_GE(found, 3);
    EXPECT_LT(found, texts);
}

// What a sequence no longer sees goes before what others may want.
TEST(SharedWindows, OfEndedTextsOutliveALongOne) {
    World world(mixed(), kNowhere);
    world.release(world.computed(count(6), {6}));
    const int32_t a = world.computed(plus({500}, Text(28, 3)));
    EXPECT_EQ(world.adopted(count(6)), 6);
    world.release(a);
}

// All that sequences may need at once is there, whatever is shared.
TEST(SharedWindows, TakeNoRoomFromSequences) {
    World world(mixed(100, 3), kNowhere);
    for (int32_t round = 0; round < 10; ++round) {
        std::vector<int32_t> sequences;
        std::vector<Text> texts;
        for (int32_t i = 0; i < 3; ++i) {
            texts.push_back(plus({1000 + round}, i ? Text{i} : Text{}));
            sequences.push_back(world.sequence());
            world.adopt(sequences.back(), texts.back());
        }
        for (int32_t page = 0; page < 25; ++page) {
            for (size_t i = 0; i < 3; ++i) {
                texts[i].push_back(page);
                world.compute(sequences[i], texts[i], {page + 1});
                if (HasFatalFailure()) return;
            }
        }
        for (const int32_t sequence : sequences) world.release(sequence);
    }
    for (int32_t list = 0; list < world.kv().lists(); ++list)
        EXPECT_EQ(world.free(list), world.kv().pool(list).pages().count());
}

// A page that two sequences have is free when both have given it back.
TEST(SharedWindows, ThatNobodySeesAnyMoreAreRoomOnce) {
    World world({{{1, 4, {200, 0}}, {2, 6}}, KvRoom(80 * kPage, kPage, 3), false}, kNowhere);
    const int32_t a = world.computed(count(6)), b = world.sequence(), c = world.sequence();
    EXPECT_EQ(world.adopt(b, count(6)), 6);
    world.compute(a, plus(count(6), Text(5, 1)));
    const PagePool& pool = world.kv().pool(1);
    EXPECT_EQ(pool.room(true), world.free(1) + 2) << "b still sees four of the six pages that a does not see";
    world.compute(b, plus(count(6), Text(5, 2)));
    const int64_t room = pool.room(true);
    EXPECT_EQ(room, world.free(1) + 6);
    EXPECT_FALSE(world.kv().reserve(c, (room + 1) * kPage));
    ASSERT_TRUE(world.kv().reserve(c, room * kPage));
    std::set<int32_t> pages;
    for (const int32_t page : world.tableOf(c, 1, 0, room)) EXPECT_TRUE(page >= 0 && pages.insert(page).second) << page;
    world.check(a, plus(count(6), Text(5, 1)));
    world.check(b, plus(count(6), Text(5, 2)));
}

TEST(SharedWindows, RollingBackBehindThemLosesWhatIsNotThere) {
    World world(mixed(), kNowhere);
    world.computed(count(10));
    const int32_t b = world.sequence();
    EXPECT_EQ(world.adopt(b, count(10)), 10);
    EXPECT_EQ(world.kv().truncate(b, 10 * kPage - 1), 0) << "the page before the window is not b's";
    EXPECT_EQ(world.adopt(b, count(9)), 9) << "it finds it again";
    world.compute(b, plus(count(9), {70}));
    EXPECT_EQ(world.kv().truncate(b, 10 * kPage - 1), 9 * kPage) << "a shared page is not written again";
    EXPECT_EQ(world.adopt(b, plus(count(9), {70, 71})), 10);
}

// --- copies ----------------------------------------------------------------------------------------------------------

TEST(SpilledWindows, ComeBackFromRam) {
    for (const CacheShape& setup : {mixed(), hybrid()}) {
        SCOPED_TRACE(setup.states);
        World world(setup, kRam);
        world.release(world.computed(count(8), {3, 8}));
        for (int i = 0; i < 2; ++i) world.flood(true);
        EXPECT_EQ(world.sharing().pages(), world.kv().pool(0).pages().index().size());
        const int64_t before = world.counts().restoredPages;
        const int32_t b = world.sequence();
        EXPECT_EQ(world.adopt(b, plus(count(8), {99})), 8);
        world.checkState(b, count(8));
        // Eight pages of the first list, two, none (a chunk ends here) and four of the others.
        EXPECT_EQ(world.counts().restoredPages, before + 8 + 2 + 0 + 4);
        world.compute(b, plus(count(8), {99, 100}));
        EXPECT_EQ(world.adopted(plus(count(3), {99})), 3);
        EXPECT_EQ(world.adopted(plus(count(6), {99})), 3) << "nobody was likely to continue after six";
    }
}

TEST(SpilledWindows, PassingPagesAreNotCopied) {
    World world(mixed(), kRam);
    const int32_t a = world.computed(count(30), {30});
    EXPECT_EQ(world.counts().spilledPages, 0) << "all that was given up was passing";
    world.release(a);
    world.close();
    EXPECT_EQ(world.adopted(count(30)), 0);
}

TEST(SpilledWindows, WithoutTheirStateOrAPageAreNotUsed) {
    SpillOptions noStates = kRam;
    noStates.statesBytes = 0;
    World world(hybrid(), noStates);
    world.release(world.computed(count(8), {8}));
    EXPECT_EQ(world.adopted(plus(count(8), {99})), 0) << "there are windows, but no state";
    SpillOptions few = kRam;
    few.pagesBytes = 9 * 2 * 2 * kPage * 12;
    World limited(mixed(), few);
    limited.release(limited.computed(count(8), {8}));
    for (int i = 0; i < 2; ++i) limited.flood(true);
    EXPECT_EQ(limited.adopted(plus(count(8), {99})), 0) << "not all of it is left";
}

SpillOptions onDisk(const TemporaryFolder& folder, std::vector<std::string>& notices) {
    SpillOptions options;
    options.directory.path = folder.path();
    options.directory.mostBytes = 1 << 30;
    options.directory.notice = [&](const std::string& line) { notices.push_back(line); };
    return options;
}

TEST(SpilledWindows, AreThereAfterARestart) {
    for (const CacheShape& setup : {mixed(), hybrid(), windowsAlone()}) {
        SCOPED_TRACE(std::to_string(setup.layers.size()) + (setup.states ? " with states" : ""));
        TemporaryFolder folder;
        std::vector<std::string> notices;
        SpillOptions options = onDisk(folder, notices);
        for (const size_t ram : {size_t{0}, size_t{1} << 24}) {
            options.pagesBytes = options.statesBytes = ram;
            options.directory.identity = {static_cast<uint8_t>(ram >> 24)};
            {
                World world(setup, options);
                world.release(world.computed(count(8), {8}));
                world.flood();
                world.release(world.computed(count(5, 200), {5}));
                world.close();
            }
            World world(setup, options);
            const int32_t a = world.sequence(), b = world.sequence();
            EXPECT_EQ(world.adopt(a, plus(count(8), {99})), 8);
            EXPECT_EQ(world.adopt(b, count(5, 200)), 5);
            world.checkState(a, count(8));
            world.checkState(b, count(5, 200));
            EXPECT_EQ(world.adopted(count(8), "salt"), 0);
        }
        EXPECT_EQ(notices.size(), 0U);
    }
}

// Which layers share a list depends on the room. A cache with other lists finds no page of another size.
TEST(SpilledWindows, OfAnotherDivisionOfLayersAreNotConfused) {
    TemporaryFolder folder;
    std::vector<std::string> notices;
    const SpillOptions options = onDisk(folder, notices);
    {
        World world(mixed(), options);
        world.release(world.computed(count(6), {6}));
        world.close();
    }
    for (int round = 0; round < 2; ++round) {
        World roomy(mixed(15), options);
        ASSERT_LT(roomy.kv().lists(), 4);
        EXPECT_EQ(roomy.adopted(count(6)), round ? 6 : 0);
        roomy.release(roomy.computed(count(6), {6}));
        roomy.close();
        World again(mixed(60), options);
        EXPECT_EQ(again.adopted(count(6)), 6) << "room alone changes no list";
    }
    EXPECT_EQ(notices.size(), 0U);
}

TEST(SpilledWindows, ThatAreDamagedLeaveAnEarlierPlace) {
    TemporaryFolder folder;
    std::vector<std::string> notices;
    const SpillOptions options = onDisk(folder, notices);
    const Text text = count(8);
    std::vector<std::filesystem::path> before;
    {
        World world(mixed(), options);
        world.release(world.computed(text, {4, 8}));
        world.close();
    }
    const std::vector<std::filesystem::path> files = folder.files();
    EXPECT_EQ(files.size(), 8U + 4 + 0 + 8) << "windows after four and after eight pages";
    int64_t fours = 0, eights = 0;
    for (size_t damaged = 0; damaged < files.size(); ++damaged) {
        std::vector<char> good(std::filesystem::file_size(files[damaged]));
        std::ifstream(files[damaged], std::ios::binary).read(good.data(), static_cast<std::streamsize>(good.size()));
        std::vector<char> bad = good;
        bad[200] = static_cast<char>(bad[200] ^ 1);
        std::ofstream(files[damaged], std::ios::binary).write(bad.data(), static_cast<std::streamsize>(bad.size()));
        notices.clear();
        World world(mixed(), options);
        const int32_t b = world.sequence();
        world.adopt(b, plus(text, {99}));
        world.adopt(b, plus(text, {99}));
        const int64_t found = world.adopt(b, plus(text, {99}));
        fours += found == 4, eights += found == 8;
        EXPECT_TRUE(found == 0 || found == 4 || found == 8) << found;
        EXPECT_EQ(notices.size(), found == 8 ? 0U : 1U);
        world.compute(b, plus(text, {99}));
        std::ofstream(files[damaged], std::ios::binary).write(good.data(), static_cast<std::streamsize>(good.size()));
    }
    EXPECT_EQ(eights, 2 + 4) << "those that only the window after four pages needs";
    EXPECT_EQ(fours, 4 + 2 + 4) << "those that come after it";
}

// A window comes back only as a whole.
TEST(SpilledWindows, WithoutRoomAreLeftWhereTheyAre) {
    World world({{{1, 4, {200, 0}}, {2, 6}}, KvRoom(40 * kPage, kPage, 2), false}, kRam);
    world.release(world.computed(count(8), {8}));
    for (int i = 0; i < 2; ++i) world.flood(true);
    std::vector<int32_t> others;
    while (world.free(1) > 3) {
        others.push_back(world.sequence());
        world.kv().extend(others.back(), std::min<int64_t>(world.free(1) - 3, 3) * kPage);
        world.kv().commit(others.back());
    }
    const std::pair<int64_t, int64_t> free{world.free(0), world.free(1)};
    const int32_t b = world.sequence();
    EXPECT_EQ(world.adopt(b, plus(count(8), {99})), 0) << "the window has four pages";
    EXPECT_EQ((std::pair{world.free(0), world.free(1)}), free);
    world.release(others.back());
    EXPECT_EQ(world.adopt(b, plus(count(8), {99})), 8);
}

// As far as the first list has room for what comes back, and there is a window.
TEST(SpilledWindows, ComeBackAsFarAsThereIsRoom) {
    World world(mixed(), kRam);
    world.release(world.computed(count(8), {4, 8}));
    for (int i = 0; i < 2; ++i) world.flood(true);
    const int32_t other = world.sequence();
    while (world.free(0) > 6) {
        world.kv().extend(other, kPage);
        world.kv().commit(other);
    }
    const int32_t b = world.sequence();
    EXPECT_EQ(world.adopt(b, count(8)), 4);
    world.release(other);
    EXPECT_EQ(world.adopt(b, count(8)), 8);
}

// A sequence whose copies fail is a beginning of its text, nothing is lost, and what is left is found.
TEST(SpilledWindows, EachCopyThatFailsCostsNoPage) {
    for (const CacheShape& setup : {mixed(), hybrid()}) {
        SCOPED_TRACE(setup.states);
        int64_t failed = 0;
        for (int64_t call = 1;; ++call) {
            SCOPED_TRACE("copy " + std::to_string(call));
            World world(setup, kRam);
            world.release(world.computed(count(8), {4, 8}));
            for (int i = 0; i < 2; ++i) world.flood(true);
            world.release(world.computed(plus({300}, Text(20, 1)), {21}));  // what comes back evicts it
            const int32_t b = world.computed(count(2));
            world.device().failing = call;
            const int64_t wanted = call;
            try {
                world.adopt(b, plus(count(8), {99}));
            } catch (const Error&) {
                ++failed;
            }
            const bool isOver = world.device().failing > 0;
            world.device().failing = 0;
            world.check(b, count(8));
            if (isOver) {
                EXPECT_EQ(world.kv().length(b), 8 * kPage) << wanted;
                break;
            }
            const int64_t again = world.adopt(b, plus(count(8), {99}));
            EXPECT_TRUE(again == 2 || again == 4 || again == 8) << again << " pages";
            world.compute(b, plus(count(8), {99}));
            world.release(b);
            for (int32_t list = 0; list < world.kv().lists(); ++list)
                EXPECT_EQ(world.free(list), world.kv().pool(list).pages().count());
        }
        EXPECT_GT(failed, 10);
    }
}

// Four sequences that begin alike, in a cache that has no more room than they need.
class Fuzz {
public:
    Fuzz(uint32_t seed, int32_t sequences, const CacheShape& shape, const SpillOptions& options)
        : _random(seed), _most(static_cast<size_t>(sequences)), _world(shape, options) {}
    World& world() { return _world; }
    int64_t adoptions = 0, partial = 0, refused = 0;

    void step() {
        if (_texts.size() < _most && _random() % 2) return begin();
        if (_texts.empty()) return;
        const auto one = std::next(_texts.begin(), static_cast<std::ptrdiff_t>(_random() % _texts.size()));
        const int32_t sequence = one->first;
        Held& held = one->second;
        const int64_t length = _world.kv().length(sequence);
        switch (_random() % 8) {
        case 0: {
            const int64_t kept = _world.kv().truncate(sequence, static_cast<int64_t>(_random()) % (length + 1));
            _world.kv().truncate(sequence, kept / kPage * kPage);
            partial += kept > 0 && kept < length;
            return _world.check(sequence, held.text, held.salt);
        }
        case 1:
        case 2:
            _world.release(sequence);
            _texts.erase(one);
            return;
        default: return grow(sequence, held);
        }
    }
    void end() {
        for (const auto& [sequence, held] : _texts) _world.release(sequence);
        for (int32_t list = 0; list < _world.kv().lists(); ++list)
            EXPECT_EQ(_world.free(list), _world.kv().pool(list).pages().count());
        _world.close();
        for (int32_t list = 0; list < _world.kv().lists(); ++list)
            EXPECT_EQ(_world.kv().pool(list).pages().index().size(), 0);
    }

private:
    struct Held {
        Text text;
        std::string salt;
    };
    void begin() {
        const int32_t sequence = _world.sequence();
        Held& held = _texts[sequence];
        held.salt = std::string(_random() % 6 == 0, 's');
        grow(sequence, held);
    }
    void grow(int32_t sequence, Held& held) {
        Text text = held.text;
        text.resize(static_cast<size_t>(_world.kv().length(sequence) / kPage));
        for (size_t more = 1 + _random() % 7; more > 0; --more)
            text.push_back(static_cast<int32_t>(_random() % 6 == 0));
        held.text = text;
        const int64_t before = _world.kv().length(sequence);
        _world.adopt(sequence, text, held.salt);
        adoptions += _world.kv().length(sequence) > before;
        if (held.salt.empty()) _world.checkState(sequence, text);
        const auto pages = static_cast<int64_t>(text.size());
        // Only the context may be too small, whatever the others have.
        if (PagePool::pagesFor(pages * kPage - _world.kv().length(sequence)) > _world.free(0)) {
            ++refused;
            return;
        }
        _world.compute(sequence, text, {pages - 1, 1 + static_cast<int64_t>(_random() % 9)}, held.salt);
        if (_random() % 3 == 0) _world.kv().keepState(sequence, pages * kPage);
    }

    std::mt19937 _random;
    const size_t _most;
    std::map<int32_t, Held> _texts;
    World _world;
};

// Whatever happens in which order, what a sequence sees has the bytes that its text gives it, and there is room for all
// that sequences see.
TEST(SharedWindows, HaveTheRightBytesUnderRandomUse) {
    int64_t restored = 0, loaded = 0, adoptions = 0, partial = 0, refused = 0;
    for (uint32_t seed = 0; seed < 12; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        TemporaryFolder folder;
        const int32_t sequences = 1 + static_cast<int32_t>(seed) % 4;
        CacheShape shape = seed % 3 == 1 ? hybrid() : seed % 3 ? windowsAlone() : mixed();
        shape.room = KvRoom((30 + 10 * sequences) * kPage, kPage, sequences);
        SpillOptions options{seed % 4 < 2 ? size_t{200000} : 0, 1000};
        if (seed % 8 < 6) {
            options.directory.path = folder.path();
            options.directory.mostBytes = 2000000;
        }
        for (uint32_t life = 0; life < 3; ++life) {
            Fuzz fuzz(testSeed(3 * seed + life), sequences, shape, options);
            for (int round = 0; round < 100 && !HasFailure(); ++round) fuzz.step();
            if (HasFailure()) return;
            restored += fuzz.world().counts().restoredPages;
            loaded += fuzz.world().counts().loadedCopies;
            adoptions += fuzz.adoptions, partial += fuzz.partial, refused += fuzz.refused;
            fuzz.end();
        }
    }
    EXPECT_GT(adoptions, 200);
    EXPECT_GT(restored, 100);
    EXPECT_GT(loaded, 100);
    EXPECT_GT(partial, 20);
    EXPECT_GT(refused, 20);
}

}  // namespace
