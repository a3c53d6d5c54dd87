// Brings activations into the order in which products of many rows read them, if what wrote them has not done so.
#pragma once

#include "kernels/rows/rows.h"

namespace sharpi::cuda {

// Writes x.wide for products of `rows` rows, at most kMostWideRows, unless it is written.
void arrangeColumns(Stream& stream, QuantizedRows& x, int rows, int64_t cols);

}  // namespace sharpi::cuda
