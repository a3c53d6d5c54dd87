// Gemma 2 and 3: norms after each part as well, GELU, and layers that see a window. Gemma 2 caps scores and logits.
#include <cmath>

#include "model/architecture.h"

namespace sharpi {

namespace {

// The largest size of each divides scores by the square root of E / H, where the others use the head's size. No key
// tells: its number of layers does.
std::optional<double> scaleOf(const ModelReader& model, int64_t largest) {
    if (model.layers() != largest) return std::nullopt;
    const auto heads = static_cast<double>(model.metadata().integer(model.key("attention.head_count"), 1, 65536));
    return std::sqrt(heads / static_cast<double>(model.spec().embedding));
}

void readLayer(LayerReader layer, const AttentionParts& attention) {
    DenseParts dense;
    dense.activation.kind = ActivationKind::Gelu;
    layer.mixerNorm("attn_norm").attention(attention).mixerPostNorm("post_attention_norm");
    layer.ffnNorm("ffn_norm").dense(dense).ffnPostNorm("post_ffw_norm");
}

int32_t window(const ModelReader& model, int64_t usual) {
    const std::string key = model.key("attention.sliding_window");
    return static_cast<int32_t>(model.metadata().integerOr(key, 1, INT32_MAX, usual));
}

void readGemma2(ModelReader& model) {
    model.scaleEnds();
    AttentionParts all;
    all.rope = model.rope(RopeSpec::Pairing::Halves);
    all.scale = scaleOf(model, 46);
    all.softcap = static_cast<float>(model.metadata().numberOr(model.key("attn_logit_softcapping"), 0.0));
    AttentionParts windowed = all;
    windowed.reach.window = window(model, 4096);
    for (int64_t i = 0; i < model.layers(); ++i) readLayer(model.layer(), i % 2 == 0 ? windowed : all);
    model.head();
}

void readGemma3(ModelReader& model) {
    constexpr int64_t kPeriod = 6;  // five layers with a window, then one that sees all
    model.scaleEnds();
    AttentionParts all;
    all.rope = model.rope(RopeSpec::Pairing::Halves);
    all.scale = scaleOf(model, 62);
    all.qkNorm = AttentionSpec::QkNorm::PerHead;
    AttentionParts windowed = all;
    RopeParts local;
    local.windowed = true;
    local.scaled = false;
    local.windowedBase = 10000.0;
    windowed.rope = model.rope(local);
    windowed.reach.window = window(model, 1024);
    for (int64_t i = 0; i < model.layers(); ++i) readLayer(model.layer(), (i + 1) % kPeriod ? windowed : all);
    model.head();
}

}  // namespace

SHARPI_FAMILY(gemma) { return {{"gemma2", readGemma2}, {"gemma3", readGemma3}}; }

}  // namespace sharpi
