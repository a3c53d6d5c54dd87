// See past_texts.h.
#include "engine/scheduler/counting/past_texts.h"

#include <algorithm>
#include <new>
#include <utility>

#include "memory/kv_cache.h"

namespace sharpi {

namespace {

// More than a server's conversations that go on at a time, in 16 MiB.
constexpr size_t kMostTexts = 256;
constexpr int64_t kMostTokens = int64_t{1} << 22;

bool beginsWith(const std::vector<int32_t>& text, const std::vector<int32_t>& beginning) {
    return beginning.size() <= text.size() && (beginning.empty() || beginning.back() == text[beginning.size() - 1]) &&
           std::equal(beginning.begin(), beginning.end(), text.begin());
}

// The tokens at the beginning of both, if there are more than `least`: then the one after those is the same too, which
// few other texts have.
int64_t commonBeyond(const std::vector<int32_t>& a, const std::vector<int32_t>& b, int64_t least) {
    const auto next = static_cast<size_t>(least);
    if (std::min(a.size(), b.size()) <= next || a[next] != b[next]) return 0;
    return commonTokens(a, b);
}

}  // namespace

void PastTexts::drop(size_t index) {
    _tokens -= _texts[index].evaluated.size();
    _texts.erase(_texts.begin() + static_cast<std::ptrdiff_t>(index));
}

void PastTexts::add(const RequestEntry& entry) noexcept {
    const Transcript& evaluated = entry.text->held().text();
    if (evaluated.size() == 0) return;
    for (size_t i = _texts.size(); i-- > 0;)
        if (_texts[i].salt == entry.request.salt && beginsWith(evaluated.tokens(), _texts[i].evaluated.tokens()))
            drop(i);
    try {
        _texts.push_back({entry.request.salt, evaluated, entry.figures.promptTokens});
    } catch (const std::bad_alloc&) {
        return;
    }
    _tokens += evaluated.size();
    while (_texts.size() > kMostTexts || (_tokens > kMostTokens && _texts.size() > 1)) drop(0);
}

EarlierText PastTexts::earlier(const RequestEntry& entry, const RequestEntries& running) const {
    const std::vector<int32_t>& prompt = entry.request.prompt;
    const HeldText& held = entry.text->held();
    const int64_t last = static_cast<int64_t>(prompt.size()) - 1;
    EarlierText best;
    const auto compare = [&](const std::string& salt, const Transcript& evaluated, int64_t promptTokens) {
        if (salt != entry.request.salt) return;
        const int64_t common = commonBeyond(prompt, evaluated.tokens(), std::max(held.size(), best.tokens));
        const int64_t tokens = std::min(common, last);
        if (tokens <= std::max(held.size(), best.tokens)) return;
        const int64_t sharable =
            held.limits().pieces.oneArithmetic ? tokens : std::min(tokens, evaluated.promptTokens());
        best = {tokens, std::min(tokens, promptTokens), sharable / KvCache::kPageTokens * KvCache::kPageTokens};
    };
    for (auto text = _texts.rbegin(); text != _texts.rend(); ++text) compare(text->salt, text->evaluated, text->prompt);
    for (const auto& other : running)
        if (other.get() != &entry && other->hasBegun)
            compare(other->request.salt, other->text->held().text(), other->figures.promptTokens);
    return best;
}

}  // namespace sharpi
