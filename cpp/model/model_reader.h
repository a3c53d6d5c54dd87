// What an architecture's reader works with: it reads metadata below the architecture's name, lists tensors, and appends
// layers made of known parts. Each part lists its weights in the order of use; that is the order in which they are
// loaded and streamed.
//
// All methods throw Error(BadModel) naming the key or the tensor.
#pragma once

#include <functional>
#include <string>

#include "model/model_spec.h"
#include "model/tensor_finder.h"

namespace sharpi {

class LayerReader;

struct AttentionParts {
    int32_t rope = -1;  // from ModelReader::rope(); -1: positions are not embedded
    AttentionSpec::QkNorm qkNorm = AttentionSpec::QkNorm::None;
    bool gated = false;
};

struct ExpertParts {
    bool renormalized = true;  // unless the key expert_weights_norm says otherwise
    bool shared = false;       // each layer has a shared expert with a scale
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

    // The file holds `rope.*` keys and perhaps rope_freqs. Returns the index for AttentionSpec::rope.
    int32_t rope(RopeSpec::Pairing pairing);
    // The next layer, 0 first.
    LayerReader layer();
    // All layers and the output head of a model whose layers are alike: attn_norm, attention, ffn_norm, and a dense
    // part or experts.
    void uniformLayers(const AttentionParts& attention, const ExpertParts& experts);
    // The file may hold prediction layers behind the model's layers. To be called before the first layer.
    void countPredictions();
    // After the model's layers: the output head, by its usual names.
    void head();
    // After the head: the next prediction layer, whose parts `read` describes.
    void prediction(const std::function<void(LayerReader& layer)>& read);

    // Checks that every tensor has a use.
    ModelSpec finish();

private:
    friend class LayerReader;
    int32_t add(std::vector<WeightSlice> slices, WeightRole role, WeightForm form, double share = 1.0);
    MatrixId matrix(const WeightSlice& slice, WeightRole role) { return {add({slice}, role, WeightForm::Matrix)}; }
    VectorId vector(const WeightSlice& slice);  // an absent one has no entry
    int32_t headDim() const;

    const Metadata& _metadata;
    TensorFinder _tensors;
    ModelSpec _spec;
    int64_t _blocks = 0, _predictions = 0, _read = 0;
    int32_t _expertLayers = 0;
    ModelPart _part = ModelPart::Body;  // of what is listed next
    int32_t _layer = -1;
};

// One layer. Its parts are to be read in the order of use: mixerNorm, a mixer, ffnNorm, a feed-forward part.
class LayerReader {
public:
    // Names are those behind "blk.N.", without ".weight".
    LayerReader& mixerNorm(const std::string& name);
    LayerReader& attention(const AttentionParts& parts);
    LayerReader& gatedDelta();
    LayerReader& ffnNorm(const std::string& name);
    LayerReader& dense();
    LayerReader& experts(const ExpertParts& parts);
    // A tensor that files may hold in the layer and that running the model does not need. The whole name behind
    // "blk.N.".
    LayerReader& unused(const std::string& name);

private:
    friend class ModelReader;
    LayerReader(ModelReader& model, LayerSpec& layer, int64_t index)
        : _model(model), _layer(layer), _block("blk." + std::to_string(index) + ".") {}
    VectorId norm(const std::string& name, int64_t size);
    void readQkv(AttentionSpec& a);
    void readBiases(AttentionSpec& a);
    void sharedExpert(ExpertFfnSpec& f);

    ModelReader& _model;
    LayerSpec& _layer;
    std::string _block;
};

}  // namespace sharpi
