// Measuring the machine: the arithmetic is right, the probe makes do with less memory and gives all of it back, and its
// results are numbers. How large they are depends on the machine.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <set>

#include "core/error.h"
#include "cpu/kernels.h"
#include "fake_device.h"
#include "hardware/devices.h"
#include "hardware/hardware_probe.h"

namespace {

using namespace sharpi;

constexpr size_t kMiB = size_t{1} << 20;

template <typename Body> ErrorKind kindOf(const Body& body) {
    try {
        body();
    } catch (const Error& error) {
        return error.kind();
    }
    ADD_FAILURE() << "nothing was thrown";
    return ErrorKind::BadModel;
}

size_t residentBytes() {
    long size = 0, resident = 0;
    std::FILE* file = std::fopen("/proc/self/statm", "r");
    if (!file) return 0;
    const int read = std::fscanf(file, "%ld %ld", &size, &resident);
    std::fclose(file);
    return read == 2 ? static_cast<size_t>(resident) * static_cast<size_t>(::sysconf(_SC_PAGESIZE)) : 0;
}

TEST(RateOf, IsOverAllSpans) {
    EXPECT_DOUBLE_EQ(rateOf({{2, 4, 10}}), 5);
    EXPECT_DOUBLE_EQ(rateOf({{0, 1, 10}, {1, 2, 10}, {2, 10, 40}}), 6);
}

// A series with these samples; the last one then repeats.
Series seriesOf(std::vector<double> values) {
    return {[values, next = size_t{0}]() mutable {
        return std::vector<double>{values[std::min(next++, values.size() - 1)]};
    }};
}

TEST(SampleInTurn, EndsWhenTheBestNoLongerRises) {
    const double little = 1 + kRise / 2, much = 1 + 2 * kRise;
    struct Case {
        std::vector<double> values;  // the first sample warms up
        size_t samples;
    };
    for (const Case& c :
         {Case{{1, 1}, kLeastSamples}, Case{{9, 1}, kLeastSamples}, Case{{1, 1, 1, much}, 3 + kCalmSamples},
          Case{{1, 1, 1, 0.2, 0.3, much}, 5 + kCalmSamples}, Case{{1, 1, little, little}, kLeastSamples},
          Case{{1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, kMostSamples}}) {
        Series series = seriesOf(c.values);
        sampleInTurn({&series});
        ASSERT_EQ(series.samples.size(), c.samples);
        for (size_t i = 0; i < series.samples.size(); ++i)
            EXPECT_EQ(series.rate()[i], c.values[std::min(i + 1, c.values.size() - 1)]);
    }
}

TEST(SampleInTurn, ABusyMomentSpoilsOneSampleOfEach) {
    std::string order;
    const auto logged = [&order](char name) {
        return [&order, name] { return order += name, std::vector<double>{1}; };
    };
    Series a{logged('a')}, b{logged('b')},
        rising{[&, n = 0]() mutable { return order += 'c', std::vector<double>{double(++n)}; }};
    sampleInTurn({&a, &b, &rising});
    std::string expected = "abc";
    for (size_t i = 0; i < kMostSamples; ++i) expected += i < kLeastSamples ? "abc" : "c";
    EXPECT_EQ(order, expected);
}

TEST(SampleInTurn, RatesOfOneMomentAreComparedByTheirSum) {
    // One rate gains what the other loses, so their sum does not rise. A single rate would.
    Series series{[n = 0.0]() mutable { return n += 1, std::vector<double>{n, 100 - n}; }};
    sampleInTurn({&series});
    EXPECT_EQ(series.samples.size(), kLeastSamples);
    EXPECT_EQ(series.rate(0)[1] + series.rate(1)[1], 100);
    EXPECT_EQ(series.rate(0).front(), 2) << "the first sample does not count";
}

TEST(RatesTogether, CountsOnlyWhileBothRan) {
    // One reads 100 per second from 0 to 4, the other 7 per second from 1 to 10. Both run from 1 to 4.
    const std::vector<Span> one = {{0, 2, 200}, {2, 4, 200}}, other = {{1, 3, 14}, {3, 10, 49}};
    const auto [first, second] = ratesTogether(one, other);
    EXPECT_DOUBLE_EQ(first, 100);
    EXPECT_DOUBLE_EQ(second, 7);
    const auto [secondAgain, firstAgain] = ratesTogether(other, one);
    EXPECT_DOUBLE_EQ(firstAgain, first);
    EXPECT_DOUBLE_EQ(secondAgain, second);
}

TEST(RatesTogether, SharesOutASpanThatReachesBeyond) {
    // Half of the second span lies within [5, 15], and a quarter of the last but one; the first and the last do not
    // count.
    const auto [first, second] =
        ratesTogether({{-9, 0, 1e6}, {0, 10, 60}, {10, 11, 1}, {11, 27, 64}, {27, 28, 1e6}}, {{5, 15, 20}});
    EXPECT_DOUBLE_EQ(first, (30 + 1 + 16) / 10.0);
    EXPECT_DOUBLE_EQ(second, 2);
}

TEST(RatesTogether, RefusesWhatDidNotRunAtOnce) {
    const std::vector<Span> early = {{0, 1, 5}}, late = {{1, 2, 5}};
    EXPECT_EQ(kindOf([&] { ratesTogether(early, late); }), ErrorKind::Internal);
    EXPECT_EQ(kindOf([&] { ratesTogether(late, early); }), ErrorKind::Internal);
    EXPECT_EQ(kindOf([&] { ratesTogether({}, late); }), ErrorKind::Internal);
    EXPECT_EQ(kindOf([&] { ratesTogether(early, {}); }), ErrorKind::Internal);
}

TEST(TakeUpTo, TakesAllThatIsWanted) {
    FakeDevice memory(64 * kMiB);
    Allocator allocator(memory);
    EXPECT_EQ(takeUpTo(allocator, 40 * kMiB, kMiB, "x").bytes(), 40 * kMiB);
    EXPECT_EQ(allocator.held(), 0u);
}

TEST(TakeUpTo, TakesHalfAsMuchUntilItFits) {
    FakeDevice memory(64 * kMiB);
    Allocator allocator(memory);
    const Buffer buffer = takeUpTo(allocator, 200 * kMiB, kMiB, "x");
    EXPECT_EQ(buffer.bytes(), 50 * kMiB);
    EXPECT_EQ(allocator.held(), 50 * kMiB);
}

TEST(TakeUpTo, NeverTakesLessThanTheLeast) {
    FakeDevice memory(64 * kMiB);
    Allocator allocator(memory);
    EXPECT_EQ(takeUpTo(allocator, 200 * kMiB, 50 * kMiB, "x").bytes(), 50 * kMiB);
    try {
        takeUpTo(allocator, 200 * kMiB, 50 * kMiB + 1, "weights to measure with");
        ADD_FAILURE() << "it took the memory";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::OutOfMemory);
        EXPECT_NE(std::string(error.what()).find("weights to measure with"), std::string::npos) << error.what();
    }
    EXPECT_EQ(allocator.held(), 0u);
}

TEST(FillRandom, DiffersByPlaceAndSeedAndNotByCall) {
    std::vector<uint64_t> words(1000), same(1000), other(1000);
    fillRandom(words.data(), words.size(), 4);
    fillRandom(same.data(), same.size(), 4);
    fillRandom(other.data(), other.size(), 5);
    EXPECT_EQ(words, same);
    std::set<uint64_t> all(words.begin(), words.end());
    all.insert(other.begin(), other.end());
    EXPECT_EQ(all.size(), 2000u);
    double ones = 0;
    for (const uint64_t word : words) ones += __builtin_popcountll(word);
    EXPECT_NEAR(ones / 64000, 0.5, 0.02);
}

void expectRate(const Samples& values, const char* name) {
    EXPECT_GE(values.size(), kLeastSamples) << name;
    EXPECT_LE(values.size(), kMostSamples) << name;
    for (const double value : values) {
        EXPECT_TRUE(std::isfinite(value)) << name;
        EXPECT_GT(value, 0) << name;
    }
}

TEST(MeasureHardware, GivesFinitePositiveRates) {
    for (const int threads : {1, 2}) {
        for (const size_t most : {kMiB, 40 * kMiB}) {
            const HardwareRates rates = measureHardware(threads, most, 0);
            expectRate(rates.ramBytesPerSecond, "RAM");
            expectRate(rates.cpuFlops, "CPU arithmetic");
            ASSERT_EQ(rates.typeCosts.size(), 4u);
            for (const TypeCost& each : rates.typeCosts) {
                EXPECT_TRUE(each.cost > 0 && std::isfinite(each.cost)) << info(each.type).name;
                EXPECT_NE(each.type, DType::Q4_K);
            }
            EXPECT_NE(rates.gpu.has_value(), !rates.gpuMissing.empty())
                << "either rates of a GPU, or why there are none";
            if (!rates.gpu) continue;
            expectRate(rates.gpu->pcieBytesPerSecond, "PCIe");
            expectRate(rates.gpu->ramBytesPerSecondShared, "RAM while PCIe works");
            expectRate(rates.gpu->pcieBytesPerSecondShared, "PCIe while the CPU works");
            EXPECT_EQ(rates.gpu->ramBytesPerSecondShared.size(), rates.gpu->pcieBytesPerSecondShared.size());
            expectRate(rates.gpu->vramBytesPerSecond, "VRAM");
            expectRate(rates.gpu->kernelSeconds, "kernel");
            expectRate(rates.gpu->flops, "GPU arithmetic");
        }
    }
}

TEST(MeasureHardware, GivesItsMemoryBack) {
    const size_t most = 128 * kMiB;
    measureHardware(2, kMiB, 0);  // the processors' libraries keep what they set up
    const size_t before = residentBytes();
    if (before == 0) GTEST_SKIP() << "this system does not say how much memory a process takes";
    measureHardware(2, most, 0);
    EXPECT_LT(residentBytes(), before + most / 4);
}

TEST(MeasureHardware, RefusesNonsense) {
    for (const int threads : {0, -3, 1025, std::numeric_limits<int>::min()}) {
        EXPECT_EQ(kindOf([&] { measureHardware(threads, kMiB, 0); }), ErrorKind::InvalidArgument) << threads;
    }
    for (const size_t most : {size_t{0}, kMiB - 1}) {
        EXPECT_EQ(kindOf([&] { measureHardware(1, most, 0); }), ErrorKind::InvalidArgument) << most;
    }
}

TEST(MakeBackend, RefusesAKindOfDeviceThatItDoesNotKnow) {
    EXPECT_EQ(kindOf([] { makeBackend(Device(), 0, 1); }), ErrorKind::Internal);
    EXPECT_EQ(std::string(makeBackend({&deviceKind("cpu")}, 0, 1)->name()), cpu::kernels().name);
}

}  // namespace
