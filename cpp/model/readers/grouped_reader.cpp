// See grouped_reader.h.
#include "model/readers/grouped_reader.h"

#include <cmath>

#include "core/error.h"
#include "core/rules/streams.h"
#include "model/reading_limits.h"

namespace sharpi {

namespace {

[[noreturn]] void bad(const std::string& what) { throw Error(ErrorKind::BadModel, what); }

constexpr int32_t kMostBlock = 128;  // tokens of a block
constexpr int32_t kPage = 64;        // of the cache, in which no row may lie in two pages

}  // namespace

void GroupedReader::beginStreams(ModelReader& model) {
    const Metadata& md = model._metadata;
    const std::string prefix = model.key("hyper_connection.");
    StreamsSpec streams;
    streams.count = static_cast<int32_t>(md.integer(prefix + "count", 1, kMostStreams));
    if (streams.count * model._spec.embedding > kMaxWidth)
        bad("metadata key '" + prefix + "count' gives an impossible width");
    streams.iterations = static_cast<int32_t>(md.integer(prefix + "sinkhorn_iterations", 1, 1000));
    streams.epsilon = static_cast<float>(md.number(prefix + "epsilon"));
    if (!(streams.epsilon >= 0 && streams.epsilon < 1)) bad("metadata key '" + prefix + "epsilon' is outside 0 to 1");
    model._spec.streams = streams;
}

StreamMixSpec GroupedReader::streamMix(ModelReader& model, const std::string& name, int64_t rows, int64_t scales) {
    const int64_t all = model._spec.streams->count * model._spec.embedding;
    StreamMixSpec mix;
    mix.fn = model.matrix(model._tensors.required(name + "_fn.weight", {all, rows}), WeightRole::Attention);
    mix.base = model.vector(model._tensors.requiredFloats(name + "_base.weight", {rows}));
    mix.scale = model.vector(model._tensors.requiredFloats(name + "_scale.weight", {scales}));
    return mix;
}

void GroupedReader::endStreams(ModelReader& model) {
    model._spec.streams->end = streamMix(model, "output_hc", model._spec.streams->count, 1);
}

StreamMixSpec GroupedReader::partStreams(const std::string& name) {
    const int64_t count = _model._spec.streams->count;
    return streamMix(_model, _layer._block + name, count * (2 + count), 3);
}

GroupedReader& GroupedReader::mixerStreams() {
    _layer._layer.mixerStreams = partStreams("hc_attn");
    return *this;
}

GroupedReader& GroupedReader::ffnStreams() {
    _layer._layer.ffnStreams = partStreams("hc_ffn");
    return *this;
}

MatrixId GroupedReader::matrix(const std::string& name, int64_t cols, int64_t rows) {
    return _model.matrix(_model._tensors.required(_layer._block + name + ".weight", {cols, rows}),
                         WeightRole::Attention);
}

CompressorSpec GroupedReader::compressor(const std::string& name, int32_t blockTokens, int32_t headDim, bool overlaps) {
    CompressorSpec c;
    c.blockTokens = blockTokens;
    c.headDim = headDim;
    c.overlaps = overlaps;
    c.firstCache = 2 * static_cast<int32_t>(_model._spec.compressors().size());
    c.keys = matrix(name + "_kv", _model._spec.embedding, c.width());
    c.gates = matrix(name + "_gate", _model._spec.embedding, c.width());
    const std::string offsets = _layer._block + name + "_ape.weight";
    c.gateOffsets = _model.vector(_model._tensors.required(offsets, {c.width(), blockTokens}));  // some quantize it
    c.norm = _layer.norm(name + "_norm", headDim);
    return c;
}

IndexerSpec GroupedReader::indexer(int64_t queryRank, int32_t rotated, int32_t blockTokens) {
    const Metadata& md = _model._metadata;
    const std::string prefix = _model.key("attention.indexer.");
    IndexerSpec indexer;
    indexer.heads = static_cast<int32_t>(md.integer(prefix + "head_count", 1, 65536));
    indexer.topK = static_cast<int32_t>(md.integer(prefix + "top_k", 1, INT32_MAX));
    const auto dim = static_cast<int32_t>(md.integer(prefix + "key_length", rotated, 4096));
    if (int64_t{indexer.heads} * dim > kMaxWidth || indexer.topK > kMaxWidth)
        bad("metadata keys '" + prefix + "head_count', 'key_length' and 'top_k' give an impossible width");
    indexer.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(indexer.heads) * dim));
    indexer.compressor = compressor("indexer_compressor", blockTokens, dim, true);
    indexer.weights = matrix("indexer.proj", _model._spec.embedding, indexer.heads);
    indexer.queries = matrix("indexer.attn_q_b", queryRank, int64_t{indexer.heads} * dim);
    return indexer;
}

GroupedReader& GroupedReader::attention(const AttentionParts& parts, int32_t blockTokens, bool indexed) {
    const Metadata& md = _model._metadata;
    const std::string prefix = _model.key("attention.");
    const int64_t width = _model._spec.embedding;
    AttentionSpec a;
    _layer.readShape(a, parts);
    if (a.kvHeads != 1) bad("metadata key '" + prefix + "head_count_kv' is not 1");
    const int64_t queries = int64_t{a.heads} * a.headDim;
    const int64_t queryRank = md.integer(prefix + "q_lora_rank", 1, kMaxWidth);
    const int64_t outputRank = md.integer(prefix + "output_lora_rank", 1, kMaxWidth);
    a.outputGroups = static_cast<int32_t>(md.integer(prefix + "output_group_count", 1, a.heads));
    if (a.heads % a.outputGroups)
        bad("metadata key '" + prefix + "head_count' is not a multiple of output_group_count");
    if (outputRank * a.outputGroups > kMaxWidth)
        bad("metadata key '" + prefix + "output_lora_rank' gives an impossible width");
    a.valuesAreKeys = a.rotatesBack = true;
    a.queryDown = matrix("attn_q_a", width, queryRank);
    a.k = matrix("attn_kv", width, a.headDim);
    a.queryNorm = _layer.norm("attn_q_a_norm", queryRank);
    a.q = matrix("attn_q_b", queryRank, queries);
    a.kNorm = _layer.norm("attn_kv_a_norm", a.headDim);
    a.sinks = _layer.norm("attn_sinks", a.heads);
    const bool fits = blockTokens >= 0 && blockTokens <= kMostBlock &&
                      (blockTokens == 0 || kPage % blockTokens == 0 || blockTokens % kPage == 0);
    if (!fits)
        bad("metadata key '" + prefix + "compress_ratios' has " + std::to_string(blockTokens) +
            ", which is neither 128 nor a divisor of 64");
    if (blockTokens > 0) {
        a.compressor = compressor("attn_compressor", blockTokens, a.headDim, indexed);
        _layer._layer.attention = a;  // the indexer's caches come after the compressor's
    }
    if (indexed) {
        const int32_t rotated = _model._spec.ropes.at(static_cast<size_t>(a.rope)).dims;
        a.indexer = indexer(queryRank, rotated, blockTokens);
    }
    a.outputDown = matrix("attn_output_a", queries / a.outputGroups, outputRank * a.outputGroups);
    a.output = matrix("attn_output_b", outputRank * a.outputGroups, width);
    _layer._layer.attention = a;
    return *this;
}

}  // namespace sharpi
