// What latent attention does between its products, besides the decode kernels of kernels/attention.
#pragma once

#include "kernels/attention/latent_shape.h"

namespace sharpi::cuda {

// The parameters that LatentCall has too.
struct LatentPreparation {
    const float* norm = nullptr;  // [rank]
    float eps = 0;
    const float *cos = nullptr, *sin = nullptr;  // [context, rotated / 2]
    bool adjacent = false;
    const float* queryScale = nullptr;  // [context] or nullptr
};

// Finishes q [rows, heads * rowDim], of which each head has its first `rank` elements: the others are those of
// headQueries [rows, heads * (plainDim + rotated)], rotated. Appends the rows k [rows, rowDim] to the cache, normalized
// and rotated, and leaves k unchanged. One launch, with the bits of the CPU's operation. If qHalf is not null, it
// receives the finished q instead.
void prepareLatent(Stream& stream, float* q, const float* headQueries, const float* k, const LatentShape& shape,
                   const LatentPreparation& how, const BatchRows& batch, const KvPages& pages, const HalfRows& qHalf);

// The first `cols` of every `stride` floats of x, for `pieces` pieces, in the requested forms.
void takePieces(Stream& stream, const float* x, int64_t stride, int64_t pieces, int64_t cols, const RowOutputs& out);

}  // namespace sharpi::cuda
