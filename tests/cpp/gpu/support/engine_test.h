// What tests of whole engines on the GPU share: loading tiny models on either processor, and running them.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/launch_rows.h"
#include "cpu/cpu_kind.h"
#include "engine/session.h"
#include "gpu_test.h"
#include "plan/cuda_kind.h"
#include "router_logits.h"
#include "tiny_model.h"

namespace sharpi::cuda {

class EngineTest : public GpuTest {
protected:
    static EngineOptions options(bool cuda, KvType kv = KvType::BF16) {
        EngineOptions o(cuda ? cudaKind() : cpuKind());
        o.context = 300;
        o.batch = 128;
        o.threads = 3;
        o.kvType = kv;
        return o;
    }
    static std::shared_ptr<Engine> load(const tiny::Model& model, const EngineOptions& o) {
        return std::make_shared<Engine>(model.spec(), model.weights(), o);
    }

    std::vector<int32_t> tokens(int64_t count, int64_t vocab) {
        std::vector<int32_t> made(static_cast<size_t>(count));
        for (int32_t& token : made) token = static_cast<int32_t>(random()() % static_cast<uint32_t>(vocab));
        return made;
    }
    // The options for tests of equality with the CPU: prompt rows follow the contract.
    static EngineOptions exact(EngineOptions o) {
        o.prompt = PromptMode::Exact;
        return o;
    }
    // Pieces for `total` tokens: most of a few rows, some of more than one launch of the contract's products takes.
    std::vector<int64_t> smallChunks(int64_t total) {
        std::vector<int64_t> chunks;
        for (int64_t i = 0; i < total; ++i) {
            const int64_t most = random()() % 4 ? kMostDraftRows : random()() % 2 ? 40 : 2 * kExactLaunchRows;
            chunks.push_back(1 + static_cast<int64_t>(random()() % static_cast<uint32_t>(most)));
        }
        return chunks;
    }
    static std::vector<int64_t> oneByOne(int64_t total) { return std::vector<int64_t>(static_cast<size_t>(total), 1); }

    // The logits of prompt rows.
    static std::vector<float> logits(Session& session, const std::vector<int32_t>& text,
                                     const std::vector<int64_t>& chunks, RowKind kind = RowKind::Prompt) {
        std::vector<float> values(text.size() * static_cast<size_t>(session.vocabSize()), NAN);
        session.evaluate(text, kind, values.data(), chunks, nullptr);
        return values;
    }
    static std::vector<float> logits(const std::shared_ptr<Engine>& engine, const std::vector<int32_t>& text,
                                     const std::vector<int64_t>& chunks) {
        Session session(engine);
        return logits(session, text, chunks);
    }
    // The logits of decode rows.
    static std::vector<float> steps(Session& session, const std::vector<int32_t>& text,
                                    const std::vector<int64_t>& chunks) {
        return logits(session, text, chunks, RowKind::Decode);
    }
    static std::vector<float> steps(const std::shared_ptr<Engine>& engine, const std::vector<int32_t>& text,
                                    const std::vector<int64_t>& chunks) {
        Session session(engine);
        return steps(session, text, chunks);
    }
    // The logits of prompt rows, and those of the routers. The rest: see RoutedEngine.
    struct RoutedRun {
        std::vector<float> logits;
        RouterLogits routers;
    };
    template <typename Backend, typename ModelType, typename... Arguments>
    static RoutedRun routed(const ModelType& model, const EngineOptions& o, const std::vector<int32_t>& text,
                            const RouterLogits* chooseBy, Arguments... ofBackend) {
        const RoutedEngine<Backend> made(model, o, chooseBy, ofBackend...);
        std::vector<float> answers = logits(made.engine, text, {});
        return {std::move(answers), std::move(made.backend->routers)};
    }
    static void expectNearRouters(const RouterLogits& got, const RouterLogits& expected, double most) {
        ASSERT_EQ(got.size(), expected.size());
        for (size_t i = 0; i < got.size(); ++i) {
            ASSERT_EQ(got[i].size(), expected[i].size());
            EXPECT_LT(distance(got[i], expected[i]), most) << "the routers of layer " << i << " of those with experts";
        }
    }
    // The distance of all numbers together, relative to the size of b.
    static double distance(const std::vector<float>& a, const std::vector<float>& b) {
        double difference = 0, norm = 0;
        for (size_t i = 0; i < a.size(); ++i) {
            difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
            norm += double(b[i]) * b[i];
        }
        return std::sqrt(difference / norm);
    }
    // The median of that distance over rows.
    static double medianDistance(const std::vector<float>& a, const std::vector<float>& b, int64_t vocab) {
        std::vector<double> rows;
        for (size_t at = 0; at < a.size(); at += vocab) {
            rows.push_back(
                distance({a.begin() + at, a.begin() + at + vocab}, {b.begin() + at, b.begin() + at + vocab}));
        }
        std::nth_element(rows.begin(), rows.begin() + rows.size() / 2, rows.end());
        return rows[rows.size() / 2];
    }
    static std::vector<int32_t> greedy(const std::shared_ptr<Engine>& engine, const std::vector<int32_t>& prompt,
                                       int count) {
        Session session(engine);
        SamplingParams params;
        params.temperature = 0;
        session.start(prompt, params, nullptr);
        std::vector<int32_t> text;
        for (int i = 0; i < count; ++i) text.push_back(*session.next());
        return text;
    }
};

}  // namespace sharpi::cuda
