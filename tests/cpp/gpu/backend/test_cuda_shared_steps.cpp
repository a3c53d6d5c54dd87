// Steps of up to 64 rows on the GPU, launched and replayed: what each text gets is what the CPU gives it alone.
#include "core/launch_rows.h"
#include "engine_test.h"

namespace sharpi::cuda {
namespace {

class CudaSharedSteps : public EngineTest {
protected:
    static constexpr int64_t kContext = 5000;

    static EngineOptions roomy(bool cuda) {
        EngineOptions o = exact(options(cuda));
        o.context = kContext;
        o.sequences = 80;
        return o;
    }
    static tiny::Model modelOf(tiny::Options tiny) {
        tiny.context = kContext;
        return tiny::Model(tiny);
    }
    // Settings that take each way of choosing a token.
    SamplingParams someParams() {
        SamplingParams params;
        params.temperature = random()() % 3 ? 0.7f : 0.0f;
        params.topK = std::vector<int32_t>{40, 5, 0, 200}[random()() % 4];
        params.seed = random()();
        if (random()() % 2) params.logitBias = {{3, 1.5f}, {7, -2.0f}};
        if (random()() % 2) params.repetitionPenalty = 1.2f;
        return params;
    }
};

// 70 texts: steps of one row of each of some of them, or of several rows where drafts are looked up in the text.
TEST_F(CudaSharedSteps, EverySessionGivesTheCpusTokens) {
    constexpr size_t kTexts = 70, kLength = 10;
    auto models = tiny::gpuVariants();
    for (const auto& hybrids : {tiny::gpuHybrids(), tiny::mambas()})
        for (const tiny::Options& tiny : hybrids) models.push_back(tiny);
    for (const tiny::Options& tiny : models) {
        SCOPED_TRACE(tiny::describe(tiny));
        const tiny::Model model = modelOf(tiny);
        const auto gpu = load(model, roomy(true)), cpu = load(model, roomy(false));
        for (const bool replay : {true, false}) {
            gpu->backend().recording()->setReplays(replay);
            std::vector<std::unique_ptr<Session>> sessions;
            std::vector<std::vector<int32_t>> expected, got(kTexts);
            for (size_t s = 0; s < kTexts; ++s) {
                const auto prompt = tokens(1 + static_cast<int64_t>(random()() % 20), tiny.vocab);
                const SamplingParams params = someParams();
                Session alone(cpu);
                alone.start(prompt, params, nullptr);
                expected.emplace_back();
                for (size_t i = 0; i < kLength; ++i) expected.back().push_back(*alone.next());
                DraftOptions drafts;
                if (random()() % 3 == 0) drafts = {DraftOptions::Source::NGram, 3};
                sessions.push_back(std::make_unique<Session>(gpu));
                sessions.back()->start(prompt, params, nullptr, drafts);
            }
            for (size_t left = kTexts * kLength; left > 0;) {
                const size_t most = random()() % 3 ? kTexts : 1 + random()() % 12;
                std::vector<size_t> chosen;
                std::vector<Session*> step;
                for (size_t s = 0; s < kTexts && step.size() < most; ++s) {
                    if (got[s].size() == kLength || random()() % 4 == 0) continue;
                    chosen.push_back(s);
                    step.push_back(sessions[s].get());
                }
                const auto made = Session::nextOf(step);
                for (size_t i = 0; i < chosen.size(); ++i) got[chosen[i]].push_back(made[i].value_or(-2));
                left -= chosen.size();
            }
            for (size_t s = 0; s < kTexts; ++s)
                ASSERT_EQ(got[s], expected[s]) << "text " << s << (replay ? ", replayed" : ", launched");
        }
    }
}

// What writes rows writes the columns of products of many rows: no product arranges them in a launch of its own.
TEST_F(CudaSharedSteps, ManyRowsTakeNoMoreLaunchesThanFew) {
    for (const char* name : {"qwen3", "gemma3", "qwen35"}) {
        tiny::Options tiny;
        tiny.architecture = name;
        tiny.layers = tiny::family(name).layers;
        tiny.embedding = tiny.hidden = 256;
        tiny.heads = tiny.kvHeads = 8;
        tiny.headDim = 32;
        tiny.matrices = DType::Q8_0;
        SCOPED_TRACE(tiny::describe(tiny));
        const auto engine = load(modelOf(tiny), roomy(true));
        Recording& recording = *engine->backend().recording();
        recording.setReplays(false);
        Session session(engine);
        const auto text = tokens(64, tiny.vocab);
        std::vector<int64_t> launches;
        for (const int64_t rows : {12, 17, 40, 64}) {
            session.reset();
            session.evaluate({text.begin(), text.begin() + rows}, RowKind::Decode, nullptr, {rows}, nullptr);
            launches.push_back(recording.kernelsPerStep());
        }
        EXPECT_EQ(launches, std::vector<int64_t>(4, launches[0]));
    }
}

// Steps of each number of rows, with logits of all rows and of none: more shapes than there may be records, so that
// records replace each other.
TEST_F(CudaSharedSteps, RecordsThatReplaceEachOtherKeepTheBits) {
    auto models = tiny::gpuHybrids();
    models.resize(1);
    models.push_back(tiny::gpuVariants().front());
    models.push_back(tiny::mambas().front());
    for (const tiny::Options& tiny : models) {
        SCOPED_TRACE(tiny::describe(tiny));
        const tiny::Model model = modelOf(tiny);
        std::vector<int64_t> chunks;
        for (int64_t rows = 1; rows <= kExactLaunchRows; ++rows) chunks.push_back(rows);
        const auto text = tokens(kExactLaunchRows * (kExactLaunchRows + 1) / 2, tiny.vocab);
        const auto expected = logits(load(model, roomy(false)), text, {});
        Session gpu(load(model, roomy(true)));
        for (int round = 0; round < 4; ++round) {
            std::shuffle(chunks.begin(), chunks.end(), random());
            EXPECT_TRUE(sameBits(expected, steps(gpu, text, chunks))) << "round " << round;
            gpu.reset();
            gpu.evaluate(text, RowKind::Decode, nullptr, chunks, nullptr);
            gpu.reset();
        }
    }
}

}  // namespace
}  // namespace sharpi::cuda
