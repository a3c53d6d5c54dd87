// The one forward pass: takes a Batch through the layers that a ModelSpec lists and gives logits. Every model,
// placement and batch shape goes through here.
#pragma once

#include "engine/backend.h"
#include "engine/batch.h"
#include "engine/model_weights.h"

namespace sharpi {

class ForwardPass {
public:
    // Throws Error(Internal) for a cache without the states that the model's layers need.
    ForwardPass(const ModelSpec& spec, const ModelWeights& weights, Backend& backend, KvCache& kv, const StepLimits& limits);

    // Room in the KV cache for the batch's rows must have been made (KvCache::extend). Commits them.
    // logits: [batch.logitRows.size(), vocabSize] in host memory; nullptr: they stay with the backend.
    void run(const Batch& batch, float* logits);
    // Chooses from the logits of the last run's last row, once. -1: no token may be chosen.
    int32_t sampleLast(const SamplingRule& rule, const std::vector<TokenAdjustment>& adjustments, double draw);

private:
    void check(const Batch& batch) const;
    void checkStates(const Batch& batch) const;
    const ModelSpec& _spec;
    const ModelWeights& _weights;
    Backend& _backend;
    KvCache& _kv;
    StepLimits _limits;
    int64_t _lastRow = -1;  // where the backend holds the last row's logits
};

}  // namespace sharpi
