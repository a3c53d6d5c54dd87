// Reading a model: every known architecture is understood, and whatever is missing, superfluous or wrong in its
// metadata and tensors is an error that names it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/error.h"
#include "tiny_model.h"

namespace {

using namespace sharpi;
using QkNorm = AttentionSpec::QkNorm;

template <typename Call> void expectBadModel(const std::string& part, const Call& call) {
    try {
        call();
        ADD_FAILURE() << "accepted; expected an error about " << part;
    } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::BadModel) << e.what();
        EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << "'" << part << "' is not in: " << e.what();
    }
}

// A model that is right until `spoil` had its hands on it.
void expectSpoiled(const tiny::Options& options, const std::string& part,
                   const std::function<void(tiny::Model&)>& spoil) {
    tiny::Model model(options);
    ASSERT_NO_THROW(model.spec());
    spoil(model);
    expectBadModel(part, [&] { model.spec(); });
}

void expectAttention(const tiny::Options& o, const ModelSpec& spec, size_t i) {
    const tiny::Family& arch = tiny::family(o.architecture);
    const LayerSpec& layer = spec.layers.at(i);
    const auto listed = [&spec](auto id) { return spec.weights.at(static_cast<size_t>(id.index)); };
    const AttentionSpec& a = *layer.attention;
    EXPECT_EQ(a.gated, arch.hybrid);
    const int64_t dim = o.headDim * (arch.gemma4 && i % 2 == 1 ? 2 : 1);
    const int64_t queryDim = arch.latent ? dim + o.plainDim : dim;
    EXPECT_EQ(a.queryDim(), queryDim);
    EXPECT_EQ(listed(a.q).slice().rows, o.heads * queryDim * (arch.hybrid ? 2 : 1));
    EXPECT_EQ(a.heads, o.heads);
    EXPECT_EQ(a.kvHeads, arch.latent ? 1 : o.kvHeads);
    EXPECT_EQ(a.headDim, arch.latent ? o.latentRank + dim : dim);
    EXPECT_EQ(a.valueDim(), arch.latent ? o.valueDim : dim);
    EXPECT_FLOAT_EQ(a.scale, arch.gemma4 ? 1.0f : 1.0f / std::sqrt(static_cast<float>(queryDim)));
    ASSERT_EQ(a.latent.has_value(), arch.latent);
    if (a.latent) {
        EXPECT_EQ(listed(a.latent->keyUp).slice().rows, o.joinedUp ? o.plainDim : o.heads * o.latentRank);
        EXPECT_EQ(listed(a.latent->valueUp).slice().rows, o.joinedUp ? o.valueDim : o.heads * o.valueDim);
        EXPECT_EQ(bool(a.queryDown), o.queryRank > 0);
    }
    EXPECT_EQ(a.qkNorm, arch.embedsPositions(static_cast<int64_t>(i)) ? arch.qkNorm : QkNorm::None);
    ASSERT_EQ(a.rope >= 0, arch.embedsPositions(static_cast<int64_t>(i))) << "layer " << i;
    if (a.rope >= 0) {
        EXPECT_EQ(spec.ropes.at(static_cast<size_t>(a.rope)).pairing, arch.pairing);
        EXPECT_EQ(spec.ropes.at(static_cast<size_t>(a.rope)).dims, dim);
    }
    EXPECT_EQ(static_cast<bool>(a.qBias), o.biases);
    EXPECT_EQ(static_cast<bool>(a.qNorm), arch.qkNorm != QkNorm::None && arch.normWeights);
}

void expectFeedForward(const tiny::Options& o, const LayerSpec& layer, int64_t number) {
    const tiny::Family& arch = tiny::family(o.architecture);
    const bool mixture = o.experts > 0 || arch.mixture;
    const bool sparse = mixture && number >= o.denseFirst && (!o.denseEvery || (number + 1) % o.denseEvery == 0);
    EXPECT_EQ(layer.experts.has_value(), sparse);
    EXPECT_EQ(layer.dense.has_value(), !sparse || arch.gemma4);
    if (sparse) {
        EXPECT_EQ(layer.experts->routing.count, o.experts ? o.experts : 4);
        EXPECT_EQ(layer.experts->routing.used, o.used);
        EXPECT_EQ(layer.experts->routing.renormalize, arch.renormalized);
        EXPECT_EQ(layer.experts->routing.gating == Gating::Sigmoid, arch.sigmoids || o.architecture == "llama4");
        EXPECT_EQ(bool(layer.experts->routing.choiceBias), arch.sigmoids);
        EXPECT_EQ(layer.experts->hidden, o.hidden);
        EXPECT_EQ(bool(layer.experts->latentDown), o.expertLatents > 0);
        EXPECT_EQ(bool(layer.experts->latentUp), o.expertLatents > 0);
        EXPECT_EQ(layer.experts->shared.has_value(), arch.hybrid || arch.plainShared);
    } else {
        EXPECT_EQ(layer.dense->hidden, o.hidden);
    }
}

TEST(ModelSpec, ReadsEveryArchitecture) {
    std::vector<std::string> names;
    for (const tiny::Options& o : tiny::variants()) {
        SCOPED_TRACE(tiny::describe(o));
        const tiny::Model model(o);
        const ModelSpec spec = model.spec();
        const tiny::Family& arch = tiny::family(o.architecture);
        EXPECT_EQ(spec.architecture, o.architecture);
        EXPECT_EQ(spec.name, "tiny");
        EXPECT_EQ(spec.vocabSize, o.vocab);
        EXPECT_EQ(spec.contextLength, o.context);
        EXPECT_EQ(spec.embedding, o.embedding);
        EXPECT_FLOAT_EQ(spec.normEpsilon, 1e-5f);
        const auto listed = [&spec](auto id) { return spec.weights.at(static_cast<size_t>(id.index)); };
        EXPECT_EQ(listed(spec.output).sameAs == spec.tokenEmbedding.index, o.tied);
        EXPECT_EQ(listed(spec.output).slice().tensor == listed(spec.tokenEmbedding).slice().tensor, o.tied);
        ASSERT_EQ(static_cast<int64_t>(spec.layers.size()), o.layers);
        for (size_t i = 0; i < spec.layers.size(); ++i) {
            const LayerSpec& layer = spec.layers[i];
            const auto number = static_cast<int64_t>(i);
            const bool updates = arch.hybrid && (number + 1) % o.interval != 0;
            ASSERT_EQ(layer.attention.has_value(), arch.attends(number) && !updates);
            ASSERT_EQ(layer.delta.has_value(), updates);
            ASSERT_EQ(layer.mamba.has_value(), arch.scans(number));
            ASSERT_EQ(layer.dense || layer.experts, arch.feeds(number));
            if (layer.mamba) {
                EXPECT_EQ(layer.mamba->groups, o.keyHeads);
                EXPECT_EQ(layer.mamba->heads, o.valueHeads);
                EXPECT_EQ(layer.mamba->headDim, o.mambaDim);
                EXPECT_EQ(layer.mamba->stateDim, o.deltaDim);
                EXPECT_EQ(layer.mamba->convState(),
                          (o.convWidth - 1) * (o.valueHeads * o.mambaDim + 2 * o.keyHeads * o.deltaDim));
                EXPECT_EQ(layer.mamba->matrixState(), o.valueHeads * o.mambaDim * o.deltaDim);
            }
            if (layer.delta) {
                EXPECT_EQ(layer.delta->keyHeads, o.keyHeads);
                EXPECT_EQ(layer.delta->valueHeads, o.valueHeads);
                EXPECT_EQ(layer.delta->headDim, o.deltaDim);
                EXPECT_EQ(layer.delta->convState(), (o.convWidth - 1) * (2 * o.keyHeads + o.valueHeads) * o.deltaDim);
                EXPECT_EQ(layer.delta->matrixState(), o.valueHeads * o.deltaDim * o.deltaDim);
            }
            if (layer.attention) expectAttention(o, spec, i);
            if (layer.dense || layer.experts) expectFeedForward(o, layer, number);
        }
        names.push_back(o.architecture);
    }
    names.emplace_back("deepseek4");  // too much for a tiny::Model: tests/python/engine/test_deepseek4.py reads it
    for (const std::string& name : knownArchitectures())
        EXPECT_EQ(std::count(names.begin(), names.end(), name) > 0, true) << name;
}

TEST(ModelSpec, CountsParameters) {
    const TensorTable tensors({{"a", DType::F32, {5}, 0, 0, 20},
                               {"b", DType::F32, {4, 3}, 0, 32, 48},
                               {"c", DType::Q8_0, {32, 2, 7}, 0, 96, 476}});
    EXPECT_EQ(ModelSpec().parameters(tensors), 5 + 12 + 448);
}

TEST(ModelSpec, UnknownArchitectureIsNamedWithThoseThatAreKnown) {
    expectSpoiled({}, "'mammoth'", [](tiny::Model& m) { m.metadata["general.architecture"] = std::string("mammoth"); });
    for (const std::string& known : knownArchitectures())
        expectSpoiled({}, known, [](tiny::Model& m) { m.metadata["general.architecture"] = std::string("mammoth"); });
    expectSpoiled({}, "general.architecture", [](tiny::Model& m) { m.metadata.erase("general.architecture"); });
    expectSpoiled({}, "general.architecture", [](tiny::Model& m) { m.metadata["general.architecture"] = int64_t{3}; });
}

TEST(ModelSpec, EveryTensorIsNeeded) {
    for (const tiny::Options& o : tiny::variants()) {
        const tiny::Model whole(o);
        for (const TensorInfo& t : whole.tensors) {
            const auto has = [&t](const char* part) { return t.name.find(part) != std::string::npos; };
            const bool optional = t.name == "output.weight" || has(".bias") || has("_scale.") || has("exps.scale");
            if (optional) continue;
            tiny::Model model(o);
            model.erase(t.name);
            SCOPED_TRACE(tiny::describe(o) + " without " + t.name);
            // A fused tensor's absence shows as that of its first part.
            const bool fused = has("attn_qkv") || has("attn_kv_b") || has("gate_up");
            expectBadModel(fused ? "is missing" : "'" + t.name + "'", [&] { model.spec(); });
        }
    }
}

TEST(ModelSpec, EveryShapeIsChecked) {
    for (const tiny::Options& o : tiny::variants()) {
        const tiny::Model whole(o);
        for (const TensorInfo& t : whole.tensors) {
            SCOPED_TRACE(tiny::describe(o) + " " + t.name);
            for (size_t d = 0; d < t.shape.size(); ++d) {
                tiny::Model model(o);
                auto shape = t.shape;
                shape[d] += info(t.type).blockElements;
                model.reshape(t.name, shape);
                // The vocabulary is as large as the embedding says, and the experts as wide as ffn_down says: there
                // it is the other tensors that do not fit.
                if (t.name == "token_embd.weight" && d == 1) {
                    const char* other = o.layerInputs ? "per_layer_token_embd" : "output.weight";
                    if (o.tied && !o.layerInputs) EXPECT_NO_THROW(model.spec());
                    else expectBadModel(other, [&] { model.spec(); });
                } else if (t.name.find("ffn_down_") != std::string::npos && t.name.find("exp") != std::string::npos &&
                           t.name.find(".weight") != std::string::npos && d == 0) {
                    const bool gated = tiny::family(o.architecture).gated;
                    expectBadModel(gated ? "ffn_gate" : "ffn_up", [&] { model.spec(); });
                } else {
                    expectBadModel("'" + t.name + "'", [&] { model.spec(); });
                }
            }
            tiny::Model model(o), same(o);
            auto shape = t.shape;
            shape.push_back(2);
            model.reshape(t.name, shape);
            expectBadModel("'" + t.name + "'", [&] { model.spec(); });
            shape.back() = 1;  // says nothing, and some writers add it
            same.reshape(t.name, shape);
            EXPECT_NO_THROW(same.spec());
        }
    }
}

TEST(ModelSpec, ScalesOfWholeMatricesAreRefused) {
    for (const char* name : {"blk.1.attn_q.scale", "blk.1.attn_q.input_scale", "blk.1.attn_q.weight.scale"}) {
        expectSpoiled({}, "scales the whole NVFP4 matrix 'blk.1.attn_q.weight'", [&](tiny::Model& m) {
            TensorInfo& matrix = m.tensor("blk.1.attn_q.weight");
            matrix.type = DType::NVFP4;
            m.reshape(matrix.name, matrix.shape);
            EXPECT_NO_THROW(m.spec());
            m.add(name, DType::F32, {1});
        });
        expectSpoiled({}, "has no place", [&](tiny::Model& m) { m.add(name, DType::F32, {1}); });
    }
}

TEST(ModelSpec, TensorsThatNobodyUsesAreRefused) {
    for (const char* name : {"blk.0.attn_sinks.weight", "blk.2.attn_norm.weight", "rope.weight", "blk.0.ffn_gate.bias"})
        expectSpoiled({}, std::string("'") + name + "'", [&](tiny::Model& m) { m.add(name, DType::F32, {64}); });
    tiny::Model model{tiny::Options()};
    model.add("rope_freqs.weight", DType::F32, {8});
    EXPECT_TRUE(static_cast<bool>(model.spec().ropes.at(0).factors));
}

TEST(ModelSpec, TheEarlyLayoutOfQwen3NextIsRefusedByName) {
    tiny::Options o;
    o.architecture = "qwen3next";
    expectSpoiled(o, "newer file", [&](tiny::Model& m) {
        m.erase("blk.0.attn_qkv.weight");
        m.erase("blk.0.attn_gate.weight");
        m.add("blk.0.ssm_in.weight", DType::F32, {o.embedding, (2 * o.keyHeads + 2 * o.valueHeads) * o.deltaDim});
    });
}

TEST(ModelSpec, MixturesSayHowManyExpertsTheyHave) {
    for (const tiny::Family& family : tiny::families()) {
        if (!family.mixture) continue;
        tiny::Options o;
        o.architecture = family.name;
        o.layers = family.layers;
        const std::string key = o.architecture + ".expert_count";
        expectSpoiled(o, "'" + key + "' is missing", [&](tiny::Model& m) { m.metadata.erase(key); });
    }
}

TEST(ModelSpec, APartWithoutAGateHasOneMatrixBeforeTheActivation) {
    for (const int64_t experts : {0, 4}) {
        tiny::Options o;
        o.architecture = "arcee";
        o.experts = experts;
        const ModelSpec spec = tiny::Model(o).spec();
        const std::string ending = experts ? "_exps.weight" : ".weight";
        for (const LayerSpec& layer : spec.layers) {
            const int32_t first = experts ? layer.experts->gate.index : layer.dense->gate.index;
            const bool second = experts ? bool(layer.experts->up) : bool(layer.dense->up);
            const Activation activation = experts ? layer.experts->activation : layer.dense->activation;
            EXPECT_FALSE(second);
            EXPECT_EQ(activation.kind, ActivationKind::ReluSquared);
            const int32_t tensor = spec.weights.at(static_cast<size_t>(first)).slice().tensor;
            EXPECT_NE(tiny::Model(o).tensors.at(static_cast<size_t>(tensor)).name.find("ffn_up" + ending),
                      std::string::npos);
        }
        std::vector<int64_t> shape{o.embedding, o.hidden};
        if (experts) shape.push_back(experts);
        expectSpoiled(o, "has no place", [&](tiny::Model& m) { m.add("blk.0.ffn_gate" + ending, DType::F32, shape); });
    }
}

// Gate first, then up, for each expert.
TEST(ModelSpec, FusedBiasesOfExpertsAreSlices) {
    tiny::Options o;
    o.architecture = "gpt-oss";
    o.fusedExperts = true;
    const tiny::Model model(o);
    const ModelSpec spec = model.spec();
    const ExpertFfnSpec& f = *spec.layers.at(1).experts;
    int64_t begin = 0;
    for (const VectorId id : {f.gateBias, f.upBias}) {
        ASSERT_TRUE(id);
        const WeightSlice& slice = spec.weights.at(static_cast<size_t>(id.index)).slice();
        EXPECT_EQ(model.tensors.at(static_cast<size_t>(slice.tensor)).name, "blk.1.ffn_gate_up_exps.bias");
        EXPECT_EQ(slice.colBegin, begin);
        EXPECT_EQ(slice.cols, o.hidden);
        EXPECT_EQ(slice.rows, 4);
        begin += o.hidden;
    }
}

TEST(ModelSpec, NormsAndBiasesMustBeFloats) {
    expectSpoiled({}, "'blk.0.attn_norm.weight'", [](tiny::Model& m) {
        m.tensor("blk.0.attn_norm.weight").type = DType::Q8_0;
        m.reshape("blk.0.attn_norm.weight", {64});
    });
}

TEST(ModelSpec, MetadataOfEveryKindIsChecked) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const auto llama = [](const std::string& rest) { return "llama." + rest; };
    struct Case {
        std::string key;
        MetadataValue value;
    };
    const std::vector<Case> cases = {
        {"context_length", int64_t{0}},
        {"context_length", int64_t{1} << 40},
        {"context_length", 3.5},
        {"embedding_length", int64_t{-64}},
        {"embedding_length", std::string("64")},
        {"embedding_length", true},
        {"block_count", int64_t{0}},
        {"block_count", int64_t{5000}},
        {"feed_forward_length", int64_t{0}},
        {"feed_forward_length", std::vector<double>{96.5, 96}},
        {"feed_forward_length", std::vector<double>{96}},
        {"attention.head_count", int64_t{0}},
        {"attention.head_count", int64_t{3}},
        {"attention.head_count_kv", int64_t{5}},
        {"attention.head_count_kv", int64_t{0}},
        {"attention.key_length", int64_t{1}},
        {"attention.key_length", int64_t{15}},
        {"attention.key_length", int64_t{5000}},
        {"attention.layer_norm_rms_epsilon", -1e-5},
        {"attention.layer_norm_rms_epsilon", 1.0},
        {"attention.layer_norm_rms_epsilon", nan},
        {"attention.layer_norm_rms_epsilon", std::string("small")},
        {"rope.dimension_count", int64_t{18}},
        {"rope.dimension_count", int64_t{7}},
        {"rope.dimension_count", int64_t{0}},
        {"rope.freq_base", 1.0},
        {"rope.freq_base", nan},
        {"rope.freq_base", -5.0},
        {"rope.scaling.factor", 0.0},
        {"rope.scaling.factor", -2.0},
        {"rope.scaling.type", std::string("bent")},
        {"rope.scaling.original_context_length", int64_t{0}},
        {"expert_count", int64_t{-1}},
    };
    for (const Case& c : cases) {
        SCOPED_TRACE(c.key);
        // head_count and head_count_kv are wrong together: either may be named.
        const std::string named = c.key.rfind("attention.head_count", 0) == 0 ? "attention.head_count" : c.key;
        expectSpoiled({}, llama(named), [&](tiny::Model& m) { m.metadata[llama(c.key)] = c.value; });
    }
    expectSpoiled({}, "different lengths",
                  [&](tiny::Model& m) { m.metadata[llama("attention.value_length")] = int64_t{8}; });
    for (const char* key : {"context_length", "embedding_length", "block_count", "feed_forward_length",
                            "attention.head_count", "attention.layer_norm_rms_epsilon"})
        expectSpoiled({}, llama(key), [&](tiny::Model& m) { m.metadata.erase(llama(key)); });

    // What is found is named as well as what is wanted.
    const auto becomes = [&](const char* key, MetadataValue value, const std::string& said) {
        expectSpoiled({}, "'" + llama(key) + "' is " + said, [&](tiny::Model& m) { m.metadata[llama(key)] = value; });
    };
    becomes("context_length", std::vector<double>{}, "an array, not a whole number of 64 bits");
    becomes("rope.freq_base", std::vector<double>{1e4}, "an array, not a number");
    becomes("rope.scaling.type", true, "a bool, not a string");

    tiny::Options sparse;
    sparse.architecture = "qwen3moe";
    expectSpoiled(sparse, "qwen3moe.expert_count", [](tiny::Model& m) { m.metadata.erase("qwen3moe.expert_count"); });
    for (const int64_t used : {0, 5})
        expectSpoiled(sparse, "qwen3moe.expert_used_count",
                      [&](tiny::Model& m) { m.metadata["qwen3moe.expert_used_count"] = used; });
    expectSpoiled(sparse, "expert_gating_func' is none of",
                  [](tiny::Model& m) { m.metadata["qwen3moe.expert_gating_func"] = int64_t{5}; });
    expectSpoiled(sparse, "expert_weights_norm",
                  [](tiny::Model& m) { m.metadata["qwen3moe.expert_weights_norm"] = int64_t{1}; });
}

TEST(ModelSpec, AQueryRankOfZeroIsNone) {
    const tiny::Options o = tiny::latents()[1];
    ASSERT_EQ(o.queryRank, 0);
    tiny::Model model(o);
    model.metadata[o.architecture + ".attention.q_lora_rank"] = int64_t{0};
    const ModelSpec spec = model.spec();
    for (size_t i = 0; i < spec.layers.size(); ++i) expectAttention(o, spec, i);
}

TEST(ModelSpec, HybridsNameWhatIsWrong) {
    tiny::Options o;
    o.architecture = "qwen35";
    const std::vector<std::pair<std::string, int64_t>> wrong = {
        {"ssm.group_count", 0},         {"ssm.group_count", 3},      {"ssm.time_step_rank", 0},
        {"ssm.time_step_rank", 65537},  {"ssm.state_size", 0},       {"ssm.state_size", 5000},
        {"ssm.inner_size", 63},         {"ssm.conv_kernel", 1},      {"ssm.conv_kernel", 65},
        {"full_attention_interval", 0}, {"nextn_predict_layers", 2}, {"nextn_predict_layers", -1}};
    for (const auto& [key, value] : wrong) {
        SCOPED_TRACE(key + " " + std::to_string(value));
        // Heads that are no multiple are told of where either is named.
        const std::string named = key == "ssm.group_count" && value == 3 ? "group_count" : "qwen35." + key;
        expectSpoiled(o, named,
                      [&, name = key, number = value](tiny::Model& m) { m.metadata["qwen35." + name] = number; });
    }
    for (const char* key :
         {"ssm.group_count", "ssm.time_step_rank", "ssm.state_size", "ssm.inner_size", "ssm.conv_kernel"})
        expectSpoiled(o, std::string("qwen35.") + key,
                      [&](tiny::Model& m) { m.metadata.erase(std::string("qwen35.") + key); });
    // Another interval wants other tensors.
    expectSpoiled(o, "'blk.1.attn_qkv.weight'",
                  [](tiny::Model& m) { m.metadata["qwen35.full_attention_interval"] = int64_t{3}; });
    o.convWidth = 32;
    expectSpoiled(o, "'blk.0.ssm_conv1d.weight' must be", [](tiny::Model& m) {
        m.tensor("blk.0.ssm_conv1d.weight").type = DType::Q8_0;
        m.reshape("blk.0.ssm_conv1d.weight", {32, 128});
    });
}

TEST(ModelSpec, MambaNamesWhatIsWrong) {
    const tiny::Options o = tiny::mambas()[0];
    const auto key = [](const std::string& rest) { return "granitehybrid.ssm." + rest; };
    const std::vector<std::pair<std::string, int64_t>> wrong = {
        {"group_count", 0}, {"group_count", 3},   {"time_step_rank", 0}, {"time_step_rank", 65537},
        {"state_size", 0},  {"state_size", 5000}, {"inner_size", 95},    {"inner_size", 0},
        {"conv_kernel", 1}, {"conv_kernel", 65}};
    for (const auto& [name, value] : wrong) {
        SCOPED_TRACE(name + " " + std::to_string(value));
        // Heads that are no multiple of groups are told of where either is named.
        const std::string named = name == "group_count" && value == 3 ? name : key(name);
        expectSpoiled(o, named, [&, name = name, value = value](tiny::Model& m) { m.metadata[key(name)] = value; });
    }
    for (const char* name : {"group_count", "time_step_rank", "state_size", "inner_size", "conv_kernel"})
        expectSpoiled(o, key(name), [&](tiny::Model& m) { m.metadata.erase(key(name)); });
    expectSpoiled(o, "'blk.0.ssm_conv1d.bias' has shape",
                  [](tiny::Model& m) { m.reshape("blk.0.ssm_conv1d.bias", {3}); });
    tiny::Model plain(o);
    plain.erase("blk.0.ssm_conv1d.bias");
    EXPECT_FALSE(plain.spec().layers[0].mamba->convBias);
    // Only where attention stands beside it may the norm be absent, which another test shows.
    tiny::Model beside(tiny::mambas()[3]);
    EXPECT_FALSE(beside.spec().layers[0].mamba->norm);
    beside.add("blk.0.ssm_norm.weight", DType::F32, {48, 2});
    EXPECT_TRUE(beside.spec().layers[0].mamba->norm);
    EXPECT_FALSE(beside.spec().layers[1].mamba->norm);
    beside.reshape("blk.0.ssm_norm.weight", {96, 1});
    expectBadModel("'blk.0.ssm_norm.weight' has shape", [&] { beside.spec(); });
    const std::string latents = "nemotron_h_moe.moe_latent_size";
    expectSpoiled(tiny::mambas()[2], "ffn_latent_down.weight' is missing",
                  [&](tiny::Model& m) { m.metadata[latents] = int64_t{32}; });
    expectSpoiled(tiny::mambas()[4], "ffn_down_exps.weight' has shape",
                  [&](tiny::Model& m) { m.metadata.erase(latents); });
    expectSpoiled(tiny::mambas()[4], "'" + latents + "'", [&](tiny::Model& m) { m.metadata[latents] = int64_t{65}; });
    // A layer whose heads of keys are 0 has no attention.
    expectSpoiled(o, "'blk.1.ssm_in.weight' is missing", [&](tiny::Model& m) {
        m.metadata["granitehybrid.attention.head_count_kv"] = std::vector<double>{0, 0, 0};
    });
}

// It is described, needed, and no layer of the model's own.
TEST(ModelSpec, ReadsPredictionLayers) {
    for (const char* architecture : {"qwen35", "qwen35moe", "glm4moe", "deepseek2"}) {
        SCOPED_TRACE(architecture);
        tiny::Options o;
        o.architecture = architecture;
        o.predictions = 1;
        const tiny::Family& family = tiny::family(architecture);
        const tiny::Model whole(o);
        const ModelSpec spec = whole.spec();
        EXPECT_EQ(spec.layers.size(), 2u);
        ASSERT_EQ(spec.predictions.size(), 1u);
        const PredictionSpec& p = spec.predictions[0];
        ASSERT_TRUE(p.layer.attention);
        EXPECT_EQ(p.layer.attention->gated, family.hybrid);
        EXPECT_EQ(p.layer.attention->latent.has_value(), family.latent);
        EXPECT_EQ(spec.weights.at(static_cast<size_t>(p.projection.index)).slice().cols, 2 * o.embedding);
        EXPECT_NE(p.headNorm.index, spec.outputNorm.index);
        EXPECT_EQ(p.embedding.index, spec.tokenEmbedding.index);
        const std::vector<const LayerSpec*> loaded = spec.loadedLayers();
        EXPECT_EQ(loaded, (std::vector<const LayerSpec*>{&spec.layers[0], &spec.layers[1], &p.layer}));
        for (const TensorInfo& t : whole.tensors) {
            const auto names = [&](const char* part) { return t.name.find(part) != std::string::npos; };
            if (t.name.rfind("blk.2.", 0) != 0 || names("shared_head") || names("exp_probs_b")) continue;
            tiny::Model model(o);
            model.erase(t.name);
            expectBadModel("'" + t.name + "'", [&] { model.spec(); });
        }
        tiny::Model own(o);
        own.add("blk.2.nextn.embed_tokens.weight", DType::F32, {o.embedding, o.vocab});
        EXPECT_NE(own.spec().predictions.at(0).embedding.index, own.spec().tokenEmbedding.index);
        own.add("blk.2.nextn.shared_head_head.weight", DType::F32, {o.embedding, o.vocab});
        const ModelSpec headed = own.spec();
        if (family.hybrid) {
            EXPECT_TRUE(headed.predictions.empty()) << "with an output head of its own";
            EXPECT_EQ(headed.loadedLayers().size(), 2u);
        } else {
            EXPECT_EQ(headed.predictions.size(), 1u) << "with a copy of the model's";
            for (const ListedWeight& weight : headed.weights)
                EXPECT_NE(weight.slice().tensor, static_cast<int32_t>(own.tensors.size()) - 1) << "the copy is loaded";
        }
        own.reshape("blk.2.nextn.shared_head_head.weight", {o.embedding, o.vocab + 1});
        expectBadModel("shared_head_head", [&] { own.spec(); });

        o.predictions = 3;  // which are read, and of which the first is kept
        tiny::Model several(o);
        ASSERT_EQ(several.spec().predictions.size(), 1u);
        const ModelSpec kept = several.spec();
        const ListedWeight& projection = kept.weights.at(static_cast<size_t>(kept.predictions[0].projection.index));
        EXPECT_EQ(several.tensors[static_cast<size_t>(projection.slice().tensor)].name, "blk.2.nextn.eh_proj.weight");
        several.add("blk.3.nextn.shared_head_head.weight", DType::F32, {o.embedding, o.vocab});
        EXPECT_EQ(several.spec().predictions.size(), 1u);
        several.add("blk.2.nextn.shared_head_head.weight", DType::F32, {o.embedding, o.vocab});
        if (family.hybrid) {
            EXPECT_TRUE(several.spec().predictions.empty()) << "the second goes on from the first";
        }
        several.erase("blk.4.nextn.hnorm.weight");
        expectBadModel("'blk.4.nextn.hnorm.weight'", [&] { several.spec(); });
    }
    tiny::Options other;  // no other architecture has one
    expectSpoiled(other, "'blk.0.nextn.enorm.weight'",
                  [](tiny::Model& m) { m.add("blk.0.nextn.enorm.weight", DType::F32, {64}); });
}

// Of the layers that metadata counts, a file may lack all tensors, or those that only prediction layers have.
TEST(ModelSpec, PredictionLayersThatTheFileLacksAreLeftOut) {
    for (const char* architecture : {"qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek2"}) {
        for (const int64_t count : {1, 3}) {
            SCOPED_TRACE(std::string(architecture) + ", " + std::to_string(count) + " counted");
            tiny::Options o;
            o.architecture = architecture;
            const ModelSpec without = tiny::Model(o).spec();
            o.predictions = count;
            for (const char* lacking : {"", "nextn."}) {
                tiny::Model model(o);
                for (const TensorInfo& t : std::vector<TensorInfo>(model.tensors))
                    for (int64_t i = o.layers; i < o.layers + count; ++i)
                        if (t.name.rfind("blk." + std::to_string(i) + "." + lacking, 0) == 0) model.erase(t.name);
                const ModelSpec spec = model.spec();
                EXPECT_TRUE(spec.predictions.empty());
                EXPECT_EQ(spec.layers.size(), 2u);
                EXPECT_EQ(spec.weights.size(), without.weights.size());
                model.erase("blk.1.attn_norm.weight");
                expectBadModel("'blk.1.attn_norm.weight'", [&] { model.spec(); });
            }
        }
    }
}

TEST(ModelSpec, ReadsRotaryScaling) {
    tiny::Model model{tiny::Options()};
    model.metadata["llama.rope.scaling.type"] = std::string("yarn");
    model.metadata["llama.rope.scaling.factor"] = 4.0;
    model.metadata["llama.rope.scaling.original_context_length"] = int64_t{75};
    model.metadata["llama.rope.dimension_count"] = int64_t{8};
    const ModelSpec spec = model.spec();
    const RopeSpec& rope = spec.ropes.at(static_cast<size_t>(spec.layers[0].attention->rope));
    EXPECT_EQ(rope.dims, 8);
    EXPECT_DOUBLE_EQ(rope.frequencyScale, 0.25);
    EXPECT_DOUBLE_EQ(rope.extrapolation, 1.0);
    EXPECT_NEAR(rope.magnitude, 1.1386294361, 1e-9);
    EXPECT_EQ(rope.originalContext, 75);
}

TEST(TensorTable, RefusesNonsense) {
    const auto table = [](TensorInfo t) { return TensorTable({std::move(t)}); };
    expectBadModel("'w'", [&] { table({"w", DType::F32, {}, 0, 0, 0}); });
    expectBadModel("'w'", [&] { table({"w", DType::F32, {0, 4}, 0, 0, 0}); });
    expectBadModel("'w'", [&] { table({"w", DType::F32, {4, -1}, 0, 0, 16}); });
    expectBadModel("'w'", [&] { table({"w", DType::Q8_0, {33, 2}, 0, 0, 70}); });
    expectBadModel("'w'", [&] { table({"w", DType::F32, {4, 4}, 0, 0, 63}); });
    expectBadModel("'w'", [&] { table({"w", DType::F32, {4, int64_t{1} << 40, int64_t{1} << 40}, 0, 0, 0}); });
    const TensorInfo good = {"w", DType::F32, {4, 4}, 0, 0, 64};
    EXPECT_NO_THROW(table(good));
    expectBadModel("'w'", [&] { TensorTable({good, good}); });
}

// The rows of a fused tensor, byte for byte those of its parts.
TEST(Weights, FusedSlicesAreTheRightRows) {
    tiny::Options o;
    o.architecture = "qwen3moe";
    o.fusedQkv = o.fusedExperts = o.biases = true;
    const tiny::Model model(o);
    const ModelSpec spec = model.spec();
    const auto weights = model.weights();
    const LayerSpec& layer = spec.layers[1];
    const AttentionSpec& a = *layer.attention;
    const auto expectRows = [&](const Matrix& m, const std::string& name, int64_t begin, int64_t rows, int64_t cols) {
        tiny::Model copy(model);
        const TensorInfo& t = copy.tensor(name);
        EXPECT_EQ(m.rows, rows);
        EXPECT_EQ(m.cols, cols);
        EXPECT_EQ(
            std::memcmp(m.data, &model.bytes[t.offset + begin * rowBytes(t.type, cols)], rows * rowBytes(t.type, cols)),
            0)
            << name;
    };
    const auto slice = [&spec](auto id) { return spec.weights.at(static_cast<size_t>(id.index)).slice(); };
    expectRows(weights->matrix(slice(a.q)), "blk.1.attn_qkv.weight", 0, 64, 64);
    expectRows(weights->matrix(slice(a.k)), "blk.1.attn_qkv.weight", 64, 32, 64);
    expectRows(weights->matrix(slice(a.v)), "blk.1.attn_qkv.weight", 96, 32, 64);
    EXPECT_EQ(slice(a.qBias).colBegin, 0);
    EXPECT_EQ(slice(a.kBias).colBegin, 64);
    EXPECT_EQ(slice(a.vBias).colBegin, 96);
    EXPECT_EQ(slice(a.qBias).cols, 64);
    EXPECT_EQ(slice(a.vBias).cols, 32);
    const ExpertFfnSpec& f = *layer.experts;
    for (int32_t e = 0; e < f.routing.count; ++e) {
        expectRows(weights->matrix(slice(f.gate), e), "blk.1.ffn_gate_up_exps.weight", e * 192, 96, 64);
        expectRows(weights->matrix(slice(f.up), e), "blk.1.ffn_gate_up_exps.weight", e * 192 + 96, 96, 64);
        expectRows(weights->matrix(slice(f.down), e), "blk.1.ffn_down_exps.weight", e * 64, 64, 96);
    }
}

// A program started with standard input closed gets its number for the first file that it opens.
TEST(Weights, AFileMayHaveTheNumberOfStandardInput) {
    const tiny::Model model{tiny::Options()};
    const int saved = ::dup(0);
    ::close(0);
    EXPECT_NO_THROW(model.weights());
    if (saved >= 0) {
        ::dup2(saved, 0);
        ::close(saved);
    }
}

TEST(Weights, TensorsOutsideTheFileAreNamed) {
    const auto expectOutside = [](const std::function<void(tiny::Model&)>& spoil) {
        tiny::Model model{tiny::Options()};
        ASSERT_NO_THROW(model.weights());
        spoil(model);
        expectBadModel("'blk.1.ffn_down.weight'", [&] { model.weights(); });
    };
    const char* last = "blk.1.ffn_down.weight";
    expectOutside([](tiny::Model& m) { m.bytes.pop_back(); });
    expectOutside([&](tiny::Model& m) { m.tensor(last).offset += 1; });
    expectOutside([&](tiny::Model& m) { m.tensor(last).offset = std::numeric_limits<uint64_t>::max() - 10; });
    expectOutside([&](tiny::Model& m) { m.tensor(last).file = 1; });
    expectOutside([&](tiny::Model& m) { m.tensor(last).file = -1; });
    const tiny::Model model{tiny::Options()};
    expectBadModel("/nonexistent/weights", [&] { Weights({"/nonexistent/weights"}, model.table()); });
    expectBadModel(::testing::TempDir(), [&] { Weights({::testing::TempDir()}, model.table()); });
}

}  // namespace
