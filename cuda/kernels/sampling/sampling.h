// Chooses tokens from logits on the device by core/rules/sampling_rule.h: those that the CPU would choose.
#pragma once

#include <vector>

#include "core/rules/sampling_rule.h"
#include "device/stream.h"

namespace sharpi::cuda {

// A row of logits and how a token is chosen from it.
struct RowChoice {
    double draw = 0;
    SamplingRule rule;
    int32_t firstAdjustment = 0, adjustments = 0;
    int16_t row = 0;    // of the logits
    int16_t token = 0;  // where the choice goes
};

// On which the scratch depends: the logits that a block reads, the most candidates of a row that is chosen from without
// sorting all logits, and the most rows that share a launch.
constexpr int kSamplingTile = 2048, kFewCandidates = 128, kMostSampledRows = 64;
size_t samplingScratchBytes(int64_t vocab);

// logits: [rows, vocab]. A row is changed in place unless its rule is plain greedy; each row has at most one choice.
// adjustments: in device memory. scratch: 256-byte aligned. Sets tokens[choice.token] for each choice, to -1 if no
// token may be chosen. Rows that keep up to 128 candidates share their launches; the others take turns.
void sampleTokens(Stream& stream, float* logits, int64_t vocab, const std::vector<RowChoice>& choices,
                  const TokenAdjustment* adjustments, void* scratch, int32_t* tokens);

}  // namespace sharpi::cuda
