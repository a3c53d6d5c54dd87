// See shared_steps.h.
#include "engine/texts/shared_steps.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace sharpi {

namespace {

using Rows = Continuation::Rows;

void decode(const LockedModel& model, const std::vector<Rows>& step) {
    std::vector<TextPasses::Part> parts;
    for (const Rows& rows : step) parts.push_back(rows.text->partOf(rows));
    std::vector<std::vector<Chosen>> chosen = TextPasses(model, step.front().text->held().limits()).run(parts);
    for (size_t i = 0; i < step.size(); ++i) step[i].text->accept(step[i], std::move(chosen[i]));
}

// If there is no room for a step of all these texts, they take several. A text that lost tokens while others were
// prepared has a step of its own.
void decodeTogether(const LockedModel& model, std::vector<Rows> step) {
    const auto isWhole = [&](const Rows& rows) { return rows.text->held().isWhole(model); };
    const auto lost = std::stable_partition(step.begin(), step.end(), isWhole);
    const auto decodeAlone = [&](const Rows& rows) {
        decode(model, {rows.text->rowsToDecode(model, static_cast<int64_t>(rows.tokens.size()) - 1)});
    };
    const std::vector<Rows> alone(lost, step.end());
    step.erase(lost, step.end());
    std::vector<std::vector<Rows>> halves;
    try {
        if (!step.empty()) decode(model, step);
    } catch (const Error& error) {
        if (error.kind() != ErrorKind::OutOfMemory || step.size() == 1) throw;
        const auto middle = step.begin() + static_cast<std::ptrdiff_t>(step.size() / 2);
        halves = {{step.begin(), middle}, {middle, step.end()}};
    }
    for (const std::vector<Rows>& half : halves) {
        if (half.size() == 1) decodeAlone(half.front());
        else decodeTogether(model, half);
    }
    std::for_each(alone.begin(), alone.end(), decodeAlone);
}

}  // namespace

void stepTogether(const std::vector<Continuation*>& texts, int64_t drafts) {
    std::vector<Continuation*> waiting;
    for (Continuation* text : texts)
        if (text->chosen().empty() && text->room() >= 1) waiting.push_back(text);
    if (waiting.empty()) return;
    const SequenceLimits& limits = waiting.front()->held().limits();
    const LockedModel model = waiting.front()->held().engine().runner().lock();
    const int64_t most = std::min(limits.pieces.decodeRows, limits.headRows);
    std::vector<Rows> step;
    int64_t taken = 0;
    for (Continuation* text : waiting) {
        Rows rows = text->rowsToDecode(model, drafts);
        const auto count = static_cast<int64_t>(rows.tokens.size());
        if (TextPasses(model, limits).predicts(*text->partOf(rows).text)) {
            decode(model, {std::move(rows)});
            continue;
        }
        if (taken + count > most) {
            decodeTogether(model, std::move(step));
            step.clear();
            taken = 0;
        }
        step.push_back(std::move(rows));
        taken += count;
    }
    decodeTogether(model, std::move(step));
}

}  // namespace sharpi
