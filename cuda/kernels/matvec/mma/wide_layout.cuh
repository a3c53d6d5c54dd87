// Where everything of a wide tile lies in shared memory, and in which order its accumulators are taken. See
// wide_tile.cuh for what the words mean.
#pragma once

#include "kernels/matvec/mma/mma_layout.cuh"

namespace sharpi::cuda {

// kRowWarps, kColumnWarps: warps side by side, each with 32 weight rows and 32 columns.
template <DType D, int kRowWarps, int kColumnWarps> struct WideLayout {
    using Numbers = MmaNumbers<D>;
    static constexpr int kWarps = 8, kThreads = 32 * kWarps;
    static constexpr int kSlices = kWarps / (kRowWarps * kColumnWarps);
    static constexpr int kRows = 32 * kRowWarps, kColumns = kWideColumns * kColumnWarps;
    static constexpr int kBundles = kColumnWarps;
    static constexpr int kGroups = kRows / kMmaRows;  // runs of 16 weight rows
    static constexpr int kOwn = 2, kTiles = 4;        // those of a warp, and its tiles of 8 columns

    // The accumulators of a slice, and the levels of the tree that join them.
    static constexpr int kTurns = kContractAccumulators / kSlices;
    static constexpr int kLevels = kTurns == 16 ? 4 : kTurns == 8 ? 3 : 2;
    static_assert(1 << kLevels == kTurns);
    // Unfinished sums of the lowest level stay in registers.
    static constexpr int kHeldLevels = 1;

    // A run is kSlices neighbouring blocks of all rows and columns. A stage has kRuns of them, so that each thread
    // unpacks two blocks of its weights.
    static constexpr int kUnits = 2;
    static constexpr int kRuns = kUnits * kThreads / (kRows * kSlices);
    // One that is multiplied, the next, whose first blocks are loaded ahead, and one that is filled.
    static constexpr int kStages = 3;
    // The slices' parts of what is unpacked are shifted, because lanes with blocks of different slices write at once.
    static constexpr int kShift = 128 / kSlices;
    static constexpr int whole(int bytes) { return (bytes + 127) / 128 * 128; }
    // Codes: for each run, 16 bytes of the first half of a block for each row, then of its second half.
    static constexpr int kRunCodes = kRows * 32, kSliceCodes = kRuns * kRunCodes + kShift;
    static constexpr int kRunNumbers = kRows * Numbers::kFields * 4, kSliceNumbers = kRuns * kRunNumbers + kShift;
    // Columns: for each run, those of all bundles, and for each bundle those of all slices, as WideColumns has them.
    static constexpr int kRunUnits = kBundles * kSlices, kStageUnits = kRuns * kRunUnits;
    // The fields of ends that a type copies, and where the sums begin that it reads.
    static constexpr int kEndFields = Numbers::kColumnFields == 3 ? WideColumns::kFields : Numbers::kColumnFields;
    static constexpr int kEndSums = Numbers::kColumnFields == 3 ? 2 : 1;
    static constexpr int kEndBytes = kEndFields * kWideColumns * 4;
    static constexpr int kNumbersAt = whole(kSlices * kSliceCodes);
    static constexpr int kColumnsAt = kNumbersAt + whole(kSlices * kSliceNumbers);
    static constexpr int kEndsAt = kColumnsAt + kStageUnits * WideColumns::kCodeBytes;
    static constexpr int kStageBytes = kEndsAt + kStageUnits * kEndBytes;
    // Chunks of 16 bytes that a thread copies, and those of a unit.
    static constexpr int kUnitChunks = WideColumns::kCodeBytes / 16, kEndChunks = kEndBytes / 16;
    static constexpr int kChunks = kStageUnits * kUnitChunks / kThreads;
    static constexpr int kEnds = (kStageUnits * kEndChunks + kThreads - 1) / kThreads;

    static constexpr int kOrderBytes = (kRuns + 1 + 3) / 4 * 16;  // of a stage, see WideOrder

    // A warp's sums: unfinished ones, and at an item's end those that other slices need.
    static constexpr int kSumCount = kOwn * kTiles * 4;  // of a lane
    static constexpr int kLevelBytes = kSumCount * 32 * 4;
    static constexpr int kWarpSumBytes = (kLevels - kHeldLevels) * kLevelBytes;

    // Whether rows have whole runs.
    static constexpr bool takes(int cols) {
        return cols > 0 && cols % (kContractBlock * kSlices) == 0 && cols / kContractBlock < 1 << 16;
    }
    // At least one for each turn.
    static __host__ __device__ constexpr int runs(int units) {
        return units / kSlices > kTurns ? units / kSlices : kTurns;
    }
    static __host__ __device__ constexpr int stages(int units) { return (runs(units) + kRuns - 1) / kRuns; }
    static constexpr int64_t sharedBytes(int cols) {
        return kStages * kStageBytes + kWarps * kWarpSumBytes + whole(stages(cols / kContractBlock) * kOrderBytes);
    }

    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
    static __device__ __forceinline__ int slice() { return warp() % kSlices; }
    static __device__ __forceinline__ int columnWarp() { return warp() / kSlices % kColumnWarps; }
    static __device__ __forceinline__ int rowWarp() { return warp() / (kSlices * kColumnWarps); }

    // What the thread unpacks belongs to one slice and one weight row. Its n-th block is in run unpackedRun(n).
    static __device__ __forceinline__ int ownSlice() { return threadIdx.x % kSlices; }
    static __device__ __forceinline__ int ownRow() { return threadIdx.x / kSlices % kRows; }
    // In a form whose constant part the compiler sees.
    static __device__ __forceinline__ int unpackedRun(int n) {
        constexpr int kRun = kSlices * kRows;  // blocks
        if constexpr (kRun >= kThreads) return n / (kRun / kThreads);
        else return threadIdx.x / kRun + n * (kThreads / kRun);
    }

    // The first block of a turn's run in each step of 32. Turns go by the reversed bits of their number, so that each
    // two, four, ... neighbours are what the contract's tree joins.
    static __device__ __forceinline__ int blockOf(int turn) { return static_cast<int>(__brev(turn) >> 27); }
};

}  // namespace sharpi::cuda
