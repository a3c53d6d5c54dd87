// A forward pass over a backend and a cache of its own, so that a test can put several sequences in one batch.
#pragma once

#include <memory>

#include "layers/forward_pass.h"
#include "planning/memory_plan.h"
#include "tiny_model.h"

namespace tiny {

template <typename BackendType> struct Pass {
    static constexpr int32_t kStates = 8;
    // backendArguments: those of BackendType's constructor. cacheTokens: room in the KV cache for all sequences
    // together.
    template <typename... Arguments>
    Pass(const Model& model, int64_t rows, int64_t context, sharpi::KvType type, int64_t cacheTokens,
         Arguments&&... backendArguments)
        : spec(model.spec()),
          files(model.weights()),
          backend(std::forward<Arguments>(backendArguments)...),
          trace(backend.allocator(), nullptr),
          limits(stepLimits(spec, files->tensors(), rows, context, type)),
          weights(spec, *files, backend.placer(), {}, 0, context, trace),
          kv(backend.allocator(), kvShapes(spec), type, cacheTokens,
             sharpi::RecurrentState(backend.allocator(), recurrentShapes(spec), kStates)),
          forward(spec, weights, backend, kv, limits) {
        backend.takeScratch(limits);
    }

    sharpi::ModelSpec spec;
    std::unique_ptr<sharpi::Weights> files;
    BackendType backend;
    sharpi::LoadTrace trace;
    sharpi::StepLimits limits;
    sharpi::ModelWeights weights;
    sharpi::KvCache kv;
    sharpi::ForwardPass forward;
};

}  // namespace tiny
