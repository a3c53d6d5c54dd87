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

GpuScratch::GpuScratch(const StepLimits& l) {
    const int64_t rowsOfFew = std::min<int64_t>(l.maxRows, cuda::kMaxMatvecRows);
    const int64_t pages = (l.context + l.pageTokens - 1) / l.pageTokens;
    x = _layout.floats(l.maxRows * l.embedding);
    q = _layout.floats(l.maxRows * l.queryWidth);
    k = _layout.floats(l.maxRows * l.kvWidth);
    v = _layout.floats(l.maxRows * l.kvWidth);
    logits = _layout.floats(rowsOfFew * l.vocab);
    chosen = _layout.floats(l.maxRows * l.expertsUsed);
    weight = _layout.floats(l.maxRows * l.expertsUsed);
    few = block(rowsOfFew, rowsOfFew, 0, pages);
    takeFew(l, rowsOfFew);
    const size_t perExpert = sizeof(int32_t) * static_cast<size_t>(l.expertLayers) * static_cast<size_t>(l.experts);
    if (perExpert) expertUses = _layout.take(perExpert);
    if (l.expertSlots) {
        expertTable = _layout.take(perExpert);
        expertOrdinal = _layout.take(perExpert);
        takeExpertSlots(l, rowsOfFew);
    }
    if (l.maxRows <= cuda::kMaxMatvecRows) return;
    const int64_t sequences = std::min(l.maxRows, kMaxSequences);
    many = block(l.maxRows, sequences, l.maxRows / cuda::kQueryTile + sequences, pages);
    takeMany(l);
}

GpuScratch::BatchBlock GpuScratch::block(int64_t rows, int64_t sequences, int64_t tiles, int64_t pages) {
    BatchBlock b;
    b.rows = rows;
    b.sequences = sequences;
    b.tiles = tiles;
    b.pages = pages;
    const auto take = [&b](int64_t count) {
        const int64_t index = b.total;
        b.total += count;
        return index;
    };
    b.tokens = take(rows);
    b.positions = take(rows);
    b.sequence = take(rows);
    b.logitRows = take(rows);
    b.tileBegin = take(tiles);
    b.tileEnd = take(tiles);
    b.tables = take(sequences * pages);
    b.at = _layout.take(sizeof(int32_t) * static_cast<size_t>(b.total));
    return b;
}

void GpuScratch::takeFew(const StepLimits& l, int64_t rows) {
    const int64_t width = std::max(l.denseHidden, l.expertsUsed * l.expertHidden);
    const size_t hiddenForms = std::max(cuda::quantizedRowsBytes(rows, l.denseHidden), cuda::quantizedRowsBytes(rows * l.expertsUsed, l.expertHidden));
    normed = _layout.floats(rows * l.embedding);
    normedQuant = _layout.take(cuda::quantizedRowsBytes(rows, l.embedding));
    attended = _layout.floats(rows * l.queryWidth);
    attendedQuant = _layout.take(cuda::quantizedRowsBytes(rows, l.queryWidth));
    hidden = _layout.floats(rows * width);
    hiddenQuant = _layout.take(hiddenForms);
    gate = _layout.floats(rows * width);
    up = _layout.floats(rows * width);
    routerLogits = _layout.floats(rows * l.experts);
    attention = _layout.take(cuda::decodeAttentionBytes(rows, {l.heads, l.kvHeads, l.headDim}, l.context, l.pageTokens));
    sampling = _layout.take(cuda::samplingScratchBytes(l.vocab));
    adjustments = _layout.take(sizeof(TokenAdjustment) * static_cast<size_t>(l.vocab));
    token = _layout.take(sizeof(int32_t));
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

void GpuScratch::takeMany(const StepLimits& l) {
    const int64_t rows = l.maxRows, pairs = rows * l.expertsUsed;
    const int64_t hiddenFloats = std::max(rows * l.denseHidden, pairs * l.expertHidden);
    splitRows = l.floatWeights;
    splitQueries = l.kvType != KvType::BF16;
    const auto halves = [&](int64_t count, bool split, size_t& hi, size_t& lo) {
        hi = lo = _layout.take(sizeof(uint16_t) * static_cast<size_t>(count));
        if (split) lo = _layout.take(sizeof(uint16_t) * static_cast<size_t>(count));
    };
    halves(rows * l.embedding, splitRows, normedHi, normedLo);
    halves(rows * l.queryWidth, splitQueries, qHi, qLo);
    halves(rows * l.queryWidth, splitRows, attendedHi, attendedLo);
    halves(hiddenFloats, splitRows, hiddenHi, hiddenLo);
    manyGate = _layout.floats(hiddenFloats);
    manyUp = _layout.floats(hiddenFloats);
    manyRouterLogits = _layout.floats(rows * l.experts);
    expertOut = _layout.floats(pairs * l.embedding);
    grouping = l.expertsUsed ? _layout.take(cuda::expertGroupingBytes(rows, l.expertsUsed, l.experts)) : 0;
}

}  // namespace sharpi
