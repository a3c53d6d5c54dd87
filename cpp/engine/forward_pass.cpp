// See forward_pass.h.
#include "engine/forward_pass.h"

#include <algorithm>

#include "core/error.h"

namespace sharpi {

StepLimits stepLimits(const ModelSpec& spec, const TensorTable& tensors, int64_t maxRows, int64_t context, KvType kvType) {
    StepLimits limits;
    limits.maxRows = maxRows;
    limits.context = context;
    limits.embedding = limits.maxCols = spec.embedding;
    limits.vocab = spec.vocabSize;
    limits.pageTokens = KvCache::kPageTokens;
    limits.kvType = kvType;
    for (const LayerSpec& layer : spec.layers) {
        const AttentionSpec& a = layer.attention;
        limits.heads = std::max(limits.heads, a.heads);
        limits.kvHeads = std::max(limits.kvHeads, a.kvHeads);
        limits.headDim = std::max(limits.headDim, a.headDim);
        limits.queryWidth = std::max(limits.queryWidth, int64_t{a.heads} * a.headDim);
        limits.kvWidth = std::max(limits.kvWidth, int64_t{a.kvHeads} * a.headDim);
        if (layer.dense) limits.denseHidden = std::max(limits.denseHidden, layer.dense->hidden());
        if (layer.experts) {
            ++limits.expertLayers;
            limits.expertRows.emplace_back(static_cast<int32_t>(&layer - spec.layers.data()), layer.experts->count);
            limits.experts = std::max(limits.experts, layer.experts->count);
            limits.expertsUsed = std::max(limits.expertsUsed, layer.experts->used);
            limits.expertHidden = std::max(limits.expertHidden, layer.experts->hidden());
        }
    }
    limits.maxCols = std::max({limits.embedding, limits.queryWidth, limits.denseHidden, limits.expertHidden});
    for (const TensorInfo& t : tensors.all()) limits.floatWeights |= t.type == DType::F32 && t.shape.size() > 1;
    return limits;
}

void ForwardPass::check(const Batch& batch) const {
    if (batch.size() > _limits.maxRows) {
        throw Error(ErrorKind::Internal, "a batch of " + std::to_string(batch.size()) + " rows, scratch holds " + std::to_string(_limits.maxRows));
    }
    for (int64_t t = 0; t < batch.size(); ++t) {
        if (batch.tokens[t] < 0 || batch.tokens[t] >= _spec.vocabSize) {
            throw Error(ErrorKind::InvalidArgument, "token " + std::to_string(batch.tokens[t]) +
                                                        " is outside the vocabulary of " + std::to_string(_spec.vocabSize));
        }
        if (batch.positions[t] < 0 || batch.positions[t] >= _limits.context) {
            throw Error(ErrorKind::Internal, "position " + std::to_string(batch.positions[t]) + " is outside the context");
        }
    }
}

void ForwardPass::run(const Batch& batch, float* logits) {
    _lastRow = -1;
    if (batch.size() == 0) return;
    check(batch);
    _backend.begin(batch, _kv);
    const auto wanted = static_cast<int64_t>(batch.logitRows.size());
    const float eps = _spec.normEpsilon;
    int64_t first = 0, count = std::min(wanted, _backend.headRows());
    _backend.region([&] {
        _backend.embed(_weights.embedding);
        for (size_t i = 0; i < _weights.layers.size(); ++i) {
            const LayerWeights& layer = _weights.layers[i];
            _backend.attention(layer.attention, _kv.layer(i), eps);
            if (layer.dense) _backend.dense(*layer.dense, eps);
            else _backend.experts(*layer.experts, eps);
        }
        if (count) _backend.head(_weights.head, eps, 0, count);
    });
    while (count) {
        if (logits) _backend.readLogits(0, count, logits + first * _spec.vocabSize);
        _lastRow = count - 1;
        first += count;
        count = std::min(wanted - first, _backend.headRows());
        if (count) _backend.head(_weights.head, eps, first, count);
    }
}

int32_t ForwardPass::sampleLast(const SamplingRule& rule, const std::vector<TokenAdjustment>& adjustments, double draw) {
    if (_lastRow < 0) throw Error(ErrorKind::Internal, "no logits to choose from");
    const int64_t row = _lastRow;
    _lastRow = -1;
    return _backend.sample(row, rule, adjustments, draw);
}

}  // namespace sharpi
