// See cached_sequence.h.
#include "engine/texts/cached_sequence.h"

#include <algorithm>
#include <vector>

namespace sharpi {

namespace {

// Tokens after which other texts may continue a part of a long prompt.
constexpr int64_t kLikelyEnd = 2048;

}  // namespace

CachedSequence::CachedSequence(ModelRunner& runner) : _runner(runner), _handle(runner.lock().kv().createSequence()) {}

CachedSequence::~CachedSequence() { _runner.lock().kv().releaseSequence(_handle); }

int64_t CachedSequence::cutBack(const LockedModel& model, int64_t tokens) {
    return model.kv().truncate(_handle, std::min(tokens, model.kv().length(_handle)));
}

int64_t CachedSequence::cutForPrompt(const LockedModel& model, int64_t tokens) {
    const int64_t step = _runner.limits().pieces.promptStep;
    int64_t kept = cutBack(model, tokens);
    while (kept % step) kept = cutBack(model, kept - kept % step);
    return kept;
}

int64_t CachedSequence::cutToComputed(const LockedModel& model, const Transcript& text) {
    const int64_t tokens = model.kv().length(_handle), pastStep = tokens % _runner.limits().pieces.promptStep;
    if (tokens >= text.promptTokens() || !pastStep) return tokens;
    return cutForPrompt(model, tokens - pastStep);
}

int64_t CachedSequence::pieceEnd(const LockedModel& model, const Transcript& text, int64_t held, int64_t chunk) {
    const PieceRules& rules = _runner.limits().pieces;
    const int64_t begin = cutToComputed(model, text);
    if (begin < held && rules.oneArithmetic) return held;
    return std::max(begin, held) + std::clamp<int64_t>(chunk, 1, rules.rows);
}

Piece CachedSequence::nextPiece(const LockedModel& model, const Transcript& text, int64_t wanted) {
    const Stretch stretch = text.piece(cutToComputed(model, text), wanted, _runner.limits().pieces);
    Piece piece{stretch.kind, text.tokens().data() + stretch.begin, stretch.begin, stretch.end - stretch.begin};
    piece.endsPrompt = stretch.end == text.promptTokens();
    if (stretch.end < text.size()) piece.follower = text.tokens()[static_cast<size_t>(stretch.end)];
    return piece;
}

// A later prompt that repeats this one, or has another end, continues from the last place before the prompt's last
// token at which prompt rows may begin. If they may begin anywhere, only the prompt of a generation is worth a state.
std::optional<int64_t> CachedSequence::stateToKeep(const Piece& piece) const {
    const int64_t step = _runner.limits().pieces.promptStep;
    if (piece.kind != RowKind::Prompt || !piece.endsPrompt || (step == 1 && piece.want != Want::Choice))
        return std::nullopt;
    return (piece.end() - 1) / step * step;
}

std::vector<int64_t> CachedSequence::likelyEnds(const Piece& piece) {
    std::vector<int64_t> lengths;
    if (!piece.isShared || piece.kind != RowKind::Prompt) return lengths;
    for (int64_t length = piece.begin / kLikelyEnd * kLikelyEnd + kLikelyEnd; length <= piece.end();
         length += kLikelyEnd)
        lengths.push_back(length);
    const auto addPageBefore = [&](int64_t length) {
        length = length / KvCache::kPageTokens * KvCache::kPageTokens;
        if (length > 0 && length >= piece.begin && length <= piece.end()) lengths.push_back(length);
    };
    for (const int64_t mark : piece.marks) addPageBefore(mark);
    // A prompt that begins with this whole one has its last token too, which that one must compute.
    if (piece.endsPrompt) addPageBefore(piece.end() - 1);
    std::sort(lengths.begin(), lengths.end());
    lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
    return lengths;
}

void CachedSequence::extend(const LockedModel& model, const Piece& piece, int32_t leave) {
    std::vector<int64_t> marks = likelyEnds(piece);
    const auto isBound = [&](int64_t length) { return length <= piece.begin || length >= piece.end(); };
    marks.erase(std::remove_if(marks.begin(), marks.end(), isBound), marks.end());
    const std::optional<int64_t> kept = stateToKeep(piece);
    if (kept && *kept > piece.begin && (marks.empty() || *kept > marks.back())) marks.push_back(*kept);
    for (int64_t length = piece.end() - piece.drafted; length < piece.end(); ++length) marks.push_back(length);
    model.kv().extend(_handle, piece.count, marks, leave);
}

void CachedSequence::addRows(const Piece& piece, Batch& batch) const {
    int64_t firstWanted = piece.count;
    if (piece.want == Want::EveryRow || piece.scores) firstWanted = piece.again;
    else if (piece.want == Want::Choice) firstWanted -= 1 + piece.drafted;
    for (int64_t i = 0; i < piece.count; ++i) {
        batch.add(piece.kind, piece.tokens[i], static_cast<int32_t>(piece.begin + i), _handle, i >= firstWanted);
    }
}

void CachedSequence::keepState(const LockedModel& model, const Piece& piece) {
    if (const std::optional<int64_t> kept = stateToKeep(piece)) model.kv().keepState(_handle, *kept);
}

}  // namespace sharpi
