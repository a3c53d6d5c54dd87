// Models that are larger than RAM: experts may be in VRAM, in RAM or on the disk, and come to the GPU or to the CPU
// from there. Logits have the same bits, and the tokens are the same.
#include <unistd.h>

#include <functional>
#include <tuple>

#include "placement_test.h"

namespace sharpi::cuda {
namespace {

class CudaDisk : public PlacementTest {
protected:
    // Experts of several disk blocks, that begin anywhere in one.
    static tiny::Options someExperts() {
        tiny::Options tiny;
        tiny.embedding = 160;
        tiny.hidden = 352;
        tiny.layers = 3;
        tiny.experts = 16;
        tiny.used = 4;
        tiny.seed = 17;
        return tiny;
    }
    static EngineOptions onDisk(const tiny::Model& model, size_t vram, size_t ram, double busRate = kFastBus) {
        EngineOptions o = inSlots(model, vram, busRate);
        o.expertRamBytes = ram;
        return o;
    }
};

TEST_F(CudaDisk, NoAnswerDependsOnWhatIsInVramAndInRam) {
    const tiny::Model model(someExperts());
    const Answers expected = answersOf(model);
    const size_t all = bytesOfAllExperts(model), most = 3 * all;  // a slot in RAM has room for whole blocks of the disk
    for (const auto& [vram, ram, busRate] : std::vector<std::tuple<size_t, size_t, double>>{
             {0, all / 2, 0}, {all / 4, all / 2, kFastBus}, {all / 4, all, 0}, {all / 4, most, kFastBus}}) {
        SCOPED_TRACE(std::to_string(vram) + " and " + std::to_string(ram) + " of " + std::to_string(all) +
                     " bytes, a bus of " + std::to_string(busRate));
        const auto engine = load(model, onDisk(model, vram, ram, busRate));
        EXPECT_TRUE(engine->notes().empty());
        expectAnswers(engine, expected);
        const ExpertCounts counts = engine->expertCounts();
        EXPECT_GT(counts.disk.ramCapacity, 0);
        EXPECT_EQ(counts.disk.ramCapacity == 48, ram == most) << "all experts of three layers";
        EXPECT_GT(counts.disk.hits, 0u);
        EXPECT_GT(counts.disk.bytes, 0u);
        EXPECT_EQ(sum(counts.hits) > 0, vram > 0);
        EXPECT_EQ(sum(counts.fetched) > 0, vram > 0 && busRate > 0);
        if (ram < most) {
            EXPECT_LE(counts.disk.ramResident, counts.disk.ramCapacity);
            EXPECT_GT(counts.disk.reads, 0u);
        }
    }
}

// The first prompt fills RAM with what it reads: the next one, and the steps behind it, read only what had no room.
TEST_F(CudaDisk, WhatAPromptReadsStaysInRamWhileThereIsRoom) {
    const tiny::Model model(someExperts());
    const auto text = tokens(100, model.options().vocab);
    const auto expected = logits(load(model, options(true)), text, {});
    const auto engine = load(model, onDisk(model, bytesOfAllExperts(model) / 4, 3 * bytesOfAllExperts(model)));
    EXPECT_TRUE(sameBits(expected, logits(engine, text, {})));
    const ExpertCounts first = engine->expertCounts();
    EXPECT_EQ(first.disk.ramResident + first.resident, 48) << "RAM has what VRAM lacks";
    EXPECT_TRUE(sameBits(expected, logits(engine, text, {})));
    EXPECT_EQ(engine->expertCounts().disk.bytes, first.disk.bytes) << "nothing more is read";
}

// VRAM takes the first of them, and RAM the next ones.
TEST_F(CudaDisk, SavedStatisticsFillVramAndRam) {
    const tiny::Model model(someExperts());
    const Answers expected = answersOf(model);
    EngineOptions o = onDisk(model, bytesOfAllExperts(model) / 4, bytesOfAllExperts(model));
    for (int32_t expert = 15; expert >= 0; --expert)
        for (int32_t layer = 2; layer >= 0; --layer) o.expertUse.warm.emplace_back(layer, expert);
    const auto engine = load(model, o);
    const ExpertCounts before = engine->expertCounts();
    EXPECT_GT(before.resident, 0);
    EXPECT_GT(before.disk.ramCapacity, 0);
    EXPECT_LT(before.resident + before.disk.ramCapacity, 48);
    EXPECT_EQ(before.disk.ramResident, before.disk.ramCapacity);
    expectAnswers(engine, expected);
}

TEST_F(CudaDisk, ExpertsOfEveryModelMayBeOnTheDisk) {
    for (const tiny::Options& tiny : tiny::gpuVariants()) {
        const tiny::Model model(tiny);
        if (!model.options().experts) continue;
        SCOPED_TRACE(tiny::describe(tiny));
        const size_t all = bytesOfAllExperts(model);
        const Answers expected = answersOf(model);
        // A tiny expert takes several times its bytes in RAM: whole blocks of the disk. One byte is room for none.
        for (const auto& [vram, ram] : {std::pair{size_t{0}, 8 * all}, {all / 3, 8 * all}, {all / 3, size_t{1}}})
            expectAnswers(load(model, onDisk(model, vram, ram)), expected);
    }
}

TEST_F(CudaDisk, ExactPromptsHaveTheCpusBits) {
    const tiny::Model model(someExperts());
    const size_t all = bytesOfAllExperts(model);
    const auto text = tokens(150, model.options().vocab);
    const auto expected = logits(load(model, options(false)), text, {});
    const auto engine = load(model, exact(onDisk(model, all / 4, all / 2)));
    for (const std::vector<int64_t>& chunks : {smallChunks(150), {}})
        EXPECT_TRUE(sameBits(expected, logits(engine, text, chunks)));
}

// Pieces of several experts, more than the ring and the stages hold, whose reads are cut.
TEST_F(CudaDisk, LargePiecesAreReadAhead) {
    tiny::Options tiny;
    tiny.embedding = 1024;
    tiny.hidden = 1440;
    tiny.heads = 8;
    tiny.headDim = 128;
    tiny.layers = 3;
    tiny.experts = 24;
    tiny.used = 4;
    const tiny::Model model(tiny);
    const auto text = tokens(80, tiny.vocab);
    const auto expected = logits(load(model, options(true)), text, {});
    const size_t all = bytesOfAllExperts(model);
    const auto engine = load(model, onDisk(model, all / 8, all / 8));
    for (int round = 0; round < 3; ++round) EXPECT_TRUE(sameBits(expected, logits(engine, text, {})));
    const ExpertCounts counts = engine->expertCounts();
    EXPECT_GT(counts.disk.bytes, size_t{3} * (all / 2)) << "each time";
}

// A step that fails leaves no kernel waiting, and no slot that holds what was not read.
TEST_F(CudaDisk, AnInterruptedTextLeavesTheLevelsUsable) {
    const tiny::Model model(someExperts());
    const auto text = tokens(60, model.options().vocab);
    const auto expected = logits(load(model, options(false)), text, {});
    const auto engine = load(model, onDisk(model, bytesOfAllExperts(model) / 4, bytesOfAllExperts(model) / 2));
    expectUsableAfterInterruptions(engine, text, expected);
}

// A prompt goes through the model, then through the prediction layer, in passes of their own: each gives room in RAM to
// the experts that it reads, and to no others, which would seem to be there.
TEST_F(CudaDisk, ThePredictionLayerDraftsWhatAResidentOneDoes) {
    tiny::Options tiny;
    tiny.architecture = "glm4moe";
    tiny.predictions = 1;
    const tiny::Model model(tiny);
    const auto text = tokens(100, tiny.vocab);
    const auto write = [&](const std::shared_ptr<Engine>& engine, DraftCounts& counts) {
        Session session(engine);
        SamplingParams greedy;
        greedy.temperature = 0;
        session.start(text, greedy, nullptr, {DraftOptions::Source::Prediction, 2});
        std::vector<int32_t> made;
        for (int i = 0; i < 40; ++i) made.push_back(session.next().value_or(-1));
        counts = session.draftCounts();
        return made;
    };
    const auto roomy = [](EngineOptions o) {
        o = exact(o);
        o.sequences = 2 * kMostDraftRows;
        return o;
    };
    DraftCounts expected, counts;
    const auto made = write(load(model, roomy(options(true))), expected);
    ASSERT_GT(expected.drafted, 0);
    const size_t all = bytesOfAllExperts(model);
    for (const size_t vram : {size_t{0}, all / 3}) {
        const auto engine = load(model, roomy(onDisk(model, vram, 8 * all)));
        if (vram == 0) {
            uint64_t ofExperts = 0;
            for (const TensorInfo& tensor : model.tensors) ofExperts += isStack(tensor) ? tensor.bytes : 0;
            logits(engine, text, {});
            EXPECT_EQ(engine->expertCounts().disk.bytes, ofExperts) << "each expert is read once";
        }
        for (int round = 0; round < 2; ++round) {
            EXPECT_EQ(made, write(engine, counts));
            EXPECT_EQ(expected.steps, counts.steps);
            EXPECT_EQ(expected.drafted, counts.drafted);
            EXPECT_EQ(expected.accepted, counts.accepted);
        }
    }
}

// What can no longer be read is an error of whoever needs it, in prompts and in steps; what is in VRAM and RAM stays.
TEST_F(CudaDisk, AFileThatWasCutIsAnErrorAndTheModelGoesOn) {
    const tiny::Model model(someExperts());
    const auto text = tokens(60, model.options().vocab);
    const auto prompt = logits(load(model, options(true)), text, {});
    const auto stepped = logits(load(model, options(false)), text, {});
    int file = -1;
    const size_t all = bytesOfAllExperts(model);
    const auto engine = std::make_shared<Engine>(model.spec(), model.weights(&file), onDisk(model, all / 4, all / 2));
    EXPECT_TRUE(sameBits(prompt, logits(engine, text, {})));
    const auto size = static_cast<off_t>(model.bytes.size());
    ASSERT_EQ(::ftruncate(file, size / 2), 0);
    const auto failure = [&](const std::function<void()>& run) {
        try {
            run();
        } catch (const Error& error) {
            return error.kind() == ErrorKind::BadModel ? std::string(error.what()) : "of another kind";
        }
        return std::string("none");
    };
    for (int round = 0; round < 2; ++round) {
        EXPECT_NE(failure([&] { logits(engine, text, {}); }).find("a part of it cannot be read"), std::string::npos);
        EXPECT_NE(failure([&] { steps(engine, text, oneByOne(60)); }).find("a part of it cannot be read"),
                  std::string::npos);
    }
    ASSERT_EQ(::pwrite(file, model.bytes.data(), model.bytes.size(), 0), size);
    ::close(file);
    for (int round = 0; round < 2; ++round) {
        EXPECT_TRUE(sameBits(prompt, logits(engine, text, {})));
        EXPECT_TRUE(sameBits(stepped, steps(engine, text, oneByOne(60))));
    }
}

}  // namespace
}  // namespace sharpi::cuda
