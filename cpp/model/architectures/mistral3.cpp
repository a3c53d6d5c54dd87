// Mistral Small 3.1 and later, and Ministral 3: Llama's layers, with queries that are scaled by their position if the
// file says so.
#include "model/architecture.h"

namespace sharpi {

namespace {

void read(ModelReader& model) {
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

SHARPI_FAMILY(mistral3) { return {{"mistral3", read}}; }

}  // namespace sharpi
