// The CPU kernels, as one table for each instruction set. The same sources are compiled for each set with its own
// flags; `kernels()` picks a table once at run time. Each kernel runs on one thread, over the range that it is given:
// dividing work between threads is the backend's job. Every table gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/matrix.h"
#include "core/rules/activation.h"
#include "core/rules/attention_reach.h"
#include "memory/kv_pages.h"

namespace sharpi::cpu {

// Activations in the form that contract.h asks for.
// Row t: q + t * qStride holds `cols` int8; scale + t * scaleStride one float for each block of 32;
// sums + t * sumStride two int16 for each block of 32 (the sums of q over its halves of 16).
// Strides are padded to whole groups of 8 blocks (256 elements); padding is zero.
struct QuantizedRows {
    int64_t rows = 0, cols = 0;
    int64_t qStride = 0, scaleStride = 0, sumStride = 0;
    int8_t* q = nullptr;
    float* scale = nullptr;
    int16_t* sums = nullptr;
};
// Bytes that a QuantizedRows needs, and its layout over a 64-byte-aligned buffer of that size.
size_t quantizedRowsBytes(int64_t rows, int64_t cols);
QuantizedRows quantizedRowsOver(void* buffer, int64_t rows, int64_t cols);

// One product y[i, r] = w[r, :] . x[row(i), :] for i < count and r in the range that a call is given, where
// row(i) = rowIndex ? rowIndex[i] : i. Float weight types read xFloat, all others xQuant.
struct MatmulArgs {
    Matrix w;
    const float* xFloat = nullptr;  // [.., cols], row stride = cols
    const QuantizedRows* xQuant = nullptr;
    const int32_t* rowIndex = nullptr;
    int64_t count = 0;
    const float* bias = nullptr;  // [w.rows] or nullptr; added last
    float* y = nullptr;           // y[i * yStride + r]
    int64_t yStride = 0;
};

// Causal attention of the query rows of one sequence. Query row i (position positions[i]) sees the keys at
// reach.first(positions[i])..positions[i]. The page of a position is pageTable[position / pageTokens]; the entries of
// pages that no row sees are not read.
// q: row i at i * rowStride, head h at + h * headDim; out: at i * outStride, + h * elements of a value. Grouped-query:
// head h reads kv head h / (heads / kvHeads).
struct AttentionArgs {
    const float* q = nullptr;
    float* out = nullptr;
    int64_t rowStride = 0, outStride = 0;
    const int32_t* positions = nullptr;
    int32_t heads = 0;
    float scale = 1.0f;
    AttentionReach reach;
    float softcap = 0;             // 0: none
    const float* sinks = nullptr;  // [heads] or nullptr
    KvPages pages;
    const int32_t* pageTable = nullptr;
    // Rows of blocks that a query sees besides; none if blocks.k is null. There is one kv head then.
    KvPages blocks;
    const int32_t* blockTable = nullptr;
    const int32_t* chosen = nullptr;  // row i's blocks, ascending: chosen + i * topK; nullptr: all that are over
    int64_t topK = 0;
};

// A block of tokens; see kernels/blocks.cpp. Of each token: its key, its gate and its gate's offset, [headDim] each.
constexpr int32_t kMostBlockTokens = 256;
struct BlockArgs {
    const float *keys[kMostBlockTokens], *gates[kMostBlockTokens], *offsets[kMostBlockTokens];
    int32_t tokens = 0;
    int64_t headDim = 0;
};

// The scores of the first `count` blocks for one query row.
struct IndexArgs {
    const float *queries = nullptr, *weights = nullptr;  // [heads, headDim], [heads]
    int32_t heads = 0;
    KvPages rows;
    const int32_t* table = nullptr;
    int64_t count = 0;
};

// A row of a feed-forward part. Both products are multiplied by `factor`, then the biases are added.
struct GatedRow {
    float* gate = nullptr;      // becomes activation(gate, up)
    const float* up = nullptr;  // nullptr: the part has no gate, and `gate` holds its one product
    const float *gateBias = nullptr, *upBias = nullptr;  // may be nullptr
    float factor = 1.0f;
};

// The convolution and SiLU of recurrent layers over the rows of one sequence, in place (kernels/convolution.cpp).
constexpr int kMaxConvWidth = 64;
struct ConvArgs {
    float* x = nullptr;  // [rows, channels]
    int64_t rows = 0, channels = 0;
    const float* weight = nullptr;  // [width, channels]
    const float* bias = nullptr;    // [channels] or nullptr
    int32_t width = 0;              // up to kMaxConvWidth
    const float* from = nullptr;    // [width - 1, channels]: the inputs before the first row; nullptr: zeros
    float* to = nullptr;            // [width - 1, channels]: the inputs before the next batch's rows; may be `from`
};

// Gated DeltaNet's delta rule over the rows of one sequence, for one value head (kernels/delta.cpp): row t's query at
// q + t * rowStride, and so on.
struct DeltaArgs {
    const float *q = nullptr, *k = nullptr, *v = nullptr;
    int64_t rowStride = 0;
    const float *decay = nullptr, *step = nullptr;  // one number a row: row t's at + t * stepStride
    int64_t stepStride = 0;
    float* out = nullptr;
    int64_t outStride = 0, rows = 0;
    int32_t dim = 0;
    const float* from = nullptr;  // [dim, dim]: the state before the first row; nullptr: zeros
    float* to = nullptr;          // the state after the last; may be `from`
};

// Mamba 2's scan over the rows of one sequence, for one head (kernels/scan.cpp): row t's B at b + t * rowStride, and so
// on.
struct ScanArgs {
    const float *x = nullptr, *b = nullptr, *c = nullptr;
    int64_t rowStride = 0;
    const float *decay = nullptr, *step = nullptr;  // one number a row: row t's at + t * stepStride
    int64_t stepStride = 0;
    float skip = 0;  // the factor of x in what the head gives
    float* out = nullptr;
    int64_t outStride = 0, rows = 0;
    int32_t stateDim = 0, headDim = 0;
    const float* from = nullptr;  // [stateDim, headDim]: the state before the first row; nullptr: zeros
    float* to = nullptr;          // the state after the last; may be `from`
};

struct Kernels {
    const char* name;  // "scalar", "avx2", "avx512", "amx"

    // --- quantized formats and matmul (matmul_*.cpp) ---
    void (*dequantizeRow)(DType type, const void* row, int64_t cols, float* out);
    void (*quantizeRow)(const float* x, int64_t cols, int8_t* q, float* scale, int16_t* sums);
    // Rows [rowBegin, rowEnd) of w for all `count` inputs. `scratch`: 64-byte-aligned, matmulScratchBytes(cols).
    void (*matmul)(const MatmulArgs& args, int64_t rowBegin, int64_t rowEnd, void* scratch);

    // --- everything else (float_*.cpp) ---
    // y = x / sqrt(mean(x^2) + eps) * weight, one row of n. y may be x. weight: nullptr: weights of 1.
    void (*rmsNorm)(const float* x, const float* weight, float eps, int64_t n, float* y);
    // y = (x - mean) / sqrt(mean of (x - mean)^2 + eps) * weight + bias, one row of n. y may be x. bias may be nullptr.
    void (*layerNorm)(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* y);
    // x += y
    void (*add)(float* x, const float* y, int64_t n);
    // x += scale * y
    void (*addScaled)(float* x, const float* y, float scale, int64_t n);
    // n elements of a row; see core/rules/activation.h.
    void (*gatedActivation)(Activation activation, const GatedRow& row, int64_t n);
    // x = x / sqrt(sum of x^2 + eps) * scale, one row of n.
    void (*l2Norm)(float* x, float eps, float scale, int64_t n);
    // x = x * sigmoid(gate)
    void (*sigmoidMul)(float* x, const float* gate, int64_t n);
    // x = portableSoftcap(x, cap)
    void (*softcap)(float* x, float cap, int64_t n);
    // Rotates the `dims` leading elements of one head by cos[dims / 2] and sin[dims / 2]. adjacent: in pairs
    // (2i, 2i + 1); otherwise (i, i + dims / 2).
    void (*rope)(float* head, const float* cos, const float* sin, int32_t dims, bool adjacent);
    // Softmax in place over n values.
    void (*softmax)(float* x, int64_t n);
    // Adds exp(x[i] - top) to lanes[i % kScoreLanes], in ascending order; NaN counts as -infinity (see
    // core/rules/log_softmax.h).
    void (*addExps)(const float* x, float top, int64_t n, double* lanes);
    // Stores n floats as KV elements, rounding to nearest even.
    void (*storeKv)(const float* x, int64_t n, KvType type, void* out);
    // Query rows [rowBegin, rowEnd) for kv head `kvHead` (all query heads of its group).
    // A row's result does not depend on the other rows of the call.
    void (*attention)(const AttentionArgs& args, int32_t kvHead, int64_t rowBegin, int64_t rowEnd, void* scratch);
    // [headDim] floats; see kernels/blocks.cpp.
    void (*poolBlock)(const BlockArgs& args, float* out);
    // scores: room for args.count rounded up to 16. scratch: [16, headDim rounded up to 16].
    void (*indexScores)(const IndexArgs& args, float* scores, float* scratch);
    // Channels [begin, end).
    void (*convSilu)(const ConvArgs& args, int64_t begin, int64_t end);
    // Columns [begin, end) of the state, and of v and out. `scratch`: 64-byte-aligned, stateScratchBytes(dim).
    void (*deltaRule)(const DeltaArgs& args, int32_t begin, int32_t end, void* scratch);
    // Columns [begin, end) of the state, and of x and out. `scratch`: 64-byte-aligned, stateScratchBytes(stateDim).
    void (*scan)(const ScanArgs& args, int32_t begin, int32_t end, void* scratch);
};

size_t matmulScratchBytes(int64_t cols);
// Products of several tokens compute tiles of this many rows, or of fewer that divide it. So ranges of rows that
// threads get are best whole numbers of it.
constexpr int64_t kMatmulTileRows = 32;
// Enough for any range of rows.
size_t attentionScratchBytes(int32_t heads, int32_t kvHeads, int32_t headDim, int32_t pageTokens);

// For kernels that update a head's matrix of that many rows.
size_t stateScratchBytes(int32_t rows);
size_t indexScratchBytes(int32_t dim, int64_t blocks);

// The best table that this machine can run, or the one that SHARPI_CPU_ISA=scalar|avx2|avx512|amx names.
// Throws Error(InvalidArgument) if that one cannot run here.
const Kernels& kernels();
// The table of that name, or nullptr if this build or this machine has none.
const Kernels* kernelsFor(const char* name);

}  // namespace sharpi::cpu
