// What a block of the decode kernel for latents works on: its shared memory, how rows are divided, and in which order
// blocks take the parts. See attention_latent.cu.
#pragma once

#include "kernels/attention/decode/join.cuh"
#include "kernels/attention/latent_shape.h"

namespace sharpi::cuda::decode {

// Warps that compute scores, and warps that sum values.
constexpr int kScoreWarps = 4, kValueWarps = 8, kLatentWarps = kScoreWarps + kValueWarps;
constexpr int kValueThreads = 32 * kValueWarps, kLatentThreads = 32 * kLatentWarps;
// A warp that sums values has a slice of the dimensions, kValueWidth for each lane, and half of the block's heads.
constexpr int kValueWidth = 4, kSlices = kMaxLatentRank / (32 * kValueWidth);
static_assert(kValueWarps == 2 * kSlices, "two halves of the heads for each slice");
// A lane that joins pieces has one dimension.
constexpr int kJoinDims = 32;

// Shared memory, in bytes: pages, each with `pitch` bytes for a key, so that eight lanes that read 16 bytes of eight
// keys use all banks; the queries [heads][headDim]; for each page in work the weights [heads][64] and the factors with
// which it is joined; rows; flags.
struct LatentLayout {
    int pages = 0;  // 0: a page has no room, and is read from device memory
    int pitch = 0, queries = 0, weights = 0, factors = 0, rows = 0, flags = 0, total = 0;

    LatentLayout() = default;
    LatentLayout(int rowBytes, int headDim, int heads, int pagesThatFit) : pages(pagesThatFit) {
        const int buffers = pages > 0 ? pages : 1;
        pitch = pages > 0 ? rowBytes + (rowBytes % 32 == 0 ? 16 : 0) : rowBytes;
        queries = pages * kPageTokens * pitch;
        weights = queries + heads * headDim * 4;
        factors = weights + buffers * heads * kPageTokens * 4;
        rows = factors + buffers * heads * 8;
        flags = rows + kMaxRows * 16;
        total = flags + 64;
    }
};

// How many heads a block has at once, in heads for each warp of scores: the kernel's own number if there is much to do,
// else fewer, so that more blocks have work.
constexpr int kFewQueries = 2;
// A row's slots, if it is so short that the block that finishes a part's last page joins them by itself.
constexpr int kSpreadSlots = 16;

struct LatentArgs {
    const float* q;  // [rows, heads, headDim]
    int heads, headDim, valueDim;
    int rowBytes;  // of the cache
    AttentionRule rule;
    BatchRows batch;
    KvPages pages;
    Partials partials;
    float2* states;  // [rows, heads, joinUnits()]: maximum and sum of the batches that have been joined
    RowOutputs out;
    LatentLayout layout;
    DecodeRing ring;
    int joins, lastJoins;  // the tickets that join a batch of a row, and the last one

    __device__ int batches() const { return ring.slots / ring.batch; }
    __device__ int joinUnits() const { return (valueDim + kJoinDims - 1) / kJoinDims; }
    // The counters of a row: how many tickets have joined, and for each batch of the ring how many pieces are finished.
    __device__ uint32_t* joined(int row) const { return partials.counters + 1 + row * (1 + batches()); }
    __device__ uint32_t* arrived(int row, int number) const { return joined(row) + 1 + number % batches(); }
    // If the pieces are spread, the same counters count the finished pages of each part of a row. There are no more
    // parts than blocks.
    __device__ uint32_t* finished(int row, int part, int parts) const {
        return partials.counters + 1 + row * parts + part;
    }
    // The first slot of a head of a row; the last one has what has been joined.
    __device__ int64_t slots(int row, int head) const {
        return (static_cast<int64_t>(row) * heads + head) * (ring.slots + 1);
    }
};

// What a ticket stands for: a piece of a row for a part of its heads, or a share of the work of joining a batch.
struct LatentWork {
    bool exists = false, isJoin = false;
    int row = 0, batch = 0;
    int piece = 0, part = 0;  // piece: its number in its row
    int join = 0;
};

struct LatentFlags {
    LatentWork next[2];  // found while a block works on what came before
    int queries;         // heads for each warp of scores
    // If all rows are short and every piece has a block: the number of pieces. A block's number is its piece then, and
    // there are no tickets; else 0.
    int spread;
    int isLast;  // whether this block finished the last piece of a part
};
static_assert(sizeof(LatentFlags) <= 64, "what LatentLayout has for them");

// A row, and how it is cut into pieces: pages or segments. A row that sees no key has one empty piece.
struct LatentRow {
    int first, keys;  // it sees the keys [first, keys)
    int sequence, pieces;
    bool isShort;  // cut at pages

    __device__ static LatentRow from(int4 p) { return {p.x, p.y, p.z, p.w >> 1, (p.w & 1) != 0}; }
    __device__ int4 packed() const { return {first, keys, sequence, pieces << 1 | (isShort ? 1 : 0)}; }
    __device__ int firstPage() const { return first / kPageTokens; }
    __device__ int endPage() const { return (keys + kPageTokens - 1) / kPageTokens; }
    __device__ int firstSegment() const { return firstPage() / kSegmentPages; }
    __device__ int pagesSeen() const { return max(1, endPage() - firstPage()); }
    __device__ int segmentsSeen() const { return max(0, endPage() - 1) / kSegmentPages - firstSegment() + 1; }
    // Slots count from the first segment. Pages that the row does not see leave theirs unused.
    __device__ int pageSlots() const { return endPage() - firstSegment() * kSegmentPages; }
    __device__ void cut(bool atPages) {
        isShort = atPages;
        pieces = atPages ? pagesSeen() : segmentsSeen();
    }
    // Batches of pieces; a short row has one.
    __device__ int batchPieces(const DecodeRing& ring) const { return isShort ? pieces : ring.batch; }
    __device__ int piecesOf(const DecodeRing& ring, int number) const {
        const int each = batchPieces(ring);
        return min(each, max(0, pieces - number * each));
    }
    __device__ bool isLast(const DecodeRing& ring, int number) const {
        return (number + 1) * batchPieces(ring) >= pieces;
    }
};

struct LatentBlock {
    uint8_t* shared;
    const LatentLayout& layout;
    int lane, warp;

    __device__ LatentBlock(uint8_t* memory, const LatentLayout& places)
        : shared(memory), layout(places), lane(threadIdx.x % 32), warp(threadIdx.x / 32) {}
    __device__ uint8_t* page(int slot) const { return shared + slot * kPageTokens * layout.pitch; }
    __device__ float* queries() const { return reinterpret_cast<float*>(shared + layout.queries); }
    __device__ float* weights() const { return reinterpret_cast<float*>(shared + layout.weights); }
    __device__ float2* factors() const { return reinterpret_cast<float2*>(shared + layout.factors); }
    __device__ int4* rows() const { return reinterpret_cast<int4*>(shared + layout.rows); }
    __device__ LatentFlags& flags() const { return *reinterpret_cast<LatentFlags*>(shared + layout.flags); }
    __device__ LatentRow row(int number) const { return LatentRow::from(rows()[number]); }
};

__device__ __forceinline__ int latentParts(int heads, int queries) {
    const int tile = kScoreWarps * queries;
    return (heads + tile - 1) / tile;
}

// Decides how the batch is divided, and leaves its rows in shared memory. most: the kernel's heads for each warp of
// scores. One warp calls it.
__device__ __forceinline__ void divideRows(const LatentArgs& args, const LatentBlock& block, int most) {
    constexpr int kHalves = kMaxRows / 32;
    const int rows = static_cast<int>(args.batch.rows), blocks = static_cast<int>(gridDim.x);
    LatentRow row[kHalves];
    int pages = 0, segments = 0, slots = 0;
#pragma unroll
    for (int half = 0; half < kHalves; half++) {
        const int at = min(block.lane + 32 * half, rows - 1);
        // Volatile: all loads are issued at once.
        const int position = static_cast<const volatile int32_t*>(args.batch.positions)[at];
        row[half].sequence = static_cast<const volatile int32_t*>(args.batch.sequence)[at];
        row[half].first = position < 0 ? 0 : args.rule.reach.first(position);
        row[half].keys = max(0, position + 1);
        if (block.lane + 32 * half >= rows) continue;
        pages += row[half].pagesSeen();
        segments += row[half].segmentsSeen();
        slots = max(slots, row[half].pageSlots());
    }
    pages = warpSum(pages), segments = warpSum(segments);
    slots = static_cast<int>(warpMax(static_cast<uint32_t>(slots)));
    // The fewest heads with which every page still has a block of its own.
    int queries = most;
    bool atPages = true;
    if (most > 1 && pages * latentParts(args.heads, 1) <= blocks) {
        queries = 1;
    } else if (most > kFewQueries && pages * latentParts(args.heads, kFewQueries) <= blocks) {
        queries = kFewQueries;
    } else {
        // Whole segments come in units of four pages, but a page costs two thirds more than a quarter of a segment:
        // nothing runs beside its scores, and each page's sums are written and joined.
        const int parts = latentParts(args.heads, most);
        const int byPage = (pages * parts + blocks - 1) / blocks,
                  bySegment = (segments * parts + blocks - 1) / blocks * kSegmentPages;
        atPages = byPage * 5 < bySegment * 3;
    }
#pragma unroll
    for (int half = 0; half < kHalves; half++) {
        if (block.lane + 32 * half >= rows) continue;
        row[half].cut(atPages && row[half].pageSlots() <= args.ring.slots);
        block.rows()[block.lane + 32 * half] = row[half].packed();
    }
    if (block.lane > 0) return;
    const int pieces = pages * latentParts(args.heads, queries);
    block.flags().queries = queries;
    block.flags().spread = atPages && slots <= min(kSpreadSlots, args.ring.slots) && pieces <= blocks ? pieces : 0;
}

// Blocks take tickets in ascending order: first the first batches of pieces of all rows, then in each round the next
// batch of each row and the joins of the batch before. A ticket waits only for earlier ones, which are in the hands of
// running blocks, and the earliest that is not finished waits for none. One warp of a block follows the order. If the
// pieces are spread, a block's number is its only ticket, and nobody waits.
struct LatentOrder {
    int parts = 1;
    int round = 0, start = 0;  // start: the round's first ticket; in the end the number of all
    int ticket = 0;            // the last one that was taken

    // Looks for number `rest` among the lanes' counts. Returns the lane, and the number within it; -1: it comes later.
    __device__ static int pick(int count, int lane, int& rest) {
        int upTo = count;
#pragma unroll
        for (int width = 1; width < 32; width <<= 1) {
            const int other = __shfl_up_sync(kWholeWarp, upTo, width);
            if (lane >= width) upTo += other;
        }
        const int all = __shfl_sync(kWholeWarp, upTo, 31);
        if (rest >= all) {
            rest -= all;
            return -1;
        }
        const int where = __popc(__ballot_sync(kWholeWarp, upTo <= rest));
        rest -= __shfl_sync(kWholeWarp, upTo - count, where);
        return where;
    }

    // Takes the next ticket, and leaves in shared memory what it stands for.
    __device__ __forceinline__ void takeNext(const LatentArgs& args, const LatentBlock& block, int turn) {
        LatentWork next;
        if (block.flags().spread == 0) {
            if (block.lane == 0) ticket = static_cast<int>(atomicAdd(args.partials.counters, 1u));
            ticket = __shfl_sync(kWholeWarp, ticket, 0);
            next = find(args, block);
        }
        if (block.lane == 0) block.flags().next[turn] = next;
    }
    // The same for the block's own number.
    __device__ __forceinline__ void takeOwn(const LatentArgs& args, const LatentBlock& block, int turn) {
        ticket = static_cast<int>(blockIdx.x);
        LatentWork own;
        if (ticket < block.flags().spread) own = find(args, block);
        if (block.lane == 0) block.flags().next[turn] = own;
    }

private:
    __device__ __forceinline__ LatentWork find(const LatentArgs& args, const LatentBlock& block) {
        const int rows = static_cast<int>(args.batch.rows);
        for (;;) {
            int rest = ticket - start;
#pragma unroll 1
            for (int base = 0; base < 2 * kMaxRows; base += 32) {
                const bool isJoin = base >= kMaxRows;
                const int first = base % kMaxRows, number = round - (isJoin ? 1 : 0);
                if (first >= rows || number < 0) continue;
                const LatentRow row = block.row(min(first + block.lane, rows - 1));
                int count = first + block.lane < rows ? row.piecesOf(args.ring, number) : 0;
                if (isJoin) count = count == 0 ? 0 : row.isLast(args.ring, number) ? args.lastJoins : args.joins;
                else count *= parts;
                const int lane = pick(count, block.lane, rest);
                if (lane < 0) continue;
                LatentWork work = {true, isJoin, first + lane, number, 0, 0, rest};
                if (isJoin) return work;
                const int each = __shfl_sync(kWholeWarp, row.batchPieces(args.ring), lane), piece = rest / parts;
                work.piece = number * each + piece, work.part = rest - piece * parts;
                return work;
            }
            const int all = ticket - start - rest;
            if (all == 0) return {};
            start += all;
            round++;
        }
    }
};

}  // namespace sharpi::cuda::decode
