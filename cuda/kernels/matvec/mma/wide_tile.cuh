// Products of quantized weights with more than 16 rows of activations on the int8 tensor cores (compute capability 8.0
// and above), bit for bit as core/contract.h defines them. mma_tile.cuh says how one mma.sync becomes one block.
//
// A warp has 32 weight rows and 32 columns, so that what it loads from shared memory serves many products. With 32
// accumulators for each of these values it would run out of registers. So it takes the accumulators one after the
// other: the blocks j, j + 32, j + 64, ... of a row, then those of the next j. One *turn* has one accumulator. Turns
// follow each other as the leaves of the contract's tree do, and like the digits of a binary counter, two sums of a
// level become one of the next. Then a value has one accumulator in a register, and at most one unfinished sum for each
// level of the tree in shared memory.
//
// Neighbouring blocks of a row lie side by side in memory, but their accumulators are as far from each other in the
// tree as can be. So a thread block has *slices*: teams of warps that have the same values, but only the accumulators j
// with j mod kSlices equal to the slice's number. They meet at the end. All slices take neighbouring blocks at the same
// time, and memory is read in runs of these.
//
// Data goes through three stages in shared memory: one is multiplied, the next is ready, so that its first loads and
// products do not wait for the barrier between the two, and the third is filled. All threads share this work evenly,
// whatever their slice: each loads two blocks of weights to registers and unpacks them a stage later, and copies some
// columns. One barrier a stage is enough.
//
// How to use it: a kernel of MmaWideTile::kThreads threads and sharedBytes() of dynamic shared memory (aligned to 128
// bytes) makes a MmaWideTile, calls start() before waitForPrevious() and run() after it. Its callables say where each
// item's rows lie and which rows of activations are its columns. run() calls done(item, 0) when the sums of an item are
// ready. There, forSums() or forPairs() visits the thread's share of them. The names are MmaTile's, so that one kernel
// takes either.
#pragma once

#include "kernels/matvec/mma/mma_tile.cuh"
#include "kernels/matvec/mma/wide_order.cuh"
#include "kernels/matvec/mma/wide_sums.cuh"

namespace sharpi::cuda {

template <DType D, int kRowWarps, int kColumnWarps> class MmaWideTile : WideLayout<D, kRowWarps, kColumnWarps> {
    using Layout = WideLayout<D, kRowWarps, kColumnWarps>;
    using F = Format<D>;
    using Raw = typename F::Raw;
    using Layout::columnWarp;
    using Layout::kBundles;
    using Layout::kChunks;
    using Layout::kColumnsAt;
    using Layout::kEndBytes;
    using Layout::kEndChunks;
    using Layout::kEnds;
    using Layout::kEndsAt;
    using Layout::kEndSums;
    using Layout::kNumbersAt;
    using Layout::kOwn;
    using Layout::kRunCodes;
    using Layout::kRunNumbers;
    using Layout::kRuns;
    using Layout::kRunUnits;
    using Layout::kSliceCodes;
    using Layout::kSliceNumbers;
    using Layout::kSlices;
    using Layout::kStageBytes;
    using Layout::kStages;
    using Layout::kStageUnits;
    using Layout::kTiles;
    using Layout::kUnitChunks;
    using Layout::kUnits;
    using Layout::kWarpSumBytes;
    using Layout::ownRow;
    using Layout::ownSlice;
    using Layout::rowWarp;
    using Layout::slice;
    using Layout::unpackedRun;

public:
    static constexpr DType kType = D;
    using Numbers = MmaNumbers<D>;
    using Weights = Steps<D>;
    using Layout::kColumns;
    using Layout::kGroups;
    using Layout::kRows;
    using Layout::kThreads;
    using Layout::kWarps;
    using Layout::lane;
    using Layout::sharedBytes;
    using Layout::takes;
    using Layout::warp;
    // For kernels and launches that take either tile.
    static constexpr bool kIsWide = true, kResident = false;
    static constexpr int kRounds = 1, kPairs = kGroups / 2, kMinBlocks = 1;

    // shared: sharedBytes(cols), aligned to 128 bytes. cols: takes(cols). All threads call it, and meet.
    __device__ __forceinline__ MmaWideTile(uint8_t* shared, int cols, int items)
        : _units(cols / kContractBlock),
          _items(items),
          _shared(sharedAddress(shared)),
          _sums(_shared + kStages * kStageBytes + warp() * kWarpSumBytes),
          _order(_shared + kStages * kStageBytes + kWarps * kWarpSumBytes, _units) {
        if (warp() == 0) _order.write(_units);
        _loaded.record = _copiedTo.record = _order.begin();
        const int l = lane(), s = ownSlice();
        _unpacked = _shared + s * kSliceCodes + unpackedRun(0) * kRunCodes + ownRow() * 16;
        _unpackedNumbers =
            _shared + kNumbersAt + s * kSliceNumbers + unpackedRun(0) * kRunNumbers + ownRow() * Numbers::kFields * 4;
        _copied = _shared + kColumnsAt + threadIdx.x * 16;
        _copiedEnd = _shared + kEndsAt + threadIdx.x * 16;
        // A's four matrices: rows 0 .. 7 and 8 .. 15 of the first half of a block, then of its second.
        _codes = _shared + slice() * kSliceCodes + l / 16 * (kRunCodes / 2) + (32 * rowWarp() + l % 16) * 16;
        _numbers = _shared + kNumbersAt + slice() * kSliceNumbers + (32 * rowWarp() + l / 4) * Numbers::kFields * 4;
        // B's four matrices: both halves of a tile, then of the next.
        const int unit = columnWarp() * kSlices + slice();
        _columns = _shared + kColumnsAt + unit * WideColumns::kCodeBytes + l / 8 % 2 * (WideColumns::kCodeBytes / 2) +
                   (l / 16 * kMmaColumns + l % 8) * 16;
        _ends = _shared + kEndsAt + unit * kEndBytes + l % 4 * 8;
        keep(_unpacked);
        keep(_unpackedNumbers);
        keep(_copied);
        keep(_copiedEnd);
        keep(_codes);
        keep(_numbers);
        keep(_columns);
        keep(_ends);
        __syncthreads();
    }

    // Issues the first loads of weights. place(item, group) returns the MmaRows of a group.
    template <typename Place> __device__ __forceinline__ void start(const Place& place) {
        if (_items <= 0) return;
        findRows(place);
        readLoaded();
#pragma unroll
        for (int i = 0; i < kUnits; ++i) nextRaw(i);
        goOnLoading(place);
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
            _firstRaw[i] = _raw[0];
            nextRaw(i);
        }
        goOnLoading(place);
    }

    // x.wide is written. rowOf(item, 0) is the row of x that is the first column of an item, a multiple of kColumns.
    // done(item, 0) is called by all threads, and may use __syncthreads().
    template <typename Place, typename RowOf, typename Done>
    __device__ __forceinline__ void run(const QuantizedRows& x, const Place& place, const RowOf& rowOf,
                                        const Done& done) {
        if (_items <= 0) return;
        const WideColumns& columns = x.wide;
        findColumns(rowOf);
        readCopied();
#pragma unroll
        for (int ahead = 0; ahead < 2; ++ahead) {
            copy(columns, ahead * kStageBytes);
            goOnCopying(rowOf);
        }
#pragma unroll
        for (int i = 0; i < kUnits; ++i) unpack(_firstRaw[i], 0, i);
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
            unpack(_raw[0], kStageBytes, i);
            nextRaw(i);
        }
        goOnLoading(place);
        waitForCopies<0>();
        __syncthreads();

        Sums sums(_sums);
        Flow flow;
        begin(flow);
        int slot = 0, item = 0;  // slot: bytes
        uint32_t record = _order.begin(), ends = Order::ends(record);
        while (true) {
            const int next = nextSlot(slot), filled = nextSlot(next);
            __syncthreads();
            copy(columns, filled);
            multiply(slot, next, filled, ends, sums, flow);
            record = _order.next(record);
            ends = Order::ends(record);
            goOnLoading(place);
            goOnCopying(rowOf);
            waitForCopies<0>();
            slot = next;
            if (record != _order.begin()) continue;
            sums.begin();
            __syncthreads();
            done(item, 0);
            if (++item == _items) break;
            __syncthreads();
        }
    }

    // Calls f(pair, row, column, first, second) for this thread's share of an item's sums: those of `row` in groups
    // 2 * pair and 2 * pair + 1.
    template <typename Visit> __device__ __forceinline__ void forPairs(int, const Visit& f) const {
        constexpr int kShare = kTiles * 4 / kSlices;
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            const int value = slice() * kShare + i, tile = value / 4, c = value % 4;
            float sum[kOwn];
#pragma unroll
            for (int own = 0; own < kOwn; ++own) {
                float v[kSlices];
                Sums::read(_sums, own, tile, c, v);
                sum[own] = tree<kSlices / 2>(v);
            }
            f(rowWarp(), lane() / 4 + c / 2 * 8, (columnWarp() * kTiles + tile) * kMmaColumns + lane() % 4 * 2 + c % 2,
              sum[0], sum[1]);
        }
    }
    // The same for each sum: f(group, row, column, sum).
    template <typename Visit> __device__ __forceinline__ void forSums(int round, const Visit& f) const {
        forPairs(round, [&](int pair, int row, int column, float first, float second) {
            f(2 * pair, row, column, first);
            f(2 * pair + 1, row, column, second);
        });
    }

private:
    using Order = WideOrder<Layout>;
    using Sums = WideSums<Layout>;
    using Values = typename Sums::Values;

    template <int kWidth, int kCount> static __device__ __forceinline__ float tree(float (&v)[kCount]) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) v[i] = __fadd_rn(v[i], v[i + kWidth]);
        if constexpr (kWidth > 1) return tree<kWidth / 2>(v);
        return v[0];
    }

    // --- stages

    static __device__ __forceinline__ int nextSlot(int slot) {
        return slot == (kStages - 1) * kStageBytes ? 0 : slot + kStageBytes;
    }
    // A stage of an item: its record.
    struct Cursor {
        uint32_t record;
        int item = 0;
    };
    // Goes on to the next stage. Returns whether an item begins with it. After the last item, it has no other rows.
    __device__ __forceinline__ bool next(Cursor& at) const {
        at.record = _order.next(at.record);
        return at.record == _order.begin() && ++at.item < _items;
    }
    // The blocks that a stage has are read from shared memory a stage before they are needed.
    __device__ __forceinline__ void readLoaded() {
#pragma unroll
        for (int i = 0; i < kUnits; ++i) _run[i] = Order::block(_loaded.record, unpackedRun(i));
    }
    __device__ __forceinline__ void readCopied() {
        Order::blocks(_copiedTo.record, _block);
#pragma unroll
        for (int run = 0; run < kRuns; ++run) _block[run] %= Order::kEmpty;
#pragma unroll
        for (int i = 0; i < kEnds; ++i) {
            const int run = min((static_cast<int>(threadIdx.x) + i * kThreads) / kEndChunks / kRunUnits, kRuns - 1);
            _endBlock[i] = Order::block(_copiedTo.record, run) % Order::kEmpty;
        }
    }
    // Goes on to the next stage to load, or to copy. After the last one, what comes is not used.
    template <typename Place> __device__ __forceinline__ void goOnLoading(const Place& place) {
        if (next(_loaded)) findRows(place);
        readLoaded();
    }
    template <typename RowOf> __device__ __forceinline__ void goOnCopying(const RowOf& rowOf) {
        if (next(_copiedTo)) findColumns(rowOf);
        readCopied();
    }

    // --- weights

    template <typename Place> __device__ __forceinline__ void findRows(const Place& place) {
        const MmaRows<D> rows = place(_loaded.item, ownRow() / kMmaRows);
        _base = rows.base;
        _first = static_cast<uint32_t>(min(rows.row + ownRow() % kMmaRows, rows.last)) * static_cast<uint32_t>(_units);
    }
    // A block of weights as loaded.
    struct Loaded {
        Raw raw;
        int inSuper;  // its number in its superblock
        bool isEmpty;
    };
    // Loads the thread's i-th block of the next stage, behind the one that is loaded.
    __device__ __forceinline__ void nextRaw(int i) {
        const uint32_t run = i == 0 ? _run[0] : _run[1], block = run % Order::kEmpty + ownSlice();
        _raw[0] = _raw[1];
        _raw[1].inSuper = static_cast<int>(block % 8);
        _raw[1].isEmpty = run >= Order::kEmpty;
        _raw[1].raw = F::loadAt(PlanesOf<D>::at(_base, _first + block), _raw[1].inSuper);
    }
    // Writes it to a stage.
    __device__ __forceinline__ void unpack(const Loaded& loaded, int slot, int i) const {
        constexpr int kApart = kRuns / kUnits;  // runs from one of the thread's blocks to the next
        uint32_t q[8];
        Numbers::codes(loaded.raw, q);
        const uint32_t to = _unpacked + slot + i * kApart * kRunCodes;
        writeShared4(to, q);
        writeShared4(to + kRunCodes / 2, q + 4);
        BlockFactors factors = blockFactors<D>(floatScales<D>(loaded.raw, loaded.inSuper));
        if (loaded.isEmpty) factors = {};
        Numbers::write(_unpackedNumbers + slot + i * kApart * kRunNumbers, factors);
    }

    // --- activations

    template <typename RowOf> __device__ __forceinline__ void findColumns(const RowOf& rowOf) {
        const uint32_t bundle = static_cast<uint32_t>(rowOf(_copiedTo.item, 0)) / kWideColumns;
        const auto unitAt = [&](int unit) {
            return (bundle + unit / kSlices % kBundles) * static_cast<uint32_t>(_units) + unit % kSlices;
        };
        const int thread = threadIdx.x;
        _chunk = unitAt(thread / kUnitChunks) * kUnitChunks + thread % kUnitChunks;
        _endChunk = unitAt(thread / kEndChunks) * (WideColumns::kEndFloats / 4) + thread % kEndChunks;
    }
    // Begins the copies of the next stage: a run of threads for each unit.
    __device__ __forceinline__ void copy(const WideColumns& x, int slot) const {
        constexpr int kAtOnce = kThreads / kUnitChunks, kTimes = kRunUnits / kAtOnce;  // units; for each run
        static_assert(kTimes * kAtOnce == kRunUnits && (kTimes == 1 || kBundles == 1));
        static_assert(kThreads / kEndChunks % kRunUnits == 0);
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const uint32_t from = _chunk + (_block[i / kTimes] + i % kTimes * kAtOnce) * kUnitChunks;
            copyAsync<16>(_copied + slot + i * kThreads * 16, reinterpret_cast<const uint4*>(x.codes) + from);
        }
#pragma unroll
        for (int i = 0; i < kEnds; ++i) {
            if (kStageUnits * kEndChunks % kThreads != 0 && threadIdx.x + i * kThreads >= kStageUnits * kEndChunks)
                break;
            const uint32_t from = _endChunk + _endBlock[i] * (WideColumns::kEndFloats / 4);
            copyAsync<16>(_copiedEnd + slot + i * kThreads * 16, reinterpret_cast<const uint4*>(x.ends) + from);
        }
        closeCopies();
    }

    // --- sums

    // What a block's products read: its weights, and two tiles of its columns.
    struct WeightFragments {
        uint32_t a[kOwn][4];
        BlockFactors rows[kOwn][2];
    };
    struct ColumnFragments {
        uint32_t b[4];
        typename Numbers::Columns ends[2];
    };
    __device__ __forceinline__ void loadWeights(int slot, int run, WeightFragments& w) const {
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            loadFragments(w.a[own], _codes + slot + run * kRunCodes + own * kMmaRows * 16);
#pragma unroll
            for (int r = 0; r < 2; ++r)
                w.rows[own][r] = Numbers::read(_numbers + slot + run * kRunNumbers +
                                               (own * kMmaRows + r * 8) * Numbers::kFields * 4);
        }
    }
    __device__ __forceinline__ void loadColumns(int slot, int run, int pair, ColumnFragments& x) const {
        loadFragments(x.b, _columns + slot + run * kRunUnits * WideColumns::kCodeBytes + pair * 2 * kMmaColumns * 16);
#pragma unroll
        for (int k = 0; k < 2; ++k)
            x.ends[k] =
                Numbers::readColumns(_ends + slot + run * kRunUnits * kEndBytes + (2 * pair + k) * kMmaColumns * 4,
                                     kEndSums * kWideColumns * 4, kWideColumns * 4);
    }
    // The integer products of a tile, as biased floats.
    using Products = float[kOwn][1 + Numbers::kHalves][4];
    static __device__ __forceinline__ void multiplyTile(const WeightFragments& w, const ColumnFragments& x, int k,
                                                        Products& product) {
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            const uint32_t (&a)[4] = w.a[own];
            if constexpr (Numbers::kHalves) {
                multiplyHalf(product[own][0], a[0], a[1], x.b[2 * k]);
                multiplyHalf(product[own][1], a[2], a[3], x.b[2 * k + 1]);
            } else {
                multiplyBlock(product[own][0], a, x.b[2 * k], x.b[2 * k + 1]);
            }
        }
    }
    static __device__ __forceinline__ void addTile(const WeightFragments& w, const ColumnFragments& x, int k,
                                                   const Products& product, int tile, Values& acc) {
#pragma unroll
        for (int own = 0; own < kOwn; ++own)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                acc[own][tile][c] = Numbers::add(product[own][0][c], product[own][Numbers::kHalves][c],
                                                 w.rows[own][c / 2], x.ends[k], c % 2, acc[own][tile][c]);
    }
    // What runs ahead of the sums, from one stage to the next.
    struct Flow {
        WeightFragments weights[2];
        ColumnFragments columns[2];
        Products products[2];
    };
    __device__ __forceinline__ void begin(Flow& flow) const {
        loadWeights(0, 0, flow.weights[0]);
        loadColumns(0, 0, 0, flow.columns[0]);
        multiplyTile(flow.weights[0], flow.columns[0], 0, flow.products[0]);
    }
    // Multiplies the stage in `slot` and writes the weights of the next but one to `filled`. Loads run ahead of the
    // products, and the products of a tile ahead of what is done with them: at the end they are those of the stage in
    // `next`. There is no branch in between but for the end of a turn, so that the compiler can mix all of it.
    __device__ __forceinline__ void multiply(int slot, int next, int filled, uint32_t ends, Sums& sums, Flow& flow) {
        auto& [weights, columns, products] = flow;
        constexpr int kEachTime = 2 * kUnits / kRuns;  // blocks that the thread unpacks in two runs
        static_assert(kEachTime * kRuns == 2 * kUnits);
        // Unrolled, so that all offsets are constants.
#pragma unroll
        for (int first = 0; first < kRuns; first += 2) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const int run = first + odd;
                const bool isLast = odd == 1 && (kRuns == 2 || run + 1 == kRuns);
                const int slotAfter = isLast ? next : slot, runAfter = isLast ? 0 : run + 1;
                loadColumns(slot, run, 1, columns[1]);
                loadWeights(slotAfter, runAfter, weights[1 - odd]);
                multiplyTile(weights[odd], columns[0], 1, products[1]);
                addTile(weights[odd], columns[0], 0, products[0], 0, sums.acc);
                if (kEachTime == 2 || odd == 0) unpack(_raw[0], filled, kEachTime == 2 ? odd : first / 2);
                multiplyTile(weights[odd], columns[1], 0, products[0]);
                addTile(weights[odd], columns[0], 1, products[1], 1, sums.acc);
                loadColumns(slotAfter, runAfter, 0, columns[0]);
                multiplyTile(weights[odd], columns[1], 1, products[1]);
                addTile(weights[odd], columns[1], 0, products[0], 2, sums.acc);
                if (kEachTime == 2 || odd == 1) nextRaw(kEachTime == 2 ? odd : first / 2);
                multiplyTile(weights[1 - odd], columns[0], 0, products[0]);
                addTile(weights[odd], columns[1], 1, products[1], 3, sums.acc);
                if (ends >> run * 8 & 1) sums.endTurn();
            }
        }
    }

    const int _units, _items;
    const uint32_t _shared, _sums;
    const Order _order;
    uint32_t _unpacked, _unpackedNumbers, _copied, _copiedEnd;  // in the first stage: what the thread writes,
    uint32_t _codes, _numbers, _columns, _ends;                 // and what it reads
    typename Weights::Base _base;
    Loaded _raw[2];                                          // the two blocks that are loaded, the earlier one first
    Loaded _firstRaw[kUnits];                                // the first stage's
    uint32_t _block[kRuns], _run[kUnits], _endBlock[kEnds];  // see readCopied() and readLoaded()
    uint32_t _first;                                         // the first block of the thread's row
    uint32_t _chunk, _endChunk;                              // what the thread copies of a run, in block 0
    Cursor _loaded, _copiedTo;                               // the stages to load and to copy next
};

}  // namespace sharpi::cuda
