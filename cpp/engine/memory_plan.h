// What running a model will take, line by line, without loading it: the loading code itself, run over a memory that
// only counts.
#pragma once

#include <vector>

#include "operations/backend.h"
#include "placement/homes.h"
#include "placement/load_trace.h"

namespace sharpi {

struct EngineOptions {
    int64_t context = 0;  // tokens that the KV cache has room for
    int64_t batch = 512;  // rows that prefill takes at once
    int threads = 1;
    KvType kvType = KvType::BF16;
    PromptMode prompt = PromptMode::Fast;  // on the GPU; the CPU has one arithmetic
    // States of sequences that a model with recurrent layers has room for: of one for each that holds tokens, and of
    // earlier tokens of these, to which they may be cut back.
    int32_t sequences = 4;
    bool cuda = false;           // on the GPU, else on the CPU
    size_t vram = 0;             // the most to take of the GPU's memory, in bytes; 0: all that is free
    Homes homes;                 // on the GPU: where each tensor shall be
    size_t expertSlotBytes = 0;  // of the GPU's memory, for slots of experts in Slots
    ExpertUse expertUse;
};

// The lines of LoadTrace, in order: "token embedding", "layer 0", ..., "prediction layer" (where there is one), "output
// head", "streaming" (the slots through which pass what is not resident), "expert slots", "recurrent state" (where
// there is one), "KV cache", "scratch", "graphs". On the CPU weights count as nothing: they stay in the mapped file.
std::vector<TraceLine> plannedLines(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options);
// The sum of what the lines take.
size_t plannedBytes(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options);
// What the plan's budget gives the experts in slots.
std::vector<ExpertSlotManager::PoolShape> expertPools(const ModelSpec& spec, const TensorTable& tensors,
                                                      const EngineOptions& options);
// A plan that takes no more than `available` bytes: as in options, or with fewer slots for experts, or with tensors of
// the highest ranks not resident; the one of the least memory where nothing fits.
struct FittedPlan {
    Homes homes;
    size_t expertSlotBytes = 0;
};
FittedPlan fittedPlan(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options,
                      size_t available);
// For a model that did not fit into `available` bytes: the setting that would, as words to end an error with.
std::string fittingAdvice(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options,
                          size_t available);

// Rows of a batch: those asked for, within the context. In Fast mode on the GPU at least a tile of prompt rows, since a
// recurrent layer takes them in whole tiles.
int64_t batchRows(const EngineOptions& options);
// What a backend's buffers are sized for.
StepLimits engineLimits(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options);
// By layer; a prediction layer's is the last.
std::vector<KvLayerShape> kvShapes(const ModelSpec& spec);
std::vector<RecurrentShape> recurrentShapes(const ModelSpec& spec);

}  // namespace sharpi
