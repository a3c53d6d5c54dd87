// The buffers of floats that operations write: each has a name and a rule for its size, so that planning and running
// lay out the same working memory on every processor.
#pragma once

#include <array>
#include <cstdint>

#include "operations/scratch.h"
#include "operations/step_limits.h"

namespace sharpi {

// [rows of the batch, width] each, decode rows before prompt rows.
enum class RowBuffer : uint8_t {
    // Kept through a pass.
    Residual,     // x: [rows, embedding]
    PartOut,      // what a part gives, if it is not added to x as it is: [rows, embedding]
    SideOut,      // what experts beside a dense part give: [rows, embedding]
    LayerInputs,  // the rows of per-layer embeddings: [rows, layers * width]
    Streams,      // of hyper-connections: [rows, streams * embedding]
    StreamMix,    // what a part makes of them: [rows, streams * (2 + streams)]
    LayerRows,    // what the table of per-layer embeddings says of each token: [rows, layers * width]
    // Used by a mixer.
    GatedQueries,  // head by head: its query, then its gate
    Queries,
    Keys,
    Values,
    LowRankQueries,  // the product with AttentionSpec::queryDown
    HeadQueries,     // of latent attention: head by head the query, its plain elements before those to be rotated
    HeadValues,      // head by head the product with valueUp, or group by group with outputDown
    CompressorKeys,
    CompressorGates,
    IndexQueries,
    IndexWeights,
    ChosenBlocks,  // of each row: numbers (int32) of blocks, ascending
    DeltaMixed,    // q, k and v of Gated DeltaNet, before and after the convolution
    DeltaGate,
    DeltaAlpha,
    DeltaBeta,
    DeltaSteps,  // alphas and betas of one product: see DeltaCall::fusedSteps
    MambaMixed,  // x, B and C of Mamba 2, before and after the convolution
    MambaGate,
    MambaSteps,  // each head's dt, then its step
    MambaDecays,
    // Used by a feed-forward part.
    RouterLogits,
    Gate,  // one row for each row of the batch, or for each pair of a row and an expert that it chose
    Up,
    ExpertOut,      // one row for each pair
    ExpertLatents,  // the rows of lower rank that experts read, then their sum
    SharedOut,      // the shared expert's output
};
constexpr int kRowBuffers = static_cast<int>(RowBuffer::SharedOut) + 1;

// Where each buffer begins: a byte offset into the working memory.
class RowBuffers {
public:
    // The largest number of floats that the buffer holds.
    static int64_t floats(RowBuffer buffer, const StepLimits& limits);

    // Takes the buffers from `first` to `last` from the layout.
    void take(ScratchLayout& layout, const StepLimits& limits, RowBuffer first, RowBuffer last);
    size_t operator[](RowBuffer buffer) const { return _at[static_cast<size_t>(buffer)]; }

private:
    std::array<size_t, kRowBuffers> _at{};
};

}  // namespace sharpi
