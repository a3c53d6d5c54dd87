// Mamba 2 (Dao and Gu, 2024) between its two products. There is one order of operations, so a sequence's state and
// answers have the same bits however its tokens are cut into batches, on every instruction set and on every processor.
// Each operation rounds to nearest even; fma rounds once; exp is cpu/kernels/exp.h's.
//
// A row of the first product is a gate z, one number dt for each head, and x, B and C. A head has its own part of x
// [headDim]; each group of consecutive heads shares one B and one C [stateDim].
//
//   x, B, C    by the convolution of cpu/kernels/convolution.cpp, channel by channel, with its bias
//   step       = mambaStep(dt, bias); decay = mambaDecay(step, rate), where rate is the head's and negative
//   S          the head's matrix [stateDim, headDim] (row n: element n of B and C; column p: of x)
//   u[p]       = x[p] * step
//   S[n][p]    = fma(B[n], u[p], S[n][p] * decay)
//   o[p]       = sum over n of fma(S[n][p], C[n], .)
//   y[p]       = fma(skip, x[p], o[p])
//   y          = (z / (1 + exp(0 - z))) * y, elementwise over all heads
//   the answer = the RMS norm of each group's heads together (core/rules/norm.h), each group with its own weights; y if
//                there are no weights
//
// The sum uses 8 accumulators that start at +0. Element n goes to accumulator n mod 8, in ascending order; then
// acc[i] += acc[i + 4], += acc[i + 2], += acc[i + 1]: as in Gated DeltaNet's sums (cpu/kernels/delta.cpp).
//
// The state is linear in the rows, and a row's decay is the exponential of step * rate. So a tile of rows can be a few
// products, with sums of step * rate in the exponents, for prompts whose bits are not fixed here.
#pragma once

#include "core/portable.h"

namespace sharpi {

SHARPI_PORTABLE float mambaStep(float dt, float bias) { return portableSoftplus(dt + bias); }
SHARPI_PORTABLE float mambaDecay(float step, float rate) { return portableExp(step * rate); }

}  // namespace sharpi
