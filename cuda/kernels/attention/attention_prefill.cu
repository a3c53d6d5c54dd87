// Prefill's attention: which kernel a call takes. Most models need rules that only scale. These have kernels without
// the work that the others cost.
#include "kernels/attention/attention_prefill_tile.cuh"

namespace sharpi::cuda {

void attentionPrefill(Stream& stream, const HalfRows& q, const HeadShape& shape, const AttentionRule& rule,
                      const BatchRows& batch, const QueryTiles& tiles, const KvPages& pages, const RowOutputs& out) {
    requireAttendable(shape, pages);
    PrefillArgs args = {q, shape, rule.scale * kLog2E, batch, tiles, pages, out, 0.0f, rule.reach, rule.sinks};
    if (rule.softcap > 0) {
        args.intoTanh = rule.scale / rule.softcap;
        args.scale = rule.softcap * kLog2E;
    }
    if (shape.headDim > 256) return prefillWide(stream, args);
    const bool onlyScales = !rule.reach.limited() && !(rule.softcap > 0) && !rule.sinks;
    onlyScales ? attendTiles<false>(stream, args) : prefillRuled(stream, args);
}

}  // namespace sharpi::cuda
