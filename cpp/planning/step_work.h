// What a token takes beside reading its weights: plans predict speeds from these counts.
#pragma once

#include <cstdint>

#include "model/model_spec.h"

namespace sharpi {

// Multiplications of queries with keys for the last of `tokens` tokens, in all layers and heads. Windows, chunks and
// blocks count as what they show, and blocks that an indexer reads as what it multiplies.
int64_t attentionProducts(const ModelSpec& spec, int64_t tokens);

// Whether all attention has heads for which the GPU has kernels for long texts (kernels/attention/decode/deep.cuh).
bool hasLongAttention(const ModelSpec& spec);

// Layers whose experts stand beside products that every token takes: a shared expert's, or a dense part's.
int64_t sharedExperts(const ModelSpec& spec);

// Small kernels over the rows that a step has beyond those of plain layers, which have a norm before the mixer and one
// before the feed-forward part; negative if layers of one part lack more of them. Norms after parts and scales of
// layers are done by the next norm's kernel.
int64_t rowKernels(const ModelSpec& spec);

}  // namespace sharpi
