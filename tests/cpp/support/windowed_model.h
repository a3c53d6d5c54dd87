// A tiny model whose layers see a window, everything, a chunk, and a window through the keys of the first layer.
#pragma once

#include <memory>

#include "engine/engine.h"
#include "tiny_model.h"

namespace tiny {

struct WindowedModel {
    static constexpr int64_t kContext = 1600;

    explicit WindowedModel(unsigned seed = 1) : model(optionsOf(seed)), spec(model.spec()) {
        spec.layers[0].attention->reach.window = 70;
        spec.layers[2].attention->reach.chunk = 96;
        spec.layers[3].attention->reach.window = 70;
        spec.layers[3].attention->kvLayer = 0;
    }
    int64_t vocab() const { return spec.vocabSize; }
    // One sequence and small batches: the cache keeps little more than the layers see.
    std::shared_ptr<sharpi::Engine> engine(sharpi::EngineOptions options, int32_t sequences = 1) const {
        options.context = kContext;
        options.sequences = sequences;
        return std::make_shared<sharpi::Engine>(spec, model.weights(), options);
    }
    // Nothing is ever given back.
    std::shared_ptr<sharpi::Engine> roomy(const sharpi::EngineOptions& options) const { return engine(options, 100); }

    Model model;
    sharpi::ModelSpec spec;

private:
    static Options optionsOf(unsigned seed) {
        Options options;
        options.architecture = "qwen3";
        options.layers = 4;
        options.context = kContext;
        options.seed = seed;
        return options;
    }
};

}  // namespace tiny
