// What a client asks of a Scheduler, and what became of it.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "engine/texts/continuation.h"

namespace sharpi {

struct Request {
    std::vector<int32_t> prompt;  // the whole text so far
    SamplingParams params;
    DraftOptions drafts;
    std::vector<int32_t> ends;                                // the answer ends before one of these tokens
    int64_t maxTokens = std::numeric_limits<int64_t>::max();  // 0: none, only the prompt's scores
    AnswerExtras extras;
    int32_t priority = 0;           // higher ones go first, and are paused last
    std::string key;                // of the client; clients take turns, however many requests each has
    std::string salt;               // requests with other salts share nothing that was computed
    std::optional<double> seconds;  // after which the request ends, however far it has come
};

// Why an answer ended.
enum class Finish {
    EndToken,  // or the constraint says that the answer is complete
    Length,    // maxTokens
    Context,   // the context is full
    Cancelled,
    TimeOut,
    Failed,
};
const char* finishName(Finish finish);

struct RequestFigures {
    double queuedSeconds = 0;      // until its prompt's first piece
    double firstTokenSeconds = 0;  // from the request to its first token; 0: it has none
    double seconds = 0;            // from the request to its end
    int64_t promptTokens = 0;
    int64_t reusedTokens = 0;  // of the prompt, found in the cache
    int64_t tokens = 0;        // of the answer
    int64_t pauses = 0;        // times that it gave its memory to others
    DraftCounts drafts;
};

struct Ending {
    Finish finish = Finish::EndToken;
    std::string error;  // for Failed
    RequestFigures figures;
};

}  // namespace sharpi
