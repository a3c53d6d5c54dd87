// Products of quantized weights with up to 8, 16, 24 or 32 rows of activations on the int8 tensor cores (compute
// capability 8.0 and above), bit for bit as core/contract.h defines them. mma_tile.cuh says how one mma.sync becomes
// one block.
//
// An *item* is kOwn times 16 weight rows, and a *step* 32 neighbouring blocks of them, as they lie in the packed
// matrix. Steps run on from one item to the next, through a ring of *slots* in shared memory. All warps copy: each some
// rows of every step. So memory is read in long pieces of rows, loads are always in flight, and nothing is unpacked
// before it is multiplied.
//
// A warp multiplies every eighth block, beginning with the one of its own number. So it has four accumulators for each
// value, one for each *turn* of a step, and its blocks have the same place in their superblocks. At the end of an item
// it joins its four as the contract's tree does. Then all meet, and each thread adds up the warps' sums of some values.
//
// Warps wait for nothing else but mbarriers: that a slot is full, and that all have done with one that is to be filled.
// They pass these in the middle of a step, where there is most other work at hand. What a step needs first is loaded at
// the end of the one before it.
//
// Activations are read in the form of WideColumns. If all fit, they stay in shared memory for all items. Otherwise they
// come step by step. A warp copies the columns of its own blocks itself.
//
// How to use it: a kernel of kThreads threads and sharedBytes() of dynamic shared memory (aligned to 128 bytes) makes a
// StreamTile, calls start() before waitForPrevious() and run() after it. Its callables are those of MmaTile, but a
// group has 8 rows.
#pragma once

#include "kernels/matvec/mma/stream_multiplier.cuh"

namespace sharpi::cuda {

template <DType D, int kTiles, int kOwn> class StreamTile : StreamLayout<D, kTiles, kOwn> {
    using Layout = StreamLayout<D, kTiles, kOwn>;
    using Multiplier = StreamMultiplier<D, Layout>;
    using Layout::kNumberBytes;
    using Layout::kSlotBytes;
    using Layout::kStageBytes;
    using Layout::kSumBytes;
    using Layout::kSums;
    using Layout::kTurns;

public:
    static constexpr DType kType = D;
    using Layout::kColumns;
    using Layout::kFewestSlots;
    using Layout::kGroupRows;
    using Layout::kGroups;
    using Layout::kMostSlots;
    using Layout::kPairs;
    using Layout::kRows;
    using Layout::kStages;
    using Layout::kThreads;
    using Layout::kWarps;
    using Layout::lane;
    using Layout::sharedBytes;
    using Layout::steps;
    using Layout::takes;
    using Layout::warp;
    // For kernels and launches that take any tile.
    static constexpr bool kIsStream = true;
    static constexpr int kRounds = 1, kMinBlocks = 1;

    // shared: sharedBytes(room), aligned to 128 bytes. All threads call it, and meet.
    __device__ __forceinline__ StreamTile(uint8_t* shared, int cols, int items, const StreamRoom& room)
        : _shape{cols / kContractBlock,
                 steps(cols),
                 items,
                 room.stages,
                 room.slots,
                 sharedAddress(shared),
                 sharedAddress(shared) + Layout::kColumnsAt + room.stages * kStageBytes} {
        if (threadIdx.x == 0) {
            for (int i = 0; i < room.slots; ++i) {
                _shape.full(i).init(kThreads);
                _shape.empty(i).init(kWarps);
            }
        }
        __syncthreads();
    }

    // Issues the first copies of weights. place(item, group) returns the MmaRows of a group.
    template <typename Place> __device__ __forceinline__ void start(const Place& place) {
        if (_shape.items <= 0) return;
        _weights.begin(_shape, place);
        for (int i = 0; i < _shape.slots; ++i) _weights.next(_shape, place);
    }

    // x.wide is written. rowOf(item, 0) is the row of x that is the first column, a multiple of kColumns and the same
    // for all items. done(item, 0) is called by all threads, and may use __syncthreads().
    template <typename Place, typename RowOf, typename Done>
    __device__ __forceinline__ void run(const QuantizedRows& x, const Place& place, const RowOf& rowOf,
                                        const Done& done) {
        if (_shape.items <= 0) return;
        const int all = _shape.items * _shape.steps;
        const bool isResident = _shape.stages == _shape.steps;
        // All columns; or those of all stages but one, which is filled while the one before it is multiplied.
        StreamColumns<Layout> columns(_shape, x.wide, static_cast<uint32_t>(rowOf(0, 0)));
        for (int i = isResident ? 0 : 1; i < _shape.stages; ++i) columns.next(_shape);
        const uint32_t endOfStages = _shape.stages * kStageBytes;
        const Multiplier multiplier(_shape);
        RingPlace used, ahead, freed;  // the slots of this step, of the next one, and of the one before
        StreamStep at = {0, 0, 0};
        if (isResident) waitForCopies<0>();
        else waitForCopies<kStages - 2>();
        _shape.full(0).wait(0);
        multiplier.writeNumbers(at, _shape.blocks);
        ahead.next(_shape.slots);
        __syncwarp();
        typename Multiplier::Flow flow;
        multiplier.begin(at, flow);
        Sums acc = {};
        int item = 0, step = 0;
        for (int n = 0; n < all; ++n) {
            if (!isResident) columns.next(_shape);
            const bool isLast = step + 1 == _shape.steps;
            StreamStep next = {static_cast<uint32_t>(ahead.at * kSlotBytes), at.stage + kStageBytes,
                               at.numbers ^ kNumberBytes};
            if (next.stage == endOfStages) next.stage = 0;
            multiplier.multiply(at, next, flow, acc, [&] {
                if (n > 0) {
                    _shape.empty(freed.at).wait(freed.parity);
                    freed.next(_shape.slots);
                    _weights.next(_shape, place);
                }
                if (n + 1 == all) return;
                if (!isResident) waitForCopies<kStages - 2>();
                _shape.full(ahead.at).wait(ahead.parity);
                ahead.next(_shape.slots);
                multiplier.writeNumbers(next, _shape.blocks - (isLast ? 0 : step + 1) * kContractAccumulators);
                __syncwarp();
            });
            __syncwarp();
            if (lane() == 0) _shape.empty(used.at).arrive();
            used.next(_shape.slots);
            at = next;
            ++step;
            if (!isLast) continue;
            step = 0;
            if (item > 0) __syncthreads();  // the sums before these have been read
            keepSums(acc);
            __syncthreads();
            done(item, 0);
            _visited = ++item;
        }
    }

    // Calls f(group, row, column, sum) for this thread's share of an item's sums.
    template <typename Visit> __device__ __forceinline__ void forSums(int, const Visit& f) const {
        forShare<4>([&](int sums, int of, int c) {
            f(2 * (sums / kTiles) + c / 2, of / 4, sums % kTiles * kMmaColumns + of % 4 * 2 + c % 2,
              sumAt(sums, of, c));
        });
    }
    // The same for the sums of two groups at once: f(pair, row, column, first, second).
    template <typename Visit> __device__ __forceinline__ void forPairs(int, const Visit& f) const {
        forShare<2>([&](int sums, int of, int c) {
            f(sums / kTiles, of / 4, sums % kTiles * kMmaColumns + of % 4 * 2 + c, sumAt(sums, of, c),
              sumAt(sums, of, c + 2));
        });
    }

private:
    using Sums = typename Multiplier::Sums;

    // Joins a warp's accumulators, which begin anew.
    __device__ __forceinline__ void keepSums(Sums& acc) const {
        static_assert(kTurns == 4);
        const uint32_t at = _shape.shared + Layout::kSumsAt + warp() * kSumBytes + lane() * 16;
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            float sum[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const auto of = [&](int turn) -> float& { return acc[turn][i % kTiles][i / kTiles][c]; };
                sum[c] = __fadd_rn(__fadd_rn(of(0), of(2)), __fadd_rn(of(1), of(3)));
                of(0) = of(1) = of(2) = of(3) = 0.0f;
            }
            writeShared(at + i * 512, sum);
        }
    }
    // The finished sum of value c of lane `of`.
    __device__ __forceinline__ float sumAt(int sums, int of, int c) const {
        const uint32_t at = _shape.shared + Layout::kSumsAt + sums * 512 + of * 16 + c * 4;
        float v[kWarps];
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            float one[1];
            readShared(at + w * kSumBytes, one);
            v[w] = one[0];
        }
        return joined<kWarps / 2>(v);
    }
    // Calls f(sums, lane, c) for this thread's share of the values, kCount of each lane. If there are fewer values than
    // threads, other warps take them in the next item.
    template <int kCount, typename Visit> __device__ __forceinline__ void forShare(const Visit& f) const {
        constexpr int kAll = kSums * 32 * kCount;
        const int turned = kAll >= kThreads ? 0 : _visited * kAll;
#pragma unroll
        for (int n = 0; n < kAll; n += kThreads) {
            const int at = n + (static_cast<int>(threadIdx.x) + turned) % kThreads;
            if (kAll % kThreads != 0 && at >= kAll) return;
            f(at / (32 * kCount), at / kCount % 32, at % kCount);
        }
    }

    const StreamShape _shape;
    StreamWeights<Layout> _weights;
    int _visited = 0;  // the item whose sums are visited
};

}  // namespace sharpi::cuda
