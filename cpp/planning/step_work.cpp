// See step_work.h.
#include "planning/step_work.h"

#include <algorithm>

namespace sharpi {

namespace {

// Beside a dense part: the norm that the router reads, and the one that the experts read.
constexpr int64_t kOfParallelParts = 2;
// The gate's rows, their product, the activation and the projection.
constexpr int64_t kOfLayerInput = 4;
// The rows of the table, those to be projected, their product, and both joined.
constexpr int64_t kOfLayerInputs = 4;
// Of Mamba 2 beside attention: its first products, its step, the rows of the last product, and that.
constexpr int64_t kOfSecondMixer = 4;
// Of experts that read latents: the rows of these, twice, and the last product.
constexpr int64_t kOfLatentExperts = 3;

// Of streams, around each of a layer's two parts: their norm, its product, the part's input, and what they become.
constexpr int64_t kOfStreams = 8;
// Of grouped outputs: the norm of queries of low rank and their product, joined segments, groups of heads, the product
// by group, and its rows for the last one.
constexpr int64_t kOfGroups = 6;
// Of latents: queries' norm and product, the products of each head before and after, and the rotated latents; most of
// them, and attention over latents, take longer than a plain kernel. Fitted to GLM-4.7-Flash and DeepSeek V2 Lite.
constexpr int64_t kOfLatents = 9;
// Mamba 2 as the only mixer, beyond attention: its step takes as much longer.
constexpr int64_t kOfMamba = 2;
// What a layer of one part lacks: the mixer, or the dense part.
constexpr int64_t kOfMixer = 6, kOfDense = 4;
// Of a compressor, and of the choice: each with its products.
constexpr int64_t kOfCompressor = 2, kOfIndexer = 4;

int64_t kernelsOf(const AttentionSpec& a) {
    return (a.latent ? kOfLatents : 0) + (a.outputDown ? kOfGroups : 0) + (a.compressor ? kOfCompressor : 0) +
           (a.indexer ? kOfCompressor + kOfIndexer : 0);
}

}  // namespace

int64_t attentionProducts(const ModelSpec& spec, int64_t tokens) {
    int64_t count = 0;
    for (const LayerSpec& layer : spec.layers) {
        if (!layer.attention) continue;
        const AttentionSpec& a = *layer.attention;
        int64_t seen = tokens - a.reach.first(static_cast<int32_t>(std::max<int64_t>(tokens - 1, 0)));
        if (a.compressor) {
            const int64_t blocks = tokens / a.compressor->blockTokens;
            seen += a.indexer ? std::min<int64_t>(blocks, a.indexer->topK) : blocks;
            if (a.indexer) count += blocks * a.indexer->heads * a.indexer->compressor.headDim;
        }
        count += seen * a.heads * a.headDim;
    }
    return count;
}

bool hasLongAttention(const ModelSpec& spec) {
    return std::all_of(spec.layers.begin(), spec.layers.end(), [](const LayerSpec& layer) {
        if (!layer.attention) return true;
        const AttentionSpec& a = *layer.attention;
        return !a.latent && !a.compressor && (a.headDim == 64 || a.headDim == 128 || a.headDim == 256);
    });
}

int64_t sharedExperts(const ModelSpec& spec) {
    return std::count_if(spec.layers.begin(), spec.layers.end(),
                         [](const LayerSpec& l) { return l.experts && (l.experts->shared || l.parallel); });
}

int64_t rowKernels(const ModelSpec& spec) {
    int64_t count = (spec.embeddingScale != 1.0f) + (spec.logitSoftcap != 0) + (spec.layerInputs ? kOfLayerInputs : 0);
    for (const LayerSpec& layer : spec.layers) {
        count += (layer.parallel ? kOfParallelParts : 0) + (layer.layerInput ? kOfLayerInput : 0) +
                 (spec.streams ? kOfStreams : 0) + (layer.attention ? kernelsOf(*layer.attention) : 0) +
                 (layer.mamba ? (layer.attention ? kOfSecondMixer : kOfMamba) : 0) +
                 (layer.experts && layer.experts->latentDown ? kOfLatentExperts : 0);
        const bool hasMixer = layer.attention || layer.delta || layer.mamba, hasFfn = layer.dense || layer.experts;
        count -= (hasMixer ? 0 : kOfMixer) + (hasFfn ? 0 : kOfDense);
    }
    return count;
}

}  // namespace sharpi
