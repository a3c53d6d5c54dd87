// See sampler.h.
#include "engine/texts/sampler.h"

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
    while (_draws.size() <= ahead) {
        _draws.push_back(0);  // first, since a number that finds no memory would be skipped for good
        _draws.back() = static_cast<double>(_random() >> 11) * 0x1p-53;
    }
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

int32_t checkedToken(int32_t token) {
    if (token >= 0) return token;
    throw Error(ErrorKind::InvalidArgument, kNoTokenMayBeChosen);
}

}  // namespace sharpi
