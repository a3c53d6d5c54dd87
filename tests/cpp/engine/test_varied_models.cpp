// Engines over models whose feed-forward parts have biases, other activations and other routing: each part of the spec
// matters, and neither batches, threads nor slots do.
#include <gtest/gtest.h>

#include <algorithm>

#include "tiny_engine.h"
#include "tiny_pass.h"
#include "varied_model.h"

namespace {

using namespace sharpi;
using namespace tiny;

std::vector<float> answers(const ModelSpec& spec, const VariedModel& model, int threads,
                           const std::vector<int64_t>& chunks) {
    EngineOptions options(cpuKind());
    options.context = 64;
    options.batch = 32;
    options.threads = threads;
    Session session(std::make_shared<Engine>(spec, model.weights(), options));
    return evaluate(session, randomTokens(30, model.options().vocab, 3), model.options().vocab, chunks);
}

std::vector<float> answers(const VariedModel& model, int threads = 1, const std::vector<int64_t>& chunks = {}) {
    return answers(model.spec(), model, threads, chunks);
}

TEST(VariedModels, BatchesAndThreadsDoNotChangeABit) {
    for (const Variation& v : variations()) {
        SCOPED_TRACE(v.name);
        const std::vector<float> whole = answers(v.model);
        expectMeaningful(whole, v.model.options().vocab);
        EXPECT_TRUE(sameBits(whole, answers(v.model, 3, {1, 7, 2, 20})));
    }
}

bool feeds(const LayerSpec& layer) { return layer.dense || layer.experts; }

// Takes one part of the spec away.
void expectThatItMatters(const VariedModel& model, const std::string& what,
                         const std::function<void(LayerSpec&)>& change) {
    ModelSpec changed = model.spec();
    for (LayerSpec& layer : changed.layers)
        if (feeds(layer)) change(layer);
    EXPECT_FALSE(sameBits(answers(model), answers(changed, model, 1, {}))) << what << " is ignored";
}

TEST(VariedModels, EveryPartOfTheSpecMatters) {
    for (const Variation& v : variations()) {
        SCOPED_TRACE(v.name);
        const std::vector<LayerSpec>& layers = v.model.spec().layers;
        const LayerSpec& first = *std::find_if(layers.begin(), layers.end(), feeds);
        const auto without = [&](const std::string& what, bool is, const std::function<void(LayerSpec&)>& change) {
            if (is) expectThatItMatters(v.model, what, change);
        };
        without("the post-norm", bool(first.ffnPostNorm), [](LayerSpec& l) { l.ffnPostNorm = {}; });
        without("the order of heads", first.delta && first.delta->consecutiveHeads, [](LayerSpec& l) {
            if (l.delta) l.delta->consecutiveHeads = false;
        });
        if (first.dense) {
            const DenseFfnSpec& f = *first.dense;
            without("the activation", f.activation.kind != ActivationKind::Silu,
                    [](LayerSpec& l) { l.dense->activation = {}; });
            without("gate's bias", bool(f.gateBias), [](LayerSpec& l) { l.dense->gateBias = {}; });
            without("up's bias", bool(f.upBias), [](LayerSpec& l) { l.dense->upBias = {}; });
            without("down's bias", bool(f.downBias), [](LayerSpec& l) { l.dense->downBias = {}; });
            continue;
        }
        const ExpertFfnSpec& f = *first.experts;
        const RoutingSpec& r = f.routing;
        without("the activation", f.activation.kind != ActivationKind::Silu,
                [](LayerSpec& l) { l.experts->activation = {}; });
        without("gate's bias", bool(f.gateBias), [](LayerSpec& l) { l.experts->gateBias = {}; });
        without("up's bias", bool(f.upBias), [](LayerSpec& l) { l.experts->upBias = {}; });
        without("down's bias", bool(f.downBias), [](LayerSpec& l) { l.experts->downBias = {}; });
        without("the router's bias", bool(r.bias), [](LayerSpec& l) { l.experts->routing.bias = {}; });
        without("the kind of gating", r.gating != Gating::Softmax, [](LayerSpec& l) {
            l.experts->routing.gating = Gating::Softmax, l.experts->routing.renormalize = false;
        });
        without("groups", r.groups > 1, [](LayerSpec& l) { l.experts->routing.groups = 1; });
        without("the bias of the choice", bool(r.choiceBias), [](LayerSpec& l) { l.experts->routing.choiceBias = {}; });
        without("output scales", bool(r.outputScale), [](LayerSpec& l) { l.experts->routing.outputScale = {}; });
        without("where the weight goes", r.weightsInput, [](LayerSpec& l) { l.experts->routing.weightsInput = false; });
    }
}

// Also of vectors that the file holds transposed or within others.
TEST(VariedModels, TheHostReadsWhatTheProcessorReads) {
    for (const tiny::Options& tiny : variants()) {
        SCOPED_TRACE(describe(tiny));
        const Model model(tiny);
        tiny::Pass<CpuBackend> pass(model, 8, 64, KvType::F32, 64, 1);
        for (size_t i = 0; i < pass.spec.weights.size(); ++i) {
            const ListedWeight& weight = pass.spec.weights[i];
            if (weight.form != WeightForm::Vector && weight.form != WeightForm::Transposed) continue;
            int64_t count = 0;
            for (const WeightSlice& slice : weight.slices) count += slice.rows * slice.cols;
            const VectorId id{static_cast<int32_t>(i)};
            const float *const onHost = pass.weights.inHost(id), *const placed = pass.weights[id];
            ASSERT_TRUE(onHost && placed);
            EXPECT_TRUE(std::equal(placed, placed + count, onHost)) << "weight " << i;
        }
    }
}

}  // namespace
