// What the scheduler counts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/scheduler/counting/again.h"
#include "engine/scheduler/entry.h"
#include "memory/spill/prefix_store.h"

namespace sharpi {

// What each of these texts has evaluated.
std::vector<EvaluatedRows> evaluatedBy(const std::vector<Continuation*>& texts);

// Tokens that were evaluated again, and the time it took: of a pass that evaluated others too, its part by rows. If a
// pass brings weights over, that is no less than what its rows took, and such a pass is rarely made for them alone.
struct Again {
    int64_t tokens = 0;
    double seconds = 0;
};

// The thread's own work: not that in which it computes or waits for the device.
struct HostSeconds {
    double all = 0;
    double hidden = 0;  // of these, while the device had work: see HostTimes
    void operator+=(const HostSeconds& other) { all += other.all, hidden += other.hidden; }
};

// What the scheduler has done since it began, and what it has to do.
struct SchedulerCounts {
    int64_t waiting = 0, preparing = 0, writing = 0;  // now: requests in the queue, with a prompt to compute, answered
    int64_t finished = 0, refused = 0, pauses = 0;
    int64_t steps = 0, stepTokens = 0;  // passes over answers, and the tokens that they gave
    int64_t pieces = 0;                 // passes over prompts, and over what paused requests had lost
    double stepSeconds = 0, pieceSeconds = 0;
    // Of the thread's turns, without tasks: what is done for pieces and to choose them; and all else if there was a
    // step, such as its batch, drafts and masks, the queue, and handing tokens to clients.
    HostSeconds stepHost, pieceHost;
    Again lost, answers, cuts;  // of stepSeconds and pieceSeconds: see AgainRows, PastTexts
    int64_t adoptedTokens = 0;  // that were not computed, as another request had done so
    int64_t sharedPages = 0;    // now: pages of the cache that requests with the same beginning find
    double cacheUsed = 0;       // now: the part of the cache's pages that requests hold, 0 to 1
    SpillCounts spill;
    std::string failure;  // why nothing is answered any more: the device has failed; empty: it has not

    void countStates(const RequestEntries& entries);
    // Counts what a pass has evaluated again. seconds: that the whole pass took.
    void countAgain(const AgainRows& rows, double seconds);
};

}  // namespace sharpi
