// See session.h.
#include "engine/session.h"

#include <algorithm>
#include <functional>

#include "core/error.h"
#include "engine/texts/shared_steps.h"

namespace sharpi {

using Lock = std::lock_guard<std::mutex>;

Session::Session(std::shared_ptr<Engine> engine) : _text(std::move(engine)) {}

std::vector<int32_t> Session::tokens() const {
    const Lock lock(_mutex);
    return _text.tokens();
}

int64_t Session::reusedTokens() const {
    const Lock lock(_mutex);
    return _text.reusedTokens();
}

DraftCounts Session::draftCounts() const {
    const Lock lock(_mutex);
    return _text.held().running().drafter.counts();
}

void Session::requireRoom(int64_t tokens) const {
    const Lock lock(_mutex);
    requireRoomFor(tokens, _text.room());
}

void Session::reset() {
    const Lock lock(_mutex);
    _text.cutBack(0);
}

void Session::evaluate(const std::vector<int32_t>& tokens, RowKind kind, float* logits,
                       const std::vector<int64_t>& chunks, const Interrupted& interrupted) {
    const Lock lock(_mutex);
    _text.beginEvaluation(tokens, kind, logits);
    _text.complete(chunks, interrupted);
}

void Session::start(const std::vector<int32_t>& prompt, const SamplingParams& params, const Interrupted& interrupted,
                    const DraftOptions& drafts) {
    const Lock lock(_mutex);
    _text.begin(prompt, params, drafts);
    _text.complete({}, interrupted);
}

std::optional<int32_t> Session::next() { return nextOf({this}).front(); }

std::vector<std::optional<int32_t>> Session::nextOf(const std::vector<Session*>& sessions) {
    std::vector<Session*> ordered = sessions;
    std::sort(ordered.begin(), ordered.end(), std::less<>());
    if (std::adjacent_find(ordered.begin(), ordered.end()) != ordered.end())
        throw Error(ErrorKind::InvalidArgument, "a session has only one next token");
    std::vector<std::unique_lock<std::mutex>> locks;  // in one order, so that two calls cannot wait for each other
    for (const Session* session : ordered) locks.emplace_back(session->_mutex);
    std::vector<Continuation*> texts;
    for (Session* session : sessions) {
        texts.push_back(&session->_text);
        if (&session->_text.held().engine() != &sessions.front()->_text.held().engine())
            throw Error(ErrorKind::InvalidArgument, "sessions of different models cannot share a step");
        if (!session->_text.hasPrompt()) throw Error(ErrorKind::Internal, "next() before start()");
    }
    stepTogether(texts, DraftOptions::kMostTokens);
    // All tokens are checked before the first is handed out.
    for (const Continuation* text : texts)
        if (!text->chosen().empty()) checkedToken(text->chosen().front().token);
    std::vector<std::optional<int32_t>> tokens;
    for (Continuation* text : texts) {
        const std::vector<Chosen> handed = text->hand(1);
        tokens.push_back(handed.empty() ? std::nullopt : std::optional(handed.front().token));
    }
    return tokens;
}

}  // namespace sharpi
