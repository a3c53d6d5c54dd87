// Brings activations into the order in which products of many rows read them.
#pragma once

#include "kernels/rows/rows.h"

namespace sharpi::cuda {

// Fills x.wide for products of `rows` rows, at most kMostWideRows.
void arrangeColumns(Stream& stream, const QuantizedRows& x, int rows, int64_t cols);

}  // namespace sharpi::cuda
