// The parts of a layer; see model_reader.h.
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "model/model_reader.h"
#include "model/reading_limits.h"

namespace sharpi {

namespace {

[[noreturn]] void bad(const std::string& what) { throw Error(ErrorKind::BadModel, what); }

}  // namespace

VectorId LayerReader::norm(const std::string& name, int64_t size) {
    return _model.vector(_model._tensors.requiredFloats(_block + name + ".weight", {size}));
}

LayerReader& LayerReader::mixerNorm(const std::string& name) {
    unused("attn_rot_embd");  // cached frequencies of early converters
    _layer.mixerNorm = norm(name, _model._spec.embedding);
    return *this;
}

LayerReader& LayerReader::ffnNorm(const std::string& name) {
    _layer.ffnNorm = norm(name, _model._spec.embedding);
    return *this;
}

LayerReader& LayerReader::unused(const std::string& name) {
    _model._tensors.unused(_block + name);
    return *this;
}

LayerReader& LayerReader::attention(const AttentionParts& parts) {
    const Metadata& md = _model._metadata;
    const std::string prefix = _model.key("attention.");
    AttentionSpec a;
    a.heads = static_cast<int32_t>(md.integer(prefix + "head_count", 1, 65536));
    a.kvHeads = static_cast<int32_t>(md.integerOr(prefix + "head_count_kv", 1, a.heads, a.heads));
    if (a.heads % a.kvHeads) bad("metadata key '" + prefix + "head_count' is not a multiple of head_count_kv");
    a.headDim = _model.headDim();
    if (int64_t{a.heads} * a.headDim > kMaxWidth)
        bad("metadata keys '" + prefix + "head_count' and 'key_length' give an impossible width");
    if (md.integerOr(prefix + "value_length", 1, 4096, a.headDim) != a.headDim)
        bad("keys and values of different lengths are not supported by this architecture");
    a.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(a.headDim)));
    a.rope = parts.rope;
    a.qkNorm = parts.qkNorm;
    a.gated = parts.gated;
    const int64_t queries = int64_t{a.heads} * a.headDim, keys = int64_t{a.kvHeads} * a.headDim;
    readQkv(a);
    a.output = _model.matrix(_model._tensors.required(_block + "attn_output.weight", {queries, _model._spec.embedding}),
                             WeightRole::Attention);
    readBiases(a);
    if (a.qkNorm != AttentionSpec::QkNorm::None) {
        const bool perHead = a.qkNorm == AttentionSpec::QkNorm::PerHead;
        a.qNorm = norm("attn_q_norm", perHead ? a.headDim : queries);
        a.kNorm = norm("attn_k_norm", perHead ? a.headDim : keys);
    }
    _layer.attention = a;
    return *this;
}

// Three matrices, or one that holds all three.
void LayerReader::readQkv(AttentionSpec& a) {
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
        k = tensors.required(_block + "attn_k.weight", {width, keys});
        v = tensors.required(_block + "attn_v.weight", {width, keys});
    }
    a.q = _model.matrix(q, WeightRole::Attention);
    a.k = _model.matrix(k, WeightRole::Attention);
    a.v = _model.matrix(v, WeightRole::Attention);
}

void LayerReader::readBiases(AttentionSpec& a) {
    TensorFinder& tensors = _model._tensors;
    const int64_t queries = int64_t{a.heads} * a.headDim * (a.gated ? 2 : 1), keys = int64_t{a.kvHeads} * a.headDim;
    if (tensors.has(_block + "attn_qkv.weight")) {
        if (const WeightSlice fused = tensors.optionalFloats(_block + "attn_qkv.bias", {queries + 2 * keys})) {
            const auto part = [&](int64_t begin, int64_t size) {
                WeightSlice slice = fused;
                slice.colBegin = begin;
                slice.cols = size;
                return _model.vector(slice);
            };
            a.qBias = part(0, queries);
            a.kBias = part(queries, keys);
            a.vBias = part(queries + keys, keys);
        }
    } else {
        a.qBias = _model.vector(tensors.optionalFloats(_block + "attn_q.bias", {queries}));
        a.kBias = _model.vector(tensors.optionalFloats(_block + "attn_k.bias", {keys}));
        a.vBias = _model.vector(tensors.optionalFloats(_block + "attn_v.bias", {keys}));
    }
    a.outputBias = _model.vector(tensors.optionalFloats(_block + "attn_output.bias", {_model._spec.embedding}));
}

LayerReader& LayerReader::gatedDelta() {
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
    d.qkv = matrix("attn_qkv", width, d.channels());
    d.gate = matrix("attn_gate", width, d.valueWidth());
    d.alpha = matrix("ssm_alpha", width, d.valueHeads);
    d.beta = matrix("ssm_beta", width, d.valueHeads);
    d.output = matrix("ssm_out", d.valueWidth(), width);
    d.conv = {_model.add({tensors.requiredFloats(_block + "ssm_conv1d.weight", {d.convWidth, d.channels()})},
                         WeightRole::Vector, WeightForm::Transposed)};
    d.stepBias = vector("ssm_dt.bias", d.valueHeads);
    d.decay = vector("ssm_a", d.valueHeads);
    d.headNorm = vector("ssm_norm.weight", d.headDim);
    _layer.delta = d;
    return *this;
}

LayerReader& LayerReader::dense() {
    TensorFinder& tensors = _model._tensors;
    const int64_t width = _model._spec.embedding;
    DenseFfnSpec f;
    f.hidden = _model._metadata.integer(_model.key("feed_forward_length"), 1, kMaxHidden);
    f.gate = _model.matrix(tensors.required(_block + "ffn_gate.weight", {width, f.hidden}), WeightRole::FfnGate);
    f.up = _model.matrix(tensors.required(_block + "ffn_up.weight", {width, f.hidden}), WeightRole::FfnUp);
    _model._spec.weights.back().unit = f.gate.index;
    f.down = _model.matrix(tensors.required(_block + "ffn_down.weight", {f.hidden, width}), WeightRole::FfnDown);
    _layer.dense = f;
    return *this;
}

LayerReader& LayerReader::experts(const ExpertParts& parts) {
    const Metadata& md = _model._metadata;
    TensorFinder& tensors = _model._tensors;
    const int64_t width = _model._spec.embedding;
    ExpertFfnSpec f;
    f.expertLayer = _model._expertLayers++;
    RoutingSpec& r = f.routing;
    r.count = static_cast<int32_t>(md.integer(_model.key("expert_count"), 1, 65536));
    r.used = static_cast<int32_t>(md.integer(_model.key("expert_used_count"), 1, std::min(r.count, 1024)));
    r.renormalize = md.flagOr(_model.key("expert_weights_norm"), parts.renormalized);
    r.weightScale = static_cast<float>(md.numberOr(_model.key("expert_weights_scale"), 1.0));
    if (r.weightScale == 0) r.weightScale = 1.0f;  // writers store 0 for "not scaled"
    r.router = _model.matrix(tensors.required(_block + "ffn_gate_inp.weight", {width, r.count}), WeightRole::Router);
    // No key needs to say how wide experts are: the tensor that leads back to the model's width does.
    f.hidden = tensors.columns(_block + "ffn_down_exps.weight", kMaxHidden);
    const WeightSlice down = tensors.required(_block + "ffn_down_exps.weight", {f.hidden, width, r.count});
    WeightSlice gate, up;
    if (tensors.has(_block + "ffn_gate_up_exps.weight")) {
        const std::string name = _block + "ffn_gate_up_exps.weight";
        const WeightSlice fused = tensors.required(name, {width, 2 * f.hidden, r.count});
        gate = rowsOf(fused, 0, f.hidden);
        up = rowsOf(fused, f.hidden, f.hidden);
    } else {
        gate = tensors.required(_block + "ffn_gate_exps.weight", {width, f.hidden, r.count});
        up = tensors.required(_block + "ffn_up_exps.weight", {width, f.hidden, r.count});
    }
    if (parts.shared) sharedExpert(f);
    const double share = static_cast<double>(r.used) / r.count;
    f.gate = {_model.add({gate}, WeightRole::Experts, WeightForm::Stack, share)};
    for (StackId* stack : {&f.up, &f.down}) {
        *stack = {_model.add({stack == &f.up ? up : down}, WeightRole::Experts, WeightForm::Stack, share)};
        _model._spec.weights.back().unit = f.gate.index;
    }
    _layer.experts = f;
    return *this;
}

// Each token reads it in full, as it does the mixer's matrices.
void LayerReader::sharedExpert(ExpertFfnSpec& f) {
    TensorFinder& tensors = _model._tensors;
    const int64_t width = _model._spec.embedding;
    SharedExpertSpec shared;
    shared.hidden = tensors.columns(_block + "ffn_down_shexp.weight", kMaxHidden);
    const auto matrix = [&](const char* name, int64_t cols, int64_t rows) {
        return _model.matrix(tensors.required(_block + name + ".weight", {cols, rows}), WeightRole::Attention);
    };
    // Usually floats, but some writers quantize it.
    shared.scale = _model.vector(tensors.required(_block + "ffn_gate_inp_shexp.weight", {width}));
    shared.gate = matrix("ffn_gate_shexp", width, shared.hidden);
    shared.up = matrix("ffn_up_shexp", width, shared.hidden);
    shared.down = matrix("ffn_down_shexp", shared.hidden, width);
    f.shared = shared;
}

}  // namespace sharpi
