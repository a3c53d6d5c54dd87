// Attention of many rows of a sequence, bit for bit as cpu/kernels/attention.cpp defines it.
//
// Both products of that definition are chains of fused multiply-adds, one for each score and one for each element of a
// page's output, in ascending order. So they are matrix products in float, and this is the kernel for such products: a
// block has some queries (heads of a group and neighbouring rows) in shared memory, keys and values pass through in
// chunks, converted to float once, and a thread has 8 x 8 results, for which it reads 16 numbers with each step. Its
// limit is the rate of multiply-adds, of which there are 2 x headDim for each query and key. On an H200 it reaches half
// of that: one instruction in five is no multiply-add, and a multiprocessor issues in two cycles of three.
//
// A block goes through the pages that its rows see, in their order, so no block waits for another: a page's
// output is joined to its segment's in registers, and the segment's, once in four pages, to sums in memory. Decode's
// kernel (attention_decode.cu), which divides a few queries' pages among blocks, reads a number from shared memory for
// every two multiply-adds. It is the faster one for rows that would leave most multiprocessors without a block of this
// kernel.
#include "kernels/attention/many/many_rows.cuh"

namespace sharpi::cuda {

namespace many {

bool launchBf16(Stream& stream, const Args& args) { return chooseKind<KvType::BF16>(stream, args); }

}  // namespace many

// The queries of a block; 0: there is no kernel. Kinds differ by the cache's type in nothing else.
static int64_t queriesOfBlock(const DeviceInfo& device, const HeadShape& shape, const KvPages& pages) {
    int64_t queries = 0;
    if (pages.valuePrefix > 0) return queries;
    many::withKind<KvType::BF16>(device, shape.headDim, [&](auto kind) {
        queries = decltype(kind)::kQueries;
        return true;
    });
    return queries;
}

bool manyRowsPay(const DeviceInfo& device, const HeadShape& shape, const KvPages& pages, int64_t tiles, int64_t rows) {
    const int64_t queries = queriesOfBlock(device, shape, pages);
    if (queries == 0) return false;
    const int64_t fullBlocks = rows * shape.heads / queries, group = shape.heads / shape.kvHeads;
    return fullBlocks >= device.multiprocessors / 2 && 3 * rows * group >= tiles * queries;
}

static bool launchManyRows(Stream& stream, const many::Args& args) {
    switch (args.pages.type) {
    case KvType::F32: return many::launchF32(stream, args);
    case KvType::F16: return many::launchF16(stream, args);
    case KvType::BF16: return many::launchBf16(stream, args);
    }
    return false;
}

void attentionManyRows(Stream& stream, const float* q, const HeadShape& shape, const AttentionRule& rule,
                       const BatchRows& batch, const QueryTiles& tiles, const KvPages& pages, float* sums,
                       const RowOutputs& out) {
    requireAttendable(shape, pages);
    if (out.half.hi || (out.quantized.q && shape.headDim % kContractBlock != 0) || pages.valuePrefix > 0 ||
        !launchManyRows(stream, {q, shape, rule, batch, tiles, pages, out, sums, shape.heads / shape.kvHeads}))
        throw Error(ErrorKind::Internal, "attentionManyRows has no kernel for these heads or outputs");
}

}  // namespace sharpi::cuda
