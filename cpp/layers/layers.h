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
    const StepLimits& limits;
    // What the last part gave but nothing has added to x yet: the operation that reads x next does it.
    OptionalPart& pending;
};

// The per-layer embeddings of the batch, if the model has them. After embed().
void prepareLayerInputs(const LayerContext& context);

// A whole layer: its mixer, then its feed-forward part, as far as it has them. index: its number in the model.
void runLayer(const LayerContext& context, const LayerSpec& layer, size_t index, const LayerSpec* nextWithExperts);

// After embed(): every stream begins with x, if the model has streams.
void beginStreams(const LayerContext& context);

// After the model's last layer: x is what the output head reads.
void endLayers(const LayerContext& context);

// Adds what a part has left to x.
void addPending(const LayerContext& context);

}  // namespace sharpi
