// See expert_policy.h.
#include "experts/cache/expert_policy.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/error.h"

namespace sharpi {

ExpertPolicy::ExpertPolicy(int32_t count, int32_t capacity)
    : _count(count),
      _capacity(capacity),
      _mostProtected(static_cast<int32_t>(kProtectedShare * capacity)),
      _next(static_cast<size_t>(count) + 2, -1),
      _previous(_next),
      _segment(static_cast<size_t>(count), Segment::None),
      _usedHere(static_cast<size_t>(count)),
      _frequency(static_cast<size_t>(count)),
      _epochOf(static_cast<size_t>(count)),
      _period(std::max<int64_t>({kAgeingUsesOfHeld * capacity, kAgeingUsesOfAll * count, 1})) {
    for (const Segment segment : {Segment::Probation, Segment::Protected}) {
        const auto end = static_cast<size_t>(endOf(segment));
        _next[end] = _previous[end] = endOf(segment);
    }
}

void ExpertPolicy::used(int32_t expert, float weight) {
    const auto e = static_cast<size_t>(expert);
    _frequency.at(e) = frequency(expert) + weight;
    _epochOf[e] = _epoch;
    if (++_usesOfEpoch == _period) {
        ++_epoch;
        _usesOfEpoch = 0;
    }
    if (!holds(expert)) return;
    if (_segment[e] == Segment::Probation && _usedHere[e]) return protect(expert);
    _usedHere[e] = 1;
    const Segment segment = _segment[e];
    unlink(expert);
    append(expert, segment);
}

// If there are too many protected experts then, the oldest goes back on probation, as the youngest there. Its next use
// protects it again.
void ExpertPolicy::protect(int32_t expert) {
    unlink(expert);
    append(expert, Segment::Protected);
    if (++_protected <= _mostProtected) return;
    const int32_t oldest = _next[static_cast<size_t>(endOf(Segment::Protected))];
    unlink(oldest);
    append(oldest, Segment::Probation);
    --_protected;
}

void ExpertPolicy::inserted(int32_t expert) {
    if (holds(expert) || _held == _capacity) {
        throw Error(ErrorKind::Internal, "expert " + std::to_string(expert) + " cannot enter a cache that holds " +
                                             std::to_string(_held) + " of " + std::to_string(_capacity) +
                                             (holds(expert) ? " experts, among them this one" : " experts"));
    }
    ++_held;
    _usedHere[static_cast<size_t>(expert)] = 0;
    append(expert, Segment::Probation);
}

void ExpertPolicy::removed(int32_t expert) {
    if (!holds(expert))
        throw Error(ErrorKind::Internal,
                    "expert " + std::to_string(expert) + " cannot leave a cache that does not hold it");
    --_held;
    if (_segment[static_cast<size_t>(expert)] == Segment::Protected) --_protected;
    unlink(expert);
    _segment[static_cast<size_t>(expert)] = Segment::None;
}

int32_t ExpertPolicy::victim(const std::function<bool(int32_t)>& may) const {
    int asked = 0;
    for (const Segment segment : {Segment::Probation, Segment::Protected}) {
        for (int32_t e = _next[static_cast<size_t>(endOf(segment))]; e != endOf(segment);
             e = _next[static_cast<size_t>(e)]) {
            if (asked++ == kMostAsked) return -1;
            if (may(e)) return e;
        }
    }
    return -1;
}

float ExpertPolicy::frequency(int32_t expert) const {
    const auto e = static_cast<size_t>(expert);
    const uint32_t halvings = std::min<uint32_t>(_epoch - _epochOf.at(e), 200);  // more than any float survives
    return std::ldexp(_frequency[e], -static_cast<int>(halvings));
}

void ExpertPolicy::unlink(int32_t expert) {
    const auto e = static_cast<size_t>(expert);
    _next[static_cast<size_t>(_previous[e])] = _next[e];
    _previous[static_cast<size_t>(_next[e])] = _previous[e];
}

// As the youngest.
void ExpertPolicy::append(int32_t expert, Segment segment) {
    const auto e = static_cast<size_t>(expert);
    const int32_t end = endOf(segment), youngest = _previous[static_cast<size_t>(end)];
    _next[e] = end;
    _previous[e] = youngest;
    _next[static_cast<size_t>(youngest)] = _previous[static_cast<size_t>(end)] = expert;
    _segment[e] = segment;
}

}  // namespace sharpi
