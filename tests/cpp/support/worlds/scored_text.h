// Answers with scores and constraints, as a plain loop over a session's logits gives them.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>
#include <vector>

#include "core/launch_rows.h"
#include "cpu/sample.h"
#include "cpu/score.h"
#include "engine/texts/continuation.h"
#include "tiny_engine.h"

namespace tiny {

// Forbids a third of the tokens, others at each place, and ends the answer after some tokens. Throws where a constraint
// is used wrongly.
class Thirds : public sharpi::TokenConstraint {
public:
    Thirds(int64_t vocab, size_t ends, uint32_t salt) : _vocab(vocab), _ends(ends), _salt(salt) {}

    bool mask(std::vector<uint32_t>& words) override {
        if (words.size() != static_cast<size_t>((_vocab + 31) / 32)) throw std::logic_error("a mask of another size");
        ++masks;
        if (masks == failsAt) throw std::runtime_error("told to fail");
        if ((accepted.size() + _salt) % 7 == 0) return false;  // all may come
        for (int32_t token = 0; token < _vocab; ++token)
            if (allows(token)) words[static_cast<size_t>(token / 32)] |= uint32_t{1} << (token % 32);
        return true;
    }
    void accept(int32_t token) override {
        if (hasEnded()) throw std::logic_error("a token after the end");
        if ((accepted.size() + _salt) % 7 != 0 && !allows(token)) throw std::logic_error("a forbidden token");
        accepted.push_back(token);
        if (++accepts == acceptFailsAt) throw std::runtime_error("told to fail");
    }
    void rollback(int64_t tokens) override {
        if (tokens < 1 || tokens > static_cast<int64_t>(accepted.size())) throw std::logic_error("rolled back too far");
        accepted.resize(accepted.size() - static_cast<size_t>(tokens));
        rolledBack += tokens;
    }
    bool hasEnded() override { return accepted.size() == _ends; }

    std::vector<int32_t> accepted;
    int64_t masks = 0, accepts = 0, rolledBack = 0;
    int64_t failsAt = 0, acceptFailsAt = 0;  // the call of mask() or accept() that throws; 0: none

private:
    bool allows(int32_t token) const {
        const auto last = static_cast<uint32_t>(accepted.empty() ? 0 : accepted.back());
        return (static_cast<uint32_t>(token) * 2654435761u + static_cast<uint32_t>(accepted.size()) + last + _salt) %
                   3 !=
               0;
    }
    int64_t _vocab;
    size_t _ends;
    uint32_t _salt;
};

struct ScoredText {
    std::vector<sharpi::Score> prompt;  // of its tokens; the first means nothing
    std::vector<int32_t> tokens;
    std::vector<sharpi::Score> scores;
    bool hasEnded = false;  // by the constraint
};

inline sharpi::RowKind kindOfPrompt(const sharpi::Engine& engine, size_t tokens) {
    const bool isShort = tokens < static_cast<size_t>(sharpi::kPromptTile);
    const bool one = const_cast<sharpi::Engine&>(engine).runner().limits().pieces.oneArithmetic;
    return isShort && !one ? sharpi::RowKind::Decode : sharpi::RowKind::Prompt;
}

// One token after the other, each from logits that a session gives.
inline ScoredText writeScored(const std::shared_ptr<sharpi::Engine>& engine, const std::vector<int32_t>& prompt,
                              const sharpi::SamplingParams& params, int64_t count, int32_t best,
                              sharpi::TokenConstraint* constraint) {
    using namespace sharpi;
    const int64_t vocab = engine->runner().limits().vocabSize, context = engine->runner().limits().context;
    Session session(engine);
    std::vector<float> logits = evaluate(session, prompt, vocab, {}, kindOfPrompt(*engine, prompt.size()));
    ScoredText text;
    text.prompt.resize(1);
    const auto scoreOf = [&](const float* row, int32_t token) {
        return scoreOnHost(cpu::kernels(), row, vocab, token, std::max(best, 0));
    };
    for (size_t i = 1; i < prompt.size(); ++i)
        text.prompt.push_back(scoreOf(&logits[(i - 1) * static_cast<size_t>(vocab)], prompt[i]));
    Sampler sampler(params, vocab);
    std::vector<int32_t> history = prompt;
    while (static_cast<int64_t>(text.tokens.size()) < count && !text.hasEnded) {
        std::vector<float> row(logits.end() - vocab, logits.end());
        std::vector<uint32_t> words(static_cast<size_t>(maskWords(vocab)));
        if (!constraint || !constraint->mask(words)) words.clear();
        const Choice choice = sampler.next(history);
        const int32_t token = sampleOnHost(row.data(), vocab, choice.rule, choice.adjustments, choice.draw, words);
        if (constraint) {
            constraint->accept(token);
            text.hasEnded = constraint->hasEnded();
        }
        text.tokens.push_back(token);
        text.scores.push_back(scoreOf(logits.data() + logits.size() - vocab, token));
        history.push_back(token);
        sampler.advance(1);
        if (static_cast<int64_t>(history.size()) > context) break;
        logits = evaluate(session, {token}, vocab, {}, RowKind::Decode);
    }
    return text;
}

inline void expectSame(const sharpi::Score& score, const sharpi::Score& expected) {
    const auto same = [](float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; };
    EXPECT_TRUE(same(score.logProbability, expected.logProbability))
        << score.logProbability << " " << expected.logProbability;
    ASSERT_EQ(score.best.size(), expected.best.size());
    for (size_t i = 0; i < score.best.size(); ++i) {
        EXPECT_EQ(score.best[i].token, expected.best[i].token);
        EXPECT_TRUE(same(score.best[i].logProbability, expected.best[i].logProbability));
    }
}

}  // namespace tiny
