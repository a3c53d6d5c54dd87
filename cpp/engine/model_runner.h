// Runs a loaded model, one pass at a time: the KV cache, the forward pass and the backend behind one lock.
#pragma once

#include <mutex>

#include "engine/texts/transcript.h"
#include "layers/forward_pass.h"

namespace sharpi {

// What a loaded model allows a sequence. Constant, so reading it needs no lock.
struct SequenceLimits {
    int64_t vocabSize = 0;
    int64_t context = 0;           // tokens
    int64_t headRows = 0;          // rows of one pass from which tokens can be chosen
    bool predictionLayer = false;  // the model has a layer that drafts tokens
    PieceRules pieces;
};

// What a pass changes, in the hands of the one thread that may use it: the model is locked while this lives.
class LockedModel {
public:
    LockedModel(std::mutex& mutex, Backend& backend, KvCache& kv, ForwardPass& forward)
        : _lock(mutex), _backend(backend), _kv(kv), _forward(forward) {}

    Backend& backend() const { return _backend; }
    KvCache& kv() const { return _kv; }
    ForwardPass& forward() const { return _forward; }

private:
    std::lock_guard<std::mutex> _lock;
    Backend& _backend;
    KvCache& _kv;
    ForwardPass& _forward;
};

class ModelRunner {
public:
    // All references must stay valid as long as the runner lives; the backend must have its scratch.
    ModelRunner(const ModelSpec& spec, const ModelWeights& weights, Backend& backend, KvCache kv,
                const StepLimits& limits);

    const SequenceLimits& limits() const { return _limits; }
    size_t kvBytes() const { return _kvBytes; }
    size_t stateBytes() const { return _stateBytes; }

    // Waits until no other thread has the model locked.
    LockedModel lock() { return {_mutex, _backend, _kv, _forward}; }

private:
    const SequenceLimits _limits;
    const size_t _kvBytes, _stateBytes;
    std::mutex _mutex;  // guards _backend, _kv and _forward
    Backend& _backend;
    KvCache _kv;
    ForwardPass _forward;
};

}  // namespace sharpi
