// How misses are shared while the machine's speed is being learned: a simulated CPU and bus with noise, compared with
// the best share that knows both. With wrong profiles, another process on half of the cores, single accidents, and
// machines that really are as slow as they look.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <vector>

#include "core/expert_orders.h"
#include "experts/miss_share.h"
#include "seed.h"

namespace sharpi {
namespace {

constexpr size_t kExpert = 2700000;  // bytes, as in qwen3-30b-a3b
constexpr int32_t kUsed = 8;

double between(std::mt19937& random, double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
}

// The speeds of the machine on which RESULTS.md was measured.
struct Machine {
    double cpuStart = 18e-6, cpuExpert = 20e-6;  // seconds, and seconds of an expert
    double busStart = 20e-6, busExpert = 55e-6;
    double own = 35e-6;
    double misses = 0.35;  // of the choices

    double cpu(int32_t experts) const { return experts > 0 ? cpuStart + cpuExpert * experts : 0; }
    double bus(int32_t experts) const { return experts > 0 ? busStart + busExpert * experts : 0; }
    double layer(int32_t missed, int32_t fetched) const { return std::max(cpu(missed - fetched), bus(fetched)) + own; }
    int32_t best(int32_t missed) const {
        int32_t best = 0;
        for (int32_t n = 1; n <= std::min(missed, kMaxExpertFetches); ++n)
            best = layer(missed, n) < layer(missed, best) ? n : best;
        return best;
    }
    double cpuRate() const { return kExpert / cpuExpert; }
    double busRate() const { return kExpert / busExpert; }
};

// Decode on such a machine. disturbed: changes the CPU's time for a layer.
class Decode {
public:
    Decode(const Machine& machine, double cpuRate, double busRate)
        : machine(machine), share(cpuRate, busRate, kExpert) {}

    // Decodes layers with misses. Returns their seconds divided by those of the best share, which knows the machine.
    double run(int layers) {
        Times sum;
        for (int i = 0; i < layers; ++i) {
            const Times times = layer();
            sum.took += times.took;
            sum.best += times.best;
        }
        return sum.took / sum.best;
    }
    struct Times {
        double took = 0, best = 0;
    };
    Times layer() {
        const int32_t missed = draw(), fetched = share.choose(missed, kExpert), computed = missed - fetched;
        EXPECT_TRUE(fetched >= 0 && fetched <= std::min(missed, kMaxExpertFetches)) << fetched << " of " << missed;
        const double cpuNoise = between(_random, 0.9, 1.2), busNoise = between(_random, 0.97, 1.05),
                     own = machine.own * between(_random, 0.9, 1.15);
        const auto cpu = [&](int32_t experts) { return machine.cpu(experts) * cpuNoise; };
        const double ours = disturbed && computed ? disturbed(cpu(computed), _random) : cpu(computed);
        const double took = std::max(ours, machine.bus(fetched) * busNoise) + own;
        share.done(static_cast<size_t>(fetched) * kExpert, static_cast<size_t>(computed) * kExpert, ours);
        if (_random() % 48) share.followed(took);  // after a step's last layer nothing follows
        now += took;
        fetchedExperts += fetched;
        computedExperts += computed;
        const int32_t known = machine.best(missed);
        return {took, std::max(cpu(missed - known), machine.bus(known) * busNoise) + own};
    }

    Machine machine;
    MissShare share;
    std::function<double(double, std::mt19937&)> disturbed;
    double now = 0;
    int64_t fetchedExperts = 0, computedExperts = 0;

private:
    int32_t draw() {
        int32_t missed = 0;
        while (missed == 0) missed = std::binomial_distribution<int32_t>(kUsed, machine.misses)(_random);
        return missed;
    }
    std::mt19937 _random{testSeed(1)};
};

// Seconds divided by those of the best share: probes may add a hundredth, and noise moves the choice between two shares
// that are nearly equal.
constexpr double kNear = 1.03;
constexpr int kLearning = 4000;  // layers: 83 tokens of 48 layers

// Another process holds half of the cores: a loop takes twice as long, and one in five waits for a thread that has lost
// its core.
double halfOfTheCores(double seconds, std::mt19937& random) {
    return 2 * seconds + (random() % 5 == 0 ? between(random, 1e-3, 4e-3) : 0);
}

TEST(MissShare, AWrongProfileIsCorrected) {
    for (const double slowness : {0.25, 1.0, 10.0}) {
        for (const double misses : {0.15, 0.35, 0.8}) {
            for (const double cpuOff : {0.25, 1.0, 4.0}) {
                for (const double busOff : {0.25, 1.0, 4.0}) {
                    SCOPED_TRACE(testing::Message() << "a CPU " << slowness << " times as slow, " << misses
                                                    << " missed, profile off by " << cpuOff << " and " << busOff);
                    Machine machine;
                    machine.cpuExpert *= slowness;
                    machine.misses = misses;
                    Decode decode(machine, machine.cpuRate() * cpuOff, machine.busRate() * busOff);
                    decode.run(kLearning);
                    EXPECT_LT(decode.run(10000), kNear);
                }
            }
        }
    }
}

// The experts are so large that computing a layer's takes longer than any allowance for probes. The profile says that
// the bus is the faster side.
TEST(MissShare, LargeExpertsAreMeasuredToo) {
    Machine machine;
    machine.cpuExpert = 10e-3;
    machine.busExpert = 30e-3;
    machine.misses = 0.9;
    Decode decode(machine, machine.cpuRate(), machine.cpuRate() * 20);
    decode.run(6 * MissShare::kLongest);
    EXPECT_LT(decode.run(10000), kNear);
}

// For a second another process holds half of the cores: from the first layer on, or later.
TEST(MissShare, ABurstIsForgotten) {
    for (const double at : {0.0, 0.001, 0.5}) {
        SCOPED_TRACE(testing::Message() << "after " << at << " s");
        const Machine machine;
        Decode decode(machine, machine.cpuRate(), machine.busRate());
        while (decode.now < at) decode.layer();
        decode.disturbed = halfOfTheCores;
        while (decode.now < at + 1) decode.layer();
        decode.disturbed = nullptr;
        decode.run(kLearning / 2);
        decode.fetchedExperts = decode.computedExperts = 0;
        EXPECT_LT(decode.run(10000), kNear);
        EXPECT_GT(decode.computedExperts, decode.fetchedExperts) << "the CPU is the faster one";
        EXPECT_GT(decode.fetchedExperts, 0);
    }
}

// Meanwhile the bus has to do the work: decoding is less than twice as slow as with the bus alone.
TEST(MissShare, ABurstIsNoticed) {
    const Machine machine;
    Decode decode(machine, machine.cpuRate(), machine.busRate());
    decode.run(kLearning);
    decode.disturbed = halfOfTheCores;
    decode.run(500);
    decode.fetchedExperts = decode.computedExperts = 0;
    decode.run(1500);
    EXPECT_GT(decode.fetchedExperts, 4 * decode.computedExperts);
}

// The very first layer takes 10 ms, as if a thread lost its core. This hardly counts.
TEST(MissShare, AnAccidentMattersLittle) {
    const Machine machine;
    Decode decode(machine, machine.cpuRate(), machine.busRate());
    decode.disturbed = [&](double seconds, std::mt19937&) { return decode.computedExperts ? seconds : 10e-3; };
    while (!decode.computedExperts) decode.layer();
    EXPECT_LT(decode.run(1000), kNear);
}

// A wrong measurement comes a hundred times in a row: a second for the CPU, for fetches or for the GPU's own part, or
// nothing at all. It is corrected all the same.
TEST(MissShare, NoStateLasts) {
    struct Wrong {
        size_t fetched, computed;
        double cpu, turn;
    };
    for (const Wrong& wrong : {Wrong{0, 4, 1, 1}, Wrong{4, 0, 0, 1}, Wrong{0, 1, 1e-5, 1}, Wrong{4, 4, 1e-9, 1e-9}}) {
        SCOPED_TRACE(testing::Message() << wrong.fetched << " fetched, " << wrong.computed << " computed in "
                                        << wrong.cpu << ", " << wrong.turn);
        const Machine machine;
        Decode decode(machine, machine.cpuRate(), machine.busRate());
        decode.run(1000);
        for (int i = 0; i < 100; ++i) {
            decode.share.done(wrong.fetched * kExpert, wrong.computed * kExpert, wrong.cpu);
            decode.share.followed(wrong.turn);
        }
        decode.run(6 * MissShare::kLongest);
        EXPECT_LT(decode.run(10000), kNear);
    }
}

// A side that is as slow as it looks is tested at little cost, and not given work again and again.
TEST(MissShare, WhatIsSlowIsTestedCheaply) {
    for (const double slower : {4.0, 10.0, 30.0, 100.0}) {
        for (const bool isCpu : {false, true}) {
            SCOPED_TRACE(testing::Message() << (isCpu ? "the CPU " : "the bus ") << slower << " times as slow");
            Machine machine;
            (isCpu ? machine.cpuExpert : machine.busExpert) *= slower;
            Decode decode(machine, Machine().cpuRate(), Machine().busRate());
            decode.run(kLearning);
            decode.fetchedExperts = decode.computedExperts = 0;
            EXPECT_LT(decode.run(30000), kNear);
            EXPECT_GT(decode.fetchedExperts, 0);
            EXPECT_GT(decode.computedExperts, 0);
        }
    }
}

}  // namespace
}  // namespace sharpi
