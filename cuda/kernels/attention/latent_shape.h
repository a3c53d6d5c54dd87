// The sizes of latent attention, and what attention needs to know of them: LatentSpec says what it is.
#pragma once

#include "kernels/attention/attention.h"

namespace sharpi::cuda {

// A head's query is `plainDim` elements and then `rotated` ones; the cache's row, for all heads, is a latent of `rank`
// elements and then a key of `rotated`.
struct LatentShape {
    int32_t heads = 0, rank = 0, rotated = 0, plainDim = 0;
    int32_t rowDim() const { return rank + rotated; }
};
constexpr int32_t kMaxLatentRank = 512, kMaxLatentRotated = 128;
// Throws Error(InvalidArgument) for a shape that there are no kernels for.
void requireLatent(const LatentShape& shape);

// attentionDecode for layers whose values are the first elements of keys: results are [rows * heads, rank], and each
// is a row of int8 blocks.
void attentionDecodeLatent(Stream& stream, const float* q, const HeadShape& shape, const AttentionRule& rule,
                           const BatchRows& batch, const KvPages& pages, void* scratch, const RowOutputs& out);

// Rows that one launch takes of such a layer, the places for its pieces, and the scratch for batches of up to `rows`
// rows: that of decodeAttentionBytes, and a maximum and a sum for each 32 elements of a head's result.
int64_t latentLaunchRows(int32_t heads);
DecodeRing latentRing(int64_t heads);
size_t latentAttentionBytes(int64_t rows, const LatentShape& shape);

}  // namespace sharpi::cuda
