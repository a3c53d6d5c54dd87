// See drafter.h.
#include "engine/texts/drafter.h"

#include <algorithm>
#include <string>

#include "core/error.h"

namespace sharpi {

namespace {

// A match of one token says little about the next token, because nearly every token occurred before, and a wrong draft
// costs time. A match of more than four seldom tells two places apart that four tokens do not.
constexpr size_t kShortestMatch = 2, kLongestMatch = 4;

}  // namespace

void DraftOptions::validate() const {
    if (tokens < 1 || tokens > kMostTokens) {
        throw Error(ErrorKind::InvalidArgument,
                    "the number of drafted tokens must be 1 to " + std::to_string(kMostTokens));
    }
}

std::vector<int32_t> ngramDraft(const std::vector<int32_t>& history, int64_t most) {
    const size_t size = history.size();
    size_t found = 0, longest = kShortestMatch - 1;
    // A match is the last tokens before `end`.
    for (size_t end = size; end-- > kShortestMatch && longest < kLongestMatch;) {
        size_t same = 0;
        while (same < kLongestMatch && same < end && history[end - 1 - same] == history[size - 1 - same]) ++same;
        if (same > longest) {
            longest = same;
            found = end;
        }
    }
    std::vector<int32_t> drafts;
    if (!found) return drafts;
    // A match that reaches the end of the history continues with its own draft.
    for (size_t at = found; static_cast<int64_t>(drafts.size()) < most; ++at)
        drafts.push_back(at < size ? history[at] : drafts[at - size]);
    return drafts;
}

void Drafter::begin(const DraftOptions& options) {
    _options = options;
    _counts = {};
    forget();
}

std::vector<int32_t> Drafter::drafts(const std::vector<int32_t>& history, int64_t most) const {
    if (_options.source == DraftOptions::Source::NGram) return ngramDraft(history, most);
    std::vector<int32_t> drafts = _predicted;
    drafts.resize(static_cast<size_t>(std::clamp<int64_t>(most, 0, static_cast<int64_t>(drafts.size()))));
    return drafts;
}

void Drafter::predict(ForwardPass& forward, KvCache& kv, const Rows& rows, Text* text) {
    forget();
    const auto count = static_cast<int64_t>(rows.followers.size()), most = text ? text->most : 0;
    Batch batch;
    for (int64_t i = 0; i < count; ++i) {
        const bool drafts = most > 0 && i + 1 == count;
        batch.add(rows.kind, rows.followers[static_cast<size_t>(i)], static_cast<int32_t>(rows.begin + i),
                  rows.sequence, drafts);
        batch.sources.push_back(static_cast<int32_t>(i));
    }
    forward.draft(batch, false);
    std::vector<int32_t> drafts;
    auto source = static_cast<int32_t>(count - 1);
    while (static_cast<int64_t>(drafts.size()) < most) {
        // Each draft after the first continues from the one before it. The cache has no room for that token yet.
        if (!drafts.empty()) {
            const auto ahead = static_cast<int64_t>(drafts.size());
            if (!kv.reserve(rows.sequence, ahead)) break;
            Batch again;
            again.add(RowKind::Decode, drafts.back(), static_cast<int32_t>(rows.begin + count + ahead - 1),
                      rows.sequence, true);
            again.sources.push_back(source);
            source = 0;
            forward.draft(again, true);
        }
        const int32_t token = forward.sample({text->sampler.next(text->history, text->chosen)})[0].token;
        if (token < 0) break;  // no logit can be compared: the layer has nothing to say
        drafts.push_back(token);
        text->chosen.push_back(token);
    }
    kv.truncate(rows.sequence, kv.length(rows.sequence));  // gives back the reserved pages
    _predicted = std::move(drafts);
}

void Drafter::count(int64_t drafted, int64_t accepted) {
    ++_counts.steps;
    _counts.drafted += drafted;
    _counts.accepted += accepted;
}

}  // namespace sharpi
