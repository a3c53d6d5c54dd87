// Which experts are in which slots of one pool. Every slot is in one of three states, and every change of state is one
// call here that checks the state it starts from:
//
//   free --claim()--> claimed --place()--> holds an expert --evict() or claim()--> free
//                     claimed --giveBack()--> free
//
// Whoever claimed a slot fills it: nobody finds an expert there yet, and nobody else is given the slot. Behind these
// slots lie the landing slots, for experts that are fetched to be used once.
//
// Experts are numbered within the pool: these numbers are called keys. While a pass runs nothing is allocated here, for
// a kernel may be waiting.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "experts/cache/expert_policy.h"

namespace sharpi {

class ExpertPool {
public:
    // keys: the number of experts that share the pool.
    ExpertPool(int32_t keys, int32_t capacity, int32_t landing);

    ExpertPolicy& policy() { return _policy; }
    // The slot that holds the expert, or -1.
    int32_t slotOf(int32_t key) const { return _slotOf.at(static_cast<size_t>(key)); }

    struct Claim {
        int32_t slot = -1;
        int32_t evicted = -1;  // the key of the expert that had to leave for it, or -1
    };
    // A slot for an expert that has none: a free one; or else that of an expert which may leave and which the policy
    // finds worth less. Nothing if there is neither.
    std::optional<Claim> claim(int32_t key, const std::function<bool(int32_t key)>& mayLeave);
    // The claimed slot holds the expert from now on. Throws Error(Internal) unless the slot is claimed and the expert
    // is in no slot.
    void place(int32_t key, int32_t slot);
    // The claimed slot is free again. Throws Error(Internal) unless it is claimed.
    void giveBack(int32_t slot);
    // The slot of the expert is free again. Throws Error(Internal) unless it has one.
    void evict(int32_t key);

    // Landing slots are handed out anew for each layer.
    void clearLanding() { _landed.clear(); }
    // The landing slot that was handed out to the expert, or -1.
    int32_t landedAt(int32_t key) const;
    // A landing slot for an expert that has none, or -1 if all are handed out.
    int32_t land(int32_t key);

private:
    // What a slot holds, if not an expert.
    static constexpr int32_t kFree = -1, kClaimed = -2;
    void requireState(int32_t slot, int32_t state, const char* action) const;

    const int32_t _capacity, _landing;
    ExpertPolicy _policy;
    std::vector<int32_t> _slotOf;  // by key; -1: in none
    std::vector<int32_t> _holds;   // by slot: a key, kFree or kClaimed
    std::vector<int32_t> _free;
    std::vector<int32_t> _landed;  // the key in each landing slot that is handed out
};

}  // namespace sharpi
