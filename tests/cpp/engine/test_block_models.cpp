// DeepSeek V4 on the CPU, on a small random model: what plans count of its caches, what its metadata may say, and many
// texts in one batch.
#include <gtest/gtest.h>

#include "core/error.h"
#include "cpu/cpu_kind.h"
#include "planning/memory_plan.h"
#include "planning/step_work.h"
#include "seed.h"
#include "tiny_blocks.h"
#include "tiny_engine.h"
#include "together.h"

namespace {

using namespace sharpi;

// The token at 999 sees 16 keys, and 8 of 250 blocks of 4, which the indexer reads all, or 7 blocks of 128.
TEST(BlockModels, WhatATokenReads) {
    const tiny::BlockModel model;
    const ModelSpec spec = model.spec();
    constexpr size_t kBf16 = 2, kFloat = 4;
    const size_t keys = 6 * 16 * 64 * kBf16;
    const size_t chosen = 8 * 64 * kBf16 + 250 * 32 * kBf16 + 8 * 2 * (128 + 64) * kFloat;
    const size_t whole = 7 * 64 * kBf16 + 128 * 2 * 64 * kFloat;
    EXPECT_EQ(kvBytesRead(spec, KvType::BF16, 1000), keys + 2 * chosen + 2 * whole);
    EXPECT_EQ(attentionProducts(spec, 1000), 6 * 16 * 8 * 64 + 2 * (8 * 8 * 64 + 250 * 6 * 32) + 2 * 7 * 8 * 64);
    EXPECT_EQ(attentionProducts(spec, 3), 6 * 3 * 8 * 64);
}

TEST(BlockModels, ChooseNoMoreThanTheContextHas) {
    tiny::BlockOptions many;
    many.topK = 100;
    const tiny::BlockModel model(many);
    const auto of = [&](int64_t context) { return stepLimits(model.spec(), model.table(), 8, context, KvType::BF16); };
    EXPECT_EQ(of(300).topK, 80);  // five pages of 16 blocks
    EXPECT_EQ(of(300).seenBlocks, 80);
    EXPECT_EQ(of(1000).topK, 100);
    EXPECT_EQ(of(1000).blocks, 256);
}

TEST(BlockModels, AClampOfZeroIsNone) {
    tiny::BlockModel model;
    const auto clamps = [&](double limit) {
        for (const char* name : {"swiglu_clamp_exp", "swiglu_clamp_shexp"})
            model.metadata[std::string("deepseek4.") + name] = std::vector<double>(6, limit);
        return model.spec();
    };
    const ModelSpec clamped = clamps(10), plain = clamps(0);
    EXPECT_EQ(clamped.layers[0].experts->activation.kind, ActivationKind::ClampedSilu);
    EXPECT_EQ(plain.layers[0].experts->activation.kind, ActivationKind::Silu);
    EXPECT_EQ(plain.layers[0].experts->shared->activation.kind, ActivationKind::Silu);
    EXPECT_THROW(clamps(-1), Error);
}

// Batches of one row of each of 64 texts, and of a few rows of some. Most texts end beyond the window and more blocks
// of 4 than are chosen, some beyond a block of 128.
TEST(BlockModels, SixtyFourTextsInABatchAreThoseAlone) {
    constexpr size_t kTexts = 64, kMost = 64;
    tiny::BlockOptions few;
    few.topK = 3;
    const tiny::BlockModel model(few);
    const int64_t vocab = model.options().vocab;
    std::mt19937 random(testSeed(1));
    Session session(tiny::makeEngine(model, 192, kMost, 1));
    tiny::Together<CpuBackend> all(model, kMost, 192, KvType::BF16, kTexts, 2);
    for (size_t s = 0; s < kTexts; ++s) {
        const auto length = static_cast<int64_t>((s % 16 ? 18 : 130) + random() % 8);
        const auto text = tiny::randomTokens(length, vocab, static_cast<unsigned>(random()));
        session.reset();
        all.add(text, tiny::evaluate(session, text, vocab));
    }
    while (!all.finished()) {
        std::vector<size_t> counts;
        for (size_t s = 0; s < kTexts; ++s) counts.push_back(std::min<size_t>(all.left(s), 1));
        if (random() % 2) counts = all.draw(random, 1 + random() % kMost);
        all.run(counts, random() % 2 ? RowKind::Decode : RowKind::Prompt);
    }
    for (size_t s = 0; s < kTexts; ++s) {
        tiny::expectMeaningful(all.got[s], vocab);
        EXPECT_TRUE(tiny::sameBits(all.alone[s], all.got[s])) << "text " << s;
    }
}

}  // namespace
