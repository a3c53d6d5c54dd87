// How a token is chosen from logits, to the bit, on every processor.
//
// Float operations are IEEE 754, each rounded to nearest even, none contracted; exp is portableExp; weights and their
// sums are doubles.
//
// 0. Mask. If there is a mask, token i may be chosen only if bit i % 32 of its word i / 32 is 1; the logits of all
//    other tokens become -infinity.
//
// 1. Adjust. For each TokenAdjustment:  logit = logit + bias;  then, if times > 0,
//        logit = logit > 0 ? logit / repetitionPenalty : logit * repetitionPenalty
//        logit = logit - (presencePenalty + frequencyPenalty * float(times))
//    After that, a logit that is NaN counts as -infinity, so it is never chosen.
//
// 2. Order. Candidates are sorted by descending logit, and equal logits (+0 and -0 are equal) by ascending id:
//    l_0 >= l_1 >= ...
//    - l_0 = -infinity: there is no choice (-1).
//    - temperature = 0, or l_0 = +infinity (no ratio to it exists): the choice is candidate 0.
//
// 3. Filter. keep = min(topK, vocab), or vocab if topK is 0. For i < keep:  w_i = exp(l_i - l_0), so w_0 = 1.
//    Sums are made in chunks, so that threads can share them: with C = ceil(keep / 1024), chunk c has the candidates
//    cC <= i < min(cC + C, keep).  inside(i) = the sum of w_j over the chunk's j < i, from +0 in ascending order;
//    base(c) = the sum of the whole chunks before c, from +0 in ascending order;  before(i) = base(c) + inside(i).
//    total = the sum of all chunks, in the same order.
//    kept = the first i > 0 with before(i) >= topP * total or w_i < minP, or keep if there is none.
//
// 4. Draw. v_i = exp((l_i - l_0) / temperature) for i < kept, in the same chunks (C does not change), with before and
//    inside as above;  through(i) = base(c) + (inside(i) + v_i);  target = draw * through(kept - 1).
//    The choice is the first candidate with through(i) > target. As draw < 1 there always is one, and its v_i > 0.
#pragma once

#include <cstdint>

#include "core/portable.h"

namespace sharpi {

struct SamplingRule {
    float temperature = 0.8f;        // 0: always the most likely token (ties: the lower id)
    int32_t topK = 40;               // 0: all
    float topP = 0.95f;              // 1: all
    float minP = 0.05f;              // 0: all
    float repetitionPenalty = 1.0f;  // divides positive, multiplies negative logits of recent tokens
    float presencePenalty = 0.0f;    // subtracted once from recent tokens
    float frequencyPenalty = 0.0f;   // subtracted for every recent occurrence
};

// A token whose logit is changed before the choice: bias is added, then the penalties for `times` recent occurrences
// are applied. A list of these names each token at most once.
struct TokenAdjustment {
    int32_t token = 0;
    int32_t times = 0;
    float bias = 0.0f;
};

// Section 0: the words of a mask, and whether it allows a token.
SHARPI_PORTABLE int64_t maskWords(int64_t vocab) { return (vocab + 31) / 32; }
SHARPI_PORTABLE bool maskAllows(const uint32_t* words, int64_t token) { return words[token / 32] >> (token % 32) & 1; }

constexpr int32_t kSamplingChunks = 1024;

SHARPI_PORTABLE int64_t samplingChunk(int64_t keep) { return (keep + kSamplingChunks - 1) / kSamplingChunks; }

// Section 1. Sources that call it on the CPU are compiled without contraction.
SHARPI_PORTABLE float adjustedLogit(float logit, const TokenAdjustment& change, const SamplingRule& rule) {
#if defined(__CUDA_ARCH__)
    logit = __fadd_rn(logit, change.bias);
    if (change.times <= 0) return logit;
    logit = logit > 0 ? __fdiv_rn(logit, rule.repetitionPenalty) : __fmul_rn(logit, rule.repetitionPenalty);
    const float counted = __fmul_rn(rule.frequencyPenalty, static_cast<float>(change.times));
    return __fsub_rn(logit, __fadd_rn(rule.presencePenalty, counted));
#else
    logit = logit + change.bias;
    if (change.times <= 0) return logit;
    logit = logit > 0 ? logit / rule.repetitionPenalty : logit * rule.repetitionPenalty;
    const float counted = rule.frequencyPenalty * static_cast<float>(change.times);
    return logit - (rule.presencePenalty + counted);
#endif
}

// v of section 4; w of section 3 is the one at temperature 1 (dividing by 1 changes nothing).
SHARPI_PORTABLE double samplingWeight(float logit, float highest, float temperature) {
#if defined(__CUDA_ARCH__)
    return static_cast<double>(portableExp(__fdiv_rn(__fsub_rn(logit, highest), temperature)));
#else
    return static_cast<double>(portableExp((logit - highest) / temperature));
#endif
}

}  // namespace sharpi
