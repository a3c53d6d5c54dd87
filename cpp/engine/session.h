// A sequence that talks to an Engine, and what its callers see of it.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/drafter.h"
#include "engine/engine.h"
#include "engine/sampler.h"
#include "engine/transcript.h"

namespace sharpi {

// Asked between pieces of long work; true stops it by throwing Error(InvalidArgument).
using Interrupted = std::function<bool()>;

// One conversation: the tokens in the KV cache, and generation that continues them. Holds its Engine alive.
// Each call is atomic against other threads; callers that hold a lock of their own must not hold it here, since
// `interrupted` is called with the session locked.
//
// With drafts a step of the model may give several tokens. They are handed out one by one, and nothing that a caller
// sees tells that the cache is ahead of them.
//
// A session remembers which tokens are prompt rows and which decode rows. What the cache lost is computed again as what
// it was. Only further prompt rows turn the decode rows before them into prompt rows: unless the backend has one
// arithmetic for both, these are computed again then, so that a long conversation gets the answers of a cold start.
class Session {
public:
    explicit Session(std::shared_ptr<Engine> engine);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    std::vector<int32_t> tokens() const;  // evaluated, in order
    int64_t vocabSize() const { return _engine->_spec.vocabSize; }
    // Throws Error(InvalidArgument) when `tokens` more do not fit into the context, or there are none.
    void requireRoom(int64_t tokens) const;
    void reset();

    // Appends tokens, computed as this kind; logits, if given, gets [tokens.size(), vocab]: row i follows tokens[0..i].
    // `chunks`: sizes of the pieces to evaluate, rounded up to what the backend takes; empty: the engine's batch size.
    // If it fails, the session holds what it held before, or more: the first pieces of these tokens.
    void evaluate(const std::vector<int32_t>& tokens, RowKind kind, float* logits, const std::vector<int64_t>& chunks,
                  const Interrupted& interrupted);

    // Begins generation after `prompt` (the whole text so far: the prompt rows that the session holds of its beginning
    // are kept). Throws Error(InvalidArgument) for an empty prompt or one that leaves no room in the context, and for
    // drafts of a prediction layer that the model does not have.
    void start(const std::vector<int32_t>& prompt, const SamplingParams& params, const Interrupted& interrupted,
               const DraftOptions& drafts = {});
    // The next token, or nothing when the context is full. start() must have been called.
    std::optional<int32_t> next();
    int64_t reusedTokens() const { return _reused; }  // of the last prompt: those that were not computed again
    DraftCounts draftCounts() const;                  // since start()

private:
    enum class Want { Nothing, EveryRow, Choice };  // logits of every row, or a token chosen from the last row's
    // Tokens of the sequence that are computed together.
    struct Piece {
        RowKind kind;
        const int32_t* tokens;
        int64_t begin, count;  // where they come, and how many
        int64_t end() const { return begin + count; }
        Want want = Want::Nothing;
        float* logits = nullptr;
        int64_t again = 0;        // its first rows were computed before: EveryRow does not mean them
        int64_t drafted = 0;      // its last tokens are guesses: a token is chosen from the row before each of them too
        bool endsPrompt = false;  // its last token is the last prompt row
        std::optional<int32_t> follower = std::nullopt;  // the token after them, where it is known and not chosen here
    };
    int64_t room() const { return _engine->_options.context - _text.size() + _ahead; }
    PieceRules rules() const;
    void checkRoom(int64_t tokens) const;
    void settle();
    void keep(int64_t tokens);
    int64_t cutBack(int64_t tokens);
    int64_t cutToComputed(const Transcript& text);
    Piece nextPiece(const Transcript& text, int64_t wanted);
    void recompute(int32_t follower);
    int64_t pieceEnd(const Transcript& text, int64_t held, int64_t chunk);
    void addWants(Piece& piece, int64_t held, bool last, float* logits) const;
    void accept(std::vector<int32_t> chosen);
    Batch batchOf(const Piece& piece) const;
    std::optional<int64_t> stateToKeep(const Piece& piece) const;
    std::vector<int32_t> run(const Piece& piece);
    std::vector<int32_t> choose(const Piece& piece);
    bool predicts() const;
    void predict(const Piece& piece, int64_t rows, const std::vector<int32_t>& chosen);
    int64_t mostDrafts(int64_t length) const;
    void append(const std::vector<int32_t>& tokens, RowKind kind, float* logits, const std::vector<int64_t>& chunks,
                const Interrupted& interrupted);
    void decode();

    std::shared_ptr<Engine> _engine;
    int32_t _sequence;
    mutable std::mutex _use;
    Transcript _text;               // in the cache, as these kinds, or lost there and to be computed again
    int64_t _ahead = 0;             // of them, at the end: those that stand for no call of next() yet
    std::vector<int32_t> _history;  // the prompt and what was handed out
    std::optional<Sampler> _sampler;
    Drafter _drafter;
    std::vector<int32_t> _chosen;  // not yet handed out; -1, at their end: none may be chosen
    int64_t _reused = 0;
};

}  // namespace sharpi
