// The one forward pass: takes a Batch through the layers that a ModelSpec lists and gives logits. Every model,
// placement and batch shape goes through here.
#pragma once

#include <functional>

#include "layers/layers.h"
#include "operations/backend.h"
#include "operations/batch.h"
#include "placement/model_weights.h"

namespace sharpi {

class ForwardPass {
public:
    // Throws Error(Internal) for a cache without the states that the model's layers need.
    ForwardPass(const ModelSpec& spec, const ModelWeights& weights, Backend& backend, KvCache& kv,
                const StepLimits& limits);

    // Room in the KV cache for the batch's rows must have been made (KvCache::extend). Commits them.
    // logits: [batch.logitRows.size(), vocabSize] in host memory; nullptr: they stay with the backend.
    void run(const Batch& batch, float* logits);
    // Called while the backend holds the logits of rows [first, first + count) of batch.logitRows, as its rows 0 and
    // up.
    using HeldRows = std::function<void(int64_t first, int64_t count)>;
    void run(const Batch& batch, const HeldRows& held);
    // Runs the prediction layer over rows of the last pass, which batch.sources names. For each it predicts what comes
    // after the token that followed the row. again: the last pass was a draft too. Needs room in the KV cache
    // (KvCache::reserve); commits nothing. At most headRows() rows want logits.
    void draft(const Batch& batch, bool again);
    // Chooses a token from each of the last choices.size() rows of the last pass that wanted logits. Can be called once
    // for a pass. Choice::row is set here.
    std::vector<Chosen> sample(std::vector<Choice> choices);

private:
    void check(const Batch& batch) const;
    LayerContext context(OptionalPart& pending) {
        return {_backend.operations(), _spec, _weights, _kv, _limits, pending};
    }
    void checkStates(const Batch& batch) const;
    HeadCall headOf(VectorId norm, VectorId bias) const;
    const ModelSpec& _spec;
    const ModelWeights& _weights;
    Backend& _backend;
    KvCache& _kv;
    StepLimits _limits;
    std::vector<const LayerSpec*> _nextWithExperts;  // for each layer: the next one that has experts, or nullptr
    int64_t _heldRows = 0;                           // rows whose logits the backend holds
};

}  // namespace sharpi
