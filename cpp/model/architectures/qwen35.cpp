// Qwen 3.5 and 3.6, dense and mixture: every n-th layer has gated attention, the others Gated DeltaNet; a prediction
// layer may follow.
#include "model/architecture.h"

namespace sharpi {

namespace {

void readLayer(LayerReader& layer, const AttentionParts* attention, bool experts) {
    layer.mixerNorm("attn_norm");
    if (attention) layer.attention(*attention);
    else layer.gatedDelta();
    layer.ffnNorm("post_attention_norm");
    ExpertParts parts;
    parts.shared = true;
    if (experts) layer.experts(parts);
    else layer.dense();
}

void read(ModelReader& model) {
    const bool experts = model.hasExperts();
    AttentionParts attention;
    attention.rope = model.rope(RopeSpec::Pairing::Halves);
    attention.qkNorm = AttentionSpec::QkNorm::PerHead;
    attention.gated = true;
    const int64_t interval = model.metadata().integerOr(model.key("full_attention_interval"), 1, 4096, 4);
    model.countPredictions();
    for (int64_t i = 0; i < model.layers(); ++i) {
        LayerReader layer = model.layer();
        readLayer(layer, (i + 1) % interval == 0 ? &attention : nullptr, experts);
    }
    model.head();
    for (int64_t i = 0; i < model.predictions(); ++i)
        model.prediction([&](LayerReader& layer) { readLayer(layer, &attention, experts); });
}

void readMixture(ModelReader& model) {
    model.requireExperts();
    read(model);
}

}  // namespace

SHARPI_FAMILY(qwen35) { return {{"qwen35", read}, {"qwen35moe", readMixture}}; }

}  // namespace sharpi
