// Loading where the device has less memory than the plan thought: how much of it is left free for what comes later.
#include <gtest/gtest.h>

#include <algorithm>

#include "tiny_engine.h"

namespace {

using namespace sharpi;
using tiny::Borrowed;

constexpr size_t kMiB = size_t{1} << 20;

// Memory is zero where it was not touched: or a large KV cache would be cleared.
struct Untouched : Borrowed {
    using Borrowed::Borrowed;
    bool commitsZeroes() const override { return device.commitsZeroes(); }
};

// A plan of which every tensor has a rank of its own, so that as little leaves as has to.
struct Planned {
    explicit Planned(const tiny::Options& shape, int64_t context)
        : model(shape), spec(model.spec()), table(model.table()) {
        options.cuda = true;
        options.context = context;
        options.batch = 16;
        options.kvType = KvType::F32;
        options.homes = Homes(model.tensors.size());
        for (size_t i = 0; i < options.homes.size(); ++i) {
            const std::string& name = model.tensors[i].name;
            // Norms stay; gate and up leave together.
            if (name.find("norm") == std::string::npos) options.homes[i].rank = static_cast<int32_t>(i + 1);
            if (name.find("ffn_up") != std::string::npos) options.homes[i].rank = options.homes[i - 1].rank;
        }
        whole = plannedBytes(spec, table, options);
    }
    // Loads on a device with that many bytes, the first commits on which fail; `homes` then says what has come of the
    // plan.
    void load(size_t capacity, int failures) const {
        FakeDevice device(capacity);
        auto memory = std::make_unique<Untouched>(device);
        memory->beforeCommit = [failures]() mutable { return failures-- <= 0; };
        const Engine engine(spec, model.weights(), options, std::make_unique<CpuBackend>(1, std::move(memory)));
        homes = engine.options().homes;
    }
    size_t bytesOf(const Homes& tried) const {
        EngineOptions other = options;
        other.homes = tried;
        return plannedBytes(spec, table, other);
    }
    bool resident() const {
        return std::all_of(homes.begin(), homes.end(), [](const TensorHome& home) { return home.home == Home::Vram; });
    }

    const tiny::Model model;
    const ModelSpec spec;
    const TensorTable table;
    EngineOptions options;
    size_t whole = 0;
    mutable Homes homes;  // after loading
};

tiny::Options manyLayers() {
    tiny::Options shape;
    shape.layers = 30;
    shape.embedding = 256;
    shape.hidden = 1280;
    return shape;
}

TEST(Adapting, WhatFitsStaysAsPlanned) {
    const Planned plan(manyLayers(), 100);
    plan.load(plan.whole, 0);
    EXPECT_TRUE(plan.resident());
}

TEST(Adapting, ASixteenthOfLittleMemoryIsLeft) {
    const Planned plan(manyLayers(), 100);
    Homes none = plan.options.homes;
    for (TensorHome& home : none) {
        if (home.rank > 0) home.home = Home::Direct;
    }
    const size_t least = plan.bytesOf(none);
    int tried = 0;
    for (size_t capacity = plan.whole - 1; capacity - capacity / 16 >= least; capacity -= kMiB, ++tried) {
        plan.load(capacity, 0);
        const size_t most = capacity - capacity / 16;
        EXPECT_FALSE(plan.resident());
        EXPECT_LE(plan.bytesOf(plan.homes), most) << capacity;
        // And no more: with the last that left, it would be less than that.
        Homes more = plan.homes;
        int32_t next = INT32_MAX;
        for (const TensorHome& home : more) {
            if (home.home != Home::Vram) next = std::min(next, home.rank);
        }
        for (TensorHome& home : more) {
            if (home.rank == next) home.home = Home::Vram;
        }
        EXPECT_GT(plan.bytesOf(more), most) << capacity;
    }
    EXPECT_GT(tried, 5);
}

// What was free was not: the last attempt leaves room even if the plan seems to fit.
TEST(Adapting, OfMuchMemory128MiBAreLeft) {
    tiny::Options shape;
    shape.layers = 12;
    shape.heads = shape.kvHeads = 4;
    shape.headDim = 256;
    shape.context = 1 << 20;
    // 96 KiB of keys and values for each token, never touched.
    const Planned plan(shape, 24 << 10);
    ASSERT_GT(plan.whole, size_t{2} << 30) << "below that a sixteenth is less than 128 MiB";
    for (const int failures : {0, 1, 2}) {
        plan.load(plan.whole + 127 * kMiB, failures);
        EXPECT_EQ(plan.resident(), failures < 2) << failures << " failures";
        plan.load(plan.whole + 129 * kMiB, failures);
        EXPECT_TRUE(plan.resident()) << failures << " failures";
    }
}

}  // namespace
