// A small random DeepSeek V4: layers that see a window alone, blocks of 4 tokens that an indexer chooses, and all
// blocks of 128; streams of residuals; experts that tokens name. As tiny_model.h's models it needs no GGUF file.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/half.h"
#include "tiny_model.h"

namespace tiny {

struct BlockOptions {
    DType matrices = DType::Q8_0, experts = DType::MXFP4, small = DType::F32;  // small: the indexer's weights, streams
    int64_t context = 300, heads = 8, headDim = 64, rotated = 16, window = 16, topK = 8;
    std::vector<double> blocks = {0, 4, 128, 4, 0, 128};  // by layer: tokens of a block, or 0
    int64_t hashed = 2;                                   // layers whose experts tokens name
    unsigned seed = 900;
};

class BlockModel : public Model {
public:
    explicit BlockModel(const BlockOptions& options = {})
        : Model(base(options), Unwritten()), _own(options), _draw(options.seed) {
        writeKeys();
        matrix("token_embd", _own.matrices, {kWidth, vocab()}, 0.7f * std::sqrt(float{kWidth}));
        vector("output_norm", kWidth);
        matrix("output", _own.matrices, {kWidth, vocab()}, 2.0f);
        for (size_t i = 0; i < _own.blocks.size(); ++i) {
            _block = "blk." + std::to_string(i) + ".";
            addAttention(static_cast<int64_t>(_own.blocks[i]));
            addExperts(static_cast<int64_t>(i) < _own.hashed);
        }
        _block.clear();
        streams("output_hc", kStreams, 1);
    }

private:
    static constexpr int64_t kWidth = 128, kQueryRank = 64, kGroups = 4, kOutputRank = 32, kStreams = 4;
    static constexpr int64_t kIndexHeads = 6, kIndexDim = 32, kExperts = 12, kUsed = 3, kHidden = 64;

    static Options base(const BlockOptions& own) {
        Options o;
        o.architecture = "deepseek4";
        o.embedding = kWidth;
        o.context = own.context;
        o.layers = static_cast<int64_t>(own.blocks.size());
        o.experts = kExperts;
        o.used = kUsed;
        return o;
    }
    int64_t vocab() const { return options().vocab; }

    void writeKeys() {
        const std::vector<double> expertClamps(_own.blocks.size(), 1.0), sharedClamps(_own.blocks.size(), 0.8);
        const std::string of = "deepseek4.";
        metadata["general.architecture"] = std::string("deepseek4");
        metadata["general.name"] = std::string("tiny");
        const auto whole = [&](const char* name, int64_t value) { metadata[of + name] = value; };
        whole("context_length", _own.context);
        whole("embedding_length", kWidth);
        whole("block_count", static_cast<int64_t>(_own.blocks.size()));
        whole("feed_forward_length", kHidden);
        whole("attention.head_count", _own.heads);
        whole("attention.head_count_kv", 1);
        whole("attention.key_length", _own.headDim);
        whole("attention.value_length", _own.headDim);
        whole("rope.dimension_count", _own.rotated);
        whole("attention.q_lora_rank", kQueryRank);
        whole("attention.sliding_window", _own.window);
        whole("attention.indexer.head_count", kIndexHeads);
        whole("attention.indexer.key_length", kIndexDim);
        whole("attention.indexer.top_k", _own.topK);
        whole("attention.output_group_count", kGroups);
        whole("attention.output_lora_rank", kOutputRank);
        whole("hyper_connection.count", kStreams);
        whole("hyper_connection.sinkhorn_iterations", 20);
        whole("hash_layer_count", _own.hashed);
        whole("expert_count", kExperts);
        whole("expert_used_count", kUsed);
        whole("expert_feed_forward_length", kHidden);
        whole("expert_shared_count", 1);
        whole("expert_gating_func", 4);
        whole("rope.scaling.original_context_length", 64);
        metadata[of + "attention.layer_norm_rms_epsilon"] = 1e-6;
        metadata[of + "rope.freq_base"] = 10000.0;
        metadata[of + "attention.compress_rope_freq_base"] = 160000.0;
        metadata[of + "rope.scaling.type"] = std::string("yarn");
        metadata[of + "rope.scaling.factor"] = 16.0;
        metadata[of + "hyper_connection.epsilon"] = 1e-6;
        metadata[of + "expert_weights_scale"] = 1.5;
        metadata[of + "expert_weights_norm"] = true;
        metadata[of + "attention.compress_ratios"] = _own.blocks;
        metadata[of + "swiglu_clamp_exp"] = expertClamps;
        metadata[of + "swiglu_clamp_shexp"] = sharedClamps;
    }

    float normal(float around, float spread) { return std::normal_distribution<float>(around, spread)(_draw); }

    // Rows of normal numbers in the type's format. MXFP4: any codes, with scales near `spread`.
    void put(const std::string& name, DType type, const std::vector<int64_t>& shape, float around, float spread) {
        while (bytes.size() % 32) bytes.push_back(0xff);
        sharpi::TensorInfo t;
        t.name = _block + name;
        t.type = type;
        t.shape = shape;
        t.offset = bytes.size();
        int64_t rows = 1;
        for (size_t d = 1; d < shape.size(); ++d) rows *= shape[d];
        t.bytes = sharpi::rowBytes(type, shape[0]) * static_cast<size_t>(rows);
        bytes.resize(t.offset + t.bytes);
        uint8_t* const to = &bytes[t.offset];
        const int64_t count = rows * shape[0];
        switch (type) {
        case DType::F32:
            for (int64_t i = 0; i < count; ++i) {
                const float x = normal(around, spread);
                std::memcpy(to + 4 * i, &x, 4);
            }
            break;
        case DType::BF16:
        case DType::F16:
            for (int64_t i = 0; i < count; ++i) {
                const float x = normal(around, spread);
                const uint16_t half = type == DType::F16 ? sharpi::f16FromFloat(x) : upper(x);
                std::memcpy(to + 2 * i, &half, 2);
            }
            break;
        case DType::Q8_0: putBytes(to, count / 32, 34, sharpi::f16FromFloat(spread / 74.0f)); break;
        case DType::MXFP4:
            for (int64_t block = 0; block < count / 32; ++block) {
                for (int i = 1; i < 17; ++i) to[block * 17 + i] = static_cast<uint8_t>(_draw());
                to[block * 17] = static_cast<uint8_t>(127 + std::lround(std::log2(spread / 3.4f)) + _draw() % 2);
            }
            break;
        default: throw std::runtime_error("a type that tiny models do not write");
        }
        tensors.push_back(t);
    }
    static uint16_t upper(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        return static_cast<uint16_t>(bits >> 16);
    }
    // Blocks of any signed bytes behind a scale.
    void putBytes(uint8_t* to, int64_t blocks, int64_t size, uint16_t scale) {
        for (int64_t block = 0; block < blocks; ++block) {
            for (int64_t i = 2; i < size; ++i) to[block * size + i] = static_cast<uint8_t>(_draw());
            std::memcpy(to + block * size, &scale, 2);
        }
    }
    // gain: how large the product with a vector of size 1 is.
    void matrix(const std::string& name, DType type, const std::vector<int64_t>& shape, float gain = 1.0f) {
        put(name + ".weight", type, shape, 0.0f, gain / std::sqrt(static_cast<float>(shape[0])));
    }
    void vector(const std::string& name, int64_t size, float around = 1.0f, float spread = 0.2f) {
        put(name + ".weight", DType::F32, {size}, around, spread);
    }
    void streams(const std::string& name, int64_t rows, int64_t scales) {
        matrix(name + "_fn", _own.small, {kStreams * kWidth, rows});
        vector(name + "_base", rows, 0.0f, 0.5f);
        vector(name + "_scale", scales);
    }
    void compressor(const std::string& name, int64_t dim, int64_t block, DType type) {
        const int64_t width = (block == 4 ? 2 : 1) * dim;
        matrix(name + "_kv", type, {kWidth, width});
        matrix(name + "_gate", type, {kWidth, width});
        put(name + "_ape.weight", DType::F32, {width, block}, 0.0f, 1.0f);
        vector(name + "_norm", dim, 1.3f);
    }

    void addAttention(int64_t block) {
        const int64_t queries = _own.heads * _own.headDim;
        vector("attn_norm", kWidth);
        vector("attn_sinks", _own.heads, 1.0f, 1.0f);
        matrix("attn_q_a", _own.matrices, {kWidth, kQueryRank});
        vector("attn_q_a_norm", kQueryRank);
        matrix("attn_q_b", _own.matrices, {kQueryRank, queries});
        matrix("attn_kv", _own.matrices, {kWidth, _own.headDim});
        vector("attn_kv_a_norm", _own.headDim, 1.3f);
        matrix("attn_output_a", _own.matrices, {queries / kGroups, kOutputRank * kGroups});
        matrix("attn_output_b", _own.matrices, {kOutputRank * kGroups, kWidth}, 2.0f);
        streams("hc_attn", (2 + kStreams) * kStreams, 3);
        streams("hc_ffn", (2 + kStreams) * kStreams, 3);
        if (block) compressor("attn_compressor", _own.headDim, block, _own.matrices);
        if (block != 4) return;
        matrix("indexer.proj", _own.small, {kWidth, kIndexHeads});
        matrix("indexer.attn_q_b", _own.small, {kQueryRank, kIndexHeads * kIndexDim});
        compressor("indexer_compressor", kIndexDim, block, _own.small);
    }

    void addExperts(bool hashed) {
        vector("ffn_norm", kWidth);
        matrix("ffn_gate_inp", DType::F32, {kWidth, kExperts}, 2.0f);
        if (!hashed) put("exp_probs_b.bias", DType::F32, {kExperts}, 0.0f, 0.3f);
        matrix("ffn_gate_exps", _own.experts, {kWidth, kHidden, kExperts}, 1.5f);
        matrix("ffn_up_exps", _own.experts, {kWidth, kHidden, kExperts}, 1.5f);
        matrix("ffn_down_exps", _own.experts, {kHidden, kWidth, kExperts}, 3.0f);
        matrix("ffn_gate_shexp", _own.matrices, {kWidth, kHidden});
        matrix("ffn_up_shexp", _own.matrices, {kWidth, kHidden});
        matrix("ffn_down_shexp", _own.matrices, {kHidden, kWidth}, 2.0f);
        if (hashed) addChoices();
    }
    // Different experts for each token.
    void addChoices() {
        std::vector<int32_t> named;
        for (int64_t token = 0; token < vocab(); ++token) {
            const auto first = static_cast<int32_t>(_draw() % kExperts);
            for (int32_t k = 0; k < kUsed; ++k) named.push_back((first + 5 * k) % static_cast<int32_t>(kExperts));
        }
        put("ffn_gate_tid2eid.weight", DType::F32, {kUsed, vocab()}, 0.0f, 1.0f);
        tensors.back().type = DType::I32;
        std::memcpy(&bytes[tensors.back().offset], named.data(), named.size() * sizeof(int32_t));
    }

    BlockOptions _own;
    std::mt19937 _draw;
    std::string _block;
};

// The least of a DeepSeek V4: a layer whose blocks an indexer chooses, and one that sees all its blocks.
inline Options withBlocks() {
    Options options;
    options.architecture = "deepseek4";
    return options;
}

inline bool hasBlocks(const Options& options) { return options.architecture == withBlocks().architecture; }

inline Model modelOf(Options options, int64_t context) {
    options.context = context;
    if (!hasBlocks(options)) return Model(options);
    BlockOptions blocks;
    blocks.context = context;
    blocks.blocks = {4, 128};
    blocks.hashed = 1;
    return BlockModel(blocks);
}

}  // namespace tiny
