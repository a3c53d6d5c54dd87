// Experts of a model that is larger than RAM: what is used is always the file's bytes, in RAM, on its way there, or
// where the file is mapped.
#include <fcntl.h>
#include <unistd.h>

#include "core/error.h"
#include "disk_world.h"
#include "experts/expert_misses.h"
#include "fake_device.h"
#include "reference_matmul.h"
#include "seed.h"

namespace {

using namespace ondisk;

constexpr int32_t kExperts = 12;

// Layers of random experts.
struct Source {
    explicit Source(int32_t layers, bool gated = true) {
        std::mt19937 random(testSeed(91));
        for (int32_t l = 0; l < layers; ++l) {
            ExpertStacks layer;
            for (MatrixStack* stack : {&layer.gate, &layer.up, &layer.down}) {
                if (stack == &layer.up && !gated) continue;
                stack->first = {DType::Q8_0, stack == &layer.down ? 64 : 96, stack == &layer.down ? 96 : 64, nullptr};
                stack->stride = fileBytes(stack->first);
                stack->count = kExperts;
                bytes.emplace_back(stack->stride * kExperts);
                for (uint8_t& b : bytes.back()) b = static_cast<uint8_t>(random());
                stack->first.data = bytes.back().data();
            }
            stacks.push_back(layer);
        }
    }
    std::vector<std::vector<uint8_t>> bytes;
    std::vector<ExpertStacks> stacks;
};

TEST(RamExperts, WhateverIsChosenHasTheFilesBytes) {
    for (const bool gated : {true, false}) {
        DiskWorld world(Source(3, gated).stacks);
        world.take(10);
        std::mt19937 random(testSeed(92));
        for (int pass = 0; pass < 60; ++pass) {
            const size_t rows = pass % 7 ? 1 : 20;
            world.ram->beginPass(static_cast<int64_t>(rows));
            for (int32_t layer = 0; layer < 3; ++layer) {
                std::vector<int32_t> chosen;
                for (size_t i = 0; i < 2 * rows; ++i) chosen.push_back(static_cast<int32_t>(random() % kExperts));
                ASSERT_TRUE(world.ram->find(layer, world.begins(layer, chosen), layer < 2 ? layer + 1 : -1));
                for (const int32_t expert : chosen) world.expectRead(layer, expert);
            }
            if (testing::Test::HasFailure()) return;
        }
        const DiskCounts counts = world.ram->counts();
        EXPECT_GT(counts.hits, 0u);
        EXPECT_GT(counts.reads, 0u);
        EXPECT_GT(counts.bytes, 0u);
        EXPECT_EQ(world.slots.resident(), world.slots.capacity());
    }
}

TEST(RamExperts, WhatWasReadIsPresentInTheNextPass) {
    DiskWorld world(Source(1).stacks);
    world.take(6);
    for (int pass = 0; pass < 2; ++pass) {
        world.ram->beginPass(1);
        ASSERT_TRUE(world.ram->find(0, world.begins(0, {3, 8}), -1));
        for (const int32_t expert : {3, 8}) {
            EXPECT_EQ(world.ram->present(expert), pass == 1);
            world.expectRead(0, expert);
        }
    }
    EXPECT_EQ(world.ram->counts().hits, 2u);
    EXPECT_EQ(world.ram->counts().reads, 2u);
}

// Layers get free slots in turn; a prompt evicts nothing.
TEST(RamExperts, APromptKeepsWhatThereIsRoomFor) {
    DiskWorld world(Source(3).stacks);
    world.take(7);
    const std::vector<std::vector<int32_t>> wanted = {{0, 1, 2, 5}, {4, 6}, {7, 8, 9, 10, 11}};
    const auto kept = [&](const auto& origins) {
        std::vector<std::pair<int32_t, int32_t>> found;
        for (size_t l = 0; l < wanted.size(); ++l) {
            for (size_t i = 0; i < wanted[l].size(); ++i) {
                EXPECT_EQ(origins[l][i][0].keep == nullptr, origins[l][i][2].keep == nullptr);
                if (origins[l][i][0].keep) found.emplace_back(static_cast<int32_t>(l), wanted[l][i]);
            }
        }
        return found;
    };
    const int64_t capacity = world.slots.capacity();
    ASSERT_EQ(capacity, 7);
    const std::vector<std::pair<int32_t, int32_t>> turns = {{0, 0}, {0, 1}, {0, 2}, {1, 4}, {1, 6}, {2, 7}, {2, 8}};
    // A pass that fails keeps nothing.
    world.ram->beginPass(50);
    EXPECT_EQ(kept(world.ram->originsOf(wanted)), turns);
    world.ram->passFailed();
    world.ram->beginPass(50);
    auto origins = world.ram->originsOf(wanted);
    EXPECT_EQ(kept(origins), turns);
    std::vector<FileReader::Part> parts;
    for (const auto& [layer, expert] : turns) {
        const auto l = static_cast<size_t>(layer);
        const auto i = static_cast<size_t>(std::find(wanted[l].begin(), wanted[l].end(), expert) - wanted[l].begin());
        for (size_t m = 0; m < 3; ++m) {
            const MatrixStack& stack = *DiskWorld::stacksOf(world.file[l])[m];
            parts.push_back({stack.at(expert).data, fileBytes(stack.first), origins[l][i][m].keep});
        }
    }
    const FileReader::Ticket first = world.reader->ask(parts);
    for (size_t i = 0; i < parts.size(); ++i) world.reader->await(first + i);
    world.ram->beginPass(50);
    origins = world.ram->originsOf(wanted);
    EXPECT_TRUE(kept(origins).empty());
    for (size_t l = 0; l < wanted.size(); ++l) {
        for (size_t i = 0; i < wanted[l].size(); ++i) {
            const std::pair<int32_t, int32_t> expert(static_cast<int32_t>(l), wanted[l][i]);
            const bool has = std::find(turns.begin(), turns.end(), expert) != turns.end();
            for (size_t m = 0; m < 3; ++m) {
                EXPECT_EQ(origins[l][i][m].inRam != nullptr, has);
                if (has) world.expectBytes(expert.first, expert.second, m, origins[l][i][m].inRam);
            }
        }
    }
    world.ram->beginPass(1);
    ASSERT_TRUE(world.ram->find(1, world.begins(1, {4, 5}), -1));
    EXPECT_TRUE(world.ram->present(4));
    EXPECT_FALSE(world.ram->present(5));
    for (const int32_t expert : {4, 5}) world.expectRead(1, expert);
}

// As many as there are slots, the first ones. They stay longer than what a step chooses once.
TEST(RamExperts, AreFilledWithTheMostWanted) {
    DiskWorld world(Source(3).stacks);
    world.take(7);
    ASSERT_EQ(world.slots.capacity(), 7);
    const LayerExperts wanted = {{2, 11}, {0, 3}, {1, 0}, {0, 5}, {2, 11}, {1, 7}, {2, 0}, {0, 9}, {1, 1}, {0, 1}};
    world.ram->fill(wanted);
    EXPECT_EQ(world.slots.resident(), 7);
    world.ram->beginPass(1);
    for (const auto& [layer, chosen] :
         std::vector<std::pair<int32_t, std::vector<int32_t>>>{{0, {1, 3, 5, 9}}, {1, {0, 1, 7}}, {2, {0, 11}}}) {
        ASSERT_TRUE(world.ram->find(layer, world.begins(layer, chosen), -1));
        for (const int32_t expert : chosen) {
            const bool isLast = expert == 1;  // of either layer
            EXPECT_EQ(world.ram->present(expert), !isLast) << "layer " << layer << ", expert " << expert;
            world.expectRead(layer, expert);
        }
    }
    EXPECT_EQ(world.ram->counts().hits, 7u);
    EXPECT_EQ(world.ram->counts().reads, 2u);
    world.ram->beginPass(1);
    EXPECT_GE(world.slots.tryGet(2, 11), 0);
}

TEST(RamExperts, AreNotFilledFromAFileThatWasCut) {
    DiskWorld world(Source(1).stacks);
    world.take(6);
    ASSERT_EQ(::truncate(world.path().c_str(), 100), 0);
    EXPECT_THROW(world.ram->fill({{0, 3}, {0, 8}}), Error);
    EXPECT_EQ(world.slots.resident(), 0);
}

// The GPU fetches only what is in RAM, from there. The CPU gets the others, which are on their way.
TEST(RamExperts, TheGpuIsOrderedToFetchOnlyWhatIsThere) {
    DiskWorld world(Source(2).stacks);
    world.take(8);
    FakeDevice device(size_t{1} << 30);
    Allocator vram(device);
    DeviceLayout layout;
    layout.bytes = fileBytes;
    ExpertSlotManager slots(vram, layout);
    for (const ExpertStacks& layer : world.file) slots.addLayer(layer);
    ExpertAccessProfiler profiler;
    for (int32_t l = 0; l < 2; ++l) profiler.addLayer(l, kExperts);
    slots.take(size_t{1} << 20, &profiler);
    ASSERT_GT(slots.capacity(), 8);
    ExpertPrefetcher prefetcher(slots, profiler, Prefetch::Off);
    ExpertUse use;
    use.cpuRate = 1e3;
    use.busRate = 1e15;  // everything that can be is fetched
    const auto reachable = [](const uint8_t* host, size_t) { return host; };
    ExpertMisses misses(slots, prefetcher, profiler, use, Prefetch::Off, reachable, &*world.ram);
    const std::vector<int32_t> chosen = {2, 9, 4}, none = {-1, -1, -1};
    for (int pass = 0; pass < 2; ++pass) {
        slots.beginPass();
        world.ram->beginPass(1);
        // Before the second pass two of them have been read.
        const std::vector<int32_t> missed = pass == 0 ? std::vector<int32_t>{2, 9} : chosen;
        ASSERT_TRUE(world.ram->find(0, world.begins(0, missed), -1));
        ExpertOrders orders;
        misses.order(0, missed.data(), none.data(), nullptr, static_cast<int32_t>(missed.size()), orders);
        EXPECT_EQ(orders.demanded, pass == 0 ? 0 : 2);
        for (int32_t i = 0; i < orders.demanded; ++i) {
            EXPECT_NE(orders.fetch[i].expert, 4);
            world.expectBytes(0, orders.fetch[i].expert, 0, orders.fetch[i].gate);
            world.expectBytes(0, orders.fetch[i].expert, 1, orders.fetch[i].up);
            world.expectBytes(0, orders.fetch[i].expert, 2, orders.fetch[i].down);
            EXPECT_NE(orders.fetch[i].gate, world.file[0].gate.at(orders.fetch[i].expert).data) << "not from the file";
            EXPECT_GE(world.slots.tryGet(0, orders.fetch[i].expert), 0) << "the GPU still reads it";
        }
        misses.done(0, missed.data(), none.data(), nullptr, static_cast<int32_t>(missed.size()), 0, 0);
        for (const int32_t expert : missed) world.expectRead(0, expert);
    }
    // What has a slot in VRAM now needs none in RAM, from the next layer on.
    ASSERT_TRUE(world.ram->find(1, world.begins(1, {0}), -1));
    world.expectRead(1, 0);
    for (const int32_t expert : {2, 9, 4})
        EXPECT_EQ(world.slots.tryGet(0, expert) >= 0, slots.tryGet(0, expert) < 0) << "expert " << expert;
}

// A part that cannot be read is an error of that expert; the slot that it was to have is empty.
TEST(RamExperts, WhatCannotBeReadIsAnError) {
    DiskWorld world(Source(1).stacks);
    world.take(6);
    ASSERT_EQ(::truncate(world.path().c_str(), 100), 0);
    world.ram->beginPass(1);
    ASSERT_TRUE(world.ram->find(0, world.begins(0, {5}), -1));
    EXPECT_THROW(world.ram->await(5, 0), Error);
    world.ram->passFailed();
    EXPECT_EQ(world.slots.resident(), 0);
}

}  // namespace
