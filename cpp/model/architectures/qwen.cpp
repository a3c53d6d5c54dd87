// Qwen 2 and 2.5, whose queries, keys and values have biases; Qwen 3 and Qwen 3 VL, dense and mixture, whose queries
// and keys are normalized head by head. Of Qwen 3 VL this is the text part: a text token has the same position in all
// sections of its rotary embedding, so the sections change nothing, and the weights that read pictures are in a
// separate file.
#include "model/architecture.h"

namespace sharpi {

namespace {

void readLayers(ModelReader& model, AttentionSpec::QkNorm norm) {
    AttentionParts attention;
    attention.rope = model.rope(RopeSpec::Pairing::Halves);
    attention.qkNorm = norm;
    model.uniformLayers(attention, {});
}

void read2(ModelReader& model) { readLayers(model, AttentionSpec::QkNorm::None); }

void read3(ModelReader& model) { readLayers(model, AttentionSpec::QkNorm::PerHead); }

}  // namespace

SHARPI_FAMILY(qwen) {
    return {{"qwen2", read2},
            {"qwen3", read3},
            {"qwen3moe", read3, Experts::Always},
            {"qwen3vl", read3},
            {"qwen3vlmoe", read3, Experts::Always}};
}

}  // namespace sharpi
