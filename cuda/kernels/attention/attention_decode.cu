// Attention of few rows over a long cache, bit for bit as cpu/kernels/attention.cpp defines it.
//
// That definition computes every page by itself and joins pages in segments of four. So the work can be cut at pages or
// at segments and gives the same bits. A short cache is cut at pages, if the device can hold all of them at once. A
// long one is cut at segments, which saves most of the intermediate writes. A block takes one such piece of one kv head
// of one row, for all query heads of the group, so that keys and values are read once. The warp that finishes the last
// piece of a head joins the pieces, so there is no second kernel. The grid depends on the batch's shape and the table's
// width alone. The number of pages is read from the positions on the device, so that a captured step serves every
// length.
//
// Inside a block, keys and values are copied to shared memory, with two buffers for each, so that the next page arrives
// while one is computed. The dot product is one chain over the dimensions, so each thread computes whole dot products:
// a warp has one head of the group and a lane has two keys, which share each query element (a broadcast). Key rows are
// an odd number of 16-byte units apart, so that eight threads that read eight keys use eight different banks. For the
// outputs, a lane owns kWidth neighbouring dimensions and runs over the keys. Each warp keeps to its own heads, so only
// the copies need barriers. If a device's shared memory cannot hold a page, the same code reads the page in place.
#include <algorithm>

#include "kernels/attention/attention.cuh"
#include "kernels/matmul/mma.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kPageTokens = kAttentionPage;
constexpr int kMaxWarps = 8;

// The results of the pieces: maxima and sums [rows][heads][pages of the table], and headDim floats of output for each.
// Before them lies a count of finished pieces for each row and head, which is zero between launches. workspace.cpp has
// their size, decodeAttentionBytes.
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

// The number of pages that a row at this position sees; 0 for a negative position.
__device__ __forceinline__ int pagesOf(int position) { return (position + kPageTokens) / kPageTokens; }

// --- what a block works on ---------------------------------------------------------------------------------------

// The layout of shared memory, in bytes. There are key and value rows only if pages are copied (stages > 0).
struct Layout {
    int rowBytes, keyStride, values, queries, outputs, weights, tops, sums, total;

    __host__ __device__ Layout(int elementBytes, int headDim, int group, int stages) {
        rowBytes = headDim * elementBytes;
        keyStride = stages ? (rowBytes / 16 | 1) * 16 : rowBytes;
        values = stages * kPageTokens * keyStride;
        queries = values + stages * kPageTokens * rowBytes;
        outputs = queries + group * headDim * 4;
        weights = outputs + (stages ? group * headDim * 4 : 0);
        tops = weights + group * kPageTokens * 4;
        sums = tops + 2 * group * 4;
        total = sums + 2 * group * 4;
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
    int shortPages;  // rows of up to this number of pages are cut at pages
};

// How the pages of a row are cut.
struct Cut {
    int pages, perPiece, pieces;

    // A row that sees no key has one empty piece.
    __device__ Cut(const Args& args, int position) {
        pages = pagesOf(position);
        const bool isShort = pages <= args.shortPages;
        perPiece = isShort ? 1 : kSegmentPages;
        pieces = max(1, isShort ? pages : (pages + kSegmentPages - 1) / kSegmentPages);
    }
};

// One piece of one kv head of one row.
struct Piece {
    int row, kvHead, index, pages, keys;  // keys: those that the row sees from the piece's first page on
    int pageId;                           // of the lane-th page

    __device__ int keysOf(int page) const { return min(keys - page * kPageTokens, kPageTokens); }
};

// What has been joined so far. m and l are the same in every lane, o is the lane's own.
template <int kWidth> struct Joined {
    float m, l, o[kWidth];

    __device__ __forceinline__ void clear() {
        m = __int_as_float(0xff800000), l = 0.0f;
#pragma unroll
        for (int i = 0; i < kWidth; i++) o[i] = 0.0f;
    }
    // Joins this to nothing, as add() would: only -0 changes, to +0.
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

// Copies `rows` rows of up to kUnits 16-byte units, contiguous at `from`, to rows that are `stride` bytes apart. A part
// of a warp copies each row.
template <int kUnits>
__device__ __forceinline__ void copyRows(uint32_t to, int stride, const uint8_t* from, int rows, int rowBytes) {
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

// Copies a piece's pages into their buffers, in the order in which they are used. Every call closes a group of copies,
// even if it copies nothing, so that the number of pending groups tells what has arrived. The whole block calls it.
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

// Dot products of two keys with a query.
template <KvType kType>
__device__ __forceinline__ float2 dotProducts(const uint8_t* first, const uint8_t* second, const float* query,
                                              int headDim) {
    constexpr int kStep = 16 / kKvBytes<kType>;
    float2 dots = {0.0f, 0.0f};
#pragma unroll 4
    for (int d = 0; d < headDim; d += kStep) {
        float keys[2][kStep], q[kStep];
        readElements<kType, kStep>(first, keys[0]);
        readElements<kType, kStep>(second, keys[1]);
        readFloats<kStep>(query + d, q);
        first += 16, second += 16;
#pragma unroll
        for (int i = 0; i < kStep; i++) {
            dots.x = fmaf(q[i], keys[0][i], dots.x);
            dots.y = fmaf(q[i], keys[1][i], dots.y);
        }
    }
    return dots;
}

// Compares the bits of the floats as integers, which have the same order once the bits of negatives are inverted.
__device__ __forceinline__ float largestOfWarp(float x) {
    const auto turned = [](uint32_t bits, bool negative) { return negative ? ~bits : bits | 0x80000000u; };
    const uint32_t bits = __float_as_uint(x), largest = warpMax(turned(bits, bits >> 31));
    return __uint_as_float(largest >> 31 ? largest & 0x7fffffffu : ~largest);
}

// Writes the weights of a page for one head to `weights`. Returns their maximum and sum.
__device__ __forceinline__ float2 weighScores(float2 dots, int n, float scale, float* weights, int lane) {
    const float low = __int_as_float(0xff800000);
    const float first = lane < n ? __fmul_rn(dots.x, scale) : low,
                second = lane + 32 < n ? __fmul_rn(dots.y, scale) : low;
    const float top = largestOfWarp(fmaxf(first, second));
    const float p = portableExp(__fsub_rn(first, top)), r = portableExp(__fsub_rn(second, top));
    weights[lane] = p;
    weights[lane + 32] = r;
    return {top, contractTree(__fadd_rn(p, r))};
}

// acc[i] = sum over the n keys of weight * value, in ascending order of keys.
template <KvType kType, int kWidth>
__device__ __forceinline__ void weighValues(const uint8_t* values, int rowBytes, const float* weights, int n,
                                            float (&acc)[kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; i++) acc[i] = 0.0f;
    int j = 0;
#pragma unroll 4
    for (; j + 4 <= n; j += 4) {
        float weight[4];
        readFloats<4>(weights + j, weight);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float value[kWidth];
            readElements<kType, kWidth>(values + k * rowBytes, value);
#pragma unroll
            for (int i = 0; i < kWidth; i++) acc[i] = fmaf(weight[k], value[i], acc[i]);
        }
        values += 4 * rowBytes;
    }
#pragma unroll 1
    for (; j < n; j++, values += rowBytes) {
        float value[kWidth];
        readElements<kType, kWidth>(values, value);
#pragma unroll
        for (int i = 0; i < kWidth; i++) acc[i] = fmaf(weights[j], value[i], acc[i]);
    }
}

// --- a piece -----------------------------------------------------------------------------------------------------

// Writes o / l to every requested output. line: headDim floats of shared memory that belong to this warp. The whole
// warp calls it.
template <int kWidth>
__device__ __forceinline__ void finishHead(const Args& args, int row, int head, const float (&o)[kWidth], float l,
                                           float* line, int lane) {
    const int dim = args.shape.headDim;
    float result[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; i++) result[i] = __fdiv_rn(o[i], l);
    if (lane * kWidth < dim) writeFloats<kWidth>(line + lane * kWidth, result);
    __syncwarp();
    const int64_t cols = static_cast<int64_t>(args.shape.heads) * dim;
    for (int from = 0; from < dim; from += 128) {
        const int column = from + lane * 4;
        const bool valid = column < dim;
        const float4 x = valid ? *reinterpret_cast<const float4*>(line + column) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        const int64_t at = static_cast<int64_t>(head) * dim + column;
        if (args.out.floats && valid) *reinterpret_cast<float4*>(args.out.floats + row * cols + at) = x;
        if (args.out.quantized.q) quantizeQuad(args.out.quantized, row, cols / kContractBlock, at, x, valid);
    }
}

// The factors of 32 neighbouring pieces. Lane i of the warp holds those of the i-th piece.
struct Factors {
    float sum, kept, added;           // for the piece within its segment
    float segmentKept, segmentAdded;  // for its whole segment

    // largest: the maximum of the segments before; becomes that of all. segment: pieces of a segment, 1 or
    // kSegmentPages.
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

// Adds one to the counter and returns its value before. A warp that counts later sees what this warp wrote before, and
// this warp sees what the earlier ones wrote.
__device__ __forceinline__ uint32_t arrive(uint32_t* counter) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter))
                 : "memory");
    return before;
}

// Joins all pieces of a head, in their order. The whole warp calls it.
template <int kWidth>
__device__ __forceinline__ void joinPieces(const Args& args, int64_t first, int pieces, int segment, int lane,
                                           Joined<kWidth>& whole) {
    constexpr int kAhead = kWidth == 8 ? 4 : 64 / kWidth;  // pieces whose outputs are loaded at once
    const int dim = args.shape.headDim, column = min(lane * kWidth, dim - kWidth);
    const float* outputs = args.partials.outputs + first * dim + column;
    const float *maxima = args.partials.maxima + first, *sums = args.partials.sums + first;
    Joined<kWidth> part;
    part.clear();
    whole.clear();
    Factors factors;
    for (int from = 0; from < pieces; from += kAhead) {
        float next[kAhead][kWidth];
#pragma unroll
        for (int i = 0; i < kAhead; i++)
            readWritten<kWidth>(outputs + static_cast<int64_t>(min(from + i, pieces - 1)) * dim, next[i]);
        if (from % 32 == 0) {
            const bool exists = from + lane < pieces;
            const float maximum = exists ? __ldcg(maxima + from + lane) : __int_as_float(0xff800000);
            factors.sum = exists ? __ldcg(sums + from + lane) : 0.0f;
            factors.make(maximum, whole.m, segment, lane);
        }
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            if (from + i >= pieces) break;
            const int at = (from + i) % 32;
            const float sum = __shfl_sync(kWholeWarp, factors.sum, at),
                        segmentKept = __shfl_sync(kWholeWarp, factors.segmentKept, at),
                        segmentAdded = __shfl_sync(kWholeWarp, factors.segmentAdded, at);
            if (segment == 1) {
                whole.add(sum, next[i], segmentKept, segmentAdded);
                continue;
            }
            if (at % segment == 0) part.clear();
            part.add(sum, next[i], __shfl_sync(kWholeWarp, factors.kept, at),
                     __shfl_sync(kWholeWarp, factors.added, at));
            if ((at + 1) % segment == 0 || from + i + 1 == pieces) whole.add(part.l, part.o, segmentKept, segmentAdded);
        }
    }
}

// Stores a piece's result for a head. Returns true for the last of the head's pieces to finish; `so` then holds the
// result of all pieces.
template <int kWidth>
__device__ __forceinline__ bool gather(const Args& args, const Piece& piece, const Cut& cut, int head,
                                       Joined<kWidth>& so, int lane) {
    if (cut.pieces == 1) {
        so.joinToNothing();
        return true;
    }
    const int dim = args.shape.headDim;
    const int64_t flat = static_cast<int64_t>(piece.row) * args.shape.heads + head,
                  first = flat * args.batch.pagesPerTable;
    if (lane * kWidth < dim)
        writeFloats<kWidth>(args.partials.outputs + (first + piece.index) * dim + lane * kWidth, so.o);
    if (lane == 0) {
        args.partials.maxima[first + piece.index] = so.m;
        args.partials.sums[first + piece.index] = so.l;
    }
    __syncwarp();
    uint32_t before = 0;
    if (lane == 0) before = arrive(args.partials.finished + flat);
    if (__shfl_sync(kWholeWarp, before, 0) + 1 != static_cast<uint32_t>(cut.pieces)) return false;
    if (lane == 0) args.partials.finished[flat] = 0;  // for the next launch
    __syncwarp();                                     // what lane 0 sees, all lanes see now
    joinPieces<kWidth>(args, first, cut.pieces, kSegmentPages / cut.perPiece, lane, so);
    return true;
}

// A block's shared memory as its warps see it.
struct Block {
    uint8_t* shared;
    const Layout& layout;
    int dim, group, lane, warp, warps;

    __device__ float* floats(int at) const { return reinterpret_cast<float*>(shared + at); }
    __device__ float* query(int head) const { return floats(layout.queries) + head * dim; }
    __device__ float* weights(int head) const { return floats(layout.weights) + head * kPageTokens; }
    // A head's maximum and sum: those of the page, and those joined so far.
    __device__ float* pageTop(int head) const { return floats(layout.tops) + 2 * head; }
    __device__ float* allTop(int head) const { return floats(layout.sums) + 2 * head; }
};

// Computes the weights of n keys for every head of this warp.
template <KvType kType>
__device__ __forceinline__ void scorePage(const Args& args, const Block& block, const uint8_t* keys, int n) {
    // Lanes past the last key read that key again; their scores are not used.
    const int lane = block.lane, first = min(lane, n - 1), second = min(lane + 32, n - 1),
              stride = block.layout.keyStride;
    for (int head = block.warp; head < block.group; head += block.warps) {
        const float2 dots =
            dotProducts<kType>(keys + first * stride, keys + second * stride, block.query(head), block.dim);
        const float2 page = weighScores(dots, n, args.scale, block.weights(head), lane);
        if (lane == 0) *reinterpret_cast<float2*>(block.pageTop(head)) = page;
    }
}

// Computes the output of n values and joins it to that of the piece's earlier pages. The first page has nothing to
// join.
template <KvType kType, int kWidth>
__device__ __forceinline__ void joinPage(const Block& block, int head, const uint8_t* values, int n, bool isFirst,
                                         Joined<kWidth>& so) {
    const int column = min(block.lane * kWidth, block.dim - kWidth), rowBytes = block.layout.rowBytes;
    float acc[kWidth];
    weighValues<kType, kWidth>(values + column * kKvBytes<kType>, rowBytes, block.weights(head), n, acc);
    const float2 page = *reinterpret_cast<const float2*>(block.pageTop(head));
    if (isFirst) {
        so.m = page.x, so.l = page.y;
#pragma unroll
        for (int i = 0; i < kWidth; i++) so.o[i] = acc[i];
        return;
    }
    const float2 state = *reinterpret_cast<const float2*>(block.allTop(head));
    so.m = state.x, so.l = state.y;
    readFloats<kWidth>(block.floats(block.layout.outputs) + head * block.dim + column, so.o);
    const float top = fmaxf(so.m, page.x);
    so.add(page.y, acc, portableExp(__fsub_rn(so.m, top)), portableExp(__fsub_rn(page.x, top)));
    so.m = top;
}

template <int kWidth>
__device__ __forceinline__ void keepJoined(const Block& block, int head, const Joined<kWidth>& so) {
    __syncwarp();  // every lane has read the state before
    if (block.lane * kWidth < block.dim)
        writeFloats<kWidth>(block.floats(block.layout.outputs) + head * block.dim + block.lane * kWidth, so.o);
    if (block.lane == 0) *reinterpret_cast<float2*>(block.allTop(head)) = {so.m, so.l};
    __syncwarp();
}

// With two buffers, page i's values and the keys of page i + 1 are still in flight when its keys have arrived. A single
// buffer is refilled as soon as it has been used. A piece without pages runs the loop once, with no keys.
template <KvType kType, int kWidth, int kStages>
__device__ __forceinline__ void attendPiece(const Args& args, const Block& block, const Piece& piece, const Cut& cut) {
    constexpr int kPending = kStages == 2 ? 2 : 0, kUnits = 2 * kWidth * kKvBytes<kType>;
    const Layout& layout = block.layout;
    const Feeder<kUnits, kStages> feeder = {args, piece, layout, sharedAddress(block.shared)};
    const int firstHead = piece.kvHead * block.group;
    const float* q = args.q + (static_cast<int64_t>(piece.row) * args.shape.heads + firstHead) * block.dim;
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
        if (n > 0) scorePage<kType>(args, block, keys, n);
        if constexpr (kStages > 0) {
            waitForCopies<kPending>();
            __syncthreads();
            feeder.keys(page + kStages);
        } else {
            __syncwarp();
        }
        for (int head = block.warp; head < block.group; head += block.warps) {
            Joined<kWidth> so;
            joinPage<kType, kWidth>(block, head, values, n, page == 0, so);
            if (page == 0 && cut.perPiece > 1) so.joinToNothing();
            if (page + 1 < piece.pages) {
                keepJoined<kWidth>(block, head, so);
            } else if (gather<kWidth>(args, piece, cut, firstHead + head, so, block.lane)) {
                finishHead<kWidth>(args, piece.row, firstHead + head, so.o, n > 0 ? so.l : 1.0f, block.query(head),
                                   block.lane);
            }
        }
    }
    waitForCopies<0>();
    __syncthreads();  // the next piece overwrites what other warps may still read
}

// Block (h, b) computes kv head h of piece b and of every gridDim.y-th piece after it, counting the pieces of all rows.
template <KvType kType, int kWidth, int kStages>
__global__ void __launch_bounds__(32 * kMaxWarps) attendFewRows(const Args args) {
    allowNext();
    waitForPrevious();
    extern __shared__ __align__(16) uint8_t shared[];
    const Layout layout(kKvBytes<kType>, args.shape.headDim, args.group, kStages);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const Block block = {shared, layout, args.shape.headDim, args.group, lane, warp, warps};
    int index = blockIdx.y;
    for (int row = 0; row < static_cast<int>(args.batch.rows); row++) {
        // Volatile: both loads are issued at once, instead of the second waiting for what the first decides.
        const int position = static_cast<const volatile int32_t*>(args.batch.positions)[row];
        const int sequence = static_cast<const volatile int32_t*>(args.batch.sequence)[row];
        const int32_t* table = args.batch.pageTables + sequence * args.batch.pagesPerTable;
        const Cut cut(args, position);
        for (; index < cut.pieces; index += gridDim.y) {
            const int first = index * cut.perPiece, pages = min(cut.pages - first, cut.perPiece);
            const int pageId = lane < pages ? table[first + lane] : 0;
            const Piece piece = {row,   static_cast<int>(blockIdx.x),       index,
                                 pages, position + 1 - first * kPageTokens, pageId};
            attendPiece<kType, kWidth, kStages>(args, block, piece, cut);
        }
        index -= cut.pieces;
    }
}

// --- launching ---------------------------------------------------------------------------------------------------

template <KvType kType, int kWidth, int kStages> void launchFewRows(Stream& stream, Args args) {
    const int bytes = Layout(kKvBytes<kType>, args.shape.headDim, args.group, kStages).total,
              warps = std::min(args.group, kMaxWarps);
    const auto kernel = attendFewRows<kType, kWidth, kStages>;
    if (bytes > 48 * 1024) allowShared(kernel, static_cast<size_t>(bytes));
    // As many blocks as the device can hold, but no more than there can be pieces: a block goes from piece to piece.
    const int room = static_cast<int>(stream.device().sharedPerMultiprocessor) / (bytes + kReservedShared);
    const int64_t perProcessor = std::max(1, std::min(16, room)), processors = stream.device().multiprocessors;
    const int64_t kvHeads = args.shape.kvHeads, pieces = args.batch.rows * args.batch.pagesPerTable;
    const int64_t blocks = std::min(pieces, std::max<int64_t>(1, perProcessor * processors / kvHeads));
    // Without buffers there is no room in shared memory to join pages either, so every page is a piece.
    const int64_t spread = kStages ? std::min<int64_t>(perProcessor, 2) * processors / kvHeads : pieces;
    args.shortPages = static_cast<int>(spread / args.batch.rows);
    launch(stream, kernel, dim3(static_cast<unsigned>(kvHeads), static_cast<unsigned>(blocks)),
           dim3(static_cast<unsigned>(32 * warps)), static_cast<size_t>(bytes), args);
}

// Takes two buffers for pages, one or none, whatever fits in a block's shared memory.
template <KvType kType, int kWidth> void chooseStages(Stream& stream, const Args& args) {
    const int most = static_cast<int>(stream.device().sharedPerBlock);
    if (Layout(kKvBytes<kType>, args.shape.headDim, args.group, 2).total <= most) {
        launchFewRows<kType, kWidth, 2>(stream, args);
    } else if (Layout(kKvBytes<kType>, args.shape.headDim, args.group, 1).total <= most) {
        launchFewRows<kType, kWidth, 1>(stream, args);
    } else {
        launchFewRows<kType, kWidth, 0>(stream, args);
    }
}

// kWidth: the smallest number of dimensions for each lane with which 32 lanes cover them all.
template <KvType kType> void chooseWidth(Stream& stream, const Args& args) {
    if (args.shape.headDim <= 64) {
        chooseStages<kType, 2>(stream, args);
    } else if (args.shape.headDim <= 128) {
        chooseStages<kType, 4>(stream, args);
    } else {
        chooseStages<kType, 8>(stream, args);
    }
}

}  // namespace

void attentionDecode(Stream& stream, const float* q, const HeadShape& shape, const AttentionRule& rule,
                     const BatchRows& batch, const KvPages& pages, void* scratch, const RowOutputs& out) {
    requireAttendable(shape, pages);
    if (out.half.hi || (out.quantized.q && shape.headDim % kContractBlock != 0) ||
        batch.rows * shape.heads > int64_t{kDecodeCounterBytes / sizeof(uint32_t)}) {
        throw Error(ErrorKind::Internal, "attentionDecode cannot write these outputs, or not for this number of rows");
    }
    const Partials partials = partialsOver(scratch, batch.rows, shape.heads, batch.pagesPerTable);
    const Args args = {q, shape, rule.scale, batch, pages, partials, out, shape.heads / shape.kvHeads, 0};
    withKvType(pages.type, [&](auto tag) { chooseWidth<decltype(tag)::kType>(stream, args); });
}

}  // namespace sharpi::cuda
