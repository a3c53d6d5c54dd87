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

namespace sharpi {

// Asked between pieces of long work; true stops it by throwing Error(InvalidArgument).
using Interrupted = std::function<bool()>;

// One conversation: the tokens in the KV cache, and generation that continues them. Holds its Engine alive.
// Each call is atomic against other threads; callers that hold a lock of their own must not hold it here, since
// `interrupted` is called with the session locked.
//
// With drafts a step of the model may give several tokens. They are handed out one by one, and nothing that a caller sees
// tells that the cache is ahead of them.
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

    // Appends tokens; logits, if given, gets [tokens.size(), vocab]: row i follows tokens[0..i].
    // `chunks`: sizes of the pieces to evaluate; empty: the engine's batch size.
    void evaluate(const std::vector<int32_t>& tokens, float* logits, const std::vector<int64_t>& chunks, const Interrupted& interrupted);

    // Begins generation after `prompt` (the whole text so far: what the session holds of its beginning is kept).
    // Throws Error(InvalidArgument) for an empty prompt or one that leaves no room in the context, and for drafts of a prediction
    // layer that the model does not have.
    void start(const std::vector<int32_t>& prompt, const SamplingParams& params, const Interrupted& interrupted, const DraftOptions& drafts = {});
    // The next token, or nothing when the context is full. start() must have been called.
    std::optional<int32_t> next();
    int64_t reusedTokens() const { return _reused; }
    DraftCounts draftCounts() const;  // since start()

private:
    enum class Want { Nothing, EveryRow, Choice };  // logits of every row, or a token chosen from the last row's
    // Tokens of the sequence that are computed together.
    struct Piece {
        const int32_t* tokens;
        int64_t begin, count;  // where they come, and how many
        Want want;
        float* logits = nullptr;
        int64_t drafted = 0;              // its last tokens are guesses: a token is chosen from the row before each of them too
        std::optional<int32_t> follower = std::nullopt;  // the token after them, where it is known and not chosen here
    };
    int64_t room() const { return _engine->_options.context - static_cast<int64_t>(_tokens.size()) + _ahead; }
    void checkRoom(int64_t tokens) const;
    void settle();
    void keep(int64_t tokens);
    void recompute(int32_t follower);
    std::vector<int32_t> run(const Piece& piece);
    std::vector<int32_t> choose(const Piece& piece);
    bool predicts() const;
    void predict(const Piece& piece, int64_t rows, const std::vector<int32_t>& chosen);
    int64_t mostDrafts(int64_t length) const;
    void append(const std::vector<int32_t>& tokens, float* logits, const std::vector<int64_t>& chunks, const Interrupted& interrupted);
    void take(const Piece& piece);
    void decode();

    std::shared_ptr<Engine> _engine;
    int32_t _sequence;
    mutable std::mutex _use;
    std::vector<int32_t> _tokens;   // in the cache, or lost there and to be computed again
    int64_t _ahead = 0;             // so many at their end stand for no call of next() yet
    std::vector<int32_t> _history;  // the prompt and what was handed out
    std::optional<Sampler> _sampler;
    Drafter _drafter;
    std::vector<int32_t> _chosen;  // not yet handed out; -1, at their end: none may be chosen
    int64_t _reused = 0;
};

}  // namespace sharpi
