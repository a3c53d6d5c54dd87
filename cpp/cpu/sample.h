// Chooses a token on the CPU.
#pragma once

#include <cstdint>
#include <vector>

#include "core/rules/sampling_rule.h"

namespace sharpi {

// The token that core/rules/sampling_rule.h chooses from logits [vocab], or -1 if none may be chosen. Adjusts the
// logits in place. Adjusted tokens must be below vocab. draw: in [0, 1). mask: of the tokens that may be chosen; empty:
// all.
int32_t sampleOnHost(float* logits, int64_t vocab, const SamplingRule& rule,
                     const std::vector<TokenAdjustment>& adjustments, double draw,
                     const std::vector<uint32_t>& mask = {});

}  // namespace sharpi
