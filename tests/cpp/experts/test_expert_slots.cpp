// Slots for single experts: where experts are found, what may be overwritten when, landing slots, loads in the
// background and their failures. What a pass reads in a slot is compared with the file, byte by byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "expert_world.h"

namespace {

using namespace slotted;
using Preload = ExpertSlotManager::Preload;

// --- where experts are ---

TEST(ExpertSlots, ATableIsAsItWasWhenThePassBegan) {
    World world(layersOf(2));
    world.take(world.budgetFor(3));
    auto& slots = *world.slots;
    EXPECT_EQ(slots.table(), std::vector<int32_t>(16, -1));
    const uint64_t first = slots.tableVersion();
    slots.beginPass();
    world.reach(0, {5, 6});
    const auto place = slots.getOrLoad(0, 5);
    ASSERT_TRUE(place && place->fill);
    EXPECT_EQ(slots.getOrLoad(0, 5)->slot, place->slot);
    EXPECT_FALSE(slots.getOrLoad(0, 5)->fill) << "it need not be brought twice";
    EXPECT_EQ(slots.tryGet(0, 5), place->slot);
    EXPECT_EQ(slots.resident(), 1);
    EXPECT_EQ(slots.table(), std::vector<int32_t>(16, -1));
    EXPECT_EQ(slots.tableVersion(), first);
    slots.beginPass();
    EXPECT_GT(slots.tableVersion(), first);
    EXPECT_EQ(world.inTable(0, 5), place->slot);
    EXPECT_EQ(std::count(slots.table().begin(), slots.table().end(), -1), 15);
    const uint64_t second = slots.tableVersion();
    slots.beginPass();
    EXPECT_EQ(slots.tableVersion(), second) << "nothing has changed";

    // The cache is full; then an expert is evicted in the middle of a pass. The table shows it until the next pass.
    world.fill(0, {1, 2});
    slots.beginPass();
    world.use(1, {7});
    world.reach(1, {7});
    const auto taken = slots.getOrLoad(1, 7);
    ASSERT_TRUE(taken && taken->fill);
    EXPECT_EQ(taken->slot, place->slot) << "the oldest on probation";
    EXPECT_EQ(slots.tryGet(0, 5), -1);
    EXPECT_EQ(world.inTable(0, 5), place->slot);
    EXPECT_EQ(world.inTable(1, 7), -1);
    EXPECT_EQ(slots.resident(), 3);
    slots.beginPass();
    EXPECT_EQ(world.inTable(0, 5), -1);
    EXPECT_EQ(world.inTable(1, 7), place->slot);
}

// The caller writes experts that are fetched ahead into the device's table, so the table must be sent again even if it
// has not changed.
TEST(ExpertSlots, WhatCameAndWentWithinAPassChangesTheVersion) {
    World world(layersOf(3));
    world.take(world.budgetFor(1));
    auto& slots = *world.slots;
    slots.beginPass();
    const uint64_t version = slots.tableVersion();
    const std::vector<int32_t> table = slots.table();
    world.reach(0);
    ASSERT_TRUE(slots.getOrLoad(1, 4, true)->fill);
    world.reach(1);
    world.reach(2, {2});
    world.use(2, {2});
    world.slots->setLoads(&world.loads);
    EXPECT_EQ(slots.preload(2, 2), Preload::Started) << "over the one of layer 1";
    slots.beginPass();
    EXPECT_EQ(slots.table(), table);
    EXPECT_GT(slots.tableVersion(), version);
}

TEST(ExpertSlots, AskedForWhatIsNotThereSaySo) {
    World world(layersOf(2));
    expectError(ErrorKind::Internal, "before their memory", [&] { world.slots->tryGet(0, 0); });
    world.take(world.budgetFor(3));
    auto& slots = *world.slots;
    expectError(ErrorKind::Internal, "expert 8", [&] { slots.tryGet(0, 8); });
    expectError(ErrorKind::Internal, "expert -1", [&] { slots.preload(0, -1); });
    EXPECT_ANY_THROW(slots.tryGet(2, 0));
    slots.beginPass();
    expectError(ErrorKind::Internal, "layer 0", [&] { slots.getOrLoad(0, 0); });  // no layer has been reached
    world.reach(0);
    expectError(ErrorKind::Internal, "layer 1", [&] { slots.getOrLoad(1, 0); });
    expectError(ErrorKind::Internal, "layer 0", [&] { slots.getOrLoad(0, 0, true); });
    expectError(ErrorKind::Internal, "after layer 0", [&] { world.reach(0); });
    expectError(ErrorKind::Internal, "layer 2", [&] { world.reach(2); });
    MatrixStack uneven = slots.file(0).gate;
    uneven.count = 3;
    World other(layersOf(1));
    expectError(ErrorKind::Internal, "8, 3 and 8",
                [&] { other.slots->addLayer({slots.file(0).gate, uneven, slots.file(0).down}); });
}

// --- what may be overwritten ---

// Three layers, a cache that is full with one expert of each, and others that are wanted more.
class FullCache : public ::testing::Test {
protected:
    FullCache() : world(layersOf(3)), slots(*world.slots) {
        world.take(world.budgetFor(3));
        for (int32_t layer = 0; layer < 3; ++layer) {
            world.fill(layer, {1});
            for (const int32_t e : {5, 6, 7}) world.use(layer, {e}, 2);
        }
    }
    bool isHeld(int32_t layer) const { return slots.tryGet(layer, 1) >= 0; }

    World world;
    ExpertSlotManager& slots;
};

TEST_F(FullCache, LayersAheadAreNotOverwritten) {
    slots.beginPass();
    world.reach(0, {1, 5});
    EXPECT_GE(slots.getOrLoad(0, 5)->slot, 3) << "it lands: the slots hold experts of later layers, or chosen ones";
    EXPECT_FALSE(slots.getOrLoad(1, 5, true));
    EXPECT_EQ(slots.preload(0, 5), Preload::NotWorthIt);
    EXPECT_TRUE(isHeld(0) && isHeld(1) && isHeld(2));
}

TEST_F(FullCache, ALayersOwnAreIfNotChosen) {
    slots.beginPass();
    world.reach(0, {5, 6});
    EXPECT_EQ(slots.getOrLoad(0, 5)->slot, 0);
    EXPECT_FALSE(isHeld(0));
    EXPECT_GE(slots.getOrLoad(0, 6)->slot, 3) << "the only other expert that might leave came for this very layer";
    EXPECT_TRUE(isHeld(1) && isHeld(2));
}

TEST_F(FullCache, LayersBehindAreEvenIfTheyWereChosen) {
    slots.beginPass();
    world.reach(0, {1});
    world.reach(1, {1, 5, 6});
    EXPECT_EQ(slots.getOrLoad(1, 5)->slot, 0);
    EXPECT_FALSE(isHeld(0));
    EXPECT_GE(slots.getOrLoad(1, 6)->slot, 3);
    EXPECT_TRUE(isHeld(1) && isHeld(2));
}

TEST_F(FullCache, WhatCameAheadStaysUntilItsLayerIsLeft) {
    slots.beginPass();
    world.reach(0, {5});
    ASSERT_EQ(slots.getOrLoad(1, 5, true)->slot, 0);  // replaces layer 0's, which was not chosen
    EXPECT_FALSE(slots.getOrLoad(1, 6, true));
    world.reach(1, {1, 6, 7});  // a guess that was wrong
    world.use(1, {6, 7}, 5);
    EXPECT_GE(slots.getOrLoad(1, 6)->slot, 3);
    EXPECT_EQ(slots.preload(1, 7), Preload::NotWorthIt);
    EXPECT_EQ(slots.tryGet(1, 5), 0);
    world.reach(2, {6});
    world.use(2, {6}, 5);
    EXPECT_EQ(slots.getOrLoad(2, 6)->slot, 1) << "layer 1's other expert was there for longer";
    EXPECT_EQ(slots.tryGet(1, 5), 0);
    EXPECT_EQ(slots.preload(2, 6), Preload::Present);
    world.use(2, {7}, 5);
    EXPECT_EQ(slots.preload(2, 7), Preload::Started);
}

TEST_F(FullCache, NothingIsInAPassThatReportsNothing) {
    slots.beginPass();
    for (int32_t layer = 0; layer < 3; ++layer) {
        EXPECT_EQ(slots.preload(layer, 5), Preload::NotWorthIt);
        EXPECT_FALSE(slots.getOrLoad(layer, 5, true));
    }
    EXPECT_TRUE(isHeld(0) && isHeld(1) && isHeld(2));
}

TEST_F(FullCache, AfterAPassWhatItsLastLayerDidNotChooseIs) {
    slots.beginPass();
    for (int32_t layer = 0; layer < 3; ++layer) world.reach(layer, {1});
    EXPECT_EQ(slots.preload(0, 5), Preload::Started);
    EXPECT_EQ(slots.preload(2, 5), Preload::Started);
    EXPECT_EQ(slots.preload(1, 5), Preload::NotWorthIt);
    EXPECT_TRUE(!isHeld(0) && !isHeld(1) && isHeld(2));
}

TEST_F(FullCache, NothingIsForWhatIsUsedNoMoreOften) {
    for (int32_t layer = 0; layer < 3; ++layer) world.use(layer, {1}, 2);
    slots.beginPass();
    world.reach(2, {5, 6});
    EXPECT_GE(slots.getOrLoad(2, 5)->slot, 3) << "used as often";
    EXPECT_EQ(slots.preload(2, 5), Preload::NotWorthIt);
    slots.addUses(2, 5, 0.5f);
    EXPECT_EQ(slots.preload(2, 5), Preload::Started);
}

TEST(ExpertSlots, FreeOnesAreFilledAtAnyTime) {
    World world(layersOf(3));
    world.take(world.budgetFor(4));
    auto& slots = *world.slots;
    slots.beginPass();
    EXPECT_EQ(slots.preload(2, 0), Preload::Started);  // in a pass that reports nothing, never used before
    EXPECT_TRUE(slots.getOrLoad(0, 0, true)->fill);
    world.reach(1, {3});
    EXPECT_TRUE(slots.getOrLoad(2, 1, true)->fill);
    EXPECT_TRUE(slots.getOrLoad(1, 3)->fill);
    EXPECT_EQ(slots.resident(), 3);
    EXPECT_GE(slots.getOrLoad(1, 4)->slot, 4);
}

TEST(ExpertSlots, ALandingPlaceIsGivenOnceALayer) {
    World world(layersOf(2, 80));
    auto& slots = *world.slots;
    world.take(slots.pools()[0].slotBytes * 64);
    ASSERT_EQ(slots.capacity(), 56);
    std::vector<int32_t> chosen(70);
    std::iota(chosen.begin(), chosen.end(), 0);
    for (int pass = 0; pass < 2; ++pass) {
        slots.beginPass();
        for (int32_t layer = 0; layer < 2; ++layer) {
            world.reach(layer, chosen);
            for (int32_t e = 14; layer == 0 && pass == 0 && e < 70; ++e) {
                ASSERT_LT(slots.getOrLoad(0, e)->slot, 56);
                world.use(0, {e}, 5);
            }
            std::set<int32_t> places;
            for (int32_t e = 0; e < 8; ++e) {
                const auto place = slots.getOrLoad(layer, e);
                ASSERT_TRUE(place && place->fill);
                EXPECT_TRUE(place->slot >= 56 && place->slot < 64) << place->slot;
                places.insert(place->slot);
                const auto again = slots.getOrLoad(layer, e);
                EXPECT_TRUE(again && !again->fill && again->slot == place->slot) << "it has landed already";
                EXPECT_EQ(slots.tryGet(layer, e), -1) << "it will not stay";
            }
            EXPECT_EQ(places.size(), 8u);
            EXPECT_FALSE(slots.getOrLoad(layer, 8));
            if (layer == 0) {
                EXPECT_FALSE(slots.getOrLoad(1, 3, true)) << "nothing lands ahead";
            }
        }
    }
    EXPECT_EQ(slots.resident(), 56);
}

// A pass that was given up may not have fetched what it was to fetch.
TEST_F(FullCache, WhatAFailedPassWasToBringIsNotThere) {
    slots.beginPass();
    const uint64_t version = slots.tableVersion();
    world.reach(0, {5});
    ASSERT_EQ(slots.getOrLoad(0, 5)->slot, 0);
    world.reach(1, {6});
    ASSERT_EQ(slots.getOrLoad(1, 6)->slot, 1);
    world.use(2, {6});
    ASSERT_EQ(slots.getOrLoad(2, 6, true)->slot, 0) << "over what came in layer 0";
    slots.passFailed();
    EXPECT_EQ(slots.resident(), 1);
    for (const auto& [layer, expert] :
         std::vector<std::pair<int32_t, int32_t>>{{0, 1}, {0, 5}, {1, 1}, {1, 6}, {2, 6}}) {
        EXPECT_EQ(slots.tryGet(layer, expert), -1) << layer << ", " << expert;
        EXPECT_EQ(world.inTable(layer, expert), -1);
    }
    EXPECT_GT(slots.tableVersion(), version);
    EXPECT_EQ(world.inTable(2, 1), 2);
    EXPECT_EQ(slots.preload(0, 5), Preload::Started);
    EXPECT_EQ(slots.preload(1, 6), Preload::Started);
    EXPECT_EQ(slots.preload(2, 6), Preload::NotWorthIt) << "until a pass reports its layers";
    world.loads.arrive(2);
    slots.beginPass();
    EXPECT_TRUE(world.isThere(0, 5, world.inTable(0, 5)) && world.isThere(1, 6, world.inTable(1, 6)) &&
                world.isThere(2, 1, 2));
    slots.passFailed();
    EXPECT_EQ(slots.resident(), 3) << "loads in the background do not belong to a pass";
}

// --- loads ---

TEST(ExpertSlots, LoadsAreFoundFromTheNextPassOn) {
    World world(layersOf(2));
    world.take(world.budgetFor(10));
    auto& slots = *world.slots;
    slots.beginPass();
    EXPECT_EQ(slots.preload(0, 2), Preload::Started);
    EXPECT_EQ(slots.preload(0, 2), Preload::Present) << "it is on its way";
    EXPECT_EQ(slots.preload(1, 2), Preload::Started);
    EXPECT_EQ(slots.preload(1, 3), Preload::Started);
    EXPECT_EQ(world.loads.asked, 0) << "the device is not asked before it must be";
    EXPECT_EQ(slots.preload(1, 4), Preload::Busy) << "three at once";
    world.loads.arrive(1);
    EXPECT_EQ(slots.preload(1, 4), Preload::Started);
    EXPECT_EQ(slots.preload(1, 5), Preload::Busy);
    EXPECT_EQ(slots.tryGet(0, 2), -1) << "this pass must not find it";
    world.reach(0, {2});
    const auto landing = slots.getOrLoad(0, 2);
    EXPECT_TRUE(landing && landing->fill && landing->slot >= 10) << "and gets no second slot for it";
    EXPECT_FALSE(slots.getOrLoad(1, 2, true));
    EXPECT_EQ(slots.resident(), 0);
    world.loads.arrive(1);
    slots.beginPass();
    EXPECT_EQ(slots.resident(), 2);
    EXPECT_TRUE(world.isThere(0, 2, world.inTable(0, 2)) && world.isThere(1, 2, world.inTable(1, 2)));
    EXPECT_EQ(slots.tryGet(1, 2), world.inTable(1, 2));
    EXPECT_EQ(world.inTable(1, 3), -1);
    EXPECT_EQ(slots.preload(0, 2), Preload::Present);
    world.loads.arrive(2);
    slots.beginPass();
    EXPECT_EQ(slots.resident(), 4);
    EXPECT_TRUE(world.isThere(1, 3, world.inTable(1, 3)) && world.isThere(1, 4, world.inTable(1, 4)));
}

TEST(ExpertSlots, WhatIsBeingLoadedIsDrivenOutByNobody) {
    World world(layersOf(2));
    world.take(world.budgetFor(2));
    auto& slots = *world.slots;
    slots.beginPass();
    ASSERT_EQ(slots.preload(0, 0), Preload::Started);
    ASSERT_EQ(slots.preload(0, 1), Preload::Started);
    world.use(1, {4, 5}, 3);
    world.reach(0);
    world.reach(1, {4});
    EXPECT_GE(slots.getOrLoad(1, 4)->slot, 2);
    EXPECT_EQ(slots.preload(1, 5), Preload::NotWorthIt);
    world.loads.arrive(2);
    EXPECT_GE(slots.getOrLoad(1, 4)->slot, 2) << "it gets no second slot before the passes find it";
    EXPECT_EQ(slots.preload(1, 5), Preload::NotWorthIt);
    slots.beginPass();
    world.reach(1, {4});
    EXPECT_LT(slots.getOrLoad(1, 4)->slot, 2);
}

// The expert that a failed load was to replace may be overwritten in part: it is gone, and no other is.
TEST_F(FullCache, ALoadThatCannotStartLeavesItsSlotFree) {
    slots.beginPass();
    for (int32_t layer = 0; layer < 3; ++layer) world.reach(layer);
    const std::vector<int32_t> table = slots.table();
    for (int n = 0; n < 3; ++n) {
        world.loads.failStart = 1;
        expectError(ErrorKind::Internal, "cannot start", [&] { slots.preload(0, 5); });
        EXPECT_EQ(isHeld(0) + isHeld(1) + isHeld(2), 2);
    }
    slots.beginPass();
    int gone = 0;
    for (size_t i = 0; i < table.size(); ++i) {
        if (slots.table()[i] == table[i]) continue;
        EXPECT_EQ(slots.table()[i], -1);
        ++gone;
    }
    EXPECT_EQ(gone, 1);
    for (int32_t layer = 0; layer < 3; ++layer) {
        world.reach(layer);
        if (world.inTable(layer, 1) < 0) continue;
        EXPECT_TRUE(world.isThere(layer, 1, world.inTable(layer, 1)));
    }
    for (const int32_t layer : {0, 1, 2}) EXPECT_EQ(slots.preload(layer, 5), Preload::Started);
    world.loads.arrive(3);
    slots.beginPass();
    for (const int32_t layer : {0, 1, 2}) EXPECT_TRUE(world.isThere(layer, 5, world.inTable(layer, 5)));
}

TEST(ExpertSlots, AFailedDeviceLosesWhatIsOnItsWayAndNoMore) {
    for (const bool inPreload : {false, true}) {
        World world(layersOf(2));
        world.take(world.budgetFor(4));
        auto& slots = *world.slots;
        world.fill(0, {7});
        ASSERT_EQ(slots.preload(0, 0), Preload::Started);
        ASSERT_EQ(slots.preload(0, 1), Preload::Started);
        ASSERT_EQ(slots.preload(0, 2), Preload::Started);
        world.loads.arrive(1);
        world.loads.failFinished = true;
        const int settled = world.loads.settled;
        expectError(ErrorKind::Internal, "has failed", [&] {
            if (inPreload) slots.preload(0, 3);
            else slots.beginPass();
        });
        EXPECT_EQ(world.loads.settled, settled + 1) << "they must not write to slots that are free";
        EXPECT_EQ(slots.resident(), 1);
        EXPECT_EQ(slots.tryGet(0, 0), -1);
        slots.beginPass();
        EXPECT_EQ(std::count(slots.table().begin(), slots.table().end(), -1), 15);
        EXPECT_TRUE(world.isThere(0, 7, world.inTable(0, 7)));
        for (const int32_t e : {0, 3, 2}) EXPECT_EQ(slots.preload(0, e), Preload::Started) << e;
        world.loads.arrive(3);
        slots.beginPass();
        for (const int32_t e : {0, 2, 3, 7}) EXPECT_TRUE(world.isThere(0, e, world.inTable(0, e))) << e;
        EXPECT_EQ(world.inTable(0, 1), -1);
    }
}

TEST(ExpertSlots, WithoutLoadsNothingIsOnItsWay) {
    World world(layersOf(1));
    world.take(world.budgetFor(4));
    auto& slots = *world.slots;
    ASSERT_EQ(slots.preload(0, 0), Preload::Started);
    slots.setLoads(nullptr);
    EXPECT_EQ(world.loads.running(), 0u) << "it has been waited for";
    EXPECT_EQ(slots.preload(0, 0), Preload::NotWorthIt);
    slots.beginPass();
    EXPECT_EQ(slots.resident(), 0);
    TestLoads others;
    slots.setLoads(&others);
    for (const int32_t e : {0, 1, 2}) EXPECT_EQ(slots.preload(0, e), Preload::Started);
    others.arrive(2);
    EXPECT_EQ(slots.preload(0, 3), Preload::Started) << "their numbers begin anew";
    slots.beginPass();
    EXPECT_EQ(slots.resident(), 2);
    slots.setLoads(nullptr);
}

TEST(ExpertSlots, TellWhatCameAndWent) {
    ExpertAccessProfiler profiler;
    World world(layersOf(2));
    for (int32_t layer = 0; layer < 2; ++layer) ASSERT_EQ(profiler.addLayer(10 + layer, 8), layer);
    world.take(world.budgetFor(2), &profiler);
    auto& slots = *world.slots;
    slots.beginPass();
    ASSERT_EQ(slots.preload(1, 3), Preload::Started);
    world.reach(0, {6, 7});
    ASSERT_EQ(slots.getOrLoad(0, 6)->slot, 1);
    ASSERT_GE(slots.getOrLoad(0, 7)->slot, 2);  // lands: no load
    ExpertCounts counts = profiler.counts();
    EXPECT_EQ(counts.loads.at(6), 1u);
    EXPECT_EQ(counts.loads.at(8 + 3), 0u) << "not before it is there";
    world.loads.arrive();
    slots.beginPass();
    EXPECT_EQ(profiler.counts().loads.at(8 + 3), 1u);
    world.use(1, {2});
    world.reach(1, {2});
    ASSERT_EQ(slots.getOrLoad(1, 2)->slot, 1);
    counts = profiler.counts();
    std::vector<uint64_t> loads(16), evictions(16);
    loads[6] = loads[8 + 3] = loads[8 + 2] = evictions[6] = 1;
    EXPECT_EQ(counts.loads, loads);
    EXPECT_EQ(counts.evictions, evictions);
}

}  // namespace
