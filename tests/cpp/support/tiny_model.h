// A small random model of any known architecture, without a GGUF file: metadata and a tensor table as a container would
// give them, and a temporary file with the weights.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "model/model_spec.h"
#include "model/weights.h"
#include "tiny_families.h"

namespace tiny {

class Model {
public:
    // Public, so that a test can damage them before it reads the spec.
    std::map<std::string, sharpi::MetadataValue> metadata;
    std::vector<sharpi::TensorInfo> tensors;
    std::vector<uint8_t> bytes;

    explicit Model(const Options& options) : _options(options), _random(options.seed) {
        if (family(options.architecture).mixture && !_options.experts) _options.experts = 4;
        writeMetadata();
        writeFamilyMetadata();
        const int64_t e = _options.embedding;
        add("token_embd.weight", _options.matrices, {e, _options.vocab});
        add("output_norm.weight", DType::F32, {e});
        if (!_options.tied) add("output.weight", _options.matrices, {e, _options.vocab});
        addModelTensors();
        for (int64_t i = 0; i < _options.layers + _options.predictions; ++i) addLayer(i);
    }

    const Options& options() const { return _options; }
    std::string key(const std::string& rest) const { return _options.architecture + "." + rest; }

    // Appends a tensor of random values: most norms near 1, decays near -1, all others near 0.
    void add(const std::string& name, DType type, const std::vector<int64_t>& shape) {
        while (bytes.size() % 32) bytes.push_back(0xff);
        sharpi::TensorInfo t;
        t.name = name;
        t.type = type;
        t.shape = shape;
        t.offset = bytes.size();
        int64_t rows = 1;
        for (size_t d = 1; d < shape.size(); ++d) rows *= shape[d];
        t.bytes = sharpi::rowBytes(type, shape[0]) * rows;
        const auto has = [&name](const char* part) { return name.find(part) != std::string::npos; };
        const bool decay = has("ssm_a") && !has("alpha");
        // Gemma 4 does not divide its scores by the head's size: with norms near 1 a row would see one key alone, and
        // rounding would choose which.
        const bool scores = family(_options.architecture).gemma4 && (has("attn_q_norm") || has("attn_k_norm"));
        fill(type, t.bytes, scores ? 0.4f : has("norm") ? 1.0f : decay ? -1.0f : 0.0f);
        tensors.push_back(t);
    }
    sharpi::TensorInfo& tensor(const std::string& name) {
        for (auto& t : tensors)
            if (t.name == name) return t;
        throw std::runtime_error("no tensor " + name);
    }
    void erase(const std::string& name) { tensors.erase(tensors.begin() + (&tensor(name) - tensors.data())); }
    void reshape(const std::string& name, const std::vector<int64_t>& shape) {
        sharpi::TensorInfo& t = tensor(name);
        t.shape = shape;
        t.bytes = sharpi::rowBytes(t.type, shape[0]);
        for (size_t d = 1; d < shape.size(); ++d) t.bytes *= shape[d];
    }

    // The same model, with the values of every matrix in F32.
    Model asFloats() const {
        Model floats = *this;
        floats.tensors.clear();
        floats.bytes.clear();
        for (const sharpi::TensorInfo& t : tensors) {
            sharpi::TensorInfo made = t;
            while (floats.bytes.size() % 32) floats.bytes.push_back(0xff);
            made.type = DType::F32;
            made.offset = floats.bytes.size();
            const auto rows = static_cast<int64_t>(t.bytes / sharpi::rowBytes(t.type, t.shape[0]));
            made.bytes = sharpi::rowBytes(DType::F32, t.shape[0]) * rows;
            floats.bytes.resize(made.offset + made.bytes);
            std::vector<float> row(t.shape[0]);
            for (int64_t r = 0; r < rows; ++r) {
                sharpi::cpu::kernels().dequantizeRow(
                    t.type, &bytes[t.offset + r * sharpi::rowBytes(t.type, t.shape[0])], t.shape[0], row.data());
                std::memcpy(&floats.bytes[made.offset + r * row.size() * sizeof(float)], row.data(),
                            row.size() * sizeof(float));
            }
            floats.tensors.push_back(made);
        }
        return floats;
    }

    sharpi::TensorTable table() const { return sharpi::TensorTable(tensors); }
    sharpi::ModelSpec spec() const { return sharpi::ModelSpec::read(sharpi::Metadata(metadata), table()); }

    // Removes the file from its folder at once; the mapping keeps its contents. descriptor: if given, receives a file
    // descriptor through which the caller may change the contents, and which the caller closes.
    std::unique_ptr<sharpi::Weights> weights(int* descriptor = nullptr) const {
        std::string path = ::testing::TempDir() + "sharpi_tiny_XXXXXX";
        const int fd = ::mkstemp(path.data());
        if (fd < 0) throw std::runtime_error("no temporary file at " + path);
        if (descriptor) *descriptor = ::dup(fd);
        FILE* file = ::fdopen(fd, "wb");
        const bool written = std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size();
        if (std::fclose(file) != 0 || !written) throw std::runtime_error("cannot write " + path);
        struct Remove {
            const std::string& path;
            ~Remove() { ::unlink(path.c_str()); }
        } remove{path};
        return std::make_unique<sharpi::Weights>(std::vector<std::string>{path}, table());
    }

protected:
    struct Unwritten {};
    // Of an architecture that families() does not have: whoever derives from it writes everything.
    Model(const Options& options, Unwritten) : _options(options), _random(options.seed) {}

private:
    void writeMetadata() {
        metadata["general.architecture"] = _options.architecture;
        metadata["general.name"] = std::string("tiny");
        metadata[key("context_length")] = _options.context;
        metadata[key("embedding_length")] = _options.embedding;
        metadata[key("block_count")] = _options.layers;
        metadata[key("feed_forward_length")] = _options.hidden;
        metadata[key("attention.head_count")] = _options.heads;
        metadata[key("attention.head_count_kv")] = _options.kvHeads;
        metadata[key("attention.key_length")] = _options.headDim;
        metadata[key("attention.layer_norm_rms_epsilon")] = 1e-5;
        metadata[key("rope.freq_base")] = 10000.0;
        if (_options.experts) {
            metadata[key("expert_count")] = _options.experts;
            metadata[key("expert_used_count")] = _options.used;
        }
        if (_options.predictions) {
            metadata[key("block_count")] = _options.layers + _options.predictions;
            metadata[key("nextn_predict_layers")] = _options.predictions;
        }
        if (!hybrid()) return;
        metadata[key("full_attention_interval")] = _options.interval;
        metadata[key("ssm.group_count")] = _options.keyHeads;
        metadata[key("ssm.time_step_rank")] = _options.valueHeads;
        metadata[key("ssm.state_size")] = _options.deltaDim;
        metadata[key("ssm.inner_size")] = _options.valueHeads * _options.deltaDim;
        metadata[key("ssm.conv_kernel")] = _options.convWidth;
    }

    void writeFamilyMetadata() {
        const Family& f = family(_options.architecture);
        if (f.windows) metadata[key("attention.sliding_window")] = kWindow;
        if (f.postNorms && f.preNorms) metadata[key("final_logit_softcapping")] = 3.0;
        if (f.layerNorms) {
            metadata.erase(key("attention.layer_norm_rms_epsilon"));
            metadata[key("attention.layer_norm_epsilon")] = 1e-5;
        }
        if (f.scales)
            for (const char* name : {"embedding_scale", "residual_scale", "logit_scale"}) metadata[key(name)] = 0.7;
        if (std::string(f.name) == "gemma2") metadata[key("attn_logit_softcapping")] = 2.0;
        if (std::string(f.name) == "mistral3") {
            metadata[key("attention.temperature_scale")] = 0.1;
            metadata[key("rope.scaling.original_context_length")] = int64_t{16};
        }
        if (_options.denseFirst) metadata[key("leading_dense_block_count")] = _options.denseFirst;
        if (f.sigmoids) metadata[key("expert_gating_func")] = int64_t{2};
        if (_options.denseEvery) metadata[key("interleave_moe_layer_step")] = _options.denseEvery;
        if (f.latent) writeLatentMetadata();
        if (f.mamba) writeMambaMetadata();
        if (!f.gemma4) return;
        std::vector<double> windowed;
        for (int64_t i = 0; i < _options.layers; ++i) windowed.push_back(i % 2 == 0);
        metadata[key("attention.sliding_window_pattern")] = windowed;
        metadata[key("attention.shared_kv_layers")] = _options.sharedKv;
        metadata[key("embedding_length_per_layer_input")] = _options.layerInputs;
        metadata[key("attention.key_length")] = 2 * _options.headDim;
        metadata[key("attention.key_length_swa")] = _options.headDim;
        metadata[key("rope.freq_base_swa")] = 1000.0;
    }

    void writeLatentMetadata() {
        const Options& o = _options;
        const std::string ending = o.joinedUp ? "" : "_mla";
        metadata[key("attention.head_count_kv")] = o.joinedUp ? o.heads : int64_t{1};
        metadata[key("attention.key_length")] = o.latentRank + o.headDim;
        metadata[key("attention.value_length")] = o.latentRank;
        metadata[key("attention.key_length" + ending)] = o.plainDim + o.headDim;
        metadata[key("attention.value_length" + ending)] = o.valueDim;
        metadata[key("attention.kv_lora_rank")] = o.latentRank;
        if (o.queryRank) metadata[key("attention.q_lora_rank")] = o.queryRank;
        metadata[key("rope.dimension_count")] = o.headDim;
        if (o.architecture != "mistral4") return;
        metadata[key("attention.temperature_scale")] = 0.1;
        metadata[key("attention.temperature_length")] = int64_t{16};
    }

    void writeMambaMetadata() {
        const Options& o = _options;
        const Family& f = family(o.architecture);
        std::vector<double> kvHeads, hidden;
        for (int64_t i = 0; i < o.layers; ++i) {
            kvHeads.push_back(f.attends(i) ? static_cast<double>(o.kvHeads) : 0);
            hidden.push_back(f.feeds(i) ? static_cast<double>(o.hidden) : 0);
        }
        metadata[key("attention.head_count_kv")] = kvHeads;
        metadata[key("feed_forward_length")] = hidden;
        metadata[key("expert_shared_feed_forward_length")] = o.hidden;
        if (o.expertLatents) metadata[key("moe_latent_size")] = o.expertLatents;
        metadata[key("ssm.group_count")] = o.keyHeads;
        metadata[key("ssm.time_step_rank")] = o.valueHeads;
        metadata[key("ssm.state_size")] = o.deltaDim;
        metadata[key("ssm.inner_size")] = o.valueHeads * o.mambaDim;
        metadata[key("ssm.conv_kernel")] = o.convWidth;
    }

    void addModelTensors() {
        if (!_options.layerInputs) return;
        const int64_t all = _options.layerInputs * _options.layers;
        add("per_layer_token_embd.weight", _options.matrices, {all, _options.vocab});
        add("per_layer_model_proj.weight", _options.matrices, {_options.embedding, all});
        add("per_layer_proj_norm.weight", DType::F32, {_options.layerInputs});
    }

    // What a layer has besides the parts that other families have too.
    void addFamilyTensors(const std::string& block) {
        const Family& f = family(_options.architecture);
        const Options& o = _options;
        const int64_t e = o.embedding;
        const auto norms = [&](std::initializer_list<const char*> names) {
            for (const char* name : names) add(block + name + ".weight", DType::F32, {e});
        };
        if (f.postNorms) norms({"post_attention_norm", "post_ffw_norm"});
        if (f.sinks) add(block + "attn_sinks.weight", DType::F32, {o.heads});
        if (!f.gemma4) return;
        add(block + "layer_output_scale.weight", DType::F32, {1});
        if (o.experts) {
            norms({"post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"});
            add(block + "ffn_gate_inp.scale", DType::F32, {e});
            add(block + "ffn_down_exps.scale", DType::F32, {o.experts});
        }
        if (!o.layerInputs) return;
        add(block + "inp_gate.weight", o.matrices, {e, o.layerInputs});
        add(block + "proj.weight", o.matrices, {o.layerInputs, e});
        norms({"post_norm"});
    }

    bool hybrid() const { return family(_options.architecture).hybrid; }

    void addLayer(int64_t i) {
        const std::string block = "blk." + std::to_string(i) + ".";
        const int64_t e = _options.embedding;
        const Family& f = family(_options.architecture);
        if (f.preNorms) add(block + "attn_norm.weight", DType::F32, {e});
        if (f.preNorms && !f.layerNorms && !f.oneParts) add(block + f.ffnNorm(), DType::F32, {e});
        if (hybrid() && i < _options.layers && (i + 1) % _options.interval) addDelta(block);
        else if (f.latent) addLatentAttention(block);
        else if (f.attends(i)) addAttention(block, i);
        if (f.scans(i)) addMamba(block);
        if (f.feeds(i)) addFeedForward(block, i);
        addFamilyTensors(block);
        if (i < _options.layers) return;
        add(block + "nextn.eh_proj.weight", _options.matrices, {2 * e, e});
        for (const char* name : {"enorm", "hnorm", "shared_head_norm"})
            add(block + "nextn." + name + ".weight", DType::F32, {e});
    }

    void addDelta(const std::string& block) {
        const Options& o = _options;
        const int64_t values = o.valueHeads * o.deltaDim, channels = 2 * o.keyHeads * o.deltaDim + values;
        add(block + "attn_qkv.weight", o.matrices, {o.embedding, channels});
        add(block + "attn_gate.weight", o.matrices, {o.embedding, values});
        if (family(o.architecture).fusedSteps) {
            add(block + "ssm_ba.weight", o.matrices, {o.embedding, 2 * o.valueHeads});
        } else {
            add(block + "ssm_alpha.weight", o.matrices, {o.embedding, o.valueHeads});
            add(block + "ssm_beta.weight", DType::F32, {o.embedding, o.valueHeads});
        }
        add(block + "ssm_out.weight", o.matrices, {values, o.embedding});
        add(block + "ssm_conv1d.weight", DType::F32, {o.convWidth, channels});
        add(block + "ssm_dt.bias", DType::F32, {o.valueHeads});
        add(block + "ssm_a", DType::F32, {o.valueHeads});
        add(block + "ssm_norm.weight", DType::F32, {o.deltaDim});
    }

    void addMamba(const std::string& block) {
        const Options& o = _options;
        const int64_t inner = o.valueHeads * o.mambaDim, channels = inner + 2 * o.keyHeads * o.deltaDim;
        add(block + "ssm_in.weight", o.matrices, {o.embedding, inner + channels + o.valueHeads});
        add(block + "ssm_out.weight", o.matrices, {inner, o.embedding});
        add(block + "ssm_conv1d.weight", DType::F32, {o.convWidth, channels});
        add(block + "ssm_conv1d.bias", DType::F32, {channels});
        add(block + "ssm_dt.bias", DType::F32, {o.valueHeads});
        add(block + "ssm_a", DType::F32, {1, o.valueHeads});
        add(block + "ssm_d", DType::F32, {1, o.valueHeads});
        if (!family(o.architecture).sideBySide)
            add(block + "ssm_norm.weight", DType::F32, {inner / o.keyHeads, o.keyHeads});
    }

    void addLatentAttention(const std::string& block) {
        const Options& o = _options;
        const int64_t queries = o.heads * (o.plainDim + o.headDim);
        if (o.queryRank) {
            add(block + "attn_q_a.weight", o.matrices, {o.embedding, o.queryRank});
            add(block + "attn_q_a_norm.weight", DType::F32, {o.queryRank});
            add(block + "attn_q_b.weight", o.matrices, {o.queryRank, queries});
        } else {
            add(block + "attn_q.weight", o.matrices, {o.embedding, queries});
        }
        add(block + "attn_kv_a_mqa.weight", o.matrices, {o.embedding, o.latentRank + o.headDim});
        add(block + "attn_kv_a_norm.weight", DType::F32, {o.latentRank});
        if (o.joinedUp) {
            add(block + "attn_kv_b.weight", o.matrices, {o.latentRank, o.heads * (o.plainDim + o.valueDim)});
        } else {
            add(block + "attn_k_b.weight", o.matrices, {o.plainDim, o.latentRank, o.heads});
            add(block + "attn_v_b.weight", o.matrices, {o.latentRank, o.valueDim, o.heads});
        }
        add(block + "attn_output.weight", o.matrices, {o.heads * o.valueDim, o.embedding});
    }

    void addAttention(const std::string& block, int64_t layer) {
        const Options& o = _options;
        const Family& f = family(o.architecture);
        const bool seesAll = f.gemma4 && layer % 2 == 1, shares = o.sharedKv && layer >= o.layers - o.sharedKv;
        const int64_t dim = o.headDim * (seesAll ? 2 : 1), q = o.heads * dim, kv = o.kvHeads * dim;
        const int64_t queries = hybrid() ? 2 * q : q;
        std::vector<std::pair<std::string, int64_t>> parts{{"attn_q", queries}, {"attn_k", kv}, {"attn_v", kv}};
        if (o.fusedQkv) parts = {{"attn_qkv", queries + 2 * kv}};
        else if (shares) parts.resize(1);
        else if (seesAll) parts.pop_back();
        for (const auto& [part, rows] : parts) {
            add(block + part + ".weight", o.matrices, {o.embedding, rows});
            if (o.biases) add(block + part + ".bias", DType::F32, {rows});
        }
        add(block + "attn_output.weight", o.matrices, {q, o.embedding});
        if (f.sinks) add(block + "attn_output.bias", DType::F32, {o.embedding});
        if (f.qkNorm == sharpi::AttentionSpec::QkNorm::None || !f.normWeights) return;
        const bool perHead = f.qkNorm == sharpi::AttentionSpec::QkNorm::PerHead;
        add(block + "attn_q_norm.weight", DType::F32, {perHead ? dim : q});
        if (!shares) add(block + "attn_k_norm.weight", DType::F32, {perHead ? dim : kv});
    }

    void addFeedForward(const std::string& block, int64_t layer) {
        const Options& o = _options;
        const Family& f = family(o.architecture);
        const bool dense = !o.experts || layer < o.denseFirst || (o.denseEvery && (layer + 1) % o.denseEvery);
        if (dense || f.gemma4) {
            if (!f.fusedUp && f.gated) add(block + "ffn_gate.weight", nextType(), {o.embedding, o.hidden});
            add(block + "ffn_up.weight", nextType(), {o.embedding, o.hidden * (f.fusedUp ? 2 : 1)});
            add(block + "ffn_down.weight", nextType(), {o.hidden, o.embedding});
        }
        if (dense) return;
        add(block + "ffn_gate_inp.weight", DType::F32, {o.embedding, o.experts});
        if (f.sigmoids) add(block + "exp_probs_b.bias", DType::F32, {o.experts});
        const int64_t width = o.expertLatents ? o.expertLatents : o.embedding;
        if (o.expertLatents) {
            add(block + "ffn_latent_down.weight", o.matrices, {o.embedding, width});
            add(block + "ffn_latent_up.weight", o.matrices, {width, o.embedding});
        }
        if (o.fusedExperts) {
            add(block + "ffn_gate_up_exps.weight", nextType(), {width, 2 * o.hidden, o.experts});
        } else {
            if (f.gated) add(block + "ffn_gate_exps.weight", nextType(), {width, o.hidden, o.experts});
            add(block + "ffn_up_exps.weight", nextType(), {width, o.hidden, o.experts});
        }
        add(block + "ffn_down_exps.weight", nextType(), {o.hidden, width, o.experts});
        if (f.sinks) {
            add(block + "ffn_gate_inp.bias", DType::F32, {o.experts});
            if (o.fusedExperts) add(block + "ffn_gate_up_exps.bias", DType::F32, {2 * o.hidden, o.experts});
            else add(block + "ffn_gate_exps.bias", DType::F32, {o.hidden, o.experts});
            if (!o.fusedExperts) add(block + "ffn_up_exps.bias", DType::F32, {o.hidden, o.experts});
            add(block + "ffn_down_exps.bias", DType::F32, {o.embedding, o.experts});
        }
        if (!hybrid() && !f.plainShared) return;
        if (!f.plainShared) add(block + "ffn_gate_inp_shexp.weight", DType::F32, {o.embedding});
        if (f.gated) add(block + "ffn_gate_shexp.weight", o.matrices, {o.embedding, o.hidden});
        add(block + "ffn_up_shexp.weight", o.matrices, {o.embedding, o.hidden});
        add(block + "ffn_down_shexp.weight", o.matrices, {o.hidden, o.embedding});
    }
    DType nextType() {
        return _options.mixed.empty() ? _options.matrices : _options.mixed[_typesTaken++ % _options.mixed.size()];
    }

    void fill(DType type, uint64_t count, float around) {
        const size_t begin = bytes.size();
        bytes.resize(begin + count);
        if (type == DType::F32) {
            std::normal_distribution<float> normal(around, 0.2f);
            for (size_t at = begin; at < bytes.size(); at += 4) {
                const float value = normal(_random);
                std::memcpy(&bytes[at], &value, 4);
            }
            return;
        }
        // A block begins with a half-precision scale. Any bytes after it are valid numbers.
        if (type != DType::Q8_0 && type != DType::Q4_0)
            throw std::runtime_error("a type that tiny models do not write");
        for (size_t at = begin; at < bytes.size(); ++at) bytes[at] = static_cast<uint8_t>(_random());
        const uint16_t smallest = type == DType::Q8_0 ? 0x1800 : 0x2800;  // 2^-9, 2^-5
        for (size_t at = begin; at < bytes.size(); at += sharpi::info(type).blockBytes) {
            const uint16_t scale = smallest + _random() % 1024;  // up to twice the smallest
            std::memcpy(&bytes[at], &scale, 2);
        }
    }

    Options _options;
    std::mt19937 _random;
    size_t _typesTaken = 0;
};

// Models with Gated DeltaNet and attention that both processors run.
inline std::vector<Options> gpuHybrids() {
    std::vector<Options> all;
    Options o;
    o.seed = 200;
    o.architecture = "qwen35";
    all.push_back(o);
    o.matrices = DType::F32;
    o.layers = 5;
    o.interval = 3;
    o.keyHeads = 1;
    o.valueHeads = 3;
    o.deltaDim = 24;  // not a multiple of a warp
    o.convWidth = 2;
    o.fusedQkv = o.tied = true;
    all.push_back(o);
    o = Options();
    o.seed = 201;
    o.architecture = "qwen35moe";
    all.push_back(o);
    o.fusedExperts = true;
    o.matrices = DType::Q4_0;
    o.deltaDim = 40;
    o.convWidth = 3;
    all.push_back(o);
    o = Options();
    o.seed = 202;
    o.architecture = "qwen3next";
    o.valueHeads = 6;
    all.push_back(o);
    return all;
}

// Models that only the CPU runs: heads and latents that do not fill a vector, and a longer convolution.
inline std::vector<Options> cpuHybrids() {
    Options heads = gpuHybrids()[1];
    heads.deltaDim = 20;
    Options convolution = gpuHybrids()[0];
    convolution.convWidth = 5;
    Options mambaHeads = mambas()[1], mambaConvolution = mambas()[1];
    mambaHeads.mambaDim = 18;
    mambaConvolution.convWidth = 5;
    Options latents = mambas()[4];
    latents.matrices = DType::F32;
    latents.expertLatents = 30;
    return {heads, convolution, mambaHeads, mambaConvolution, latents};
}

inline std::vector<Options> hybrids() {
    std::vector<Options> all = gpuHybrids();
    for (const Options& o : mambas()) all.push_back(o);
    for (const Options& o : cpuHybrids()) all.push_back(o);
    return all;
}

// Experts beside the dense part; layers with embeddings of their own, of which the last have no keys and values.
inline std::vector<Options> gemma4Variants() {
    Options mixture;
    mixture.seed = 300;
    mixture.architecture = "gemma4";
    mixture.layers = 3;
    mixture.experts = 5;
    mixture.fusedExperts = true;
    Options inputs;
    inputs.seed = 301;
    inputs.architecture = "gemma4";
    inputs.layers = 5;
    inputs.layerInputs = 32;
    inputs.sharedKv = 2;
    inputs.tied = true;
    return {mixture, inputs};
}

// Latent attention, with queries of low rank and without.
inline std::vector<Options> latents() {
    Options narrow;
    narrow.seed = 400;
    narrow.architecture = "deepseek2";
    narrow.denseFirst = 1;
    Options wide = narrow;
    wide.seed = 401;
    wide.queryRank = wide.denseFirst = 0;
    wide.matrices = DType::F32;
    Options scaled = narrow;
    scaled.seed = 402;
    scaled.architecture = "mistral4";
    scaled.denseFirst = 0;
    scaled.matrices = DType::Q4_0;
    scaled.fusedExperts = true;
    Options joined = narrow;
    joined.seed = 403;
    joined.joinedUp = true;
    Options large = scaled;  // a latent that lanes own eight elements of
    large.seed = 404;
    large.architecture = "deepseek2";
    large.matrices = DType::Q8_0;
    large.latentRank = 160;
    large.heads = 5;
    large.headDim = 24;
    large.plainDim = 64;
    large.valueDim = 32;
    return {narrow, wide, scaled, joined, large};
}

// Every architecture, and the ways in which files store the same parts. Both processors run all of them.
inline std::vector<Options> gpuVariants() {
    std::vector<Options> all;
    for (const Family& a : families()) {
        if (a.hybrid || a.latent || a.mamba) continue;
        Options o;
        o.architecture = a.name;
        o.seed = static_cast<unsigned>(all.size() + 1);
        o.layers = a.layers;
        all.push_back(o);
    }
    Options o;
    o.seed = 100;
    o.architecture = "llama";
    o.experts = 5;
    o.used = 3;
    all.push_back(o);
    o.architecture = "qwen3moe";
    o.fusedExperts = o.fusedQkv = o.tied = true;
    o.matrices = DType::Q4_0;
    all.push_back(o);
    o = Options();
    o.architecture = "qwen2";
    o.fusedQkv = o.biases = true;
    all.push_back(o);
    o.fusedQkv = false;
    o.matrices = DType::F32;
    all.push_back(o);
    for (const Options& other : gemma4Variants()) all.push_back(other);
    o = Options();
    o.seed = 101;
    o.architecture = "llama4";
    o.layers = 4;
    o.denseEvery = 2;
    all.push_back(o);
    o = Options();
    o.seed = 102;
    o.architecture = "gpt-oss";
    o.fusedExperts = true;
    all.push_back(o);
    o = Options();
    o.seed = 104;
    o.architecture = "glm4moe";
    o.denseFirst = 1;
    all.push_back(o);
    o = Options();
    o.seed = 103;
    o.architecture = "arcee";
    o.experts = 5;
    o.matrices = DType::Q4_0;
    all.push_back(o);
    for (const Options& hybrid : gpuHybrids()) all.push_back(hybrid);
    for (const Options& latent : latents()) all.push_back(latent);
    for (const Options& mamba : mambas()) all.push_back(mamba);
    return all;
}

inline std::vector<Options> variants() {
    std::vector<Options> all = gpuVariants();
    for (const Options& o : cpuHybrids()) all.push_back(o);
    return all;
}

inline std::string describe(const Options& o) {
    return o.architecture + " " + sharpi::info(o.matrices).name + " seed " + std::to_string(o.seed) +
           (o.fusedQkv ? " fused" : "") + (o.biases ? " biased" : "") + (o.mixed.empty() ? "" : " mixed");
}

}  // namespace tiny
