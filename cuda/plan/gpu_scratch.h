// Where the GPU backend's working memory lies: offsets into one allocation, computed from the limits alone, so that
// planning and running count the same. No CUDA here: plans are made on machines without a GPU.
#pragma once

#include <optional>

#include "kernels/delta/gated_delta.h"
#include "operations/backend.h"
#include "operations/scratch.h"
#include "plan/batch_numbers.h"

namespace sharpi {

// Buffers that weights pass through on their way: while one is packed, perhaps behind a kernel that fills the GPU, the
// next ones are filled.
constexpr int kTransferStages = 3;

// How the GPU keeps matrices.
DeviceLayout gpuLayout();

struct GpuScratch {
    // The most decode rows of one batch, and the most sequences that have fast rows; all of these may be sequences of
    // their own.
    static constexpr int64_t kMaxDecodeRows = 64, kMaxPrompts = 16, kMaxSequences = kMaxDecodeRows + kMaxPrompts;

    explicit GpuScratch(const StepLimits& limits);
    size_t bytes() const { return _layout.bytes(); }

    // Rows that follow the contract (exact), and rows that go through tensor cores (fast): the most of each in a batch.
    int64_t exactRows = 0, fastRows = 0;
    // A batch's numbers: of a step, which has decode rows alone, and of any batch. Apart, so that a step uploads
    // little.
    struct Numbers {
        size_t at = 0;  // offset in bytes
        std::optional<BatchNumbers> layout;
    };
    Numbers step, batch;

    // Floats of all rows, exact before fast.
    size_t x = 0, q = 0, k = 0, v = 0, chosen = 0, weight = 0, routerLogits = 0;
    size_t gatedQueries = 0, deltaMixed = 0, deltaGate = 0, deltaAlpha = 0, deltaBeta = 0;
    size_t gate = 0, up = 0;                // of rows, or of pairs of a row and an expert
    size_t expertOut = 0;                   // of pairs
    size_t sharedScale = 0, sharedOut = 0;  // of the expert for every token
    size_t apart = 0;                       // [2 * rows, embedding]: what a draft goes on from, before it is joined
    size_t logits = 0;                      // of up to kMaxMatvecRows rows
    // Exact rows: floats and int8 forms.
    size_t normed = 0, normedQuant = 0, attended = 0, attendedQuant = 0, hidden = 0, hiddenQuant = 0, joined = 0,
           joinedQuant = 0;
    size_t attention = 0;
    size_t deltaReaders = 0, deltaReaderBytes = 0;  // zero between launches
    // Fast rows: 16-bit forms, the low half of the split where the model or cache needs it (offset of the high half
    // else).
    bool splitRows = false, splitQueries = false;
    size_t normedHi = 0, normedLo = 0, qHi = 0, qLo = 0, attendedHi = 0, attendedLo = 0, hiddenHi = 0, hiddenLo = 0;
    size_t joinedHi = 0, joinedLo = 0, keysHi = 0, keysLo = 0, attendedFloats = 0, deltaWindows = 0, deltaChunks = 0,
           grouping = 0;
    // If experts are in slots: the matrix of each pair, or -1; what is foreseen of the next layer; the CPU's orders.
    size_t slot = 0, orders = 0, foreseen = 0, foreseenWeight = 0, foreseenRows = 0, foreseenQuant = 0;
    // [layers of experts, experts]: how often each was used; the slot it is in; of those that are not, which one of the
    // layer it is.
    size_t expertUses = 0, expertTable = 0, expertOrdinal = 0;
    size_t sampling = 0, adjustments = 0, token = 0;

private:
    Numbers numbers(const BatchNumbers::Room& room);
    void takeAlways(const StepLimits& limits);
    void takeExperts(const StepLimits& limits);
    void takeMixer(const StepLimits& limits);
    void takeFastMixer(const StepLimits& limits);
    void takeFeed(const StepLimits& limits);
    void takeJoined(const StepLimits& limits);
    void takeHalves(int64_t count, bool split, size_t& hi, size_t& lo);
    ScratchLayout _layout;
};

}  // namespace sharpi
