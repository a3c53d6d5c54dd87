// Granite 3 and 4 without Mamba layers: Llama's layers with scales on embeddings, attention, what each part adds, and
// logits.
#include "model/architecture.h"

namespace sharpi {

namespace {

void read(ModelReader& model) {
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
    model.uniformLayers(attention, experts);
}

}  // namespace

SHARPI_FAMILY(granite) { return {{"granite", read}, {"granitemoe", read, Experts::Always}}; }

}  // namespace sharpi
