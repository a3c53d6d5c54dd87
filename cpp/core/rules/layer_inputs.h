// How a row of the per-layer embeddings is made, to the bit on every processor.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/portable.h"

namespace sharpi {

struct LayerInputFactors {
    float projected = 1, row = 1, sum = 1;
    LayerInputFactors(int64_t embedding, int64_t width)
        : projected(static_cast<float>(1.0 / std::sqrt(static_cast<double>(embedding)))),
          row(static_cast<float>(std::sqrt(static_cast<double>(width)))),
          sum(static_cast<float>(1.0 / std::sqrt(2.0))) {}
};

// normed: an element of the normalized projection; row: the table's.
SHARPI_PORTABLE float joinedLayerInput(float normed, float row, const LayerInputFactors& f) {
    return fmaf(row, f.row, normed) * f.sum;
}

}  // namespace sharpi
