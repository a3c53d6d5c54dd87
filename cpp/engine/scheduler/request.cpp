// See request.h.
#include "engine/scheduler/request.h"

#include <algorithm>
#include <new>
#include <string>

#include "core/rules/log_softmax.h"

namespace sharpi {

bool isOutOfMemory(const std::exception& error) {
    const auto* known = dynamic_cast<const Error*>(&error);
    return known ? known->kind() == ErrorKind::OutOfMemory : dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
}

// Never throws: the text without memory is so short that a string holds it in itself.
static std::string textOf(const std::exception& error) {
    const char* const noMemory = "no memory left";
    try {
        return dynamic_cast<const std::bad_alloc*>(&error) ? noMemory : error.what();
    } catch (const std::bad_alloc&) {
        return noMemory;
    }
}

Ending failure(const std::exception& error) {
    Ending ending{Finish::Failed, textOf(error)};
    const auto* known = dynamic_cast<const Error*>(&error);
    if (known) ending.kind = known->kind();
    else if (isOutOfMemory(error)) ending.kind = ErrorKind::OutOfMemory;
    return ending;
}

void requireServable(const Request& request, const SequenceLimits& limits) {
    request.params.validate(limits.vocabSize);
    request.drafts.validate();
    if (request.drafts.source == DraftOptions::Source::Prediction && !limits.predictionLayer)
        throw Error(ErrorKind::InvalidArgument, "the model has no prediction layer to draft with");
    if (request.prompt.empty()) throw Error(ErrorKind::InvalidArgument, "the prompt is empty: give at least one token");
    for (const int32_t token : request.prompt) {
        if (token < 0 || token >= limits.vocabSize)
            throw Error(
                ErrorKind::InvalidArgument,
                "token " + std::to_string(token) + " is outside the vocabulary of " + std::to_string(limits.vocabSize));
    }
    if (static_cast<int64_t>(request.prompt.size()) > limits.context) {
        throw Error(ErrorKind::InvalidArgument, "the prompt has " + std::to_string(request.prompt.size()) +
                                                    " tokens, the context holds " + std::to_string(limits.context) +
                                                    ": shorten it or ask for a larger context");
    }
    for (const int64_t mark : request.marks) {
        if (mark < 0 || mark > static_cast<int64_t>(request.prompt.size()))
            throw Error(ErrorKind::InvalidArgument, "a mark after " + std::to_string(mark) +
                                                        " tokens is outside the prompt, which has " +
                                                        std::to_string(request.prompt.size()));
    }
    if (request.ahead < 1) throw Error(ErrorKind::InvalidArgument, "an answer is written ahead of its reader");
    if (request.maxTokens < (request.extras.echo || request.conversation ? 0 : 1))
        throw Error(ErrorKind::InvalidArgument,
                    "an answer has at least one token, unless the prompt's scores are asked");
    if (request.extras.best < -1 || request.extras.best > kMostBest) {
        throw Error(ErrorKind::InvalidArgument,
                    "a score names 0 to " + std::to_string(kMostBest) + " of the likeliest tokens");
    }
    if (request.seconds && !(*request.seconds > 0))
        throw Error(ErrorKind::InvalidArgument, "a request needs more than 0 seconds");
}

int64_t commonTokens(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
    return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

int64_t commonTokens(const Request& a, const Request& b) {
    return a.salt == b.salt ? commonTokens(a.prompt, b.prompt) : 0;
}

const char* finishName(Finish finish) {
    switch (finish) {
    case Finish::EndToken: return "end";
    case Finish::Length: return "length";
    case Finish::Context: return "context";
    case Finish::Cancelled: return "cancelled";
    case Finish::TimeOut: return "timeout";
    case Finish::Failed: return "failed";
    }
    return "";
}

}  // namespace sharpi
