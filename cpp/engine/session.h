// One conversation with an Engine, as its callers see it.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/texts/continuation.h"

namespace sharpi {

// The tokens in the KV cache, and generation that continues them. Keeps its Engine alive.
//
// Each call is atomic for other threads. The session is locked while it calls `interrupted`, so a caller must not hold
// a lock that `interrupted` takes: on Python's threads, the GIL.
class Session {
public:
    explicit Session(std::shared_ptr<Engine> engine);

    std::vector<int32_t> tokens() const;  // evaluated, in order
    int64_t vocabSize() const { return _text.held().limits().vocabSize; }
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
    // next() of each of these sessions of one engine, which share the steps that they need (stepTogether()). If it
    // throws, no token is lost: the next call hands out those that were chosen.
    static std::vector<std::optional<int32_t>> nextOf(const std::vector<Session*>& sessions);
    int64_t reusedTokens() const;     // tokens of the last prompt that did not have to be computed again
    DraftCounts draftCounts() const;  // since start()

private:
    mutable std::mutex _mutex;  // guards the text. A thread that needs the model's lock too takes it second.
    Continuation _text;
};

}  // namespace sharpi
