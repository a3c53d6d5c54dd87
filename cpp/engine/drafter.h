// Guesses the tokens that come next, so that one step of the model can verify several: from what the text says already
// (n-gram look-up), or with the model's prediction layer. A guess decides how fast text comes, never which.
#pragma once

#include <cstdint>
#include <vector>

#include "core/launch_rows.h"
#include "engine/sampler.h"
#include "layers/forward_pass.h"

namespace sharpi {

struct DraftOptions {
    // Drafted tokens and the token before them are the rows of one launch.
    static constexpr int32_t kMostTokens = kExactLaunchRows - 1;
    enum class Source { Off, NGram, Prediction };
    Source source = Source::Off;
    int32_t tokens = 1;  // the most to draft at once

    // Throws Error(InvalidArgument) for a number of tokens that is out of range.
    void validate() const;
};

struct DraftCounts {
    int64_t steps = 0;                  // of the model, with drafts or without
    int64_t drafted = 0, accepted = 0;  // tokens that were verified, and those that were right
};

// Up to `most` tokens that followed where the history's end stood before: its last 4 tokens, or as many of them as are
// found, at least 2; of equally long ones the latest. Nothing where there is no such place.
std::vector<int32_t> ngramDraft(const std::vector<int32_t>& history, int64_t most);

// Drafts for one sequence.
class Drafter {
public:
    // Forgets all drafts and counts.
    void begin(const DraftOptions& options);
    const DraftOptions& options() const { return _options; }
    // Forgets drafts that were made for a text which is not gone on with.
    void forget() { _predicted.clear(); }

    // Up to `most` tokens that may follow the history.
    std::vector<int32_t> drafts(const std::vector<int32_t>& history, int64_t most) const;

    // Rows [0, followers.size()) of the model's last pass, which are the sequence's, of one kind, and came at `begin`,
    // where it now ends. The prediction layer's rows are of the same kind; those that go on from its own are decode
    // rows.
    struct Rows {
        RowKind kind = RowKind::Prompt;
        int32_t sequence = 0;
        int64_t begin = 0;
        std::vector<int32_t> followers;  // the token that follows each
    };
    // The text that drafts go on from: history and then what was chosen.
    struct Text {
        Sampler& sampler;
        const std::vector<int32_t>& history;
        std::vector<int32_t> chosen;
        int64_t most = 0;  // tokens to draft
    };
    // The prediction layer's part of a pass: takes its keys and values on by these rows and, with a text, drafts.
    void predict(ForwardPass& forward, KvCache& kv, const Rows& rows, Text* text);

    void count(int64_t drafted, int64_t accepted);
    const DraftCounts& counts() const { return _counts; }

private:
    DraftOptions _options;
    DraftCounts _counts;
    std::vector<int32_t> _predicted;
};

}  // namespace sharpi
