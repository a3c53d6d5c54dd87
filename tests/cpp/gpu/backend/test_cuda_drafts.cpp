// Drafts decide how fast the text comes, never what it says. With drafts the GPU writes the text that the CPU writes
// without them: greedy and sampled, wherever the weights are, replayed and launched. It drafts and accepts the same
// tokens as the CPU.
#include <cstring>
#include <optional>

#include "placement_test.h"

namespace sharpi::cuda {
namespace {

using Source = DraftOptions::Source;
using Text = std::vector<int32_t>;

struct Written {
    Text text;
    DraftCounts counts;
};

class CudaDrafts : public PlacementTest {
protected:
    // Exact prompts, so that all rows have the CPU's bits, and room for a state after each drafted token.
    static EngineOptions few(EngineOptions o, int64_t context = 300) {
        o.context = context;
        o.prompt = PromptMode::Exact;
        o.batch = kMostDraftRows;
        o.sequences = 2 * kMostDraftRows;
        return o;
    }
    static std::shared_ptr<Engine> loadOnCpu(const tiny::Model& model, int64_t context = 300) {
        EngineOptions o = few(options(false), context);
        o.threads = 1;  // with so little work, more threads cost more than they save
        return load(model, o);
    }
    static Written write(Session& session, const Text& prompt, int count, const SamplingParams& params,
                         const DraftOptions& drafts = {}) {
        Written w;
        session.start(prompt, params, nullptr, drafts);
        while (static_cast<int>(w.text.size()) < count) {
            const std::optional<int32_t> token = session.next();
            if (!token) break;
            w.text.push_back(*token);
        }
        w.counts = session.draftCounts();
        return w;
    }
    static Written write(const std::shared_ptr<Engine>& engine, const Text& prompt, int count,
                         const SamplingParams& params, const DraftOptions& drafts = {}) {
        Session session(engine);
        return write(session, prompt, count, params, drafts);
    }
    static std::vector<SamplingParams> samplings() {
        SamplingParams greedy, sampled;
        greedy.temperature = 0;
        sampled.temperature = 0.8f;
        sampled.seed = 5;
        sampled.topK = 20;
        sampled.repetitionPenalty = 1.05f;
        sampled.presencePenalty = 0.1f;
        return {greedy, sampled};
    }
    // A text that repeats itself, so that look-up finds something.
    Text repetitive(int64_t count, int64_t vocab) {
        const Text words = tokens(7, vocab);
        Text text;
        while (static_cast<int64_t>(text.size()) < count) text.push_back(words[text.size() % words.size()]);
        return text;
    }
    // Compares the GPU with drafts, replayed and launched, with the CPU without drafts and with the same drafts.
    // Returns the number of drafts accepted in all.
    int64_t expectTheCpus(const tiny::Model& model, const EngineOptions& o, Source source,
                          const std::vector<int32_t>& amounts, int count) {
        const auto onCpu = loadOnCpu(model, o.context), onGpu = load(model, o);
        const Text prompt = repetitive(20, model.options().vocab);
        int64_t accepted = 0;
        for (const SamplingParams& params : samplings()) {
            const Text expected = write(onCpu, prompt, count, params).text;
            for (const int32_t amount : amounts) {
                const DraftOptions drafts{source, amount};
                const DraftCounts counted = write(onCpu, prompt, count, params, drafts).counts;
                for (const bool replay : {true, false}) {
                    SCOPED_TRACE(std::to_string(amount) + " drafts, temperature " + std::to_string(params.temperature) +
                                 (replay ? ", replayed" : ", launched"));
                    onGpu->backend().recording()->setReplays(replay);
                    const Written got = write(onGpu, prompt, count, params, drafts);
                    EXPECT_EQ(expected, got.text);
                    EXPECT_EQ(counted.steps, got.counts.steps);
                    EXPECT_EQ(counted.drafted, got.counts.drafted);
                    EXPECT_EQ(counted.accepted, got.counts.accepted);
                    EXPECT_LE(got.counts.drafted, got.counts.steps * amount);
                    accepted += got.counts.accepted;
                }
            }
        }
        return accepted;
    }
    static std::vector<tiny::Options> predicting() {
        std::vector<tiny::Options> all = tiny::gpuHybrids();
        tiny::Options mixture;
        mixture.architecture = "glm4moe";
        all.push_back(mixture);
        all.push_back(tiny::latents()[0]);
        for (tiny::Options& o : all) o.predictions = 1;
        return all;
    }
};

// Overwrites an F32 tensor, value by value.
template <typename Value> void set(tiny::Model& model, const std::string& name, const Value& value) {
    const TensorInfo& t = model.tensor(name);
    for (uint64_t i = 0; i < t.bytes / sizeof(float); ++i) {
        const float v = value(static_cast<int64_t>(i));
        std::memcpy(&model.bytes[t.offset + i * sizeof(float)], &v, sizeof v);
    }
}

// A model whose next token depends on the last one alone, as does its prediction layer's. Its drafts are right, unless
// rounding decides between two tokens that are nearly equal.
tiny::Model predictable() {
    tiny::Options tiny = tiny::gpuHybrids()[0];
    tiny.matrices = DType::F32;
    tiny.predictions = 1;
    tiny::Model model(tiny);
    for (const TensorInfo& t : model.tensors) {
        const auto ends = [&](const std::string& with) { return t.name.find(with) != std::string::npos; };
        if (ends("attn_output") || ends("ssm_out") || ends("ffn_down"))
            set(model, t.name, [](int64_t) { return 0.0f; });
    }
    const std::string block = "blk." + std::to_string(tiny.layers) + ".nextn.";
    const int64_t width = tiny.embedding;
    set(model, block + "eh_proj.weight", [&](int64_t i) { return i % (2 * width) == i / (2 * width) ? 1.0f : 0.0f; });
    set(model, block + "enorm.weight", [](int64_t) { return 1.0f; });
    const uint8_t* norm = &model.bytes[model.tensor("output_norm.weight").offset];
    set(model, block + "shared_head_norm.weight", [&](int64_t i) {
        float value;
        std::memcpy(&value, norm + i * 4, sizeof value);
        return value;
    });
    return model;
}

TEST_F(CudaDrafts, FromTheTextGiveTheCpusText) {
    int64_t accepted = 0;
    for (const tiny::Options& tiny : tiny::gpuVariants()) {
        SCOPED_TRACE(tiny::describe(tiny));
        accepted += expectTheCpus(tiny::Model(tiny), few(options(true)), Source::NGram, {1, 2, 4, 7}, 70);
    }
    EXPECT_GT(accepted, 100) << "hardly anything was verified";
}

// With random weights, nearly all drafts are wrong.
TEST_F(CudaDrafts, OfThePredictionLayerGiveTheCpusText) {
    for (const tiny::Options& tiny : predicting()) {
        SCOPED_TRACE(tiny::describe(tiny));
        expectTheCpus(tiny::Model(tiny), few(options(true)), Source::Prediction, {1, 2, 3, 7}, 70);
    }
}

TEST_F(CudaDrafts, OfAPredictionLayerThatIsRightAreAccepted) {
    const tiny::Model model = predictable();
    const auto engine = load(model, few(options(true)));
    const Text prompt = tokens(5, model.options().vocab);
    for (const SamplingParams& params : samplings()) {
        for (const int32_t amount : {1, 2, 7}) {
            const Written got = write(engine, prompt, 200, params, {Source::Prediction, amount});
            EXPECT_EQ(write(engine, prompt, 200, params).text, got.text);
            EXPECT_GT(got.counts.drafted, 0);
            EXPECT_GT(static_cast<double>(got.counts.accepted), 0.9 * static_cast<double>(got.counts.drafted))
                << amount << " drafts";
            EXPECT_LT(static_cast<double>(got.counts.steps), 1.2 * 200 / (amount + 1)) << amount << " drafts";
        }
    }
    EXPECT_GT(expectTheCpus(model, few(options(true)), Source::Prediction, {1, 2, 3, 4, 5, 6, 7}, 100), 1000);
}

// Near the end of the context there are fewer drafts, and pages for them may be missing.
TEST_F(CudaDrafts, FillTheContext) {
    for (const int64_t context : {64, 65, 127}) {
        SCOPED_TRACE(context);
        expectTheCpus(predictable(), few(options(true), context), Source::Prediction, {1, 3, 7}, 200);
        expectTheCpus(tiny::Model{tiny::Options()}, few(options(true), context), Source::NGram, {1, 7}, 200);
    }
}

// After a long prompt on tensor cores, whose bits differ from the CPU's. Compared with the GPU without drafts.
TEST_F(CudaDrafts, BehindALongPromptGiveTheSameText) {
    std::vector<tiny::Options> all = predicting();
    for (const tiny::Options& tiny : tiny::gpuVariants()) all.push_back(tiny);
    for (const tiny::Options& tiny : all) {
        SCOPED_TRACE(tiny::describe(tiny));
        const tiny::Model model(tiny);
        EngineOptions o = options(true);
        o.sequences = 2 * kMostDraftRows;
        const auto engine = load(model, o);
        const Text prompt = repetitive(170, tiny.vocab);
        for (const SamplingParams& params : samplings()) {
            const Text expected = write(engine, prompt, 60, params).text;
            for (const int32_t amount : {1, 2, 7}) {
                EXPECT_EQ(expected, write(engine, prompt, 60, params, {Source::NGram, amount}).text);
                if (tiny.predictions) {
                    const Written got = write(engine, prompt, 60, params, {Source::Prediction, amount});
                    EXPECT_EQ(expected, got.text);
                    EXPECT_GT(got.counts.drafted, 0);
                }
            }
        }
    }
}

// Some of the weights come across the bus in every pass, among them the prediction layer's, and the CPU computes a part
// of the rows.
TEST_F(CudaDrafts, GiveTheSameTextEverywhere) {
    std::vector<tiny::Options> all = predicting();
    all.push_back(tiny::Options());
    for (const tiny::Options& tiny : all) {
        SCOPED_TRACE(tiny::describe(tiny));
        const tiny::Model model(tiny);
        const Source source = tiny.predictions ? Source::Prediction : Source::NGram;
        for (const size_t resident : {size_t{0}, model.tensors.size() / 2, model.tensors.size() - 6}) {
            for (const int share : {0, 40, 100}) {
                SCOPED_TRACE("resident " + std::to_string(resident) + ", the CPU's share " + std::to_string(share));
                EngineOptions o = few(options(true));
                o.homes = homes(model, resident, share);
                expectTheCpus(model, o, source, {1, 2, 7}, 40);
            }
        }
    }
}

// The prediction layer has experts in slots too.
TEST_F(CudaDrafts, GiveTheSameTextWithExpertsInSlots) {
    for (const tiny::Options& tiny : predicting()) {
        const tiny::Model model(tiny);
        if (!model.options().experts) continue;
        const size_t all = bytesOfAllExperts(model);
        for (const size_t bytes : {size_t{0}, all / 4, all * 2 / 3, 2 * all}) {
            for (const double busRate : {0.0, kFastBus}) {
                SCOPED_TRACE(tiny::describe(tiny) + ", " + std::to_string(bytes) + " of " + std::to_string(all) +
                             " bytes, a bus of " + std::to_string(busRate));
                expectTheCpus(model, few(inSlots(model, bytes, busRate)), Source::Prediction, {1, 2, 7}, 40);
                expectTheCpus(model, few(inSlots(model, bytes, busRate)), Source::NGram, {3}, 40);
            }
        }
    }
}

// Each session gives the answer that it gives alone, whatever the others draft. Their states are rolled back one by
// one.
TEST_F(CudaDrafts, SessionsInTurnDoNotTouchEachOther) {
    for (tiny::Options tiny : predicting()) {
        SCOPED_TRACE(tiny::describe(tiny));
        tiny.context = 900;
        const tiny::Model model(tiny);
        EngineOptions o = few(options(true), 900);
        o.sequences = 20;
        const auto onCpu = loadOnCpu(model), engine = load(model, o);
        const std::vector<DraftOptions> kinds = {
            {Source::Prediction, 2}, {Source::NGram, 7}, {Source::Off, 1}, {Source::Prediction, 7}};
        std::vector<Text> expected;
        std::vector<std::unique_ptr<Session>> sessions;
        for (size_t i = 0; i < kinds.size(); ++i) {
            const Text prompt = repetitive(10 + static_cast<int64_t>(i), tiny.vocab);
            const SamplingParams params = samplings()[i % 2];
            expected.push_back(write(onCpu, prompt, 60, params).text);
            sessions.push_back(std::make_unique<Session>(engine));
            sessions.back()->start(prompt, params, nullptr, kinds[i]);
        }
        std::vector<Text> got(kinds.size());
        while (got[0].size() + got[1].size() + got[2].size() + got[3].size() < 4 * 60) {
            const size_t i = random()() % kinds.size();
            if (got[i].size() < 60) got[i].push_back(*sessions[i]->next());
        }
        EXPECT_EQ(expected, got);
    }
}

// A generation is abandoned while the cache is ahead, and the text continues in another way.
TEST_F(CudaDrafts, AreForgottenWhenTheTextGoesOnOtherwise) {
    for (const tiny::Options& tiny : predicting()) {
        SCOPED_TRACE(tiny::describe(tiny));
        const tiny::Model model(tiny);
        Session cpu(loadOnCpu(model)), gpu(load(model, few(options(true))));
        Text prompt = repetitive(20, tiny.vocab);
        for (int turn = 0; turn < 12; ++turn) {
            const DraftOptions drafts{turn % 3 ? Source::Prediction : Source::NGram,
                                      1 + static_cast<int32_t>(random()() % 7)};
            const SamplingParams params = samplings()[static_cast<size_t>(turn % 2)];
            const int count = 1 + static_cast<int>(random()() % 12);
            const Text text = write(cpu, prompt, count, params).text;
            ASSERT_EQ(text, write(gpu, prompt, count, params, drafts).text) << "turn " << turn;
            EXPECT_EQ(cpu.tokens(), gpu.tokens());
            const std::vector<int32_t> further = tokens(5, tiny.vocab);
            if (turn % 4 == 3) {
                EXPECT_TRUE(sameBits(logits(cpu, further, {}), logits(gpu, further, {}))) << "turn " << turn;
            }
            prompt.insert(prompt.end(), text.begin(), text.end());
            prompt.resize(prompt.size() - random()() % 5);
            prompt.insert(prompt.end(), further.begin(),
                          further.begin() + static_cast<std::ptrdiff_t>(1 + random()() % 3));
        }
    }
}

TEST_F(CudaDrafts, NeedAPredictionLayer) {
    Session session(load(tiny::Model{tiny::gpuHybrids()[0]}, options(true)));
    EXPECT_THROW(write(session, {1, 2, 3}, 3, samplings()[0], {Source::Prediction, 1}), Error);
    EXPECT_EQ(write(session, {1, 2, 3}, 3, samplings()[0], {Source::NGram, 1}).text.size(), 3u);
}

}  // namespace
}  // namespace sharpi::cuda
