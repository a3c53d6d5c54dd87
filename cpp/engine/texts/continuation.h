// A text that a model continues: its prompt, and the tokens that were chosen. It belongs to one thread at a time;
// sessions and the scheduler are built on it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/texts/held_text.h"

namespace sharpi {

// What comes with an answer beside its tokens.
struct AnswerExtras {
    int32_t best = -1;  // the likeliest tokens that each token's score names, up to kMostBest; -1: no scores
    bool echo = false;  // the prompt's tokens have scores too. The whole prompt is computed, whatever the cache has
    std::shared_ptr<TokenConstraint> constraint;
};

// With drafts, one step of the model may give several tokens. hand() can hand them out one by one, and no caller
// sees that the cache is ahead.
class Continuation {
public:
    // salt: see HeldText.
    explicit Continuation(std::shared_ptr<Engine> engine, std::optional<std::string> salt = {})
        : _held(std::move(engine), std::move(salt)) {}

    const HeldText& held() const { return _held; }
    std::vector<int32_t> tokens() const;  // evaluated, in order
    int64_t room() const {
        return _held.limits().context - _held.size() + _ahead;
    }  // tokens that the context still takes
    int64_t reusedTokens() const { return _reused; }  // of the last prompt, that did not have to be computed again

    // Keeps at most the first `tokens`, and ends a generation.
    void cutBack(int64_t tokens);
    // Gives the pages and states of the cache back and keeps the text: prepare() computes it again.
    void setAside();
    // Appends tokens, which are to be computed as this kind, by evaluatePiece(). logits, if given, receives
    // [tokens.size(), vocab]: row i follows tokens[0..i].
    void beginEvaluation(const std::vector<int32_t>& tokens, RowKind kind, float* logits);
    // Computes a piece, of about `rows` rows, until held().size() says that the text has all tokens. Returns whether
    // the piece had new ones, and not only what the cache had lost. If it throws, it can be called again.
    bool evaluatePiece(int64_t rows);

    // Begins a generation: see Session::start(). The prompt is then to be computed, by complete() as a whole, or by
    // prepare() in pieces. marks: see Request.
    void begin(const std::vector<int32_t>& prompt, const SamplingParams& params, const DraftOptions& drafts,
               const AnswerExtras& extras = {}, const std::vector<int64_t>& marks = {});
    // Computes all of what was begun. Pieces have as many rows as `chunks` says, one after the other; after those, as
    // many as a pass takes. If it throws, what was begun cannot go on.
    void complete(const std::vector<int64_t>& chunks, const Interrupted& interrupted);
    // Computes a piece, of about `rows` rows, of what is missing and no other text has computed: of the prompt, or of
    // what the cache has lost. Returns whether nothing is missing any more. If it throws, it can be called again.
    bool prepare(int64_t rows);
    // Takes what other texts have computed of the prompt, which must have begun. prepare() does it too.
    void adoptPrompt();
    // Computes a piece of each text's prompt in one pass of at most `rows` rows, of as many of the texts as have room
    // in it; the first one always has. Returns for each text whether nothing is missing any more. All prompts must have
    // begun. What a text gets does not depend on its company. If it throws, it can be called again, also with other
    // texts.
    friend std::vector<bool> prepareTogether(const std::vector<Continuation*>& texts, int64_t rows);
    // The tokens at the beginning of a generation's prompt that begin() would find in the cache.
    int64_t reusable(const std::vector<int32_t>& prompt) const;

    // With echo, once the prompt is computed: of each of its tokens; the first one's means nothing. Else nullptr.
    const std::vector<Score>* promptScores() const { return _scores ? &_scores->scores() : nullptr; }
    // Lets go of what only its own answer needs.
    void endAnswer();

    // Whether a prompt was computed that tokens can follow.
    bool hasPrompt() const { return _held.running().sampler && !_prompt; }
    // Tokens that were chosen and not handed out; hand() gives nothing if there are none. -1, as the last of them:
    // no token may be chosen.
    const std::vector<Chosen>& chosen() const { return _chosen; }
    // Hands out the first of these, at most `most`.
    std::vector<Chosen> hand(size_t most);

    // Its rows in a step, for stepTogether(): its last token, then guesses.
    struct Rows {
        Continuation* text;
        std::vector<int32_t> tokens;
    };
    // hasPrompt() must have said yes. Computes what the cache has lost.
    Rows rowsToDecode(const LockedModel& model, int64_t drafts);
    TextPasses::Part partOf(const Rows& rows);
    void accept(const Rows& rows, std::vector<Chosen> chosen);

private:
    void settle();
    bool addPiece(Addition& addition, int64_t rows);

    HeldText _held;                   // what the cache holds, or has lost and the next step computes again
    std::optional<Addition> _prompt;  // that is to be computed
    int64_t _ahead = 0;               // tokens at the end that drafts added before hand() has come to them
    std::vector<Chosen> _chosen;      // what is to be handed out; -1, at the end: no token may be chosen
    std::optional<PromptScores> _scores;
    int64_t _reused = 0;
};

std::vector<bool> prepareTogether(const std::vector<Continuation*>& texts, int64_t rows);

}  // namespace sharpi
