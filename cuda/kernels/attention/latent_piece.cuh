// How a block computes a piece of a row's latents: pages one after the other, scores of one while it sums the values of
// the one before. See attention_latent.cu.
#pragma once

#include "kernels/attention/latent_work.cuh"

namespace sharpi::cuda::decode {

// The pages of a piece, and for which heads.
struct LatentPiece {
    int row = 0, batch = 0, firstHead = 0, heads = 0;
    int firstKey = 0, endKey = 0;  // that the row sees
    int firstPage = 0, pages = 0;
    int slot = 0;  // where its results go
    bool isShort = false;
    int entry = 0;  // lane i: the page table's entry of the i-th page

    LatentPiece() = default;
    __device__ LatentPiece(const LatentArgs& args, const LatentBlock& block, const LatentWork& work, int parts)
        : row(work.row), batch(work.batch) {
        const LatentRow of = block.row(row);
        firstHead = work.part * args.heads / parts;
        heads = (work.part + 1) * args.heads / parts - firstHead;
        firstKey = of.first, endKey = of.keys, isShort = of.isShort;
        const int segment = of.firstSegment() + work.piece;
        firstPage = isShort ? of.firstPage() + work.piece : max(of.firstPage(), segment * kSegmentPages);
        pages = min(isShort ? firstPage + 1 : (segment + 1) * kSegmentPages, of.endPage()) - firstPage;
        slot = isShort ? firstPage - of.firstSegment() * kSegmentPages : work.piece & (args.ring.slots - 1);
        const int32_t* table = args.batch.pageTables + of.sequence * args.batch.pagesPerTable;
        if (block.lane < pages) entry = table[firstPage + block.lane];
    }
    // The keys of the i-th page that the row sees.
    __device__ Span span(int i) const { return Span(int2{firstKey, endKey}, firstPage + i); }
    // The whole warp calls it.
    __device__ const uint8_t* page(const LatentArgs& args, int i) const {
        return args.pages.k + static_cast<int64_t>(__shfl_sync(kWholeWarp, entry, i)) * kPageTokens * args.rowBytes;
    }
    // Brings the first page to the L2 cache before it may be read: the last keys may still be written.
    __device__ void prefetch(const LatentArgs& args) const {
        if (pages > 0) prefetchBytes(page(args, 0), span(0).end * args.rowBytes, threadIdx.x, kLatentThreads);
    }
    __device__ int64_t resultOf(const LatentArgs& args, int head) const {
        return args.slots(row, firstHead + head) + slot;
    }
    // Returns once the piece's slots are free. The whole warp calls it.
    __device__ void awaitSlots(const LatentArgs& args, int lane) const {
        const int batches = args.batches();
        if (batch < batches) return;
        if (lane == 0) waitUntil(args.joined(row), static_cast<uint32_t>((batch - batches + 1) * args.joins));
        __syncwarp();
    }
};

// What has been brought to shared memory before a piece begins: its queries, and its first pages.
struct LatentLoaded {
    int slot = 0;  // of the first page
    int pages = 0;
    bool queries = false;
};

// The lines of a page that a row sees, and those before them.
struct LatentLines {
    const uint8_t* from = nullptr;
    int count = 0;

    LatentLines() = default;
    // The whole warp calls it.
    __device__ LatentLines(const LatentArgs& args, const LatentPiece& piece, int page)
        : from(piece.page(args, page)), count(piece.span(page).end) {}
    // Begins to copy lines [begin, end) to a page of shared memory. kWarps warps call it; warp: the number among them.
    template <int kWarps>
    __device__ __forceinline__ void copy(const LatentArgs& args, const LatentBlock& block, int slot, int begin, int end,
                                         int warp) const {
        const uint32_t to = sharedAddress(block.page(slot));
#pragma unroll 1
        for (int line = begin + warp; line < min(end, count); line += kWarps) {
#pragma unroll 3
            for (int at = block.lane * 16; at < args.rowBytes; at += 32 * 16)
                copyChunk(to + line * block.layout.pitch + at, from + line * args.rowBytes + at, true);
        }
    }
};

// A barrier of the warps that sum values.
__device__ __forceinline__ void syncValueWarps() { asm volatile("bar.sync 1, %0;" ::"n"(kValueThreads) : "memory"); }

// --- scores ------------------------------------------------------------------------------------------------------

// The dot products of two keys with kQueries queries. keys: the lane's line; the second key is 32 lines after it.
template <KvType kType, int kQueries>
__device__ __forceinline__ void dotLatents(const uint8_t* keys, int pitch, const float* queries, int dim,
                                           float2 (&dots)[kQueries]) {
    constexpr int kStep = 8;
    const uint8_t* second = keys + 32 * pitch;
#pragma unroll 4
    for (int d = 0; d < dim; d += kStep) {
        float a[kStep], b[kStep];
        readElements<kType, kStep>(keys + d * kKvBytes<kType>, a);
        readElements<kType, kStep>(second + d * kKvBytes<kType>, b);
#pragma unroll
        for (int quad = 0; quad < kStep; quad += 4) {
#pragma unroll
            for (int i = 0; i < kQueries; i++) {
                float q[4];
                readFloats<4>(queries + i * dim + d + quad, q);
#pragma unroll
                for (int x = 0; x < 4; x++) {
                    dots[i].x = fmaf(q[x], a[quad + x], dots[i].x);
                    dots[i].y = fmaf(q[x], b[quad + x], dots[i].y);
                }
            }
        }
    }
}

// --- values ------------------------------------------------------------------------------------------------------

// Sums of values for kHeads heads: kValueWidth dimensions of each.
template <KvType kType, int kHeads> struct LatentSums {
    float acc[kHeads][kValueWidth];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < kHeads; i++) {
#pragma unroll
            for (int x = 0; x < kValueWidth; x++) acc[i][x] = 0.0f;
        }
    }
    // Adds kKeys neighbouring keys, 1 or 4. values: the lane's elements of the first. weights: [heads][64].
    template <int kKeys> __device__ __forceinline__ void add(const uint8_t* values, int pitch, const float* weights) {
        RawRun<kType, kValueWidth> runs[kKeys];
        float value[kKeys][kValueWidth];
#pragma unroll
        for (int k = 0; k < kKeys; k++) runs[k].read(values + k * pitch);
#pragma unroll
        for (int k = 0; k < kKeys; k++) runs[k].floats(value[k]);
#pragma unroll
        for (int i = 0; i < kHeads; i++) {
            float weight[kKeys];
            if constexpr (kKeys == 1) weight[0] = weights[i * kPageTokens];
            else readFloats<kKeys>(weights + i * kPageTokens, weight);
#pragma unroll
            for (int k = 0; k < kKeys; k++) {
#pragma unroll
                for (int x = 0; x < kValueWidth; x++) acc[i][x] = fmaf(weight[k], value[k][x], acc[i][x]);
            }
        }
    }
    // Adds the keys [begin, end) of a page that are also in [from, from + 16), in ascending order.
    __device__ __forceinline__ void addQuarter(const uint8_t* values, int pitch, const float* weights, int from,
                                               const Span& span) {
        if (span.begin <= from && span.end >= from + 16) {
#pragma unroll
            for (int key = 0; key < 16; key += 4) add<4>(values + (from + key) * pitch, pitch, weights + from + key);
            return;
        }
#pragma unroll 1
        for (int key = max(from, span.begin); key < min(from + 16, span.end); key++)
            add<1>(values + key * pitch, pitch, weights + key);
    }
};

// --- a piece -----------------------------------------------------------------------------------------------------

// A piece with up to kQueries heads for each warp of scores. Both kinds of warps go from one barrier to the next
// together: with room for two pages, scores are a page ahead.
template <KvType kType, int kQueries, bool kResident> struct LatentPieceWork {
    static constexpr int kHeads = kScoreWarps * kQueries, kHalf = kHeads / 2;

    const LatentArgs& args;
    const LatentBlock& block;
    const LatentPiece& piece;
    LatentOrder& order;
    LatentLoaded loaded;
    int turn;  // where the warp that takes tickets leaves what comes next

    // What comes after this piece.
    LatentPiece nextPiece = {};

    __device__ int buffers() const { return kResident ? args.layout.pages : 1; }
    __device__ bool isAhead() const { return buffers() > 1; }
    __device__ int slotOf(int page) const { return buffers() > 1 ? (loaded.slot + page) & 1 : 0; }

    __device__ __forceinline__ void takeNext() const {
        if (block.warp == kLatentWarps - 1) order.takeNext(args, block, turn);
    }
    // It has been there since the last barrier.
    __device__ __forceinline__ void findNext() {
        const LatentWork next = block.flags().next[turn];
        if (next.exists && !next.isJoin) nextPiece = LatentPiece(args, block, next, order.parts);
    }
    template <int kThreadsUsed> __device__ __forceinline__ void copyQueries(const LatentPiece& of, int thread) const {
        const auto* from = args.q + (static_cast<int64_t>(of.row) * args.heads + of.firstHead) * args.headDim;
        copyBytes<kThreadsUsed>(sharedAddress(block.queries()), from, of.heads * args.headDim * 4, thread);
    }
    // Ends a step: what was copied has arrived, and everybody has used what may now be overwritten.
    __device__ __forceinline__ static void endStep() {
        closeCopies();
        waitForCopies<0>();
        __syncthreads();
    }

    // Brings what is not there yet. The second page may still be on its way on return.
    __device__ __forceinline__ void begin() const {
        if (!loaded.queries) copyQueries<kLatentThreads>(piece, threadIdx.x);
        if (kResident && loaded.pages == 0 && piece.pages > 0)
            LatentLines(args, piece, 0).copy<kLatentWarps>(args, block, slotOf(0), 0, kPageTokens, block.warp);
        closeCopies();
        if (kResident && isAhead() && loaded.pages < 2 && piece.pages > 1)
            LatentLines(args, piece, 1).copy<kLatentWarps>(args, block, slotOf(1), 0, kPageTokens, block.warp);
        closeCopies();
        waitForCopies<1>();
        __syncthreads();
    }

    // The weights of a page. m, l: in lane i, what has been joined of the warp's i-th head.
    __device__ __forceinline__ void scorePage(int page, float& m, float& l) const {
        const int lane = block.lane, first = block.warp * kQueries, count = min(kQueries, piece.heads - first);
        const uint8_t* stored = kResident ? block.page(slotOf(page)) : piece.page(args, page);
        if (count <= 0) return;
        float2 dots[kQueries], tops[kQueries];
#pragma unroll
        for (int i = 0; i < kQueries; i++) dots[i] = {0.0f, 0.0f};
        dotLatents<kType, kQueries>(stored + lane * block.layout.pitch, block.layout.pitch,
                                    block.queries() + first * args.headDim, args.headDim, dots);
        const Span span = piece.span(page);
        int begin[kQueries], end[kQueries];
#pragma unroll
        for (int i = 0; i < kQueries; i++) begin[i] = span.begin, end[i] = span.end;
        const int at = slotOf(page) * kHeads + first;
        weighScores(dots, begin, end, args.rule, lane, block.weights() + at * kPageTokens, tops);
        float2 own = tops[0];
#pragma unroll
        for (int i = 1; i < kQueries; i++)
            if (lane == i) own = tops[i];
        const float top = fmaxf(m, own.x), kept = page == 0 ? 0.0f : portableExp(__fsub_rn(m, top)),
                    added = portableExp(__fsub_rn(own.x, top));
        m = top;
        l = fmaf(own.y, added, __fmul_rn(l, kept));
        if (lane < count) block.factors()[at + lane] = {kept, added};
    }
    __device__ __forceinline__ void keepSums(float m, float l) const {
        piece.awaitSlots(args, block.lane);
        const int head = block.warp * kQueries + block.lane;
        if (block.lane >= kQueries || head >= piece.heads) return;
        const int64_t to = piece.resultOf(args, head);
        args.partials.maxima[to] = m, args.partials.sums[to] = l;
    }
    __device__ __forceinline__ void runScores() {
        float m = __int_as_float(0xff800000), l = 0.0f;
#pragma unroll 1
        for (int page = 0; page < piece.pages; page++) {
            scorePage(page, m, l);
            if (page + 1 == piece.pages) keepSums(m, l);
            if (!isAhead()) __syncthreads();
            if (!isAhead() && page + 1 == piece.pages)
                findNext(), copyQueries<32 * kScoreWarps>(nextPiece, threadIdx.x);
            endStep();
        }
        if (!isAhead()) return;
        findNext();
        copyQueries<32 * kScoreWarps>(nextPiece, threadIdx.x);
        endStep();
    }

    // Sums a page's values, joins them to `joined`, and brings the page that comes to the same place, a quarter at a
    // time.
    __device__ __forceinline__ void sumPage(int page, float (&joined)[kHalf][kValueWidth]) const {
        const int warp = block.warp - kScoreWarps, first = warp / kSlices * kHalf, slot = slotOf(page);
        const Columns<kValueWidth> columns(warp % kSlices * 32 * kValueWidth, block.lane, args.valueDim);
        const bool isUsed = first < piece.heads && warp % kSlices * 32 * kValueWidth < args.valueDim;
        const uint8_t* values = kResident ? block.page(slot) : piece.page(args, page);
        values += columns.at * kKvBytes<kType>;
        const float* weights = block.weights() + (slot * kHeads + first) * kPageTokens;
        const Span span = piece.span(page);
        // The page after those that have places, of this piece or of the next one.
        const int later = page + buffers() - piece.pages;
        LatentLines lines;
        if (later < 0) lines = LatentLines(args, piece, page + buffers());
        else if (later < nextPiece.pages) lines = LatentLines(args, nextPiece, later);
        if (kResident && page == 0 && piece.pages < buffers() && nextPiece.pages > 0)
            LatentLines(args, nextPiece, 0).copy<kValueWarps>(args, block, slotOf(piece.pages), 0, kPageTokens, warp);
        LatentSums<kType, kHalf> sums;
        sums.clear();
#pragma unroll 1
        for (int from = 0; from < kPageTokens; from += 16) {
            if (isUsed) sums.addQuarter(values, block.layout.pitch, weights, from, span);
            if (!kResident || lines.count <= from) continue;
            syncValueWarps();
            lines.copy<kValueWarps>(args, block, slot, from, from + 16, warp);
        }
        if (!isUsed) return;
        const float2* factors = block.factors() + slot * kHeads + first;
#pragma unroll
        for (int i = 0; i < kHalf; i++) {
            const float2 factor = factors[i];
#pragma unroll
            for (int x = 0; x < kValueWidth; x++)
                joined[i][x] =
                    piece.isShort ? sums.acc[i][x] : fmaf(sums.acc[i][x], factor.y, __fmul_rn(joined[i][x], factor.x));
        }
    }
    __device__ __forceinline__ void keepOutputs(const float (&joined)[kHalf][kValueWidth]) const {
        const int warp = block.warp - kScoreWarps, first = warp / kSlices * kHalf;
        const Columns<kValueWidth> columns(warp % kSlices * 32 * kValueWidth, block.lane, args.valueDim);
        piece.awaitSlots(args, block.lane);
#pragma unroll
        for (int i = 0; i < kHalf; i++) {
            if (first + i < piece.heads)
                columns.write(args.partials.outputs + piece.resultOf(args, first + i) * args.valueDim, joined[i]);
        }
    }
    __device__ __forceinline__ void runValues() {
        float joined[kHalf][kValueWidth];
#pragma unroll
        for (int i = 0; i < kHalf; i++) {
#pragma unroll
            for (int x = 0; x < kValueWidth; x++) joined[i][x] = 0.0f;
        }
        takeNext();
        if (isAhead()) endStep();
#pragma unroll 1
        for (int page = 0; page < piece.pages; page++) {
            if (!isAhead()) __syncthreads();
            if (page == 0) findNext();
            sumPage(page, joined);
            if (page + 1 == piece.pages) keepOutputs(joined);
            endStep();
        }
    }

    // Computes the piece. Afterwards `nextPiece` is what this block does next, if it is a piece, and `loaded` what is
    // there of it.
    __device__ __forceinline__ void run() {
        begin();
        if (piece.pages <= 0) {
            takeNext();
            __syncthreads();
            findNext();
            loaded = {};
        } else {
            if (block.warp < kScoreWarps) runScores();
            else runValues();
            loaded.slot = slotOf(piece.pages);
            loaded.pages = kResident ? min(buffers(), nextPiece.pages) : 0;
            loaded.queries = nextPiece.heads > 0;
        }
        if (threadIdx.x == 0 && block.flags().spread == 0) arrive(args.arrived(piece.row, piece.batch));
    }
};

}  // namespace sharpi::cuda::decode
