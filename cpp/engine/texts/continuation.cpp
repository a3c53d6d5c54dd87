// See continuation.h.
#include "engine/texts/continuation.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "core/error.h"

namespace sharpi {

namespace {

// Kernels for prompts need as long for a few rows as for a tile of them, and a step of so few decode rows needs less.
RowKind promptKind(int64_t tokens, const PieceRules& rules) {
    return tokens < kPromptTile && !rules.oneArithmetic ? RowKind::Decode : RowKind::Prompt;
}

// What a generation can take from the cache of its prompt: all but the last token, whose pass gives the logits.
Transcript reusablePart(const std::vector<int32_t>& prompt, const PieceRules& rules) {
    const auto tokens = static_cast<int64_t>(prompt.size());
    Transcript part;
    part.append(prompt.data(), tokens - 1, promptKind(tokens, rules));
    return part;
}

// Whether a text holds all of its prompt, which is then forgotten.
bool endIfWhole(std::optional<Addition>& prompt, const HeldText& held) {
    if (held.size() < prompt->text.size()) return false;
    prompt.reset();
    return true;
}

// Computes a piece, of about `rows` rows, of what the cache has lost. Returns whether nothing is missing any more.
bool recompute(HeldText& held, int64_t rows) {
    const LockedModel model = held.engine().runner().lock();
    const int64_t computed = held.running().sequence.cutToComputed(model, held.text());
    return held.recomputePiece(model, computed + std::clamp<int64_t>(rows, 1, held.limits().pieces.rows));
}

}  // namespace

std::vector<int32_t> Continuation::tokens() const {
    const std::vector<int32_t>& all = _held.text().tokens();
    return {all.begin(), all.end() - _ahead};
}

void Continuation::setAside() {
    _held.setAside();
    _held.running().drafter.forget();
}

// Forgets the tokens that the cache is ahead by.
void Continuation::settle() {
    if (_prompt) _held.abandon(*_prompt);
    _prompt.reset();
    _held.cut(_held.size() - _ahead);
    _ahead = 0;
    _chosen.clear();
    _held.running().drafter.forget();
}

void Continuation::cutBack(int64_t tokens) {
    _held.running().sampler.reset();
    settle();
    if (tokens < _held.size()) _held.cut(tokens);
}

void Continuation::beginEvaluation(const std::vector<int32_t>& tokens, RowKind kind, float* logits) {
    _held.running().sampler.reset();
    settle();
    _prompt = _held.adding(tokens, kind, logits);
}

bool Continuation::evaluatePiece(int64_t rows) {
    const bool isNew = addPiece(*_prompt, rows);
    endIfWhole(_prompt, _held);
    return isNew;
}

void Continuation::complete(const std::vector<int64_t>& chunks, const Interrupted& interrupted) {
    try {
        for (size_t chunk = 0; _held.size() < _prompt->text.size();) {
            if (interrupted && interrupted()) throw Error(ErrorKind::InvalidArgument, "interrupted");
            if (addPiece(*_prompt, chunk < chunks.size() ? chunks[chunk] : _held.limits().pieces.rows)) ++chunk;
        }
        _prompt.reset();
    } catch (...) {
        _held.running().sampler.reset();
        _held.abandon(*_prompt);
        _prompt.reset();
        throw;
    }
}

// Returns whether the piece had new tokens.
bool Continuation::addPiece(Addition& addition, int64_t rows) {
    const LockedModel model = _held.engine().runner().lock();
    const Piece piece = _held.nextPiece(model, addition, rows);
    std::vector<std::vector<Chosen>> chosen = TextPasses(model, _held.limits()).run({{&_held.running(), piece}});
    // Nothing from here on may need memory: the cache holds the piece already, and the text would lack it.
    if (!_held.take(model, addition, piece)) return false;
    if (_held.running().sampler) _held.running().sampler->advance(chosen.front().size());
    _chosen = std::move(chosen.front());
    return true;
}

// --- generation ------------------------------------------------------------------------------------------------------

void Continuation::endAnswer() {
    _held.running().constraint = {};
    _scores.reset();
}

void Continuation::begin(const std::vector<int32_t>& prompt, const SamplingParams& params, const DraftOptions& drafts,
                         const AnswerExtras& extras, const std::vector<int64_t>& marks) {
    RunningText& running = _held.running();
    running.sampler.reset();  // so that nothing follows if this fails
    params.validate(_held.limits().vocabSize);
    drafts.validate();
    if (drafts.source == DraftOptions::Source::Prediction && !_held.limits().predictionLayer) {
        throw Error(ErrorKind::InvalidArgument,
                    "the model has no prediction layer to draft with; n-gram drafts work with any model");
    }
    if (prompt.empty()) throw Error(ErrorKind::InvalidArgument, "the prompt is empty: give at least one token");
    if (static_cast<int64_t>(prompt.size()) > _held.limits().context) {
        throw Error(ErrorKind::InvalidArgument,
                    "the prompt has " + std::to_string(prompt.size()) + " tokens, the context holds " +
                        std::to_string(_held.limits().context) + ": shorten it or ask for a larger context");
    }
    settle();
    const RowKind kind = promptKind(static_cast<int64_t>(prompt.size()), _held.limits().pieces);
    endAnswer();
    _held.keep(extras.echo ? 0 : reusable(prompt), kind);
    _reused = _held.size();
    running.history = prompt;
    running.drafter.begin(drafts);
    Addition addition = _held.adding({prompt.begin() + _reused, prompt.end()}, kind, nullptr, marks);
    if (extras.echo) addition.scores = &_scores.emplace(prompt, std::max(extras.best, 0));
    running.best = extras.best;
    running.constraint = ConstraintFollower(extras.constraint);
    running.sampler.emplace(params, _held.limits().vocabSize);
    _prompt = std::move(addition);
}

bool Continuation::prepare(int64_t rows) {
    if (!_held.running().sampler) throw Error(ErrorKind::Internal, "prepare() before begin()");
    if (!_prompt) return recompute(_held, rows);
    adoptPrompt();
    addPiece(*_prompt, rows);
    return endIfWhole(_prompt, _held);
}

void Continuation::adoptPrompt() {
    if (!_prompt || _prompt->scores) return;  // only what is computed gives scores
    const int64_t before = _held.size();
    _held.adopt(*_prompt);
    _reused += _held.size() - before;
}

int64_t Continuation::reusable(const std::vector<int32_t>& prompt) const {
    if (prompt.empty()) return 0;
    return _held.text().agreement(reusablePart(prompt, _held.limits().pieces), _held.limits().pieces.oneArithmetic);
}

std::vector<Chosen> Continuation::hand(size_t most) {
    std::vector<int32_t>& history = _held.running().history;
    const size_t count = std::min(most, _chosen.size());
    if (history.capacity() < history.size() + count) history.reserve(2 * (history.size() + count));
    const auto end = _chosen.begin() + static_cast<std::ptrdiff_t>(count);
    std::vector<Chosen> handed(std::make_move_iterator(_chosen.begin()), std::make_move_iterator(end));
    _chosen.erase(_chosen.begin(), end);
    _ahead = static_cast<int64_t>(_chosen.size());
    for (const Chosen& chosen : handed) history.push_back(chosen.token);
    return handed;
}

// --- steps -----------------------------------------------------------------------------------------------------------

// After the tokens that were handed out, with as many drafts as there is room for.
Continuation::Rows Continuation::rowsToDecode(const LockedModel& model, int64_t drafts) {
    while (!_held.recomputePiece(model, _held.size())) {
    }
    _held.share(model);
    const RunningText& running = _held.running();
    const int64_t most = std::min(drafts, TextPasses(model, _held.limits()).mostDrafts(running, _held.size()));
    Rows rows{this, running.drafter.drafts(running.history, most)};
    rows.tokens.insert(rows.tokens.begin(), running.history.back());
    const auto count = [&] { return static_cast<int64_t>(rows.tokens.size()); };
    while (count() > 1 && !model.kv().reserve(running.sequence.handle(), count())) rows.tokens.pop_back();
    _held.reserve(_held.size() + count());
    return rows;
}

TextPasses::Part Continuation::partOf(const Rows& rows) {
    Piece piece{RowKind::Decode, rows.tokens.data(), _held.size(), static_cast<int64_t>(rows.tokens.size()),
                Want::Choice};
    piece.drafted = piece.count - 1;
    return {&_held.running(), piece};
}

// Takes the first token of its rows, and the guesses that are right.
void Continuation::accept(const Rows& rows, std::vector<Chosen> chosen) {
    _held.append(rows.tokens, chosen.size());
    _ahead = static_cast<int64_t>(chosen.size()) - 1;
    _held.running().sampler->advance(chosen.size());
    _held.running().drafter.count(static_cast<int64_t>(rows.tokens.size()) - 1, _ahead);
    _chosen = std::move(chosen);
}

// --- prompts ---------------------------------------------------------------------------------------------------------

std::vector<bool> prepareTogether(const std::vector<Continuation*>& texts, int64_t rows) {
    std::vector<bool> done(texts.size());
    std::vector<Continuation*> together;
    std::vector<TextPasses::Part> parts;
    for (Continuation* text : texts)
        if (texts.size() > 1) text->adoptPrompt();
    const SequenceLimits& limits = texts.front()->_held.limits();
    {
        const LockedModel model = texts.front()->_held.engine().runner().lock();
        const TextPasses passes(model, limits);
        int64_t left = std::min(rows, limits.pieces.rows);
        // If a part found no room when others have begun their step, their states might already be overwritten.
        const int32_t states = model.kv().states().stepRoom();
        const auto hasRoom = [&](const Piece& piece, const HeldText& held) {
            return static_cast<int64_t>(parts.size()) < states &&
                   model.kv().reserve(held.running().sequence.handle(), piece.count);
        };
        for (Continuation* text : texts) {
            HeldText& held = text->_held;
            std::optional<Addition>& prompt = text->_prompt;
            const bool isAlone = !prompt || prompt->scores || passes.predicts(held.running());
            const bool isFull = left < 1 || static_cast<int64_t>(parts.size()) == limits.pieces.prompts;
            if (isAlone || isFull) continue;
            const Piece piece = held.nextPiece(model, *prompt, left);
            if (piece.kind != RowKind::Prompt || piece.count > left || !hasRoom(piece, held)) continue;
            left -= piece.count;
            parts.push_back({&held.running(), piece});
            together.push_back(text);
        }
        if (parts.size() > 1 && together.front() == texts.front()) {
            std::vector<std::vector<Chosen>> chosen = passes.run(parts);
            for (size_t i = 0; i < parts.size(); ++i) {
                Continuation& text = *together[i];
                if (text._held.take(model, *text._prompt, parts[i].piece)) {
                    text._held.running().sampler->advance(chosen[i].size());
                    text._chosen = std::move(chosen[i]);
                }
                const auto at = std::find(texts.begin(), texts.end(), &text) - texts.begin();
                done[static_cast<size_t>(at)] = endIfWhole(text._prompt, text._held);
            }
            return done;
        }
        for (const TextPasses::Part& part : parts) part.text->sequence.cutBack(model, part.piece.begin);
    }
    done[0] = texts.front()->prepare(rows);
    return done;
}

}  // namespace sharpi
