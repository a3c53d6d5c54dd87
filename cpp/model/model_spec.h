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
    double frequencyScale = 1.0;      // 1 / factor of the extension
    double extrapolation = 0.0;       // YaRN's mix; 0: linear scaling only
    double magnitude = 1.0;           // YaRN's attention factor
    double betaFast = 32.0, betaSlow = 1.0;
    int64_t originalContext = 0;
    WeightSlice factors;              // rope_freqs: frequencies are divided by it; may be absent
};

struct AttentionSpec {
    enum class QkNorm { None, PerHead, FullRow };
    int32_t heads = 0, kvHeads = 0, headDim = 0;
    float scale = 1.0f;
    QkNorm qkNorm = QkNorm::None;
    RopeSpec rope;
    WeightSlice q, k, v, output;
    WeightSlice qBias, kBias, vBias, outputBias;  // may be absent
    WeightSlice qNorm, kNorm;                     // absent with QkNorm::None
};

struct DenseFfnSpec {
    WeightSlice gate, up, down;
    int64_t hidden() const { return gate.rows; }
};

// softmax over all experts, the `used` best kept (ties: the lower index), their weights renormalized or not.
struct ExpertFfnSpec {
    int32_t count = 0, used = 0;
    bool renormalize = true;
    float weightScale = 1.0f;
    WeightSlice router, gate, up, down;
    int64_t hidden() const { return gate.rows; }
};

struct LayerSpec {
    WeightSlice mixerNorm, ffnNorm;
    AttentionSpec attention;
    std::optional<DenseFfnSpec> dense;  // exactly one of the two
    std::optional<ExpertFfnSpec> experts;
};

struct ModelSpec {
    std::string architecture;  // for people to read
    std::string name;
    int64_t vocabSize = 0, contextLength = 0, embedding = 0;
    float normEpsilon = 0;
    WeightSlice tokenEmbedding, outputNorm, output;  // output is tokenEmbedding when the file ties them
    std::vector<LayerSpec> layers;

    // Throws Error(BadModel): unknown architecture, missing or ill-shaped tensors, tensors nobody would use.
    static ModelSpec read(const Metadata& metadata, const TensorTable& tensors);

    int64_t parameters(const TensorTable& tensors) const;
};

// The names that ModelSpec::read knows, in order.
std::vector<std::string> knownArchitectures();

}  // namespace sharpi
