// Sessions that draft, as their callers see them: in any order of calls, and after any failure, no caller can see that
// the cache is ahead. Also which rows the prediction layer computes.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "draft_world.h"
#include "seed.h"

namespace {

using namespace sharpi;
using namespace tiny;

// Makes the same calls to a session that drafts, and whose steps fail now and then, and to one that does neither.
class Pair {
public:
    Pair(const Model& model, const EngineOptions& options, unsigned seed)
        : _watched(model, options),
          _a(_watched.engine),
          _b(engineOf(model, options)),
          _random(sharpi::testSeed(seed)),
          _vocab(model.options().vocab),
          _hybrid(_watched.engine->stateBytes() > 0),
          _predicts(model.options().predictions > 0) {}
    int failures = 0, steps = 0, startedAhead = 0, evaluatedAhead = 0;
    Totals totals;

    void act() {
        const unsigned action = _random() % 10;
        const DraftCounts counts = _a.draftCounts();
        const bool ahead = _started && _handed < 1 + counts.steps + counts.accepted;
        if (_b.tokens().size() > 150 || (action == 4 && _random() % 4 == 0)) return reset();
        if (action < 4) {
            const bool evaluates = action < 2 && _started;
            if (ahead) ++(evaluates ? evaluatedAhead : startedAhead);
            if (evaluates) evaluateSome();
            else start();
        } else if (_started) {
            generateSome();
        }
        ASSERT_EQ(_a.tokens(), _b.tokens());
    }

private:
    // Makes a call that may fail at first. The session then holds at least `least` tokens, and a beginning of `most`.
    template <typename Call> void tried(const std::vector<int32_t>& most, size_t least, const Call& call) {
        if (_random() % 3 == 0) _watched.backend->failIn = 1 + static_cast<int>(_random() % 8);
        try {
            call();
        } catch (const std::runtime_error& e) {
            if (std::string(e.what()) != "told to fail") throw;
            ++failures;
            const auto after = _a.tokens();
            ASSERT_GE(after.size(), least);
            ASSERT_LE(after.size(), most.size());
            ASSERT_TRUE(std::equal(after.begin(), after.end(), most.begin()));
            _watched.backend->failIn = 0;
            call();
        }
        _watched.backend->failIn = 0;
    }
    void start() {
        auto prompt = _b.tokens();
        prompt.resize(_random() % (prompt.size() + 1));
        const auto more = repetitive(1 + static_cast<int64_t>(_random() % 15), _vocab, _random() % 3);
        prompt.insert(prompt.end(), more.begin(), more.end());
        const SamplingParams params = _random() % 2 ? greedyParams() : sampledParams(_random());
        const Source sources[] = {Source::Off, Source::NGram, Source::Prediction};
        const DraftOptions options =
            drafts(sources[_random() % (_predicts ? 3 : 2)], 1 + static_cast<int32_t>(_random() % 7));
        _b.start(prompt, params, nullptr);
        tried(prompt, 0, [&] { _a.start(prompt, params, nullptr, options); });
        if (!_hybrid && failures == 0) {
            EXPECT_EQ(_a.reusedTokens(), _b.reusedTokens());
        }
        _started = true;
        _handed = 0;
    }
    void generateSome() {
        for (unsigned i = _random() % 20; i > 0; --i) {
            const auto expected = _b.next();
            const auto before = _a.tokens();
            std::optional<int32_t> token;
            tried(before, before.size(), [&] { token = _a.next(); });
            ASSERT_EQ(token, expected);
            ASSERT_EQ(_a.tokens(), _b.tokens());
            ++steps;
            ++_handed;
        }
        const DraftCounts counts = _a.draftCounts();
        totals.drafted += counts.drafted;
        totals.accepted += counts.accepted;
    }
    void evaluateSome() {
        const auto tokens = randomTokens(1 + _random() % 12, _vocab, _random());
        const auto expected = evaluate(_b, tokens, _vocab);
        const auto before = _a.tokens();
        std::vector<float> got;
        tried(before, before.size(), [&] { got = evaluate(_a, tokens, _vocab); });
        EXPECT_TRUE(sameBits(got, expected));
        _started = false;
    }
    void reset() {
        _a.reset();
        _b.reset();
        _started = false;
    }

    WatchedEngine _watched;
    Session _a, _b;
    std::mt19937 _random;
    int64_t _vocab;
    int64_t _handed = 0;
    bool _hybrid, _predicts, _started = false;
};

TEST(DraftSessions, NothingThatACallerSeesTellsOfThem) {
    std::vector<Model> all;
    for (const tiny::Options& options : predicting()) all.emplace_back(options);
    all.emplace_back(gpuVariants()[0]);
    tiny::Options experts;
    experts.architecture = "qwen3moe";
    all.emplace_back(experts);
    all.push_back(knowing(0));  // guesses are mostly right here
    all.push_back(knowing(0.4f));
    int startedAhead = 0, evaluatedAhead = 0;
    for (const Model& model : all) {
        const tiny::Options& options = model.options();
        for (const int32_t states : {1, 3, 9}) {
            if (states > 1 && !options.predictions) continue;
            SCOPED_TRACE(describe(options) + ", " + std::to_string(states) + " states");
            Pair pair(model, engineOptions(200, 16, states), options.seed + static_cast<unsigned>(states));
            for (int i = 0; i < 60; ++i) {
                pair.act();
                if (::testing::Test::HasFatalFailure()) return;
            }
            EXPECT_GT(pair.steps, 100);
            EXPECT_GT(pair.failures, 5);
            if (states > 1 || !options.predictions) {
                EXPECT_GT(pair.totals.drafted, 20);
            }
            startedAhead += pair.startedAhead;
            evaluatedAhead += pair.evaluatedAhead;
        }
    }
    EXPECT_GT(startedAhead, 10) << "the cache was hardly ever ahead";
    EXPECT_GT(evaluatedAhead, 10) << "the cache was hardly ever ahead";
}

// Checks each pass of the prediction layer against the pass before it. Returns the token that follows each row, as the
// last pass over that row had it.
std::map<int32_t, int32_t> checkedFollowers(const std::vector<std::pair<sharpi::Pass, Batch>>& seen, int& again) {
    std::map<int32_t, int32_t> followers;
    for (size_t i = 0; i < seen.size(); ++i) {
        const auto& [pass, batch] = seen[i];
        if (pass == sharpi::Pass::Model) {
            EXPECT_TRUE(i == 0 || seen[i - 1].first != pass) << "a pass that the prediction layer did not follow";
            continue;
        }
        const auto& [passBefore, before] = seen.at(i - 1);
        EXPECT_EQ(passBefore == sharpi::Pass::Model, pass == sharpi::Pass::Draft);
        if (pass == sharpi::Pass::DraftAgain) {
            ++again;
            EXPECT_EQ(batch.sources, (std::vector<int32_t>{static_cast<int32_t>(before.size() - 1)}));
            EXPECT_EQ(batch.positions, (std::vector<int32_t>{before.positions.back() + 1}));
        } else {
            EXPECT_LE(batch.size(), before.size());
            EXPECT_TRUE(std::equal(batch.positions.begin(), batch.positions.end(), before.positions.begin()));
            EXPECT_LE(batch.positions[0], followers.empty() ? 0 : followers.rbegin()->first + 1) << "a hole";
            for (size_t t = 0; t < batch.tokens.size(); ++t) EXPECT_EQ(batch.sources.at(t), static_cast<int32_t>(t));
        }
        for (size_t t = 0; t < batch.tokens.size(); ++t) followers[batch.positions[t]] = batch.tokens[t];
    }
    return followers;
}

// After each pass of the model, the prediction layer computes the same rows, each with the token that follows it.
TEST(DraftSessions, ThePredictionLayerSeesEveryRow) {
    for (const Model& model : {Model(predicting()[0]), knowing(0.4f)}) {
        WatchedEngine watched(model, engineOptions());
        Session session(watched.engine);
        const auto prompt = randomTokens(50, model.options().vocab, 4);
        auto text = prompt;
        for (const int32_t token : generate(session, prompt, greedyParams(), 60, drafts(Source::Prediction, 3)))
            text.push_back(token);
        int again = 0;
        const auto followers = checkedFollowers(watched.backend->seen, again);
        EXPECT_GT(again, 20);
        const auto held = static_cast<int32_t>(session.tokens().size());
        for (int32_t at = 0; at < held; ++at)
            ASSERT_EQ(followers.at(at), text[static_cast<size_t>(at) + 1]) << "at " << at;
    }
}

TEST(DraftSessions, OnlyAGenerationThatMayUseThePredictionLayerPaysForIt) {
    const Model model = knowing(0.4f);
    const int64_t vocab = model.options().vocab;
    WatchedEngine watched(model, engineOptions());
    auto& seen = watched.backend->seen;
    Session session(watched.engine);
    const auto prompt = randomTokens(50, vocab, 4);
    for (const Source source : {Source::Off, Source::NGram}) {
        seen.clear();
        generate(session, prompt, greedyParams(), 10, drafts(source, 2));
        EXPECT_GT(seen.size(), 5u);
        for (const auto& pass : seen) EXPECT_EQ(pass.first, sharpi::Pass::Model);
    }
    // A generation that follows an evaluation may draft, so the layer takes part in the evaluation.
    const auto expected = generate(session, prompt, greedyParams(), 60);
    session.reset();
    seen.clear();
    evaluate(session, prompt, vocab);
    int again = 0;
    EXPECT_EQ(checkedFollowers(seen, again).size(), prompt.size());
    EXPECT_EQ(generate(session, prompt, greedyParams(), 60, drafts(Source::Prediction, 3)), expected);
    EXPECT_GT(session.draftCounts().accepted, 0);
}

}  // namespace
