// See prompt_scores.h.
#include "engine/answers/prompt_scores.h"

#include <utility>

namespace sharpi {

PromptScores::PromptScores(std::vector<int32_t> prompt, int32_t best)
    : _prompt(std::move(prompt)), _best(best), _scores(_prompt.size()) {}

void PromptScores::take(Backend& backend, int64_t position, int64_t count) {
    std::vector<ScoredToken> wanted;
    const auto first = static_cast<size_t>(position) + 1;  // the token after the first row
    for (size_t at = first; at < first + static_cast<size_t>(count) && at < _prompt.size(); ++at)
        wanted.push_back({static_cast<int64_t>(at - first), _prompt[at], _best});
    if (wanted.empty()) return;
    std::vector<Score> scores = backend.score(wanted);
    for (size_t i = 0; i < scores.size(); ++i) _scores[first + i] = std::move(scores[i]);
}

}  // namespace sharpi
