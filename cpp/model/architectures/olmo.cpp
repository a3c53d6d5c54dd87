// OLMoE: a mixture whose experts' weights are not renormalized; whole rows of queries and keys are normalized. OLMo 2
// and 3, too: parts read x as it is, and what they give is normalized. In OLMo 3 three layers of four have a window,
// and only the fourth extends its positions.
#include "model/architecture.h"

namespace sharpi {

namespace {

constexpr int64_t kPeriod = 4;  // if no key says which layers have a window

void read(ModelReader& model) {
    const Metadata& md = model.metadata();
    AttentionParts all;
    all.rope = model.rope(RopeSpec::Pairing::Halves);
    all.qkNorm = AttentionSpec::QkNorm::FullRow;
    AttentionParts windowed = all;
    const std::string window = model.key("attention.sliding_window"), pattern = window + "_pattern";
    const bool windows = md.integerOr(window, 0, INT32_MAX, 0) > 0;
    if (windows) {
        RopeParts local;
        local.windowed = true;
        local.scaled = false;
        windowed.rope = model.rope(local);
        windowed.reach.window = static_cast<int32_t>(md.integer(window, 1, INT32_MAX));
    }
    for (int64_t i = 0; i < model.layers(); ++i) {
        const bool own = md.has(pattern) ? md.flagAt(pattern, static_cast<size_t>(i)) : (i + 1) % kPeriod != 0;
        model.layer()
            .attention(windows && own ? windowed : all)
            .mixerPostNorm("post_attention_norm")
            .dense()
            .ffnPostNorm("post_ffw_norm");
    }
    model.head();
}

void readMixture(ModelReader& model) {
    AttentionParts attention;
    attention.rope = model.rope(RopeSpec::Pairing::Halves);
    attention.qkNorm = AttentionSpec::QkNorm::FullRow;
    ExpertParts experts;
    experts.renormalized = false;
    model.uniformLayers(attention, experts);
}

}  // namespace

SHARPI_FAMILY(olmo) { return {{"olmo2", read}, {"olmoe", readMixture, Experts::Always}}; }

}  // namespace sharpi
