// What tests of the scheduler share: requests, and all that comes of their answers.
#pragma once

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "draft_world.h"
#include "engine/scheduler/scheduler.h"
#include "tiny_blocks.h"

namespace tiny {

constexpr double kForever = 60;
constexpr int64_t kPage = KvCache::kPageTokens;

// A model some of whose layers see a window.
inline Options withWindows() {
    Options options;
    options.architecture = "gemma3";
    options.layers = family("gemma3").layers;
    return options;
}

// Whether layers see windows, if the cache has room for few sequences.
inline bool seesWindows(const Options& options) {
    return options.architecture == withWindows().architecture || hasBlocks(options);
}
// A context that is longer than the windows.
inline int64_t contextOf(const Options& options) { return seesWindows(options) ? 1024 : 512; }

// All that comes of an answer.
struct Whole {
    std::vector<int32_t> tokens;
    std::vector<Score> scores, promptScores;
    Ending ending;
};
inline Whole wait(Answer& answer) {
    Whole whole;
    for (;;) {
        const Answer::News news = answer.take(kForever);
        for (const Chosen& chosen : news.tokens) {
            whole.tokens.push_back(chosen.token);
            whole.scores.push_back(chosen.score);
        }
        if (news.promptScores) {
            EXPECT_TRUE(whole.promptScores.empty()) << "they come once";
            EXPECT_EQ(whole.tokens.size(), news.tokens.size()) << "they come before all tokens";
            whole.promptScores = *news.promptScores;
        }
        if (!news.ending) continue;
        whole.ending = *news.ending;
        return whole;
    }
}

inline Request requestOf(std::vector<int32_t> prompt, int64_t maxTokens) {
    Request request;
    request.prompt = std::move(prompt);
    request.params = greedyParams();
    request.maxTokens = maxTokens;
    return request;
}

inline SchedulerOptions longQueue() {
    SchedulerOptions options;
    options.queue = 1000;
    return options;
}

}  // namespace tiny
