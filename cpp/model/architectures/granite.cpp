// Granite 3 and 4: Llama's layers with scales on embeddings, attention, what each part adds, and logits. In hybrids,
// most layers have Mamba 2 for attention.
#include "model/architecture.h"

namespace sharpi {

namespace {

void readModel(ModelReader& model, bool hybrid) {
    const Metadata& md = model.metadata();
    model.scales(ModelReader::LogitScale::Divides);
    AttentionParts attention;
    // Files say with this key whether positions are embedded at all.
    if (md.flagOr(model.key("rope.scaling.finetuned"), true)) attention.rope = model.rope(RopeSpec::Pairing::Adjacent);
    const double scale = md.numberOr(model.key("attention.scale"), 0.0);
    if (scale != 0) attention.scale = scale;
    ExpertParts experts;
    if (md.integerOr(model.key("expert_shared_feed_forward_length"), 0, INT32_MAX, 0) > 0)
        experts.shared = ExpertParts::Shared::Plain;
    if (!hybrid) return model.uniformLayers(attention, experts);
    for (int64_t i = 0; i < model.layers(); ++i) {
        LayerReader layer = model.layer();
        layer.mixerNorm("attn_norm");
        if (hasKvHeads(model, i)) layer.attention(attention);
        else layer.mamba();
        layer.ffnNorm("ffn_norm");
        if (model.hasExperts()) layer.experts(experts);
        else layer.dense();
    }
    model.head();
}

void read(ModelReader& model) { readModel(model, false); }

void readHybrid(ModelReader& model) { readModel(model, true); }

}  // namespace

SHARPI_FAMILY(granite) {
    return {{"granite", read}, {"granitemoe", read, Experts::Always}, {"granitehybrid", readHybrid}};
}

}  // namespace sharpi
