// The engine with a plan of where each weight is, on a device in host memory: whatever is resident and whatever is not,
// logits have the same bits; whatever memory is missing or is taken meanwhile, loading ends in one error that says what
// there is, and nothing is lost.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "memory/stream/copying_transfers.h"
#include "memory/stream/weight_stream.h"
#include "planning/memory_plan.h"
#include "tiny_engine.h"

namespace {

using namespace sharpi;
using namespace tiny;

// Numbers in the order of use: one for all experts, one for a layer's gate and up; -1 for vectors, which never leave.
std::vector<int32_t> ranksOf(const tiny::Model& model) {
    std::vector<int32_t> ranks(model.tensors.size(), -1);
    int32_t next = 0, ofExperts = -1;
    for (const TensorUse& use : tensorUses(model.spec(), model.table())) {
        const std::string role = roleName(use.role);
        if (role == "vector") continue;
        int32_t& rank = ranks[static_cast<size_t>(use.tensor)];
        if (role == "experts") rank = ofExperts < 0 ? ofExperts = next++ : ofExperts;
        else rank = role == "ffn_up" ? next - 1 : next++;
    }
    return ranks;
}

// Tensors with ranks from `limit` on are in the file, and the CPU has `cpuRows` rows of feed-forward matrices and head.
Homes homesUpTo(const tiny::Model& model, int32_t limit, int64_t cpuRows) {
    Homes homes(model.tensors.size());
    const std::vector<int32_t> ranks = ranksOf(model);
    for (const TensorUse& use : tensorUses(model.spec(), model.table())) {
        const std::string role = roleName(use.role);
        TensorHome& home = homes[static_cast<size_t>(use.tensor)];
        if (ranks[static_cast<size_t>(use.tensor)] >= limit) home.home = role == "experts" ? Home::Slots : Home::Direct;
        home.cpuRows = role.rfind("ffn_", 0) == 0 || role == "head" ? cpuRows : 0;
    }
    return homes;
}

EngineOptions homeOptions(const Homes& homes, int64_t batch = 16) {
    EngineOptions options = smallOptions();
    options.device.kind = &cudaKind();  // or homes would not matter
    options.batch = batch;
    options.homes = homes;
    return options;
}

std::vector<tiny::Options> modelsWithHomes() {
    tiny::Options plain, fused, floats, experts;
    fused.architecture = floats.architecture = "qwen2";
    fused.fusedQkv = fused.biases = fused.tied = floats.fusedQkv = floats.biases = true;
    floats.matrices = DType::F32;
    experts.architecture = "qwen3moe";
    experts.fusedExperts = experts.fusedQkv = experts.tied = true;
    experts.matrices = DType::Q4_0;
    tiny::Options apart, floatExperts;
    apart.experts = floatExperts.experts = 5;
    apart.used = 3;
    floatExperts.used = 1;
    floatExperts.matrices = DType::F32;
    std::vector<tiny::Options> all = {plain, fused, floats, experts, apart, floatExperts};
    for (const char* architecture : {"qwen35", "qwen35moe"}) {  // with a prediction layer
        tiny::Options hybrid;
        hybrid.architecture = architecture;
        hybrid.predictions = 1;
        hybrid.vocab = 12;  // drafts by such weights are right by chance alone
        hybrid.tied = all.size() % 2;
        all.push_back(hybrid);
    }
    return all;
}

// Text with drafts of the prediction layer, where there is one, and what became of these.
std::pair<std::vector<int32_t>, std::vector<int64_t>> drafted(Session& session, bool predicts,
                                                              const std::vector<int32_t>& prompt) {
    SamplingParams params;
    params.temperature = 1.5f;
    params.seed = 5;
    DraftOptions drafts;
    drafts.source = predicts ? DraftOptions::Source::Prediction : DraftOptions::Source::NGram;
    drafts.tokens = 2;
    session.start(prompt, params, nullptr, drafts);
    std::vector<int32_t> made;
    while (made.size() < 48) made.push_back(*session.next());
    const DraftCounts counts = session.draftCounts();
    return {made, {counts.steps, counts.drafted, counts.accepted}};
}

bool isStack(const TensorInfo& tensor) { return tensor.name.find("_exps.") != std::string::npos; }

TEST(Homes, WhereWeightsAreDoesNotChangeLogitsOrTokens) {
    for (const tiny::Options& options : modelsWithHomes()) {
        const tiny::Model model(options);
        const auto tokens = randomTokens(80, options.vocab, 3), prompt = randomTokens(40, options.vocab, 4);
        Session plain(makeEngine(model, 200, 16, 1));
        const auto logits = evaluate(plain, tokens, options.vocab);
        expectMeaningful(logits, options.vocab);
        const auto made = greedy(plain, prompt, 64);
        const auto withDrafts = drafted(plain, options.predictions > 0, prompt);
        EXPECT_TRUE(!options.predictions || withDrafts.second[2] > 0) << "no draft was right";
        std::vector<Homes> sweep;
        for (const int32_t limit : {0, 1, 2, 4, 6, 7, 9, 100}) {
            for (const int64_t cpuRows : {0, 32, 1000}) sweep.push_back(homesUpTo(model, limit, cpuRows));
        }
        sweep.push_back(homesUpTo(model, 100, 0));
        sweep.back()[0].home = Home::Direct;  // the embedding alone, or with the head that it is
        sweep.push_back(homesUpTo(model, 0, 32));
        sweep.back()[0].home = Home::Vram;
        for (size_t t = 0; t < model.tensors.size(); ++t) {  // the other stacks go with it
            if (!isStack(model.tensors[t])) continue;
            sweep.push_back(homesUpTo(model, 100, 0));
            sweep.back()[t].home = t % 2 ? Home::Slots : Home::Direct;
        }
        for (size_t i = 0; i < sweep.size(); ++i) {
            const int64_t batch = std::vector<int64_t>{16, 1, 7, 100}[i % 4];
            SCOPED_TRACE(tiny::describe(options) + " homes " + std::to_string(i) + " batch " + std::to_string(batch));
            const auto engine = OnFake(size_t{256} << 20, size_t{2} << 20).load(model, homeOptions(sweep[i], batch));
            ASSERT_TRUE(engine->notes().empty()) << engine->notes()[0];
            const auto inFile = [](const TensorHome& h) { return h.home != Home::Vram; };
            const bool streams = std::any_of(sweep[i].begin() + (options.tied ? 0 : 1), sweep[i].end(), inFile);
            EXPECT_EQ(engine->backend().bus().streams, streams);
            Session session(engine);
            EXPECT_TRUE(sameBits(evaluate(session, tokens, options.vocab), logits));
            EXPECT_EQ(greedy(session, prompt, 64), made);
            const auto again = drafted(session, options.predictions > 0, prompt);
            EXPECT_EQ(again.first, withDrafts.first);
            EXPECT_TRUE(batch == 1 || again.second == withDrafts.second) << "drafts were other ones";
        }
    }
}

// Some writers quantize what is a vector of floats in other files.
TEST(Homes, AVectorMayBeQuantized) {
    tiny::Options options;
    options.architecture = "qwen35moe";
    const char* name = "blk.1.ffn_gate_inp_shexp.weight";
    tiny::Model quantized(options), floats(options);
    quantized.erase(name);
    quantized.add(name, DType::Q8_0, {options.embedding});
    const TensorInfo& from = quantized.tensor(name);
    std::vector<float> values(static_cast<size_t>(options.embedding));
    cpu::kernels().dequantizeRow(from.type, &quantized.bytes[from.offset], options.embedding, values.data());
    std::memcpy(&floats.bytes[floats.tensor(name).offset], values.data(), values.size() * sizeof(float));
    const auto tokens = randomTokens(20, options.vocab, 3);
    Session expected(makeEngine(floats, 200, 16, 1)), plain(makeEngine(quantized, 200, 16, 1));
    const auto logits = evaluate(expected, tokens, options.vocab);
    expectMeaningful(logits, options.vocab);
    EXPECT_TRUE(sameBits(evaluate(plain, tokens, options.vocab), logits));
    Session away(OnFake(size_t{256} << 20).load(quantized, homeOptions(homesUpTo(quantized, 0, 0))));
    EXPECT_TRUE(sameBits(evaluate(away, tokens, options.vocab), logits));
}

TEST(Homes, StacksOfSeveralPiecesGiveTheSameBits) {
    tiny::Options options;
    options.layers = 2;
    options.embedding = 512;
    options.hidden = 2560;
    options.experts = 14;
    options.used = 3;
    options.matrices = DType::Q8_0;
    const tiny::Model model(options);
    const auto large = [](const TensorInfo& t) { return t.bytes > WeightGroup::kPieceBytes; };
    ASSERT_EQ(std::count_if(model.tensors.begin(), model.tensors.end(), large), 6) << "all stacks";
    const auto tokens = randomTokens(12, options.vocab, 3);
    Session plain(makeEngine(model, 200, 16, 1));
    const auto logits = evaluate(plain, tokens, options.vocab);
    expectMeaningful(logits, options.vocab);
    Session session(OnFake(size_t{1} << 30, size_t{2} << 20).load(model, homeOptions(homesUpTo(model, 0, 0))));
    EXPECT_TRUE(sameBits(evaluate(session, tokens, options.vocab, {9, 1, 2}), logits));
}

TEST(Homes, MatricesOfSeveralPiecesGiveTheSameBits) {
    tiny::Options options;
    options.architecture = "qwen2";
    options.biases = true;
    options.layers = 1;
    options.embedding = 256;
    options.hidden = 66048;
    options.heads = 260;
    options.kvHeads = 20;
    options.headDim = 256;
    options.vocab = 62000;
    const tiny::Model model(options);
    const auto large = [](const TensorInfo& t) { return t.bytes > WeightGroup::kPieceBytes; };
    ASSERT_EQ(std::count_if(model.tensors.begin(), model.tensors.end(), large), 7)
        << "all matrices but those of keys and values";
    const auto tokens = randomTokens(12, options.vocab, 3);
    Session plain(makeEngine(model, 200, 16, 1));
    const auto logits = evaluate(plain, tokens, options.vocab);
    for (const int64_t cpuRows : {0, 1024}) {
        Session session(
            OnFake(size_t{1} << 30, size_t{2} << 20).load(model, homeOptions(homesUpTo(model, 1, cpuRows))));
        EXPECT_TRUE(sameBits(evaluate(session, tokens, options.vocab, {9, 1, 2}), logits));
    }
}

// The file changes under a loaded model: what is resident must not notice, and what is not must.
TEST(Homes, ResidentWeightsAreReadOnTheDeviceAndTheOthersInTheFile) {
    tiny::Options experts;
    experts.experts = 4;
    for (const char* name :
         {"token_embd.weight", "blk.0.attn_k.weight", "blk.1.ffn_up.weight", "blk.1.ffn_down.weight", "output.weight",
          "blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight", "blk.1.ffn_down_exps.weight"}) {
        const tiny::Options options = std::string(name).find("_exps.") == std::string::npos ? tiny::Options() : experts;
        const tiny::Model model(options);
        const auto tokens = randomTokens(20, options.vocab, 3);
        tiny::Model changed = model;
        const TensorInfo tensor = changed.tensor(name);
        const auto index = static_cast<size_t>(&changed.tensor(name) - changed.tensors.data());
        for (size_t at = 2; at < tensor.bytes; at += 34)
            changed.bytes[tensor.offset + at] ^= 0x55;  // the first number of each block
        Session before(makeEngine(model, 200, 16, 1)), after(makeEngine(changed, 200, 16, 1));
        const auto logitsBefore = evaluate(before, tokens, options.vocab),
                   logitsAfter = evaluate(after, tokens, options.vocab);
        ASSERT_FALSE(sameBits(logitsBefore, logitsAfter));
        for (const bool resident : {true, false}) {
            SCOPED_TRACE(std::string(name) + (resident ? " resident" : " in the file"));
            Homes homes = homesUpTo(model, resident ? 0 : 100, 32);  // all others are where this one is not
            const std::vector<int32_t> ranks = ranksOf(model);
            for (size_t i = 0; i < homes.size(); ++i) {
                if (ranks[i] == ranks[index])
                    homes[i].home = resident ? Home::Vram : Home::Direct;  // gate goes with up, stacks with stacks
            }
            int file = -1;
            Session session(std::make_shared<Engine>(
                model.spec(), model.weights(&file), homeOptions(homes),
                std::make_unique<CpuBackend>(1, std::make_unique<FakeDevice>(size_t{256} << 20))));
            EXPECT_TRUE(sameBits(evaluate(session, tokens, options.vocab), logitsBefore));
            const auto written =
                ::pwrite(file, &changed.bytes[tensor.offset], tensor.bytes, static_cast<off_t>(tensor.offset));
            ::close(file);
            ASSERT_EQ(written, static_cast<ssize_t>(tensor.bytes));
            session.reset();
            EXPECT_TRUE(sameBits(evaluate(session, tokens, options.vocab), resident ? logitsBefore : logitsAfter));
        }
    }
}

// With a partial cache, once the first pass has brought everything: one line, and the same numbers.
TEST(Homes, ThePartialCacheIsReportedWhenItIsFull) {
    const tiny::Model model{tiny::Options()};
    const auto tokens = randomTokens(20, 77, 3);
    for (const int32_t limit : {5, 1000}) {
        SCOPED_TRACE(limit);
        ::setenv("SHARPI_TRACE_VRAM", "1", 1);
        testing::internal::CaptureStderr();
        const auto engine =
            OnFake(size_t{256} << 20, size_t{2} << 20).load(model, homeOptions(homesUpTo(model, limit, 32)));
        const std::string loading = testing::internal::GetCapturedStderr();
        EXPECT_NE(loading.find("vram: KV cache"), std::string::npos) << loading;
        EXPECT_EQ(loading.find("are kept in vram"), std::string::npos) << loading;
        const bool isPartial = limit < 1000;
        EXPECT_EQ(engine->uploadSeconds().has_value(), !isPartial) << "the rest comes behind the first pass";
        Session session(engine);
        testing::internal::CaptureStderr();
        evaluate(session, tokens, 77, {10, 5, 5});
        const std::string report = testing::internal::GetCapturedStderr();
        ::unsetenv("SHARPI_TRACE_VRAM");
        ASSERT_TRUE(engine->uploadSeconds());
        EXPECT_GE(*engine->uploadSeconds(), 0);
        const Placement p = engine->placement();
        const std::string expected = "weights: " + std::to_string(p.kept) + " of " + std::to_string(p.candidates) +
                                     " tensors are kept in vram, ";
        if (isPartial) {
            EXPECT_EQ(report.rfind(expected, 0), 0u) << report;
            EXPECT_EQ(std::count(report.begin(), report.end(), '\n'), 1) << report;
            EXPECT_EQ(p.kept, 5) << "the embedding, and the first layer's query, key, value and output";
        } else {
            EXPECT_EQ(report, "");
            EXPECT_EQ(p.kept, p.candidates);
        }
    }
}

// What loading lacks. It must lack something, and give everything back.
Shortage shortageOf(const tiny::Model& model, const EngineOptions& options, std::unique_ptr<Borrowed> memory) {
    const FakeDevice& device = memory->device;
    const size_t before = device.freeBytes();
    Shortage shortage;
    try {
        const Engine engine(model.spec(), model.weights(), options, std::make_unique<CpuBackend>(1, std::move(memory)));
        ADD_FAILURE() << "it loads";
    } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::OutOfMemory) << e.what();
        EXPECT_NE(std::string(e.what()).find("needs"), std::string::npos) << e.what();
        EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
        EXPECT_TRUE(e.shortage()) << e.what();
        shortage = e.shortage().value_or(Shortage());
    }
    EXPECT_EQ(device.freeBytes(), before);
    EXPECT_EQ(device.reserved(), 0u);
    return shortage;
}

tiny::Options threeLayers() {
    tiny::Options options;
    options.layers = 3;
    return options;
}

// The device has room for what loading allocates, but not for what the driver will take beside that.
TEST(Homes, APlanThatNeedsMoreThanThereIsIsRefusedBeforeAnythingIsLoaded) {
    const tiny::Model model(threeLayers());
    const EngineOptions options = homeOptions(homesUpTo(model, 5, 32));
    const size_t needed = plannedBytes(model.spec(), model.table(), options);
    for (const size_t missing : {size_t{1} << 20, size_t{8} << 20, size_t{0}}) {
        FakeDevice device(needed - missing, size_t{256} << 10);
        auto memory = std::make_unique<Borrowed>(device);
        int commits = 0;
        memory->beforeCommit = [&commits] { return ++commits > 0; };
        if (missing == 0) {
            const Engine engine(model.spec(), model.weights(), options,
                                std::make_unique<CpuBackend>(1, std::move(memory)));
            EXPECT_GT(commits, 0);
            EXPECT_TRUE(engine.notes().empty());
            continue;
        }
        const Shortage shortage = shortageOf(model, options, std::move(memory));
        EXPECT_EQ(commits, 0);
        EXPECT_EQ(shortage.available, needed - missing);
        EXPECT_EQ(shortage.wanted, needed);
    }
}

// Others take memory after the plan was made, and keep it.
TEST(Homes, WhatOthersTakeWhileItLoadsIsNotAvailable) {
    tiny::Options shape;
    shape.layers = 24;
    shape.embedding = 256;
    shape.hidden = 640;
    const tiny::Model model(shape);
    const EngineOptions options = homeOptions(homesUpTo(model, 1000, 32));
    const size_t most = plannedBytes(model.spec(), model.table(), options), theirs = most - (size_t{2} << 20);
    for (const int at : {1, 3, 5}) {
        SCOPED_TRACE("before commit " + std::to_string(at));
        FakeDevice device(most, size_t{64} << 10);
        void* const taken = device.reserve(theirs);
        auto memory = std::make_unique<Borrowed>(device);
        int commits = 0;
        memory->beforeCommit = [&] { return ++commits != at || device.commit(taken, theirs); };
        try {
            const Engine engine(model.spec(), model.weights(), options,
                                std::make_unique<CpuBackend>(1, std::move(memory)));
            ADD_FAILURE() << "it loads";
        } catch (const Error& e) {
            ASSERT_TRUE(e.shortage()) << e.what();
            EXPECT_EQ(e.shortage()->available, most - theirs);
            EXPECT_EQ(e.shortage()->wanted, most);
        }
        EXPECT_EQ(device.freeBytes(), most - theirs);
        device.decommit(taken, theirs);
        device.release(taken, theirs);
    }
}

// A refusal of any commit, once or from it on, ends in the same error, and the same device then loads the same plan.
TEST(Homes, AnyCommitMayFailWithAPlan) {
    const tiny::Model model(threeLayers());
    const auto tokens = randomTokens(5, model.options().vocab, 3);
    Session plain(makeEngine(model, 200, 16, 1));
    const auto logits = evaluate(plain, tokens, model.options().vocab);
    const EngineOptions options = homeOptions(homesUpTo(model, 5, 32));
    const size_t needed = plannedBytes(model.spec(), model.table(), options);
    FakeDevice device(needed, size_t{4} << 10);
    int commits = 0;
    const auto borrow = [&](int n, bool ever) {
        auto memory = std::make_unique<Borrowed>(device);
        commits = 0;
        memory->beforeCommit = [n, ever, &commits] { return ++commits < n || (!ever && commits > n); };
        return memory;
    };
    const auto expectToLoad = [&] {
        Session session(std::make_shared<Engine>(model.spec(), model.weights(), options,
                                                 std::make_unique<CpuBackend>(1, borrow(1 << 30, false))));
        EXPECT_TRUE(sameBits(evaluate(session, tokens, model.options().vocab), logits));
    };
    expectToLoad();
    const int last = commits;
    ASSERT_GT(last, 10);
    for (int n = 1; n <= last; ++n) {
        for (const bool ever : {false, true}) {
            SCOPED_TRACE("commit " + std::to_string(n) + (ever ? " and on" : ""));
            const Shortage shortage = shortageOf(model, options, borrow(n, ever));
            EXPECT_EQ(shortage.available, needed) << "all was given back";
            EXPECT_EQ(shortage.wanted, needed);
        }
    }
    expectToLoad();
}

// Host memory is refused, as to a GPU's transfers, while the device has plenty.
struct ShortOfHostMemory : CpuBackend {
    using CpuBackend::CpuBackend;
    void takeScratch(const StepLimits&) override { throw Error(ErrorKind::OutOfMemory, "no host memory"); }
};

TEST(Homes, OtherMemoryThatIsShortIsNotTakenForTheDevices) {
    const tiny::Model model{tiny::Options()};
    FakeDevice device(size_t{64} << 20);
    const size_t before = device.freeBytes();
    for (const Homes& homes : {Homes(), homesUpTo(model, 0, 32), homesUpTo(model, 5, 0), homesUpTo(model, 100, 0)}) {
        try {
            const Engine engine(model.spec(), model.weights(), homeOptions(homes),
                                std::make_unique<ShortOfHostMemory>(1, std::make_unique<Borrowed>(device)));
            ADD_FAILURE() << "it loads";
        } catch (const Error& e) {
            EXPECT_EQ(e.kind(), ErrorKind::OutOfMemory);
            EXPECT_STREQ(e.what(), "no host memory");
            ASSERT_TRUE(e.shortage());
            EXPECT_EQ(e.shortage()->available, before);
            EXPECT_LE(e.shortage()->wanted, e.shortage()->available) << "it is not the device's memory that is short";
        }
        EXPECT_EQ(device.freeBytes(), before);
        EXPECT_EQ(device.reserved(), 0u);
    }
}

TEST(Homes, RefusesPlansOfOtherModels) {
    const tiny::Model model{tiny::Options()};
    const Homes right = homesUpTo(model, 3, 32);
    for (const size_t count : {size_t{1}, right.size() - 1, right.size() + 1}) {
        Homes wrong = right;
        wrong.resize(count);
        expectError(ErrorKind::InvalidArgument, std::to_string(count),
                    [&] { OnFake(size_t{256} << 20).load(model, homeOptions(wrong)); });
    }
    Homes negative = right;
    negative.back().cpuRows = -32;
    expectError(ErrorKind::InvalidArgument, "negative",
                [&] { OnFake(size_t{256} << 20).load(model, homeOptions(negative)); });
}

// The fake device keeps the file's layout, which takes no more than a GPU's, and has no stages.
TEST(Homes, APlanWithHomesCountsAtLeastWhatLoadingTakes) {
    for (const tiny::Options& options : modelsWithHomes()) {
        const tiny::Model model(options);
        for (const int32_t limit : {0, 3, 6, 100}) {
            SCOPED_TRACE(tiny::describe(options) + " limit " + std::to_string(limit));
            const EngineOptions wanted = homeOptions(homesUpTo(model, limit, 32));
            const auto engine = OnFake(size_t{256} << 20).load(model, wanted);
            const auto lines = plannedLines(model.spec(), model.table(), wanted);
            ASSERT_EQ(lines.size() + 1, engine->trace().size());
            bool told = false;
            for (size_t i = 0; i < lines.size(); ++i) {
                const TraceLine& took = engine->trace()[i + 1];
                EXPECT_EQ(lines[i].name, took.name);
                if (took.name != "scratch") {
                    EXPECT_LE(took.asked, lines[i].asked) << took.name;
                }
                if (took.name != "streaming") continue;
                told = true;
                EXPECT_EQ(took.asked > 0, limit < 100);
                EXPECT_EQ(lines[i].asked > 0, limit < 100);
            }
            EXPECT_TRUE(told);
        }
    }
}

TEST(CopyingTransfers, RowsComeToTheirPlaces) {
    FakeDevice device(size_t{8} << 20);
    Allocator allocator(device);
    CopyingTransfers transfers(device);
    const size_t row = rowBytes(DType::Q4_0, 64);
    const auto file = randomTokens(70 * static_cast<int64_t>(row) / 4, 1 << 30, 3);
    const auto* bytes = reinterpret_cast<const uint8_t*>(file.data());
    const Buffer place(allocator, 70 * row, "a matrix");
    auto* const at = place.as<uint8_t>();
    std::memset(at, 0xcd, 70 * row);
    const Matrix to{DType::Q4_0, 70, 64, at};
    transfers.fetch({{to, 32, 38, bytes + 32 * row, 32}}, 0);
    for (size_t i = 0; i < 32 * row; ++i) ASSERT_EQ(at[i], 0xcd);
    transfers.fetch({{to, 0, 32, bytes, 0}}, 1);
    EXPECT_EQ(std::memcmp(at, bytes, 70 * row), 0);
}

}  // namespace
