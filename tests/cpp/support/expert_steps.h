// Steps that miss experts: ExpertMisses over the real slots in a fake device's memory. A step goes through the layers
// as HostShare and the kernels do. Every order is checked here, and what a product would read is compared with the
// file.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "expert_world.h"
#include "experts/expert_misses.h"

namespace slotted {

using List = std::vector<int32_t>;

inline double between(std::mt19937& random, double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
}

// The GPU reads the file at other addresses.
constexpr std::ptrdiff_t kElsewhere = std::ptrdiff_t{1} << 44;

struct Rates {
    double cpu = 0, bus = 0;
};
constexpr Rates kBusOnly = {1e3, 1e15};  // the CPU is so slow that all goes over the bus

class Steps {
public:
    // perPool: slots of each pool, landing slots not counted. The GPU can read all of the file.
    Steps(const std::vector<LayerShape>& layers, int64_t perPool, Rates rates, Prefetch mode = Prefetch::Off)
        : world(layers) {
        world.take(world.budgetFor(perPool), &profiler);
        for (int32_t i = 0; i < world.slots->layers(); ++i) profiler.addLayer(i + 3, world.slots->file(i).gate.count);
        prefetcher = std::make_unique<ExpertPrefetcher>(*world.slots, profiler, mode);
        ExpertUse use;
        use.cpuRate = rates.cpu;
        use.busRate = rates.bus;
        const auto reachable = [this](const uint8_t* file, size_t bytes) -> const uint8_t* {
            asked[file] = bytes;
            return hidden.count(file) ? nullptr : file + kElsewhere;
        };
        misses = std::make_unique<ExpertMisses>(*world.slots, *prefetcher, profiler, use, mode, reachable);
    }
    // From now on the GPU cannot read one of its matrices.
    void hide(int32_t layer, int32_t expert, size_t matrix) {
        hidden.insert(expertAt(world.slots->file(layer), expert)[matrix].data);
    }
    bool isHidden(int32_t layer, int32_t expert) const {
        const auto matrices = expertAt(world.slots->file(layer), expert);
        return std::any_of(matrices.begin(), matrices.end(), [&](const Matrix& m) { return hidden.count(m.data) > 0; });
    }

    // --- a pass, as CudaBackend drives it
    void begin() {
        prefetcher->pump(misses->takeFetched());
        world.slots->beginPass();
        _table = world.slots->table();
    }
    // A layer; bytes and seconds: the CPU's, as HostShare::experts reports them. Returns the orders, which are empty if
    // nothing was missed.
    ExpertOrders layer(int32_t layer, const List& chosen, const List* predicted = nullptr, size_t bytes = 0,
                       double seconds = 0) {
        const ExpertOrders orders = order(layer, chosen, predicted);
        finish(bytes, seconds);
        return orders;
    }
    // Its first half, and its second.
    ExpertOrders order(int32_t layer, const List& chosen, const List* predicted = nullptr) {
        const auto pairs = static_cast<int32_t>(chosen.size());
        slot.clear();
        for (const int32_t expert : chosen) slot.push_back(onDevice(layer, expert));
        _layer = layer, _chosen = chosen, _predicted = predicted;
        ExpertOrders orders;
        missed = std::count(slot.begin(), slot.end(), -1);
        if (missed)
            misses->order(layer, chosen.data(), slot.data(), predicted ? predicted->data() : nullptr, pairs, orders);
        List at = slot;
        checkDemanded(layer, chosen, orders, at);
        checkAhead(layer + 1, orders);
        for (size_t p = 0; p < chosen.size(); ++p) {
            if (at[p] < 0) continue;
            EXPECT_TRUE(world.isThere(layer, chosen[p], at[p]))
                << "expert " << chosen[p] << " of layer " << layer << ", slot " << at[p];
        }
        return orders;
    }
    void finish(size_t bytes, double seconds) {
        const auto pairs = static_cast<int32_t>(_chosen.size());
        misses->done(_layer, _chosen.data(), slot.data(), _predicted ? _predicted->data() : nullptr, pairs, bytes,
                     seconds);
    }
    int32_t onDevice(int32_t layer, int32_t expert) const {
        return _table.at(static_cast<size_t>(layer * world.slots->experts() + expert));
    }
    uint64_t counted(const std::vector<uint64_t>& counts, int32_t layer, int32_t expert) const {
        return counts.at(static_cast<size_t>(layer * world.slots->experts() + expert));
    }

    ExpertAccessProfiler profiler;
    World world;
    std::unique_ptr<ExpertPrefetcher> prefetcher;
    std::unique_ptr<ExpertMisses> misses;
    std::set<const uint8_t*> hidden;
    std::map<const uint8_t*, size_t> asked;  // the bytes that reachable() was asked for
    List slot;                               // of the last layer's pairs, before anything was fetched
    std::ptrdiff_t missed = 0;               // of these

private:
    void checkAddresses(int32_t layer, const ExpertFetch& fetch) const {
        const auto file = expertAt(world.slots->file(layer), fetch.expert);
        EXPECT_EQ(fetch.gate, file[0].data + kElsewhere);
        EXPECT_EQ(fetch.up, file[1].data + kElsewhere);
        EXPECT_EQ(fetch.down, file[2].data + kElsewhere);
        for (const Matrix& m : file) {
            EXPECT_EQ(asked.at(m.data), fileBytes(m)) << "the GPU reads so many";
            EXPECT_FALSE(hidden.count(m.data));
        }
    }
    // at: becomes the slots after the fetches.
    void checkDemanded(int32_t layer, const List& chosen, const ExpertOrders& orders, List& at) {
        const int32_t capacity = world.slots->slots(layer).gate.count;
        std::set<int32_t> experts, slots;
        ASSERT_TRUE(orders.demanded >= 0 && orders.demanded <= kMaxExpertFetches) << orders.demanded;
        for (int32_t i = 0; i < orders.demanded; ++i) {
            const ExpertFetch& fetch = orders.fetch[i];
            ASSERT_TRUE(fetch.slot >= 0 && fetch.slot < capacity) << fetch.slot;
            EXPECT_TRUE(experts.insert(fetch.expert).second) << "expert " << fetch.expert << " twice";
            EXPECT_TRUE(slots.insert(fetch.slot).second) << "slot " << fetch.slot << " twice";
            EXPECT_FALSE(std::count(slot.begin(), slot.end(), fetch.slot)) << "into a slot that is in use";
            checkAddresses(layer, fetch);
            const auto place = world.slots->getOrLoad(layer, fetch.expert);
            ASSERT_TRUE(place);
            EXPECT_EQ(place->slot, fetch.slot) << "as the manager has it";
            EXPECT_FALSE(place->fill) << "the manager has given it away";
            bool wanted = false;
            for (size_t p = 0; p < chosen.size(); ++p) {
                if (chosen[p] != fetch.expert) continue;
                EXPECT_LT(slot[p], 0) << "it was not missed";
                at[p] = fetch.slot;
                wanted = true;
            }
            EXPECT_TRUE(wanted) << "nobody chose it";
            world.write(layer, fetch.expert, fetch.slot);
        }
    }
    void checkAhead(int32_t layer, const ExpertOrders& orders) {
        ASSERT_TRUE(orders.ahead >= 0 && orders.ahead <= ExpertMisses::kMostAhead) << orders.ahead;
        for (int32_t i = 0; i < orders.ahead; ++i) {
            const ExpertFetch& fetch = orders.aheadFetch[i];
            ASSERT_EQ(world.slots->tryGet(layer, fetch.expert), fetch.slot) << "a place of its own";
            int32_t& inTable = _table.at(static_cast<size_t>(layer * world.slots->experts() + fetch.expert));
            EXPECT_LT(inTable, 0) << "it is there";
            checkAddresses(layer, fetch);
            world.write(layer, fetch.expert, fetch.slot);
            inTable = fetch.slot;
        }
    }
    List _table;  // the device's
    // The layer at work.
    int32_t _layer = 0;
    List _chosen;
    const List* _predicted = nullptr;
};

}  // namespace slotted
