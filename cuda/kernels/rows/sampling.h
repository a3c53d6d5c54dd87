// Chooses a token from logits on the device by core/rules/sampling_rule.h. It is the token that the CPU would choose.
#pragma once

#include "core/rules/sampling_rule.h"
#include "device/stream.h"

namespace sharpi::cuda {

size_t samplingScratchBytes(int64_t vocab);

// logits: [vocab], changed in place unless the rule is plain greedy. adjustments: [count], in device memory. scratch:
// 256-byte aligned. Sets *token to the choice, or to -1 if no token may be chosen.
void sampleToken(Stream& stream, float* logits, int64_t vocab, const SamplingRule& rule,
                 const TokenAdjustment* adjustments, int32_t count, double draw, void* scratch, int32_t* token);

}  // namespace sharpi::cuda
