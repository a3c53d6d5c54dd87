// gpt-oss: attention sinks, a window on every other layer, and experts with biases and a clamped activation.
#include "model/architecture.h"

namespace sharpi {

namespace {

constexpr float kLimit = 7.0f;  // no metadata key gives it

void read(ModelReader& model) {
    AttentionParts all;
    all.rope = model.rope(RopeSpec::Pairing::Halves);
    all.sinks = true;
    AttentionParts windowed = all;
    const std::string window = model.key("attention.sliding_window");
    windowed.reach.window = static_cast<int32_t>(model.metadata().integer(window, 1, INT32_MAX));
    ExpertParts experts;
    experts.gating = Gating::SoftmaxOfChosen;
    experts.renormalized = false;
    experts.activation = {ActivationKind::ClampedSwiglu, kLimit};
    for (int64_t i = 0; i < model.layers(); ++i) {
        LayerReader layer = model.layer();
        layer.mixerNorm("attn_norm").attention(i % 2 == 0 ? windowed : all);
        layer.ffnNorm("post_attention_norm").experts(experts);
    }
    model.head();
}

}  // namespace

SHARPI_FAMILY(gptoss) { return {{"gpt-oss", read, Experts::Always}}; }

}  // namespace sharpi
