// The homes of weights, for tests of engines that hold only a part of a model in VRAM.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "engine_test.h"
#include "planning/memory_plan.h"

namespace sharpi::cuda {

class PlacementTest : public EngineTest {
protected:
    static bool isStack(const TensorInfo& tensor) { return tensor.name.find("_exps.") != std::string::npos; }
    // The experts are in slots or resident. Everything else is resident.
    static Homes expertHomes(const tiny::Model& model, bool inSlots) {
        Homes made(model.tensors.size());
        for (size_t i = 0; i < made.size(); ++i) {
            if (inSlots && isStack(model.tensors[i])) made[i].home = Home::Slots;
        }
        return made;
    }
    // Tensors with a common home (a layer's gate and up, or all its experts) have a common name here. Others have their
    // own.
    static std::string groupOf(const std::string& tensor) {
        const std::string layer = tensor.substr(0, tensor.find("ffn_"));
        if (tensor.find("_exps.weight") != std::string::npos) return "experts";
        const bool isPair =
            tensor.find("ffn_gate.") != std::string::npos || tensor.find("ffn_up.") != std::string::npos;
        return isPair ? layer + "gate and up" : tensor;
    }
    // The first `resident` tensors stay on the device, each with the rest of its group. The CPU computes `share`
    // percent of the feed-forward rows of the others.
    static Homes homes(const tiny::Model& model, size_t resident, int share) {
        Homes made(model.tensors.size());
        for (size_t i = 0; i < made.size(); ++i) {
            const auto first = std::find_if(model.tensors.begin(), model.tensors.end(), [&](const TensorInfo& t) {
                return groupOf(t.name) == groupOf(model.tensors[i].name);
            });
            if (first - model.tensors.begin() < static_cast<std::ptrdiff_t>(resident)) continue;
            made[i].home = isStack(model.tensors[i]) ? Home::Slots : Home::Direct;
            made[i].cpuRows = isStack(model.tensors[i]) ? 0 : model.tensors[i].shape.back() * share / 100;
        }
        return made;
    }

    // The usual plan for experts that do not fit: everything else is resident, and slots hold as many experts as fit in
    // `bytes`. With a bus of this rate, the GPU fetches what a step misses, up to kMaxExpertFetches experts.
    static constexpr double kFastBus = 1e13;
    static EngineOptions inSlots(const tiny::Model& model, size_t bytes, double busRate = kFastBus) {
        EngineOptions o = options(true);
        o.homes = expertHomes(model, true);
        o.expertSlotBytes = bytes;
        o.expertUse.cpuRate = 1e9;
        o.expertUse.busRate = busRate;
        return o;
    }
    static size_t bytesOfAllExperts(const tiny::Model& model) {
        size_t bytes = 0;
        for (const auto& pool : expertPools(model.spec(), model.table(), inSlots(model, 0)))
            bytes += pool.slotBytes * static_cast<size_t>(pool.experts);
        return bytes;
    }

    // The expected answers, wherever weights are: those of the CPU in steps, and those of a resident model in batches
    // of many rows.
    struct Answers {
        std::vector<int32_t> text, start, continued;
        std::vector<float> steps, prefill;
    };
    Answers answersOf(const tiny::Model& model) {
        Answers a;
        a.text = tokens(100, model.options().vocab);
        a.start.assign(a.text.begin(), a.text.begin() + 20);
        a.steps = logits(load(model, options(false)), a.text, {});
        const auto resident = load(model, options(true));
        a.prefill = logits(resident, a.text, {});
        a.continued = greedy(resident, a.start, 40);
        return a;
    }
    // Twice, since the second time finds other experts in slots. Then by direct launches.
    void expectAnswers(const std::shared_ptr<Engine>& engine, const Answers& a) {
        for (int round = 0; round < 2; ++round) {
            EXPECT_TRUE(sameBits(a.prefill, logits(engine, a.text, {})));
            EXPECT_TRUE(sameBits(a.steps, steps(engine, a.text, oneByOne(100)))) << "token by token";
            EXPECT_TRUE(sameBits(a.steps, steps(engine, a.text, smallChunks(100)))) << "a few at a time";
            EXPECT_EQ(a.continued, greedy(engine, a.start, 40)) << "a prompt of many rows, then single ones";
        }
        EXPECT_TRUE(engine->backend().recording()->replays());
        engine->backend().recording()->setReplays(false);
        EXPECT_TRUE(sameBits(a.steps, steps(engine, a.text, smallChunks(100)))) << "launched";
    }
    // A text of 60 tokens may be interrupted after any piece: the next one finds everything usable. expected: of the
    // CPU.
    void expectUsableAfterInterruptions(const std::shared_ptr<Engine>& engine, const std::vector<int32_t>& text,
                                        const std::vector<float>& expected) {
        for (const int pieces : {0, 1, 7, 30}) {
            Session session(engine);
            int asked = 0;
            EXPECT_THROW(
                session.evaluate(text, RowKind::Decode, nullptr, oneByOne(60), [&] { return asked++ == pieces; }),
                Error);
            session.reset();
            EXPECT_TRUE(sameBits(expected, steps(session, text, smallChunks(60)))) << "after " << pieces;
        }
    }
    static uint64_t sum(const std::vector<uint64_t>& values) {
        return std::accumulate(values.begin(), values.end(), uint64_t{0});
    }
};

}  // namespace sharpi::cuda
