// Qwen 3, dense and mixture: queries and keys are normalized head by head.
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

SHARPI_FAMILY(qwen3) { return {{"qwen3", read}, {"qwen3moe", readMixture}}; }

}  // namespace sharpi
