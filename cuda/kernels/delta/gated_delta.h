// Gated DeltaNet on the GPU: all work between a layer's first products (queries, keys and values; gate; alpha; beta)
// and its last one. Also the gates of gated attention.
#pragma once

#include "core/launch_rows.h"
#include "core/portable.h"
#include "kernels/rows/rows.h"

namespace sharpi::cuda {

// Heads of 8, 16, .. kMaxDeltaDim elements, convolutions over 2 to kMaxDeltaConv inputs.
constexpr int32_t kMaxDeltaDim = 128, kMaxDeltaConv = 4;
struct DeltaShape {
    int32_t keyHeads = 0, valueHeads = 0, dim = 0, convWidth = 0;
    bool consecutive = false;  // value head h reads key head h / (valueHeads / keyHeads); else h % keyHeads
    SHARPI_PORTABLE int32_t headsPerKey() const { return consecutive ? valueHeads / keyHeads : 0; }
    SHARPI_PORTABLE int64_t keyWidth() const { return int64_t{keyHeads} * dim; }
    SHARPI_PORTABLE int64_t valueWidth() const { return int64_t{valueHeads} * dim; }
    SHARPI_PORTABLE int64_t channels() const { return 2 * keyWidth() + valueWidth(); }
    // The two parts of a state: [convWidth - 1, channels], and [valueHeads, dim, dim], with a line for each element of
    // a key.
    SHARPI_PORTABLE int64_t convFloats() const { return (convWidth - 1) * channels(); }
    SHARPI_PORTABLE int64_t matrixFloats() const { return valueWidth() * dim; }
};

// The key head that a value head reads. headsPerKey: DeltaShape::headsPerKey().
SHARPI_PORTABLE int32_t keyHeadOf(int32_t valueHead, int32_t keyHeads, int32_t headsPerKey) {
    return headsPerKey ? valueHead / headsPerKey : valueHead % keyHeads;
}

// A layer's states, entry after entry, as memory/recurrent_state.h holds them.
struct DeltaStates {
    float *conv = nullptr, *matrix = nullptr;
};

struct DeltaParameters {
    const float* conv = nullptr;                        // [convWidth, channels]
    const float *stepBias = nullptr, *decay = nullptr;  // [valueHeads]
    const float* headNorm = nullptr;                    // [dim]
    float eps = 0;
};

// Rows [begin[i], end[i]) of a batch, in device memory. Kernels skip an empty range, so that a list may be shorter than
// the room that a captured launch has for it.
struct RowRanges {
    const int32_t *begin = nullptr, *end = nullptr;
    int64_t count = 0;
};

// Values of from[t] that name no entry:
constexpr int32_t kStateIsZero = -1;         // row t begins a sequence
constexpr int32_t kStateIsOfRowBefore = -2;  // rows t - 1 and t are of the same sequence
// The rows of a batch. Everything is in device memory and is written before the pass: kernels read it, and the states
// that the pass begins from, while the kernel before them still runs.
struct DeltaBatch {
    int64_t rows = 0;
    const int32_t* from = nullptr;  // [rows]: the entry of the state before row t, or one of the above
    const int32_t* to = nullptr;    // [rows]: the entry for the state after row t; -1: it is not kept
    RowRanges sequences;            // all rows of each sequence
};

// The results of a row's products.
struct DeltaInputs {
    float* mixed = nullptr;                   // [rows, channels]: queries, keys, values
    float *alpha = nullptr, *beta = nullptr;  // [rows, valueHeads]
    const float* gate = nullptr;              // [rows, valueHeads * dim]
    // [rows, 2 * valueHeads]: key head by key head, the betas and then the alphas of the value heads that read it, for
    // shapes with consecutive heads. prepareDelta and deltaStep read them from here; null: from alpha and beta.
    const float* steps = nullptr;
};

// Where a beta is in DeltaInputs::steps; its alpha is `headsPerKey` behind it.
SHARPI_PORTABLE int64_t betaAt(int64_t row, int32_t head, int32_t valueHeads, int32_t headsPerKey) {
    return 2 * row * valueHeads + 2 * head - head % headsPerKey;
}

// Throws Error(InvalidArgument) if there are no kernels for this shape.
void requireDelta(const DeltaShape& shape);

// Works in place: mixed becomes silu(conv(mixed)) with queries and keys scaled to their lengths, alpha becomes the
// decay and beta the step. Writes the states of the convolution. The bits are the CPU's (cpu/cpu_delta.cpp). It is
// meant for few rows, because one warp takes a head's channels through all rows of a sequence.
void prepareDelta(Stream& stream, const DeltaInputs& in, const DeltaParameters& parameters, const DeltaShape& shape,
                  const DeltaStates& states, const DeltaBatch& batch);
// The same for many rows, all tiles at once. tiles: the same rows, cut anywhere and in any order, but not across
// sequences. windows: prepareDeltaBytes. If queriesAndKeys is not null, it receives these in halves,
// [rows, 2 * keyWidth].
size_t prepareDeltaBytes(int64_t tiles, const DeltaShape& shape);
void prepareDelta(Stream& stream, const DeltaInputs& in, const DeltaParameters& parameters, const DeltaShape& shape,
                  const DeltaStates& states, const DeltaBatch& batch, const RowRanges& tiles, void* windows,
                  const HalfRows& queriesAndKeys);

// The delta rule, row after row, then silu(gate) * headNorm: rows of valueHeads * dim in the requested forms, with the
// bits of the CPU. It takes any number of rows but is fast only if each sequence has few, however many sequences there
// are. If dim is not a multiple of 32, int8 forms are made from out.floats, which must then be requested too. Without a
// headNorm there is neither norm nor gate.
void deltaRule(Stream& stream, const DeltaInputs& in, const DeltaParameters& parameters, const DeltaShape& shape,
               const DeltaStates& states, const DeltaBatch& batch, const RowOutputs& out);

// prepareDelta and deltaRule in one launch, for any number of sequences with up to kDeltaStepRows rows each. `in` does
// not change. The caller must keep each sequence within that limit: only the total number of rows is checked. scratch:
// deltaStepBytes, 4-byte aligned, zero before the first call; every call leaves it zero.
constexpr int64_t kDeltaStepRows = kMostDraftRows;
size_t deltaStepBytes(int64_t sequences, const DeltaShape& shape);
void deltaStep(Stream& stream, const DeltaInputs& in, const DeltaParameters& parameters, const DeltaShape& shape,
               const DeltaStates& states, const DeltaBatch& batch, void* scratch, const RowOutputs& out);

// The delta rule for many rows, on tensor cores. tiles: up to kDeltaChunk rows each; a state is kept only after the
// last row of a tile. queriesAndKeys: see prepareDelta. If it has a low half, products are in split form, and the error
// of outputs and states is at most 5e-5 of the largest number of their head (2e-2 without). attended: [rows,
// valueWidth], the output before the norm; may be out.floats. The values in in.mixed are overwritten. scratch:
// deltaChunkBytes, 256-byte aligned. A device with too little shared memory goes row after row instead.
constexpr int kDeltaChunk = 64;
size_t deltaTileListBytes(int64_t rows);  // the first part of that scratch
size_t deltaChunkBytes(int64_t rows, int64_t tiles, const DeltaShape& shape, bool split);
void deltaRuleInChunks(Stream& stream, const DeltaInputs& in, const HalfRows& queriesAndKeys,
                       const DeltaParameters& parameters, const DeltaShape& shape, const DeltaStates& states,
                       const DeltaBatch& batch, const RowRanges& tiles, void* scratch, float* attended,
                       const RowOutputs& out);

// silu(gate) * headNorm of each head of x [rows, valueWidth], in the requested forms, as deltaRule computes it.
// out.floats may be x.
void gatedNorm(Stream& stream, const float* x, const float* gate, const DeltaParameters& parameters,
               const DeltaShape& shape, int64_t rows, const RowOutputs& out);

// The product of gated attention holds the query and then the gate of each head. This copies the queries to where the
// next kernels read them: from gated [rows, heads, 2, headDim] to q [rows, heads * headDim].
void splitGatedQueries(Stream& stream, const float* gated, int64_t rows, int32_t heads, int32_t headDim, float* q);
// x * sigmoid(gate), with x [rows, heads * headDim] and the gates as above, and the bits of the CPU's sigmoidMul.
// out.floats may be x.
void gateHeads(Stream& stream, const float* x, const float* gated, int64_t rows, int32_t heads, int32_t headDim,
               const RowOutputs& out);

}  // namespace sharpi::cuda
