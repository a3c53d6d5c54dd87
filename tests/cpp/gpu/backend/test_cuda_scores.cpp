// Answers with scores and constraints on the GPU: the CPU's tokens and log-probabilities, to the bit.
#include "draft_world.h"
#include "engine/scheduler/scheduler.h"
#include "engine_test.h"
#include "scored_text.h"

namespace sharpi::cuda {
namespace {

class CudaScores : public EngineTest {
protected:
    static constexpr int64_t kContext = 400;
    static tiny::Model modelOf(tiny::Options tiny) {
        tiny.context = kContext;
        return tiny::Model(tiny);
    }
    // Prompt rows follow the contract, so that the CPU gives their bits too.
    static EngineOptions roomy(bool cuda) {
        EngineOptions o = exact(options(cuda));
        o.context = kContext;
        o.cacheTokens = 8192;
        o.sequences = 20;
        return o;
    }
    Request someRequest(int64_t vocab) {
        Request r;
        r.prompt = tiny::repetitive(1 + static_cast<int64_t>(random()() % 100), vocab, random()());
        r.params.temperature = random()() % 3 ? 0.7f : 0.0f;
        r.params.topK = std::vector<int32_t>{40, 5, 0, 200}[random()() % 4];
        r.params.seed = random()();
        if (random()() % 2) r.params.logitBias = {{3, 1.5f}, {7, -2.0f}};
        if (random()() % 2) r.params.repetitionPenalty = 1.2f;
        if (random()() % 2) r.drafts = {DraftOptions::Source::NGram, 4};
        r.maxTokens = 1 + static_cast<int64_t>(random()() % 40);
        r.extras.best = static_cast<int32_t>(random()() % 22) - 1;
        r.extras.echo = random()() % 3 == 0;
        return r;
    }
};

TEST_F(CudaScores, EveryAnswerHasTheCpusScores) {
    auto models = tiny::gpuVariants();
    for (const tiny::Options& tiny : tiny::gpuHybrids()) models.push_back(tiny);
    for (const tiny::Options& options : models) {
        SCOPED_TRACE(tiny::describe(options));
        const tiny::Model model = modelOf(options);
        const auto gpu = load(model, roomy(true)), cpu = load(model, roomy(false));
        SchedulerOptions queue;
        queue.queue = 1000;
        Scheduler scheduler(gpu, queue);
        std::vector<tiny::ScoredText> expected;
        std::vector<Request> requests;
        std::vector<std::shared_ptr<Answer>> answers;
        for (int i = 0; i < 30; ++i) {
            Request request = someRequest(options.vocab);
            const auto constrained = [&] {
                return std::make_shared<tiny::Thirds>(options.vocab, 100, static_cast<uint32_t>(i));
            };
            const auto constraint = i % 2 ? constrained() : nullptr;
            expected.push_back(tiny::writeScored(cpu, request.prompt, request.params, request.maxTokens,
                                                 request.extras.best, constraint.get()));
            if (i % 2) request.extras.constraint = constrained();
            requests.push_back(request);
        }
        for (const Request& request : requests) answers.push_back(scheduler.submit(request));
        for (size_t i = 0; i < answers.size(); ++i) {
            SCOPED_TRACE("request " + std::to_string(i));
            std::vector<Chosen> got;
            std::vector<Score> prompt;
            for (bool ended = false; !ended;) {
                const Answer::News news = answers[i]->take(60);
                got.insert(got.end(), news.tokens.begin(), news.tokens.end());
                if (news.promptScores) prompt = *news.promptScores;
                ended = news.ending.has_value();
                if (ended) {
                    EXPECT_EQ(news.ending->finish, Finish::Length) << news.ending->error;
                }
            }
            ASSERT_EQ(got.size(), expected[i].tokens.size());
            for (size_t t = 0; t < got.size(); ++t) {
                EXPECT_EQ(got[t].token, expected[i].tokens[t]) << t;
                if (requests[i].extras.best >= 0) tiny::expectSame(got[t].score, expected[i].scores[t]);
            }
            ASSERT_EQ(prompt.size(), requests[i].extras.echo ? requests[i].prompt.size() : 0);
            for (size_t t = 1; t < prompt.size(); ++t) tiny::expectSame(prompt[t], expected[i].prompt[t]);
        }
    }
}

}  // namespace
}  // namespace sharpi::cuda
