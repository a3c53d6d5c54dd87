// SmolLM3: Llama's layers, except that every fourth one embeds no positions.
#include "model/architecture.h"

namespace sharpi {

namespace {

constexpr int64_t kInterval = 4;  // no metadata key gives it

void read(ModelReader& model) {
    AttentionParts with, without;
    with.rope = model.rope(RopeSpec::Pairing::Adjacent);
    for (int64_t i = 0; i < model.layers(); ++i) {
        const AttentionParts& attention = (i + 1) % kInterval == 0 ? without : with;
        model.layer().mixerNorm("attn_norm").attention(attention).ffnNorm("ffn_norm").dense();
    }
    model.head();
}

}  // namespace

SHARPI_FAMILY(smollm3) { return {{"smollm3", read}}; }

}  // namespace sharpi
