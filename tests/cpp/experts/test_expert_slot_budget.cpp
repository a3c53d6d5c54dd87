// How a budget becomes slots for experts: each pool's part is in proportion to what its experts take, less than a slot
// a pool is wasted, and landing slots come off first; and what happens if memory is short.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "expert_world.h"
#include "seed.h"

namespace {

using namespace slotted;
using Preload = ExpertSlotManager::Preload;

// Four sizes of slots; two layers of different types have slots of the same size.
std::vector<LayerShape> randomLayers(std::mt19937& random, int count) {
    std::vector<LayerShape> layers(static_cast<size_t>(count));
    for (LayerShape& layer : layers) {
        const unsigned kind = random() % 5;
        if (kind == 1) layer.types = {DType::Q8_0, DType::Q4_0, DType::F32};
        if (kind == 2) layer.types = {DType::Q4_0, DType::Q8_0, DType::F32};
        if (kind == 3) layer.hidden = 96;
        if (kind == 4) layer.embedding = 416;
        layer.experts = 1 + static_cast<int32_t>(random() % 24);
    }
    return layers;
}

// The three matrices of each slot lie in order and overlap nothing.
void expectApart(const ExpertSlotManager& slots) {
    std::map<uintptr_t, uintptr_t> ranges;
    std::set<const uint8_t*> seen;
    for (int32_t layer = 0; layer < slots.layers(); ++layer) {
        const ExpertStacks stacks = slots.slots(layer);
        for (int32_t s = 0; s < stacks.gate.count; ++s) {
            const auto parts = expertAt(stacks, s), file = expertAt(slots.file(layer), 0);
            ASSERT_LT(parts[0].data, parts[1].data);
            ASSERT_LT(parts[1].data, parts[2].data);
            for (size_t i = 0; i < 3; ++i) {
                ASSERT_TRUE(parts[i].type == file[i].type && parts[i].rows == file[i].rows &&
                            parts[i].cols == file[i].cols);
                ASSERT_EQ(reinterpret_cast<uintptr_t>(parts[i].data) % Allocator::kAlignment, 0u);
                std::memset(bytesOf(parts[i]), 1,
                            deviceBytes(parts[i]));  // a fault, or a sanitizer's, if it is not there
            }
            const auto begin = reinterpret_cast<uintptr_t>(parts[0].data),
                       end = reinterpret_cast<uintptr_t>(parts[2].data) + deviceBytes(parts[2]);
            if (seen.insert(parts[0].data).second) ranges[begin] = end;
            else ranges[begin] = std::max(ranges[begin], end);
        }
    }
    uintptr_t last = 0;
    for (const auto& [begin, end] : ranges) {
        ASSERT_LE(last, begin) << "two slots overlap";
        last = end;
    }
}

TEST(ExpertSlots, CutABudgetByWhatAllExpertsTake) {
    std::mt19937 random(sharpi::testSeed(11));
    for (int round = 0; round < 20; ++round) {
        const std::vector<LayerShape> layers = randomLayers(random, 1 + static_cast<int>(random() % 12));
        size_t all = 0, least = SIZE_MAX;
        {
            const World world(layers);
            for (const auto& pool : world.slots->pools()) {
                all += pool.slotBytes * static_cast<size_t>(pool.experts);
                least = std::min(least, pool.slotBytes);
            }
        }
        for (int tenth = 0; tenth <= 11; ++tenth) {
            SCOPED_TRACE("round " + std::to_string(round) + ", tenth " + std::to_string(tenth));
            World world(layers);
            const size_t budget = budgetLeaving(*world.slots, all) * static_cast<size_t>(tenth) / 10 + random() % 3;
            const size_t landing = landingBytes(*world.slots, budget);
            const std::vector<size_t> landingOf = landingSlots(*world.slots, budget);
            world.take(budget);
            const bool any = budget >= landing + least;
            const double part =
                any ? std::min(1.0, static_cast<double>(budget - landing) / static_cast<double>(all)) : 0;
            size_t taken = 0, couldGrow = SIZE_MAX, number = 0;
            int64_t capacity = 0;
            for (const auto& pool : world.slots->pools()) {
                taken += pool.slotBytes * static_cast<size_t>(pool.capacity + pool.landing);
                capacity += pool.capacity;
                EXPECT_EQ(static_cast<size_t>(pool.landing), any ? landingOf[number] : 0);
                ++number;
                EXPECT_LE(pool.capacity, pool.experts);
                EXPECT_GT(pool.capacity, part * static_cast<double>(pool.experts) - 1) << "less than its part";
                if (pool.capacity < pool.experts) couldGrow = std::min(couldGrow, pool.slotBytes);
            }
            EXPECT_EQ(world.slots->capacity(), capacity);
            EXPECT_EQ(world.slots->bytes(), taken);
            EXPECT_EQ(world.allocator.held(), taken);
            EXPECT_LE(taken, budget);
            if (any && couldGrow < SIZE_MAX) {
                EXPECT_LT(budget - taken, couldGrow) << "a slot more would have fitted";
            }
            if (taken > 0) {
                EXPECT_EQ(world.allocator.holdings().at(0).name, "expert slots");
            }
            for (int32_t layer = 0; layer < world.slots->layers(); ++layer) {
                EXPECT_EQ(world.slots->slots(layer).down.count > 0, any);
            }
            expectApart(*world.slots);
        }
    }
}

TEST(ExpertSlots, OfTwoSizesGetTheirPartsAndWhatIsOver) {
    LayerShape small, large;
    small.experts = 30;
    large.experts = 10;
    large.hidden = 64;  // slots of twice the bytes
    World world({small, large, small});
    const auto pools = world.slots->pools();
    ASSERT_EQ(pools.size(), 2u);
    ASSERT_EQ(pools[0].layers, 2);
    ASSERT_EQ(pools[0].experts, 60);
    ASSERT_EQ(pools[1].experts, 10);
    const size_t one = pools[0].slotBytes, other = pools[1].slotBytes;
    ASSERT_TRUE(other > one && other < 2 * one + 1024);
    // A quarter: 15 and 2.5 slots; the rest is too small for half of a large one, but not for small ones.
    world.take(budgetLeaving(*world.slots, one * 15 + other * 5 / 2));
    const size_t over = other / 2 / one;
    EXPECT_EQ(world.slots->pools()[0].capacity, 15 + static_cast<int32_t>(over));
    EXPECT_EQ(world.slots->pools()[1].capacity, 2);
}

TEST(ExpertSlots, WhatRoundingTookMostFromGetsASlotMoreFirst) {
    for (const bool swapped : {false, true}) {
        LayerShape some, others;
        some.experts = 30;
        others.experts = 10;
        others.types[0] = DType::Q8_0;
        World world(swapped ? std::vector<LayerShape>{others, some} : std::vector<LayerShape>{some, others});
        size_t all = 0;
        for (const auto& pool : world.slots->pools()) all += pool.slotBytes * static_cast<size_t>(pool.experts);
        world.take(budgetLeaving(*world.slots, all * 29 / 100));  // 8.7 and 2.9 slots
        const auto pools = world.slots->pools();
        ASSERT_EQ(pools.size(), 2u);
        EXPECT_EQ(pools[swapped].capacity, 8);
        EXPECT_EQ(pools[!swapped].capacity, 3);
    }
}

TEST(ExpertSlots, TooFewForLandingPlacesAreNone) {
    World enough(layersOf(2)), tooFew(layersOf(2)), none(layersOf(2));
    enough.take(enough.budgetFor(1));
    tooFew.take(tooFew.budgetFor(1) - 1);
    none.take(0);
    EXPECT_EQ(enough.slots->capacity(), 1);
    for (World* world : {&tooFew, &none}) {
        EXPECT_EQ(world->slots->capacity(), 0);
        EXPECT_EQ(world->slots->bytes(), 0u);
        EXPECT_EQ(world->allocator.taken(), 0u);
        EXPECT_EQ(world->slots->table(), std::vector<int32_t>(16, -1));
        world->slots->beginPass();
        world->reach(0, {1});
        EXPECT_FALSE(world->slots->getOrLoad(0, 1));
        EXPECT_FALSE(world->slots->getOrLoad(1, 1, true));
        EXPECT_EQ(world->slots->tryGet(0, 1), -1);
        EXPECT_EQ(world->slots->preload(0, 1), Preload::NotWorthIt);
        world->use(0, {1, 1});
        EXPECT_EQ(world->slots->resident(), 0);
    }
}

TEST(ExpertSlots, LandingPlacesGoByTheirBytes) {
    DeviceLayout huge;  // nothing is touched: an allocator that takes no memory is not needed for this
    huge.bytes = [](const Matrix& m) { return static_cast<size_t>(m.rows) << 20; };
    for (const auto& [rows, landing] :
         std::vector<std::pair<int64_t, int32_t>>{{1, 8}, {2, 8}, {3, 7}, {10, 2}, {21, 1}, {22, 1}, {500, 1}}) {
        FakeDevice device(size_t{1} << 34);
        Allocator allocator(device);
        ExpertSlotManager slots(allocator, huge);
        const MatrixStack stack{{DType::F32, rows, 32, nullptr}, 128, 80};
        slots.addLayer({stack, stack, stack});
        slots.take(size_t{1} << 33, nullptr);
        EXPECT_EQ(slots.pools()[0].landing, landing) << rows;
        EXPECT_EQ(slots.pools()[0].capacity, std::min<int64_t>(80, 8192 / (3 * rows) - landing));
        EXPECT_EQ(slots.slots(0).gate.count, slots.pools()[0].capacity + landing);
    }
}

TEST(ExpertSlots, LandingPlacesLeaveASmallCacheMostOfIt) {
    for (const auto& [slots, landing] : std::vector<std::pair<int32_t, int32_t>>{
             {2, 1}, {15, 1}, {16, 2}, {23, 2}, {24, 3}, {63, 7}, {64, 8}, {90, 8}}) {
        World world(layersOf(2, 50));
        world.take(world.slots->pools()[0].slotBytes * static_cast<size_t>(slots));
        EXPECT_EQ(world.slots->pools()[0].landing, landing) << slots;
        EXPECT_EQ(world.slots->pools()[0].capacity, slots - landing);
    }
}

// A landing slot for each row of a step, as long as these are no more than one for each 64 slots.
TEST(ExpertSlots, LargeCachesHaveLandingPlacesForManyRows) {
    DeviceLayout layout;
    layout.bytes = [](const Matrix&) { return size_t{4096}; };
    struct Case {
        int32_t slots;
        int64_t rows;
        int32_t landing;
    };
    for (const auto& [slots, rows, landing] : std::vector<Case>{{60, 64, 7},
                                                                {500, 64, 8},
                                                                {575, 64, 8},
                                                                {576, 64, 9},
                                                                {4000, 1, 8},
                                                                {4000, 8, 8},
                                                                {4000, 9, 9},
                                                                {4000, 64, 62},
                                                                {4096, 64, 64},
                                                                {13000, 64, 64},
                                                                {13000, 200, 64}}) {
        FakeDevice device(size_t{1} << 30);
        Allocator allocator(device);
        ExpertSlotManager world(allocator, layout);
        const MatrixStack stack{{DType::F32, 1, 32, nullptr}, 128, 14000};
        world.addLayer({stack, stack, stack});
        world.take({static_cast<size_t>(slots) * 3 * 4096, rows}, nullptr);
        EXPECT_EQ(world.pools()[0].landing, landing) << slots << " slots, " << rows << " rows";
        EXPECT_EQ(world.pools()[0].capacity, slots - landing);
    }
}

TEST(ExpertSlots, TakeNothingWhereMemoryIsShort) {
    const size_t budget = World(layersOf(3)).budgetFor(20);
    for (int fail = 0; fail < 3; ++fail) {
        World world(layersOf(3), fail == 0 ? budget / 2 / 4096 * 4096 : size_t{1} << 30);
        const auto tooMuch = [&] { world.slots->take(budget, nullptr); };
        if (fail > 0) world.device.failCommit(fail);
        const int commits = world.device.commits();
        expectError(ErrorKind::OutOfMemory, "expert slots", tooMuch);
        EXPECT_EQ(world.allocator.held(), 0u);
        EXPECT_EQ(world.allocator.taken(), 0u);
        EXPECT_EQ(world.slots->bytes(), 0u);
        world.device.failCommit(0);
        if (fail > 0) {
            EXPECT_EQ(world.device.commits(), commits + fail) << "nothing failed";
        }
        world.take(budget / 3);
        EXPECT_GT(world.slots->capacity(), 0);
        EXPECT_EQ(world.allocator.held(), world.slots->bytes());
        world.fill(1, {3});
        EXPECT_TRUE(world.isThere(1, 3, world.slots->tryGet(1, 3)));
        expectError(ErrorKind::Internal, "cannot grow", [&] { world.slots->take(budget, nullptr); });
        expectError(ErrorKind::Internal, "taken", [&] { world.slots->addLayer(world.slots->file(0)); });
    }
}

}  // namespace
