// See token_constraint.h.
#include "engine/answers/token_constraint.h"

#include <exception>

namespace sharpi {

template <typename Call> void ConstraintFollower::attempt(const Call& call) {
    if (!_constraint || !_failure.empty()) return;
    try {
        call();
    } catch (const std::exception& error) {
        _failure = std::string("the answer's constraint failed: ") + error.what();
    }
}

// A guess that is forbidden is wrong, so nothing is asked about what comes after it.
void ConstraintFollower::mask(Choice* choices, const std::vector<int32_t>& guesses, int64_t vocab) {
    _accepted = 0;
    attempt([&] {
        for (size_t i = 0;; ++i) {
            std::vector<uint32_t> words(static_cast<size_t>(maskWords(vocab)));
            if (_constraint->mask(words)) choices[i].mask = std::move(words);
            if (i == guesses.size()) return;
            const std::vector<uint32_t>& mask = choices[i].mask;
            if (!mask.empty() && !maskAllows(mask.data(), guesses[i])) return;
            _constraint->accept(guesses[i]);
            ++_accepted;
            if (_constraint->hasEnded()) {
                _hasEnded = true;
                return;
            }
        }
    });
}

void ConstraintFollower::settle(std::vector<Chosen>& chosen) {
    attempt([&] {
        const auto right = static_cast<int64_t>(chosen.size()) - 1;
        if (_hasEnded && right >= _accepted) {
            chosen.resize(static_cast<size_t>(_accepted));
            return;
        }
        _hasEnded = false;
        if (const int64_t wrong = _accepted - right; wrong > 0) {
            _accepted = right;
            _constraint->rollback(wrong);
        }
        if (chosen.back().token < 0) return;
        _constraint->accept(chosen.back().token);
        ++_accepted;
        _hasEnded = _constraint->hasEnded();
    });
}

void ConstraintFollower::undo() {
    _hasEnded = false;
    const int64_t accepted = std::exchange(_accepted, 0);
    if (accepted > 0) attempt([&] { _constraint->rollback(accepted); });
}

}  // namespace sharpi
