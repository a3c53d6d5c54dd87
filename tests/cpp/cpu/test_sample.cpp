// Choosing a token on the CPU: which candidate a draw selects, and the order of every sum. engine/test_sampler.cpp
// tests the same function through Sampler.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "cpu/sample.h"
#include "distributions.h"

namespace {

using namespace sharpi;

// Words that allow all of their tokens, none, and some, and a last word that has fewer tokens than bits.
TEST(Sample, AMaskAllowsTheTokensOfItsBits) {
    SamplingRule greedy;
    greedy.temperature = 0;
    const std::vector<uint32_t> mask = {UINT32_MAX, 0, 0x80000001u, 0x5u};
    const int64_t vocab = 32 + 32 + 32 + 3;
    std::vector<float> logits(vocab);
    for (int64_t best = 0; best < vocab; ++best) {
        for (int64_t i = 0; i < vocab; ++i) logits[i] = static_cast<float>(-i);
        logits[best] = 1;
        const bool allowed = mask[best / 32] >> (best % 32) & 1;
        EXPECT_EQ(sampleOnHost(logits.data(), vocab, greedy, {}, 0.0, mask), allowed ? best : 0) << best;
        for (int64_t i = 0; i < vocab; ++i)
            EXPECT_EQ(std::isinf(logits[i]), !(mask[i / 32] >> (i % 32) & 1)) << best << " " << i;
    }
    const std::vector<uint32_t> none(4);
    EXPECT_EQ(sampleOnHost(logits.data(), vocab, greedy, {}, 0.0, none), -1);
}

// A draw that falls on the bound between two tokens selects the later one.
TEST(Sample, ADrawOnABoundTakesTheNextToken) {
    SamplingRule rule;
    rule.temperature = 1;
    rule.topK = 0, rule.topP = 1, rule.minP = 0;
    for (int quarter = 0; quarter < 4; ++quarter) {
        std::vector<float> logits(4, 0.5f);
        EXPECT_EQ(sampleOnHost(logits.data(), 4, rule, {}, quarter / 4.0), quarter);
        EXPECT_EQ(sampleOnHost(logits.data(), 4, rule, {}, std::nextafter((quarter + 1) / 4.0, 0.0)), quarter);
    }
}

// The draw selects by the cumulated weights: with weights 4 : 2 : 1 : 1, each eighth of its range means one token.
TEST(Sample, TheDrawWalksTheCandidatesInOrder) {
    SamplingRule rule;
    rule.temperature = 1;
    rule.topK = 0, rule.topP = 1, rule.minP = 0;
    const std::vector<float> logits = {std::log(1.0f), std::log(4.0f), std::log(1.0f), std::log(2.0f),
                                       -std::numeric_limits<float>::infinity()};
    const int32_t order[] = {1, 1, 1, 1, 3, 3, 0, 2};
    for (int eighth = 0; eighth < 8; ++eighth) {
        for (const double within : {0.001, 0.5, 0.999}) {
            std::vector<float> copy = logits;
            EXPECT_EQ(sampleOnHost(copy.data(), 5, rule, {}, (eighth + within) / 8), order[eighth])
                << eighth << " " << within;
        }
    }
    std::vector<float> copy = logits;
    EXPECT_EQ(sampleOnHost(copy.data(), 5, rule, {}, 0.0), 1);
    EXPECT_EQ(sampleOnHost(copy.data(), 5, rule, {}, 1 - 0x1p-53), 2);  // never the token without weight
}

// A second implementation of the rule, sum by sum as core/rules/sampling_rule.h words it: the choice among candidates
// in order, and the bounds between them.
struct PlainRule {
    std::vector<double> through;
    int64_t kept = 0;

    PlainRule(const std::vector<float>& ordered, const SamplingRule& rule) {
        const auto keep = static_cast<int64_t>(ordered.size());
        const auto [before, sums] = summed(ordered, keep, keep, 1.0f);
        for (kept = 1; kept < keep; ++kept) {
            if (before[kept] >= rule.topP * sums[keep - 1] ||
                samplingWeight(ordered[kept], ordered[0], 1.0f) < rule.minP)
                break;
        }
        through = summed(ordered, kept, keep, rule.temperature).second;
    }

    int64_t choice(double draw) const {
        const double target = draw * through[kept - 1];
        for (int64_t i = 0; i < kept; ++i) {
            if (through[i] > target) return i;
        }
        return -1;
    }

private:
    using Sums = std::vector<double>;

    // `before` and `through` of the first `count` candidates, in the chunks that `keep` candidates have.
    static std::pair<Sums, Sums> summed(const std::vector<float>& ordered, int64_t count, int64_t keep,
                                        float temperature) {
        const int64_t chunk = (keep + 1023) / 1024;
        Sums before, through;
        double base = 0;
        for (int64_t begin = 0; begin < count; begin += chunk) {
            double inside = 0;
            for (int64_t i = begin; i < std::min(begin + chunk, count); ++i) {
                const double weight = samplingWeight(ordered[i], ordered[0], temperature);
                before.push_back(base + inside);
                inside = inside + weight;
                through.push_back(base + inside);
            }
            base = base + inside;
        }
        return {before, through};
    }
};

// Draws on and next to the bounds between candidates reveal sums that are added in another order. This takes weights of
// very different sizes, because a few thousand floats of similar size have an exact sum in doubles in any order.
TEST(Sample, SumsAreAddedInTheRulesOrder) {
    for (const int count : {700, 1024, 1025, 5000, 5001, 20001}) {
        SamplingRule rule;
        rule.temperature = 0.7f;
        rule.topK = 0, rule.topP = count % 2 ? 1 : std::nextafter(1.0f, 0.0f), rule.minP = 0;
        std::vector<float> logits = randomLogits(static_cast<size_t>(count), static_cast<unsigned>(count), 8);
        std::sort(logits.begin(), logits.end(), std::greater<>());  // so that a token's id is its place in the order
        const PlainRule plain(logits, rule);
        ASSERT_GT(plain.kept, 100);
        const double total = plain.through[plain.kept - 1];
        for (int64_t i = 0; i < plain.kept; i += std::max<int64_t>(1, plain.kept / 100)) {
            const double bound = plain.through[i] / total;
            for (const double draw : {std::nextafter(bound, 0.0), bound, std::nextafter(bound, 1.0)}) {
                if (draw >= 1) continue;
                std::vector<float> copy = logits;
                ASSERT_EQ(sampleOnHost(copy.data(), count, rule, {}, draw), plain.choice(draw)) << i << " of " << count;
            }
        }
    }
}

// If a chunk has several candidates, their sums are added in another order. The distribution stays the same.
TEST(Sample, ManyCandidatesAreDrawnByTheirShare) {
    SamplingRule rule;
    rule.temperature = 0.7f;
    rule.topK = 0, rule.topP = 0.9f, rule.minP = 0.001f;
    const std::vector<float> logits = randomLogits(5000, 77);
    const std::vector<double> expected = expectedDistribution(rule, logits);
    std::vector<int32_t> order(logits.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    double before = 0;
    size_t next = 0;
    for (size_t r = 0; r < order.size() && expected[order[r]] > 0; ++r) {
        const double share = expected[order[r]];
        if (r == next) {
            std::vector<float> copy = logits;
            ASSERT_EQ(sampleOnHost(copy.data(), 5000, rule, {}, before + share / 2), order[r]) << "rank " << r;
            next += 1 + r / 20;
        }
        before += share;
    }
    EXPECT_GT(next, 500u);  // enough candidates passed the filters for the test to mean something
}

}  // namespace
