// Placement never changes the answer on the GPU. Weights may be resident or come across the bus in every pass, and the
// CPU may compute a part of the rows or of the experts: logits have the same bits, and the tokens are the same.
#include <algorithm>
#include <numeric>
#include <thread>
#include <tuple>

#include "backend/cuda_backend.h"
#include "placement_test.h"

namespace sharpi::cuda {
namespace {

class CudaStreaming : public PlacementTest {};

std::vector<tiny::Options> models() {
    std::vector<tiny::Options> all = tiny::gpuVariants();
    // More rows than a piece has, and not a multiple of 32.
    tiny::Options wide;
    wide.embedding = 160;
    wide.hidden = 352;
    wide.layers = 3;
    wide.seed = 7;
    all.push_back(wide);
    wide.matrices = DType::Q4_0;
    wide.tied = true;
    all.push_back(wide);
    wide.experts = 7;
    wide.used = 4;
    all.push_back(wide);
    wide.matrices = DType::F32;
    wide.used = 1;
    all.push_back(wide);
    // Hidden rows that products of many rows read in columns, of which the CPU's part comes in rows.
    tiny::Options columns;
    columns.hidden = 128;
    columns.seed = 9;
    all.push_back(columns);
    tiny::Options hybrid;
    hybrid.architecture = "qwen35";
    hybrid.embedding = 160;
    hybrid.hidden = 352;
    hybrid.layers = 4;
    hybrid.interval = 4;
    hybrid.deltaDim = 64;
    hybrid.predictions = 1;  // its passes use their own weights and the head's
    hybrid.seed = 8;
    all.push_back(hybrid);
    hybrid.architecture = "qwen35moe";
    hybrid.experts = 7;
    hybrid.used = 4;
    hybrid.matrices = DType::Q4_0;
    hybrid.tied = true;
    all.push_back(hybrid);
    for (tiny::Options mamba : tiny::mambas()) {
        mamba.embedding = 160;
        mamba.hidden = 352;
        all.push_back(mamba);
    }
    return all;
}

// Stacks of experts with as many pieces as the stream has buffers, and with more. No row chooses some of the experts.
tiny::Options manyExperts() {
    tiny::Options tiny;
    tiny.embedding = 1024;
    tiny.hidden = 1440;
    tiny.heads = 8;
    tiny.headDim = 128;
    tiny.layers = 3;
    tiny.experts = 24;  // 1.5 MiB each
    tiny.used = 4;
    return tiny;
}

TEST_F(CudaStreaming, StepsHaveTheSameBitsEverywhere) {
    for (const tiny::Options& tiny : models()) {
        SCOPED_TRACE(tiny::describe(tiny));
        const tiny::Model model(tiny);
        const auto text = tokens(90, tiny.vocab);
        const auto expected = logits(load(model, options(false)), text, {});
        const auto expectedTokens = greedy(load(model, options(false)), {text.begin(), text.begin() + 5}, 64);
        for (const size_t resident : {size_t{0}, model.tensors.size() / 2, model.tensors.size() - 2}) {
            for (const int share : {0, 40, 100}) {
                SCOPED_TRACE("resident " + std::to_string(resident) + ", the CPU's share " + std::to_string(share));
                EngineOptions o = exact(options(true));
                o.homes = homes(model, resident, share);
                const auto engine = load(model, o);
                EXPECT_TRUE(sameBits(expected, logits(engine, text, {}))) << "an exact prompt";
                EXPECT_TRUE(sameBits(expected, steps(engine, text, oneByOne(90)))) << "token by token, replayed";
                EXPECT_TRUE(sameBits(expected, steps(engine, text, smallChunks(90)))) << "a few at a time";
                EXPECT_EQ(expectedTokens, greedy(engine, {text.begin(), text.begin() + 5}, 64));
                engine->backend().recording()->setReplays(false);
                EXPECT_TRUE(sameBits(expected, steps(engine, text, smallChunks(90)))) << "launched";
            }
        }
    }
}

TEST_F(CudaStreaming, PrefillHasTheSameBitsEverywhere) {
    for (const tiny::Options& tiny : models()) {
        SCOPED_TRACE(tiny::describe(tiny));
        const tiny::Model model(tiny);
        const auto text = tokens(250, tiny.vocab);
        const auto expected = logits(load(model, options(true)), text, {});
        for (const size_t resident : {size_t{0}, model.tensors.size() / 2}) {
            EngineOptions o = options(true);
            o.homes = homes(model, resident, 50);
            const auto engine = load(model, o);
            EXPECT_TRUE(sameBits(expected, logits(engine, text, {}))) << "while the resident part is being uploaded";
            EXPECT_TRUE(sameBits(expected, logits(engine, text, {}))) << "after";
        }
    }
}

// Weights with more pieces than the stream has buffers, so that a piece that is overwritten or read too early shows.
TEST_F(CudaStreaming, ManyPiecesThroughTheSlots) {
    tiny::Options tiny;
    tiny.embedding = 1024;
    tiny.hidden = 40000 / 32 * 32;
    tiny.heads = 8;
    tiny.headDim = 128;
    tiny.layers = 2;
    const tiny::Model model(tiny);
    const auto text = tokens(60, tiny.vocab);
    const auto resident = load(model, options(true));
    const auto stepped = steps(resident, text, oneByOne(60)), prefill = logits(resident, text, {});
    for (const int share : {0, 30}) {
        EngineOptions o = options(true);
        o.homes = homes(model, 0, share);
        const auto engine = load(model, o);
        EXPECT_TRUE(sameBits(prefill, logits(engine, text, {})));
        for (int round = 0; round < 3; ++round) EXPECT_TRUE(sameBits(stepped, steps(engine, text, oneByOne(60))));
        EXPECT_TRUE(sameBits(prefill, logits(engine, text, {})));
    }
}

// Slots hold no experts, a few, most or all. The CPU, the GPU or both handle the misses.
TEST_F(CudaStreaming, ExpertsInSlotsGiveTheSameBits) {
    const tiny::Model model(manyExperts());
    const Answers expected = answersOf(model);
    constexpr size_t kExpert = size_t{5} << 20;
    for (const auto& [slots, busRate] : std::vector<std::pair<size_t, double>>{
             {0, 0}, {0, kFastBus}, {12, 0}, {12, kFastBus}, {30, kFastBus}, {60, 0}, {200, kFastBus}}) {
        SCOPED_TRACE(std::to_string(slots) + " slots, a bus of " + std::to_string(busRate));
        const auto engine = load(model, inSlots(model, slots * kExpert, busRate));
        EXPECT_TRUE(engine->backend().bus().streams);
        EXPECT_GT(engine->placement().slots, 0u);
        expectAnswers(engine, expected);
        const ExpertCounts counts = engine->expertCounts();
        EXPECT_EQ(sum(counts.hits) > 0, slots > 0);
        EXPECT_EQ(sum(counts.computed) == 0, slots == 200) << "all fit";
        EXPECT_EQ(sum(counts.fetched) > 0, slots > 0 && slots < 200 && busRate > 0);
        EXPECT_LT(sum(counts.hits) + sum(counts.computed) + sum(counts.fetched), sum(counts.uses))
            << "prefill counts uses, and nothing else";
    }
}

TEST_F(CudaStreaming, ExpertsOfEveryModelMayBeInSlots) {
    for (const tiny::Options& tiny : models()) {
        const tiny::Model model(tiny);
        if (!model.options().experts) continue;
        const size_t all = bytesOfAllExperts(model);
        const Answers expected = answersOf(model);
        for (const size_t bytes : {size_t{0}, all / 4, all * 2 / 3, 2 * all}) {
            SCOPED_TRACE(tiny::describe(tiny) + ", " + std::to_string(bytes) + " of " + std::to_string(all) + " bytes");
            const auto engine = load(model, inSlots(model, bytes));
            expectAnswers(engine, expected);
            // A budget that holds no more than the landing slots makes no cache.
            const ExpertCounts counts = engine->expertCounts();
            EXPECT_EQ(sum(counts.hits) > 0, counts.slotBytes > 0);
            if (bytes == 0 || bytes > all / 2) {
                EXPECT_EQ(counts.slotBytes > 0, bytes > 0);
            }
        }
    }
}

TEST_F(CudaStreaming, ExactPromptsWithExpertsInSlotsHaveTheCpusBits) {
    for (const tiny::Options& tiny : models()) {
        const tiny::Model model(tiny);
        if (!model.options().experts) continue;
        SCOPED_TRACE(tiny::describe(tiny));
        const auto text = tokens(150, tiny.vocab);
        const auto expected = logits(load(model, options(false)), text, {});
        for (const size_t bytes : {size_t{0}, bytesOfAllExperts(model) / 3}) {
            const auto engine = load(model, exact(inSlots(model, bytes)));
            EXPECT_TRUE(sameBits(expected, logits(engine, text, smallChunks(150)))) << bytes << " bytes of slots";
            EXPECT_TRUE(sameBits(expected, logits(engine, text, {}))) << bytes << " bytes of slots";
        }
    }
}

// Layers whose experts have other types than those of neighbouring layers, and gates that have another type than up.
TEST_F(CudaStreaming, ExpertsOfMixedTypesInSlotsGiveTheSameBits) {
    tiny::Options tiny = manyExperts();
    tiny.embedding = 512;
    tiny.hidden = 736;
    tiny.layers = 4;
    tiny.experts = 16;
    tiny.mixed = {DType::Q8_0, DType::Q8_0, DType::Q4_0, DType::F32};
    const tiny::Model model(tiny);
    const size_t all = bytesOfAllExperts(model);
    EXPECT_GE(expertPools(model.spec(), model.table(), inSlots(model, all / 2)).size(), 3u);
    const Answers expected = answersOf(model);
    for (const auto& [bytes, busRate] : std::vector<std::pair<size_t, double>>{
             {all / 6, kFastBus}, {all / 2, 0}, {all / 2, kFastBus}, {2 * all, kFastBus}}) {
        SCOPED_TRACE(std::to_string(bytes) + " of " + std::to_string(all) + " bytes, rate " + std::to_string(busRate));
        const auto engine = load(model, inSlots(model, bytes, busRate));
        expectAnswers(engine, expected);
        const ExpertCounts counts = engine->expertCounts();
        for (int32_t row = 0; row < counts.layers; ++row) {
            const auto begin = counts.hits.begin() + int64_t{row} * counts.experts;
            EXPECT_GT(std::accumulate(begin, begin + counts.experts, uint64_t{0}), 0u)
                << "layer " << row << " has slots";
        }
    }
}

// If nothing is fetched, the warm experts stay: the same text then has as many hits as it uses these experts.
TEST_F(CudaStreaming, WarmedSlotsHoldTheMostUsed) {
    const tiny::Model model(manyExperts());
    const auto text = tokens(80, model.options().vocab);
    const auto cold = load(model, inSlots(model, 0, 0));
    const auto expected = steps(cold, text, oneByOne(80));
    const ExpertCounts counted = cold->expertCounts();
    ASSERT_EQ(sum(counted.computed), sum(counted.uses));
    std::vector<std::pair<int32_t, int32_t>> order;
    for (size_t i = 0; i < counted.uses.size(); ++i) {
        order.emplace_back(counted.layer[i / static_cast<size_t>(counted.experts)],
                           static_cast<int32_t>(i) % counted.experts);
    }
    const auto uses = [&](const std::pair<int32_t, int32_t>& e) {
        return counted.uses[static_cast<size_t>(e.first * counted.experts + e.second)];
    };
    std::stable_sort(order.begin(), order.end(), [&](const auto& a, const auto& b) { return uses(a) > uses(b); });
    EngineOptions o = inSlots(model, bytesOfAllExperts(model) / 4, 0);
    o.expertUse.warm = order;
    const auto warm = load(model, o);
    EXPECT_TRUE(sameBits(expected, steps(warm, text, oneByOne(80))));
    const ExpertCounts found = warm->expertCounts();
    ASSERT_GT(found.capacity, 4);
    EXPECT_EQ(found.resident, found.capacity);
    uint64_t wanted = 0;
    for (int64_t i = 0; i < found.capacity; ++i) wanted += uses(order[static_cast<size_t>(i)]);
    EXPECT_EQ(sum(found.hits), wanted);
    EXPECT_EQ(sum(found.computed), sum(counted.uses) - wanted);
}

// Several sessions, each in its own thread. Their steps run in any order, and each changes what is in slots for the
// next.
TEST_F(CudaStreaming, ThreadsShareTheSlots) {
    constexpr int kThreads = 4;
    const tiny::Model model(manyExperts());
    const auto onCpu = load(model, options(false));
    const auto engine = load(model, inSlots(model, bytesOfAllExperts(model) / 4));
    std::vector<std::vector<int32_t>> texts;
    std::vector<std::vector<int64_t>> chunks;
    std::vector<std::vector<float>> got(kThreads);
    for (int i = 0; i < kThreads; ++i) {
        texts.push_back(tokens(50, model.options().vocab));
        chunks.push_back(smallChunks(50));
    }
    std::vector<std::thread> threads;
    for (size_t i = 0; i < kThreads; ++i) threads.emplace_back([&, i] { got[i] = steps(engine, texts[i], chunks[i]); });
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 0; i < kThreads; ++i) EXPECT_TRUE(sameBits(logits(onCpu, texts[i], {}), got[i])) << "thread " << i;
}

TEST_F(CudaStreaming, AnInterruptedTextLeavesTheSlotsUsable) {
    const tiny::Model model(manyExperts());
    const auto text = tokens(60, model.options().vocab);
    const auto expected = logits(load(model, options(false)), text, {});
    const auto engine = load(model, inSlots(model, bytesOfAllExperts(model) / 4));
    expectUsableAfterInterruptions(engine, text, expected);
}

// Prefetching changes which experts are in slots, and nothing else.
TEST_F(CudaStreaming, PrefetchingGivesTheSameBits) {
    const tiny::Options tiny = manyExperts();
    const tiny::Model model(tiny);
    const auto text = tokens(60, tiny.vocab);
    const auto expected = logits(load(model, options(false)), text, {});
    for (const char* mode : {"count", "next-token", "next-layer"}) {
        SCOPED_TRACE(mode);
        ::setenv("SHARPI_EXPERT_PREFETCH", mode, 1);
        const auto engine = load(model, inSlots(model, size_t{150} << 20));
        ::unsetenv("SHARPI_EXPERT_PREFETCH");
        for (int round = 0; round < 3; ++round) {
            EXPECT_TRUE(sameBits(expected, steps(engine, text, oneByOne(60))));
            EXPECT_TRUE(sameBits(expected, steps(engine, text, smallChunks(60))));
        }
        engine->backend().recording()->setReplays(false);
        EXPECT_TRUE(sameBits(expected, steps(engine, text, smallChunks(60)))) << "launched";
        const ExpertCounts counts = engine->expertCounts();
        ASSERT_EQ(counts.predictors.size(), mode == std::string("next-token") ? 1u : 2u);
        for (const PredictorCounts& p : counts.predictors) EXPECT_GT(p.used, 0u) << p.name;
    }
}

// The engine's first pass is a step, which uploads the resident weights meanwhile.
TEST_F(CudaStreaming, TheFirstPassMayBeAStepWithExpertsInTheFile) {
    const tiny::Options tiny = manyExperts();
    const tiny::Model model(tiny);
    const auto text = tokens(30, tiny.vocab);
    const auto expected = logits(load(model, options(false)), text, {});
    EngineOptions o = inSlots(model, size_t{100} << 20);
    EXPECT_TRUE(sameBits(expected, steps(load(model, o), text, oneByOne(30))));
    o = exact(o);
    o.batch = 8;  // so that no batch is large
    EXPECT_TRUE(sameBits(expected, logits(load(model, o), text, {})));
}

// A model's file that a test can change while an engine has it mapped.
class ChangingFile {
public:
    explicit ChangingFile(const tiny::Model& model)
        : _model(model), _path(::testing::TempDir() + "sharpi_changing.bin") {
        write(model.bytes);
    }
    ~ChangingFile() { std::remove(_path.c_str()); }
    std::unique_ptr<Weights> weights() const {
        return std::make_unique<Weights>(std::vector<std::string>{_path}, _model.table());
    }
    // Changes the codes in every block of Q8_0 (a scale of two bytes, then 32 codes).
    void change() {
        std::vector<uint8_t> bytes = _model.bytes;
        for (const TensorInfo& t : _model.tensors) {
            for (uint64_t i = 0; t.type == DType::Q8_0 && i < t.bytes; ++i) {
                if (i % 34 >= 2) bytes[t.offset + i] ^= 0x10;
            }
        }
        write(bytes);
    }

private:
    // Writes in place, so that the mapping sees it.
    void write(const std::vector<uint8_t>& bytes) {
        FILE* file = std::fopen(_path.c_str(), "r+b");
        if (!file) file = std::fopen(_path.c_str(), "w+b");
        ASSERT_NE(file, nullptr);
        EXPECT_EQ(std::fwrite(bytes.data(), 1, bytes.size(), file), bytes.size());
        std::fclose(file);
    }
    const tiny::Model& _model;
    std::string _path;
};

// Proves where a weight is read from: if the file changes, the engine notices it for weights that are not resident, and
// only for these.
TEST_F(CudaStreaming, ResidentWeightsAreReadFromTheDeviceAndOthersFromTheFile) {
    tiny::Options withExperts;
    withExperts.experts = 4;
    const auto text = tokens(40, 77);
    for (const auto& [tiny, resident] :
         {std::pair(tiny::Options(), true), {tiny::Options(), false}, {withExperts, true}, {withExperts, false}}) {
        SCOPED_TRACE(std::to_string(tiny.experts) + " experts" + (resident ? ", resident" : ""));
        const tiny::Model model(tiny);
        EngineOptions o = options(true);
        o.homes = homes(model, resident ? model.tensors.size() : 0, 0);
        if (tiny.experts && !resident) o.homes = expertHomes(model, true);
        ChangingFile file(model);
        const auto engine = std::make_shared<Engine>(model.spec(), file.weights(), o);
        const auto before = steps(engine, text, oneByOne(40));
        EXPECT_TRUE(sameBits(before, steps(engine, text, oneByOne(40))));
        file.change();
        const auto after = steps(engine, text, oneByOne(40));
        EXPECT_EQ(resident, static_cast<bool>(sameBits(before, after)));
    }
}

TEST_F(CudaStreaming, WithoutPinningItIsTheSame) {
    const tiny::Model model{tiny::Options()};
    const auto text = tokens(40, 77);
    const auto expected = logits(load(model, options(false)), text, {});
    ::setenv("SHARPI_CUDA_PIN", "0", 1);
    EngineOptions o = options(true);
    o.homes = homes(model, 4, 30);
    const auto engine = load(model, o);
    ::unsetenv("SHARPI_CUDA_PIN");
    EXPECT_TRUE(sameBits(expected, steps(engine, text, oneByOne(40))));
    ASSERT_FALSE(engine->notes().empty());
}

// A plan that needs more than the budget fails with what there is; one made for that loads, with the same bits.
TEST_F(CudaStreaming, APlanForLessMemoryLoadsAfterOneThatFailed) {
    tiny::Options dense;
    dense.embedding = 512;
    dense.hidden = 4096;
    dense.layers = 12;
    for (const tiny::Options& tiny : {dense, manyExperts()}) {
        SCOPED_TRACE(tiny::describe(tiny));
        const tiny::Model model(tiny);
        const auto text = tokens(30, tiny.vocab);
        EngineOptions whole = options(true), less = options(true);
        whole.batch = less.batch = 16;
        whole.homes = tiny.experts ? expertHomes(model, false) : homes(model, model.tensors.size(), 0);
        less.homes = tiny.experts ? expertHomes(model, true) : homes(model, model.tensors.size() / 2, 0);
        const size_t all = plannedBytes(model.spec(), model.table(), whole),
                     some = plannedBytes(model.spec(), model.table(), less);
        ASSERT_LT(some, all);
        const auto expected = steps(load(model, whole), text, oneByOne(30));
        whole.vram = less.vram = some;
        try {
            load(model, whole);
            ADD_FAILURE() << "it loads";
        } catch (const Error& e) {
            ASSERT_TRUE(e.shortage()) << e.what();
            EXPECT_EQ(e.shortage()->available, some);
            EXPECT_EQ(e.shortage()->wanted, all);
        }
        EXPECT_TRUE(sameBits(expected, steps(load(model, less), text, oneByOne(30))));
    }
}

}  // namespace
}  // namespace sharpi::cuda
