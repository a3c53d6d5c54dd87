// Llama 2 and 3, Mistral, SmolLM2 and others of their shape. Mixtral's models are mixtures under the same name. SmolLM3
// has the same layers, except that every fourth one embeds no positions; Arcee's AFM, with a feed-forward part that has
// no gate, and the square of ReLU; Mistral Small 3.1 and later, and Ministral 3, with queries that are scaled by their
// position if the file says so.
#include "model/architecture.h"

namespace sharpi {

namespace {

constexpr int64_t kSmolInterval = 4;  // no metadata key gives it

void read(ModelReader& model) {
    AttentionParts attention;
    attention.rope = model.rope(RopeSpec::Pairing::Adjacent);
    model.uniformLayers(attention, {});
}

void readSmol(ModelReader& model) {
    AttentionParts with, without;
    with.rope = model.rope(RopeSpec::Pairing::Adjacent);
    for (int64_t i = 0; i < model.layers(); ++i) {
        const AttentionParts& attention = (i + 1) % kSmolInterval == 0 ? without : with;
        model.layer().mixerNorm("attn_norm").attention(attention).ffnNorm("ffn_norm").dense();
    }
    model.head();
}

constexpr Activation kReluSquared{ActivationKind::ReluSquared, 0};

void readArcee(ModelReader& model) {
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

void readMistral3(ModelReader& model) {
    const Metadata& md = model.metadata();
    RopeParts rope;
    rope.pairing = RopeSpec::Pairing::Adjacent;
    rope.fileBetas = true;
    AttentionParts attention;
    attention.rope = model.rope(rope);
    const double slope = md.numberOr(model.key("attention.temperature_scale"), 0.0);
    if (slope != 0) {
        const int64_t original = md.integer(model.key("rope.scaling.original_context_length"), 1, INT32_MAX);
        attention.queryScale = model.queryScale({slope, original, 0});
    }
    model.uniformLayers(attention, {});
}

}  // namespace

SHARPI_FAMILY(llama) {
    return {{"arcee", readArcee}, {"llama", read}, {"mistral3", readMistral3}, {"smollm3", readSmol}};
}

}  // namespace sharpi
