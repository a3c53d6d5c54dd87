// See sample.h.
#include "cpu/sample.h"

#include <algorithm>
#include <cmath>

namespace sharpi {

namespace {

struct Candidate {
    float logit;
    int32_t token;
};

bool better(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

// The weights of candidates, and the sums before and through each, added in the rule's order.
struct Sums {
    std::vector<double> weight, before, through;

    Sums(const std::vector<Candidate>& candidates, int64_t count, int64_t chunk, float temperature)
        : weight(count), before(count), through(count) {
        double base = 0, inside = 0;
        for (int64_t i = 0; i < count; ++i) {
            if (i % chunk == 0) {
                base += inside;
                inside = 0;
            }
            weight[i] = samplingWeight(candidates[i].logit, candidates[0].logit, temperature);
            before[i] = base + inside;
            inside += weight[i];
            through[i] = base + inside;
        }
    }
};

// The place of the drawn candidate among the first `keep`. Weights without the temperature decide which candidates
// stay; weights with it decide which one is drawn.
int64_t drawn(const std::vector<Candidate>& candidates, int64_t keep, const SamplingRule& rule, double draw) {
    const int64_t chunk = samplingChunk(keep);
    int64_t kept = 1;
    {
        const Sums w(candidates, keep, chunk, 1.0f);
        const double most = rule.topP * w.through[keep - 1];
        while (kept < keep && w.before[kept] < most && w.weight[kept] >= rule.minP) ++kept;
    }
    const Sums v(candidates, kept, chunk, rule.temperature);
    const double target = draw * v.through[kept - 1];
    int64_t chosen = 0;
    while (chosen + 1 < kept && v.through[chosen] <= target) ++chosen;
    return chosen;
}

// Section 0. Words are looked at first: most masks allow nearly all tokens, or nearly none.
void forbid(float* logits, int64_t vocab, const std::vector<uint32_t>& mask) {
    for (int64_t first = 0; first < vocab; first += 32) {
        const uint32_t word = mask[first / 32];
        const int64_t end = std::min<int64_t>(vocab, first + 32);
        if (word == 0) std::fill(logits + first, logits + end, -INFINITY);
        if (word == 0 || word == UINT32_MAX) continue;
        for (int64_t i = first; i < end; ++i)
            if (!maskAllows(mask.data(), i)) logits[i] = -INFINITY;
    }
}

}  // namespace

int32_t sampleOnHost(float* logits, int64_t vocab, const SamplingRule& rule,
                     const std::vector<TokenAdjustment>& adjustments, double draw, const std::vector<uint32_t>& mask) {
    if (!mask.empty()) forbid(logits, vocab, mask);
    for (const TokenAdjustment& change : adjustments)
        logits[change.token] = adjustedLogit(logits[change.token], change, rule);
    // NaN would break the order that sorting relies on.
    std::replace_if(logits, logits + vocab, [](float logit) { return std::isnan(logit); }, -INFINITY);
    const auto best = std::max_element(logits, logits + vocab);
    if (best == logits + vocab || *best == -INFINITY) return -1;
    if (rule.temperature == 0 || std::isinf(*best)) return static_cast<int32_t>(best - logits);

    std::vector<Candidate> candidates(vocab);
    for (int64_t i = 0; i < vocab; ++i) candidates[i] = {logits[i], static_cast<int32_t>(i)};
    const int64_t keep = rule.topK > 0 ? std::min<int64_t>(vocab, rule.topK) : vocab;
    if (keep < vocab) std::nth_element(candidates.begin(), candidates.begin() + keep, candidates.end(), better);
    std::sort(candidates.begin(), candidates.begin() + keep, better);
    return candidates[drawn(candidates, keep, rule, draw)].token;
}

}  // namespace sharpi
