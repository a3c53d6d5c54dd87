// How a stream tile shares out its work, and where everything lies in its shared memory. See stream_tile.cuh for what
// the words mean.
#pragma once

#include "kernels/matvec/mma/mma_layout.cuh"
#include "kernels/matvec/mma/stream_room.h"
#include "kernels/rows/rows.h"

namespace sharpi::cuda {

// How plane p of a packed matrix lies in a slot: the bytes of a step of each of kRows rows.
template <DType D, int p, int kRows> struct StreamPlane {
    using P = PlanesOf<D>;
    // Bytes for each block, or for each eight.
    static constexpr int kBytes = P::template kBytes<p>, kOf = P::template kBlocks<p>;
    static constexpr bool kHasSuperblocks = P::template kBlocks<0> == 8 || P::template kBlocks<1> == 8 ||
                                            P::template kBlocks<2> == 8 || P::template kBlocks<3> == 8;
    static constexpr int kTurn = kBytes * 8 / kOf,
                         kUsed = kTurn * (kContractAccumulators / 8);  // of a row: a turn, a step
    // What a lane copies at once. takes() says whether rows begin at multiples of it.
    static constexpr int kLeast = kHasSuperblocks ? kTurn : kBytes;
    static constexpr int kPiece = kLeast % 16 == 0 ? 16 : kLeast % 8 == 0 ? 8 : 4, kPieces = kUsed / kPiece;
    static_assert(kUsed % kPiece == 0);
    static constexpr bool takes(int64_t cols) {
        return cols % (kHasSuperblocks ? 256 : kContractBlock) == 0 && cols / 32 * kBytes / kOf % kPiece == 0;
    }
    // Eight lanes that read the same bytes of eight rows find them in different banks.
    static constexpr int kStride = kUsed + (kUsed % 128 == 0 && kUsed != 0 ? 16 : 0);
    static constexpr int begin() {
        if constexpr (p == 0) return 0;
        else return (StreamPlane<D, p - 1, kRows>::kEnd + 15) / 16 * 16;
    }
    static constexpr int kBegin = begin(), kEnd = kBegin + kRows * kStride;
};

// kTiles: tiles of 8 columns. kOwn: fragments of 16 weight rows, which are two groups each.
template <DType D, int kTiles, int kOwn> struct StreamLayout {
    using Numbers = MmaNumbers<D>;
    static constexpr int kWarps = 8, kThreads = 32 * kWarps;
    static constexpr int kTurns = kContractAccumulators / kWarps;  // blocks of a warp in a step
    static constexpr int kColumns = kMmaColumns * kTiles, kRows = kMmaRows * kOwn;
    static constexpr int kGroupRows = 8, kGroups = kRows / kGroupRows, kPairs = kGroups / 2;

    template <int p> using Plane = StreamPlane<D, p, kRows>;
    static constexpr int kSlotBytes = (Plane<3>::kEnd + 15) / 16 * 16;
    // With two slots, a step's weights would be requested in the middle of the step before it, which then waits for
    // them.
    static constexpr int kFewestSlots = 3, kMostSlots = 4;

    // A stage of columns: for each block, the first halves of all columns, then the second; and behind all blocks their
    // ends, field by field.
    static constexpr int kFields = Numbers::kColumnFields, kFieldBytes = kColumns * 4;
    static constexpr int kBlockBytes = kColumns * kContractBlock, kEndBytes = kFields * kFieldBytes;
    static constexpr int kEndsAt = kContractAccumulators * kBlockBytes;
    static constexpr int kStageBytes = kEndsAt + kContractAccumulators * kEndBytes;
    static constexpr int kStages = 3;  // if not all columns fit

    // Numbers of a warp's blocks in a step: those of all rows for each turn, twice. With the gap, lanes that write
    // those of four turns find different banks. A lane writes those of a row and a turn, and of every eighth row after
    // it.
    static constexpr int kTurnBytes = kRows * Numbers::kFields * 4 + 32, kNumberBytes = kTurns * kTurnBytes;
    static constexpr int kRowsAtOnce = 32 / kTurns;
    // A warp's sums of an item, joined from its turns: fragments of 512 bytes.
    static constexpr int kSums = kOwn * kTiles, kSumBytes = kSums * 512;

    static constexpr int kNumbersAt = 2 * kMostSlots * 8;  // behind the mbarriers
    static constexpr int kSumsAt = kNumbersAt + kWarps * 2 * kNumberBytes;
    static constexpr int kColumnsAt = (kSumsAt + kWarps * kSumBytes + 127) / 128 * 128;

    static constexpr bool takes(int64_t cols) {
        return cols > 0 && Plane<0>::takes(cols) && Plane<1>::takes(cols) && Plane<2>::takes(cols) &&
               Plane<3>::takes(cols);
    }
    static __host__ __device__ constexpr int steps(int cols) {
        return (cols / kContractBlock + kContractAccumulators - 1) / kContractAccumulators;
    }
    static constexpr int64_t sharedBytes(const StreamRoom& room) {
        return kColumnsAt + int64_t{room.stages} * kStageBytes + int64_t{room.slots} * kSlotBytes;
    }

    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
};

}  // namespace sharpi::cuda
