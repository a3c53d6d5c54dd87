// Prepares each choice of a token: which logits change and by how much, and the random number.
// core/rules/sampling_rule.h says what the choice then is; every processor makes the same one.
//
// Bias, penalties and filters apply in the order that users of GGUF models know: logit bias, penalties, top-k, top-p,
// min-p, temperature, draw. The same seed and the same logits give the same tokens. Each position of the text has its
// own random number, so drafting and verifying several tokens gives the same text as choosing one at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <vector>

#include "operations/backend.h"

namespace sharpi {

struct SamplingParams : SamplingRule {
    int32_t penaltyWindow = 64;  // the number of last tokens that count as recent
    std::map<int32_t, float> logitBias;
    uint64_t seed = 0;

    // Throws Error(InvalidArgument) naming the setting that is out of range.
    void validate(int64_t vocabSize) const;
};

class Sampler {
public:
    Sampler(const SamplingParams& params, int64_t vocabSize);

    // The choice of the token that follows `history` (the text so far, with the prompt) and then `drafted`. Calling it
    // again gives the same choice.
    Choice next(const std::vector<int32_t>& history, const std::vector<int32_t>& drafted = {});
    // The caller has added this number of tokens to the history.
    void advance(size_t tokens);

private:
    std::vector<TokenAdjustment> recent(const std::vector<int32_t>& history, const std::vector<int32_t>& drafted) const;
    double draw(size_t ahead);
    SamplingParams _params;
    std::mt19937_64 _random;
    std::deque<double> _draws;  // element i: for the position i tokens after the next
};

constexpr const char* kNoTokenMayBeChosen =
    "no token may be chosen: logit bias forbids all, or the model's weights are damaged";
// Returns the token. If it is -1, throws Error(InvalidArgument) saying why none could be chosen.
int32_t checkedToken(int32_t token);

}  // namespace sharpi
