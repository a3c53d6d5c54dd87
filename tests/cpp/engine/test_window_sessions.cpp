// Sessions of models whose layers see a window or a chunk, in a cache that keeps little more than these. What they
// answer is compared with engines whose cache keeps everything: a page that was given back too early, or read from
// another list, gives an answer that looks right.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "draft_world.h"
#include "planning/memory_plan.h"
#include "seed.h"
#include "tiny_engine.h"
#include "varied_model.h"

namespace {

using namespace tiny;

EngineOptions optionsOf(int64_t batch = 16) { return engineOptions(WindowedModel::kContext, batch); }

TEST(WindowSessions, ALongTextInASmallCacheGetsTheSameBits) {
    for (const int64_t batch : {16, 300}) {
        const WindowedModel windowed(static_cast<unsigned>(batch));
        const auto small = windowed.engine(optionsOf(batch)), roomy = windowed.roomy(optionsOf(batch));
        ASSERT_LT(small->kvBytes(), roomy->kvBytes());
        const int64_t vocab = windowed.vocab();
        const auto tokens = randomTokens(1200, vocab, 1);
        Session expected(roomy);
        const auto whole = evaluate(expected, tokens, vocab);
        expectMeaningful(whole, vocab);
        std::mt19937 random(testSeed(static_cast<uint32_t>(batch)));
        for (int round = 0; round < 4; ++round) {
            std::vector<int64_t> chunks(1200, round ? batch : 1);
            if (round > 1)
                for (int64_t& chunk : chunks) chunk = 1 + random() % batch;
            Session session(small);
            EXPECT_TRUE(sameBits(evaluate(session, tokens, vocab, chunks), whole)) << "round " << round;
        }
    }
}

// Every layer's reach matters to the answer, or equality would prove nothing.
TEST(WindowSessions, WhatALayerSeesDecidesTheAnswer) {
    const WindowedModel windowed;
    const int64_t vocab = windowed.vocab();
    const auto tokens = randomTokens(300, vocab, 5);
    Session session(windowed.roomy(optionsOf()));
    const auto answer = evaluate(session, tokens, vocab);
    for (const size_t layer : {size_t{0}, size_t{2}, size_t{3}}) {
        WindowedModel other;
        AttentionReach& reach = other.spec().layers[layer].attention->reach;
        ++(reach.window ? reach.window : reach.chunk);
        Session different(other.roomy(optionsOf()));
        const auto otherAnswer = evaluate(different, tokens, vocab);
        EXPECT_FALSE(sameBits(answer, otherAnswer)) << layer;
    }
}

TEST(WindowSessions, GenerationIsTheSame) {
    const WindowedModel windowed;
    const auto prompt = repetitive(50, windowed.vocab(), 3);
    Session small(windowed.engine(optionsOf(), 1)), roomy(windowed.roomy(optionsOf()));
    const auto expected = generate(roomy, prompt, sampledParams(7), 1000);
    EXPECT_EQ(expected.size(), 1000u);
    EXPECT_EQ(generate(small, prompt, sampledParams(7), 1000), expected);
    // Wrong drafts are rolled back.
    EXPECT_EQ(generate(small, prompt, sampledParams(7), 1000, drafts(Source::NGram, 5)), expected);
    EXPECT_GT(small.draftCounts().drafted, small.draftCounts().accepted);
    EXPECT_GT(small.draftCounts().accepted, 0);
}

// Each prompt changes the one before it somewhere, so that the session goes back as far as it can.
TEST(WindowSessions, GoingBackGivesTheAnswerOfABeginning) {
    const WindowedModel windowed;
    const auto roomy = windowed.roomy(optionsOf());
    for (const int32_t sequences : {1, 2, 4}) {
        Session used(windowed.engine(optionsOf(), sequences));
        auto prompt = randomTokens(700, windowed.vocab(), 3);
        greedy(used, prompt, 6);
        for (const size_t changed : {699u, 698u, 650u, 640u, 400u, 250u, 192u, 5u, 0u}) {
            prompt[changed] = static_cast<int32_t>((prompt[changed] + 1) % windowed.vocab());
            const auto continued = greedy(used, prompt, 6);
            EXPECT_LE(used.reusedTokens(), static_cast<int64_t>(changed));
            if (changed >= 650) {
                EXPECT_EQ(used.reusedTokens(), static_cast<int64_t>(changed)) << sequences;
            }
            Session fresh(roomy);
            EXPECT_EQ(continued, greedy(fresh, prompt, 6)) << "from token " << changed;
        }
    }
}

// Chat programs send a conversation again and again, often without what was thought.
TEST(WindowSessions, APromptGivenAgainIsNotComputedAgain) {
    const WindowedModel windowed;
    Session session(windowed.engine(optionsOf(), 2)), fresh(windowed.roomy(optionsOf()));
    auto prompt = randomTokens(500, windowed.vocab(), 5);
    const auto first = greedy(session, prompt, 600);
    EXPECT_EQ(greedy(session, prompt, 600), first);
    EXPECT_EQ(session.reusedTokens(), 499);
    EXPECT_EQ(first, greedy(fresh, prompt, 600));
    prompt.insert(prompt.end(), first.begin(), first.end());
    prompt.push_back(7);
    greedy(session, prompt, 1);
    EXPECT_EQ(session.reusedTokens(), 1099);
}

TEST(WindowSessions, SessionsShareThePages) {
    const WindowedModel windowed;
    const auto engine = windowed.engine(optionsOf(), 3);
    std::vector<std::unique_ptr<Session>> sessions;
    std::vector<std::vector<int32_t>> prompts, expected;
    for (unsigned i = 0; i < 3; ++i) {
        sessions.push_back(std::make_unique<Session>(engine));
        prompts.push_back(randomTokens(300 + 20 * i, windowed.vocab(), i));
        Session alone(windowed.roomy(optionsOf()));
        expected.push_back(generate(alone, prompts[i], greedyParams(), 150));
        sessions[i]->start(prompts[i], greedyParams(), nullptr);
    }
    std::vector<std::vector<int32_t>> made(3);
    for (int token = 0; token < 150; ++token)
        for (size_t i = 0; i < 3; ++i) made[i].push_back(sessions[i]->next().value());
    EXPECT_EQ(made, expected);
    // A fourth may be refused, and then nobody has lost anything.
    Session fourth(engine), fifth(engine);
    expectError(ErrorKind::OutOfMemory, "close other sessions", [&] {
        greedy(fourth, prompts[0], 1);
        greedy(fifth, prompts[0], 1);
    });
    for (size_t i = 0; i < 3; ++i) {
        std::vector<int32_t> text = prompts[i];
        text.insert(text.end(), made[i].begin(), made[i].end());
        Session alone(windowed.roomy(optionsOf()));
        EXPECT_EQ(greedy(*sessions[i], text, 5), greedy(alone, text, 5));
    }
}

TEST(WindowSessions, APlanCountsWhatIsTaken) {
    const WindowedModel windowed;
    for (const int32_t sequences : {1, 4}) {
        for (const int64_t batch : {1, 16, 300}) {
            EngineOptions options = optionsOf(batch);
            options.sequences = sequences;
            const auto engine = windowed.engine(options, sequences);
            const auto lines = plannedLines(windowed.spec(), windowed.table(), options);
            for (const TraceLine& line : lines) {
                if (line.name == "KV cache") {
                    EXPECT_EQ(line.asked, engine->kvBytes());
                }
            }
            EXPECT_EQ(engine->kvBytes(), kvBytes(windowed.spec(), options));
            EXPECT_LT(engine->kvBytes(), kvBytesIfAllSeen(windowed.spec(), options));
        }
    }
    // Three layers with keys and values of their own, in 25 pages.
    const size_t token = 2 * 2 * 2 * 16;  // two heads of 16, for keys and values, in bf16
    EXPECT_EQ(kvBytesIfAllSeen(windowed.spec(), optionsOf()), 3 * 25 * 64 * token);
    // The token at 999 sees 70 twice, 1000, and the chunk from 960 on.
    EXPECT_EQ(kvBytesRead(windowed.spec(), KvType::BF16, 1000), (70 + 70 + 1000 + 40) * token);
    EXPECT_EQ(kvBytesRead(windowed.spec(), KvType::BF16, 30), 4 * 30 * token);
    EXPECT_EQ(kvBytesRead(windowed.spec(), KvType::BF16, 0), 0u);
}

}  // namespace
