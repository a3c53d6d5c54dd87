// Latent attention; see model_reader.h.
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "model/model_reader.h"
#include "model/reading_limits.h"

namespace sharpi {

namespace {

[[noreturn]] void bad(const std::string& what) { throw Error(ErrorKind::BadModel, what); }

// A tensor [cols, rows, heads] as one matrix, head by head.
WeightSlice allHeads(WeightSlice slice) {
    slice.rows *= slice.experts;
    slice.experts = 1;
    return slice;
}

}  // namespace

LayerReader& LayerReader::latentAttention(const AttentionParts& parts) {
    const Metadata& md = _model._metadata;
    TensorFinder& tensors = _model._tensors;
    const std::string prefix = _model.key("attention.");
    const int64_t width = _model._spec.embedding;
    // Before mid-2025 the cache's row had no keys of its own.
    const auto length = [&](const std::string& name) {
        return static_cast<int32_t>(
            md.integer(prefix + name + (md.has(prefix + name + "_mla") ? "_mla" : ""), 1, 4096));
    };
    const auto integer = [&](const std::string& name, int64_t most) {
        return static_cast<int32_t>(md.integer(prefix + name, 1, most));
    };
    const auto matrix = [&](const char* name, const std::vector<int64_t>& shape) {
        return _model.matrix(allHeads(tensors.required(_block + name + ".weight", shape)), WeightRole::Attention);
    };
    AttentionSpec a;
    LatentSpec latent;
    a.heads = static_cast<int32_t>(md.integerAt(prefix + "head_count", _index, 1, 65536));
    a.kvHeads = 1;
    a.rope = parts.rope;
    a.queryScale = parts.queryScale;
    latent.rank = integer("kv_lora_rank", 4096);
    latent.valueDim = length("value_length");
    const int32_t rotated = _model._spec.ropes.at(static_cast<size_t>(a.rope)).dims;
    const int32_t keyDim = length("key_length");
    latent.plainDim = keyDim - rotated;
    if (latent.plainDim < 1) bad("metadata key '" + prefix + "key_length(_mla)' is not above rope.dimension_count");
    a.headDim = latent.rank + rotated;
    if (int64_t{a.heads} * std::max({a.headDim, keyDim, latent.valueDim}) > kMaxWidth)
        bad("metadata keys '" + prefix + "head_count' and 'kv_lora_rank' give an impossible width");
    a.scale = static_cast<float>(parts.scale.value_or(1.0 / std::sqrt(static_cast<double>(keyDim))));
    const int64_t queries = int64_t{a.heads} * keyDim;
    // Some files say 0 for queries without a rank.
    const auto queryRank = static_cast<int32_t>(md.integerOr(prefix + "q_lora_rank", 0, kMaxWidth, 0));
    if (queryRank > 0) {
        a.queryDown = matrix("attn_q_a", {width, queryRank});
        a.k = matrix("attn_kv_a_mqa", {width, a.headDim});
        a.queryNorm = norm("attn_q_a_norm", queryRank);
        a.q = matrix("attn_q_b", {queryRank, queries});
    } else {
        a.q = matrix("attn_q", {width, queries});
        a.k = matrix("attn_kv_a_mqa", {width, a.headDim});
    }
    latent.norm = norm("attn_kv_a_norm", latent.rank);
    if (tensors.has(_block + "attn_kv_b.weight")) {
        const int64_t both = latent.plainDim + latent.valueDim;
        const WeightSlice joined = tensors.required(_block + "attn_kv_b.weight", {latent.rank, a.heads * both});
        const auto byHead = [&](int64_t begin, int64_t rows, WeightForm form) {
            WeightSlice slice = rowsOf(joined, begin, rows);
            slice.experts = a.heads;
            slice.expertStride = both;
            return MatrixId{_model.add({slice}, WeightRole::Vector, form)};
        };
        latent.keyUp = byHead(0, latent.plainDim, WeightForm::HeadColumns);
        latent.valueUp = byHead(latent.plainDim, latent.valueDim, WeightForm::HeadRows);
    } else {
        latent.keyUp = matrix("attn_k_b", {latent.plainDim, latent.rank, a.heads});
        latent.valueUp = matrix("attn_v_b", {latent.rank, latent.valueDim, a.heads});
    }
    a.output = matrix("attn_output", {int64_t{a.heads} * latent.valueDim, width});
    a.latent = latent;
    _layer.attention = a;
    return *this;
}

}  // namespace sharpi
