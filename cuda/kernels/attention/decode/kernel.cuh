// The decode kernel and how it is launched. See attention_decode.cu.
#pragma once

#include <algorithm>

#include "kernels/attention/decode/deep.cuh"

namespace sharpi::cuda::decode {

// A piece as a block computes it.
template <class K> struct PieceWork {
    static constexpr int kWidth = K::kWidth, kTile = K::kTile, kShare = K::kShare;

    const Args& args;
    const Block& block;
    const Piece& piece;
    int page;           // the warp's
    int64_t pageStart;  // in elements of the cache
    int n;              // keys that some row sees
    int turn;           // where the next piece's ticket goes

    __device__ PieceWork(const Args& a, const Block& b, const Piece& p, int next)
        : args(a), block(b), piece(p), page(p.page(b.warp)), pageStart(0), n(0), turn(next) {
        if (!piece.has(page)) return;
        pageStart = piece.startOf(args, page);
        n = min(kPageTokens, piece.run.keys - page * kPageTokens);
    }

    __device__ bool isShort() const { return piece.run.isShort; }
    __device__ int dim() const { return K::dim(args.shape); }
    __device__ int rowBytes() const { return K::rowBytes(args.shape); }
    __device__ int chunks() const { return K::chunks(args.shape); }
    __device__ const uint8_t* keys() const { return args.pages.k + pageStart * kKvBytes<K::kType>; }
    __device__ const uint8_t* values() const { return args.pages.v + pageStart * kKvBytes<K::kType>; }
    __device__ int2 rowOf(int query) const { return block.rows()[piece.run.row + args.rowOf(query)]; }
    __device__ bool keepsValues() const { return isShort() && args.layout.keepsValues(); }
    // Results lie where the keys were: those of a warp's page, or those of a warp's share of a short row's heads.
    __device__ Results pageResults(int warp) const {
        return Results(block.shared + warp * args.layout.region, kTile, dim());
    }
    __device__ Results shareResults(int warp) const {
        return Results(block.shared + warp * Results::bytes(kShare, dim()), kShare, dim());
    }

    // Brings keys to the L2 cache before they may be read, since the last ones may still be written, and a short row's
    // values. The values of all multiprocessors' segments would not fit.
    __device__ __forceinline__ void prefetch() const {
        const int thread = isShort() ? threadIdx.x : block.lane, threads = isShort() ? kThreads : 32;
        prefetchBytes(keys(), n * rowBytes(), thread, threads);
        if (isShort()) prefetchBytes(values(), n * rowBytes(), thread, threads);
    }

    // Takes the next piece. The counter's answer is only waited for by a thread that waits for keys anyway.
    __device__ __forceinline__ void takeNext(const Tile& tile) const {
        if (tile.first > piece.firstQuery || threadIdx.x != kThreads - 1) return;
        const uint32_t given = block.flags().mayWait ? 0 : gridDim.x;  // tickets that need no counter
        block.flags().ticket[turn] = static_cast<int>(given + atomicAdd(args.partials.counters, 1u));
    }

    // A short row's queries belong to the open group of copies. Those of a segment have been loaded on return.
    template <bool kShort> __device__ __forceinline__ void loadQueries(const Tile& tile) const {
        const int quads = dim() / 4;
#pragma unroll 1
        for (int query = block.warp; query < tile.count; query += kWarps) {
            const Head head(args, piece, tile.first + query);
            const auto* from = reinterpret_cast<const float4*>(args.q) +
                               (static_cast<int64_t>(head.row) * args.shape.heads + head.head) * quads;
            auto* to = reinterpret_cast<float4*>(block.queries()) + query;
#pragma unroll 1
            for (int quad = block.lane; quad < quads; quad += 32) {
                if (kShort) copyChunk(sharedAddress(to + quad * kTile), from + quad, true);
                else to[quad * kTile] = from[quad];
            }
        }
    }

    // Computes kCount queries from `first` on against the warp's page; those from `count` on do not exist. kShort: the
    // page is the block's, and every warp calls this, even if it has no query.
    template <int kCount, bool kShort>
    __device__ __forceinline__ void attend(const KeyFeeder<kShort>& feeder, const Tile& tile, int first, int count,
                                           const Results& to) const {
        const int dim = this->dim(), lane = block.lane;
        float2 dots[kCount];
#pragma unroll
        for (int i = 0; i < kCount; i++) dots[i] = {0.0f, 0.0f};
        const float* query = block.queries() + first * 4;
        const uint8_t* lines = block.shared + (kShort ? 0 : block.warp * args.layout.region) + lane * kLineBytes;
#pragma unroll 1
        for (int chunk = 0, place = 0; chunk < chunks(); chunk++) {
            feeder.await(chunk, place);
            const int units =
                K::kWhole ? min(kLineBytes, rowBytes()) / 16 : min(kLineBytes, rowBytes() - chunk * kLineBytes) / 16;
            if (!kShort || count > 0)
                addDotProducts<K::kType, kTile, kCount>(lines + place * kChunkBytes, units, query, lane, dots);
            query += kLineBytes / kKvBytes<K::kType> * kTile;
            feeder.release(chunk, place);
            place = place + 1 == feeder.ring ? 0 : place + 1;
        }
        waitForCopies<0>();
        if (kShort) __syncthreads();
        else __syncwarp();
        if (kShort && count <= 0) return;
        int begin[kCount], end[kCount];
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            const Span span(rowOf(tile.first + first + min(i, count - 1)), page);
            begin[i] = span.empty() ? 0 : span.begin, end[i] = span.empty() ? 0 : span.end;
        }
        float2 top[kCount];
        weighScores(dots, begin, end, args.rule, lane, to.weights, top);
#pragma unroll
        for (int i = 0; i < kCount; i++)
            if (lane == 0) to.tops[i] = top[i];
        __syncwarp();
        const uint8_t* values = kShort && keepsValues() ? block.shared + chunks() * kChunkBytes : this->values();
#pragma unroll 1
        for (int from = 0; from < dim; from += 32 * kWidth) {
            const Columns<kWidth> columns(from, lane, dim);
            ValueSums<K::kType, kWidth, kCount> sums;
            sums.compute(values + columns.at * kKvBytes<K::kType>, rowBytes(), to.weights, begin, end);
#pragma unroll
            for (int i = 0; i < kCount; i++) columns.write(to.outputs + i * dim, sums.acc[i]);
        }
        __syncwarp();
    }

    // Computes a tile of a short row, whose page is the block's.
    __device__ __forceinline__ void attendShort(const Tile& tile) const {
        loadQueries<true>(tile);  // first, because the page's number may still be on its way
        const KeyFeeder<true> feeder(block, keys(), n, rowBytes(), chunks());
        feeder.begin();
        if (tile.first == piece.firstQuery && keepsValues())
            copyBytes<kThreads>(sharedAddress(block.shared) + chunks() * kChunkBytes, values(), n * rowBytes(),
                                threadIdx.x);
        closeCopies();
        takeNext(tile);
        const int share = tile.count <= kWarps ? 1 : kShare, first = block.warp * share;
        const int count = min(share, tile.count - first);
        if (kShare == 1 || share == kShare) attend<kShare, true>(feeder, tile, first, count, shareResults(block.warp));
        else attend<1, true>(feeder, tile, first, count, shareResults(block.warp));
#pragma unroll 1
        for (int i = 0; i < count; i++) keep<true>(tile, first + i, i);
        __syncthreads();
    }

    // Computes a tile of a segment, of which each warp has a page, with the least number of queries at once.
    __device__ __forceinline__ void attendSegment(const Tile& tile, const Chain& chain) const {
        const KeyFeeder<false> feeder(block, keys(), n, rowBytes(), chunks());
        const bool isUsed = piece.has(page);
        if (isUsed) feeder.begin();
        if (isUsed && tile.first == piece.firstQuery) prefetchBytes(values(), n * rowBytes(), block.lane, 32);
        loadQueries<false>(tile);
        takeNext(tile);
        __syncthreads();
        const Results to = pageResults(block.warp);
        if (!isUsed) {
        } else if (tile.count <= kTile / 4) {
            attend<kTile / 4, false>(feeder, tile, 0, tile.count, to);
        } else if (tile.count <= kTile / 2) {
            attend<kTile / 2, false>(feeder, tile, 0, tile.count, to);
        } else if (tile.count <= kTile * 3 / 4) {
            attend<kTile * 3 / 4, false>(feeder, tile, 0, tile.count, to);
        } else {
            attend<kTile, false>(feeder, tile, 0, tile.count, to);
        }
        if (threadIdx.x == 0) chain.awaitSlots(args);
        __syncthreads();
#pragma unroll 1
        for (int i = block.warp; i < tile.count; i += kWarps) keep<false>(tile, i, i);
        __syncthreads();
    }

    // The result of a query's pages in this piece: a short row's page, or the pages of the segment in their order. at:
    // the query's place among the results.
    template <bool kShort>
    __device__ __forceinline__ void joinPages(int at, int2 row, const Columns<kWidth>& columns,
                                              Joined<kWidth>& so) const {
        if (kShort) {
            const Results of = shareResults(block.warp);
            const float2 top = of.tops[at];
            so.m = top.x, so.l = top.y;
            readFloats<kWidth>(of.outputs + at * dim() + columns.at, so.o);
            if (piece.pieces == 1) so.joinToNothing();
            return;
        }
        // Lane i has the factors of the i-th page. The pages that the row sees are neighbours.
        const int own = block.lane % kWarps;
        const bool isSeen = !Span(row, piece.page(own)).empty();
        const float2 top = pageResults(own).tops[at];
        Factors factors;
        factors.sum = isSeen ? top.y : 0.0f;
        so.clear();
        factors.make<kWarps>(isSeen ? top.x : so.m, so.m, block.lane);
#pragma unroll
        for (int i = 0; i < kWarps; i++) {
            float outputs[kWidth];
            const float sum = __shfl_sync(kWholeWarp, factors.sum, i), kept = __shfl_sync(kWholeWarp, factors.kept, i),
                        added = __shfl_sync(kWholeWarp, factors.added, i);
            if (Span(row, piece.page(i)).empty()) continue;
            readFloats<kWidth>(pageResults(i).outputs + at * dim() + columns.at, outputs);
            so.add(sum, outputs, kept, added);
        }
    }

    // Writes the piece's result of a query to its slot, or, if the piece is the only one, the head's result.
    template <bool kShort> __device__ __forceinline__ void keep(const Tile& tile, int query, int at) const {
        const int lane = block.lane;
        const int2 row = rowOf(tile.first + query);
        const Head head(args, piece, tile.first + query);
        const int slot = kShort ? page - piece.run.firstSegment() * kSegmentPages : piece.index & (args.ring.slots - 1);
        // Only this warp reads the query's results.
        float* line = (kShort ? shareResults(block.warp) : pageResults(0)).outputs + at * dim();
#pragma unroll 1
        for (int from = 0; from < dim(); from += 32 * kWidth) {
            const Columns<kWidth> columns(from, lane, dim());
            Joined<kWidth> so;
            joinPages<kShort>(at, row, columns, so);
            __syncwarp();
            if (piece.pieces == 1) divide<kWidth>(args, head, so, row.x < row.y, columns, line);
            else writeSlot<K>(args, head.first + slot, so, columns, lane == 0 && from == 0);
        }
        if (piece.pieces == 1) writeHead<K>(args, head, line, lane);
    }

    __device__ __forceinline__ void run() const {
        const int end = piece.endQuery;
        const Chain chain(args, piece);
#pragma unroll 1
        for (Tile tile = {piece.firstQuery, 0}; tile.first < end; tile.first += kTile) {
            tile.count = min(kTile, end - tile.first);
            if (isShort()) attendShort(tile);
            else attendSegment(tile, chain);
        }
        if (piece.pieces == 1) return;
        if (threadIdx.x == 0) block.flags().finished = chain.finish();
        __syncthreads();
        if (!block.flags().finished) return;
        const auto* staged = reinterpret_cast<const float*>(block.shared + block.warp * args.layout.region);
        float* line = block.queries() + block.warp * dim();
#pragma unroll 1
        for (int query = piece.firstQuery + block.warp; query < end; query += kWarps)
            joinBatch<K>(args, piece, chain, query, rowOf(query), staged, line, block.lane);
        __syncthreads();
        if (threadIdx.x == 0) chain.close();
    }
};

// Blocks take pieces by ticket, in ascending order, until there are no more. A block's number serves as its first
// ticket if no piece can wait for another, since a block that has not started yet would hold up those that wait for it.
template <class K> __global__ void __launch_bounds__(kThreads, K::kBlocks) attendFewRows(const Args args) {
    allowNext();
    extern __shared__ __align__(128) uint8_t shared[];
    const Block block(shared, args.layout);
    uint32_t* taken = args.partials.counters;
    if (block.warp == 0) findRuns(args, block);
    __syncthreads();
    const Parts parts(args, block, K::kTile);
    const int all = block.flags().pieces * args.shape.kvHeads * parts.count, blocks = static_cast<int>(gridDim.x);
    int present = static_cast<int>(blockIdx.x);
    if (block.flags().mayWait) {
        waitForPrevious();
        if (threadIdx.x == 0) block.flags().ticket[1] = static_cast<int>(atomicAdd(taken, 1u));
        __syncthreads();
        present = block.flags().ticket[1];
    }
#pragma unroll 1
    for (int turn = 0; present < all; turn ^= 1) {
        const Piece piece(args, block, parts, present);
        // No barrier follows: after its last one, a piece only reads flags that no piece writes before its first.
        const PieceWork<K> work(args, block, piece, turn);
        if (present == static_cast<int>(blockIdx.x)) {  // the first one
            work.prefetch();
            waitForPrevious();
        }
        work.run();
        present = block.flags().ticket[turn];
    }
    // The tickets end with one too many for each block. The last of them leaves the counter ready for the next launch.
    if (threadIdx.x == 0 && present == all + blocks - 1) *taken = 0;
}

// --- launching ---------------------------------------------------------------------------------------------------

// A second stage brings keys while others are used, but in a whole step it costs more than that saves: kernels begin
// beside the one before, and blocks that take little shared memory leave room for that. It pays where it gives a short
// row's values their place.
template <class K> Layout chooseLayout(const DeviceInfo& device, const Args& args) {
    const auto stages = [&](int most) {
        return Layout(static_cast<int>(kKvBytes<K::kType>), args.shape.headDim, K::kTile, most);
    };
    const Layout one = stages(1), two = stages(2);
    const bool twoPay = two.keepsValues() && !one.keepsValues() && two.total <= static_cast<int>(device.sharedPerBlock);
    return twoPay ? two : one;
}

// pages: the most that a row sees.
template <class K> void launchFewRows(Stream& stream, Args args, int64_t pages) {
    if constexpr (K::kWhole) {
        if (isDeep<K>(stream.device(), args)) return launchDeep<K>(stream, args);
    }
    const auto kernel = attendFewRows<K>;
    args.layout = chooseLayout<K>(stream.device(), args);
    const int bytes = args.layout.total;
    if (bytes > 48 * 1024) allowShared(kernel, static_cast<size_t>(bytes));
    // As many blocks as the device can hold, but no more than there can be pieces.
    const int room = static_cast<int>(stream.device().sharedPerMultiprocessor) / (bytes + kReservedShared);
    const int64_t perProcessor = std::max(1, std::min(K::kBlocks, room)), processors = stream.device().multiprocessors;
    const int64_t chains = args.batch.rows * args.shape.kvHeads;
    const int64_t blocks = std::min(chains * Parts::most(args.group) * pages, perProcessor * processors);
    // One block joins all pages of a short row, so from some number on segments are faster, however many blocks there
    // are. A short row's pages leave room for the pages of its first segment that it does not see.
    constexpr int64_t kMostShortPages = 40;
    const int64_t spread = std::min<int64_t>(perProcessor, 3) * processors / chains;
    args.shortPages =
        static_cast<int>(std::min<int64_t>({spread, kMostShortPages, args.ring.slots - kSegmentPages + 1}));
    launch(stream, kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), static_cast<size_t>(bytes), args);
}

// The usual sizes of heads have kernels of their own, for few and for many queries.
template <KvType kType> void chooseKernel(Stream& stream, const Args& args, int64_t pages) {
    const bool isFew = args.group * std::min<int64_t>(args.batch.rows, kRunRows) <= 4;
    const auto launch = [&](auto few, auto many) {
        if (isFew) launchFewRows<decltype(few)>(stream, args, pages);
        else launchFewRows<decltype(many)>(stream, args, pages);
    };
    switch (args.shape.headDim) {
    case 64: return launch(Kind<kType, 2, 4, true, 4>(), Kind<kType, 2, 8, true, 4>());
    case 128:
        // With many rows, more warps are better than more registers for each.
        if (args.batch.rows > kRunRows) return launch(Kind<kType, 4, 4, true, 3>(), Kind<kType, 4, 8, true, 4>());
        return launch(Kind<kType, 4, 4, true, 3>(), Kind<kType, 4, 8, true, 3>());
    case 256: return launch(Kind<kType, 8, 4, true, 3>(), Kind<kType, 8, 8, true, 3>());
    default: break;
    }
    if (args.shape.headDim <= 128) launchFewRows<Kind<kType, 4, 4, false, 3>>(stream, args, pages);
    else launchFewRows<Kind<kType, 8, 4, false, 3>>(stream, args, pages);
}

// Each in a source of its own.
void launchF32(Stream& stream, const Args& args, int64_t pages);
void launchF16(Stream& stream, const Args& args, int64_t pages);
void launchBf16(Stream& stream, const Args& args, int64_t pages);

}  // namespace sharpi::cuda::decode
