// The decode kernel and how it is launched. See attention_decode.cu.
#pragma once

#include <algorithm>
#include <string>

#include "kernels/attention/decode_page.cuh"

namespace sharpi::cuda::decode {

constexpr int kMaxWarps = 8;

// Writes o / l to every requested output. line: headDim floats of shared memory that belong to this warp. The whole
// warp calls it.
template <int kWidth>
__device__ __forceinline__ void finishHead(const Args& args, int row, int head, const float (&o)[kWidth], float l,
                                           float* line, int lane) {
    const int dim = args.shape.headDim;
    const Columns<kWidth> columns = {lane, dim};
    float result[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; i++) result[i] = __fdiv_rn(o[i], l);
    columns.write(line, result);
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

// readColumns for floats that other blocks wrote in this launch.
template <int kWidth>
__device__ __forceinline__ void readWrittenColumns(const float* at, int apart, float (&out)[kWidth]) {
    forRuns<kWidth>(apart, out,
                    [&](int offset, auto& run) { readWritten<(kWidth < 8 ? kWidth : 8)>(at + offset, run); });
}

// Joins the pieces of a head in the slots [begin, end), in their order. first: its first slot. The whole warp calls it.
template <int kWidth, bool kPlain>
__device__ __forceinline__ void joinPieces(const Args& args, int64_t first, int begin, int end, int segment, int lane,
                                           Joined<kWidth>& whole) {
    constexpr int kAhead = kWidth == 16 ? 2 : kWidth == 8 ? 4 : 64 / kWidth;  // pieces whose outputs are loaded at once
    const int dim = args.shape.headDim;
    const Columns<kWidth> columns = {lane, dim};
    const float* outputs = args.partials.outputs + first * dim + columns.first();
    const float *maxima = args.partials.maxima + first, *sums = args.partials.sums + first;
    Joined<kWidth> part;
    part.clear();
    whole.clear();
    Factors factors;
    for (int from = 0; from < end; from += kAhead) {
        float next[kAhead][kWidth];
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            const int slot = kPlain ? min(from + i, end - 1) : max(begin, min(from + i, end - 1));
            readWrittenColumns<kWidth>(outputs + static_cast<int64_t>(slot) * dim, columns.apart(), next[i]);
        }
        if (from % 32 == 0) {
            const bool exists = from + lane < end && (kPlain || from + lane >= begin);
            const float maximum = exists ? __ldcg(maxima + from + lane) : __int_as_float(0xff800000);
            factors.sum = exists ? __ldcg(sums + from + lane) : 0.0f;
            factors.make(maximum, whole.m, segment, lane);
        }
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            if (from + i >= end) break;
            if (!kPlain && from + i < begin) continue;
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
            if ((at + 1) % segment == 0 || from + i + 1 == end) whole.add(part.l, part.o, segmentKept, segmentAdded);
        }
    }
}

// Stores a piece's result for a head. Returns true for the last of the head's pieces to finish; `so` then holds the
// result of all pieces.
template <int kWidth, bool kPlain>
__device__ __forceinline__ bool gather(const Args& args, const Piece& piece, const Cut<kPlain>& cut, int head,
                                       Joined<kWidth>& so, int lane) {
    if (cut.pieces == 1) {
        so.joinToNothing();
        return true;
    }
    const int dim = args.shape.headDim;
    const int64_t flat = static_cast<int64_t>(piece.row) * args.shape.heads + head,
                  first = flat * (kPlain ? args.batch.pagesPerTable : args.slots),
                  slot = first + cut.firstSlot() + piece.index;
    Columns<kWidth>{lane, dim}.write(args.partials.outputs + slot * dim, so.o);
    if (lane == 0) {
        args.partials.maxima[slot] = so.m;
        args.partials.sums[slot] = so.l;
    }
    __syncwarp();
    uint32_t before = 0;
    if (lane == 0) before = arrive(args.partials.finished + flat);
    if (__shfl_sync(kWholeWarp, before, 0) + 1 != static_cast<uint32_t>(cut.pieces)) return false;
    if (lane == 0) args.partials.finished[flat] = 0;  // for the next launch
    __syncwarp();                                     // what lane 0 sees, all lanes see now
    joinPieces<kWidth, kPlain>(args, first, cut.firstSlot(), cut.firstSlot() + cut.pieces, kSegmentPages / cut.perPiece,
                               lane, so);
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

// Computes the weights of the keys [begin, n) for every head of this warp.
template <KvType kType, bool kPlain>
__device__ __forceinline__ void scorePage(const Args& args, const Block& block, const uint8_t* keys, int begin, int n) {
    // Lanes past the last key read that key again; their scores are not used.
    const int lane = block.lane, first = min(lane, n - 1), second = min(lane + 32, n - 1),
              stride = block.layout.keyStride;
    for (int head = block.warp; head < block.group; head += block.warps) {
        const float2 dots =
            dotProducts<kType>(keys + first * stride, keys + second * stride, block.query(head), block.dim);
        const float2 page = weighScores<kPlain>(dots, begin, n, args.rule, block.weights(head), lane);
        if (lane == 0) *reinterpret_cast<float2*>(block.pageTop(head)) = page;
    }
}

// Computes the output of the values [begin, n) and joins it to that of the piece's earlier pages. The first page has
// nothing to join.
template <KvType kType, int kWidth, bool kPlain>
__device__ __forceinline__ void joinPage(const Block& block, int head, const uint8_t* values, int begin, int n,
                                         bool isFirst, Joined<kWidth>& so) {
    const Columns<kWidth> columns = {block.lane, block.dim};
    const int column = columns.first(), apart = columns.apart();
    float acc[kWidth];
    weighValues<kType, kWidth, kPlain>(values + column * kKvBytes<kType>, apart, block.layout.rowBytes,
                                       block.weights(head), begin, n, acc);
    const float2 page = *reinterpret_cast<const float2*>(block.pageTop(head));
    if (isFirst) {
        so.m = page.x, so.l = page.y;
#pragma unroll
        for (int i = 0; i < kWidth; i++) so.o[i] = acc[i];
        return;
    }
    const float2 state = *reinterpret_cast<const float2*>(block.allTop(head));
    so.m = state.x, so.l = state.y;
    readColumns<KvType::F32, kWidth>(
        reinterpret_cast<const uint8_t*>(block.floats(block.layout.outputs) + head * block.dim + column), apart, so.o);
    const float top = fmaxf(so.m, page.x);
    so.add(page.y, acc, portableExp(__fsub_rn(so.m, top)), portableExp(__fsub_rn(page.x, top)));
    so.m = top;
}

template <int kWidth>
__device__ __forceinline__ void keepJoined(const Block& block, int head, const Joined<kWidth>& so) {
    __syncwarp();  // every lane has read the state before
    Columns<kWidth>{block.lane, block.dim}.write(block.floats(block.layout.outputs) + head * block.dim, so.o);
    if (block.lane == 0) *reinterpret_cast<float2*>(block.allTop(head)) = {so.m, so.l};
    __syncwarp();
}

// With two buffers, page i's values and the keys of page i + 1 are still in flight when its keys have arrived. A single
// buffer is refilled as soon as it has been used. A piece without pages runs the loop once, with no keys.
template <KvType kType, int kWidth, int kStages, bool kPlain>
__device__ __forceinline__ void attendPiece(const Args& args, const Block& block, const Piece& piece,
                                            const Cut<kPlain>& cut) {
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
        const int n = piece.keysOf(page), begin = kPlain || page > 0 ? 0 : piece.hidden;
        const int at = kStages == 2 ? page & 1 : 0;
        waitForCopies<kPending>();
        __syncthreads();
        const uint8_t *keys = block.shared + at * kPageTokens * layout.keyStride,
                      *values = block.shared + layout.values + at * kPageTokens * layout.rowBytes;
        if constexpr (kStages == 0) keys = feeder.place(args.pages.k, page), values = feeder.place(args.pages.v, page);
        if constexpr (kStages > 0) feeder.values(page + kStages - 1);
        if (n > 0) scorePage<kType, kPlain>(args, block, keys, begin, n);
        if constexpr (kStages > 0) {
            waitForCopies<kPending>();
            __syncthreads();
            feeder.keys(page + kStages);
        } else {
            __syncwarp();
        }
        for (int head = block.warp; head < block.group; head += block.warps) {
            Joined<kWidth> so;
            joinPage<kType, kWidth, kPlain>(block, head, values, begin, n, page == 0, so);
            if (page == 0 && cut.perPiece > 1) so.joinToNothing();
            if (page + 1 < piece.pages) {
                keepJoined<kWidth>(block, head, so);
            } else if (gather<kWidth>(args, piece, cut, firstHead + head, so, block.lane)) {
                if (!kPlain && args.rule.sinks && n > 0) so.addSink(args.rule.sinks[firstHead + head]);
                finishHead<kWidth>(args, piece.row, firstHead + head, so.o, n > 0 ? so.l : 1.0f, block.query(head),
                                   block.lane);
            }
        }
    }
    waitForCopies<0>();
    __syncthreads();  // the next piece overwrites what other warps may still read
}

// Block (h, b) computes kv head h of piece b and of every gridDim.y-th piece after it, counting the pieces of all rows.
template <KvType kType, int kWidth, int kStages, bool kPlain>
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
        const Cut<kPlain> cut(args, position);
        for (; index < cut.pieces; index += gridDim.y) {
            const int first = cut.begin(index), pages = cut.pagesFrom(first);
            const int keys = position + 1 - first * kPageTokens, hidden = max(0, cut.firstKey - first * kPageTokens);
            const int pageId = lane < pages ? table[first + lane] : 0;
            const Piece piece = {row, static_cast<int>(blockIdx.x), index, pages, keys, hidden, pageId};
            attendPiece<kType, kWidth, kStages, kPlain>(args, block, piece, cut);
        }
        index -= cut.pieces;
    }
}

// --- launching ---------------------------------------------------------------------------------------------------

// pages: the most that a row sees.
template <KvType kType, int kWidth, int kStages, bool kPlain> void launchFewRows(Stream& stream, Args args, int pages) {
    const int bytes = Layout(kKvBytes<kType>, args.shape.headDim, args.group, kStages).total,
              warps = std::min(args.group, kMaxWarps);
    const auto kernel = attendFewRows<kType, kWidth, kStages, kPlain>;
    if (bytes > 48 * 1024) allowShared(kernel, static_cast<size_t>(bytes));
    // As many blocks as the device can hold, but no more than there can be pieces: a block goes from piece to piece.
    const int room = static_cast<int>(stream.device().sharedPerMultiprocessor) / (bytes + kReservedShared);
    const int64_t perProcessor = std::max(1, std::min(16, room)), processors = stream.device().multiprocessors;
    const int64_t kvHeads = args.shape.kvHeads, pieces = args.batch.rows * pages;
    const int64_t blocks = std::min(pieces, std::max<int64_t>(1, perProcessor * processors / kvHeads));
    // Without buffers there is no room in shared memory to join pages either, so every page is a piece.
    const int64_t spread = kStages ? std::min<int64_t>(perProcessor, 2) * processors / kvHeads : pieces;
    args.shortPages = static_cast<int>(spread / args.batch.rows);
    launch(stream, kernel, dim3(static_cast<unsigned>(kvHeads), static_cast<unsigned>(blocks)),
           dim3(static_cast<unsigned>(32 * warps)), static_cast<size_t>(bytes), args);
}

// Takes two buffers for pages, one or none, whatever fits in a block's shared memory.
template <KvType kType, int kWidth, bool kPlain> void chooseStages(Stream& stream, const Args& args, int pages) {
    const int most = static_cast<int>(stream.device().sharedPerBlock);
    if (Layout(kKvBytes<kType>, args.shape.headDim, args.group, 2).total <= most) {
        launchFewRows<kType, kWidth, 2, kPlain>(stream, args, pages);
    } else if (Layout(kKvBytes<kType>, args.shape.headDim, args.group, 1).total <= most) {
        launchFewRows<kType, kWidth, 1, kPlain>(stream, args, pages);
    } else if (Layout(kKvBytes<kType>, args.shape.headDim, args.group, 0).total <= most) {
        launchFewRows<kType, kWidth, 0, kPlain>(stream, args, pages);
    } else {
        throw Error(ErrorKind::InvalidArgument, "attention with " + std::to_string(args.group) + " heads of " +
                                                    std::to_string(args.shape.headDim) +
                                                    " elements over one needs more shared memory than this GPU has");
    }
}

// kWidth: the smallest number of dimensions for each lane with which 32 lanes cover them all.
template <KvType kType, bool kPlain> void chooseWidth(Stream& stream, const Args& args, int pages) {
    if (args.shape.headDim <= 64) {
        chooseStages<kType, 2, kPlain>(stream, args, pages);
    } else if (args.shape.headDim <= 128) {
        chooseStages<kType, 4, kPlain>(stream, args, pages);
    } else if (kPlain || args.shape.headDim <= 256) {
        chooseStages<kType, 8, kPlain>(stream, args, pages);
    } else {
        if constexpr (!kPlain) chooseStages<kType, 16, kPlain>(stream, args, pages);
    }
}

// Each in a source of its own. launchPlain is for heads of up to 256 elements.
void launchPlain(Stream& stream, const Args& args, int pages);
void launchRuled(Stream& stream, const Args& args, int pages);

}  // namespace sharpi::cuda::decode
