// A text in the cache of a model: which tokens it has, which of them the cache holds, and how others are added. It
// belongs to one thread at a time.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/texts/text_passes.h"
#include "engine/texts/transcript.h"

namespace sharpi {

// Asked between the pieces of long work; true stops the work, which then throws Error(InvalidArgument).
using Interrupted = std::function<bool()>;

// Tokens on their way into a text.
struct Addition {
    Transcript text;                 // what the text will be
    int64_t held = 0;                // tokens that it had before
    float* logits = nullptr;         // where those of the new tokens go, if they are wanted
    PromptScores* scores = nullptr;  // what scores the new tokens, if anything does
    bool begun = false;
};

// Throws Error(InvalidArgument) if `tokens` is 0, or more than a context has room for.
void requireRoomFor(int64_t tokens, int64_t room);

// It remembers which tokens are prompt rows and which are decode rows, and computes what the cache has lost as the kind
// that it was. Only further prompt rows turn the decode rows before them into prompt rows. These are then computed
// again, unless the backend has one arithmetic for both kinds: a long conversation gets the answers of a cold start.
class HeldText {
public:
    // salt: texts of the engine that have the same one share what they have computed of a common beginning. None: the
    // text shares nothing.
    explicit HeldText(std::shared_ptr<Engine> engine, std::optional<std::string> salt = {});

    Engine& engine() const { return *_engine; }
    const SequenceLimits& limits() const { return _engine->runner().limits(); }
    RunningText& running() { return _running; }
    const RunningText& running() const { return _running; }
    const Transcript& text() const { return _text; }
    int64_t size() const { return _text.size(); }
    int64_t cachedTokens() const;  // that the cache holds now; locks the model
    bool isWhole(const LockedModel& model) const;
    const std::optional<std::string>& salt() const { return _salt; }
    int64_t adoptedTokens() const { return _adopted; }  // that other texts have computed, since it was made

    // Keeps the first `tokens` of the text. If the state after them is lost, the next step computes it again.
    void cut(int64_t tokens);
    // Keeps the first `tokens` of the text, or fewer, so that rows of this kind can follow and nothing is to be
    // computed again.
    void keep(int64_t tokens, RowKind follower);
    // Gives the pages and states of the cache back and keeps the text.
    void setAside();
    // Takes tokens that a step has computed as decode rows. reserve() has made room for them.
    void append(const std::vector<int32_t>& tokens, size_t count);
    void reserve(int64_t tokens) { _text.reserve(tokens); }

    // marks: see Request. Throws what requireRoomFor() throws.
    Addition adding(const std::vector<int32_t>& tokens, RowKind kind, float* logits, std::vector<int64_t> marks = {});
    // The next piece of what an addition lacks, of about `rows` rows. If there is a sampler, the pass over it chooses a
    // token from the last row's logits. Otherwise it writes the logits of every row to `logits`.
    Piece nextPiece(const LockedModel& model, Addition& addition, int64_t rows);
    // Takes a piece of an addition that a pass has computed. Returns whether it has new tokens.
    bool take(const LockedModel& model, const Addition& addition, const Piece& piece);
    // Whether its additions come to places where the state is to be kept for other texts, and there may be no room for
    // it beside the states at their end. Locks the model.
    bool lacksStates() const;
    // Leaves nothing in the cache that was computed for an addition as another kind than the text says.
    void abandon(const Addition& addition);
    // Computes a piece, up to the token `wanted` or near it, of what the cache has lost. Returns whether nothing is
    // missing any more.
    bool recomputePiece(const LockedModel& model, int64_t wanted);
    // Takes what other texts have computed of an addition, but for its last token.
    void adopt(Addition& addition);
    // Lets other texts have what is computed. piece: what was computed last, with states that are worth a copy.
    void share(const LockedModel& model, const Piece* piece = nullptr) const;

private:
    void adopt(const LockedModel& model, const Transcript& text, int64_t tokens);

    const std::shared_ptr<Engine> _engine;
    const std::optional<std::string> _salt;
    int64_t _adopted = 0;
    // Tokens with which other texts have begun too, at the last look, though it could not continue there: the next one
    // that begins so should. 0: there are none.
    int64_t _common = 0;
    std::vector<int64_t> _marks;  // of what was added last: see Request
    RunningText _running;
    Transcript _text;
};

}  // namespace sharpi
