// The parts of a layer; see model_reader.h.
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "model/model_reader.h"
#include "model/reading_limits.h"

namespace sharpi {

namespace {

[[noreturn]] void bad(const std::string& what) { throw Error(ErrorKind::BadModel, what); }

Gating readGating(const Metadata& md, const std::string& key, Gating usual) {
    switch (md.integerOr(key, 0, INT32_MAX, 0)) {
    case 0: return usual;
    case 1: return Gating::Softmax;
    case 2: return Gating::Sigmoid;
    case 3: return Gating::SoftmaxOfChosen;
    case 4: return Gating::RootSoftplus;
    default:
        bad("metadata key '" + key +
            "' is none of 1 (softmax), 2 (sigmoid), 3 (softmax of the chosen) and 4 (root of softplus)");
    }
}

}  // namespace

VectorId LayerReader::norm(const std::string& name, int64_t size, const std::string& ending) {
    return _model.vector(_model._tensors.requiredFloats(_block + name + ending, {size}));
}

LayerReader& LayerReader::mixerNorm(const std::string& name) {
    unused("attn_rot_embd");  // cached frequencies of early converters
    _layer.mixerNorm = norm(name, _model._spec.embedding);
    if (_model._spec.norm == NormKind::Layer) _layer.mixerNormBias = floats(name + ".bias", {_model._spec.embedding});
    return *this;
}

LayerReader& LayerReader::ffnNorm(const std::string& name, const std::string& ending) {
    _layer.ffnNorm = norm(name, _model._spec.embedding, ending);
    if (_model._spec.norm == NormKind::Layer) _layer.ffnNormBias = floats(name + ".bias", {_model._spec.embedding});
    return *this;
}

LayerReader& LayerReader::oneNorm() {
    _layer.oneNorm = true;
    return *this;
}

LayerReader& LayerReader::unused(const std::string& name) {
    _model._tensors.unused(_block + name);
    return *this;
}

LayerReader& LayerReader::mixerPostNorm(const std::string& name) {
    _layer.mixerPostNorm = norm(name, _model._spec.embedding);
    return *this;
}

LayerReader& LayerReader::ffnPostNorm(const std::string& name) {
    _layer.ffnPostNorm = norm(name, _model._spec.embedding);
    return *this;
}

LayerReader& LayerReader::parallelNorms(const std::string& denseOut, const std::string& routerIn,
                                        const std::string& expertIn, const std::string& expertOut) {
    const int64_t width = _model._spec.embedding;
    ParallelNorms norms;
    norms.denseOut = norm(denseOut, width);
    const WeightSlice router = _model._tensors.requiredFloats(_block + routerIn, {width});
    norms.routerIn = _model.vector(router, 1.0 / std::sqrt(static_cast<double>(width)));
    norms.expertIn = norm(expertIn, width);
    norms.expertOut = norm(expertOut, width);
    _layer.parallel = norms;
    return *this;
}

LayerReader& LayerReader::layerInput() {
    const std::optional<LayerInputsSpec>& inputs = _model._spec.layerInputs;
    if (!inputs) return *this;
    const int64_t width = _model._spec.embedding;
    TensorFinder& tensors = _model._tensors;
    LayerInputSpec input;
    const WeightSlice gate = tensors.required(_block + "inp_gate.weight", {width, inputs->width});
    const WeightSlice projection = tensors.required(_block + "proj.weight", {inputs->width, width});
    input.gate = _model.matrix(gate, WeightRole::Attention);
    input.projection = _model.matrix(projection, WeightRole::Attention);
    input.norm = norm("post_norm", width);
    _layer.layerInput = input;
    return *this;
}

LayerReader& LayerReader::outputScale(const std::string& name) {
    _layer.outputScale = _model.vector(_model._tensors.optionalFloats(_block + name + ".weight", {1}));
    return *this;
}

VectorId LayerReader::floats(const std::string& name, const std::vector<int64_t>& shape) {
    return _model.vector(_model._tensors.optionalFloats(_block + name, shape));
}

LayerReader& LayerReader::attention(const AttentionParts& parts) {
    AttentionSpec a;
    readShape(a, parts);
    const int64_t queries = int64_t{a.heads} * a.headDim, keys = int64_t{a.kvHeads} * a.headDim;
    readQkv(a, parts);
    a.output = _model.matrix(_model._tensors.required(_block + "attn_output.weight", {queries, _model._spec.embedding}),
                             WeightRole::Attention);
    readBiases(a);
    if (a.qkNorm != AttentionSpec::QkNorm::None && parts.normWeights) {
        const bool perHead = a.qkNorm == AttentionSpec::QkNorm::PerHead;
        a.qNorm = norm("attn_q_norm", perHead ? a.headDim : queries);
        if (a.kvLayer < 0) a.kNorm = norm("attn_k_norm", perHead ? a.headDim : keys);
    }
    if (parts.sinks) a.sinks = norm("attn_sinks", a.heads);
    _layer.attention = a;
    return *this;
}

void LayerReader::readShape(AttentionSpec& a, const AttentionParts& parts) {
    const Metadata& md = _model._metadata;
    const std::string prefix = _model.key("attention.");
    a.heads = static_cast<int32_t>(md.integerAt(prefix + "head_count", _index, 1, 65536));
    a.kvHeads = a.heads;
    if (md.has(prefix + "head_count_kv"))
        a.kvHeads = static_cast<int32_t>(md.integerAt(prefix + "head_count_kv", _index, 1, a.heads));
    if (a.heads % a.kvHeads) bad("metadata key '" + prefix + "head_count' is not a multiple of head_count_kv");
    a.headDim = _model.headDim(parts.windowed, _index);
    if (int64_t{a.heads} * a.headDim > kMaxWidth)
        bad("metadata keys '" + prefix + "head_count' and 'key_length' give an impossible width");
    const std::string value = prefix + "value_length";
    const bool windowed = parts.windowed && md.has(value + "_swa");
    if (md.integerOr(windowed ? value + "_swa" : value, 1, 4096, a.headDim) != a.headDim)
        bad("keys and values of different lengths are not supported by this architecture");
    a.scale = static_cast<float>(parts.scale.value_or(1.0 / std::sqrt(static_cast<double>(a.headDim))));
    a.rope = parts.rope;
    a.qkNorm = parts.qkNorm;
    if (parts.normsOptional && !_model._tensors.has(_block + "attn_q_norm.weight"))
        a.qkNorm = AttentionSpec::QkNorm::None;
    a.normAfterRotation = parts.normAfterRotation;
    a.valueNorm = parts.valueNorm;
    a.gated = parts.gated;
    a.kvLayer = parts.kvLayer;
    a.reach = parts.reach;
    a.softcap = parts.softcap;
    a.queryScale = parts.queryScale;
}

// Three matrices, or one that holds all three; or fewer, if the layer has no keys or values of its own.
void LayerReader::readQkv(AttentionSpec& a, const AttentionParts& parts) {
    TensorFinder& tensors = _model._tensors;
    const int64_t width = _model._spec.embedding;
    const int64_t queries = int64_t{a.heads} * a.headDim * (a.gated ? 2 : 1), keys = int64_t{a.kvHeads} * a.headDim;
    WeightSlice q, k, v;
    if (tensors.has(_block + "attn_qkv.weight")) {
        const WeightSlice fused = tensors.required(_block + "attn_qkv.weight", {width, queries + 2 * keys});
        q = rowsOf(fused, 0, queries);
        k = rowsOf(fused, queries, keys);
        v = rowsOf(fused, queries + keys, keys);
    } else {
        q = tensors.required(_block + "attn_q.weight", {width, queries});
        if (a.kvLayer < 0) {
            k = tensors.required(_block + "attn_k.weight", {width, keys});
            const bool valued = !parts.keysAreValues || tensors.has(_block + "attn_v.weight");
            if (valued) v = tensors.required(_block + "attn_v.weight", {width, keys});
        }
    }
    a.q = _model.matrix(q, WeightRole::Attention);
    if (k) a.k = _model.matrix(k, WeightRole::Attention);
    if (v) a.v = _model.matrix(v, WeightRole::Attention);
}

void LayerReader::readBiases(AttentionSpec& a) {
    TensorFinder& tensors = _model._tensors;
    const int64_t queries = int64_t{a.heads} * a.headDim * (a.gated ? 2 : 1), keys = int64_t{a.kvHeads} * a.headDim;
    if (tensors.has(_block + "attn_qkv.weight")) {
        if (const WeightSlice fused = tensors.optionalFloats(_block + "attn_qkv.bias", {queries + 2 * keys})) {
            a.qBias = _model.vector(columnsOf(fused, 0, queries));
            a.kBias = _model.vector(columnsOf(fused, queries, keys));
            a.vBias = _model.vector(columnsOf(fused, queries + keys, keys));
        }
    } else {
        a.qBias = _model.vector(tensors.optionalFloats(_block + "attn_q.bias", {queries}));
        if (a.k) a.kBias = _model.vector(tensors.optionalFloats(_block + "attn_k.bias", {keys}));
        if (a.v) a.vBias = _model.vector(tensors.optionalFloats(_block + "attn_v.bias", {keys}));
    }
    a.outputBias = _model.vector(tensors.optionalFloats(_block + "attn_output.bias", {_model._spec.embedding}));
}

LayerReader& LayerReader::gatedDelta(bool fusedSteps) {
    const Metadata& md = _model._metadata;
    TensorFinder& tensors = _model._tensors;
    const std::string prefix = _model.key("ssm.");
    const int64_t width = _model._spec.embedding;
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
    const auto matrix = [&](const char* name, int64_t cols, int64_t rows) {
        return _model.matrix(tensors.required(_block + name + ".weight", {cols, rows}), WeightRole::Attention);
    };
    const auto vector = [&](const std::string& name, int64_t size) {
        return _model.vector(tensors.requiredFloats(_block + name, {size}));
    };
    // Queries, keys, values and gates alternate there by key head, so no slice of it is a matrix of the layer.
    if (tensors.has(_block + "ssm_in.weight"))
        bad("tensor '" + _block +
            "ssm_in.weight' has a layout of early Qwen3-Next files, which is not supported: take "
            "a newer file, with attn_qkv and attn_gate");
    d.qkv = matrix("attn_qkv", width, d.channels());
    d.gate = matrix("attn_gate", width, d.valueWidth());
    d.fusedSteps = d.consecutiveHeads = fusedSteps;
    if (fusedSteps) {
        d.beta = matrix("ssm_ba", width, 2 * d.valueHeads);
    } else {
        d.alpha = matrix("ssm_alpha", width, d.valueHeads);
        d.beta = matrix("ssm_beta", width, d.valueHeads);
    }
    d.output = matrix("ssm_out", d.valueWidth(), width);
    d.conv = {_model.add({tensors.requiredFloats(_block + "ssm_conv1d.weight", {d.convWidth, d.channels()})},
                         WeightRole::Vector, WeightForm::Transposed)};
    d.stepBias = vector("ssm_dt.bias", d.valueHeads);
    d.decay = vector("ssm_a", d.valueHeads);
    d.headNorm = vector("ssm_norm.weight", d.headDim);
    _layer.delta = d;
    return *this;
}

LayerReader& LayerReader::mamba(const MambaParts& parts) {
    const Metadata& md = _model._metadata;
    TensorFinder& tensors = _model._tensors;
    const std::string prefix = _model.key("ssm.");
    const int64_t width = _model._spec.embedding;
    const auto integer = [&](const char* name, int64_t low, int64_t high) {
        return static_cast<int32_t>(md.integer(prefix + name, low, high));
    };
    MambaSpec m;
    m.heads = integer("time_step_rank", 1, 65536);
    m.groups = integer("group_count", 1, 65536);
    m.stateDim = integer("state_size", 1, 4096);
    m.convWidth = integer("conv_kernel", 2, 64);
    const int64_t inner = integer("inner_size", 1, kMaxWidth);
    if (inner % m.heads) bad("metadata key '" + prefix + "inner_size' is not a multiple of time_step_rank");
    if (m.heads % m.groups) bad("metadata key '" + prefix + "time_step_rank' is not a multiple of group_count");
    m.headDim = static_cast<int32_t>(inner / m.heads);
    if (m.channels() > kMaxWidth)
        bad("metadata keys '" + prefix + "group_count' and 'state_size' give an impossible width");
    const auto floats = [&](const char* name, const std::vector<int64_t>& shape) {
        return _model.vector(tensors.requiredFloats(_block + name, shape));
    };
    const WeightSlice in = tensors.required(_block + "ssm_in.weight", {width, inner + m.channels() + m.heads});
    m.gate = _model.matrix(rowsOf(in, 0, inner), WeightRole::Attention);
    m.mixed = _model.matrix(rowsOf(in, inner, m.channels()), WeightRole::Attention);
    m.steps = _model.matrix(rowsOf(in, inner + m.channels(), m.heads), WeightRole::Attention);
    m.output = _model.matrix(tensors.required(_block + "ssm_out.weight", {inner, width}), WeightRole::Attention);
    m.conv = {_model.add({tensors.requiredFloats(_block + "ssm_conv1d.weight", {m.convWidth, m.channels()})},
                         WeightRole::Vector, WeightForm::Transposed)};
    m.convBias = this->floats("ssm_conv1d.bias", {m.channels()});
    m.stepBias = floats("ssm_dt.bias", {m.heads});
    m.rate = floats("ssm_a", {1, m.heads});
    m.skip = floats("ssm_d", {1, m.heads});
    if (!parts.normOptional || tensors.has(_block + "ssm_norm.weight"))
        m.norm = floats("ssm_norm.weight", {inner / m.groups, m.groups});
    _layer.mamba = m;
    return *this;
}

LayerReader& LayerReader::dense(const DenseParts& parts) {
    TensorFinder& tensors = _model._tensors;
    const int64_t width = _model._spec.embedding;
    DenseFfnSpec f;
    f.activation = parts.activation;
    f.hidden = _model._metadata.integerAt(_model.key("feed_forward_length"), _index, 1, kMaxHidden);
    WeightSlice gate, up;
    if (parts.fused) {
        const WeightSlice fused = tensors.required(_block + "ffn_up.weight", {width, 2 * f.hidden});
        gate = rowsOf(fused, 0, f.hidden);
        up = rowsOf(fused, f.hidden, f.hidden);
    } else {
        if (parts.gated) gate = tensors.required(_block + "ffn_gate.weight", {width, f.hidden});
        up = tensors.required(_block + "ffn_up.weight", {width, f.hidden});
    }
    if (parts.gated) {
        f.gate = _model.matrix(gate, WeightRole::FfnGate);
        f.up = _model.matrix(up, WeightRole::FfnUp);
        _model._spec.weights.back().unit = f.gate.index;
    } else {
        f.gate = _model.matrix(up, WeightRole::FfnUp);
    }
    f.down = _model.matrix(tensors.required(_block + "ffn_down.weight", {f.hidden, width}), WeightRole::FfnDown);
    if (parts.gated) f.gateBias = floats("ffn_gate.bias", {f.hidden});
    (parts.gated ? f.upBias : f.gateBias) = floats("ffn_up.bias", {f.hidden});
    f.downBias = floats("ffn_down.bias", {width});
    _layer.dense = f;
    return *this;
}

void LayerReader::readRouting(RoutingSpec& r, const ExpertParts& parts) {
    const Metadata& md = _model._metadata;
    r.count = static_cast<int32_t>(md.integer(_model.key("expert_count"), 1, 65536));
    r.used = static_cast<int32_t>(md.integerAt(_model.key("expert_used_count"), _index, 1, std::min(r.count, 1024)));
    r.gating = readGating(md, _model.key("expert_gating_func"), parts.gating);
    r.weightsInput = parts.weightsInput;
    r.renormalize = md.flagOr(_model.key("expert_weights_norm"), parts.renormalized);
    r.weightScale = static_cast<float>(md.numberOr(_model.key("expert_weights_scale"), 1.0));
    if (r.weightScale == 0) r.weightScale = 1.0f;  // writers store 0 for "not scaled"
    r.groups = static_cast<int32_t>(md.integerOr(_model.key("expert_group_count"), 0, r.count, 1));
    if (r.groups == 0) r.groups = 1;
    r.groupsUsed = static_cast<int32_t>(md.integerOr(_model.key("expert_group_used_count"), 0, r.groups, r.groups));
    if (r.groupsUsed == 0) r.groupsUsed = r.groups;
    if (r.count % r.groups || r.count / r.groups * r.groupsUsed < r.used)
        bad("metadata keys '" + _model.key("expert_group_count") +
            "' and 'expert_group_used_count' leave too few experts");
    const WeightSlice router =
        _model._tensors.required(_block + "ffn_gate_inp.weight", {_model._spec.embedding, r.count});
    r.router = _model.matrix(router, WeightRole::Router);
    r.bias = floats("ffn_gate_inp.bias", {r.count});
    if (parts.choicesByToken) {
        const WeightSlice table =
            _model._tensors.requiredIntegers(_block + "ffn_gate_tid2eid.weight", {r.used, _model._spec.vocabSize});
        r.tokenChoices = _model.vector(table);
        _model._spec.weights.back().below = r.count;
    }
    r.choiceBias = floats("exp_probs_b.bias", {r.count});
    r.outputScale = floats("ffn_down_exps.scale", {r.count});
}

LayerReader& LayerReader::experts(const ExpertParts& parts) {
    ExpertFfnSpec f;
    f.expertLayer = _model._expertLayers++;
    f.activation = parts.activation;
    readRouting(f.routing, parts);
    const auto latent = [&](const char* name, int64_t cols, int64_t rows) {
        return _model.matrix(_model._tensors.required(_block + name, {cols, rows}), WeightRole::Attention);
    };
    const int64_t width = _model._spec.embedding;
    if (parts.latents) f.latentDown = latent("ffn_latent_down.weight", width, parts.latents);
    // No key needs to say how wide experts are: the tensor that leads back to the model's width does.
    f.hidden = _model._tensors.columns(_block + "ffn_down_exps.weight", kMaxHidden);
    readStacks(f, parts);
    readStackBiases(f, parts.latents ? parts.latents : width, parts.gated);
    if (parts.latents) f.latentUp = latent("ffn_latent_up.weight", parts.latents, width);
    _layer.experts = f;
    return *this;
}

// Gate and up, which newer files fuse, or up alone, and down; before them, the shared expert.
void LayerReader::readStacks(ExpertFfnSpec& f, const ExpertParts& parts) {
    TensorFinder& tensors = _model._tensors;
    const int64_t width = parts.latents ? parts.latents : _model._spec.embedding, count = f.routing.count;
    const WeightSlice down = tensors.required(_block + "ffn_down_exps.weight", {f.hidden, width, count});
    std::vector<WeightSlice> stacks;
    if (parts.gated && tensors.has(_block + "ffn_gate_up_exps.weight")) {
        const std::string name = _block + "ffn_gate_up_exps.weight";
        const WeightSlice fused = tensors.required(name, {width, 2 * f.hidden, count});
        stacks = {rowsOf(fused, 0, f.hidden), rowsOf(fused, f.hidden, f.hidden)};
    } else {
        if (parts.gated) stacks.push_back(tensors.required(_block + "ffn_gate_exps.weight", {width, f.hidden, count}));
        stacks.push_back(tensors.required(_block + "ffn_up_exps.weight", {width, f.hidden, count}));
    }
    stacks.push_back(down);
    if (parts.shared != ExpertParts::Shared::None) sharedExpert(f, parts);
    const double share = static_cast<double>(f.routing.used) / static_cast<double>(count);
    std::vector<StackId> ids;
    for (const WeightSlice& stack : stacks) {
        ids.push_back({_model.add({stack}, WeightRole::Experts, WeightForm::Stack, share)});
        _model._spec.weights.back().unit = ids.front().index;
    }
    f.gate = ids.front();
    if (parts.gated) f.up = ids[1];
    f.down = ids.back();
}

void LayerReader::readStackBiases(ExpertFfnSpec& f, int64_t width, bool gated) {
    TensorFinder& tensors = _model._tensors;
    const int64_t count = f.routing.count;
    const WeightSlice fused = tensors.optionalFloats(_block + "ffn_gate_up_exps.bias", {2 * f.hidden, count});
    if (gated && fused) {
        f.gateBias = _model.vector(columnsOf(fused, 0, f.hidden));
        f.upBias = _model.vector(columnsOf(fused, f.hidden, f.hidden));
    } else {
        if (gated) f.gateBias = floats("ffn_gate_exps.bias", {f.hidden, count});
        (gated ? f.upBias : f.gateBias) = floats("ffn_up_exps.bias", {f.hidden, count});
    }
    f.downBias = floats("ffn_down_exps.bias", {width, count});
}

// Each token reads it in full, as it does the mixer's matrices.
void LayerReader::sharedExpert(ExpertFfnSpec& f, const ExpertParts& parts) {
    TensorFinder& tensors = _model._tensors;
    const int64_t width = _model._spec.embedding;
    SharedExpertSpec shared;
    shared.activation = parts.sharedActivation.value_or(parts.activation);
    shared.hidden = tensors.columns(_block + "ffn_down_shexp.weight", kMaxHidden);
    const auto matrix = [&](const char* name, int64_t cols, int64_t rows) {
        return _model.matrix(tensors.required(_block + name + ".weight", {cols, rows}), WeightRole::Attention);
    };
    // Usually floats, but some writers quantize it.
    if (parts.shared == ExpertParts::Shared::Scaled)
        shared.scale = _model.vector(tensors.required(_block + "ffn_gate_inp_shexp.weight", {width}));
    shared.gate = matrix(parts.gated ? "ffn_gate_shexp" : "ffn_up_shexp", width, shared.hidden);
    if (parts.gated) shared.up = matrix("ffn_up_shexp", width, shared.hidden);
    shared.down = matrix("ffn_down_shexp", shared.hidden, width);
    f.shared = shared;
}

}  // namespace sharpi
