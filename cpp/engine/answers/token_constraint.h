// Forbids tokens of one answer as it is written, such as those that a grammar does not allow.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "operations/backend.h"

namespace sharpi {

// One thread at a time calls it, and it may throw: its answer then fails.
class TokenConstraint {
public:
    virtual ~TokenConstraint() = default;
    // Sets the tokens that may come next: see core/rules/sampling_rule.h. Returns whether any is forbidden; if not, the
    // words do not count.
    virtual bool mask(std::vector<uint32_t>& words) = 0;
    // The answer goes on with this token, which mask() allowed.
    virtual void accept(int32_t token) = 0;
    // Takes back the last accepted tokens, this number of them.
    virtual void rollback(int64_t tokens) = 0;
    // Whether the answer ends after the accepted tokens.
    virtual bool hasEnded() = 0;
};

// Keeps a constraint in step with its text through passes that verify guesses. A constraint that throws is not called
// again.
class ConstraintFollower {
public:
    ConstraintFollower() = default;
    explicit ConstraintFollower(std::shared_ptr<TokenConstraint> constraint) : _constraint(std::move(constraint)) {}

    // Of a pass, sets the masks of the choices after the text so far, and after each of these guesses.
    void mask(Choice* choices, const std::vector<int32_t>& guesses, int64_t vocab);
    // The pass chose these tokens. Removes those after the answer's end.
    void settle(std::vector<Chosen>& chosen);
    // The pass is over.
    void commit() { _accepted = 0; }
    // The pass has failed: goes back to before mask(), if that was called.
    void undo();

    // After the chosen tokens.
    bool hasEnded() const { return _hasEnded; }
    // What the constraint threw; empty: nothing.
    const std::string& failure() const { return _failure; }

private:
    template <typename Call> void attempt(const Call& call);

    std::shared_ptr<TokenConstraint> _constraint;
    int64_t _accepted = 0;  // tokens of a pass that is not over
    bool _hasEnded = false;
    std::string _failure;
};

}  // namespace sharpi
