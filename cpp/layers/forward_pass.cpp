// See forward_pass.h.
#include "layers/forward_pass.h"

#include <algorithm>

#include "core/error.h"

namespace sharpi {

ForwardPass::ForwardPass(const ModelSpec& spec, const ModelWeights& weights, Backend& backend, KvCache& kv,
                         const StepLimits& limits)
    : _spec(spec), _weights(weights), _backend(backend), _kv(kv), _limits(limits) {
    const bool recurrent =
        std::any_of(spec.layers.begin(), spec.layers.end(), [](const LayerSpec& layer) { return layer.recurrent(); });
    // A prediction layer's experts come in passes of their own.
    _nextWithExperts.resize(spec.layers.size(), nullptr);
    for (size_t i = spec.layers.size(); i-- > 1;)
        _nextWithExperts[i - 1] = spec.layers[i].experts ? &spec.layers[i] : _nextWithExperts[i];
    if (recurrent && !kv.states().any())
        throw Error(ErrorKind::Internal, "a cache without states for a model with recurrent layers");
}

void ForwardPass::check(const Batch& batch) const {
    if (batch.size() > _limits.maxRows) {
        throw Error(ErrorKind::Internal, "a batch of " + std::to_string(batch.size()) + " rows, scratch holds " +
                                             std::to_string(_limits.maxRows));
    }
    const int64_t decodeRows = batch.decodeRows;
    if (decodeRows < 0 || decodeRows > std::min(batch.size(), _backend.decodeRows())) {
        throw Error(ErrorKind::Internal, "a batch of " + std::to_string(batch.size()) + " rows with " +
                                             std::to_string(decodeRows) + " decode rows, the backend takes " +
                                             std::to_string(_backend.decodeRows()));
    }
    if (decodeRows > 0 && batch.hasPromptRows() && batch.sequences[decodeRows - 1] == batch.sequences[decodeRows]) {
        throw Error(ErrorKind::Internal, "decode rows and prompt rows of sequence " +
                                             std::to_string(batch.sequences[decodeRows]) + " in one batch");
    }
    for (int64_t t = 0; t < batch.size(); ++t) {
        if (batch.tokens[t] < 0 || batch.tokens[t] >= _spec.vocabSize) {
            throw Error(ErrorKind::InvalidArgument, "token " + std::to_string(batch.tokens[t]) +
                                                        " is outside the vocabulary of " +
                                                        std::to_string(_spec.vocabSize));
        }
        if (batch.positions[t] < 0 || batch.positions[t] >= _limits.context) {
            throw Error(ErrorKind::Internal,
                        "position " + std::to_string(batch.positions[t]) + " is outside the context");
        }
    }
}

// A recurrent state continues from where it is, so a batch must have exactly the rows by which the cache was extended.
void ForwardPass::checkStates(const Batch& batch) const {
    batch.forSequences([&](int64_t begin, int64_t end) {
        const int32_t sequence = batch.sequences[begin];
        const std::vector<StateStep> steps = _kv.states().steps(sequence);
        if (steps.empty() || steps.back().end != end - begin ||
            batch.positions[begin] != _kv.length(sequence) - (end - begin)) {
            throw Error(ErrorKind::Internal, "the rows of sequence " + std::to_string(sequence) +
                                                 " are not those that its state comes to next");
        }
    });
}

HeadCall ForwardPass::headOf(VectorId norm, VectorId bias) const {
    return {{_spec.norm, _weights[norm], _weights[bias], _spec.normEpsilon},
            _weights[_spec.output],
            _spec.logitScale,
            _spec.logitSoftcap};
}

void ForwardPass::run(const Batch& batch, float* logits) {
    run(batch, [&](int64_t first, int64_t count) {
        if (logits) _backend.readLogits(0, count, logits + first * _spec.vocabSize);
    });
}

void ForwardPass::run(const Batch& batch, const HeldRows& held) {
    _heldRows = 0;
    if (batch.size() == 0) return;
    check(batch);
    if (_kv.states().any()) checkStates(batch);
    _backend.begin(batch, _kv);
    const auto wanted = static_cast<int64_t>(batch.logitRows.size());
    int64_t first = 0, count = std::min(wanted, _backend.headRows());
    Operations& ops = _backend.operations();
    const auto head = [&](int64_t from) { ops.head(headOf(_spec.outputNorm, _spec.outputNormBias), from, count); };
    _backend.region(Pass::Model, [&] {
        OptionalPart pending;
        const LayerContext context = this->context(pending);
        ops.embed(_weights[_spec.tokenEmbedding], _spec.embeddingScale);
        prepareLayerInputs(context);
        beginStreams(context);
        for (size_t i = 0; i < _spec.layers.size(); ++i) runLayer(context, _spec.layers[i], i, _nextWithExperts[i]);
        endLayers(context);
        if (count) head(0);
    });
    for (const int32_t sequence : batch.sequences) _kv.commit(sequence);
    while (count) {
        held(first, count);
        _heldRows = count;
        first += count;
        count = std::min(wanted - first, _backend.headRows());
        if (count) head(first);
    }
}

void ForwardPass::draft(const Batch& batch, bool again) {
    _heldRows = 0;
    if (_spec.predictions.empty()) throw Error(ErrorKind::Internal, "a draft of a model without a prediction layer");
    const auto wanted = static_cast<int64_t>(batch.logitRows.size());
    if (batch.sources.size() != batch.tokens.size() || wanted > _backend.headRows())
        throw Error(ErrorKind::Internal, "an impossible batch to draft");
    check(batch);
    const PredictionSpec& p = _spec.predictions[0];
    const float eps = _spec.normEpsilon;
    const Weight& projection = _weights[p.projection];
    const float* const sourceNorm = _weights[again ? p.headNorm : _spec.outputNorm];
    Operations& ops = _backend.operations();
    _backend.begin(batch, _kv);
    _backend.region(again ? Pass::DraftAgain : Pass::Draft, [&] {
        OptionalPart pending;
        const LayerContext context = this->context(pending);
        ops.joinDraft(_weights[p.embedding], _weights[p.norms], sourceNorm, eps, projection);
        ops.linear(RowInput::Joined, {{projection, nullptr, RowBuffer::Residual}});
        runLayer(context, p.layer, _spec.layers.size(), nullptr);
        addPending(context);
        if (wanted) ops.head(headOf(p.headNorm, {}), 0, wanted);
    });
    _heldRows = wanted;
}

std::vector<Chosen> ForwardPass::sample(std::vector<Choice> choices) {
    const auto count = static_cast<int64_t>(choices.size());
    if (count > _heldRows) throw Error(ErrorKind::Internal, "no logits to choose from");
    int64_t row = _heldRows - count;
    for (Choice& choice : choices) choice.row = row++;
    _heldRows = 0;
    return _backend.sample(choices);
}

}  // namespace sharpi
