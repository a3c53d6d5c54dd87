// Qwen 2 and 2.5: queries, keys and values have biases.
#include "model/architecture.h"

namespace sharpi {

namespace {

void read(ModelReader& model) {
    AttentionParts attention;
    attention.rope = model.rope(RopeSpec::Pairing::Halves);
    model.uniformLayers(attention, {});
}

}  // namespace

SHARPI_FAMILY(qwen2) { return {{"qwen2", read}}; }

}  // namespace sharpi
