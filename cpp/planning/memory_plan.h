// What running a model with given options will take, line by line, without loading it: the loading code itself, run
// over a memory that only counts. It chooses no options: Python plans.
#pragma once

#include <vector>

#include "experts/expert_slots.h"
#include "memory/kv_cache.h"
#include "operations/step_limits.h"
#include "placement/load_trace.h"
#include "planning/engine_options.h"

namespace sharpi {

// The lines of LoadTrace, in order: "token embedding", "layer 0", ..., "prediction layer" (if there is one), "output
// head", "streaming" (buffers for weights that are not resident), "expert slots", "recurrent state" (if there is one),
// "KV cache", "scratch", "graphs". Weights that stay in the mapped file count as nothing.
std::vector<TraceLine> plannedLines(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options);
// The sum of what the lines take.
size_t plannedBytes(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options);
// What the plan's budget gives the experts in slots.
std::vector<ExpertSlotManager::PoolShape> expertPools(const ModelSpec& spec, const TensorTable& tensors,
                                                      const EngineOptions& options);
// Rows of a batch: those asked for, within the context, and at least the device's tile of prompt rows.
int64_t batchRows(const EngineOptions& options);
// Rows of a batch from which tokens can be chosen at once: a token and a draft of each sequence, or all drafts of one.
int64_t headRows(const EngineOptions& options);
// Of the device's memory, for experts in Slots.
SlotBudget slotBudget(const EngineOptions& options);
// What a backend's buffers are sized for.
StepLimits engineLimits(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options);
// By layer; a prediction layer's is the last.
std::vector<KvLayerShape> kvShapes(const ModelSpec& spec);
KvRoom kvRoom(const EngineOptions& options);
// What the KV cache takes; and what it would take if every layer saw all tokens.
size_t kvBytes(const ModelSpec& spec, const EngineOptions& options);
size_t kvBytesIfAllSeen(const ModelSpec& spec, const EngineOptions& options);
// What the last of `tokens` tokens reads of the KV cache.
size_t kvBytesRead(const ModelSpec& spec, KvType type, int64_t tokens);
std::vector<RecurrentShape> recurrentShapes(const ModelSpec& spec);

}  // namespace sharpi
