// The engine over small random models of every architecture: however a text is cut into batches, and whatever
// shares a batch with it, its logits have the same bits; and what fails leaves a session as it was.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tiny_engine.h"
#include "tiny_pass.h"

namespace {

using namespace sharpi;
using namespace tiny;

TEST(Engine, ChunksDoNotChangeLogits) {
    for (const tiny::Options& options : tiny::variants()) {
        SCOPED_TRACE(tiny::describe(options));
        const tiny::Model model(options);
        const auto tokens = randomTokens(150, options.vocab, options.seed);  // three pages
        const auto engine = makeEngine(model, 200, 200, 2);
        Session session(engine);
        const auto whole = evaluate(session, tokens, options.vocab);
        expectMeaningful(whole, options.vocab);
        EXPECT_EQ(session.tokens(), tokens);

        session.reset();
        EXPECT_TRUE(sameBits(evaluate(session, tokens, options.vocab, std::vector<int64_t>(150, 1)), whole))
            << "token by token";
        std::mt19937 random(options.seed);
        for (int round = 0; round < 3; ++round) {
            std::vector<int64_t> chunks;
            for (int i = 0; i < 150; ++i) chunks.push_back(1 + random() % (round == 0 ? 5 : 70));
            session.reset();
            EXPECT_TRUE(sameBits(evaluate(session, tokens, options.vocab, chunks), whole)) << "random chunks";
        }
        // Other thread counts and batch sizes.
        for (const int threads : {1, 3}) {
            Session other(makeEngine(model, 200, threads == 1 ? 200 : 37, threads));
            EXPECT_TRUE(sameBits(evaluate(other, tokens, options.vocab), whole)) << threads << " threads";
        }
    }
}

TEST(Engine, KvTypesAreEachConsistent) {
    tiny::Options options;
    const tiny::Model model(options);
    const auto tokens = randomTokens(100, options.vocab, 5);
    std::vector<std::vector<float>> results;
    for (const KvType type : {KvType::F32, KvType::F16, KvType::BF16}) {
        Session session(makeEngine(model, 128, 128, 2, type));
        results.push_back(evaluate(session, tokens, options.vocab));
        session.reset();
        EXPECT_TRUE(sameBits(evaluate(session, tokens, options.vocab, std::vector<int64_t>(100, 1)), results.back()));
    }
    for (size_t i = 1; i < results.size(); ++i) {
        double largest = 0;
        for (size_t j = 0; j < results[0].size(); ++j)
            largest = std::max<double>(largest, std::fabs(results[i][j] - results[0][j]));
        EXPECT_GT(largest, 0.0) << "the type was not used";
        EXPECT_LT(largest, 2.0);
    }
}

TEST(ForwardPass, SequencesInOneBatchDoNotTouchEachOther) {
    for (const tiny::Options& options : tiny::variants()) {
        SCOPED_TRACE(tiny::describe(options));
        const tiny::Model model(options);
        const std::vector<std::vector<int32_t>> texts = {randomTokens(140, options.vocab, 1),
                                                         randomTokens(90, options.vocab, 2),
                                                         randomTokens(33, options.vocab, 3)};
        std::vector<std::vector<float>> alone;
        for (const auto& text : texts) {
            Session session(makeEngine(model, 200, 200, 1));
            alone.push_back(evaluate(session, text, options.vocab));
        }
        tiny::Pass<CpuBackend> pass(model, 128, 200, KvType::BF16, 4 * 200, 2);
        std::mt19937 random(options.seed);
        std::vector<int32_t> handles;
        for (size_t s = 0; s < texts.size(); ++s) handles.push_back(pass.kv.createSequence());
        std::vector<size_t> done(texts.size(), 0);
        size_t left = 140 + 90 + 33;
        while (left > 0) {
            Batch batch;
            std::vector<std::pair<size_t, size_t>> wanted;  // sequence and position of each row of logits
            std::vector<size_t> order = {0, 1, 2};
            std::shuffle(order.begin(), order.end(), random);
            for (const size_t s : order) {
                const size_t count = std::min<size_t>(random() % 40, texts[s].size() - done[s]);
                if (count == 0) continue;
                pass.kv.extend(handles[s], static_cast<int64_t>(count));
                for (size_t i = 0; i < count; ++i, ++done[s], --left) {
                    const bool want = random() % 3 == 0 || done[s] + 1 == texts[s].size();
                    batch.add(RowKind::Prompt, texts[s][done[s]], static_cast<int32_t>(done[s]), handles[s], want);
                    if (want) wanted.emplace_back(s, done[s]);
                }
            }
            std::vector<float> logits(wanted.size() * options.vocab, kPoison);
            pass.forward.run(batch, logits.empty() ? nullptr : logits.data());
            for (size_t i = 0; i < wanted.size(); ++i) {
                const auto [s, position] = wanted[i];
                ASSERT_EQ(std::memcmp(&logits[i * options.vocab], &alone[s][position * options.vocab],
                                      options.vocab * sizeof(float)),
                          0)
                    << "sequence " << s << " at " << position;
            }
        }
    }
}

TEST(Session, TwoSessionsOfOneEngine) {
    tiny::Options options;
    const tiny::Model model(options);
    const auto a = randomTokens(70, options.vocab, 1), b = randomTokens(80, options.vocab, 2);
    const auto engine = makeEngine(model, 300, 64, 2);
    Session alone(engine);
    const auto expectedA = evaluate(alone, a, options.vocab);
    alone.reset();
    const auto expectedB = evaluate(alone, b, options.vocab);
    alone.reset();
    Session first(engine), second(engine);
    std::vector<float> gotA, gotB;
    for (size_t i = 0; i < 80; i += 10) {
        if (i < 70) {
            const auto piece = evaluate(first, {a.begin() + i, a.begin() + i + 10}, options.vocab);
            gotA.insert(gotA.end(), piece.begin(), piece.end());
        }
        const auto piece = evaluate(second, {b.begin() + i, b.begin() + i + 10}, options.vocab);
        gotB.insert(gotB.end(), piece.begin(), piece.end());
    }
    EXPECT_TRUE(sameBits(gotA, expectedA));
    EXPECT_TRUE(sameBits(gotB, expectedB));
}

TEST(Session, AFailureLeavesItAsItWas) {
    tiny::Options options;
    const tiny::Model model(options);
    const auto engine = makeEngine(model, 128, 128, 2);
    const auto tokens = randomTokens(100, options.vocab, 9);
    const std::vector<int32_t> head(tokens.begin(), tokens.begin() + 60), tail(tokens.begin() + 60, tokens.end());
    Session fresh(engine);
    const auto whole = evaluate(fresh, tokens, options.vocab);
    fresh.reset();

    Session session(engine);
    evaluate(session, head, options.vocab);
    for (const int32_t wrong : {-1, static_cast<int32_t>(options.vocab), std::numeric_limits<int32_t>::max()}) {
        std::vector<int32_t> bad = tail;
        bad[20] = wrong;
        expectError(ErrorKind::InvalidArgument, std::to_string(wrong), [&] { evaluate(session, bad, options.vocab); });
        EXPECT_EQ(session.tokens(), head);
    }
    expectError(ErrorKind::InvalidArgument, "empty", [&] { evaluate(session, {}, options.vocab); });
    expectError(ErrorKind::InvalidArgument, "69",
                [&] { evaluate(session, randomTokens(69, options.vocab, 1), options.vocab); });
    EXPECT_EQ(session.tokens(), head);
    // Another session holds the pages that are left: the cache refuses.
    evaluate(fresh, randomTokens(64, options.vocab, 2), options.vocab);
    expectError(ErrorKind::OutOfMemory, "KV cache", [&] { evaluate(session, tail, options.vocab); });
    EXPECT_EQ(session.tokens(), head);
    fresh.reset();
    const auto logits = evaluate(session, tail, options.vocab);
    EXPECT_TRUE(sameBits(logits, {whole.begin() + 60 * options.vocab, whole.end()}));
}

TEST(Session, InterruptionKeepsWhatWasEvaluated) {
    tiny::Options options;
    const tiny::Model model(options);
    Session session(makeEngine(model, 128, 10, 1));
    const auto tokens = randomTokens(35, options.vocab, 4);
    int asked = 0;
    expectError(ErrorKind::InvalidArgument, "interrupted",
                [&] { session.evaluate(tokens, RowKind::Prompt, nullptr, {}, [&] { return ++asked == 3; }); });
    EXPECT_EQ(session.tokens(), std::vector<int32_t>(tokens.begin(), tokens.begin() + 20));
}

TEST(Session, StartReusesTheCommonBeginning) {
    for (const char* name : {"llama", "qwen3moe"}) {
        tiny::Options options;
        options.architecture = name;
        const tiny::Model model(options);
        const auto engine = makeEngine(model, 300, 64, 2);
        auto prompt = randomTokens(100, options.vocab, 3);
        Session used(engine);
        greedy(used, prompt, 20);
        EXPECT_EQ(used.reusedTokens(), 0);
        for (const size_t changed : {99u, 70u, 64u, 63u, 0u}) {
            prompt[changed] = (prompt[changed] + 1) % options.vocab;
            const auto continued = greedy(used, prompt, 20);
            EXPECT_EQ(used.reusedTokens(), static_cast<int64_t>(changed));
            Session fresh(engine);
            EXPECT_EQ(continued, greedy(fresh, prompt, 20)) << "from token " << changed;
        }
        // Logits too, after a start that cut the sequence in the middle of a page.
        const std::vector<int32_t> shorter(prompt.begin(), prompt.begin() + 80),
            more = randomTokens(30, options.vocab, 8);
        greedy(used, shorter, 1);
        EXPECT_EQ(used.reusedTokens(), 79);
        EXPECT_EQ(used.tokens(), shorter);
        const auto continued = evaluate(used, more, options.vocab);
        Session fresh(engine);
        evaluate(fresh, shorter, options.vocab);
        EXPECT_TRUE(sameBits(continued, evaluate(fresh, more, options.vocab)));
    }
}

TEST(Session, GreedyFollowsTheLogitsUntilTheContextIsFull) {
    tiny::Options options;
    const tiny::Model model(options);
    const auto engine = makeEngine(model, 70, 64, 1);
    const auto prompt = randomTokens(50, options.vocab, 6);
    Session session(engine);
    const auto made = greedy(session, prompt, 1000);
    EXPECT_EQ(made.size(), 21u);  // the one that the 70th token gives is the last
    EXPECT_EQ(session.next(), std::nullopt);
    EXPECT_EQ(session.tokens().size(), 70u);
    Session check(engine);
    session.reset();
    std::vector<int32_t> text = prompt;
    text.insert(text.end(), made.begin(), made.end() - 1);
    const auto logits = evaluate(check, text, options.vocab);
    for (size_t i = 0; i < made.size(); ++i) {
        const float* row = &logits[(prompt.size() - 1 + i) * options.vocab];
        EXPECT_EQ(made[i], std::max_element(row, row + options.vocab) - row);
    }
}

TEST(Session, AStartThatFailedCannotBeContinued) {
    tiny::Options options;
    const tiny::Model model(options);
    const auto engine = makeEngine(model, 100, 8, 1);
    Session session(engine);
    greedy(session, randomTokens(20, options.vocab, 7), 3);
    expectError(ErrorKind::InvalidArgument, "interrupted",
                [&] { session.start(randomTokens(30, options.vocab, 8), SamplingParams{}, [] { return true; }); });
    expectError(ErrorKind::Internal, "start", [&] { session.next(); });
}

TEST(Engine, RefusesImpossibleOptions) {
    tiny::Options options;
    const tiny::Model model(options);
    expectError(ErrorKind::InvalidArgument, "context", [&] { makeEngine(model, 0, 1, 1); });
    expectError(ErrorKind::InvalidArgument, "301", [&] { makeEngine(model, 301, 1, 1); });
    expectError(ErrorKind::InvalidArgument, "batch", [&] { makeEngine(model, 100, 0, 1); });
    expectError(ErrorKind::InvalidArgument, "batch", [&] { makeEngine(model, 100, 65537, 1); });
    expectError(ErrorKind::InvalidArgument, "threads", [&] { makeEngine(model, 100, 10, 0); });
    EXPECT_EQ(makeEngine(model, 100, 512, 1)->options().batch, 100);
    const auto engine = makeEngine(model, 100, 512, 1);
    EXPECT_EQ(engine->kvBytes(), kvBytes(model.spec(), engine->options()));
}

TEST(Engine, WeightsCopiedToADeviceGiveTheSameBits) {
    for (const tiny::Options& options : tiny::variants()) {
        SCOPED_TRACE(tiny::describe(options));
        const tiny::Model model(options);
        const auto tokens = randomTokens(40, options.vocab, 3);
        Session mapped(makeEngine(model, 200, 16, 1));
        OnFake fake(size_t{64} << 20);
        Session copied(fake.load(model, smallOptions()));
        EXPECT_TRUE(sameBits(evaluate(copied, tokens, options.vocab), evaluate(mapped, tokens, options.vocab)));
    }
}

TEST(Engine, AnyAllocationMayFailAndNothingIsLost) {
    tiny::Options options;
    options.architecture = "qwen3moe";
    const tiny::Model model(options);
    int commits = 0;
    {
        OnFake fake(size_t{64} << 20);
        const auto engine = fake.load(model, smallOptions());
        commits = fake.device.commits();
    }
    ASSERT_GT(commits, 10);
    for (int n = 1; n <= commits; ++n) {
        FakeDevice device(size_t{64} << 20, size_t{16} << 10);
        const size_t before = device.freeBytes();
        device.failCommit(n);
        try {
            Engine engine(model.spec(), model.weights(), smallOptions(),
                          std::make_unique<CpuBackend>(1, std::make_unique<Borrowed>(device)));
            ADD_FAILURE() << "commit " << n << " failed, and nobody said so";
        } catch (const Error& e) {
            EXPECT_EQ(e.kind(), ErrorKind::OutOfMemory) << e.what();
            EXPECT_NE(std::string(e.what()).find("needs"), std::string::npos) << e.what();
            EXPECT_NE(std::string(e.what()).find(" free"), std::string::npos) << e.what();
        }
        EXPECT_EQ(device.freeBytes(), before) << "after the failure of commit " << n;
    }
}

TEST(Engine, WhatDoesNotFitIsSaidWithWhatThereIs) {
    tiny::Options options;
    options.context = 8000;
    options.layers = 4;
    options.kvHeads = 4;
    options.headDim = 64;
    const tiny::Model model(options);
    EngineOptions wanted = smallOptions();
    wanted.context = 8000;
    const size_t capacity = size_t{28} << 20;
    for (const DeviceKind* kind : {&cpuKind(), &cudaKind()}) {
        SCOPED_TRACE(kind->name());
        wanted.device.kind = kind;
        const size_t needed = plannedBytes(model.spec(), model.table(), wanted);
        ASSERT_GT(needed, capacity);
        try {
            OnFake(capacity, size_t{2} << 20).load(model, wanted);
            FAIL() << "it fits";
        } catch (const Error& e) {
            EXPECT_EQ(e.kind(), ErrorKind::OutOfMemory);
            EXPECT_NE(std::string(e.what()).find("KV cache"), std::string::npos) << e.what();
            ASSERT_TRUE(e.shortage());
            EXPECT_EQ(e.shortage()->available, capacity);
            EXPECT_EQ(e.shortage()->wanted, needed);
        }
    }
}

TEST(Engine, ThePlanCountsWhatLoadingTakes) {
    for (const tiny::Options& options : tiny::variants()) {
        SCOPED_TRACE(tiny::describe(options));
        const tiny::Model model(options);
        OnFake fake(size_t{64} << 20, size_t{4} << 10);
        const auto engine = fake.load(model, smallOptions());
        const auto lines = plannedLines(model.spec(), model.weights()->tensors(), smallOptions());
        ASSERT_EQ(lines.size() + 1, engine->trace().size());
        for (size_t i = 0; i < lines.size(); ++i) {
            const TraceLine& took = engine->trace()[i + 1];
            EXPECT_EQ(lines[i].name, took.name);
            if (took.name == "KV cache" || took.name == "scratch" || took.name == "graphs") {
                EXPECT_EQ(lines[i].asked, took.asked) << took.name;
            }
        }
        EXPECT_EQ(engine->kvBytes() + engine->scratchBytes(),
                  lines[lines.size() - 3].asked + lines[lines.size() - 2].asked);
    }
}

TEST(Engine, SaysWhatHoldsItsMemory) {
    for (const tiny::Options& options : tiny::variants()) {
        SCOPED_TRACE(tiny::describe(options));
        const tiny::Model model(options);
        OnFake fake(size_t{64} << 20);
        const auto mapped = makeEngine(model, 200, 16, 1), copied = fake.load(model, smallOptions());
        for (const auto& engine : {mapped, copied}) {
            std::map<std::string, size_t> holdings;
            size_t all = 0, last = SIZE_MAX;
            for (const Holding& holding : engine->holdings()) {
                EXPECT_LE(holding.bytes, last) << holding.name << " is larger than what is before it";
                EXPECT_TRUE(holdings.emplace(holding.name, holding.bytes).second) << holding.name << " is there twice";
                last = holding.bytes;
                all += holding.bytes;
            }
            EXPECT_EQ(all, engine->backend().allocator().held());
            EXPECT_EQ(holdings["KV cache"], engine->kvBytes());
            EXPECT_EQ(holdings["working memory"], engine->scratchBytes());
            EXPECT_EQ(holdings["recurrent state"], engine->stateBytes());
            EXPECT_GT(holdings["output_norm.weight"], 0u);
            EXPECT_EQ(holdings.count("token_embd.weight"), engine == copied ? 1u : 0u) << "the mapped file is not held";
        }
    }
}

}  // namespace
