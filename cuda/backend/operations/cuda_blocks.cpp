// See cuda_blocks.h.
#include "backend/operations/cuda_blocks.h"

#include "kernels/blocks/blocks.h"

namespace sharpi {

namespace {

cuda::RotatedPart partOf(const RopeTable& rope, int32_t headDim) {
    return {rope.cos, rope.sin, rope.dims, static_cast<int32_t>(rope.begin(headDim)), rope.adjacent};
}

cuda::HeadShape shapeOf(const HeadsCall& call, const KvPages& pages) {
    return {call.heads, pages.kvHeads, pages.headDim};
}

cuda::PagedRows pagedRows(const CudaPass& pass, const KvPages& pages) { return {pages, pass.view.tablesOf(pages)}; }

}  // namespace

void CudaBlocks::compress(const CompressCall& call) {
    const cuda::BlockRule rule{call.blockTokens, call.overlaps, call.gateOffsets,
                               call.norm,        call.eps,      partOf(call.rope, call.rows.headDim)};
    cuda::compressBlocks(_pass.stream, rule, _pass.floats(RowBuffer::CompressorKeys),
                         _pass.floats(RowBuffer::CompressorGates), _pass.view.allOf(call.pending),
                         pagedRows(_pass, call.pending), pagedRows(_pass, call.rows));
}

void CudaBlocks::choose(const IndexCall& call) {
    const cuda::IndexRule rule{call.heads, call.topK, call.scale, partOf(call.rope, call.rows.headDim)};
    cuda::chooseBlocks(_pass.stream, rule, _pass.floats(RowBuffer::IndexQueries), _pass.floats(RowBuffer::IndexWeights),
                       _pass.view.allOf(call.rows), pagedRows(_pass, call.rows),
                       _pass.at<uint8_t>(_pass.layout->indexScores), _pass.layout->indexScoreBytes,
                       reinterpret_cast<int32_t*>(_pass.floats(RowBuffer::ChosenBlocks)));
}

void CudaBlocks::prepareHeads(const HeadsCall& call, const KvPages& pages) {
    const cuda::BlockHeads how{call.qNorm, call.kNorm, call.eps, partOf(call.rope, pages.headDim)};
    const int64_t exact = _pass.exactRows();
    float *const q = _pass.floats(RowBuffer::Queries), *const k = _pass.floats(RowBuffer::Keys);
    const cuda::HeadShape shape = shapeOf(call, pages);
    cuda::prepareBlockHeads(_pass.stream, q, k, shape, how, _pass.view.exactOf(pages), pages, {});
    cuda::prepareBlockHeads(_pass.stream, q + exact * call.heads * pages.headDim, k + exact * pages.headDim, shape, how,
                            _pass.view.fastOf(pages), pages, _pass.halves(_pass.layout->queries));
}

// Results take the place of the queries. Each group of heads is a row for the product with `reader`.
void CudaBlocks::attend(const HeadsCall& call, const KvPages& pages, const Weight& reader) {
    const int64_t width = int64_t{call.heads} * pages.headDim, pieces = width / reader.cols, exact = _pass.exactRows(),
                  fast = _pass.fastRows();
    const Activations& attended = _pass.shape(RowInput::Attended, {reader}, reader.cols, pieces);
    float* const q = _pass.floats(RowBuffer::Queries);
    cuda::SeenBlocks seen;
    if (call.blocks) seen.rows = pagedRows(_pass, *call.blocks);
    if (call.topK > 0) {
        seen.chosen = reinterpret_cast<const int32_t*>(_pass.floats(RowBuffer::ChosenBlocks));
        seen.topK = call.topK;
    }
    const cuda::HeadShape shape = shapeOf(call, pages);
    const cuda::AttentionRule rule{call.scale, call.reach, call.softcap, call.sinks};
    const cuda::RotatedPart back = partOf(call.rope, pages.headDim);
    cuda::attendBlocks(_pass.stream, q, shape, rule, _pass.view.exactOf(pages), pages, seen, back,
                       _pass.at<uint8_t>(_pass.layout->blockAttention), _pass.layout->blockAttentionBytes, q);
    cuda::convertRows(_pass.stream, q, exact * pieces, reader.cols, attended.exact);
    if (seen.chosen) seen.chosen += exact * seen.topK;
    cuda::prefillBlocks(_pass.stream, _pass.halves(_pass.layout->queries), shape, rule, _pass.view.fastOf(pages), pages,
                        seen, back, q + exact * width);
    cuda::convertRows(_pass.stream, q + exact * width, fast * pieces, reader.cols, {nullptr, {}, attended.fast});
}

}  // namespace sharpi
