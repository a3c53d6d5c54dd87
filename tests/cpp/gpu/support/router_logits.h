// Comparing two arithmetics of a model with experts. Rounding may turn a choice between two nearly equal experts. That
// changes the row a lot, and all later rows that attend to it, which may be most of the text. But the router logits
// differ by rounding alone, and if both arithmetics choose by the same ones, so does everything else. So one run keeps
// its router logits. The other chooses by them, and keeps its own, which are compared too.
#pragma once

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "backend/cuda_backend.h"
#include "engine/engine.h"
#include "forwarding.h"
#include "gpu_test.h"

namespace sharpi::cuda {

// Of each layer with experts: [rows, experts], in the order in which the rows were computed.
using RouterLogits = std::vector<std::vector<float>>;

// A backend that keeps them. Not those of decode rows: a GPU records their steps, and nothing can be read meanwhile.
template <typename Backend> class Routed : public Backend {
public:
    using Backend::Backend;
    RouterLogits routers;
    const RouterLogits* chooseBy = nullptr;  // the logits that rows choose by instead of their own

    void begin(const Batch& batch, const KvCache& kv) override {
        _rows = batch.decodeRows ? 0 : batch.size();
        Backend::begin(batch, kv);
    }
    Operations& operations() override {
        if (!_routing) _routing.emplace(*this);
        return *_routing;
    }

private:
    class Routing : public tiny::Forwarding {
    public:
        explicit Routing(Routed& owner) : Forwarding(owner.Backend::operations()), _owner(owner) {}
        void route(const ExpertCall& call) override {
            if (_owner._rows) _owner.exchange(call.routing);
            Forwarding::route(call);
        }

    private:
        Routed& _owner;
    };

    template <typename Any> static float* rowsOf(const Any& any, RowBuffer buffer) {
        if constexpr (std::is_base_of_v<CudaBackend, Any>) return any._pass.floats(buffer);
        else return any.rows(buffer);
    }
    void exchange(const RouterCall& call) {
        const auto layer = static_cast<size_t>(call.expertLayer), count = static_cast<size_t>(_rows * call.count);
        if (routers.size() <= layer) routers.resize(layer + 1);
        const size_t before = routers[layer].size();
        routers[layer].resize(before + count);
        float* const logits = rowsOf(*this, RowBuffer::RouterLogits);
        require(cudaDeviceSynchronize());
        require(cudaMemcpy(&routers[layer][before], logits, count * sizeof(float), cudaMemcpyDefault));
        if (!chooseBy) return;
        const std::vector<float>& others = chooseBy->at(layer);
        ASSERT_LE(before + count, others.size()) << "the other run had fewer rows";
        require(cudaMemcpy(logits, &others[before], count * sizeof(float), cudaMemcpyDefault));
        require(cudaDeviceSynchronize());
    }

    int64_t _rows = 0;
    std::optional<Routing> _routing;
};

// An engine on such a backend. Of the options, the device and the number of threads are the backend's own arguments.
template <typename Backend> struct RoutedEngine {
    template <typename Model, typename... Arguments>
    RoutedEngine(const Model& model, const EngineOptions& options, const RouterLogits* chooseBy,
                 Arguments... ofBackend) {
        auto made = std::make_unique<Routed<Backend>>(ofBackend...);
        backend = made.get();
        engine = std::make_shared<Engine>(model.spec(), model.weights(), options, std::move(made));
        backend->routers.clear();  // of what engines run to begin with
        backend->chooseBy = chooseBy;
    }
    Routed<Backend>* backend;
    std::shared_ptr<Engine> engine;
};

}  // namespace sharpi::cuda
