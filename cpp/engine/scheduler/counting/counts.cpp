// See counts.h.
#include "engine/scheduler/counting/counts.h"

#include <algorithm>

namespace sharpi {

std::vector<EvaluatedRows> evaluatedBy(const std::vector<Continuation*>& texts) {
    std::vector<EvaluatedRows> rows;
    for (const Continuation* text : texts) rows.push_back(text->held().running().evaluated);
    return rows;
}

void SchedulerCounts::countStates(const RequestEntries& entries) {
    waiting = countOf(entries, RequestState::Waiting);
    preparing = countOf(entries, RequestState::Preparing);
    writing = countOf(entries, RequestState::Writing);
}

void SchedulerCounts::countAgain(const AgainRows& rows, double seconds) {
    const auto count = [&](Again& again, int64_t tokens) {
        again.tokens += tokens;
        again.seconds += seconds * static_cast<double>(tokens) / static_cast<double>(std::max<int64_t>(rows.all, 1));
    };
    count(lost, rows.lost);
    count(answers, rows.answers);
    count(cuts, rows.cuts);
}

}  // namespace sharpi
