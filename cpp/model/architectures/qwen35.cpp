// Qwen 3.5 and 3.6, dense and mixture, and Qwen 3 Next: every n-th layer has gated attention, the others Gated
// DeltaNet; a prediction layer may follow. Qwen 3 Next groups the heads otherwise.
#include "model/architecture.h"

namespace sharpi {

namespace {

void readLayer(LayerReader& layer, const AttentionParts* attention, bool experts, bool fusedSteps) {
    layer.mixerNorm("attn_norm");
    if (attention) layer.attention(*attention);
    else layer.gatedDelta(fusedSteps);
    layer.ffnNorm("post_attention_norm");
    ExpertParts parts;
    parts.shared = ExpertParts::Shared::Scaled;
    if (experts) layer.experts(parts);
    else layer.dense();
}

void readModel(ModelReader& model, bool fusedSteps) {
    const bool experts = model.hasExperts();
    AttentionParts attention;
    attention.rope = model.rope(RopeSpec::Pairing::Halves);
    attention.qkNorm = AttentionSpec::QkNorm::PerHead;
    attention.gated = true;
    const Metadata& md = model.metadata();
    const std::string recurrent = model.key("attention.recurrent_layers");
    const int64_t interval = md.integerOr(model.key("full_attention_interval"), 1, 4096, 4);
    const auto attends = [&](int64_t i) {
        return md.has(recurrent) ? !md.flagAt(recurrent, static_cast<size_t>(i)) : (i + 1) % interval == 0;
    };
    model.countPredictions();
    for (int64_t i = 0; i < model.layers(); ++i) {
        LayerReader layer = model.layer();
        readLayer(layer, attends(i) ? &attention : nullptr, experts, fusedSteps);
    }
    model.head();
    for (int64_t i = 0; i < model.predictions(); ++i) {
        model.prediction(ModelReader::DraftHead::Own,
                         [&](LayerReader& layer) { readLayer(layer, &attention, experts, fusedSteps); });
    }
}

void read(ModelReader& model) { readModel(model, false); }

void readNext(ModelReader& model) { readModel(model, true); }

}  // namespace

SHARPI_FAMILY(qwen35) {
    return {{"qwen35", read}, {"qwen35moe", read, Experts::Always}, {"qwen3next", readNext, Experts::Always}};
}

}  // namespace sharpi
