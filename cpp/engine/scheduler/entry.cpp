// See entry.h.
#include "engine/scheduler/entry.h"

#include <algorithm>

#include "engine/scheduler/conversation.h"

namespace sharpi {

namespace {

// A reader who has been behind for this long counts as gone: others may have the memory of the answer.
constexpr auto kLate = std::chrono::milliseconds(100);

}  // namespace

bool isWanted(const RequestEntry& entry) { return !entry.hasEnded && !entry.answer->isBehind(); }

bool isIdle(const RequestEntry& entry) {
    return entry.answer->isBehind() && entry.behindSince && SchedulerClock::now() - *entry.behindSince >= kLate;
}

bool isOutdated(const RequestEntry& entry) {
    const auto& conversation = entry.request.conversation;
    return conversation && conversation->latest() != entry.answer->number();
}

bool needsALook(const RequestEntry& entry) {
    return !entry.answer->isBehind() || entry.answer->isCancelled() || isOutdated(entry);
}

void noteReaders(const RequestEntries& entries) {
    for (const auto& entry : entries) {
        if (!entry->answer->isBehind()) entry->behindSince.reset();
        else if (!entry->behindSince) entry->behindSince = SchedulerClock::now();
    }
}

int64_t countOf(const RequestEntries& entries, RequestState state) {
    return std::count_if(entries.begin(), entries.end(),
                         [&](const auto& entry) { return isWanted(*entry) && entry->state == state; });
}

int64_t runningOf(const RequestEntries& entries) {
    return std::count_if(entries.begin(), entries.end(), [](const auto& entry) {
        return !entry->hasEnded && entry->state != RequestState::Waiting && !isIdle(*entry);
    });
}

}  // namespace sharpi
