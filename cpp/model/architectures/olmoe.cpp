// OLMoE: a mixture whose experts' weights are not renormalized. Whole rows of queries and keys are normalized.
#include "model/architecture.h"

namespace sharpi {

namespace {

void read(ModelReader& model) {
    AttentionParts attention;
    attention.rope = model.rope(RopeSpec::Pairing::Halves);
    attention.qkNorm = AttentionSpec::QkNorm::FullRow;
    ExpertParts experts;
    experts.renormalized = false;
    model.uniformLayers(attention, experts);
}

}  // namespace

SHARPI_FAMILY(olmoe) { return {{"olmoe", read, Experts::Always}}; }

}  // namespace sharpi
