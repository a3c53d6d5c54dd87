// Decode attention over latents, bit for bit as cpu/kernels/attention.cpp defines it: all heads share one key, whose
// first elements are the value (KvPages::valuePrefix).
//
// With one key for many heads, the multiplications are the limit: a token of 20 heads takes 21,760 for 1,152 bytes of
// cache. Every dot product is one chain over the dimensions, and so is every sum over a page's keys, so scores and
// outputs are small matrix products whose inner loop is serial. Four warps of a block compute the scores of a page: a
// lane has two keys and up to six heads. Eight warps sum the values: a lane has four dimensions and up to twelve heads.
// At these sizes a quarter of the instructions are no multiplications, and reads of shared memory, of which one takes
// two cycles even if all lanes read the same 16 bytes, just keep up. A page lies in shared memory once for both. If
// there is room for two, the scores are a page ahead of the values; the page after that follows behind the values, a
// quarter at a time.
//
// A piece of work is a segment of one row for a part of the heads, or one page if there is little to do. Outputs stay
// in registers while a segment's pages are joined, and go to device memory once. Blocks take pieces by ticket. The
// joins of segments are tickets too, which come after the pieces: a warp joins 32 dimensions of one head, so that the
// whole device takes part in what nothing else can overlap. Pieces are joined in batches, whose places are used again,
// so the scratch does not grow with the context. If all rows are short and every page of every part has a block, there
// are no tickets: the block that finishes the last page of a part joins it, and the other blocks are gone by then, so
// that the next kernels can start. A block's page is on its way before the kernel's turn. The device decides how a
// batch is divided, from its positions, so that a captured step serves every length; the grid depends on the batch's
// shape and the table's width alone.
#include "kernels/attention/latent_kernel.cuh"

namespace sharpi::cuda {

namespace decode {

void launchLatentsBf16(Stream& stream, const LatentArgs& args, int64_t pages) {
    chooseLatents<KvType::BF16>(stream, args, pages);
}

}  // namespace decode

void attentionDecodeLatent(Stream& stream, const float* q, const HeadShape& shape, const AttentionRule& rule,
                           const BatchRows& batch, const KvPages& pages, void* scratch, const RowOutputs& out) {
    requireLatentAttendable(shape, pages);
    const int32_t valueDim = pages.valuePrefix;
    const int64_t width = int64_t{shape.heads} * shape.headDim, outWidth = int64_t{shape.heads} * valueDim;
    const int64_t most = latentLaunchRows(shape.heads), seen = decode::pagesSeen(rule.reach, batch.listPages);
    for (int64_t first = 0; first < batch.rows; first += most) {
        decode::LatentArgs args = {};
        args.batch = batch.from(first, std::min(most, batch.rows - first));
        const int64_t heads = args.batch.rows * shape.heads;
        args.q = q + first * width;
        args.heads = shape.heads, args.headDim = shape.headDim, args.valueDim = valueDim;
        args.rowBytes = shape.headDim * static_cast<int>(kvElementBytes(pages.type));
        args.rule = rule;
        args.pages = pages;
        args.ring = latentRing(heads);
        args.partials = decode::partialsOver(scratch, heads * (args.ring.slots + 1));
        args.states = reinterpret_cast<float2*>(args.partials.outputs + heads * (args.ring.slots + 1) * valueDim);
        args.out = rowsFrom(out, first, outWidth);
        switch (pages.type) {
        case KvType::F32: decode::launchLatentsF32(stream, args, seen); break;
        case KvType::F16: decode::launchLatentsF16(stream, args, seen); break;
        case KvType::BF16: decode::launchLatentsBf16(stream, args, seen); break;
        }
    }
}

}  // namespace sharpi::cuda
