// A crowd of requests of every kind, each of which must be answered as if it were alone.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "answers.h"
#include "scored_text.h"
#include "seed.h"

namespace tiny {

// Requests drawn at random, with the answers that they get alone. Half of them begin with one of three texts of up to
// `pages` whole pages.
class Crowd {
public:
    Crowd(const Model& model, std::shared_ptr<Engine> reference, unsigned seed, int64_t pages = 3)
        : _model(model), _reference(std::move(reference)), _random(sharpi::testSeed(seed)) {
        for (int64_t i = 1; i <= 3; ++i)
            _beginnings.push_back(repetitive(std::min(i, pages) * kPage, model.options().vocab, _random()));
    }

    struct Expected {
        Request request;
        std::vector<int32_t> tokens;
        std::vector<Score> scores, promptScores;
        Finish finish = Finish::Length;
    };
    Expected draw(int64_t longestPrompt, int64_t longestAnswer) {
        Expected e;
        Request& r = e.request;
        const auto length = 1 + static_cast<int64_t>(_random() % static_cast<uint64_t>(longestPrompt));
        r.prompt = repetitive(length, _model.options().vocab, _random());
        if (!_last.empty() && _random() % 3 == 0) r.prompt.insert(r.prompt.begin(), _last.begin(), _last.end());
        if (static_cast<int64_t>(r.prompt.size()) > 2 * longestPrompt) r.prompt.resize(static_cast<size_t>(length));
        _last = r.prompt;
        if (_random() % 2) {
            const std::vector<int32_t>& beginning = _beginnings[_random() % _beginnings.size()];
            r.prompt.insert(r.prompt.begin(), beginning.begin(), beginning.end());
        }
        r.salt = _random() % 8 ? "" : "salt";
        r.params = _random() % 2 ? sampledParams(_random()) : greedyParams();
        std::vector<Source> sources{Source::Off, Source::NGram};
        if (_model.options().predictions) sources.push_back(Source::Prediction);
        r.drafts = drafts(sources[_random() % sources.size()], 1 + static_cast<int32_t>(_random() % 7));
        r.maxTokens = 1 + static_cast<int64_t>(_random() % static_cast<uint64_t>(longestAnswer));
        r.priority = static_cast<int32_t>(_random() % 3);
        r.key = std::string(1, static_cast<char>('a' + _random() % 3));
        r.extras.best = static_cast<int32_t>(_random() % 8) - 2;
        r.extras.best = std::max(r.extras.best, -1);
        r.extras.echo = _random() % 4 == 0;
        writeAlone(e);
        if (e.tokens.size() > 3 && _random() % 2) {
            r.ends = {e.tokens[e.tokens.size() / 2]};
            e.tokens.erase(std::find(e.tokens.begin(), e.tokens.end(), r.ends[0]), e.tokens.end());
            e.finish = Finish::EndToken;
        }
        return e;
    }
    std::mt19937& random() { return _random; }

private:
    // With a constraint in a third of all cases.
    void writeAlone(Expected& e) {
        Request& r = e.request;
        if (_random() % 3) {
            const ScoredText text = writeScored(_reference, r.prompt, r.params, r.maxTokens, r.extras.best, nullptr);
            Session alone(_reference);
            EXPECT_EQ(generate(alone, r.prompt, r.params, static_cast<int>(r.maxTokens)), text.tokens);
            return take(e, text);
        }
        const size_t ends = 1 + _random() % (4 * static_cast<size_t>(r.maxTokens));
        const auto salt = static_cast<uint32_t>(_random());
        Thirds constraint(_model.options().vocab, ends, salt);
        take(e, writeScored(_reference, r.prompt, r.params, r.maxTokens, r.extras.best, &constraint));
        r.extras.constraint = std::make_shared<Thirds>(_model.options().vocab, ends, salt);
    }
    static void take(Expected& e, const ScoredText& text) {
        e.tokens = text.tokens;
        e.scores = text.scores;
        e.promptScores = text.prompt;
        if (text.hasEnded) e.finish = Finish::EndToken;
    }

    const Model& _model;
    std::shared_ptr<Engine> _reference;
    std::mt19937 _random;
    std::vector<int32_t> _last;
    std::vector<std::vector<int32_t>> _beginnings;
};

struct Served {
    Crowd::Expected expected;
    std::shared_ptr<Answer> answer;
};

inline void checkScores(const Whole& whole, const Crowd::Expected& expected) {
    const AnswerExtras& extras = expected.request.extras;
    EXPECT_EQ(whole.promptScores.size(), extras.echo ? expected.request.prompt.size() : 0);
    for (size_t i = 1; i < whole.promptScores.size(); ++i) expectSame(whole.promptScores[i], expected.promptScores[i]);
    if (extras.best < 0) return;
    ASSERT_LE(whole.scores.size(), expected.scores.size());
    for (size_t i = 0; i < whole.scores.size(); ++i) expectSame(whole.scores[i], expected.scores[i]);
}

// However the text was paused, its constraint has followed it, and was asked no more than once for each token.
inline void checkConstraint(const Whole& whole, const Request& request) {
    if (!request.extras.constraint) return;
    EXPECT_EQ(request.extras.constraint.use_count(), 1) << "nobody else needs it any more";
    const auto& constraint = static_cast<const Thirds&>(*request.extras.constraint);
    ASSERT_GE(constraint.accepted.size(), whole.tokens.size());
    EXPECT_TRUE(std::equal(whole.tokens.begin(), whole.tokens.end(), constraint.accepted.begin()));
    if (request.drafts.source == Source::Off) {
        EXPECT_EQ(constraint.masks, static_cast<int64_t>(constraint.accepted.size()));
    }
}

inline void check(const std::vector<Served>& all) {
    for (size_t i = 0; i < all.size(); ++i) {
        SCOPED_TRACE("request " + std::to_string(i));
        const Whole whole = wait(*all[i].answer);
        const std::vector<int32_t>& expected = all[i].expected.tokens;
        checkConstraint(whole, all[i].expected.request);
        if (whole.ending.finish == Finish::Cancelled) {
            EXPECT_TRUE(all[i].answer->isCancelled());
            ASSERT_LE(whole.tokens.size(), expected.size());
            EXPECT_TRUE(std::equal(whole.tokens.begin(), whole.tokens.end(), expected.begin()));
            continue;
        }
        checkScores(whole, all[i].expected);
        EXPECT_EQ(whole.ending.finish, all[i].expected.finish) << whole.ending.error;
        EXPECT_EQ(whole.tokens, expected);
        EXPECT_EQ(whole.ending.figures.tokens, static_cast<int64_t>(expected.size()));
    }
}

// Submits requests at random moments and cancels some of them.
inline void serve(Scheduler& scheduler, Crowd& crowd, int count, int64_t longestPrompt, int64_t longestAnswer,
                  bool cancels) {
    std::vector<Served> all;
    std::vector<Crowd::Expected> drawn;
    for (int i = 0; i < count; ++i) drawn.push_back(crowd.draw(longestPrompt, longestAnswer));
    for (Crowd::Expected& expected : drawn) {
        const std::shared_ptr<Answer> answer = scheduler.submit(expected.request);
        all.push_back({std::move(expected), answer});
        if (crowd.random()() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(crowd.random()() % 3000));
        if (cancels && crowd.random()() % 3 == 0) all[crowd.random()() % all.size()].answer->cancel();
    }
    check(all);
}

// Submits requests while the model is locked, so that they compete for memory however fast the machine is.
inline void serveAtOnce(Engine& engine, Scheduler& scheduler, Crowd& crowd, int count, int64_t longestPrompt,
                        int64_t longestAnswer) {
    std::vector<Served> all;
    for (int i = 0; i < count; ++i) all.push_back({crowd.draw(longestPrompt, longestAnswer), nullptr});
    {
        const LockedModel locked = engine.runner().lock();
        for (Served& one : all) one.answer = scheduler.submit(one.expected.request);
    }
    check(all);
}

}  // namespace tiny
