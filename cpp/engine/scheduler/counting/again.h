// Which rows that were evaluated had been evaluated before, and why they are again.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/texts/continuation.h"

namespace sharpi {

// What a prompt and an earlier text have in common, at the beginning of both.
struct EarlierText {
    int64_t tokens = 0;  // that were evaluated
    int64_t prompt = 0;  // of these, the earlier text's prompt; the others are its answer
    int64_t pages = 0;   // of these, the tokens in whole pages that texts share
};

struct AgainRows {
    int64_t all = 0;
    // Of these, tokens that had been evaluated before:
    int64_t lost = 0;     // the cache no longer had them: the request was paused, or others needed the memory
    int64_t answers = 0;  // an earlier answer's: its rows are not prompt rows, or fill no page
    int64_t cuts = 0;     // an earlier prompt's, after the last multiple of a page, or of a tile, that texts share

    // Adds what a text has evaluated since it had evaluated `before`: what it had lost, then new tokens at its end.
    void add(const Continuation& text, const EvaluatedRows& before, const EarlierText& earlier) {
        const EvaluatedRows& now = text.held().running().evaluated;
        const int64_t rows = now.all - before.all, again = now.again - before.again;
        const int64_t end = text.held().size(), begin = end - (rows - again);
        const auto within = [&](int64_t from, int64_t to) {
            return std::max<int64_t>(std::min(end, to) - std::max(begin, from), 0);
        };
        const int64_t prompt = std::max(earlier.pages, earlier.prompt);
        all += rows;
        lost += again + within(0, earlier.pages);
        cuts += within(earlier.pages, prompt);
        answers += within(prompt, earlier.tokens);
    }
};

}  // namespace sharpi
