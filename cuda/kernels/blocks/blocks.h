// Blocks of tokens that attention sees as one row each (CompressorSpec), the choice among them (IndexerSpec), and
// attention over them and the keys of a window. Everything has the CPU's bits (cpu/kernels/blocks.cpp, attention.cpp).
#pragma once

#include "kernels/attention/attention.h"

namespace sharpi::cuda {

// The rotation of a part of a head: its elements [first, first + dims), by the angles of a position.
struct RotatedPart {
    const float *cos = nullptr, *sin = nullptr;  // [context, dims / 2]
    int32_t dims = 0, first = 0;
    bool adjacent = false;
};

// A layer's rows of blocks, or its unfinished blocks, as kernels see them. tables: the list of pages of sequence 0; one
// list is as far from the next as BatchRows::pagesPerTable says.
struct PagedRows {
    KvPages pages;
    const int32_t* tables = nullptr;
};

// Between the projections and attention: normalizes each head of q [rows, heads * headDim] (weights: [headDim] or null)
// and rotates it, in place, and does the same to k [rows, headDim] on its way to the cache; k stays as it is. If qHalf
// is not null, it receives q as HalfRows too.
struct BlockHeads {
    const float *qNorm = nullptr, *kNorm = nullptr;
    float eps = 0;
    RotatedPart rope;
};
void prepareBlockHeads(Stream& stream, float* q, const float* k, const HeadShape& shape, const BlockHeads& how,
                       const BatchRows& batch, const KvPages& pages, const HalfRows& qHalf);

struct BlockRule {
    int32_t blockTokens = 0;
    bool overlaps = false;
    const float* gateOffsets = nullptr;  // [blockTokens, width]
    const float* norm = nullptr;         // [headDim]
    float eps = 0;
    RotatedPart rope;
};
// Elements of a row of blocks, and tokens of a block.
constexpr int32_t kMostBlockDim = 512, kMostBlockTokens = 128;

// Keeps the keys and gates of a batch's tokens, [rows, width], in `pending`, and makes the rows of the blocks that end
// in the batch.
void compressBlocks(Stream& stream, const BlockRule& rule, const float* keys, const float* gates,
                    const BatchRows& batch, const PagedRows& pending, const PagedRows& rows);

struct IndexRule {
    int32_t heads = 0, topK = 0;
    float scale = 1.0f;
    RotatedPart rope;
};
constexpr int32_t kMostIndexDim = 256;
// Rows whose scores are held at once.
constexpr int64_t kIndexedRows = 64;
// The scores of that many rows. blocks: the most of a sequence.
size_t indexScoreBytes(int64_t rows, int64_t blocks);

// chosen: [rows, topK], the blocks that each row sees, ascending; of a row that has fewer, that many. queries: [rows,
// heads, elements of a row of `blocks`]; weights: [rows, heads]. scratch: indexScoreBytes for these rows and for the
// blocks of listPages pages.
void chooseBlocks(Stream& stream, const IndexRule& rule, const float* queries, const float* weights,
                  const BatchRows& batch, const PagedRows& blocks, void* scratch, size_t scratchBytes, int32_t* chosen);

// What attention sees beside the keys of its reach. pages.k: null: nothing.
struct SeenBlocks {
    PagedRows rows;
    const int32_t* chosen = nullptr;  // [rows, topK]; null: all that are over
    int32_t topK = 0;
};

// Segments of pages that one row sees at most: `blocks` rows of blocks and the keys of the reach, in a cache of
// `pages` pages for a sequence.
int64_t blockSegments(int64_t blocks, const AttentionReach& reach, int64_t pages);
// Results of segments, before they are joined, for some of the rows at a time.
size_t blockAttentionBytes(int64_t rows, const HeadShape& shape, int64_t segments);
// Enough for batches of that many rows, in several launches if there are many.
size_t blockAttentionScratch(int64_t rows, const HeadShape& shape, int64_t segments);

// Attention with one kv head whose keys are its values. What a head gives is rotated back by its query's position.
// out: [rows, heads * headDim], may be q. scratch: blockAttentionBytes for one row or more.
void attendBlocks(Stream& stream, const float* q, const HeadShape& shape, const AttentionRule& rule,
                  const BatchRows& batch, const KvPages& pages, const SeenBlocks& seen, const RotatedPart& back,
                  void* scratch, size_t scratchBytes, float* out);

// The same for many rows on tensor cores, near these bits. fp32 and fp16 caches are multiplied in split form, and so
// are queries with a q.lo.
void prefillBlocks(Stream& stream, const HalfRows& q, const HeadShape& shape, const AttentionRule& rule,
                   const BatchRows& batch, const KvPages& pages, const SeenBlocks& seen, const RotatedPart& back,
                   float* out);

}  // namespace sharpi::cuda
