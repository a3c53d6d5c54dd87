// DeepSeek V4 on the GPU: decode rows and exact prompts have the CPU's bits, wherever the weights are, however a text
// is cut, whoever else is in the batch, and after roll-backs. Fast prompts are near.
#include "backend/cuda_backend.h"
#include "placement_test.h"
#include "tiny_blocks.h"
#include "together.h"

namespace sharpi::cuda {
namespace {

using tiny::BlockModel;
using tiny::BlockOptions;

class CudaBlocks : public PlacementTest {
protected:
    static EngineOptions with(bool cuda, KvType kv = KvType::BF16) {
        EngineOptions o = options(cuda, kv);
        o.sequences = 4;
        return o;
    }
    static std::vector<BlockOptions> models() {
        BlockOptions mixed, floats, wide;
        floats.matrices = floats.experts = DType::F32;
        floats.seed = 901;
        wide.matrices = DType::BF16;
        wide.experts = wide.small = DType::Q8_0;
        wide.heads = 20;
        wide.headDim = 128;
        wide.rotated = 32;
        wide.window = 100;
        wide.topK = 40;
        wide.blocks = {4, 128, 64, 0};
        wide.hashed = 0;
        wide.seed = 902;
        return {mixed, floats, wide};
    }
};

constexpr int64_t kText = 290;

TEST_F(CudaBlocks, HaveTheCpusBits) {
    for (const BlockOptions& of : models()) {
        const BlockModel model(of);
        for (const KvType kv : {KvType::BF16, KvType::F32, KvType::F16}) {
            SCOPED_TRACE("seed " + std::to_string(of.seed) + ", cache " + std::to_string(static_cast<int>(kv)));
            const auto text = tokens(kText, model.options().vocab);
            const auto expected = logits(load(model, with(false, kv)), text, {});
            const auto engine = load(model, exact(with(true, kv)));
            EXPECT_TRUE(sameBits(expected, steps(engine, text, oneByOne(kText)))) << "token by token";
            EXPECT_TRUE(sameBits(expected, steps(engine, text, smallChunks(kText)))) << "a few at a time";
            EXPECT_TRUE(sameBits(expected, logits(engine, text, {}))) << "an exact prompt";
            EXPECT_TRUE(sameBits(expected, logits(engine, text, {3, 1, 60, 64, 1, 127, 34}))) << "a prompt in pieces";
            engine->backend().recording()->setReplays(false);
            EXPECT_TRUE(sameBits(expected, steps(engine, text, smallChunks(kText)))) << "launched";
        }
    }
}

// With float weights, for which the distance is small enough to tell a wrong rule from rounding. A row whose choice of
// experts or blocks hangs on a rounding differs a lot, so the median over rows counts. If it is an early row, so do the
// rows behind it, which see its keys. So most of several texts count.
TEST_F(CudaBlocks, FastPromptsAreNear) {
    const BlockModel model(models()[1]);
    const auto onCpu = load(model, with(false, KvType::F32)), engine = load(model, with(true, KvType::F32));
    std::vector<double> distances;
    for (int i = 0; i < 5; ++i) {
        const auto text = tokens(kText, model.options().vocab);
        const auto expected = logits(onCpu, text, {}), got = logits(engine, text, {});
        distances.push_back(medianDistance(got, expected, model.options().vocab));
        EXPECT_GT(distance(got, expected), 0.0) << "this was not computed on tensor cores";
        EXPECT_TRUE(sameBits(got, logits(engine, text, {64, 128, 98}))) << "in pieces";
        EXPECT_TRUE(sameBits(expected, steps(engine, text, smallChunks(kText)))) << "decode rows";
    }
    std::sort(distances.begin(), distances.end());
    EXPECT_LT(distances[2], 1e-4);
}

// Everything but norms stays in the file, or a part of it, and the CPU computes some rows.
TEST_F(CudaBlocks, DirectReadsHaveTheSameBits) {
    const BlockModel model;
    const auto text = tokens(150, model.options().vocab);
    const auto expected = logits(load(model, with(false)), text, {});
    for (const auto& [resident, share] : std::vector<std::pair<size_t, int>>{{0, 0}, {0, 40}, {40, 100}, {90, 0}}) {
        SCOPED_TRACE(std::to_string(resident) + " tensors resident, the CPU's share " + std::to_string(share));
        EngineOptions o = exact(with(true));
        o.homes = homes(model, resident, share);
        const auto engine = load(model, o);
        EXPECT_TRUE(sameBits(expected, steps(engine, text, oneByOne(150)))) << "token by token";
        EXPECT_TRUE(sameBits(expected, steps(engine, text, smallChunks(150)))) << "a few at a time";
        EXPECT_TRUE(sameBits(expected, logits(engine, text, {}))) << "an exact prompt";
    }
}

TEST_F(CudaBlocks, ExpertsInSlotsHaveTheSameBits) {
    const BlockModel model;
    const auto text = tokens(100, model.options().vocab);
    const auto expected = logits(load(model, with(false)), text, {});
    const size_t all = bytesOfAllExperts(model);
    for (const auto& [bytes, busRate] :
         std::vector<std::pair<size_t, double>>{{0, 0}, {all / 3, 0}, {all / 3, kFastBus}, {2 * all, kFastBus}}) {
        SCOPED_TRACE(std::to_string(bytes) + " bytes of slots, rate " + std::to_string(busRate));
        const auto engine = load(model, exact(inSlots(model, bytes, busRate)));
        EXPECT_TRUE(sameBits(expected, steps(engine, text, oneByOne(100)))) << "token by token";
        EXPECT_TRUE(sameBits(expected, steps(engine, text, smallChunks(100)))) << "a few at a time";
        EXPECT_TRUE(sameBits(expected, logits(engine, text, {}))) << "an exact prompt";
        EXPECT_TRUE(sameBits(expected, logits(engine, text, {3, 1, 64, 1, 31}))) << "a prompt in pieces";
    }
}

// Streamed weights, with a part of the rows for the CPU in steps, and experts in slots: those of a GPU that holds all.
TEST_F(CudaBlocks, FastPromptsHaveTheSameBitsWhereverTheWeightsAre) {
    const BlockModel model;
    const auto text = tokens(kText, model.options().vocab);
    const auto expected = logits(load(model, with(true)), text, {});
    std::vector<EngineOptions> placed;
    for (const auto& [resident, share] : std::vector<std::pair<size_t, int>>{{0, 0}, {40, 40}, {90, 0}}) {
        placed.push_back(with(true));
        placed.back().homes = homes(model, resident, share);
    }
    const size_t all = bytesOfAllExperts(model);
    for (const size_t bytes : {size_t{0}, all / 3, 2 * all}) placed.push_back(inSlots(model, bytes));
    for (size_t i = 0; i < placed.size(); ++i) {
        const auto engine = load(model, placed[i]);
        EXPECT_TRUE(sameBits(expected, logits(engine, text, {}))) << "placement " << i;
        EXPECT_TRUE(sameBits(expected, logits(engine, text, {64, 1, 127, 98}))) << "placement " << i << ", in pieces";
    }
}

// Steps of one row of each of 64 texts, and of a few rows of some. Most texts end beyond the window and more blocks of
// 4 than are chosen, some beyond a block of 128.
TEST_F(CudaBlocks, StepsOfSixtyFourTextsHaveTheCpusBits) {
    constexpr size_t kTexts = 64;
    BlockOptions few;
    few.topK = 3;
    const BlockModel model(few);
    const int64_t vocab = model.options().vocab;
    Session cpu(load(model, with(false)));
    for (const bool replay : {true, false}) {
        tiny::Together<CudaBackend> all(model, kExactLaunchRows, 192, KvType::BF16, kTexts, 0, size_t{0}, 2);
        all.pass.backend.recording()->setReplays(replay);
        for (size_t s = 0; s < kTexts; ++s) {
            const auto text = tokens((s % 16 ? 18 : 130) + static_cast<int64_t>(random()() % 8), vocab);
            cpu.reset();
            all.add(text, logits(cpu, text, {}));
        }
        while (!all.finished()) {
            std::vector<size_t> counts;
            for (size_t s = 0; s < kTexts; ++s) counts.push_back(std::min<size_t>(all.left(s), 1));
            if (random()() % 2) counts = all.draw(random(), 1 + random()() % kExactLaunchRows);
            all.run(counts, RowKind::Decode);
        }
        for (size_t s = 0; s < kTexts; ++s)
            ASSERT_TRUE(sameBits(all.alone[s], all.got[s])) << "text " << s << (replay ? ", replayed" : ", launched");
        const auto last = [&](size_t s) { return std::vector<float>(all.got[s].end() - vocab, all.got[s].end()); };
        EXPECT_GT(distance(last(0), last(1)), 0.1) << "all texts have the same logits";
    }
}

// Turns of two sessions that keep any beginning of what they held, within a block too.
TEST_F(CudaBlocks, RollBacksLeaveNothingBehind) {
    const BlockModel model;
    EngineOptions o = exact(with(true));
    o.cacheTokens = 2 * o.context;  // sessions never make room for each other
    const auto engine = load(model, o);
    const auto onCpu = load(model, with(false));
    Session sessions[] = {Session(engine), Session(engine)};
    std::vector<int32_t> texts[] = {tokens(30, model.options().vocab), tokens(200, model.options().vocab)};
    SamplingParams params;
    params.temperature = 0;
    for (int turn = 0; turn < 10; ++turn) {
        std::vector<int32_t>& text = texts[turn % 2];
        sessions[turn % 2].start(text, params, nullptr);
        std::vector<int32_t> found;
        for (int i = 0; i < 12; ++i) found.push_back(*sessions[turn % 2].next());
        ASSERT_EQ(greedy(onCpu, text, 12), found) << "turn " << turn;
        text.insert(text.end(), found.begin(), found.end());
        text.resize(1 + random()() % text.size());
        const auto more = tokens(1 + random()() % 60, model.options().vocab);
        text.insert(text.end(), more.begin(), more.end());
        text.resize(std::min<size_t>(text.size(), 270));
    }
}

}  // namespace
}  // namespace sharpi::cuda
