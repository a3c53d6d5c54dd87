// Llama 2 and 3, Mistral, SmolLM2 and others of their shape. Mixtral's models are mixtures under the same name.
#include "model/architecture.h"

namespace sharpi {

namespace {

void read(ModelReader& model) {
    AttentionParts attention;
    attention.rope = model.rope(RopeSpec::Pairing::Adjacent);
    model.uniformLayers(attention, {});
}

}  // namespace

SHARPI_FAMILY(llama) { return {{"llama", read}}; }

}  // namespace sharpi
