// A cache of single experts in the device's memory, for models whose experts do not fit: each slot holds one expert
// whole (gate, up and down, rearranged as the device wants them). Which expert is where changes while the model runs;
// what a pass of the model may use, and what may be overwritten meanwhile, is decided here and nowhere else:
//
// - A pass works with the table as it was when the pass began (table()), which the device has a copy of.
// - A step goes through the layers in order and reports each (reached()). Experts of layers that it has left may
//   then be overwritten, and those of the layer it is in that were not chosen; those of layers still to come may not.
// - A pass that is no step reports nothing, so only slots that hold nothing are filled while it runs. The same holds
// from beginPass()
//   until the first layer is reached; when a step is over, and the next has not begun, nearly everything may be
//   overwritten.
//
// Experts of all layers whose experts take the same bytes share one pool of slots. Pools get parts of the budget in
// proportion to what all their experts take, so every layer has the same chance, and nothing is rounded away but less
// than a slot a pool. A few slots of each pool are landing places: for experts that are brought over to be used once.
//
// One thread drives the passes; preload(), tryGet() and what there is may be asked by any.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/matrix.h"
#include "experts/expert_policy.h"
#include "experts/expert_profiler.h"
#include "memory/allocator.h"
#include "memory/weight_stream.h"  // DeviceLayout

namespace sharpi {

// Copies of experts that run while the device computes.
class ExpertLoads {
public:
    virtual ~ExpertLoads() = default;
    // How many may be on their way at once; at least 1.
    virtual int depth() const = 0;
    // Starts to bring the three matrices from the file to the device, where each has its room. Returns the load's
    // number; numbers rise by one, the first is 1. May throw: nothing runs then, but what was there may have been
    // overwritten.
    virtual uint64_t start(const std::array<StreamPart, 3>& parts) = 0;
    // All loads up to this number have arrived. Does not wait. Throws if the device has failed.
    virtual uint64_t finished() = 0;
    // Waits for all of them.
    virtual void settle() = 0;
};

class ExpertSlotManager {
public:
    // Landing slots of a pool: as many as fit into that, but at least one and no more than kMaxLanding; and one for so
    // many slots that the budget gives the pool, so that they leave a small cache most of them.
    static constexpr size_t kLandingBytes = size_t{64} << 20, kMaxLanding = 8, kSlotsForALanding = 8;

    ExpertSlotManager(Allocator& allocator, DeviceLayout layout) : _allocator(allocator), _layout(std::move(layout)) {}
    ExpertSlotManager(const ExpertSlotManager&) = delete;
    ExpertSlotManager& operator=(const ExpertSlotManager&) = delete;

    // --- loading ----------------------------------------------------------------------------------------------------

    // A layer whose experts are not resident, in the order of the passes. The stacks are as in the file (null addresses
    // when only planning). Returns its number: 0, 1, ... Before take().
    int32_t addLayer(const ExpertStacks& file);
    // Takes slots of up to `budget` bytes in all, landing slots included; fewer where that is more than all experts. A
    // budget too small for the landing slots and one slot more takes nothing: the cache is then empty, and every lookup
    // a miss. Once. Throws Error(OutOfMemory); nothing was taken then. profiler: told of loads and evictions, by this
    // class's numbers of layers; may be null.
    void take(size_t budget, ExpertAccessProfiler* profiler);
    // From now on preload() works; with null, no longer: waits for what is on its way, and forgets it. The slots must
    // not be given back before that, or before the loads have settled.
    void setLoads(ExpertLoads* loads);

    // --- what there is
    // ------------------------------------------------------------------------------------------------

    int32_t layers() const { return static_cast<int32_t>(_layers.size()); }
    int32_t experts() const { return _experts; }  // the most of a layer: the length of the table's rows
    // The slots that a layer's experts may be in, as stacks: element s of each is slot s. count: landing slots
    // included; 0 without any.
    ExpertStacks slots(int32_t layer) const;
    // A layer's experts in the file.
    const ExpertStacks& file(int32_t layer) const { return _layers.at(static_cast<size_t>(layer)).file; }
    size_t expertBytes(int32_t layer) const;  // in the file
    int64_t capacity() const;                 // experts that all pools hold, without landing slots
    int64_t resident() const;                 // experts that are there now
    size_t bytes() const { return _memory.bytes(); }
    struct PoolShape {
        int32_t layers = 0;
        int64_t experts = 0;  // of all its layers
        size_t slotBytes = 0;
        int32_t capacity = 0, landing = 0;  // slots: for experts that stay, and beside them
    };
    std::vector<PoolShape> pools() const;  // in the order of their first layers

    // --- passes
    // -------------------------------------------------------------------------------------------------------

    // While the device does nothing: what has arrived can be used from here on. Throws if a load has failed: those on
    // their way are lost then, and all else is as it should be.
    void beginPass();
    // A pass was given up, and the device does nothing: the slots that getOrLoad() gave away to be filled in it may not
    // have been, and hold nothing.
    void passFailed();
    // [layers, experts()]: the slot of each expert that the pass may use, or -1.
    const std::vector<int32_t>& table() const { return _table; }
    // Rises whenever the table changes.
    uint64_t tableVersion() const { return _tableVersion; }
    // A step has come to this layer, whose rows chose these experts (with repetitions).
    void reached(int32_t layer, const int32_t* chosen, int32_t count);
    // Every choice of a layer, for the policy. Any time after reached() of the layer and before the next.
    void used(int32_t layer, const int32_t* chosen, int32_t count);
    // `rows` rows of a batch that is no step chose this expert, or a saved statistic says so. At any time.
    void addUses(int32_t layer, int32_t expert, float rows);

    // The slot where the pass finds an expert, or -1.
    int32_t tryGet(int32_t layer, int32_t expert) const;

    struct Place {
        int32_t slot = -1;
        bool fill = false;  // the caller brings the expert there before the layer's products, in the order of the pass
    };
    // A place for an expert of the layer that the pass is in, or (ahead) of one that it has not reached: where it is
    // already; or a slot to fill that is its own from then on, if the policy finds it worth more than what it replaces;
    // or, but not ahead, a landing slot, whose content is gone with the next layer. Nothing where none is free: landing
    // slots are handed out once a layer, and an expert that a load is bringing gets no second slot of its own. An
    // expert that is kept is in table() with the next pass; the device's copy the caller updates itself if this pass is
    // to find it.
    std::optional<Place> getOrLoad(int32_t layer, int32_t expert, bool ahead = false);

    enum class Preload {
        Started,
        Present,     // it is there, or on its way
        Busy,        // as many loads as may be are on their way: later
        NotWorthIt,  // nothing may be overwritten, or nothing that is worth less
    };
    // Starts to bring an expert over, to be used by later passes. Throws what ExpertLoads throws: what it was to
    // replace is gone then, and loads on their way are lost if the device has failed.
    Preload preload(int32_t layer, int32_t expert);

private:
    struct Layer {
        ExpertStacks file;
        int32_t pool = -1;
        int32_t firstKey = 0;  // of its experts in the pool's policy
    };
    // Slots are numbered from 0: those that experts stay in, then the landing slots. Each of the former is free, or
    // holds an expert, or is being filled by a load: then nobody finds the expert there, and nobody drives it out.
    struct Pool {
        PoolShape shape;
        size_t offset = 0;  // of slot 0 in _memory
        std::optional<ExpertPolicy> policy;
        std::vector<int32_t> layerOf;    // of each key
        std::vector<int32_t> slotOf;     // where it is, or -1
        std::vector<uint8_t> loading;    // a load is bringing it
        std::vector<uint8_t> changed;    // its place in the table is out of date
        std::vector<uint64_t> chosenIn;  // the last visit to its layer that chose it
        std::vector<uint64_t> placedIn;  // the last pass in which getOrLoad() gave it a slot of its own
        std::vector<int32_t> keyIn;      // of each slot: the expert that it holds, or -1
        std::vector<int32_t> free;
        std::vector<int32_t> landed;  // the key in each landing slot that was handed out in this layer
    };
    struct Key {
        int32_t pool = -1, key = -1;
    };
    struct Load {
        uint64_t number = 0;
        Key what;
        int32_t slot = -1;
    };

    const Layer& layerAt(int32_t layer) const { return _layers.at(static_cast<size_t>(layer)); }
    Pool& poolAt(int32_t pool) { return _pools[static_cast<size_t>(pool)]; }
    const Pool& poolAt(int32_t pool) const { return _pools[static_cast<size_t>(pool)]; }
    Key keyOf(int32_t layer, int32_t expert) const;
    size_t slotBytesOf(const ExpertStacks& file) const;
    ExpertStacks stacksFrom(const ExpertStacks& file, const Pool& pool) const;
    void cutBudget(size_t budget);

    bool mayLeave(const Pool& pool, int32_t key) const;
    int32_t roomFor(const Pool& pool, int32_t key) const;
    void vacate(const Key& forWhom, int32_t slot);
    void settleIn(const Key& what, int32_t slot);
    void drop(const Key& what);
    void markChanged(const Key& what);
    void tell(const Key& what, ExpertAccessProfiler::Event event);
    void updateTable();

    bool busy();
    void hearOfLoads();
    void forgetLoads() noexcept;
    std::array<StreamPart, 3> partsOf(int32_t layer, int32_t expert, int32_t slot) const;

    Allocator& _allocator;
    DeviceLayout _layout;
    ExpertLoads* _loads = nullptr;
    ExpertAccessProfiler* _profiler = nullptr;
    std::vector<Layer> _layers;
    std::vector<Pool> _pools;
    int32_t _experts = 0;
    bool _taken = false;
    Buffer _memory;

    mutable std::mutex _mutex;  // over all that follows, and what changes in the pools
    std::vector<int32_t> _table;
    uint64_t _tableVersion = 0;
    std::vector<Key> _changed;  // since the table was brought up to date
    int64_t _resident = 0;
    int32_t _reached = -1;  // the layer that the pass is in
    uint64_t _pass = 0, _visit = 0;
    std::vector<Key> _placed;     // in this pass, by getOrLoad()
    std::vector<Load> _onTheWay;  // or arrived, and not to be found before the next pass begins; numbers rise
    uint64_t _arrived = 0;        // the last number that was heard of
};

}  // namespace sharpi
