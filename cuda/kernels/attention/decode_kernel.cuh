// The decode kernel and how it is launched. See attention_decode.cu.
#pragma once

#include <algorithm>

#include "kernels/attention/decode_join.cuh"

namespace sharpi::cuda::decode {

// A tile of up to kTile queries of a piece, which a block computes in one go.
struct Tile {
    int first, count;
};

// A piece as a block computes it.
template <KvType kType, int kWidth, int kTile> struct PieceWork {
    // With short rows, the tile's queries are spread over the warps, and the page is the block's.
    static constexpr int kShare = kTile < kWarps ? 1 : kTile / kWarps;

    const Args& args;
    const Block& block;
    const Piece& piece;
    int page;           // the warp's
    int64_t pageStart;  // in elements of the cache
    int n;              // keys that some row sees

    __device__ PieceWork(const Args& a, const Block& b, const Piece& p)
        : args(a), block(b), piece(p), page(p.page(b.warp)), pageStart(0), n(0) {
        if (!piece.has(page)) return;
        const int32_t* table = args.batch.pageTables + piece.run.sequence * args.batch.pagesPerTable;
        pageStart =
            (static_cast<int64_t>(table[page]) * args.shape.kvHeads + piece.kvHead) * kPageTokens * args.shape.headDim;
        n = min(kPageTokens, piece.run.keys - page * kPageTokens);
    }

    __device__ bool isShort() const { return piece.run.isShort; }
    __device__ const uint8_t* values() const { return args.pages.v + pageStart * kKvBytes<kType>; }
    __device__ int2 rowOf(int query) const { return block.rows()[piece.run.row + args.rowOf(query)]; }
    // Whether the block's values have room beside its keys.
    __device__ bool keepsValues() const {
        return isShort() &&
               args.layout.chunks * kChunkBytes + kPageTokens * args.layout.rowBytes <= kWarps * args.layout.region;
    }
    // Results lie where the keys were.
    __device__ Results results(int warp) const {
        const int dim = args.shape.headDim;
        if (!isShort()) return Results(block.shared + warp * args.layout.region, kTile, dim);
        return Results(block.shared + warp * Results::bytes(kShare, dim), kShare, dim);
    }

    __device__ __forceinline__ void loadQueries(const Tile& tile) const {
        const int quads = args.shape.headDim / 4;
        for (int query = block.warp; query < tile.count; query += kWarps) {
            const Head head(args, piece, tile.first + query);
            const auto* from = reinterpret_cast<const float4*>(args.q) +
                               (static_cast<int64_t>(head.row) * args.shape.heads + head.head) * quads;
            auto* to = reinterpret_cast<float4*>(block.queries()) + query;
            for (int quad = block.lane; quad < quads; quad += 32) to[quad * kTile] = from[quad];
        }
    }

    // Computes kCount queries from `first` on against the warp's page; those from `count` on do not exist. A short
    // row's page is the block's, and every warp calls this, even if it has no query.
    template <int kCount>
    __device__ __forceinline__ void attend(const KeyFeeder& feeder, const Tile& tile, int first, int count) const {
        const int dim = args.shape.headDim, lane = block.lane;
        constexpr int kStep = 16 / kKvBytes<kType>;
        float2 dots[kCount];
#pragma unroll
        for (int i = 0; i < kCount; i++) dots[i] = {0.0f, 0.0f};
        const float* query = block.queries() + first * 4;
        const uint8_t* keys = block.shared + (isShort() ? 0 : block.warp * args.layout.region) + lane * kLineBytes;
        for (int chunk = 0, place = 0; chunk < args.layout.chunks; chunk++) {
            feeder.await(chunk, place);
            const int units = min(kLineBytes, args.layout.rowBytes - chunk * kLineBytes) / 16;
            if (count > 0) addDotProducts<kType, kTile, kCount>(keys + place * kChunkBytes, units, query, lane, dots);
            query += kLineBytes / 16 * kStep * kTile;
            feeder.release(chunk, place);
            place = place + 1 == feeder.ring ? 0 : place + 1;
        }
        waitForCopies<0>();
        if (isShort()) __syncthreads();
        else __syncwarp();
        if (count <= 0) return;
        const Results to = results(block.warp);
        int begin[kCount], end[kCount];
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            const Span span(rowOf(tile.first + first + min(i, count - 1)), page);
            begin[i] = span.begin, end[i] = span.end;
            const float2 top = weighScores(dots[i], span, args.rule, to.weights + i * kPageTokens, lane);
            if (lane == 0) to.tops[i] = top;
            if (span.empty()) begin[i] = end[i] = 0;
        }
        __syncwarp();
        const uint8_t* values = keepsValues() ? block.shared + args.layout.chunks * kChunkBytes : this->values();
        for (int from = 0; from < dim; from += 32 * kWidth) {
            const Columns<kWidth> columns(from, lane, dim);
            ValueSums<kType, kWidth, kCount> sums;
            sums.compute(values + columns.at * kKvBytes<kType>, args.layout.rowBytes, to.weights, begin, end);
#pragma unroll
            for (int i = 0; i < kCount; i++) columns.write(to.outputs + i * dim, sums.acc[i]);
        }
        __syncwarp();
    }

    // The same, for the least number of queries at once that covers the tile.
    __device__ __forceinline__ void attendTile(const KeyFeeder& feeder, const Tile& tile) const {
        if (isShort()) {
            const int first = block.warp * kShare;
            attend<kShare>(feeder, tile, first, min(kShare, tile.count - first));
        } else if (piece.has(page)) {
            if (tile.count <= kTile / 4) return attend<kTile / 4>(feeder, tile, 0, tile.count);
            if (tile.count <= kTile / 2) return attend<kTile / 2>(feeder, tile, 0, tile.count);
            if constexpr (kTile == 8)
                if (tile.count <= 6) return attend<6>(feeder, tile, 0, tile.count);
            attend<kTile>(feeder, tile, 0, tile.count);
        }
    }

    // The result of a query's pages in this piece: a warp's page, or the pages of the segment in their order.
    __device__ __forceinline__ void joinPages(int query, int2 row, const Columns<kWidth>& columns,
                                              Joined<kWidth>& so) const {
        const int dim = args.shape.headDim;
        if (isShort()) {
            const Results of = results(query / kShare);
            const float2 top = of.tops[query % kShare];
            so.m = top.x, so.l = top.y;
            readFloats<kWidth>(of.outputs + query % kShare * dim + columns.at, so.o);
            if (piece.pieces == 1) so.joinToNothing();
            return;
        }
        so.clear();
        bool isFirst = true;
#pragma unroll
        for (int i = 0; i < kWarps; i++) {
            if (Span(row, piece.page(i)).empty()) continue;
            const Results of = results(i);
            const float2 page = of.tops[query];
            float outputs[kWidth];
            readFloats<kWidth>(of.outputs + query * dim + columns.at, outputs);
            const float top = fmaxf(so.m, page.x);
            const float kept = isFirst ? 0.0f : portableExp(__fsub_rn(so.m, top)),
                        added = isFirst ? 1.0f : portableExp(__fsub_rn(page.x, top));
            so.add(page.y, outputs, kept, added);
            so.m = top;
            isFirst = false;
        }
    }

    // Writes the piece's result of a query to its slot, or, if the piece is the only one, the head's result.
    __device__ __forceinline__ void keep(const Tile& tile, int query) const {
        const int dim = args.shape.headDim, lane = block.lane;
        const int2 row = rowOf(tile.first + query);
        const Head head(args, piece, tile.first + query);
        const int slot = isShort() ? page - piece.run.firstSegment() * kSegmentPages : piece.index % args.ring.slots;
        // Only this warp reads the query's results.
        float* line =
            isShort() ? results(query / kShare).outputs + query % kShare * dim : results(0).outputs + query * dim;
        for (int from = 0; from < dim; from += 32 * kWidth) {
            const Columns<kWidth> columns(from, lane, dim);
            Joined<kWidth> so;
            joinPages(query, row, columns, so);
            __syncwarp();
            if (piece.pieces == 1) divide<kWidth>(args, head, so, row.x < row.y, columns, line);
            else writeSlot<kWidth>(args, head.first + slot, so, columns, lane == 0 && from == 0);
        }
        if (piece.pieces == 1) writeHead(args, head, line, lane);
    }

    __device__ __forceinline__ void run() const {
        const int count = piece.run.rows * args.group;
        const Chain chain(args, piece);
        const KeyFeeder feeder(block, args.pages.k + pageStart * kKvBytes<kType>, n, isShort());
        for (Tile tile = {0, 0}; tile.first < count; tile.first += kTile) {
            tile.count = min(kTile, count - tile.first);
            feeder.begin();
            if (isShort()) {
                if (tile.first == 0 && keepsValues())
                    copyBytes(sharedAddress(block.shared) + args.layout.chunks * kChunkBytes, values(),
                              n * args.layout.rowBytes);
                closeCopies();
            } else if (tile.first == 0) {
                prefetchBytes(values(), n * args.layout.rowBytes, block.lane);
            }
            loadQueries(tile);
            __syncthreads();
            attendTile(feeder, tile);
            if (threadIdx.x == 0 && !isShort()) chain.awaitSlots(args);
            __syncthreads();
            if (isShort()) {
                for (int i = block.warp * kShare; i < min(tile.count, (block.warp + 1) * kShare); i++) keep(tile, i);
            } else {
                for (int i = block.warp; i < tile.count; i += kWarps) keep(tile, i);
            }
            __syncthreads();
        }
        if (piece.pieces == 1) return;
        if (threadIdx.x == 0) block.flags()[3] = chain.finish();
        __syncthreads();
        if (!block.flags()[3]) return;
        float* line = reinterpret_cast<float*>(block.shared) + block.warp * args.shape.headDim;
        for (int query = block.warp; query < count; query += kWarps)
            joinBatch<kWidth>(args, piece, chain, query, rowOf(query), line, block.lane);
        __syncthreads();
        if (threadIdx.x == 0) chain.close();
    }
};

// Blocks take pieces by ticket, in ascending order, until there are no more.
template <KvType kType, int kWidth, int kTile>
__global__ void __launch_bounds__(kThreads, 3) attendFewRows(const Args args) {
    allowNext();
    waitForPrevious();
    extern __shared__ __align__(128) uint8_t shared[];
    const Block block(shared, args.layout);
    uint32_t* taken = args.partials.counters;
    uint32_t ticket = 0;
    if (threadIdx.x == kThreads - 1) ticket = atomicAdd(taken, 1u);
    if (block.warp == 0) findRuns(args, block);
    for (;;) {
        if (threadIdx.x == kThreads - 1) block.flags()[0] = static_cast<int>(ticket);
        __syncthreads();
        const int present = block.flags()[0], all = block.flags()[2] * args.shape.kvHeads;
        if (present >= all) {
            // Every block takes one ticket too many. The last of these leaves the counter ready for the next launch.
            if (threadIdx.x == 0 && present == all + static_cast<int>(gridDim.x) - 1) *taken = 0;
            return;
        }
        if (threadIdx.x == kThreads - 1) ticket = atomicAdd(taken, 1u);
        const Piece piece(args, block, present);
        PieceWork<kType, kWidth, kTile>(args, block, piece).run();
        __syncthreads();  // the next piece overwrites what other warps may still read
    }
}

// --- launching ---------------------------------------------------------------------------------------------------

// pages: the most that a row sees.
template <KvType kType, int kWidth, int kTile> void launchFewRows(Stream& stream, Args args, int64_t pages) {
    const auto kernel = attendFewRows<kType, kWidth, kTile>;
    args.layout = Layout(kKvBytes<kType>, args.shape.headDim, kTile, 2);
    if (args.layout.total > static_cast<int>(stream.device().sharedPerBlock))
        args.layout = Layout(kKvBytes<kType>, args.shape.headDim, kTile, 1);
    const int bytes = args.layout.total;
    if (bytes > 48 * 1024) allowShared(kernel, static_cast<size_t>(bytes));
    // As many blocks as the device can hold, but no more than there can be pieces.
    const int room = static_cast<int>(stream.device().sharedPerMultiprocessor) / (bytes + kReservedShared);
    const int64_t perProcessor = std::max(1, std::min(8, room)), processors = stream.device().multiprocessors;
    const int64_t chains = args.batch.rows * args.shape.kvHeads;
    const int64_t blocks = std::min(chains * pages, perProcessor * processors);
    // A short row's pages leave room for the pages of its first segment that it does not see.
    const int64_t spread = std::min<int64_t>(perProcessor, 3) * processors / chains;
    args.shortPages = static_cast<int>(std::min<int64_t>(spread, args.ring.slots - kSegmentPages + 1));
    launch(stream, kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), static_cast<size_t>(bytes), args);
}

// kWidth: the smallest number of dimensions for each lane with which 32 lanes cover them all, but at most 8.
template <KvType kType> void chooseKernel(Stream& stream, const Args& args, int64_t pages) {
    const int dim = args.shape.headDim;
    const bool isWide = args.group * std::min<int64_t>(args.batch.rows, kRunRows) > 4;
    if (dim <= 64) {
        (isWide ? launchFewRows<kType, 2, 8> : launchFewRows<kType, 2, 4>)(stream, args, pages);
    } else if (dim <= 128) {
        (isWide ? launchFewRows<kType, 4, 8> : launchFewRows<kType, 4, 4>)(stream, args, pages);
    } else {
        (isWide && dim <= 256 ? launchFewRows<kType, 8, 8> : launchFewRows<kType, 8, 4>)(stream, args, pages);
    }
}

// Each in a source of its own.
void launchF32(Stream& stream, const Args& args, int64_t pages);
void launchF16(Stream& stream, const Args& args, int64_t pages);
void launchBf16(Stream& stream, const Args& args, int64_t pages);

}  // namespace sharpi::cuda::decode
