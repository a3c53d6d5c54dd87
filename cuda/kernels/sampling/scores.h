// Scores tokens by core/rules/log_softmax.h, and masks logits, on the device.
#pragma once

#include <vector>

#include "core/rules/log_softmax.h"
#include "kernels/sampling/sampling.h"

namespace sharpi::cuda {

// What the device makes of a row that is scored.
struct RowScore {
    double logOfTotal;
    float highest;
    float logProbability;  // of the row's token
    int32_t best[kMostBest];
    float bestLogProbability[kMostBest];
};

// A row of logits, and what of it goes to scores[slot] or comes from there.
struct ScoredRow {
    int16_t row = 0;
    int16_t slot = 0;
    int32_t best = 0;  // up to kMostBest, and no more than the vocabulary has
};

// logits: [rows, vocab]. Sets all of a row's score but its token's log-probability. One launch for 64 rows.
void scoreRows(Stream& stream, const float* logits, int64_t vocab, const std::vector<ScoredRow>& rows,
               RowScore* scores);

// Sets scores[slot].logProbability to that of tokens[slot], after scoreRows(); -1 has -infinity. Each choice is of a
// scored row whose slot is choice.token. If adjustScored() has changed the row, its adjustments hold the logits that it
// had.
void scoreChosen(Stream& stream, const float* logits, int64_t vocab, const std::vector<RowChoice>& choices,
                 const TokenAdjustment* adjustments, const int32_t* tokens, RowScore* scores);

// Applies the choices' adjustments to their rows, as sampleTokens() would, and puts the logit that each token had in
// place of its bias. The rows are then to be sampled without adjustments.
void adjustScored(Stream& stream, float* logits, int64_t vocab, const std::vector<RowChoice>& choices,
                  TokenAdjustment* adjustments);

// words: [rows.size()] masks of maskWords(vocab) words. The logits of tokens that they forbid become -infinity.
void maskRows(Stream& stream, float* logits, int64_t vocab, const std::vector<int16_t>& rows, const uint32_t* words);

}  // namespace sharpi::cuda
