// See text_passes.h.
#include "engine/texts/text_passes.h"

#include <algorithm>

#include "core/error.h"

namespace sharpi {

namespace {

// The number of guesses at the beginning that were right.
size_t rightGuesses(const std::vector<int32_t>& chosen, const int32_t* guesses) {
    size_t right = 0;
    while (right + 1 < chosen.size() && chosen[right] == guesses[right]) ++right;
    return right;
}

// Each token is chosen as it would be without drafts.
void addChoices(const TextPasses::Part& part, std::vector<Choice>& choices) {
    const Piece& piece = part.piece;
    if (piece.want != Want::Choice) return;
    const int32_t* guesses = piece.tokens + piece.count - piece.drafted;
    for (int64_t i = 0; i <= piece.drafted; ++i)
        choices.push_back(part.text->sampler->next(part.text->history, {guesses, guesses + i}));
}

}  // namespace

std::vector<std::vector<int32_t>> TextPasses::run(const std::vector<Part>& parts) const {
    Batch batch;
    for (const Part& part : parts) part.text->sequence.addRows(part.piece, batch);
    std::vector<std::vector<int32_t>> result;
    try {
        extend(parts);
        _model.forward().run(batch, parts.front().piece.logits);
        std::vector<Choice> choices;
        for (const Part& part : parts) addChoices(part, choices);
        std::vector<int32_t> all;
        if (!choices.empty()) all = _model.forward().sample(std::move(choices));
        auto at = all.begin();
        for (const Part& part : parts) {
            const Piece& piece = part.piece;
            std::vector<int32_t>& chosen = result.emplace_back();
            int64_t right = piece.end();
            if (piece.want == Want::Choice) {
                chosen.assign(at, at + piece.drafted + 1);
                at += piece.drafted + 1;
                chosen.resize(rightGuesses(chosen, piece.tokens + piece.count - piece.drafted) + 1);
                right -= piece.drafted + 1 - static_cast<int64_t>(chosen.size());
            }
            if (part.text->sequence.cutBack(_model, right) != right)
                throw Error(ErrorKind::Internal, "the state before a wrong draft was not kept");
            if (predicts(*part.text)) predict(part, right - piece.begin, chosen);
            part.text->sequence.keepState(_model, piece);
        }
        return result;
    } catch (...) {
        for (const Part& part : parts) part.text->sequence.cutBack(_model, part.piece.begin);
        throw;
    }
}

// Guesses need states to roll back to. A text alone makes no more guesses than there are states for, but the texts of a
// step take them from each other.
void TextPasses::extend(const std::vector<Part>& parts) const {
    for (const Part& part : parts) part.text->sequence.extend(_model, part.piece);
    const RecurrentState& states = _model.kv().states();
    for (const Part& part : parts) {
        const auto kept = static_cast<int64_t>(states.steps(part.text->sequence.handle()).size());
        if (parts.size() > 1 && states.any() && kept <= part.piece.drafted)
            throw Error(ErrorKind::OutOfMemory, "no room for the states of all texts of a step");
    }
}

// If no generation is running, it does: the next one may draft with it. A generation that drafts in another way leaves
// it out. The layer's cache then lacks those rows, which costs a later generation right guesses and never changes its
// text.
bool TextPasses::predicts(const RunningText& text) const {
    return _limits.predictionLayer &&
           (!text.sampler || text.drafter.options().source == DraftOptions::Source::Prediction);
}

// Runs the prediction layer over the first `rows` rows of a part that was computed.
void TextPasses::predict(const Part& part, int64_t rows, const std::vector<int32_t>& chosen) const {
    const Piece& piece = part.piece;
    RunningText& text = *part.text;
    Drafter::Rows passed{piece.kind, text.sequence.handle(), piece.begin, {piece.tokens + 1, piece.tokens + rows}};
    const bool continues = !chosen.empty() && chosen.back() >= 0;
    // If the follower is not known, the token itself takes its place, so that the layer's cache has no holes.
    passed.followers.push_back(continues ? chosen.back() : piece.follower.value_or(piece.tokens[rows - 1]));
    if (!continues) return text.drafter.predict(_model.forward(), _model.kv(), passed, nullptr);
    Drafter::Text next{*text.sampler, text.history, chosen, mostDrafts(text, piece.begin + rows)};
    text.drafter.predict(_model.forward(), _model.kv(), passed, &next);
}

int64_t TextPasses::mostDrafts(const RunningText& text, int64_t length) const {
    const DraftOptions& options = text.drafter.options();
    if (options.source == DraftOptions::Source::Off) return 0;
    const int64_t rows = std::min({_limits.context - length, _limits.pieces.decodeRows, _limits.headRows});
    return std::clamp<int64_t>(std::min<int64_t>(options.tokens, _model.kv().snapshotRoom(text.sequence.handle())), 0,
                               std::max<int64_t>(rows - 1, 0));
}

}  // namespace sharpi
