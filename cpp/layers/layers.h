// Layers, composed of operations. Each function takes the batch that the processor works on through one part of a
// layer; it knows neither the processor nor where weights are.
#pragma once

#include "memory/kv_cache.h"
#include "model/model_spec.h"
#include "operations/operations.h"
#include "placement/model_weights.h"

namespace sharpi {

// What the parts of a layer work with.
struct LayerContext {
    Operations& ops;
    const ModelSpec& spec;
    const ModelWeights& weights;
    const KvCache& kv;
};

// x += output(attention(norm(x)))
void attentionLayer(const LayerContext& context, const LayerSpec& layer, const KvPages& pages);
// x += output(gated delta rule(norm(x)))
void gatedDeltaLayer(const LayerContext& context, const LayerSpec& layer, const RecurrentLayer& state);
// x += down(silu(gate n) * up n), n = norm(x)
void denseLayer(const LayerContext& context, const LayerSpec& layer);
// x += the weighted sum of the chosen experts, and of the shared one. next: the layer with experts that comes next in
// the same pass, or nullptr.
void expertLayer(const LayerContext& context, const LayerSpec& layer, const LayerSpec* next);

// A whole layer: its mixer, then its feed-forward part. index: its number in the model.
void runLayer(const LayerContext& context, const LayerSpec& layer, size_t index, const LayerSpec* nextWithExperts);

}  // namespace sharpi
