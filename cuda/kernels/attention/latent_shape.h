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

// The most heads that read a page together in attentionDecode; see attention_decode.cu.
constexpr int32_t kLatentGroup = 8;
// Rows that one launch of attentionDecode takes of such a layer, and the scratch for batches of up to `rows` rows.
int64_t latentLaunchRows(int32_t heads);
size_t latentAttentionBytes(int64_t rows, const LatentShape& shape);

}  // namespace sharpi::cuda
