// See session.h.
#include "engine/session.h"

#include <algorithm>
#include <string>

#include "core/error.h"

namespace sharpi {

Session::Session(std::shared_ptr<Engine> engine) : _engine(std::move(engine)) {
    std::lock_guard<std::mutex> lock(_engine->_mutex);
    _sequence = _engine->_kv->createSequence();
}

Session::~Session() {
    std::lock_guard<std::mutex> lock(_engine->_mutex);
    _engine->_kv->releaseSequence(_sequence);
}

std::vector<int32_t> Session::tokens() const {
    std::lock_guard<std::mutex> use(_use);
    return {_text.tokens().begin(), _text.tokens().end() - _ahead};
}

DraftCounts Session::draftCounts() const {
    std::lock_guard<std::mutex> use(_use);
    return _drafter.counts();
}

void Session::requireRoom(int64_t tokens) const {
    std::lock_guard<std::mutex> use(_use);
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
    std::lock_guard<std::mutex> use(_use);
    _sampler.reset();
    settle();
    keep(0);
}

PieceRules Session::rules() const {
    const Backend& backend = *_engine->_backend;
    const int64_t rows = _engine->_options.batch;
    return {backend.oneArithmetic(), backend.promptStep(), rows, std::min(rows, backend.decodeRows())};
}

// Forgets what the cache is ahead by. A state that is not there for what remains is computed again by the next step.
void Session::settle() {
    std::lock_guard<std::mutex> lock(_engine->_mutex);
    _text.truncate(_text.size() - _ahead);
    _ahead = 0;
    cutBack(_text.size());
    _chosen.clear();
    _drafter.forget();
}

// Keeps the first `tokens`, or fewer, so that prompt rows may go on from there without anything to compute again.
void Session::keep(int64_t tokens) {
    std::lock_guard<std::mutex> lock(_engine->_mutex);
    const int64_t step = _engine->_backend->promptStep();
    int64_t kept = cutBack(tokens);
    while (kept % step) kept = cutBack(kept - kept % step);
    _text.truncate(kept);
}

// Leaves at most the first `tokens` in the cache, with the engine locked. How many it holds then: see
// KvCache::truncate.
int64_t Session::cutBack(int64_t tokens) {
    KvCache& kv = *_engine->_kv;
    return kv.truncate(_sequence, std::min(tokens, kv.length(_sequence)));
}

// How many tokens of a text that begins with what the cache holds need not be computed, with the engine locked. Cuts
// back what is in the way of prompt rows.
int64_t Session::cutToComputed(const Transcript& text) {
    const int64_t step = _engine->_backend->promptStep();
    int64_t tokens = _engine->_kv->length(_sequence);
    while (tokens < text.promptTokens() && tokens % step) tokens = cutBack(tokens - tokens % step);
    return tokens;
}

// What to compute next of a text that is not all computed, to the token `wanted` or near it, with the engine locked.
Session::Piece Session::nextPiece(const Transcript& text, int64_t wanted) {
    const Stretch stretch = text.piece(cutToComputed(text), wanted, rules());
    Piece piece{stretch.kind, text.tokens().data() + stretch.begin, stretch.begin, stretch.end - stretch.begin};
    piece.endsPrompt = stretch.end == text.promptTokens();
    if (stretch.end < text.size()) piece.follower = text.tokens()[static_cast<size_t>(stretch.end)];
    return piece;
}

// Computes again what the cache lost of the session's tokens, after which comes `follower`, with the engine locked.
void Session::recompute(int32_t follower) {
    while (cutToComputed(_text) < _text.size()) {
        Piece piece = nextPiece(_text, _text.size());
        if (!piece.follower) piece.follower = follower;
        run(piece);
    }
}

Batch Session::batchOf(const Piece& piece) const {
    int64_t firstWanted = piece.count;
    if (piece.want == Want::EveryRow) firstWanted = piece.again;
    if (piece.want == Want::Choice) firstWanted -= 1 + piece.drafted;
    Batch batch;
    for (int64_t i = 0; i < piece.count; ++i) {
        batch.add(piece.kind, piece.tokens[i], static_cast<int32_t>(piece.begin + i), _sequence, i >= firstWanted);
    }
    return batch;
}

// From where a later prompt goes on, if it is given again or has another end: the last place before a prompt's last
// token at which prompt rows may begin. If that is any place, only a generation's prompt is worth it.
std::optional<int64_t> Session::stateToKeep(const Piece& piece) const {
    const int64_t step = _engine->_backend->promptStep();
    if (piece.kind != RowKind::Prompt || !piece.endsPrompt || (step == 1 && piece.want != Want::Choice))
        return std::nullopt;
    return (piece.end() - 1) / step * step;
}

// Computes a piece with the engine locked, and keeps what is right of it. What was chosen: the guesses that are right,
// and the token after them. If it throws, the cache is as it was, but for a state that there was no room to keep.
std::vector<int32_t> Session::run(const Piece& piece) {
    KvCache& kv = *_engine->_kv;
    const int64_t end = piece.end();
    const std::optional<int64_t> kept = stateToKeep(piece);
    std::vector<int64_t> marks;
    if (kept && *kept > piece.begin) marks.push_back(*kept);
    for (int64_t length = end - piece.drafted; length < end; ++length) marks.push_back(length);
    const Batch batch = batchOf(piece);
    try {
        kv.extend(_sequence, piece.count, marks);
        _engine->_forward->run(batch, piece.logits);
        std::vector<int32_t> chosen;
        int64_t right = end;
        if (piece.want == Want::Choice) {
            chosen = choose(piece);
            right = end - piece.drafted + static_cast<int64_t>(chosen.size()) - 1;
        }
        if (kv.truncate(_sequence, right) != right)
            throw Error(ErrorKind::Internal, "the state of a draft was not kept");
        if (predicts()) predict(piece, right - piece.begin, chosen);
        if (kept) kv.keepState(_sequence, *kept);
        return chosen;
    } catch (...) {
        cutBack(piece.begin);
        throw;
    }
}

// As without drafts each token would have been, so far as the guesses before it were right.
std::vector<int32_t> Session::choose(const Piece& piece) {
    const int32_t* guesses = piece.tokens + piece.count - piece.drafted;
    std::vector<Choice> choices;
    for (int64_t i = 0; i <= piece.drafted; ++i) choices.push_back(_sampler->next(_history, {guesses, guesses + i}));
    std::vector<int32_t> chosen = _engine->_forward->sample(std::move(choices));
    size_t right = 0;
    while (right + 1 < chosen.size() && chosen[right] == guesses[right]) ++right;
    chosen.resize(right + 1);
    return chosen;
}

// Where nobody generates, whoever goes on from the tokens may want drafts. A generation that drafts in another way
// leaves the layer out: its cache has nothing of those rows then, which costs a later generation right guesses, never
// the text.
bool Session::predicts() const {
    return !_engine->_spec.predictions.empty() &&
           (!_sampler || _drafter.options().source == DraftOptions::Source::Prediction);
}

// Takes the prediction layer over the first `rows` of a piece that was computed; the guesses among them are the chosen
// tokens.
void Session::predict(const Piece& piece, int64_t rows, const std::vector<int32_t>& chosen) {
    Drafter::Rows passed{piece.kind, _sequence, piece.begin, {piece.tokens + 1, piece.tokens + rows}};
    const bool goesOn = !chosen.empty() && chosen.back() >= 0;
    // Where no follower is known the token itself stands in, so that the layer's cache has no holes.
    passed.followers.push_back(goesOn ? chosen.back() : piece.follower.value_or(piece.tokens[rows - 1]));
    if (!goesOn) return _drafter.predict(*_engine->_forward, *_engine->_kv, passed, nullptr);
    Drafter::Text text{*_sampler, _history, chosen, mostDrafts(piece.begin + rows)};
    _drafter.predict(*_engine->_forward, *_engine->_kv, passed, &text);
}

// The number of guesses that can be verified behind `length` tokens and the one that comes next.
int64_t Session::mostDrafts(int64_t length) const {
    const DraftOptions& options = _drafter.options();
    if (options.source == DraftOptions::Source::Off) return 0;
    const int64_t rows =
        std::min({_engine->_options.context - length, rules().decodeRows, _engine->_backend->headRows()});
    return std::clamp<int64_t>(std::min<int64_t>(options.tokens, _engine->_kv->snapshotRoom(_sequence)), 0,
                               std::max<int64_t>(rows - 1, 0));
}

void Session::evaluate(const std::vector<int32_t>& tokens, RowKind kind, float* logits,
                       const std::vector<int64_t>& chunks, const Interrupted& interrupted) {
    std::lock_guard<std::mutex> use(_use);
    _sampler.reset();
    settle();
    append(tokens, kind, logits, chunks, interrupted);
}

// With a sampler, the last row's logits give a token; without, every row's are written where `logits` says. The session
// takes the tokens, and what they make of those before them, as soon as some of them are computed.
void Session::append(const std::vector<int32_t>& tokens, RowKind kind, float* logits,
                     const std::vector<int64_t>& chunks, const Interrupted& interrupted) {
    checkRoom(static_cast<int64_t>(tokens.size()));
    const int64_t held = _text.size();
    Transcript text = _text;
    text.append(tokens.data(), static_cast<int64_t>(tokens.size()), kind);
    _text.reserve(text.size());
    const auto forgetOtherKinds = [&] { cutBack(_text.agreement(text, rules().oneArithmetic)); };
    bool begun = false;
    try {
        for (size_t chunk = 0; _text.size() < text.size();) {
            if (interrupted && interrupted()) throw Error(ErrorKind::InvalidArgument, "interrupted");
            std::lock_guard<std::mutex> lock(_engine->_mutex);
            if (!begun) forgetOtherKinds();
            begun = true;
            Piece piece =
                nextPiece(text, pieceEnd(text, held, chunk < chunks.size() ? chunks[chunk] : _engine->_options.batch));
            const bool hasNew = piece.end() > held;
            if (hasNew) addWants(piece, held, piece.end() == text.size(), logits);
            std::vector<int32_t> chosen = run(piece);
            if (!hasNew) continue;
            ++chunk;
            _text.follow(text, piece.end());
            accept(std::move(chosen));
        }
    } catch (...) {
        std::lock_guard<std::mutex> lock(_engine->_mutex);
        if (begun) forgetOtherKinds();
        throw;
    }
}

// Where a piece should end that has `chunk` new tokens, which begin at `held`. Tokens that become prompt rows share
// their passes. What was only lost is computed alone, so that new tokens that fail do not lose it again. With the
// engine locked.
int64_t Session::pieceEnd(const Transcript& text, int64_t held, int64_t chunk) {
    const int64_t begin = cutToComputed(text);
    if (begin < held && rules().oneArithmetic) return held;
    return std::max(begin, held) + std::clamp<int64_t>(chunk, 1, _engine->_options.batch);
}

// What is wanted of a piece that has new tokens: those from `held` on, whose logits are written from `logits` on.
void Session::addWants(Piece& piece, int64_t held, bool last, float* logits) const {
    if (logits) {
        piece.want = Want::EveryRow;
        piece.again = std::max<int64_t>(held - piece.begin, 0);
        piece.logits = logits + (piece.begin + piece.again - held) * _engine->_spec.vocabSize;
    } else if (_sampler && last) {
        piece.want = Want::Choice;
    }
}

// Takes on what was chosen by a piece whose tokens the session has taken.
void Session::accept(std::vector<int32_t> chosen) {
    _ahead = chosen.empty() ? 0 : static_cast<int64_t>(chosen.size()) - 1;
    if (_sampler) _sampler->advance(chosen.size());
    _chosen = std::move(chosen);
}

void Session::start(const std::vector<int32_t>& prompt, const SamplingParams& params, const Interrupted& interrupted,
                    const DraftOptions& drafts) {
    std::lock_guard<std::mutex> use(_use);
    _sampler.reset();  // next() refuses to go on from a start that failed
    params.validate(_engine->_spec.vocabSize);
    drafts.validate();
    if (drafts.source == DraftOptions::Source::Prediction && _engine->_spec.predictions.empty()) {
        throw Error(ErrorKind::InvalidArgument,
                    "the model has no prediction layer to draft with; n-gram drafts work with any model");
    }
    if (prompt.empty()) throw Error(ErrorKind::InvalidArgument, "the prompt is empty: give at least one token");
    if (static_cast<int64_t>(prompt.size()) > _engine->_options.context) {
        throw Error(ErrorKind::InvalidArgument,
                    "the prompt has " + std::to_string(prompt.size()) + " tokens, the context holds " +
                        std::to_string(_engine->_options.context) + ": shorten it or ask for a larger context");
    }
    settle();
    Transcript reusable;
    reusable.append(prompt.data(), static_cast<int64_t>(prompt.size()) - 1,
                    RowKind::Prompt);  // not the last: its logits are needed
    keep(_text.agreement(reusable, rules().oneArithmetic));
    _reused = _text.size();
    _history = prompt;
    _drafter.begin(drafts);
    _sampler.emplace(params, _engine->_spec.vocabSize);
    try {
        append(std::vector<int32_t>(prompt.begin() + _reused, prompt.end()), RowKind::Prompt, nullptr, {}, interrupted);
    } catch (...) {
        _sampler.reset();
        throw;
    }
}

// A step behind the text that was handed out, with as many drafts as there is room for.
void Session::decode() {
    std::lock_guard<std::mutex> lock(_engine->_mutex);
    recompute(_history.back());
    const int64_t begin = _text.size();
    std::vector<int32_t> tokens = _drafter.drafts(_history, mostDrafts(begin));
    tokens.insert(tokens.begin(), _history.back());
    while (tokens.size() > 1 && !_engine->_kv->reserve(_sequence, static_cast<int64_t>(tokens.size())))
        tokens.pop_back();
    Piece piece{RowKind::Decode, tokens.data(), begin, static_cast<int64_t>(tokens.size()), Want::Choice};
    piece.drafted = piece.count - 1;
    _text.reserve(begin + piece.count);
    std::vector<int32_t> chosen = run(piece);
    _text.append(tokens.data(), static_cast<int64_t>(chosen.size()),
                 RowKind::Decode);  // the first, and the guesses that are right
    accept(std::move(chosen));
    _drafter.count(piece.drafted, _ahead);
}

std::optional<int32_t> Session::next() {
    std::lock_guard<std::mutex> use(_use);
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
