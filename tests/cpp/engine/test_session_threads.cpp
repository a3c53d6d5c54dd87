// Sessions of one engine in several threads: passes run one at a time, and each call of a session is atomic.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "draft_world.h"
#include "tiny_engine.h"

namespace {

using namespace sharpi;
using namespace tiny;

struct Conversation {
    std::vector<int32_t> prompt, answer, text;  // text: the prompt, then the answer
    SamplingParams params;
    std::unique_ptr<Session> session;
};

// What other threads may see of a session at any time: the beginning of its text, and counts that fit together.
void expectConsistent(const Conversation& c) {
    const std::vector<int32_t> tokens = c.session->tokens();
    ASSERT_LE(tokens.size(), c.text.size());
    EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), c.text.begin()));
    EXPECT_LE(c.session->reusedTokens(), static_cast<int64_t>(c.prompt.size()));
    const DraftCounts counts = c.session->draftCounts();
    EXPECT_LE(counts.accepted, counts.drafted);
}

TEST(SessionThreads, EachGetsTheAnswerThatItGetsAlone) {
    tiny::Options options = hybrids()[0];
    options.context = 1000;
    const Model model(options);
    const auto engine = engineOf(model, engineOptions(1000, 16, 9)), other = engineOf(model);
    std::vector<Conversation> all(3);
    for (unsigned i = 0; i < all.size(); ++i) {
        Conversation& c = all[i];
        c.prompt = repetitive(30 + 7 * i, options.vocab, i);
        c.params = i % 2 ? sampledParams(i) : greedyParams();
        Session alone(other);
        c.text = c.prompt;
        c.answer = generate(alone, c.prompt, c.params, 40);
        c.text.insert(c.text.end(), c.answer.begin(), c.answer.end());
        c.session = std::make_unique<Session>(engine);
    }
    std::atomic<int> running{static_cast<int>(all.size())};
    std::vector<std::thread> threads;
    for (Conversation& c : all) {
        threads.emplace_back([&c, &running] {
            for (int round = 0; round < 8; ++round) {
                const DraftOptions guesses = drafts(round % 2 ? Source::NGram : Source::Off, 3);
                EXPECT_EQ(generate(*c.session, c.prompt, c.params, 40, guesses), c.answer);
            }
            --running;
        });
    }
    threads.emplace_back([&] {
        while (running > 0) {
            for (const Conversation& c : all) expectConsistent(c);
        }
    });
    // Sessions come and go meanwhile, and others look at the engine.
    threads.emplace_back([&] {
        while (running > 0) {
            Session(engine).requireRoom(1);
            engine->expertCounts();
        }
    });
    for (std::thread& thread : threads) thread.join();
}

}  // namespace
