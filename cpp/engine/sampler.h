// Chooses a token from logits. Order: logit bias, penalties, top-k, top-p, min-p, temperature, draw: the order that
// users of GGUF models know. Same seed, same logits: same tokens.
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <vector>

namespace sharpi {

struct SamplingParams {
    float temperature = 0.8f;  // 0: always the most likely token (ties: the lower id)
    int32_t topK = 40;         // 0: all
    float topP = 0.95f;        // 1: all
    float minP = 0.05f;        // 0: all
    float repetitionPenalty = 1.0f;  // divides positive, multiplies negative logits of recent tokens
    float presencePenalty = 0.0f;    // subtracted once from recent tokens
    float frequencyPenalty = 0.0f;   // subtracted for every recent occurrence
    int32_t penaltyWindow = 64;      // how many of the last tokens are recent
    std::map<int32_t, float> logitBias;
    uint64_t seed = 0;

    // Throws Error(InvalidArgument) naming the setting that is out of range.
    void validate(int64_t vocabSize) const;
};

class Sampler {
public:
    Sampler(const SamplingParams& params, int64_t vocabSize);
    // logits [vocabSize] are changed. history: all tokens so far, the prompt included.
    int32_t sample(float* logits, const std::vector<int32_t>& history);

private:
    void adjust(float* logits, const std::vector<int32_t>& history) const;
    SamplingParams _params;
    int64_t _vocabSize;
    std::mt19937_64 _random;
    std::vector<std::pair<float, int32_t>> _candidates;
};

}  // namespace sharpi
