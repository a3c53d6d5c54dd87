// Slots for experts over a fake device, with loads that run, arrive and fail when a test says so. Until an expert has
// arrived its slot holds rubbish, as a GPU's memory would. Every expert has different bytes, so a test can tell which
// one is in a slot.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "experts/expert_slots.h"
#include "fake_device.h"

namespace slotted {

using namespace sharpi;

// A matrix takes more room on the device than in the file.
inline size_t deviceBytes(const Matrix& m) { return fileBytes(m) + 40 * static_cast<size_t>(m.rows); }

inline std::array<Matrix, 3> expertAt(const ExpertStacks& stacks, int32_t i) {
    return {stacks.gate.at(i), stacks.up.at(i), stacks.down.at(i)};
}

inline uint8_t* bytesOf(const Matrix& m) { return const_cast<uint8_t*>(m.data); }

class TestLoads : public ExpertLoads {
public:
    int most = 3;
    int failStart = 0;          // the n-th start from now fails
    bool failFinished = false;  // the next finished() fails
    int settled = 0, asked = 0;
    uint64_t started = 0;

    int depth() const override { return most; }
    uint64_t start(const std::array<StreamPart, 3>& parts) override {
        if (failStart > 0 && --failStart == 0) {
            std::memset(bytesOf(parts[0].to), 0xcd, deviceBytes(parts[0].to));
            throw Error(ErrorKind::Internal, "a load that cannot start");
        }
        EXPECT_LT(started - _heard, static_cast<uint64_t>(most)) << "more loads at once than there may be";
        for (const StreamPart& part : parts) {
            EXPECT_TRUE(part.rowBegin == 0 && part.rows == part.to.rows && part.fileRow == 0);
            EXPECT_EQ(reinterpret_cast<uintptr_t>(part.to.data) % Allocator::kAlignment, 0u);
            for (const auto& other : _running) {
                for (const StreamPart& there : other)
                    EXPECT_NE(there.to.data, part.to.data) << "two loads into one slot";
            }
            std::memset(bytesOf(part.to), 0xcd, deviceBytes(part.to));
        }
        _running.push_back(parts);
        return ++started;
    }
    uint64_t finished() override {
        ++asked;
        if (std::exchange(failFinished, false)) throw Error(ErrorKind::Internal, "a device that has failed");
        return _heard = started - _running.size();
    }
    void settle() override {
        ++settled;
        arrive(_running.size());
        _heard = started;
    }
    // The next loads arrive, in order.
    void arrive(size_t count = 1) {
        for (; count > 0; --count) {
            for (const StreamPart& part : _running.at(0)) std::memcpy(bytesOf(part.to), part.file, part.bytes());
            _running.pop_front();
        }
    }
    size_t running() const { return _running.size(); }
    const std::array<StreamPart, 3>& last() const { return _running.back(); }

private:
    std::deque<std::array<StreamPart, 3>> _running;
    uint64_t _heard = 0;
};

struct LayerShape {
    std::array<DType, 3> types = {DType::Q4_0, DType::Q4_0, DType::Q4_0};
    int64_t hidden = 32, embedding = 64;
    int32_t experts = 8;
};

inline std::vector<LayerShape> layersOf(int count, int32_t experts = 8) {
    LayerShape shape;
    shape.experts = experts;
    return std::vector<LayerShape>(static_cast<size_t>(count), shape);
}

// The number of landing slots that each pool gets from a budget, for steps of one row.
inline std::vector<size_t> landingSlots(const ExpertSlotManager& slots, size_t budget) {
    size_t all = 0;
    for (const auto& pool : slots.pools()) all += pool.slotBytes * static_cast<size_t>(pool.experts);
    std::vector<size_t> made;
    for (const auto& pool : slots.pools()) {
        const size_t fit = std::min(budget, all) * static_cast<size_t>(pool.experts) / all;
        const size_t ofToken = std::min({size_t{8}, fit / 8, (size_t{64} << 20) / pool.slotBytes});
        made.push_back(std::max(size_t{1}, ofToken));
    }
    return made;
}

inline size_t landingBytes(const ExpertSlotManager& slots, size_t budget) {
    const std::vector<size_t> landing = landingSlots(slots, budget);
    size_t bytes = 0;
    for (size_t i = 0; i < landing.size(); ++i) bytes += slots.pools()[i].slotBytes * landing[i];
    return bytes;
}

// The least budget that leaves this many bytes beside the landing slots.
inline size_t budgetLeaving(const ExpertSlotManager& slots, size_t rest) {
    size_t budget = rest;
    while (budget < rest + landingBytes(slots, budget)) budget = rest + landingBytes(slots, budget);
    return budget;
}

class World {
public:
    explicit World(const std::vector<LayerShape>& layers, size_t capacity = size_t{1} << 30)
        : device(capacity, 4096), allocator(device) {
        std::mt19937 random(7);
        DeviceLayout layout;
        layout.bytes = deviceBytes;
        slots = std::make_unique<ExpertSlotManager>(allocator, layout);
        for (const LayerShape& shape : layers) {
            const auto stack = [&](DType type, int64_t rows, int64_t cols) {
                const size_t stride = fileBytes({type, rows, cols, nullptr}) + 18;  // experts lie apart
                auto& bytes = _files.emplace_back(stride * static_cast<size_t>(shape.experts));
                for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
                return MatrixStack{{type, rows, cols, bytes.data()}, stride, shape.experts};
            };
            slots->addLayer({stack(shape.types[0], shape.hidden, shape.embedding),
                             stack(shape.types[1], shape.hidden, shape.embedding),
                             stack(shape.types[2], shape.embedding, shape.hidden)});
        }
    }
    // The budget for `perPool` slots in each pool, beside the landing slots.
    size_t budgetFor(int64_t perPool) const {
        size_t bytes = 0;
        for (const auto& pool : slots->pools()) bytes += pool.slotBytes * static_cast<size_t>(perPool);
        return budgetLeaving(*slots, bytes);
    }
    void take(size_t budget, ExpertAccessProfiler* profiler = nullptr) {
        slots->take(budget, profiler);
        slots->setLoads(&loads);
    }

    // Does what a kernel does that fetches an expert within the pass.
    void write(int32_t layer, int32_t expert, int32_t slot) {
        const auto from = expertAt(slots->file(layer), expert), to = expertAt(slots->slots(layer), slot);
        for (size_t i = 0; i < 3; ++i) std::memcpy(bytesOf(to[i]), from[i].data, fileBytes(from[i]));
    }
    bool isThere(int32_t layer, int32_t expert, int32_t slot) const {
        const auto from = expertAt(slots->file(layer), expert), at = expertAt(slots->slots(layer), slot);
        bool same = true;
        for (size_t i = 0; i < 3; ++i) same &= std::memcmp(at[i].data, from[i].data, fileBytes(from[i])) == 0;
        return same;
    }
    int32_t inTable(int32_t layer, int32_t expert) const {
        return slots->table().at(static_cast<size_t>(layer * slots->experts() + expert));
    }
    void reach(int32_t layer, const std::vector<int32_t>& chosen = {}) {
        slots->reached(layer, chosen.data(), static_cast<int32_t>(chosen.size()));
    }
    void use(int32_t layer, const std::vector<int32_t>& chosen, int times = 1) {
        for (; times > 0; --times) slots->used(layer, chosen.data(), static_cast<int32_t>(chosen.size()));
    }
    // Loads experts of a layer into slots, as a pass does, and uses each of them `times` times.
    void fill(int32_t layer, const std::vector<int32_t>& experts, int times = 0) {
        slots->beginPass();
        reach(layer, experts);
        for (const int32_t e : experts) {
            const auto place = slots->getOrLoad(layer, e);
            ASSERT_TRUE(place && place->fill) << e;
            write(layer, e, place->slot);
        }
        use(layer, experts, times);
        slots->beginPass();
    }

    FakeDevice device;
    Allocator allocator;
    TestLoads loads;
    std::unique_ptr<ExpertSlotManager> slots;

private:
    std::deque<std::vector<uint8_t>> _files;
};

template <typename Call> void expectError(ErrorKind kind, const std::string& part, const Call& call) {
    try {
        call();
        ADD_FAILURE() << "no error";
    } catch (const Error& e) {
        EXPECT_EQ(e.kind(), kind) << e.what();
        EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
}

}  // namespace slotted
