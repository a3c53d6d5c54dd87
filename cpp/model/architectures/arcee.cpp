// Arcee's AFM: Llama's layers with a feed-forward part that has no gate, and the square of ReLU.
#include "model/architecture.h"

namespace sharpi {

namespace {

constexpr Activation kReluSquared{ActivationKind::ReluSquared, 0};

void read(ModelReader& model) {
    AttentionParts attention;
    attention.rope = model.rope(RopeSpec::Pairing::Adjacent);
    DenseParts dense;
    dense.activation = kReluSquared;
    dense.gated = false;
    ExpertParts experts;
    experts.activation = kReluSquared;
    experts.gated = false;
    model.uniformLayers(attention, experts, dense);
}

}  // namespace

SHARPI_FAMILY(arcee) { return {{"arcee", read}}; }

}  // namespace sharpi
