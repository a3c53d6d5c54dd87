// See cpu_router.h.
#include "cpu/operations/cpu_router.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/rules/routing_rule.h"

namespace sharpi {

namespace {

// The `best` largest of the keys at [0, n), in that order; among equals the lower index comes first.
void orderByKey(std::vector<int32_t>& order, const uint32_t* key, int32_t n, int32_t best) {
    order.resize(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + best, order.end(),
                      [key](int32_t a, int32_t b) { return key[a] > key[b] || (key[a] == key[b] && a < b); });
}

}  // namespace

CpuRouter::CpuRouter(const cpu::Kernels& kernels, const RouterCall& call)
    : _kernels(kernels), _call(call), _biased(static_cast<size_t>(call.count)), _key(static_cast<size_t>(call.count)) {}

void CpuRouter::route(float* logits, int32_t* chosen, float* weight, int32_t token) {
    score(logits);
    choose(logits, token, chosen);
    weigh(logits, chosen, weight);
}

void CpuRouter::choose(const float* scores, int32_t token, int32_t* chosen) {
    if (_call.tokenChoices) {
        const float* const row = _call.tokenChoices + int64_t{token} * _call.used;
        std::transform(row, row + _call.used, chosen, [](float expert) { return static_cast<int32_t>(expert); });
        return;
    }
    for (size_t e = 0; e < _key.size(); ++e) {
        _biased[e] = _call.choiceBias ? scores[e] + _call.choiceBias[e] : scores[e];
        _key[e] = scoreKey(_biased[e]);
    }
    if (_call.groups > 1) keepBestGroups();
    orderByKey(_order, _key.data(), _call.count, _call.used);
    std::copy_n(_order.begin(), _call.used, chosen);
}

void CpuRouter::score(float* logits) {
    switch (_call.gating) {
    case Gating::Softmax: return _kernels.softmax(logits, _call.count);
    case Gating::Sigmoid:
        std::transform(logits, logits + _call.count, logits, [](float logit) { return portableSigmoid(logit); });
        return;
    case Gating::SoftmaxOfChosen: return;
    case Gating::RootSoftplus:
        std::transform(logits, logits + _call.count, logits,
                       [](float logit) { return std::sqrt(portableSoftplus(logit)); });
        return;
    }
}

void CpuRouter::keepBestGroups() {
    const int32_t size = _call.count / _call.groups;
    std::vector<uint32_t> groupKey;
    for (int32_t g = 0; g < _call.groups; ++g) {
        orderByKey(_order, &_key[static_cast<size_t>(g * size)], size, std::min(2, size));
        const float* const group = &_biased[static_cast<size_t>(g * size)];
        groupKey.push_back(scoreKey(size > 1 ? group[_order[0]] + group[_order[1]] : group[0]));
    }
    orderByKey(_order, groupKey.data(), _call.groups, _call.groupsUsed);
    for (auto g = _order.begin() + _call.groupsUsed; g != _order.end(); ++g)
        std::fill_n(_key.begin() + *g * size, size, 0u);
}

void CpuRouter::weigh(const float* scores, const int32_t* chosen, float* weight) const {
    const int32_t used = _call.used;
    const bool softmax = _call.gating == Gating::SoftmaxOfChosen;
    float largest = -INFINITY, sum = 0;
    for (int32_t k = 0; k < used; ++k) {
        weight[k] = scores[chosen[k]];
        largest = weight[k] > largest ? weight[k] : largest;
    }
    for (int32_t k = 0; k < used; ++k) {
        if (softmax) weight[k] = portableExp(weight[k] - largest);
        sum += weight[k];
    }
    for (int32_t k = 0; k < used; ++k) {
        if (softmax) weight[k] /= sum;
        else if (_call.renormalize) weight[k] /= weightSum(sum);
        weight[k] *= _call.weightScale;
        if (_call.outputScale) weight[k] *= _call.outputScale[chosen[k]];
    }
}

}  // namespace sharpi
