// See model_reader.h. What every model has; the parts of layers are in layer_reader.cpp.
#include "model/model_reader.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "model/reading_limits.h"

namespace sharpi {

namespace {

[[noreturn]] void bad(const std::string& what) { throw Error(ErrorKind::BadModel, what); }

// The scaling keys say how positions beyond the original context are embedded.
void readScaling(RopeSpec& rope, const Metadata& md, const std::string& prefix, bool fileBetas) {
    const std::string scaling = prefix + "scaling.";
    rope.magnitude = md.numberOr(scaling + "attn_factor", 1.0);
    const double factor = md.numberOr(scaling + "factor", md.numberOr(prefix + "scale_linear", 1.0));
    if (factor <= 0) bad("metadata key '" + scaling + "factor' must be positive");
    const std::string type = md.textOr(scaling + "type", factor != 1.0 ? "linear" : "none");
    if (type == "none" || type == "longrope") return;  // longrope's factors are tensors
    if (type != "linear" && type != "yarn")
        bad("metadata key '" + scaling + "type' is '" + type + "': known are none, linear, yarn and longrope");
    rope.frequencyScale = 1.0 / factor;
    if (type == "linear") return;
    rope.extrapolation = md.numberOr(scaling + "yarn_ext_factor", 1.0);
    if (fileBetas) {
        rope.betaFast = md.numberOr(scaling + "yarn_beta_fast", rope.betaFast);
        rope.betaSlow = md.numberOr(scaling + "yarn_beta_slow", rope.betaSlow);
    }
    if (rope.betaFast <= 0 || rope.betaSlow <= 0) bad("metadata keys '" + scaling + "yarn_beta_*' must be positive");
    // A file with this multiplier has the factor elsewhere: in the scale of its scores, if anywhere.
    const bool elsewhere = md.has(scaling + "yarn_log_multiplier");
    if (rope.extrapolation != 0 && !elsewhere) rope.magnitude *= 1.0 + 0.1 * std::log(factor);
}

constexpr const char* kRmsEpsilon = "attention.layer_norm_rms_epsilon";
constexpr const char* kLayerEpsilon = "attention.layer_norm_epsilon";

float readEpsilon(const Metadata& md, const std::string& key) {
    const auto epsilon = static_cast<float>(md.number(key));
    if (!(epsilon >= 0 && epsilon < 1)) bad("metadata key '" + key + "' is outside 0 to 1");
    return epsilon;
}

// Whether attention and Mamba 2 can stand side by side in the layer: both read one norm, and x takes both as they are.
bool sideBySide(const LayerSpec& layer, const ModelSpec& spec) {
    const bool plain = layer.attention && !layer.attention->latent && !layer.attention->outputDown;
    return plain && layer.mamba && layer.mixerNorm && !layer.oneNorm && !layer.mixerPostNorm && !spec.streams;
}

// Writers store 0 for "not scaled".
float readScale(const Metadata& md, const std::string& key) {
    const double scale = md.numberOr(key, 0.0);
    if (!std::isfinite(scale)) bad("metadata key '" + key + "' is not a number");
    return scale == 0 ? 1.0f : static_cast<float>(scale);
}

}  // namespace

ModelReader::ModelReader(const Metadata& metadata, const TensorTable& tensors)
    : _metadata(metadata), _tensors(tensors) {
    _spec.architecture = metadata.text("general.architecture");
    _spec.name = metadata.textOr("general.name", _spec.architecture);
    _spec.contextLength = metadata.integer(key("context_length"), 1, kMaxContext);
    _spec.embedding = metadata.integer(key("embedding_length"), 1, kMaxWidth);
    // A file without RMS norms has the other key alone: see layerNorms().
    if (metadata.has(key(kRmsEpsilon)) || !metadata.has(key(kLayerEpsilon)))
        _spec.normEpsilon = readEpsilon(metadata, key(kRmsEpsilon));
    _blocks = metadata.integer(key("block_count"), 1, 4096);
    _spec.layers.reserve(static_cast<size_t>(_blocks));  // readers of layers point to them
    const TensorInfo* embedding = tensors.find("token_embd.weight");
    if (!embedding || embedding->shape.size() < 2) bad("tensor 'token_embd.weight' is missing or not a matrix");
    _spec.vocabSize = embedding->shape[1];
    if (_spec.vocabSize > kMaxDim) bad("tensor 'token_embd.weight' has too many rows");
    const WeightSlice table = _tensors.required("token_embd.weight", {_spec.embedding, _spec.vocabSize});
    _spec.tokenEmbedding = {
        add({table}, WeightRole::Embedding, WeightForm::Table, 1.0 / static_cast<double>(_spec.vocabSize))};
}

void ModelReader::layerNorms() {
    _spec.norm = NormKind::Layer;
    _spec.normEpsilon = readEpsilon(_metadata, key(kLayerEpsilon));
}

int32_t ModelReader::add(std::vector<WeightSlice> slices, WeightRole role, WeightForm form, double share) {
    ListedWeight weight;
    weight.slices = std::move(slices);
    weight.role = role;
    weight.form = form;
    weight.part = _part;
    weight.layer = _layer;
    weight.share = share;
    weight.unit = static_cast<int32_t>(_spec.weights.size());
    _spec.weights.push_back(std::move(weight));
    return _spec.weights.back().unit;
}

VectorId ModelReader::vector(const WeightSlice& slice, double factor) {
    if (!slice) return {};
    const VectorId id{add({slice}, WeightRole::Vector, WeightForm::Vector)};
    _spec.weights.back().factor = factor;
    return id;
}

bool ModelReader::hasExperts() const { return _metadata.integerOr(key("expert_count"), 0, 65536, 0) > 0; }

bool hasKvHeads(const ModelReader& model, int64_t layer) {
    const std::string key = model.key("attention.head_count_kv");
    return model.metadata().integerAt(key, static_cast<size_t>(layer), 0, 65536) > 0;
}

void ModelReader::requireExperts() const {
    if (!hasExperts()) bad("metadata key '" + key("expert_count") + "' is missing");
}

void ModelReader::countPredictions() {
    _predictions = _metadata.integerOr(key("nextn_predict_layers"), 0, _blocks - 1, 0);
    const auto block = [](int64_t number) { return "blk." + std::to_string(number) + "."; };
    for (int64_t i = layers(); i < _blocks; ++i)
        if (_tensors.hasAny(block(i) + "nextn.")) return;
    // Writers that leave these layers out may count them still. Without their own tensors they draft nothing.
    for (int64_t i = layers(); i < _blocks; ++i) _tensors.unusedAll(block(i));
    _blocks = layers();
    _predictions = 0;
}

// The size of a head, from the keys of attention.
int32_t ModelReader::headDim(bool windowed, size_t layer) const {
    const int64_t heads = _metadata.integerAt(key("attention.head_count"), layer, 1, 65536);
    std::string length = key("attention.key_length");
    if (windowed && _metadata.has(length + "_swa")) length += "_swa";
    if (!_metadata.has(length) && _spec.embedding % heads)
        bad("metadata key '" + length + "' is missing, and the width is no multiple of the head count");
    const int64_t dim = _metadata.integerOr(length, 2, 4096, _spec.embedding / heads);
    if (dim % 2) bad("metadata key '" + length + "' is odd");
    return static_cast<int32_t>(dim);
}

int32_t ModelReader::rope(RopeSpec::Pairing pairing) {
    RopeParts parts;
    parts.pairing = pairing;
    return rope(parts);
}

int32_t ModelReader::rope(const RopeParts& parts) {
    const std::string prefix = key("rope.");
    const auto named = [&](const std::string& name) {
        return prefix + name + (parts.windowed && _metadata.has(prefix + name + "_swa") ? "_swa" : "");
    };
    RopeSpec rope;
    rope.pairing = parts.pairing;
    const int64_t dim = headDim(parts.windowed, 0);
    rope.last = parts.last;
    const std::string count = named("dimension_count");
    const std::string base = parts.windowed ? named("freq_base") : key(parts.baseKey);
    rope.dims = static_cast<int32_t>(_metadata.integerOr(count, 2, dim, dim));
    if (rope.dims % 2) bad("metadata key '" + count + "' is odd: rotary embedding works on pairs");
    rope.base = _metadata.numberOr(base, parts.base);
    if (parts.windowed && parts.windowedBase && !_metadata.has(prefix + "freq_base_swa"))
        rope.base = *parts.windowedBase;
    if (rope.base <= 1.0) bad("metadata key '" + base + "' must be above 1");
    rope.originalContext =
        _metadata.integerOr(prefix + "scaling.original_context_length", 1, kMaxDim, _spec.contextLength);
    if (parts.scaled) readScaling(rope, _metadata, prefix, parts.fileBetas);
    if (parts.magnitude) rope.magnitude = *parts.magnitude;
    const auto factors = [&](const std::string& name) -> VectorId {
        const WeightSlice slice = _tensors.optionalFloats(name, {rope.dims / 2});
        return slice ? VectorId{add({slice}, WeightRole::Vector, WeightForm::Parameters)} : VectorId();
    };
    if (parts.factors) {
        rope.factors = factors("rope_freqs.weight");
        if (!rope.factors) rope.factors = factors("rope_factors_short.weight");
        rope.longFactors = factors("rope_factors_long.weight");
    }
    _spec.ropes.push_back(rope);
    return static_cast<int32_t>(_spec.ropes.size()) - 1;
}

int32_t ModelReader::queryScale(const QueryScaleSpec& scale) {
    _spec.queryScales.push_back(scale);
    return static_cast<int32_t>(_spec.queryScales.size()) - 1;
}

void ModelReader::scaleEnds() {
    _spec.embeddingScale = static_cast<float>(std::sqrt(static_cast<double>(_spec.embedding)));
    _spec.logitSoftcap = static_cast<float>(_metadata.numberOr(key("final_logit_softcapping"), 0.0));
}

void ModelReader::scales(LogitScale logits) {
    _spec.embeddingScale = readScale(_metadata, key("embedding_scale"));
    _spec.residualScale = readScale(_metadata, key("residual_scale"));
    _spec.logitScale = readScale(_metadata, key("logit_scale"));
    if (logits == LogitScale::Divides) _spec.logitScale = 1.0f / _spec.logitScale;
}

void ModelReader::layerInputs() {
    const int64_t width = _metadata.integerOr(key("embedding_length_per_layer_input"), 0, kMaxWidth, 0);
    if (width == 0) return;
    const int64_t all = width * layers();
    LayerInputsSpec inputs;
    inputs.width = width;
    inputs.projection =
        matrix(_tensors.required("per_layer_model_proj.weight", {_spec.embedding, all}), WeightRole::Attention);
    inputs.norm = vector(_tensors.requiredFloats("per_layer_proj_norm.weight", {width}));
    const WeightSlice table = _tensors.required("per_layer_token_embd.weight", {all, _spec.vocabSize});
    inputs.table = {
        add({table}, WeightRole::LayerEmbedding, WeightForm::Table, 1.0 / static_cast<double>(_spec.vocabSize))};
    _spec.layerInputs = inputs;
}

LayerReader ModelReader::layer() {
    _layer = static_cast<int32_t>(_read);
    _spec.layers.emplace_back();
    return LayerReader(*this, _spec.layers.back(), _read++);
}

void ModelReader::uniformLayers(const AttentionParts& attention, const ExpertParts& experts, const DenseParts& dense) {
    const bool mixture = hasExperts();
    for (int64_t i = 0; i < layers(); ++i) {
        LayerReader next = layer();
        next.mixerNorm("attn_norm").attention(attention).ffnNorm("ffn_norm");
        if (mixture) next.experts(experts);
        else next.dense(dense);
    }
    head();
}

void ModelReader::head() {
    _part = ModelPart::Head;
    _layer = -1;
    _spec.outputNorm = vector(_tensors.requiredFloats("output_norm.weight", {_spec.embedding}));
    if (_spec.norm == NormKind::Layer)
        _spec.outputNormBias = vector(_tensors.optionalFloats("output_norm.bias", {_spec.embedding}));
    if (const WeightSlice output = _tensors.optional("output.weight", {_spec.embedding, _spec.vocabSize})) {
        _spec.output = matrix(output, WeightRole::Head);
        return;
    }
    const int32_t table = _spec.tokenEmbedding.index;
    _spec.output = matrix(_spec.weights[static_cast<size_t>(table)].slice(), WeightRole::Head);
    _spec.weights.back().sameAs = table;
}

void ModelReader::prediction(DraftHead head, const std::function<void(LayerReader&)>& read) {
    const ModelSpec without = _spec;
    const int32_t expertLayers = _expertLayers;
    const int64_t width = _spec.embedding;
    const std::string block = "blk." + std::to_string(_read) + ".nextn.";
    _part = ModelPart::Prediction;
    _layer = static_cast<int32_t>(layers());
    PredictionSpec p;
    p.embedding = _spec.tokenEmbedding;
    if (const WeightSlice own = _tensors.optional(block + "embed_tokens.weight", {width, _spec.vocabSize})) {
        const double share = 1.0 / static_cast<double>(_spec.vocabSize);
        p.embedding = {add({own}, WeightRole::Embedding, WeightForm::Table, share)};
    }
    const WeightSlice ofToken = _tensors.requiredFloats(block + "enorm.weight", {width});
    const WeightSlice ofHidden = _tensors.requiredFloats(block + "hnorm.weight", {width});
    p.norms = {add({ofToken, ofHidden}, WeightRole::Vector, WeightForm::Vector)};
    p.projection = matrix(_tensors.required(block + "eh_proj.weight", {2 * width, width}), WeightRole::Attention);
    LayerReader reader(*this, p.layer, _read++);
    read(reader);
    p.headNorm = vector(_tensors.optionalFloats(block + "shared_head_norm.weight", {width}));
    if (!p.headNorm) p.headNorm = _spec.outputNorm;
    const WeightSlice found = _tensors.optional(block + "shared_head_head.weight", {width, _spec.vocabSize});
    const bool ownHead = found && head == DraftHead::Own;
    // Later ones continue from one another, each for one further token.
    if (!ownHead && _read == layers() + 1) {
        _spec.predictions.push_back(p);
        return;
    }
    _spec = without;  // its tensors are known, and stay in the file
    _expertLayers = expertLayers;
}

ModelSpec ModelReader::finish() {
    if (_read != _blocks || !_spec.output) {
        throw Error(ErrorKind::Internal, "the reader of '" + _spec.architecture + "' has read " +
                                             std::to_string(_read) + " of " + std::to_string(_blocks) +
                                             " layers, or no output head");
    }
    for (const LayerSpec* layer : _spec.loadedLayers()) {
        const int mixers = int{layer->attention.has_value()} + layer->delta.has_value() + layer->mamba.has_value();
        const bool paired = mixers == 2 && sideBySide(*layer, _spec);
        const bool latents = layer->experts && layer->experts->latentDown;
        const int feeds = int{layer->dense.has_value()} + layer->experts.has_value();
        const bool parallel = feeds == 2 && layer->parallel && layer->ffnPostNorm;
        const bool normed =
            !feeds || layer->ffnNorm || (layer->dense && !layer->experts && (!layer->oneNorm || layer->mixerNorm));
        const bool alone = !latents || (feeds == 1 && !_spec.partsApart(*layer));
        if ((mixers > 1 && !paired) || (feeds > 1 && !parallel) || mixers + feeds == 0 || !normed || !alone) {
            throw Error(ErrorKind::Internal,
                        "the reader of '" + _spec.architecture +
                            "' has made a layer with two mixers or two feed-forward parts, without any, without a "
                            "norm, or with latents that are not added to x as they are");
        }
    }
    if (_spec.normEpsilon < 0) _spec.normEpsilon = readEpsilon(_metadata, key(kRmsEpsilon));
    _tensors.requireAllUsed(_spec.architecture);
    return std::move(_spec);
}

}  // namespace sharpi
