// See model_runner.h.
#include "engine/model_runner.h"

#include <algorithm>
#include <utility>

#include "core/launch_rows.h"

namespace sharpi {

namespace {

SequenceLimits sequenceLimits(const ModelSpec& spec, const Backend& backend, const StepLimits& limits) {
    SequenceLimits s;
    s.vocabSize = limits.vocab;
    s.context = limits.context;
    s.headRows = backend.headRows();
    s.predictionLayer = !spec.predictions.empty();
    s.pieces = {backend.oneArithmetic(), backend.promptStep(), limits.maxRows,
                std::min(limits.maxRows, backend.decodeRows()), std::min<int64_t>(s.headRows, kMostPrompts)};
    return s;
}

}  // namespace

ModelRunner::ModelRunner(const ModelSpec& spec, const ModelWeights& weights, Backend& backend, KvCache kv,
                         const StepLimits& limits)
    : _limits(sequenceLimits(spec, backend, limits)),
      _kvBytes(kv.bytes()),
      _stateBytes(kv.states().bytes()),
      _backend(backend),
      _kv(std::move(kv)),
      _forward(spec, weights, backend, _kv, limits) {}

}  // namespace sharpi
