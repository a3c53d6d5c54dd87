// What tests of sampling compare with: random logits, and the probabilities that the rules give them.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "core/rules/sampling_rule.h"
#include "seed.h"

namespace sharpi {

inline std::vector<float> randomLogits(size_t count, unsigned seed, float spread = 2.0f) {
    std::mt19937 random(testSeed(seed));
    std::normal_distribution<float> normal(0.0f, spread);
    std::vector<float> logits(count);
    for (float& logit : logits) logit = normal(random);
    return logits;
}

// The probability of each token by core/rules/sampling_rule.h: one filter after another, each over the whole list.
inline std::vector<double> expectedDistribution(const SamplingRule& rule, const std::vector<float>& logits) {
    const size_t n = logits.size();
    std::vector<bool> stays(n, true);
    const auto rank = [&](size_t token) {
        size_t better = 0;
        for (size_t other = 0; other < n; ++other)
            better += logits[other] > logits[token] || (logits[other] == logits[token] && other < token);
        return better;
    };
    std::vector<size_t> byRank(n);
    for (size_t i = 0; i < n; ++i) byRank[rank(i)] = i;
    if (rule.topK > 0)
        for (size_t r = rule.topK; r < n; ++r) stays[byRank[r]] = false;
    const auto probabilities = [&](double temperature) {
        std::vector<double> p(n, 0.0);
        double total = 0;
        for (size_t i = 0; i < n; ++i)
            if (stays[i]) total += p[i] = std::exp((double(logits[i]) - logits[byRank[0]]) / temperature);
        for (double& value : p) value /= total;
        return p;
    };
    const std::vector<double> p = probabilities(1);
    double before = 0;  // the probability of all better tokens; the token that crosses topP stays
    for (size_t r = 0; r < n; ++r) {
        if (r > 0 && before >= rule.topP) stays[byRank[r]] = false;
        before += p[byRank[r]];
    }
    for (size_t i = 0; i < n; ++i)
        if (i != byRank[0] && p[i] < rule.minP * p[byRank[0]]) stays[i] = false;
    return probabilities(rule.temperature);
}

}  // namespace sharpi
