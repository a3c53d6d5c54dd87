// Where the GPU backend's working memory lies: offsets into one allocation, computed from the limits alone, so that
// planning and running count the same. No CUDA here: plans are made on machines without a GPU.
#pragma once

#include "engine/backend.h"
#include "engine/scratch.h"
#include "kernels/gated_delta.h"

namespace sharpi {

// Buffers that weights pass through on their way: while one is packed, perhaps behind a kernel that fills the GPU, the next
// ones are filled.
constexpr int kTransferStages = 3;

// How the GPU keeps matrices.
DeviceLayout gpuLayout();

struct GpuScratch {
    // The most sequences of one batch.
    static constexpr int64_t kMaxSequences = 64;
    // The most decode rows of one batch.
    static constexpr int64_t kMaxDecodeRows = 64;
    // Pieces of sequences, beside those of whole tiles, that recurrent layers take many rows of a batch in: ends of sequences, and
    // states that are kept. A batch of more goes through them row after row.
    static constexpr int64_t kMorePieces = 16;

    explicit GpuScratch(const StepLimits& limits);
    size_t bytes() const { return _layout.bytes(); }

    // A batch's numbers, as begin() uploads them: int32 each, at these indices into one block. The block for few rows
    // is apart from the one for many, so that a decode step uploads little.
    struct BatchBlock {
        size_t at = 0;  // offset in bytes
        int64_t rows = 0, sequences = 0, tiles = 0, deltaTiles = 0, pages = 0;
        int64_t tokens = 0, positions = 0, sequence = 0, logitRows = 0, tileBegin = 0, tileEnd = 0;
        int64_t sources = 0, joined = 0;                           // of drafts
        int64_t stateFrom = 0, stateTo = 0, begin = 0, end = 0;    // of recurrent layers: by row, and by sequence
        int64_t deltaTileBegin = 0, deltaTileEnd = 0, tables = 0, total = 0;
    };
    BatchBlock few, many;

    size_t x = 0, q = 0, k = 0, v = 0, logits = 0, chosen = 0, weight = 0;
    size_t gatedQueries = 0, deltaMixed = 0, deltaGate = 0, deltaAlpha = 0, deltaBeta = 0;
    size_t sharedScale = 0, sharedOut = 0;  // of the expert for every token
    // What a draft goes on from, [rows, 2 * embedding]: two blocks of rows, then side by side, for few rows as floats and int8 forms.
    size_t apart = 0, joined = 0, joinedQuant = 0;
    // Few rows: floats and int8 forms.
    size_t normed = 0, normedQuant = 0, attended = 0, attendedQuant = 0, hidden = 0, hiddenQuant = 0, gate = 0, up = 0;
    // Few rows, where experts are in slots: each pair's slot, and its answer; what is foreseen of the next layer; the CPU's orders.
    size_t slot = 0, answers = 0, orders = 0, foreseen = 0, foreseenWeight = 0, foreseenRows = 0, foreseenQuant = 0;
    // [layers of experts, experts]: how often each was used; the slot it is in; of those that are not, which one of the layer it is.
    size_t expertUses = 0, expertTable = 0, expertOrdinal = 0;
    size_t routerLogits = 0, attention = 0, sampling = 0, adjustments = 0, token = 0;
    // Many rows: bf16 forms, the second half of the split where the model or cache needs it (offset of the first else).
    bool splitRows = false, splitQueries = false;
    size_t normedHi = 0, normedLo = 0, qHi = 0, qLo = 0, attendedHi = 0, attendedLo = 0, hiddenHi = 0, hiddenLo = 0;
    size_t manyGate = 0, manyUp = 0, manyRouterLogits = 0, expertOut = 0, grouping = 0;
    size_t deltaReaders = 0, deltaReaderBytes = 0;  // few rows; zero between launches
    size_t joinedHi = 0, joinedLo = 0, keysHi = 0, keysLo = 0, attendedFloats = 0, deltaWindows = 0, deltaChunks = 0;

private:
    BatchBlock block(const StepLimits& limits, int64_t rows, int64_t sequences, bool isMany);
    void takeMixer(const StepLimits& limits);
    void takeFeed(const StepLimits& limits);
    void takeFew(const StepLimits& limits, int64_t rows);
    void takeMany(const StepLimits& limits);
    void takeManyMixer(const StepLimits& limits);
    void takeJoined(const StepLimits& limits, bool isMany);
    void takeManyFeed(const StepLimits& limits);
    void takeHalves(int64_t count, bool split, size_t& hi, size_t& lo);
    void takeExpertSlots(const StepLimits& limits, int64_t rows);
    ScratchLayout _layout;
};

}  // namespace sharpi
