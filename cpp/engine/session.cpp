// See session.h.
#include "engine/session.h"

#include <algorithm>
#include <string>

#include "core/error.h"

namespace sharpi {

Session::Session(std::shared_ptr<Engine> engine) : _engine(std::move(engine)), _sequence(_engine->runner()) {}

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
    return _drafter.counts();
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
    _sampler.reset();
    settle();
    keep(0, RowKind::Prompt);
}

// Forgets the tokens that the cache is ahead by. If the state after the tokens that remain is lost, the next step
// computes it again.
void Session::settle() {
    const LockedModel model = _engine->runner().lock();
    _text.truncate(_text.size() - _ahead);
    _ahead = 0;
    _sequence.cutBack(model, _text.size());
    _chosen.clear();
    _drafter.forget();
}

// Keeps the first `tokens` of the text, or fewer, so that rows of this kind can follow and nothing is to be computed
// again.
void Session::keep(int64_t tokens, RowKind follower) {
    const LockedModel model = _engine->runner().lock();
    const bool tiled = follower == RowKind::Prompt;
    _text.truncate(tiled ? _sequence.cutForPrompt(model, tokens) : _sequence.cutBack(model, tokens));
}

// Computes the tokens of the session again that the cache has lost. `follower` is the token after them.
void Session::recompute(const LockedModel& model, int32_t follower) {
    while (_sequence.cutToComputed(model, _text) < _text.size()) {
        Piece piece = _sequence.nextPiece(model, _text, _text.size());
        if (!piece.follower) piece.follower = follower;
        run(model, piece);
    }
}

// Computes a piece and keeps it up to its last right guess. Returns what was chosen: the right guesses, and the token
// after them. If it throws, the cache stays unchanged, except that it may lose a state that it had no room to keep.
std::vector<int32_t> Session::run(const LockedModel& model, const Piece& piece) {
    const Batch batch = _sequence.batchOf(piece);
    try {
        _sequence.extend(model, piece);
        model.forward().run(batch, piece.logits);
        std::vector<int32_t> chosen;
        int64_t right = piece.end();
        if (piece.want == Want::Choice) {
            chosen = choose(model, piece);
            right -= piece.drafted + 1 - static_cast<int64_t>(chosen.size());
        }
        if (_sequence.cutBack(model, right) != right)
            throw Error(ErrorKind::Internal, "the state before a wrong draft was not kept");
        if (predicts()) predict(model, piece, right - piece.begin, chosen);
        _sequence.keepState(model, piece);
        return chosen;
    } catch (...) {
        _sequence.cutBack(model, piece.begin);
        throw;
    }
}

// Chooses each token as it would be chosen without drafts, up to the first that differs from its guess.
std::vector<int32_t> Session::choose(const LockedModel& model, const Piece& piece) {
    const int32_t* guesses = piece.tokens + piece.count - piece.drafted;
    std::vector<Choice> choices;
    for (int64_t i = 0; i <= piece.drafted; ++i) choices.push_back(_sampler->next(_history, {guesses, guesses + i}));
    std::vector<int32_t> chosen = model.forward().sample(std::move(choices));
    size_t right = 0;
    while (right + 1 < chosen.size() && chosen[right] == guesses[right]) ++right;
    chosen.resize(right + 1);
    return chosen;
}

// Whether the prediction layer takes part in a pass. It does if no generation is running: the next one may draft with
// it. A generation that drafts in another way leaves it out. The layer's cache then lacks those rows, which costs a
// later generation right guesses and never changes its text.
bool Session::predicts() const {
    return limits().predictionLayer && (!_sampler || _drafter.options().source == DraftOptions::Source::Prediction);
}

// Runs the prediction layer over the first `rows` rows of a piece that was computed. chosen: what choose() made of it.
void Session::predict(const LockedModel& model, const Piece& piece, int64_t rows, const std::vector<int32_t>& chosen) {
    Drafter::Rows passed{piece.kind, _sequence.handle(), piece.begin, {piece.tokens + 1, piece.tokens + rows}};
    const bool continues = !chosen.empty() && chosen.back() >= 0;
    // If the follower is not known, the token itself takes its place, so that the layer's cache has no holes.
    passed.followers.push_back(continues ? chosen.back() : piece.follower.value_or(piece.tokens[rows - 1]));
    if (!continues) return _drafter.predict(model.forward(), model.kv(), passed, nullptr);
    Drafter::Text text{*_sampler, _history, chosen, mostDrafts(model, piece.begin + rows)};
    _drafter.predict(model.forward(), model.kv(), passed, &text);
}

// The number of guesses that a step can verify after `length` tokens and the token that comes next.
int64_t Session::mostDrafts(const LockedModel& model, int64_t length) const {
    const DraftOptions& options = _drafter.options();
    if (options.source == DraftOptions::Source::Off) return 0;
    const int64_t rows = std::min({limits().context - length, limits().pieces.decodeRows, limits().headRows});
    return std::clamp<int64_t>(std::min<int64_t>(options.tokens, model.kv().snapshotRoom(_sequence.handle())), 0,
                               std::max<int64_t>(rows - 1, 0));
}

void Session::evaluate(const std::vector<int32_t>& tokens, RowKind kind, float* logits,
                       const std::vector<int64_t>& chunks, const Interrupted& interrupted) {
    std::lock_guard<std::mutex> lock(_mutex);
    _sampler.reset();
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
        _sequence.cutBack(model, _text.agreement(text, rules.oneArithmetic));
    };
    bool begun = false;
    try {
        for (size_t chunk = 0; _text.size() < text.size();) {
            if (interrupted && interrupted()) throw Error(ErrorKind::InvalidArgument, "interrupted");
            const LockedModel model = _engine->runner().lock();
            if (!begun) forgetOtherKinds(model);
            begun = true;
            const int64_t size = chunk < chunks.size() ? chunks[chunk] : rules.rows;
            Piece piece = _sequence.nextPiece(model, text, _sequence.pieceEnd(model, text, held, size));
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
    } else if (_sampler && last) {
        piece.want = Want::Choice;
    }
}

// Takes what was chosen from a piece whose tokens are in _text.
void Session::accept(std::vector<int32_t> chosen) {
    _ahead = chosen.empty() ? 0 : static_cast<int64_t>(chosen.size()) - 1;
    if (_sampler) _sampler->advance(chosen.size());
    _chosen = std::move(chosen);
}

// Kernels for prompts need as long for a few rows as for a tile of them, and a step of so few decode rows needs less.
RowKind Session::promptKind(int64_t tokens) const {
    return tokens < kPromptTile && !limits().pieces.oneArithmetic ? RowKind::Decode : RowKind::Prompt;
}

void Session::start(const std::vector<int32_t>& prompt, const SamplingParams& params, const Interrupted& interrupted,
                    const DraftOptions& drafts) {
    std::lock_guard<std::mutex> lock(_mutex);
    _sampler.reset();  // so that next() refuses to continue if start() fails
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
    const RowKind kind = promptKind(static_cast<int64_t>(prompt.size()));
    Transcript reusable;
    // Without the last token: the pass over it gives the logits.
    reusable.append(prompt.data(), static_cast<int64_t>(prompt.size()) - 1, kind);
    keep(_text.agreement(reusable, limits().pieces.oneArithmetic), kind);
    _reused = _text.size();
    _history = prompt;
    _drafter.begin(drafts);
    _sampler.emplace(params, limits().vocabSize);
    try {
        append(std::vector<int32_t>(prompt.begin() + _reused, prompt.end()), kind, nullptr, {}, interrupted);
    } catch (...) {
        _sampler.reset();
        throw;
    }
}

// A step after the tokens that were handed out, with as many drafts as there is room for.
void Session::decode() {
    const LockedModel model = _engine->runner().lock();
    recompute(model, _history.back());
    const int64_t begin = _text.size();
    std::vector<int32_t> tokens = _drafter.drafts(_history, mostDrafts(model, begin));
    tokens.insert(tokens.begin(), _history.back());
    while (tokens.size() > 1 && !model.kv().reserve(_sequence.handle(), static_cast<int64_t>(tokens.size())))
        tokens.pop_back();
    Piece piece{RowKind::Decode, tokens.data(), begin, static_cast<int64_t>(tokens.size()), Want::Choice};
    piece.drafted = piece.count - 1;
    _text.reserve(begin + piece.count);
    std::vector<int32_t> chosen = run(model, piece);
    // The first token, and the guesses that are right.
    _text.append(tokens.data(), static_cast<int64_t>(chosen.size()), RowKind::Decode);
    accept(std::move(chosen));
    _drafter.count(piece.drafted, _ahead);
}

std::optional<int32_t> Session::next() {
    std::lock_guard<std::mutex> lock(_mutex);
    if (!_sampler) throw Error(ErrorKind::Internal, "next() before start()");
    if (_chosen.empty()) {
        if (room() < 1) return std::nullopt;
        decode();
    } else if (_ahead > 0) {
        --_ahead;
    }
    const int32_t token = checkedToken(_chosen.front());
    _history.push_back(token);
    _chosen.erase(_chosen.begin());
    return token;
}

}  // namespace sharpi
