// Prepares each choice of a token (which logits change, by how much, and the random number) and makes it on the
// CPU. What a choice means is core/sampling_rule.h's to say; the GPU makes the same one from what next() gives.
// Order: logit bias, penalties, top-k, top-p, min-p, temperature, draw: the order that users of GGUF models know.
// Same seed, same logits: same tokens.
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "core/sampling_rule.h"

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

    // One choice. The references hold until the next call of next().
    struct Step {
        const SamplingRule& rule;
        const std::vector<TokenAdjustment>& adjustments;  // by ascending token
        double draw;                                      // in [0, 1)
    };
    // history: all tokens so far, the prompt included. Each call takes one random number.
    Step next(const std::vector<int32_t>& history);

private:
    void countRecent(const std::vector<int32_t>& history);
    SamplingParams _params;
    std::mt19937_64 _random;
    std::vector<TokenAdjustment> _recent, _adjustments;
    std::vector<int32_t> _window;
};

// The token that core/sampling_rule.h chooses, or -1 if none may be chosen. logits [vocab] are changed by the adjustments.
int32_t sampleOnHost(float* logits, int64_t vocab, const SamplingRule& rule, const std::vector<TokenAdjustment>& adjustments,
                     double draw);

// The token, or Error(InvalidArgument) saying why there is none if it is -1.
int32_t checkedToken(int32_t token);

}  // namespace sharpi
