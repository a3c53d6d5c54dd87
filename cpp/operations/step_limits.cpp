// See step_limits.h.
#include "operations/step_limits.h"

#include <algorithm>

#include "memory/kv_cache.h"

namespace sharpi {

namespace {

void addLatentLimits(StepLimits& limits, const AttentionSpec& a) {
    const LatentSpec& latent = *a.latent;
    const int64_t heads = a.heads;
    limits.headQueryWidth = std::max(limits.headQueryWidth, heads * a.queryDim());
    limits.headValueWidth = std::max(limits.headValueWidth, heads * latent.valueDim);
    limits.latentHeads = std::max(limits.latentHeads, a.heads);
    limits.latentRank = std::max(limits.latentRank, latent.rank);
    limits.plainDim = std::max(limits.plainDim, latent.plainDim);
}

// Rows of a matrix.
int64_t rowsOf(const ModelSpec& spec, MatrixId matrix) {
    return spec.weights[static_cast<size_t>(matrix.index)].slice().rows;
}

void addLimits(StepLimits& limits, const CompressorSpec& c, std::vector<AttentionReach>& reaches) {
    limits.compressorWidth = std::max<int64_t>(limits.compressorWidth, c.width());
    limits.compressorDim = std::max(limits.compressorDim, c.headDim);
    reaches.push_back({c.span(), 0});
}

// What the layers of some families have besides.
void addFurtherLimits(StepLimits& limits, const AttentionSpec& a, const ModelSpec& spec,
                      std::vector<AttentionReach>& reaches) {
    if (a.latent) addLatentLimits(limits, a);
    if (a.queryDown) limits.queryRank = std::max(limits.queryRank, rowsOf(spec, a.queryDown));
    if (a.outputDown) {
        limits.outputGroups = std::max(limits.outputGroups, a.outputGroups);
        limits.groupWidth = std::max(limits.groupWidth, int64_t{a.heads} * a.headDim / a.outputGroups);
        limits.headValueWidth = std::max(limits.headValueWidth, rowsOf(spec, a.outputDown));
    }
    if (a.outputDown) limits.blockWindow = std::max(limits.blockWindow, a.reach.window);
    if (a.compressor) {
        addLimits(limits, *a.compressor, reaches);
        const int64_t all = limits.blocksOf(a.compressor->blockTokens), topK = a.indexer ? a.indexer->topK : all;
        limits.seenBlocks = std::max(limits.seenBlocks, std::min(all, topK));
    }
    if (!a.indexer) return;
    const IndexerSpec& indexer = *a.indexer;
    addLimits(limits, indexer.compressor, reaches);
    limits.indexHeads = std::max(limits.indexHeads, indexer.heads);
    limits.indexWidth = std::max(limits.indexWidth, int64_t{indexer.heads} * indexer.compressor.headDim);
    limits.topK = std::max(limits.topK, limits.mostChosen(indexer));
    limits.blocks = std::max(limits.blocks, limits.blocksOf(indexer.compressor.blockTokens));
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
    limits.mambaGroups = std::max(limits.mambaGroups, m.groups);
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
    if (spec.streams) limits.streams = spec.streams->count;
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
            addFurtherLimits(limits, *layer->attention, spec, reaches);
            if (layer->attention->reach.limited()) reaches.push_back(layer->attention->reach);
        }
        if (layer->delta) addLimits(limits, *layer->delta);
        if (layer->mamba) addLimits(limits, *layer->mamba);
        if (layer->dense) limits.denseHidden = std::max(limits.denseHidden, layer->dense->hidden);
        if (layer->experts) {
            addLimits(limits, *layer->experts, number);
            limits.predictionExperts += number >= static_cast<int32_t>(spec.layers.size());
            if (layer->experts->latentDown) limits.expertLatents = rowsOf(spec, layer->experts->latentDown);
        }
        limits.partOuts |= spec.partsApart(*layer);
        limits.parallelParts |= layer->parallel.has_value();
        ++number;
    }
    limits.pageLists = 1;
    for (auto reach = reaches.begin(); reach != reaches.end(); ++reach)
        limits.pageLists += std::find(reaches.begin(), reach, *reach) == reach;
    // A draft's input is two joined rows.
    limits.maxCols = std::max({(limits.drafts ? 2 : 1) * limits.embedding, limits.queryWidth, limits.queryRank,
                               limits.headValueWidth, limits.deltaWidth, limits.mambaWidth, limits.denseHidden,
                               limits.expertHidden, limits.sharedHidden, limits.streams * limits.embedding});
    for (const TensorInfo& t : tensors.all()) limits.floatWeights |= t.type == DType::F32 && t.shape.size() > 1;
    return limits;
}

}  // namespace sharpi
