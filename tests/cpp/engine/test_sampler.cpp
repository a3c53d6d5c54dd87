// Sampling: ties, filters, penalties and reproducibility. Whole distributions of draws are compared with a plain
// implementation of the same rules (distributions.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cpu/sample.h"
#include "distributions.h"
#include "engine/texts/sampler.h"
#include "seed.h"

namespace {

using namespace sharpi;

const float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = std::numeric_limits<float>::quiet_NaN();

// Settings with which no filter removes a token.
SamplingParams open() {
    SamplingParams params;
    params.temperature = 1;
    params.topK = 0;
    params.topP = 1;
    params.minP = 0;
    return params;
}

// Makes one choice as the engine makes it on the CPU.
int32_t choose(Sampler& sampler, std::vector<float>& logits, const std::vector<int32_t>& history) {
    const Choice choice = sampler.next(history);
    sampler.advance(1);
    return checkedToken(
        sampleOnHost(logits.data(), static_cast<int64_t>(logits.size()), choice.rule, choice.adjustments, choice.draw));
}

int32_t draw(const SamplingParams& params, std::vector<float> logits, const std::vector<int32_t>& history = {}) {
    Sampler sampler(params, static_cast<int64_t>(logits.size()));
    return choose(sampler, logits, history);
}

// Pearson's chi-square test over `draws` draws. Tokens that are expected fewer than 5 times are counted together. With
// d degrees of freedom the sum has mean d and variance 2 d. Chance exceeds the bound, mean + 5 deviations + 5, for
// about one seed in 10^5, and the seed is fixed.
void expectDraws(const SamplingParams& params, const std::vector<float>& logits, int draws) {
    const std::vector<double> expected = expectedDistribution(params, logits);
    Sampler sampler(params, static_cast<int64_t>(logits.size()));
    std::vector<int> counts(logits.size(), 0);
    for (int i = 0; i < draws; ++i) {
        std::vector<float> copy = logits;
        ++counts.at(choose(sampler, copy, {}));
    }
    double chi = 0, restExpected = 0;
    int cells = 0, restCount = 0;
    for (size_t i = 0; i < logits.size(); ++i) {
        const double mean = expected[i] * draws;
        if (mean == 0) {
            ASSERT_EQ(counts[i], 0) << "token " << i << " was filtered and drawn";
        } else if (mean < 5) {
            restExpected += mean;
            restCount += counts[i];
        } else {
            chi += (counts[i] - mean) * (counts[i] - mean) / mean;
            ++cells;
        }
    }
    if (restExpected >= 5) {
        chi += (restCount - restExpected) * (restCount - restExpected) / restExpected;
        ++cells;
    }
    const double freedom = std::max(1, cells - 1);
    EXPECT_LT(chi, freedom + 5 * std::sqrt(2 * freedom) + 5) << cells << " cells";
}

TEST(Sampler, GreedyTakesTheBestAndTheLowerOfTies) {
    SamplingParams params;
    params.temperature = 0;
    EXPECT_EQ(draw(params, {0, 3, 1, 3, 2}), 1);
    EXPECT_EQ(draw(params, {5, 5, 5}), 0);
    EXPECT_EQ(draw(params, {-kInfinity, -9, -kInfinity}), 1);
    for (unsigned seed = 0; seed < 50; ++seed) {
        const auto logits = randomLogits(300, seed);
        EXPECT_EQ(draw(params, logits), std::max_element(logits.begin(), logits.end()) - logits.begin());
    }
}

TEST(Sampler, DrawsFollowTheDistribution) {
    struct Case {
        float temperature;
        int32_t topK;
        float topP, minP;
    };
    const Case cases[] = {{1, 0, 1, 0},          {0.5f, 0, 1, 0},          {2, 0, 1, 0},
                          {1, 5, 1, 0},          {1, 1000, 1, 0},          {1, 0, 0.7f, 0},
                          {1, 0, 1, 0.1f},       {0.8f, 40, 0.95f, 0.05f}, {1.5f, 20, 0.6f, 0.02f},
                          {0.7f, 10, 0.9f, 0.3f}};
    unsigned seed = 1;
    for (const Case& c : cases) {
        SCOPED_TRACE("case " + std::to_string(seed));
        SamplingParams params = open();
        params.temperature = c.temperature;
        params.topK = c.topK;
        params.topP = c.topP;
        params.minP = c.minP;
        params.seed = seed;
        expectDraws(params, randomLogits(60, seed), 20000);
        ++seed;
    }
}

TEST(Sampler, TiesAtTheEdgeOfTopKKeepTheLowerIds) {
    SamplingParams params = open();
    params.topK = 3;
    std::set<int32_t> drawn;
    for (params.seed = 0; params.seed < 200; ++params.seed) drawn.insert(draw(params, {1, 1, 2, 1, 1}));
    EXPECT_EQ(drawn, (std::set<int32_t>{0, 1, 2}));
}

// Tokens of equal weight, whose sums are exact: a token is cut if those before it already make up top-p, to the bit.
TEST(Sampler, TiesAtTheEdgeOfTopPKeepTheLowerIds) {
    struct Case {
        float topP;
        std::vector<float> logits;
        std::set<int32_t> kept;
    };
    const Case cases[] = {
        {0.5f, {1, 1}, {0}},  // exactly half of the weight is before the second token
        {0.25f, {2, 2, 2, 2}, {0}},
        {0.5f, {2, 2, 2, 2}, {0, 1}},
        {0.75f, {2, 2, 2, 2}, {0, 1, 2}},
        {std::nextafter(0.5f, 1.0f), {2, 2, 2, 2}, {0, 1, 2}},
        {std::nextafter(0.5f, 0.0f), {2, 2, 2, 2}, {0, 1}},
        {0.75f, {-kInfinity, 3, -kInfinity, 3, 3, 3}, {1, 3, 4}},
    };
    for (const Case& c : cases) {
        SamplingParams params = open();
        params.topP = c.topP;
        std::set<int32_t> drawn;
        for (params.seed = 0; params.seed < 300; ++params.seed) drawn.insert(draw(params, c.logits));
        EXPECT_EQ(drawn, c.kept) << "top-p " << c.topP << " of " << c.logits.size();
    }
}

TEST(Sampler, TiesAtTheEdgeOfMinPStay) {
    SamplingParams params = open();
    params.minP = 1;
    std::set<int32_t> drawn;
    for (params.seed = 0; params.seed < 200; ++params.seed) drawn.insert(draw(params, {1, 3, 3, 2.999f, 3}));
    EXPECT_EQ(drawn, (std::set<int32_t>{1, 2, 4}));
}

TEST(Sampler, OneCandidateIsCertain) {
    const auto logits = randomLogits(100, 5);
    const auto best = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    for (uint64_t seed = 0; seed < 50; ++seed) {
        for (int which = 0; which < 3; ++which) {
            SamplingParams params = open();
            params.seed = seed;
            if (which == 0) params.topK = 1;
            if (which == 1) params.topP = 1e-6f;
            if (which == 2) params.minP = 1;
            EXPECT_EQ(draw(params, logits), best);
        }
    }
}

// The logits as one choice leaves them: adjusted in place.
std::vector<float> adjusted(SamplingParams params, std::vector<float> logits, const std::vector<int32_t>& history) {
    params.temperature = 0;
    Sampler sampler(params, static_cast<int64_t>(logits.size()));
    choose(sampler, logits, history);
    return logits;
}

TEST(Sampler, PenaltiesOfTheRecentTokens) {
    const std::vector<int32_t> history = {4, 0, 1, 1, 2, 1};
    const std::vector<float> logits = {3, 2, -1, 5, 4};
    SamplingParams params;
    params.penaltyWindow = 5;  // token 4 is outside of it
    params.repetitionPenalty = 2;
    EXPECT_EQ(adjusted(params, logits, history), (std::vector<float>{1.5f, 1, -2, 5, 4}));
    params.repetitionPenalty = 1;
    params.presencePenalty = 0.5f;
    EXPECT_EQ(adjusted(params, logits, history), (std::vector<float>{2.5f, 1.5f, -1.5f, 5, 4}));
    params.frequencyPenalty = 0.25f;
    EXPECT_EQ(adjusted(params, logits, history), (std::vector<float>{2.25f, 0.75f, -1.75f, 5, 4}));
    params.repetitionPenalty = 2;  // applies before the penalties that are subtracted
    EXPECT_EQ(adjusted(params, logits, history), (std::vector<float>{0.75f, -0.25f, -2.75f, 5, 4}));
    params.penaltyWindow = 0;
    EXPECT_EQ(adjusted(params, logits, history), logits);
    params.penaltyWindow = 1000;  // longer than the history
    params.repetitionPenalty = 1;
    params.frequencyPenalty = 0;
    EXPECT_EQ(adjusted(params, logits, history), (std::vector<float>{2.5f, 1.5f, -1.5f, 5, 3.5f}));
    EXPECT_EQ(adjusted(params, logits, {}), logits);
}

TEST(Sampler, OneAdjustmentATokenByAscendingToken) {
    SamplingParams params;
    params.presencePenalty = 1;
    params.penaltyWindow = 5;
    params.logitBias = {{0, 0.5f}, {3, -2.0f}, {7, 1.0f}};
    Sampler sampler(params, 10);
    const auto listed = [&](const std::vector<int32_t>& history) {
        std::vector<std::array<float, 3>> list;
        for (const TokenAdjustment& a : sampler.next(history).adjustments)
            list.push_back({float(a.token), float(a.times), a.bias});
        return list;
    };
    using List = std::vector<std::array<float, 3>>;
    EXPECT_EQ(listed({9, 9, 3, 8, 3, 1, 9}),
              (List{{0, 0, 0.5f}, {1, 1, 0}, {3, 2, -2}, {7, 0, 1}, {8, 1, 0}, {9, 1, 0}}));
    EXPECT_EQ(listed({}), (List{{0, 0, 0.5f}, {3, 0, -2}, {7, 0, 1}}));
    EXPECT_EQ(listed({7, 7}), (List{{0, 0, 0.5f}, {3, 0, -2}, {7, 2, 1}}));
}

TEST(Sampler, BiasThenPenaltiesOnTheSameToken) {
    SamplingParams params;
    params.repetitionPenalty = 2;
    params.presencePenalty = 0.25f;
    params.logitBias = {{0, 4.0f}, {1, -4.0f}};
    EXPECT_EQ(adjusted(params, {-1, 1, 9}, {0, 1}), (std::vector<float>{1.25f, -6.25f, 9}));
}

TEST(Sampler, BiasAddsAndForbids) {
    SamplingParams params;
    params.logitBias = {{1, 2.5f}, {3, -1.0f}};
    EXPECT_EQ(adjusted(params, {1, 2, 3, 4}, {}), (std::vector<float>{1, 4.5f, 3, 3}));
    params = open();
    params.logitBias = {{0, -kInfinity}, {3, -kInfinity}};
    std::set<int32_t> drawn;
    for (params.seed = 0; params.seed < 300; ++params.seed) drawn.insert(draw(params, {9, 1, 1.5f, 9}));
    EXPECT_EQ(drawn, (std::set<int32_t>{1, 2}));
    params.temperature = 0;
    EXPECT_EQ(draw(params, {9, 1, 1.5f, 9}), 2);
}

TEST(Sampler, TheSeedDecidesEverything) {
    const auto text = [](uint64_t seed) {
        SamplingParams params = open();
        params.seed = seed;
        Sampler sampler(params, 200);
        std::vector<int32_t> tokens;
        for (unsigned i = 0; i < 100; ++i) {
            auto logits = randomLogits(200, i);
            tokens.push_back(choose(sampler, logits, tokens));
        }
        return tokens;
    };
    EXPECT_EQ(text(42), text(42));
    EXPECT_NE(text(42), text(43));
    EXPECT_NE(text(0), text(uint64_t{1} << 32));  // all 64 bits count
}

// A position ahead of the text has the penalties and the random number that it gets once the text reaches it, no matter
// how many choices ahead were made and discarded.
TEST(Sampler, PositionsAheadAreThoseThatComeLater) {
    std::mt19937 random(sharpi::testSeed(11));
    for (int round = 0; round < 20; ++round) {
        SamplingParams params;
        params.seed = random();
        params.penaltyWindow = static_cast<int32_t>(random() % 12);
        params.presencePenalty = round % 2 ? 0.5f : 0.0f;
        params.logitBias = {{3, 1.0f}, {7, -1.0f}};
        Sampler one(params, 10), ahead(params, 10);
        std::vector<int32_t> history(random() % 6, 2), text = history;
        std::vector<Choice> expected;
        for (int i = 0; i < 60; ++i) {
            expected.push_back(one.next(text));
            one.advance(1);
            text.push_back(static_cast<int32_t>(random() % 10));
        }
        const size_t prompt = history.size();
        while (history.size() + 8 < text.size()) {
            const size_t asked = random() % 8, taken = random() % (asked + 1);
            for (size_t i = 0; i <= asked; ++i) {
                const std::vector<int32_t> drafted(text.begin() + static_cast<std::ptrdiff_t>(history.size()),
                                                   text.begin() + static_cast<std::ptrdiff_t>(history.size() + i));
                const Choice choice = ahead.next(history, drafted), &same = expected[history.size() - prompt + i];
                ASSERT_EQ(choice.draw, same.draw);
                ASSERT_EQ(choice.adjustments.size(), same.adjustments.size());
                for (size_t a = 0; a < same.adjustments.size(); ++a) {
                    EXPECT_EQ(choice.adjustments[a].token, same.adjustments[a].token);
                    EXPECT_EQ(choice.adjustments[a].times, same.adjustments[a].times);
                    EXPECT_EQ(choice.adjustments[a].bias, same.adjustments[a].bias);
                }
            }
            ahead.advance(taken + 1);
            for (size_t i = 0; i <= taken; ++i) history.push_back(text[history.size()]);
        }
        Sampler skipped(params, 10);
        skipped.advance(30);  // without a call of next()
        EXPECT_EQ(skipped.next(text).draw, expected[30].draw);
    }
}

TEST(Sampler, NamesTheSettingThatIsOutOfRange) {
    struct Case {
        const char* names;
        std::function<void(SamplingParams&)> spoil;
    };
    const Case cases[] = {
        {"temperature", [](SamplingParams& p) { p.temperature = -0.1f; }},
        {"temperature", [](SamplingParams& p) { p.temperature = kNaN; }},
        {"temperature", [](SamplingParams& p) { p.temperature = kInfinity; }},
        {"top-k", [](SamplingParams& p) { p.topK = -1; }},
        {"top-p", [](SamplingParams& p) { p.topP = 0; }},
        {"top-p", [](SamplingParams& p) { p.topP = 1.01f; }},
        {"top-p", [](SamplingParams& p) { p.topP = kNaN; }},
        {"min-p", [](SamplingParams& p) { p.minP = -0.01f; }},
        {"min-p", [](SamplingParams& p) { p.minP = 1.01f; }},
        {"min-p", [](SamplingParams& p) { p.minP = kNaN; }},
        {"repetition penalty", [](SamplingParams& p) { p.repetitionPenalty = 0; }},
        {"repetition penalty", [](SamplingParams& p) { p.repetitionPenalty = kNaN; }},
        {"penalties", [](SamplingParams& p) { p.presencePenalty = kInfinity; }},
        {"penalties", [](SamplingParams& p) { p.frequencyPenalty = kNaN; }},
        {"window", [](SamplingParams& p) { p.penaltyWindow = -1; }},
        {"bias", [](SamplingParams& p) { p.logitBias[-1] = 1; }},
        {"bias", [](SamplingParams& p) { p.logitBias[10] = 1; }},
        {"bias", [](SamplingParams& p) { p.logitBias[9] = kNaN; }},
    };
    for (const Case& c : cases) {
        SamplingParams params;
        EXPECT_NO_THROW(params.validate(10));
        c.spoil(params);
        try {
            Sampler sampler(params, 10);
            ADD_FAILURE() << c.names << " was accepted";
        } catch (const Error& e) {
            EXPECT_EQ(e.kind(), ErrorKind::InvalidArgument);
            EXPECT_NE(std::string(e.what()).find(c.names), std::string::npos) << e.what();
        }
    }
}

TEST(Sampler, NeverChoosesWhatCannotBeCompared) {
    for (const float temperature : {0.0f, 1.0f}) {
        SamplingParams params = open();
        params.temperature = temperature;
        for (unsigned seed = 0; seed < 50; ++seed) {
            params.seed = seed;
            EXPECT_EQ(draw(params, {kNaN, -kInfinity, 0.5f, kNaN}), 2);
        }
    }
}

TEST(Sampler, SaysSoWhenNothingMayBeChosen) {
    for (const float temperature : {0.0f, 1.0f}) {
        SamplingParams params = open();
        params.temperature = temperature;
        EXPECT_THROW(draw(params, {kNaN, -kInfinity, kNaN}), Error);
        params.logitBias = {{0, -kInfinity}, {1, -kInfinity}};
        EXPECT_THROW(draw(params, {1.0f, 2.0f}), Error);
    }
}

}  // namespace
