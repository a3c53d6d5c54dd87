// See session.h.
#include "engine/session.h"

#include <algorithm>
#include <functional>
#include <string>

#include "core/error.h"

namespace sharpi {

Session::Session(std::shared_ptr<Engine> engine) : _engine(std::move(engine)), _running(_engine->runner()) {}

std::vector<int32_t> Session::tokens() const {
    std::lock_guard<std::mutex> lock(_mutex);
    return {_text.tokens().begin(), _text.tokens().end() - _ahead};
}

int64_t Session::reusedTokens() const {
    std::lock_guard<std::mutex> lock(_mutex);
    return _reused;
}

DraftCounts Session::draftCounts() const {
    std::lock_guard<std::mutex> lock(_mutex);
    return _running.drafter.counts();
}

void Session::requireRoom(int64_t tokens) const {
    std::lock_guard<std::mutex> lock(_mutex);
    checkRoom(tokens);
}

void Session::checkRoom(int64_t tokens) const {
    if (tokens == 0) throw Error(ErrorKind::InvalidArgument, "the prompt is empty: give at least one token");
    if (tokens > room()) {
        throw Error(ErrorKind::InvalidArgument,
                    std::to_string(tokens) + " tokens do not fit: the context has room for " + std::to_string(room()) +
                        "; load with a larger context or shorten the prompt");
    }
}

void Session::reset() {
    std::lock_guard<std::mutex> lock(_mutex);
    _running.sampler.reset();
    settle();
    keep(0, RowKind::Prompt);
}

// Forgets the tokens that the cache is ahead by. If the state after the tokens that remain is lost, the next step
// computes it again.
void Session::settle() {
    const LockedModel model = _engine->runner().lock();
    _text.truncate(_text.size() - _ahead);
    _ahead = 0;
    _running.sequence.cutBack(model, _text.size());
    _chosen.clear();
    _running.drafter.forget();
}

// Keeps the first `tokens` of the text, or fewer, so that rows of this kind can follow and nothing is to be computed
// again.
void Session::keep(int64_t tokens, RowKind follower) {
    const LockedModel model = _engine->runner().lock();
    const bool tiled = follower == RowKind::Prompt;
    _text.truncate(tiled ? _running.sequence.cutForPrompt(model, tokens) : _running.sequence.cutBack(model, tokens));
}

// Computes the tokens of the session again that the cache has lost. `follower` is the token after them.
void Session::recompute(const LockedModel& model, int32_t follower) {
    while (_running.sequence.cutToComputed(model, _text) < _text.size()) {
        Piece piece = _running.sequence.nextPiece(model, _text, _text.size());
        if (!piece.follower) piece.follower = follower;
        run(model, piece);
    }
}

std::vector<int32_t> Session::run(const LockedModel& model, const Piece& piece) {
    return TextPasses(model, limits()).run({{&_running, piece}}).front();
}

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

void Session::evaluate(const std::vector<int32_t>& tokens, RowKind kind, float* logits,
                       const std::vector<int64_t>& chunks, const Interrupted& interrupted) {
    std::lock_guard<std::mutex> lock(_mutex);
    _running.sampler.reset();
    settle();
    append(tokens, kind, logits, chunks, interrupted);
}

// If there is a sampler, a token is chosen from the last row's logits. Otherwise the logits of every row are written to
// `logits`. The session takes each piece of the tokens once it is computed, and with the first piece the kinds that the
// tokens give to the rows before them.
void Session::append(const std::vector<int32_t>& tokens, RowKind kind, float* logits,
                     const std::vector<int64_t>& chunks, const Interrupted& interrupted) {
    checkRoom(static_cast<int64_t>(tokens.size()));
    const int64_t held = _text.size();
    Transcript text = _text;
    text.append(tokens.data(), static_cast<int64_t>(tokens.size()), kind);
    _text.reserve(text.size());
    const PieceRules& rules = limits().pieces;
    const auto forgetOtherKinds = [&](const LockedModel& model) {
        _running.sequence.cutBack(model, _text.agreement(text, rules.oneArithmetic));
    };
    bool begun = false;
    try {
        for (size_t chunk = 0; _text.size() < text.size();) {
            if (interrupted && interrupted()) throw Error(ErrorKind::InvalidArgument, "interrupted");
            const LockedModel model = _engine->runner().lock();
            if (!begun) forgetOtherKinds(model);
            begun = true;
            const int64_t size = chunk < chunks.size() ? chunks[chunk] : rules.rows;
            Piece piece = _running.sequence.nextPiece(model, text, _running.sequence.pieceEnd(model, text, held, size));
            const bool hasNew = piece.end() > held;
            if (hasNew) addWants(piece, held, piece.end() == text.size(), logits);
            std::vector<int32_t> chosen = run(model, piece);
            if (!hasNew) continue;
            ++chunk;
            _text.follow(text, piece.end());
            accept(std::move(chosen));
        }
    } catch (...) {
        if (begun) forgetOtherKinds(_engine->runner().lock());
        throw;
    }
}

// Sets what is wanted of a piece with new tokens: those from `held` on, whose logits go to `logits`.
void Session::addWants(Piece& piece, int64_t held, bool last, float* logits) const {
    if (logits) {
        piece.want = Want::EveryRow;
        piece.again = std::max<int64_t>(held - piece.begin, 0);
        piece.logits = logits + (piece.begin + piece.again - held) * limits().vocabSize;
    } else if (_running.sampler && last) {
        piece.want = Want::Choice;
    }
}

// Takes what was chosen from a piece whose tokens are in _text.
void Session::accept(std::vector<int32_t> chosen) {
    _ahead = chosen.empty() ? 0 : static_cast<int64_t>(chosen.size()) - 1;
    if (_running.sampler) _running.sampler->advance(chosen.size());
    _chosen = std::move(chosen);
}

namespace {

// Kernels for prompts need as long for a few rows as for a tile of them, and a step of so few decode rows needs less.
RowKind promptKind(int64_t tokens, const PieceRules& rules) {
    return tokens < kPromptTile && !rules.oneArithmetic ? RowKind::Decode : RowKind::Prompt;
}

}  // namespace

void Session::start(const std::vector<int32_t>& prompt, const SamplingParams& params, const Interrupted& interrupted,
                    const DraftOptions& drafts) {
    std::lock_guard<std::mutex> lock(_mutex);
    _running.sampler.reset();  // so that next() refuses to continue if start() fails
    params.validate(limits().vocabSize);
    drafts.validate();
    if (drafts.source == DraftOptions::Source::Prediction && !limits().predictionLayer) {
        throw Error(ErrorKind::InvalidArgument,
                    "the model has no prediction layer to draft with; n-gram drafts work with any model");
    }
    if (prompt.empty()) throw Error(ErrorKind::InvalidArgument, "the prompt is empty: give at least one token");
    if (static_cast<int64_t>(prompt.size()) > limits().context) {
        throw Error(ErrorKind::InvalidArgument, "the prompt has " + std::to_string(prompt.size()) +
                                                    " tokens, the context holds " + std::to_string(limits().context) +
                                                    ": shorten it or ask for a larger context");
    }
    settle();
    const RowKind kind = promptKind(static_cast<int64_t>(prompt.size()), limits().pieces);
    Transcript reusable;
    // Without the last token: the pass over it gives the logits.
    reusable.append(prompt.data(), static_cast<int64_t>(prompt.size()) - 1, kind);
    keep(_text.agreement(reusable, limits().pieces.oneArithmetic), kind);
    _reused = _text.size();
    _running.history = prompt;
    _running.drafter.begin(drafts);
    _running.sampler.emplace(params, limits().vocabSize);
    try {
        append(std::vector<int32_t>(prompt.begin() + _reused, prompt.end()), kind, nullptr, {}, interrupted);
    } catch (...) {
        _running.sampler.reset();
        throw;
    }
}

// After the tokens that were handed out, with as many drafts as there is room for. Computes what the cache has lost.
Session::Rows Session::rowsToDecode(const LockedModel& model) {
    recompute(model, _running.history.back());
    const int64_t most = TextPasses(model, limits()).mostDrafts(_running, _text.size());
    Rows rows{this, _running.drafter.drafts(_running.history, most)};
    rows.tokens.insert(rows.tokens.begin(), _running.history.back());
    const auto count = [&] { return static_cast<int64_t>(rows.tokens.size()); };
    while (count() > 1 && !model.kv().reserve(_running.sequence.handle(), count())) rows.tokens.pop_back();
    _text.reserve(_text.size() + count());
    return rows;
}

void Session::decode(const LockedModel& model, const std::vector<Rows>& step) {
    std::vector<TextPasses::Part> parts;
    for (const Rows& rows : step) {
        Piece piece{RowKind::Decode, rows.tokens.data(), rows.session->_text.size(),
                    static_cast<int64_t>(rows.tokens.size()), Want::Choice};
        piece.drafted = piece.count - 1;
        parts.push_back({&rows.session->_running, piece});
    }
    std::vector<std::vector<int32_t>> chosen = TextPasses(model, step.front().session->limits()).run(parts);
    for (size_t i = 0; i < step.size(); ++i) {
        Session& session = *step[i].session;
        // The first token, and the guesses that are right.
        session._text.append(step[i].tokens.data(), static_cast<int64_t>(chosen[i].size()), RowKind::Decode);
        session.accept(std::move(chosen[i]));
        session._running.drafter.count(parts[i].piece.drafted, session._ahead);
    }
}

// If there is no room for a step of all these sessions, they take several. A session that lost tokens while others were
// prepared has a step of its own.
void Session::decodeTogether(const LockedModel& model, std::vector<Rows> step) {
    const auto isWhole = [&](const Rows& rows) {
        return model.kv().length(rows.session->_running.sequence.handle()) == rows.session->_text.size();
    };
    const auto lost = std::stable_partition(step.begin(), step.end(), isWhole);
    const auto decodeAlone = [&](const Rows& rows) { decode(model, {rows.session->rowsToDecode(model)}); };
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

// Steps of as many sessions as fit.
void Session::decodeAll(const std::vector<Session*>& sessions) {
    const SequenceLimits& limits = sessions.front()->limits();
    const LockedModel model = sessions.front()->_engine->runner().lock();
    const int64_t most = std::min(limits.pieces.decodeRows, limits.headRows);
    std::vector<Rows> step;
    int64_t taken = 0;
    for (Session* session : sessions) {
        Rows rows = session->rowsToDecode(model);
        const auto count = static_cast<int64_t>(rows.tokens.size());
        if (TextPasses(model, limits).predicts(session->_running)) {
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

std::vector<std::optional<int32_t>> Session::nextOf(const std::vector<Session*>& sessions) {
    std::vector<Session*> ordered = sessions;
    std::sort(ordered.begin(), ordered.end(), std::less<>());
    if (std::adjacent_find(ordered.begin(), ordered.end()) != ordered.end())
        throw Error(ErrorKind::InvalidArgument, "a session has only one next token");
    std::vector<std::unique_lock<std::mutex>> locks;  // in one order, so that two calls cannot wait for each other
    for (const Session* session : ordered) locks.emplace_back(session->_mutex);
    std::vector<Session*> waiting;
    for (Session* session : sessions) {
        if (session->_engine != sessions.front()->_engine)
            throw Error(ErrorKind::InvalidArgument, "sessions of different models cannot share a step");
        if (!session->_running.sampler) throw Error(ErrorKind::Internal, "next() before start()");
        if (session->_chosen.empty() && session->room() >= 1) waiting.push_back(session);
    }
    if (!waiting.empty()) decodeAll(waiting);
    // All tokens are checked before the first is handed out.
    for (Session* session : sessions) {
        if (session->_chosen.empty()) continue;
        session->_ahead = static_cast<int64_t>(session->_chosen.size()) - 1;
        checkedToken(session->_chosen.front());
    }
    std::vector<std::optional<int32_t>> tokens;
    for (Session* session : sessions) {
        tokens.emplace_back();
        if (session->_chosen.empty()) continue;
        tokens.back() = session->_chosen.front();
        session->_running.history.push_back(*tokens.back());
        session->_chosen.erase(session->_chosen.begin());
    }
    return tokens;
}

std::optional<int32_t> Session::next() { return nextOf({this}).front(); }

}  // namespace sharpi
