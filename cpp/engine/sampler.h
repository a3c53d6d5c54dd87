// Prepares each choice of a token (which logits change, by how much, and the random number) and makes it on the
// CPU. What a choice means is core/sampling_rule.h's to say; the GPU makes the same one from what next() gives.
// Order: logit bias, penalties, top-k, top-p, min-p, temperature, draw: the order that users of GGUF models know.
// Same seed, same logits: same tokens. Every position of the text has a random number of its own, so it does not show
// whether one token was chosen at a time, or several were drafted and verified.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <vector>

#include "operations/backend.h"

namespace sharpi {

struct SamplingParams : SamplingRule {
    int32_t penaltyWindow = 64;  // how many of the last tokens are recent
    std::map<int32_t, float> logitBias;
    uint64_t seed = 0;

    // Throws Error(InvalidArgument) naming the setting that is out of range.
    void validate(int64_t vocabSize) const;
};

class Sampler {
public:
    Sampler(const SamplingParams& params, int64_t vocabSize);

    // The choice of the token that follows `history` (the text so far, the prompt included) and then `drafted`. Asked
    // again, it is the same.
    Choice next(const std::vector<int32_t>& history, const std::vector<int32_t>& drafted = {});
    // So many tokens have been added to the history.
    void advance(size_t tokens);

private:
    std::vector<TokenAdjustment> recent(const std::vector<int32_t>& history, const std::vector<int32_t>& drafted) const;
    double draw(size_t ahead);
    SamplingParams _params;
    std::mt19937_64 _random;
    std::deque<double> _draws;  // of the positions from the next one on
};

// The token that core/sampling_rule.h chooses, or -1 if none may be chosen. logits [vocab] are changed by the
// adjustments.
int32_t sampleOnHost(float* logits, int64_t vocab, const SamplingRule& rule,
                     const std::vector<TokenAdjustment>& adjustments, double draw);

// The token, or Error(InvalidArgument) saying why there is none if it is -1.
int32_t checkedToken(int32_t token);

}  // namespace sharpi
