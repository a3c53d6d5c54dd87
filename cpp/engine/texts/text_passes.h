// Passes of the model over pieces of texts.
#pragma once

#include <optional>
#include <vector>

#include "engine/answers/token_constraint.h"
#include "engine/texts/cached_sequence.h"
#include "engine/texts/drafter.h"
#include "engine/texts/sampler.h"

namespace sharpi {

// In passes that did not fail.
struct EvaluatedRows {
    int64_t all = 0;
    int64_t again = 0;  // of these, tokens that the text had before, and the cache had lost
};

// A text as a pass of the model sees it: where it is cached, and how it goes on.
struct RunningText {
    explicit RunningText(ModelRunner& runner) : sequence(runner) {}
    CachedSequence sequence;
    std::vector<int32_t> history;    // the prompt, and what was handed out since
    std::optional<Sampler> sampler;  // while tokens are generated
    int32_t best = -1;               // the likeliest tokens that each score names; -1: no scores
    ConstraintFollower constraint;
    Drafter drafter;
    EvaluatedRows evaluated;
};

// Passes of the locked model over pieces of texts.
class TextPasses {
public:
    struct Part {
        RunningText* text;
        Piece piece;
    };

    TextPasses(const LockedModel& model, const SequenceLimits& limits) : _model(model), _limits(limits) {}

    // Computes the parts in one pass and keeps each up to its last right guess. Returns what was chosen for each: the
    // right guesses, and the token after them. Several parts must be of different texts, none of which runs the
    // prediction layer, and all of one kind: decode rows, or prompt rows whose logits are not wanted row by row. If it
    // throws, the cache stays unchanged, except that it may lose a state that it had no room to keep. A constraint that
    // throws fails its own text only: see RunningText::constraint.
    std::vector<std::vector<Chosen>> run(const std::vector<Part>& parts) const;
    // Whether the prediction layer takes part in the passes over a text.
    bool predicts(const RunningText& text) const;
    // The number of guesses that a step can verify after `length` tokens and the token that comes next.
    int64_t mostDrafts(const RunningText& text, int64_t length) const;

private:
    void extend(const std::vector<Part>& parts) const;
    std::vector<Chosen> choose(const std::vector<Part>& parts) const;
    int64_t settle(const Part& part, std::vector<Chosen>& chosen) const;
    void predict(const Part& part, int64_t rows, const std::vector<Chosen>& chosen) const;

    const LockedModel& _model;
    const SequenceLimits& _limits;
};

}  // namespace sharpi
