// What tests of drafted tokens share: texts, settings, models with prediction layers, and a backend that can be
// watched.
#pragma once

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tiny_engine.h"

namespace tiny {

using namespace sharpi;
using Source = DraftOptions::Source;

inline DraftOptions drafts(Source source, int32_t tokens) {
    DraftOptions options;
    options.source = source;
    options.tokens = tokens;
    return options;
}

inline SamplingParams greedyParams() {
    SamplingParams params;
    params.temperature = 0;
    return params;
}

// Tiny models of random weights are nearly flat: a low temperature makes some tokens likely.
inline SamplingParams sampledParams(uint64_t seed) {
    SamplingParams params;
    params.temperature = 0.15f;
    params.topK = 30;
    params.minP = 0;
    params.presencePenalty = 0.05f;
    params.repetitionPenalty = 1.05f;
    params.penaltyWindow = 12;
    params.logitBias = {{5, 0.3f}};
    params.seed = seed;
    return params;
}

// A text that repeats itself, with some exceptions.
inline std::vector<int32_t> repetitive(int64_t count, int64_t vocab, unsigned seed) {
    std::mt19937 random(seed);
    const auto phrase = randomTokens(7, vocab, seed + 1);
    std::vector<int32_t> text;
    for (int64_t i = 0; i < count; ++i)
        text.push_back(random() % 9 ? phrase[static_cast<size_t>(i % 7)] : static_cast<int32_t>(random() % vocab));
    return text;
}

inline std::vector<int32_t> generate(Session& session, const std::vector<int32_t>& prompt, const SamplingParams& params,
                                     int count, const DraftOptions& options = {}) {
    session.start(prompt, params, nullptr, options);
    std::vector<int32_t> text;
    while (static_cast<int>(text.size()) < count) {
        const auto token = session.next();
        if (!token) break;
        text.push_back(*token);
    }
    return text;
}

inline EngineOptions engineOptions(int64_t context = 300, int64_t batch = 16, int32_t sequences = 9) {
    EngineOptions options(cpuKind());
    options.context = context;
    options.batch = batch;
    options.threads = 1;
    options.sequences = sequences;
    return options;
}

inline std::shared_ptr<Engine> engineOf(const Model& model, const EngineOptions& options = engineOptions()) {
    return std::make_shared<Engine>(model.spec(), model.weights(), options);
}

struct Totals {
    int64_t steps = 0, drafted = 0, accepted = 0;
    // Adds the counts of a generation that handed out `tokens`. Each step gives one token and the accepted drafts; the
    // last step's may not all have been handed out.
    void add(const DraftCounts& counts, size_t tokens, int32_t most) {
        steps += counts.steps;
        drafted += counts.drafted;
        accepted += counts.accepted;
        const auto handed = static_cast<int64_t>(tokens), given = 1 + counts.steps + counts.accepted;
        EXPECT_LE(handed, given);
        EXPECT_GE(handed, given - most);
        EXPECT_LE(counts.accepted, counts.drafted);
        EXPECT_LE(counts.drafted, counts.steps * most);
    }
};

inline std::vector<Options> predicting() {
    std::vector<Options> all;
    for (Options o : hybrids()) {
        if (family(o.architecture).mamba) continue;
        o.predictions = 1;
        all.push_back(o);
    }
    Options mixture, latent = latents()[0];
    mixture.architecture = "glm4moe";
    mixture.predictions = latent.predictions = 1;
    all.push_back(mixture);
    all.push_back(latent);
    return all;
}

// A model whose next token depends on the last token: on it alone if `mixed` is 0, else mostly. Its prediction layer
// knows this: it hands the head the embedding of the token that followed.
inline Model knowing(float mixed) {
    Options options = hybrids()[0];
    options.matrices = DType::F32;
    options.predictions = 1;
    Model model(options);
    const auto floats = [&](const std::string& name) {
        return reinterpret_cast<float*>(&model.bytes[model.tensor(name).offset]);
    };
    const auto each = [&](const std::string& name, const auto& change) {
        float* values = floats(name);
        for (size_t i = 0; i < model.tensor(name).bytes / sizeof(float); ++i) values[i] = change(i, values[i]);
    };
    for (const TensorInfo& t : std::vector<TensorInfo>(model.tensors)) {
        const bool output = t.name.find("attn_output") != std::string::npos ||
                            t.name.find("ssm_out") != std::string::npos || t.name.find("ffn_down") != std::string::npos;
        if (output) each(t.name, [&](size_t, float value) { return value * mixed; });
    }
    const std::string block = "blk." + std::to_string(options.layers) + ".";
    const auto width = static_cast<size_t>(options.embedding);
    each(block + "nextn.eh_proj.weight",
         [&](size_t i, float) { return i % (2 * width) == i / (2 * width) ? 1.0f : 0.0f; });
    each(block + "nextn.enorm.weight", [](size_t, float) { return 1.0f; });
    const float* norm = floats("output_norm.weight");
    each(block + "nextn.shared_head_norm.weight", [&](size_t i, float) { return norm[i]; });
    return model;
}

// A backend that fails when it is told to, and records the passes that it runs.
class Watched : public CpuBackend {
public:
    Watched() : CpuBackend(1) {}
    int failIn = 0;       // counts down before and after each pass and before each sample(), and fails at 0; 0: never
    bool isLost = false;  // it fails as a device that does nothing more
    std::vector<std::pair<sharpi::Pass, Batch>> seen;

    void begin(const Batch& batch, const KvCache& kv) override {
        _batch = batch;
        CpuBackend::begin(batch, kv);
    }
    void region(sharpi::Pass pass, const std::function<void()>& body) override {
        mayFail();
        CpuBackend::region(pass, body);
        seen.emplace_back(pass, _batch);
        mayFail();
    }
    std::vector<Chosen> sample(const std::vector<Choice>& choices) override {
        mayFail();
        return CpuBackend::sample(choices);
    }

private:
    void mayFail() {
        if (failIn == 0 || --failIn > 0) return;
        if (isLost) throw Error(ErrorKind::DeviceLost, "told to be lost");
        throw std::runtime_error("told to fail");
    }
    Batch _batch;
};

struct WatchedEngine {
    WatchedEngine(const Model& model, const EngineOptions& options) {
        auto made = std::make_unique<Watched>();
        backend = made.get();
        engine = std::make_shared<Engine>(model.spec(), model.weights(), options, std::move(made));
    }
    Watched* backend;
    std::shared_ptr<Engine> engine;
};

}  // namespace tiny
