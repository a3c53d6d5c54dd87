// Placement never changes the answer, on the GPU: models whose weights are resident, come across the bus in every pass, or
// are computed by the CPU in part, as experts that are not resident are, give the same logits to the bit, and the same tokens.
#include <algorithm>
#include <cmath>
#include <functional>

#include "engine/cuda_backend.h"
#include "engine/engine.h"
#include "gpu_test.h"
#include "tiny_model.h"

namespace sharpi::cuda {
namespace {

class CudaStreaming : public GpuTest {
protected:
    static EngineOptions options(bool cuda, KvType kv = KvType::BF16) {
        EngineOptions o;
        o.context = 300;
        o.batch = 128;
        o.threads = 3;
        o.kvType = kv;
        o.cuda = cuda;
        return o;
    }
    // The stacks of experts are in the file in the layers that `inFile` wants there, all else is resident.
    static Homes expertHomes(const tiny::Model& model, const std::function<bool(int64_t)>& inFile) {
        Homes made(model.tensors.size());
        for (size_t i = 0; i < made.size(); ++i) {
            const std::string& name = model.tensors[i].name;
            const bool isStack = name.find("_exps.") != std::string::npos;
            made[i].rank = isStack ? 1 + std::stoi(name.substr(4)) : 0;
            if (isStack && inFile(std::stoll(name.substr(4)))) made[i].home = Home::Direct;
        }
        return made;
    }
    std::vector<int32_t> tokens(int64_t count, int64_t vocab) {
        std::vector<int32_t> made(count);
        for (int32_t& token : made) token = static_cast<int32_t>(random()() % vocab);
        return made;
    }
    static std::shared_ptr<Engine> load(const tiny::Model& model, const EngineOptions& o) {
        return std::make_shared<Engine>(model.spec(), model.weights(), o);
    }
    static std::vector<float> logits(const std::shared_ptr<Engine>& engine, const std::vector<int32_t>& text, const std::vector<int64_t>& chunks) {
        Session session(engine);
        std::vector<float> values(text.size() * session.vocabSize(), NAN);
        session.evaluate(text, values.data(), chunks, nullptr);
        return values;
    }
    static std::vector<int32_t> greedy(const std::shared_ptr<Engine>& engine, const std::vector<int32_t>& prompt, int count) {
        Session session(engine);
        SamplingParams params;
        params.temperature = 0;
        session.start(prompt, params, nullptr);
        std::vector<int32_t> text;
        for (int i = 0; i < count; ++i) text.push_back(*session.next());
        return text;
    }
    std::vector<int64_t> smallChunks(int64_t total) {
        std::vector<int64_t> chunks;
        for (int64_t i = 0; i < total; ++i) chunks.push_back(1 + static_cast<int64_t>(random()() % kMaxMatvecRows));
        return chunks;
    }
    // What has one home and rank in a layer, gate and up or the stacks of experts, has one name here; else a tensor's own.
    static std::string groupOf(const std::string& tensor) {
        const std::string layer = tensor.substr(0, tensor.find("ffn_"));
        if (tensor.find("_exps.") != std::string::npos) return layer + "experts";
        const bool isPair = tensor.find("ffn_gate.") != std::string::npos || tensor.find("ffn_up.") != std::string::npos;
        return isPair ? layer + "gate and up" : tensor;
    }
    // The first `resident` tensors stay on the device, each with the rest of its group; of the others' feed-forward rows the CPU
    // has `share` percent.
    static Homes homes(const tiny::Model& model, size_t resident, int share) {
        Homes made(model.tensors.size());
        for (size_t i = 0; i < made.size(); ++i) {
            const auto first = std::find_if(model.tensors.begin(), model.tensors.end(),
                                            [&](const TensorInfo& t) { return groupOf(t.name) == groupOf(model.tensors[i].name); });
            made[i].rank = static_cast<int32_t>(first - model.tensors.begin());
            if (made[i].rank < static_cast<int32_t>(resident)) continue;
            made[i].home = Home::Direct;
            made[i].cpuRows = model.tensors[i].shape.back() * share / 100;
        }
        return made;
    }
};

std::vector<tiny::Options> models() {
    std::vector<tiny::Options> all = tiny::gpuVariants();
    // Rows that are no whole number of pieces of 32, and more of them than one.
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
    return all;
}

// Experts of several pieces a stack, as many as there are slots and more, some of them not chosen by any row.
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
                EngineOptions o = options(true);
                o.homes = homes(model, resident, share);
                const auto engine = load(model, o);
                EXPECT_TRUE(sameBits(expected, logits(engine, text, std::vector<int64_t>(90, 1)))) << "token by token, replayed";
                EXPECT_TRUE(sameBits(expected, logits(engine, text, smallChunks(90)))) << "a few at a time";
                EXPECT_EQ(expectedTokens, greedy(engine, {text.begin(), text.begin() + 5}, 64));
                engine->backend().setReplays(false);
                EXPECT_TRUE(sameBits(expected, logits(engine, text, smallChunks(90)))) << "launched";
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
            EXPECT_TRUE(sameBits(expected, logits(engine, text, {}))) << "while the resident part is on its way";
            EXPECT_TRUE(sameBits(expected, logits(engine, text, {}))) << "after";
        }
    }
}

// Weights of several pieces each, more than there are slots: what is overwritten too early, or read too early, shows.
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
    const auto steps = logits(resident, text, std::vector<int64_t>(60, 1)), prefill = logits(resident, text, {});
    for (const int share : {0, 30}) {
        EngineOptions o = options(true);
        o.homes = homes(model, 0, share);
        const auto engine = load(model, o);
        EXPECT_TRUE(sameBits(prefill, logits(engine, text, {})));
        for (int round = 0; round < 3; ++round) EXPECT_TRUE(sameBits(steps, logits(engine, text, std::vector<int64_t>(60, 1))));
        EXPECT_TRUE(sameBits(prefill, logits(engine, text, {})));
    }
}

// The usual plan: all but experts is resident, and these in some layers. A step then brings nothing over.
TEST_F(CudaStreaming, ExpertsInTheFileGiveTheSameBits) {
    const tiny::Options tiny = manyExperts();
    const tiny::Model model(tiny);
    const auto text = tokens(100, tiny.vocab), start = std::vector<int32_t>(text.begin(), text.begin() + 20);
    const auto steps = logits(load(model, options(false)), text, {});
    const auto resident = load(model, options(true));
    const auto prefill = logits(resident, text, {});
    const auto made = greedy(resident, start, 40);
    const std::function<bool(int64_t)> kinds[] = {[](int64_t) { return true; }, [](int64_t layer) { return layer == 1; }, [](int64_t layer) { return layer != 1; }};
    for (const auto& inFile : kinds) {
        SCOPED_TRACE("kind " + std::to_string(&inFile - kinds));
        EngineOptions o = options(true);
        o.homes = expertHomes(model, inFile);
        const auto engine = load(model, o);
        EXPECT_TRUE(engine->backend().streams());
        EXPECT_GT(engine->placement().cpu, 0u);
        for (int round = 0; round < 2; ++round) {
            EXPECT_TRUE(sameBits(prefill, logits(engine, text, {})));
            EXPECT_TRUE(sameBits(steps, logits(engine, text, std::vector<int64_t>(100, 1)))) << "token by token";
            EXPECT_TRUE(sameBits(steps, logits(engine, text, smallChunks(100)))) << "a few at a time";
            EXPECT_EQ(made, greedy(engine, start, 40)) << "a prompt of many rows, then single ones";
        }
        EXPECT_TRUE(engine->backend().replays());
        engine->backend().setReplays(false);
        EXPECT_TRUE(sameBits(steps, logits(engine, text, smallChunks(100)))) << "launched";
    }
}

// A step is the first thing that the engine does: what is resident comes meanwhile.
TEST_F(CudaStreaming, TheFirstPassMayBeAStepWithExpertsInTheFile) {
    const tiny::Options tiny = manyExperts();
    const tiny::Model model(tiny);
    const auto text = tokens(30, tiny.vocab);
    const auto expected = logits(load(model, options(false)), text, {});
    EngineOptions o = options(true);
    o.homes = expertHomes(model, [](int64_t) { return true; });
    EXPECT_TRUE(sameBits(expected, logits(load(model, o), text, std::vector<int64_t>(30, 1))));
    o.batch = 8;  // no batch is ever large
    EXPECT_TRUE(sameBits(expected, logits(load(model, o), text, {})));
}

// A model's file that stays, to be changed under the engine that has mapped it.
class ChangingFile {
public:
    explicit ChangingFile(const tiny::Model& model) : _model(model), _path(::testing::TempDir() + "sharpi_changing.bin") { write(model.bytes); }
    ~ChangingFile() { std::remove(_path.c_str()); }
    std::unique_ptr<Weights> weights() const { return std::make_unique<Weights>(std::vector<std::string>{_path}, _model.table()); }
    // Other codes in every block of Q8_0 (a scale of two bytes, 32 codes).
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
    // In place: the mapping sees it.
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

// The proof of where a weight is read: one that is resident does not notice that the file has changed, one that is not does.
TEST_F(CudaStreaming, ResidentWeightsAreReadFromTheDeviceAndOthersFromTheFile) {
    tiny::Options withExperts;
    withExperts.experts = 4;
    const auto text = tokens(40, 77);
    for (const auto& [tiny, resident] : {std::pair(tiny::Options(), true), {tiny::Options(), false}, {withExperts, true}, {withExperts, false}}) {
        SCOPED_TRACE(std::to_string(tiny.experts) + " experts" + (resident ? ", resident" : ""));
        const tiny::Model model(tiny);
        EngineOptions o = options(true);
        o.homes = homes(model, resident ? model.tensors.size() : 0, 0);
        if (tiny.experts && !resident) o.homes = expertHomes(model, [](int64_t) { return true; });
        ChangingFile file(model);
        const auto engine = std::make_shared<Engine>(model.spec(), file.weights(), o);
        const auto before = logits(engine, text, std::vector<int64_t>(40, 1));
        EXPECT_TRUE(sameBits(before, logits(engine, text, std::vector<int64_t>(40, 1))));
        file.change();
        const auto after = logits(engine, text, std::vector<int64_t>(40, 1));
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
    EXPECT_TRUE(sameBits(expected, logits(engine, text, std::vector<int64_t>(40, 1))));
    ASSERT_FALSE(engine->notes().empty());
}

TEST_F(CudaStreaming, WithLessMemoryExpertsStayInTheFile) {
    const tiny::Options tiny = manyExperts();
    const tiny::Model model(tiny);
    const auto text = tokens(30, tiny.vocab);
    EngineOptions o = options(true);
    o.batch = 16;
    o.homes = expertHomes(model, [](int64_t) { return false; });
    const size_t all = plannedBytes(model.spec(), model.table(), o);
    const auto whole = load(model, o);
    EXPECT_TRUE(whole->notes().empty());
    const auto expected = logits(whole, text, std::vector<int64_t>(30, 1));
    EngineOptions least = o;
    least.homes = expertHomes(model, [](int64_t) { return true; });
    o.vram = std::max(all - (size_t{8} << 20), plannedBytes(model.spec(), model.table(), least));
    ASSERT_LT(o.vram, all);
    const auto engine = load(model, o);
    ASSERT_EQ(engine->notes().size(), 1u);
    EXPECT_LT(engine->placement().vram, whole->placement().vram);
    EXPECT_TRUE(sameBits(expected, logits(engine, text, std::vector<int64_t>(30, 1))));
}

// Less memory than the plan wants: less is resident, and a line says so.
TEST_F(CudaStreaming, LessMemoryThanPlanned) {
    tiny::Options tiny;
    tiny.embedding = 512;
    tiny.hidden = 4096;
    tiny.layers = 12;
    const tiny::Model model(tiny);
    const auto text = tokens(40, tiny.vocab);
    EngineOptions o = options(true);
    o.homes = homes(model, model.tensors.size(), 0);
    const size_t all = plannedBytes(model.spec(), model.table(), o);
    const auto whole = load(model, o);
    EXPECT_TRUE(whole->notes().empty());
    const auto expected = logits(whole, text, std::vector<int64_t>(40, 1));
    o.vram = all - (size_t{40} << 20);
    const auto engine = load(model, o);
    ASSERT_EQ(engine->notes().size(), 1u);
    EXPECT_LT(engine->placement().vram, whole->placement().vram);
    EXPECT_GT(engine->placement().vram, 0u);
    EXPECT_TRUE(sameBits(expected, logits(engine, text, std::vector<int64_t>(40, 1))));
}

}  // namespace
}  // namespace sharpi::cuda
