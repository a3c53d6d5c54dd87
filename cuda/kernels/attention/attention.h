// Attention over the paged KV cache, and what prepares its inputs.
#pragma once

#include "kernels/rows/rows.h"
#include "memory/kv_pages.h"

namespace sharpi::cuda {

// The rows of a batch as kernels see them: everything that changes from step to step, in device memory.
struct BatchRows {
    int64_t rows = 0;
    const int32_t* positions = nullptr;   // [rows]
    const int32_t* sequence = nullptr;    // [rows]: which page table
    const int32_t* pageTables = nullptr;  // [sequences, pagesPerTable]
    int64_t pagesPerTable = 0;

    // Rows [first, first + count) of these. Page tables are the sequences', so they stay.
    BatchRows from(int64_t first, int64_t count) const {
        return {count, positions + first, sequence + first, pageTables, pagesPerTable};
    }
};

struct HeadShape {
    int32_t heads = 0, kvHeads = 0, headDim = 0;
};

enum class HeadNorm { None, PerHead, FullRow };

// What happens to queries, keys and values between their projections and attention.
struct HeadPreparation {
    HeadNorm norm = HeadNorm::None;
    const float *qNorm = nullptr, *kNorm = nullptr;  // [headDim], or the whole row with FullRow
    float eps = 0;
    const float *cos = nullptr, *sin = nullptr;  // [context, ropeDims / 2]
    int32_t ropeDims = 0;
    bool adjacent = false;
};

// Norm and rotation of q [rows, heads * headDim] in place; of k [rows, kvHeads * headDim] on its way to the cache (k
// itself stays), and v's append. One launch; the bits of the CPU's rmsNorm, rope and storeKv. qHalf: also q's HalfRows,
// where not null.
void prepareHeads(Stream& stream, float* q, float* k, const float* v, const HeadShape& shape,
                  const HeadPreparation& how, const BatchRows& batch, const KvPages& pages, const HalfRows& qHalf);

// Causal attention of few rows, in one launch: the bits of the CPU's attention (see cpu/kernels/attention.cpp).
// scratch: decodeAttentionBytes, 256-byte aligned, its first kDecodeCounterBytes zero before the first call and left so
// by every call. out: [rows, heads * headDim], floats and quantized (headDim a multiple of 32); rows * heads up to
// kDecodeCounterBytes / 4.
constexpr size_t kDecodeCounterBytes = 16384;
size_t decodeAttentionBytes(int64_t rows, const HeadShape& shape, int64_t context, int64_t pageTokens);
void attentionDecode(Stream& stream, const float* q, const HeadShape& shape, float scale, const BatchRows& batch,
                     const KvPages& pages, void* scratch, const RowOutputs& out);

// Causal attention of many rows, on tensor cores. Tile i is rows [tileBegin[i], tileEnd[i]) of one sequence, at most
// kQueryTile rows with ascending positions; arrays in device memory. fp32 and fp16 caches, and q.lo, are used in
// split form. out: [rows, heads * headDim] in the forms asked for (floats and half; quantized is ignored).
constexpr int kQueryTile = 64;
struct QueryTiles {
    const int32_t *begin = nullptr, *end = nullptr;
    int64_t count = 0;
};
void attentionPrefill(Stream& stream, const HalfRows& q, const HeadShape& shape, float scale, const BatchRows& batch,
                      const QueryTiles& tiles, const KvPages& pages, const RowOutputs& out);

}  // namespace sharpi::cuda
