// What a client asks of a Scheduler, and what became of it.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "engine/texts/continuation.h"

namespace sharpi {

class Conversation;

struct Request {
    std::vector<int32_t> prompt;  // the whole text so far
    // Lengths of the prompt after which other prompts are likely to differ, such as the end of a system prompt. Hints:
    // what others need to continue there is kept if there is room, and no answer depends on them.
    std::vector<int64_t> marks = {};
    SamplingParams params;
    DraftOptions drafts;
    std::vector<int32_t> ends;  // the answer ends before one of these tokens
    // 0: none. Only for the prompt's scores, or in a conversation, whose text the prompt then is.
    int64_t maxTokens = std::numeric_limits<int64_t>::max();
    AnswerExtras extras;
    int32_t priority = 0;           // higher ones go first, and are paused last
    std::string key;                // of the client; clients take turns, however many requests each has
    std::string salt;               // requests with other salts share nothing that was computed
    std::optional<double> seconds;  // after which the request ends, however far it has come
    // Tokens that may be written ahead of the reader. An answer that is so far ahead takes part in no step, and others
    // may have its memory: it is then computed again when it is read.
    int64_t ahead = std::numeric_limits<int64_t>::max();
    // The request continues its text, and its salt counts. The conversation's request before it is cancelled.
    std::shared_ptr<Conversation> conversation;
};

// Throws Error(InvalidArgument) for a request that can never be served.
void requireServable(const Request& request, const SequenceLimits& limits);

// Tokens with which both begin; of prompts, if they may share what is computed.
int64_t commonTokens(const std::vector<int32_t>& a, const std::vector<int32_t>& b);
int64_t commonTokens(const Request& a, const Request& b);

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

// The time of the passes in which a text had part, and what its drafts gave.
struct Spent {
    double promptSeconds = 0;  // of those over its prompt
    double stepSeconds = 0;    // of its steps, and of computing again what it had lost since
    DraftCounts drafts;
};

struct RequestFigures {
    double queuedSeconds = 0;      // until its prompt's first piece
    double firstTokenSeconds = 0;  // from the request to its first token; 0: it has none
    double seconds = 0;            // from the request to its end
    int64_t promptTokens = 0;
    int64_t reusedTokens = 0;  // of the prompt, found in the cache
    int64_t tokens = 0;        // of the answer
    int64_t pauses = 0;        // times that it gave its memory to others
    Spent spent;
};

struct Ending {
    Finish finish = Finish::EndToken;
    std::string error = {};              // for Failed
    std::optional<ErrorKind> kind = {};  // of that error, if it has one
    RequestFigures figures = {};
};

// Whether the cache or the machine lacked memory, which other requests may give up.
bool isOutOfMemory(const std::exception& error);
// What a request ends with if this was thrown. Does not throw.
Ending failure(const std::exception& error);

}  // namespace sharpi
