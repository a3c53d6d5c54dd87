// Prefill's attention: which kernel a call takes. Most models need rules that only scale. These have kernels without
// the work that the others cost.
#include "kernels/prefill/prefill_tile.cuh"

namespace sharpi::cuda {

void attentionPrefill(Stream& stream, const HalfRows& q, const HeadShape& shape, const AttentionRule& rule,
                      const BatchRows& batch, const QueryTiles& tiles, const KvPages& pages, const RowOutputs& out) {
    const bool isLatent = pages.valuePrefix > 0;
    isLatent ? requireLatentAttendable(shape, pages) : requireAttendable(shape, pages);
    const int32_t valueDim = kvValueDim(shape.headDim, pages.valuePrefix);
    PrefillArgs args = {q,        shape, rule.scale * kLog2E, batch,     tiles, pages, out,
                        valueDim, 0.0f,  rule.reach,          rule.sinks};
    if (rule.softcap > 0) {
        args.intoTanh = rule.scale / rule.softcap;
        args.scale = rule.softcap * kLog2E;
    }
    if (isLatent) return prefillLatent(stream, args);
    if (shape.headDim > 256) return prefillWide(stream, args);
    const bool onlyScales = !rule.reach.limited() && !(rule.softcap > 0) && !rule.sinks;
    onlyScales ? attendTiles<false>(stream, args) : prefillRuled(stream, args);
}

}  // namespace sharpi::cuda
