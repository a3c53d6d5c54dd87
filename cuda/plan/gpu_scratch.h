// Where the GPU backend's working memory lies: offsets into one allocation, computed from the limits alone, so that
// planning and running count the same. No CUDA here: plans are made on machines without a GPU.
#pragma once

#include <array>
#include <optional>

#include "core/launch_rows.h"
#include "kernels/delta/gated_delta.h"
#include "memory/device_layout.h"
#include "operations/operations.h"
#include "operations/scratch.h"
#include "plan/batch_numbers.h"

namespace sharpi {

// Buffers that weights pass through on their way: while one is packed, perhaps behind a kernel that fills the GPU, the
// next ones are filled.
constexpr int kTransferStages = 3;

// How the GPU keeps matrices.
DeviceLayout gpuLayout();

struct GpuScratch {
    // The most decode rows of one batch. Each may belong to a different sequence.
    static constexpr int64_t kMaxDecodeRows = kExactLaunchRows, kMaxSequences = kMaxDecodeRows + kMostPrompts;

    explicit GpuScratch(const StepLimits& limits);
    size_t bytes() const { return _layout.bytes(); }

    // Rows that follow the contract (exact), and rows that go through tensor cores (fast): the most of each in a batch.
    int64_t exactRows = 0, fastRows = 0;
    int64_t headRows = 0;  // rows whose logits are held
    // The numbers of a step, which has only decode rows, and those of any batch: apart, so that a step uploads little.
    struct Numbers {
        size_t at = 0;  // offset in bytes
        std::optional<BatchNumbers> layout;
    };
    Numbers step, batch;

    // The forms of exact rows that products read: floats and int8 blocks.
    struct Exact {
        size_t floats = 0, quantized = 0;
    };
    // The forms of fast rows: 16-bit numbers, with low halves if the model or the cache needs them (else lo = hi).
    struct Halves {
        size_t hi = 0, lo = 0;
    };
    struct Input {
        Exact exact;
        Halves fast;
    };
    std::array<Input, kRowInputs> inputs;  // by RowInput

    const Input& input(RowInput which) const { return inputs[static_cast<size_t>(which)]; }

    RowBuffers rows;                // exact rows before fast ones
    size_t chosen = 0, weight = 0;  // [rows, used]: the experts of each row, and their weights
    size_t sharedScale = 0;         // [rows]
    size_t apart = 0;               // [2 * rows, embedding]: a draft's two inputs, before they are joined
    size_t logits = 0;              // [headRows, vocab]
    size_t attention = 0;           // of exact rows
    size_t blockAttention = 0, blockAttentionBytes = 0;  // of kernels/blocks
    size_t indexScores = 0, indexScoreBytes = 0;
    size_t attendedFloats = 0;                      // [fast rows, width]: a mixer's output before its gate or its norm
    Halves queries, keys;                           // of fast rows, for attention and for Gated DeltaNet
    size_t stateReaders = 0, stateReaderBytes = 0;  // of recurrent layers; zero between launches
    size_t deltaWindows = 0, deltaChunks = 0, grouping = 0;
    size_t mambaWindows = 0;  // of exact or of fast rows
    size_t mambaChunks = 0;   // of fast rows
    size_t pairGroups = 0;    // of exact rows
    // If experts are in slots: the matrix of each pair, or -1; the guess at the next layer's choices; the CPU's orders.
    size_t slot = 0, orders = 0, foreseen = 0, foreseenWeight = 0;
    Exact foreseenRows;
    // [layers of experts, experts]: how often each was used; the slot it is in; for an expert in no slot, its number
    // among the layer's missing experts.
    size_t expertUses = 0, expertTable = 0, expertOrdinal = 0;
    size_t sampling = 0, adjustments = 0, token = 0, scores = 0;

private:
    Numbers numbers(const BatchNumbers::Room& room);
    void takeAlways(const StepLimits& limits);
    void takeExperts(const StepLimits& limits);
    void takeMixer(const StepLimits& limits);
    void takeLatent(const StepLimits& limits);
    void takeFastMixer(const StepLimits& limits);
    void takeLowRank(const StepLimits& limits);
    void takeBlocks(const StepLimits& limits);
    void takeStreams(const StepLimits& limits);
    void takeFeed(const StepLimits& limits);
    void takeJoined(const StepLimits& limits);
    Halves takeHalves(int64_t count, bool split);
    Exact takeExact(int64_t rows, int64_t cols);
    Input& input(RowInput which) { return inputs[static_cast<size_t>(which)]; }
    bool _splitRows = false, _splitQueries = false;  // whether halves have low halves
    ScratchLayout _layout;
};

}  // namespace sharpi
