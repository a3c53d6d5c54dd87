// The tokens of a session with the kind that each is computed as, and the pieces in which missing ones are computed.
#pragma once

#include <cstdint>
#include <vector>

#include "operations/batch.h"

namespace sharpi {

// What a backend demands of the pieces of a sequence.
struct PieceRules {
    bool oneArithmetic = true;  // both kinds of rows give the same bits
    int64_t promptStep = 1;     // a piece of prompt rows begins at a multiple of it
    int64_t rows = 1;           // the most rows of a piece
    int64_t decodeRows = 1;     // the most rows of a piece of decode rows
    int64_t prompts = 1;        // the most texts with prompt rows in one pass
};

// Tokens [begin, end), all of one kind.
struct Stretch {
    RowKind kind = RowKind::Prompt;
    int64_t begin = 0, end = 0;
};

// Prompt rows, followed by decode rows.
class Transcript {
public:
    const std::vector<int32_t>& tokens() const { return _tokens; }
    int64_t size() const { return static_cast<int64_t>(_tokens.size()); }
    int64_t promptTokens() const { return _promptTokens; }

    void reserve(int64_t tokens);
    // Appending prompt rows turns all tokens before them into prompt rows.
    void append(const int32_t* tokens, int64_t count, RowKind kind);
    // Becomes the first `end` tokens of `longer`, with its kinds. `longer` must begin with the tokens held here. Does
    // not throw if there is room for `end` tokens: see reserve().
    void follow(const Transcript& longer, int64_t end);
    void truncate(int64_t tokens);

    // The number of tokens at the beginning of both that are the same and are computed alike.
    int64_t agreement(const Transcript& other, bool oneArithmetic) const;
    // What to compute next if the first `begin` tokens are computed and others are not. The piece ends at `wanted`, or
    // as near to it as the rules allow. Throws Error(Internal) if no piece may begin at `begin`.
    Stretch piece(int64_t begin, int64_t wanted, const PieceRules& rules) const;

private:
    std::vector<int32_t> _tokens;
    int64_t _promptTokens = 0;
};

}  // namespace sharpi
