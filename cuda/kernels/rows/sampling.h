// Chooses a token from logits on the device, as core/sampling_rule.h defines it: the token that the CPU would choose.
#pragma once

#include "core/sampling_rule.h"
#include "device/stream.h"

namespace sharpi::cuda {

size_t samplingScratchBytes(int64_t vocab);

// logits [vocab] (left as they are when the rule is plain greedy, else changed in place); adjustments [count] in device
// memory; scratch 256-byte aligned. *token = the choice, or -1 when none may be chosen.
void sampleToken(Stream& stream, float* logits, int64_t vocab, const SamplingRule& rule,
                 const TokenAdjustment* adjustments, int32_t count, double draw, void* scratch, int32_t* token);

}  // namespace sharpi::cuda
