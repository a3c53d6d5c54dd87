// What a block of the decode kernel works on: runs of rows, pieces of their cache, and shared memory. See
// attention_decode.cu.
#pragma once

#include <algorithm>

#include "kernels/attention/attention.cuh"
#include "kernels/matmul/mma.cuh"

namespace sharpi::cuda::decode {

constexpr int kPageTokens = kAttentionPage;
// A warp takes one page of a segment.
constexpr int kWarps = kSegmentPages, kThreads = 32 * kWarps;
// The most rows of a run, and of a launch.
constexpr int kRunRows = 8, kMaxRows = static_cast<int>(kDecodeLaunchRows);
// A chunk of a page of keys: up to 128 bytes of each key.
constexpr int kLineBytes = 128, kChunkBytes = kPageTokens * kLineBytes;

// What a kernel is compiled for. kWidth: the neighbouring dimensions that a lane owns. kTile: the most queries that a
// warp computes at once. kWhole: 32 lanes own a whole head; else heads are of any size. kBlocks: of a multiprocessor.
template <KvType type, int width, int tile, bool whole, int blocks> struct Kind {
    static constexpr KvType kType = type;
    static constexpr int kWidth = width, kTile = tile;
    static constexpr bool kWhole = whole;
    static constexpr int kBlocks = blocks;
    // With short rows, a tile's queries are spread over the warps.
    static constexpr int kShare = tile < kWarps ? 1 : tile / kWarps;

    __device__ __forceinline__ static int dim(const HeadShape& shape) { return whole ? 32 * width : shape.headDim; }
    __device__ __forceinline__ static int rowBytes(const HeadShape& shape) { return dim(shape) * kKvBytes<type>; }
    __device__ __forceinline__ static int chunks(const HeadShape& shape) {
        return (rowBytes(shape) + kLineBytes - 1) / kLineBytes;
    }
};

// The results of pieces: maxima and sums [rows][heads][slots], and headDim floats of output for each. The last slot of
// a head has what has been joined so far. counters: a count of pieces that have been taken, then for each row and kv
// head, or part of it (Parts), a count of joined batches, and one of finished pieces for each batch of the ring. All
// counts are zero between launches. workspace.cpp has the size, decodeAttentionBytes.
struct Partials {
    uint32_t* counters;
    float *maxima, *sums, *outputs;
};

inline Partials partialsOver(void* scratch, int64_t partials) {
    const size_t each = (sizeof(float) * static_cast<size_t>(partials) + 255) / 256 * 256;
    auto* bytes = static_cast<uint8_t*>(scratch) + kDecodeCounterBytes;
    return {static_cast<uint32_t*>(scratch), reinterpret_cast<float*>(bytes), reinterpret_cast<float*>(bytes + each),
            reinterpret_cast<float*>(bytes + 2 * each)};
}

// The most pages that hold keys that one row sees.
inline int64_t pagesSeen(const AttentionReach& reach, int64_t listPages) {
    if (!reach.limited()) return listPages;
    const int64_t keys = reach.window > 0 ? reach.window : reach.chunk;
    const bool aligned = reach.window == 0 && reach.chunk % kPageTokens == 0;
    return std::min(listPages, aligned ? keys / kPageTokens : (keys + kPageTokens - 2) / kPageTokens + 1);
}

// The layout of shared memory, in bytes. A warp has a region of `stages` chunks of keys. Once the keys are used, the
// region has the weights, the outputs and the maxima and sums of the warp's page. When pieces are joined, it has the
// outputs of up to `joined` of them: a power of two from kSegmentPages to 32.
struct Layout {
    int rowBytes = 0, chunks = 0, stages = 0, region = 0, queries = 0, rows = 0, runs = 0, flags = 0, total = 0;
    int joined = 32;

    Layout() = default;
    Layout(int elementBytes, int headDim, int tile, int mostStages) {
        rowBytes = headDim * elementBytes;
        chunks = (rowBytes + kLineBytes - 1) / kLineBytes;
        stages = chunks < mostStages ? chunks : mostStages;
        const int results = (tile * (kPageTokens + headDim + 2) * 4 + kLineBytes - 1) / kLineBytes * kLineBytes;
        region = stages * kChunkBytes > results ? stages * kChunkBytes : results;
        while (joined * headDim * 4 > region) joined /= 2;
        queries = kWarps * region;
        rows = queries + tile * headDim * 4;
        placeRows();
    }
    // Places what follows the rows.
    void placeRows() {
        runs = rows + kMaxRows * 8;
        flags = runs + kMaxRows * 16;
        total = flags + 32;
    }
    // Whether a block has room for the values of a short row's page beside its keys.
    __host__ __device__ bool keepsValues() const {
        return chunks * kChunkBytes + kPageTokens * rowBytes <= kWarps * region;
    }
};

// The segments that one launch of the deep kernel computes: as many as there are slots. Those of a limited reach are
// all computed by the first launch.
struct Round {
    int first = 0;
    bool isOnly = true;
};

struct Args {
    const float* q;
    HeadShape shape;
    AttentionRule rule;
    BatchRows batch;
    KvPages pages;
    Partials partials;
    RowOutputs out;
    Layout layout;
    DecodeRing ring;
    int group;              // heads of a kv head
    uint32_t groupInverse;  // 2^32 / group, rounded up; 0 for a group of 1
    int shortPages;         // a row that sees up to this number of pages is cut at pages
    Round round = {};

    // How many of a run's pieces this launch computes.
    __device__ int piecesNow(int pieces) const {
        return round.isOnly ? pieces : max(0, min(pieces - round.first, ring.slots));
    }

    // The row of a query. Queries count the rows of a run and the heads of each.
    __device__ int rowOf(int query) const { return groupInverse ? __umulhi(query, groupInverse) : query; }
};

// What the threads of a block tell each other.
struct Flags {
    volatile int ticket[2];  // of the next piece, which a block takes while it works on a piece
    volatile int runs, pieces;
    volatile int mayWait;   // whether a piece may wait for an earlier one
    volatile int finished;  // whether this block joins the batch
};

// Shared memory as the threads of a block see it.
struct Block {
    uint8_t* shared;
    const Layout& layout;
    int lane, warp;

    __device__ Block(uint8_t* memory, const Layout& places)
        : shared(memory), layout(places), lane(threadIdx.x % 32), warp(threadIdx.x / 32) {}
    __device__ float* queries() const { return reinterpret_cast<float*>(shared + layout.queries); }
    // The first key that a row sees, and how many keys end with its own.
    __device__ int2* rows() const { return reinterpret_cast<int2*>(shared + layout.rows); }
    __device__ int4* runs() const { return reinterpret_cast<int4*>(shared + layout.runs); }
    __device__ Flags& flags() const { return *reinterpret_cast<Flags*>(shared + layout.flags); }
};

// --- runs --------------------------------------------------------------------------------------------------------

// Neighbouring rows of one sequence that are computed together, page by page. A row that sees few pages is alone.
struct Run {
    int row, rows, sequence;
    bool isShort;   // a piece is one page, else one segment
    int firstPage;  // the first page that any row sees
    int keys;       // one more than the largest position
    int end;        // the pieces of this run and of all before it, in this round

    // A row without its neighbours. first: the first key that it sees.
    __device__ static Run alone(const Args& args, int row, int position, int sequence, int first) {
        Run run = {row, 1, sequence, true, first / kPageTokens, max(0, position + 1), 0};
        run.isShort = run.endPage() - run.firstPage <= args.shortPages;
        return run;
    }
    __device__ int4 packed() const {
        return {row | rows << 8 | (isShort ? 1 << 15 : 0) | sequence << 16, firstPage, keys, end};
    }
    __device__ static Run from(int4 p) {
        return {p.x & 0xff, p.x >> 8 & 0x7f, p.x >> 16, (p.x >> 15 & 1) != 0, p.y, p.z, p.w};
    }
    __device__ int endPage() const { return (keys + kPageTokens - 1) / kPageTokens; }
    __device__ int firstSegment() const { return firstPage / kSegmentPages; }
    // A row that sees no key has one empty piece.
    __device__ int pieces() const {
        if (isShort) return max(1, endPage() - firstPage);
        return (endPage() - 1) / kSegmentPages - firstSegment() + 1;
    }
    // Whether a piece of this run may wait for an earlier one: whether there is more than one batch.
    __device__ bool mayWait(const Args& args) const { return !isShort && pieces() > args.ring.batch; }
};

// findRuns() for a single row, without what is needed to tell rows apart.
__device__ __forceinline__ void findOnlyRun(const Args& args, const Block& block) {
    // Volatile: both loads are issued at once.
    const int position = *static_cast<const volatile int32_t*>(args.batch.positions);
    const int sequence = *static_cast<const volatile int32_t*>(args.batch.sequence);
    const int first = position < 0 ? 0 : args.rule.reach.first(position);
    Run run = Run::alone(args, 0, position, sequence, first);
    run.end = args.piecesNow(run.pieces());
    if (block.lane > 0) return;
    block.rows()[0] = {first, run.keys};
    block.runs()[0] = run.packed();
    block.flags().runs = 1, block.flags().pieces = run.end, block.flags().mayWait = run.mayWait(args);
}

// Finds the runs of the batch and leaves them and what each row sees in shared memory. One warp calls it.
__device__ __forceinline__ void findRuns(const Args& args, const Block& block) {
    const int rows = static_cast<int>(args.batch.rows), lane = block.lane;
    if (rows == 1) return findOnlyRun(args, block);
    int runs = 0, pieces = 0;
    bool mayWait = false;
#pragma unroll 1
    for (int base = 0; base < rows; base += 32) {
        const int row = min(base + lane, rows - 1), before = max(0, row - 1);
        const bool exists = base + lane < rows;
        // Volatile: all loads are issued at once.
        const int position = static_cast<const volatile int32_t*>(args.batch.positions)[row];
        const int sequence = static_cast<const volatile int32_t*>(args.batch.sequence)[row];
        const int previous = static_cast<const volatile int32_t*>(args.batch.sequence)[before];
        const int first = position < 0 ? 0 : args.rule.reach.first(position);
        Run run = Run::alone(args, row, position, sequence, first);
        if (exists) block.rows()[row] = {first, run.keys};
        const bool shortBefore = __shfl_up_sync(kWholeWarp, static_cast<int>(run.isShort), 1);
        const bool breaks = lane == 0 || run.isShort || shortBefore || sequence != previous || !exists;
        const uint32_t broken = __ballot_sync(kWholeWarp, breaks), upTo = 0xffffffffu >> (31 - lane);
        const bool starts = exists && (lane - (31 - __clz(broken & upTo))) % kRunRows == 0;
        const uint32_t all = __ballot_sync(kWholeWarp, starts || !exists), after = all & ~upTo;
        run.rows = (after ? __ffs(after) - 1 : 32) - lane;
#pragma unroll
        for (int i = 1; i < kRunRows; i++) {
            const int page = __shfl_down_sync(kWholeWarp, first / kPageTokens, i);
            const int keys = __shfl_down_sync(kWholeWarp, max(0, position + 1), i);
            if (i < run.rows) run.firstPage = min(run.firstPage, page), run.keys = max(run.keys, keys);
        }
        run.end = starts ? args.piecesNow(run.pieces()) : 0;
        mayWait |= __ballot_sync(kWholeWarp, starts && run.mayWait(args)) != 0;
#pragma unroll
        for (int width = 1; width < 32 && width < rows; width <<= 1) {
            const int other = __shfl_up_sync(kWholeWarp, run.end, width);
            if (lane >= width) run.end += other;
        }
        run.end += pieces;
        const uint32_t starting = __ballot_sync(kWholeWarp, starts);
        if (starts) block.runs()[runs + __popc(starting & upTo) - 1] = run.packed();
        runs += __popc(starting);
        pieces = __shfl_sync(kWholeWarp, run.end, min(31, rows - 1 - base));
    }
    if (lane == 0) block.flags().runs = runs, block.flags().pieces = pieces, block.flags().mayWait = mayWait;
}

// There may be fewer pieces than blocks. Then a block takes a part of a group's heads, and of a run's queries: one head
// for each warp if the blocks suffice, else a tile. A part is joined by itself, and counts as a kv head of its own.
// There are no more parts than blocks and no more than heads, so the counters suffice.
struct Parts {
    int each, count;  // heads of a part, parts of a group

    // The most parts that a group may have.
    __host__ __device__ static int most(int group) { return (group + kWarps - 1) / kWarps; }

    // All heads of a group.
    __device__ explicit Parts(const Args& args) : each(args.group), count(1) {}
    __device__ Parts(const Args& args, const Block& block, int tile) : each(args.group), count(1) {
        if (block.flags().mayWait) return;
        const int pieces = block.flags().pieces * args.shape.kvHeads;
#pragma unroll 1
        for (int heads = kWarps; heads <= tile && heads < args.group; heads *= 2) {
            const int parts = (args.group + heads - 1) / heads;
            if (pieces * parts > static_cast<int>(gridDim.x)) continue;
            each = heads, count = parts;
            return;
        }
    }
};

// One piece of one kv head of a run: a page, or the pages of a segment, for all queries or for a part of them.
struct Piece {
    Run run;
    int kvHead, index, pieces;
    int firstQuery, endQuery;
    int chain;  // the number of what it is joined with

    // ticket: counts the pieces of all runs, kv heads and parts. The whole warp calls it.
    __device__ Piece(const Args& args, const Block& block, const Parts& parts, int ticket) {
        const int whole = parts.count == 1 ? ticket : ticket / parts.count, part = ticket - whole * parts.count;
        const int piece = whole / args.shape.kvHeads, runs = block.flags().runs, lane = block.lane;
        kvHead = whole - piece * args.shape.kvHeads;
        int number = 0;
#pragma unroll 1
        for (int base = 0; base < runs; base += 32) {
            const bool isBefore = base + lane < runs && block.runs()[min(base + lane, kMaxRows - 1)].w <= piece;
            number += __popc(__ballot_sync(kWholeWarp, isBefore));
        }
        run = Run::from(block.runs()[number]);
        pieces = run.pieces();
        index = args.round.first + piece - (run.end - args.piecesNow(pieces));
        firstQuery = part * parts.each * run.rows;
        endQuery = min(firstQuery + parts.each * run.rows, run.rows * args.group);
        chain = (run.row * args.shape.kvHeads + kvHead) * parts.count + part;
    }
    // The page of a warp.
    __device__ int page(int warp) const {
        return run.isShort ? run.firstPage + index : (run.firstSegment() + index) * kSegmentPages + warp;
    }
    // The pages of a segment that any row sees.
    __device__ int beginPage() const { return max(page(0), run.firstPage); }
    __device__ int endPage() const { return min(page(kSegmentPages), run.endPage()); }
    __device__ bool has(int page) const { return page >= run.firstPage && page < run.endPage(); }
    // Where a page of the kv head begins, in elements of the cache.
    __device__ int64_t startOf(const Args& args, int page) const {
        const int32_t* table = args.batch.pageTables + run.sequence * args.batch.pagesPerTable;
        return (static_cast<int64_t>(table[page]) * args.pages.kvHeads + kvHead) * kPageTokens * args.shape.headDim;
    }
};

// A tile of up to kTile queries of a piece, which are computed in one go.
struct Tile {
    int first, count;
};

// What a row sees of a page: the keys [begin, end) of it.
struct Span {
    int begin, end;

    __device__ Span(int2 row, int page)
        : begin(max(0, row.x - page * kPageTokens)), end(min(kPageTokens, row.y - page * kPageTokens)) {}
    __device__ bool empty() const { return begin >= end; }
};

// --- copies ------------------------------------------------------------------------------------------------------

// Copies the keys of a page to shared memory by chunks, in the order in which they are used: those of a warp's own page
// to its region, or those of the block's page to the block's regions (kBlocks). A chunk's lines are 128 bytes apart.
// The 16-byte units of line i are exchanged by i % 8, so that eight threads that read the same unit of eight keys use
// all banks.
template <bool kBlocks> struct KeyFeeder {
    static constexpr int kLines = (kBlocks ? kThreads : 32) / 8;  // that are copied at once
    const uint8_t* keys;
    uint32_t shared;
    int n, rowBytes, chunks, ring;

    __device__ __forceinline__ KeyFeeder(const Block& block, const uint8_t* page, int count, int bytes, int inAll)
        : keys(page), n(count), rowBytes(bytes), chunks(inAll) {
        shared = sharedAddress(block.shared) + (kBlocks ? 0 : block.warp * block.layout.region);
        ring = kBlocks ? min(chunks, kWarps * block.layout.region / kChunkBytes) : block.layout.stages;
    }
    __device__ __forceinline__ void copy(int chunk, int place) const {
        const int thread = kBlocks ? threadIdx.x : threadIdx.x % 32, unit = thread % 8, first = thread / 8;
        if (chunk * kLineBytes + unit * 16 >= rowBytes) return;
        const uint8_t* from = keys + first * rowBytes + chunk * kLineBytes + unit * 16;
        const uint32_t to = shared + place * kChunkBytes + first * kLineBytes + ((unit ^ (first & 7)) << 4);
        const auto copyLines = [&](int lines) {
#pragma unroll
            for (int line = 0; line < kPageTokens; line += kLines) {
                if (first + line < lines)
                    copyChunk((line & 4 ? to ^ 64 : to) + line * kLineBytes, from + line * rowBytes, true);
            }
        };
        if (n == kPageTokens) copyLines(2 * kPageTokens);
        else copyLines(n);
    }
    // Begins the copies of the first chunks. A warp closes a group for each chunk, a block one for all.
    __device__ __forceinline__ void begin() const {
#pragma unroll 1
        for (int chunk = 0; chunk < ring; chunk++) {
            copy(chunk, chunk);
            if (!kBlocks) closeCopies();
        }
        if (kBlocks) closeCopies();
    }
    // Returns when the chunk has arrived. The block's values may still be on their way. place: chunk mod ring.
    __device__ __forceinline__ void await(int chunk, int place) const {
        if (kBlocks) {
            if (place != 0) return;
            if (chunk == 0) waitForCopies<1>();
            else waitForCopies<0>();
            __syncthreads();
        } else {
            if (ring > 1) waitForCopies<1>();
            else waitForCopies<0>();
            __syncwarp();
        }
    }
    // The chunk has been used: begins the next copies to its place.
    __device__ __forceinline__ void release(int chunk, int place) const {
        if (kBlocks) {
            if (place != ring - 1 || chunk + 1 == chunks) return;
            __syncthreads();
#pragma unroll 1
            for (int i = 0; i < min(ring, chunks - chunk - 1); i++) copy(chunk + 1 + i, i);
        } else if (chunk + ring < chunks) {
            __syncwarp();
            copy(chunk + ring, place);
        }
        closeCopies();
    }
};

// Copies `bytes`, a multiple of 16, from global to shared memory. The threads of a block or of a warp call it, each
// with its number among kCount.
template <int kCount> __device__ __forceinline__ void copyBytes(uint32_t to, const void* from, int bytes, int thread) {
#pragma unroll 2
    for (int i = thread * 16; i < bytes; i += kCount * 16)
        copyChunk(to + i, static_cast<const uint8_t*>(from) + i, true);
}

// Asks for these bytes to be brought to the L2 cache. `threads` threads call it, each with its number.
__device__ __forceinline__ void prefetchBytes(const uint8_t* from, int bytes, int thread, int threads) {
#pragma unroll 1
    for (int i = thread * 128; i < bytes; i += threads * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from + i)));
}

}  // namespace sharpi::cuda::decode
