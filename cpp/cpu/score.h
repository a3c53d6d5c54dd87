// Scores tokens on the CPU by core/rules/log_softmax.h.
#pragma once

#include <cstdint>

#include "core/score.h"
#include "cpu/kernels.h"

namespace sharpi {

// The score of a token after logits [vocab], with the `best` likeliest tokens. token: -1: its own log-probability is
// -infinity.
Score scoreOnHost(const cpu::Kernels& kernels, const float* logits, int64_t vocab, int32_t token, int32_t best);

}  // namespace sharpi
