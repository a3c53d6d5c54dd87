// One packed, ragged batch for everything: prefill, decode, several sequences, verification of drafted tokens.
#pragma once

#include <cstdint>
#include <vector>

namespace sharpi {

struct Batch {
    // Rows of one sequence stand together, positions ascending without gaps.
    std::vector<int32_t> tokens;     // [T]
    std::vector<int32_t> positions;  // [T]
    std::vector<int32_t> sequences;  // [T], handles of the KvCache
    std::vector<int32_t> logitRows;  // rows that want logits, ascending
    // Of a batch for a prediction layer, [T]: the row of the last pass that row t goes on from. Token t is then the one that
    // followed there, position t that of the row gone on from. Empty else.
    std::vector<int32_t> sources;

    int64_t size() const { return static_cast<int64_t>(tokens.size()); }
    void add(int32_t token, int32_t position, int32_t sequence, bool wantsLogits) {
        if (wantsLogits) logitRows.push_back(static_cast<int32_t>(tokens.size()));
        tokens.push_back(token);
        positions.push_back(position);
        sequences.push_back(sequence);
    }
};

}  // namespace sharpi
