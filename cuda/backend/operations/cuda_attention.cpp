// Attention on the GPU; see cuda_operations.h.
#include "backend/operations/cuda_operations.h"
#include "core/contract.h"
#include "kernels/attention/attention.h"
#include "kernels/rows/rows.h"

namespace sharpi {

namespace {

cuda::HeadPreparation preparation(const HeadsCall& call) {
    using QkNorm = AttentionSpec::QkNorm;
    cuda::HeadPreparation how;
    how.norm = call.qkNorm == QkNorm::PerHead   ? cuda::HeadNorm::PerHead
               : call.qkNorm == QkNorm::FullRow ? cuda::HeadNorm::FullRow
                                                : cuda::HeadNorm::None;
    how.normAfterRotation = call.normAfterRotation;
    how.valueNorm = call.valueNorm;
    how.appends = call.appends;
    how.valuesAreKeys = call.valuesAreKeys;
    how.queryScale = call.queryScale;
    how.qNorm = call.qNorm;
    how.kNorm = call.kNorm;
    how.eps = call.eps;
    how.cos = call.rope.cos;
    how.sin = call.rope.sin;
    how.ropeDims = call.rope.dims;
    how.adjacent = call.rope.adjacent;
    return how;
}

cuda::AttentionRule ruleOf(const HeadsCall& call) { return {call.scale, call.reach, call.softcap, call.sinks}; }

cuda::HeadShape shapeOf(const HeadsCall& call, const KvPages& pages) {
    return {call.heads, pages.kvHeads, pages.headDim};
}

// Exact prompts may have many rows of a sequence, decode has few of each.
void attendRows(CudaPass& pass, const HeadsCall& call, const KvPages& pages, const cuda::RowOutputs& out) {
    const cuda::HeadShape shape = shapeOf(call, pages);
    const cuda::BatchRows batch = pass.view.exactOf(pages);
    const float* const queries = pass.floats(RowBuffer::Queries);
    auto* const scratch = pass.at<uint8_t>(pass.layout->attention);
    const cuda::QueryTiles& tiles = pass.view.exactTiles;
    if (!cuda::manyRowsPay(pass.stream.device(), shape, pages, tiles.count, pass.view.tiledRows)) {
        cuda::attentionDecode(pass.stream, queries, shape, ruleOf(call), batch, pages, scratch, out);
        return;
    }
    const int64_t width = int64_t{shape.heads} * shape.headDim;
    cuda::attentionManyRows(pass.stream, queries, shape, ruleOf(call), batch, tiles, pages,
                            pass.exactFloats(RowInput::Attended), out);
    for (const auto& [begin, end] : pass.view.untiledRows) {
        cuda::attentionDecode(pass.stream, queries + begin * width, shape, ruleOf(call), batch.from(begin, end - begin),
                              pages, scratch, cuda::rowsFrom(out, begin, width));
    }
}

void attendExact(CudaPass& pass, const HeadsCall& call, const KvPages& pages, const Weight& reader,
                 const Activations& attended) {
    // The kernel writes whole blocks of the contract only if a head is whole blocks.
    const bool wholeBlocks = info(reader.type).isFloat || pages.headDim % kContractBlock == 0;
    const bool convert = call.gated || !wholeBlocks;
    float* const floats = pass.exactFloats(RowInput::Attended);
    const cuda::RowOutputs written = convert ? cuda::RowOutputs{floats, {}, {}} : attended.exact;
    attendRows(pass, call, pages, written);
    const int64_t rows = pass.exactRows();
    if (call.gated) {
        cuda::gateHeads(pass.stream, floats, pass.floats(RowBuffer::GatedQueries), rows, call.heads, pages.headDim,
                        attended.exact);
    } else if (convert) {
        cuda::convertRows(pass.stream, floats, rows, attended.cols, attended.exact);
    }
}

void attendFast(CudaPass& pass, const HeadsCall& call, const KvPages& pages, const Activations& attended) {
    const cuda::RowOutputs ungated{pass.floats(pass.layout->attendedFloats), {}, {}};
    const cuda::RowOutputs written{nullptr, {}, attended.fast};
    cuda::attentionPrefill(pass.stream, pass.halves(pass.layout->queries), shapeOf(call, pages), ruleOf(call),
                           pass.view.fastOf(pages), pass.view.queryTiles, pages, call.gated ? ungated : written);
    if (!call.gated) return;
    const float* const gates = pass.floats(RowBuffer::GatedQueries) + pass.exactRows() * 2 * call.heads * pages.headDim;
    cuda::gateHeads(pass.stream, ungated.floats, gates, pass.fastRows(), call.heads, pages.headDim, written);
}

// Values are the beginnings of keys; see LatentSpec. Each (row, head) is a row for the product with `reader`.
void attendLatent(CudaPass& pass, const HeadsCall& call, const KvPages& pages, const Weight& reader) {
    const Activations& to = pass.shape(RowInput::Attended, {reader}, pages.valuePrefix, call.heads);
    if (pass.exactRows()) {
        cuda::attentionDecode(pass.stream, pass.floats(RowBuffer::Queries), shapeOf(call, pages), ruleOf(call),
                              pass.view.exactOf(pages), pages, pass.at<uint8_t>(pass.layout->attention), to.exact);
    }
    if (pass.fastRows()) {
        cuda::attentionPrefill(pass.stream, pass.halves(pass.layout->queries), shapeOf(call, pages), ruleOf(call),
                               pass.view.fastOf(pages), pass.view.queryTiles, pages, {nullptr, {}, to.fast});
    }
}

}  // namespace

void CudaOperations::prepareHeads(const HeadsCall& call, const KvPages& pages) {
    if (CudaBlocks::has(call)) return _blocks.prepareHeads(call, pages);
    const int64_t width = int64_t{call.heads} * pages.headDim, kvWidth = int64_t{pages.kvHeads} * pages.headDim;
    const int64_t exact = _pass.exactRows();
    float *const q = _pass.floats(RowBuffer::Queries), *const k = _pass.floats(RowBuffer::Keys),
                 *const v = _pass.floats(RowBuffer::Values);
    if (call.gated) {
        cuda::splitGatedQueries(_pass.stream, _pass.floats(RowBuffer::GatedQueries), _pass.view.rows, call.heads,
                                pages.headDim, q);
    }
    const cuda::HeadPreparation how = preparation(call);
    const cuda::HeadShape shape = shapeOf(call, pages);
    if (exact) cuda::prepareHeads(_pass.stream, q, k, v, shape, how, _pass.view.exactOf(pages), pages, {});
    if (_pass.fastRows()) {
        cuda::prepareHeads(_pass.stream, q + exact * width, k + exact * kvWidth, v + exact * kvWidth, shape, how,
                           _pass.view.fastOf(pages), pages, _pass.halves(_pass.layout->queries));
    }
}

void CudaOperations::attend(const HeadsCall& call, const KvPages& pages, const Weight& reader) {
    if (CudaBlocks::has(call)) return _blocks.attend(call, pages, reader);
    if (pages.valuePrefix > 0) return attendLatent(_pass, call, pages, reader);
    const Activations& attended = _pass.shape(RowInput::Attended, {reader}, reader.cols);
    if (_pass.exactRows()) attendExact(_pass, call, pages, reader, attended);
    if (_pass.fastRows()) attendFast(_pass, call, pages, attended);
}

}  // namespace sharpi
