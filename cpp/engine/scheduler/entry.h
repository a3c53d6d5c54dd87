// A request on its way through the scheduler. All of it is the scheduler's thread's.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/scheduler/answer.h"
#include "engine/scheduler/counting/again.h"
#include "engine/scheduler/request.h"
#include "engine/texts/continuation.h"

namespace sharpi {

using SchedulerClock = std::chrono::steady_clock;

enum class RequestState { Waiting, Preparing, Writing };

// Waiting requests hold no memory of the cache: they are new, or were paused.
struct RequestEntry {
    Request request;
    std::shared_ptr<Answer> answer;
    std::unique_ptr<Continuation> text;  // none: new
    RequestState state = RequestState::Waiting;
    bool hasBegun = false;   // the text has its prompt
    bool hasPrompt = false;  // which was computed once
    bool hasEnded = false;
    SchedulerClock::time_point submitted;
    std::optional<SchedulerClock::time_point> behindSince;  // if its reader is behind
    std::optional<EarlierText> earlier;                     // once the prompt is compared with others
    RequestFigures figures;
};
using RequestEntries = std::vector<std::unique_ptr<RequestEntry>>;

// Whether a request may go on: its reader is not behind.
bool isWanted(const RequestEntry& entry);
// Whether a request waits for a reader who seems to have gone.
bool isIdle(const RequestEntry& entry);
// Whether a later request of its conversation has come.
bool isOutdated(const RequestEntry& entry);
// Whether the thread has to look at a request.
bool needsALook(const RequestEntry& entry);

// Notes since when readers are behind.
void noteReaders(const RequestEntries& entries);
// Requests in this state that may go on.
int64_t countOf(const RequestEntries& entries, RequestState state);
// Requests that hold memory for what they are about to do.
int64_t runningOf(const RequestEntries& entries);

}  // namespace sharpi
