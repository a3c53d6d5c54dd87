// Drafted tokens: generation with drafts gives the text of generation without them, whatever makes the guesses, however
// many are right and however little room there is.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "draft_world.h"
#include "seed.h"

namespace {

using namespace sharpi;
using namespace tiny;

TEST(NgramDraft, IsWhatFollowedTheLongestLatestMatch) {
    // Compared with a plain search: for each length the latest place; the text grows one token at a time.
    const auto plain = [](std::vector<int32_t> text, int64_t most) {
        const size_t size = text.size();
        for (size_t length = 4; length >= 2; --length) {
            for (size_t at = size; at-- > 0;) {
                if (at + length >= size ||
                    !std::equal(text.begin() + at, text.begin() + at + length, text.end() - length))
                    continue;
                for (int64_t i = 0; i < most; ++i) text.push_back(text[at + length + i]);
                return std::vector<int32_t>(text.begin() + size, text.end());
            }
        }
        return std::vector<int32_t>();
    };
    std::mt19937 random(sharpi::testSeed(1));
    int found = 0, none = 0;
    for (int round = 0; round < 3000; ++round) {
        const auto text = randomTokens(random() % 40, 1 + random() % 12, random());
        const auto most = static_cast<int64_t>(random() % 8);
        const auto expected = plain(text, most);
        ASSERT_EQ(ngramDraft(text, most), expected) << "round " << round;
        if (most) ++(expected.empty() ? none : found);
    }
    EXPECT_GT(found, 500);
    EXPECT_GT(none, 500);
    EXPECT_EQ(ngramDraft({1, 2, 3, 1, 2}, 7), (std::vector<int32_t>{3, 1, 2, 3, 1, 2, 3}));
}

TEST(Drafts, TextIsTheSameAsWithout) {
    Totals greedyTotals, sampledTotals;
    for (const tiny::Options& options : variants()) {
        SCOPED_TRACE(describe(options));
        const Model model(options);
        Session plain(engineOf(model)), drafting(engineOf(model));
        const auto prompt = repetitive(40, options.vocab, options.seed);
        const auto expected = generate(plain, prompt, greedyParams(), 70),
                   sampled = generate(plain, prompt, sampledParams(3), 50);
        ASSERT_NE(expected, sampled);
        for (const int32_t tokens : {1, 2, 3, 7}) {
            EXPECT_EQ(generate(drafting, prompt, greedyParams(), 70, drafts(Source::NGram, tokens)), expected)
                << tokens << " drafts";
            greedyTotals.add(drafting.draftCounts(), 70, tokens);
            EXPECT_EQ(generate(drafting, prompt, sampledParams(3), 50, drafts(Source::NGram, tokens)), sampled)
                << tokens << " drafts, sampled";
            sampledTotals.add(drafting.draftCounts(), 50, tokens);
        }
        EXPECT_EQ(generate(drafting, prompt, greedyParams(), 5),
                  std::vector<int32_t>(expected.begin(), expected.begin() + 5));
        EXPECT_EQ(drafting.draftCounts().drafted, 0) << "no drafts were asked for";
    }
    for (const Totals& t : {greedyTotals, sampledTotals}) {
        EXPECT_GT(t.accepted, 50);
        EXPECT_GT(t.drafted - t.accepted, 50);
    }
}

// A model whose next token depends on the last one alone soon repeats itself, and then look-up is right.
TEST(Drafts, WhatRepeatsItselfTakesFewSteps) {
    const Model model = knowing(0);
    Session plain(engineOf(model)), drafting(engineOf(model));
    const auto prompt = randomTokens(20, model.options().vocab, 3);
    const auto expected = generate(plain, prompt, greedyParams(), 200);
    for (const int32_t tokens : {1, 4, 7}) {
        EXPECT_EQ(generate(drafting, prompt, greedyParams(), 200, drafts(Source::NGram, tokens)), expected);
        EXPECT_LT(drafting.draftCounts().steps, 60 + 140 / (tokens + 1)) << tokens << " drafts";
    }
}

// Each draft needs room for one more recurrent state: less room, fewer drafts, the same text.
TEST(Drafts, HybridsDraftAsFarAsThereIsRoomForStates) {
    for (const tiny::Options& options : hybrids()) {
        SCOPED_TRACE(describe(options));
        const Model model(options);
        const auto prompt = repetitive(40, options.vocab, 5);
        Session plain(engineOf(model));
        const auto expected = generate(plain, prompt, greedyParams(), 80);
        int64_t last = -1;
        for (const int32_t states : {1, 2, 4, 8}) {
            const auto engine = engineOf(model, engineOptions(300, 16, states));
            Session session(engine);
            EXPECT_EQ(generate(session, prompt, greedyParams(), 80, drafts(Source::NGram, 7)), expected)
                << states << " states";
            const DraftCounts counts = session.draftCounts();
            EXPECT_LE(counts.drafted, counts.steps * (states - 1));
            EXPECT_GE(counts.drafted, last);
            last = counts.drafted;
            // The prompt's state is kept if there is room for more than what a step needs.
            generate(session, prompt, greedyParams(), 1);
            if (states >= 4) {
                EXPECT_EQ(session.reusedTokens(), 39);
            }
        }
        EXPECT_GT(last, 0);
    }
}

TEST(Drafts, SessionsThatTakeTurnsDoNotTouchEachOther) {
    for (tiny::Options options : {gpuVariants()[0], predicting()[0], predicting()[2]}) {
        SCOPED_TRACE(describe(options));
        options.context = 1000;
        const Model model(options);
        const auto engine = engineOf(model, engineOptions(1000, 16, 7)), other = engineOf(model);
        std::vector<std::unique_ptr<Session>> sessions;
        std::vector<std::vector<int32_t>> expected, texts(4);
        for (unsigned i = 0; i < 4; ++i) {
            const auto prompt = repetitive(20 + 9 * i, options.vocab, i);
            const SamplingParams params = i % 2 ? sampledParams(i) : greedyParams();
            Session plain(other);
            expected.push_back(generate(plain, prompt, params, 60));
            sessions.push_back(std::make_unique<Session>(engine));
            const Source source = options.predictions && i < 2 ? Source::Prediction : Source::NGram;
            sessions.back()->start(prompt, params, nullptr, drafts(source, 1 + static_cast<int32_t>(i)));
        }
        std::mt19937 random(sharpi::testSeed(4));
        for (size_t done = 0; done < 4 * 60;) {
            const size_t i = random() % 4;
            if (texts[i].size() == 60) continue;
            texts[i].push_back(*sessions[i]->next());
            ++done;
        }
        EXPECT_EQ(texts, expected);
    }
}

TEST(Drafts, AContextIsFilledToItsEnd) {
    for (const tiny::Options& options : {gpuVariants()[0], predicting()[0], predicting()[1]}) {
        SCOPED_TRACE(describe(options));
        const Model model(options);
        for (const int64_t context : {64, 65, 100, 130}) {
            Session plain(engineOf(model, engineOptions(context))), drafting(engineOf(model, engineOptions(context)));
            const auto prompt = repetitive(40, options.vocab, 8);
            const auto expected = generate(plain, prompt, greedyParams(), 1000);
            ASSERT_EQ(static_cast<int64_t>(expected.size()), context - 40 + 1);
            for (const Source source : {Source::NGram, Source::Prediction}) {
                if (source == Source::Prediction && !options.predictions) continue;
                for (const int32_t tokens : {1, 3, 7}) {
                    EXPECT_EQ(generate(drafting, prompt, greedyParams(), 1000, drafts(source, tokens)), expected);
                    const DraftCounts counts = drafting.draftCounts();
                    EXPECT_EQ(static_cast<int64_t>(expected.size()), 1 + counts.steps + counts.accepted);
                    EXPECT_EQ(static_cast<int64_t>(drafting.tokens().size()), context);
                    EXPECT_EQ(drafting.next(), std::nullopt);
                }
            }
        }
    }
}

// Two sessions share a cache that is nearly full, so no pages are left for guesses.
TEST(Drafts, AFullCacheMeansFewerGuesses) {
    for (const tiny::Options& options : {gpuVariants()[0], predicting()[0]}) {
        SCOPED_TRACE(describe(options));
        const Model model(options);
        const auto engine = engineOf(model, engineOptions(192));
        const auto prompt = repetitive(50, options.vocab, 2);
        Session plain(engineOf(model));
        const auto expected = generate(plain, prompt, greedyParams(), 15);
        Session session(engine), neighbour(engine);
        evaluate(neighbour, randomTokens(128, options.vocab, 1), options.vocab);
        for (const Source source : {Source::NGram, Source::Prediction}) {
            if (source == Source::Prediction && !options.predictions) continue;
            // The last of these tokens is the last that its page holds.
            EXPECT_EQ(generate(session, prompt, greedyParams(), 15, drafts(source, 7)), expected);
            expectError(ErrorKind::OutOfMemory, "KV cache is full", [&] { session.next(); });
            expectError(ErrorKind::OutOfMemory, "KV cache is full", [&] { session.next(); });
            EXPECT_EQ(session.tokens().size(), 64u);
        }
    }
}

TEST(Drafts, PagesForGuessesGoBack) {
    const Model model(predicting()[0]);
    const int64_t vocab = model.options().vocab;
    Session session(engineOf(model, engineOptions(300)));
    const auto engine = engineOf(model, engineOptions(192));
    Session drafting(engine), neighbour(engine);
    const auto prompt = randomTokens(60, vocab, 2);
    const auto expected = generate(session, prompt, greedyParams(), 3);
    // The guesses reach into the next page.
    drafting.start(prompt, greedyParams(), nullptr, drafts(Source::Prediction, 7));
    EXPECT_NO_THROW(evaluate(neighbour, randomTokens(128, vocab, 1), vocab));
    for (const int32_t token : expected) EXPECT_EQ(drafting.next(), token);
}

TEST(Drafts, ThePredictionLayerDoesNotChangeTheText) {
    Totals totals;
    for (const tiny::Options& options : predicting()) {
        SCOPED_TRACE(describe(options));
        const Model model(options);
        Session plain(engineOf(model)), drafting(engineOf(model));
        const auto prompt = randomTokens(40, options.vocab, options.seed);
        const auto expected = generate(plain, prompt, greedyParams(), 50),
                   sampled = generate(plain, prompt, sampledParams(6), 50);
        for (const int32_t tokens : {1, 2, 3, 7}) {
            EXPECT_EQ(generate(drafting, prompt, greedyParams(), 50, drafts(Source::Prediction, tokens)), expected)
                << tokens << " drafts";
            totals.add(drafting.draftCounts(), 50, tokens);
            EXPECT_EQ(generate(drafting, prompt, sampledParams(6), 50, drafts(Source::Prediction, tokens)), sampled)
                << tokens << " drafts, sampled";
            totals.add(drafting.draftCounts(), 50, tokens);
            EXPECT_GT(drafting.draftCounts().drafted, 0);
        }
    }
    EXPECT_GT(totals.drafted, 1000);
}

TEST(Drafts, APredictionLayerThatKnowsIsAccepted) {
    for (const float mixed : {0.0f, 0.4f}) {
        const Model model = knowing(mixed);
        Session plain(engineOf(model)), drafting(engineOf(model));
        for (const SamplingParams& params : {greedyParams(), sampledParams(2)}) {
            const auto prompt = randomTokens(40, model.options().vocab, 4);
            const auto expected = generate(plain, prompt, params, 120);
            for (const int32_t tokens : {1, 2, 3, 7}) {
                EXPECT_EQ(generate(drafting, prompt, params, 120, drafts(Source::Prediction, tokens)), expected);
                const DraftCounts counts = drafting.draftCounts();
                if (mixed == 0) {
                    EXPECT_GE(static_cast<double>(counts.accepted), 0.95 * static_cast<double>(counts.drafted))
                        << tokens << " drafts";
                    EXPECT_LE(counts.steps, 119 / (tokens + 1) + 6);
                } else {
                    EXPECT_GT(counts.accepted, 0);
                    EXPECT_LT(counts.accepted, counts.drafted);
                }
            }
        }
    }
}

TEST(Drafts, ImpossibleOnesAreRefusedAndChangeNothing) {
    const tiny::Options options = hybrids()[0];
    const Model model(options);
    Session session(engineOf(model));
    const auto prompt = randomTokens(10, options.vocab, 1);
    evaluate(session, prompt, options.vocab);
    expectError(ErrorKind::InvalidArgument, "no prediction layer",
                [&] { session.start({1}, greedyParams(), nullptr, drafts(Source::Prediction, 1)); });
    for (const int32_t tokens : {-1, 0, 8}) {
        expectError(ErrorKind::InvalidArgument, "1 to 7",
                    [&] { session.start({1}, greedyParams(), nullptr, drafts(Source::NGram, tokens)); });
    }
    EXPECT_EQ(session.tokens(), prompt);
    expectError(ErrorKind::Internal, "before start", [&] { session.next(); });
}

// If no token may be chosen, every call that wants that token says so.
TEST(Drafts, SaysSoIfNoTokenMayBeChosen) {
    Model model(predicting()[0]);
    const int64_t vocab = model.options().vocab;
    SamplingParams none = greedyParams();
    for (int32_t token = 0; token < vocab; ++token) none.logitBias[token] = -std::numeric_limits<float>::infinity();
    for (const Source source : {Source::NGram, Source::Prediction}) {
        Session session(engineOf(model));
        const auto prompt = repetitive(20, vocab, 1);
        session.start(prompt, none, nullptr, drafts(source, 3));
        for (int i = 0; i < 2; ++i) {
            expectError(ErrorKind::InvalidArgument, "no token may be chosen", [&] { session.next(); });
            EXPECT_EQ(session.tokens(), prompt);
        }
    }
}

// A prediction layer with damaged weights drafts nothing; the text stays.
TEST(Drafts, APredictionLayerOfNaNsDraftsNothing) {
    Model model = knowing(0);
    const Model whole = model;
    const TensorInfo& t = model.tensor("blk." + std::to_string(model.options().layers) + ".nextn.hnorm.weight");
    const float nan = kPoison;
    for (size_t at = 0; at < t.bytes; at += sizeof nan) std::memcpy(&model.bytes[t.offset + at], &nan, sizeof nan);
    Session plain(engineOf(whole)), session(engineOf(model));
    const auto prompt = randomTokens(30, model.options().vocab, 2);
    EXPECT_EQ(generate(session, prompt, greedyParams(), 40, drafts(Source::Prediction, 2)),
              generate(plain, prompt, greedyParams(), 40));
    EXPECT_EQ(session.draftCounts().drafted, 0);
    EXPECT_EQ(session.draftCounts().steps, 39);
}

}  // namespace
