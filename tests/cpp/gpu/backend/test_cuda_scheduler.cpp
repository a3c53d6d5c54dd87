// The scheduler on the GPU: every request is answered as if it were alone, with other requests beside it, too few pages
// for all of them, and weights that are not all resident.
#include "crowd.h"
#include "placement_test.h"

namespace sharpi::cuda {
namespace {

class CudaScheduler : public PlacementTest {
protected:
    static std::vector<tiny::Options> models() {
        tiny::Options experts;
        experts.architecture = "qwen3moe";
        tiny::Options predicting = tiny::gpuHybrids()[2];
        predicting.predictions = 1;
        tiny::Options windows;
        windows.architecture = "gemma3";
        windows.layers = tiny::family("gemma3").layers;
        return {tiny::gpuVariants()[0], experts, tiny::gpuHybrids()[0], predicting, windows, tiny::mambas()[2]};
    }
    // Two whose caches hold something else than keys and values of heads.
    static std::vector<tiny::Options> otherCaches() { return {tiny::latents()[0], tiny::withBlocks()}; }
    static EngineOptions sized(EngineOptions o, int64_t context, int32_t sequences) {
        o.context = context;
        o.batch = 64;
        o.sequences = sequences;
        return o;
    }
    // Everything resident, a part of it, and experts in slots.
    static std::vector<EngineOptions> placements(const tiny::Model& model) {
        std::vector<EngineOptions> all{options(true), options(true)};
        all[1].homes = homes(model, model.tensors.size() / 2, 40);
        if (bytesOfAllExperts(model)) all.push_back(inSlots(model, bytesOfAllExperts(model) / 3));
        return all;
    }
    // Requests are alone on an engine with `reference`.
    void expectAsAlone(const tiny::Model& model, const EngineOptions& reference, EngineOptions o) {
        {
            tiny::Crowd crowd(model, load(model, sized(reference, 600, 12)), random()());
            const auto engine = load(model, sized(o, 4000, 64));
            Scheduler scheduler(engine, tiny::longQueue());
            tiny::serve(scheduler, crowd, 20, 100, 30, false);
            tiny::serveAtOnce(*engine, scheduler, crowd, 25, 100, 30);
            tiny::serve(scheduler, crowd, 15, 100, 30, true);
        }
        tiny::Crowd crowd(model, load(model, sized(reference, 512, 12)), random()(), 1);
        const auto engine = load(model, sized(o, 512, 20));
        Scheduler scheduler(engine, tiny::longQueue());
        tiny::serveAtOnce(*engine, scheduler, crowd, 30, 50, 200);
        EXPECT_GT(scheduler.counts().pauses, 0);
    }
    void expectAsOnTheCpu(const std::vector<tiny::Options>& all) {
        for (const tiny::Options& tiny : all) {
            SCOPED_TRACE(tiny::describe(tiny));
            const tiny::Model model = tiny::modelOf(tiny, 4000);
            for (const EngineOptions& o : placements(model)) expectAsAlone(model, exact(options(false)), exact(o));
        }
    }
    void expectAsAlone(const std::vector<tiny::Options>& all) {
        for (const tiny::Options& tiny : all) {
            SCOPED_TRACE(tiny::describe(tiny));
            const tiny::Model model = tiny::modelOf(tiny, 4000);
            for (const EngineOptions& o : placements(model)) expectAsAlone(model, options(true), o);
        }
    }
};

// Exact prompts: the texts are those of the CPU.
TEST_F(CudaScheduler, RequestsAreAnsweredAsOnTheCpu) { expectAsOnTheCpu(models()); }
TEST_F(CudaScheduler, RequestsOfOtherCachesAreAnsweredAsOnTheCpu) { expectAsOnTheCpu(otherCaches()); }

// Fast prompts: the texts are those of a session on the same GPU that holds the whole model.
TEST_F(CudaScheduler, RequestsAreAnsweredAsAlone) { expectAsAlone(models()); }
TEST_F(CudaScheduler, RequestsOfOtherCachesAreAnsweredAsAlone) { expectAsAlone(otherCaches()); }

}  // namespace
}  // namespace sharpi::cuda
