// Qwen 3 and Qwen 3 VL, dense and mixture: queries and keys are normalized head by head. Of Qwen 3 VL this is the text
// part: a text token has the same position in all sections of its rotary embedding, so the sections change nothing, and
// the weights that read pictures are in a separate file.
#include "model/architecture.h"

namespace sharpi {

namespace {

void read(ModelReader& model) {
    AttentionParts attention;
    attention.rope = model.rope(RopeSpec::Pairing::Halves);
    attention.qkNorm = AttentionSpec::QkNorm::PerHead;
    model.uniformLayers(attention, {});
}

}  // namespace

SHARPI_FAMILY(qwen3) {
    return {
        {"qwen3", read}, {"qwen3moe", read, Experts::Always}, {"qwen3vl", read}, {"qwen3vlmoe", read, Experts::Always}};
}

}  // namespace sharpi
