// Attention over the paged KV cache, and the preparation of its inputs.
#pragma once

#include <algorithm>
#include <tuple>

#include "core/rules/attention_reach.h"
#include "kernels/rows/rows.h"
#include "memory/kv_pages.h"

namespace sharpi::cuda {

// How long the texts of decode rows are, by which attention chooses its kernel. Rounded, so that few steps have to be
// captured for it. Zeros: short, or not known.
struct BatchDepth {
    int64_t deepest = 0;     // pages: no text has more
    int64_t all = 0;         // pages: about as many have all texts together
    int64_t rowsOfText = 0;  // no text has more rows

    // That of `count` of `rows` rows.
    BatchDepth part(int64_t count, int64_t rows) const {
        if (deepest == 0) return {};
        const int64_t texts = std::max<int64_t>(1, rows / rowsOfText), own = std::max<int64_t>(1, count / rowsOfText);
        return {deepest, all * std::min(own, texts) / texts, rowsOfText};
    }
    bool operator<(const BatchDepth& other) const {
        return std::tie(deepest, all, rowsOfText) < std::tie(other.deepest, other.all, other.rowsOfText);
    }
};

// The rows of a batch as kernels see them. All that changes from step to step is in device memory, where no kernel
// writes it: it may be read before waitForPrevious().
struct BatchRows {
    int64_t rows = 0;
    const int32_t* positions = nullptr;   // [rows]
    const int32_t* sequence = nullptr;    // [rows]: the number of the page table
    const int32_t* pageTables = nullptr;  // [sequences, pagesPerTable]
    int64_t pagesPerTable = 0;            // of all lists of a sequence's pages
    int64_t listPages = 0;                // of one list: the most pages of a sequence, and how far the next list is
    BatchDepth depth = {};

    // Rows [first, first + count) of these. The page tables stay, since they belong to sequences.
    BatchRows from(int64_t first, int64_t count) const {
        return {count,         positions + first, sequence + first,       pageTables,
                pagesPerTable, listPages,         depth.part(count, rows)};
    }
};

// Heads of 8, 16, .. kMaxHeadDim elements.
constexpr int32_t kMaxHeadDim = 512;
struct HeadShape {
    int32_t heads = 0, kvHeads = 0, headDim = 0;
};
// Throws Error(InvalidArgument) for a shape that attention has no kernels for.
void requireHeads(const HeadShape& shape);

enum class HeadNorm { None, PerHead, FullRow };

// What happens to queries, keys and values between their projections and attention. HeadsCall says what the members
// mean. FullRow comes with weights, before the rotation, and with values as v has them.
struct HeadPreparation {
    HeadNorm norm = HeadNorm::None;
    bool normAfterRotation = false, valueNorm = false, appends = true, valuesAreKeys = false;
    const float *qNorm = nullptr, *kNorm = nullptr;  // [headDim]; nullptr: weights of 1; or the whole row with FullRow
    const float* queryScale = nullptr;               // [context] or nullptr
    float eps = 0;
    const float *cos = nullptr, *sin = nullptr;  // [context, ropeDims / 2]
    int32_t ropeDims = 0;
    bool adjacent = false;
};

// Prepares q [rows, heads * headDim] in place, and k and v [rows, kvHeads * headDim] on their way to the cache, which
// leaves k and v themselves unchanged. One launch, with the bits of the CPU's rmsNorm, rope and storeKv.
// If qHalf is not null, it receives q as HalfRows too.
void prepareHeads(Stream& stream, float* q, float* k, const float* v, const HeadShape& shape,
                  const HeadPreparation& how, const BatchRows& batch, const KvPages& pages, const HalfRows& qHalf);

// What attention makes of dot products and what it lets a query see. A score is scale * q.k, with a softcap softcap *
// tanh(scale * q.k / softcap); a head's sink, which is not scaled, joins the softmax as a score without a value.
struct AttentionRule {
    float scale = 1;
    AttentionReach reach;
    float softcap = 0;             // 0: none
    const float* sinks = nullptr;  // [heads] or nullptr
};

// Causal attention of few rows, with the bits of the CPU's attention (cpu/kernels/attention.cpp). scratch:
// decodeAttentionBytes for no fewer rows, heads and elements, 256-byte aligned; its first kDecodeCounterBytes
// are zero before the first call, and every call leaves them zero. The page table's entries are read from the page of
// the first key that a row sees to that of the last. If the batch's depth is known, no row may see more pages than its
// deepest. out: [rows, heads * headDim] as floats and quantized (if headDim is a multiple of 32). Neighbouring rows of
// one sequence share what they read.
constexpr size_t kDecodeCounterBytes = 65536;
constexpr int64_t kDecodeLaunchRows = 64;
size_t decodeAttentionBytes(int64_t rows, const HeadShape& shape);
void attentionDecode(Stream& stream, const float* q, const HeadShape& shape, const AttentionRule& rule,
                     const BatchRows& batch, const KvPages& pages, void* scratch, const RowOutputs& out);

// The same for many rows of a sequence: prompts that follow the contract. Tile i is rows [begin[i], end[i]): up to
// kManyRowsTile neighbouring rows of one sequence with ascending positions. The arrays are in device memory. out is as
// for attentionDecode; rows outside the tiles are not written. sums: scratch, heads * headDim floats for each row,
// 16-byte aligned; it may be out.floats.
constexpr int64_t kManyRowsTile = 128;
constexpr int64_t kManyRows = 32;  // the fewest of a sequence that make tiles
struct QueryTiles {
    const int32_t *begin = nullptr, *end = nullptr;
    int64_t count = 0;
};
void attentionManyRows(Stream& stream, const float* q, const HeadShape& shape, const AttentionRule& rule,
                       const BatchRows& batch, const QueryTiles& tiles, const KvPages& pages, float* sums,
                       const RowOutputs& out);
// Whether to call attentionManyRows for `tiles` tiles with `rows` rows in all. True if there is a kernel for these
// heads on this device, and if the rows fill enough of the device and of each block for it to be faster than
// attentionDecode.
bool manyRowsPay(const DeviceInfo& device, const HeadShape& shape, const KvPages& pages, int64_t tiles, int64_t rows);

// Rows that one launch of attentionDecode takes: as many as its counters serve.
int64_t decodeLaunchRows(int32_t kvHeads);
// The places for results of pieces that are not joined yet: `slots` for each head of each row, in batches that are
// joined together. Both are powers of two. heads: those of all rows.
struct DecodeRing {
    int32_t slots = 0, batch = 0;
};
DecodeRing decodeRing(int64_t heads);

// Causal attention of many rows, on tensor cores. Tile i is rows [tileBegin[i], tileEnd[i]) of one sequence: at most
// kQueryTile rows with ascending positions. The arrays are in device memory. fp32 and fp16 caches are multiplied in
// split form, and so are queries with a q.lo. A tile reads no entry of its page table before the page of the first key
// that its first row sees. out: [rows, heads * kvValueDim] as floats and as halves; quantized is ignored. Latents
// are split only on devices with more than 64 KiB of shared memory for a block.
constexpr int kQueryTile = 64;
void attentionPrefill(Stream& stream, const HalfRows& q, const HeadShape& shape, const AttentionRule& rule,
                      const BatchRows& batch, const QueryTiles& tiles, const KvPages& pages, const RowOutputs& out);

}  // namespace sharpi::cuda
