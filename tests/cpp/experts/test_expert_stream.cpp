// Stacks of experts in the weight stream: full passes fetch the wanted experts whole, and steps fetch none.
#include "seed.h"
#include "weight_world.h"

namespace {

using namespace streamed;

// The bytes of a Q8_0 row on the device.
GappedRows rowsOf(size_t bytes) { return {bytes - rowBytes(DType::Q8_0, 256), 3}; }

GroupShape stack(int64_t rows, int32_t experts, int64_t apart = 0) {
    return {{DType::Q8_0}, {256}, rows, 0, false, experts, apart};
}
GroupShape matrix(bool resident) { return {{DType::Q8_0}, {256}, 40, 0, resident}; }

TEST(ExpertStream, PiecesAreAsManyExpertsAsFitAndAlike) {
    constexpr size_t kRow = size_t{64} << 10;  // 256 rows are a piece
    const struct {
        int64_t rows;
        int32_t experts;
        int64_t apart;
        std::vector<int32_t> pieces;
    } cases[] = {
        {64, 8, 0, {4, 4}},                                                                        // 4 MiB each
        {64, 9, 64, {3, 3, 3}},                                                                    // not 4, 4 and 1
        {65, 7, 3, {3, 3, 1}},  {64, 4, 0, {4}}, {1, 300, 0, {150, 150}}, {256, 3, 0, {1, 1, 1}},  // a piece each
        {257, 2, 1, {1, 1}},  // more than a piece each
        {5, 1, 0, {1}},
    };
    for (const auto& c : cases) {
        SCOPED_TRACE(std::to_string(c.experts) + " experts of " + std::to_string(c.rows) + " rows");
        World world(rowsOf(kRow), 3);
        world.add(stack(c.rows, c.experts, c.apart));
        EXPECT_TRUE(world.stream.streams() && !world.stream.sharesRows());
        world.stream.take();
        const size_t slots = std::min<size_t>(Transfers::kMostBuffers, c.pieces.size());
        EXPECT_EQ(world.held("buffers for streamed weights"), slots * static_cast<size_t>(c.pieces[0] * c.rows) * kRow);
        const size_t expertInFile = rowBytes(DType::Q8_0, 256) * static_cast<size_t>(c.rows);
        EXPECT_EQ(world.transfers.stageBytes, static_cast<size_t>(c.pieces[0]) * Allocator::aligned(expertInFile));
        for (int round = 0; round < 2; ++round) {
            std::vector<int32_t> counts;
            world.stream.begin(WeightStream::Part::Model, false, true);
            world.stream.forExperts(0, [&](const MatrixStack& part, int32_t) { counts.push_back(part.count); });
            world.stream.end();
            EXPECT_EQ(counts, c.pieces);
            world.changeFiles();
            world.pass(false, true);  // compares every byte with the file
        }
    }
}

// In steps the CPU computes them, and nothing waits for them: later weights are fetched instead.
TEST(ExpertStream, PassesOfFewRowsDoWithout) {
    World world(rowsOf(size_t{64} << 10), 5);
    for (const int32_t experts : {0, 12, 9, 0, 5}) world.add(experts ? stack(64, experts) : matrix(false));
    world.startHead();
    world.add(stack(64, 3));
    world.stream.take();
    for (int round = 0; round < 2; ++round) {
        world.pass(true, true);
        EXPECT_EQ(world.transfers.fetches, 2u);
        EXPECT_EQ(world.fetchesAtUse, (std::vector<size_t>{2, 2}));
        world.changeFiles();
        world.pass(false, true);
        EXPECT_EQ(world.transfers.fetches, 1u + 3 + 3 + 1 + 2 + 1);
        world.pass(false, false);
        EXPECT_EQ(world.transfers.fetches, 1u + 3 + 3 + 1 + 2);
        world.pass(true, false);
        EXPECT_EQ(world.transfers.fetches, 2u);
    }
}

TEST(ExpertStream, OnlyThoseThatAreWantedCome) {
    constexpr size_t kRow = size_t{64} << 10;
    const struct {
        std::vector<int32_t> wanted, pieces;
    } cases[] = {
        {{0, 1, 2, 3, 4, 5, 6, 7}, {3, 3, 2}},  // not 4 and 4: buffers hold three, the pieces of all nine
        {{1, 3, 5, 7}, {2, 2}},
        {{0, 7, 8}, {3}},
        {{8}, {1}},
        {{}, {}},
        {{1, 2, 4, 5, 8}, {3, 2}},
        {{0, 1, 2, 3, 4, 5, 6, 7, 8}, {3, 3, 3}},
    };
    World world(rowsOf(kRow), 13);
    world.add(matrix(false));
    world.add(stack(64, 9, 5));
    world.add(matrix(true));
    world.stream.take();
    const size_t held = world.allocator.held();
    for (const auto& c : cases) {
        SCOPED_TRACE(::testing::PrintToString(c.wanted));
        world.want(world.groups[1], c.wanted);
        world.pass(true, true);
        EXPECT_EQ(world.fetchesAtUse.size(), 1u);
        world.pass(false, true);  // which holds every byte against the file
        world.changeFiles();
        std::vector<int32_t> counts;
        world.stream.begin(WeightStream::Part::Model, false, true);
        world.use(world.groups[0], false);
        world.stream.forExperts(1, [&](const MatrixStack& part, int32_t first) {
            EXPECT_EQ(first, std::accumulate(counts.begin(), counts.end(), 0));
            counts.push_back(part.count);
        });
        world.use(world.groups[2], false);
        world.stream.end();
        EXPECT_EQ(counts, c.pieces);
        EXPECT_EQ(world.transfers.fetches, 1 + c.pieces.size());
    }
    EXPECT_EQ(world.allocator.held(), held);
}

TEST(ExpertStream, AnyOfThemMayBeWantedInAnyPass) {
    std::mt19937 random(sharpi::testSeed(17));
    for (int round = 0; round < 20; ++round) {
        SCOPED_TRACE("round " + std::to_string(round));
        World world(rowsOf(size_t{64} << 10), 900u + static_cast<unsigned>(round));
        for (size_t i = 0; i < 6; ++i) {
            // Of several to a piece, one to a piece, and more than a piece each.
            const int64_t rows[] = {1 + static_cast<int64_t>(random() % 100), 256,
                                    257 + static_cast<int64_t>(random() % 40)};
            const auto apart = static_cast<int64_t>(random() % 2 * (random() % 9));
            world.add(random() % 4 ? stack(rows[random() % 3], 1 + static_cast<int32_t>(random() % 20), apart)
                                   : matrix(random() % 2));
        }
        world.stream.take();
        for (int pass = 0; pass < 8; ++pass) {
            for (World::Group& group : world.groups) {
                if (group.isStack && random() % 3) world.wantSome(group);
            }
            world.pass(random() % 4 == 0, true);
            world.changeFiles();
        }
        if (::testing::Test::HasFailure()) return;
    }
}

TEST(ExpertStream, RefusesToWantWhatThereIsNot) {
    World world({0, 3}, 19);
    world.add(stack(16, 4));
    world.add(matrix(false));
    world.add(matrix(true));
    expectInternal([&] { world.stream.setWanted(0, {1}); });  // nothing is taken
    world.stream.take();
    for (const std::vector<int32_t>& wrong :
         {std::vector<int32_t>{4}, {-1}, {-1, 0}, {0, 0}, {2, 1}, {0, 1, 3, 3}, {0, 1, 2, 3, 4}}) {
        expectInternal([&] { world.stream.setWanted(0, wrong); });
    }
    for (const int32_t group : {1, 2}) expectInternal([&] { world.stream.setWanted(group, {}); });
    world.pass(false, true);  // all are still wanted
    world.want(world.groups[0], {1, 3});
    world.pass(false, true);
}

TEST(ExpertStream, ToWantOthersEndsAPassThatWasLeft) {
    World world({0, 3}, 23);
    world.add(stack(16, 4));
    world.add(stack(16, 4));
    world.stream.take();
    world.stream.begin(WeightStream::Part::Model, false, true);
    world.use(world.groups[0], false);
    world.want(world.groups[1], {2});
    expectError(ErrorKind::Internal, "outside a pass", [&] { world.use(world.groups[1], false); });
    world.transfers.mayGiveUp = true;
    world.pass(false, true);
}

TEST(ExpertStream, WithStacksAloneAStepBringsNothing) {
    World world({0, 3}, 7);
    world.add(matrix(true));
    world.add(stack(64, 8));
    world.stream.take();
    world.stream.uploadAll();
    EXPECT_EQ(world.transfers.passes, 0) << "the first pass fetches resident weights";
    world.pass(true, true);
    EXPECT_EQ(world.transfers.passes, 1);
    world.stream.finishUploads();
    EXPECT_EQ(world.transfers.finished, 1);
    world.pass(true, true);
    EXPECT_EQ(world.transfers.passes, 1) << "there was nothing to do";
    world.pass(false, true);
    EXPECT_EQ(world.transfers.passes, 2);
    world.want(world.groups[1], {});
    world.pass(false, true);
    EXPECT_EQ(world.transfers.passes, 2) << "nothing was wanted";
    world.want(world.groups[1], {7});
    world.pass(false, true);
    EXPECT_EQ(world.transfers.passes, 3);
}

TEST(ExpertStream, RefusesUsesOutOfOrder) {
    World world({0, 3}, 9);
    world.add(stack(16, 4));
    world.add(matrix(false));
    world.add(stack(16, 4));
    world.stream.take();
    const auto use = [&](size_t group) { world.use(world.groups[group], false); };
    const auto begin = [&](bool few) {
        world.transfers.mayGiveUp = true;
        world.stream.begin(WeightStream::Part::Model, few, true);
    };
    const auto nothing = [](const auto&...) {};
    expectInternal([&] { use(0); });  // no pass
    for (const std::vector<size_t>& uses : {std::vector<size_t>{1}, {2}, {0, 0}, {0, 2}, {0, 1, 0}, {0, 1, 2, 2}}) {
        SCOPED_TRACE(::testing::PrintToString(uses));
        begin(false);
        for (size_t i = 0; i + 1 < uses.size(); ++i) use(uses[i]);
        expectInternal([&] { use(uses.back()); });
    }
    for (const bool few : {false, true}) {
        begin(few);
        expectInternal([&] { world.stream.forPieces(0, nothing); });
        expectInternal([&] { world.stream.forPieces(0, 0, nothing); });
        expectInternal([&] { world.stream.forExperts(1, nothing); });
    }
    begin(false);
    expectInternal([&] { world.stream.end(); });
    begin(false);
    for (const size_t group : {0, 1}) use(group);
    expectInternal([&] { world.stream.end(); });
    world.transfers.mayGiveUp = true;
    world.pass(false, true);
}

TEST(ExpertStream, RefusesTheHeadInAPassWithoutIt) {
    for (const bool isStack : {false, true}) {
        World world({0, 3}, 11);
        world.add(matrix(false));
        world.startHead();
        world.add(isStack ? stack(16, 4) : matrix(false));
        world.stream.take();
        world.stream.begin(WeightStream::Part::Model, false, false);
        world.use(world.groups[0], false);
        expectError(ErrorKind::Internal, "none", [&] { world.use(world.groups[1], false); });
        world.stream.end();
        world.pass(false, true);
    }
}

}  // namespace
