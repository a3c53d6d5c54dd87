// How probable a model finds a token, and which ones it finds the likeliest.
#pragma once

#include <cstdint>
#include <vector>

namespace sharpi {

// Natural logarithms, by core/rules/log_softmax.h.
struct TokenScore {
    int32_t token = 0;
    float logProbability = 0;
};

struct Score {
    float logProbability = 0;      // the token's own
    std::vector<TokenScore> best;  // the likeliest tokens, the likeliest first
};

}  // namespace sharpi
