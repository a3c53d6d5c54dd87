// A session's tokens and what each was computed as; in which pieces those that the KV cache lacks are computed.
#pragma once

#include <cstdint>
#include <vector>

#include "operations/batch.h"

namespace sharpi {

// What a backend asks of the pieces of a sequence.
struct PieceRules {
    bool oneArithmetic = true;  // a token's kind does not show
    int64_t promptStep = 1;     // pieces of prompt rows begin at multiples of it
    int64_t rows = 1;           // the most of a piece
    int64_t decodeRows = 1;     // the most of a piece of decode rows
};

// Tokens [begin, end), all of a kind.
struct Stretch {
    RowKind kind = RowKind::Prompt;
    int64_t begin = 0, end = 0;
};

// Prompt rows, and then decode rows.
class Transcript {
public:
    const std::vector<int32_t>& tokens() const { return _tokens; }
    int64_t size() const { return static_cast<int64_t>(_tokens.size()); }
    int64_t promptTokens() const { return _promptTokens; }

    void reserve(int64_t tokens);
    // Prompt rows make prompt rows of all tokens before them.
    void append(const int32_t* tokens, int64_t count, RowKind kind);
    // Appends what `longer`, which begins with these tokens, has up to its token `end`, and takes its kinds. Does not
    // throw within what was reserved.
    void follow(const Transcript& longer, int64_t end);
    void truncate(int64_t tokens);

    // The number of first tokens that both have and compute alike.
    int64_t agreement(const Transcript& other, bool oneArithmetic) const;
    // What to compute next if the first `begin` tokens, and not all, are computed: to `wanted`, or as near to it as the
    // rules let a piece end. Throws Error(Internal) if no piece may begin there.
    Stretch piece(int64_t begin, int64_t wanted, const PieceRules& rules) const;

private:
    std::vector<int32_t> _tokens;
    int64_t _promptTokens = 0;
};

}  // namespace sharpi
