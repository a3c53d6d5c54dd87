// Command R7B and Command A: attention and the feed-forward part read the same LayerNorm and are both added to x. Three
// layers of four have a window and embed positions; the fourth has neither.
#include "model/architecture.h"

namespace sharpi {

namespace {

constexpr int64_t kPeriod = 4;  // no metadata key gives it

void read(ModelReader& model) {
    model.layerNorms();
    model.scales(ModelReader::LogitScale::Multiplies);
    const AttentionParts all;
    AttentionParts windowed;
    windowed.rope = model.rope(RopeSpec::Pairing::Adjacent);
    const std::string window = model.key("attention.sliding_window");
    windowed.reach.window = static_cast<int32_t>(model.metadata().integer(window, 1, INT32_MAX));
    for (int64_t i = 0; i < model.layers(); ++i)
        model.layer().mixerNorm("attn_norm").attention((i + 1) % kPeriod ? windowed : all).oneNorm().dense();
    model.head();
}

}  // namespace

SHARPI_FAMILY(cohere2) { return {{"cohere2", read}}; }

}  // namespace sharpi
