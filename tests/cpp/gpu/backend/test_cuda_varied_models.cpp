// Models whose feed-forward parts have biases, other activations and other routing: on the GPU they have the CPU's
// bits in decode rows and exact prompts, wherever the weights are and whoever computes them. Fast prompts are near.
#include "backend/cuda_backend.h"
#include "cpu/cpu_backend.h"
#include "placement_test.h"
#include "varied_model.h"

namespace sharpi::cuda {
namespace {

class CudaVariedModels : public PlacementTest {
protected:
    static std::shared_ptr<Engine> load(const tiny::VariedModel& model, const EngineOptions& o) {
        return std::make_shared<Engine>(model.spec(), model.weights(), o);
    }
    static size_t bytesOfExperts(const tiny::VariedModel& model) {
        size_t bytes = 0;
        for (const auto& pool : expertPools(model.spec(), model.table(), inSlots(model, 0)))
            bytes += pool.slotBytes * static_cast<size_t>(pool.experts);
        return bytes;
    }
};

TEST_F(CudaVariedModels, HaveTheCpusBits) {
    for (const tiny::Variation& v : tiny::variations()) {
        SCOPED_TRACE(v.name);
        const auto text = tokens(120, v.model.options().vocab);
        const auto expected = logits(load(v.model, options(false)), text, {});
        const auto engine = load(v.model, exact(options(true)));
        EXPECT_TRUE(sameBits(expected, steps(engine, text, oneByOne(120)))) << "token by token";
        EXPECT_TRUE(sameBits(expected, steps(engine, text, smallChunks(120)))) << "a few at a time";
        EXPECT_TRUE(sameBits(expected, logits(engine, text, {}))) << "an exact prompt";
    }
}

// With float weights, for which the distance is small enough to tell a wrong rule from rounding.
TEST_F(CudaVariedModels, FastPromptsAreNear) {
    for (const tiny::Variation& v : tiny::variations(DType::F32)) {
        SCOPED_TRACE(v.name);
        const auto text = tokens(200, v.model.options().vocab);
        const RoutedRun got = routed<CudaBackend>(v.model, options(true, KvType::F32), text, nullptr, 0, size_t{0}, 3);
        const RoutedRun expected = routed<CpuBackend>(v.model, options(false, KvType::F32), text, &got.routers, 3);
        EXPECT_LT(distance(got.logits, expected.logits), 1e-4);
        EXPECT_GT(distance(got.logits, expected.logits), 0.0) << "this was not computed on tensor cores";
        expectNearRouters(got.routers, expected.routers, 1e-4);
    }
}

// The CPU computes a part of the rows of feed-forward matrices, or all of them.
TEST_F(CudaVariedModels, SharedRowsHaveTheSameBits) {
    for (const tiny::Variation& v : tiny::variations()) {
        if (v.model.options().experts) continue;
        const auto text = tokens(60, v.model.options().vocab);
        const auto expected = logits(load(v.model, options(false)), text, {});
        for (const int share : {0, 40, 100}) {
            SCOPED_TRACE(v.name + ", the CPU's share " + std::to_string(share));
            EngineOptions o = exact(options(true));
            o.homes = homes(v.model, 0, share);
            const auto engine = load(v.model, o);
            EXPECT_TRUE(sameBits(expected, steps(engine, text, oneByOne(60)))) << "token by token, replayed";
            EXPECT_TRUE(sameBits(expected, steps(engine, text, smallChunks(60)))) << "a few at a time";
            EXPECT_TRUE(sameBits(expected, logits(engine, text, {}))) << "an exact prompt";
            engine->backend().recording()->setReplays(false);
            EXPECT_TRUE(sameBits(expected, steps(engine, text, smallChunks(60)))) << "launched";
        }
    }
}

// Missed experts are fetched, or computed by the CPU.
TEST_F(CudaVariedModels, ExpertsInSlotsHaveTheSameBits) {
    for (const tiny::Variation& v : tiny::variations()) {
        if (!v.model.options().experts || !v.usesAll) continue;
        const auto text = tokens(60, v.model.options().vocab);
        const auto expected = logits(load(v.model, options(false)), text, {});
        const auto resident = logits(load(v.model, options(true)), text, {});
        const size_t all = bytesOfExperts(v.model);
        for (const auto& [bytes, busRate] :
             std::vector<std::pair<size_t, double>>{{0, 0}, {all / 3, 0}, {all / 3, kFastBus}, {2 * all, kFastBus}}) {
            SCOPED_TRACE(v.name + ", " + std::to_string(bytes) + " bytes of slots, rate " + std::to_string(busRate));
            EXPECT_NO_THROW({
                const auto engine = load(v.model, inSlots(v.model, bytes, busRate));
                EXPECT_TRUE(sameBits(expected, steps(engine, text, oneByOne(60)))) << "token by token";
                EXPECT_TRUE(sameBits(expected, steps(engine, text, smallChunks(60)))) << "a few at a time";
                EXPECT_TRUE(sameBits(resident, logits(engine, text, {}))) << "a fast prompt";
            });
        }
    }
}

}  // namespace
}  // namespace sharpi::cuda
