// Reads a ModelSpec off metadata and tensor table. The only place that knows tensors by name.
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "model/architecture.h"

namespace sharpi {

namespace {

constexpr int64_t kMaxDim = int64_t{1} << 31;
// Far beyond any model, and small enough that no product of them overflows when memory is counted.
constexpr int64_t kMaxContext = int64_t{1} << 27, kMaxWidth = int64_t{1} << 20, kMaxHidden = int64_t{1} << 24;

[[noreturn]] void bad(const std::string& what) { throw Error(ErrorKind::BadModel, what); }

// Finds tensors, checks their shapes and remembers which were used.
class Finder {
public:
    explicit Finder(const TensorTable& tensors) : _tensors(tensors), _used(tensors.all().size(), false) {}

    // shape: innermost first. An absent tensor gives an empty slice.
    WeightSlice optional(const std::string& name, const std::vector<int64_t>& shape) {
        const TensorInfo* t = _tensors.find(name);
        if (!t) return {};
        if (withoutTrailingOnes(t->shape) != withoutTrailingOnes(shape))
            bad("tensor '" + name + "' has shape " + show(t->shape) + ", expected " + show(shape));
        WeightSlice slice;
        slice.tensor = static_cast<int32_t>(t - _tensors.all().data());
        slice.cols = shape[0];
        slice.rows = shape.size() > 1 ? shape[1] : 1;
        slice.experts = shape.size() > 2 ? shape[2] : 1;
        slice.expertStride = slice.rows;
        _used[slice.tensor] = true;
        return slice;
    }

    WeightSlice required(const std::string& name, const std::vector<int64_t>& shape) {
        WeightSlice slice = optional(name, shape);
        if (!slice) bad("tensor '" + name + "' is missing");
        return slice;
    }

    // Biases and norms are read as one float row.
    WeightSlice optionalVector(const std::string& name, int64_t n) { return vectorOnly(optional(name, {n}), name); }
    WeightSlice requiredVector(const std::string& name, int64_t n) { return requiredFloats(name, {n}); }
    WeightSlice requiredFloats(const std::string& name, const std::vector<int64_t>& shape) {
        return vectorOnly(required(name, shape), name);
    }

    bool has(const std::string& name) const { return _tensors.find(name) != nullptr; }
    const TensorInfo* find(const std::string& name) const { return _tensors.find(name); }
    void ignore(const std::string& name) {
        if (const TensorInfo* t = _tensors.find(name)) _used[t - _tensors.all().data()] = true;
    }

    void requireAllUsed(const std::string& architecture) const {
        for (size_t i = 0; i < _used.size(); ++i) {
            if (!_used[i]) {
                bad("tensor '" + _tensors.all()[i].name + "' has no place in the architecture '" + architecture +
                    "': running without it would give wrong answers");
            }
        }
    }

private:
    // Writers differ in whether they keep them: [n, 1] is a vector of n.
    static std::vector<int64_t> withoutTrailingOnes(std::vector<int64_t> shape) {
        while (shape.size() > 1 && shape.back() == 1) shape.pop_back();
        return shape;
    }
    static std::string show(const std::vector<int64_t>& shape) {
        std::string text = "[";
        for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
        return text + "]";
    }
    WeightSlice vectorOnly(WeightSlice slice, const std::string& name) const {
        if (slice && !info(_tensors.all()[slice.tensor].type).isFloat)
            bad("tensor '" + name + "' must be F32, F16 or BF16");
        return slice;
    }

    const TensorTable& _tensors;
    std::vector<bool> _used;
};

WeightSlice rowsOf(const WeightSlice& whole, int64_t begin, int64_t rows) {
    WeightSlice part = whole;
    part.rowBegin = begin;
    part.rows = rows;
    return part;
}

RopeSpec readRope(const Architecture& arch, const Metadata& md, Finder& tensors, int32_t headDim, int64_t context) {
    const std::string prefix = std::string(arch.name) + ".rope.";
    RopeSpec rope;
    rope.pairing = arch.pairing;
    rope.dims = static_cast<int32_t>(md.integerOr(prefix + "dimension_count", 2, headDim, headDim));
    if (rope.dims % 2) bad("metadata key '" + prefix + "dimension_count' is odd: rotary embedding works on pairs");
    rope.base = md.numberOr(prefix + "freq_base", 10000.0);
    if (rope.base <= 1.0) bad("metadata key '" + prefix + "freq_base' must be above 1");
    rope.originalContext = md.integerOr(prefix + "scaling.original_context_length", 1, kMaxDim, context);

    const std::string scaling = prefix + "scaling.";
    const double factor = md.numberOr(scaling + "factor", md.numberOr(prefix + "scale_linear", 1.0));
    if (factor <= 0) bad("metadata key '" + scaling + "factor' must be positive");
    const std::string type = md.textOr(scaling + "type", factor != 1.0 ? "linear" : "none");
    if (type == "linear" || type == "yarn") {
        rope.frequencyScale = 1.0 / factor;
    } else if (type != "none") {
        bad("metadata key '" + scaling + "type' is '" + type + "': known are none, linear and yarn");
    }
    if (type == "yarn") {
        rope.extrapolation = md.numberOr(scaling + "yarn_ext_factor", 1.0);
        rope.betaFast = md.numberOr(scaling + "yarn_beta_fast", 32.0);
        rope.betaSlow = md.numberOr(scaling + "yarn_beta_slow", 1.0);
        if (rope.betaFast <= 0 || rope.betaSlow <= 0)
            bad("metadata keys '" + scaling + "yarn_beta_*' must be positive");
        rope.magnitude = md.numberOr(scaling + "yarn_attn_factor", md.numberOr(scaling + "attn_factor", 1.0));
        if (rope.extrapolation != 0) rope.magnitude *= 1.0 + 0.1 * std::log(factor);
    }
    rope.factors = tensors.optionalVector("rope_freqs.weight", rope.dims / 2);
    return rope;
}

void readQkv(AttentionSpec& a, Finder& tensors, const std::string& block, int64_t embedding) {
    const int64_t qRows = int64_t{a.heads} * a.headDim * (a.gated ? 2 : 1), kvRows = int64_t{a.kvHeads} * a.headDim;
    if (tensors.has(block + "attn_qkv.weight")) {
        const WeightSlice fused = tensors.required(block + "attn_qkv.weight", {embedding, qRows + 2 * kvRows});
        a.q = rowsOf(fused, 0, qRows);
        a.k = rowsOf(fused, qRows, kvRows);
        a.v = rowsOf(fused, qRows + kvRows, kvRows);
        // A vector's parts are ranges of its columns.
        if (const WeightSlice bias = tensors.optionalVector(block + "attn_qkv.bias", qRows + 2 * kvRows)) {
            const auto part = [&](int64_t begin, int64_t n) {
                WeightSlice slice = bias;
                slice.rowBegin = begin;
                slice.cols = n;
                return slice;
            };
            a.qBias = part(0, qRows);
            a.kBias = part(qRows, kvRows);
            a.vBias = part(qRows + kvRows, kvRows);
        }
        return;
    }
    a.q = tensors.required(block + "attn_q.weight", {embedding, qRows});
    a.k = tensors.required(block + "attn_k.weight", {embedding, kvRows});
    a.v = tensors.required(block + "attn_v.weight", {embedding, kvRows});
    a.qBias = tensors.optionalVector(block + "attn_q.bias", qRows);
    a.kBias = tensors.optionalVector(block + "attn_k.bias", kvRows);
    a.vBias = tensors.optionalVector(block + "attn_v.bias", kvRows);
}

AttentionSpec readAttention(const Architecture& arch, const Metadata& md, Finder& tensors, const std::string& block,
                            int64_t embedding, int64_t context) {
    const std::string prefix = std::string(arch.name) + ".attention.";
    AttentionSpec a;
    a.heads = static_cast<int32_t>(md.integer(prefix + "head_count", 1, 65536));
    a.kvHeads = static_cast<int32_t>(md.integerOr(prefix + "head_count_kv", 1, a.heads, a.heads));
    if (a.heads % a.kvHeads) bad("metadata key '" + prefix + "head_count' is not a multiple of head_count_kv");
    if (!md.has(prefix + "key_length") && embedding % a.heads) {
        bad("metadata key '" + prefix + "key_length' is missing, and the width is no multiple of the head count");
    }
    a.headDim = static_cast<int32_t>(md.integerOr(prefix + "key_length", 2, 4096, embedding / a.heads));
    if (a.headDim % 2) bad("metadata key '" + prefix + "key_length' is odd");
    if (int64_t{a.heads} * a.headDim > kMaxWidth)
        bad("metadata keys '" + prefix + "head_count' and 'key_length' give an impossible width");
    if (md.integerOr(prefix + "value_length", 1, 4096, a.headDim) != a.headDim) {
        bad("keys and values of different lengths are not supported by this architecture");
    }
    a.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(a.headDim)));
    a.rope = readRope(arch, md, tensors, a.headDim, context);
    a.qkNorm = arch.qkNorm;
    a.gated = arch.hybrid;
    readQkv(a, tensors, block, embedding);
    const int64_t qRows = int64_t{a.heads} * a.headDim;
    a.output = tensors.required(block + "attn_output.weight", {qRows, embedding});
    a.outputBias = tensors.optionalVector(block + "attn_output.bias", embedding);
    if (a.qkNorm != AttentionSpec::QkNorm::None) {
        const bool perHead = a.qkNorm == AttentionSpec::QkNorm::PerHead;
        a.qNorm = tensors.requiredVector(block + "attn_q_norm.weight", perHead ? a.headDim : qRows);
        a.kNorm =
            tensors.requiredVector(block + "attn_k_norm.weight", perHead ? a.headDim : int64_t{a.kvHeads} * a.headDim);
    }
    return a;
}

GatedDeltaSpec readGatedDelta(const Architecture& arch, const Metadata& md, Finder& tensors, const std::string& block,
                              int64_t embedding) {
    const std::string prefix = std::string(arch.name) + ".ssm.";
    GatedDeltaSpec d;
    d.keyHeads = static_cast<int32_t>(md.integer(prefix + "group_count", 1, 65536));
    d.valueHeads = static_cast<int32_t>(md.integer(prefix + "time_step_rank", 1, 65536));
    d.headDim = static_cast<int32_t>(md.integer(prefix + "state_size", 1, 4096));
    d.convWidth = static_cast<int32_t>(md.integer(prefix + "conv_kernel", 2, 64));
    if (d.valueHeads % d.keyHeads) bad("metadata key '" + prefix + "time_step_rank' is not a multiple of group_count");
    if (d.channels() > kMaxWidth)
        bad("metadata keys '" + prefix + "time_step_rank' and 'state_size' give an impossible width");
    if (md.integer(prefix + "inner_size", 1, kMaxWidth) != d.valueWidth()) {
        bad("metadata key '" + prefix +
            "inner_size' is not time_step_rank times state_size: keys and values of different lengths are not "
            "supported");
    }
    d.qkv = tensors.required(block + "attn_qkv.weight", {embedding, d.channels()});
    d.gate = tensors.required(block + "attn_gate.weight", {embedding, d.valueWidth()});
    d.alpha = tensors.required(block + "ssm_alpha.weight", {embedding, d.valueHeads});
    d.beta = tensors.required(block + "ssm_beta.weight", {embedding, d.valueHeads});
    d.output = tensors.required(block + "ssm_out.weight", {d.valueWidth(), embedding});
    d.conv = tensors.requiredFloats(block + "ssm_conv1d.weight", {d.convWidth, d.channels()});
    d.stepBias = tensors.requiredVector(block + "ssm_dt.bias", d.valueHeads);
    d.decay = tensors.requiredVector(block + "ssm_a", d.valueHeads);
    d.norm = tensors.requiredVector(block + "ssm_norm.weight", d.headDim);
    return d;
}

// The width of experts that no key need tell: that of the tensor which brings them back to the model's.
int64_t expertHidden(const Finder& tensors, const std::string& name) {
    const TensorInfo* down = tensors.find(name);
    if (!down) bad("tensor '" + name + "' is missing");
    if (down->shape[0] > kMaxHidden) bad("tensor '" + name + "' has an impossible shape");
    return down->shape[0];
}

SharedExpertSpec readSharedExpert(Finder& tensors, const std::string& block, int64_t embedding) {
    SharedExpertSpec f;
    const int64_t hidden = expertHidden(tensors, block + "ffn_down_shexp.weight");
    f.scale = tensors.required(block + "ffn_gate_inp_shexp.weight",
                               {embedding});  // floats by habit, but some writers quantize it
    f.gate = tensors.required(block + "ffn_gate_shexp.weight", {embedding, hidden});
    f.up = tensors.required(block + "ffn_up_shexp.weight", {embedding, hidden});
    f.down = tensors.required(block + "ffn_down_shexp.weight", {hidden, embedding});
    return f;
}

ExpertFfnSpec readExperts(const Architecture& arch, const Metadata& md, Finder& tensors, const std::string& block,
                          int64_t embedding) {
    const std::string prefix = std::string(arch.name) + ".";
    ExpertFfnSpec f;
    f.count = static_cast<int32_t>(md.integer(prefix + "expert_count", 1, 65536));
    f.used = static_cast<int32_t>(md.integer(prefix + "expert_used_count", 1, std::min(f.count, 1024)));
    f.renormalize = md.flagOr(prefix + "expert_weights_norm", arch.expertsRenormalized);
    f.weightScale = static_cast<float>(md.numberOr(prefix + "expert_weights_scale", 1.0));
    if (f.weightScale == 0) f.weightScale = 1.0f;  // writers store 0 for "not scaled"
    f.router = tensors.required(block + "ffn_gate_inp.weight", {embedding, f.count});

    const int64_t hidden = expertHidden(tensors, block + "ffn_down_exps.weight");
    f.down = tensors.required(block + "ffn_down_exps.weight", {hidden, embedding, f.count});
    if (tensors.has(block + "ffn_gate_up_exps.weight")) {
        const WeightSlice fused = tensors.required(block + "ffn_gate_up_exps.weight", {embedding, 2 * hidden, f.count});
        f.gate = rowsOf(fused, 0, hidden);
        f.up = rowsOf(fused, hidden, hidden);
    } else {
        f.gate = tensors.required(block + "ffn_gate_exps.weight", {embedding, hidden, f.count});
        f.up = tensors.required(block + "ffn_up_exps.weight", {embedding, hidden, f.count});
    }
    if (arch.hybrid) f.shared = readSharedExpert(tensors, block, embedding);
    return f;
}

DenseFfnSpec readDense(const Architecture& arch, const Metadata& md, Finder& tensors, const std::string& block,
                       int64_t embedding) {
    const int64_t hidden = md.integer(std::string(arch.name) + ".feed_forward_length", 1, kMaxHidden);
    DenseFfnSpec f;
    f.gate = tensors.required(block + "ffn_gate.weight", {embedding, hidden});
    f.up = tensors.required(block + "ffn_up.weight", {embedding, hidden});
    f.down = tensors.required(block + "ffn_down.weight", {hidden, embedding});
    return f;
}

// Attention is in every n-th layer of a hybrid, and in all of others.
bool hasAttention(const Architecture& arch, const Metadata& md, int64_t layer) {
    if (!arch.hybrid) return true;
    return (layer + 1) % md.integerOr(std::string(arch.name) + ".full_attention_interval", 1, 4096, 4) == 0;
}

LayerSpec readLayer(const Architecture& arch, const Metadata& md, Finder& tensors, const std::string& block,
                    const ModelSpec& spec, bool attention) {
    LayerSpec layer;
    layer.mixerNorm = tensors.requiredVector(block + "attn_norm.weight", spec.embedding);
    layer.ffnNorm = tensors.requiredVector(block + arch.ffnNorm + ".weight", spec.embedding);
    if (attention) layer.attention = readAttention(arch, md, tensors, block, spec.embedding, spec.contextLength);
    else layer.delta = readGatedDelta(arch, md, tensors, block, spec.embedding);
    const bool experts = md.integerOr(spec.architecture + ".expert_count", 0, 65536, 0) > 0;
    if (arch.needsExperts && !experts) bad("metadata key '" + spec.architecture + ".expert_count' is missing");
    if (experts) layer.experts = readExperts(arch, md, tensors, block, spec.embedding);
    else layer.dense = readDense(arch, md, tensors, block, spec.embedding);
    tensors.ignore(block + "attn_rot_embd");  // cached frequencies of early converters
    return layer;
}

// Nothing where it has an output head of its own.
std::optional<PredictionSpec> readPrediction(const Architecture& arch, const Metadata& md, Finder& tensors,
                                             const std::string& block, const ModelSpec& spec) {
    PredictionSpec p;
    p.layer = readLayer(arch, md, tensors, block, spec, true);
    p.projection = tensors.required(block + "nextn.eh_proj.weight", {2 * spec.embedding, spec.embedding});
    p.embeddingNorm = tensors.requiredVector(block + "nextn.enorm.weight", spec.embedding);
    p.hiddenNorm = tensors.requiredVector(block + "nextn.hnorm.weight", spec.embedding);
    p.headNorm = tensors.optionalVector(block + "nextn.shared_head_norm.weight", spec.embedding);
    p.embedding = tensors.optional(block + "nextn.embed_tokens.weight", {spec.embedding, spec.vocabSize});
    if (tensors.optional(block + "nextn.shared_head_head.weight", {spec.embedding, spec.vocabSize}))
        return std::nullopt;
    return p;
}

const Architecture& findArchitecture(const std::string& name) {
    std::string known;
    for (const Architecture& a : architectures()) {
        if (name == a.name) return a;
        known += (known.empty() ? "" : ", ") + std::string(a.name);
    }
    bad("unknown architecture '" + name + "': known are " + known);
}

}  // namespace

ModelSpec ModelSpec::read(const Metadata& md, const TensorTable& table) {
    ModelSpec spec;
    spec.architecture = md.text("general.architecture");
    const Architecture& arch = findArchitecture(spec.architecture);
    const std::string prefix = spec.architecture + ".";
    spec.name = md.textOr("general.name", spec.architecture);
    spec.contextLength = md.integer(prefix + "context_length", 1, kMaxContext);
    spec.embedding = md.integer(prefix + "embedding_length", 1, kMaxWidth);
    spec.normEpsilon = static_cast<float>(md.number(prefix + "attention.layer_norm_rms_epsilon"));
    if (!(spec.normEpsilon >= 0 && spec.normEpsilon < 1))
        bad("metadata key '" + prefix + "attention.layer_norm_rms_epsilon' is outside 0 to 1");
    const int64_t blocks = md.integer(prefix + "block_count", 1, 4096);
    const int64_t predictions = arch.hybrid ? md.integerOr(prefix + "nextn_predict_layers", 0, blocks - 1, 0) : 0;

    Finder tensors(table);
    const TensorInfo* embeddingTensor = table.find("token_embd.weight");
    if (!embeddingTensor || embeddingTensor->shape.size() < 2)
        bad("tensor 'token_embd.weight' is missing or not a matrix");
    spec.vocabSize = embeddingTensor->shape[1];
    if (spec.vocabSize > kMaxDim) bad("tensor 'token_embd.weight' has too many rows");
    spec.tokenEmbedding = tensors.required("token_embd.weight", {spec.embedding, spec.vocabSize});
    spec.outputNorm = tensors.requiredVector("output_norm.weight", spec.embedding);
    spec.output = tensors.optional("output.weight", {spec.embedding, spec.vocabSize});
    if (!spec.output) spec.output = spec.tokenEmbedding;

    for (int64_t i = 0; i < blocks; ++i) {
        const std::string block = "blk." + std::to_string(i) + ".";
        if (i < blocks - predictions) {
            spec.layers.push_back(readLayer(arch, md, tensors, block, spec, hasAttention(arch, md, i)));
            continue;
        }
        std::optional<PredictionSpec> prediction = readPrediction(arch, md, tensors, block, spec);
        // Those behind the first go on from one another, each for one further token.
        if (prediction && i == blocks - predictions) spec.predictions.push_back(*std::move(prediction));
    }
    tensors.requireAllUsed(spec.architecture);
    return spec;
}

std::vector<const LayerSpec*> ModelSpec::loadedLayers() const {
    std::vector<const LayerSpec*> all;
    for (const LayerSpec& layer : layers) all.push_back(&layer);
    for (const PredictionSpec& prediction : predictions) all.push_back(&prediction.layer);
    return all;
}

int64_t ModelSpec::parameters(const TensorTable& tensors) const {
    int64_t n = 0;
    for (const TensorInfo& t : tensors.all()) {
        int64_t elements = 1;
        for (const int64_t extent : t.shape) elements *= extent;
        n += elements;
    }
    return n;
}

}  // namespace sharpi
