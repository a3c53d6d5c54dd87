// How the decode kernel joins pages to segments and segments to a head's result. See attention_decode.cu.
#pragma once

#include "kernels/attention/decode/page.cuh"

namespace sharpi::cuda::decode {

// The dimensions of a head's values that a lane owns among the 32 * kWidth from `from` on. A lane past the end of the
// head reads the head's last run, and writes none.
template <int kWidth> struct Columns {
    int at;
    bool isOwn;

    __device__ Columns(int from, int lane, int dim)
        : at(min(from + lane * kWidth, dim - kWidth)), isOwn(from + lane * kWidth < dim) {}
    __device__ __forceinline__ void write(float* to, const float (&values)[kWidth]) const {
        if (isOwn) writeFloats<kWidth>(to + at, values);
    }
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
    __device__ __forceinline__ void addIf(bool exists, float sum, const float (&outputs)[kWidth], float kept,
                                          float added) {
        Joined next = *this;
        next.add(sum, outputs, kept, added);
        l = exists ? next.l : l;
#pragma unroll
        for (int i = 0; i < kWidth; i++) o[i] = exists ? next.o[i] : o[i];
    }
    // Joins a score that has no value.
    __device__ __forceinline__ void addSink(float sink) {
        const float top = fmaxf(m, sink), kept = portableExp(__fsub_rn(m, top));
        l = __fadd_rn(__fmul_rn(l, kept), portableExp(__fsub_rn(sink, top)));
#pragma unroll
        for (int i = 0; i < kWidth; i++) o[i] = __fmul_rn(o[i], kept);
    }
};

// The factors of 32 neighbouring pieces. Lane i of the warp holds those of the i-th piece.
struct Factors {
    float sum, kept, added;           // for the piece within its segment
    float segmentKept, segmentAdded;  // for its whole segment

    // largest: the maximum of the segments before; becomes that of all. segment: the pieces of each.
    template <int segment> __device__ __forceinline__ void make(float maximum, float& largest, int lane) {
        float top = maximum;
#pragma unroll
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
#pragma unroll
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

// --- a head's results in device memory -----------------------------------------------------------------------------

// One head of one row, and its slots.
struct Head {
    int row, head;
    int64_t first;  // its first slot

    __device__ Head(const Args& args, const Piece& piece, int query) : row(args.rowOf(query)) {
        head = piece.kvHead * args.group + query - row * args.group;
        row += piece.run.row;
        first = (static_cast<int64_t>(row) * args.shape.heads + head) * (args.ring.slots + 1);
    }
};

template <class K>
__device__ __forceinline__ void writeSlot(const Args& args, int64_t slot, const Joined<K::kWidth>& so,
                                          const Columns<K::kWidth>& columns, bool isFirstLane) {
    columns.write(args.partials.outputs + slot * K::dim(args.shape), so.o);
    if (isFirstLane) args.partials.maxima[slot] = so.m, args.partials.sums[slot] = so.l;
}

// Joins the pieces in the slots [begin, end) of a head, in their order, to `whole`. Slot 0 begins a segment of kSegment
// pieces. staged: the warp's region. The whole warp calls it. The loop is short on purpose: with few pieces, a warp
// that runs through unrolled code mostly waits for its instructions.
template <class K, int kSegment>
__device__ __forceinline__ void joinSlots(const Args& args, int64_t head, int begin, int end, int column, int lane,
                                          const float* staged, Joined<K::kWidth>& whole) {
    constexpr int kWidth = K::kWidth, kQuad = kSegmentPages;
    const int dim = K::dim(args.shape), ahead = args.layout.joined;
    const float* outputs = args.partials.outputs + head * dim;
    const float *maxima = args.partials.maxima + head, *sums = args.partials.sums + head;
    Factors factors;
#pragma unroll 1
    for (int from = begin & -ahead; from < end; from += ahead) {
        const int first = max(begin, from), last = min(end, from + ahead);
        __syncwarp();  // what was staged before has been read
        copyBytes<32>(sharedAddress(staged), outputs + static_cast<int64_t>(first) * dim, (last - first) * dim * 4,
                      lane);
        closeCopies();
        if (from % 32 == 0 || from <= begin) {
            const int slot = from / 32 * 32 + lane;
            const bool exists = slot >= begin && slot < end;
            const float maximum = exists ? __ldcg(maxima + slot) : __int_as_float(0xff800000);
            factors.sum = exists ? __ldcg(sums + slot) : 0.0f;
            factors.make<kSegment>(maximum, whole.m, lane);
        }
        waitForCopies<0>();
        __syncwarp();
#pragma unroll 1
        for (int quad = first / kQuad * kQuad; quad < last; quad += kQuad) {
            Joined<kWidth> part;
            part.clear();
#pragma unroll
            for (int i = 0; i < kQuad; i++) {
                const int slot = quad + i, at = slot % 32;
                if (slot < first || slot >= last) continue;
                float output[kWidth];
                readFloats<kWidth>(staged + (slot - first) * dim + column, output);
                const float sum = __shfl_sync(kWholeWarp, factors.sum, at);
                if (kSegment == 1)
                    whole.add(sum, output, __shfl_sync(kWholeWarp, factors.segmentKept, at),
                              __shfl_sync(kWholeWarp, factors.segmentAdded, at));
                else
                    part.add(sum, output, __shfl_sync(kWholeWarp, factors.kept, at),
                             __shfl_sync(kWholeWarp, factors.added, at));
            }
            if (kSegment == 1) continue;
            const int at = quad % 32;  // the segment's factors are the same in all of its lanes
            whole.add(part.l, part.o, __shfl_sync(kWholeWarp, factors.segmentKept, at),
                      __shfl_sync(kWholeWarp, factors.segmentAdded, at));
        }
    }
    __syncwarp();  // the region may be written again
}

// Puts o / l on `line`, headDim floats of shared memory that belong to this warp.
template <int kWidth>
__device__ __forceinline__ void divide(const Args& args, const Head& head, Joined<kWidth>& so, bool seesKeys,
                                       const Columns<kWidth>& columns, float* line) {
    if (args.rule.sinks && seesKeys) so.addSink(args.rule.sinks[head.head]);
    const float sum = seesKeys ? so.l : 1.0f;
#pragma unroll
    for (int i = 0; i < kWidth; i++) so.o[i] = __fdiv_rn(seesKeys ? so.o[i] : 0.0f, sum);
    columns.write(line, so.o);
}

// Writes a head's line to every requested output. The whole warp calls it.
template <class K>
__device__ __forceinline__ void writeHead(const Args& args, const Head& head, const float* line, int lane) {
    __syncwarp();
    const int dim = K::dim(args.shape);
    const int64_t cols = static_cast<int64_t>(args.shape.heads) * dim, row = head.row,
                  before = static_cast<int64_t>(head.head) * dim;
#pragma unroll 1
    for (int from = 0; from < dim; from += 128) {
        const int column = from + lane * 4;
        const bool valid = column < dim;
        const float4 x = valid ? *reinterpret_cast<const float4*>(line + column) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        const int64_t at = before + column;
        if (args.out.floats && valid) *reinterpret_cast<float4*>(args.out.floats + row * cols + at) = x;
        if (args.out.quantized.q) quantizeQuad(args.out.quantized, row, cols / kContractBlock, at, x, valid);
    }
    __syncwarp();  // the line may be written again
}

// --- in which order the blocks join --------------------------------------------------------------------------------

// Adds one to the counter and returns its value before. A thread that counts later sees what this block wrote before a
// barrier, and this thread sees what the earlier ones wrote.
__device__ __forceinline__ uint32_t arrive(uint32_t* counter) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter))
                 : "memory");
    return before;
}

__device__ __forceinline__ void publish(uint32_t* counter, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(counter)), "r"(value) : "memory");
}

// Returns once the counter has reached `value`.
__device__ __forceinline__ void waitUntil(const uint32_t* counter, uint32_t value) {
    for (;;) {
        uint32_t now;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                     : "=r"(now)
                     : "l"(__cvta_generic_to_global(counter))
                     : "memory");
        if (now >= value) return;
        __nanosleep(100);
    }
}

// The pieces of one kv head of a run, or of a part of it. They are joined in batches, in their order, by the block that
// finishes a batch. A batch's slots are used again once it has been joined. Blocks take pieces in ascending order, so
// whatever a block waits for is in the hands of a block that took it before: the oldest of them never waits.
struct Chain {
    uint32_t *joined, *arrived;  // arrived: of this piece's batch
    int batch, first, pieces;    // first: the batch's first segment; pieces: those of the batch
    bool isLast;

    __device__ Chain(const Args& args, const Piece& piece) {
        const int shift = 31 - __clz(args.ring.batch), batches = args.ring.slots >> shift;
        joined = args.partials.counters + 1 + piece.chain * (1 + batches);
        batch = piece.run.isShort ? 0 : piece.index >> shift;
        arrived = joined + 1 + (batch & (batches - 1));
        first = batch << shift;
        pieces = piece.run.isShort ? piece.pieces : min(piece.pieces - first, args.ring.batch);
        isLast = first + pieces == piece.pieces;
    }
    // Returns once this batch's slots are free. One thread calls it.
    __device__ void awaitSlots(const Args& args) const {
        const int batches = args.ring.slots / args.ring.batch;
        if (batch >= batches) waitUntil(joined, batch - batches + 1);
    }
    // One thread of the block says that the piece is finished. Returns true for the batch's last piece, once the
    // batches before have been joined.
    __device__ bool finish() const {
        if (arrive(arrived) + 1 != static_cast<uint32_t>(pieces)) return false;
        *arrived = 0;
        if (batch > 0) waitUntil(joined, batch);
        return true;
    }
    // One thread says that the batch has been joined. Nobody waits for the last one.
    __device__ void close() const {
        if (!isLast) publish(joined, batch + 1);
        else if (batch > 0) *joined = 0;
    }
};

// Joins the batch of this piece to the earlier ones, for one query. staged: as for joinSlots(). line: as for divide().
// The whole warp calls it.
template <class K>
__device__ __forceinline__ void joinBatch(const Args& args, const Piece& piece, const Chain& chain, int query, int2 row,
                                          const float* staged, float* line, int lane) {
    const Head head(args, piece, query);
    constexpr int kWidth = K::kWidth;
    const int dim = K::dim(args.shape), perPiece = piece.run.isShort ? 1 : kSegmentPages;
    // Slots begin at the run's first segment. Those of the row are [begin, end), those of the batch [first, last).
    const int origin = piece.run.firstSegment() * kSegmentPages;
    const int begin = (row.x / kPageTokens - origin) / perPiece,
              end = ((row.y + kPageTokens - 1) / kPageTokens - origin + perPiece - 1) / perPiece;
    const int first = piece.run.isShort ? begin : max(begin, chain.first),
              last = piece.run.isShort ? end : min(end, chain.first + chain.pieces);
    const int turn = piece.run.isShort ? 0 : chain.first & -args.ring.slots;
    if (first >= last && !chain.isLast) return;
#pragma unroll 1
    for (int from = 0; from < dim; from += 32 * kWidth) {
        const Columns<kWidth> columns(from, lane, dim);
        const int64_t kept = head.first + args.ring.slots;
        Joined<kWidth> so;
        so.clear();
        if (begin < first || first >= last) {  // joined before
            so.m = __ldcg(args.partials.maxima + kept), so.l = __ldcg(args.partials.sums + kept);
            readWritten<kWidth>(args.partials.outputs + kept * dim + columns.at, so.o);
        }
        if (first < last && piece.run.isShort)
            joinSlots<K, kSegmentPages>(args, head.first, first, last, columns.at, lane, staged, so);
        else if (first < last)
            joinSlots<K, 1>(args, head.first, first - turn, last - turn, columns.at, lane, staged, so);
        if (chain.isLast) divide<kWidth>(args, head, so, true, columns, line);
        else writeSlot<K>(args, kept, so, columns, lane == 0 && from + 32 * kWidth >= dim);  // each round reads them
        __syncwarp();
    }
    if (chain.isLast) writeHead<K>(args, head, line, lane);
}

}  // namespace sharpi::cuda::decode
