// The small-batch matmul contract: which float each dot product is, to the bit.
//
// All code that computes y[t, r] = w[r, :] . x[t, :] by these rules (scalar, AVX2, AVX-512, a GPU warp) gets the same
// bits. So where a weight lives, how many tokens are in a call and how rows are divided never change an answer. On the
// CPU this holds for every batch size. All float operations are IEEE 754 binary32, rounded to nearest even, subnormals
// kept; fma is the fused multiply-add, rounded once. No other contraction is allowed.
//
// 1. Activations become int8 (weights of quantized types only)
//
// A row of x is cut into blocks of 32. For each block, absmax is the largest |x|.
//   - If any element is NaN or at least 2^100 (kHugeActivation): scale = NaN, all q = 0.
//   - Otherwise, if absmax < 2^-100 (kTinyActivation): scale = 0, all q = 0.
//   - Otherwise: scale = absmax / 127, a rounded division, then rounded up to 16 significant bits
//     (roundedUpScale of core/portable.h); inverse = 1 / scale, a rounded division;
//     q = rint(x * inverse), ties to even.
// |q| <= 127 always: scale is at least absmax / 127 less half a unit of its last place, so x * inverse exceeds 127 by a
// few such units at most.
// S0 and S1 of a block are the integer sums of q over its first and second 16 elements.
//
// The 16 bits let a GPU compute the product of a scale s and an integer I, |I| < 2^22, with one fma and no conversion:
// the bits of an integer sum that starts at 0x4b400000 are those of the float biased = 12582912 + I. s * 12582912 is
// exact and finite, so fma(s, biased, -(s * 12582912)) is s * I rounded once.
//
// 2. The sum over a row of quantized weights
//
// Element i of a weight row is  d * sub[i] * quant[i]  (+ m * min[i] for types with a minimum). Here quant is the
// stored number minus its offset (or the table's value), sub and min are the integers of its sub-block (1 if the type
// has none), and d and m are the floats of the block:
//
//     type                   quant            sub (per)           d              min (per)       m
//     Q4_0 Q5_0              q - 8, q - 16    1                   block's d      -
//     Q4_1 Q5_1              q                1                   block's d      1               block's m
//     Q8_0                   q                1                   block's d      -
//     IQ4_NL                 table            1                   block's d      -
//     MXFP4                  table            1                   2^(e - 128)    -
//     Q2_K                   q                0..15 (16)          d              0..15 (16)      -dmin
//     Q3_K                   q - 4            -32..31 (16)        d              -
//     Q4_K Q5_K              q                0..63 (32)          d              0..63 (32)      -dmin
//     Q6_K                   q - 32           -128..127 (16)      d              -
//     IQ4_XS                 table            -32..31 (32)        d              -
//     IQ2_XXS                +-grid           1, 3 .. 31 (32)     d / 8          -
//     IQ2_XS IQ2_S           +-grid           1, 3 .. 31 (16)     d / 8          -
//     IQ3_XXS                +-grid           1, 3 .. 31 (32)     d / 4          -
//     IQ3_S                  +-grid           1, 3 .. 31 (32)     d              -
//     IQ1_S                  8 grid +- 1      1, 3 .. 15 (32)     d / 8          -
//     IQ1_M                  8 grid +- 1      1, 3 .. 15 (16)     d / 8          -
//     TQ1_0 TQ2_0            q - 1            1                   d              -
//     NVFP4                  table            1                   d (16)         -
//     Q1_0                   2 q - 1          1                   d              -
//
// For each block b of 32 elements, with the activation block's q, scale s and sums S0, S1:
//     I0, I1 = sums of quant * q over its first and second 16 elements    exact integers; I = I0 + I1, |I| < 2^22
// 32 accumulators start at +0. For b = 0, 1, 2, ... in this order, where acc is acc[b mod 32]:
//     types with a sub for each half (16):      acc = fma(d * sub0, s * I0, acc)
//                                               acc = fma(d * sub1, s * I1, acc)
//     all other types:                          acc = fma(d * sub, s * I, acc)
// and then
//     types with a minimum for each half:       acc = fma(m * min0, s * S0, acc)
//                                               acc = fma(m * min1, s * S1, acc)
//     other types with a minimum:               acc = fma(m * min, s * (S0 + S1), acc)
// Products with s are rounded. d * sub and m * min are exact: a float of at most 11 significant bits times an integer
// of at most 8. They belong to the weights alone, and s * S0, s * S1 and s * (S0 + S1) to the activations alone.
//
// Each half of an NVFP4 block has its own d, which stands for d * sub0 or d * sub1.
//
// 3. The sum over a row of float weights (F32, F16, BF16)
//
// Activations stay floats and the weight is converted exactly. For i = 0, 1, 2, ...:
//     acc[i mod 32] = fma(w[i], x[i], acc[i mod 32])
//
// 4. The end, for both
//
//     for width in 16, 8, 4, 2, 1:   acc[i] = acc[i] + acc[i + width] for every i < width
//     y = acc[0], or acc[0] + bias if there is a bias
//
// What stands between products follows rules of its own: core/rules/norm.h normalizes rows and adds parts,
// core/rules/activation.h joins gates and ups, core/rules/mamba.h and cpu/kernels/delta.cpp update the states of
// recurrent layers, and core/rules/routing_rule.h chooses and weighs experts. The answer of an expert is its finished
// product with the bias; a row's answers are summed by rank from +0 with one fma each, acc = fma(weight, answer, acc),
// then the shared expert's with its factor. A weight that multiplied the expert's input is 1 here. The sum replaces its
// destination, or is added to it at the end.
#pragma once

namespace sharpi {

// The number of these rules. Saved caches carry it, since what they hold was computed by them: raise it whenever any
// bits change.
constexpr int kContractVersion = 2;
// Elements of an activation block, and accumulators of a row.
constexpr int kContractBlock = 32;
constexpr int kContractAccumulators = 32;
// 2^-100. Below it the block counts as zero, so that no scale is subnormal and no inverse overflows.
constexpr float kTinyActivation = 7.888609052210118e-31f;
// 2^100. From it on a block counts as not finite, so that products with a scale cannot overflow.
constexpr float kHugeActivation = 1.2676506002282294e30f;

}  // namespace sharpi
