// What a model is, as data: a list of weights, and a list of layers that name them. Each layer is a mixer, or two side
// by side, and a feed-forward part, or one of them. Everything above this room works from a ModelSpec and never asks
// for an architecture's name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/rules/activation.h"
#include "core/rules/attention_reach.h"
#include "core/rules/norm.h"
#include "core/rules/routing_rule.h"
#include "model/metadata.h"
#include "model/weight_registry.h"

namespace sharpi {

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
    bool last = false;     // the last elements of a head are rotated instead
    VectorId factors;      // [dims / 2]: frequencies are divided by it; may be absent
    VectorId longFactors;  // takes the place of `factors` in contexts beyond the original one; may be absent
    bool isLong(int64_t context) const { return longFactors && context > originalContext; }
};

// A factor of the queries that grows with their position: 1 + slope * ln(floor((position + offset) / length) + 1).
struct QueryScaleSpec {
    double slope = 0;
    int64_t length = 1, offset = 0;
};

// Latent attention (DeepSeek-AI, 2024). The cache holds one row of a token for all heads: its latent, and a key that is
// rotated. A head's key and value are products of the latent with matrices of that head. Here the key's matrix is
// multiplied by the query instead, and the value's by what the head has made of the latents it saw. So the layer is
// attention with one kv head of rank + rotated elements, whose values are the first `rank` elements of the keys.
struct LatentSpec {
    int32_t rank = 0;      // elements of a latent
    int32_t plainDim = 0;  // of a head's query before that product: those that are not rotated
    int32_t valueDim = 0;  // of a head's value
    VectorId norm;         // [rank], of latents
    MatrixId keyUp;        // head by head: [plainDim, heads * rank]
    MatrixId valueUp;      // head by head: [rank, heads * valueDim]
};

// Makes one row of a block of tokens: element by element, the softmax over the block's tokens of their gates weighs
// their keys. The row is normalized, and rotated by the position of the block's first token. With `overlaps`, keys and
// gates have two halves: a block takes the second half of its own tokens' and the first half of the tokens' of the
// block before. The cache keeps the rows, and the keys and gates of tokens whose block is not over.
struct CompressorSpec {
    int32_t blockTokens = 0, headDim = 0;
    bool overlaps = false;
    MatrixId keys, gates;    // [embedding, width()]
    VectorId gateOffsets;    // [blockTokens, width()], added to the gates of a block's tokens
    VectorId norm;           // [headDim]
    int32_t firstCache = 0;  // ModelSpec::extraCache: of unfinished blocks; the next one is that of the rows
    int32_t width() const { return (overlaps ? 2 : 1) * headDim; }
    // Tokens whose keys and gates a block's last token needs.
    int32_t span() const { return (overlaps ? 2 : 1) * blockTokens; }
};

// Chooses the blocks that a token sees: the topK with the largest sums over heads of weight * max(0, query . row), the
// lower number among equals. Its rows are its own.
struct IndexerSpec {
    int32_t heads = 0, topK = 0;
    float scale = 1.0f;  // of the weights
    MatrixId queries;    // of the row of low rank that q reads; rotated as the layer's are
    MatrixId weights;    // [embedding, heads]
    CompressorSpec compressor;
};

struct AttentionSpec {
    enum class QkNorm { None, PerHead, FullRow };
    int32_t heads = 0, kvHeads = 0, headDim = 0;
    float scale = 1.0f;
    QkNorm qkNorm = QkNorm::None;    // PerHead without qNorm and kNorm: by weights of 1
    bool normAfterRotation = false;  // queries and keys are normalized after their rotation, not before
    bool valueNorm = false;          // each head's values are normalized, by weights of 1
    int32_t kvLayer = -1;            // the layer whose keys and values it reads, so that it has none; -1: its own
    AttentionReach reach;
    float softcap = 0;        // scores become softcap * tanh(score / softcap); 0: they stay
    int32_t queryScale = -1;  // index into ModelSpec::queryScales; -1: none
    // q gives each head's query and then its gate; the head's output is multiplied by sigmoid(gate).
    bool gated = false;
    MatrixId queryDown;  // [embedding, rank of queries], normalized by queryNorm, which q reads; absent: q reads x
    VectorId queryNorm;
    bool valuesAreKeys = false;  // as the cache has them, where nothing is stored twice; there is no v
    bool rotatesBack = false;    // what a head gives is rotated back by its query's position
    MatrixId outputDown;  // group by group: [heads * headDim / groups, groups * rank], read by `output`; or absent
    int32_t outputGroups = 0;
    std::optional<CompressorSpec> compressor;  // its rows are seen beside the keys of the reach
    std::optional<IndexerSpec> indexer;        // else all of them are seen
    // Elements of a head's query as q gives it: those that are not rotated come first in latent attention.
    int32_t queryDim() const { return latent ? latent->plainDim + headDim - latent->rank : headDim; }
    // Elements of what a head gives to `output`.
    int32_t valueDim() const { return latent ? latent->valueDim : headDim; }
    int32_t rope = -1;                         // index into ModelSpec::ropes; -1: positions are not embedded
    MatrixId q, k, v, output;                  // no v: values are the keys, before their norm and rotation
    VectorId qBias, kBias, vBias, outputBias;  // may be absent
    VectorId qNorm, kNorm;                     // absent with QkNorm::None
    std::optional<LatentSpec> latent;          // kvHeads is 1, k gives latents and rotated keys; there is no v
    VectorId sinks;                            // [heads]: exp(sink) joins the sum of each head's softmax; may be absent
};

// Gated DeltaNet (Yang et al., 2024): a matrix per value head takes the place of a cache and is updated token by token.
// cpu/kernels/delta.cpp has the equations.
struct GatedDeltaSpec {
    int32_t keyHeads = 0, valueHeads = 0, headDim = 0;  // keys and values are equally long
    int32_t convWidth = 0;                              // inputs that the convolution sees, the present one included
    // Value head h reads the queries and keys of key head h / (valueHeads / keyHeads); else of h mod keyHeads.
    bool consecutiveHeads = false;
    // `beta` has, key head by key head, the rows of its value heads' betas and then of their alphas; there is no alpha.
    bool fusedSteps = false;
    MatrixId qkv, gate, alpha, beta, output;
    VectorId conv;                       // transposed: [convWidth, channels], over q, k and v
    VectorId stepBias, decay, headNorm;  // per value head, per value head, per element of a head; decay is negative
    int64_t keyWidth() const { return int64_t{keyHeads} * headDim; }
    int64_t valueWidth() const { return int64_t{valueHeads} * headDim; }
    int64_t channels() const { return 2 * keyWidth() + valueWidth(); }
    // The state of a sequence, in floats: the convolution's last inputs, and each head's matrix.
    int64_t convState() const { return (convWidth - 1) * channels(); }
    int64_t matrixState() const { return valueWidth() * headDim; }
};

// Mamba 2 (Dao and Gu, 2024): a matrix per head takes the place of a cache. core/rules/mamba.h has the equations.
struct MambaSpec {
    int32_t heads = 0, groups = 0;  // head h reads B and C of group h / (heads / groups)
    int32_t headDim = 0, stateDim = 0;
    int32_t convWidth = 0;  // inputs that the convolution sees, the present one included
    MatrixId gate, mixed, steps, output;
    VectorId conv;                  // transposed: [convWidth, channels], over x, B and C
    VectorId convBias;              // [channels]; may be absent
    VectorId stepBias, rate, skip;  // [heads]; rate is negative
    VectorId norm;                  // [width], of each group by itself; may be absent
    int64_t width() const { return int64_t{heads} * headDim; }
    int64_t channels() const { return width() + 2 * int64_t{groups} * stateDim; }
    // The state of a sequence, in floats: the convolution's last inputs, and each head's matrix.
    int64_t convState() const { return (convWidth - 1) * channels(); }
    int64_t matrixState() const { return width() * stateDim; }
};

// A part without a gate has no `up`: its first matrix, which files call ffn_up, is `gate`, since the activation is
// taken of its product (core/rules/activation.h). Experts and shared experts are alike in this.
struct DenseFfnSpec {
    int64_t hidden = 0;
    MatrixId gate, up, down;
    VectorId gateBias, upBias, downBias;  // may be absent
    Activation activation;
};

// An expert that every token goes through, times sigmoid(scale . x).
struct SharedExpertSpec {
    int64_t hidden = 0;
    Activation activation;
    VectorId scale;  // absent: times 1
    MatrixId gate, up, down;
};

// The `used` best scores, each with the choice bias added, are kept (ties: the lower index). Weights are the scores
// without that bias: renormalized or not, times weightScale, times the expert's outputScale. With a table of choices,
// each token has its experts whatever the scores are.
struct RoutingSpec {
    int32_t count = 0, used = 0;
    Gating gating = Gating::Softmax;
    // The `groupsUsed` groups of experts whose two best biased scores have the largest sums stay; 1 group: all do.
    int32_t groups = 1, groupsUsed = 1;
    bool renormalize = true;
    float weightScale = 1.0f;
    bool weightsInput = false;  // the weight multiplies the expert's input, not its output
    MatrixId router;
    VectorId bias;          // [count], of the logits; may be absent
    VectorId tokenChoices;  // [vocab, used]: each token's experts; may be absent
    VectorId choiceBias;    // [count], of the scores, for the choice alone; may be absent
    VectorId outputScale;   // [count]; may be absent
};

// With latents, experts read a row of lower rank and give one; the router and the shared expert read the whole row:
// latentUp(experts(latentDown n)) + shared(n).
struct ExpertFfnSpec {
    int32_t expertLayer = 0;  // this layer's number among those with experts
    int64_t hidden = 0;
    MatrixId latentDown, latentUp;  // [embedding, rank], [rank, embedding]; absent: experts read the whole row
    RoutingSpec routing;
    Activation activation;
    StackId gate, up, down;
    VectorId gateBias, upBias, downBias;  // [count, hidden], [count, hidden], [count, embedding]; may be absent
    std::optional<SharedExpertSpec> shared;
};

// The norms around a dense part and experts that stand side by side: x += ffnPostNorm(denseOut(dense(ffnNorm x)) +
// expertOut(experts(expertIn x))). The router reads routerIn(x).
struct ParallelNorms {
    VectorId denseOut, routerIn, expertIn, expertOut;
};

// A layer's part of the per-layer embeddings: x += norm(projection(gelu(gate x) * u)), where u is the layer's row.
struct LayerInputSpec {
    MatrixId gate, projection;
    VectorId norm;
};

// How a part of a layer reads the streams of hyper-connections and how its answer joins them. m = fn(rms(all streams)),
// three runs of numbers: sigmoid(scale[0] * m + base) + epsilon weighs streams into the part's input, 2 *
// sigmoid(scale[1] * m + base) weighs the answer into each stream, and from the rest Sinkhorn's iterations make the
// matrix that mixes the streams. core/rules/streams.h has the order.
struct StreamMixSpec {
    MatrixId fn;  // [streams * embedding, streams * (2 + streams)]; at the model's end [.., streams]
    VectorId base, scale;
    explicit operator bool() const { return bool(fn); }
};

// The residual stream is `count` streams: hyper-connections (Zhu et al., 2024).
struct StreamsSpec {
    int32_t count = 0, iterations = 0;
    float epsilon = 0;
    StreamMixSpec end;  // weighs the streams into what the output head reads
};

struct LayerSpec {
    StreamMixSpec mixerStreams, ffnStreams;  // if the model has streams
    VectorId mixerNorm, ffnNorm;             // absent: the part reads x as it is
    VectorId mixerNormBias, ffnNormBias;     // of NormKind::Layer; may be absent
    VectorId mixerPostNorm, ffnPostNorm;     // of what a part adds to x; may be absent
    bool oneNorm = false;                    // the feed-forward part reads what the mixer reads; there is no ffnNorm
    // The mixer: at most one of the three, or attention and Mamba 2 side by side, each of which reads the mixer's norm
    // and adds to x. A layer may lack the mixer, or the feed-forward part, but not both.
    std::optional<AttentionSpec> attention;
    std::optional<GatedDeltaSpec> delta;
    std::optional<MambaSpec> mamba;
    // The feed-forward part: at most one of the two, unless there are parallel norms.
    std::optional<DenseFfnSpec> dense;
    std::optional<ExpertFfnSpec> experts;
    std::optional<ParallelNorms> parallel;
    std::optional<LayerInputSpec> layerInput;
    VectorId outputScale;  // [1]: the layer's last step is x *= outputScale; may be absent
    bool recurrent() const { return delta || mamba; }
};

// A layer that guesses the token after the next (multi-token prediction). Its input joins embeddingNorm(embedding of
// the next token) and hiddenNorm(the row that the output head reads); `projection` maps both to the model's width. The
// layer's output goes through headNorm to the output head. A further guess continues from that normalized row.
struct PredictionSpec {
    LayerSpec layer;
    MatrixId projection;  // [embedding, 2 * embedding]
    VectorId norms;       // [2, embedding]: embeddingNorm, then hiddenNorm
    VectorId headNorm;    // the model's if the layer has none
    MatrixId embedding;   // the model's if the layer has none
};

// Each token has a row of `width` floats for each layer. Layer l's, from the token and from its scaled embedding x:
// u = (norm((projection x)_l / sqrt(embedding)) + sqrt(width) * (the table's row)_l) / sqrt(2).
struct LayerInputsSpec {
    int64_t width = 0;
    MatrixId table;  // [layers * width, vocab]
    MatrixId projection;
    VectorId norm;  // [width]
};

struct ModelSpec {
    std::string architecture;  // for people to read
    std::string name;
    int64_t vocabSize = 0, contextLength = 0, embedding = 0;
    NormKind norm = NormKind::Rms;  // of what layers and the output head read; all other norms are RMS norms
    float normEpsilon = -1;
    float embeddingScale = 1.0f;
    float residualScale = 1.0f;         // of what each part adds to x
    float logitScale = 1.0f;            // of logits, before their cap
    float logitSoftcap = 0;             // logits become softcap * tanh(logit / softcap); 0: they stay
    std::vector<ListedWeight> weights;  // part by part, each in the order of use
    std::vector<RopeSpec> ropes;
    std::vector<QueryScaleSpec> queryScales;
    std::optional<LayerInputsSpec> layerInputs;
    std::optional<StreamsSpec> streams;
    MatrixId tokenEmbedding, output;
    VectorId outputNorm, outputNormBias;  // the bias: of NormKind::Layer; may be absent
    std::vector<LayerSpec> layers;
    // At most one is run. If a file has several, it is the first; it is none if that one has an output head of its own,
    // which would take as much memory as the model's. A prediction layer that is not run is not loaded, and neither is
    // a copy of the model's output head.
    std::vector<PredictionSpec> predictions;

    // Throws Error(BadModel): unknown architecture, missing or ill-shaped tensors, tensors without a use.
    static ModelSpec read(const Metadata& metadata, const TensorTable& tensors);
    // The same model without its prediction layer: neither planned nor loaded.
    void dropPredictions();

    // Whether what the layer's parts give is changed before it is added to x.
    bool partsApart(const LayerSpec& layer) const {
        return streams || layer.mixerPostNorm || layer.ffnPostNorm || layer.outputScale || residualScale != 1.0f;
    }
    int64_t parameters(const TensorTable& tensors) const;
    // All layers whose weights are loaded, in the order of use: the prediction layer is the last.
    std::vector<const LayerSpec*> loadedLayers() const;
    // The compressors of all layers, which have two caches each behind those of the loaded layers.
    std::vector<const CompressorSpec*> compressors() const;
    size_t extraCache(int32_t number) const { return layers.size() + predictions.size() + static_cast<size_t>(number); }
};

// The names that ModelSpec::read knows, in alphabetical order.
std::vector<std::string> knownArchitectures();

}  // namespace sharpi
