// Latent attention: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash (deepseek2) and Mistral Small 4 (mistral4). Dense layers
// first, then experts beside one that every token takes; a prediction layer may follow.
#include <cmath>

#include "model/architecture.h"

namespace sharpi {

namespace {

// The usual scale, which YaRN multiplies by the square of its attention factor. The key yarn_log_multiplier is a tenth
// of the factor's weight; without it, the weight is 1, and rotated elements have the factor too.
double scoreScale(const ModelReader& model) {
    const Metadata& md = model.metadata();
    const std::string scaling = model.key("rope.scaling."), length = model.key("attention.key_length");
    const bool later = md.has(length + "_mla");  // than mid-2025
    const double plain = 1.0 / std::sqrt(static_cast<double>(md.integer(later ? length + "_mla" : length, 1, 4096)));
    if (md.textOr(scaling + "type", "none") != "yarn") return plain;
    const double weight = md.numberOr(scaling + "yarn_log_multiplier", 0.1) / 0.1;
    const double stretch = 1.0 + 0.1 * weight * std::log(md.numberOr(scaling + "factor", 1.0));
    return plain * stretch * stretch;
}

// Files of GLM-4.7-Flash of its first days do not say how experts are chosen; DeepSeek V2's never do. Only their sizes
// tell them apart.
Gating usualGating(const ModelReader& model) {
    constexpr int64_t kFlashVocabulary = 154880;
    const int64_t blocks = model.layers() + model.predictions();
    const bool flash = (blocks == 47 || blocks == 48) && model.spec().vocabSize == kFlashVocabulary;
    return flash ? Gating::Sigmoid : Gating::Softmax;
}

void read(ModelReader& model) {
    model.countPredictions();
    const Metadata& md = model.metadata();
    AttentionParts attention;
    attention.rope = model.rope(RopeSpec::Pairing::Adjacent);
    attention.scale = scoreScale(model);
    const double slope = md.numberOr(model.key("attention.temperature_scale"), 0.0);
    if (slope != 0) {
        const int64_t length = md.integer(model.key("attention.temperature_length"), 1, INT32_MAX);
        attention.queryScale = model.queryScale({slope, length, 0});
    }
    ExpertParts experts;
    experts.gating = usualGating(model);
    experts.renormalized = false;
    experts.shared = ExpertParts::Shared::Plain;
    const auto readLayer = [&](LayerReader& layer, bool dense) {
        layer.mixerNorm("attn_norm").latentAttention(attention).ffnNorm("ffn_norm");
        if (dense) layer.dense();
        else layer.experts(experts);
    };
    const int64_t dense = md.integerOr(model.key("leading_dense_block_count"), 0, model.layers(), 0);
    for (int64_t i = 0; i < model.layers(); ++i) {
        LayerReader layer = model.layer();
        readLayer(layer, i < dense);
    }
    model.head();
    // Checkpoints of GLM-4.7-Flash and DeepSeek V3 repeat the model's head in the layer.
    for (int64_t i = 0; i < model.predictions(); ++i)
        model.prediction(ModelReader::DraftHead::Copy, [&](LayerReader& layer) { readLayer(layer, false); });
}

}  // namespace

SHARPI_FAMILY(deepseek2) { return {{"deepseek2", read, Experts::Always}, {"mistral4", read, Experts::Always}}; }

}  // namespace sharpi
