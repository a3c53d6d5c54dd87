// Choosing tokens on the GPU: the same logits, settings and random number always give the token that the CPU chooses.
#include <algorithm>
#include <cmath>

#include "cpu/sample.h"
#include "gpu_test.h"
#include "kernels/sampling/sampling.h"

namespace sharpi::cuda {
namespace {

constexpr int64_t kLargest = 152000;

class Sampling : public GpuTest {
protected:
    void SetUp() override {
        GpuTest::SetUp();
        if (IsSkipped()) return;
        // The logits behind the vocabulary would be chosen if they were read.
        _logits = std::make_unique<DeviceArray<float>>(std::vector<float>(kLargest + 4096, 1e30f));
        _adjustments = std::make_unique<DeviceArray<TokenAdjustment>>(size_t{4096});
        _scratch = std::make_unique<DeviceArray<uint8_t>>(samplingScratchBytes(kLargest));
        _token = std::make_unique<DeviceArray<int32_t>>(size_t{1});
    }

    int32_t onDevice(const std::vector<float>& logits, const SamplingRule& rule,
                     const std::vector<TokenAdjustment>& adjustments, double draw) {
        const auto vocab = static_cast<int64_t>(logits.size());
        stream().upload(_logits->get(), logits.data(), logits.size() * sizeof(float));
        if (!adjustments.empty())
            stream().upload(_adjustments->get(), adjustments.data(), adjustments.size() * sizeof(TokenAdjustment));
        sampleTokens(stream(), _logits->get(), vocab, {{draw, rule, 0, static_cast<int32_t>(adjustments.size()), 0, 0}},
                     _adjustments->get(), _scratch->get(), _token->get());
        int32_t token = -2;
        stream().download(&token, _token->get(), sizeof token);
        const std::vector<float> beyond(16, 1e30f);
        stream().upload(_logits->get() + vocab, beyond.data(), beyond.size() * sizeof(float));
        return token;
    }

    // Returns true if the token is not simply the best one, so that the draw mattered.
    bool check(std::vector<float> logits, const SamplingRule& rule, const std::vector<TokenAdjustment>& adjustments,
               double draw) {
        const int32_t actual = onDevice(logits, rule, adjustments, draw);
        const auto vocab = static_cast<int64_t>(logits.size());
        const int32_t expected = sampleOnHost(logits.data(), vocab, rule, adjustments, draw);
        EXPECT_EQ(expected, actual) << "vocab " << vocab << ", temperature " << rule.temperature << ", top-k "
                                    << rule.topK << ", top-p " << rule.topP << ", min-p " << rule.minP
                                    << ", adjustments " << adjustments.size() << ", draw " << draw;
        return expected >= 0 && expected != std::max_element(logits.begin(), logits.end()) - logits.begin();
    }

    template <typename T> T oneOf(std::initializer_list<T> values) {
        return values.begin()[random()() % values.size()];
    }
    double uniform() { return static_cast<double>(_wide() >> 11) * 0x1p-53; }

    std::vector<float> someLogits(int64_t vocab) {
        auto logits = randomFloats(vocab, oneOf({0.1f, 1.0f, 3.0f, 10.0f}));
        const auto each = [&](auto change) {
            for (float& l : logits) l = change(l);
        };
        switch (random()() % 10) {
        case 0: each([](float l) { return std::round(l); }); break;  // ties, zeros of both signs
        case 1: each([](float) { return 1.5f; }); break;
        case 2: each([&](float l) { return random()() % 4 ? l : NAN; }); break;
        case 3: each([&](float l) { return random()() % 4 ? l : -INFINITY; }); break;
        case 4: each([&](float l) { return random()() % 1000 ? l : INFINITY; }); break;
        case 5: each([](float l) { return l * 1e37f; }); break;
        case 6: each([&](float l) { return random()() % 50 ? -INFINITY : l; }); break;
        default: break;
        }
        return logits;
    }

    SamplingRule someRule() {
        SamplingRule rule;
        rule.temperature = oneOf({0.0f, 0.1f, 0.8f, 0.8f, 1.0f, 1.0f, 2.0f, 10.0f, 1e-30f});
        rule.topK = oneOf({0, 0, 1, 2, 40, 40, 127, 128, 129, 1000, 1025, 5000});
        rule.topP = oneOf({1.0f, 1.0f, 0.95f, 0.5f, 1e-6f});
        rule.minP = oneOf({0.0f, 0.0f, 0.05f, 0.001f, 1.0f});
        rule.repetitionPenalty = oneOf({1.0f, 1.3f, 0.5f, 1e-30f});
        rule.presencePenalty = oneOf({0.0f, 0.7f, -3.0f});
        rule.frequencyPenalty = oneOf({0.0f, 0.3f, 1e37f});
        return rule;
    }

    std::vector<TokenAdjustment> someAdjustments(int64_t vocab) {
        std::vector<TokenAdjustment> list;
        const int64_t count = random()() % 3 ? 0 : std::min<int64_t>(vocab, random()() % 300);
        if (!count) return list;
        const int64_t step = vocab / count;
        for (int64_t i = 0; i < count; ++i) {
            const auto token = static_cast<int32_t>(i * step + random()() % step);
            list.push_back({token, static_cast<int32_t>(random()() % 4), oneOf({0.0f, 2.0f, -1.5f, 8.0f, -INFINITY})});
        }
        return list;
    }

private:
    std::unique_ptr<DeviceArray<float>> _logits;
    std::unique_ptr<DeviceArray<TokenAdjustment>> _adjustments;
    std::unique_ptr<DeviceArray<uint8_t>> _scratch;
    std::unique_ptr<DeviceArray<int32_t>> _token;
    std::mt19937_64 _wide{std::random_device{}()};
};

TEST_F(Sampling, AnySettingsOnSmallVocabularies) {
    int interesting = 0;
    for (int i = 0; i < 6000 && !HasFailure(); ++i) {
        const int64_t vocab = i % 3 ? 1 + random()() % 70 : 1 + random()() % 5000;
        const double draw = random()() % 10 ? uniform() : oneOf({0.0, 0.5, 1 - 0x1p-53});
        interesting += check(someLogits(vocab), someRule(), someAdjustments(vocab), draw);
    }
    EXPECT_GT(interesting, 500);
}

TEST_F(Sampling, AnySettingsOnRealVocabularies) {
    int interesting = 0;
    for (int i = 0; i < 150 && !HasFailure(); ++i) {
        const int64_t vocab = oneOf<int64_t>({32000, 49152, 128256, 151936, 65536, 65537});
        interesting += check(someLogits(vocab), someRule(), someAdjustments(vocab), uniform());
    }
    EXPECT_GT(interesting, 15);
}

TEST_F(Sampling, EdgesOfTilesAndTiesAcrossThem) {
    for (const int64_t vocab : {1, 2, 127, 128, 129, 2047, 2048, 2049, 4096, 4097, 150000}) {
        for (const int32_t topK : {0, 1, 40, 128, 129}) {
            for (const double draw : {0.0, 0.3, 0.999999, 1 - 0x1p-53}) {
                SamplingRule rule;
                rule.topK = topK, rule.topP = 1, rule.minP = 0, rule.temperature = 1;
                check(std::vector<float>(vocab, 0.25f), rule, {}, draw);
                std::vector<float> rising(vocab), last(vocab, -INFINITY);
                for (int64_t i = 0; i < vocab; ++i) rising[i] = static_cast<float>(i) * 1e-4f;
                last.back() = -3;
                check(rising, rule, {}, draw);
                check(last, rule, {}, draw);
                rule.temperature = 0;
                check(rising, rule, {}, draw);
                check(last, rule, {{static_cast<int32_t>(vocab - 1), 1, -INFINITY}}, draw);
            }
        }
    }
}

// Many closely spaced draws: the bounds between neighbouring tokens are the CPU's to the last bit.
TEST_F(Sampling, TheBoundsBetweenTokensAreTheSame) {
    for (const int32_t topK : {0, 40, 3000}) {
        SamplingRule rule;
        rule.topK = topK;
        const auto logits = randomFloats(6000, 1.5f);
        double low = 0, high = 1;  // bisects to one bound
        const auto host = [&](double draw) {
            auto copy = logits;
            return sampleOnHost(copy.data(), 6000, rule, {}, draw);
        };
        const int32_t first = host(low);
        for (int i = 0; i < 60; ++i) {
            const double middle = (low + high) / 2;
            if (middle <= low || middle >= high) break;
            check(logits, rule, {}, middle);
            (host(middle) == first ? low : high) = middle;
        }
        check(logits, rule, {}, low);
        if (high < 1) check(logits, rule, {}, high);
        EXPECT_NE(host(low), host(std::min(high, 1 - 0x1p-53)));
    }
}

// Rows of any rules and adjustments, in any order: each gets the token that it gets alone, and rows that nothing is
// chosen from stay as they are.
TEST_F(Sampling, RowsInOneCallGetWhatEachGetsAlone) {
    for (int round = 0; round < 60 && !HasFailure(); ++round) {
        const int64_t vocab = round % 6 == 0 ? 151936 : 1 + random()() % 6000;
        const auto held = 1 + static_cast<int64_t>(random()() % (round % 6 == 0 ? 12 : 90));
        std::vector<int16_t> order(held);
        for (int16_t i = 0; i < held; ++i) order[i] = i;
        std::shuffle(order.begin(), order.end(), random());
        order.resize(1 + random()() % held);
        std::vector<float> logits;
        for (int64_t i = 0; i < held; ++i) {
            const auto row = someLogits(vocab);
            logits.insert(logits.end(), row.begin(), row.end());
        }
        const SamplingRule common = someRule();
        std::vector<RowChoice> choices;
        std::vector<TokenAdjustment> adjustments(3);  // nobody's
        std::vector<int32_t> expected(order.size());
        std::vector<bool> chosenFrom(held);
        for (size_t i = 0; i < order.size(); ++i) {
            RowChoice choice{uniform(), random()() % 2 ? common : someRule()};
            const auto list = someAdjustments(vocab);
            choice.firstAdjustment = static_cast<int32_t>(adjustments.size());
            choice.adjustments = static_cast<int32_t>(list.size());
            adjustments.insert(adjustments.end(), list.begin(), list.end());
            choice.row = order[i];
            choice.token = static_cast<int16_t>(order.size() - 1 - i);
            choices.push_back(choice);
            const auto row = logits.begin() + order[i] * vocab;
            std::vector<float> copy(row, row + vocab);
            expected[choice.token] = sampleOnHost(copy.data(), vocab, choice.rule, list, choice.draw);
            chosenFrom[order[i]] = true;
        }
        const DeviceArray<float> deviceLogits(logits);
        const DeviceArray<TokenAdjustment> deviceAdjustments(adjustments);
        const DeviceArray<uint8_t> scratch(samplingScratchBytes(vocab));
        const DeviceArray<int32_t> tokens(order.size());
        sampleTokens(stream(), deviceLogits.get(), vocab, choices, deviceAdjustments.get(), scratch.get(),
                     tokens.get());
        EXPECT_EQ(tokens.read(), expected) << order.size() << " of " << held << " rows of " << vocab;
        const auto after = deviceLogits.read();
        for (int64_t i = 0; i < held; ++i) {
            if (chosenFrom[i]) continue;
            const auto same = [&](const auto& of) {
                return std::vector<float>(of.begin() + i * vocab, of.begin() + (i + 1) * vocab);
            };
            EXPECT_TRUE(sameBits(same(logits), same(after))) << "row " << i << " was not chosen from";
        }
    }
}

// Rows that keep few candidates, and greedy ones, take two launches however many they are.
TEST_F(Sampling, RowsShareLaunches) {
    const int64_t vocab = 5000;
    const DeviceArray<float> logits(randomFloats(64 * vocab));
    const DeviceArray<uint8_t> scratch(samplingScratchBytes(vocab));
    const DeviceArray<int32_t> tokens(size_t{64});
    for (const float temperature : {0.0f, 0.8f}) {
        for (const int16_t rows : {1, 2, 8, 9, 64}) {
            std::vector<RowChoice> choices(rows);
            for (int16_t i = 0; i < rows; ++i) {
                choices[i].rule.temperature = temperature;
                choices[i].row = choices[i].token = i;
            }
            const int64_t before = stream().launches();
            sampleTokens(stream(), logits.get(), vocab, choices, nullptr, scratch.get(), tokens.get());
            EXPECT_EQ(stream().launches() - before, 2) << rows << " rows";
        }
    }
}

TEST_F(Sampling, PlainGreedyLeavesTheLogits) {
    const auto logits = randomFloats(5001);
    const DeviceArray<float> deviceLogits(logits);
    const DeviceArray<uint8_t> scratch(samplingScratchBytes(5001));
    const DeviceArray<int32_t> token(1);
    SamplingRule rule;
    rule.temperature = 0;
    sampleTokens(stream(), deviceLogits.get(), 5001, {{0.5, rule}}, nullptr, scratch.get(), token.get());
    EXPECT_EQ(token.read()[0], std::max_element(logits.begin(), logits.end()) - logits.begin());
    EXPECT_TRUE(sameBits(logits, deviceLogits.read()));
}

TEST_F(Sampling, CanBeCaptured) {
    for (const int32_t topK : {0, 40}) {
        SamplingRule rule;
        rule.topK = topK;
        auto logits = randomFloats(30000);
        const DeviceArray<float> deviceLogits(logits);
        const DeviceArray<uint8_t> scratch(samplingScratchBytes(30000));
        const DeviceArray<int32_t> token(1);
        const auto graph = stream().capture([&] {
            sampleTokens(stream(), deviceLogits.get(), 30000, {{0.7, rule}}, nullptr, scratch.get(), token.get());
        });
        EXPECT_EQ(token.read()[0], -1) << "nothing ran yet";
        stream().replay(*graph);
        const int32_t expected = sampleOnHost(logits.data(), 30000, rule, {}, 0.7);
        EXPECT_EQ(token.read()[0], expected);
    }
}

}  // namespace
}  // namespace sharpi::cuda
