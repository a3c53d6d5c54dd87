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
    waitForPrevious();
    extern __shared__ __align__(128) uint8_t shared[];
    const LatentBlock block(shared, args.layout);
    LatentOrder order;
    if (block.warp == kLatentWarps - 1) {
        divideRows(args, block, K::kQueries);
        __syncwarp();
        order.parts = latentParts(args.heads, block.flags().queries);
        order.takeNext(args, block, 0);
    }
    __syncthreads();
    const int queries = block.flags().queries;
    order.parts = latentParts(args.heads, queries);
    LatentPiece piece;
    LatentLoaded loaded;
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
        if (queries == K::kQueries) {
            attendPiece<K, K::kQueries>(args, block, order, turn, piece, loaded);
        } else if (K::kQueries > kFewQueries && queries == kFewQueries) {
            attendPiece<K, kFewQueries>(args, block, order, turn, piece, loaded);
        } else {
            attendPiece<K, 1>(args, block, order, turn, piece, loaded);
        }
    }
    // The tickets end with one too many for each block. The last of them leaves the counter ready for the next launch.
    if (threadIdx.x == kLatentThreads - 1 && order.ticket == order.start + static_cast<int>(gridDim.x) - 1)
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
