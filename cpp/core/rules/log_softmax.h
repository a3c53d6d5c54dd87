// How probable the model itself finds each token: log-probabilities of logits before masks, biases, penalties and
// temperature, to the bit, on every processor.
//
// Float and double operations are IEEE 754, each rounded to nearest even, none contracted; exp is portableExp, log is
// portableLog.
//
// 1. A logit that is NaN counts as -infinity. highest is the largest logit.
// 2. w_i = exp(l_i - highest) is a float. Sums are doubles, in lanes, so that threads can share them: lane j adds w_i
//    for i = j, j + 1024, j + 2048, ... from +0 in this order; total = lane 0 + lane 1 + ... + lane 1023, from +0 in
//    this order. A lane without tokens is +0.
// 3. The log-probability of token i is the float nearest to (l_i - highest) - log(total), a double.
//    It is -infinity if l_i is. If highest is +infinity, it is 0 for the tokens with that logit, -infinity for others.
//
// The likeliest tokens are those with the highest logits; of equal ones (+0 and -0 are equal) the lower id comes first.
#pragma once

#include <cstdint>

#include "core/portable.h"

namespace sharpi {

constexpr int32_t kScoreLanes = 1024;
constexpr int32_t kMostBest = 20;  // of the likeliest tokens, that a score can name

// Section 3. logOfTotal does not count if highest is infinite.
SHARPI_PORTABLE float logProbability(float logit, float highest, double logOfTotal) {
    if (!(logit > -INFINITY)) return -INFINITY;
    if (highest == INFINITY) return logit == highest ? 0.0f : -INFINITY;
    // 0.0 is added so that a certain token has 0 and never -0, whatever the sign of a logit of 0.
    return static_cast<float>((static_cast<double>(logit) - static_cast<double>(highest)) - logOfTotal + 0.0);
}

}  // namespace sharpi
