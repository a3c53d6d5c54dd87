// See score.h.
#include "cpu/score.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/rules/log_softmax.h"

namespace sharpi {

namespace {

struct Candidate {
    float logit;
    int32_t token;
};

// The first `count` in the rule's order.
std::vector<Candidate> likeliest(const float* logits, int64_t vocab, int32_t count) {
    std::vector<Candidate> best;
    const size_t most = static_cast<size_t>(std::min<int64_t>(count, vocab));
    for (int64_t i = 0; i < vocab && most > 0; ++i) {
        const float logit = std::isnan(logits[i]) ? -INFINITY : logits[i];
        if (best.size() == most && !(logit > best.back().logit)) continue;
        if (best.size() == most) best.pop_back();
        // Ids ascend, so a token comes after all others with its logit.
        const auto after = [](float value, const Candidate& other) { return value > other.logit; };
        best.insert(std::upper_bound(best.begin(), best.end(), logit, after), {logit, static_cast<int32_t>(i)});
    }
    return best;
}

double logOfTotal(const cpu::Kernels& kernels, const float* logits, int64_t vocab, float highest) {
    std::vector<double> lanes(kScoreLanes, 0.0);
    kernels.addExps(logits, highest, vocab, lanes.data());
    double total = 0;
    for (const double lane : lanes) total += lane;
    return portableLog(total);
}

}  // namespace

Score scoreOnHost(const cpu::Kernels& kernels, const float* logits, int64_t vocab, int32_t token, int32_t best) {
    const std::vector<Candidate> first = likeliest(logits, vocab, std::max(best, 1));
    const float highest = first.front().logit;
    const double log = std::isinf(highest) ? 0.0 : logOfTotal(kernels, logits, vocab, highest);
    Score score;
    score.logProbability = token < 0 ? -INFINITY : logProbability(logits[token], highest, log);
    for (int32_t i = 0; i < std::min<int64_t>(best, static_cast<int64_t>(first.size())); ++i)
        score.best.push_back({first[i].token, logProbability(first[i].logit, highest, log)});
    return score;
}

}  // namespace sharpi
