// How a layer's misses are shared between the CPU and the bus: the line of seconds over bytes that is learned, and the
// shares compared with a plain search of all splits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "expert_steps.h"
#include "seed.h"

namespace {

using namespace slotted;

// --- the line ---

constexpr double kExpert = 3e6;  // bytes

TEST(TimeLine, IsAsExpectedBeforeAnythingIsSeen) {
    std::mt19937 random(sharpi::testSeed(1));
    for (int i = 0; i < 100; ++i) {
        const double start = between(random, 0, 1e-4), rate = between(random, 1e9, 1e11),
                     around = between(random, 1e4, 1e8);
        const TimeLine line(start, rate, around);
        for (int j = 0; j < 20; ++j) {
            const double bytes = between(random, 0, 10 * around), expected = start + bytes / rate;
            EXPECT_NEAR(line.seconds(bytes), expected, 1e-9 * expected);
        }
    }
}

// Times scatter by a tenth around a line, and the expectation is far off.
TEST(TimeLine, FindsStartAndSlope) {
    std::mt19937 random(sharpi::testSeed(2));
    for (int i = 0; i < 20; ++i) {
        const double start = between(random, 1e-5, 1e-4), rate = between(random, 1e10, 1e11);
        TimeLine line(between(random, 0, 1e-3), between(random, 1e9, 1e12), 2 * kExpert);
        for (int n = 0; n < 6000; ++n) {
            const double bytes = kExpert * static_cast<double>(1 + random() % 8);
            line.add(bytes, (start + bytes / rate) * between(random, 0.9, 1.1));
        }
        for (int experts = 0; experts <= 8; ++experts) {
            const double bytes = kExpert * experts, expected = start + bytes / rate;
            EXPECT_NEAR(line.seconds(bytes), expected, 0.02 * (start + 8 * kExpert / rate))
                << experts << ", start " << start << ", rate " << rate;
        }
        EXPECT_NEAR(line.seconds(2 * kExpert) - line.seconds(kExpert), kExpert / rate, 0.1 * kExpert / rate);
    }
}

// The line follows the machine however long it was different before.
TEST(TimeLine, FollowsAChange) {
    std::mt19937 random(sharpi::testSeed(3));
    for (const int before : {100, 10000}) {
        TimeLine line(1e-5, 5e10, 2 * kExpert);
        const auto add = [&](int times, double start, double rate) {
            for (int n = 0; n < times; ++n) {
                const double bytes = kExpert * static_cast<double>(1 + random() % 8);
                line.add(bytes, start + bytes / rate);
            }
        };
        const auto at = [](double start, double rate) { return start + 4 * kExpert / rate; };
        add(before, 2e-5, 4e10);
        EXPECT_NEAR(line.seconds(4 * kExpert), at(2e-5, 4e10), 0.01 * at(2e-5, 4e10));
        add(600, 5e-5, 1e10);
        EXPECT_GT(line.seconds(4 * kExpert), at(2e-5, 4e10) + 0.6 * (at(5e-5, 1e10) - at(2e-5, 4e10)))
            << "after these layers";
        add(3000, 5e-5, 1e10);
        for (int experts = 0; experts <= 8; ++experts) {
            const double expected = 5e-5 + kExpert * experts / 1e10;
            EXPECT_NEAR(line.seconds(kExpert * experts), expected, 0.01 * expected) << experts;
        }
    }
}

TEST(TimeLine, FewThatAreOddMatterLittle) {
    TimeLine line(1e-5, 5e10, 2 * kExpert);
    std::mt19937 random(sharpi::testSeed(4));
    for (int n = 0; n < 2000; ++n) {
        const double bytes = kExpert * static_cast<double>(1 + random() % 8);
        line.add(bytes, 1e-5 + bytes / 5e10);
    }
    const double before = line.seconds(4 * kExpert);
    line.add(4 * kExpert, 10 * before);  // another process had the processor
    EXPECT_GT(line.seconds(4 * kExpert), before);
    EXPECT_LT(line.seconds(4 * kExpert), 1.05 * before);
}

// Neither start nor slope becomes negative, whatever was measured.
TEST(TimeLine, IsNeverNegative) {
    std::mt19937 random(sharpi::testSeed(5));
    int flat = 0, throughOrigin = 0, both = 0;
    for (int i = 0; i < 500; ++i) {
        TimeLine line(between(random, 0, 1e-4), between(random, 1e9, 1e11), between(random, 1e5, 1e7));
        const double few = between(random, 1e4, 1e7), many = between(random, few, 1e8);
        const double fewTake = between(random, 1e-6, 1e-3), manyTake = between(random, 1e-6, 1e-3);
        for (uint32_t n = random() % 3000; n > 0; --n) random() % 2 ? line.add(few, fewTake) : line.add(many, manyTake);
        const double start = line.seconds(0), slope = line.seconds(2e8) - line.seconds(1e8);
        EXPECT_GE(start, 0);
        EXPECT_GE(slope, 0);
        EXPECT_GT(line.seconds(1e7), 0);
        (slope == 0 ? flat : start == 0 ? throughOrigin : both) += 1;
    }
    EXPECT_GT(flat, 20);
    EXPECT_GT(throughOrigin, 20);
    EXPECT_GT(both, 20);
}

// If the measurements have no slope, the line keeps the expected one, for ever.
TEST(TimeLine, KeepsItsSlopeWhereAllIsOfOneSize) {
    std::mt19937 random(sharpi::testSeed(6));
    for (const int times : {10, 1000, 20000, 60000}) {
        for (const double scatter : {0.0, 0.2}) {
            TimeLine line(1e-5, 5e10, 2 * kExpert);
            for (int n = 0; n < times; ++n) line.add(2 * kExpert, 2e-4 * between(random, 1 - scatter, 1 + scatter));
            if (times > 10) {
                EXPECT_NEAR(line.seconds(2 * kExpert), 2e-4, 0.05 * 2e-4) << times;
            }
            EXPECT_NEAR(line.seconds(8 * kExpert) - line.seconds(2 * kExpert), 6 * kExpert / 5e10,
                        0.01 * 6 * kExpert / 5e10)
                << times;
            EXPECT_GT(line.seconds(0), 0);
        }
    }
    // The machine is much faster than was expected: then the line goes through the origin, and no lower.
    TimeLine fast(1e-5, 5e10, 2 * kExpert);
    for (int n = 0; n < 20000; ++n) fast.add(2 * kExpert, 1e-5);
    EXPECT_NEAR(fast.seconds(2 * kExpert), 1e-5, 0.05e-5);
    EXPECT_NEAR(fast.seconds(8 * kExpert), 4e-5, 0.2e-5);
    EXPECT_EQ(fast.seconds(0), 0);
}

// --- shares ---

TEST(ExpertMisses, WithoutARateAllIsTheCpus) {
    std::mt19937 random(sharpi::testSeed(7));
    for (const Rates rates : {Rates{0, 0}, Rates{5e10, 0}, Rates{0, 5e10}}) {
        Steps steps(layersOf(1), 4, rates);
        for (int32_t missed = 0; missed < 20; ++missed)
            EXPECT_EQ(steps.misses->share(missed, 1 + random() % 10000000), 0);
        steps.begin();
        const auto orders = steps.layer(0, {1, 2, 3}, nullptr, 1000, 1.0);
        EXPECT_EQ(orders.demanded, 0);
        EXPECT_EQ(steps.misses->share(8, 1000), 0) << "measuring how slow it is changes nothing";
        EXPECT_TRUE(steps.asked.empty());
    }
}

// Compared with all splits, by a line of the test's own that gets the same measurements.
TEST(ExpertMisses, TheSlowerOfBothIsDoneSoonest) {
    std::mt19937 random(sharpi::testSeed(8));
    std::map<int32_t, int> found;
    for (int turn = 0; turn < 60; ++turn) {
        const double cpuRate = std::exp(between(random, std::log(1e8), std::log(1e11))),
                     busRate = cpuRate * std::exp(between(random, -3, 3));
        Steps steps(layersOf(1), 0, {cpuRate, busRate});
        const auto one = static_cast<double>(steps.world.slots->expertBytes(0));
        TimeLine cpu(MissShare::kCpuStart, cpuRate, 2 * one);
        for (int step = 0; step < 30; ++step) {
            const int32_t missed = static_cast<int32_t>(random() % (2 * kMaxExpertFetches));
            const size_t bytes = static_cast<size_t>(one * std::exp(between(random, 0, 9)));
            const auto seconds = [&](int32_t n) {
                const double ours = missed > n ? cpu.seconds(static_cast<double>(bytes) * (missed - n)) : 0;
                const double fetches = n > 0 ? MissShare::kFetchStart + static_cast<double>(bytes) * n / busRate : 0;
                return std::max(ours, fetches);
            };
            const int32_t n = steps.misses->share(missed, bytes);
            ASSERT_TRUE(n >= 0 && n <= missed && n <= kMaxExpertFetches) << n << " of " << missed;
            for (int32_t other = 0; other <= std::min(missed, kMaxExpertFetches); ++other) {
                EXPECT_LE(seconds(n), seconds(other) * (1 + 1e-12)) << n << " of " << missed << " instead of " << other;
            }
            ++found[n];
            const size_t computed =
                static_cast<size_t>(one * static_cast<double>(random() % 8));  // 0: nothing was left to the CPU
            const double took =
                computed ? (1e-5 + static_cast<double>(computed) / cpuRate) * between(random, 0.3, 3) : 0;
            if (computed) cpu.add(static_cast<double>(computed), took);
            else cpu.fade();
            steps.begin();
            steps.layer(0, {static_cast<int32_t>(random() % 8)}, nullptr, computed, took);
        }
    }
    for (const int32_t n : {0, kMaxExpertFetches}) EXPECT_GT(found[n], 5) << n << " are seldom the best";
    EXPECT_GT(found.size(), static_cast<size_t>(kMaxExpertFetches / 2));
}

TEST(ExpertMisses, NoMoreIsFetchedThanGains) {
    Steps cpuOnly(layersOf(1), 0, {1e12, 1e6}), busOnly(layersOf(1), 0, kBusOnly), flat(layersOf(1), 0, {1e10, 1e12});
    const size_t bytes = cpuOnly.world.slots->expertBytes(0);
    for (int32_t missed = 0; missed < kMaxExpertFetches + 20; ++missed) {
        EXPECT_EQ(cpuOnly.misses->share(missed, bytes), 0);
        EXPECT_EQ(busOnly.misses->share(missed, bytes), std::min(missed, kMaxExpertFetches));
    }
    // A CPU that takes as long for one expert as for many: if it gets any, fetching gains nothing.
    for (int i = 0; i < 20000; ++i) {
        flat.begin();
        flat.layer(0, {0}, nullptr, (1 + static_cast<size_t>(i) % 2) * bytes, i % 2 ? 1e-3 : 2e-3);
    }
    EXPECT_EQ(flat.misses->share(kMaxExpertFetches + 20, bytes), 0);
    EXPECT_EQ(flat.misses->share(8, bytes), 8) << "fetching all leaves the CPU nothing";
}

TEST(ExpertMisses, LearnsHowFastTheCpuIs) {
    Steps steps(layersOf(1), 0, {1e12, 5e9});
    const size_t bytes = 2000000, one = steps.world.slots->expertBytes(0);
    EXPECT_EQ(steps.misses->share(8, bytes), 0);
    const auto learn = [&](double rate) {
        for (int i = 0; i < 4000; ++i) {
            const size_t computed = one * (1 + static_cast<size_t>(i) % 8);
            steps.begin();
            steps.layer(0, {0}, nullptr, computed, static_cast<double>(computed) / rate);
        }
    };
    learn(5e9);
    EXPECT_TRUE(steps.misses->share(8, bytes) == 4 || steps.misses->share(8, bytes) == 3)
        << steps.misses->share(8, bytes);
    learn(5e8);
    EXPECT_GE(steps.misses->share(8, bytes), 7);
    learn(1e12);
    EXPECT_EQ(steps.misses->share(8, bytes), 0);
}

// The GPU's own part of a layer takes ten times as long in steps of many rows. It must not be taken for slow fetches.
TEST(ExpertMisses, StepsOfManyRowsAreMeasuredApart) {
    constexpr double kCpuExpert = 20e-6, kBusExpert = 55e-6;
    World shape(layersOf(1, 64));
    const auto one = static_cast<double>(shape.slots->expertBytes(0));
    Steps steps(layersOf(1, 64), 12, {one / kCpuExpert, one / kBusExpert});
    const size_t bytes = steps.world.slots->expertBytes(0);
    const auto run = [&](const List& missing, int layers, double own) {
        for (int i = 0; i < layers; ++i) {
            steps.begin();
            const int32_t fetched = steps.order(0, missing).demanded;
            const auto computed = static_cast<int32_t>(std::set<int32_t>(missing.begin(), missing.end()).size()) -
                                  static_cast<int32_t>(steps.slot.size() - static_cast<size_t>(steps.missed)) - fetched;
            const double cpu = computed > 0 ? MissShare::kCpuStart + kCpuExpert * computed : 0,
                         bus = fetched > 0 ? MissShare::kFetchStart + kBusExpert * fetched : 0;
            steps.finish(static_cast<size_t>(std::max(computed, 0)) * bytes, cpu);
            steps.misses->followed(own + std::max(cpu, bus));
        }
    };
    List few, many;
    for (int32_t i = 0; i < 8; ++i) few.push_back(i);
    for (int32_t i = 0; i < 512; ++i) many.push_back(20 + i % 40);
    const auto wanted = steps.misses->share(40, bytes, 512);
    EXPECT_NEAR(wanted, 10, 1);
    for (int turn = 0; turn < 4; ++turn) {
        run(few, 400, 35e-6);
        run(many, 400, 350e-6);
    }
    EXPECT_NEAR(steps.misses->share(40, bytes, 512), wanted, 2);
    EXPECT_NEAR(steps.misses->share(8, bytes, 8), 2, 1);
}

// A side that the best share leaves idle gets an expert now and then (miss_share.h). Orders and counts both show it.
TEST(ExpertMisses, TestsWhatItDoesNotUse) {
    for (const bool cpuIsIdle : {true, false}) {
        SCOPED_TRACE(cpuIsIdle ? "all are fetched" : "all are computed");
        Steps steps(layersOf(1, 64), 20, cpuIsIdle ? Rates{1e7, 1e12} : Rates{1e12, 1e7});
        const size_t bytes = steps.world.slots->expertBytes(0);
        const int32_t usual = cpuIsIdle ? 2 : 0;
        std::map<int32_t, int> found;
        for (int i = 0; i < 1000; ++i) {
            ASSERT_EQ(steps.misses->share(2, bytes), usual);
            steps.begin();
            List missing;
            for (int32_t e = i; missing.size() < 2; ++e) {
                if (steps.onDevice(0, e % 64) < 0) missing.push_back(e % 64);
            }
            const int32_t fetched = steps.order(0, missing).demanded;
            const double cpu = fetched < 2 ? (cpuIsIdle ? 1e-3 : 1e-6) : 0,
                         bus = fetched > 0 ? (cpuIsIdle ? 1e-6 : 1e-3) : 0;
            steps.finish(static_cast<size_t>(2 - fetched) * bytes, cpu);
            steps.misses->followed(1e-3 + std::max(cpu, bus));
            ++found[fetched];
        }
        EXPECT_GT(found[usual], 900);
        EXPECT_GT(found[1], 3);
        const ExpertCounts counts = steps.profiler.counts();
        uint64_t computed = 0;
        for (const uint64_t count : counts.computed) computed += count;
        EXPECT_EQ(computed, static_cast<uint64_t>(found[1] + 2 * found[0]));
    }
}

}  // namespace
