// Gated DeltaNet on the GPU: what lies between a layer's first products (queries, keys and values; gate; alpha; beta)
// and its last one. And the gates of gated attention.
#pragma once

#include "core/launch_rows.h"
#include "core/portable.h"
#include "kernels/rows/rows.h"

namespace sharpi::cuda {

// Heads of 8, 16, .. kMaxDeltaDim elements, convolutions over 2 to kMaxDeltaConv inputs.
constexpr int32_t kMaxDeltaDim = 128, kMaxDeltaConv = 4;
struct DeltaShape {
    int32_t keyHeads = 0, valueHeads = 0, dim = 0, convWidth = 0;  // value head h reads key head h % keyHeads
    SHARPI_PORTABLE int64_t keyWidth() const { return int64_t{keyHeads} * dim; }
    SHARPI_PORTABLE int64_t valueWidth() const { return int64_t{valueHeads} * dim; }
    SHARPI_PORTABLE int64_t channels() const { return 2 * keyWidth() + valueWidth(); }
    // Of a state: [convWidth - 1, channels], and [valueHeads, dim, dim] (a line for each element of a key).
    SHARPI_PORTABLE int64_t convFloats() const { return (convWidth - 1) * channels(); }
    SHARPI_PORTABLE int64_t matrixFloats() const { return valueWidth() * dim; }
};

// A layer's states, slot after slot, as memory/recurrent_state.h holds them.
struct DeltaStates {
    float *conv = nullptr, *matrix = nullptr;
};

struct DeltaParameters {
    const float* conv = nullptr;                        // [convWidth, channels]
    const float *stepBias = nullptr, *decay = nullptr;  // [valueHeads]
    const float* headNorm = nullptr;                    // [dim]
    float eps = 0;
};

// Rows [begin[i], end[i]) of a batch, in device memory. An empty one is passed over, so that a list may be shorter than
// a captured launch has room for.
struct RowRanges {
    const int32_t *begin = nullptr, *end = nullptr;
    int64_t count = 0;
};

// from[t], where it is no slot:
constexpr int32_t kStateIsZero = -1;         // row t begins a sequence
constexpr int32_t kStateIsOfRowBefore = -2;  // rows t - 1 and t are of the same sequence
// The rows of a batch, everything in device memory and written before the pass: kernels read it, and the states that a
// pass begins from, while the kernel before still runs.
struct DeltaBatch {
    int64_t rows = 0;
    const int32_t* from = nullptr;  // [rows]: the slot of the state before row t, or one of the above
    const int32_t* to = nullptr;    // [rows]: the slot for the state after row t; -1: it is not kept
    RowRanges sequences;            // the rows of each sequence, whole
};

// What a row's products gave.
struct DeltaInputs {
    float* mixed = nullptr;                   // [rows, channels]: queries, keys, values
    float *alpha = nullptr, *beta = nullptr;  // [rows, valueHeads]
    const float* gate = nullptr;              // [rows, valueHeads * dim]
};

// Throws Error(InvalidArgument) if there are no kernels for it.
void requireDelta(const DeltaShape& shape);

// In place: mixed becomes silu(conv(mixed)) with queries and keys at their lengths, alpha the decay, beta the step; the
// states of the convolution are written. Bits of the CPU's (engine/cpu_delta.cpp). A warp takes a head's channels
// through all rows of a sequence: for few rows.
void prepareDelta(Stream& stream, const DeltaInputs& in, const DeltaParameters& parameters, const DeltaShape& shape,
                  const DeltaStates& states, const DeltaBatch& batch);
// The same for many rows, all tiles at once. tiles: the rows once more, cut anywhere and in any order, not across
// sequences. windows: prepareDeltaBytes. queriesAndKeys: also these in halves, [rows, 2 * keyWidth], where not null.
size_t prepareDeltaBytes(int64_t tiles, const DeltaShape& shape);
void prepareDelta(Stream& stream, const DeltaInputs& in, const DeltaParameters& parameters, const DeltaShape& shape,
                  const DeltaStates& states, const DeltaBatch& batch, const RowRanges& tiles, void* windows,
                  const HalfRows& queriesAndKeys);

// The delta rule, row after row, then silu(gate) * headNorm: rows of valueHeads * dim in the forms asked for. Bits of
// the CPU's. For few rows of each sequence, however many those are; right for any number of rows. Where dim is no
// multiple of 32, int8 forms are made from out.floats, which must then be among them. Without a headNorm there is
// neither norm nor gate.
void deltaRule(Stream& stream, const DeltaInputs& in, const DeltaParameters& parameters, const DeltaShape& shape,
               const DeltaStates& states, const DeltaBatch& batch, const RowOutputs& out);

// prepareDelta and deltaRule in one launch, for any number of sequences of up to kDeltaStepRows rows each; `in` stays
// as it is. The caller answers for the rows of each sequence; only their total is checked. scratch: deltaStepBytes,
// 4-byte aligned, zero before the first call and left so by every call.
constexpr int64_t kDeltaStepRows = 8;
static_assert(kDeltaStepRows >= kExactLaunchRows, "a step's rows of one sequence fit into one launch");
size_t deltaStepBytes(int64_t sequences, const DeltaShape& shape);
void deltaStep(Stream& stream, const DeltaInputs& in, const DeltaParameters& parameters, const DeltaShape& shape,
               const DeltaStates& states, const DeltaBatch& batch, void* scratch, const RowOutputs& out);

// The delta rule for many rows, on tensor cores. tiles: of up to kDeltaChunk rows; a state is kept only after the last
// row of one. queriesAndKeys: see prepareDelta; with a low part products are in split form, and what is attended and
// the states stay within 5e-5 of the largest number of their head (2e-2 without). attended: [rows, valueWidth], what
// comes before the norm; may be out.floats. The values in in.mixed are overwritten. scratch: deltaChunkBytes, 256-byte
// aligned. (A device whose blocks have too little shared memory goes row after row.)
constexpr int kDeltaChunk = 64;
size_t deltaTileListBytes(int64_t rows);  // the first part of it
size_t deltaChunkBytes(int64_t rows, int64_t tiles, const DeltaShape& shape, bool split);
void deltaRuleInChunks(Stream& stream, const DeltaInputs& in, const HalfRows& queriesAndKeys,
                       const DeltaParameters& parameters, const DeltaShape& shape, const DeltaStates& states,
                       const DeltaBatch& batch, const RowRanges& tiles, void* scratch, float* attended,
                       const RowOutputs& out);

// silu(gate) * headNorm of each head of x [rows, valueWidth], in the forms asked for, as deltaRule does it. out.floats
// may be x.
void gatedNorm(Stream& stream, const float* x, const float* gate, const DeltaParameters& parameters,
               const DeltaShape& shape, int64_t rows, const RowOutputs& out);

// Gated attention's product holds, for each head, the query and then its gate. The queries, as the next kernels want
// them: q [rows, heads * headDim] from gated [rows, heads, 2, headDim].
void splitGatedQueries(Stream& stream, const float* gated, int64_t rows, int32_t heads, int32_t headDim, float* q);
// x * sigmoid(gate), with x [rows, heads * headDim] and the gates as above. Bits of the CPU's sigmoidMul. out.floats
// may be x.
void gateHeads(Stream& stream, const float* x, const float* gated, int64_t rows, int32_t heads, int32_t headDim,
               const RowOutputs& out);

}  // namespace sharpi::cuda
