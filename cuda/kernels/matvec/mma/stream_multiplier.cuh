// How a warp of a stream tile multiplies the blocks of a step. See stream_tile.cuh.
#pragma once

#include "kernels/matvec/mma/stream_copies.cuh"

namespace sharpi::cuda {

// Where a step's data lie: bytes from slot 0, from stage 0, and from the first of a warp's two buffers of numbers.
struct StreamStep {
    uint32_t slot, stage, numbers;
};

// Where a lane reads and writes. Addresses are those of slot 0, stage 0, the first group of rows and the first turn.
template <DType D, typename Layout> class StreamMultiplier {
    using F = Format<D>;
    using Numbers = MmaNumbers<D>;
    static constexpr int kTiles = Layout::kColumns / kMmaColumns, kOwn = Layout::kRows / kMmaRows,
                         kTurns = Layout::kTurns, kWarps = Layout::kWarps, kGroups = Layout::kGroups,
                         kGroupRows = Layout::kGroupRows, kTurnBytes = Layout::kTurnBytes,
                         kRowBytes = Numbers::kFields * 4;  // of a row's numbers
    template <int p> using Plane = typename Layout::template Plane<p>;

    // What two products read of the weights, and of the columns of two tiles, or of two turns.
    struct WeightFragment {
        uint32_t a[kOwn][4];
        BlockFactors rows[kOwn][2];
    };
    using ColumnFragment = typename Numbers::ColumnFragment;
    using Product = typename Numbers::Product[kOwn];

    // A unit is two products, of neighbouring tiles or turns: those of a turn's tiles, then those of the next turn's.
    static constexpr int kUnits = kTurns * kTiles / 2, kFirst = kTiles > 1 ? 1 : 2;
    static_assert(kTurns * kTiles % 2 == 0);
    static __device__ __forceinline__ constexpr int turnOf(int unit, int k) { return (2 * unit + k) / kTiles; }
    static __device__ __forceinline__ constexpr int tileOf(int unit, int k) { return (2 * unit + k) % kTiles; }
    // Bytes from the first product's columns to the second's, if both are of one turn, and if they are not.
    static constexpr int kNextTile = kMmaColumns * 16,
                         kNextTurn = kWarps * Layout::kBlockBytes - (kTiles - 1) * kNextTile;

public:
    using Sums = float[kTurns][kTiles][kOwn][4];
    // What a step has loaded for the next one.
    struct Flow {
        WeightFragment weights[kFirst];
        ColumnFragment columns;
    };

    __device__ __forceinline__ explicit StreamMultiplier(const StreamShape& shape)
        : _place(Layout::warp()), _ownTurn(Layout::lane() % kTurns) {
        const int lane = Layout::lane(), warp = Layout::warp(), row = lane / 4, ownRow = lane / kTurns;
        const uint32_t numbers = shape.shared + Layout::kNumbersAt + warp * 2 * Layout::kNumberBytes,
                       columns = shape.shared + Layout::kColumnsAt;
        _codes = planes(shape.weights, row, 0);
        _scales = planes(shape.weights, ownRow, _ownTurn);
        _numbers = numbers + row * kRowBytes;
        _written = numbers + _ownTurn * kTurnBytes + ownRow * kRowBytes;
        // B's four matrices: both halves of a block, of both products of a unit.
        const uint32_t first =
            columns + warp * Layout::kBlockBytes + lane / 8 % 2 * (Layout::kColumns * 16) + lane % 8 * 16;
        _columns = first + lane / 16 * kNextTile;
        _columnsOfTwoTurns = first + lane / 16 * kNextTurn;
        _ends = columns + Layout::kEndsAt + warp * Layout::kEndBytes + lane % 4 * 8;
        keep(_numbers);
        keep(_written);
        keep(_columns);
        keep(_columnsOfTwoTurns);
        keep(_ends);
    }

    // Writes the numbers of the warp's blocks in a step: a lane those of one turn. left: blocks of a row from the
    // step's beginning on. Those past the row's end get factors of 0, which add nothing.
    __device__ __forceinline__ void writeNumbers(const StreamStep& at, int left) const {
        // All loads first, because the chains of what follows are long.
        constexpr int kCount = Layout::kRows / Layout::kRowsAtOnce;
        typename F::Raw raw[kCount];
        BlockFactors factors[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            raw[i] = loadScales<D>(moved(_scales, at.slot, i * Layout::kRowsAtOnce, 0), _place);
#pragma unroll
        for (int i = 0; i < kCount; ++i) factors[i] = blockFactors<D>(floatScales<D>(raw[i], _place));
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (left < kContractAccumulators && _ownTurn * kWarps + _place >= left) factors[i] = {};
            Numbers::write(_written + at.numbers + i * Layout::kRowsAtOnce * kRowBytes, factors[i]);
        }
    }

    // Loads what the first unit of a step needs.
    __device__ __forceinline__ void begin(const StreamStep& at, Flow& flow) const {
#pragma unroll
        for (int k = 0; k < kFirst; ++k) loadWeights(at, k, flow.weights[k]);
        loadColumns(at, 0, flow.columns);
    }
    // Multiplies a step. Loads run a unit ahead of the products, and these one ahead of what is done with them.
    // between() is called in the middle. After it, the next step's data are there.
    template <typename Between>
    __device__ __forceinline__ void multiply(const StreamStep& at, const StreamStep& next, Flow& flow, Sums& acc,
                                             const Between& between) const {
        WeightFragment weights[kTurns];
        ColumnFragment columns[kUnits];
        Product products[kUnits][2];
        const auto add = [&](int unit) {
            addBlocks(weights[turnOf(unit, 0)], weights[turnOf(unit, 1)], columns[unit], products[unit],
                      acc[turnOf(unit, 0)][tileOf(unit, 0)], acc[turnOf(unit, 1)][tileOf(unit, 1)]);
        };
#pragma unroll
        for (int k = 0; k < kFirst; ++k) weights[k] = flow.weights[k];
        columns[0] = flow.columns;
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            if (unit + 1 == kUnits) {
                begin(next, flow);
            } else {
#pragma unroll
                for (int k = 0; k < 2; ++k)
                    if (tileOf(unit + 1, k) == 0) loadWeights(at, turnOf(unit + 1, k), weights[turnOf(unit + 1, k)]);
                loadColumns(at, unit + 1, columns[unit + 1]);
            }
#pragma unroll
            for (int k = 0; k < 2; ++k)
                multiplyBlocks(weights[turnOf(unit, k)], columns[unit].b + 2 * k, products[unit][k]);
            if (unit > 0) add(unit - 1);
            if (unit == (kUnits - 1) / 2) between();
        }
        add(kUnits - 1);
    }

private:
    // The planes of the warp's block in a turn.
    __device__ __forceinline__ SharedPlanes planes(uint32_t weights, int row, int turn) const {
        return {{{planeAt<0>(weights, row, turn)},
                 {planeAt<1>(weights, row, turn)},
                 {planeAt<2>(weights, row, turn)},
                 {planeAt<3>(weights, row, turn)}}};
    }
    template <int p> __device__ __forceinline__ uint32_t planeAt(uint32_t weights, int row, int turn) const {
        using Q = Plane<p>;
        if constexpr (Q::kBytes == 0) return 0;
        uint32_t at = weights + Q::kBegin + row * Q::kStride + _place / Q::kOf * Q::kBytes + turn * Q::kTurn;
        keep(at);
        return at;
    }
    // The same in a slot, `row` rows and `turn` turns further.
    static __device__ __forceinline__ SharedPlanes moved(const SharedPlanes& from, uint32_t slot, int row, int turn) {
        return {{{movedPlane<0>(from, slot, row, turn)},
                 {movedPlane<1>(from, slot, row, turn)},
                 {movedPlane<2>(from, slot, row, turn)},
                 {movedPlane<3>(from, slot, row, turn)}}};
    }
    template <int p>
    static __device__ __forceinline__ uint32_t movedPlane(const SharedPlanes& from, uint32_t slot, int row, int turn) {
        return from.plane[p].at + slot + static_cast<uint32_t>(row * Plane<p>::kStride + turn * Plane<p>::kTurn);
    }

    __device__ __forceinline__ void loadWeights(const StreamStep& at, int turn, WeightFragment& w) const {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const int own = group / 2, half = group % 2;
            const auto words = CodeWords<D>::load(moved(_codes, at.slot, group * kGroupRows, turn), Layout::lane() % 4);
            w.a[own][half] = Numbers::signedCodes(words.low);
            w.a[own][2 + half] = Numbers::signedCodes(words.high);
            w.rows[own][half] =
                Numbers::read(_numbers + at.numbers + turn * kTurnBytes + group * kGroupRows * kRowBytes);
        }
    }
    __device__ __forceinline__ void loadColumns(const StreamStep& at, int unit, ColumnFragment& x) const {
        const bool isOneTurn = turnOf(unit, 0) == turnOf(unit, 1);
        loadFragments(x.b, (isOneTurn ? _columns : _columnsOfTwoTurns) + at.stage +
                               turnOf(unit, 0) * (kWarps * Layout::kBlockBytes) + tileOf(unit, 0) * (kMmaColumns * 16));
#pragma unroll
        for (int k = 0; k < 2; ++k)
            x.ends[k] = Numbers::readColumns(
                _ends + at.stage + turnOf(unit, k) * (kWarps * Layout::kEndBytes) + tileOf(unit, k) * (kMmaColumns * 4),
                Layout::kFieldBytes);
    }
    static __device__ __forceinline__ void multiplyBlocks(const WeightFragment& w, const uint32_t* b,
                                                          Product& product) {
#pragma unroll
        for (int own = 0; own < kOwn; ++own) Numbers::multiply(product[own], w.a[own], b);
    }
    // Numbers::add() for all values of two blocks, step by step: each step of a value waits for the one before it.
    static __device__ __forceinline__ void addBlocks(const WeightFragment& first, const WeightFragment& second,
                                                     const ColumnFragment& x, const Product (&product)[2],
                                                     float (&firstAcc)[kOwn][4], float (&secondAcc)[kOwn][4]) {
        const auto forAll = [&](const auto& f) {
#pragma unroll
            for (int k = 0; k < 2; ++k)
#pragma unroll
                for (int own = 0; own < kOwn; ++own)
#pragma unroll
                    for (int c = 0; c < 4; ++c)
                        f(k, own, c, (k ? second : first).rows[own][c / 2], (k ? secondAcc : firstAcc)[own][c]);
        };
        float sum[2][kOwn][4];
        constexpr bool kHalves = Numbers::kHalves, kTwoSums = F::kHasMin && F::kTwoScales;
        const auto scale = [&](int half) {
            forAll([&](int k, int own, int c, const BlockFactors&, float&) {
                sum[k][own][c] = fmaf(x.ends[k].scale[c % 2], product[k][own][half][c], x.ends[k].unbias[c % 2]);
            });
        };
        scale(0);
        forAll(
            [&](int k, int own, int c, const BlockFactors& w, float& acc) { acc = fmaf(w.dot0, sum[k][own][c], acc); });
        if constexpr (kHalves) {
            scale(1);
            forAll([&](int k, int own, int c, const BlockFactors& w, float& acc) {
                acc = fmaf(w.dot1, sum[k][own][c], acc);
            });
        }
        if constexpr (F::kHasMin)
            forAll([&](int k, int, int c, const BlockFactors& w, float& acc) {
                acc = fmaf(w.min0, x.ends[k].sum0[c % 2], acc);
            });
        if constexpr (kTwoSums)
            forAll([&](int k, int, int c, const BlockFactors& w, float& acc) {
                acc = fmaf(w.min1, x.ends[k].sum1[c % 2], acc);
            });
    }

    int _place, _ownTurn;  // of the warp's blocks in their superblocks; the turn whose numbers the lane writes
    SharedPlanes _codes, _scales;
    uint32_t _numbers, _written, _columns, _columnsOfTwoTurns, _ends;
};

}  // namespace sharpi::cuda
