// What an architecture's reader works with: it reads metadata below the architecture's name, lists tensors, and appends
// layers made of known parts. Each part lists its weights in the order of use; that is the order in which they are
// loaded and streamed.
//
// All methods throw Error(BadModel) naming the key or the tensor.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "model/model_spec.h"
#include "model/tensor_finder.h"

namespace sharpi {

class GroupedReader;
class LayerReader;

// The members of AttentionSpec that no tensor and no usual key gives.
struct AttentionParts {
    int32_t rope = -1;  // from ModelReader::rope(); -1: positions are not embedded
    AttentionSpec::QkNorm qkNorm = AttentionSpec::QkNorm::None;
    bool normWeights = true;     // queries' and keys' norms have weights
    bool normsOptional = false;  // a layer without these weights normalizes neither
    bool normAfterRotation = false;
    bool valueNorm = false;
    bool gated = false;
    bool windowed = false;       // the keys of a head's size may end in _swa
    bool keysAreValues = false;  // if there is no attn_v
    bool sinks = false;
    int32_t kvLayer = -1;
    AttentionReach reach;
    std::optional<double> scale;  // in place of 1 / sqrt(head size)
    float softcap = 0;
    int32_t queryScale = -1;  // from ModelReader::queryScale()
};

struct RopeParts {
    RopeSpec::Pairing pairing = RopeSpec::Pairing::Halves;
    bool windowed = false;   // the keys of these layers may end in _swa
    bool last = false;       // the last elements of a head are rotated
    bool scaled = true;      // as the keys rope.scaling.* say
    bool factors = true;     // the file may have rope_freqs for these layers
    bool fileBetas = false;  // the file's yarn_beta_* are used; usually they are 32 and 1 whatever it says
    double base = 10000.0;   // if no key says it
    std::string baseKey = "rope.freq_base";  // on layers without a window
    std::optional<double> magnitude;         // in place of what the keys make of it
    std::optional<double> windowedBase;      // if freq_base_swa is not there; absent: as freq_base says
};

struct DenseParts {
    Activation activation;
    bool gated = true;
    bool fused = false;  // ffn_up holds gate and up
};

struct MambaParts {
    bool normOptional = false;  // a layer without ssm_norm does not normalize what its heads give
};

struct ExpertParts {
    Gating gating = Gating::Softmax;  // unless the key expert_gating_func says otherwise
    bool renormalized = true;         // unless the key expert_weights_norm says otherwise
    bool weightsInput = false;
    enum class Shared { None, Scaled, Plain };
    Shared shared = Shared::None;  // Scaled: times sigmoid(ffn_gate_inp_shexp . x)
    Activation activation;
    std::optional<Activation> sharedActivation;  // of the shared expert, if it is another
    bool gated = true;                           // the shared expert too
    bool choicesByToken = false;                 // ffn_gate_tid2eid names each token's experts
    int64_t latents = 0;                         // elements of the rows that experts read; 0: they read whole ones
};

class ModelReader {
public:
    // Reads what every model has: its name, width, context, vocabulary and token embedding.
    ModelReader(const Metadata& metadata, const TensorTable& tensors);

    // Keys are given without the architecture's name.
    std::string key(const std::string& rest) const { return _spec.architecture + "." + rest; }
    const Metadata& metadata() const { return _metadata; }
    // Layers of the model, and prediction layers behind them in the file.
    int64_t layers() const { return _blocks - _predictions; }
    int64_t predictions() const { return _predictions; }
    bool hasExperts() const;
    void requireExperts() const;

    // Returns the index for AttentionSpec::rope.
    int32_t rope(const RopeParts& parts);
    int32_t rope(RopeSpec::Pairing pairing);
    // Returns the index for AttentionSpec::queryScale.
    int32_t queryScale(const QueryScaleSpec& scale);
    // Embeddings are multiplied by the root of the model's width, and logits capped by the key final_logit_softcapping.
    void scaleEnds();
    // What layers and the output head read goes through LayerNorm. To be called before the first layer.
    void layerNorms();
    // The factors of embeddings, of what parts add to x, and of logits, if the keys embedding_scale, residual_scale and
    // logit_scale say them. The last one multiplies logits or divides them.
    enum class LogitScale { Multiplies, Divides };
    void scales(LogitScale logits);
    // The tables of per-layer embeddings, if embedding_length_per_layer_input is above 0.
    void layerInputs();
    // As far as it has been read.
    const ModelSpec& spec() const { return _spec; }
    // The next layer, 0 first.
    LayerReader layer();
    // All layers and the output head of a model whose layers are alike: attn_norm, attention, ffn_norm, and a dense
    // part or experts.
    void uniformLayers(const AttentionParts& attention, const ExpertParts& experts, const DenseParts& dense = {});
    // The file may hold prediction layers behind the model's layers; metadata may count some that it does not hold. To
    // be called before the first layer.
    void countPredictions();
    // After the model's layers: the output head, by its usual names.
    void head();
    // After the head: the next prediction layer, whose parts `read` describes. An output head that the file has for it
    // is its own, or a copy of the model's, which is used in its place.
    enum class DraftHead { Own, Copy };
    void prediction(DraftHead head, const std::function<void(LayerReader& layer)>& read);

    // Checks that every tensor has a use.
    ModelSpec finish();

private:
    friend class GroupedReader;
    friend class LayerReader;
    int32_t add(std::vector<WeightSlice> slices, WeightRole role, WeightForm form, double share = 1.0);
    MatrixId matrix(const WeightSlice& slice, WeightRole role) { return {add({slice}, role, WeightForm::Matrix)}; }
    VectorId vector(const WeightSlice& slice, double factor = 1.0);  // an absent one has no entry
    // Of layer `layer`, if the file has a number for each.
    int32_t headDim(bool windowed, size_t layer) const;

    const Metadata& _metadata;
    TensorFinder _tensors;
    ModelSpec _spec;
    int64_t _blocks = 0, _predictions = 0, _read = 0;
    int32_t _expertLayers = 0;
    ModelPart _part = ModelPart::Body;  // of what is listed next
    int32_t _layer = -1;
};

// In models whose layers differ in this: whether the layer has attention. Throws Error(BadModel).
bool hasKvHeads(const ModelReader& model, int64_t layer);

// One layer. Its parts are to be read in the order of use: mixerNorm, the mixer, ffnNorm, a feed-forward part. Without
// a norm, a part reads x as it is. A layer may lack the mixer or the feed-forward part.
class LayerReader {
public:
    // Names are those behind "blk.N.", without ".weight".
    LayerReader& mixerNorm(const std::string& name);
    LayerReader& attention(const AttentionParts& parts);
    // By the keys *_mla, or without that ending in files from before mid-2025. Queries, keys and values have the names
    // that DeepSeek V3's files give them.
    LayerReader& latentAttention(const AttentionParts& parts);
    LayerReader& gatedDelta(bool fusedSteps = false);
    // After attention(): beside it.
    LayerReader& mamba(const MambaParts& parts = {});
    LayerReader& mixerPostNorm(const std::string& name);
    // ending: of the tensor's name.
    LayerReader& ffnNorm(const std::string& name, const std::string& ending = ".weight");
    // In place of ffnNorm: the feed-forward part reads what the mixer reads.
    LayerReader& oneNorm();
    LayerReader& dense(const DenseParts& parts = {});
    LayerReader& experts(const ExpertParts& parts);
    LayerReader& ffnPostNorm(const std::string& name);
    // The norms of a dense part and experts side by side. The router's has the factor 1 / sqrt(embedding).
    LayerReader& parallelNorms(const std::string& denseOut, const std::string& routerIn, const std::string& expertIn,
                               const std::string& expertOut);
    // This layer's part of the per-layer embeddings, if the model has them.
    LayerReader& layerInput();
    // x *= the tensor, if there is one.
    LayerReader& outputScale(const std::string& name);
    // A tensor that files may hold in the layer and that running the model does not need. The whole name behind
    // "blk.N.".
    LayerReader& unused(const std::string& name);

private:
    friend class GroupedReader;
    friend class ModelReader;
    LayerReader(ModelReader& model, LayerSpec& layer, int64_t index)
        : _model(model),
          _layer(layer),
          _index(static_cast<size_t>(index)),
          _block("blk." + std::to_string(index) + ".") {}
    VectorId norm(const std::string& name, int64_t size, const std::string& ending = ".weight");
    void readShape(AttentionSpec& a, const AttentionParts& parts);
    void readQkv(AttentionSpec& a, const AttentionParts& parts);
    void readBiases(AttentionSpec& a);
    void readRouting(RoutingSpec& r, const ExpertParts& parts);
    VectorId floats(const std::string& name, const std::vector<int64_t>& shape);
    void readStacks(ExpertFfnSpec& f, const ExpertParts& parts);
    void readStackBiases(ExpertFfnSpec& f, int64_t width, bool gated);
    void sharedExpert(ExpertFfnSpec& f, const ExpertParts& parts);

    ModelReader& _model;
    LayerSpec& _layer;
    size_t _index;  // of its block in the file, and of its numbers in arrays of metadata
    std::string _block;
};

}  // namespace sharpi
