// GLM-4.5, 4.6, 4.7 and Air: dense layers first, then experts that are chosen by sigmoids with a bias; a prediction
// layer may follow.
#include "model/architecture.h"

namespace sharpi {

namespace {

void read(ModelReader& model) {
    AttentionParts attention;
    attention.rope = model.rope(RopeSpec::Pairing::Halves);
    attention.qkNorm = AttentionSpec::QkNorm::PerHead;
    attention.normsOptional = true;
    ExpertParts experts;
    experts.gating = Gating::Sigmoid;
    experts.shared = ExpertParts::Shared::Plain;
    const auto readLayer = [&](LayerReader& layer, bool dense) {
        layer.mixerNorm("attn_norm").attention(attention).ffnNorm("post_attention_norm");
        if (dense) layer.dense();
        else layer.experts(experts);
    };
    model.countPredictions();
    const int64_t dense = model.metadata().integerOr(model.key("leading_dense_block_count"), 0, model.layers(), 0);
    for (int64_t i = 0; i < model.layers(); ++i) {
        LayerReader layer = model.layer();
        readLayer(layer, i < dense);
    }
    model.head();
    // Checkpoints of GLM 4.5 repeat the model's head in the layer, those of GLM 4.6 do not.
    for (int64_t i = 0; i < model.predictions(); ++i)
        model.prediction(ModelReader::DraftHead::Copy, [&](LayerReader& layer) { readLayer(layer, false); });
}

}  // namespace

SHARPI_FAMILY(glm4moe) { return {{"glm4moe", read, Experts::Always}}; }

}  // namespace sharpi
