// What planning knows of a model's tensors: what each is used for, where all their bytes are, and what loading takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "memory/stream/weight_stream.h"
#include "placement/placement.h"
#include "plan/cuda_kind.h"
#include "planning/memory_plan.h"
#include "seed.h"
#include "tiny_model.h"

namespace {

using namespace sharpi;

std::vector<std::string> described(const tiny::Model& model, const ModelSpec& spec) {
    std::vector<std::string> lines;
    for (const TensorUse& use : tensorUses(spec, model.table())) {
        lines.push_back(model.tensors.at(static_cast<size_t>(use.tensor)).name + " " + roleName(use.role) + " " +
                        std::to_string(use.layer));
    }
    return lines;
}
std::vector<std::string> described(const tiny::Model& model) { return described(model, model.spec()); }

TEST(TensorUses, ComeInTheOrderOfAToken) {
    tiny::Options o;
    o.architecture = "qwen2";
    o.biases = true;
    o.layers = 1;
    EXPECT_EQ(described(tiny::Model(o)),
              (std::vector<std::string>{
                  "token_embd.weight embedding -1", "blk.0.attn_norm.weight vector 0",
                  "blk.0.attn_q.weight attention 0", "blk.0.attn_k.weight attention 0",
                  "blk.0.attn_v.weight attention 0", "blk.0.attn_output.weight attention 0",
                  "blk.0.attn_q.bias vector 0", "blk.0.attn_k.bias vector 0", "blk.0.attn_v.bias vector 0",
                  "blk.0.ffn_norm.weight vector 0", "blk.0.ffn_gate.weight ffn_gate 0", "blk.0.ffn_up.weight ffn_up 0",
                  "blk.0.ffn_down.weight ffn_down 0", "output_norm.weight vector -1", "output.weight head -1"}));

    o = tiny::Options();
    o.architecture = "qwen3moe";
    o.fusedExperts = o.fusedQkv = o.tied = true;
    o.layers = 2;
    std::vector<std::string> expected = {"token_embd.weight embedding -1"};
    for (const std::string i : {"0", "1"}) {
        for (const std::string line :
             {"attn_norm.weight vector", "attn_qkv.weight attention", "attn_qkv.weight attention",
              "attn_qkv.weight attention", "attn_output.weight attention", "attn_q_norm.weight vector",
              "attn_k_norm.weight vector", "ffn_norm.weight vector", "ffn_gate_inp.weight router",
              "ffn_gate_up_exps.weight experts", "ffn_gate_up_exps.weight experts", "ffn_down_exps.weight experts"}) {
            expected.push_back("blk." + i + "." + line + " " + i);
        }
    }
    expected.push_back("output_norm.weight vector -1");
    expected.push_back("token_embd.weight head -1");
    EXPECT_EQ(described(tiny::Model(o)), expected);
}

// Every variant, and hybrids with a prediction layer.
std::vector<tiny::Options> variantsAndPredictions() {
    std::vector<tiny::Options> all = tiny::variants();
    for (tiny::Options o : tiny::hybrids()) {
        if (tiny::family(o.architecture).mamba) continue;
        o.predictions = 1;
        all.push_back(o);
    }
    return all;
}

std::vector<tiny::Options> manyModels() {
    std::vector<tiny::Options> all = variantsAndPredictions();
    for (int64_t vocab : {49, 98, 103, 107, 161, 1001}) {  // 1 / vocab has no exact float
        tiny::Options o = all[all.size() % 5];
        o.vocab = vocab;
        all.push_back(o);
    }
    for (int64_t experts : {3, 7, 10}) {
        tiny::Options o;
        o.experts = experts;
        o.used = experts - 1;
        all.push_back(o);
    }
    return all;
}

TEST(TensorUses, CountWhatATokenReads) {
    for (const tiny::Options& o : manyModels()) {
        SCOPED_TRACE(tiny::describe(o) + " vocab " + std::to_string(o.vocab));
        const tiny::Model model(o);
        const ModelSpec spec = model.spec();
        const TensorTable table = model.table();
        std::map<int32_t, uint64_t> whole;  // of tensors that a token reads in full, slice by slice
        std::set<int32_t> seen;
        for (const TensorUse& use : tensorUses(spec, table)) {
            const TensorInfo& t = table.all().at(static_cast<size_t>(use.tensor));
            const std::string role = roleName(use.role);
            seen.insert(use.tensor);
            EXPECT_EQ(use.cols, role == "vector" && (o.fusedQkv || o.fusedExperts) ? use.cols : t.shape[0]) << t.name;
            if (role == "embedding" || role == "layer_embedding") {
                EXPECT_EQ(use.bytesPerToken, rowBytes(t.type, t.shape[0]));
                EXPECT_EQ(use.rows, o.vocab);
            } else if (role == "experts") {
                const ExpertFfnSpec& f = *spec.loadedLayers().at(static_cast<size_t>(use.layer))->experts;
                EXPECT_EQ(use.bytesPerToken, rowBytes(t.type, use.cols) * static_cast<uint64_t>(use.rows) *
                                                 static_cast<uint64_t>(f.routing.used))
                    << t.name;
            } else if (role == "head") {
                EXPECT_EQ(use.bytesPerToken, t.bytes);
                EXPECT_EQ(use.rows, o.vocab);
            } else {
                whole[use.tensor] += use.bytesPerToken;
                const bool byHead = t.name.find("attn_kv_b") != std::string::npos;  // its uses are parts of every head
                const int64_t rows = use.rows * (byHead ? o.heads : 1);
                EXPECT_EQ(use.bytesPerToken, rowBytes(t.type, use.cols) * static_cast<uint64_t>(rows)) << t.name;
            }
        }
        for (const auto& [tensor, bytes] : whole) {
            EXPECT_EQ(bytes, table.all()[static_cast<size_t>(tensor)].bytes)
                << table.all()[static_cast<size_t>(tensor)].name;
        }
        EXPECT_EQ(seen.size(), table.all().size()) << "each tensor has a use";
    }
}

Homes randomHomes(const tiny::Model& model, std::mt19937& random) {
    Homes homes(model.tensors.size());
    for (TensorHome& home : homes) {
        home.home = std::vector<Home>{Home::Vram, Home::Vram, Home::Direct, Home::Slots}[random() % 4];
        home.cpuRows = 32 * static_cast<int64_t>(random() % 5);
    }
    return homes;
}

bool isStack(const TensorInfo& tensor) { return tensor.name.find("_exps.weight") != std::string::npos; }
std::string layerOf(const TensorInfo& tensor) { return tensor.name.substr(0, tensor.name.find('.', 4)); }

bool isGated(const TensorInfo& tensor) {
    return tensor.name.find("ffn_gate.") != std::string::npos || tensor.name.find("ffn_up.") != std::string::npos;
}
bool goTogether(const TensorInfo& a, const TensorInfo& b) {
    return (isStack(a) && isStack(b)) || (layerOf(a) == layerOf(b) && isGated(a) && isGated(b));
}

// Norms, biases and convolutions are always resident; a layer's gate and up, and all stacks, together or not at all.
// Stacks alone are in slots.
Home homeOf(const tiny::Model& model, const Homes& homes, size_t tensor) {
    const TensorInfo& t = model.tensors[tensor];
    const auto has = [&t](const char* part) { return t.name.find(part) != std::string::npos; };
    const bool small = t.shape.size() == 1 || !has(".weight") || has("ssm_conv1d") || has("ssm_norm");
    if (homes.empty() || small || has("attn_kv_b")) return Home::Vram;
    bool away = homes[tensor].home != Home::Vram;
    for (size_t i = 0; i < homes.size(); ++i) away |= goTogether(model.tensors[i], t) && homes[i].home != Home::Vram;
    return !away ? Home::Vram : isStack(t) ? Home::Slots : Home::Direct;
}

// Of gate and up gate's number counts.
int64_t cpuRowsOf(const tiny::Model& model, const Homes& homes, size_t tensor) {
    const std::string& name = model.tensors[tensor].name;
    const size_t up = name.find("ffn_up.");
    if (up == std::string::npos) return homes[tensor].cpuRows;
    for (size_t i = 0; i < homes.size(); ++i) {
        if (model.tensors[i].name == name.substr(0, up) + "ffn_gate." + name.substr(up + 7)) return homes[i].cpuRows;
    }
    return homes[tensor].cpuRows;
}

// Some of the tensors in a second file, and gaps of all sizes between them. The second file's offsets go on where the
// first's end.
void scatter(tiny::Model& model, std::mt19937& random) {
    uint64_t next = 0;
    for (size_t i = 0; i < model.tensors.size(); ++i) {
        TensorInfo& t = model.tensors[i];
        t.file = i > model.tensors.size() * 2 / 3;
        next += (random() % 3 == 0 ? 4096 + random() % 3 : random() % 4097);
        t.offset = next;
        next += t.bytes;
    }
    std::shuffle(model.tensors.begin(), model.tensors.end(), random);
}

TEST(PlacementOf, EveryByteIsInOneRange) {
    std::mt19937 random(sharpi::testSeed(3));
    for (const tiny::Options& o : variantsAndPredictions()) {
        for (int round = 0; round < 6; ++round) {
            SCOPED_TRACE(tiny::describe(o) + " round " + std::to_string(round));
            tiny::Model model(o);
            if (round > 1) scatter(model, random);
            const Homes homes = round == 0 ? Homes() : randomHomes(model, random);
            const Placement placement = placementOf(model.spec(), model.table(), homes);
            uint64_t vram = 0, direct = 0, slots = 0, cpu = 0;
            std::set<size_t> candidates;
            for (const TensorUse& use : tensorUses(model.spec(), model.table())) {
                if (use.role != WeightRole::Vector) candidates.insert(static_cast<size_t>(use.tensor));
            }
            for (size_t i = 0; i < model.tensors.size(); ++i) {
                const TensorInfo& t = model.tensors[i];
                const Home where = homeOf(model, homes, i);
                (where == Home::Vram ? vram : where == Home::Direct ? direct : slots) += t.bytes;
                const bool feedForward =
                    t.name.find("ffn_") != std::string::npos && t.name.find("inp") == std::string::npos &&
                    t.name.find("latent") == std::string::npos && t.name.find("shexp") == std::string::npos;
                const bool head = t.name == (o.tied ? "token_embd.weight" : "output.weight");
                if (where == Home::Direct && (feedForward || head)) {
                    // A tensor that is gate and up gives rows of both.
                    const bool both = t.name.find("ffn_up.") != std::string::npos && t.shape[1] == 2 * o.hidden;
                    const int64_t parts = both ? 2 : 1;
                    cpu += rowBytes(t.type, t.shape[0]) * static_cast<uint64_t>(parts) *
                           static_cast<uint64_t>(std::min(t.shape[1] / parts, cpuRowsOf(model, homes, i)));
                }
                const auto holds = [&](const Placement::Range& r) {
                    return r.file == t.file && r.begin <= t.offset && t.offset + t.bytes <= r.end && r.home == where;
                };
                EXPECT_EQ(std::count_if(placement.ranges.begin(), placement.ranges.end(), holds), 1) << t.name;
            }
            EXPECT_EQ(placement.vram, vram);
            EXPECT_EQ(placement.direct, direct);
            EXPECT_EQ(placement.slots, slots);
            EXPECT_EQ(placement.cpu, cpu);
            EXPECT_EQ(placement.ram, direct + slots);
            EXPECT_EQ(placement.candidateBytes - placement.keptBytes, direct + slots)
                << "what is a candidate, and not kept";
            EXPECT_EQ(placement.candidates, static_cast<int32_t>(candidates.size()));
            int32_t kept = 0;
            uint64_t keptBytes = 0;
            for (const size_t i : candidates) {
                kept += homeOf(model, homes, i) == Home::Vram;
                keptBytes += homeOf(model, homes, i) == Home::Vram ? model.tensors[i].bytes : 0;
            }
            EXPECT_EQ(placement.kept, kept);
            EXPECT_EQ(placement.keptBytes, keptBytes);
            for (size_t i = 1; i < placement.ranges.size(); ++i) {
                const Placement::Range &a = placement.ranges[i - 1], &b = placement.ranges[i];
                ASSERT_TRUE(a.file < b.file || (a.file == b.file && a.end <= b.begin)) << "not in order";
                EXPECT_FALSE(a.file == b.file && a.home == b.home && b.begin - a.end <= 4096)
                    << "neighbours of one home apart";
            }
            for (const Placement::Range& r :
                 placement.ranges) {  // no range begins or ends in a gap, or spans a wide one
                std::vector<std::pair<uint64_t, uint64_t>> within;
                for (const TensorInfo& t : model.tensors) {
                    if (t.file == r.file && t.offset >= r.begin && t.offset < r.end)
                        within.emplace_back(t.offset, t.offset + t.bytes);
                }
                std::sort(within.begin(), within.end());
                ASSERT_FALSE(within.empty());
                EXPECT_EQ(within.front().first, r.begin);
                EXPECT_EQ(within.back().second, r.end);
                for (size_t i = 1; i < within.size(); ++i) EXPECT_LE(within[i].first - within[i - 1].second, 4096u);
            }
        }
    }
}

TEST(PlacementOf, OnTheCpuAllIsInRam) {
    for (const tiny::Options& o : variantsAndPredictions()) {
        SCOPED_TRACE(tiny::describe(o));
        const tiny::Model model(o);
        const Placement resident = placementOf(model.spec(), model.table(), {}),
                        placement = placementOnCpu(model.spec(), model.table());
        EXPECT_EQ(placement.ram, resident.vram);
        EXPECT_EQ(placement.cpu, placement.ram);
        EXPECT_EQ(placement.vram + placement.direct + placement.slots, 0u);
        EXPECT_EQ(placement.candidates, 0);
        ASSERT_EQ(placement.ranges.size(), resident.ranges.size());
        for (size_t i = 0; i < placement.ranges.size(); ++i) {
            EXPECT_EQ(placement.ranges[i].begin, resident.ranges[i].begin);
            EXPECT_EQ(placement.ranges[i].end, resident.ranges[i].end);
            EXPECT_EQ(std::string(homeName(placement.ranges[i].home)), "ram");
        }
    }
}

// Layers with a state, the expert for every token, and a prediction layer, which takes no place where it is not used.
TEST(TensorUses, OfAHybrid) {
    tiny::Options o;
    o.architecture = "qwen35moe";
    o.predictions = 1;
    tiny::Model model(o);
    model.add("blk.2.nextn.embed_tokens.weight", DType::Q8_0, {o.embedding, o.vocab});
    std::vector<std::string> expected = {"token_embd.weight embedding -1"};
    const auto layer = [&](const std::string& index, const std::vector<std::string>& lines) {
        for (const std::string& line : lines) expected.push_back("blk." + index + "." + line + " " + index);
        for (const std::string line :
             {"post_attention_norm.weight vector", "ffn_gate_inp.weight router", "ffn_gate_inp_shexp.weight vector",
              "ffn_gate_shexp.weight attention", "ffn_up_shexp.weight attention", "ffn_down_shexp.weight attention",
              "ffn_gate_exps.weight experts", "ffn_up_exps.weight experts", "ffn_down_exps.weight experts"})
            expected.push_back("blk." + index + "." + line + " " + index);
    };
    layer("0", {"attn_norm.weight vector", "attn_qkv.weight attention", "attn_gate.weight attention",
                "ssm_alpha.weight attention", "ssm_beta.weight attention", "ssm_out.weight attention",
                "ssm_conv1d.weight vector", "ssm_dt.bias vector", "ssm_a vector", "ssm_norm.weight vector"});
    const std::vector<std::string> attention = {"attn_norm.weight vector",      "attn_q.weight attention",
                                                "attn_k.weight attention",      "attn_v.weight attention",
                                                "attn_output.weight attention", "attn_q_norm.weight vector",
                                                "attn_k_norm.weight vector"};
    layer("1", attention);
    std::vector<std::string> without = expected;
    for (const std::string line :
         {"embed_tokens.weight embedding", "enorm.weight vector", "hnorm.weight vector", "eh_proj.weight attention"})
        expected.push_back("blk.2.nextn." + line + " 2");
    layer("2", attention);
    expected.push_back("blk.2.nextn.shared_head_norm.weight vector 2");
    for (auto* lines : {&expected, &without}) {
        lines->push_back("output_norm.weight vector -1");
        lines->push_back("output.weight head -1");
    }
    ModelSpec spec = model.spec();
    EXPECT_EQ(described(model, spec), expected);
    uint64_t all = 0, used = 0;
    for (const TensorInfo& t : model.tensors) {
        all += t.bytes;
        used += t.name.rfind("blk.2.", 0) == 0 ? 0 : t.bytes;
    }
    EXPECT_EQ(placementOf(spec, model.table(), {}).vram, all);
    spec.dropPredictions();
    EXPECT_EQ(described(model, spec), without);
    const Placement placement = placementOf(spec, model.table(), {});
    EXPECT_EQ(placement.vram, used);
    EXPECT_EQ(placement.direct + placement.cpu, 0u);
}

// Experts of all layers go together, whichever layer's stack a plan names.
TEST(ExpertsAway, ThePredictionLayersCount) {
    tiny::Options o;
    o.architecture = "qwen35moe";
    o.predictions = 1;
    const tiny::Model model(o);
    ModelSpec spec = model.spec();
    for (size_t i = 0; i < model.tensors.size(); ++i) {
        if (!isStack(model.tensors[i])) continue;
        Homes homes(model.tensors.size());
        homes[i].home = Home::Direct;
        const Homes made = normalized(spec, homes);
        EXPECT_TRUE(expertsAway(spec, made));
        for (size_t k = 0; k < made.size(); ++k) {
            EXPECT_EQ(made[k].home, isStack(model.tensors[k]) ? Home::Slots : Home::Vram) << model.tensors[k].name;
        }
        ModelSpec without = spec;
        without.dropPredictions();
        EXPECT_EQ(expertsAway(without, normalized(without, homes)), layerOf(model.tensors[i]) != "blk.2");
    }
}

size_t plannedLine(const tiny::Model& model, const EngineOptions& options, const std::string& name) {
    for (const TraceLine& l : plannedLines(model.spec(), model.table(), options))
        if (l.name == name) return l.asked;
    ADD_FAILURE() << "no line " << name;
    return 0;
}

TEST(PlannedLines, StreamingTakesWhatSlotsAndStagingTake) {
    tiny::Options o;
    o.layers = 3;
    o.embedding = 256;
    o.hidden = 640;
    const tiny::Model model(o);
    EngineOptions options(cudaKind());
    options.context = 100;
    options.batch = 16;
    const auto line = [&](const std::string& name) { return plannedLine(model, options, name); };
    EXPECT_EQ(line("streaming"), 0u) << "without a plan";
    const size_t layer = line("layer 1"), head = line("output head"), embedding = line("token embedding");
    options.homes = Homes(model.tensors.size());
    EXPECT_EQ(line("streaming"), 0u) << "all resident";
    EXPECT_EQ(line("layer 1"), layer);
    for (size_t i = 0; i < model.tensors.size(); ++i) {
        if (model.tensors[i].name.find("blk.1.ffn") == 0) options.homes[i].home = Home::Direct;
    }
    const size_t gate = rowBytes(DType::Q8_0, o.embedding) * static_cast<size_t>(o.hidden);
    const size_t down = rowBytes(DType::Q8_0, o.hidden) * static_cast<size_t>(o.embedding);
    EXPECT_LE(line("layer 1") + 2 * gate + down, layer + 4 * 256);
    EXPECT_GE(line("layer 1") + 2 * gate + down, layer);
    // The largest piece: gate with up, for few rows. The most of them: gate, up and down, for many. Three slots, three
    // stages.
    EXPECT_GE(line("streaming"), (3 + 3) * 2 * gate);
    EXPECT_LE(line("streaming"), (3 + 3) * 2 * (gate + 256));
    EXPECT_EQ(line("output head"), head);
    options.homes[0].home = Home::Direct;  // the embedding is read where it is
    EXPECT_EQ(line("token embedding"), 0u);
    EXPECT_GT(embedding, 0u);
    EXPECT_LE(line("streaming"), (3 + 3) * 2 * (gate + 256));
}

TEST(PlannedLines, StreamingLargeMatricesTakesSlotsAndStagesOfAPiece) {
    tiny::Options o;
    o.layers = 1;
    o.embedding = 256;
    o.hidden = 92544;  // four pieces of gate with up, or two of each
    const tiny::Model model(o);
    EngineOptions options(cudaKind());
    options.context = 100;
    options.batch = 16;
    options.homes = Homes(model.tensors.size());
    for (size_t i = 0; i < model.tensors.size(); ++i) {
        if (model.tensors[i].name.find("ffn") != std::string::npos) options.homes[i].home = Home::Direct;
    }
    const size_t taken = plannedLine(model, options, "streaming"),
                 piece = 2 * rowBytes(DType::Q8_0, o.embedding) * 23136;
    EXPECT_GE(taken, (Transfers::kMostBuffers + 3) * piece);
    EXPECT_LE(taken, (Transfers::kMostBuffers + 3) * (piece + 2 * 256));
    EXPECT_LE(taken, (Transfers::kMostBuffers + 3) * WeightGroup::kPieceBytes);
}

// Whichever of the stacks a plan names, all stay in the file.
TEST(PlannedLines, StacksInTheFileLeaveSlotsAndStagesOfWholeExperts) {
    for (const bool fused : {false, true}) {
        tiny::Options o;
        o.architecture = fused ? "qwen3moe" : "llama";
        o.fusedExperts = fused;
        o.layers = 2;
        o.embedding = 512;
        o.hidden = 1024;
        o.experts = 60;  // of 544 KiB: 30 are a piece
        const tiny::Model model(o);
        EngineOptions options(cudaKind());
        options.context = 100;
        options.batch = 16;
        const size_t layer = plannedLine(model, options, "layer 1"),
                     expert = rowBytes(DType::Q8_0, o.embedding) * static_cast<size_t>(o.hidden);
        for (size_t i = 0; i < model.tensors.size(); ++i) {
            if (!isStack(model.tensors[i]) || layerOf(model.tensors[i]) != "blk.1") continue;
            SCOPED_TRACE(model.tensors[i].name);
            options.homes = Homes(model.tensors.size());
            options.homes[i].home = Home::Direct;
            const size_t left = plannedLine(model, options, "layer 1"),
                         streaming = plannedLine(model, options, "streaming");
            const size_t stacks = 3 * 60 * expert;
            EXPECT_GE(left + stacks + stacks / 100, layer);
            EXPECT_LE(left + stacks, layer);
            EXPECT_GE(streaming, (Transfers::kMostBuffers + 3) * 30 * expert);
            EXPECT_LE(streaming, (Transfers::kMostBuffers + 3) * WeightGroup::kPieceBytes);
        }
    }
}

TEST(PlannedLines, ATiedHeadIsResidentOnce) {
    tiny::Options o;
    o.tied = true;
    const tiny::Model model(o);
    EngineOptions options(cudaKind());
    options.context = 100;
    const auto head = [&] { return plannedLine(model, options, "output head"); };
    EXPECT_EQ(head(), sizeof(float) * static_cast<size_t>(o.embedding)) << "the norm";
    options.homes = Homes(model.tensors.size());
    EXPECT_EQ(head(), sizeof(float) * static_cast<size_t>(o.embedding));
    options.homes[0].home = Home::Direct;
    EXPECT_EQ(head(), sizeof(float) * static_cast<size_t>(o.embedding));
}

TEST(CudaKind, RefusesHeadsThatAttentionHasNoKernelsFor) {
    struct Heads {
        int32_t heads, kvHeads, headDim;
        bool known;
    };
    const tiny::Model model{tiny::Options()};
    for (const Heads& each : {Heads{64, 2, 16, true},
                              {4, 4, 256, true},
                              {4, 2, 8, true},
                              {66, 2, 16, true},
                              {4, 2, 512, true},
                              {600, 2, 16, true},
                              {64, 1, 512, true},
                              {4, 2, 520, false},
                              {4, 2, 20, false}}) {
        SCOPED_TRACE(each.heads);
        SCOPED_TRACE(each.headDim);
        ModelSpec spec = model.spec();
        AttentionSpec& attention = *spec.layers.back().attention;
        attention.heads = each.heads;
        attention.kvHeads = each.kvHeads;
        attention.headDim = each.headDim;
        if (each.known) {
            EXPECT_NO_THROW(cudaKind().requireCanRun(spec));
            continue;
        }
        try {
            cudaKind().requireCanRun(spec);
            ADD_FAILURE() << "it can run";
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::InvalidArgument) << error.what();
        }
    }
}

}  // namespace
