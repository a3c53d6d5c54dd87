// Nemotron-H and Nemotron 3: a layer is Mamba 2, attention without positions, or a feed-forward part. The latter has no
// gate, and squared ReLU; in mixtures it has experts, and one that every token takes. Those of Nemotron 3 Super read
// latents.
#include "model/architecture.h"

namespace sharpi {

namespace {

constexpr Activation kReluSquared{ActivationKind::ReluSquared, 0};

void read(ModelReader& model) {
    DenseParts dense;
    dense.activation = kReluSquared;
    dense.gated = false;
    ExpertParts experts;
    experts.activation = kReluSquared;
    experts.gated = false;
    experts.gating = Gating::Sigmoid;
    experts.shared = ExpertParts::Shared::Plain;
    experts.latents = model.metadata().integerOr(model.key("moe_latent_size"), 0, model.spec().embedding, 0);
    const std::string hidden = model.key("feed_forward_length");
    for (int64_t i = 0; i < model.layers(); ++i) {
        LayerReader layer = model.layer();
        const bool feeds = model.metadata().integerAt(hidden, static_cast<size_t>(i), 0, INT32_MAX) > 0;
        if (hasKvHeads(model, i)) layer.mixerNorm("attn_norm").attention({});
        else if (!feeds) layer.mixerNorm("attn_norm").mamba();
        else if (model.hasExperts()) layer.ffnNorm("attn_norm").experts(experts);
        else layer.ffnNorm("attn_norm").dense(dense);
    }
    model.head();
}

}  // namespace

SHARPI_FAMILY(nemotron_h) { return {{"nemotron_h", read}, {"nemotron_h_moe", read, Experts::Always}}; }

}  // namespace sharpi
