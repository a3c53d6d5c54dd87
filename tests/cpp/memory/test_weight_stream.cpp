// The weight stream: whatever the matrices, the stacks and the passes, every byte that is used is the file's.
#include "seed.h"
#include "weight_world.h"

namespace {

using namespace streamed;

constexpr DType kTypes[] = {DType::F32,  DType::F16,  DType::Q4_0, DType::Q8_0, DType::Q4_K,
                            DType::Q5_K, DType::Q6_K, DType::Q2_K, DType::MXFP4};

GroupShape randomGroup(std::mt19937& random, int64_t mostRows, int residentOf10) {
    GroupShape shape;
    shape.rows = 1 + static_cast<int64_t>(random() % mostRows);
    for (size_t i = 1 + random() % 3; i > 0; --i) {
        shape.types.push_back(kTypes[random() % std::size(kTypes)]);
        shape.cols.push_back(256 * (1 + static_cast<int64_t>(random() % 4)));
    }
    shape.resident = static_cast<int>(random() % 10) < residentOf10;
    if (!shape.resident && random() % 4 == 0) {
        shape.experts = 1 + static_cast<int32_t>(random() % 12);
        shape.rows = 1 + static_cast<int64_t>(random() % (mostRows / 4));
        shape.apart = random() % 2 ? static_cast<int64_t>(random() % 40) : 0;
        return shape;
    }
    if (!shape.resident && random() % 2) {
        shape.cpuRows = random() % 4 == 0 ? shape.rows
                                          : shape.rows - std::min(shape.rows, 32 * static_cast<int64_t>(random() % 20));
    }
    return shape;
}

void addRandomGroups(World& world, std::mt19937& random, size_t count, int64_t mostRows, int residentOf10) {
    const size_t head = random() % 3 == 0 ? count : count - 1 - random() % 2;
    const size_t prediction =
        random() % 2 ? count : head - random() % (head + 1);  // all groups may be the prediction layer's, or none
    for (size_t i = 0; i < count; ++i) {
        if (i == prediction) world.startPrediction();
        if (i == head) world.startHead();
        world.add(randomGroup(random, mostRows, residentOf10));
    }
    if (head == count && random() % 2) world.startHead();  // a head with nothing of its own
}

TEST(WeightStream, EveryByteUsedIsTheFiles) {
    std::mt19937 random(sharpi::testSeed(11));
    // The gap, and the most rows. A group has one piece; several; 32 rows of two matrices may exceed a piece; even 32
    // rows of one may.
    const std::pair<size_t, int64_t> kinds[] = {
        {0, 300}, {size_t{12} << 10, 1500}, {size_t{120} << 10, 120}, {size_t{300} << 10, 90}};
    for (int round = 0; round < 48; ++round) {
        SCOPED_TRACE("round " + std::to_string(round));
        const auto& [gap, mostRows] = kinds[round % 4];
        World world({gap, round % 5 == 0 ? 0 : 3}, 100u + static_cast<unsigned>(round));
        addRandomGroups(world, random, 3 + random() % 8, mostRows, round / 4 % 4 * 3);
        const Matrix table = world.random(DType::Q6_K, 50, 256);
        world.stream.addTable(table);
        world.stream.take();
        world.transfers.ahead = round % 3 * 4;
        EXPECT_EQ(world.transfers.prepared, 1);
        for (const auto* ranges :
             {&world.transfers.ranges.always, &world.transfers.ranges.once, &world.transfers.ranges.optional})
            EXPECT_FALSE(overlaps(*ranges, table.data, fileBytes(table))) << "single rows of a table are read";
        const auto any = [&](const auto& is) { return std::any_of(world.groups.begin(), world.groups.end(), is); };
        const bool streams = any([](const World::Group& g) { return !g.resident(); });
        EXPECT_EQ(world.stream.streams(), streams);
        EXPECT_EQ(world.stream.sharesRows(), any([](const World::Group& g) { return g.cpuRows > 0; }));
        world.stream.uploadAll();
        EXPECT_EQ(world.transfers.finished, streams ? 0 : 1);
        for (size_t i = 0; i < world.groups.size(); ++i) {
            if (!streams || world.ofPrediction(i)) world.keep(world.groups[i]);
        }
        world.changeFiles();
        for (int pass = 0; pass < 6; ++pass) {
            for (World::Group& group : world.groups) {
                if (group.isStack && random() % 2) world.wantSome(group);
            }
            const bool headAlone = pass < 5 && world.headBegin != SIZE_MAX && random() % 4 == 0;
            const auto part =
                pass < 5 && random() % 3 == 0 ? WeightStream::Part::Prediction : WeightStream::Part::Model;
            world.pass(part, !headAlone && random() % 2, headAlone || pass == 5 || random() % 3 > 0, headAlone);
            world.changeFiles();
        }
        for (World::Group& group : world.groups) {
            if (group.isStack) world.wantAll(group);
        }
        EXPECT_EQ(world.transfers.residentRows, world.residentRows);
        size_t pieces = 0;
        for (const bool few :
             {true, false}) {  // only streamed weights are fetched again, and at each use the whole ring is busy
            for (const auto part : {WeightStream::Part::Prediction, WeightStream::Part::Model}) {
                world.pass(part, few, part == WeightStream::Part::Model);
                EXPECT_EQ(world.transfers.fetches, world.fetchesAtUse.size());
                EXPECT_EQ(world.transfers.heard, few || round % 3 == 0 ? 0 : world.transfers.fetches);
                const size_t buffers = world.transfers.buffersSeen.size();
                for (size_t i = 0; i < world.fetchesAtUse.size(); ++i)
                    EXPECT_EQ(world.fetchesAtUse[i], std::min(world.transfers.fetches, i + buffers));
                pieces += few ? 0 : world.transfers.fetches;
            }
        }
        EXPECT_EQ(world.transfers.residentRows, world.residentRows) << "each resident row comes once";
        // Each part has its own passes, and one part may have fewer pieces than the ring has buffers.
        if (streams) {
            EXPECT_LE(world.transfers.buffersSeen.size(), std::min(size_t{Transfers::kMostBuffers}, pieces));
        }
        if (streams && world.predictionBegin == SIZE_MAX) {
            EXPECT_EQ(world.transfers.buffersSeen.size(), std::min(size_t{Transfers::kMostBuffers}, pieces));
        }

        world.stream.finishUploads();
        world.stream.finishUploads();
        EXPECT_EQ(world.transfers.finished, 1);
        if (::testing::Test::HasFailure()) return;
    }
}

TEST(WeightStream, PiecesOfLargeMatricesAreAlikeAndFit) {
    const struct {
        GroupShape shape;
        size_t few, many;  // pieces
    } cases[] = {
        {{{DType::Q6_K}, {4096}, 5000, 0, false}, 2, 2},  // 16 MiB and a little
        {{{DType::Q4_K, DType::Q6_K}, {4096, 4096}, 6001, 1984, false}, 2, 1 + 2},
        {{{DType::Q8_0}, {1024}, 15420, 0, false}, 1, 1},  // 16 MiB less 256 bytes
        {{{DType::Q8_0}, {1024}, 15421, 0, false}, 2, 2},
        {{{DType::F32}, {1 << 17}, 33, 0, false}, 2, 2},            // 32 rows are 16 MiB
        {{{DType::F32}, {(1 << 17) + 256}, 100, 64, false}, 2, 4},  // 32 rows exceed 16 MiB
        {{{DType::F32, DType::F32}, {1 << 16, 1 << 16}, 70, 0, false},
         3,
         2 + 2},  // 32 rows of both are 16 MiB, 64 of one
    };
    World world({0, 3}, 5);
    for (const auto& c : cases) world.add(c.shape);
    world.stream.take();
    for (const bool few : {false, true}) {
        world.stream.begin(WeightStream::Part::Model, few, true);
        for (size_t i = 0; i < world.groups.size(); ++i) {
            SCOPED_TRACE("case " + std::to_string(i));
            world.fetchesAtUse.clear();
            world.use(world.groups[i], few);
            EXPECT_EQ(world.fetchesAtUse.size(), few ? cases[i].few : cases[i].many);
        }
        world.stream.end();
    }
}

TEST(WeightStream, ResidentWeightsComeOnceAndTheOthersEachTime) {
    World world({0, 3}, 7);
    world.add({{DType::Q4_K, DType::Q6_K}, {512, 512}, 9000, 0, true});  // several uploads of 2 MiB
    world.add({{DType::Q8_0}, {256}, 100, 32, false});
    world.startHead();
    world.add({{DType::Q6_K}, {256}, 300, 0, true});
    world.stream.take();
    std::vector<double> told;
    world.stream.onUploaded([&](double seconds) { told.push_back(seconds); });
    const std::vector<uint8_t> first(world.groups[0].file[0].data,
                                     world.groups[0].file[0].data + fileBytes(world.groups[0].file[0]));
    world.pass(false, false);
    EXPECT_GT(world.transfers.fetches, 4u);
    EXPECT_EQ(world.transfers.residentRows, 18000) << "nobody has asked for the head's rows";
    world.stream.finishUploads();
    EXPECT_EQ(world.transfers.finished, 0) << "the head's rows have not arrived";
    EXPECT_TRUE(told.empty());
    world.changeFiles();
    const std::vector<uint8_t> headWhenUsed(world.groups[2].file[0].data,
                                            world.groups[2].file[0].data + fileBytes(world.groups[2].file[0]));
    world.pass(true, true);  // use() compares every byte with the file
    EXPECT_TRUE(told.empty()) << "nobody has waited for the uploads yet";
    world.stream.finishUploads();
    EXPECT_EQ(world.transfers.finished, 1);
    ASSERT_EQ(told.size(), 1u);
    EXPECT_GT(told[0], 0);
    world.changeFiles();
    world.pass(false, true);
    world.stream.finishUploads();
    EXPECT_EQ(told.size(), 1u) << "told again";
    EXPECT_EQ(world.transfers.fetches, 1u);
    EXPECT_EQ(world.transfers.residentRows, world.residentRows);
    EXPECT_EQ(world.groups[0].kept[0], first);
    EXPECT_EQ(world.groups[2].kept[0], headWhenUsed);
    EXPECT_NE(std::memcmp(world.groups[0].file[0].data, first.data(), first.size()), 0) << "the file was not changed";
}

// Passes over the model leave out the prediction layer; its own passes leave out all but it and the head. Its resident
// weights do not wait for such a pass, which may never be made.
TEST(WeightStream, APredictionLayerHasPassesOfItsOwn) {
    using Part = WeightStream::Part;
    World world({0, 3}, 8);
    const GroupShape streamed{{DType::Q8_0}, {256}, 96, 32, false}, resident{{DType::Q6_K}, {256}, 50, 0, true};
    GroupShape stack{{DType::Q8_0}, {256}, 40, 0, false};
    stack.experts = 4;
    for (const GroupShape& shape : {streamed, resident, stack}) world.add(shape);
    world.startPrediction();
    for (const GroupShape& shape : {resident, stack, streamed, resident}) world.add(shape);
    world.startHead();
    for (const GroupShape& shape : {streamed, resident}) world.add(shape);
    world.stream.take();
    world.stream.uploadAll();
    EXPECT_EQ(world.transfers.residentRows, 100) << "the prediction layer's rows";
    for (const size_t group : {size_t{3}, size_t{6}}) world.keep(world.groups[group]);
    world.stream.finishUploads();
    EXPECT_EQ(world.transfers.finished, 0);
    world.changeFiles();
    const struct {
        Part part;
        bool few, withHead;
        size_t fetches;
    } passes[] = {{Part::Prediction, false, false, 2}, {Part::Model, false, false, 3},
                  {Part::Prediction, true, false, 1},  {Part::Model, true, true, 3},
                  {Part::Model, false, true, 3},       {Part::Prediction, false, true, 3},
                  {Part::Prediction, true, true, 2},   {Part::Model, true, false, 1}};
    for (const auto& p : passes) {  // each use is compared with the file
        world.pass(p.part, p.few, p.withHead);
        EXPECT_EQ(world.transfers.fetches, p.fetches);
        world.changeFiles();
    }
    EXPECT_EQ(world.transfers.residentRows, world.residentRows);
    world.stream.finishUploads();
    EXPECT_EQ(world.transfers.finished, 1);

    const auto refused = [&](Part part, const std::vector<size_t>& uses) {
        world.stream.begin(part, true, true);
        for (size_t i = 0; i + 1 < uses.size(); ++i) world.use(world.groups[uses[i]], true);
        expectInternal([&] { world.use(world.groups[uses.back()], true); });
        expectInternal([&] { world.stream.end(); });
        world.transfers.mayGiveUp = true;
    };
    refused(Part::Model, {5});
    refused(Part::Model, {0, 5});
    refused(Part::Prediction, {0});
    refused(Part::Prediction, {7});
    refused(Part::Prediction, {5, 5});
    world.pass(Part::Prediction, true, true);
}

TEST(WeightStream, WithoutADraftNothingStaysPinned) {
    World world({0, 3}, 8);
    world.add({{DType::Q8_0}, {256}, 96, 0, false});
    world.startPrediction();
    world.add({{DType::Q6_K}, {256}, 50, 0, true});
    world.startHead();
    world.add({{DType::Q6_K}, {256}, 70, 0, true});
    world.stream.take();
    world.stream.uploadAll();
    world.keep(world.groups[1]);
    world.pass(false, true);
    world.stream.finishUploads();
    EXPECT_EQ(world.transfers.finished, 1);
}

TEST(WeightStream, APassGivenUpHalfWayHarmsNoOther) {
    std::mt19937 random(sharpi::testSeed(21));
    for (int round = 0; round < 30; ++round) {
        SCOPED_TRACE("round " + std::to_string(round));
        World world({round % 2 ? size_t{12} << 10 : size_t{0}, 3}, 500u + static_cast<unsigned>(round));
        addRandomGroups(world, random, 6, 1000, 4);
        world.stream.take();
        for (int pass = 0; pass < 4; ++pass) {
            const bool few = random() % 2;
            const auto part = random() % 3 ? WeightStream::Part::Model : WeightStream::Part::Prediction;
            world.stream.begin(part, few, true);
            const size_t stop = random() % world.groups.size();
            try {
                for (size_t i = 0; i <= stop; ++i) {
                    if (world.isIn(i, part, true))
                        world.use(world.groups[i], few, i == stop ? static_cast<int64_t>(random() % 3) : -1);
                }
            } catch (const World::GivenUp&) {
            }
            world.transfers.mayGiveUp = true;
            world.changeFiles();
            for (World::Group& group : world.groups) {
                if (group.isStack && random() % 2) world.wantSome(group);
            }
            if (pass % 2) world.pass(random() % 2, true);
        }
        world.transfers.mayGiveUp = true;
        world.pass(false, true);
        if (::testing::Test::HasFailure()) return;
    }
}

TEST(WeightStream, RefusesUsesOutOfOrder) {
    World world({0, 3}, 9);
    for (const size_t matrices : {0, 2, 1, 0}) {  // 0: a resident one
        world.add({std::vector<DType>(std::max<size_t>(matrices, 1), DType::Q8_0), {256, 512}, 40, 0, matrices == 0});
    }
    // 10 group + matrix: one matrix, as in a full pass. 10 group + 9: all matrices together. kEnd: the pass ends.
    constexpr int kEnd = -1;
    const auto use = [&](int what) {
        if (what == kEnd) return world.stream.end();
        World::Group& group = world.groups[static_cast<size_t>(what / 10)];
        if (group.resident()) world.use(group, false);
        else if (what % 10 == 9) world.useTogether(group);
        else world.useMember(group, what % 10);
    };
    const auto begin = [&](bool few) {
        world.transfers.mayGiveUp = true;
        world.stream.begin(WeightStream::Part::Model, few, true);
    };
    expectInternal([&] { world.stream.begin(WeightStream::Part::Model, false, true); });  // nothing is taken
    world.stream.take();
    expectInternal([&] { world.stream.take(); });
    for (const int first : {0, 10, 19}) expectInternal([&] { use(first); });  // no pass
    const struct {
        bool few;
        std::vector<int> uses;  // only the last one is refused
    } orders[] = {{false, {10}},
                  {false, {30}},
                  {false, {0, 11}},
                  {false, {0, 20}},
                  {false, {0, 29}},
                  {false, {0, 10, 10}},
                  {false, {0, 10, 20}},
                  {false, {0, 10, 29}},
                  {false, {0, 10, 11, 10}},
                  {false, {0, 10, 11, 11}},
                  {false, {0, 10, 11, 30}},
                  {false, {0, 10, 11, 20, 20}},
                  {false, {0, kEnd}},
                  {false, {0, 10, kEnd}},
                  {false, {0, 10, 11, kEnd}},
                  {true, {0, 19, kEnd}},
                  {true, {0, 29}},
                  {true, {0, 19, 19}},
                  {true, {0, 19, 30}},
                  {true, {0, 10}},
                  {true, {0, 19, 20}}};
    for (const auto& order : orders) {
        SCOPED_TRACE(::testing::PrintToString(order.uses) + (order.few ? " few" : " many"));
        begin(order.few);
        for (size_t i = 0; i + 1 < order.uses.size(); ++i) use(order.uses[i]);
        expectInternal([&] { use(order.uses.back()); });
    }
    begin(true);
    for (const int what : {0, 19}) use(what);
    expectInternal([&] { use(20); });  // the pass can go on
    for (const int what : {29, 30}) use(what);
    world.stream.end();
    world.transfers.mayGiveUp = true;
    world.pass(false, true);
}

TEST(WeightStream, WithNothingStreamedAllComesAtOnceAndStagingGoes) {
    World world({0, 3}, 13);
    for (int i = 0; i < 5; ++i) world.add({{DType::Q4_K, DType::F32}, {512, 256}, 3000, 0, true});
    world.stream.startHead();
    world.add({{DType::Q6_K}, {256}, 100, 0, true});
    world.stream.take();
    EXPECT_EQ(world.held("buffers for streamed weights"), 0u);
    EXPECT_EQ(world.held("staging for weights"), 3 * world.transfers.stageBytes);
    world.stream.uploadAll();
    EXPECT_EQ(world.held("staging for weights"), 0u);
    EXPECT_EQ(world.transfers.finished, 1);
    EXPECT_EQ(world.transfers.passes, 1);
    EXPECT_EQ(world.transfers.residentRows, world.residentRows);
    for (const World::Group& group : world.groups) {
        for (size_t i = 0; i < group.to.size(); ++i) world.expectRows(group.to[i], group.file[i].data, "uploaded");
    }
    world.pass(true, true);
    EXPECT_EQ(world.transfers.passes, 1) << "there was nothing left to do";
    world.stream.finishUploads();
    EXPECT_EQ(world.transfers.finished, 1);
}

// A plan: the same adds over the same layout, without a file and without transfers.
TEST(WeightStream, APlanTakesTheSameMemory) {
    std::mt19937 random(sharpi::testSeed(31));
    for (int round = 0; round < 12; ++round) {
        const GappedRows rows{round % 2 ? size_t{30} << 10 : size_t{0}, 3};
        World world(rows, 700u + static_cast<unsigned>(round));
        addRandomGroups(world, random, 5, 500, round % 3 * 5);
        FakeDevice device{size_t{16} << 30};
        Allocator allocator(device);
        WeightStream planned(allocator, rows.layout(), nullptr);
        size_t residents = 0;
        for (const World::Group& group : world.groups) {
            std::vector<Matrix> file = group.file;
            for (Matrix& m : file) m.data = nullptr;
            if (group.isStack)
                planned.addStreamedStack({file[0], fileBytes(file[0]), static_cast<int32_t>(file.size())});
            else if (group.resident()) planned.addResident(group.to, file);
            else planned.addStreamed(file, group.cpuRows);
            for (const Matrix& m : group.to) residents += rows.layout().bytes(m);
        }
        world.stream.take();
        planned.take();
        EXPECT_EQ(allocator.held() + residents, world.allocator.held());
        world.stream.uploadAll();
        planned.uploadAll();
        planned.finishUploads();
        EXPECT_EQ(allocator.held() + residents, world.allocator.held()) << "after uploading";
        expectInternal([&] { planned.begin(WeightStream::Part::Model, false, true); });
    }
}

TEST(WeightStream, ARingThatDoesNotFitIsRefusedByName) {
    World world({0, 3}, 17, size_t{4} << 20);
    world.add({{DType::Q8_0}, {1024}, 9000, 0, false});
    expectError(ErrorKind::OutOfMemory, "buffers", [&] { world.stream.take(); });
    EXPECT_EQ(world.transfers.prepared, 0);
}

}  // namespace
