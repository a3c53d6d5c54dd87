// Attention of few rows over a long cache, bit for bit as cpu/kernels/attention.cpp defines it.
//
// That definition computes every page by itself and joins pages in segments of four. So the work can be cut at pages or
// at segments and gives the same bits. A short cache is cut at pages, if the device can hold all of them at once. A
// long one is cut at segments, which saves most of the intermediate writes. A block takes one such piece of one kv head
// of one row, for all query heads of the group, so that keys and values are read once. The warp that finishes the last
// piece of a head joins the pieces, so there is no second kernel. The grid depends on the batch's shape and the table's
// width alone. The number of pages is read from the positions on the device, so that a captured step serves every
// length. With a window or chunks a row's work begins at the page of the first key that it sees, and the grid is no
// larger than the pages that it can see. Pieces are still cut at absolute segments.
//
// Inside a block, keys and values are copied to shared memory, with two buffers for each, so that the next page arrives
// while one is computed. The dot product is one chain over the dimensions, so each thread computes whole dot products:
// a warp has one head of the group and a lane has two keys, which share each query element (a broadcast). Key rows are
// an odd number of 16-byte units apart, so that eight threads that read eight keys use eight different banks. For the
// outputs, a lane owns kWidth neighbouring dimensions and runs over the keys. Each warp keeps to its own heads, so only
// the copies need barriers. If a device's shared memory cannot hold a page, the same code reads the page in place.
#include "kernels/attention/decode_kernel.cuh"

namespace sharpi::cuda {

namespace decode {

void launchPlain(Stream& stream, const Args& args, int pages) {
    withKvType(args.pages.type, [&](auto tag) { chooseWidth<decltype(tag)::kType, true>(stream, args, pages); });
}

// The most pages that hold keys that one row sees.
static int64_t pagesSeen(const AttentionReach& reach, int64_t pagesPerTable) {
    if (!reach.limited()) return pagesPerTable;
    const int64_t keys = reach.window > 0 ? reach.window : reach.chunk;
    const bool aligned = reach.window == 0 && reach.chunk % kPageTokens == 0;
    return std::min(pagesPerTable, aligned ? keys / kPageTokens : (keys + kPageTokens - 2) / kPageTokens + 1);
}

}  // namespace decode

void attentionDecode(Stream& stream, const float* q, const HeadShape& shape, const AttentionRule& rule,
                     const BatchRows& batch, const KvPages& pages, void* scratch, const RowOutputs& out) {
    requireAttendable(shape, pages);
    if (out.half.hi || (out.quantized.q && shape.headDim % kContractBlock != 0) ||
        batch.rows * shape.heads > int64_t{kDecodeCounterBytes / sizeof(uint32_t)}) {
        throw Error(ErrorKind::Internal, "attentionDecode cannot write these outputs, or not for this number of rows");
    }
    const int64_t seen = decode::pagesSeen(rule.reach, batch.pagesPerTable);
    // The first piece may lie anywhere in a segment.
    const int64_t slots = std::min(batch.pagesPerTable, seen + kSegmentPages - 1);
    const decode::Partials partials = decode::partialsOver(scratch, batch.rows, shape.heads, slots);
    const decode::Args args = {
        q, shape, rule, batch, pages, partials, out, shape.heads / shape.kvHeads, static_cast<int>(slots), 0};
    const bool plain = !rule.reach.limited() && rule.softcap == 0 && !rule.sinks && shape.headDim <= 256;
    (plain ? decode::launchPlain : decode::launchRuled)(stream, args, static_cast<int>(seen));
}

}  // namespace sharpi::cuda
