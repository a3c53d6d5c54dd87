// See step_limits.h.
#include "operations/step_limits.h"

#include <algorithm>

#include "memory/kv_cache.h"

namespace sharpi {

namespace {

void addLatentLimits(StepLimits& limits, const AttentionSpec& a, const ModelSpec& spec) {
    const LatentSpec& latent = *a.latent;
    const int64_t heads = a.heads;
    if (latent.queryDown) {
        const int64_t rank = spec.weights[static_cast<size_t>(latent.queryDown.index)].slice().rows;
        limits.queryRank = std::max(limits.queryRank, rank);
    }
    limits.headQueryWidth = std::max(limits.headQueryWidth, heads * a.queryDim());
    limits.headValueWidth = std::max(limits.headValueWidth, heads * latent.valueDim);
    limits.latentHeads = std::max(limits.latentHeads, a.heads);
    limits.latentRank = std::max(limits.latentRank, latent.rank);
    limits.plainDim = std::max(limits.plainDim, latent.plainDim);
}

void addLimits(StepLimits& limits, const AttentionSpec& a) {
    const int64_t width = int64_t{a.heads} * a.headDim;
    limits.heads = std::max(limits.heads, a.heads);
    limits.kvHeads = std::max(limits.kvHeads, a.kvHeads);
    limits.headDim = std::max(limits.headDim, a.headDim);
    limits.queryWidth = std::max(limits.queryWidth, width);
    limits.kvWidth = std::max(limits.kvWidth, int64_t{a.kvHeads} * a.headDim);
    if (a.gated) limits.gatedQueryWidth = std::max(limits.gatedQueryWidth, 2 * width);
}

void addLimits(StepLimits& limits, const GatedDeltaSpec& d) {
    limits.deltaChannels = std::max(limits.deltaChannels, d.channels());
    limits.deltaWidth = std::max(limits.deltaWidth, d.valueWidth());
    limits.deltaHeads = std::max(limits.deltaHeads, d.valueHeads);
    limits.deltaDim = std::max(limits.deltaDim, d.headDim);
    limits.fusedDeltaSteps |= d.fusedSteps;
    limits.deltaConvWidth = std::max(limits.deltaConvWidth, d.convWidth);
}

void addLimits(StepLimits& limits, const MambaSpec& m) {
    limits.mambaChannels = std::max(limits.mambaChannels, m.channels());
    limits.mambaWidth = std::max(limits.mambaWidth, m.width());
    limits.mambaHeads = std::max(limits.mambaHeads, m.heads);
    limits.mambaStateDim = std::max(limits.mambaStateDim, m.stateDim);
}

void addLimits(StepLimits& limits, const ExpertFfnSpec& f, int32_t layer) {
    limits.expertLayers.emplace_back(layer, f.routing.count);
    limits.experts = std::max(limits.experts, f.routing.count);
    limits.expertsUsed = std::max(limits.expertsUsed, f.routing.used);
    limits.expertHidden = std::max(limits.expertHidden, f.hidden);
    if (f.shared) limits.sharedHidden = std::max(limits.sharedHidden, f.shared->hidden);
}

}  // namespace

StepLimits stepLimits(const ModelSpec& spec, const TensorTable& tensors, int64_t maxRows, int64_t context,
                      KvType kvType) {
    StepLimits limits;
    limits.maxRows = maxRows;
    limits.context = context;
    limits.embedding = spec.embedding;
    limits.vocab = spec.vocabSize;
    limits.pageTokens = KvCache::kPageTokens;
    limits.kvType = kvType;
    limits.drafts = !spec.predictions.empty();
    if (spec.layerInputs) {
        const int64_t width = spec.layerInputs->width;
        limits.layerInputs = width * static_cast<int64_t>(spec.layers.size());
        limits.denseHidden = width;  // each layer's gate has this width
        limits.partOuts = true;
    }
    int32_t number = 0;
    std::vector<AttentionReach> reaches;  // besides everything
    for (const LayerSpec* layer : spec.loadedLayers()) {
        if (layer->attention) {
            addLimits(limits, *layer->attention);
            if (layer->attention->latent) addLatentLimits(limits, *layer->attention, spec);
            const AttentionReach& reach = layer->attention->reach;
            if (reach.limited() && std::find(reaches.begin(), reaches.end(), reach) == reaches.end())
                reaches.push_back(reach);
        }
        if (layer->delta) addLimits(limits, *layer->delta);
        if (layer->mamba) addLimits(limits, *layer->mamba);
        if (layer->dense) limits.denseHidden = std::max(limits.denseHidden, layer->dense->hidden);
        if (layer->experts) addLimits(limits, *layer->experts, number);
        limits.partOuts |= spec.partsApart(*layer);
        limits.parallelParts |= layer->parallel.has_value();
        ++number;
    }
    limits.pageLists = 1 + static_cast<int32_t>(reaches.size());
    // A draft's input is two joined rows.
    limits.maxCols = std::max({(limits.drafts ? 2 : 1) * limits.embedding, limits.queryWidth, limits.queryRank,
                               limits.headValueWidth, limits.deltaWidth, limits.mambaWidth, limits.denseHidden,
                               limits.expertHidden, limits.sharedHidden});
    for (const TensorInfo& t : tensors.all()) limits.floatWeights |= t.type == DType::F32 && t.shape.size() > 1;
    return limits;
}

}  // namespace sharpi
