// Gemma 4: dense, with experts beside the dense part, and with embeddings for each layer (E2B, E4B). Layers with a
// window have another head size than the ones that see all. The last layers may have no keys and values of their own.
#include "core/error.h"
#include "model/architecture.h"

namespace sharpi {

namespace {

constexpr Activation kGelu{ActivationKind::Gelu, 0};

AttentionParts attentionOf(ModelReader& model, bool windowed) {
    RopeParts rope;
    rope.windowed = windowed;
    rope.factors = !windowed;
    AttentionParts attention;
    attention.windowed = windowed;
    attention.rope = model.rope(rope);
    attention.qkNorm = AttentionSpec::QkNorm::PerHead;
    attention.valueNorm = true;
    attention.keysAreValues = !windowed;
    attention.scale = 1.0;
    if (windowed) {
        const std::string key = model.key("attention.sliding_window");
        attention.reach.window = static_cast<int32_t>(model.metadata().integer(key, 1, INT32_MAX));
    }
    return attention;
}

void readFeed(LayerReader& layer, bool mixture) {
    DenseParts dense;
    dense.activation = kGelu;
    layer.ffnNorm("ffn_norm").dense(dense);
    if (mixture) {
        ExpertParts experts;
        experts.activation = kGelu;
        layer.parallelNorms("post_ffw_norm_1", "ffn_gate_inp.scale", "pre_ffw_norm_2", "post_ffw_norm_2");
        layer.experts(experts);
    }
    layer.ffnPostNorm("post_ffw_norm").layerInput().outputScale("layer_output_scale");
}

void read(ModelReader& model) {
    const Metadata& md = model.metadata();
    model.scaleEnds();
    model.layerInputs();
    const AttentionParts kinds[] = {attentionOf(model, false), attentionOf(model, true)};
    const bool mixture = model.hasExperts();
    const std::string pattern = model.key("attention.sliding_window_pattern");
    const int64_t own =
        model.layers() - md.integerOr(model.key("attention.shared_kv_layers"), 0, model.layers() - 1, 0);
    int32_t last[] = {-1, -1};  // of each kind: the last layer that has keys and values of its own
    for (int64_t i = 0; i < model.layers(); ++i) {
        const bool windowed = md.flagAt(pattern, static_cast<size_t>(i));
        AttentionParts attention = kinds[windowed];
        LayerReader layer = model.layer();
        if (i < own) {
            last[windowed] = static_cast<int32_t>(i);
        } else {
            if (last[windowed] < 0) {
                throw Error(ErrorKind::BadModel,
                            "layer " + std::to_string(i) +
                                " shares the keys and values of an earlier one, but none has its window");
            }
            attention.kvLayer = last[windowed];
            for (const char* name : {"attn_k.weight", "attn_v.weight", "attn_k_norm.weight"}) layer.unused(name);
        }
        layer.mixerNorm("attn_norm").attention(attention).mixerPostNorm("post_attention_norm");
        readFeed(layer, mixture);
    }
    model.head();
}

}  // namespace

SHARPI_FAMILY(gemma4) { return {{"gemma4", read}}; }

}  // namespace sharpi
