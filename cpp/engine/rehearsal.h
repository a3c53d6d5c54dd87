// Runs a model before anyone waits for a token, so that kernels are loaded and the step is captured.
#pragma once

#include "engine/model_runner.h"
#include "planning/engine_options.h"

namespace sharpi {

// A prefill and a decode step; if the model drafts, a step with a draft too.
void rehearse(ModelRunner& runner, const ModelSpec& spec, const EngineOptions& options);

}  // namespace sharpi
