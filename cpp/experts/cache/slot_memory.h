// The memory of the slots for experts: which layers use them, how many there are and where each lies. All of it is
// fixed once the memory is taken; which expert is in which slot is ExpertSlotManager's business.
//
// The experts of all layers whose experts take the same number of bytes share one pool of slots. Each pool gets a part
// of the budget in proportion to what all its experts take, so every layer has the same chance, and rounding costs less
// than a slot a pool. A few slots of each pool are landing slots: for experts that are fetched to be used once.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/expert_orders.h"
#include "core/matrix.h"
#include "memory/allocator.h"
#include "memory/device_layout.h"
#include "memory/stream/transfers.h"

namespace sharpi {

// What slots are taken for.
struct SlotBudget {
    SlotBudget(size_t most, int64_t rows = 1) : bytes(most), stepRows(rows) {}

    size_t bytes;      // the most that slots may take, landing slots included
    int64_t stepRows;  // the most rows of a step
};

// An expert by its pool, and its number among the pool's experts.
struct ExpertKey {
    int32_t pool = -1, key = -1;
};

class ExpertSlotMemory {
public:
    // A token needs few landing slots: up to kLandingOfToken, as many as fit into kLandingBytes, and one for each
    // kSlotsForALanding slots that the budget gives the pool, so that a small cache keeps most of its slots. Steps of
    // many rows miss more experts. For them, a pool has a landing slot for each row, as long as these are at most one
    // for each kSlotsForMoreLanding slots. Every pool has at least one.
    static constexpr size_t kLandingBytes = size_t{64} << 20, kLandingOfToken = 8, kSlotsForALanding = 8;
    static constexpr size_t kMostLanding = kMaxExpertFetches, kSlotsForMoreLanding = 64;

    struct PoolShape {
        int32_t layers = 0;
        int64_t experts = 0;  // of all its layers
        size_t slotBytes = 0;
        int32_t capacity = 0, landing = 0;  // slots: for experts that stay, and landing slots
    };

    ExpertSlotMemory(Allocator& allocator, DeviceLayout layout) : _allocator(allocator), _layout(std::move(layout)) {}

    // A layer whose experts are not resident, in the order of the passes. The stacks are as in the file (null addresses
    // when only planning). Returns its number among these layers: 0, 1, ... Before the memory is taken.
    int32_t addLayer(const ExpertStacks& file);

    int32_t layers() const { return static_cast<int32_t>(_layers.size()); }
    int32_t experts() const { return _experts; }  // the most that a layer has
    // The slots that a layer's experts may be in, as stacks: element s of each is slot s. count: landing slots
    // included; 0 if there are no slots.
    ExpertStacks slots(int32_t layer) const;
    // A layer's experts in the file.
    const ExpertStacks& file(int32_t layer) const { return layerAt(layer).file; }
    size_t expertBytes(int32_t layer) const;  // in the file
    int64_t capacity() const;                 // experts that all pools hold, landing slots not counted
    size_t bytes() const { return _memory.bytes(); }
    uint8_t* memory() const { return _memory.as<uint8_t>(); }  // of all slots; null if there are none
    std::vector<PoolShape> pools() const;                      // in the order of their first layers

protected:
    ~ExpertSlotMemory() = default;

    // Throws Error(OutOfMemory); nothing was taken then.
    void takeMemory(const SlotBudget& budget);
    bool taken() const { return _taken; }
    // Throws Error(Internal) if there is no such expert, or no memory was taken.
    ExpertKey keyOf(int32_t layer, int32_t expert) const;
    int32_t layerOf(const ExpertKey& key) const;
    int32_t expertOf(const ExpertKey& key) const { return key.key - layerAt(layerOf(key)).firstKey; }
    // An expert's matrices on their way into a slot.
    std::array<StreamPart, 3> partsOf(int32_t layer, int32_t expert, int32_t slot) const;

private:
    struct Layer {
        ExpertStacks file;
        int32_t pool = -1;
        int32_t firstKey = 0;  // of its experts in the pool
    };
    struct Pool {
        PoolShape shape;
        size_t offset = 0;             // of slot 0 in _memory
        std::vector<int32_t> layerOf;  // by key
    };
    const Layer& layerAt(int32_t layer) const { return _layers.at(static_cast<size_t>(layer)); }
    size_t slotBytesOf(const ExpertStacks& file) const;
    bool cutLanding(const SlotBudget& budget, size_t* rest);
    void cutBudget(const SlotBudget& budget);

    Allocator& _allocator;
    DeviceLayout _layout;
    std::vector<Layer> _layers;
    std::vector<Pool> _pools;
    int32_t _experts = 0;
    bool _taken = false;
    Buffer _memory;
};

}  // namespace sharpi
