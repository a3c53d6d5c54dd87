// See forward_pass.h.
#include "engine/forward_pass.h"

#include <algorithm>

#include "core/error.h"

namespace sharpi {

namespace {

void addLimits(StepLimits& limits, const AttentionSpec& a) {
    const int64_t width = int64_t{a.heads} * a.headDim;
    limits.heads = std::max(limits.heads, a.heads);
    limits.kvHeads = std::max(limits.kvHeads, a.kvHeads);
    limits.headDim = std::max(limits.headDim, a.headDim);
    limits.queryWidth = std::max(limits.queryWidth, width);
    limits.kvWidth = std::max(limits.kvWidth, int64_t{a.kvHeads} * a.headDim);
    if (a.gated) limits.gatedQueryWidth = std::max(limits.gatedQueryWidth, 2 * width);
}

void addLimits(StepLimits& limits, const GatedDeltaSpec& d) {
    limits.deltaChannels = std::max(limits.deltaChannels, d.channels());
    limits.deltaWidth = std::max(limits.deltaWidth, d.valueWidth());
    limits.deltaHeads = std::max(limits.deltaHeads, d.valueHeads);
    limits.deltaDim = std::max(limits.deltaDim, d.headDim);
}

}  // namespace

StepLimits stepLimits(const ModelSpec& spec, const TensorTable& tensors, int64_t maxRows, int64_t context, KvType kvType) {
    StepLimits limits;
    limits.maxRows = maxRows;
    limits.context = context;
    limits.embedding = limits.maxCols = spec.embedding;
    limits.vocab = spec.vocabSize;
    limits.pageTokens = KvCache::kPageTokens;
    limits.kvType = kvType;
    for (const LayerSpec& layer : spec.layers) {
        if (layer.attention) addLimits(limits, *layer.attention);
        else addLimits(limits, *layer.delta);
        if (layer.dense) limits.denseHidden = std::max(limits.denseHidden, layer.dense->hidden());
        if (layer.experts) {
            ++limits.expertLayers;
            limits.expertRows.emplace_back(static_cast<int32_t>(&layer - spec.layers.data()), layer.experts->count);
            limits.experts = std::max(limits.experts, layer.experts->count);
            limits.expertsUsed = std::max(limits.expertsUsed, layer.experts->used);
            limits.expertHidden = std::max(limits.expertHidden, layer.experts->hidden());
            if (layer.experts->shared) limits.sharedHidden = std::max(limits.sharedHidden, layer.experts->shared->hidden());
        }
    }
    limits.maxCols = std::max({limits.embedding, limits.queryWidth, limits.deltaWidth, limits.denseHidden, limits.expertHidden, limits.sharedHidden});
    for (const TensorInfo& t : tensors.all()) limits.floatWeights |= t.type == DType::F32 && t.shape.size() > 1;
    return limits;
}

ForwardPass::ForwardPass(const ModelSpec& spec, const ModelWeights& weights, Backend& backend, KvCache& kv, const StepLimits& limits)
    : _spec(spec), _weights(weights), _backend(backend), _kv(kv), _limits(limits) {
    const bool recurrent = std::any_of(spec.layers.begin(), spec.layers.end(), [](const LayerSpec& layer) { return layer.delta.has_value(); });
    if (recurrent && !kv.states().any()) throw Error(ErrorKind::Internal, "a cache without states for a model with recurrent layers");
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
    if (_kv.states().any()) checkStates(batch);
}

// A state goes on from where it is: a batch must have exactly the rows that the cache was extended by.
void ForwardPass::checkStates(const Batch& batch) const {
    for (int64_t begin = 0, end = 0; begin < batch.size(); begin = end) {
        const int32_t sequence = batch.sequences[begin];
        while (end < batch.size() && batch.sequences[end] == sequence) ++end;
        const std::vector<StateStep> steps = _kv.states().steps(sequence);
        if (steps.empty() || steps.back().end != end - begin || batch.positions[begin] != _kv.length(sequence) - (end - begin)) {
            throw Error(ErrorKind::Internal, "the rows of sequence " + std::to_string(sequence) + " are not those that its state comes to next");
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
            if (layer.attention) _backend.attention(*layer.attention, _kv.layer(i), eps);
            else _backend.gatedDelta(*layer.delta, _kv.states().layer(i), eps);
            if (layer.dense) _backend.dense(*layer.dense, eps);
            else _backend.experts(*layer.experts, eps);
        }
        if (count) _backend.head(_weights.head, eps, 0, count);
    });
    for (const int32_t sequence : batch.sequences) _kv.commit(sequence);
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
