// Which of the experts that a step misses are fetched, into which slots, and what is learned when a layer is done: with
// the real slots in a fake device's memory. expert_steps.h checks every order.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "expert_steps.h"
#include "seed.h"

namespace {

using namespace slotted;

// --- orders ---

TEST(ExpertMisses, EachMissedExpertIsFetchedOnce) {
    Steps steps(layersOf(1, 16), 8, kBusOnly);
    steps.begin();
    const auto first = steps.layer(0, {5, 9, 5, 2, 9, 9});
    EXPECT_EQ(first.demanded, 3);
    EXPECT_EQ(first.ahead, 0);
    EXPECT_EQ(steps.misses->takeFetched(), 3);
    EXPECT_EQ(steps.misses->takeFetched(), 0);
    steps.begin();
    const auto second = steps.layer(0, {5, 7, 2, 7, 5, 9});
    ASSERT_EQ(second.demanded, 1);
    EXPECT_EQ(second.fetch[0].expert, 7);
    EXPECT_EQ(steps.misses->takeFetched(), 1);
    steps.begin();
    steps.layer(0, {7, 7, 2});
    EXPECT_EQ(steps.missed, 0);
    EXPECT_EQ(steps.misses->takeFetched(), 0);
}

TEST(ExpertMisses, FetchedOfAllLayersIsCounted) {
    Steps steps(layersOf(3, 16), 24, kBusOnly);
    steps.begin();
    steps.layer(0, {5, 9});
    steps.layer(1, {1, 2, 3});
    steps.layer(2, {4});
    EXPECT_EQ(steps.misses->takeFetched(), 6);
}

// Experts that the CPU computes are not fetched. Each missed expert is shared once, however many rows chose it, and no
// other expert is.
TEST(ExpertMisses, OrdersWhatSharesSay) {
    std::mt19937 random(sharpi::testSeed(9));
    std::set<int32_t> found;
    for (const double busRate : {1e8, 3e8, 1e9, 3e9}) {
        Steps steps(layersOf(1, 60), 60, {1e8, busRate});
        List all(60);
        for (int32_t e = 0; e < 60; ++e) all[static_cast<size_t>(e)] = e;
        std::shuffle(all.begin(), all.end(), random);
        for (size_t at = 0, count = 1; at + count <= all.size(); at += count++) {
            steps.begin();
            List chosen(all.begin() + static_cast<std::ptrdiff_t>(at),
                        all.begin() + static_cast<std::ptrdiff_t>(at + count));
            for (int32_t e = 0; e < 60; ++e) {
                if (steps.onDevice(0, e) >= 0) chosen.push_back(e);
            }
            for (size_t i = 0; i < 2 * count; ++i) chosen.push_back(chosen[i % count]);
            std::shuffle(chosen.begin(), chosen.end(), random);
            const int32_t wanted = steps.misses->share(static_cast<int32_t>(count), steps.world.slots->expertBytes(0));
            EXPECT_EQ(steps.layer(0, chosen).demanded, wanted) << count << " missed";
            found.insert(wanted);
        }
    }
    EXPECT_GE(found.size(), 5u);
}

// The share depends on the size of the layer's own experts.
TEST(ExpertMisses, LayersOfLargeExpertsAreSharedOtherwise) {
    std::vector<LayerShape> shapes = layersOf(2, 16);
    shapes[1].hidden = 1024;
    Steps steps(shapes, 16, {1e12, 1e9});
    const auto& slots = *steps.world.slots;
    const auto share = [&](int32_t layer) { return steps.misses->share(8, slots.expertBytes(layer), 8); };
    const int32_t small = share(0), large = share(1);
    EXPECT_EQ(small, large) << "the profile's CPU is so fast that it computes both";
    for (int i = 0; i < 3000; ++i) {
        steps.begin();
        const size_t bytes = slots.expertBytes(0) * (1 + static_cast<size_t>(i) % 8);
        steps.layer(0, List(8, 0), nullptr, bytes, static_cast<double>(bytes) / 1e9);
    }
    const int32_t now[] = {share(0), share(1)};
    ASSERT_LT(now[0], now[1]);
    steps.begin();
    EXPECT_EQ(steps.layer(0, {8, 9, 10, 11, 12, 13, 14, 15}).demanded, now[0]);
    EXPECT_EQ(steps.layer(1, {8, 9, 10, 11, 12, 13, 14, 15}).demanded, now[1]);
}

TEST(ExpertMisses, OnlyWhatTheGpuCanReadIsFetched) {
    for (size_t matrix = 0; matrix < 3; ++matrix) {
        Steps steps(layersOf(1, 16), 8, kBusOnly);
        steps.hide(0, 3, matrix);
        steps.hide(0, 4, (matrix + 1) % 3);
        steps.begin();
        const auto orders = steps.layer(0, {3, 1, 4, 2});
        ASSERT_EQ(orders.demanded, 2);
        EXPECT_EQ(std::set<int32_t>({orders.fetch[0].expert, orders.fetch[1].expert}), std::set<int32_t>({1, 2}));
        for (const int32_t expert : {3, 4})
            EXPECT_LT(steps.world.slots->tryGet(0, expert), 0) << "nobody fills its slot";
        EXPECT_EQ(steps.world.slots->resident(), 2);
    }
}

// Experts are fetched into slots of the cache while any may be overwritten, then into landing slots, then not at all.
TEST(ExpertMisses, OrdersWhatThereIsRoomFor) {
    Steps steps(layersOf(2, 16), 3, kBusOnly);
    const auto pool = steps.world.slots->pools().at(0);
    ASSERT_EQ(pool.capacity, 3);
    const List chosen = {8, 9, 10, 11, 12, 13, 14, 15};
    ASSERT_LT(static_cast<size_t>(pool.capacity + pool.landing), chosen.size());
    for (int pass = 0; pass < 2; ++pass) {
        steps.begin();
        const auto first = steps.layer(0, chosen), second = steps.layer(1, chosen);
        // The three experts that the first pass fetched are worth as much as those that would replace them.
        EXPECT_EQ(first.demanded, pass == 0 ? 3 + pool.landing : pool.landing);
        EXPECT_EQ(second.demanded, pool.landing) << "each layer hands the landing slots out again";
        for (int32_t i = 0; i < second.demanded; ++i) EXPECT_GE(second.fetch[i].slot, pool.capacity);
    }
}

// The CPU's time grows with an expert's pairs, the GPU's hardly.
TEST(ExpertMisses, TheGpuFetchesTheExpertsOfTheMostPairs) {
    Steps steps(layersOf(1, 16), 8, {1e9, 1e9});
    steps.begin();
    const List chosen = {5, 1, 9, 1, 4, 9, 7, 9, 12, 4, 3, 1};
    const int32_t wanted = steps.misses->share(7, steps.world.slots->expertBytes(0));
    const auto orders = steps.layer(0, chosen);
    ASSERT_GT(wanted, 2);
    ASSERT_LT(wanted, 7);
    ASSERT_EQ(orders.demanded, wanted);
    const List byPairs = {1, 9, 4, 5, 7, 12, 3};  // equal ones as they come
    for (int32_t i = 0; i < wanted; ++i) EXPECT_EQ(orders.fetch[i].expert, byPairs[static_cast<size_t>(i)]) << i;
}

TEST(ExpertMisses, OrdersNothingWithoutSlots) {
    World empty(layersOf(2, 16));
    empty.take(0);
    ExpertAccessProfiler profiler;
    for (int32_t i = 0; i < 2; ++i) profiler.addLayer(i, 16);
    ExpertPrefetcher prefetcher(*empty.slots, profiler, Prefetch::NextLayer);
    ExpertUse use;
    use.cpuRate = kBusOnly.cpu;
    use.busRate = kBusOnly.bus;
    ExpertMisses misses(*empty.slots, prefetcher, profiler, use, Prefetch::NextLayer,
                        [](const uint8_t* file, size_t) { return file; });
    empty.slots->beginPass();
    const List chosen = {1, 2, 1, 3}, slot(4, -1), predicted = {4, 5, 6, 7};
    ExpertOrders orders;
    misses.order(0, chosen.data(), slot.data(), predicted.data(), 4, orders);
    EXPECT_EQ(orders.demanded, 0);
    EXPECT_EQ(orders.ahead, 0);
    EXPECT_EQ(misses.takeFetched(), 0);
    misses.done(0, chosen.data(), slot.data(), predicted.data(), 4, 1, 1);
    EXPECT_EQ(profiler.counts().computed, (std::vector<uint64_t>{0, 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  //
                                                                 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
}

// An expert that a load is bringing gets no second slot.
TEST(ExpertMisses, WhatIsOnItsWayLandsAtMost) {
    Steps steps(layersOf(1, 16), 4, kBusOnly);
    steps.prefetcher->fill({{0, 3}});
    steps.begin();
    ASSERT_EQ(steps.world.loads.running(), 1u);
    const auto orders = steps.layer(0, {3, 5});
    ASSERT_EQ(orders.demanded, 2);
    EXPECT_EQ(orders.fetch[0].expert, 3);
    EXPECT_GE(orders.fetch[0].slot, steps.world.slots->pools().at(0).capacity);
    EXPECT_LT(orders.fetch[1].slot, steps.world.slots->pools().at(0).capacity);
    steps.world.loads.arrive();
    steps.begin();
    steps.layer(0, {3, 5});
    EXPECT_EQ(steps.missed, 0);
}

// The slots are told of the layer, so that its experts stay, and those of earlier layers may leave.
TEST(ExpertMisses, SlotsHearWhereThePassIs) {
    for (const bool misses : {false, true}) {
        Steps steps(layersOf(3, 16), 4, kBusOnly);
        steps.begin();
        steps.layer(0, {0, 1, 2, 3});
        steps.begin();
        if (misses) steps.hide(0, 9, 0);
        steps.layer(0, misses ? List{0, 1, 2, 9} : List{0, 1, 2, 1});
        EXPECT_EQ(steps.missed, misses ? 1 : 0);
        const auto& slots = steps.world.slots;
        for (int i = 0; i < 5; ++i) {
            for (int32_t e = 0; e < 4; ++e) slots->addUses(0, 10 + e, 1);
        }
        const auto place = slots->getOrLoad(0, 10);  // throws if they were told of another layer
        ASSERT_TRUE(place && place->fill);
        EXPECT_LT(slots->tryGet(0, 3), 0) << "the only one that was not chosen";
        const auto landing = slots->getOrLoad(0, 11);
        ASSERT_TRUE(landing);
        EXPECT_GE(landing->slot, slots->pools().at(0).capacity) << "all others are in use";
        EXPECT_THROW(slots->reached(0, nullptr, 0), Error);
    }
}

// --- ahead ---

TEST(ExpertMisses, OrdersAheadWhereThatIsWanted) {
    const List predicted = {4, 5, 4, 6, 7, 8};
    for (const Prefetch mode : {Prefetch::Off, Prefetch::Count, Prefetch::NextToken, Prefetch::NextLayer}) {
        Steps steps(layersOf(2, 16), 20, kBusOnly, mode);
        steps.begin();
        const auto orders = steps.layer(0, {1, 2, 1, 3, 2, 3}, &predicted);
        EXPECT_EQ(orders.demanded, 3);
        if (mode != Prefetch::NextLayer) {
            EXPECT_EQ(orders.ahead, 0);
            EXPECT_EQ(steps.misses->takeFetched(), 3);
            continue;
        }
        ASSERT_EQ(orders.ahead, ExpertMisses::kMostAhead);
        EXPECT_EQ(orders.aheadFetch[0].expert, 4);
        EXPECT_EQ(orders.aheadFetch[1].expert, 5);
        EXPECT_EQ(steps.misses->takeFetched(), 3 + ExpertMisses::kMostAhead) << "these used the bus too";
        const auto next = steps.layer(1, {4, 5, 6, 4});
        EXPECT_EQ(steps.missed, 1) << "the others came ahead";
        EXPECT_EQ(next.demanded, 1);
        const ExpertCounts counts = steps.profiler.counts();
        EXPECT_EQ(steps.counted(counts.hits, 1, 4), 2u);
        EXPECT_EQ(steps.counted(counts.hits, 1, 5), 1u);
        EXPECT_EQ(steps.counted(counts.fetched, 1, 6), 1u);
    }
    Steps steps(layersOf(2, 16), 20, kBusOnly, Prefetch::NextLayer);
    steps.begin();
    EXPECT_EQ(steps.layer(0, {1, 2}).ahead, 0) << "nothing was predicted";
}

TEST(ExpertMisses, AheadComesWhatHasNoSlotAndCanBeRead) {
    Steps steps(layersOf(2, 16), 20, kBusOnly, Prefetch::NextLayer);
    steps.begin();
    steps.layer(0, {0});
    steps.layer(1, {4, 5});
    steps.hide(1, 6, 2);
    steps.begin();
    const List predicted = {4, 6, 5, 7};
    const auto orders = steps.layer(0, {1, 2, 3, 0}, &predicted);
    ASSERT_EQ(orders.ahead, 1);
    EXPECT_EQ(orders.aheadFetch[0].expert, 7);
    EXPECT_LT(steps.world.slots->tryGet(1, 6), 0);
}

// The manager holds an expert that the GPU did not find: it was ordered ahead, but was not fetched.
TEST(ExpertMisses, WhatHasASlotIsNotOrdered) {
    Steps steps(layersOf(3, 16), 20, kBusOnly, Prefetch::NextLayer);
    steps.begin();
    List predicted = {4, 5};
    ASSERT_EQ(steps.layer(0, {1, 2}, &predicted).ahead, 2);
    const List chosen = {4, 6}, slot = {-1, -1};
    predicted = {7, 7};
    ExpertOrders orders;
    steps.misses->order(1, chosen.data(), slot.data(), predicted.data(), 2, orders);
    ASSERT_EQ(orders.demanded, 1);
    EXPECT_EQ(orders.fetch[0].expert, 6);
    ASSERT_EQ(orders.ahead, 1);
    EXPECT_EQ(orders.aheadFetch[0].expert, 7);

    // No address is asked for an expert that is there: the GPU is waiting.
    Steps there(layersOf(2, 16), 20, kBusOnly, Prefetch::NextLayer);
    there.begin();
    there.layer(1, {4, 5});
    there.asked.clear();
    there.begin();
    predicted = {5, 4};
    EXPECT_EQ(there.layer(0, {1, 2}, &predicted).ahead, 0);
    EXPECT_EQ(there.asked.size(), 6u) << "three matrices of each that was missed";
}

// No expert lands ahead: the next layer's own misses need the landing slots.
TEST(ExpertMisses, AheadComesOnlyWhatMayStay) {
    Steps steps(layersOf(2, 16), 2, kBusOnly, Prefetch::NextLayer);
    const List predicted = {4, 5};
    steps.begin();
    const auto orders = steps.layer(0, {1, 2}, &predicted);
    EXPECT_EQ(orders.demanded, 2);
    EXPECT_EQ(orders.ahead, 0) << "the slots are in use";
}

// --- when a layer is done ---

// An expert that several rows chose is counted as found, fetched or computed once for each row.
TEST(ExpertMisses, CountsWhatBecameOfEveryPair) {
    Steps steps(layersOf(2, 16), 20, kBusOnly);
    steps.hide(1, 9, 1);
    steps.begin();
    steps.layer(1, {1, 2, 9, 1, 9, 1});
    ExpertCounts counts = steps.profiler.counts();
    const auto expect = [&](int32_t expert, uint64_t hits, uint64_t fetched, uint64_t computed) {
        EXPECT_EQ(steps.counted(counts.hits, 1, expert), hits) << expert;
        EXPECT_EQ(steps.counted(counts.fetched, 1, expert), fetched) << expert;
        EXPECT_EQ(steps.counted(counts.computed, 1, expert), computed) << expert;
    };
    expect(1, 0, 3, 0);
    expect(2, 0, 1, 0);
    expect(9, 0, 0, 2);
    steps.begin();
    steps.layer(1, {2, 1, 2, 9});
    counts = steps.profiler.counts();
    expect(1, 1, 3, 0);
    expect(2, 2, 1, 0);
    expect(9, 0, 0, 3);
    steps.begin();
    steps.layer(1, {1, 2});
    ASSERT_EQ(steps.missed, 0);
    counts = steps.profiler.counts();
    expect(1, 2, 3, 0);
    expect(2, 3, 1, 0);
    expect(9, 0, 0, 3);
    for (int32_t e = 0; e < 16; ++e)
        EXPECT_EQ(steps.counted(counts.hits, 0, e) + steps.counted(counts.fetched, 0, e), 0u);
}

// An expert that is used often replaces others in a slot, and is then found there.
TEST(ExpertMisses, WhatIsUsedOftenStays) {
    Steps steps(layersOf(2, 32), 6, kBusOnly);
    steps.begin();
    steps.layer(0, {0, 1, 2, 3, 4, 5});
    ASSERT_EQ(steps.world.slots->resident(), 6);
    int missed = 0;
    for (int pass = 0; pass < 12; ++pass) {
        steps.begin();
        steps.layer(0, {6 + pass});
        steps.layer(1, {20, 20});
        missed += steps.missed > 0;
        if (pass >= 2) {
            EXPECT_EQ(steps.missed, 0) << "pass " << pass;
        }
    }
    EXPECT_GT(missed, 0);
    EXPECT_GE(steps.world.slots->tryGet(1, 20), 0);
    const ExpertCounts counts = steps.profiler.counts();
    EXPECT_EQ(steps.counted(counts.loads, 1, 20), 1u);
    EXPECT_EQ(steps.world.slots->resident(), 6);
}

// The prefetcher is told what was chosen, missed and predicted, even of layers without a miss.
TEST(ExpertMisses, PredictorsAreCounted) {
    Steps steps(layersOf(2, 16), 20, kBusOnly, Prefetch::Count);
    const List predicted = {4, 5, 6, 4};
    for (int pass = 0; pass < 3; ++pass) {
        steps.begin();
        steps.layer(0, {1, 2, 3, 2}, &predicted);
        steps.layer(1, {4, 5, 7, 7});
        EXPECT_EQ(steps.missed, pass == 0 ? 4 : 0);
    }
    std::map<std::string, PredictorCounts> found;
    for (const PredictorCounts& p : steps.profiler.counts().predictors) found[p.name] = p;
    ASSERT_EQ(found.size(), 2u);
    EXPECT_EQ(found["next-layer"].named, 9u);
    EXPECT_EQ(found["next-layer"].used, 6u);
    EXPECT_EQ(found["next-layer"].wanted, 9u);
    EXPECT_EQ(found["next-token"].named, 12u);
    EXPECT_EQ(found["next-token"].used, 12u);
    EXPECT_EQ(found["next-token"].wanted, 12u);
}

TEST(ExpertMisses, WhatWasMissedIsAHintForTheNextToken) {
    Steps steps(layersOf(2, 16), 20, {}, Prefetch::NextToken);
    steps.prefetcher->fill({{1, 5}});
    steps.begin();
    steps.world.loads.arrive();
    steps.begin();
    steps.layer(0, {1, 2, 1, 3});
    EXPECT_EQ(steps.prefetcher->hints(), 3u);
    steps.layer(1, {5});
    EXPECT_EQ(steps.prefetcher->hints(), 3u) << "a layer that missed nothing";
    steps.begin();
    EXPECT_EQ(steps.world.loads.running(), 3u);
    steps.world.loads.arrive(3);
    steps.begin();
    steps.layer(0, {3, 2, 1, 2});
    EXPECT_EQ(steps.missed, 0);
    EXPECT_EQ(steps.prefetcher->hints(), 0u);
}

TEST(ExpertMisses, WhatWasFetchedToStayIsNoHint) {
    Steps steps(layersOf(1, 32), 3, kBusOnly, Prefetch::NextToken);
    const auto pool = steps.world.slots->pools().at(0);
    List chosen(static_cast<size_t>(pool.capacity + pool.landing));
    for (size_t i = 0; i < chosen.size(); ++i) chosen[i] = 30 - static_cast<int32_t>(i);
    steps.begin();
    ASSERT_EQ(steps.layer(0, chosen).demanded, pool.capacity + pool.landing);
    EXPECT_EQ(steps.prefetcher->hints(), static_cast<size_t>(pool.landing)) << "landed experts are gone again";
    EXPECT_EQ(steps.profiler.counts().fetched, [&] {
        std::vector<uint64_t> expected(32);
        for (const int32_t expert : chosen) expected[static_cast<size_t>(expert)] = 1;
        return expected;
    }());
}

// --- all of it ---

// Passes of rows that choose at random, some experts more often than others. The GPU cannot read some experts, and
// loads arrive late. Every order is checked, every product reads the file's bytes, and every pair is counted once.
class RandomSteps : public testing::TestWithParam<Prefetch> {};

TEST_P(RandomSteps, NothingIsWrong) {
    std::mt19937 random(sharpi::testSeed(11 + static_cast<unsigned>(GetParam())));
    std::vector<LayerShape> shapes = layersOf(4, 24);
    shapes[1].types = {DType::Q8_0, DType::Q4_0, DType::Q8_0};
    shapes[3].types = shapes[1].types;
    shapes[2].experts = 16;
    for (const int64_t perPool : {1, 6, 20}) {
        Steps steps(shapes, perPool, {1e9, 1e9}, GetParam());
        for (int32_t layer = 0; layer < 4; ++layer)
            steps.hide(layer, static_cast<int32_t>(random() % 16), random() % 3);
        const auto draw = [&](int32_t layer, size_t rows) {
            List chosen;
            while (chosen.size() < 4 * rows) {
                const auto row = chosen.begin() + static_cast<std::ptrdiff_t>(chosen.size() / 4 * 4);
                const double skewed = std::pow(between(random, 0, 1), 3);
                const auto expert = static_cast<int32_t>(skewed * shapes[static_cast<size_t>(layer)].experts);
                if (std::find(row, chosen.end(), expert) == chosen.end()) chosen.push_back(expert);
            }
            return chosen;
        };
        std::map<std::pair<int32_t, int32_t>, std::array<uint64_t, 3>> became;  // hits, fetched, computed
        uint64_t fetched = 0, computed = 0, hits = 0, ahead = 0;
        for (int pass = 0; pass < 400; ++pass) {
            steps.begin();
            steps.world.loads.arrive(random() % (steps.world.loads.running() + 1));
            const size_t rows = 1 + random() % 3;
            for (int32_t layer = 0; layer < 4; ++layer) {
                const List chosen = draw(layer, rows), predicted = layer < 3 ? draw(layer + 1, rows) : List();
                const size_t bytes = steps.world.slots->expertBytes(layer) * (random() % 4);
                const double seconds = static_cast<double>(bytes) / between(random, 1e8, 1e9);
                const auto orders = steps.layer(layer, chosen, layer < 3 ? &predicted : nullptr, bytes, seconds);
                ahead += static_cast<uint64_t>(orders.ahead);
                std::set<int32_t> gpus;
                for (int32_t i = 0; i < orders.demanded; ++i) gpus.insert(orders.fetch[i].expert);
                for (size_t p = 0; p < chosen.size(); ++p) {
                    const size_t which = steps.slot[p] >= 0 ? 0 : gpus.count(chosen[p]) ? 1 : 2;
                    ++became[{layer, chosen[p]}][which];
                    ++(which == 0 ? hits : which == 1 ? fetched : computed);
                }
                for (const int32_t expert : gpus) EXPECT_FALSE(steps.isHidden(layer, expert));
                if (testing::Test::HasFailure())
                    FAIL() << "pass " << pass << ", layer " << layer << ", " << perPool << " slots";
            }
        }
        const ExpertCounts counts = steps.profiler.counts();
        for (int32_t layer = 0; layer < 4; ++layer) {
            for (int32_t e = 0; e < shapes[static_cast<size_t>(layer)].experts; ++e) {
                const auto& expected = became[{layer, e}];
                EXPECT_EQ(steps.counted(counts.hits, layer, e), expected[0]);
                EXPECT_EQ(steps.counted(counts.fetched, layer, e), expected[1]);
                EXPECT_EQ(steps.counted(counts.computed, layer, e), expected[2]);
            }
        }
        for (const uint64_t some : {hits, fetched, computed}) EXPECT_GT(some, 100u);
        EXPECT_EQ(ahead > 0, GetParam() == Prefetch::NextLayer);
    }
}

INSTANTIATE_TEST_SUITE_P(AllModes, RandomSteps,
                         testing::Values(Prefetch::Off, Prefetch::Count, Prefetch::NextToken, Prefetch::NextLayer));

}  // namespace
