// One conversation with an Engine, as its callers see it.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/cached_sequence.h"
#include "engine/drafter.h"
#include "engine/engine.h"
#include "engine/sampler.h"
#include "engine/transcript.h"

namespace sharpi {

// Asked between the pieces of long work; true stops the work, which then throws Error(InvalidArgument).
using Interrupted = std::function<bool()>;

// A text as a pass of the model sees it: where it is cached, and how it goes on.
struct RunningText {
    explicit RunningText(ModelRunner& runner) : sequence(runner) {}
    CachedSequence sequence;
    std::vector<int32_t> history;    // the prompt, and what was handed out since
    std::optional<Sampler> sampler;  // while tokens are generated
    Drafter drafter;
};

// Passes of the locked model over pieces of texts.
class TextPasses {
public:
    struct Part {
        RunningText* text;
        Piece piece;
    };

    TextPasses(const LockedModel& model, const SequenceLimits& limits) : _model(model), _limits(limits) {}

    // Computes the parts in one pass and keeps each up to its last right guess. Returns what was chosen for each: the
    // right guesses, and the token after them. Several parts must be decode rows of different texts, none of which
    // runs the prediction layer. If it throws, the cache stays unchanged, except that it may lose a state that it had
    // no room to keep.
    std::vector<std::vector<int32_t>> run(const std::vector<Part>& parts) const;
    // Whether the prediction layer takes part in the passes over a text.
    bool predicts(const RunningText& text) const;
    // The number of guesses that a step can verify after `length` tokens and the token that comes next.
    int64_t mostDrafts(const RunningText& text, int64_t length) const;

private:
    void extend(const std::vector<Part>& parts) const;
    void predict(const Part& part, int64_t rows, const std::vector<int32_t>& chosen) const;

    const LockedModel& _model;
    const SequenceLimits& _limits;
};

// One conversation: the tokens in the KV cache, and generation that continues them. Keeps its Engine alive.
//
// Each call is atomic for other threads. The session is locked while it calls `interrupted`, so a caller must not hold
// a lock that `interrupted` takes: on Python's threads, the GIL.
//
// With drafts, one step of the model may give several tokens. next() hands them out one by one, and no caller can see
// that the cache is ahead.
//
// A session remembers which tokens are prompt rows and which are decode rows, and computes what the cache has lost as
// the kind that it was. Only further prompt rows turn the decode rows before them into prompt rows. These are then
// computed again, unless the backend has one arithmetic for both kinds: a long conversation gets the answers of a cold
// start.
class Session {
public:
    explicit Session(std::shared_ptr<Engine> engine);

    std::vector<int32_t> tokens() const;  // evaluated, in order
    int64_t vocabSize() const { return limits().vocabSize; }
    // Throws Error(InvalidArgument) if `tokens` is 0, or if the context has no room for that many more.
    void requireRoom(int64_t tokens) const;
    void reset();

    // Appends tokens, computed as this kind. logits, if given, receives [tokens.size(), vocab]: row i follows
    // tokens[0..i]. chunks: the sizes of the pieces to evaluate, rounded up to sizes that the backend can take; if
    // there are none, or not enough, the engine's batch size. If it fails, the session holds what it held before, and
    // perhaps the first pieces of these tokens.
    void evaluate(const std::vector<int32_t>& tokens, RowKind kind, float* logits, const std::vector<int64_t>& chunks,
                  const Interrupted& interrupted);

    // Begins generation after `prompt`, which is the whole text so far; the prompt rows that the session holds of its
    // beginning are kept. If the kinds have different bits, a prompt of fewer than kPromptTile tokens is computed as
    // decode rows: only its length decides. Throws Error(InvalidArgument) for a prompt that is empty or larger than the
    // context, and for drafts by a prediction layer that the model does not have.
    void start(const std::vector<int32_t>& prompt, const SamplingParams& params, const Interrupted& interrupted,
               const DraftOptions& drafts = {});
    // The next token, or nothing if the context is full. start() must have been called.
    std::optional<int32_t> next();
    // next() of each of these sessions of one engine. Sessions that need a step share it, as many as its rows allow;
    // those that draft with the prediction layer have steps of their own. What a session gives does not depend on its
    // company. If it throws, no token is lost: the next call hands out those that were chosen.
    static std::vector<std::optional<int32_t>> nextOf(const std::vector<Session*>& sessions);
    int64_t reusedTokens() const;     // tokens of the last prompt that did not have to be computed again
    DraftCounts draftCounts() const;  // since start()

private:
    const SequenceLimits& limits() const { return _engine->runner().limits(); }
    int64_t room() const { return limits().context - _text.size() + _ahead; }
    void checkRoom(int64_t tokens) const;
    void settle();
    void keep(int64_t tokens, RowKind follower);
    void recompute(const LockedModel& model, int32_t follower);
    void addWants(Piece& piece, int64_t held, bool last, float* logits) const;
    void accept(std::vector<int32_t> chosen);
    std::vector<int32_t> run(const LockedModel& model, const Piece& piece);
    void append(const std::vector<int32_t>& tokens, RowKind kind, float* logits, const std::vector<int64_t>& chunks,
                const Interrupted& interrupted);
    // The rows of a session in a step: its last token, then guesses.
    struct Rows {
        Session* session;
        std::vector<int32_t> tokens;
    };
    Rows rowsToDecode(const LockedModel& model);
    static void decode(const LockedModel& model, const std::vector<Rows>& step);
    static void decodeTogether(const LockedModel& model, std::vector<Rows> step);
    static void decodeAll(const std::vector<Session*>& sessions);

    const std::shared_ptr<Engine> _engine;

    // Guards everything below. A thread that needs the model's lock too takes it second.
    mutable std::mutex _mutex;
    RunningText _running;
    Transcript _text;              // what the cache holds, or has lost and the next step computes again
    int64_t _ahead = 0;            // tokens at the end of _text that drafts added before next() has come to them
    std::vector<int32_t> _chosen;  // what next() will hand out; -1, at the end: no token may be chosen
    int64_t _reused = 0;
};

}  // namespace sharpi
