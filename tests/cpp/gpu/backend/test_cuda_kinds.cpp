// A row's bits depend on its kind, its tokens and its position. On the GPU they do not depend on how a prompt is cut,
// on the batch's size, on where weights are, or on what else is in the batch.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "backend/cuda_backend.h"
#include "placement_test.h"
#include "tiny_blocks.h"
#include "tiny_pass.h"

namespace sharpi::cuda {
namespace {

// A model on the GPU with room for many sequences, and with homes for its weights.
struct World {
    World(const tiny::Model& model, const EngineOptions& o, int32_t sequences)
        : spec(model.spec()),
          files(model.weights()),
          backend(0, size_t{0}, 2),
          trace(backend.allocator(), nullptr),
          limits(engineLimits(spec, files->tensors(), o)),
          weights(spec, *files, backend.placer(), normalized(spec, o.homes), slotBudget(o), o.context, trace),
          kv(backend.allocator(), kvShapes(spec), o.kvType, sequences * o.context,
             RecurrentState(backend.allocator(), recurrentShapes(spec), 2 * sequences)),
          forward(spec, weights, backend, kv, limits),
          vocab(static_cast<size_t>(spec.vocabSize)) {
        backend.takeScratch(limits);
        if (limits.expertSlots) backend.startExperts(o.expertUse);
    }

    // The next rows of a sequence, to be computed.
    struct Rows {
        int32_t sequence;
        std::vector<int32_t> tokens;
        RowKind kind;
    };
    // Computes rows in one batch. Returns the logits, row after row.
    std::vector<float> run(const std::vector<Rows>& all) {
        Batch batch;
        for (const Rows& rows : all) {
            const auto begin = static_cast<int32_t>(kv.length(rows.sequence));
            kv.extend(rows.sequence, static_cast<int64_t>(rows.tokens.size()));
            for (size_t i = 0; i < rows.tokens.size(); ++i)
                batch.add(rows.kind, rows.tokens[i], begin + static_cast<int32_t>(i), rows.sequence, true);
        }
        std::vector<float> logits(batch.logitRows.size() * vocab, NAN);
        forward.run(batch, logits.data());
        return logits;
    }

    ModelSpec spec;
    std::unique_ptr<Weights> files;
    CudaBackend backend;
    LoadTrace trace;
    StepLimits limits;
    ModelWeights weights;
    KvCache kv;
    ForwardPass forward;
    size_t vocab;
};

class CudaKinds : public PlacementTest {
protected:
    static EngineOptions of(int64_t batch, KvType kv = KvType::BF16) {
        EngineOptions o = options(true, kv);
        o.batch = batch;
        return o;
    }
    std::vector<int64_t> cuts(int64_t total) {
        std::vector<int64_t> chunks;
        const auto most = 1 + random()() % 150;
        for (int64_t i = 0; i < total; ++i) chunks.push_back(1 + static_cast<int64_t>(random()() % most));
        return chunks;
    }
    // One for each place where a model's weights may be.
    static std::vector<EngineOptions> placements(const tiny::Model& model, int64_t batch) {
        std::vector<EngineOptions> all = {of(batch)};
        EngineOptions o = of(batch);
        o.homes = homes(model, 0, 40);
        all.push_back(o);
        if (!model.options().experts) return all;
        EngineOptions slots = inSlots(model, bytesOfAllExperts(model) / 3);
        slots.batch = batch;
        all.push_back(slots);
        return all;
    }
    void expectTheSameHoweverCut(const tiny::Model& model);
    void expectTheSameWithoutWhatFollows(const tiny::Model& model);
    void expectTheSameBesideTheOtherKind(const tiny::Model& model);
    // A sequence's rows in a batch, with the logits that they have alone: a prompt's, or a decode row's after it.
    struct Text {
        std::vector<int32_t> prompt, more;  // more: the decode row
        std::vector<float> expected;
    };
    std::vector<Text> textsAlone(World& world, int count, bool decoding, int64_t most);
    // Compares one batch of texts with what they get alone.
    void expectAsAlone(World& world, const std::vector<Text>& texts);
};

void CudaKinds::expectTheSameHoweverCut(const tiny::Model& model) {
    std::vector<std::shared_ptr<Engine>> engines;
    for (const int64_t batch : {64, 100, 300}) {
        for (const EngineOptions& o : placements(model, batch)) engines.push_back(load(model, o));
    }
    for (const int64_t length : {1, 2, 3, 4, 5, 6, 7, 8, 9, 63, 64, 65, 130, 290}) {
        const auto text = tokens(length, model.options().vocab);
        const auto expected = logits(engines.back(), text, {});
        for (size_t i = 0; i < engines.size(); ++i) {
            EXPECT_TRUE(sameBits(expected, logits(engines[i], text, {}))) << length << " tokens, engine " << i;
            EXPECT_TRUE(sameBits(expected, logits(engines[i], text, cuts(length))))
                << length << " tokens, engine " << i << ", cut";
        }
    }
}

TEST_F(CudaKinds, APromptMayBeCutAnywhere) {
    for (const tiny::Options& tiny : tiny::gpuVariants()) {
        SCOPED_TRACE(tiny::describe(tiny));
        expectTheSameHoweverCut(tiny::Model(tiny));
    }
}

// Compares a row that is alone in its batch with the same row among others: the first rows of a longer prompt.
void CudaKinds::expectTheSameWithoutWhatFollows(const tiny::Model& model) {
    const int64_t vocab = model.options().vocab;
    for (const KvType kv : {KvType::BF16, KvType::F32}) {
        const auto engine = load(model, of(300, kv));
        const auto text = tokens(200, vocab);
        const auto expected = logits(engine, text, {});
        for (const int64_t length : {1, 2, 7, 8, 9, 31, 63, 64, 65, 127, 128, 129, 190}) {
            const auto first = logits(engine, {text.begin(), text.begin() + length}, {});
            EXPECT_TRUE(sameBits(first, {expected.begin(), expected.begin() + length * vocab})) << length;
        }
    }
}

TEST_F(CudaKinds, WhatComesBehindARowDoesNotShow) {
    for (const tiny::Options& tiny : tiny::gpuVariants()) {
        SCOPED_TRACE(tiny::describe(tiny));
        expectTheSameWithoutWhatFollows(tiny::Model(tiny));
    }
}

std::vector<CudaKinds::Text> CudaKinds::textsAlone(World& world, int count, bool decoding, int64_t most) {
    const auto vocab = static_cast<int64_t>(world.vocab);
    std::vector<Text> texts(static_cast<size_t>(count));
    for (Text& text : texts) {
        text.prompt = tokens(1 + static_cast<int64_t>(random()() % static_cast<uint32_t>(most)), vocab);
        if (decoding) text.more = tokens(1, vocab);
        const int32_t sequence = world.kv.createSequence();
        text.expected = world.run({{sequence, text.prompt, RowKind::Prompt}});
        if (decoding) text.expected = world.run({{sequence, text.more, RowKind::Decode}});
        world.kv.releaseSequence(sequence);
    }
    return texts;
}

void CudaKinds::expectAsAlone(World& world, const std::vector<Text>& texts) {
    std::vector<World::Rows> together;
    std::vector<float> expected;
    for (const Text& text : texts) {
        const int32_t sequence = world.kv.createSequence();
        const bool decoding = !text.more.empty();
        if (decoding) world.run({{sequence, text.prompt, RowKind::Prompt}});
        together.push_back(
            {sequence, decoding ? text.more : text.prompt, decoding ? RowKind::Decode : RowKind::Prompt});
        expected.insert(expected.end(), text.expected.begin(), text.expected.end());
    }
    EXPECT_TRUE(sameBits(expected, world.run(together)));
    for (const World::Rows& rows : together) world.kv.releaseSequence(rows.sequence);
}

void CudaKinds::expectTheSameBesideTheOtherKind(const tiny::Model& model) {
    for (const EngineOptions& o : placements(model, 40 + 3 * 90)) {
        SCOPED_TRACE(o.homes.empty() ? "resident" : o.expertSlotBytes ? "in slots" : "direct");
        World world(model, o, 48);
        std::vector<Text> decoding = textsAlone(world, 40, true, 90), prompts = textsAlone(world, 3, false, 90);
        for (const int decoders : {0, 1, 2, 7, 8, 9, 17, 40}) {
            for (const int others : {0, 1, 3}) {
                if (decoders + others == 0) continue;
                SCOPED_TRACE(std::to_string(decoders) + " decode rows beside " + std::to_string(others) + " prompts");
                std::shuffle(decoding.begin(), decoding.end(), random());
                std::shuffle(prompts.begin(), prompts.end(), random());
                std::vector<Text> texts(decoding.begin(), decoding.begin() + decoders);
                texts.insert(texts.end(), prompts.begin(), prompts.begin() + others);
                expectAsAlone(world, texts);
            }
        }
    }
}

TEST_F(CudaKinds, RowsOfBothKindsInOneBatchGetWhatTheyGetAlone) {
    for (const tiny::Options& tiny : tiny::gpuVariants()) {
        SCOPED_TRACE(tiny::describe(tiny));
        expectTheSameBesideTheOtherKind(tiny::Model(tiny));
    }
}

// DeepSeek V4: with a layer whose blocks an indexer chooses, and one that sees all its blocks.
TEST_F(CudaKinds, RowsThatSeeBlocksDependOnNothingElseEither) {
    const tiny::Model model = tiny::modelOf(tiny::withBlocks(), 300);
    expectTheSameHoweverCut(model);
    expectTheSameWithoutWhatFollows(model);
    expectTheSameBesideTheOtherKind(model);
}

// Much of a prompt, enough for the kernel for many rows of a sequence, behind a part of it, with sequences that have
// few rows before and behind it; then its rest. Attention's output is converted in one launch more (heads of less than
// a block, gated ones) or written as products read it.
TEST_F(CudaKinds, LongExactPromptsHaveTheCpusBits) {
    tiny::Options wide, hybrid = tiny::gpuHybrids()[0];
    wide.headDim = 64;
    for (tiny::Options shape : {tiny::Options(), wide, hybrid}) {
        SCOPED_TRACE(tiny::describe(shape) + ", heads of " + std::to_string(shape.headDim));
        shape.heads = 32, shape.kvHeads = 4, shape.context = 700;
        const tiny::Model model(shape);
        EngineOptions o = exact(of(700)), cpu = options(false);
        o.context = cpu.context = 700;
        ASSERT_TRUE(manyRowsPay(stream().device(), {32, 4, static_cast<int32_t>(shape.headDim)}, {}, 6, 590 + 40));
        World world(model, o, 4);
        const auto onCpu = load(model, cpu);
        struct Cut {
            std::vector<int64_t> lengths;  // of the rows in each batch
            std::vector<int32_t> tokens;
            std::vector<float> expected;
            int32_t sequence;
        };
        std::vector<Cut> texts = {{{20, 2, 1}}, {{50, 590, 60}}, {{0, 5, 1}}, {{0, 40, 30}}};
        for (Cut& text : texts) {
            text.tokens = tokens(std::accumulate(text.lengths.begin(), text.lengths.end(), int64_t{0}), shape.vocab);
            text.expected = logits(onCpu, text.tokens, {});
            text.sequence = world.kv.createSequence();
        }
        std::vector<int64_t> held(texts.size());
        for (size_t batch = 0; batch < 3; ++batch) {
            std::vector<World::Rows> rows;
            std::vector<float> expected;
            for (size_t i = 0; i < texts.size(); ++i) {
                const int64_t begin = held[i], end = held[i] += texts[i].lengths[batch];
                if (begin == end) continue;
                const Cut& text = texts[i];
                rows.push_back({text.sequence,
                                {text.tokens.begin() + begin, text.tokens.begin() + end},
                                i == 0 && batch > 0 ? RowKind::Decode : RowKind::Prompt});
                expected.insert(expected.end(), text.expected.begin() + begin * shape.vocab,
                                text.expected.begin() + end * shape.vocab);
            }
            EXPECT_TRUE(sameBits(expected, world.run(rows))) << "batch " << batch;
        }
    }
}

TEST_F(CudaKinds, ImpossibleBatchesAreRefused) {
    tiny::Options hybrid = tiny::gpuHybrids()[0];
    const tiny::Model model(hybrid);
    World world(model, of(300), 80);
    const auto refused = [&](const std::vector<World::Rows>& rows, const char* part) {
        try {
            world.run(rows);
            ADD_FAILURE() << "the batch was accepted";
        } catch (const Error& e) {
            EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
        }
        for (const World::Rows& r : rows) world.kv.truncate(r.sequence, 0);
    };
    std::vector<World::Rows> decode, prompts;
    for (int i = 0; i < 65; ++i)
        decode.push_back({world.kv.createSequence(), tokens(1, hybrid.vocab), RowKind::Decode});
    refused(decode, "decode rows");
    for (int i = 0; i < 17; ++i)
        prompts.push_back({decode[static_cast<size_t>(i)].sequence, tokens(1, hybrid.vocab), RowKind::Prompt});
    refused(prompts, "prompts");
    const int32_t sequence = decode[0].sequence;
    world.run({{sequence, tokens(20, hybrid.vocab), RowKind::Prompt}});
    refused({{sequence, tokens(20, hybrid.vocab), RowKind::Prompt}}, "no multiple of 64");
}

}  // namespace
}  // namespace sharpi::cuda
