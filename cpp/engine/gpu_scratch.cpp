// See gpu_scratch.h.
#include "engine/gpu_scratch.h"

#include <algorithm>

#include "kernels/attention.h"
#include "kernels/expert_cache.h"
#include "kernels/packed_shape.h"
#include "kernels/router.h"
#include "kernels/sampling.h"

namespace sharpi {

DeviceLayout gpuLayout() {
    DeviceLayout layout;
    layout.bytes = [](const Matrix& m) { return cuda::packedBytes(m.type, m.rows, m.cols); };
    layout.stages = kTransferStages;
    return layout;
}

namespace {

cuda::DeltaShape deltaShape(const StepLimits& l) {
    cuda::DeltaShape shape;
    shape.dim = l.deltaDim;
    shape.valueHeads = l.deltaHeads;
    shape.keyHeads = static_cast<int32_t>((l.deltaChannels - l.deltaWidth) / 2 / l.deltaDim);
    shape.convWidth = l.deltaConvWidth;
    return shape;
}

}  // namespace

GpuScratch::GpuScratch(const StepLimits& l) {
    const int64_t rowsOfFew = std::min<int64_t>(l.maxRows, cuda::kMaxMatvecRows);
    const bool isMany = l.maxRows > cuda::kMaxMatvecRows;
    x = _layout.floats(l.maxRows * l.embedding);
    logits = _layout.floats(rowsOfFew * l.vocab);
    chosen = _layout.floats(l.maxRows * l.expertsUsed);
    weight = _layout.floats(l.maxRows * l.expertsUsed);
    few = block(l, rowsOfFew, rowsOfFew, false);
    takeFew(l, rowsOfFew);
    const size_t perExpert = sizeof(int32_t) * static_cast<size_t>(l.expertLayers) * static_cast<size_t>(l.experts);
    if (perExpert) expertUses = _layout.take(perExpert);
    if (l.expertSlots) {
        expertTable = _layout.take(perExpert);
        expertOrdinal = _layout.take(perExpert);
        takeExpertSlots(l, rowsOfFew);
    }
    if (isMany) takeMany(l);
    // What a mixer works in is free again when the feed-forward part begins; a draft is joined before either.
    const ScratchLayout before = _layout;
    takeMixer(l);
    if (isMany) takeManyMixer(l);
    const ScratchLayout mixer = _layout;
    _layout = before;
    takeFeed(l);
    if (isMany) takeManyFeed(l);
    const ScratchLayout feed = _layout;
    _layout = before;
    takeJoined(l, isMany);
    _layout.cover(mixer);
    _layout.cover(feed);
}

GpuScratch::BatchBlock GpuScratch::block(const StepLimits& l, int64_t rows, int64_t sequences, bool isMany) {
    BatchBlock b;
    b.rows = rows;
    b.sequences = sequences;
    b.tiles = isMany ? rows / cuda::kQueryTile + sequences : 0;
    b.deltaTiles = isMany && l.deltaHeads ? std::min(rows, rows / cuda::kDeltaChunk + kMorePieces) : 0;
    b.pages = (l.context + l.pageTokens - 1) / l.pageTokens;
    const auto take = [&b](int64_t count) {
        const int64_t index = b.total;
        b.total += count;
        return index;
    };
    b.tokens = take(rows);
    b.positions = take(rows);
    b.sequence = take(rows);
    b.logitRows = take(rows);
    b.tileBegin = take(b.tiles);
    b.tileEnd = take(b.tiles);
    b.sources = take(l.drafts ? rows : 0);
    b.joined = take(l.drafts ? 2 * rows : 0);
    b.stateFrom = take(l.deltaHeads ? rows : 0);
    b.stateTo = take(l.deltaHeads ? rows : 0);
    b.begin = take(l.deltaHeads ? sequences : 0);
    b.end = take(l.deltaHeads ? sequences : 0);
    b.deltaTileBegin = take(b.deltaTiles);
    b.deltaTileEnd = take(b.deltaTiles);
    b.tables = take(sequences * b.pages);
    b.at = _layout.take(sizeof(int32_t) * static_cast<size_t>(b.total));
    return b;
}

void GpuScratch::takeMixer(const StepLimits& l) {
    q = _layout.floats(l.maxRows * l.queryWidth);
    k = _layout.floats(l.maxRows * l.kvWidth);
    v = _layout.floats(l.maxRows * l.kvWidth);
    gatedQueries = _layout.floats(l.maxRows * l.gatedQueryWidth);
    deltaMixed = _layout.floats(l.maxRows * l.deltaChannels);
    deltaGate = _layout.floats(l.maxRows * l.deltaWidth);
    deltaAlpha = _layout.floats(l.maxRows * l.deltaHeads);
    deltaBeta = _layout.floats(l.maxRows * l.deltaHeads);
}

void GpuScratch::takeFew(const StepLimits& l, int64_t rows) {
    const int64_t width = std::max({l.denseHidden, l.expertsUsed * l.expertHidden, l.sharedHidden}), attendedWidth = std::max(l.queryWidth, l.deltaWidth);
    const size_t hiddenForms = std::max({cuda::quantizedRowsBytes(rows, l.denseHidden), cuda::quantizedRowsBytes(rows * l.expertsUsed, l.expertHidden),
                                         cuda::quantizedRowsBytes(rows, l.sharedHidden)});
    normed = _layout.floats(rows * l.embedding);
    normedQuant = _layout.take(cuda::quantizedRowsBytes(rows, l.embedding));
    attended = _layout.floats(rows * attendedWidth);
    attendedQuant = _layout.take(cuda::quantizedRowsBytes(rows, attendedWidth));
    hidden = _layout.floats(rows * width);
    hiddenQuant = _layout.take(hiddenForms);
    gate = _layout.floats(rows * width);
    up = _layout.floats(rows * width);
    routerLogits = _layout.floats(rows * l.experts);
    attention = _layout.take(cuda::decodeAttentionBytes(rows, {l.heads, l.kvHeads, l.headDim}, l.context, l.pageTokens));
    sampling = _layout.take(cuda::samplingScratchBytes(l.vocab));
    adjustments = _layout.take(sizeof(TokenAdjustment) * static_cast<size_t>(l.vocab));
    token = _layout.take(sizeof(int32_t) * static_cast<size_t>(rows));
    sharedScale = _layout.floats(l.sharedHidden ? l.maxRows : 0);
    joined = _layout.floats(l.drafts ? 2 * rows * l.embedding : 0);
    deltaReaderBytes = l.deltaHeads ? cuda::deltaStepBytes(rows, deltaShape(l)) : 0;
    deltaReaders = _layout.take(deltaReaderBytes);
    joinedQuant = _layout.take(l.drafts ? cuda::quantizedRowsBytes(rows, 2 * l.embedding) : 0);
}

void GpuScratch::takeExpertSlots(const StepLimits& l, int64_t rows) {
    const int64_t pairs = rows * l.expertsUsed;
    slot = _layout.floats(pairs);
    foreseen = _layout.floats(pairs);
    foreseenWeight = _layout.floats(pairs);
    foreseenRows = _layout.floats(rows * l.embedding);
    foreseenQuant = _layout.take(cuda::quantizedRowsBytes(rows, l.embedding));
    answers = _layout.floats(pairs * l.embedding);
    orders = _layout.take(sizeof(cuda::DeviceOrders));
}

void GpuScratch::takeHalves(int64_t count, bool split, size_t& hi, size_t& lo) {
    hi = lo = _layout.take(sizeof(uint16_t) * static_cast<size_t>(count));
    if (split) lo = _layout.take(sizeof(uint16_t) * static_cast<size_t>(count));
}

void GpuScratch::takeFeed(const StepLimits& l) { sharedOut = _layout.floats(l.sharedHidden ? l.maxRows * l.embedding : 0); }

void GpuScratch::takeMany(const StepLimits& l) {
    many = block(l, l.maxRows, std::min(l.maxRows, kMaxSequences), true);
    splitRows = l.floatWeights;
    splitQueries = l.kvType != KvType::BF16;
    takeHalves(l.maxRows * l.embedding, splitRows, normedHi, normedLo);
    manyRouterLogits = _layout.floats(l.maxRows * l.experts);
    grouping = l.expertsUsed ? _layout.take(cuda::expertGroupingBytes(l.maxRows, l.expertsUsed, l.experts)) : 0;
}

void GpuScratch::takeManyMixer(const StepLimits& l) {
    const int64_t rows = l.maxRows;
    takeHalves(rows * l.queryWidth, splitQueries, qHi, qLo);
    takeHalves(rows * std::max(l.queryWidth, l.deltaWidth), splitRows, attendedHi, attendedLo);
    attendedFloats = _layout.floats(rows * std::max(l.gatedQueryWidth / 2, l.deltaWidth));
    if (!l.deltaHeads) return;
    const cuda::DeltaShape shape = deltaShape(l);
    takeHalves(rows * 2 * shape.keyWidth(), true, keysHi, keysLo);
    deltaWindows = _layout.take(cuda::prepareDeltaBytes(many.deltaTiles, shape));
    deltaChunks = _layout.take(cuda::deltaChunkBytes(rows, many.deltaTiles, shape, true));
}

void GpuScratch::takeJoined(const StepLimits& l, bool isMany) {
    if (!l.drafts) return;
    apart = _layout.floats(2 * l.maxRows * l.embedding);
    if (isMany) takeHalves(2 * l.maxRows * l.embedding, splitRows, joinedHi, joinedLo);
}

void GpuScratch::takeManyFeed(const StepLimits& l) {
    const int64_t rows = l.maxRows, pairs = rows * l.expertsUsed;
    const int64_t hiddenFloats = std::max({rows * l.denseHidden, pairs * l.expertHidden, rows * l.sharedHidden});
    takeHalves(hiddenFloats, splitRows, hiddenHi, hiddenLo);
    manyGate = _layout.floats(hiddenFloats);
    manyUp = _layout.floats(hiddenFloats);
    expertOut = _layout.floats(pairs * l.embedding);
}

}  // namespace sharpi
