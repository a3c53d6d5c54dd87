// The decode kernel for latents: how pieces are joined, and how it is launched. See attention_latent.cu.
#pragma once

#include <algorithm>

#include "kernels/attention/latent_piece.cuh"

namespace sharpi::cuda::decode {

// --- joining -----------------------------------------------------------------------------------------------------

// Joins the slots [begin, end) of a head, in their order, to `whole`. Slot 0 begins a segment of kSegment pieces.
// outputs: the lane's element of slot 0. The whole warp calls it.
template <int kSegment>
__device__ __forceinline__ void joinColumn(const LatentArgs& args, int64_t head, int begin, int end,
                                           const float* outputs, int lane, Joined<1>& whole) {
    constexpr int kAhead = 32;
    Joined<1> part;
    part.clear();
#pragma unroll 1
    for (int base = begin & -kAhead; base < end; base += kAhead) {
        float ahead[kAhead];
        const int own = base + lane;
        const bool exists = own >= begin && own < end;
        const float maximum = exists ? __ldcg(args.partials.maxima + head + own) : __int_as_float(0xff800000);
        Factors factors;
        factors.sum = exists ? __ldcg(args.partials.sums + head + own) : 0.0f;
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            const int slot = base + i;
            if (slot >= begin && slot < end) ahead[i] = __ldcg(outputs + static_cast<int64_t>(slot) * args.valueDim);
        }
        factors.make<kSegment>(maximum, whole.m, lane);
        // Everything is computed and what does not exist is dropped, since branches would cost more.
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            if (i % 8 == 0 && base + i >= end) break;
            const bool isThere = base + i >= begin && base + i < end;
            const float sum = __shfl_sync(kWholeWarp, factors.sum, i), output[1] = {ahead[i]};
            const float kept = __shfl_sync(kWholeWarp, factors.segmentKept, i),
                        added = __shfl_sync(kWholeWarp, factors.segmentAdded, i);
            if (kSegment == 1) {
                whole.addIf(isThere, sum, output, kept, added);
                continue;
            }
            part.addIf(isThere, sum, output, __shfl_sync(kWholeWarp, factors.kept, i),
                       __shfl_sync(kWholeWarp, factors.added, i));
            if (i % kSegment < kSegment - 1) continue;
            const int first = base + i - (kSegment - 1);
            whole.addIf(first < end && base + i >= begin, part.l, part.o, kept, added);
            part.clear();
        }
    }
}

// Writes a lane's element of a head's result to every requested output. The whole warp calls it.
__device__ __forceinline__ void writeElement(const LatentArgs& args, int64_t row, int unit, int lane, float x) {
    const int column = unit * kJoinDims + lane;
    if (args.out.floats && column < args.valueDim) args.out.floats[row * args.valueDim + column] = x;
    if (args.out.quantized.q) quantizeLane(args.out.quantized, row, args.valueDim / kContractBlock, unit, x);
}

// Joins a batch to the earlier ones: 32 dimensions of a head for each warp.
__device__ __forceinline__ void joinUnits(const LatentArgs& args, const LatentBlock& block, const LatentWork& work,
                                          const LatentRow& row, int tickets) {
    const int lane = block.lane, units = args.joinUnits();
    const int begin = row.isShort ? row.firstPage() - row.firstSegment() * kSegmentPages
                                  : work.batch * args.ring.batch & (args.ring.slots - 1);
    const int end = row.isShort ? row.pageSlots() : begin + row.piecesOf(args.ring, work.batch);
    const bool isLast = row.isLast(args.ring, work.batch);
#pragma unroll 1
    for (int at = work.join + block.warp * tickets; at < args.heads * units; at += kLatentWarps * tickets) {
        const int head = at / units, unit = at - head * units;
        const int64_t result = static_cast<int64_t>(work.row) * args.heads + head, slots = args.slots(work.row, head);
        const int column = min(unit * kJoinDims + lane, args.valueDim - 1);
        float* outputs = args.partials.outputs + slots * args.valueDim + column;
        float* kept = outputs + static_cast<int64_t>(args.ring.slots) * args.valueDim;
        float2* state = args.states + result * units + unit;
        Joined<1> so;
        so.clear();
        if (work.batch > 0) {
            const float2 before = __ldcg(state);
            so.m = before.x, so.l = before.y, so.o[0] = __ldcg(kept);
        }
        if (row.isShort) joinColumn<kSegmentPages>(args, slots, begin, end, outputs, lane, so);
        else if (row.keys > 0) joinColumn<1>(args, slots, begin, end, outputs, lane, so);
        __syncwarp();
        if (!isLast) {
            if (unit * kJoinDims + lane < args.valueDim) *kept = so.o[0];
            if (lane == 0) *state = {so.m, so.l};
            continue;
        }
        const bool seesKeys = row.first < row.keys;
        if (args.rule.sinks && seesKeys) so.addSink(args.rule.sinks[head]);
        writeElement(args, result, unit, lane, seesKeys ? __fdiv_rn(so.o[0], so.l) : 0.0f);
    }
}

// Joins a share of a batch.
__device__ __forceinline__ void joinShare(const LatentArgs& args, const LatentBlock& block, const LatentWork& work,
                                          LatentOrder& order, int turn) {
    const LatentRow row = block.row(work.row);
    const int batches = args.batches(), turns = work.batch / batches;
    const bool isLast = row.isLast(args.ring, work.batch);
    uint32_t *const joined = args.joined(work.row), *const arrived = args.arrived(work.row, work.batch);
    if (block.warp == kLatentWarps - 1) order.takeNext(args, block, turn);
    if (threadIdx.x == 0) {
        // The counters go on from batch to batch.
        const int pieces = turns * args.ring.batch + row.piecesOf(args.ring, work.batch);
        waitUntil(arrived, static_cast<uint32_t>(pieces * order.parts));
        if (work.batch > 0) waitUntil(joined, static_cast<uint32_t>(work.batch * args.joins));
    }
    __syncthreads();
    joinUnits(args, block, work, row, isLast ? args.lastJoins : args.joins);
    __syncthreads();
    if (threadIdx.x == 0 && arrive(joined) + 1 == static_cast<uint32_t>(work.batch * args.joins + args.lastJoins) &&
        isLast) {
        // Nobody looks at this row's counters any more. They are zero between launches.
        for (int i = 0; i <= batches; i++) joined[i] = 0;
    }
}

// --- joining a spread row ----------------------------------------------------------------------------------------

// A lane's dimensions of a head: four from `first` on, and four that are 128 further.
struct LatentQuads {
    int first;
    bool isThere[2];

    __device__ LatentQuads(const LatentArgs& args, int from, int lane) : first(from + lane * 4) {
        isThere[0] = first < args.valueDim, isThere[1] = first + 128 < args.valueDim;
    }
    // What other blocks wrote for a slot.
    __device__ __forceinline__ void read(const float* outputs, float (&out)[8]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 x = isThere[i] ? __ldcg(reinterpret_cast<const float4*>(outputs + first + i * 128))
                                        : float4{0.0f, 0.0f, 0.0f, 0.0f};
            out[4 * i] = x.x, out[4 * i + 1] = x.y, out[4 * i + 2] = x.z, out[4 * i + 3] = x.w;
        }
    }
    __device__ __forceinline__ void write(const LatentArgs& args, int64_t row, const float (&x)[8]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 quad = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
            const int column = first + i * 128;
            if (args.out.floats && isThere[i])
                *reinterpret_cast<float4*>(args.out.floats + row * args.valueDim + column) = quad;
            if (args.out.quantized.q)
                quantizeQuad(args.out.quantized, row, args.valueDim / kContractBlock, column, quad, isThere[i]);
        }
    }
};

// Joins the pages [begin, end) of a head, in their order, to nothing. outputs: of slot 0. The whole warp calls it.
__device__ __forceinline__ void joinPages(const LatentArgs& args, int64_t head, int begin, int end,
                                          const float* outputs, const LatentQuads& quads, int lane, Joined<8>& whole) {
    constexpr int kAhead = 2 * kSegmentPages;
    Factors factors;
#pragma unroll 1
    for (int base = 0; base < end; base += kAhead) {
        float ahead[kAhead][8];
#pragma unroll
        for (int i = 0; i < kAhead; i++)
            if (base + i >= begin && base + i < end) quads.read(outputs + (base + i) * args.valueDim, ahead[i]);
        if (base == 0) {
            const bool exists = lane >= begin && lane < end;
            const float maximum = exists ? __ldcg(args.partials.maxima + head + lane) : __int_as_float(0xff800000);
            factors.sum = exists ? __ldcg(args.partials.sums + head + lane) : 0.0f;
            factors.make<kSegmentPages>(maximum, whole.m, lane);
        }
#pragma unroll
        for (int segment = 0; segment < kAhead; segment += kSegmentPages) {
            if (base + segment >= end) break;
            Joined<8> part;
            part.clear();
#pragma unroll
            for (int i = segment; i < segment + kSegmentPages; i++) {
                if (base + i < begin || base + i >= end) continue;
                part.add(__shfl_sync(kWholeWarp, factors.sum, base + i), ahead[i],
                         __shfl_sync(kWholeWarp, factors.kept, base + i),
                         __shfl_sync(kWholeWarp, factors.added, base + i));
            }
            whole.add(part.l, part.o, __shfl_sync(kWholeWarp, factors.segmentKept, base + segment),
                      __shfl_sync(kWholeWarp, factors.segmentAdded, base + segment));
        }
    }
}

// Joins a part of a row if this block has finished its last piece.
__device__ __forceinline__ void joinSpread(const LatentArgs& args, const LatentBlock& block, int parts) {
    constexpr int kDims = 256;
    const LatentWork work = block.flags().next[0];
    const LatentRow row = block.row(work.row);
    if (threadIdx.x == 0) {
        uint32_t* const finished = args.finished(work.row, work.part, parts);
        block.flags().isLast = arrive(finished) + 1 == static_cast<uint32_t>(row.pieces);
        if (block.flags().isLast) *finished = 0;
    }
    __syncthreads();
    if (!block.flags().isLast) return;
    const int firstHead = work.part * args.heads / parts, heads = (work.part + 1) * args.heads / parts - firstHead;
    const int begin = row.firstPage() - row.firstSegment() * kSegmentPages,
              slices = (args.valueDim + kDims - 1) / kDims;
    const bool seesKeys = row.first < row.keys;
#pragma unroll 1
    for (int unit = block.warp; unit < heads * slices; unit += kLatentWarps) {
        const int head = firstHead + unit / slices;
        const int64_t slots = args.slots(work.row, head);
        const LatentQuads quads(args, unit % slices * kDims, block.lane);
        Joined<8> so;
        so.clear();
        joinPages(args, slots, begin, row.pageSlots(), args.partials.outputs + slots * args.valueDim, quads, block.lane,
                  so);
        if (args.rule.sinks && seesKeys) so.addSink(args.rule.sinks[head]);
#pragma unroll
        for (float& x : so.o) x = seesKeys ? __fdiv_rn(x, so.l) : 0.0f;
        quads.write(args, static_cast<int64_t>(work.row) * args.heads + head, so.o);
    }
}

// --- the kernel --------------------------------------------------------------------------------------------------

// What a kernel is compiled for. kQueries: the most heads for each warp of scores. kResident: whether pages are brought
// to shared memory.
template <KvType type, int queries, bool resident> struct LatentKind {
    static constexpr KvType kType = type;
    static constexpr int kQueries = queries;
    static constexpr bool kResident = resident;
};

template <class K, int kQueries>
__device__ __forceinline__ void attendPiece(const LatentArgs& args, const LatentBlock& block, LatentOrder& order,
                                            int turn, LatentPiece& piece, LatentLoaded& loaded) {
    LatentPieceWork<K::kType, kQueries, K::kResident> on = {args, block, piece, order, loaded, turn};
    on.run();
    loaded = on.loaded, piece = on.nextPiece;
}

template <class K> __global__ void __launch_bounds__(kLatentThreads) attendLatents(const LatentArgs args) {
    allowNext();
    extern __shared__ __align__(128) uint8_t shared[];
    const LatentBlock block(shared, args.layout);
    LatentOrder order;
    if (block.warp == kLatentWarps - 1) {
        divideRows(args, block, K::kQueries);
        __syncwarp();
        order.parts = latentParts(args.heads, block.flags().queries);
        if (block.flags().spread > 0) order.takeOwn(args, block, 0);
    }
    __syncthreads();
    const int queries = block.flags().queries;
    order.parts = latentParts(args.heads, queries);
    LatentPiece piece;
    LatentLoaded loaded;
    if (block.flags().spread == 0) {
        waitForPrevious();
        if (block.warp == kLatentWarps - 1) order.takeNext(args, block, 0);
        __syncthreads();
    }
#pragma unroll 1
    for (int turn = 1;; turn ^= 1) {
        const LatentWork work = block.flags().next[turn ^ 1];
        if (!work.exists) break;
        if (work.isJoin) {
            joinShare(args, block, work, order, turn);
            loaded = {}, piece = {};
            continue;
        }
        if (piece.heads == 0) piece = LatentPiece(args, block, work, order.parts);
        if (block.flags().spread > 0) {
            piece.prefetch(args);
            waitForPrevious();
        }
        if (queries == K::kQueries) {
            attendPiece<K, K::kQueries>(args, block, order, turn, piece, loaded);
        } else if (K::kQueries > kFewQueries && queries == kFewQueries) {
            attendPiece<K, kFewQueries>(args, block, order, turn, piece, loaded);
        } else {
            attendPiece<K, 1>(args, block, order, turn, piece, loaded);
        }
        if (block.flags().spread > 0) return joinSpread(args, block, order.parts);
    }
    // The tickets end with one too many for each block. The last of them leaves the counter ready for the next launch.
    if (threadIdx.x == kLatentThreads - 1 && block.flags().spread == 0 &&
        order.ticket == order.start + static_cast<int>(gridDim.x) - 1)
        *args.partials.counters = 0;
}

// --- launching ---------------------------------------------------------------------------------------------------

// pages: the most that a row sees.
template <class K> void launchLatents(Stream& stream, LatentArgs args, const LatentLayout& layout, int64_t pages) {
    const auto kernel = attendLatents<K>;
    args.layout = layout;
    if (layout.total > 48 * 1024) allowShared(kernel, static_cast<size_t>(layout.total));
    // A block's registers fill a multiprocessor. No more blocks than there can be work for.
    const int64_t rows = args.batch.rows;
    const int64_t units = args.heads * ((args.valueDim + kJoinDims - 1) / kJoinDims);
    const int64_t blocks =
        std::min<int64_t>(rows * std::max(pages * args.heads, units), stream.device().multiprocessors);
    // Few tickets, so that few blocks have to wait; but the last batch is waited for by all.
    const auto tickets = [&](int64_t rounds) { return (units + kLatentWarps * rounds - 1) / (kLatentWarps * rounds); };
    args.joins = static_cast<int>(tickets(2));
    args.lastJoins = static_cast<int>(std::max(tickets(4), std::min(units, blocks / rows)));
    launch(stream, kernel, dim3(static_cast<unsigned>(blocks)), dim3(kLatentThreads), static_cast<size_t>(layout.total),
           args);
}

// Chooses how many heads a block has, so that all parts have about as many, and how many pages it keeps.
template <KvType kType> void chooseLatents(Stream& stream, const LatentArgs& args, int64_t pages) {
    constexpr int kMost = 6, kMostHeads = kScoreWarps * kMost;
    const int parts = (args.heads + kMostHeads - 1) / kMostHeads, most = (args.heads + parts - 1) / parts;
    const int wanted = (most + kScoreWarps - 1) / kScoreWarps;
    const auto launched = [&](auto kind) {
        using K = decltype(kind);
        for (const int kept : {2, 1}) {
            const LatentLayout layout(args.rowBytes, args.headDim, kScoreWarps * K::kQueries, kept);
            if (layout.total > static_cast<int>(stream.device().sharedPerBlock)) continue;
            launchLatents<K>(stream, args, layout, pages);
            return true;
        }
        return false;
    };
    if (wanted > 5 && launched(LatentKind<kType, 6, true>())) return;
    if (wanted == 5 && launched(LatentKind<kType, 5, true>())) return;
    if (wanted > kFewQueries && launched(LatentKind<kType, 4, true>())) return;
    if (launched(LatentKind<kType, kFewQueries, true>())) return;
    const LatentLayout none(args.rowBytes, args.headDim, kScoreWarps * kFewQueries, 0);
    launchLatents<LatentKind<kType, kFewQueries, false>>(stream, args, none, pages);
}

// Each in a source of its own.
void launchLatentsF32(Stream& stream, const LatentArgs& args, int64_t pages);
void launchLatentsF16(Stream& stream, const LatentArgs& args, int64_t pages);
void launchLatentsBf16(Stream& stream, const LatentArgs& args, int64_t pages);

}  // namespace sharpi::cuda::decode
