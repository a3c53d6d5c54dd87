// The counts of what becomes of experts, compared with plain maps: over layers of different sizes, from several
// threads.
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "experts/expert_profiler.h"
#include "seed.h"

namespace {

using sharpi::Error;
using sharpi::ErrorKind;
using sharpi::ExpertAccessProfiler;
using sharpi::ExpertCounts;
using Event = ExpertAccessProfiler::Event;

constexpr std::array<Event, 5> kEvents = {Event::Hit, Event::Computed, Event::Fetched, Event::Load, Event::Eviction};

std::vector<const std::vector<uint64_t>*> eventsOf(const ExpertCounts& counts) {
    return {&counts.hits, &counts.computed, &counts.fetched, &counts.loads, &counts.evictions};
}

template <typename Call> void expectInternal(const Call& call) {
    try {
        call();
        ADD_FAILURE() << "no error";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::Internal) << error.what();
    }
}

// Layers 3, 1 and 7 of a model, of 5, 9 and 2 experts.
constexpr std::array<int32_t, 3> kLayers = {3, 1, 7}, kExperts = {5, 9, 2};

void addLayers(ExpertAccessProfiler& profiler) {
    for (size_t i = 0; i < kLayers.size(); ++i)
        ASSERT_EQ(profiler.addLayer(kLayers[i], kExperts[i]), static_cast<int32_t>(i));
}

TEST(ExpertAccessProfiler, CountsWhatItIsTold) {
    std::mt19937 random(sharpi::testSeed(5));
    ExpertAccessProfiler profiler;
    addLayers(profiler);
    constexpr size_t kStride = 12;
    std::map<std::pair<int32_t, int32_t>, uint64_t> uses;
    std::array<std::map<std::pair<int32_t, int32_t>, uint64_t>, kEvents.size()> events;
    for (int i = 0; i < 3000; ++i) {
        const auto row = static_cast<int32_t>(random() % kExperts.size());
        const auto expert = static_cast<int32_t>(random() % static_cast<unsigned>(kExperts[static_cast<size_t>(row)]));
        const uint64_t times = random() % 3 ? 1 : (uint64_t{1} << 33) + random() % 7;  // past 32 bits
        if (random() % 20 == 0) {
            std::vector<uint32_t> many(kExperts.size() * kStride);
            for (uint32_t& count : many) count = random() % 100;
            profiler.addUses(many.data(), kStride);
            for (size_t r = 0; r < kExperts.size(); ++r)
                for (int32_t e = 0; e < kExperts[r]; ++e)
                    uses[{static_cast<int32_t>(r), e}] += many[r * kStride + static_cast<size_t>(e)];
        } else if (random() % 5 == 0) {
            profiler.addUse(row, expert, times);
            uses[{row, expert}] += times;
        } else {
            const size_t event = random() % kEvents.size();
            if (times == 1) profiler.count(row, expert, kEvents[event]);
            else profiler.count(row, expert, kEvents[event], times);
            events[event][{row, expert}] += times;
        }
    }
    const ExpertCounts counts = profiler.counts();
    EXPECT_EQ(counts.layers, 3);
    EXPECT_EQ(counts.experts, 9);
    EXPECT_EQ(counts.layer, std::vector<int32_t>(kLayers.begin(), kLayers.end()));
    EXPECT_EQ(counts.present, std::vector<int32_t>(kExperts.begin(), kExperts.end()));
    ASSERT_EQ(counts.uses.size(), 27u);
    for (const auto* all : eventsOf(counts)) ASSERT_EQ(all->size(), 27u);
    for (int32_t row = 0; row < 3; ++row) {
        for (int32_t e = 0; e < 9; ++e) {  // none where there is no expert
            const auto at = static_cast<size_t>(row * 9 + e);
            EXPECT_EQ(counts.uses[at], (uses[{row, e}])) << row << ", " << e;
            for (size_t event = 0; event < kEvents.size(); ++event)
                EXPECT_EQ(eventsOf(counts)[event]->at(at), (events[event][{row, e}]))
                    << row << ", " << e << ", event " << event;
        }
    }
}

TEST(ExpertAccessProfiler, AddsUpPredictionsByName) {
    ExpertAccessProfiler profiler;
    profiler.addPrediction("b", 8, 3, 9);
    profiler.addPrediction("a", 4, 1, 4);
    profiler.addPrediction("b", 8, 5, 7);
    const ExpertCounts counts = profiler.counts();
    ASSERT_EQ(counts.predictors.size(), 2u);
    EXPECT_EQ(counts.predictors[0].name, "b");
    EXPECT_EQ(counts.predictors[0].named, 16u);
    EXPECT_EQ(counts.predictors[0].used, 8u);
    EXPECT_EQ(counts.predictors[0].wanted, 16u);
    EXPECT_EQ(counts.predictors[1].name, "a");
    EXPECT_EQ(counts.predictors[1].named, 4u);
    EXPECT_EQ(counts.layers + counts.experts, 0);
}

TEST(ExpertAccessProfiler, ForgetsCountsButNotLayers) {
    ExpertAccessProfiler profiler;
    addLayers(profiler);
    for (const Event event : kEvents) profiler.count(1, 8, event, 3);
    profiler.addUse(2, 1);
    profiler.addPrediction("a", 1, 1, 1);
    profiler.clear();
    const ExpertCounts counts = profiler.counts();
    EXPECT_EQ(counts.layer, std::vector<int32_t>(kLayers.begin(), kLayers.end()));
    EXPECT_EQ(counts.uses, std::vector<uint64_t>(27));
    for (const auto* all : eventsOf(counts)) EXPECT_EQ(*all, std::vector<uint64_t>(27));
    EXPECT_TRUE(counts.predictors.empty());
    profiler.count(1, 8, Event::Load);
    EXPECT_EQ(profiler.counts().loads[17], 1u);
}

TEST(ExpertAccessProfiler, RefusesWhatThereIsNot) {
    ExpertAccessProfiler profiler;
    expectInternal([&] { profiler.addUse(0, 0); });
    addLayers(profiler);
    expectInternal([&] { profiler.addLayer(9, 0); });
    for (const auto& [row, expert] :
         {std::pair(-1, 0), std::pair(3, 0), std::pair(0, -1), std::pair(0, 5), std::pair(2, 2)}) {
        expectInternal([&, row = row, expert = expert] { profiler.addUse(row, expert); });
        expectInternal([&, row = row, expert = expert] { profiler.count(row, expert, Event::Hit); });
    }
    const std::vector<uint32_t> uses(3 * 8, 1);
    expectInternal([&] { profiler.addUses(uses.data(), 8); });
    const ExpertCounts counts = profiler.counts();
    EXPECT_EQ(counts.layers, 3);
    EXPECT_EQ(counts.uses, std::vector<uint64_t>(27));
    EXPECT_EQ(counts.hits, std::vector<uint64_t>(27));
}

// Meant to be run under ThreadSanitizer too.
TEST(ExpertAccessProfiler, CountsFromManyThreads) {
    ExpertAccessProfiler profiler;
    addLayers(profiler);
    constexpr int kThreads = 4, kTurns = 2000;
    const std::vector<uint32_t> uses(3 * 9, 1);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, t] {
            for (int i = 0; i < kTurns; ++i) {
                profiler.count(1, i % 9, kEvents[static_cast<size_t>(t) % kEvents.size()]);
                profiler.addUses(uses.data(), 9);
                profiler.addUse(2, 1, 2);
                profiler.addPrediction(t % 2 ? "odd" : "even", 2, 1, 3);
                if (i % 100 == 0) profiler.counts();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    const ExpertCounts counts = profiler.counts();
    const auto eventsCounted = eventsOf(counts);
    for (int t = 0; t < kThreads; ++t)
        for (size_t e = 0; e < 9; ++e)
            EXPECT_EQ(eventsCounted[static_cast<size_t>(t)]->at(9 + e), (kTurns + 8 - e) / 9);
    for (size_t r = 0; r < 3; ++r)
        for (size_t e = 0; e < 9; ++e) {
            const bool present = static_cast<int32_t>(e) < kExperts[r], twice = r == 2 && e == 1;
            EXPECT_EQ(counts.uses[r * 9 + e], present ? static_cast<uint64_t>(kThreads * kTurns * (twice ? 3 : 1)) : 0u)
                << r << ", " << e;
        }
    ASSERT_EQ(counts.predictors.size(), 2u);
    for (const auto& predictor : counts.predictors)
        EXPECT_EQ(predictor.wanted, 3u * kTurns * kThreads / 2) << predictor.name;
}

}  // namespace
