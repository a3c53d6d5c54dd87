// Scores of a prompt's own tokens, made as its pieces are computed.
#pragma once

#include <cstdint>
#include <vector>

#include "operations/backend.h"

namespace sharpi {

class PromptScores {
public:
    PromptScores(std::vector<int32_t> prompt, int32_t best);

    // The backend holds the logits of `count` tokens of the prompt, from this position on.
    void take(Backend& backend, int64_t position, int64_t count);
    // Of each token. Nothing comes before the first, so its score means nothing.
    const std::vector<Score>& scores() const { return _scores; }

private:
    std::vector<int32_t> _prompt;
    int32_t _best;
    std::vector<Score> _scores;
};

}  // namespace sharpi
