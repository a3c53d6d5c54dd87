// Mamba 2 on the GPU: all work between a layer's first products (gates; x, B and C; steps) and its last one, with the
// bits of the CPU (core/rules/mamba.h).
#pragma once

#include "kernels/delta/gated_delta.h"

namespace sharpi::cuda {

// Heads of 4, 8, 12, .. elements, states of up to kMaxMambaState lines, convolutions over 2 to kMaxDeltaConv inputs.
constexpr int32_t kMaxMambaState = 256;
struct MambaShape {
    int32_t heads = 0, groups = 0, headDim = 0, stateDim = 0, convWidth = 0;
    SHARPI_PORTABLE int32_t headsPerGroup() const { return heads / groups; }
    SHARPI_PORTABLE int64_t width() const { return int64_t{heads} * headDim; }
    SHARPI_PORTABLE int64_t channels() const { return width() + 2 * int64_t{groups} * stateDim; }
    // The two parts of a state: [convWidth - 1, channels], and [heads, stateDim, headDim].
    SHARPI_PORTABLE int64_t convFloats() const { return (convWidth - 1) * channels(); }
    SHARPI_PORTABLE int64_t matrixFloats() const { return width() * stateDim; }
};

struct MambaParameters {
    const float *conv = nullptr, *convBias = nullptr;                   // [convWidth, channels]; [channels] or null
    const float *stepBias = nullptr, *rate = nullptr, *skip = nullptr;  // [heads]
    const float* norm = nullptr;                                        // [width], or null: no norm
    float eps = 0;
};

// The results of a row's products, and what becomes of them.
struct MambaInputs {
    float* mixed = nullptr;   // [rows, channels]: x, B, C
    float* gate = nullptr;    // [rows, width]: the gates; then the heads' gated answers
    float* steps = nullptr;   // [rows, heads]
    float* decays = nullptr;  // [rows, heads]: room
};

// Throws Error(InvalidArgument) if there are no kernels for this shape.
void requireMamba(const MambaShape& shape);

// Convolution, steps, scan and gates in one launch, for any number of sequences with up to kDeltaStepRows rows each.
// Only in.gate changes. The caller must keep each sequence within that limit: only the total number of rows is checked.
// scratch: stepMambaBytes, 4-byte aligned, zero before the first call; every call leaves it zero.
size_t stepMambaBytes(int64_t sequences, const MambaShape& shape);
void stepMamba(Stream& stream, const MambaInputs& in, const MambaParameters& parameters, const MambaShape& shape,
               const DeltaStates& states, const DeltaBatch& batch, void* scratch);

// The same for any number of rows, in two parts. The first works in place: mixed becomes silu(conv(mixed)), steps
// become what they are called, and decays are written. The second goes row after row. longest: no sequence has more
// rows. If it is more than kMambaTile, rows are convolved in tiles; windows: mambaWindowBytes for the batch's rows and
// sequences.
constexpr int64_t kMambaTile = 64;
size_t mambaWindowBytes(int64_t rows, int64_t sequences, const MambaShape& shape);
void prepareMamba(Stream& stream, const MambaInputs& in, const MambaParameters& parameters, const MambaShape& shape,
                  const DeltaStates& states, const DeltaBatch& batch, int64_t longest, void* windows);
void scanMamba(Stream& stream, const MambaInputs& in, const MambaParameters& parameters, const MambaShape& shape,
               const DeltaStates& states, const DeltaBatch& batch);

// scanMamba for many rows, on tensor cores. tiles: up to kDeltaChunk rows each; a state is kept only after the last row
// of a tile. Products are in split form: the error of answers and states is at most 5e-5 of the largest number of their
// head. scratch: mambaChunkBytes, 256-byte aligned. A device with too little shared memory goes row after row instead.
size_t mambaChunkBytes(int64_t rows, int64_t tiles, const MambaShape& shape);
void scanMambaInChunks(Stream& stream, const MambaInputs& in, const MambaParameters& parameters,
                       const MambaShape& shape, const DeltaStates& states, const DeltaBatch& batch,
                       const RowRanges& tiles, void* scratch);

// The norm of each group of heads of x [rows, width], in the requested forms; x itself if there is no norm. If a group
// is no multiple of 32 elements, int8 forms of its norm are made from out.floats, which must then be requested too.
// out.floats may be x.
void normMamba(Stream& stream, const float* x, const MambaParameters& parameters, const MambaShape& shape, int64_t rows,
               const RowOutputs& out);

}  // namespace sharpi::cuda
