// DeepSeek V4: hyper-connections; attention over a window and over rows of blocks of tokens; experts of the first
// layers chosen by the token itself.
#include <string>

#include "core/error.h"
#include "model/architecture.h"
#include "model/readers/grouped_reader.h"

namespace sharpi {

namespace {

// Blocks of so many tokens overlap, and an indexer chooses among them.
constexpr int32_t kIndexedBlock = 4;

int32_t rope(ModelReader& model, bool compressed) {
    RopeParts parts;
    parts.pairing = RopeSpec::Pairing::Adjacent;
    parts.last = true;
    parts.scaled = compressed;
    parts.factors = false;
    if (compressed) {
        parts.baseKey = "attention.compress_rope_freq_base";
        parts.magnitude = 1.0;
    }
    return model.rope(parts);
}

Activation clamped(const ModelReader& model, const std::string& key, const std::string& fallback, size_t layer) {
    const Metadata& md = model.metadata();
    const std::string name = model.key(md.has(model.key(key)) ? key : fallback);
    const double limit = md.numberAt(name, layer);
    if (!(limit >= 0)) throw Error(ErrorKind::BadModel, "metadata key '" + name + "' must not be negative");
    if (limit == 0) return {};  // no clamp
    return {ActivationKind::ClampedSilu, static_cast<float>(limit)};
}

void read(ModelReader& model) {
    const Metadata& md = model.metadata();
    const int32_t plain = rope(model, false), compressed = rope(model, true);
    AttentionParts attention;
    attention.qkNorm = AttentionSpec::QkNorm::PerHead;
    attention.reach.window = static_cast<int32_t>(md.integer(model.key("attention.sliding_window"), 1, INT32_MAX));
    ExpertParts experts;
    experts.gating = Gating::RootSoftplus;
    experts.shared = ExpertParts::Shared::Plain;
    const int64_t hashed = md.integerOr(model.key("hash_layer_count"), 0, model.layers(), 0);
    GroupedReader::beginStreams(model);
    for (int64_t i = 0; i < model.layers(); ++i) {
        const auto index = static_cast<size_t>(i);
        const auto block = static_cast<int32_t>(md.integerAt(model.key("attention.compress_ratios"), index, 0, 65536));
        LayerReader layer = model.layer();
        GroupedReader grouped(model, layer);
        attention.rope = block ? compressed : plain;
        experts.activation = clamped(model, "swiglu_clamp_exp", "swiglu_clamp_exp", index);
        experts.sharedActivation = clamped(model, "swiglu_clamp_shexp", "swiglu_clamp_exp", index);
        experts.choicesByToken = i < hashed;
        grouped.mixerStreams();
        layer.mixerNorm("attn_norm");
        grouped.attention(attention, block, block == kIndexedBlock);
        grouped.ffnStreams();
        layer.ffnNorm("ffn_norm").experts(experts).unused("exp_probs_b_vl.bias");  // of pictures
    }
    GroupedReader::endStreams(model);
    model.head();
}

}  // namespace

SHARPI_FAMILY(deepseek4) { return {{"deepseek4", read, Experts::Always}}; }

}  // namespace sharpi
