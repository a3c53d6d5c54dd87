// The copies of a stream tile: weights to the ring of slots, columns to their stages. See stream_tile.cuh.
#pragma once

#include "kernels/matvec/mma/mbarrier.cuh"
#include "kernels/matvec/mma/stream_layout.cuh"

namespace sharpi::cuda {

// What all parts of a tile know.
struct StreamShape {
    int blocks, steps, items;  // blocks of a row, steps of an item, items
    int stages, slots;
    uint32_t shared, weights;  // where shared memory and its slots begin

    // All threads arrive when their part of a slot is there.
    __device__ __forceinline__ Mbarrier full(int slot) const { return Mbarrier(shared + slot * 16); }
    // All warps arrive when they have done with it.
    __device__ __forceinline__ Mbarrier empty(int slot) const { return Mbarrier(shared + slot * 16 + 8); }
};

// No other block of the multiprocessor reads these. Pieces of 16 bytes bypass the L1 cache; smaller ones cannot.
template <int kCount> __device__ __forceinline__ void copyPastL1(uint32_t to, const uint8_t* from) {
    if constexpr (kCount < 16) copyAsync<kCount>(to, from);
#if __CUDA_ARCH__ >= 800
    else
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from))
                     : "memory");
#endif
}

// A warp's part of the copies of weights: a few rows of each step.
template <typename Layout> class StreamWeights {
    template <int p> using Plane = typename Layout::template Plane<p>;
    using P = typename Plane<0>::P;
    static constexpr int kOfWarp = Layout::kRows / Layout::kWarps;
    static_assert(Layout::kGroupRows % kOfWarp == 0);
    // Pieces that a lane copies of a plane in a step.
    template <int p> static constexpr int kCount = (kOfWarp * Plane<p>::kPieces + 31) / 32;
    static constexpr int most(int a, int b) { return a > b ? a : b; }
    static constexpr int kMostCount = most(most(kCount<0>, kCount<1>), most(kCount<2>, kCount<3>));

public:
    // place(item, group) returns the MmaRows of a group.
    template <typename Place> __device__ __forceinline__ void begin(const StreamShape& shape, const Place& place) {
        _item = _step = _slot = 0;
        find(shape, place);
    }
    // Begins the copies of the next step to the next slot, which is empty.
    template <typename Place> __device__ __forceinline__ void next(const StreamShape& shape, const Place& place) {
        if (_item >= shape.items) return;
        const uint32_t to = shape.weights + _slot * Layout::kSlotBytes;
        const int left = shape.blocks - _step * kContractAccumulators;  // blocks of a row
        copyPlane<0>(to, left);
        copyPlane<1>(to, left);
        copyPlane<2>(to, left);
        copyPlane<3>(to, left);
        shape.full(_slot).arriveWithCopies();
        if (++_slot == shape.slots) _slot = 0;
        if (++_step < shape.steps) return;
        _step = 0;
        if (++_item < shape.items) find(shape, place);
    }

private:
    // A lane copies piece lane, lane + 32, ... of the warp's rows. Pieces are those of one row, then of the next.
    template <int p> static __device__ __forceinline__ int rowOf(int i) {
        return (Layout::lane() + 32 * i) / Plane<p>::kPieces;
    }
    template <int p> static __device__ __forceinline__ int byteOf(int i) {
        return (Layout::lane() + 32 * i) % Plane<p>::kPieces * Plane<p>::kPiece;
    }
    template <typename Place> __device__ __forceinline__ void find(const StreamShape& shape, const Place& place) {
        const int row = Layout::warp() * kOfWarp;
        const auto rows = place(_item, row / Layout::kGroupRows);
        const int first = rows.row + row % Layout::kGroupRows;
        findPlane<0>(rows, first, shape.blocks);
        findPlane<1>(rows, first, shape.blocks);
        findPlane<2>(rows, first, shape.blocks);
        findPlane<3>(rows, first, shape.blocks);
    }
    template <int p, typename Rows>
    __device__ __forceinline__ void findPlane(const Rows& rows, int firstRow, int blocks) {
        using Q = Plane<p>;
        if constexpr (Q::kBytes != 0) {
            const auto row = [&](int i) { return min(firstRow + rowOf<p>(i), rows.last); };
            const int first = row(0);
            _from[p] = rows.base.plane[p] + byteOf<p>(0) +
                       P::template offset<p>(static_cast<uint32_t>(first) * static_cast<uint32_t>(blocks));
#pragma unroll
            for (int i = 1; i < kCount<p>; ++i)
                _more[p][i] = (row(i) - first) * (blocks * Q::kBytes / Q::kOf) + byteOf<p>(i) - byteOf<p>(0);
        }
    }
    // What lies past the row's end is not copied: it is multiplied by factors of 0.
    template <int p> __device__ __forceinline__ void copyPlane(uint32_t to, int left) {
        using Q = Plane<p>;
        if constexpr (Q::kBytes != 0) {
            constexpr int kAll = kOfWarp * Q::kPieces;
            to += Q::kBegin + Layout::warp() * kOfWarp * Q::kStride;
#pragma unroll
            for (int i = 0; i < kCount<p>; ++i) {
                if (kAll % 32 != 0 && i * 32 + Layout::lane() >= kAll) break;
                if (byteOf<p>(i) * Q::kOf < left * Q::kBytes)
                    copyPastL1<Q::kPiece>(to + rowOf<p>(i) * Q::kStride + byteOf<p>(i),
                                          _from[p] + (i == 0 ? 0 : _more[p][i]));
            }
            _from[p] += Q::kUsed;
        }
    }

    const uint8_t* _from[PackedShape::kPlanes];   // the lane's first piece of each plane
    int _more[PackedShape::kPlanes][kMostCount];  // bytes from there to its others
    int _item = 0, _step = 0, _slot = 0;          // to copy next
};

// A warp's copies of the columns of its own blocks, step by step.
template <typename Layout> class StreamColumns {
    static constexpr int kColumns = Layout::kColumns, kTurns = Layout::kTurns, kFields = Layout::kFields,
                         kWarps = Layout::kWarps;

public:
    // firstRow: the row of x that is the first column.
    __device__ __forceinline__ StreamColumns(const StreamShape& shape, const WideColumns& x, uint32_t firstRow) {
        const uint32_t first = firstRow + static_cast<uint32_t>(x.first), column = first % WideColumns::kBundle,
                       block = first / WideColumns::kBundle * static_cast<uint32_t>(shape.blocks) + Layout::warp();
        _codes = x.codes + block * WideColumns::kCodeBytes + column * 16;
        _ends = reinterpret_cast<const uint8_t*>(x.ends + block * WideColumns::kEndFloats + column);
        _ofFirst = WideColumns::kBundle - static_cast<int>(column);
    }
    // Begins the copies of the next step to the next stage, and closes their group. The first step comes after the
    // last. Blocks past the row's end repeat its last one.
    __device__ __forceinline__ void next(const StreamShape& shape) {
        constexpr int kPieces = 2 * kColumns, kQuads = kColumns / 4, kEnds = kTurns * kFields * kQuads;
        const int lane = Layout::lane(), last = shape.blocks - 1 - _step * kContractAccumulators - Layout::warp();
        const uint32_t to = shape.shared + Layout::kColumnsAt + _stage * Layout::kStageBytes,
                       codes = to + Layout::warp() * Layout::kBlockBytes,
                       ends = to + Layout::kEndsAt + Layout::warp() * Layout::kEndBytes;
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
            const int block = min(turn * kWarps, last);
#pragma unroll
            for (int n = 0; n < kPieces; n += 32) {
                const int at = n + lane, from = at / kColumns * WideColumns::kBundle + at % kColumns;
                if (kPieces % 32 != 0 && at >= kPieces) break;
                copyPastL1<16>(codes + turn * kWarps * Layout::kBlockBytes + at * 16,
                               _codes + (block * WideColumns::kCodeBytes + from * 16) +
                                   toNextBundle(at % kColumns, shape.blocks * WideColumns::kCodeBytes, 16));
            }
        }
        // The ends of all turns.
#pragma unroll
        for (int n = 0; n < kEnds; n += 32) {
            const int at = n + lane;
            if (kEnds % 32 != 0 && at >= kEnds) break;
            const int turn = at / (kFields * kQuads), field = at / kQuads % kFields;
            // A type with two sums for each block has no use for the sum of both.
            const int from = kFields == 3 && field > 0 ? field + 1 : field;
            copyPastL1<16>(ends + turn * kWarps * Layout::kEndBytes + at % (kFields * kQuads) * 16,
                           _ends + min(turn * kWarps, last) * (WideColumns::kEndFloats * 4) +
                               from * (WideColumns::kBundle * 4) + at % kQuads * 16 +
                               toNextBundle(at % kQuads * 4, shape.blocks * (WideColumns::kEndFloats * 4), 4));
        }
        closeCopies();
        if (++_stage == shape.stages) _stage = 0;
        const bool isLast = ++_step == shape.steps;
        if (isLast) _step = 0;
        const int steps = isLast ? 1 - shape.steps : 1;
        _codes += static_cast<int64_t>(steps) * (kContractAccumulators * WideColumns::kCodeBytes);
        _ends += static_cast<int64_t>(steps) * (kContractAccumulators * WideColumns::kEndFloats * 4);
    }

private:
    // Bytes to where a tile's column is, from where it would be if it were in the bundle of the first. each: bytes of a
    // column.
    __device__ __forceinline__ int toNextBundle(int column, int bundleBytes, int each) const {
        if (WideColumns::kBundle % kColumns == 0) return 0;  // tiles have columns of one bundle
        return column < _ofFirst ? 0 : bundleBytes - WideColumns::kBundle * each;
    }

    const uint8_t *_codes, *_ends;
    int _ofFirst;               // columns, from the tile's first on, of the first's bundle
    int _step = 0, _stage = 0;  // to copy next
};

}  // namespace sharpi::cuda
