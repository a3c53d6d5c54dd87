// The loads that are on their way into slots, and those that have arrived but cannot be used before the next pass
// begins.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "experts/cache/slot_memory.h"
#include "experts/expert_loads.h"

namespace sharpi {

class PendingLoads {
public:
    struct Load {
        uint64_t number = 0;
        ExpertKey expert;
        int32_t slot = -1;
    };

    // nullptr: nothing can be loaded. Only while there are no loads.
    void setLoads(ExpertLoads* loads) {
        _loads = loads;
        _arrived = 0;
    }
    bool canLoad() const { return _loads != nullptr; }
    // Throws what ExpertLoads::start() throws; there is no load then.
    void start(const ExpertKey& expert, int32_t slot, const std::array<StreamPart, 3>& parts) {
        _pending.reserve(_pending.size() + 1);  // so that nothing fails once the load runs
        _pending.push_back({_loads->start(parts), expert, slot});
    }
    // Whether as many loads are on their way as may be, by what ask() has heard.
    bool full() const {
        const auto running = std::count_if(_pending.begin(), _pending.end(),
                                           [this](const Load& load) { return load.number > _arrived; });
        return running >= _loads->depth();
    }
    // Asks which loads have arrived. Throws what ExpertLoads::finished() throws.
    void ask() {
        if (!_pending.empty()) _arrived = std::max(_arrived, _loads->finished());
    }
    // Gives out the loads that have arrived.
    std::vector<Load> takeArrived() {
        const auto next =
            std::find_if(_pending.begin(), _pending.end(), [this](const Load& load) { return load.number > _arrived; });
        std::vector<Load> arrived(_pending.begin(), next);
        _pending.erase(_pending.begin(), next);
        return arrived;
    }
    // Gives out all loads as lost, once none of them writes to a slot any more.
    std::vector<Load> takeLost() noexcept {
        if (!_pending.empty()) {
            try {
                _loads->settle();
            } catch (...) {
                // A device that has failed writes nothing more, and the caller knows of the failure.
            }
        }
        return std::exchange(_pending, {});
    }

private:
    ExpertLoads* _loads = nullptr;
    std::vector<Load> _pending;  // numbers rise
    uint64_t _arrived = 0;       // the last number that ask() heard of
};

}  // namespace sharpi
