// A text that a client's requests continue, one after the other. Between them the scheduler keeps it, as long as nobody
// else needs the memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/scheduler/answer.h"
#include "engine/texts/continuation.h"

namespace sharpi {

// One request at a time has the text. It ends where the reader of the last answer stopped, however much further that
// answer was written.
class Conversation {
public:
    explicit Conversation(std::string salt) : _salt(std::move(salt)) {}

    const std::string& salt() const { return _salt; }

    // All else is the scheduler's thread's.
    bool isBusy() const { return _isBusy; }
    // The number of the last request: those before it are over.
    int64_t latest() const { return _latest; }
    void setLatest(int64_t number) { _latest = number; }
    // The text while no request has it; nullptr if there is none.
    const Continuation* kept() const { return _kept.get(); }
    // A request has the text, or its own.
    void setBusy() { _isBusy = true; }
    // Hands the text out, cut to what was read.
    std::unique_ptr<Continuation> lend() {
        if (_kept && _answer) _kept->cutBack(length());
        _answer.reset();
        return std::move(_kept);
    }
    void giveBack(std::unique_ptr<Continuation> text) {
        _kept = std::move(text);
        _isBusy = false;
    }
    // The text now consists of this prompt, and of as much of this answer as is read.
    void follow(std::shared_ptr<const Answer> answer, int64_t promptTokens) {
        _answer = std::move(answer);
        _promptTokens = promptTokens;
    }
    void forget() {
        _kept.reset();
        _answer.reset();
    }
    void setAside() {
        if (_kept) _kept->setAside();
    }
    // The tokens that were evaluated and read. text: where they are.
    std::vector<int32_t> tokens(const Continuation* text) const {
        if (!text) return {};
        std::vector<int32_t> tokens = text->tokens();
        if (_answer) tokens.resize(static_cast<size_t>(std::min(static_cast<int64_t>(tokens.size()), length())));
        return tokens;
    }

private:
    // The last token that was read need not have been evaluated.
    int64_t length() const { return _promptTokens + std::max<int64_t>(_answer->readTokens() - 1, 0); }

    const std::string _salt;
    int64_t _latest = -1;
    bool _isBusy = false;
    std::unique_ptr<Continuation> _kept;
    std::shared_ptr<const Answer> _answer;  // the last one, unless the text is cut to it
    int64_t _promptTokens = 0;              // before it
};

}  // namespace sharpi
