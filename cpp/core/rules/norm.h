// How a row of n numbers is normalized, in an order that gives every processor the same bits. All sums have 32
// accumulators that start at +0, number i of the row going to accumulator i mod 32, and core/contract.h's end.
//
//   Rms     inverse = 1 / sqrt(sum of fma(x, x, acc) / n + eps);  y = (x * inverse) * weight
//   Layer   mean = (sum of acc + x) / n;  d = x - mean;  inverse = 1 / sqrt(sum of fma(d, d, acc) / n + eps);
//           y = (d * inverse) * weight, then + bias if there is a bias
//
// What a part of a layer adds to the residual stream is normalized by a weight of its own, if the model has one, and
// multiplied by a factor, if that is not 1: x = x + norm(part) * factor. If the layer scales its output, x = x * scale
// follows. Each operation is rounded.
#pragma once

#include <cstdint>

namespace sharpi {

enum class NormKind : uint8_t { Rms, Layer };

}  // namespace sharpi
