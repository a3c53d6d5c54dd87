// Guesses the tokens that come next, so that one step of the model can verify several of them: from the text so far
// (n-gram look-up), or with the model's prediction layer. Guesses decide how fast the text comes, never what it says.
#pragma once

#include <cstdint>
#include <vector>

#include "core/launch_rows.h"
#include "engine/texts/sampler.h"
#include "layers/forward_pass.h"

namespace sharpi {

struct DraftOptions {
    // Drafted tokens and the token before them are the rows of one step.
    static constexpr int32_t kMostTokens = kMostDraftRows - 1;
    enum class Source { Off, NGram, Prediction };
    Source source = Source::Off;
    int32_t tokens = 1;  // the most to draft at once

    // Throws Error(InvalidArgument) if the number of tokens is out of range.
    void validate() const;
};

struct DraftCounts {
    int64_t steps = 0;     // of the model, with drafts or without
    int64_t drafted = 0;   // guesses that these steps verified
    int64_t accepted = 0;  // guesses that were right
};

// Finds where the last tokens of the history occurred before, and returns up to `most` of the tokens that followed
// there. It looks for the longest match of 2 to 4 tokens, and among equally long ones for the latest. No match: no
// tokens.
std::vector<int32_t> ngramDraft(const std::vector<int32_t>& history, int64_t most);

// Drafts for one sequence.
class Drafter {
public:
    // Forgets all drafts and counts.
    void begin(const DraftOptions& options);
    const DraftOptions& options() const { return _options; }
    // Forgets drafts for a text that is not continued.
    void forget() { _predicted.clear(); }

    // Up to `most` tokens that may follow the history.
    std::vector<int32_t> drafts(const std::vector<int32_t>& history, int64_t most) const;

    // The first followers.size() rows of the model's last pass. They belong to one sequence, which they now end, and
    // begin at position `begin`. The prediction layer computes its rows as the same kind; the rows with which it
    // continues its own drafts are decode rows.
    struct Rows {
        RowKind kind = RowKind::Prompt;
        int32_t sequence = 0;
        int64_t begin = 0;
        std::vector<int32_t> followers;  // the token that follows each row
    };
    // The text that drafts continue: the history, then what was chosen.
    struct Text {
        Sampler& sampler;
        const std::vector<int32_t>& history;
        std::vector<int32_t> chosen;
        int64_t most = 0;  // tokens to draft
    };
    // The prediction layer's part of a pass: extends the layer's keys and values by these rows. If there is a text,
    // also drafts tokens that continue it.
    void predict(ForwardPass& forward, KvCache& kv, const Rows& rows, Text* text);

    void count(int64_t drafted, int64_t accepted);
    const DraftCounts& counts() const { return _counts; }

private:
    DraftOptions _options;
    DraftCounts _counts;
    std::vector<int32_t> _predicted;
};

}  // namespace sharpi
