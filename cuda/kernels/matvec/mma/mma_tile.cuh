// Products of quantized weights with up to 8, 16 or 32 rows of activations on the int8 tensor cores (compute capability
// 8.0 and above), bit for bit as core/contract.h defines them.
//
// One mma.sync multiplies one block (32 elements) of 16 weight rows by the same block of 8 rows of activations
// ("columns" here). Its sums are integers, so they are exact in any order. They start at the bits of 1.5 * 2^23, so
// that they are floats without a conversion; no type's sum over a block reaches 2^22. The rest of a block is what the
// contract says, in float, with one accumulator for each of its 32.
//
// A *group* is 16 weight rows; a thread block has kGroups of them. The 32 accumulators of a value are divided among the
// warps that have its group: one for each *slice* of kBlocks of the 32 blocks of a step, which are those of as many
// accumulators. At the end, a warp adds up what it can of its accumulators; then the warps meet in shared memory, and
// each adds up the rest of some values, all by the contract's tree. A warp has kOwn groups. The warps of one slice form
// a *team*, because they read the same blocks of the activations:
//
// - Weights: a lane loads a few blocks as Format<D> defines, one step ahead, in registers. It unpacks them and writes
//   signed bytes and float scales to the warp's own shared memory, which ldmatrix reads as fragments.
// - Activations: a team copies the blocks of all columns to its stages in shared memory. The layout of QuantizedRows is
//   already what ldmatrix needs. In a *resident* tile there are stages for all steps. The team copies everything once,
//   and the block has many items with the same columns; the first one waits for each step's. Otherwise there are a few
//   stages, and copies are some steps ahead.
//
// Nothing but a team's barrier stands in the main loop, and in a resident tile not even that after the first item.
// Steps run on from one item (16 weight rows for each group, and their columns) to the next, so that loads are always
// in flight.
//
// How to use it: a kernel of MmaTile::kThreads threads and sharedBytes() of dynamic shared memory (aligned to 128
// bytes) makes an MmaTile, calls start() before waitForPrevious() and run() after it. Its callables say where each
// item's rows lie and which rows of activations are its columns. run() calls done(item, round) when the sums of an
// item, or a part of them, are ready. There, forSums() or forPairs() visits the thread's share of them.
#pragma once

#include "kernels/matvec/mma/mma_layout.cuh"
#include "kernels/matvec/mma/stream_room.h"

namespace sharpi::cuda {

// A resident tile's items all have the columns of the first.
template <DType D, int kTiles, bool isResident = false> class MmaTile : MmaLayout<D, kTiles, isResident> {
    using Layout = MmaLayout<D, kTiles, isResident>;
    using Layout::kRoundValues;
    using F = Format<D>;
    using Raw = typename F::Raw;
    using Layout::block;
    using Layout::blockAt;
    using Layout::chunkOffset;
    using Layout::endOffset;
    using Layout::group;
    using Layout::kChunkColumns;
    using Layout::kChunks;
    using Layout::kCodeBytes;
    using Layout::kEndBytes;
    using Layout::kEnds;
    using Layout::kEndStep;
    using Layout::kNeighbours;
    using Layout::kNumberBytes;
    using Layout::kOwn;
    using Layout::kPairBlocks;
    using Layout::kStageBytes;
    using Layout::kStages;
    using Layout::kStride;
    using Layout::kTeam;
    using Layout::kTileBytes;
    using Layout::kUnits;
    using Layout::kWarpBytes;
    using Layout::kWarps;
    using Layout::member;
    using Layout::moved;
    using Layout::nextStage;
    using Layout::rowOfPair;
    using Layout::sumOffset;

public:
    static constexpr DType kType = D;
    // For kernels and launches that take any tile.
    static constexpr bool kIsStream = false;
    static constexpr int kGroupRows = kMmaRows;
    using Numbers = MmaNumbers<D>;
    using Weights = Steps<D>;
    using Layout::kBlocks;
    using Layout::kColumns;
    using Layout::kGroups;
    using Layout::kMinBlocks;
    using Layout::kPairs;
    using Layout::kResident;
    using Layout::kRounds;
    using Layout::kSlices;
    using Layout::kThreads;
    using Layout::lane;
    using Layout::sharedBytes;
    using Layout::slice;
    using Layout::stages;
    using Layout::warp;

    // shared: sharedBytes(cols), aligned to 128 bytes.
    __device__ __forceinline__ MmaTile(uint8_t* shared, int cols, int items, const StreamRoom& = {})
        : _units(cols / kContractBlock), _items(items), _shared(sharedAddress(shared)) {
        const int begin = blockAt(slice(), 0);
        _steps = (_units - begin + kContractAccumulators - 1) / kContractAccumulators;
        if (_steps < 0) _steps = 0;
        const int l = lane(), m = member();
        _staged = _shared + (group() * kSlices + slice()) * kWarpBytes;
        _unpacked = _staged + chunkOffset(rowOfPair(0), 0, block());
        const uint32_t columns = _shared + kGroups * kSlices * kWarpBytes + slice() * stages(cols) * kStageBytes;
        _copied = columns + chunkOffset(m / (2 * kBlocks), m / kBlocks % 2, m % kBlocks);
        _copiedEnd = columns + endOffset(m / kBlocks, m % kBlocks);
        // B's four matrices: both halves of a block, of two blocks or of two tiles.
        _columns = columns + (kPairBlocks == 2 ? chunkOffset(l % 8, l / 8 % 2, l / 16)
                                               : chunkOffset(l % 8 + l / 16 * kMmaColumns, l / 8 % 2, 0));
        _ends = columns + endOffset(l % 4 * 2, 0);
        keep(_unpacked);
        keep(_copied);
        keep(_copiedEnd);
        keep(_columns);
        keep(_ends);
    }

    // Issues the first loads of weights. place(item, group) returns the MmaRows of a group.
    template <typename Place> __device__ __forceinline__ void start(const Place& place) {
        if (_items <= 0 || _steps == 0) return;
        findRows(place, 0);
        fetch(place);
    }

    // rowOf(item, column) is the row of x that is a column of an item; every column needs a valid one, whether it is
    // used or not. done(item, round) is called by all threads, and may use __syncthreads().
    template <typename Place, typename RowOf, typename Done>
    __device__ __forceinline__ void run(const QuantizedRows& x, const Place& place, const RowOf& rowOf,
                                        const Done& done) {
        if (_items > 0 && _steps > 0) findColumns(0, rowOf);
        if constexpr (kResident) {
            if (_items > 0) copyAllColumns(x);
        } else {
#pragma unroll
            for (int i = 1; i < kStages; ++i) copyNext(x, rowOf);
        }
        int stage = 0;  // bytes
        for (int item = 0; item < _items; ++item) {
            float acc[kOwn][kTiles][kBlocks][4] = {};
            for (int step = 0; step < _steps; ++step) {
                unpack(step);
                fetch(place);
                if constexpr (kResident) {
                    if (item == 0) finishColumns(stage, step);
                    else __syncwarp();  // the unpacked weights are written
                } else {
                    finishColumns(stage, 0);  // also orders the warp's own writes before its reads
                    copyNext(x,
                             rowOf);  // to the stage that nobody reads any more: the whole team has passed the barrier
                }
                multiply(stage, acc);
                __syncwarp();  // before the staged weights are overwritten
                stage = kResident ? stage + kStageBytes : nextStage(stage);
            }
            if (kResident) stage = 0;
#pragma unroll
            for (int round = 0; round < kRounds; ++round) {
                keepSums(acc, round);
                __syncthreads();
                done(item, round);
                __syncthreads();
            }
        }
    }

    // Calls f(group, row, column, sum) for this thread's share of an item's sums in a round.
    template <typename Visit> __device__ __forceinline__ void forSums(int round, const Visit& f) const {
        forValues<kGroups>(
            round, [&](int group, int row, int column, int value) { f(group, row, column, sumOf(group, value)); });
    }
    // The same for the sums of two groups at once: f(pair, row, column, first, second).
    template <typename Visit> __device__ __forceinline__ void forPairs(int round, const Visit& f) const {
        static_assert(kPairs == 1);
        forValues<1>(round, [&](int pair, int row, int column, int value) {
            f(pair, row, column, sumOf(0, value), sumOf(1, value));
        });
    }

private:
    // Calls f(group, row, column, value) for this thread's share of the first kVisited groups. sumOf() takes `value`.
    template <int kVisited, typename Visit>
    static __device__ __forceinline__ void forValues(int round, const Visit& f) {
        constexpr int kAll = kRoundValues * kVisited;
#pragma unroll
        for (int i = 0; i < (kAll + kWarps - 1) / kWarps; ++i) {
            const int n = i * kWarps + warp();
            if (kAll % kWarps != 0 && n >= kAll) return;
            const int value = n % kRoundValues, of = round * kRoundValues + value;
            f(n / kRoundValues, lane() / 4 + of % 4 / 2 * 8, of / 4 * kMmaColumns + lane() % 4 * 2 + of % 2, value);
        }
    }
    // The finished sum of this row and column in any group.
    __device__ __forceinline__ float sumOf(int group, int value) const {
        float v[kStride];
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
            float part[kNeighbours];
            readShared(_shared + (group * kSlices + s) * kWarpBytes + sumOffset(value), part);
#pragma unroll
            for (int k = 0; k < kNeighbours; ++k) v[kNeighbours * s + k] = part[k];
        }
        return joined<kStride / 2>(v);
    }

    static constexpr int kGroupBytes = kSlices * kWarpBytes;  // from a group's shared memory to the next

    // --- weights

    template <typename Place> __device__ __forceinline__ void findRows(const Place& place, int item) {
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            const MmaRows<D> rows = place(item, group() + own);
            _base[own] = rows.base;
#pragma unroll
            for (int i = 0; i < kUnits; ++i)
                _first[own][i] =
                    static_cast<uint32_t>(min(rows.row + rowOfPair(i), rows.last)) * static_cast<uint32_t>(_units);
        }
    }
    // Loads the next step's weights, of this item or the following one.
    template <typename Place> __device__ __forceinline__ void fetch(const Place& place) {
        if (_nextItem >= _items) return;
        const int at = blockAt(slice(), block()), b = _nextStep * kContractAccumulators + at;
#pragma unroll
        for (int own = 0; own < kOwn; ++own)
#pragma unroll
            for (int i = 0; i < kUnits; ++i)
                _raw[own][i] = F::loadAt(PlanesOf<D>::at(_base[own], _first[own][i] + min(b, _units - 1)), at % 8);
        if (++_nextStep < _steps) return;
        _nextStep = 0;
        if (++_nextItem < _items) findRows(place, _nextItem);
    }
    // Writes the loaded weights to shared memory. Blocks past the row's end get factors of 0, which add nothing.
    __device__ __forceinline__ void unpack(int step) {
        const int at = blockAt(slice(), block());
        const bool whole = (step + 1) * kContractAccumulators <= _units;
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            const uint32_t codes = _unpacked + own * kGroupBytes;
            const uint32_t numbers =
                _staged + own * kGroupBytes + kCodeBytes + block() * kNumberBytes + rowOfPair(0) * Numbers::kFields * 4;
#pragma unroll
            for (int i = 0; i < kUnits; ++i) {
                uint32_t q[8];
                Numbers::codes(_raw[own][i], q);
                const uint32_t to = kBlocks == 8 ? moved(codes, 4 * i) : moved(codes, 8 * i);
                writeShared4(to, q);
                writeShared4(kBlocks == 8 ? to + 128 : to ^ 64, q + 4);
                BlockFactors factors = blockFactors<D>(floatScales<D>(_raw[own][i], at % 8));
                if (!whole && step * kContractAccumulators + at >= _units) factors = {};
                Numbers::write(numbers + i * (32 / kBlocks) * Numbers::kFields * 4, factors);
            }
        }
    }

    // --- activations

    template <typename RowOf> __device__ __forceinline__ void findColumns(int item, const RowOf& rowOf) {
        const int half = member() / kBlocks % 2;
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
            _chunk[i] =
                static_cast<uint32_t>((rowOf(item, member() / (2 * kBlocks) + i * kChunkColumns) * 2 + half) * _units);
#pragma unroll
        for (int i = 0; i < kEnds; ++i)
            _end[i] = static_cast<uint32_t>(rowOf(item, member() / kBlocks + i * 2 * kChunkColumns) * _units);
    }
    // Begins the copies of the next step, of this item or a following one.
    template <typename RowOf> __device__ __forceinline__ void copyNext(const QuantizedRows& x, const RowOf& rowOf) {
        if (_copyItem < _items && _steps > 0) {
            copyColumns(x, _copyStage, _copyStep);
            if (++_copyStep == _steps) {
                _copyStep = 0;
                if (++_copyItem < _items) findColumns(_copyItem, rowOf);
            }
        }
        closeCopies();
        _copyStage = nextStage(_copyStage);
    }
    __device__ __forceinline__ void copyColumns(const QuantizedRows& x, int stage, int step) const {
        // Blocks past the row's end repeat its last one.
        const int b = min(step * kContractAccumulators + blockAt(slice(), member() % kBlocks), _units - 1);
        const uint32_t to = _copied + stage, toEnd = _copiedEnd + stage;
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
            copyAsync<16>(moved(to, i * kChunkColumns),
                          reinterpret_cast<const uint4*>(x.q) + (_chunk[i] + static_cast<uint32_t>(b)));
#pragma unroll
        for (int i = 0; i < kEnds; ++i) {
            const uint32_t from = _end[i] + static_cast<uint32_t>(b);
            copyAsync<4>(toEnd + i * kEndStep, x.scale + from);
            if (F::kHasMin) copyAsync<4>(toEnd + i * kEndStep + Numbers::kFieldBytes, x.sums + from);
        }
    }
    // Waits for the team's copies. In a resident tile, those of the first step are a group, and all others another one.
    __device__ __forceinline__ void finishColumns(int stage, int step) const {
        if (kResident && step > 0) waitForCopies<0>();
        else waitForCopies<kResident ? 1 : kStages - 2>();
        scaleSums(stage);
        meet<kTeam>(1 + slice());
    }
    __device__ __forceinline__ void copyAllColumns(const QuantizedRows& x) const {
        for (int step = 0; step < _steps; ++step) {
            copyColumns(x, step * kStageBytes, step);
            if (step == 0) closeCopies();
        }
        closeCopies();
    }
    // A thread multiplies the sums that it copied by their scales.
    __device__ __forceinline__ void scaleSums(int stage) const {
        if constexpr (F::kHasMin) {
#pragma unroll
            for (int i = 0; i < kEnds; ++i) {
                const uint32_t at = _copiedEnd + stage + i * kEndStep;
                float scale[1], sums[1];  // the second as bits
                readShared(at, scale);
                readShared(at + Numbers::kFieldBytes, sums);
                const auto part = [&](int first, int second) {
                    const int sum = addPair(__float_as_int(sums[0]), first, second, kIntegerBiasBits);
                    return scaled(scale[0], __int_as_float(sum));
                };
                const float sum[1] = {F::kTwoScales ? part(1, 0) : part(1, 1)}, rest[1] = {part(0, 1)};
                writeShared(at + Numbers::kFieldBytes, sum);
                if (F::kTwoScales) writeShared(at + 2 * Numbers::kFieldBytes, rest);
            }
        }
    }

    // --- sums

    // What one unit of work reads: the weights of a block, or of two, and two fragments of columns.
    struct WeightFragment {
        uint32_t a[kPairBlocks][4];
        BlockFactors rows[kPairBlocks][2];
    };
    using ColumnFragment = typename Numbers::ColumnFragment;
    // Loads run a unit ahead of the arithmetic; with four tiles, those of weights would take too many registers.
    __device__ __forceinline__ void multiply(int stage, float (&acc)[kOwn][kTiles][kBlocks][4]) const {
        constexpr int kInner = kTiles * kPairBlocks / 2, kUnits = kBlocks / kPairBlocks * kInner;
        constexpr int kHeld = kTiles == 4 ? 1 : 2;  // fragments of weights
        WeightFragment weights[kHeld][kOwn];
        ColumnFragment columns[2];
        if (kHeld == 2) loadWeights(0, weights[0]);
        loadColumns(stage, 0, 0, columns[0]);
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            const int first = unit / kInner * kPairBlocks, tile = unit % kInner * (2 / kPairBlocks);
            if (unit + 1 < kUnits) {
                const int next = (unit + 1) / kInner * kPairBlocks;
                if (kHeld == 2 && next != first) loadWeights(next, weights[next / kPairBlocks % kHeld]);
                loadColumns(stage, next, (unit + 1) % kInner * (2 / kPairBlocks), columns[(unit + 1) % 2]);
            }
            if (kHeld == 1 && tile == 0) loadWeights(first, weights[0]);
#pragma unroll
            for (int own = 0; own < kOwn; ++own)
                addUnit(weights[first / kPairBlocks % kHeld][own], columns[unit % 2], first, tile, acc[own]);
        }
    }
    __device__ __forceinline__ void loadWeights(int first, WeightFragment (&w)[kOwn]) const {
        const int l = lane();
        // A's four matrices: rows 0 .. 7 and 8 .. 15 of the first half, then of the second. The number of a block is
        // XORed into the address.
        const uint32_t codesAt = _staged + chunkOffset(l % 16, l / 16, 0);
        const uint32_t numbersAt = _staged + kCodeBytes + l / 4 * Numbers::kFields * 4;
#pragma unroll
        for (int own = 0; own < kOwn; ++own)
#pragma unroll
            for (int k = 0; k < kPairBlocks; ++k) {
                loadFragments(w[own].a[k], (codesAt ^ (first + k) * 16) + own * kGroupBytes);
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    w[own].rows[k][r] = Numbers::read(numbersAt + own * kGroupBytes + (first + k) * kNumberBytes +
                                                      r * 8 * Numbers::kFields * 4);
            }
    }
    __device__ __forceinline__ void loadColumns(int stage, int first, int tile, ColumnFragment& x) const {
        loadFragments(x.b, ((_columns + stage) ^ first * 16) + tile * kTileBytes);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int n = kPairBlocks == 2 ? tile : tile + k, j = kPairBlocks == 2 ? first + k : first;
            x.ends[k] = Numbers::readColumns(_ends + stage + (n * kBlocks + j) * kEndBytes);
        }
    }
    static __device__ __forceinline__ void addUnit(const WeightFragment& w, const ColumnFragment& x, int first,
                                                   int tile, float (&acc)[kTiles][kBlocks][4]) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int n = kPairBlocks == 2 ? tile : tile + k, j = kPairBlocks == 2 ? k : 0;
            typename Numbers::Product product;
            Numbers::multiply(product, w.a[j], x.b + 2 * k);
#pragma unroll
            for (int c = 0; c < 4; ++c)
                acc[n][first + j][c] = Numbers::add(product[0][c], product[Numbers::kHalves][c], w.rows[j][c / 2],
                                                    x.ends[k], c % 2, acc[n][first + j][c]);
        }
    }
    // Adds up the warp's accumulators as the tree's lower levels do, and writes the rest to shared memory.
    __device__ __forceinline__ void keepSums(const float (&acc)[kOwn][kTiles][kBlocks][4], int round) const {
#pragma unroll
        for (int own = 0; own < kOwn; ++own)
#pragma unroll
            for (int value = 0; value < kRoundValues; ++value) {
                const int of = round * kRoundValues + value, n = of / 4, c = of % 4;
                float v[kBlocks];
#pragma unroll
                for (int j = 0; j < kBlocks; ++j) v[j] = acc[own][n][j][c];
#pragma unroll
                for (int width = kBlocks / 2; width >= kNeighbours; width /= 2) {
#pragma unroll
                    for (int j = 0; j < width; ++j) v[j] = __fadd_rn(v[j], v[j + width]);
                }
                float rest[kNeighbours];
#pragma unroll
                for (int k = 0; k < kNeighbours; ++k) rest[k] = v[k];
                writeShared(_staged + own * kGroupBytes + sumOffset(value), rest);
            }
    }

    const int _units, _items;
    const uint32_t _shared;
    int _steps;
    uint32_t _staged;                               // the warp's own shared memory
    uint32_t _unpacked;                             // where the lane writes its first block's codes
    uint32_t _copied, _copiedEnd, _columns, _ends;  // in the first stage: what the thread copies, and what it reads
    typename Weights::Base _base[kOwn];
    Raw _raw[kOwn][kUnits];
    uint32_t _first[kOwn][kUnits];  // the first blocks of the lane's rows
    uint32_t _chunk[kChunks], _end[kEnds];
    int _nextItem = 0, _nextStep = 0;                  // the weights to load next
    int _copyItem = 0, _copyStep = 0, _copyStage = 0;  // the activations to copy next, and where to
};

}  // namespace sharpi::cuda
