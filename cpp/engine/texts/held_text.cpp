// See held_text.h.
#include "engine/texts/held_text.h"

#include <algorithm>
#include <new>
#include <set>
#include <string>
#include <utility>

#include "core/error.h"
#include "memory/kv_sharing.h"

namespace sharpi {

namespace {

// Sets what is wanted of a piece with tokens that come after the `known` ones.
void addWants(Piece& piece, const Addition& addition, int64_t known, bool chooses, int64_t vocabulary) {
    piece.again = std::max<int64_t>(known - piece.begin, 0);
    piece.scores = addition.scores;
    if (addition.logits) {
        piece.want = Want::EveryRow;
        piece.logits = addition.logits + (piece.begin + piece.again - addition.held) * vocabulary;
    } else if (chooses && piece.end() == addition.text.size()) {
        piece.want = Want::Choice;
    }
}

// Rows are shared with texts for which they may be prompt rows.
SaltedText sharable(const std::string& salt, const Transcript& text, int64_t tokens, const PieceRules& rules) {
    if (!rules.oneArithmetic) tokens = std::min(tokens, text.promptTokens());
    return {salt, text.tokens().data(), tokens};
}

void cutToAgreement(const LockedModel& model, HeldText& held, const Addition& addition) {
    const int64_t same = held.text().agreement(addition.text, held.limits().pieces.oneArithmetic);
    held.running().sequence.cutBack(model, same);
}

std::vector<int64_t> marksAnd(int64_t common, std::vector<int64_t> marks) {
    if (common > 0) marks.push_back(common);
    return marks;
}

}  // namespace

void requireRoomFor(int64_t tokens, int64_t room) {
    if (tokens == 0) throw Error(ErrorKind::InvalidArgument, "the prompt is empty: give at least one token");
    if (tokens > room) {
        throw Error(ErrorKind::InvalidArgument,
                    std::to_string(tokens) + " tokens do not fit: the context has room for " + std::to_string(room) +
                        "; load with a larger context or shorten the prompt");
    }
}

HeldText::HeldText(std::shared_ptr<Engine> engine, std::optional<std::string> salt)
    : _engine(std::move(engine)), _salt(std::move(salt)), _running(_engine->runner()) {}

int64_t HeldText::cachedTokens() const { return _engine->runner().lock().kv().length(_running.sequence.handle()); }

bool HeldText::isWhole(const LockedModel& model) const {
    return model.kv().length(_running.sequence.handle()) == _text.size();
}

void HeldText::cut(int64_t tokens) {
    _text.truncate(tokens);
    _running.sequence.cutBack(_engine->runner().lock(), tokens);
}

void HeldText::keep(int64_t tokens, RowKind follower) {
    const LockedModel model = _engine->runner().lock();
    const bool tiled = follower == RowKind::Prompt;
    _text.truncate(tiled ? _running.sequence.cutForPrompt(model, tokens) : _running.sequence.cutBack(model, tokens));
}

void HeldText::setAside() { _running.sequence.cutBack(_engine->runner().lock(), 0); }

void HeldText::append(const std::vector<int32_t>& tokens, size_t count) {
    _running.evaluated.all += static_cast<int64_t>(tokens.size());
    _text.append(tokens.data(), static_cast<int64_t>(count), RowKind::Decode);
}

Addition HeldText::adding(const std::vector<int32_t>& tokens, RowKind kind, float* logits, std::vector<int64_t> marks) {
    const auto count = static_cast<int64_t>(tokens.size());
    requireRoomFor(count, limits().context - _text.size());
    Addition addition{_text, _text.size(), logits};
    addition.text.append(tokens.data(), count, kind);
    _text.reserve(addition.text.size());
    // The last page before the last token is kept all the same.
    const int64_t last = (addition.text.size() - 1) / KvCache::kPageTokens;
    const auto isLast = [&](int64_t mark) { return mark / KvCache::kPageTokens >= last; };
    marks.erase(std::remove_if(marks.begin(), marks.end(), isLast), marks.end());
    _marks = std::move(marks);
    _common = 0;  // what was found of another text
    return addition;
}

void HeldText::abandon(const Addition& addition) {
    if (addition.begun) cutToAgreement(_engine->runner().lock(), *this, addition);
}

bool HeldText::lacksStates() const {
    constexpr int32_t kEnds = 3;  // after the last piece, at the last multiple of a page, and before the last token
    const LockedModel model = _engine->runner().lock();
    if (!_salt || !KvSharing(model.kv()).keepsStates()) return false;
    const int64_t held = model.kv().length(_running.sequence.handle());
    std::set<int64_t> wanted;
    for (const int64_t mark : marksAnd(_common, _marks))
        if (const int64_t length = mark / KvCache::kPageTokens * KvCache::kPageTokens; length > held)
            wanted.insert(length);
    return !wanted.empty() && model.kv().states().stepRoom() < kEnds + static_cast<int32_t>(wanted.size());
}

Piece HeldText::nextPiece(const LockedModel& model, Addition& addition, int64_t rows) {
    if (!std::exchange(addition.begun, true)) cutToAgreement(model, *this, addition);
    const int64_t end = _running.sequence.pieceEnd(model, addition.text, _text.size(), rows);
    Piece piece = _running.sequence.nextPiece(model, addition.text, end);
    piece.isShared = _salt.has_value();
    piece.marks = marksAnd(_common, _marks);
    if (piece.end() > _text.size())
        addWants(piece, addition, _text.size(), _running.sampler.has_value(), limits().vocabSize);
    return piece;
}

// The text takes each piece of the tokens once it is computed, and with the first piece the kinds that the tokens give
// to the rows before them.
bool HeldText::take(const LockedModel& model, const Addition& addition, const Piece& piece) {
    _running.evaluated.all += piece.count;
    _running.evaluated.again += std::clamp<int64_t>(_text.size() - piece.begin, 0, piece.count);
    if (piece.end() <= _text.size()) return false;
    _text.follow(addition.text, piece.end());
    share(model, &piece);
    return true;
}

bool HeldText::recomputePiece(const LockedModel& model, int64_t wanted) {
    const auto isComputed = [&] { return _running.sequence.cutToComputed(model, _text) == _text.size(); };
    if (isComputed()) return true;
    adopt(model, _text, _text.size());
    if (isComputed()) return true;
    Piece piece = _running.sequence.nextPiece(model, _text, wanted);
    piece.isShared = _salt.has_value();
    piece.marks = marksAnd(_common, _marks);
    if (!piece.follower) piece.follower = _running.history.back();
    TextPasses(model, limits()).run({{&_running, piece}});
    _running.evaluated.all += piece.count;
    _running.evaluated.again += piece.count;
    share(model, &piece);
    return isComputed();
}

void HeldText::adopt(const LockedModel& model, const Transcript& text, int64_t tokens) {
    if (!_salt) return;
    const int32_t handle = _running.sequence.handle();
    const int64_t before = model.kv().length(handle);
    const SaltedText shared = sharable(*_salt, text, tokens, limits().pieces);
    const int64_t held = KvSharing(model.kv()).adopt(handle, shared, &_common);
    if (_common <= held) _common = 0;
    _adopted += held - before;
}

void HeldText::adopt(Addition& addition) {
    const LockedModel model = _engine->runner().lock();
    if (!std::exchange(addition.begun, true)) cutToAgreement(model, *this, addition);
    adopt(model, addition.text, addition.text.size() - 1);
    const int64_t held = model.kv().length(_running.sequence.handle());
    if (held > _text.size()) _text.follow(addition.text, held);
}

// If there is no memory for it, nothing is shared: what was computed counts all the same.
void HeldText::share(const LockedModel& model, const Piece* piece) const {
    if (!_salt) return;
    const int32_t handle = _running.sequence.handle();
    try {
        const int64_t tokens = std::min(model.kv().length(handle), _text.size());
        const std::vector<int64_t> likely = piece ? CachedSequence::likelyEnds(*piece) : std::vector<int64_t>();
        KvSharing(model.kv()).share(handle, sharable(*_salt, _text, tokens, limits().pieces), likely);
    } catch (const std::bad_alloc&) {
    }
}

}  // namespace sharpi
