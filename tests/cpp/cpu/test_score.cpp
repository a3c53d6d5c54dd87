// Log-probabilities on the CPU, and masks: the rules of core/rules/log_softmax.h and of core/rules/sampling_rule.h's
// section 0, against plain arithmetic, and the same bits from every table.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/rules/log_softmax.h"
#include "cpu/sample.h"
#include "cpu/score.h"
#include "distributions.h"
#include "kernel_tables.h"
#include "seed.h"

namespace {

using namespace sharpi;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(Log, IsWithinItsBoundEverywhere) {
    std::mt19937_64 random(testSeed(1));
    double worst = 0;
    const auto compare = [&](double x) {
        const double exact = std::log(x), unit = std::nextafter(std::abs(exact), kInfinity) - std::abs(exact);
        worst = std::max(worst, std::abs(portableLog(x) - exact) / unit);
    };
    std::uniform_real_distribution<double> exponent(-300, 300), near(-0.5, 0.5), total(1, 300000);
    for (int i = 0; i < 200000; ++i) {
        compare(std::exp2(exponent(random)));
        compare(1 + near(random) * std::exp2(-static_cast<double>(random() % 50)));
        compare(total(random));
    }
    EXPECT_LE(worst, 3);
    EXPECT_EQ(portableLog(1), 0);
    EXPECT_FALSE(std::signbit(portableLog(1)));
}

// Section 2 and 3, word by word.
std::vector<float> logProbabilities(const std::vector<float>& logits) {
    float highest = -kInfinity;
    for (const float logit : logits) highest = logit > highest ? logit : highest;
    double total = 0;
    for (size_t lane = 0; lane < 1024; ++lane) {
        double sum = 0;
        for (size_t i = lane; i < logits.size(); i += 1024)
            if (!std::isnan(logits[i])) sum = sum + static_cast<double>(portableExp(logits[i] - highest));
        total = total + sum;
    }
    std::vector<float> all;
    for (const float logit : logits) {
        const double value = (static_cast<double>(logit) - static_cast<double>(highest)) - portableLog(total);
        all.push_back(std::isnan(logit) ? -kInfinity : static_cast<float>(value));
    }
    return all;
}

bool sameBits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

TEST(Score, EveryTableFollowsTheRule) {
    for (const int64_t vocab : {1, 7, 100, 1024, 1025, 5000, 151936}) {
        std::vector<float> logits = randomLogits(static_cast<size_t>(vocab), static_cast<unsigned>(vocab), 6);
        if (vocab > 10) {
            logits[3] = kNaN;
            logits[5] = -kInfinity;
            logits[7] = -200;  // its weight is 0
        }
        const std::vector<float> expected = logProbabilities(logits);
        for (const cpu::Kernels* table : tables()) {
            SCOPED_TRACE(std::string(table->name) + " " + std::to_string(vocab));
            for (int64_t token = 0; token < vocab; token += 1 + vocab / 20) {
                const Score score = scoreOnHost(*table, logits.data(), vocab, static_cast<int32_t>(token), 0);
                EXPECT_TRUE(sameBits(score.logProbability, expected[static_cast<size_t>(token)])) << token;
                EXPECT_TRUE(score.best.empty());
            }
        }
    }
}

// The scores are floats, which hide the order of the sums; the lanes do not.
TEST(Score, EveryTableFillsTheSameLanes) {
    for (const int64_t vocab : {1, 15, 16, 17, 1023, 1024, 1030, 20001}) {
        std::vector<float> logits = randomLogits(static_cast<size_t>(vocab), static_cast<unsigned>(vocab), 8);
        const float highest = *std::max_element(logits.begin(), logits.end());
        if (vocab > 10) logits[3] = kNaN;
        std::vector<double> expected(1024, 0.0);
        for (size_t i = 0; i < logits.size(); ++i)
            if (!std::isnan(logits[i])) expected[i % 1024] += static_cast<double>(portableExp(logits[i] - highest));
        for (const cpu::Kernels* table : tables()) {
            std::vector<double> lanes(1024, 0.0);
            table->addExps(logits.data(), highest, vocab, lanes.data());
            EXPECT_EQ(std::memcmp(lanes.data(), expected.data(), 1024 * sizeof(double)), 0) << table->name;
        }
    }
}

TEST(Score, IsThePlainLogSoftmax) {
    const std::vector<float> logits = randomLogits(30000, 3, 5);
    const float highest = *std::max_element(logits.begin(), logits.end());
    double total = 0, sum = 0;
    for (const float logit : logits) total += std::exp(static_cast<double>(logit) - highest);
    for (size_t i = 0; i < logits.size(); i += 97) {
        const double exact = static_cast<double>(logits[i]) - highest - std::log(total);
        const float got = scoreOnHost(*tables()[0], logits.data(), 30000, static_cast<int32_t>(i), 0).logProbability;
        // The exponentials have errors of one unit, and the result is a float.
        EXPECT_NEAR(got, exact, 2e-7 * std::max(1.0, std::abs(exact)));
    }
    for (const TokenScore& best : scoreOnHost(*tables()[0], logits.data(), 30000, 0, 20).best)
        sum += std::exp(best.logProbability);
    EXPECT_GT(sum, 0);
    EXPECT_LE(sum, 1);
}

TEST(Score, TheLikeliestComeInOrder) {
    const std::vector<float> logits = {1, 3, kNaN, 3, 0.0f, -0.0f, -kInfinity, 2, 3};
    const auto ids = [&](int32_t best) {
        std::vector<int32_t> found;
        for (const TokenScore& one : scoreOnHost(*tables()[0], logits.data(), 9, 0, best).best)
            found.push_back(one.token);
        return found;
    };
    EXPECT_EQ(ids(1), std::vector<int32_t>({1}));
    EXPECT_EQ(ids(4), std::vector<int32_t>({1, 3, 8, 7}));
    EXPECT_EQ(ids(20), std::vector<int32_t>({1, 3, 8, 7, 0, 4, 5, 2, 6})) << "all that there are";
    std::mt19937 random(testSeed(4));
    std::vector<float> many(10000);
    for (float& logit : many) logit = static_cast<float>(random() % 500);
    std::vector<int32_t> order(many.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return many[a] > many[b]; });
    const std::vector<float> expected = logProbabilities(many);
    const Score score = scoreOnHost(*tables()[0], many.data(), 10000, 0, 20);
    ASSERT_EQ(score.best.size(), 20u);
    for (size_t i = 0; i < 20; ++i) {
        EXPECT_EQ(score.best[i].token, order[i]);
        EXPECT_TRUE(sameBits(score.best[i].logProbability, expected[static_cast<size_t>(order[i])]));
    }
}

TEST(Score, InfiniteLogitsHaveScoresToo) {
    const auto score = [](const std::vector<float>& logits, int32_t token) {
        return scoreOnHost(*tables()[0], logits.data(), static_cast<int64_t>(logits.size()), token, 0).logProbability;
    };
    EXPECT_EQ(score({1, kInfinity, 2}, 1), 0);
    EXPECT_EQ(score({1, kInfinity, 2}, 2), -kInfinity);
    EXPECT_EQ(score({-kInfinity, kNaN}, 0), -kInfinity);
    EXPECT_EQ(score({-kInfinity, kNaN}, 1), -kInfinity);
    EXPECT_EQ(score({1, 2}, -1), -kInfinity) << "no token was chosen";
    EXPECT_EQ(score({5}, 0), 0);
}

// --- masks -----------------------------------------------------------------------------------------------------------

SamplingRule ruleWith(float temperature, int32_t topK) {
    SamplingRule rule;
    rule.temperature = temperature;
    rule.topK = topK;
    rule.topP = 1, rule.minP = 0;
    return rule;
}

TEST(Mask, OnlyAllowedTokensAreChosen) {
    for (const int64_t vocab : {1, 31, 32, 33, 1000}) {
        std::vector<float> logits = randomLogits(static_cast<size_t>(vocab), 5, 3);
        for (const SamplingRule& rule : {ruleWith(0, 0), ruleWith(1, 5), ruleWith(1, 0)}) {
            std::vector<uint32_t> words(static_cast<size_t>(maskWords(vocab)));
            std::vector<float> copy = logits;
            EXPECT_EQ(sampleOnHost(copy.data(), vocab, rule, {}, 0.5, words), -1) << "all are forbidden";
            for (int64_t only = 0; only < vocab; only += 1 + vocab / 7) {
                words.assign(words.size(), 0);
                words[static_cast<size_t>(only / 32)] = uint32_t{1} << (only % 32);
                copy = logits;
                EXPECT_EQ(sampleOnHost(copy.data(), vocab, rule, {}, 0.99, words), only);
            }
        }
    }
}

// A mask is a bias of -infinity on the forbidden tokens; no bias or penalty brings one back.
TEST(Mask, IsABiasOfMinusInfinity) {
    std::mt19937 random(testSeed(6));
    for (int round = 0; round < 200; ++round) {
        const std::vector<float> logits = randomLogits(500, random(), 3);
        SamplingRule rule = ruleWith(round % 3 ? 0.8f : 0, round % 2 ? 20 : 0);
        rule.repetitionPenalty = 1.3f;
        rule.presencePenalty = -50;
        std::vector<uint32_t> words(16, ~uint32_t{0});
        std::vector<TokenAdjustment> changes, biases;
        for (int32_t token = 0; token < 500; ++token) {
            const bool forbidden = random() % 3 == 0, changed = random() % 5 == 0;
            if (forbidden) words[static_cast<size_t>(token / 32)] &= ~(uint32_t{1} << (token % 32));
            if (changed) changes.push_back({token, 2, 40.0f});
            if (forbidden) biases.push_back({token, 0, -kInfinity});
            else if (changed) biases.push_back(changes.back());
        }
        const double draw = static_cast<double>(random() % 1000) / 1000;
        std::vector<float> masked = logits, biased = logits;
        EXPECT_EQ(sampleOnHost(masked.data(), 500, rule, changes, draw, words),
                  sampleOnHost(biased.data(), 500, rule, biases, draw));
    }
}

}  // namespace
