// One packed, ragged batch for everything: prefill, decode, several sequences, verification of drafted tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "core/error.h"

namespace sharpi {

// What a row is computed as. A row's bits depend on its kind and its position, and on the tokens up to it with their
// kinds: neither on other rows of the batch nor on where a prompt was cut.
enum class RowKind : uint8_t {
    Decode,  // by core/contract.h: tokens that were generated, and drafts
    Prompt,  // as the engine's PromptMode says
};

// How prompt rows are computed.
enum class PromptMode : uint8_t {
    Exact,  // by core/contract.h, as decode rows are: the same bits on every processor
    Fast,   // on tensor cores, in tiles at absolute multiples of kPromptTile positions: the bits depend on the kind of
            // GPU
};

// Tokens of a tile of a recurrent layer's prompt rows.
constexpr int64_t kPromptTile = 64;

struct Batch {
    // Decode rows come first, then prompt rows. Rows of one sequence stand together, are of one kind, and have
    // positions that ascend without gaps.
    std::vector<int32_t> tokens;     // [T]
    std::vector<int32_t> positions;  // [T]
    std::vector<int32_t> sequences;  // [T], handles of the KvCache
    int64_t decodeRows = 0;          // rows [0, decodeRows) are decode rows, the others prompt rows
    std::vector<int32_t> logitRows;  // rows that want logits, ascending
    // For a prediction layer's batch, [T]: the row of the last pass that row t continues from. Token t is the token
    // that followed that row; position t is that row's position. Otherwise empty.
    std::vector<int32_t> sources;

    int64_t size() const { return static_cast<int64_t>(tokens.size()); }
    bool hasPromptRows() const { return decodeRows < size(); }
    // Calls body(begin, end) for the rows [begin, end) of each sequence, in order.
    template <typename Body> void forSequences(const Body& body) const {
        for (int64_t begin = 0, end = 0; begin < size(); begin = end) {
            while (end < size() && sequences[static_cast<size_t>(end)] == sequences[static_cast<size_t>(begin)]) ++end;
            body(begin, end);
        }
    }
    // Throws Error(Internal) for a decode row after a prompt row.
    void add(RowKind kind, int32_t token, int32_t position, int32_t sequence, bool wantsLogits) {
        if (kind == RowKind::Decode) {
            if (hasPromptRows()) throw Error(ErrorKind::Internal, "a decode row behind the prompt rows of a batch");
            ++decodeRows;
        }
        if (wantsLogits) logitRows.push_back(static_cast<int32_t>(tokens.size()));
        tokens.push_back(token);
        positions.push_back(position);
        sequences.push_back(sequence);
    }
};

}  // namespace sharpi
