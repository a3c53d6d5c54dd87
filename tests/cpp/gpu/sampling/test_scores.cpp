// Log-probabilities and masks on the GPU: the same bits as on the CPU.
#include "kernels/sampling/scores.h"

#include <algorithm>
#include <cmath>

#include "cpu/sample.h"
#include "cpu/score.h"
#include "gpu_test.h"

namespace sharpi::cuda {
namespace {

class Scores : public GpuTest {
protected:
    std::vector<float> someLogits(int64_t count) {
        const float scales[] = {0.1f, 1, 3, 10};
        auto logits = randomFloats(static_cast<size_t>(count), scales[random()() % 4]);
        const auto each = [&](auto change) {
            for (float& l : logits) l = change(l);
        };
        switch (random()() % 9) {
        case 0: each([](float l) { return std::round(l); }); break;  // ties, zeros of both signs
        case 1: each([](float) { return 1.5f; }); break;
        case 2: each([&](float l) { return random()() % 4 ? l : NAN; }); break;
        case 3: each([&](float l) { return random()() % 4 ? l : -INFINITY; }); break;
        case 4: each([&](float l) { return random()() % 1000 ? l : INFINITY; }); break;
        case 5: each([](float l) { return l * 1e37f; }); break;
        case 6: each([](float) { return -INFINITY; }); break;
        default: break;
        }
        return logits;
    }
    std::vector<float> rowOf(const std::vector<float>& logits, int64_t row, int64_t vocab) {
        return {logits.begin() + row * vocab, logits.begin() + (row + 1) * vocab};
    }
    static bool same(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }
    static void expectScore(const RowScore& got, const Score& expected) {
        EXPECT_TRUE(same(got.logProbability, expected.logProbability))
            << got.logProbability << " " << expected.logProbability;
        for (size_t i = 0; i < expected.best.size(); ++i) {
            EXPECT_EQ(got.best[i], expected.best[i].token) << i;
            EXPECT_TRUE(same(got.bestLogProbability[i], expected.best[i].logProbability)) << i;
        }
    }
};

TEST_F(Scores, HaveTheCpusBits) {
    for (const int64_t vocab : {1, 2, 31, 100, 1023, 1024, 1025, 5000, 151936}) {
        for (const int64_t held : {1, 3, 64}) {
            if (vocab * held > 3000000) continue;
            SCOPED_TRACE(std::to_string(held) + " rows of " + std::to_string(vocab));
            std::vector<float> logits;
            for (int64_t row = 0; row < held; ++row) {
                const auto one = someLogits(vocab);
                logits.insert(logits.end(), one.begin(), one.end());
            }
            std::vector<ScoredRow> rows;
            std::vector<RowChoice> choices;
            std::vector<int32_t> tokens;
            for (int64_t row = held; row-- > 0;) {  // slots and rows differ
                const auto slot = static_cast<int16_t>(held - 1 - row);
                const auto best = static_cast<int32_t>(std::min<int64_t>(random()() % (kMostBest + 1), vocab));
                rows.push_back({static_cast<int16_t>(row), slot, best});
                RowChoice choice;
                choice.row = static_cast<int16_t>(row);
                choice.token = slot;
                choices.push_back(choice);
                tokens.push_back(random()() % 8 ? static_cast<int32_t>(random()() % static_cast<uint32_t>(vocab)) : -1);
            }
            const DeviceArray<float> deviceLogits(logits);
            const DeviceArray<int32_t> deviceTokens(tokens);
            const DeviceArray<RowScore> scores(static_cast<size_t>(held));
            const int64_t before = stream().launches();
            scoreRows(stream(), deviceLogits.get(), vocab, rows, scores.get());
            scoreChosen(stream(), deviceLogits.get(), vocab, choices, nullptr, deviceTokens.get(), scores.get());
            EXPECT_EQ(stream().launches() - before, 2) << "one for all rows";
            const std::vector<RowScore> got = scores.read();
            for (const ScoredRow& row : rows) {
                const auto slot = static_cast<size_t>(row.slot);
                const std::vector<float> one = rowOf(logits, row.row, vocab);
                expectScore(got[slot], scoreOnHost(cpu::kernels(), one.data(), vocab, tokens[slot], row.best));
            }
            EXPECT_TRUE(sameBits(logits, deviceLogits.read()));
        }
    }
}

TEST_F(Scores, NobodyWhoWantsNoneWaitsForThem) {
    const int64_t before = stream().launches();
    scoreRows(stream(), nullptr, 1000, {}, nullptr);
    scoreChosen(stream(), nullptr, 1000, {}, nullptr, nullptr, nullptr);
    adjustScored(stream(), nullptr, 1000, {}, nullptr);
    maskRows(stream(), nullptr, 1000, {}, nullptr);
    EXPECT_EQ(stream().launches(), before);
}

// A row that was adjusted is scored as the model left it.
TEST_F(Scores, AdjustmentsDoNotChangeScores) {
    const int64_t vocab = 5000;
    for (int round = 0; round < 10; ++round) {
        const std::vector<float> logits = randomFloats(static_cast<size_t>(2 * vocab), 3);
        std::vector<TokenAdjustment> adjustments;
        std::vector<RowChoice> choices(2);
        std::vector<int32_t> tokens;
        std::vector<float> adjusted = logits;
        for (int16_t row = 0; row < 2; ++row) {
            RowChoice& choice = choices[static_cast<size_t>(row)];
            choice.row = choice.token = row;
            choice.rule.repetitionPenalty = 1.3f;
            choice.rule.frequencyPenalty = 0.4f;
            choice.firstAdjustment = static_cast<int32_t>(adjustments.size());
            for (int32_t token = static_cast<int32_t>(random()() % 40); token < vocab; token += 1 + row * 300) {
                adjustments.push_back({token, static_cast<int32_t>(random()() % 3), randomFloats(1)[0]});
                float& logit = adjusted[static_cast<size_t>(row * vocab + token)];
                logit = adjustedLogit(logit, adjustments.back(), choice.rule);
            }
            choice.adjustments = static_cast<int32_t>(adjustments.size()) - choice.firstAdjustment;
            tokens.push_back(round % 2 ? adjustments.back().token : static_cast<int32_t>(random()() % vocab));
        }
        const DeviceArray<float> deviceLogits(logits);
        const DeviceArray<TokenAdjustment> list(adjustments);
        const DeviceArray<int32_t> deviceTokens(tokens);
        const DeviceArray<RowScore> scores(size_t{2});
        scoreRows(stream(), deviceLogits.get(), vocab, {{0, 0, 5}, {1, 1, 0}}, scores.get());
        adjustScored(stream(), deviceLogits.get(), vocab, choices, list.get());
        EXPECT_TRUE(sameBits(adjusted, deviceLogits.read()));
        scoreChosen(stream(), deviceLogits.get(), vocab, choices, list.get(), deviceTokens.get(), scores.get());
        const std::vector<RowScore> got = scores.read();
        for (int64_t row = 0; row < 2; ++row) {
            const auto at = static_cast<size_t>(row);
            const std::vector<float> one = rowOf(logits, row, vocab);
            expectScore(got[at], scoreOnHost(cpu::kernels(), one.data(), vocab, tokens[at], row ? 0 : 5));
        }
    }
}

TEST_F(Scores, MasksForbidTokensOfTheirRowsOnly) {
    for (const int64_t vocab : {1, 31, 32, 33, 255, 257, 5001}) {
        const int64_t held = 70;
        const std::vector<float> logits = randomFloats(static_cast<size_t>(held * vocab));
        const auto perRow = static_cast<size_t>(maskWords(vocab));
        std::vector<int16_t> rows;
        std::vector<uint32_t> words;
        std::vector<float> expected = logits;
        for (int16_t row = 0; row < held; ++row) {
            if (random()() % 8 == 0) continue;
            rows.push_back(row);
            for (size_t i = 0; i < perRow; ++i) words.push_back(random()() & random()());
            for (int64_t id = 0; id < vocab; ++id)
                if (!maskAllows(&words[words.size() - perRow], id))
                    expected[static_cast<size_t>(row * vocab + id)] = -INFINITY;
        }
        const DeviceArray<float> deviceLogits(logits);
        const DeviceArray<uint32_t> deviceWords(words);
        maskRows(stream(), deviceLogits.get(), vocab, rows, deviceWords.get());
        EXPECT_TRUE(sameBits(expected, deviceLogits.read())) << vocab;
    }
}

}  // namespace
}  // namespace sharpi::cuda
