// Qwen 3 VL, dense and mixture, for text: Qwen 3's layers. The file's sections of the rotary embedding change nothing
// here, since a text token has the same position in all of them. The weights that read pictures are in a separate file.
#include "model/architecture.h"

namespace sharpi {

namespace {

void read(ModelReader& model) {
    AttentionParts attention;
    attention.rope = model.rope(RopeSpec::Pairing::Halves);
    attention.qkNorm = AttentionSpec::QkNorm::PerHead;
    model.uniformLayers(attention, {});
}

void readMixture(ModelReader& model) {
    model.requireExperts();
    read(model);
}

}  // namespace

SHARPI_FAMILY(qwen3vl) { return {{"qwen3vl", read}, {"qwen3vlmoe", readMixture}}; }

}  // namespace sharpi
