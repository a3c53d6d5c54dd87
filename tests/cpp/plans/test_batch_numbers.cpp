// The numbers of a batch, as kernels will find them.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "core/error.h"
#include "fake_device.h"
#include "plan/batch_numbers.h"

namespace {

using namespace sharpi;

constexpr int32_t kUntouched = -777777;

// A cache with recurrent states, or without, and the numbers of batches over it.
struct World {
    explicit World(bool recurrent, int32_t slots = 20)
        : device(size_t{64} << 20),
          allocator(device, 0),
          kv(allocator, {{1, 8}}, KvType::BF16, 20 * 640,
             RecurrentState(allocator, {recurrent ? RecurrentShape{4, 16} : RecurrentShape{}}, slots)) {
        room.rows = 300;
        room.sequences = 20;
        room.fastSequences = 4;
        room.pages = 10;
        room.recurrent = recurrent;
    }
    // Rows of a sequence that has `held` tokens; they are committed unless it is the last call before fill().
    void add(RowKind kind, int32_t sequence, int64_t count, const std::vector<int64_t>& marks = {}) {
        const int64_t begin = kv.length(sequence);
        kv.extend(sequence, count, marks);
        for (int64_t i = 0; i < count; ++i)
            batch.add(kind, static_cast<int32_t>(1000 + batch.size()), static_cast<int32_t>(begin + i), sequence,
                      i + 1 == count);
    }
    int32_t held(int64_t tokens) {
        const int32_t sequence = kv.createSequence();
        if (tokens) kv.extend(sequence, tokens);
        kv.commit(sequence);
        return sequence;
    }
    BatchView fill(int64_t exactRows) {
        const BatchNumbers numbers(room);
        host.assign(static_cast<size_t>(numbers.count()), kUntouched);
        const BatchNumbers::Filled filled = numbers.fill(batch, kv, exactRows, host.data(), host.data());
        EXPECT_LE(filled.used, numbers.count());
        // What is read must have been uploaded.
        std::fill(host.begin() + filled.used, host.end(), kUntouched);
        return filled.view;
    }
    static std::vector<int32_t> list(const int32_t* at, int64_t count) { return {at, at + count}; }

    FakeDevice device;
    Allocator allocator;
    KvCache kv;
    BatchNumbers::Room room;
    Batch batch;
    std::vector<int32_t> host;
};

using List = std::vector<int32_t>;
using List64 = std::vector<int64_t>;

// Up to 128 pages in all are short texts. From there on, the deepest text and the rows of one count up to a power of
// two, and all texts together as the nearest power of two or one and a half of one.
TEST(BatchNumbers, DepthIsThatOfTheTextsOfDecodeRows) {
    const auto depthOf = [](const std::vector<int64_t>& pages, int64_t rows, int64_t promptPages) {
        World world(false);
        world.kv = KvCache(world.allocator, {{1, 8}}, KvType::BF16, 600 * 64, RecurrentState(world.allocator, {}, 0));
        world.room.pages = 600;
        int64_t exactRows = 0;
        for (const int64_t count : pages) {
            world.add(RowKind::Decode, world.held(count * 64 - rows), rows);  // the last rows of the last page
            exactRows += rows;
        }
        if (promptPages) world.add(RowKind::Prompt, world.held(promptPages * 64 - 64), 64);
        const cuda::BatchDepth depth = world.fill(exactRows).exact.depth;
        return List64{depth.deepest, depth.all, depth.rowsOfText};
    };
    const List64 isShort = {0, 0, 0};
    EXPECT_EQ(depthOf({1, 3}, 2, 150), isShort);
    EXPECT_EQ(depthOf({128}, 5, 0), isShort);
    EXPECT_EQ(depthOf({64, 64}, 1, 0), isShort);
    EXPECT_EQ(depthOf({}, 1, 150), isShort);
    EXPECT_EQ(depthOf({129}, 1, 0), (List64{256, 128, 1}));
    EXPECT_EQ(depthOf({64, 64, 31}, 2, 0), (List64{64, 128, 2}));
    EXPECT_EQ(depthOf({64, 64, 32}, 3, 0), (List64{64, 192, 4}));
    EXPECT_EQ(depthOf({129, 66}, 5, 0), (List64{256, 192, 8}));
    EXPECT_EQ(depthOf(std::vector<int64_t>(20, 10), 1, 0), (List64{16, 192, 1}));
    EXPECT_EQ(depthOf({100, 123}, 1, 0), (List64{128, 192, 1}));
    EXPECT_EQ(depthOf({100, 124}, 1, 0), (List64{128, 256, 1}));
    EXPECT_EQ(depthOf({319}, 1, 0), (List64{512, 256, 1}));
    EXPECT_EQ(depthOf({320}, 1, 0), (List64{512, 384, 1}));
    EXPECT_EQ(depthOf({501}, 1, 0), (List64{512, 512, 1}));
}

TEST(BatchNumbers, RowsAreThoseOfTheBatch) {
    World world(false);
    const int32_t a = world.held(70), b = world.held(0), c = world.held(130);
    world.add(RowKind::Decode, a, 2);
    world.add(RowKind::Prompt, b, 3);
    world.add(RowKind::Prompt, c, 2);
    const BatchView view = world.fill(2);
    EXPECT_EQ(view.rows, 7);
    EXPECT_EQ(view.exactRows, 2);
    EXPECT_EQ(view.fastRows(), 5);
    EXPECT_EQ(World::list(view.tokens, 7), (List{1000, 1001, 1002, 1003, 1004, 1005, 1006}));
    EXPECT_EQ(World::list(view.logitRows, 3), (List{1, 4, 6}));
    EXPECT_EQ(view.exact.rows, 2);
    EXPECT_EQ(World::list(view.exact.positions, 2), (List{70, 71}));
    EXPECT_EQ(view.fast.rows, 5);
    EXPECT_EQ(World::list(view.fast.positions, 5), (List{0, 1, 2, 130, 131}));
    for (const auto& [rows, sequence, expected, pages] :
         {std::tuple(&view.exact, 0, a, 2), {&view.fast, 0, b, 1}, {&view.fast, 3, c, 3}}) {
        const int32_t* const table = rows->pageTables + rows->sequence[sequence] * rows->pagesPerTable;
        EXPECT_EQ(World::list(table, pages), World::list(world.kv.pageTable(expected), pages));
    }
}

// How many rows a sequence has decides how recurrent layers take them.
TEST(BatchNumbers, KnowsTheMostExactRowsOfASequence) {
    World world(false);
    const int32_t a = world.held(70), b = world.held(3), c = world.held(130), d = world.held(0);
    world.add(RowKind::Decode, a, 1);
    world.add(RowKind::Decode, b, 4);
    world.add(RowKind::Decode, c, 2);
    EXPECT_EQ(world.fill(7).mostExact, 4);
    world.add(RowKind::Prompt, d, 9);
    EXPECT_EQ(world.fill(7).mostExact, 4) << "fast rows do not count";
    EXPECT_EQ(world.fill(7).mostFast, 9);
    EXPECT_EQ(world.fill(16).mostExact, 9);
}

// Tiles are cut at absolute multiples of 64 positions, however a prompt was cut, and count from the first fast row.
TEST(BatchNumbers, QueryTilesBeginAtAbsoluteMultiples) {
    World world(false);
    const int32_t a = world.held(5), b = world.held(100), c = world.held(64);
    world.add(RowKind::Decode, a, 1);
    world.add(RowKind::Prompt, b, 100);  // positions 100 to 199
    world.add(RowKind::Prompt, c, 65);   // positions 64 to 128
    const BatchView view = world.fill(1);
    ASSERT_EQ(view.queryTiles.count, 5);
    EXPECT_EQ(World::list(view.queryTiles.begin, 5), (List{0, 28, 92, 100, 164}));
    EXPECT_EQ(World::list(view.queryTiles.end, 5), (List{28, 92, 100, 164, 165}));
    EXPECT_EQ(view.stateTiles.count, 0);
}

// Sequences with few rows are left out, wherever they stand; neighbours make one range.
TEST(BatchNumbers, ExactRowsOfAPromptMakeTiles) {
    World world(false);
    world.room.exactPrompts = true;
    for (const int64_t count : {1, 4}) world.add(RowKind::Decode, world.held(70), count);
    for (const int64_t count : {32, 31, 5, 129, 3}) world.add(RowKind::Prompt, world.held(10), count);
    const BatchView view = world.fill(world.batch.size());
    EXPECT_EQ(World::list(view.exactTiles.begin, view.exactTiles.count), (std::vector<int32_t>{5, 73, 201}));
    EXPECT_EQ(World::list(view.exactTiles.end, view.exactTiles.count), (std::vector<int32_t>{37, 201, 202}));
    EXPECT_EQ(view.tiledRows, 32 + 129);
    EXPECT_EQ(view.untiledRows, (std::vector<std::pair<int64_t, int64_t>>{{0, 5}, {37, 73}, {202, 205}}));
}

// A row more than a whole tile, and sequences that have just enough rows: as many tiles as there may be.
TEST(BatchNumbers, TilesOfExactRowsHaveRoom) {
    for (const std::vector<int64_t>& counts : std::vector<std::vector<int64_t>>{
             {32, 32, 32, 32, 32, 32, 32, 32, 32}, {129, 129, 42}, {300}, {129, 32, 32, 32, 32, 32}}) {
        World world(false);
        world.room.exactPrompts = true;
        std::vector<int32_t> begin, end, pages;
        for (const int64_t count : counts) {
            const auto first = static_cast<int32_t>(world.batch.size()), last = first + static_cast<int32_t>(count);
            for (int32_t row = first; row < last; row += 128) {
                begin.push_back(row);
                end.push_back(std::min(last, row + 128));
            }
            const int32_t sequence = world.held(0);
            world.add(RowKind::Prompt, sequence, count);
            pages.push_back(world.kv.pageTable(sequence)[0]);
        }
        const BatchView view = world.fill(world.batch.size());
        EXPECT_EQ(World::list(view.exactTiles.begin, view.exactTiles.count), begin);
        EXPECT_EQ(World::list(view.exactTiles.end, view.exactTiles.count), end);
        EXPECT_EQ(view.tiledRows, world.batch.size());
        EXPECT_TRUE(view.untiledRows.empty());
        for (size_t i = 0; i < pages.size(); ++i)
            EXPECT_EQ(view.exact.pageTables[static_cast<int64_t>(i) * view.exact.pagesPerTable], pages[i]);
    }
}

TEST(BatchNumbers, RowsOfFastPromptsAndDecodeMakeNoExactTiles) {
    World world(false);
    world.add(RowKind::Decode, world.held(70), 40);
    world.add(RowKind::Prompt, world.held(0), 100);
    const BatchView view = world.fill(40);
    EXPECT_EQ(view.exactTiles.count, 0);
    EXPECT_EQ(view.tiledRows, 0);
    EXPECT_TRUE(view.untiledRows.empty());
}

TEST(BatchNumbers, StatesAreReadAndKeptWhereTheCacheSays) {
    World world(true);
    const int32_t a = world.held(5), b = world.held(64), c = world.held(0);
    world.add(RowKind::Decode, a, 3, {6, 7});
    world.add(RowKind::Prompt, b, 150, {128, 192});
    world.add(RowKind::Prompt, c, 10);
    const BatchView view = world.fill(3);
    const auto stepsOf = [&](int32_t sequence) { return world.kv.states().steps(sequence); };
    ASSERT_EQ(stepsOf(a).size(), 3u);
    EXPECT_EQ(World::list(view.exactStates.from, 3),
              (List{stepsOf(a)[0].from, cuda::kStateIsOfRowBefore, cuda::kStateIsOfRowBefore}));
    EXPECT_EQ(World::list(view.exactStates.to, 3), (List{stepsOf(a)[0].to, stepsOf(a)[1].to, stepsOf(a)[2].to}));
    EXPECT_EQ(view.exactStates.sequences.count, 1);
    EXPECT_EQ(view.exactStates.sequences.begin[0], 0);
    EXPECT_EQ(view.exactStates.sequences.end[0], 3);
    ASSERT_EQ(stepsOf(b).size(), 3u);
    EXPECT_EQ(view.fastStates.from[0], stepsOf(b)[0].from);
    EXPECT_EQ(view.fastStates.from[150], cuda::kStateIsZero);
    std::vector<std::pair<int64_t, int32_t>> kept;
    for (int64_t row = 0; row < 160; ++row) {
        if (view.fastStates.to[row] >= 0) kept.emplace_back(row, view.fastStates.to[row]);
    }
    EXPECT_EQ(kept,
              (std::vector<std::pair<int64_t, int32_t>>{
                  {63, stepsOf(b)[0].to}, {127, stepsOf(b)[1].to}, {149, stepsOf(b)[2].to}, {159, stepsOf(c)[0].to}}));
    EXPECT_EQ(World::list(view.fastStates.sequences.begin, 2), (List{0, 150}));
    EXPECT_EQ(World::list(view.fastStates.sequences.end, 2), (List{150, 160}));
    ASSERT_EQ(view.stateTiles.count, 4);
    EXPECT_EQ(World::list(view.stateTiles.begin, 4), (List{0, 64, 128, 150}));
    EXPECT_EQ(World::list(view.stateTiles.end, 4), (List{64, 128, 150, 160}));
}

// A captured step of n rows is replayed for any number of sequences: what is not there is empty.
TEST(BatchNumbers, ACapturedStepHasARangeForEachRow) {
    World world(true);
    world.room.captured = true;
    world.room.fastSequences = 0;
    const int32_t a = world.held(5), b = world.held(6);
    world.add(RowKind::Decode, a, 2);
    world.add(RowKind::Decode, b, 1);
    const BatchView view = world.fill(3);
    ASSERT_EQ(view.exactStates.sequences.count, 3);
    EXPECT_EQ(World::list(view.exactStates.sequences.begin, 3), (List{0, 2, 0}));
    EXPECT_EQ(World::list(view.exactStates.sequences.end, 3), (List{2, 3, 0}));
}

// A block's addresses depend on the room alone.
TEST(BatchNumbers, ANumberIsAlwaysAtTheSamePlace) {
    World world(true);
    world.room.drafts = true;
    const int32_t a = world.held(0);
    world.add(RowKind::Decode, a, 1);
    const BatchView one = world.fill(1);
    const int32_t* const host = world.host.data();
    const std::set<const int32_t*> places = {one.tokens,
                                             one.logitRows,
                                             one.sources,
                                             one.joined,
                                             one.exact.positions,
                                             one.exact.sequence,
                                             one.exact.pageTables,
                                             one.exactStates.from,
                                             one.exactStates.to,
                                             one.exactStates.sequences.begin,
                                             one.exactStates.sequences.end};
    EXPECT_EQ(places.size(), 11u);
    world.kv.commit(a);
    world.batch = Batch();
    world.add(RowKind::Decode, a, 5);
    world.add(RowKind::Decode, world.held(3), 4);
    const BatchView nine = world.fill(9);
    ASSERT_EQ(world.host.data(), host);
    EXPECT_EQ(nine.exact.positions, one.exact.positions);
    EXPECT_EQ(nine.exact.pageTables, one.exact.pageTables);
    EXPECT_EQ(nine.exactStates.to, one.exactStates.to);
}

// Layers that see equally far share a page table, at a place that does not depend on the batch.
TEST(BatchNumbers, EveryReachHasItsPageTables) {
    World world(false);
    const std::vector<KvLayerShape> layers = {{1, 8, {}}, {1, 8, {64, 0}}, {1, 8, {0, 128}}};
    world.kv = KvCache(world.allocator, layers, KvType::BF16, KvRoom(20 * 640, 64, 3));
    ASSERT_EQ(world.kv.lists(), 3);
    for (int32_t i = 0, other = world.held(0); i < 40; ++i) {  // so that the lists come to differ
        world.kv.extend(other, 64);
        world.kv.commit(other);
    }
    const int32_t a = world.held(130), b = world.held(64);
    world.add(RowKind::Decode, a, 1);
    world.add(RowKind::Prompt, b, 64);
    EXPECT_THROW(world.fill(1), Error) << "room for one list";
    world.room.lists = 3;
    const BatchView view = world.fill(1);
    std::set<const int32_t*> places;
    std::set<List> tables;
    for (size_t i = 0; i < layers.size(); ++i) {
        const KvPages& pages = world.kv.layer(i);
        for (const auto& [rows, sequence, count] :
             {std::tuple(view.exactOf(pages), a, 3), {view.fastOf(pages), b, 2}}) {
            const int32_t* const table = rows.pageTables + rows.sequence[0] * rows.pagesPerTable;
            EXPECT_EQ(World::list(table, count), World::list(world.kv.pageTable(sequence, pages.list), count));
            for (int32_t p = 0; p < count; ++p) places.insert(table + p);
            tables.insert(World::list(table, count));
        }
    }
    EXPECT_EQ(tables.size(), 3u * 2);
    EXPECT_EQ(places.size(), 3u * (3 + 2));
    world.batch = Batch();
    world.add(RowKind::Decode, b, 1);
    EXPECT_EQ(world.fill(1).exactOf(world.kv.layer(2)).pageTables, view.exactOf(world.kv.layer(2)).pageTables);
}

TEST(BatchNumbers, ADraftsInputsAreJoinedInTurn) {
    World world(true);
    world.room.drafts = true;
    const int32_t a = world.held(64);
    ASSERT_TRUE(world.kv.reserve(a, 3));
    for (int32_t i = 0; i < 3; ++i) {
        world.batch.add(RowKind::Prompt, i, 64 + i, a, false);
        world.batch.sources.push_back(10 + i);
    }
    const BatchView view = world.fill(0);
    EXPECT_EQ(World::list(view.sources, 3), (List{10, 11, 12}));
    EXPECT_EQ(World::list(view.joined, 6), (List{0, 3, 1, 4, 2, 5}));
    EXPECT_EQ(view.stateTiles.count, 0) << "a draft goes through no recurrent layer";
    EXPECT_EQ(World::list(view.fastStates.to, 3), (List{-1, -1, -1}));
}

TEST(BatchNumbers, WhatThereIsNoRoomForIsRefused) {
    const auto refused = [](World& world, int64_t exactRows, const char* part) {
        try {
            world.fill(exactRows);
            ADD_FAILURE() << "it fits: " << part;
        } catch (const Error& e) {
            EXPECT_EQ(e.kind(), ErrorKind::Internal);
            EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
        }
    };
    World rows(false), sequences(false), prompts(false), pages(false), kinds(false), tile(true), mark(true);
    rows.add(RowKind::Prompt, rows.held(0), 301);
    refused(rows, 0, "300 rows");
    for (int i = 0; i < 21; ++i) sequences.add(RowKind::Decode, sequences.held(0), 1);
    refused(sequences, 21, "20 sequences");
    for (int i = 0; i < 5; ++i) prompts.add(RowKind::Prompt, prompts.held(0), 1);
    refused(prompts, 0, "4 prompts");
    pages.add(RowKind::Decode, pages.held(640), 1);
    refused(pages, 1, "10 pages");
    kinds.add(RowKind::Prompt, kinds.held(0), 4);
    refused(kinds, 2, "two kinds");
    tile.add(RowKind::Prompt, tile.held(20), 4);
    refused(tile, 0, "no multiple of 64");
    mark.add(RowKind::Prompt, mark.held(0), 40, {20});
    refused(mark, 0, "no multiple of 64");
}

}  // namespace
