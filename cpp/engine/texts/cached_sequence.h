// One sequence of a model's KV cache, and the pieces in which the text that it holds is computed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/answers/prompt_scores.h"
#include "engine/model_runner.h"

namespace sharpi {

// What a caller wants of a piece's rows: nothing, the logits of every row, or a token chosen from the last row's
// logits.
enum class Want { Nothing, EveryRow, Choice };

// Consecutive tokens of a sequence that one pass computes.
struct Piece {
    RowKind kind;
    const int32_t* tokens;
    int64_t begin, count;  // position of the first token; number of tokens
    Want want = Want::Nothing;
    float* logits = nullptr;  // for EveryRow
    int64_t again = 0;        // rows at the beginning that were computed before: EveryRow and `scores` leave them out
    PromptScores* scores = nullptr;  // if every row's logits are to be scored, whatever else is wanted
    int64_t drafted = 0;             // guesses at the end: Choice also chooses a token from the row before each of them
    bool endsPrompt = false;         // the last token is the text's last prompt row
    bool isShared = false;           // other texts may have what is computed
    std::vector<int64_t> marks = {};  // lengths of the text after which others are likely to differ; hints, any order
    std::optional<int32_t> follower = std::nullopt;  // the token after the piece, if it is known before the pass

    int64_t end() const { return begin + count; }
};

// All but the constructor and the destructor need the model locked, and prove it by their argument.
class CachedSequence {
public:
    // Both lock the model. The destructor gives pages and states back.
    explicit CachedSequence(ModelRunner& runner);
    ~CachedSequence();
    CachedSequence(const CachedSequence&) = delete;
    CachedSequence& operator=(const CachedSequence&) = delete;

    int32_t handle() const { return _handle; }

    // Keeps at most the first `tokens`; the result is the number that the cache then holds (see KvCache::truncate).
    int64_t cutBack(const LockedModel& model, int64_t tokens);
    // Like cutBack(), and prompt rows can follow what the cache then holds.
    int64_t cutForPrompt(const LockedModel& model, int64_t tokens);
    // The number of tokens at the beginning of the text that need not be computed. The cache must hold nothing but a
    // beginning of the text. Cuts the cache back if prompt rows come next and cannot follow all that it holds.
    int64_t cutToComputed(const LockedModel& model, const Transcript& text);

    // Where the next piece should end: after `chunk` new tokens, which begin at `held`. Decode rows that become prompt
    // rows share a pass with the new tokens. Tokens that the cache only lost are computed alone, so that they stay
    // computed if the pass over the new tokens fails.
    int64_t pieceEnd(const LockedModel& model, const Transcript& text, int64_t held, int64_t chunk);
    // What to compute next of a text that is not all computed, up to the token `wanted` or near it.
    Piece nextPiece(const LockedModel& model, const Transcript& text, int64_t wanted);
    // Makes room for a piece, and for the states that cutting back its guesses and continuing from its prompt need, as
    // far as there is room for these. leave: pieces of other sequences that are to share the pass, and need states too.
    // Throws Error(OutOfMemory); the sequence is then unchanged.
    void extend(const LockedModel& model, const Piece& piece, int32_t leave);
    // Appends the piece's rows to a batch.
    void addRows(const Piece& piece, Batch& batch) const;
    // Lengths in whole pages, ascending, that a shared piece ends at or passes, after which other texts are likely to
    // continue: every 2,048 tokens, the last before each mark, and the last before the prompt's last token. States
    // there are worth a copy, and windows are kept longest. They never cut a piece, so they change no bits.
    static std::vector<int64_t> likelyEnds(const Piece& piece);
    // After the pass over a piece: keeps the state that the next prompt is likely to continue from.
    void keepState(const LockedModel& model, const Piece& piece);

private:
    std::optional<int64_t> stateToKeep(const Piece& piece) const;

    ModelRunner& _runner;
    int32_t _handle;
};

}  // namespace sharpi
