// See sampler.h.
#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/error.h"

namespace sharpi {

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

Sampler::Sampler(const SamplingParams& params, int64_t vocabSize)
    : _params(params), _vocabSize(vocabSize), _random(params.seed) {
    params.validate(vocabSize);
}

void Sampler::adjust(float* logits, const std::vector<int32_t>& history) const {
    for (const auto& [token, bias] : _params.logitBias) logits[token] += bias;
    const bool penalized = _params.repetitionPenalty != 1 || _params.presencePenalty != 0 || _params.frequencyPenalty != 0;
    if (!penalized) return;
    std::map<int32_t, int32_t> recent;
    const size_t window = std::min<size_t>(history.size(), _params.penaltyWindow);
    for (size_t i = history.size() - window; i < history.size(); ++i) ++recent[history[i]];
    for (const auto& [token, times] : recent) {
        float& logit = logits[token];
        logit = logit > 0 ? logit / _params.repetitionPenalty : logit * _params.repetitionPenalty;
        logit -= _params.presencePenalty + _params.frequencyPenalty * static_cast<float>(times);
    }
}

int32_t Sampler::sample(float* logits, const std::vector<int32_t>& history) {
    adjust(logits, history);
    // NaN would break the order that sorting relies on; a token that cannot be compared is never chosen.
    std::replace_if(logits, logits + _vocabSize, [](float logit) { return std::isnan(logit); }, -INFINITY);
    const auto best = std::max_element(logits, logits + _vocabSize);
    if (*best == -INFINITY) {
        throw Error(ErrorKind::InvalidArgument, "no token may be chosen: logit bias forbids all, or the model's weights are damaged");
    }
    if (_params.temperature == 0) return static_cast<int32_t>(best - logits);

    const auto better = [](const auto& a, const auto& b) { return a.first > b.first || (a.first == b.first && a.second < b.second); };
    _candidates.clear();
    for (int64_t i = 0; i < _vocabSize; ++i) _candidates.emplace_back(logits[i], static_cast<int32_t>(i));
    size_t keep = _candidates.size();
    if (_params.topK > 0) keep = std::min<size_t>(keep, _params.topK);
    std::partial_sort(_candidates.begin(), _candidates.begin() + keep, _candidates.end(), better);

    // Probabilities before temperature decide which candidates stay; those after it, which one is drawn.
    const float highest = _candidates.front().first;
    if (std::isinf(highest)) return _candidates.front().second;  // penalties can overflow; no ratio to it exists
    std::vector<double> weight(keep);
    double total = 0;
    for (size_t i = 0; i < keep; ++i) total += weight[i] = std::exp(static_cast<double>(_candidates[i].first - highest));
    double cumulated = 0;
    for (size_t i = 0; i < keep; ++i) {
        if (i > 0 && (cumulated >= _params.topP * total || weight[i] < _params.minP * weight[0])) keep = i;
        else cumulated += weight[i];
    }
    total = 0;
    for (size_t i = 0; i < keep; ++i) {
        total += weight[i] = std::exp(static_cast<double>(_candidates[i].first - highest) / _params.temperature);
    }
    double draw = static_cast<double>(_random() >> 11) * 0x1p-53 * total;
    for (size_t i = 0; i + 1 < keep; ++i) {
        draw -= weight[i];
        if (draw < 0) return _candidates[i].second;
    }
    return _candidates[keep - 1].second;
}

}  // namespace sharpi
