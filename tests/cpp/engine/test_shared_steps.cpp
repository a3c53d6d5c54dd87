// Sessions that share steps (Session::nextOf): each gives the tokens that it gives alone, whatever its company, its
// drafts and the memory that there is. And sessions that can share a step do.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "planning/memory_plan.h"
#include "seed.h"
#include "two_arithmetics.h"

namespace {

using namespace sharpi;
using namespace tiny;

// Room for the pages of all sessions.
constexpr int64_t kContext = 5000;

Model modelOf(Options options) {
    options.context = kContext;
    return Model(options);
}

// A generation and the tokens that it gives alone.
struct Generation {
    std::unique_ptr<Session> session;
    std::vector<int32_t> prompt, expected;
    SamplingParams params;
    DraftOptions drafts;
    size_t handed = 0;

    bool finished() const { return handed == expected.size(); }
    void start() { session->start(prompt, params, nullptr, drafts); }
};

std::vector<Options> models() {
    Options experts;
    experts.architecture = "qwen3moe";
    std::vector<Options> all{gpuVariants()[0], experts, hybrids()[0], predicting()[1]};
    Options windows;
    windows.architecture = "gemma3";
    windows.layers = family("gemma3").layers;
    all.push_back(windows);
    return all;
}

class Company {
public:
    Company(const Model& model, std::shared_ptr<Engine> engine, std::shared_ptr<Engine> reference, unsigned seed)
        : _model(model),
          _engine(std::move(engine)),
          _reference(std::move(reference)),
          _random(sharpi::testSeed(seed)) {}

    std::vector<Generation> generations;

    void add(int count, const std::vector<Source>& sources) {
        for (int i = 0; i < count; ++i) {
            Generation g;
            g.session = std::make_unique<Session>(_engine);
            g.prompt = repetitive(1 + static_cast<int64_t>(_random() % 40), _model.options().vocab, _random());
            g.params = _random() % 3 ? sampledParams(_random()) : greedyParams();
            g.drafts = drafts(sources[_random() % sources.size()], 1 + static_cast<int32_t>(_random() % 7));
            Session alone(_reference);
            g.expected = generate(alone, g.prompt, g.params, 1 + static_cast<int>(_random() % 25));
            generations.push_back(std::move(g));
        }
    }
    // Some generations that have not finished, in any order.
    std::vector<Generation*> some() {
        std::vector<Generation*> chosen;
        for (Generation& g : generations)
            if (!g.finished() && _random() % 4) chosen.push_back(&g);
        std::shuffle(chosen.begin(), chosen.end(), _random);
        return chosen;
    }
    void take(const std::vector<Generation*>& chosen) {
        std::vector<Session*> sessions;
        for (const Generation* g : chosen) sessions.push_back(g->session.get());
        const auto tokens = Session::nextOf(sessions);
        ASSERT_EQ(tokens.size(), chosen.size());
        for (size_t i = 0; i < chosen.size(); ++i) {
            Generation& g = *chosen[i];
            EXPECT_EQ(tokens[i], g.expected[g.handed]) << "token " << g.handed << " of generation " << i;
            ++g.handed;
        }
    }
    void finish() {
        for (Generation& g : generations) g.start();
        while (std::any_of(generations.begin(), generations.end(), [](const auto& g) { return !g.finished(); })) {
            take(some());
            if (::testing::Test::HasFailure()) return;
        }
        for (const Generation& g : generations) {
            Session alone(_reference);
            generate(alone, g.prompt, g.params, static_cast<int>(g.expected.size()));
            EXPECT_EQ(g.session->tokens(), alone.tokens());
        }
    }

private:
    const Model& _model;
    std::shared_ptr<Engine> _engine, _reference;
    std::mt19937 _random;
};

std::vector<Source> sourcesOf(const Model& model) {
    std::vector<Source> sources{Source::Off, Source::Off, Source::NGram};
    if (model.options().predictions) sources.push_back(Source::Prediction);
    return sources;
}

TEST(SharedSteps, EverySessionGivesWhatItGivesAlone) {
    for (const Options& options : models()) {
        SCOPED_TRACE(describe(options));
        const Model model = modelOf(options);
        const auto reference = engineOf(model, engineOptions(400, 64, 12));
        for (const int32_t sequences : {20, 60}) {
            Company company(model, engineOf(model, engineOptions(kContext, 64, sequences)), reference,
                            static_cast<unsigned>(sequences));
            company.add(15, sourcesOf(model));
            company.finish();
        }
    }
}

// With two arithmetics, tokens are the same only if decode rows stay decode rows. At most nine of them fit in a batch.
TEST(SharedSteps, RowsKeepTheirKind) {
    for (const Options& options : models()) {
        SCOPED_TRACE(describe(options));
        const Model model = modelOf(options);
        const int64_t step = promptStepOf(options);
        const TwoArithmeticsEngine alone(model, engineOptions(400, 64, 12), step);
        const TwoArithmeticsEngine together(model, engineOptions(kContext, 64, 40), step);
        Company company(model, together.engine, alone.engine, 2);
        company.add(20, sourcesOf(model));
        company.finish();
    }
}

// Drafts need states to roll back to. If there are not enough for all sessions, these take several steps.
TEST(SharedSteps, StatesMayBeTooFewForAllDrafts) {
    for (const Options& options : {hybrids()[0], predicting()[1]}) {
        SCOPED_TRACE(describe(options));
        const Model model = modelOf(options);
        const auto reference = engineOf(model, engineOptions(400, 64, 12));
        for (const int32_t sequences : {6, 7, 8, 10, 14}) {
            Company company(model, engineOf(model, engineOptions(kContext, 64, sequences)), reference,
                            static_cast<unsigned>(sequences));
            company.add(6, {Source::NGram, Source::NGram, sourcesOf(model).back()});
            company.finish();
        }
    }
}

// The decode rows of each pass since the last call.
std::vector<int64_t> stepsSeen(Watched& backend) {
    std::vector<int64_t> rows;
    for (const auto& [pass, batch] : backend.seen)
        if (pass == sharpi::Pass::Model) rows.push_back(batch.decodeRows);
    backend.seen.clear();
    return rows;
}

TEST(SharedSteps, SessionsThatCanShareAStepDo) {
    const Model model = modelOf(gpuVariants()[0]);
    const WatchedEngine watched(model, engineOptions(kContext, 96, 4));
    std::vector<std::unique_ptr<Session>> sessions;
    std::vector<Session*> all;
    for (int i = 0; i < 70; ++i) {
        sessions.push_back(std::make_unique<Session>(watched.engine));
        all.push_back(sessions.back().get());
        all.back()->start(randomTokens(3 + i % 5, model.options().vocab, static_cast<unsigned>(i)), greedyParams(),
                          nullptr);
    }
    stepsSeen(*watched.backend);
    Session::nextOf(all);
    EXPECT_TRUE(stepsSeen(*watched.backend).empty()) << "the first tokens were chosen with the prompts";
    Session::nextOf({all.begin(), all.begin() + 17});
    EXPECT_EQ(stepsSeen(*watched.backend), std::vector<int64_t>({17}));
    Session::nextOf(all);
    EXPECT_EQ(stepsSeen(*watched.backend), std::vector<int64_t>({64, 6})) << "64 rows can be chosen from at once";
    EXPECT_TRUE(Session::nextOf({}).empty());
}

// Tokens can be chosen at once from a row of each sequence and one guess of each, and a plan counts their logits.
TEST(SharedSteps, LogitsAreHeldForAllSessions) {
    Options options;
    options.vocab = 40000;
    const Model model = modelOf(options);
    const auto tensors = model.weights()->tensors();
    const auto at = [&](int32_t sequences, int64_t batch) {
        EngineOptions wanted(cudaKind());
        wanted.context = kContext;
        wanted.batch = batch;
        wanted.sequences = sequences;
        wanted.prompt = PromptMode::Exact;
        return wanted;
    };
    for (const auto& [sequences, rows] : {std::pair(1, 8), {4, 8}, {5, 10}, {31, 62}, {32, 64}, {4096, 64}})
        EXPECT_EQ(engineLimits(model.spec(), tensors, at(sequences, 512)).headRows, rows) << sequences;
    EXPECT_EQ(engineLimits(model.spec(), tensors, at(40, 3)).headRows, 3);
    const auto scratch = [&](int32_t sequences) {
        for (const TraceLine& line : plannedLines(model.spec(), tensors, at(sequences, 512)))
            if (line.name == "scratch") return line.taken;
        return int64_t{0};
    };
    const int64_t granule = 2 << 20;
    EXPECT_NEAR(scratch(64) - scratch(4), 4 * (64 - 8) * options.vocab, granule);
}

TEST(SharedSteps, RefusesSessionsThatCannotShareOne) {
    const Model model = modelOf(gpuVariants()[0]);
    const auto engine = engineOf(model);
    Session first(engine), second(engine), unstarted(engine), elsewhere(engineOf(model));
    first.start({1, 2, 3}, greedyParams(), nullptr);
    second.start({4, 5}, greedyParams(), nullptr);
    elsewhere.start({1, 2}, greedyParams(), nullptr);
    expectError(ErrorKind::InvalidArgument, "only one next token", [&] { Session::nextOf({&first, &second, &first}); });
    expectError(ErrorKind::Internal, "before start", [&] { Session::nextOf({&first, &unstarted}); });
    expectError(ErrorKind::InvalidArgument, "different models", [&] { Session::nextOf({&first, &elsewhere}); });
    EXPECT_EQ(Session::nextOf({&first, &second}).size(), 2u);
}

TEST(SharedSteps, AFullContextGivesNoToken) {
    const Model model = modelOf(gpuVariants()[0]);
    Session full(engineOf(model, engineOptions(64, 16)));
    full.start(randomTokens(63, model.options().vocab, 1), greedyParams(), nullptr);
    for (int i = 0; i < 2; ++i) EXPECT_TRUE(Session::nextOf({&full})[0]);
    EXPECT_FALSE(Session::nextOf({&full})[0]);
}

// A step that fails changes nothing: called again, it gives the tokens that it would have given.
TEST(SharedSteps, AFailedStepLosesNoToken) {
    for (const Options& options : models()) {
        SCOPED_TRACE(describe(options));
        const Model model = modelOf(options);
        const auto reference = engineOf(model, engineOptions(400, 64, 12));
        const WatchedEngine watched(model, engineOptions(kContext, 64, 30));
        Company company(model, watched.engine, reference, 5);
        company.add(6, sourcesOf(model));
        for (Generation& g : company.generations) g.start();
        std::mt19937 random(sharpi::testSeed(6));
        int failures = 0;
        for (int call = 0; call < 200; ++call) {
            const auto chosen = company.some();
            watched.backend->failIn = random() % 2 ? 1 + static_cast<int>(random() % 6) : 0;
            try {
                std::vector<Session*> sessions;
                for (const Generation* g : chosen) sessions.push_back(g->session.get());
                const auto tokens = Session::nextOf(sessions);
                for (size_t i = 0; i < chosen.size(); ++i)
                    ASSERT_EQ(tokens[i], chosen[i]->expected[chosen[i]->handed++]) << "after " << failures;
            } catch (const std::runtime_error& error) {
                ASSERT_EQ(std::string(error.what()), "told to fail");
                ++failures;
            }
            watched.backend->failIn = 0;
        }
        EXPECT_GT(failures, 0);
        for (const Generation& g : company.generations) EXPECT_TRUE(g.finished());
    }
}

// A session whose logits allow no token says so, and the tokens chosen beside it are handed out by the next call.
TEST(SharedSteps, ASessionWithoutATokenTakesNoneFromTheOthers) {
    const Model model = modelOf(gpuVariants()[0]);
    const auto engine = engineOf(model);
    const auto prompt = randomTokens(9, model.options().vocab, 1);
    Session alone(engine), good(engine), bad(engine);
    const auto expected = generate(alone, prompt, greedyParams(), 6);
    SamplingParams none = greedyParams();
    for (int32_t token = 0; token < model.options().vocab; ++token)
        none.logitBias[token] = -std::numeric_limits<float>::infinity();
    const DraftOptions guesses = drafts(Source::NGram, 3);
    good.start(prompt, greedyParams(), nullptr, guesses);
    EXPECT_EQ(good.next(), expected[0]);
    bad.start(prompt, none, nullptr);
    for (int i = 0; i < 3; ++i)
        expectError(ErrorKind::InvalidArgument, "no token may be chosen", [&] { Session::nextOf({&good, &bad}); });
    for (size_t i = 1; i < expected.size(); ++i) EXPECT_EQ(good.next(), expected[i]) << i;
}

}  // namespace
