// What the known architectures are, as their models' own code has it; see tiny_model.h.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "model/model_spec.h"

namespace tiny {

// What the known architectures are, as their models' own code has it. It says what the readers in model/architectures/
// must find, and what files to write for them.
struct Family {
    const char* name;
    sharpi::RopeSpec::Pairing pairing;
    sharpi::AttentionSpec::QkNorm qkNorm;
    bool renormalized;             // the weights of the experts that a row chose sum to 1
    bool mixture;                  // every model has experts
    bool hybrid;                   // layers of Gated DeltaNet between those of attention, which is gated
    int64_t withoutPositions = 0;  // n: every n-th layer embeds no positions; 0: every layer embeds them
    int64_t layers = 2;            // so that each kind of layer is there
    bool windows = false;          // layers see a window of kWindow tokens: every second, or what the reader's habit is
    bool postNorms = false;        // norms after each part
    bool normWeights = true;       // of queries and keys, if they are normalized
    bool sinks = false;            // of attention, and biases on everything
    bool plainShared = false;      // a shared expert without a scale
    bool fusedUp = false;          // ffn_up holds gate and up
    bool fusedSteps = false;       // ssm_ba holds the rows of alpha and beta
    bool gated = true;             // feed-forward parts have a gate
    bool preNorms = true;          // norms before each part
    bool layerNorms = false;       // these norms subtract the mean, and the feed-forward part has none of its own
    bool scales = false;           // of embeddings, of what each part adds, and of logits
    bool latent = false;           // latent attention: see Model::addLatentAttention
    bool sigmoids = false;         // experts are chosen by sigmoids with a bias; the layers may predict too
    bool gemma4 = false;           // larger heads in every second layer, which has no values; and Options::layerInputs
    bool embedsPositions(int64_t layer) const { return !withoutPositions || (layer + 1) % withoutPositions; }
    const char* ffnNorm() const { return hybrid || sinks || sigmoids ? "post_attention_norm" : "ffn_norm"; }
};

inline const std::vector<Family>& families() {
    using Pairing = sharpi::RopeSpec::Pairing;
    using QkNorm = sharpi::AttentionSpec::QkNorm;
    static const std::vector<Family> all = [] {
        std::vector<Family> known = {
            {"llama", Pairing::Adjacent, QkNorm::None, true, false, false},  // Mixtral divides by the sum of the chosen
            {"olmoe", Pairing::Halves, QkNorm::FullRow, false, true, false},
            {"qwen2", Pairing::Halves, QkNorm::None, true, false, false},
            {"qwen3", Pairing::Halves, QkNorm::PerHead, true, false, false},
            {"qwen3moe", Pairing::Halves, QkNorm::PerHead, true, true, false},
            {"qwen35", Pairing::Halves, QkNorm::PerHead, true, false, true},
            {"qwen35moe", Pairing::Halves, QkNorm::PerHead, true, true, true},
            {"qwen3vl", Pairing::Halves, QkNorm::PerHead, true, false, false},
            {"qwen3vlmoe", Pairing::Halves, QkNorm::PerHead, true, true, false},
            {"smollm3", Pairing::Adjacent, QkNorm::None, true, false, false, 4,
             5},  // the last one embeds positions again
            {"mistral3", Pairing::Adjacent, QkNorm::None, true, false, false},
        };
        const auto add = [&](const char* name, Pairing pairing, QkNorm norm) -> Family& {
            known.push_back({name, pairing, norm, true, false, false});
            return known.back();
        };
        add("phi3", Pairing::Halves, QkNorm::None).fusedUp = true;
        for (const char* name : {"gemma2", "gemma3", "gemma4"}) {
            const bool plain = name == std::string("gemma2");
            Family& gemma = add(name, Pairing::Halves, plain ? QkNorm::None : QkNorm::PerHead);
            gemma.windows = gemma.postNorms = true;
            gemma.gemma4 = name == std::string("gemma4");
            gemma.layers = name == std::string("gemma3") ? 6 : 4;
        }
        Family& olmo = add("olmo2", Pairing::Halves, QkNorm::FullRow);
        olmo.windows = olmo.postNorms = true;
        olmo.preNorms = false;
        olmo.layers = 4;
        Family& cohere = add("cohere2", Pairing::Adjacent, QkNorm::None);
        cohere.windows = cohere.layerNorms = cohere.scales = true;
        cohere.layers = cohere.withoutPositions = 4;
        for (const char* name : {"granite", "granitemoe"}) {
            Family& granite = add(name, Pairing::Adjacent, QkNorm::None);
            granite.scales = true;
            granite.mixture = name == std::string("granitemoe");
        }
        Family& oss = add("gpt-oss", Pairing::Halves, QkNorm::None);
        oss.mixture = oss.windows = oss.sinks = true;
        oss.renormalized = false;
        Family& llama4 = add("llama4", Pairing::Adjacent, QkNorm::PerHead);
        llama4.mixture = llama4.plainShared = true;
        llama4.renormalized = llama4.normWeights = false;
        llama4.layers = llama4.withoutPositions = 4;
        Family& next = add("qwen3next", Pairing::Halves, QkNorm::PerHead);
        next.mixture = next.hybrid = next.fusedSteps = true;
        add("arcee", Pairing::Adjacent, QkNorm::None).gated = false;
        Family& glm = add("glm4moe", Pairing::Halves, QkNorm::None);
        glm.mixture = glm.plainShared = glm.sigmoids = true;
        for (const char* name : {"deepseek2", "mistral4"}) {
            Family& latent = add(name, Pairing::Adjacent, QkNorm::None);
            latent.mixture = latent.plainShared = latent.latent = true;
            latent.renormalized = false;
        }
        return known;
    }();
    return all;
}

inline const Family& family(const std::string& name) {
    for (const Family& f : families())
        if (name == f.name) return f;
    throw std::runtime_error("no architecture " + name);
}

}  // namespace tiny
