// Compares the whole engine on the GPU with the CPU's. Decode rows and exact prompts have the same bits, replayed or
// launched, whatever shares their batch. Fast prompts stay as near as their bf16 products allow. Memory is given back.
#include <cmath>
#include <numeric>

#include "backend/cuda_backend.h"
#include "cpu/cpu_backend.h"
#include "engine_test.h"
#include "tiny_pass.h"

namespace sharpi::cuda {
namespace {

class CudaEngine : public EngineTest {};

TEST_F(CudaEngine, DecodeRowsHaveTheCpusBits) {
    for (const tiny::Options& tiny : tiny::gpuVariants()) {
        SCOPED_TRACE(tiny::describe(tiny));
        const tiny::Model model(tiny);
        const auto text = tokens(140, tiny.vocab);
        Session cpu(load(model, options(false)));
        const auto expected = logits(cpu, text, {});
        Session gpu(load(model, options(true)));
        EXPECT_TRUE(sameBits(expected, steps(gpu, text, oneByOne(140)))) << "token by token";
        gpu.reset();
        EXPECT_TRUE(sameBits(expected, steps(gpu, text, smallChunks(140)))) << "a few at a time";
    }
}

TEST_F(CudaEngine, ExactPromptsHaveTheCpusBits) {
    for (const tiny::Options& tiny : tiny::gpuVariants()) {
        SCOPED_TRACE(tiny::describe(tiny));
        const tiny::Model model(tiny);
        const auto text = tokens(290, tiny.vocab);
        const auto expected = logits(load(model, options(false)), text, {});
        const auto engine = load(model, exact(options(true)));
        EXPECT_TRUE(sameBits(expected, logits(engine, text, {})));
        EXPECT_TRUE(sameBits(expected, logits(engine, text, smallChunks(290)))) << "a few at a time";
        EXPECT_TRUE(sameBits(expected, steps(engine, text, smallChunks(290)))) << "as decode rows";
    }
}

TEST_F(CudaEngine, EveryCacheTypeHasTheCpusBits) {
    std::vector<tiny::Options> models = tiny::latents();
    models.emplace_back();
    for (const tiny::Options& tiny : models) {
        for (const KvType kv : {KvType::F32, KvType::F16, KvType::BF16}) {
            SCOPED_TRACE(tiny::describe(tiny));
            const tiny::Model model(tiny);
            const auto text = tokens(100, tiny.vocab);
            Session cpu(load(model, options(false, kv))), gpu(load(model, options(true, kv)));
            EXPECT_TRUE(sameBits(logits(cpu, text, {}), steps(gpu, text, oneByOne(100))));
        }
    }
}

// The reference has the same weights as float32 on the CPU. Rounding a factor to bf16 costs 2^-9 of it, so 0.3 % of
// each product and a few times that after a few layers. The contract's int8 activations cost more. Factors that are
// split into a high and a low half cost 2^-16. The reference chooses experts by the router logits of what is compared
// with it, and these must be as near as all else.
TEST_F(CudaEngine, PrefillIsNear) {
    for (const tiny::Options& tiny : tiny::gpuVariants()) {
        const tiny::Model model(tiny), exact = model.asFloats();
        const auto text = tokens(250, tiny.vocab);
        for (const bool floats : {false, true}) {
            const std::string name = tiny::describe(tiny) + (floats ? " as floats" : "");
            SCOPED_TRACE(name);
            const tiny::Model& given = floats ? exact : model;
            const KvType kv = floats ? KvType::F32 : KvType::BF16;
            const auto reference = [&](const RoutedRun& run) {
                return routed<CpuBackend>(exact, options(false, KvType::F32), text, &run.routers, 3);
            };
            const RoutedRun prefill = routed<CudaBackend>(given, options(true, kv), text, nullptr, 0, size_t{0}, 3),
                            expected = reference(prefill);
            if (!prefill.routers.empty()) {
                EXPECT_TRUE(sameBits(logits(load(given, options(true, kv)), text, {}), prefill.logits))
                    << "reading the router logits changes the answer";
            }
            // 1 % for each layer, since what rounding activations makes adds up, and 1 % for the output head. Twice
            // that if products by head round them to int8, as steps do.
            const double each = tiny::family(tiny.architecture).latent ? 0.02 : 0.01;
            const double most = floats ? 1e-4 : each * static_cast<double>(tiny.layers + 1);
            const double off = distance(prefill.logits, expected.logits);
            EXPECT_LT(off, most);
            EXPECT_GT(off, 0.0) << "this was not computed on tensor cores";
            expectNearRouters(prefill.routers, expected.routers, most);
            std::printf("%-40s prefill is off by %.1e", name.c_str(), off);
            if (!floats && tiny.matrices != DType::F32) {
                // The bits of steps: see DecodeRowsHaveTheCpusBits.
                const RoutedRun contract = routed<CpuBackend>(given, options(false, kv), text, nullptr, 3);
                const double offSteps = distance(contract.logits, reference(contract).logits);
                std::printf(", steps by %.1e", offSteps);
                EXPECT_LT(off, offSteps);
            }
            std::printf("\n");
        }
    }
}

TEST_F(CudaEngine, ReplayedStepsAreTheLaunchedOnes) {
    for (const tiny::Options& tiny : tiny::gpuVariants()) {
        SCOPED_TRACE(tiny::describe(tiny));
        const tiny::Model model(tiny);
        const auto engine = load(model, options(true));
        const auto prompt = tokens(20, tiny.vocab);
        std::vector<std::vector<int32_t>> texts;
        std::vector<std::vector<float>> all;
        for (const bool replay : {true, false}) {
            engine->backend().recording()->setReplays(replay);
            Session session(engine);
            SamplingParams greedy;
            greedy.temperature = 0;
            session.start(prompt, greedy, nullptr);
            texts.emplace_back();
            for (int i = 0; i < 256; ++i) texts.back().push_back(*session.next());
            EXPECT_GT(engine->backend().recording()->kernelsPerStep(), 0);
            session.reset();
            all.push_back(steps(session, texts.front(), oneByOne(256)));
        }
        EXPECT_EQ(texts[0], texts[1]);
        EXPECT_TRUE(sameBits(all[0], all[1]));
    }
}

TEST_F(CudaEngine, SequencesInOneBatchDoNotTouchEachOther) {
    for (const tiny::Options& tiny : tiny::gpuVariants()) {
        SCOPED_TRACE(tiny::describe(tiny));
        const tiny::Model model(tiny);
        tiny::Pass<CudaBackend> pass(model, 40, 300, KvType::BF16, 4 * 300, 0, size_t{0}, 2);

        constexpr int kTexts = 4, kLength = 70;
        std::vector<std::vector<int32_t>> texts;
        std::vector<std::vector<float>> alone;
        std::vector<int32_t> handles;
        Session cpu(load(model, options(false)));
        for (int s = 0; s < kTexts; ++s) {
            texts.push_back(tokens(kLength, tiny.vocab));
            cpu.reset();
            alone.push_back(logits(cpu, texts.back(), {}));
            handles.push_back(pass.kv.createSequence());
        }
        std::vector<size_t> done(kTexts, 0);
        for (size_t left = kTexts * kLength; left > 0;) {
            Batch batch;
            std::vector<std::pair<size_t, size_t>> rows;
            for (int s = 0; s < kTexts; ++s) {
                const size_t count = std::min<size_t>(random()() % (random()() % 4 ? 3 : 11), kLength - done[s]);
                if (count == 0) continue;
                pass.kv.extend(handles[s], static_cast<int64_t>(count));
                for (size_t i = 0; i < count; ++i, ++done[s], --left) {
                    batch.add(RowKind::Decode, texts[s][done[s]], static_cast<int32_t>(done[s]), handles[s], true);
                    rows.emplace_back(s, done[s]);
                }
            }
            std::vector<float> got(rows.size() * tiny.vocab, NAN);
            pass.forward.run(batch, got.data());
            for (size_t i = 0; i < rows.size(); ++i) {
                const auto [s, at] = rows[i];
                ASSERT_EQ(std::memcmp(&got[i * tiny.vocab], &alone[s][at * tiny.vocab], tiny.vocab * sizeof(float)), 0)
                    << "sequence " << s << " at " << at << " in a batch of " << rows.size();
            }
        }
    }
}

// The same on tensor cores with float32 weights, for which the distance is small enough to tell a wrong row from
// rounding.
TEST_F(CudaEngine, SequencesShareAPrefill) {
    for (const tiny::Options& tiny : tiny::gpuVariants()) {
        SCOPED_TRACE(tiny::describe(tiny));
        const tiny::Model model = tiny::Model(tiny).asFloats();
        tiny::Pass<Routed<CudaBackend>> pass(model, 200, 300, KvType::F32, 80 * 64, 0, size_t{0}, 2);
        const std::vector<int64_t> lengths = {150, 3, 1, 46};
        std::vector<std::vector<int32_t>> texts;
        Batch batch;
        for (const int64_t length : lengths) {
            texts.push_back(tokens(length, tiny.vocab));
            const int32_t handle = pass.kv.createSequence();
            pass.kv.extend(handle, length);
            for (int64_t i = 0; i < length; ++i)
                batch.add(RowKind::Prompt, texts.back()[i], static_cast<int32_t>(i), handle, true);
        }
        std::vector<float> got(200 * tiny.vocab, NAN);
        pass.forward.run(batch, got.data());
        // One after the other, so that rows come in the batch's order.
        RoutedEngine<CpuBackend> reference(model, options(false, KvType::F32), &pass.backend.routers, 3);
        std::vector<float> expected;
        for (const std::vector<int32_t>& text : texts) {
            const auto alone = logits(reference.engine, text, {});
            expected.insert(expected.end(), alone.begin(), alone.end());
        }
        EXPECT_LT(distance(got, expected), 1e-4);
        expectNearRouters(pass.backend.routers, reference.backend->routers, 1e-4);

        if (pass.kv.states().any()) continue;  // there is no room for a state of each
        Batch many;                            // more sequences than a batch can hold
        for (int i = 0; i < 65; ++i) {
            const int32_t handle = pass.kv.createSequence();
            pass.kv.extend(handle, 1);
            many.add(RowKind::Prompt, 0, 0, handle, false);
        }
        EXPECT_THROW(pass.forward.run(many, nullptr), Error);
    }
}

TEST_F(CudaEngine, ChoosesTheTokensThatTheCpuChooses) {
    tiny::Options tiny;
    tiny.vocab = 5000;
    const tiny::Model model(tiny);
    const auto prompt = tokens(30, tiny.vocab);
    SamplingParams params;
    params.seed = 5;
    params.repetitionPenalty = 1.1f;
    params.logitBias = {{3, 2.0f}, {4999, -1.0f}};
    for (const float temperature : {0.0f, 0.7f, 1.3f}) {
        for (const int topK : {0, 1, 40, 3000}) {
            params.temperature = temperature;
            params.topK = topK;
            std::vector<std::vector<int32_t>> texts;
            for (const bool cuda : {false, true}) {
                Session session(load(model, exact(options(cuda))));
                session.start(prompt, params, nullptr);
                texts.emplace_back();
                for (int i = 0; i < 60; ++i) texts.back().push_back(*session.next());
            }
            EXPECT_EQ(texts[0], texts[1]) << "temperature " << temperature << ", top-k " << topK;
        }
    }
}

TEST_F(CudaEngine, ClosingGivesTheMemoryBack) {
    const tiny::Model model{tiny::Options()};
    const auto prompt = tokens(20, 77);
    const auto round = [&] {
        Session session(load(model, options(true)));
        session.start(prompt, SamplingParams(), nullptr);
        for (int i = 0; i < 3; ++i) session.next();
    };
    round();  // kernels stay loaded
    const size_t before = findDevice(0).freeBytes;
    for (int i = 0; i < 100; ++i) round();
    EXPECT_EQ(findDevice(0).freeBytes, before);
}

// The first engine leaves memory behind that belongs to the process: the driver loads kernels with their first launch,
// and its pools for streams, events and page-locked memory grow by 2 MiB at a time. So the first refused engine may
// take memory, and later ones may not.
TEST_F(CudaEngine, ABudgetThatIsTooSmallIsSaid) {
    tiny::Options tiny;
    tiny.context = 8000;
    const tiny::Model model(tiny);
    EngineOptions o = options(true);
    o.context = 8000;
    o.vram = size_t{2} << 20;
    const auto refuse = [&] {
        try {
            load(model, o);
            ADD_FAILURE() << "it fits";
        } catch (const Error& e) {
            EXPECT_EQ(e.kind(), ErrorKind::OutOfMemory);
            EXPECT_NE(std::string(e.what()).find("budget"), std::string::npos) << e.what();
        }
    };
    refuse();
    const size_t before = findDevice(0).freeBytes;
    for (int i = 0; i < 50; ++i) refuse();
    EXPECT_EQ(findDevice(0).freeBytes, before);
}

TEST_F(CudaEngine, WorkingMemoryNeverGrows) {
    const tiny::Model model{tiny::Options()};
    const auto engine = load(model, options(true));
    EXPECT_THROW(engine->backend().takeScratch(StepLimits()), Error);
}

}  // namespace
}  // namespace sharpi::cuda
