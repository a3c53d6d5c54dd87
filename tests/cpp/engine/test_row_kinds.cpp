// Sessions on a backend with two arithmetics. A token's bits depend on the tokens up to it and their kinds, and on
// nothing else that happened. And a session computes again only what this requires.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "seed.h"
#include "tiny_pass.h"
#include "two_arithmetics.h"

namespace {

using namespace sharpi;
using namespace tiny;

constexpr int64_t kContext = 700;
using Rows = std::pair<int64_t, int64_t>;  // prompt rows, decode rows

// A model, and the positions at which its prompt rows may begin: multiples of `step`.
struct Case {
    Model model;
    int64_t step;
    std::string text() const { return describe(model.options()) + ", step " + std::to_string(step); }
    int64_t vocab() const { return model.options().vocab; }
    // Computes the expected answers: a whole sequence at once, one sequence at a time.
    std::shared_ptr<Engine> reference() const {
        if (!_reference) _reference = load(kContext).engine;
        return _reference;
    }
    TwoArithmeticsEngine load(int64_t batch, int32_t sequences = 9) const {
        return TwoArithmeticsEngine(model, engineOptions(kContext, batch, sequences), step);
    }
    mutable std::shared_ptr<Engine> _reference = nullptr;
};

Case caseOf(tiny::Options options, int64_t step) {
    options.context = 1000;
    return {Model(options), step};
}

std::vector<Case> cases() {
    tiny::Options experts;
    experts.architecture = "qwen3moe";
    return {caseOf(gpuVariants()[0], 1),          caseOf(experts, 1),
            caseOf(predicting()[0], kPromptTile), caseOf(predicting()[2], kPromptTile),
            caseOf(hybrids()[1], kPromptTile),    caseOf(hybrids()[0], 1)};
}

std::vector<int32_t> joined(std::vector<int32_t> tokens, const std::vector<int32_t>& more) {
    tokens.insert(tokens.end(), more.begin(), more.end());
    return tokens;
}

std::vector<float> decoded(Session& session, const std::vector<int32_t>& tokens, int64_t vocab) {
    return evaluate(session, tokens, vocab, {}, RowKind::Decode);
}

// Computes a sequence at once, its first `prompt` tokens as prompt rows. Returns the logits of the rows from `from` on.
std::vector<float> cold(const Case& c, const std::vector<int32_t>& tokens, int64_t prompt, size_t from) {
    Session session(c.reference());
    const auto middle = tokens.begin() + prompt;
    std::vector<float> all;
    if (prompt) all = evaluate(session, {tokens.begin(), middle}, c.vocab());
    if (middle != tokens.end()) {
        const auto rest = decoded(session, {middle, tokens.end()}, c.vocab());
        all.insert(all.end(), rest.begin(), rest.end());
    }
    all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(from * static_cast<size_t>(c.vocab())));
    return all;
}

TEST(RowKinds, TheBackendShowsThemAndTheCpuDoesNot) {
    for (const Case& c : cases()) {
        SCOPED_TRACE(c.text());
        const auto tokens = randomTokens(20, c.vocab(), 1);
        EXPECT_FALSE(sameBits(cold(c, tokens, 20, 0), cold(c, tokens, 0, 0)));
        EXPECT_FALSE(sameBits(cold(c, tokens, 15, 19), cold(c, tokens, 10, 19)))
            << "a token shows the kinds of the tokens before it";
        Session prompt(engineOf(c.model)), decode(engineOf(c.model));
        EXPECT_TRUE(sameBits(evaluate(prompt, tokens, c.vocab()), decoded(decode, tokens, c.vocab())));
    }
}

TEST(RowKinds, CutsAndBatchesDoNotShow) {
    std::mt19937 random(sharpi::testSeed(1));
    for (const Case& c : cases()) {
        SCOPED_TRACE(c.text());
        for (const int64_t length : {1, 2, 9, 63, 64, 65, 128, 200, 300}) {
            const auto prompt = randomTokens(length, c.vocab(), static_cast<unsigned>(length)),
                       answer = randomTokens(23, c.vocab(), 3);
            const auto expected = cold(c, joined(prompt, answer), length, 0);
            for (int round = 0; round < 4; ++round) {
                const auto loaded =
                    c.load(c.step + static_cast<int64_t>(random() % 100), 1 + static_cast<int32_t>(random() % 3));
                std::vector<int64_t> cuts(400);
                for (int64_t& cut : cuts) cut = 1 + static_cast<int64_t>(random() % (round ? 90 : 3));
                Session session(loaded.engine);
                auto got = evaluate(session, prompt, c.vocab(), cuts);
                EXPECT_EQ(loaded.rowsSeen(), Rows(length, 0));
                const auto rest = evaluate(session, answer, c.vocab(), cuts, RowKind::Decode);
                EXPECT_EQ(loaded.rowsSeen(), Rows(0, 23));
                got.insert(got.end(), rest.begin(), rest.end());
                EXPECT_TRUE(sameBits(got, expected)) << length << " tokens, round " << round;
            }
        }
    }
}

// Appending tokens in several evaluations gives the same bits as appending them in one. A recurrent sequence computes
// its last, incomplete tile again.
TEST(RowKinds, PromptRowsContinuePromptRows) {
    for (const Case& c : cases()) {
        SCOPED_TRACE(c.text());
        const auto loaded = c.load(128);
        const auto tokens = randomTokens(320, c.vocab(), 2);
        const auto expected = cold(c, tokens, 320, 0);
        Session session(loaded.engine);
        int64_t done = 0;
        for (const int64_t count : {1, 62, 1, 1, 35, 28, 64, 128}) {
            const auto got = evaluate(session, {tokens.begin() + done, tokens.begin() + done + count}, c.vocab());
            const auto first = expected.begin() + done * c.vocab();
            EXPECT_TRUE(sameBits(got, {first, first + count * c.vocab()})) << count << " after " << done;
            EXPECT_EQ(loaded.rowsSeen(), Rows(done % c.step + count, 0)) << count << " after " << done;
            done += count;
        }
    }
}

TEST(RowKinds, PromptRowsTurnDecodeRowsIntoPromptRows) {
    for (const Case& c : cases()) {
        SCOPED_TRACE(c.text());
        for (const int64_t batch : {64, 77, 256}) {
            const auto loaded = c.load(batch);
            const auto tokens = randomTokens(250, c.vocab(), 2);
            const std::vector<int32_t> prompt(tokens.begin(), tokens.begin() + 100),
                answer(tokens.begin() + 100, tokens.begin() + 140);
            Session session(loaded.engine);
            evaluate(session, prompt, c.vocab());
            const auto got = decoded(session, answer, c.vocab());
            EXPECT_TRUE(sameBits(got, cold(c, joined(prompt, answer), 100, 100)));
            loaded.rowsSeen();
            const auto more = evaluate(session, {tokens.begin() + 140, tokens.end()}, c.vocab());
            EXPECT_TRUE(sameBits(more, cold(c, tokens, 250, 140)));
            EXPECT_EQ(loaded.rowsSeen(), Rows(100 % c.step + 150, 0));
            EXPECT_EQ(session.tokens(), tokens);
        }
    }
}

// With one arithmetic for both kinds, nothing is computed again.
TEST(RowKinds, CostNothingOnABackendWithOneArithmetic) {
    for (const Case& c : cases()) {
        SCOPED_TRACE(c.text());
        WatchedEngine watched(c.model, engineOptions(kContext, 64));
        Session session(watched.engine);
        const auto tokens = randomTokens(200, c.vocab(), 2);
        evaluate(session, {tokens.begin(), tokens.begin() + 100}, c.vocab());
        decoded(session, {tokens.begin() + 100, tokens.begin() + 150}, c.vocab());
        evaluate(session, {tokens.begin() + 150, tokens.begin() + 170}, c.vocab());
        generate(session, tokens, greedyParams(), 1);
        EXPECT_EQ(session.reusedTokens(), 170);
        int64_t rows = 0;
        for (const auto& [pass, batch] : watched.backend->seen) rows += pass == sharpi::Pass::Model ? batch.size() : 0;
        EXPECT_EQ(rows, 200);
    }
}

bool isShort(int64_t prompt) { return prompt < kPromptTile; }

// The tokens that the session holds of the beginning of the text, up to its last token.
int64_t heldOf(const Session& session, const std::vector<int32_t>& text) {
    const auto held = session.tokens();
    const size_t most = std::min(held.size(), text.size() - 1);
    return std::mismatch(held.begin(), held.begin() + static_cast<std::ptrdiff_t>(most), text.begin()).first -
           held.begin();
}

// The number of tokens of the last prompt that a turn reuses: all of them. A recurrent sequence reuses the part whose
// state was kept. If the prompt ended where prompt rows may begin, the state at its end may still be there.
int64_t reusable(const TwoArithmeticsEngine& loaded, int64_t prompt, int64_t reused) {
    if (prompt == 0 || loaded.engine->stateBytes() == 0) return prompt;
    const int64_t step = loaded.backend->promptStep();
    return prompt % step == 0 && reused == prompt ? prompt : (prompt - 1) / step * step;
}

// Compares ten turns with cold starts, and checks what each turn costs. It computes the last answer again as a prompt;
// a recurrent sequence also computes the tokens again that follow the last whole tile before the prompt's last token.
// As long as the whole text is short, all rows are decode rows, and only a recurrent sequence computes any again.
TEST(RowKinds, AConversationGetsTheAnswersOfColdStarts) {
    std::mt19937 random(sharpi::testSeed(7));
    for (const Case& c : cases()) {
        SCOPED_TRACE(c.text());
        for (const Source source : {Source::Off, Source::NGram, Source::Prediction}) {
            if (source == Source::Prediction && !c.model.options().predictions) continue;
            const DraftOptions options = drafts(source, 3);
            const auto loaded = c.load(128);
            Session session(loaded.engine);
            std::vector<int32_t> text;
            int64_t before = 0;
            for (unsigned turn = 0; turn < 10; ++turn) {
                auto more = repetitive(1 + static_cast<int64_t>(random() % 40), c.vocab(), turn);
                if (turn == 5) more.resize((64 - text.size() % 64) % 64 + 64, 7);  // a prompt that ends with a tile
                text = joined(text, more);
                const auto size = static_cast<int64_t>(text.size());
                const SamplingParams params = turn % 2 ? greedyParams() : sampledParams(turn);
                loaded.rowsSeen();
                const int64_t held = heldOf(session, text);
                const int length = turn % 3 ? 12 : 3;  // after 3 tokens the state at the prompt's end is still there
                const auto answer = generate(session, text, params, length, options);
                const auto [prompt, decode] = loaded.rowsSeen();
                const int64_t reused = session.reusedTokens(), asDecode = isShort(size) ? size - reused : 0;
                if (!isShort(size)) {
                    EXPECT_EQ(reused, reusable(loaded, before, reused)) << "turn " << turn;
                } else if (loaded.engine->stateBytes() == 0) {
                    EXPECT_EQ(reused, held) << "turn " << turn;
                }
                EXPECT_EQ(prompt + asDecode, size - reused);
                const DraftCounts counts = session.draftCounts();
                EXPECT_EQ(decode - asDecode, counts.steps + counts.drafted);
                if (source == Source::Off) {
                    EXPECT_EQ(decode - asDecode, length - 1);
                }
                Session fresh(c.reference());
                EXPECT_EQ(answer, generate(fresh, text, params, length)) << "turn " << turn;
                EXPECT_EQ(session.tokens(), fresh.tokens());
                EXPECT_TRUE(sameBits(decoded(session, {3, 4}, c.vocab()), decoded(fresh, {3, 4}, c.vocab())))
                    << "turn " << turn;
                text = joined(text, answer);
                before = isShort(size) ? 0 : size;
            }
        }
    }
}

TEST(RowKinds, AShortPromptOfAGenerationIsMadeOfDecodeRows) {
    for (const Case& c : cases()) {
        SCOPED_TRACE(c.text());
        const auto loaded = c.load(256);
        for (const int64_t length : {1, 9, 63, 64}) {
            const auto prompt = randomTokens(length, c.vocab(), static_cast<unsigned>(length));
            Session session(loaded.engine);
            loaded.rowsSeen();
            const auto answer = generate(session, prompt, greedyParams(), 4);
            EXPECT_EQ(loaded.rowsSeen(), length < 64 ? Rows(0, length + 3) : Rows(64, 3));
            const auto text = joined(prompt, {answer.begin(), answer.begin() + 3});
            EXPECT_EQ(session.tokens(), text);
            EXPECT_TRUE(sameBits(decoded(session, {5}, c.vocab()),
                                 cold(c, joined(text, {5}), length < 64 ? 0 : 64, text.size())))
                << length << " tokens";
        }
    }
}

// A prompt that is given again reuses only prompt rows, even if the decode rows after them are the same tokens.
TEST(RowKinds, APromptGivenAgainReusesPromptRows) {
    for (const Case& c : cases()) {
        SCOPED_TRACE(c.text());
        const auto loaded = c.load(256);
        Session session(loaded.engine);
        for (const int64_t length : {64, 65, 128, 190}) {
            const auto prompt = randomTokens(length, c.vocab(), static_cast<unsigned>(length));
            const auto answer = generate(session, prompt, greedyParams(), 30);
            loaded.rowsSeen();
            EXPECT_EQ(generate(session, prompt, greedyParams(), 30), answer);
            EXPECT_EQ(session.reusedTokens(), (length - 1) / c.step * c.step);
            EXPECT_EQ(loaded.rowsSeen(), Rows(length - session.reusedTokens(), 29));
            // The answer is part of the prompt now, but it was computed as decode rows.
            generate(session, joined(prompt, answer), greedyParams(), 1);
            EXPECT_LE(session.reusedTokens(), length);
            EXPECT_GE(session.reusedTokens(), (length - 1) / c.step * c.step);
        }
    }
}

// A step that has to overwrite a state loses it if the step fails. The tokens are then computed again as the kinds that
// they were.
TEST(RowKinds, LostTokensAreComputedAgainAsTheirKinds) {
    for (const Case& c : cases()) {
        SCOPED_TRACE(c.text());
        for (const int32_t states : {1, 2}) {
            const auto loaded = c.load(128, states);
            const bool recurrent = loaded.engine->stateBytes() > 0;
            Session session(loaded.engine), neighbour(loaded.engine);
            if (states == 2) evaluate(neighbour, {1, 2, 3}, c.vocab());
            const auto prompt = randomTokens(150, c.vocab(), 1), answer = randomTokens(40, c.vocab(), 2);
            evaluate(session, prompt, c.vocab());
            decoded(session, answer, c.vocab());
            for (int round = 0; round < 2; ++round) {
                loaded.backend->failIn = 2;  // within the pass
                EXPECT_THROW(decoded(session, {5}, c.vocab()), std::runtime_error);
                EXPECT_EQ(session.tokens(), joined(prompt, answer));
            }
            loaded.rowsSeen();
            EXPECT_TRUE(
                sameBits(decoded(session, {5}, c.vocab()), cold(c, joined(joined(prompt, answer), {5}), 150, 190)));
            EXPECT_EQ(loaded.rowsSeen(), recurrent ? Rows(150, 41) : Rows(0, 1));
        }
    }
}

// Prompt rows would turn decode rows into prompt rows. If they fail or are interrupted, the decode rows stay what they
// were.
TEST(RowKinds, APromptThatFailsLeavesTheKindsAsTheyWere) {
    for (const Case& c : cases()) {
        SCOPED_TRACE(c.text());
        const auto prompt = randomTokens(100, c.vocab(), 1), answer = randomTokens(150, c.vocab(), 2),
                   more = randomTokens(200, c.vocab(), 3);
        const auto held = joined(prompt, answer), all = joined(held, more);
        const auto expected = cold(c, joined(held, {5}), 100, 250);
        for (const bool fails : {true, false}) {
            for (int piece = 1; piece <= 6; ++piece) {
                const auto loaded = c.load(64);
                Session session(loaded.engine);
                evaluate(session, prompt, c.vocab());
                decoded(session, answer, c.vocab());
                int asked = 0;
                const Interrupted interrupted = [&] {
                    if (++asked < piece) return false;
                    if (fails) loaded.backend->failIn = 2;
                    return !fails;
                };
                EXPECT_THROW(session.evaluate(more, RowKind::Prompt, nullptr, {}, interrupted), std::runtime_error);
                loaded.backend->failIn = 0;
                const auto tokens = session.tokens();
                const auto kept = static_cast<int64_t>(tokens.size());
                if (kept == 250) {
                    EXPECT_TRUE(sameBits(decoded(session, {5}, c.vocab()), expected)) << "piece " << piece;
                    continue;
                }
                EXPECT_EQ(tokens, std::vector<int32_t>(all.begin(), all.begin() + kept));
                EXPECT_GT(piece, 3);
                EXPECT_TRUE(
                    sameBits(decoded(session, {5}, c.vocab()), cold(c, joined(tokens, {5}), kept, tokens.size())))
                    << "piece " << piece;
            }
        }
    }
}

// Uses two sessions in turn, in all ways and with failures, and compares each with a sequence that is computed at once.
class Use {
public:
    Use(const Case& c, int64_t batch, int32_t states, uint32_t seed)
        : _case(c), _loaded(c.load(batch, states)), _random(seed) {
        for (int i = 0; i < (states > 1 ? 2 : 1); ++i)
            _all.push_back({std::make_unique<Session>(_loaded.engine), {}, 0});
    }
    int failures = 0, checked = 0;

    void act() {
        One& one = _all[_random() % _all.size()];
        const unsigned action = _random() % 8;
        if (one.tokens.size() > 200 || action == 7) {
            one.session->reset();
            one.tokens.clear();
            one.prompt = 0;
        } else if (action < 3) {
            append(one, RowKind::Prompt, 1 + _random() % 90);
        } else if (action < 5) {
            append(one, RowKind::Decode, 1 + _random() % 20);
        } else {
            generateSome(one);
        }
        ASSERT_EQ(one.session->tokens(), one.tokens);
    }

private:
    struct One {
        std::unique_ptr<Session> session;
        std::vector<int32_t> tokens;
        int64_t prompt;
    };
    template <typename Call> bool fails(const Call& call) {
        if (_random() % 3 == 0) _loaded.backend->failIn = 1 + static_cast<int>(_random() % 6);
        try {
            call();
            _loaded.backend->failIn = 0;
            return false;
        } catch (const std::runtime_error& e) {
            const std::string what = e.what();
            if (what != "told to fail" && what != "interrupted") throw;
        }
        _loaded.backend->failIn = 0;
        ++failures;
        return true;
    }
    void append(One& one, RowKind kind, int64_t count) {
        const auto more = randomTokens(count, _case.vocab(), _random());
        std::vector<int64_t> cuts(_random() % 9);
        for (int64_t& cut : cuts) cut = 1 + static_cast<int64_t>(_random() % 70);
        const auto asks = static_cast<int>(_random() % 8);
        int asked = 0;
        std::vector<float> got(more.size() * static_cast<size_t>(_case.vocab()), kPoison);
        const auto all = joined(one.tokens, more);
        const bool failed =
            fails([&] { one.session->evaluate(more, kind, got.data(), cuts, [&] { return ++asked == asks; }); });
        const auto tokens = one.session->tokens();
        ASSERT_GE(tokens.size(), one.tokens.size());
        ASSERT_EQ(tokens, std::vector<int32_t>(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(tokens.size())));
        if (kind == RowKind::Prompt && tokens.size() > one.tokens.size())
            one.prompt = static_cast<int64_t>(tokens.size());
        const size_t before = one.tokens.size();
        one.tokens = tokens;
        if (failed) return;
        ASSERT_EQ(tokens, all);
        ASSERT_TRUE(sameBits(got, cold(_case, tokens, one.prompt, before)));
        ++checked;
    }
    void generateSome(One& one) {
        auto prompt = one.tokens;
        if (_random() % 3 == 0) prompt.resize(_random() % (prompt.size() + 1));
        prompt = joined(prompt, repetitive(1 + static_cast<int64_t>(_random() % 30), _case.vocab(), _random() % 3));
        const SamplingParams params = _random() % 2 ? greedyParams() : sampledParams(_random());
        const Source sources[] = {Source::Off, Source::NGram, Source::Prediction};
        const DraftOptions options = drafts(sources[_random() % (_case.model.options().predictions ? 3 : 2)],
                                            1 + static_cast<int32_t>(_random() % 7));
        const bool failed = fails([&] { one.session->start(prompt, params, nullptr, options); });
        one.tokens = one.session->tokens();
        one.prompt = isShort(static_cast<int64_t>(prompt.size())) ? 0 : static_cast<int64_t>(one.tokens.size());
        ASSERT_LE(one.tokens.size(), prompt.size());
        ASSERT_TRUE(std::equal(one.tokens.begin(), one.tokens.end(), prompt.begin()));
        if (failed) return;
        ASSERT_EQ(one.tokens, prompt);
        const auto expected = [&] {
            Session fresh(_case.reference());
            return generate(fresh, prompt, params, 15);
        }();
        const size_t count = 1 + _random() % 15;
        for (size_t i = 0; i < count; ++i) {
            std::optional<int32_t> token;
            while (fails([&] { token = one.session->next(); })) ASSERT_EQ(one.session->tokens(), one.tokens);
            ASSERT_EQ(token, expected[i]) << "token " << i;
            if (i) one.tokens.push_back(expected[i - 1]);
            ASSERT_EQ(one.session->tokens(), one.tokens);
        }
        ++checked;
    }

    const Case& _case;
    TwoArithmeticsEngine _loaded;
    std::mt19937 _random;
    std::vector<One> _all;
};

TEST(RowKinds, NothingThatHappenedBeforeShows) {
    unsigned seed = 0;
    for (const Case& c : cases()) {
        for (const int32_t states : {1, 2, 3, 12}) {
            const int64_t batch = std::vector<int64_t>{64, 100, 256}[seed % 3] - (c.step == 1 ? 50 : 0);
            SCOPED_TRACE(c.text() + ", " + std::to_string(states) + " states, batch " + std::to_string(batch));
            Use use(c, batch, states, sharpi::testSeed(++seed));
            for (int i = 0; i < 70; ++i) {
                use.act();
                if (::testing::Test::HasFatalFailure()) return;
            }
            EXPECT_GT(use.failures, 5);
            EXPECT_GT(use.checked, 20);
        }
    }
}

TEST(RowKinds, ThePredictionLayersRowsAreOfTheKindOfTheRowsBefore) {
    for (const Case& c : {caseOf(predicting()[0], kPromptTile), caseOf(predicting()[2], 1)}) {
        SCOPED_TRACE(c.text());
        const auto loaded = c.load(128);
        Session session(loaded.engine);
        generate(session, randomTokens(100, c.vocab(), 1), greedyParams(), 20, drafts(Source::Prediction, 3));
        decoded(session, {1, 2, 3}, c.vocab());
        evaluate(session, {4, 5}, c.vocab());
        const auto& seen = loaded.backend->seen;
        int behindPrompt = 0, behindDecode = 0, again = 0;
        for (size_t i = 1; i < seen.size(); ++i) {
            const Batch &batch = seen[i].second, &before = seen[i - 1].second;
            if (seen[i].first == sharpi::Pass::Draft) {
                EXPECT_EQ(batch.hasPromptRows(), before.hasPromptRows());
                EXPECT_TRUE(batch.decodeRows == 0 || !batch.hasPromptRows());
                ++(batch.hasPromptRows() ? behindPrompt : behindDecode);
            } else if (seen[i].first == sharpi::Pass::DraftAgain) {
                EXPECT_EQ(batch.decodeRows, 1);
                ++again;
            }
        }
        EXPECT_GT(behindPrompt, 1);
        EXPECT_GT(behindDecode, 5);
        EXPECT_GT(again, 5);
    }
}

TEST(RowKinds, ImpossibleBatchesAreRefused) {
    const Case c = caseOf(hybrids()[0], kPromptTile);
    tiny::Pass<TwoArithmetics> pass(c.model, 64, 200, KvType::BF16, 256, kPromptTile);
    const int32_t handle = pass.kv.createSequence(), other = pass.kv.createSequence();
    const auto batchOf = [&](int64_t decode, int64_t prompt, int32_t promptSequence) {
        Batch batch;
        for (int64_t i = 0; i < decode; ++i) batch.add(RowKind::Decode, 1, static_cast<int32_t>(i), handle, false);
        for (int64_t i = 0; i < prompt; ++i) {
            const int64_t position = promptSequence == handle ? decode + i : i;
            batch.add(RowKind::Prompt, 1, static_cast<int32_t>(position), promptSequence, false);
        }
        return batch;
    };
    pass.kv.extend(handle, 9);
    pass.kv.extend(other, 3);
    EXPECT_NO_THROW(pass.forward.run(batchOf(9, 3, other), nullptr));
    pass.kv.truncate(handle, 0);
    pass.kv.extend(handle, 10);
    expectError(ErrorKind::Internal, "10 decode rows, the backend takes 9",
                [&] { pass.forward.run(batchOf(10, 0, other), nullptr); });
    expectError(ErrorKind::Internal, "decode rows and prompt rows of sequence",
                [&] { pass.forward.run(batchOf(4, 6, handle), nullptr); });
    for (const int64_t impossible : {-1, 3}) {
        Batch batch = batchOf(0, 2, handle);
        batch.decodeRows = impossible;
        expectError(ErrorKind::Internal, "decode rows", [&] { pass.forward.run(batch, nullptr); });
    }
    Batch batch = batchOf(0, 1, handle);
    EXPECT_THROW(batch.add(RowKind::Decode, 1, 0, other, false), Error);
}

TEST(RowKinds, AFastGpuTakesAtLeastATileOfRows) {
    const Case c = caseOf(predicting()[0], kPromptTile);
    EngineOptions options = engineOptions(300, 16);
    options.device.kind = &cudaKind();
    TwoArithmeticsEngine loaded(c.model, options, kPromptTile);
    EXPECT_EQ(loaded.engine->options().batch, 64);
    EXPECT_EQ(engineLimits(c.model.spec(), c.model.weights()->tensors(), options).maxRows, 64);
    // Loading rehearsed a prompt, a step, and a step with a draft.
    std::vector<Rows> rehearsed;
    for (const auto& [pass, batch] : loaded.backend->seen) {
        if (pass == sharpi::Pass::Model) rehearsed.emplace_back(batch.size() - batch.decodeRows, batch.decodeRows);
    }
    EXPECT_EQ(rehearsed, (std::vector<Rows>{{64, 0}, {0, 1}, {0, 2}}));
    options.context = 40;
    EXPECT_EQ(TwoArithmeticsEngine(c.model, options, kPromptTile).engine->options().batch, 40);
    options.prompt = PromptMode::Exact;
    EXPECT_EQ(batchRows(options), 16);
    options.prompt = PromptMode::Fast;
    options.device.kind = &cpuKind();
    EXPECT_EQ(batchRows(options), 16);
}

// The cache has room for many sequences, and a batch for rows of several: a rehearsal has one sequence.
TEST(RowKinds, ARehearsalStaysWithinTheContext) {
    const Case c = caseOf(predicting()[0], kPromptTile);
    for (const PromptMode prompt : {PromptMode::Fast, PromptMode::Exact}) {
        EngineOptions options = engineOptions(100, 512);
        options.device.kind = &cudaKind();
        options.cacheTokens = 1000;
        options.prompt = prompt;
        TwoArithmeticsEngine loaded(c.model, options, kPromptTile);
        EXPECT_EQ(loaded.engine->options().batch, 512);
        std::vector<int64_t> rehearsed;
        for (const auto& [pass, batch] : loaded.backend->seen)
            if (pass == sharpi::Pass::Model) rehearsed.push_back(batch.size());
        EXPECT_EQ(rehearsed, (std::vector<int64_t>{100, 1, 2}));
    }
}

}  // namespace
