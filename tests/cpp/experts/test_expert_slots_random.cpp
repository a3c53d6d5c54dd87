// Slots for experts under thousands of random calls, in the order in which an engine makes them. What the device may
// read in a pass is compared with the file whenever it may read it; the experts in the slots, and those that are
// evicted, with a model of the rules in maps. And threads that ask while another drives passes.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "expert_world.h"
#include "experts/cache/expert_policy.h"
#include "seed.h"

namespace {

using namespace slotted;
using Preload = ExpertSlotManager::Preload;
using Expert = std::pair<int32_t, int32_t>;  // layer, expert

// One pool, as the header's rules have it. Experts are numbered layer * experts + expert.
class PlainSlots {
public:
    PlainSlots(int32_t layers, int32_t experts, int32_t capacity)
        : _experts(experts), _policy(layers * experts, capacity) {
        for (int32_t s = 0; s < capacity; ++s) _free.insert(s);
    }
    void beginPass() {
        _reached = -1;
        _placed.clear();
    }
    void reached(int32_t layer, const std::vector<int32_t>& chosen) {
        _reached = layer;
        _chosen = std::set<int32_t>(chosen.begin(), chosen.end());
    }
    void used(const Expert& e) { _policy.used(number(e)); }
    bool isAt(const Expert& e) const { return _slotOf.count(e) > 0; }
    int32_t slotOf(const Expert& e) const { return isAt(e) ? _slotOf.at(e) : -1; }
    // The expert that it would replace, {-1, -1} if a slot is free; nothing if it gets no slot.
    std::optional<Expert> wouldReplace(const Expert& e) const {
        if (!_free.empty()) return Expert{-1, -1};
        const int32_t victim = _policy.victim([&](int32_t x) { return mayLeave({x / _experts, x % _experts}); });
        if (victim < 0 || _policy.frequency(number(e)) <= _policy.frequency(victim)) return std::nullopt;
        return Expert{victim / _experts, victim % _experts};
    }
    void leave(const Expert& e) {
        _free.insert(_slotOf.at(e));
        _slotOf.erase(e);
        _policy.removed(number(e));
    }
    void come(const Expert& e, int32_t slot, bool inPass) {
        if (inPass) _placed.insert(e);
        _slotOf[e] = slot;
        _policy.inserted(number(e));
    }
    void occupy(int32_t slot) { ASSERT_EQ(_free.erase(slot), 1u) << "slot " << slot << " is not free"; }
    void failed() {
        for (const Expert& e : _placed) {
            if (isAt(e)) leave(e);
        }
        beginPass();
    }
    size_t resident() const { return _slotOf.size(); }

private:
    int32_t number(const Expert& e) const { return e.first * _experts + e.second; }
    bool mayLeave(const Expert& e) const {
        return e.first < _reached || (e.first == _reached && _chosen.count(e.second) == 0 && _placed.count(e) == 0);
    }
    int32_t _experts;
    ExpertPolicy _policy;
    std::map<Expert, int32_t> _slotOf;
    std::set<int32_t> _free;
    std::set<Expert> _placed;
    std::set<int32_t> _chosen;
    int32_t _reached = -1;
};

// An engine's passes over one pool, in both the manager and the model.
class Drive {
public:
    Drive(unsigned seed, int32_t layers, int32_t experts, int32_t capacity)
        : _random(sharpi::testSeed(seed)),
          _layers(layers),
          _experts(experts),
          _capacity(capacity),
          _world(shapes(layers, experts)),
          _slots(*_world.slots),
          _plain(layers, experts, capacity) {
        _world.take(_world.budgetFor(capacity));
    }
    int64_t evictions = 0, loads = 0, hits = 0;

    void pass() {
        ++_passes;
        begin();
        const unsigned kind = _random() % 8;
        if (kind == 0) return manyRows();
        const int32_t until = kind == 1 ? static_cast<int32_t>(_random() % static_cast<unsigned>(_layers)) : _layers;
        for (int32_t layer = 0; layer < until && !::testing::Test::HasFatalFailure(); ++layer) fewRows(layer);
        if (until < _layers || _random() % 16 == 0) {
            _slots.passFailed();
            _plain.failed();
        }
        // Between two passes.
        for (unsigned n = _random() % 4; n > 0; --n) preload();
    }

private:
    static std::vector<LayerShape> shapes(int32_t layers, int32_t experts) {
        LayerShape shape;
        shape.experts = experts;
        return std::vector<LayerShape>(static_cast<size_t>(layers), shape);
    }
    unsigned any(int32_t below) { return static_cast<unsigned>(_random()) % static_cast<unsigned>(below); }
    // Some are chosen more often than others; which, changes.
    Expert someOf(int32_t layer) {
        return {layer, (static_cast<int32_t>(std::min(any(_experts), any(_experts))) + _passes / 6) % _experts};
    }

    void begin() {
        _world.loads.arrive(any(static_cast<int32_t>(_world.loads.running()) + 1));
        const size_t running = _world.loads.running();
        _slots.beginPass();
        _plain.beginPass();
        for (; _onTheWay.size() > running; _onTheWay.erase(_onTheWay.begin())) {
            const auto& [expert, slot] = _onTheWay.front();
            _plain.come(expert, slot, false);
        }
        _device = _slots.table();
        ASSERT_EQ(_slots.resident(), static_cast<int64_t>(_plain.resident()));
        for (int32_t layer = 0; layer < _layers; ++layer) {
            for (int32_t e = 0; e < _experts; ++e) {
                ASSERT_EQ(onDevice({layer, e}), _plain.slotOf({layer, e})) << layer << ", " << e;
                ASSERT_EQ(_slots.tryGet(layer, e), onDevice({layer, e}));
            }
        }
    }
    int32_t& onDevice(const Expert& e) { return _device[static_cast<size_t>(e.first * _experts + e.second)]; }
    void expectThere(const Expert& e, int32_t slot) {
        ASSERT_TRUE(_world.isThere(e.first, e.second, slot))
            << "expert " << e.second << " of layer " << e.first << " is not in slot " << slot;
    }

    void manyRows() {
        const std::vector<int32_t> table = _slots.table();
        for (int n = 0; n < 4; ++n) preload();
        ASSERT_EQ(_slots.table(), table);
        for (int32_t i = 0; i < _layers * _experts; ++i) {
            if (table[static_cast<size_t>(i)] >= 0)
                expectThere({i / _experts, i % _experts}, table[static_cast<size_t>(i)]);
        }
    }
    void fewRows(int32_t layer) {
        std::vector<int32_t> chosen(1 + any(6));
        std::map<int32_t, int32_t> slotOf;  // as the layer's kernels will have it
        for (int32_t& e : chosen) {
            e = someOf(layer).second;
            slotOf[e] = onDevice({layer, e});
            hits += slotOf[e] >= 0;
        }
        _slots.reached(layer, chosen.data(), static_cast<int32_t>(chosen.size()));
        _plain.reached(layer, chosen);
        if (_random() % 2) preload();
        int32_t landed = 0;
        for (auto& [e, slot] : slotOf) {
            if (slot < 0 && _random() % 4 > 0) slot = demand({layer, e}, landed);
        }
        if (layer + 1 < _layers && _random() % 2)
            ahead(someOf(layer + 1 + static_cast<int32_t>(any(_layers - layer - 1))));
        if (_random() % 2) preload();
        for (const auto& [e, slot] : slotOf) {
            if (slot >= 0) expectThere({layer, e}, slot);
        }
        _slots.used(layer, chosen.data(), static_cast<int32_t>(chosen.size()));
        for (const int32_t e : chosen) _plain.used({layer, e});
        // What later layers will read is there as well.
        for (int32_t i = (layer + 1) * _experts; i < _layers * _experts; ++i) {
            if (_device[static_cast<size_t>(i)] >= 0)
                expectThere({i / _experts, i % _experts}, _device[static_cast<size_t>(i)]);
        }
    }
    int32_t demand(const Expert& e, int32_t& landed) {
        const auto place = _slots.getOrLoad(e.first, e.second);
        if (!keeps(e, place)) {
            if (!place) {
                EXPECT_EQ(landed, _slots.pools()[0].landing) << "a landing slot was free";
                return -1;
            }
            EXPECT_EQ(place->slot, _capacity + landed++);
            EXPECT_TRUE(place->fill);
            _world.write(e.first, e.second, place->slot);
        }
        return place->slot;
    }
    void ahead(const Expert& e) {
        const bool there = _plain.isAt(e);
        const auto place = _slots.getOrLoad(e.first, e.second, true);
        if (there) {
            ASSERT_TRUE(place && !place->fill && place->slot == _plain.slotOf(e));
        } else if (keeps(e, place)) {
            onDevice(e) = place->slot;
        } else {
            ASSERT_FALSE(place);
        }
    }
    // Whether it has a slot to keep now; the model then gives it one too.
    bool keeps(const Expert& e, const std::optional<ExpertSlotManager::Place>& place) {
        const auto replaced = isOnTheWay(e) ? std::nullopt : _plain.wouldReplace(e);
        if (!replaced) return false;
        EXPECT_TRUE(place && place->fill && place->slot < _capacity) << "it is worth a slot";
        replace(*replaced, place->slot);
        _plain.come(e, place->slot, true);
        EXPECT_EQ(_slots.tryGet(e.first, e.second), place->slot);
        _world.write(e.first, e.second, place->slot);
        return true;
    }
    void replace(const Expert& victim, int32_t slot) {
        if (victim.first >= 0) {
            EXPECT_EQ(_plain.slotOf(victim), slot) << "evicted another expert than the model";
            _plain.leave(victim);
            EXPECT_EQ(_slots.tryGet(victim.first, victim.second), -1);
            ++evictions;
        }
        _plain.occupy(slot);
    }
    void preload() {
        const Expert e = someOf(static_cast<int32_t>(any(_layers)));
        const bool full = _world.loads.running() >= static_cast<size_t>(_world.loads.most);
        const auto replaced = _plain.wouldReplace(e);
        if (_random() % 8 == 0) _world.loads.failStart = 1;
        const bool present = _plain.isAt(e) || isOnTheWay(e);
        Preload answer = Preload::Present;
        try {
            answer = _slots.preload(e.first, e.second);
        } catch (const Error&) {
            ASSERT_TRUE(!present && !full && replaced);
            if (replaced->first < 0) return;
            _plain.leave(*replaced);  // its slot may have been overwritten
            EXPECT_EQ(_slots.tryGet(replaced->first, replaced->second), -1);
            ++evictions;
            return;
        }
        _world.loads.failStart = 0;
        ASSERT_EQ(answer, present    ? Preload::Present
                          : full     ? Preload::Busy
                          : replaced ? Preload::Started
                                     : Preload::NotWorthIt);
        if (answer != Preload::Started) return;
        const uint8_t* gate = _world.loads.last()[0].to.data;
        const MatrixStack stack = _slots.slots(e.first).gate;
        const auto slot = static_cast<int32_t>(static_cast<size_t>(gate - stack.first.data) / stack.stride);
        ASSERT_TRUE(slot < _capacity && _world.loads.last()[2].file == _slots.file(e.first).down.at(e.second).data);
        replace(*replaced, slot);
        _onTheWay.emplace_back(e, slot);
        ++loads;
    }
    bool isOnTheWay(const Expert& e) const {
        return std::any_of(_onTheWay.begin(), _onTheWay.end(), [&](const auto& load) { return load.first == e; });
    }

    std::mt19937 _random;
    int32_t _layers, _experts, _capacity, _passes = 0;
    World _world;
    ExpertSlotManager& _slots;
    PlainSlots _plain;
    std::vector<int32_t> _device;  // its copy of the table
    std::vector<std::pair<Expert, int32_t>> _onTheWay;
};

TEST(ExpertSlotsAtRandom, DoWhatTheRulesSayAndOverwriteNothingInUse) {
    int64_t evictions = 0, loads = 0, hits = 0;
    for (unsigned seed = 0; seed < 30; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        std::mt19937 random(sharpi::testSeed(seed));
        const auto layers = 1 + static_cast<int32_t>(random() % 5), experts = 2 + static_cast<int32_t>(random() % 14);
        Drive drive(seed, layers, experts,
                    1 + static_cast<int32_t>(random() % static_cast<unsigned>(seed % 2 ? layers * experts : layers)));
        for (int pass = 0; pass < 200; ++pass) {
            drive.pass();
            if (HasFatalFailure() || HasNonfatalFailure()) return;
        }
        evictions += drive.evictions;
        loads += drive.loads;
        hits += drive.hits;
    }
    EXPECT_TRUE(evictions > 500 && loads > 500 && hits > 5000) << evictions << ", " << loads << ", " << hits;
}

// Layers with slots of several sizes; each expert must land in its own pool.
TEST(ExpertSlotsAtRandom, MixedSizesDoNotDisturbEachOther) {
    std::mt19937 random(sharpi::testSeed(9));
    std::vector<LayerShape> layers(6);
    layers[1].hidden = layers[4].hidden = 96;
    layers[2].types = {DType::Q8_0, DType::Q4_0, DType::F32};
    layers[3].types = {DType::F32, DType::Q4_0, DType::Q8_0};
    layers[5].experts = 3;
    World world(layers);
    auto& slots = *world.slots;
    ASSERT_EQ(slots.pools().size(), 3u);
    world.take(world.budgetFor(6));
    int64_t found = 0;
    for (int pass = 0; pass < 400; ++pass) {
        world.loads.arrive(random() % (world.loads.running() + 1));
        slots.beginPass();
        for (int32_t layer = 0; layer < 6; ++layer) {
            std::vector<int32_t> chosen(3);
            for (int32_t& e : chosen)
                e = static_cast<int32_t>(random() % static_cast<unsigned>(slots.file(layer).gate.count));
            world.reach(layer, chosen);
            std::vector<int32_t> at;
            for (const int32_t e : chosen) {
                at.push_back(world.inTable(layer, e));
                found += at.back() >= 0;
                if (at.back() >= 0) continue;
                const auto place = slots.getOrLoad(layer, e);
                if (place && place->fill) world.write(layer, e, place->slot);
                if (place) at.back() = place->slot;
            }
            slots.preload(static_cast<int32_t>(random() % 6), static_cast<int32_t>(random() % 3));
            for (size_t i = 0; i < chosen.size(); ++i) {
                ASSERT_TRUE(at[i] < 0 || world.isThere(layer, chosen[i], at[i]))
                    << "pass " << pass << ", layer " << layer;
            }
            world.use(layer, chosen);
        }
    }
    EXPECT_GT(found, 1000);
    EXPECT_EQ(slots.resident() + static_cast<int64_t>(world.loads.running()), slots.capacity());
}

TEST(ExpertSlotsAtRandom, AnswerManyThreadsWhileOneDrivesPasses) {
    LayerShape shape;
    shape.experts = 16;
    ExpertAccessProfiler profiler;
    World world(std::vector<LayerShape>(4, shape));
    for (int32_t layer = 0; layer < 4; ++layer) profiler.addLayer(layer, 16);
    world.take(world.budgetFor(20), &profiler);
    auto& slots = *world.slots;
    std::atomic<bool> done{false};
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
            std::mt19937 random(sharpi::testSeed(static_cast<uint32_t>(t)));
            while (!done) {
                const int32_t slot =
                    slots.tryGet(static_cast<int32_t>(random() % 4), static_cast<int32_t>(random() % 16));
                const int64_t resident = slots.resident();
                if (slot < -1 || slot >= 20 || resident < 0 || resident > slots.capacity() ||
                    slots.pools()[0].capacity != 20)
                    ++wrong;
                if (slots.bytes() == 0 || slots.slots(1).up.count != 22 || slots.expertBytes(2) == 0 ||
                    profiler.counts().layers != 4)
                    ++wrong;
                std::this_thread::yield();
            }
        });
    }
    std::mt19937 random(sharpi::testSeed(40));
    for (int pass = 0; pass < 300; ++pass) {
        world.loads.arrive(random() % (world.loads.running() + 1));
        slots.beginPass();
        for (int32_t layer = 0; layer < 4; ++layer) {
            const std::vector<int32_t> chosen = {static_cast<int32_t>(random() % 16),
                                                 static_cast<int32_t>(random() % 16)};
            world.reach(layer, chosen);
            for (const int32_t e : chosen) {
                const auto place = slots.getOrLoad(layer, e);
                if (place && place->fill) world.write(layer, e, place->slot);
            }
            world.use(layer, chosen);
            slots.preload(static_cast<int32_t>(random() % 4), static_cast<int32_t>(random() % 16));
        }
        if (pass % 50 == 7) slots.passFailed();
    }
    done = true;
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_GT(slots.resident(), 15);
}

}  // namespace
