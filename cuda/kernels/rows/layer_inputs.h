// Per-layer embeddings: a row of floats for each token and layer (LayerInputsSpec).
#pragma once

#include "core/rules/layer_inputs.h"
#include "kernels/rows/rows.h"

namespace sharpi::cuda {

// inputs: [parts, width], the projections of the rows, part by part. Each part becomes joinedLayerInput() of its norm
// and of the same part of `rows`, with the bits of the CPU.
void joinLayerInputs(Stream& stream, float* inputs, const float* rows, int64_t parts, int64_t width,
                     const LayerInputFactors& factors, const float* norm, float eps);

}  // namespace sharpi::cuda
