// The second half of a layer of experts: down, weighted and summed.
#pragma once

#include "kernels/matvec/matvec.h"

namespace sharpi::cuda {

// chosen: [rows, used], the experts of each row by rank, none of them negative. groups: see matvec.h.
// to[t, :] += sum over ascending ranks k of weight[t, k] * (down x[t * used + k, :] + bias), starting at +0, by fma;
// then the shared answer. If weight is null, weights are 1. terms.expert is not read: the biases are those of `chosen`.
// answers: scratch [rows * used, down.first.rows], needed with groups.
void expertDownAdd(Stream& stream, const MatvecInput& x, int rows, const ExpertStack& down, const int32_t* chosen,
                   const float* weight, int32_t used, float* to, const SharedAnswer& shared = {},
                   const AnswerTerms& terms = {}, const PairGroups& groups = {}, float* answers = nullptr);

}  // namespace sharpi::cuda
