// Phi 3.5, Phi 4 and Phi 4 mini: gate and up in one matrix, and rotary factors for short and for long contexts.
#include "model/architecture.h"

namespace sharpi {

namespace {

void read(ModelReader& model) {
    AttentionParts attention;
    attention.rope = model.rope(RopeSpec::Pairing::Halves);
    DenseParts dense;
    dense.fused = true;
    for (int64_t i = 0; i < model.layers(); ++i)
        model.layer().mixerNorm("attn_norm").attention(attention).ffnNorm("ffn_norm").dense(dense);
    model.head();
}

}  // namespace

SHARPI_FAMILY(phi3) { return {{"phi3", read}}; }

}  // namespace sharpi
