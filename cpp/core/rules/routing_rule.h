// How a row's logits become experts and their weights, operation for operation, so that the CPU and the GPU agree to
// the bit. RoutingSpec says what the parameters mean. Every operation rounds to nearest even.
//
// 1. Scores. Softmax: the CPU's softmax over all logits. Sigmoid: portableSigmoid of each. SoftmaxOfChosen: the logits.
//    RootSoftplus: the root of portableSoftplus of each.
// 2. If the layer has a table, the row's token names the chosen experts, by rank. Otherwise the choice goes by
// key(score + choiceBias), or key(score) if there is no such bias. Among equal keys the lower
//    index wins. With groups, a group's sum is that of its two best biased scores, the larger first (a group of one
//    expert has its score); the groups with the best key(sum) stay, and experts of the others are not chosen.
// 3. Shares, by rank k. SoftmaxOfChosen: e[k] = exp(score[k] - the largest chosen score); share[k] = e[k] / sum of e.
//    Otherwise score[k], or if weights are renormalized, score[k] / max(sum of the chosen scores, kLeastWeightSum).
//    Sums begin at +0 and go by rank.
// 4. weight[k] = share[k] * weightScale, then * outputScale[expert] if there is one.
#pragma once

#include "core/portable.h"

namespace sharpi {

// How a row's scores become the experts that it uses and their weights.
enum class Gating : uint8_t {
    Softmax,          // of all logits
    Sigmoid,          // of each logit
    SoftmaxOfChosen,  // of the chosen logits
    RootSoftplus,     // sqrt(log(1 + exp(logit)))
};

constexpr float kLeastWeightSum = 0x1p-14f;

// A better score has a larger key. NaN comes last, so that choices are valid whatever the scores are; -0 is +0. Keys
// are at least 1.
SHARPI_PORTABLE uint32_t scoreKey(float score) {
    if (score != score) return 1;
#if defined(__CUDA_ARCH__)
    const uint32_t bits = __float_as_uint(score);
#else
    uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
#endif
    if (score == 0.0f) return 0x80000000u;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The score of a key: the same, but for the sign of zero and the bits of NaN.
SHARPI_PORTABLE float scoreOfKey(uint32_t key) {
    const uint32_t bits = key == 1 ? 0x7fc00000u : key >> 31 ? key ^ 0x80000000u : ~key;
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float score;
    std::memcpy(&score, &bits, sizeof score);
    return score;
#endif
}

// What a renormalized weight is divided by.
SHARPI_PORTABLE float weightSum(float sum) { return sum < kLeastWeightSum ? kLeastWeightSum : sum; }

}  // namespace sharpi
