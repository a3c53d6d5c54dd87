// Llama 4 Scout and Maverick: three layers of four see only their chunk of the context; the fourth sees all and embeds
// no positions, but scales its queries by them. An expert's input has its weight.
#include "model/architecture.h"

namespace sharpi {

namespace {

// No metadata key gives these.
constexpr int32_t kChunk = 8192;
constexpr int64_t kPeriod = 4, kMaverickExperts = 128;
constexpr double kSlope = 0.1;

void read(ModelReader& model) {
    const Metadata& md = model.metadata();
    AttentionParts local, global;
    local.rope = model.rope(RopeSpec::Pairing::Adjacent);
    local.reach.chunk = kChunk;
    if (md.integer(model.key("expert_count"), 1, 65536) != kMaverickExperts) {
        local.qkNorm = AttentionSpec::QkNorm::PerHead;
        local.normWeights = false;
        local.normAfterRotation = true;
    }
    global.queryScale = model.queryScale({kSlope, kChunk, 1});
    ExpertParts experts;
    experts.gating = Gating::Sigmoid;
    experts.renormalized = false;
    experts.weightsInput = true;
    experts.shared = ExpertParts::Shared::Plain;
    const int64_t step = md.integerOr(model.key("interleave_moe_layer_step"), 1, 4096, 1);
    for (int64_t i = 0; i < model.layers(); ++i) {
        LayerReader layer = model.layer();
        layer.mixerNorm("attn_norm").attention((i + 1) % kPeriod ? local : global).ffnNorm("ffn_norm");
        if ((i + 1) % step) layer.dense();
        else layer.experts(experts);
    }
    model.head();
}

}  // namespace

SHARPI_FAMILY(llama4) { return {{"llama4", read, Experts::Always}}; }

}  // namespace sharpi
