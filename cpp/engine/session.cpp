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
    return {_tokens.begin(), _tokens.end() - _ahead};
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
        throw Error(ErrorKind::InvalidArgument, std::to_string(tokens) + " tokens do not fit: the context has room for " +
                                                    std::to_string(room()) + "; load with a larger context or shorten the prompt");
    }
}

void Session::reset() {
    std::lock_guard<std::mutex> use(_use);
    _sampler.reset();
    settle();
    keep(0);
}

// Forgets what the cache is ahead by. A state that is not there for what remains is computed again by the next step.
void Session::settle() {
    std::lock_guard<std::mutex> lock(_engine->_mutex);
    KvCache& kv = *_engine->_kv;
    _tokens.resize(_tokens.size() - static_cast<size_t>(_ahead));
    _ahead = 0;
    kv.truncate(_sequence, std::min(static_cast<int64_t>(_tokens.size()), kv.length(_sequence)));
    _chosen.clear();
    _drafter.forget();
}

// Keeps the first `tokens`, or fewer: see KvCache::truncate.
void Session::keep(int64_t tokens) {
    std::lock_guard<std::mutex> lock(_engine->_mutex);
    KvCache& kv = *_engine->_kv;  // which a step that failed may have left with fewer
    _tokens.resize(static_cast<size_t>(kv.truncate(_sequence, std::min(tokens, kv.length(_sequence)))));
}

// Computes again what the cache lost of the session's tokens, after which comes `follower`, with the engine locked.
void Session::recompute(int32_t follower) {
    const auto held = static_cast<int64_t>(_tokens.size());
    for (int64_t begin = _engine->_kv->length(_sequence); begin < held;) {
        Piece piece{_tokens.data() + begin, begin, std::min(_engine->_options.batch, held - begin), Want::Nothing};
        begin += piece.count;
        piece.follower = begin < held ? _tokens[static_cast<size_t>(begin)] : follower;
        run(piece);
    }
}

// Computes a piece with the engine locked, and keeps what is right of it. What was chosen: the guesses that are right, and the
// token after them. If it throws, the cache is as it was, but for a state that there was no room to keep.
std::vector<int32_t> Session::run(const Piece& piece) {
    KvCache& kv = *_engine->_kv;
    const int64_t firstChoice = piece.count - 1 - piece.drafted;
    Batch batch;
    for (int64_t i = 0; i < piece.count; ++i) {
        const bool wanted = piece.want == Want::EveryRow || (piece.want == Want::Choice && i >= firstChoice);
        batch.add(RowKind::Prompt, piece.tokens[i], static_cast<int32_t>(piece.begin + i), _sequence, wanted);
    }
    // A prompt may be given again, or with another end: all but its last token are then held.
    const int64_t snapshots = piece.drafted ? piece.drafted : piece.count > 1 && piece.want == Want::Choice ? 1 : 0;
    try {
        kv.extend(_sequence, piece.count, static_cast<int32_t>(snapshots));
        _engine->_forward->run(batch, piece.logits);
        std::vector<int32_t> chosen;
        int64_t right = piece.count;
        if (piece.want == Want::Choice) {
            chosen = choose(piece);
            right = firstChoice + static_cast<int64_t>(chosen.size());
        }
        if (kv.truncate(_sequence, piece.begin + right) != piece.begin + right) throw Error(ErrorKind::Internal, "the state of a draft was not kept");
        if (predicts()) predict(piece, right, chosen);
        return chosen;
    } catch (...) {
        kv.truncate(_sequence, std::min(piece.begin, kv.length(_sequence)));
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

// Where nobody generates, whoever goes on from the tokens may want drafts. A generation that drafts in another way leaves the layer
// out: its cache has nothing of those rows then, which costs a later generation right guesses, never the text.
bool Session::predicts() const {
    return _engine->_weights->prediction && (!_sampler || _drafter.options().source == DraftOptions::Source::Prediction);
}

// Takes the prediction layer over the first `rows` of a piece that was computed; the guesses among them are the chosen tokens.
void Session::predict(const Piece& piece, int64_t rows, const std::vector<int32_t>& chosen) {
    Drafter::Rows passed{_sequence, piece.begin, {piece.tokens + 1, piece.tokens + rows}};
    const bool goesOn = !chosen.empty() && chosen.back() >= 0;
    // Where no follower is known the token itself stands in, so that the layer's cache has no holes.
    passed.followers.push_back(goesOn ? chosen.back() : piece.follower.value_or(piece.tokens[rows - 1]));
    if (!goesOn) return _drafter.predict(*_engine->_forward, *_engine->_kv, passed, nullptr);
    Drafter::Text text{*_sampler, _history, chosen, mostDrafts(piece.begin + rows)};
    _drafter.predict(*_engine->_forward, *_engine->_kv, passed, &text);
}

// So many guesses can be verified behind `length` tokens and the one that comes next.
int64_t Session::mostDrafts(int64_t length) const {
    const DraftOptions& options = _drafter.options();
    if (options.source == DraftOptions::Source::Off) return 0;
    const int64_t rows = std::min({_engine->_options.context - length, _engine->_options.batch, _engine->_backend->headRows()});
    return std::clamp<int64_t>(std::min<int64_t>(options.tokens, _engine->_kv->snapshotRoom(_sequence)), 0, std::max<int64_t>(rows - 1, 0));
}

// Computes a piece behind the session's tokens, with the engine locked. On failure the session holds what it held before.
void Session::take(const Piece& piece) {
    _tokens.reserve(_tokens.size() + static_cast<size_t>(piece.count));
    std::vector<int32_t> chosen = run(piece);
    if (piece.count > 1 && piece.want == Want::Choice && !piece.drafted) _engine->_kv->keepState(_sequence, piece.begin + piece.count - 1);
    _ahead = chosen.empty() ? 0 : static_cast<int64_t>(chosen.size()) - 1;
    _tokens.insert(_tokens.end(), piece.tokens, piece.tokens + piece.count - piece.drafted + _ahead);
    if (_sampler) _sampler->advance(chosen.size());
    _chosen = std::move(chosen);
}

void Session::evaluate(const std::vector<int32_t>& tokens, float* logits, const std::vector<int64_t>& chunks,
                       const Interrupted& interrupted) {
    std::lock_guard<std::mutex> use(_use);
    _sampler.reset();
    settle();
    append(tokens, logits, chunks, interrupted);
}

// With a sampler, the last row's logits give a token; without, every row's are written where `logits` says.
void Session::append(const std::vector<int32_t>& tokens, float* logits, const std::vector<int64_t>& chunks,
                     const Interrupted& interrupted) {
    const auto total = static_cast<int64_t>(tokens.size());
    checkRoom(total);
    int64_t done = 0;
    for (size_t index = 0; done < total; ++index) {
        if (interrupted && interrupted()) throw Error(ErrorKind::InvalidArgument, "interrupted");
        const int64_t wanted = index < chunks.size() ? chunks[index] : _engine->_options.batch;
        const int64_t count = std::clamp<int64_t>(wanted, 1, std::min(_engine->_options.batch, total - done));
        const Want want = logits ? Want::EveryRow : _sampler && done + count == total ? Want::Choice : Want::Nothing;
        Piece piece{tokens.data() + done, static_cast<int64_t>(_tokens.size()), count, want};
        if (logits) piece.logits = logits + done * _engine->_spec.vocabSize;
        if (done + count < total) piece.follower = tokens[static_cast<size_t>(done + count)];
        std::lock_guard<std::mutex> lock(_engine->_mutex);
        recompute(piece.tokens[0]);
        take(piece);
        done += count;
    }
}

void Session::start(const std::vector<int32_t>& prompt, const SamplingParams& params, const Interrupted& interrupted, const DraftOptions& drafts) {
    std::lock_guard<std::mutex> use(_use);
    _sampler.reset();  // next() refuses to go on from a start that failed
    params.validate(_engine->_spec.vocabSize);
    drafts.validate();
    if (drafts.source == DraftOptions::Source::Prediction && !_engine->_weights->prediction) {
        throw Error(ErrorKind::InvalidArgument, "the model has no prediction layer to draft with; n-gram drafts work with any model");
    }
    if (prompt.empty()) throw Error(ErrorKind::InvalidArgument, "the prompt is empty: give at least one token");
    if (static_cast<int64_t>(prompt.size()) > _engine->_options.context) {
        throw Error(ErrorKind::InvalidArgument, "the prompt has " + std::to_string(prompt.size()) + " tokens, the context holds " +
                                                    std::to_string(_engine->_options.context) + ": shorten it or ask for a larger context");
    }
    settle();
    // The last token is evaluated again even if it is held: its logits are needed.
    int64_t common = 0;
    const auto limit = static_cast<int64_t>(std::min(_tokens.size(), prompt.size() - 1));
    while (common < limit && _tokens[common] == prompt[common]) ++common;
    keep(common);
    _reused = static_cast<int64_t>(_tokens.size());
    _history = prompt;
    _drafter.begin(drafts);
    _sampler.emplace(params, _engine->_spec.vocabSize);
    try {
        append(std::vector<int32_t>(prompt.begin() + _reused, prompt.end()), nullptr, {}, interrupted);
    } catch (...) {
        _sampler.reset();
        throw;
    }
}

// A step behind the text that was handed out, with as many drafts as there is room for.
void Session::decode() {
    std::lock_guard<std::mutex> lock(_engine->_mutex);
    recompute(_history.back());
    const auto begin = static_cast<int64_t>(_tokens.size());
    std::vector<int32_t> tokens = _drafter.drafts(_history, mostDrafts(begin));
    tokens.insert(tokens.begin(), _history.back());
    while (tokens.size() > 1 && !_engine->_kv->reserve(_sequence, static_cast<int64_t>(tokens.size()))) tokens.pop_back();
    Piece piece{tokens.data(), begin, static_cast<int64_t>(tokens.size()), Want::Choice};
    piece.drafted = piece.count - 1;
    take(piece);
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
