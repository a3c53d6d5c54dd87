// A cache of single experts in the device's memory, for models whose experts do not fit: each slot holds one expert
// whole (gate, up and down, rearranged as the device wants them). Which expert is where changes while the model runs;
// what a pass of the model may use, and what may be overwritten meanwhile, is decided here and nowhere else:
//
// - A pass works with the table as it was when the pass began (table()), of which the device has a copy.
// - A step goes through the layers in order and reports each (reached()). The experts of layers that it has left may
//   be overwritten, and so may those of the current layer that were not chosen; those of later layers may not.
// - A pass that is no step reports nothing, so while it runs only free slots are filled. The same holds from
//   beginPass() until the first layer is reached. After a step, and before the next pass begins, nearly everything may
//   be overwritten.
//
// One thread drives the passes; any thread may call preload(), tryGet() and resident().
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "experts/cache/expert_pool.h"
#include "experts/cache/pending_loads.h"
#include "experts/cache/slot_memory.h"
#include "experts/expert_loads.h"
#include "experts/expert_profiler.h"
#include "experts/expert_use.h"

namespace sharpi {

class ExpertSlotManager : public ExpertSlotMemory {
public:
    using ExpertSlotMemory::ExpertSlotMemory;
    ExpertSlotManager(const ExpertSlotManager&) = delete;
    ExpertSlotManager& operator=(const ExpertSlotManager&) = delete;

    // --- loading ---

    // Takes slots of up to `budget` bytes in all, landing slots included; no more than all experts need. A budget too
    // small for the landing slots and one slot more takes nothing: the cache is then empty, and every lookup a miss.
    // Once, after the last addLayer(). Throws Error(OutOfMemory); nothing was taken then. profiler: told of loads and
    // evictions, by this class's numbers of layers; may be null.
    void take(const SlotBudget& budget, ExpertAccessProfiler* profiler);
    // What leaves is on the disk, and not in RAM (ExpertPolicy::setReluctant). After take().
    void setReluctant();
    // From now on preload() works; with nullptr, it no longer does: this waits for the loads on their way and forgets
    // them. Call it before the loads or the slots are destroyed.
    void setLoads(ExpertLoads* loads);

    int64_t resident() const;  // experts that are in slots now

    // --- passes ---

    // While the device does nothing: experts that have arrived can be used from here on. Throws if a load has failed:
    // the loads on their way are lost then, and all else is unaffected.
    void beginPass();
    // A pass was given up, and the device does nothing: the slots that getOrLoad() gave out in it may not have been
    // filled, so they hold nothing.
    void passFailed();
    // [layers, experts()]: the slot of each expert that the pass may use, or -1.
    const std::vector<int32_t>& table() const { return _table; }
    // Rises whenever the table changes.
    uint64_t tableVersion() const { return _tableVersion; }
    // A step has come to this layer, whose rows chose these experts (with repetitions).
    void reached(int32_t layer, const int32_t* chosen, int32_t count);
    // All choices of a layer, for the policy. At any time between reached() of the layer and of the next.
    void used(int32_t layer, const int32_t* chosen, int32_t count);
    // `rows` rows of a batch that is no step chose this expert, or a saved statistic says so. At any time.
    void addUses(int32_t layer, int32_t expert, float rows);
    // The same of these, the most wanted first, each for less than the one before: the first is the last to be evicted.
    void addWanted(const LayerExperts& wanted);

    // The expert's slot is free, if it has one: nobody reads it any more, and nobody will miss it here.
    void release(int32_t layer, int32_t expert);

    // The slot where the pass finds an expert, or -1.
    int32_t tryGet(int32_t layer, int32_t expert) const;

    struct Place {
        int32_t slot = -1;
        bool fill = false;  // the caller fetches the expert there before the layer's products, in the order of the pass
    };
    // A place for an expert of the pass's current layer, or (ahead) of a later one:
    // - where it is already;
    // - or a slot to fill, which it keeps, if the policy finds it worth more than what it replaces;
    // - or, but not ahead, a landing slot, which the next layer's experts overwrite.
    // Nothing if none is free: landing slots are handed out once a layer, and an expert that a load is bringing gets no
    // second slot. An expert that keeps its slot is in table() from the next pass on; if this pass is to find it, the
    // caller updates the device's copy.
    std::optional<Place> getOrLoad(int32_t layer, int32_t expert, bool ahead = false);

    enum class Preload {
        Started,
        Present,     // it is in a slot, or on its way
        Busy,        // as many loads as may be are on their way: try again later
        NotWorthIt,  // nothing may be overwritten, or nothing that is worth less
    };
    // Starts to load an expert, for use by later passes. Throws what ExpertLoads throws: the expert that it was to
    // replace is gone then, and loads on their way are lost if the device has failed.
    Preload preload(int32_t layer, int32_t expert);

private:
    // One pool, with what is known of each of its experts, by key.
    struct Pool {
        ExpertPool slots;
        std::vector<uint8_t> loading;    // a load is bringing it
        std::vector<uint8_t> changed;    // its place in the table is out of date
        std::vector<uint64_t> chosenIn;  // the last visit to its layer that chose it
        std::vector<uint64_t> placedIn;  // the last pass in which getOrLoad() gave it a slot to keep
    };
    Pool& poolOf(const ExpertKey& expert) { return _pools[static_cast<size_t>(expert.pool)]; }
    bool mayLeave(const ExpertKey& expert) const;
    std::optional<int32_t> claim(const ExpertKey& expert);
    void place(const ExpertKey& expert, int32_t slot);
    void markChanged(const ExpertKey& expert);
    void tell(const ExpertKey& expert, ExpertAccessProfiler::Event event);
    void updateTable();
    void hearOfLoads();
    void forgetLoads() noexcept;

    ExpertAccessProfiler* _profiler = nullptr;

    mutable std::mutex _mutex;  // over all that follows
    std::vector<Pool> _pools;
    std::vector<int32_t> _table;
    uint64_t _tableVersion = 0;
    std::vector<ExpertKey> _changed;  // since the table was brought up to date
    int64_t _resident = 0;
    int32_t _reached = -1;  // the layer that the pass is in
    uint64_t _pass = 0, _visit = 0;
    std::vector<ExpertKey> _placed;  // in this pass, by getOrLoad()
    PendingLoads _pending;
};

}  // namespace sharpi
