// What the known architectures are, as their models' own code has it, and what a tiny model of one has; see
// tiny_model.h.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "model/model_spec.h"

namespace tiny {

using sharpi::DType;

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
    bool mamba = false;            // layers of Mamba 2 between those of attention
    bool sideBySide = false;       // of Mamba 2 and attention: every layer has both, and normalizes no heads' answers
    bool oneParts = false;         // a layer is one of three, in turn: Mamba 2, attention, a feed-forward part
    bool gemma4 = false;           // larger heads in every second layer, which has no values; and Options::layerInputs
    bool embedsPositions(int64_t layer) const { return !withoutPositions || (layer + 1) % withoutPositions; }
    bool scans(int64_t layer) const { return mamba && (sideBySide || layer % (oneParts ? 3 : 2) == 0); }
    bool attends(int64_t layer) const { return sideBySide || (!scans(layer) && (!oneParts || layer % 3 == 1)); }
    bool feeds(int64_t layer) const { return !oneParts || layer % 3 == 2; }
    const char* ffnNorm() const {
        if (sideBySide) return "ffn_norm";
        return hybrid || sinks || sigmoids ? "post_attention_norm.weight" : "ffn_norm.weight";
    }
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
        Family& hybrid = add("granitehybrid", Pairing::Adjacent, QkNorm::None);
        hybrid.mamba = hybrid.scales = hybrid.plainShared = true;
        hybrid.layers = 3;
        Family& falcon = add("falcon-h1", Pairing::Halves, QkNorm::None);
        falcon.mamba = falcon.sideBySide = true;
        for (const char* name : {"nemotron_h", "nemotron_h_moe"}) {
            Family& nemotron = add(name, Pairing::Adjacent, QkNorm::None);
            nemotron.mamba = nemotron.oneParts = nemotron.plainShared = true;
            nemotron.gated = false;
            nemotron.layers = 5;
            nemotron.withoutPositions = 1;
            nemotron.mixture = nemotron.sigmoids = name == std::string("nemotron_h_moe");
        }
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

constexpr int64_t kWindow = 8;

struct Options {
    std::string architecture = "llama";
    DType matrices = DType::Q8_0;  // F32, Q8_0 or Q4_0
    int64_t layers = 2, embedding = 64, heads = 4, kvHeads = 2, headDim = 16, hidden = 96, vocab = 77, context = 300;
    int64_t experts = 0, used = 2;  // each expert has `hidden` rows; 0: dense
    std::vector<DType> mixed;  // types that the feed-forward matrices of all layers take in turn; empty: `matrices`
    // For hybrids: every `interval`-th layer has attention, the others have these heads.
    int64_t interval = 2, keyHeads = 2, valueHeads = 4, deltaDim = 16, convWidth = 4, predictions = 0;
    int64_t mambaDim =
        24;  // the size of a head of Mamba 2, which has keyHeads groups, valueHeads heads, deltaDim states
    bool fusedQkv = false, fusedExperts = false, biases = false, tied = false;
    int64_t expertLatents = 0;  // elements of the rows that experts read, if they read latents
    int64_t layerInputs = 0;    // the width of per-layer embeddings
    int64_t sharedKv = 0;       // the last layers without keys and values
    int64_t denseEvery = 0;     // n: of n layers of a mixture, all but the last are dense
    // Latent attention: head sizes are headDim, of rotated elements, and those of the plain ones and of values.
    int64_t queryRank = 64, latentRank = 32, plainDim = 32, valueDim = 24;  // queryRank: 0: queries come from x
    bool joinedUp = false;   // keys' and values' matrices of all heads are one, as in files from before mid-2025
    int64_t denseFirst = 0;  // so many layers of a mixture, its first, are dense
    unsigned seed = 1;
};

// Mamba 2: a mixture with shared experts, layers of one part, such layers with experts, attention beside it, and
// experts that read latents.
inline std::vector<Options> mambas() {
    Options granite;
    granite.seed = 500;
    granite.architecture = "granitehybrid";
    granite.layers = 3;
    granite.experts = 5;
    Options dense;
    dense.seed = 501;
    dense.architecture = "nemotron_h";
    dense.layers = 5;
    dense.matrices = DType::F32;
    dense.keyHeads = 1;
    dense.valueHeads = 3;
    dense.deltaDim = 20;  // not a multiple of 8 sums
    dense.convWidth = 2;
    Options mixture;
    mixture.seed = 502;
    mixture.architecture = "nemotron_h_moe";
    mixture.layers = 5;
    mixture.matrices = DType::Q4_0;
    mixture.mambaDim = 32;
    Options beside;
    beside.seed = 503;
    beside.architecture = "falcon-h1";
    Options latents = mixture;
    latents.seed = 504;
    latents.layers = 3;  // nothing follows the experts: rounding that turns a choice changes one row alone
    latents.matrices = DType::Q8_0;
    latents.expertLatents = 32;
    return {granite, dense, mixture, beside, latents};
}

}  // namespace tiny
