// See text_passes.h.
#include "engine/texts/text_passes.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/error.h"

namespace sharpi {

namespace {

// The number of guesses at the beginning that were right.
size_t rightGuesses(const std::vector<Chosen>& chosen, const std::vector<int32_t>& guesses) {
    size_t right = 0;
    while (right + 1 < chosen.size() && chosen[right].token == guesses[right]) ++right;
    return right;
}

std::vector<int32_t> guessesOf(const Piece& piece) {
    return {piece.tokens + piece.count - piece.drafted, piece.tokens + piece.count};
}

// Each token is chosen as it would be without drafts.
void addChoices(const TextPasses::Part& part, int64_t vocab, std::vector<Choice>& choices) {
    if (part.piece.want != Want::Choice) return;
    RunningText& text = *part.text;
    const std::vector<int32_t> guesses = guessesOf(part.piece);
    const size_t first = choices.size();
    for (size_t i = 0; i <= guesses.size(); ++i) {
        choices.push_back(text.sampler->next(text.history, {guesses.data(), guesses.data() + i}));
        choices.back().best = text.best;
    }
    text.constraint.mask(&choices[first], guesses, vocab);
}

}  // namespace

std::vector<std::vector<Chosen>> TextPasses::run(const std::vector<Part>& parts) const {
    Batch batch;
    for (const Part& part : parts) part.text->sequence.addRows(part.piece, batch);
    std::vector<std::vector<Chosen>> result;
    try {
        extend(parts);
        const Piece& first = parts.front().piece;
        const auto score = [&](int64_t from, int64_t count) {
            first.scores->take(_model.backend(), first.begin + first.again + from, count);
        };
        if (first.scores) _model.forward().run(batch, score);
        else _model.forward().run(batch, first.logits);
        std::vector<Chosen> all = choose(parts);
        auto at = all.begin();
        for (const Part& part : parts) {
            std::vector<Chosen>& chosen = result.emplace_back();
            if (part.piece.want == Want::Choice) {
                const auto end = at + part.piece.drafted + 1;
                chosen.assign(std::make_move_iterator(at), std::make_move_iterator(end));
                at = end;
            }
            const int64_t right = settle(part, chosen);
            if (predicts(*part.text)) predict(part, right - part.piece.begin, chosen);
            part.text->sequence.keepState(_model, part.piece);
        }
        for (const Part& part : parts) part.text->constraint.commit();
        return result;
    } catch (...) {
        for (const Part& part : parts) {
            part.text->sequence.cutBack(_model, part.piece.begin);
            part.text->constraint.undo();
        }
        throw;
    }
}

// Masks are asked for while a device may still be computing the logits.
std::vector<Chosen> TextPasses::choose(const std::vector<Part>& parts) const {
    std::vector<Choice> choices;
    for (const Part& part : parts) addChoices(part, _limits.vocabSize, choices);
    if (choices.empty()) return {};
    return _model.forward().sample(std::move(choices));
}

// Keeps what was rightly guessed, and the token after it. Returns where the text then ends in the cache.
int64_t TextPasses::settle(const Part& part, std::vector<Chosen>& chosen) const {
    const Piece& piece = part.piece;
    int64_t right = piece.end();
    if (piece.want == Want::Choice) {
        chosen.resize(rightGuesses(chosen, guessesOf(piece)) + 1);
        part.text->constraint.settle(chosen);
        right -= piece.drafted + 1 - static_cast<int64_t>(chosen.size());
    }
    if (part.text->sequence.cutBack(_model, right) != right)
        throw Error(ErrorKind::Internal, "the state before a wrong draft was not kept");
    return right;
}

// Guesses need states to roll back to. A text alone makes no more guesses than there are states for, but the texts of a
// step take them from each other.
void TextPasses::extend(const std::vector<Part>& parts) const {
    auto leave = static_cast<int32_t>(parts.size());
    for (const Part& part : parts) part.text->sequence.extend(_model, part.piece, --leave);
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
void TextPasses::predict(const Part& part, int64_t rows, const std::vector<Chosen>& chosen) const {
    const Piece& piece = part.piece;
    RunningText& text = *part.text;
    Drafter::Rows passed{piece.kind, text.sequence.handle(), piece.begin, {piece.tokens + 1, piece.tokens + rows}};
    const bool continues = !chosen.empty() && chosen.back().token >= 0;
    // If the follower is not known, the token itself takes its place, so that the layer's cache has no holes.
    passed.followers.push_back(continues ? chosen.back().token : piece.follower.value_or(piece.tokens[rows - 1]));
    if (!continues) return text.drafter.predict(_model.forward(), _model.kv(), passed, nullptr);
    Drafter::Text next{*text.sampler, text.history, {}, mostDrafts(text, piece.begin + rows)};
    for (const Chosen& one : chosen) next.chosen.push_back(one.token);
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
