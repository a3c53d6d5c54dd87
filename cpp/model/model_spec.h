// What a model is, as data: a list of layers, each a mixer and a feed-forward part, and which tensors they use.
// Everything above this room works from a ModelSpec and never asks for an architecture's name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "model/metadata.h"

namespace sharpi {

// Some rows of a tensor. Newer files fuse matrices (attn_qkv, ffn_gate_up_exps): each part is then a slice of
// one tensor. A tensor of experts is a stack: expert e's rows start at rowBegin + e * expertStride.
struct WeightSlice {
    int32_t tensor = -1;  // index into the TensorTable
    int64_t rowBegin = 0;
    int64_t rows = 0;
    int64_t cols = 0;
    int64_t experts = 1;
    int64_t expertStride = 0;  // rows from one expert to the next
    explicit operator bool() const { return tensor >= 0; }
};

// Rotary position embedding (Su et al., 2021), with linear or YaRN (Peng et al., 2023) context extension.
struct RopeSpec {
    enum class Pairing { Adjacent, Halves };  // pairs (2i, 2i + 1), or (i, i + dims / 2)
    Pairing pairing = Pairing::Halves;
    int32_t dims = 0;  // leading elements of a head that are rotated
    double base = 10000.0;
    double frequencyScale = 1.0;  // 1 / factor of the extension
    double extrapolation = 0.0;   // YaRN's mix; 0: linear scaling only
    double magnitude = 1.0;       // YaRN's attention factor
    double betaFast = 32.0, betaSlow = 1.0;
    int64_t originalContext = 0;
    WeightSlice factors;  // rope_freqs: frequencies are divided by it; may be absent
};

struct AttentionSpec {
    enum class QkNorm { None, PerHead, FullRow };
    int32_t heads = 0, kvHeads = 0, headDim = 0;
    float scale = 1.0f;
    QkNorm qkNorm = QkNorm::None;
    bool gated = false;  // q gives each head's query and then its gate; what is attended is multiplied by sigmoid(gate)
    RopeSpec rope;
    WeightSlice q, k, v, output;
    WeightSlice qBias, kBias, vBias, outputBias;  // may be absent
    WeightSlice qNorm, kNorm;                     // absent with QkNorm::None
};

// Gated DeltaNet (Yang et al., 2024): a matrix per value head in place of a cache, taken on token by token. Value head
// h reads the queries and keys of key head h mod keyHeads. What is computed is written at cpu/kernels/delta.cpp.
struct GatedDeltaSpec {
    int32_t keyHeads = 0, valueHeads = 0, headDim = 0;  // keys and values are equally long
    int32_t convWidth = 0;                              // inputs that the convolution sees, the present one included
    WeightSlice qkv, gate, alpha, beta, output;
    WeightSlice conv;                   // [channels, convWidth], over q, k and v
    WeightSlice stepBias, decay, norm;  // by value head, by value head, by element of a head; decay is negative
    int64_t keyWidth() const { return int64_t{keyHeads} * headDim; }
    int64_t valueWidth() const { return int64_t{valueHeads} * headDim; }
    int64_t channels() const { return 2 * keyWidth() + valueWidth(); }
    // What it keeps of a sequence, in floats: the convolution's last inputs, and each head's matrix.
    int64_t convState() const { return (convWidth - 1) * channels(); }
    int64_t matrixState() const { return valueWidth() * headDim; }
};

struct DenseFfnSpec {
    WeightSlice gate, up, down;
    int64_t hidden() const { return gate.rows; }
};

// An expert that every token goes through, times sigmoid(scale . x).
struct SharedExpertSpec {
    WeightSlice scale, gate, up, down;
    int64_t hidden() const { return gate.rows; }
};

// softmax over all experts, the `used` best kept (ties: the lower index), their weights renormalized or not.
struct ExpertFfnSpec {
    int32_t count = 0, used = 0;
    bool renormalize = true;
    float weightScale = 1.0f;
    WeightSlice router, gate, up, down;
    std::optional<SharedExpertSpec> shared;
    int64_t hidden() const { return gate.rows; }
};

struct LayerSpec {
    WeightSlice mixerNorm, ffnNorm;
    std::optional<AttentionSpec> attention;  // exactly one of the two
    std::optional<GatedDeltaSpec> delta;
    std::optional<DenseFfnSpec> dense;  // exactly one of the two
    std::optional<ExpertFfnSpec> experts;
};

// A layer that guesses the token after the next (multi-token prediction): embeddingNorm(embedding of the next token)
// and hiddenNorm(what the model's output head reads), one behind the other, are projected, go through the layer, and to
// the output head behind a norm of their own. What that norm gives stands for the head's input in a further guess.
struct PredictionSpec {
    LayerSpec layer;
    WeightSlice projection;                           // [embedding, 2 * embedding]
    WeightSlice embeddingNorm, hiddenNorm, headNorm;  // headNorm may be absent: the model's
    WeightSlice embedding;                            // may be absent: the model's
};

struct ModelSpec {
    std::string architecture;  // for people to read
    std::string name;
    int64_t vocabSize = 0, contextLength = 0, embedding = 0;
    float normEpsilon = 0;
    WeightSlice tokenEmbedding, outputNorm, output;  // output is tokenEmbedding when the file ties them
    std::vector<LayerSpec> layers;
    // One at most is run: of several in a file the first, and none that has an output head of its own, which would take
    // as much memory as the model's. Empty: nothing of it is loaded.
    std::vector<PredictionSpec> predictions;

    // Throws Error(BadModel): unknown architecture, missing or ill-shaped tensors, tensors nobody would use.
    static ModelSpec read(const Metadata& metadata, const TensorTable& tensors);

    int64_t parameters(const TensorTable& tensors) const;
    // All layers whose weights are loaded, in the order of use: the prediction layer is the last.
    std::vector<const LayerSpec*> loadedLayers() const;
};

// The names that ModelSpec::read knows, in order.
std::vector<std::string> knownArchitectures();

}  // namespace sharpi
