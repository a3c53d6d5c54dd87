// Falcon-H1: attention and Mamba 2 side by side in every layer, then a dense part. What its configurations multiply
// with constants, files have in their weights.
#include "model/architecture.h"

namespace sharpi {

namespace {

void read(ModelReader& model) {
    AttentionParts attention;
    attention.rope = model.rope(RopeSpec::Pairing::Halves);
    MambaParts mamba;
    mamba.normOptional = true;
    for (int64_t i = 0; i < model.layers(); ++i) {
        // llama.cpp's converter leaves out the ending of this one name.
        model.layer().mixerNorm("attn_norm").attention(attention).mamba(mamba).ffnNorm("ffn_norm", "").dense();
    }
    model.head();
}

}  // namespace

SHARPI_FAMILY(falcon_h1) { return {{"falcon-h1", read}}; }

}  // namespace sharpi
