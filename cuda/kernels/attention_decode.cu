// Attention of few rows over a long cache, bit for bit as cpu/kernels/attention.cpp defines it.
//
// That definition computes every page by itself and joins pages in segments of four, so the work can be cut at pages or at
// segments and give the same bits: at pages where a cache is short and the device has room for all of them at once,
// at segments where it is long, which saves most of what would be written between. A block takes one such piece of one kv head of one
// row, for all query heads of the group, so that keys and values are read once. Whichever warp finishes the last piece of a head joins
// the pieces: no second kernel. The grid follows from the batch's shape and the table's width alone; how many pages there
// are is read from the positions on the device, so that a captured step serves every length.
//
// Inside a block: keys and values are copied to shared memory, in two buffers each, so that the next page is under way
// while one is computed. The order of the dot product is one chain over the dimensions, so a thread makes whole dot products,
// of one key with two heads of the group: converting a key to floats, which costs as much as multiplying it, then serves both.
// Two warps share such a bundle of heads: for the scores each has half of the page's keys, for the weights half of the
// heads, for the outputs half of the dimensions, of which a lane owns kWidth neighbouring ones and runs over the keys. What a lane owns
// stays in registers from page to page. Key rows are an odd number of 16-byte units apart, so that eight threads reading eight keys meet
// eight different banks. Where the shared memory of a device cannot hold a page, the same code reads it from where it lies.
#include <algorithm>

#include "kernels/attention.cuh"
#include "kernels/mma.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kPageTokens = kAttentionPage;
constexpr int kBundleWarps = 2;  // warps that share a bundle of heads
constexpr int kMaxWarps = 16;

// What a piece gave: [rows][heads][pages of the table], and outputs with headDim floats for each of them; before them
// counts of finished pieces for each row, head and half of its dimensions, zero between launches. Their size is decodeAttentionBytes, in workspace.cpp.
struct Partials {
    uint32_t* finished;
    float *maxima, *sums, *outputs;
};

size_t roundUp(size_t bytes) { return (bytes + 255) / 256 * 256; }

Partials partialsOver(void* scratch, int64_t rows, int32_t heads, int64_t pages) {
    const size_t each = roundUp(sizeof(float) * static_cast<size_t>(rows * heads * pages));
    auto* bytes = static_cast<uint8_t*>(scratch) + kDecodeCounterBytes;
    return {static_cast<uint32_t*>(scratch), reinterpret_cast<float*>(bytes), reinterpret_cast<float*>(bytes + each),
            reinterpret_cast<float*>(bytes + 2 * each)};
}

// Pages that a row at this position sees; none below zero.
__device__ __forceinline__ int pagesOf(int position) { return (position + kPageTokens) / kPageTokens; }

// --- what a block works on ---------------------------------------------------------------------------------------

// Where things lie in shared memory, in bytes; key and value rows only where pages are copied.
struct Layout {
    int rowBytes, keyStride, values, queries, weights, tops, outputs, total;

    // slots: heads of the group, rounded up to whole bundles.
    __host__ __device__ Layout(KvType type, int headDim, int group, int slots, int stages) {
        rowBytes = headDim * (type == KvType::F32 ? 4 : 2);
        keyStride = stages ? (rowBytes / 16 | 1) * 16 : rowBytes;
        values = stages * kPageTokens * keyStride;
        queries = values + stages * kPageTokens * rowBytes;
        weights = queries + group * headDim * 4;
        tops = weights + slots * kPageTokens * 4;
        outputs = tops + 2 * slots * 4;
        total = outputs + slots * headDim * 4;
    }
};

struct Args {
    const float* q;
    HeadShape shape;
    float scale;
    BatchRows batch;
    KvPages pages;
    Partials partials;
    RowOutputs out;
    int group;       // heads of a kv head
    int shortPages;  // rows of up to so many pages are cut at pages
};

// How the pages of a row are cut.
struct Cut {
    int pages, perPiece, pieces;

    // A row that sees no key is one empty piece.
    __device__ Cut(const Args& args, int position) {
        pages = pagesOf(position);
        const bool isShort = pages <= args.shortPages;
        perPiece = isShort ? 1 : kSegmentPages;
        pieces = max(1, isShort ? pages : (pages + kSegmentPages - 1) / kSegmentPages);
    }
};

// One piece of one kv head of one row.
struct Piece {
    int row, kvHead, index, pages, keys;  // keys: that the row sees, from the piece's first page on
    int pageId;                           // of the lane-th page

    __device__ int keysOf(int page) const { return min(keys - page * kPageTokens, kPageTokens); }
};

// What has been joined so far: the same m and l in every lane, a lane's own o.
template <int kWidth> struct Joined {
    float m, l, o[kWidth];

    __device__ __forceinline__ void clear() {
        m = __int_as_float(0xff800000), l = 0.0f;
#pragma unroll
        for (int i = 0; i < kWidth; i++) o[i] = 0.0f;
    }
    // As add() to nothing does, which leaves all as it is but -0.
    __device__ __forceinline__ void joinToNothing() {
#pragma unroll
        for (int i = 0; i < kWidth; i++) o[i] = __fadd_rn(o[i], 0.0f);
    }
    __device__ __forceinline__ void add(float sum, const float (&outputs)[kWidth], float kept, float added) {
        l = fmaf(sum, added, __fmul_rn(l, kept));
#pragma unroll
        for (int i = 0; i < kWidth; i++) o[i] = fmaf(outputs[i], added, __fmul_rn(o[i], kept));
    }
};

// --- copies ------------------------------------------------------------------------------------------------------

// `rows` rows of up to kUnits 16-byte units, contiguous at `from`, to rows `stride` bytes apart; a part of a warp to a row.
template <int kUnits> __device__ __forceinline__ void copyRows(uint32_t to, int stride, const uint8_t* from, int rows, int rowBytes) {
    constexpr int kAbreast = kUnits < 32 ? kUnits : 32;
    const int first = threadIdx.x / kAbreast, column = threadIdx.x % kAbreast * 16, step = blockDim.x / kAbreast;
    to += first * stride + column, from += first * rowBytes + column;
#pragma unroll 2
    for (int row = first; row < rows; row += step) {
#pragma unroll
        for (int at = 0; at < kUnits * 16; at += kAbreast * 16)
            if (column + at < rowBytes) copyChunk(to + at, from + at, true);
        to += step * stride, from += step * rowBytes;
    }
}

__device__ __forceinline__ void copyBytes(uint32_t to, const void* from, int bytes) {
    const auto* at = static_cast<const uint8_t*>(from);
#pragma unroll 2
    for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) copyChunk(to + i, at + i, true);
}

// Copies a piece's pages into their buffers, in the order in which they are used. Every call ends a group of copies, also one that has
// nothing to copy, so that counting groups tells what has arrived. The whole block calls.
template <int kUnits, int kStages> struct Feeder {
    const Args& args;
    const Piece& piece;
    const Layout& layout;
    uint32_t shared;

    __device__ __forceinline__ const uint8_t* place(const uint8_t* base, int page) const {
        const int64_t id = __shfl_sync(kWholeWarp, piece.pageId, page);
        return base + (id * args.shape.kvHeads + piece.kvHead) * kPageTokens * layout.rowBytes;
    }
    __device__ __forceinline__ void keys(int page) const {
        const int at = kStages == 2 ? page & 1 : 0;
        if (page < piece.pages)
            copyRows<kUnits>(shared + at * kPageTokens * layout.keyStride, layout.keyStride, place(args.pages.k, page),
                             piece.keysOf(page), layout.rowBytes);
        closeCopies();
    }
    __device__ __forceinline__ void values(int page) const {
        const int at = kStages == 2 ? page & 1 : 0;
        if (page < piece.pages)
            copyBytes(shared + layout.values + at * kPageTokens * layout.rowBytes, place(args.pages.v, page),
                      piece.keysOf(page) * layout.rowBytes);
        closeCopies();
    }
};

// --- one page ----------------------------------------------------------------------------------------------------

// Dot products of a key with the queries of a bundle.
template <KvType kType, int kHeads>
__device__ __forceinline__ void dotProducts(const uint8_t* key, const float* const (&queries)[kHeads], int headDim, float (&dots)[kHeads]) {
    constexpr int kStep = kType == KvType::F32 ? 4 : 8;
#pragma unroll
    for (int h = 0; h < kHeads; h++) dots[h] = 0.0f;
#pragma unroll 2
    for (int d = 0; d < headDim; d += kStep) {
        float elements[kStep];
        readElements<kType, kStep>(key, elements);
        key += 16;
        float q[kHeads][kStep];
#pragma unroll
        for (int h = 0; h < kHeads; h++) readFloats<kStep>(queries[h] + d, q[h]);
#pragma unroll
        for (int i = 0; i < kStep; i++) {
#pragma unroll
            for (int h = 0; h < kHeads; h++) dots[h] = fmaf(q[h][i], elements[i], dots[h]);
        }
    }
}

// By the order of their bits, that of integers once those of negative numbers are turned.
__device__ __forceinline__ float largestOfWarp(float x) {
    const auto turned = [](uint32_t bits, bool negative) { return negative ? ~bits : bits | 0x80000000u; };
    const uint32_t bits = __float_as_uint(x), largest = warpMax(turned(bits, bits >> 31));
    return __uint_as_float(largest >> 31 ? largest & 0x7fffffffu : ~largest);
}

// Turns the dot products of a page, kHeads floats apart, into a head's weights; gives its maximum and sum.
template <int kHeads> __device__ __forceinline__ float2 weighScores(float* weights, int n, float scale, int lane) {
    const float low = __int_as_float(0xff800000);
    const float first = lane < n ? __fmul_rn(weights[lane * kHeads], scale) : low;
    const float second = lane + 32 < n ? __fmul_rn(weights[(lane + 32) * kHeads], scale) : low;
    const float top = largestOfWarp(fmaxf(first, second));
    const float p = portableExp(__fsub_rn(first, top)), r = portableExp(__fsub_rn(second, top));
    weights[lane * kHeads] = p;
    weights[(lane + 32) * kHeads] = r;
    return {top, contractTree(__fadd_rn(p, r))};
}

// acc[h][i] = sum over the n keys of weight * value, keys ascending. weights: [keys][kHeads].
template <KvType kType, int kHeads, int kWidth>
__device__ __forceinline__ void weighValues(const uint8_t* values, int rowBytes, const float* weights, int n, float (&acc)[kHeads][kWidth]) {
#pragma unroll
    for (int h = 0; h < kHeads; h++) {
#pragma unroll
        for (int i = 0; i < kWidth; i++) acc[h][i] = 0.0f;
    }
#pragma unroll 8
    for (int j = 0; j < n; j++) {
        float weight[kHeads], value[kWidth];
        readFloats<kHeads>(weights + j * kHeads, weight);
        readElements<kType, kWidth>(values + j * rowBytes, value);
#pragma unroll
        for (int h = 0; h < kHeads; h++) {
#pragma unroll
            for (int i = 0; i < kWidth; i++) acc[h][i] = fmaf(weight[h], value[i], acc[h][i]);
        }
    }
}

// --- a piece -----------------------------------------------------------------------------------------------------

// o / l to wherever it is asked for, of the dimensions from `from` on that a warp has. line: the head's headDim floats of shared
// memory; the whole warp calls it.
template <int kWidth>
__device__ __forceinline__ void finishHead(const Args& args, int row, int head, int from, const float (&o)[kWidth], float l, float* line, int lane) {
    const int dim = args.shape.headDim;
    float result[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; i++) result[i] = __fdiv_rn(o[i], l);
    if (from + lane * kWidth < dim) writeFloats<kWidth>(line + from + lane * kWidth, result);
    __syncwarp();
    const int64_t cols = static_cast<int64_t>(args.shape.heads) * dim;
    const int column = from + lane * 4;
    const bool valid = lane < 8 * kWidth && column < dim;
    const float4 x = valid ? *reinterpret_cast<const float4*>(line + column) : float4{0.0f, 0.0f, 0.0f, 0.0f};
    const int64_t at = static_cast<int64_t>(head) * dim + column;
    if (args.out.floats && valid) *reinterpret_cast<float4*>(args.out.floats + row * cols + at) = x;
    if (args.out.quantized.q) quantizeQuad(args.out.quantized, row, cols / kContractBlock, at, x, valid);
}

// Factors of 32 neighbouring pieces as a warp holds them, lane i those of the i-th.
struct Factors {
    float sum, kept, added;              // of the piece within its segment
    float segmentKept, segmentAdded;     // of its segment as a whole

    // largest: of the segments before, becomes that of all. segment: pieces of a segment, 1 or kSegmentPages.
    __device__ __forceinline__ void make(float maximum, float& largest, int segment, int lane) {
        float top = maximum;
        for (int width = 1; width < segment; width <<= 1) {
            const float other = __shfl_up_sync(kWholeWarp, top, width);
            if (lane % segment >= width) top = fmaxf(top, other);
        }
        const float before = __shfl_up_sync(kWholeWarp, top, 1);
        kept = lane % segment == 0 ? 0.0f : portableExp(__fsub_rn(before, top));
        added = portableExp(__fsub_rn(maximum, top));
        // Lanes past the last piece hold -inf, so the segment's last lane has its maximum.
        const float own = __shfl_sync(kWholeWarp, top, lane | (segment - 1));
        float all = own;
        for (int width = segment; width < 32; width <<= 1) {
            const float other = __shfl_up_sync(kWholeWarp, all, width);
            if (lane >= width) all = fmaxf(all, other);
        }
        all = fmaxf(all, largest);
        float earlier = __shfl_up_sync(kWholeWarp, all, segment);
        if (lane < segment) earlier = largest;
        segmentKept = portableExp(__fsub_rn(earlier, all));
        segmentAdded = portableExp(__fsub_rn(own, all));
        largest = __shfl_sync(kWholeWarp, all, 31);
    }
};

// Counts one more; what this warp wrote before is seen by whoever counts after, and what others wrote before by this warp.
__device__ __forceinline__ uint32_t arrive(uint32_t* counter) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(__cvta_generic_to_global(counter)) : "memory");
    return before;
}

// All pieces of a head, in their order, in the dimensions from `from` on. The whole warp calls it.
template <int kWidth>
__device__ __forceinline__ void joinPieces(const Args& args, int64_t first, int pieces, int segment, int from, int lane, Joined<kWidth>& whole) {
    constexpr int kAhead = kWidth == 4 ? 8 : 16;  // pieces whose outputs are under way at once
    const int dim = args.shape.headDim, column = min(from + lane * kWidth, dim - kWidth);
    const float* outputs = args.partials.outputs + first * dim + column;
    const float *maxima = args.partials.maxima + first, *sums = args.partials.sums + first;
    Joined<kWidth> part;
    part.clear();
    whole.clear();
    Factors factors;
    for (int piece = 0; piece < pieces; piece += kAhead) {
        float next[kAhead][kWidth];
#pragma unroll
        for (int i = 0; i < kAhead; i++) readWritten<kWidth>(outputs + static_cast<int64_t>(min(piece + i, pieces - 1)) * dim, next[i]);
        if (piece % 32 == 0) {
            const bool exists = piece + lane < pieces;
            const float maximum = exists ? __ldcg(maxima + piece + lane) : __int_as_float(0xff800000);
            factors.sum = exists ? __ldcg(sums + piece + lane) : 0.0f;
            factors.make(maximum, whole.m, segment, lane);
        }
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            if (piece + i >= pieces) break;
            const int at = (piece + i) % 32;
            const float sum = __shfl_sync(kWholeWarp, factors.sum, at), segmentKept = __shfl_sync(kWholeWarp, factors.segmentKept, at),
                        segmentAdded = __shfl_sync(kWholeWarp, factors.segmentAdded, at);
            if (segment == 1) {
                whole.add(sum, next[i], segmentKept, segmentAdded);
                continue;
            }
            if (at % segment == 0) part.clear();
            part.add(sum, next[i], __shfl_sync(kWholeWarp, factors.kept, at), __shfl_sync(kWholeWarp, factors.added, at));
            if ((at + 1) % segment == 0 || piece + i + 1 == pieces) whole.add(part.l, part.o, segmentKept, segmentAdded);
        }
    }
}

// Leaves a piece's result for a head, in the dimensions that this warp has (the half-th half of them); true for the last of the head's
// pieces to come, which then has what all gave.
template <int kWidth>
__device__ __forceinline__ bool gather(const Args& args, const Piece& piece, const Cut& cut, int head, int half, Joined<kWidth>& so, int lane) {
    if (cut.pieces == 1) {
        so.joinToNothing();
        return true;
    }
    const int dim = args.shape.headDim, from = half * 32 * kWidth, column = from + lane * kWidth;
    const int64_t flat = static_cast<int64_t>(piece.row) * args.shape.heads + head, first = flat * args.batch.pagesPerTable;
    uint32_t* finished = args.partials.finished + flat * kBundleWarps + half;
    if (column < dim) writeFloats<kWidth>(args.partials.outputs + (first + piece.index) * dim + column, so.o);
    if (lane == 0) {  // both halves write them, each for those that wait for it
        args.partials.maxima[first + piece.index] = so.m;
        args.partials.sums[first + piece.index] = so.l;
    }
    __syncwarp();
    uint32_t before = 0;
    if (lane == 0) before = arrive(finished);
    if (__shfl_sync(kWholeWarp, before, 0) + 1 != static_cast<uint32_t>(cut.pieces)) return false;
    if (lane == 0) *finished = 0;  // for the next launch
    __syncwarp();                  // what lane 0 may see now all may
    joinPieces<kWidth>(args, first, cut.pieces, kSegmentPages / cut.perPiece, from, lane, so);
    return true;
}

// A block's shared memory as its warps see it, and what this warp does: the bundle of heads from `firstHead` of the group on.
template <int kHeads> struct Block {
    uint8_t* shared;
    const Layout& layout;
    int dim, group, lane, firstHead, half;

    __device__ float* floats(int at) const { return reinterpret_cast<float*>(shared + at); }
    // Past the group's end: the last head's, for nothing.
    __device__ float* query(int h) const { return floats(layout.queries) + min(firstHead + h, group - 1) * dim; }
    // [kPageTokens][kHeads]: dot products, then weights.
    __device__ float* weights() const { return floats(layout.weights) + firstHead * kPageTokens; }
    // A head's maximum and sum over the page, at last over the piece.
    __device__ float* pageTop(int h) const { return floats(layout.tops) + 2 * (firstHead + h); }
    __device__ float* output(int h) const { return floats(layout.outputs) + (firstHead + h) * dim; }
};

// Dot products of this warp's half of n keys.
template <KvType kType, int kHeads>
__device__ __forceinline__ void scoreKeys(const Block<kHeads>& block, const uint8_t* keys, int n) {
    const int key = block.half * 32 + block.lane;
    const float* queries[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; h++) queries[h] = block.query(h);
    if (block.half * 32 >= n) return;
    // Keys past the last one are any that may be read; their scores are not used.
    float dots[kHeads];
    dotProducts<kType, kHeads>(keys + min(key, n - 1) * block.layout.keyStride, queries, block.dim, dots);
    writeFloats<kHeads>(block.weights() + key * kHeads, dots);
}

// Weights of this warp's half of the bundle's heads.
template <int kHeads> __device__ __forceinline__ void weighKeys(const Args& args, const Block<kHeads>& block, int n) {
    constexpr int kEach = (kHeads + kBundleWarps - 1) / kBundleWarps;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
        const int h = block.half * kEach + i;
        if (h >= kHeads) break;
        const float2 page = weighScores<kHeads>(block.weights() + h, n, args.scale, block.lane);
        if (block.lane == 0) *reinterpret_cast<float2*>(block.pageTop(h)) = page;
    }
}

// Outputs of n values in this warp's half of the dimensions, joined to what the piece's earlier pages gave; the first page as it is.
template <KvType kType, int kHeads, int kWidth>
__device__ __forceinline__ void joinPage(const Block<kHeads>& block, const uint8_t* values, int n, bool isFirst, Joined<kWidth> (&so)[kHeads]) {
    const int column = min((block.half * 32 + block.lane) * kWidth, block.dim - kWidth);
    float acc[kHeads][kWidth];
    weighValues<kType, kHeads, kWidth>(values + column * (kType == KvType::F32 ? 4 : 2), block.layout.rowBytes, block.weights(), n, acc);
#pragma unroll
    for (int h = 0; h < kHeads; h++) {
        const float2 page = *reinterpret_cast<const float2*>(block.pageTop(h));
        if (isFirst) {
            so[h].m = page.x, so[h].l = page.y;
#pragma unroll
            for (int i = 0; i < kWidth; i++) so[h].o[i] = acc[h][i];
            continue;
        }
        const float top = fmaxf(so[h].m, page.x);
        so[h].add(page.y, acc[h], portableExp(__fsub_rn(so[h].m, top)), portableExp(__fsub_rn(page.x, top)));
        so[h].m = top;
    }
}

// Hands on what the piece gave. A loop over the heads, through shared memory: the code that joins pieces is long, and would be
// fetched anew for every head if it were written out for each.
template <int kHeads, int kWidth>
__device__ __forceinline__ void finishPiece(const Args& args, const Block<kHeads>& block, const Piece& piece, const Cut& cut,
                                            Joined<kWidth> (&so)[kHeads]) {
    const int from = block.half * 32 * kWidth, column = min(from + block.lane * kWidth, block.dim - kWidth);
    float maxima[kHeads], sums[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; h++) {
        maxima[h] = so[h].m, sums[h] = so[h].l;
        writeFloats<kWidth>(block.output(h) + column, so[h].o);
    }
    __syncwarp();
#pragma unroll 1
    for (int h = 0; h < kHeads && block.firstHead + h < block.group; h++) {
        Joined<kWidth> whole;
        whole.m = h == 0 ? maxima[0] : maxima[kHeads - 1], whole.l = h == 0 ? sums[0] : sums[kHeads - 1];
        readFloats<kWidth>(block.output(h) + column, whole.o);
        __syncwarp();
        const int head = piece.kvHead * block.group + block.firstHead + h;
        if (!gather<kWidth>(args, piece, cut, head, block.half, whole, block.lane)) continue;
        finishHead<kWidth>(args, piece.row, head, from, whole.o, piece.keys > 0 ? whole.l : 1.0f, block.output(h), block.lane);
    }
}

// With two buffers, when page i's keys are waited for, its values and the keys of page i + 1 are under way; a buffer is
// filled again as soon as it has been used. A piece without pages goes once round with nothing.
template <KvType kType, int kHeads, int kWidth, int kStages>
__device__ __forceinline__ void attendPiece(const Args& args, const Block<kHeads>& block, const Piece& piece, const Cut& cut) {
    constexpr int kPending = kStages == 2 ? 2 : 0, kUnits = kWidth * (kType == KvType::F32 ? 16 : 8);
    const Layout& layout = block.layout;
    const Feeder<kUnits, kStages> feeder = {args, piece, layout, sharedAddress(block.shared)};
    const float* q = args.q + (static_cast<int64_t>(piece.row) * args.shape.heads + piece.kvHead * block.group) * block.dim;
    const bool hasDims = block.half * 32 * kWidth < block.dim;
    Joined<kWidth> so[kHeads];
    copyBytes(feeder.shared + layout.queries, q, block.group * block.dim * 4);
    if constexpr (kStages > 0) feeder.keys(0);
    if constexpr (kStages == 2) feeder.values(0), feeder.keys(1);
    if constexpr (kStages == 0) closeCopies();

    for (int page = 0; page == 0 || page < piece.pages; page++) {
        const int n = piece.keysOf(page), at = kStages == 2 ? page & 1 : 0;
        waitForCopies<kPending>();
        __syncthreads();
        const uint8_t *keys = block.shared + at * kPageTokens * layout.keyStride,
                      *values = block.shared + layout.values + at * kPageTokens * layout.rowBytes;
        if constexpr (kStages == 0) keys = feeder.place(args.pages.k, page), values = feeder.place(args.pages.v, page);
        if constexpr (kStages > 0) feeder.values(page + kStages - 1);
        scoreKeys<kType, kHeads>(block, keys, n);
        __syncthreads();
        if constexpr (kStages > 0) feeder.keys(page + kStages);
        if (n > 0) weighKeys<kHeads>(args, block, n);
        if constexpr (kStages > 0) waitForCopies<kStages == 2 ? 3 : 1>();
        __syncthreads();
        if (!hasDims) continue;
        joinPage<kType, kHeads, kWidth>(block, values, n, page == 0, so);
        if (page == 0 && cut.perPiece > 1) {
#pragma unroll
            for (int h = 0; h < kHeads; h++) so[h].joinToNothing();
        }
    }
    if (hasDims) finishPiece<kHeads, kWidth>(args, block, piece, cut, so);
    waitForCopies<0>();
    __syncthreads();  // the next piece overwrites what other warps may still read
}

// Block (h, b) takes kv head h of piece b, and of every gridDim.y-th after it, of all the rows' pieces.
template <KvType kType, int kHeads, int kWidth, int kStages>
__global__ void __launch_bounds__(32 * kMaxWarps) attendFewRows(const __grid_constant__ Args args) {
    allowNext();
    waitForPrevious();
    extern __shared__ __align__(16) uint8_t shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slots = static_cast<int>(blockDim.x) / 32 / kBundleWarps * kHeads;
    const Layout layout(kType, args.shape.headDim, args.group, slots, kStages);
    const Block<kHeads> block = {shared, layout, args.shape.headDim, args.group, lane, warp / kBundleWarps * kHeads, warp % kBundleWarps};
    int index = blockIdx.y;
    for (int row = 0; row < static_cast<int>(args.batch.rows); row++) {
        // Volatile, or the second would wait for what the first decides.
        const int position = static_cast<const volatile int32_t*>(args.batch.positions)[row];
        const int sequence = static_cast<const volatile int32_t*>(args.batch.sequence)[row];
        const int32_t* table = args.batch.pageTables + sequence * args.batch.pagesPerTable;
        const Cut cut(args, position);
        for (; index < cut.pieces; index += gridDim.y) {
            const int first = index * cut.perPiece, pages = min(cut.pages - first, cut.perPiece);
            const int pageId = lane < pages ? table[first + lane] : 0;
            const Piece piece = {row, static_cast<int>(blockIdx.x), index, pages, position + 1 - first * kPageTokens, pageId};
            attendPiece<kType, kHeads, kWidth, kStages>(args, block, piece, cut);
        }
        index -= cut.pieces;
    }
}

// --- launching ---------------------------------------------------------------------------------------------------

int slotsOf(int group, int heads) { return (group + heads - 1) / heads * heads; }

template <KvType kType, int kHeads, int kWidth, int kStages> void launchFewRows(Stream& stream, Args args) {
    const int slots = slotsOf(args.group, kHeads), warps = slots / kHeads * kBundleWarps;
    const int bytes = Layout(kType, args.shape.headDim, args.group, slots, kStages).total;
    const auto kernel = attendFewRows<kType, kHeads, kWidth, kStages>;
    if (bytes > 48 * 1024) allowShared(kernel, static_cast<size_t>(bytes));
    // As many blocks as the device can hold, or as there can be pieces: a block goes from piece to piece.
    const int room = deviceAttribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / (bytes + 1024);  // 1 KiB is the system's
    const int64_t perProcessor = std::max(1, std::min(8, room)), processors = stream.device().multiprocessors;
    const int64_t kvHeads = args.shape.kvHeads, pieces = args.batch.rows * args.batch.pagesPerTable;
    const int64_t blocks = std::min(pieces, std::max<int64_t>(1, perProcessor * processors / kvHeads));
    // Without buffers there is no room to join in either.
    const int64_t spread = kStages ? perProcessor * processors / kvHeads : pieces;
    args.shortPages = static_cast<int>(spread / args.batch.rows);
    launch(stream, kernel, dim3(static_cast<unsigned>(kvHeads), static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(32 * warps)),
           static_cast<size_t>(bytes), args);
}

// Two buffers for pages, or one, or none: what a block's shared memory holds.
template <KvType kType, int kHeads, int kWidth> void chooseStages(Stream& stream, const Args& args) {
    const int most = sharedBytesPerBlock(), slots = slotsOf(args.group, kHeads);
    if (Layout(kType, args.shape.headDim, args.group, slots, 2).total <= most) {
        launchFewRows<kType, kHeads, kWidth, 2>(stream, args);
    } else if (Layout(kType, args.shape.headDim, args.group, slots, 1).total <= most) {
        launchFewRows<kType, kHeads, kWidth, 1>(stream, args);
    } else {
        launchFewRows<kType, kHeads, kWidth, 0>(stream, args);
    }
}

// kWidth: the fewest dimensions a lane with which two warps have them all.
template <KvType kType, int kHeads> void chooseWidth(Stream& stream, const Args& args) {
    if (args.shape.headDim <= 64) {
        chooseStages<kType, kHeads, 1>(stream, args);
    } else if (args.shape.headDim <= 128) {
        chooseStages<kType, kHeads, 2>(stream, args);
    } else {
        chooseStages<kType, kHeads, 4>(stream, args);
    }
}

template <KvType kType> void chooseHeads(Stream& stream, const Args& args) {
    args.group == 1 ? chooseWidth<kType, 1>(stream, args) : chooseWidth<kType, 2>(stream, args);
}

}  // namespace

void attentionDecode(Stream& stream, const float* q, const HeadShape& shape, float scale, const BatchRows& batch, const KvPages& pages,
                     void* scratch, const RowOutputs& out) {
    requireAttendable(shape, pages);
    if (out.half.hi || (out.quantized.q && shape.headDim % kContractBlock != 0) ||
        batch.rows * shape.heads * kBundleWarps > int64_t{kDecodeCounterBytes / sizeof(uint32_t)}) {
        throw Error(ErrorKind::Internal, "attentionDecode asked for outputs or rows that it does not have");
    }
    const Partials partials = partialsOver(scratch, batch.rows, shape.heads, batch.pagesPerTable);
    const Args args = {q, shape, scale, batch, pages, partials, out, shape.heads / shape.kvHeads, 0};
    switch (pages.type) {
        case KvType::F32: chooseHeads<KvType::F32>(stream, args); break;
        case KvType::BF16: chooseHeads<KvType::BF16>(stream, args); break;
        case KvType::F16: chooseHeads<KvType::F16>(stream, args); break;
    }
}

}  // namespace sharpi::cuda
