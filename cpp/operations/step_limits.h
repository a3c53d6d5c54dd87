// The most that a model's steps need room for. A backend's buffers are sized for it when they are taken, and plans
// count the same buffers from the same limits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "memory/kv_pages.h"
#include "model/model_spec.h"
#include "operations/batch.h"

namespace sharpi {

struct StepLimits {
    int64_t maxRows = 1;   // rows of a batch
    int64_t context = 1;   // tokens of a sequence
    int64_t headRows = 8;  // rows whose logits are held at once, so that tokens can be chosen from all of them
    int64_t embedding = 1, vocab = 1;
    int64_t maxCols = 1;                                          // inputs of any matrix
    int32_t heads = 1, kvHeads = 1, headDim = 2, pageTokens = 1;  // the largest of any layer
    int32_t pageLists = 1;                                        // of a sequence: see KvPages::list
    int64_t queryWidth = 1, kvWidth = 1;                          // floats of a row's queries, and of its keys
    // Latent attention: see LatentSpec. Floats of a row's queries and values as heads have them; 0: there is none.
    int64_t headQueryWidth = 0, headValueWidth = 0, queryRank = 0;
    int32_t latentHeads = 0, latentRank = 0, plainDim = 0;
    // Attention with grouped outputs: groups, and inputs of each. Compressors and indexers: see CompressorSpec.
    int32_t outputGroups = 0, indexHeads = 0, topK = 0, compressorDim = 0;
    int64_t groupWidth = 0, compressorWidth = 0, indexWidth = 0,
            blocks = 0;       // blocks: rows of a sequence to choose from
    int64_t seenBlocks = 0;   // rows of blocks that a token sees
    int32_t blockWindow = 0;  // beside keys of this window
    int32_t streams = 0;      // of hyper-connections
    int64_t denseHidden = 0;
    int32_t experts = 0, expertsUsed = 0;  // of any layer
    // Layers with experts, in the order of ExpertFfnSpec::expertLayer: the layer's number in the model, its experts.
    std::vector<std::pair<int32_t, int32_t>> expertLayers;
    int32_t predictionExperts = 0;               // of expertLayers: those of prediction layers, the last ones
    int64_t expertHidden = 0, sharedHidden = 0;  // sharedHidden: of the expert for every token
    int64_t expertLatents = 0;                   // elements of the rows that experts read and give; 0: whole rows
    bool expertSlots = false;                    // experts are in Slots, perhaps with room for none
    int64_t gatedQueryWidth = 0;                 // queries and their gates; 0: no gates
    int64_t deltaChannels = 0, deltaWidth = 0;   // Gated DeltaNet: of q, k and v; of v
    int32_t deltaHeads = 0, deltaDim = 0, deltaConvWidth = 0;
    int64_t mambaChannels = 0, mambaWidth = 0;  // Mamba 2: of x, B and C; of x
    int32_t mambaHeads = 0, mambaGroups = 0, mambaStateDim = 0;
    bool fusedDeltaSteps = false;  // alphas and betas come from one product
    bool partOuts = false;         // some part is not added to x as it is: see RowBuffer::PartOut
    bool parallelParts = false;    // some layer has a dense part beside its experts
    int64_t layerInputs = 0;       // floats of a row's per-layer embeddings, of all layers
    bool drafts = false;           // there is a prediction layer
    bool floatWeights = false;     // some matrix is F32
    KvType kvType = KvType::BF16;
    PromptMode prompt = PromptMode::Fast;

    // Blocks of the tokens that a sequence has pages for.
    int64_t blocksOf(int32_t blockTokens) const {
        return (context + pageTokens - 1) / pageTokens * pageTokens / blockTokens;
    }
    // Those of them that a row chooses.
    int32_t mostChosen(const IndexerSpec& indexer) const {
        return static_cast<int32_t>(std::min<int64_t>(indexer.topK, blocksOf(indexer.compressor.blockTokens)));
    }
    int64_t expertWidth() const { return expertLatents ? expertLatents : embedding; }
    bool recurrent() const { return deltaHeads > 0 || mambaHeads > 0; }
    int32_t expertLayerCount() const { return static_cast<int32_t>(expertLayers.size()); }
};

StepLimits stepLimits(const ModelSpec& spec, const TensorTable& tensors, int64_t maxRows, int64_t context,
                      KvType kvType);

}  // namespace sharpi
