// See kept_texts.h.
#include "engine/scheduler/kept_texts.h"

#include <algorithm>
#include <utility>

namespace sharpi {

namespace {

// Texts of ended requests that are kept for prompts that begin alike.
constexpr size_t kMostEnded = 64;

}  // namespace

void KeptTexts::reserve(size_t texts) {
    _ended.reserve(_ended.size() + texts);
    _conversations.reserve(_conversations.size() + texts);
}

void KeptTexts::keep(std::unique_ptr<Continuation> text) {
    _ended.push_back(std::move(text));
    while (_ended.size() > kMostEnded) _ended.erase(_ended.begin());
}

std::vector<std::shared_ptr<Conversation>>::iterator KeptTexts::find(const Conversation& conversation) {
    return std::find_if(_conversations.begin(), _conversations.end(),
                        [&](const auto& known) { return known.get() == &conversation; });
}

void KeptTexts::add(const std::shared_ptr<Conversation>& conversation) {
    if (find(*conversation) == _conversations.end()) _conversations.push_back(conversation);
}

void KeptTexts::use(const Conversation& conversation) {
    const auto at = find(conversation);
    if (at != _conversations.end()) std::rotate(at, at + 1, _conversations.end());
}

const Continuation* KeptTexts::match(const std::string& salt, const std::vector<int32_t>& prompt) const {
    const Continuation* best = nullptr;
    int64_t most = 0;
    for (const auto& text : _ended) {
        if (text->held().salt() != salt) continue;
        const int64_t reusable = text->reusable(prompt);
        if (reusable > most) best = text.get(), most = reusable;
    }
    return best;
}

std::unique_ptr<Continuation> KeptTexts::take(const Continuation* text) {
    const auto at = std::find_if(_ended.begin(), _ended.end(), [&](const auto& one) { return one.get() == text; });
    std::unique_ptr<Continuation> taken = std::move(*at);
    _ended.erase(at);
    return taken;
}

bool KeptTexts::dropEnded(const Continuation* except) {
    const auto ended =
        std::find_if(_ended.begin(), _ended.end(), [&](const auto& text) { return text.get() != except; });
    if (ended == _ended.end()) return false;
    _ended.erase(ended);
    return true;
}

bool KeptTexts::giveWay(const Continuation* except) {
    if (dropEnded(except)) return true;
    for (const auto& conversation : _conversations) {
        const Continuation* text = conversation->kept();
        if (!text || text == except || text->held().cachedTokens() == 0) continue;
        conversation->setAside();
        return true;
    }
    return false;
}

void KeptTexts::remove(Conversation& conversation) {
    conversation.forget();
    const auto at = find(conversation);
    if (at != _conversations.end()) _conversations.erase(at);
}

void KeptTexts::clear() {
    _ended.clear();
    for (const auto& conversation : _conversations) conversation->forget();
    _conversations.clear();
}

}  // namespace sharpi
