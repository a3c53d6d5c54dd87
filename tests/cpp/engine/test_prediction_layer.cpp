// The prediction layer: its logits are those of a model of that layer alone over the rows that it goes on from,
// computed here; they keep their bits however rows are cut and wherever its weights are; and plans count it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "cpu/cpu_backend.h"
#include "fake_device.h"
#include "layers/forward_pass.h"
#include "placement/placement.h"
#include "planning/memory_plan.h"
#include "seed.h"
#include "state_marks.h"
#include "tiny_engine.h"

namespace {

using namespace sharpi;
using namespace tiny;

// As many tokens as floats in a row, so that an output matrix of the same shape can be the identity.
constexpr int64_t kWidth = 96;
// Rows of a text: within a page, to its end, so that further drafts need the next, and beyond.
constexpr int64_t kTexts[] = {20, 63, 64, 75};

// A model with a prediction layer, some of whose parts are its own.
struct Shape {
    Options options;
    bool ownEmbedding = false, ownNorm = true;
    Model make() const {
        Model model(options);
        const std::string block = "blk." + std::to_string(options.layers) + ".nextn.";
        if (ownEmbedding) model.add(block + "embed_tokens.weight", options.matrices, {kWidth, options.vocab});
        if (!ownNorm) model.erase(block + "shared_head_norm.weight");
        return model;
    }
    std::string text() const {
        return describe(options) + (ownEmbedding ? ", its own embedding" : "") + (ownNorm ? "" : ", the model's norm");
    }
};

std::vector<Shape> shapes(DType matrices) {
    std::vector<Shape> all;
    for (const char* architecture : {"qwen35", "qwen35moe", "glm4moe", "deepseek2"}) {
        Options o;
        o.architecture = architecture;
        o.matrices = matrices;
        o.embedding = o.vocab = kWidth;
        o.predictions = 1;
        o.seed = 300 + static_cast<unsigned>(all.size());
        all.push_back({o, false, true});
        o.layers = 3;
        o.tied = true;
        all.push_back({o, true, false});
    }
    return all;
}

// A model loaded on the CPU, or with homes on a device in host memory.
struct Loaded {
    explicit Loaded(const Model& model, const Homes& planned = {}, int64_t slotBytes = 0, int64_t rows = 128)
        : spec(model.spec()),
          files(model.weights()),
          backend(makeBackend(planned)),
          trace(backend->allocator(), nullptr),
          limits(stepLimits(spec, files->tensors(), rows, 128, KvType::F32)),
          homes(normalized(spec, planned)),
          weights(spec, *files, backend->placer(), homes, static_cast<size_t>(slotBytes), 128, trace),
          kv(backend->allocator(), kvShapes(spec), KvType::F32, 512,
             RecurrentState(backend->allocator(), recurrentShapes(spec), 32)),
          forward(spec, weights, *backend, kv, limits) {
        limits.expertSlots = expertsAway(spec, homes);
        backend->takeScratch(limits);
    }
    static std::unique_ptr<CpuBackend> makeBackend(const Homes& planned) {
        if (planned.empty()) return std::make_unique<CpuBackend>(1);
        auto device = std::make_unique<FakeDevice>(size_t{256} << 20);
        device->poisonCommits();
        return std::make_unique<CpuBackend>(1, std::move(device));
    }
    std::vector<float> logits(int64_t rows) {
        std::vector<float> out(static_cast<size_t>(rows * spec.vocabSize), kPoison);
        if (rows) backend->readLogits(0, rows, out.data());
        return out;
    }

    ModelSpec spec;
    std::unique_ptr<Weights> files;
    std::unique_ptr<CpuBackend> backend;
    LoadTrace trace;
    StepLimits limits;
    Homes homes;
    ModelWeights weights;
    KvCache kv;
    ForwardPass forward;
};

// Logits of the rows of a text, which is a sequence of its own.
std::vector<float> run(Loaded& model, const std::vector<int32_t>& text) {
    const int32_t handle = model.kv.createSequence();
    Batch batch;
    for (size_t i = 0; i < text.size(); ++i) batch.add(RowKind::Prompt, text[i], static_cast<int32_t>(i), handle, true);
    model.kv.extend(handle, batch.size());
    std::vector<float> logits(text.size() * static_cast<size_t>(model.spec.vocabSize), kPoison);
    model.forward.run(batch, logits.data());
    model.kv.releaseSequence(handle);
    return logits;
}

// The prediction layer's logits behind rows [0, text.size() - 1) of a text, a batch for each of `cuts`; and then those
// of `again` further rows, which go on from the layer's own with these tokens.
std::vector<float> drafts(Loaded& model, const std::vector<int32_t>& text, const std::vector<int64_t>& cuts,
                          const std::vector<int32_t>& again = {}) {
    const int32_t handle = model.kv.createSequence();
    std::vector<float> all;
    const auto draft = [&](const Batch& batch, bool ofDraft) {
        model.forward.draft(batch, ofDraft);
        const std::vector<float> logits = model.logits(static_cast<int64_t>(batch.logitRows.size()));
        all.insert(all.end(), logits.begin(), logits.end());
    };
    const auto rows = static_cast<int64_t>(text.size()) - 1;
    int64_t done = 0, last = 0;
    for (size_t piece = 0; done < rows; ++piece) {
        const int64_t count = std::min(rows - done, cuts[piece % cuts.size()]);
        Batch batch, behind;
        for (int64_t i = 0; i < count; ++i) {
            const auto at = static_cast<size_t>(done + i);
            batch.add(RowKind::Prompt, text[at], static_cast<int32_t>(at), handle, i % 3 == 0);
            behind.add(RowKind::Prompt, text[at + 1], static_cast<int32_t>(at), handle, true);
            behind.sources.push_back(static_cast<int32_t>(i));
        }
        model.kv.extend(handle, count);
        model.forward.run(batch, nullptr);
        draft(behind, false);
        done += count;
        last = count - 1;
    }
    EXPECT_TRUE(again.empty() || model.kv.reserve(handle, static_cast<int64_t>(again.size())));
    for (const int32_t token : again) {
        Batch behind;
        behind.add(RowKind::Prompt, token, static_cast<int32_t>(done++), handle, true);
        behind.sources = {static_cast<int32_t>(last)};
        last = 0;
        draft(behind, true);
    }
    model.kv.releaseSequence(handle);
    return all;
}

std::vector<float> floatsOf(const Model& model, const std::string& name) {
    Model copy = model;
    const TensorInfo& t = copy.tensor(name);
    std::vector<float> values(t.bytes / sizeof(float));
    std::memcpy(values.data(), &model.bytes[t.offset], t.bytes);
    return values;
}

void write(Model& model, const std::string& name, const std::vector<float>& values) {
    const TensorInfo& t = model.tensor(name);
    ASSERT_EQ(t.bytes, values.size() * sizeof(float)) << name;
    std::memcpy(&model.bytes[t.offset], values.data(), t.bytes);
}

std::vector<float> identity() {
    std::vector<float> values(kWidth * kWidth, 0.0f);
    for (int64_t i = 0; i < kWidth; ++i) values[static_cast<size_t>(i * kWidth + i)] = 1.0f;
    return values;
}

// The same model whose logits are what its output head reads. (A tied one gets a head for it.)
Model showingRows(Model model) {
    if (model.options().tied) model.add("output.weight", DType::F32, {kWidth, kWidth});
    write(model, "output.weight", identity());
    return model;
}

// What the layer goes on from, in double: [norms, side by side], projected.
std::vector<float> joined(const Model& model, const std::string& block, const std::vector<float>& table, int32_t token,
                          const float* row) {
    const auto norm = [&](const float* x, const std::string& name) {
        const std::vector<float> weight = floatsOf(model, block + name);
        double squares = 0;
        for (int64_t i = 0; i < kWidth; ++i) squares += double{x[i]} * x[i];
        std::vector<double> y;
        for (int64_t i = 0; i < kWidth; ++i)
            y.push_back(x[i] / std::sqrt(squares / kWidth + 1e-5) * weight[static_cast<size_t>(i)]);
        return y;
    };
    std::vector<double> both = norm(&table[static_cast<size_t>(token * kWidth)], "nextn.enorm.weight");
    const std::vector<double> behind = norm(row, "nextn.hnorm.weight");
    both.insert(both.end(), behind.begin(), behind.end());
    const std::vector<float> projection = floatsOf(model, block + "nextn.eh_proj.weight");
    std::vector<float> result;
    for (size_t r = 0; r < kWidth; ++r) {
        double sum = 0;
        for (size_t i = 0; i < both.size(); ++i) sum += both[i] * projection[r * both.size() + i];
        result.push_back(static_cast<float>(sum));
    }
    return result;
}

// A model of the prediction layer alone, whose token i has row i of `rows` for its embedding.
Model alone(const Shape& shape, const Model& model, const std::vector<float>& rows) {
    Options o = shape.options;
    o.layers = o.interval = 1;
    o.predictions = 0;
    o.tied = false;
    Model made(o);
    const std::string block = "blk." + std::to_string(shape.options.layers) + ".";
    for (const TensorInfo& t : made.tensors) {
        if (t.name.rfind("blk.0.", 0) == 0) write(made, t.name, floatsOf(model, block + t.name.substr(6)));
    }
    std::vector<float> table = rows;
    table.resize(static_cast<size_t>(kWidth * o.vocab));
    write(made, "token_embd.weight", table);
    write(made, "output.weight", floatsOf(model, shape.options.tied ? "token_embd.weight" : "output.weight"));
    write(made, "output_norm.weight",
          floatsOf(model, shape.ownNorm ? block + "nextn.shared_head_norm.weight" : "output_norm.weight"));
    return made;
}

std::vector<int32_t> upTo(int64_t count) {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<int32_t>(i));
    return tokens;
}

// In floats of 24 bits: a few hundred roundings behind each other, on sums of up to 192 terms.
constexpr double kBound = 2e-5;

void expectNear(const std::vector<float>& made, const std::vector<float>& expected) {
    ASSERT_EQ(made.size(), expected.size());
    double largest = 0, apart = 0;
    for (size_t i = 0; i < made.size(); ++i) {
        ASSERT_TRUE(std::isfinite(made[i])) << i;
        largest = std::max(largest, std::abs(double{expected[i]}));
        apart = std::max(apart, std::abs(double{made[i]} - expected[i]));
    }
    EXPECT_LE(apart, kBound * largest);
    EXPECT_GT(largest, 0.1);
}

// For each text's rows and then what `again` goes on with, the logits by the model of the layer alone.
std::vector<float> expectedDrafts(const Shape& shape, const Model& model, const std::vector<int32_t>& text,
                                  const std::vector<int32_t>& again) {
    const std::string block = "blk." + std::to_string(shape.options.layers) + ".";
    const std::vector<float> table =
        floatsOf(model, shape.ownEmbedding ? block + "nextn.embed_tokens.weight" : "token_embd.weight");
    Loaded shows(showingRows(model));
    const std::vector<float> hidden = run(shows, text);
    std::vector<float> rows;
    const auto goOn = [&](int32_t token, const float* row) {
        const std::vector<float> both = joined(model, block, table, token, row);
        rows.insert(rows.end(), both.begin(), both.end());
        return static_cast<int64_t>(rows.size()) / kWidth;
    };
    int64_t known = 0;
    for (size_t i = 0; i + 1 < text.size(); ++i) known = goOn(text[i + 1], &hidden[i * kWidth]);
    // A row that goes on from the layer's own: what its head reads of the row before.
    for (const int32_t token : again) {
        Loaded layer(showingRows(alone(shape, model, rows)));
        const std::vector<float> own = run(layer, upTo(known));
        known = goOn(token, &own[static_cast<size_t>((known - 1) * kWidth)]);
    }
    Loaded layer(alone(shape, model, rows));
    return run(layer, upTo(known));
}

TEST(PredictionLayer, DraftsAreThoseOfAModelOfTheLayerAlone) {
    for (const Shape& shape : shapes(DType::F32)) {
        const Model model = shape.make();
        Loaded whole(model);
        ASSERT_EQ(whole.spec.predictions.size(), 1u);
        for (const int64_t rows : kTexts) {
            SCOPED_TRACE(shape.text() + ", " + std::to_string(rows) + " rows");
            const auto text = randomTokens(rows + 1, kWidth, 5), again = randomTokens(3, kWidth, 6);
            const std::vector<float> expected = expectedDrafts(shape, model, text, again);
            for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{64}, {1}, {5, 1, 17}}) {
                expectNear(drafts(whole, text, cuts, again), expected);
            }
        }
    }
}

TEST(PredictionLayer, AnyCutGivesTheSameBits) {
    for (const DType type : {DType::F32, DType::Q8_0, DType::Q4_0}) {
        for (const Shape& shape : shapes(type)) {
            Loaded model(shape.make());
            std::mt19937 random(shape.options.seed);
            for (const int64_t rows : kTexts) {
                SCOPED_TRACE(shape.text() + ", " + std::to_string(rows) + " rows");
                const auto text = randomTokens(rows + 1, kWidth, 7), again = randomTokens(2, kWidth, 8);
                const std::vector<float> expected = drafts(model, text, {1}, again);
                expectMeaningful(expected, kWidth);
                for (const std::vector<int64_t>& cuts :
                     {std::vector<int64_t>{64}, {2}, {8, 3}, {1 + static_cast<int64_t>(random() % 60), 7}})
                    EXPECT_TRUE(sameBits(drafts(model, text, cuts, again), expected)) << ::testing::PrintToString(cuts);
                // What its cache held before shows nowhere.
                drafts(model, randomTokens(76, kWidth, 9), {11}, again);
                EXPECT_TRUE(sameBits(drafts(model, text, {64}, again), expected));
            }
        }
    }
}

// Rows of several texts in one batch, of which only some are gone on from, as after a verification.
TEST(PredictionLayer, SeveralSequencesDraftAsEachAlone) {
    constexpr int kSequences = 3, kRows = 20;
    const Shape shape = shapes(DType::Q8_0)[2];
    Loaded model(shape.make());
    std::vector<std::vector<int32_t>> texts;
    std::vector<std::vector<float>> expected;
    for (unsigned s = 0; s < kSequences; ++s) {
        texts.push_back(randomTokens(kRows + 1, kWidth, 20 + s));
        expected.push_back(drafts(model, texts.back(), {64}));
    }
    std::mt19937 random(sharpi::testSeed(3));
    std::vector<int32_t> handles;
    std::vector<int64_t> done(kSequences, 0);
    for (int s = 0; s < kSequences; ++s) handles.push_back(model.kv.createSequence());
    while (*std::min_element(done.begin(), done.end()) < kRows) {
        Batch batch, behind;
        std::vector<std::pair<size_t, int64_t>> rows;
        std::vector<int64_t> kept(kSequences, 0);
        for (size_t s = 0; s < kSequences; ++s) {
            kept[s] = std::min<int64_t>(static_cast<int64_t>(random() % 4), kRows - done[s]);
            const int64_t count = kept[s] + static_cast<int64_t>(random() % 3);
            if (count) model.kv.extend(handles[s], count, lastMarks(done[s], done[s] + count, count - kept[s]));
            for (int64_t i = 0; i < count; ++i) {
                const auto at = static_cast<int32_t>(done[s] + i);
                if (i < kept[s]) {
                    behind.add(RowKind::Prompt, texts[s][static_cast<size_t>(at) + 1], at, handles[s], true);
                    behind.sources.push_back(static_cast<int32_t>(batch.size()));
                    rows.emplace_back(s, at);
                }
                const auto drafted = static_cast<int32_t>(random() % kWidth);
                batch.add(RowKind::Prompt, i < kept[s] ? texts[s][static_cast<size_t>(at)] : drafted, at, handles[s],
                          true);
            }
        }
        if (batch.size() == 0) continue;
        model.forward.run(batch, nullptr);
        for (size_t s = 0; s < kSequences; ++s) {
            done[s] += kept[s];
            ASSERT_EQ(model.kv.truncate(handles[s], done[s]), done[s]);
        }
        if (behind.size() == 0) continue;
        model.forward.draft(behind, false);
        const std::vector<float> logits = model.logits(behind.size());
        for (size_t i = 0; i < rows.size(); ++i) {
            const auto [text, row] = rows[i];
            const float* const alone = &expected[text][static_cast<size_t>(row * kWidth)];
            ASSERT_EQ(std::memcmp(&logits[i * kWidth], alone, kWidth * sizeof(float)), 0)
                << "text " << text << " row " << row;
        }
    }
}

// Of the prediction layer, of all others, or of both, in the file: by the tensor's number, with rows for the CPU, which
// on this device takes none.
Homes homesOf(const Model& model, bool layerAway, bool othersAway, int only = -1) {
    const std::string block = "blk." + std::to_string(model.options().layers) + ".";
    Homes homes(model.tensors.size());
    for (size_t i = 0; i < homes.size(); ++i) {
        const bool ofLayer = model.tensors[i].name.rfind(block, 0) == 0;
        const bool away = only < 0 ? (ofLayer ? layerAway : othersAway) : static_cast<size_t>(only) == i;
        const bool stack = model.tensors[i].name.find("_exps.") != std::string::npos;
        if (away) homes[i].home = stack ? Home::Slots : Home::Direct;
        homes[i].cpuRows = away ? 32 : 0;
    }
    return homes;
}

TEST(PredictionLayer, WhereItsWeightsAreDoesNotShow) {
    for (const Shape& shape : shapes(DType::Q8_0)) {
        SCOPED_TRACE(shape.text());
        const Model model = shape.make();
        const auto text = randomTokens(30, kWidth, 11), again = randomTokens(2, kWidth, 12);
        Loaded plain(model);
        const std::vector<float> expected = drafts(plain, text, {64}, again);
        const auto expectSame = [&](const Homes& homes, int64_t slotBytes) {
            Loaded placed(model, homes, slotBytes);
            for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{64}, {1}, {4, 9}}) {
                EXPECT_TRUE(sameBits(drafts(placed, text, cuts, again), expected));
            }
        };
        for (const bool layerAway : {false, true}) {
            for (const bool othersAway : {false, true}) {
                SCOPED_TRACE(std::string(layerAway ? "layer away, " : "layer there, ") +
                             (othersAway ? "others away" : "others there"));
                expectSame(homesOf(model, layerAway, othersAway), layerAway ? 1 << 20 : 0);
            }
        }
        for (size_t i = 0; i < model.tensors.size(); ++i) {  // each by itself
            if (model.tensors[i].name.rfind("blk.", 0) == 0 &&
                model.tensors[i].name.rfind("blk." + std::to_string(shape.options.layers), 0) != 0)
                continue;
            SCOPED_TRACE(model.tensors[i].name);
            expectSame(homesOf(model, false, false, static_cast<int>(i)), 0);
        }
    }
}

EngineOptions planned(bool cuda) {
    EngineOptions options = smallOptions();
    options.device.kind = cuda ? &cudaKind() : &cpuKind();
    return options;
}

TEST(PredictionLayer, APlanCountsWhatLoadingTakes) {
    for (const DType type : {DType::F32, DType::Q8_0}) {
        for (const Shape& shape : shapes(type)) {
            for (const bool loaded : {true, false}) {
                SCOPED_TRACE(shape.text() + (loaded ? "" : ", left in the file"));
                const Model model = shape.make();
                ModelSpec spec = model.spec();
                if (!loaded) spec.dropPredictions();
                const auto options = planned(false);
                const auto lines = plannedLines(spec, model.table(), options);
                const Engine engine(spec, model.weights(), options);
                ASSERT_EQ(lines.size() + 1, engine.trace().size());
                for (size_t i = 0; i < lines.size(); ++i) {
                    EXPECT_EQ(lines[i].name, engine.trace()[i + 1].name);
                    EXPECT_EQ(lines[i].asked, engine.trace()[i + 1].asked) << lines[i].name;
                }
                const auto line = static_cast<size_t>(shape.options.layers) + 1;
                EXPECT_EQ(lines[line - 1].name, "layer " + std::to_string(shape.options.layers - 1));
                EXPECT_EQ(lines[line].name, loaded ? "prediction layer" : "output head");
                EXPECT_EQ(lines[line + (loaded ? 1 : 0)].name, "output head");
            }
        }
    }
}

size_t lineOf(const std::vector<TraceLine>& lines, const std::string& name) {
    for (const TraceLine& line : lines)
        if (line.name == name) return line.asked;
    return 0;
}

TEST(PredictionLayer, APlanForADeviceCountsItsBytes) {
    for (const Shape& shape : shapes(DType::Q8_0)) {
        SCOPED_TRACE(shape.text());
        const Model model = shape.make();
        ModelSpec without = model.spec();
        without.dropPredictions();
        const std::string block = "blk." + std::to_string(shape.options.layers) + ".";
        size_t bytes = 0;
        for (const TensorInfo& t : model.tensors) bytes += t.name.rfind(block, 0) == 0 ? t.bytes : 0;
        const auto with = plannedLines(model.spec(), model.table(), planned(true)),
                   less = plannedLines(without, model.table(), planned(true));
        EXPECT_GE(lineOf(with, "prediction layer"), bytes);
        EXPECT_LE(lineOf(with, "prediction layer"), bytes + bytes / 50 + 40 * 256) << "whole rows and alignment";
        // Of bf16, for 200 tokens in pages of 64: as much as an attention layer's, whose latents are stored once.
        const tiny::Options& o = shape.options;
        const int64_t width = family(o.architecture).latent ? o.latentRank + o.headDim : 2 * o.kvHeads * o.headDim;
        EXPECT_EQ(lineOf(with, "KV cache") - lineOf(less, "KV cache"),
                  sizeof(uint16_t) * 256 * static_cast<size_t>(width));
        EXPECT_EQ(lineOf(with, "recurrent state"), lineOf(less, "recurrent state"));
        for (const char* name : {"token embedding", "layer 0", "output head"})
            EXPECT_EQ(lineOf(with, name), lineOf(less, name)) << name;
        EXPECT_EQ(kvBytes(model.spec(), planned(true)), lineOf(with, "KV cache"));

        const Placement all = placementOf(model.spec(), model.table(), {}),
                        part = placementOf(without, model.table(), {});
        EXPECT_EQ(all.vram - part.vram, bytes);
        EngineOptions away = planned(true);
        away.homes = homesOf(model, true, false);
        const auto streamed = plannedLines(model.spec(), model.table(), away);
        EXPECT_LT(lineOf(streamed, "prediction layer"), bytes / 2);
        EXPECT_GT(lineOf(streamed, "streaming"), 0u);
        // Experts of all layers are there together, or away.
        EXPECT_EQ(lineOf(streamed, "layer 0") < lineOf(with, "layer 0"), model.options().experts > 0);
        // What nobody loads is nowhere, whatever a plan says of it.
        EXPECT_EQ(lineOf(plannedLines(without, model.table(), away), "streaming"), 0u);
    }
}

TEST(PredictionLayer, StepsHaveRoomForIt) {
    Options o;
    o.architecture = "qwen35moe";
    o.predictions = 1;
    o.hidden = 32;
    Model model(o);
    ModelSpec spec = model.spec();
    spec.predictions[0].layer.experts->routing.used = 3;
    spec.predictions[0].layer.attention->heads = 16;
    const StepLimits with = stepLimits(spec, model.table(), 8, 64, KvType::BF16);
    spec.dropPredictions();
    const StepLimits without = stepLimits(spec, model.table(), 8, 64, KvType::BF16);
    EXPECT_TRUE(with.drafts);
    EXPECT_FALSE(without.drafts);
    EXPECT_EQ(with.expertLayerCount(), without.expertLayerCount() + 1);
    EXPECT_EQ(with.expertLayers.back(), (std::pair<int32_t, int32_t>(2, 4)));
    EXPECT_EQ(without.expertLayers.back().first, 1);
    EXPECT_EQ(with.expertsUsed, 3);
    EXPECT_EQ(without.expertsUsed, 2);
    EXPECT_EQ(with.queryWidth, 16 * o.headDim);
    EXPECT_EQ(with.maxCols, 16 * o.headDim);
    EXPECT_EQ(without.maxCols, 64);
    EXPECT_EQ(stepLimits(Model(o).spec(), model.table(), 8, 64, KvType::BF16).maxCols, 2 * o.embedding);
}

TEST(PredictionLayer, ImpossibleDraftsAreRefused) {
    const Shape shape = shapes(DType::Q8_0)[0];
    const Model model = shape.make();
    Loaded loaded(model);
    const int32_t handle = loaded.kv.createSequence();
    loaded.kv.extend(handle, 2);
    Batch batch;
    for (int i = 0; i < 2; ++i) batch.add(RowKind::Prompt, 1, i, handle, false);
    loaded.forward.run(batch, nullptr);
    expectError(ErrorKind::Internal, "draft", [&] { loaded.forward.draft(batch, false); });  // from nowhere
    batch.sources = {0, 1};
    batch.tokens[1] = static_cast<int32_t>(kWidth);
    expectError(ErrorKind::InvalidArgument, "vocabulary", [&] { loaded.forward.draft(batch, false); });
    batch.tokens[1] = 1;
    EXPECT_NO_THROW(loaded.forward.draft(batch, false));
    expectError(ErrorKind::Internal, "no logits", [&] { loaded.forward.sample({Choice()}); });
    batch.logitRows = {1};
    loaded.forward.draft(batch, false);
    EXPECT_EQ(loaded.forward.sample({Choice()}).size(), 1u);

    Options plain = shape.options;
    plain.predictions = 0;
    Loaded without{Model(plain)};
    const int32_t other = without.kv.createSequence();
    without.kv.extend(other, 1);
    Batch one;
    one.add(RowKind::Prompt, 1, 0, other, true);
    without.forward.run(one, nullptr);
    one.sources = {0};
    expectError(ErrorKind::Internal, "without a prediction layer", [&] { without.forward.draft(one, false); });
}

}  // namespace
