// Attention of few rows over a long cache, bit for bit as cpu/kernels/attention.cpp defines it.
//
// That definition computes every page by itself, joins the pages of a segment of four, and then joins the segments in
// their order. A block takes one segment of one kv head, and each of its four warps takes a page of it, for all query
// heads of the group and for all neighbouring rows of the sequence: keys and values are read and converted once. The
// warps' pages are joined in shared memory, so only segments are written. A row that sees few pages would leave most of
// the device idle. It is cut at pages instead, and the block's warps share the group's heads; if there still are more
// blocks than pieces, a piece is for a part of the group only. What a block does first, up to the page's address, does
// not depend on the kernel before and is done beside it.
//
// The chain of segments can only be joined in order. Blocks take pieces in ascending order: the first by their own
// numbers, if no piece has to wait for another, and all others from a counter. The block that finishes the last piece
// of a batch joins the batch to the earlier ones. The slots of a joined batch are used again, so the scratch does not
// grow with the context. What is launched depends on the batch's shape and depth and the table's width alone: the
// number of pages is read from the positions on the device, so that a captured step serves every length of its depth.
// With a window or chunks a row's work begins at the page of the first key that it sees. Pieces are still cut at
// absolute segments.
//
// A dot product is one chain over the dimensions, so a lane computes whole dot products: those of two keys with up to
// eight queries, which come from shared memory as broadcasts. Keys pass through shared memory in chunks of 128 bytes,
// because a lane that read its key directly would touch as many cache lines as there are lanes. Values do not: a lane
// owns kWidth neighbouring dimensions, runs over the keys, and reads the next ones while it adds. Shared memory is what
// limits the warps of a multiprocessor, so a page's weights and outputs lie where its keys were.
//
// With more segments than the device has room for, what a block does once for each would take half of its time:
// finding it, joining its pages, counting it. Then each warp takes segments by itself (decode/deep.cuh): pages come to
// it through a ring that runs on from segment to segment, it joins their pages in registers, and a second kernel joins
// the segments. A warp waits for no other. Segments that exceed the slots are computed in rounds. The host chooses, by
// how long it knows the texts to be (BatchDepth), since a captured step cannot.
//
// Latent attention has kernels of its own (attention_latent.cu).
#include "kernels/attention/decode/kernel.cuh"
#include "kernels/attention/latent_shape.h"

namespace sharpi::cuda {

namespace decode {

void launchBf16(Stream& stream, const Args& args, int64_t pages) { chooseKernel<KvType::BF16>(stream, args, pages); }

static void launchRows(Stream& stream, Args args, void* scratch) {
    const int64_t heads = args.batch.rows * args.shape.heads;
    args.ring = decodeRing(heads);
    args.partials = partialsOver(scratch, heads * (args.ring.slots + 1));
    const int64_t pages = pagesSeen(args.rule.reach, args.batch.listPages);
    switch (args.pages.type) {
    case KvType::F32: return launchF32(stream, args, pages);
    case KvType::F16: return launchF16(stream, args, pages);
    case KvType::BF16: return launchBf16(stream, args, pages);
    }
}

}  // namespace decode

void attentionDecode(Stream& stream, const float* q, const HeadShape& shape, const AttentionRule& rule,
                     const BatchRows& batch, const KvPages& pages, void* scratch, const RowOutputs& out) {
    if (out.half.hi || (out.quantized.q && kvValueDim(shape.headDim, pages.valuePrefix) % kContractBlock != 0))
        throw Error(ErrorKind::Internal, "attentionDecode cannot write these outputs");
    if (pages.valuePrefix > 0) return attentionDecodeLatent(stream, q, shape, rule, batch, pages, scratch, out);
    requireAttendable(shape, pages);
    const int group = shape.heads / shape.kvHeads;
    const int64_t width = int64_t{shape.heads} * shape.headDim, most = decodeLaunchRows(shape.kvHeads);
    const auto inverse = static_cast<uint32_t>(group == 1 ? 0 : (uint64_t{1} << 32) / group + 1);
    for (int64_t first = 0; first < batch.rows; first += most) {
        const int64_t rows = std::min(most, batch.rows - first);
        decode::Args args = {};
        args.q = q + first * width;
        args.shape = shape, args.rule = rule, args.pages = pages;
        args.batch = batch.from(first, rows);
        args.out = rowsFrom(out, first, width);
        args.group = group, args.groupInverse = inverse;
        decode::launchRows(stream, args, scratch);
    }
}

}  // namespace sharpi::cuda
