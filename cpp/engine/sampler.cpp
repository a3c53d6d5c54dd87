// See sampler.h, and core/sampling_rule.h for what sampleOnHost computes.
#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/error.h"

namespace sharpi {

namespace {

struct Candidate {
    float logit;
    int32_t token;
};

bool better(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

// The weights of candidates, and their sums before and through each in the rule's order.
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

// Which of the first `keep` candidates: weights before temperature decide which of them stay, those after it which one
// is drawn.
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

}  // namespace

void SamplingParams::validate(int64_t vocabSize) const {
    const auto require = [](bool ok, const char* what) {
        if (!ok) throw Error(ErrorKind::InvalidArgument, what);
    };
    require(std::isfinite(temperature) && temperature >= 0, "temperature must be 0 or more");
    require(topK >= 0, "top-k must be 0 (all) or more");
    require(topP > 0 && topP <= 1, "top-p must be above 0 and at most 1");
    require(minP >= 0 && minP <= 1, "min-p must be between 0 and 1");
    require(std::isfinite(repetitionPenalty) && repetitionPenalty > 0, "repetition penalty must be above 0");
    require(std::isfinite(presencePenalty) && std::isfinite(frequencyPenalty), "penalties must be finite");
    require(penaltyWindow >= 0, "the penalty window must be 0 or more");
    for (const auto& [token, bias] : logitBias) {
        require(token >= 0 && token < vocabSize, "logit bias names a token outside the vocabulary");
        require(bias < INFINITY, "logit bias must be a number below infinity");
    }
}

Sampler::Sampler(const SamplingParams& params, int64_t vocabSize) : _params(params), _random(params.seed) {
    params.validate(vocabSize);
}

std::vector<TokenAdjustment> Sampler::recent(const std::vector<int32_t>& history,
                                             const std::vector<int32_t>& drafted) const {
    std::vector<TokenAdjustment> counted;
    const bool penalized =
        _params.repetitionPenalty != 1 || _params.presencePenalty != 0 || _params.frequencyPenalty != 0;
    if (!penalized) return counted;
    const size_t window = std::min<size_t>(history.size() + drafted.size(), _params.penaltyWindow);
    const size_t ofDrafted = std::min(window, drafted.size());
    std::vector<int32_t> tokens(history.end() - static_cast<std::ptrdiff_t>(window - ofDrafted), history.end());
    tokens.insert(tokens.end(), drafted.end() - static_cast<std::ptrdiff_t>(ofDrafted), drafted.end());
    std::sort(tokens.begin(), tokens.end());
    for (const int32_t token : tokens) {
        if (counted.empty() || counted.back().token != token) counted.push_back({token, 0, 0.0f});
        ++counted.back().times;
    }
    return counted;
}

double Sampler::draw(size_t ahead) {
    while (_draws.size() <= ahead) _draws.push_back(static_cast<double>(_random() >> 11) * 0x1p-53);
    return _draws[ahead];
}

void Sampler::advance(size_t tokens) {
    for (; tokens > 0; --tokens) {
        draw(0);
        _draws.pop_front();
    }
}

Choice Sampler::next(const std::vector<int32_t>& history, const std::vector<int32_t>& drafted) {
    const std::vector<TokenAdjustment> counted = recent(history, drafted);
    Choice choice;
    choice.rule = _params;
    auto at = counted.cbegin();
    for (const auto& [token, bias] : _params.logitBias) {
        for (; at != counted.cend() && at->token < token; ++at) choice.adjustments.push_back(*at);
        const bool both = at != counted.cend() && at->token == token;
        choice.adjustments.push_back({token, both ? at->times : 0, bias});
        if (both) ++at;
    }
    choice.adjustments.insert(choice.adjustments.end(), at, counted.cend());
    choice.draw = draw(drafted.size());
    return choice;
}

int32_t sampleOnHost(float* logits, int64_t vocab, const SamplingRule& rule,
                     const std::vector<TokenAdjustment>& adjustments, double draw) {
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

int32_t checkedToken(int32_t token) {
    if (token >= 0) return token;
    throw Error(ErrorKind::InvalidArgument,
                "no token may be chosen: logit bias forbids all, or the model's weights are damaged");
}

}  // namespace sharpi
