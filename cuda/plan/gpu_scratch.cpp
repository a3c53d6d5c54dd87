// See gpu_scratch.h.
#include "plan/gpu_scratch.h"

#include <algorithm>

#include "kernels/attention/attention.h"
#include "kernels/attention/latent_shape.h"
#include "kernels/blocks/blocks.h"
#include "kernels/delta/mamba.h"
#include "kernels/experts/expert_cache.h"
#include "kernels/experts/router.h"
#include "kernels/formats/packed_shape.h"
#include "kernels/rows/pair_groups.h"
#include "kernels/sampling/scores.h"

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

cuda::LatentShape latentShape(const StepLimits& l) {
    return {l.latentHeads, l.latentRank, l.headDim - l.latentRank, l.plainDim};
}

cuda::MambaShape mambaShape(const StepLimits& l) {
    cuda::MambaShape shape;
    shape.heads = l.mambaHeads;
    shape.groups = l.mambaGroups;
    shape.headDim = static_cast<int32_t>(l.mambaWidth / l.mambaHeads);
    shape.stateDim = l.mambaStateDim;
    shape.convWidth = cuda::kMaxDeltaConv;
    return shape;
}

}  // namespace

GpuScratch::GpuScratch(const StepLimits& l)
    : exactRows(l.prompt == PromptMode::Exact ? l.maxRows : std::min(l.maxRows, kMaxDecodeRows)),
      fastRows(l.prompt == PromptMode::Exact ? 0 : l.maxRows),
      headRows(std::min({l.maxRows, l.headRows, kMaxDecodeRows})),
      _splitRows(l.floatWeights),
      _splitQueries(l.kvType != KvType::BF16) {
    BatchNumbers::Room room;
    room.rows = std::min(l.maxRows, kMaxDecodeRows);
    room.sequences = std::min(room.rows, kMaxSequences);
    room.pages = (l.context + l.pageTokens - 1) / l.pageTokens;
    room.lists = l.pageLists;
    room.recurrent = l.recurrent();
    room.drafts = l.drafts;
    room.captured = true;
    step = numbers(room);
    room.captured = false;
    room.rows = l.maxRows;
    room.sequences = std::min(l.maxRows, kMaxSequences);
    room.fastSequences = fastRows ? std::min<int64_t>(l.maxRows, kMostPrompts) : 0;
    room.exactPrompts = l.prompt == PromptMode::Exact;
    batch = numbers(room);
    takeAlways(l);
    takeExperts(l);
    // What a mixer works in is free again when the feed-forward part begins; a draft is joined before either, and
    // streams are normalized between them.
    const ScratchLayout before = _layout;
    takeMixer(l);
    const ScratchLayout mixer = _layout;
    _layout = before;
    takeFeed(l);
    const ScratchLayout feed = _layout;
    _layout = before;
    takeStreams(l);
    const ScratchLayout streams = _layout;
    _layout = before;
    takeJoined(l);
    _layout.cover(streams);
    _layout.cover(mixer);
    _layout.cover(feed);
}

GpuScratch::Numbers GpuScratch::numbers(const BatchNumbers::Room& room) {
    Numbers numbers;
    numbers.layout.emplace(room);
    numbers.at = _layout.take(sizeof(int32_t) * static_cast<size_t>(numbers.layout->count()));
    return numbers;
}

void GpuScratch::takeAlways(const StepLimits& l) {
    rows.take(_layout, l, RowBuffer::Residual, RowBuffer::LayerRows);
    logits = _layout.floats(headRows * l.vocab);
    input(RowInput::Normed) = {takeExact(exactRows, l.embedding), takeHalves(fastRows * l.embedding, _splitRows)};
    const cuda::HeadShape heads{l.heads, l.kvHeads, l.headDim};
    // Layers with grouped outputs have attention of their own.
    attention = _layout.take(l.outputGroups  ? cuda::kDecodeCounterBytes
                             : l.latentHeads ? cuda::latentAttentionBytes(exactRows, latentShape(l))
                                             : cuda::decodeAttentionBytes(exactRows, heads));
    const int64_t sequences = batch.layout->room().sequences;
    stateReaderBytes = std::max(l.deltaHeads ? cuda::deltaStepBytes(sequences, deltaShape(l)) : 0,
                                l.mambaHeads ? cuda::stepMambaBytes(sequences, mambaShape(l)) : 0);
    stateReaders = _layout.take(stateReaderBytes);
    sampling = _layout.take(cuda::samplingScratchBytes(l.vocab));
    adjustments = _layout.take(sizeof(TokenAdjustment) * static_cast<size_t>(l.vocab));
    token = _layout.take(sizeof(int32_t) * static_cast<size_t>(headRows));
    scores = _layout.take(sizeof(cuda::RowScore) * static_cast<size_t>(headRows));
}

void GpuScratch::takeExperts(const StepLimits& l) {
    if (!l.expertsUsed) return;
    const int64_t stepRows = step.layout->room().rows, stepPairs = stepRows * l.expertsUsed;
    const size_t perExpert = sizeof(int32_t) * l.expertLayers.size() * static_cast<size_t>(l.experts);
    chosen = _layout.floats(l.maxRows * l.expertsUsed);
    weight = _layout.floats(l.maxRows * l.expertsUsed);
    sharedScale = _layout.floats(l.sharedHidden ? l.maxRows : 0);
    grouping = fastRows ? _layout.take(cuda::expertGroupingBytes(fastRows, l.expertsUsed, l.experts)) : 0;
    pairGroups = _layout.take(cuda::pairGroupsBytes(std::min(exactRows, kMaxDecodeRows) * l.expertsUsed, l.experts));
    expertUses = _layout.take(perExpert);
    if (!l.expertSlots) return;
    expertTable = _layout.take(perExpert);
    expertOrdinal = _layout.take(perExpert);
    slot = _layout.floats(exactRows * l.expertsUsed);
    foreseen = _layout.floats(stepPairs);
    foreseenWeight = _layout.floats(stepPairs);
    foreseenRows = takeExact(stepRows, l.embedding);
    orders = _layout.take(sizeof(cuda::DeviceOrders));
}

GpuScratch::Halves GpuScratch::takeHalves(int64_t count, bool split) {
    Halves halves;
    halves.hi = halves.lo = _layout.take(sizeof(uint16_t) * static_cast<size_t>(count));
    if (split) halves.lo = _layout.take(sizeof(uint16_t) * static_cast<size_t>(count));
    return halves;
}

GpuScratch::Exact GpuScratch::takeExact(int64_t count, int64_t cols) {
    Exact exact;
    exact.floats = _layout.floats(count * cols);
    exact.quantized = _layout.take(cuda::quantizedRowsBytes(count, cols));
    return exact;
}

void GpuScratch::takeMixer(const StepLimits& l) {
    rows.take(_layout, l, RowBuffer::GatedQueries, RowBuffer::MambaDecays);
    if (l.latentHeads) takeLatent(l);
    else if (l.outputGroups) takeBlocks(l);
    else input(RowInput::Attended).exact = takeExact(exactRows, std::max({l.queryWidth, l.deltaWidth, l.mambaWidth}));
    if (l.mambaHeads) {
        const BatchNumbers::Room& room = batch.layout->room();
        const int64_t sequences = fastRows ? room.fastSequences : room.sequences;
        mambaWindows = _layout.take(cuda::mambaWindowBytes(l.maxRows, sequences, mambaShape(l)));
    }
    if (fastRows) takeFastMixer(l);
}

// Plain queries have been multiplied when attention begins.
void GpuScratch::takeLatent(const StepLimits& l) {
    const int64_t heads = exactRows * l.latentHeads, most = std::max<int64_t>(l.latentRank, l.plainDim);
    Input pieces;
    pieces.exact.floats = _layout.floats(heads * most);
    pieces.exact.quantized = _layout.take(
        std::max(cuda::quantizedRowsBytes(heads, l.latentRank), cuda::quantizedRowsBytes(heads, l.plainDim)));
    pieces.fast = takeHalves(fastRows * std::max({l.latentHeads * most, l.deltaWidth, l.mambaWidth}), _splitRows);
    input(RowInput::Attended) = input(RowInput::PlainQueries) = pieces;
    takeLowRank(l);
}

void GpuScratch::takeLowRank(const StepLimits& l) {
    input(RowInput::LowRank) = {takeExact(exactRows, l.queryRank), takeHalves(fastRows * l.queryRank, _splitRows)};
    input(RowInput::HeadValues) = {takeExact(exactRows, l.headValueWidth),
                                   takeHalves(fastRows * l.headValueWidth, _splitRows)};
}

void GpuScratch::takeBlocks(const StepLimits& l) {
    const int64_t segments = cuda::blockSegments(l.seenBlocks, {l.blockWindow, 0}, batch.layout->room().pages);
    const cuda::HeadShape shape{l.heads, l.kvHeads, l.headDim};
    input(RowInput::Attended).exact = takeExact(exactRows * l.outputGroups, l.groupWidth);
    takeLowRank(l);
    blockAttentionBytes = cuda::blockAttentionScratch(exactRows, shape, segments);
    blockAttention = _layout.take(blockAttentionBytes);
    indexScoreBytes = cuda::indexScoreBytes(l.maxRows, l.blocks);
    indexScores = _layout.take(indexScoreBytes);
}

void GpuScratch::takeFastMixer(const StepLimits& l) {
    queries = takeHalves(fastRows * l.queryWidth, _splitQueries);
    if (!l.latentHeads) {
        input(RowInput::Attended).fast =
            takeHalves(fastRows * std::max({l.queryWidth, l.deltaWidth, l.mambaWidth}), _splitRows);
    }
    attendedFloats = _layout.floats(fastRows * std::max(l.gatedQueryWidth / 2, l.deltaWidth));
    const int64_t tiles = batch.layout->stateTiles();
    if (l.mambaHeads) mambaChunks = _layout.take(cuda::mambaChunkBytes(fastRows, tiles, mambaShape(l)));
    if (!l.deltaHeads) return;
    const cuda::DeltaShape shape = deltaShape(l);
    keys = takeHalves(fastRows * 2 * shape.keyWidth(), true);
    deltaWindows = _layout.take(cuda::prepareDeltaBytes(tiles, shape));
    deltaChunks = _layout.take(cuda::deltaChunkBytes(fastRows, tiles, shape, true));
}

void GpuScratch::takeFeed(const StepLimits& l) {
    const int64_t exactPairs = exactRows * l.expertsUsed, fastPairs = fastRows * l.expertsUsed;
    const auto widest = [&](int64_t ofRows, int64_t ofPairs) {
        return std::max({ofRows * l.denseHidden, ofPairs * l.expertHidden, ofRows * l.sharedHidden});
    };
    rows.take(_layout, l, RowBuffer::RouterLogits, RowBuffer::SharedOut);
    if (const int64_t latents = l.expertLatents)
        input(RowInput::ExpertLatents) = {takeExact(exactRows, latents), takeHalves(fastRows * latents, _splitRows)};
    Input& hidden = input(RowInput::Hidden);
    hidden.exact.floats = _layout.floats(widest(exactRows, exactPairs));
    hidden.exact.quantized = _layout.take(std::max({cuda::quantizedRowsBytes(exactRows, l.denseHidden),
                                                    cuda::quantizedRowsBytes(exactPairs, l.expertHidden),
                                                    cuda::quantizedRowsBytes(exactRows, l.sharedHidden)}));
    hidden.fast = takeHalves(widest(fastRows, fastPairs), _splitRows);
}

void GpuScratch::takeStreams(const StepLimits& l) {
    const int64_t width = l.streams * l.embedding;
    if (width) input(RowInput::Streams) = {takeExact(exactRows, width), takeHalves(fastRows * width, _splitRows)};
}

void GpuScratch::takeJoined(const StepLimits& l) {
    if (!l.drafts) return;
    apart = _layout.floats(2 * l.maxRows * l.embedding);
    input(RowInput::Joined) = {takeExact(exactRows, 2 * l.embedding),
                               takeHalves(2 * fastRows * l.embedding, _splitRows)};
}

}  // namespace sharpi
