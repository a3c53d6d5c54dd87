// Sequences of hybrid models: many in one batch, sequences that are cut back, steps that fail. A state that does not
// belong to the sequence's tokens gives wrong answers that look right, so every answer is compared with one that was
// computed from the beginning.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "plan/cuda_kind.h"
#include "seed.h"
#include "state_marks.h"
#include "tiny_engine.h"
#include "tiny_pass.h"

namespace {

using namespace sharpi;
using namespace tiny;

std::shared_ptr<Engine> hybridEngine(const Model& model, int32_t sequences, int64_t batch = 16, int64_t context = 300) {
    EngineOptions options(cpuKind());
    options.context = context;
    options.batch = batch;
    options.threads = 2;
    options.sequences = sequences;
    return std::make_shared<Engine>(model.spec(), model.weights(), options);
}

TEST(RecurrentSessions, AnswersDoNotDependOnHowTokensAreCut) {
    for (const tiny::Options& options : hybrids()) {
        SCOPED_TRACE(describe(options));
        const Model model(options);
        const auto tokens = randomTokens(90, options.vocab, 1);
        Session whole(hybridEngine(model, 1, 90));
        const auto expected = evaluate(whole, tokens, options.vocab);
        expectMeaningful(expected, options.vocab);
        std::mt19937 random(options.seed);
        for (int round = 0; round < 4; ++round) {
            std::vector<int64_t> chunks(90, 1);
            if (round)
                for (int64_t& chunk : chunks) chunk = 1 + random() % 40;
            for (const int32_t room : {1, 4}) {
                Session cut(hybridEngine(model, room, 90));
                EXPECT_TRUE(sameBits(evaluate(cut, tokens, options.vocab, chunks), expected))
                    << "round " << round << " room " << room;
            }
        }
    }
}

// Gives prompts one after another to a session that cuts back and continues, and each of them to a fresh session.
TEST(RecurrentSessions, CuttingBackGivesTheAnswerOfABeginning) {
    for (const tiny::Options& options : hybrids()) {
        SCOPED_TRACE(describe(options));
        const Model model(options);
        for (const int32_t room : {1, 2, 8}) {
            const auto engine = hybridEngine(model, room, 32), other = hybridEngine(model, 1, 32);
            auto prompt = randomTokens(70, options.vocab, 3);
            Session used(engine);
            greedy(used, prompt, 6);
            for (const size_t changed : {69u, 68u, 64u, 5u, 0u}) {
                prompt[changed] = static_cast<int32_t>((prompt[changed] + 1) % options.vocab);
                const auto continued = greedy(used, prompt, 6);
                EXPECT_LE(used.reusedTokens(), static_cast<int64_t>(changed));
                Session fresh(other);
                EXPECT_EQ(continued, greedy(fresh, prompt, 6)) << "from token " << changed << ", room for " << room;
            }
        }
    }
}

TEST(RecurrentSessions, APromptGivenAgainIsNotComputedAgain) {
    const tiny::Options options = hybrids()[0];
    const Model model(options);
    const auto engine = hybridEngine(model, 4, 64);
    auto prompt = randomTokens(100, options.vocab, 5);
    Session session(engine);
    const auto first = greedy(session, prompt, 30);
    EXPECT_EQ(greedy(session, prompt, 30), first);
    EXPECT_EQ(session.reusedTokens(), 99);
    // A prompt that continues the answer uses the state after it.
    prompt.insert(prompt.end(), first.begin(), first.end());
    prompt.push_back(7);
    greedy(session, prompt, 1);
    EXPECT_EQ(session.reusedTokens(), 129);
}

TEST(RecurrentSessions, AFailureLeavesTheTokensAsTheyWere) {
    for (const tiny::Options& options : hybrids()) {
        SCOPED_TRACE(describe(options));
        const Model model(options);
        for (const int32_t room : {1, 3}) {
            const auto engine = hybridEngine(model, room, 32, 128), other = hybridEngine(model, 1, 32, 128);
            const auto tokens = randomTokens(100, options.vocab, 9);
            const std::vector<int32_t> head(tokens.begin(), tokens.begin() + 60),
                tail(tokens.begin() + 60, tokens.end());
            Session fresh(other), session(engine);
            const auto whole = evaluate(fresh, tokens, options.vocab);
            evaluate(session, head, options.vocab);
            for (const int32_t wrong : {-1, static_cast<int32_t>(options.vocab)}) {
                std::vector<int32_t> bad = tail;
                bad[20] = wrong;
                expectError(ErrorKind::InvalidArgument, std::to_string(wrong),
                            [&] { evaluate(session, bad, options.vocab); });
                EXPECT_EQ(session.tokens(), head);
            }
            EXPECT_TRUE(
                sameBits(evaluate(session, tail, options.vocab), {whole.begin() + 60 * options.vocab, whole.end()}));
            // A prompt with the same beginning, after a failure that lost the state.
            expectError(ErrorKind::InvalidArgument, "-5", [&] { evaluate(session, {3, -5}, options.vocab); });
            const auto again = greedy(session, tokens, 5);
            fresh.reset();
            EXPECT_EQ(again, greedy(fresh, tokens, 5));
        }
    }
}

TEST(RecurrentSessions, MoreThanThereIsRoomForAreRefusedAndOthersContinue) {
    const tiny::Options options = hybrids()[0];
    const Model model(options);
    const auto engine = hybridEngine(model, 2, 16, 300);
    const auto a = randomTokens(20, options.vocab, 1), b = randomTokens(20, options.vocab, 2);
    Session first(engine), second(engine), third(engine);
    const auto expectedA = evaluate(first, a, options.vocab);
    evaluate(second, b, options.vocab);
    expectError(ErrorKind::OutOfMemory, "recurrent state", [&] { evaluate(third, a, options.vocab); });
    EXPECT_TRUE(third.tokens().empty());
    evaluate(first, b, options.vocab);
    evaluate(second, a, options.vocab);
    second.reset();
    EXPECT_TRUE(sameBits(evaluate(third, a, options.vocab), expectedA));
}

// 64 sequences in one batch, each with a text of its own: some with one row, others with several.
TEST(RecurrentSessions, SixtyFourSequencesGetTheAnswersTheyGetAlone) {
    constexpr int kSequences = 64, kTokens = 24;
    for (const tiny::Options& options : {hybrids()[0], hybrids()[2]}) {
        SCOPED_TRACE(describe(options));
        const Model model(options);
        std::vector<std::vector<int32_t>> texts;
        std::vector<std::vector<float>> alone;
        Session session(hybridEngine(model, 1, 64, 64));
        for (int s = 0; s < kSequences; ++s) {
            texts.push_back(randomTokens(kTokens, options.vocab, 100 + static_cast<unsigned>(s)));
            session.reset();
            alone.push_back(evaluate(session, texts.back(), options.vocab));
        }
        tiny::Pass<CpuBackend> pass(model, 512, 64, KvType::BF16, kSequences * 64, 2);
        pass.kv = KvCache(pass.backend.allocator(), kvShapes(pass.spec), KvType::BF16, kSequences * 64,
                          RecurrentState(pass.backend.allocator(), recurrentShapes(pass.spec), kSequences));
        std::mt19937 random(options.seed);
        std::vector<int32_t> handles;
        std::vector<int> done(kSequences, 0);
        for (int s = 0; s < kSequences; ++s) handles.push_back(pass.kv.createSequence());
        while (*std::min_element(done.begin(), done.end()) < kTokens) {
            Batch batch;
            std::vector<std::pair<int, int>> rows;
            for (int s = 0; s < kSequences; ++s) {
                const int count =
                    std::min<int>(random() % 3 ? 1 : 1 + random() % 7, kTokens - done[static_cast<size_t>(s)]);
                if (count == 0) continue;
                pass.kv.extend(handles[static_cast<size_t>(s)], count);
                for (int i = 0; i < count; ++i) {
                    const int at = done[static_cast<size_t>(s)]++;
                    batch.add(RowKind::Prompt, texts[static_cast<size_t>(s)][static_cast<size_t>(at)], at,
                              handles[static_cast<size_t>(s)], true);
                    rows.emplace_back(s, at);
                }
            }
            std::vector<float> logits(rows.size() * static_cast<size_t>(options.vocab), kPoison);
            pass.forward.run(batch, logits.data());
            for (size_t i = 0; i < rows.size(); ++i) {
                const auto [s, at] = rows[i];
                ASSERT_EQ(std::memcmp(&logits[i * static_cast<size_t>(options.vocab)],
                                      &alone[static_cast<size_t>(s)][static_cast<size_t>(at * options.vocab)],
                                      static_cast<size_t>(options.vocab) * sizeof(float)),
                          0)
                    << "sequence " << s << " at " << at;
            }
        }
    }
}

// Batches that keep the state after each of their last rows, as the verification of drafts does. The sequence is cut
// back to such a state and continues with other tokens.
TEST(RecurrentSessions, RowsOfABatchCanBeTakenBack) {
    for (const tiny::Options& options : hybrids()) {
        SCOPED_TRACE(describe(options));
        const Model model(options);
        const auto text = randomTokens(40, options.vocab, 8);
        Session session(hybridEngine(model, 1, 64));
        const auto expected = evaluate(session, text, options.vocab);
        tiny::Pass<CpuBackend> pass(model, 16, 64, KvType::BF16, 128, 2);
        const int32_t handle = pass.kv.createSequence();
        std::mt19937 random(sharpi::testSeed(3));
        for (int64_t done = 0; done < 40;) {
            const auto right = std::min<int64_t>(1 + random() % 4, 40 - done),
                       wrong = static_cast<int64_t>(random() % 4);
            Batch batch;
            for (int64_t i = 0; i < right + wrong; ++i) {
                const int32_t token =
                    i < right ? text[static_cast<size_t>(done + i)] : static_cast<int32_t>(random() % options.vocab);
                batch.add(RowKind::Prompt, token, static_cast<int32_t>(done + i), handle, true);
            }
            pass.kv.extend(handle, right + wrong, lastMarks(done, done + right + wrong, wrong));
            std::vector<float> logits(batch.logitRows.size() * static_cast<size_t>(options.vocab), kPoison);
            pass.forward.run(batch, logits.data());
            ASSERT_EQ(std::memcmp(logits.data(), &expected[static_cast<size_t>(done * options.vocab)],
                                  static_cast<size_t>(right * options.vocab) * sizeof(float)),
                      0)
                << "after " << done;
            done += right;
            ASSERT_EQ(pass.kv.truncate(handle, done), done);
        }
    }
}

TEST(RecurrentSessions, TheGpuRefusesWhatItHasNoKernelsForBeforeLoading) {
    for (const tiny::Options& options : cpuHybrids()) {
        SCOPED_TRACE(describe(options));
        expectError(ErrorKind::InvalidArgument, "cannot run", [&] { cudaKind().requireCanRun(Model(options).spec()); });
    }
    for (const auto& models : {gpuVariants(), gpuHybrids(), mambas()}) {
        for (const tiny::Options& options : models)
            EXPECT_NO_THROW(cudaKind().requireCanRun(Model(options).spec())) << describe(options);
    }
}

TEST(RecurrentSessions, ACacheThatDoesNotFitTheModelIsRefused) {
    const Model model(hybrids()[0]);
    tiny::Pass<CpuBackend> pass(model, 16, 64, KvType::BF16, 128, 1);
    KvCache without(pass.backend.allocator(), kvShapes(pass.spec), KvType::BF16, 128);
    expectError(ErrorKind::Internal, "states",
                [&] { ForwardPass(pass.spec, pass.weights, pass.backend, without, pass.limits); });
    // A batch must have exactly the rows by which the cache was extended.
    const int32_t handle = pass.kv.createSequence();
    pass.kv.extend(handle, 3);
    for (const int rows : {2, 4}) {
        Batch batch;
        for (int i = 0; i < rows; ++i) batch.add(RowKind::Prompt, 1, i, handle, false);
        expectError(ErrorKind::Internal, "rows of sequence", [&] { pass.forward.run(batch, nullptr); });
    }
    expectError(ErrorKind::InvalidArgument, "sequences", [&] { hybridEngine(model, 0); });
}

}  // namespace
