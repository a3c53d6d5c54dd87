// Layers that see a window or a chunk, in a cache that keeps little more than these: the GPU answers as with a cache
// that keeps everything, and by the contract as the CPU does.
#include "engine_test.h"
#include "varied_model.h"

namespace sharpi::cuda {
namespace {

class CudaWindows : public EngineTest {
protected:
    static EngineOptions of(bool cuda, PromptMode prompt = PromptMode::Exact) {
        EngineOptions o = options(cuda);
        o.batch = 64;
        o.prompt = prompt;
        return o;
    }
    std::vector<int64_t> cuts() {
        std::vector<int64_t> chunks;
        for (int i = 0; i < 1200; ++i) chunks.push_back(1 + static_cast<int64_t>(random()() % 64));
        return chunks;
    }
};

TEST_F(CudaWindows, ALongTextInASmallCacheGetsTheSameBits) {
    const tiny::WindowedModel windowed(3);
    const auto text = tokens(1200, windowed.vocab());
    const auto onCpu = logits(windowed.roomy(of(false)), text, cuts());
    for (const PromptMode prompt : {PromptMode::Exact, PromptMode::Fast}) {
        const auto small = windowed.engine(of(true, prompt)), roomy = windowed.roomy(of(true, prompt));
        ASSERT_LT(2 * small->kvBytes(), roomy->kvBytes());
        const auto expected = logits(roomy, text, cuts());
        EXPECT_EQ(logits(small, text, cuts()), expected);
        if (prompt == PromptMode::Exact) {
            EXPECT_EQ(expected, onCpu);
        }
        const auto stepped = steps(small, text, smallChunks(1200));
        EXPECT_EQ(steps(roomy, text, oneByOne(1200)), stepped);
        EXPECT_EQ(stepped, onCpu);
    }
}

// Through recorded steps, which find each list of pages at a fixed place.
TEST_F(CudaWindows, GenerationIsTheSame) {
    const tiny::WindowedModel windowed(4);
    const auto prompt = tokens(300, windowed.vocab());
    for (const PromptMode mode : {PromptMode::Exact, PromptMode::Fast}) {
        const auto expected = greedy(windowed.roomy(of(true, mode)), prompt, 1000);
        EXPECT_EQ(greedy(windowed.engine(of(true, mode)), prompt, 1000), expected);
        EXPECT_EQ(greedy(windowed.engine(of(true, mode), 3), prompt, 1000), expected);
    }
}

TEST_F(CudaWindows, GoingBackGivesTheAnswerOfABeginning) {
    const tiny::WindowedModel windowed(5);
    const auto small = windowed.engine(of(true, PromptMode::Fast)), roomy = windowed.roomy(of(true, PromptMode::Fast));
    Session used(small);
    auto prompt = tokens(700, windowed.vocab());
    SamplingParams params;
    params.temperature = 0;
    for (const size_t changed : {699u, 698u, 640u, 300u, 192u, 5u, 0u}) {
        prompt[changed] = static_cast<int32_t>((prompt[changed] + 1) % windowed.vocab());
        used.start(prompt, params, nullptr);
        std::vector<int32_t> text;
        for (int i = 0; i < 20; ++i) text.push_back(*used.next());
        EXPECT_EQ(text, greedy(roomy, prompt, 20)) << "from token " << changed;
    }
}

}  // namespace
}  // namespace sharpi::cuda
