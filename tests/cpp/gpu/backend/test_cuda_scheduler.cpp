// The scheduler on the GPU: every request is answered as if it were alone, with other requests beside it, too few pages
// for all of them, and weights that are not all resident. And how requests end if the device fails.
#include <unistd.h>

#include <cstdlib>
#include <iostream>

#include "crowd.h"
#include "kernels/rows/rows.h"
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
        // Whether memory ends depends on the lengths that are drawn.
        for (int i = 0; i < 4 && scheduler.counts().pauses == 0; ++i)
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

// After an illegal access nothing works any more in the process that made it. So each of these runs in one of its own:
// this program, started again for the one test.
class CudaSchedulerDeathTest : public CudaScheduler {
protected:
    static constexpr unsigned kMostSeconds = 120;

    void SetUp() override {
        CudaScheduler::SetUp();
        GTEST_FLAG_SET(death_test_style, "threadsafe");
    }
    // A kernel writes where nothing is, in a stream that is not the backend's.
    void makeFault() { scaleRows(stream(), nullptr, 64, 2.0f); }
    static void tell(const std::string& wrong) {
        std::cerr << wrong << std::endl;
        _hasFailed = true;
    }
    static bool isLoss(std::optional<ErrorKind> kind, const std::string& words) {
        return kind == ErrorKind::DeviceLost && words.find("illegal memory access") != std::string::npos;
    }
    static void expectLost(Answer& answer) {
        const Ending ending = tiny::wait(answer).ending;
        if (ending.finish != Finish::Failed || !isLoss(ending.kind, ending.error))
            tell("a request ended otherwise: " + ending.error);
    }
    static void expectRefusal(Scheduler& scheduler) {
        try {
            scheduler.submit(tiny::requestOf({1, 2, 3}, 4));
            tell("a request was taken after the fault");
        } catch (const Error& error) {
            if (!isLoss(error.kind(), error.what())) tell(std::string("refused otherwise: ") + error.what());
        }
        if (scheduler.counts().failure.empty()) tell("the scheduler does not say that it has failed");
    }
    // Two requests are written and two wait while the fault comes.
    void failWhileWriting(const tiny::Model& model, const EngineOptions& o) {
        SchedulerOptions few = tiny::longQueue();
        few.running = 2;
        Scheduler scheduler(load(model, sized(o, 8000, 8)), few);
        std::vector<std::shared_ptr<Answer>> answers;
        for (int i = 0; i < 4; ++i)
            answers.push_back(scheduler.submit(tiny::requestOf(tokens(20, model.options().vocab), 3500)));
        for (size_t i = 0; i < 2; ++i) answers[i]->take(tiny::kForever);
        makeFault();
        for (const auto& answer : answers) expectLost(*answer);
        expectRefusal(scheduler);
        scheduler.close();
    }
    void failWhileIdle(const tiny::Model& model, const EngineOptions& o) {
        Scheduler scheduler(load(model, sized(o, 4000, 8)), tiny::longQueue());
        if (tiny::wait(*scheduler.submit(tiny::requestOf({1, 2, 3}, 4))).ending.finish != Finish::Length)
            tell("no answer before the fault");
        makeFault();
        expectLost(*scheduler.submit(tiny::requestOf({1, 2, 3}, 4)));
        expectRefusal(scheduler);
    }
    // Of that process: it exits as one that found nothing wrong, after all has been closed. If something hangs, it is
    // killed.
    [[noreturn]] static void runAndExit(const std::function<void()>& work) {
        ::alarm(kMostSeconds);
        work();
        std::exit(_hasFailed);
    }

private:
    static inline bool _hasFailed = false;
};

TEST_F(CudaSchedulerDeathTest, AFaultEndsAllRequests) {
    const tiny::Model model = tiny::modelOf(models()[1], 8000);
    for (const EngineOptions& o : placements(model))
        EXPECT_EXIT(runAndExit([&] { failWhileWriting(model, o); }), testing::ExitedWithCode(0), "");
}

TEST_F(CudaSchedulerDeathTest, AFaultBetweenRequestsIsFoundByTheNext) {
    const tiny::Model model = tiny::modelOf(models()[1], 4000);
    EXPECT_EXIT(runAndExit([&] { failWhileIdle(model, options(true)); }), testing::ExitedWithCode(0), "");
}

// Exact prompts: the texts are those of the CPU.
TEST_F(CudaScheduler, RequestsAreAnsweredAsOnTheCpu) { expectAsOnTheCpu(models()); }
TEST_F(CudaScheduler, RequestsOfOtherCachesAreAnsweredAsOnTheCpu) { expectAsOnTheCpu(otherCaches()); }

// Fast prompts: the texts are those of a session on the same GPU that holds the whole model.
TEST_F(CudaScheduler, RequestsAreAnsweredAsAlone) { expectAsAlone(models()); }
TEST_F(CudaScheduler, RequestsOfOtherCachesAreAnsweredAsAlone) { expectAsAlone(otherCaches()); }

}  // namespace
}  // namespace sharpi::cuda
