// Tiny models that differ from those that the known architectures' files describe: a spec as an architecture's reader
// makes it, changed, with further vectors in the file.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "tiny_model.h"

namespace tiny {

class VariedModel : public Model {
public:
    explicit VariedModel(const Options& options) : Model(options), _spec(Model::spec()) {}

    const sharpi::ModelSpec& spec() const { return _spec; }
    sharpi::ModelSpec& spec() { return _spec; }

    // Adds a vector of random floats, near 1 if its name contains "norm", else near 0.
    sharpi::VectorId addVector(int32_t layer, const std::string& name, int64_t size) {
        add("blk." + std::to_string(layer) + "." + name, DType::F32, {size});
        sharpi::ListedWeight weight;
        sharpi::WeightSlice slice;
        slice.tensor = static_cast<int32_t>(tensors.size()) - 1;
        slice.rows = 1;
        slice.cols = size;
        weight.slices = {slice};
        weight.layer = layer;
        const auto index = static_cast<int32_t>(_spec.weights.size());
        weight.unit = index;
        _spec.weights.push_back(weight);
        return {index};
    }

    void addExpertBiases() {
        forLayers([&](int32_t layer, sharpi::LayerSpec& of) {
            if (!of.experts) return;
            sharpi::ExpertFfnSpec& f = *of.experts;
            const int64_t count = f.routing.count;
            f.routing.bias = addVector(layer, "ffn_gate_inp.bias", count);
            f.gateBias = addVector(layer, "ffn_gate_exps.bias", count * f.hidden);
            if (f.up) f.upBias = addVector(layer, "ffn_up_exps.bias", count * f.hidden);
            f.downBias = addVector(layer, "ffn_down_exps.bias", count * _spec.embedding);
        });
    }
    void addDenseBiases() {
        forLayers([&](int32_t layer, sharpi::LayerSpec& of) {
            if (!of.dense) return;
            of.dense->gateBias = addVector(layer, "ffn_gate.bias", of.dense->hidden);
            if (of.dense->up) of.dense->upBias = addVector(layer, "ffn_up.bias", of.dense->hidden);
            of.dense->downBias = addVector(layer, "ffn_down.bias", _spec.embedding);
        });
    }
    void addPostNorms() {
        forLayers([&](int32_t layer, sharpi::LayerSpec& of) {
            of.ffnPostNorm = addVector(layer, "post_ffw_norm", _spec.embedding);
        });
    }
    void setActivation(sharpi::Activation activation) {
        forLayers([&](int32_t, sharpi::LayerSpec& of) {
            if (of.dense) of.dense->activation = activation;
            if (of.experts) of.experts->activation = activation;
        });
    }
    void forRouting(const std::function<void(int32_t layer, sharpi::ExpertFfnSpec& experts)>& body) {
        forLayers([&](int32_t layer, sharpi::LayerSpec& of) {
            if (of.experts) body(layer, *of.experts);
        });
    }
    void forLayers(const std::function<void(int32_t layer, sharpi::LayerSpec& spec)>& body) {
        for (size_t i = 0; i < _spec.layers.size(); ++i) body(static_cast<int32_t>(i), _spec.layers[i]);
    }

private:
    sharpi::ModelSpec _spec;
};

struct Variation {
    std::string name;
    VariedModel model;
    bool usesAll = true;  // else it leaves a matrix out, so its weights cannot be streamed in the order of their uses
};

// Every way in which mixtures and dense parts differ, each once and in company.
inline std::vector<Variation> variations(DType matrices = DType::Q8_0) {
    using namespace sharpi;
    std::vector<Variation> all;
    const auto add = [&](const std::string& name, Options o, const std::function<void(VariedModel&)>& change) {
        o.matrices = matrices;
        o.seed = 300 + static_cast<unsigned>(all.size());
        VariedModel model(o);
        change(model);
        all.push_back({name, model});
    };
    Options dense, mixture, shared, ungated;
    mixture.architecture = "qwen3moe";
    mixture.experts = 8;
    mixture.used = 3;
    shared.architecture = "qwen35moe";
    shared.experts = 8;
    shared.used = 2;
    ungated.architecture = "arcee";
    Options ungatedMixture = mixture;
    ungatedMixture.architecture = ungated.architecture;
    Options mixed = mixture;
    mixed.mixed = {matrices == DType::Q8_0 ? DType::Q4_0 : DType::F32, matrices, matrices};
    const Activation gelu{ActivationKind::Gelu}, clamped{ActivationKind::ClampedSwiglu, 0.7f},
        squared{ActivationKind::ReluSquared};

    add("dense, gelu, post-norms", dense, [&](VariedModel& m) {
        m.setActivation(gelu);
        m.addPostNorms();
    });
    add("dense, clamped, biases", dense, [&](VariedModel& m) {
        m.setActivation(clamped);
        m.addDenseBiases();
    });
    add("dense, biases, post-norms", dense, [&](VariedModel& m) {
        m.addDenseBiases();
        m.addPostNorms();
    });
    for (const Options& o : {mixture, mixed}) {
        add("biases, clamped, softmax of the chosen", o, [&](VariedModel& m) {
            m.setActivation(clamped);
            m.addExpertBiases();
            m.forRouting([](int32_t, ExpertFfnSpec& f) { f.routing.gating = Gating::SoftmaxOfChosen; });
        });
        add("weighted inputs, sigmoid", o, [&](VariedModel& m) {
            m.forRouting([](int32_t, ExpertFfnSpec& f) {
                f.routing.gating = Gating::Sigmoid;
                f.routing.renormalize = false;
                f.routing.weightsInput = true;
            });
        });
    }
    add("weighted inputs, biases, gelu, post-norms", mixture, [&](VariedModel& m) {
        m.setActivation(gelu);
        m.addExpertBiases();
        m.addPostNorms();
        m.forRouting([](int32_t, ExpertFfnSpec& f) { f.routing.weightsInput = true; });
    });
    add("sigmoid, groups, choice bias", mixture, [&](VariedModel& m) {
        m.forRouting([&](int32_t layer, ExpertFfnSpec& f) {
            f.routing.gating = Gating::Sigmoid;
            f.routing.groups = 4;
            f.routing.groupsUsed = 2;
            f.routing.weightScale = 2.5f;
            f.routing.choiceBias = m.addVector(layer, "exp_probs_b.bias", f.routing.count);
        });
    });
    add("gelu, output scales", mixture, [&](VariedModel& m) {
        m.setActivation(gelu);
        m.forRouting([&](int32_t layer, ExpertFfnSpec& f) {
            f.routing.outputScale = m.addVector(layer, "ffn_down_exps.norm", f.routing.count);
        });
    });
    add("shared expert without a scale, consecutive heads", shared, [&](VariedModel& m) {
        m.forLayers([&](int32_t, LayerSpec& of) {
            if (of.experts) of.experts->shared->scale = {};
            if (of.delta) of.delta->consecutiveHeads = true;
        });
    });
    add("shared expert, post-norms", shared, [&](VariedModel& m) { m.addPostNorms(); });
    add("dense, square of ReLU", dense, [&](VariedModel& m) { m.setActivation(squared); });
    add("dense without a gate, biases", ungated, [&](VariedModel& m) { m.addDenseBiases(); });
    add("dense without a gate, gelu", ungated, [&](VariedModel& m) { m.setActivation(gelu); });
    add("experts without a gate, biases", ungatedMixture, [&](VariedModel& m) { m.addExpertBiases(); });
    ungatedMixture.mixed = {matrices == DType::Q8_0 ? DType::Q4_0 : DType::F32, matrices};
    add("experts without a gate, weighted inputs, clamped", ungatedMixture, [&](VariedModel& m) {
        m.setActivation(clamped);
        m.forRouting([](int32_t, ExpertFfnSpec& f) { f.routing.weightsInput = true; });
    });
    Options latents = mambas().back();
    latents.layers = 6;  // two have experts
    latents.experts = 8;
    latents.used = 3;
    add("experts that read latents", latents, [](VariedModel&) {});
    latents.mixed = mixed.mixed;
    add("experts that read latents, biases", latents, [&](VariedModel& m) {
        m.forRouting([&](int32_t layer, ExpertFfnSpec& f) {
            f.downBias = m.addVector(layer, "ffn_down_exps.bias", f.routing.count * 32);
        });
    });
    add("shared expert without a gate", shared, [&](VariedModel& m) {
        m.forLayers([&](int32_t, LayerSpec& of) {
            if (of.experts) of.experts->shared->up = {};
        });
    });
    all.back().usesAll = false;
    return all;
}

// Its layers see a window, everything, a chunk, and a window through the keys of the first layer.
class WindowedModel : public VariedModel {
public:
    static constexpr int64_t kContext = 1600;

    explicit WindowedModel(unsigned seed = 1) : VariedModel(optionsOf(seed)) {
        std::vector<sharpi::LayerSpec>& layers = spec().layers;
        layers[0].attention->reach.window = 70;
        layers[2].attention->reach.chunk = 96;
        layers[3].attention->reach.window = 70;
        layers[3].attention->kvLayer = 0;
    }
    int64_t vocab() const { return spec().vocabSize; }
    // With one sequence and small batches the cache keeps little more than the layers see.
    std::shared_ptr<sharpi::Engine> engine(sharpi::EngineOptions options, int32_t sequences = 1) const {
        options.context = kContext;
        options.sequences = sequences;
        return std::make_shared<sharpi::Engine>(spec(), weights(), options);
    }
    // Nothing is ever given back.
    std::shared_ptr<sharpi::Engine> roomy(const sharpi::EngineOptions& options) const { return engine(options, 100); }

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
