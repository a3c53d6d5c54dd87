// The numbers that a tile of a tensor-core product has of its blocks, and where everything of an MmaTile lies in shared
// memory. See mma_tile.cuh for what the words mean.
#pragma once

#include "kernels/matvec/mma/shared_codes.cuh"

namespace sharpi::cuda {

// --- a type's numbers -----------------------------------------------------------------------------------------------

// Which of a block's factors a type has. They lie in shared memory in the order dot0, dot1, min0, min1, without those
// that it lacks.
template <DType D> struct MmaNumbers {
    using F = Format<D>;
    static constexpr bool kHalves = F::kTwoScales || F::kTwoFloats;
    static constexpr int kCount = 1 + kHalves + F::kHasMin * (1 + F::kTwoScales);
    static constexpr int kFields = kCount <= 2 ? kCount : 4;  // floats for each block
    // Of each column's block: its scale, then that times its sum, or times its two halves' sums. A field of eight
    // columns is an array of its own, because lanes that read 16 bytes take four times as long as with 8.
    static constexpr int kColumnFields = !F::kHasMin ? 1 : F::kTwoScales ? 3 : 2;
    static constexpr int kFieldBytes = kMmaColumns * 4;

    static __device__ __forceinline__ void write(uint32_t at, const BlockFactors& f) {
        float v[kFields] = {};
        int n = 0;
        v[n++] = f.dot0;
        if (kHalves) v[n++] = f.dot1;
        if (F::kHasMin) v[n++] = f.min0;
        if (F::kHasMin && F::kTwoScales) v[n++] = f.min1;
        writeShared(at, v);
    }
    static __device__ __forceinline__ BlockFactors read(uint32_t at) {
        float v[kFields];
        readPairs(at, v);
        BlockFactors f = {};
        int n = 0;
        f.dot0 = v[n++];
        if (kHalves) f.dot1 = v[n++];
        if (F::kHasMin) f.min0 = v[n++];
        if (F::kHasMin && F::kTwoScales) f.min1 = v[n++];
        return f;
    }
    // Two neighbouring columns. unbias: the scale times -kIntegerBias.
    struct Columns {
        float scale[2], unbias[2], sum0[2], sum1[2];
    };
    // The fields of sums come after the scales', one every `apart` bytes.
    static __device__ __forceinline__ Columns readColumns(uint32_t at, int apart = kFieldBytes) {
        Columns x = {};
        readShared(at, x.scale);
        if constexpr (kColumnFields > 1) readShared(at + apart, x.sum0);
        if constexpr (kColumnFields > 2) readShared(at + 2 * apart, x.sum1);
#pragma unroll
        for (int c = 0; c < 2; ++c) x.unbias[c] = __fmul_rn(x.scale[c], -kIntegerBias);
        return x;
    }
    // Of two products: both halves of each one's columns, and what comes after them.
    struct ColumnFragment {
        uint32_t b[4];
        Columns ends[2];
    };

    // The biased sums of a block, or of its halves. b: both halves of the columns.
    using Product = float[1 + kHalves][4];
    static __device__ __forceinline__ void multiply(Product& product, const uint32_t (&a)[4], const uint32_t* b) {
        if constexpr (kHalves) {
            multiplyHalf(product[0], a[0], a[1], b[0]);
            multiplyHalf(product[1], a[2], a[3], b[1]);
        } else {
            multiplyBlock(product[0], a, b[0], b[1]);
        }
    }
    // The accumulator after a block, from the biased sums of the whole block, or of its halves.
    static __device__ __forceinline__ float add(float first, float second, const BlockFactors& w, const Columns& x,
                                                int c, float acc) {
        acc = fmaf(w.dot0, fmaf(x.scale[c], first, x.unbias[c]), acc);
        if constexpr (kHalves) acc = fmaf(w.dot1, fmaf(x.scale[c], second, x.unbias[c]), acc);
        if constexpr (F::kHasMin) acc = fmaf(w.min0, x.sum0[c], acc);
        if constexpr (F::kHasMin && F::kTwoScales) acc = fmaf(w.min1, x.sum1[c], acc);
        return acc;
    }

    // Codes as signed bytes: minus the offset. Codes are below 64, so no byte carries into the next.
    static __device__ __forceinline__ void codes(const typename F::Raw& raw, uint32_t (&q)[8]) {
        F::codes(raw, q);
#pragma unroll
        for (int k = 0; k < 8; ++k) q[k] = signedCodes(q[k]);
    }
    static __device__ __forceinline__ uint32_t signedCodes(uint32_t q) {
        return F::kOffset != 0 ? (q + (128u - F::kOffset) * 0x01010101u) ^ 0x80808080u : q;
    }
};

// The upper levels of the contract's tree: the sum of 2 * kWidth accumulators, or of sums of a level.
template <int kWidth, int kCount> __device__ __forceinline__ float joined(float (&v)[kCount]) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) v[i] = __fadd_rn(v[i], v[i + kWidth]);
    if constexpr (kWidth > 1) return joined<kWidth / 2>(v);
    return v[0];
}

// --- the layout -----------------------------------------------------------------------------------------------------

// How a thread block of MmaTile shares out its work and its shared memory. kTiles: tiles of 8 columns. The more there
// are, the fewer accumulators a warp can have for each value. isResident: all activations stay in shared memory.
template <DType D, int kTiles, bool isResident> struct MmaLayout {
    using Numbers = MmaNumbers<D>;
    static constexpr int kBlocks = kTiles == 1 ? 8 : 4;
    static constexpr int kSlices = kContractAccumulators / kBlocks;
    // Block j of a slice is number blockAt(j) of the 32 of a step. With four tiles, the sums of 32 accumulators take
    // long to join: those of a slice are then as far apart as the contract's tree allows, and a warp adds up its own
    // but for the last two. Otherwise, all blocks of a slice are neighbours, whose codes are loaded fastest.
    static constexpr int kNeighbours = kTiles == 4 ? 2 : kBlocks;
    static constexpr int kStride = kNeighbours * kSlices;
    // Groups of a block, and of a warp. A warp that has both groups reads the activations once for both, but needs
    // registers for the accumulators of both, and there are half as many warps to hide what loads take.
    static constexpr int kGroups = 2, kPairs = kGroups / 2;
    static constexpr int kOwn = kTiles == 4 ? 2 : 1;
    static constexpr bool kResident = isResident;
    static constexpr int kWarps = kSlices * kGroups / kOwn;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kMinBlocks = kTiles == 1 ? 2 : 1;  // of a multiprocessor
    static constexpr int kColumns = kMmaColumns * kTiles;
    // The sums of an item are joined in rounds, to save shared memory. A lane has four values of a tile.
    static constexpr int kRoundValues = kTiles == 1 ? 4 : 8;
    static constexpr int kRounds = kTiles * 4 / kRoundValues;
    static_assert(kRounds * kRoundValues == kTiles * 4);

    static constexpr int kUnits = kMmaRows * kBlocks / 32;  // blocks that a lane loads in a step
    static constexpr int kTeam = 32 * kGroups / kOwn;
    // Codes are rows of 2 * kBlocks chunks of 16 bytes: the first halves of all blocks, then the second. Chunks are
    // swizzled by the row's number, so that ldmatrix finds eight rows in different banks.
    static constexpr int kRowBytes = kBlocks * 32;
    // Numbers of block j: those of all rows. The gap keeps the lanes that write in different banks.
    static constexpr int kNumberBytes = (kMmaRows * Numbers::kFields + 4) * 4;
    static constexpr int kCodeBytes = kMmaRows * kRowBytes;
    static constexpr int kStagedBytes = kCodeBytes + kBlocks * kNumberBytes;
    static constexpr int kSumBytes = kRoundValues * kNeighbours * 32 * 4;  // what a warp has added up in a round
    static constexpr int kWarpBytes = ((kStagedBytes > kSumBytes ? kStagedBytes : kSumBytes) + 127) / 128 * 128;
    static constexpr int kTileBytes = kMmaColumns * kRowBytes;
    static constexpr int kEndBytes = kMmaColumns * Numbers::kColumnFields * 4;  // of a block of 8 columns
    static constexpr int kStageBytes = kTiles * (kTileBytes + kBlocks * kEndBytes);
    static constexpr int kPairBlocks = kTiles == 1 ? 2 : 1;  // blocks of a tile that one load of columns has
    static constexpr int kChunks = kTiles * kMmaColumns * 2 * kBlocks / kTeam;  // that a thread copies in a step
    static constexpr int kEnds = kTiles * kMmaColumns * kBlocks / kTeam;
    static_assert(kChunks * kTeam == kTiles * kMmaColumns * 2 * kBlocks && kEnds * kTeam * 2 == kChunks * kTeam);
    // Columns between a thread's copies, and bytes between those of scales.
    static constexpr int kChunkColumns = kTeam / (2 * kBlocks);
    static constexpr int kEndStep = 2 * kChunkColumns / kMmaColumns * kBlocks * kEndBytes;
    static_assert(kChunkColumns == 4 || kChunkColumns == 8);
    static_assert(kTeam % (2 * kBlocks) == 0 && kTileBytes % 128 == 0 && kSlices <= 15);
    static_assert(kStageBytes % 128 == 0);

    // A copy takes longer than a step. Four tiles leave room for three stages.
    static constexpr int kStages = kTiles == 4 ? 3 : 4;

    static __host__ __device__ constexpr int stages(int cols) {
        return kResident ? (cols / kContractBlock + kContractAccumulators - 1) / kContractAccumulators : kStages;
    }
    static constexpr int64_t sharedBytes(int cols) {
        return kGroups * kSlices * kWarpBytes + int64_t{kSlices} * kStageBytes * stages(cols);
    }

    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int slice() { return threadIdx.x / 32 % kSlices; }
    static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
    // The first of the warp's groups. Others follow.
    static __device__ __forceinline__ int group() { return threadIdx.x / (32 * kSlices); }
    // The thread within its team.
    static __device__ __forceinline__ int member() { return group() * 32 + lane(); }
    // The lane's block within the slice, and its rows. Lanes 4 .. 7 of eight have row 4 if a row has only four blocks
    // in a slice: the swizzle puts that into other banks than row 0.
    static __device__ __forceinline__ int block() { return lane() % kBlocks; }
    static __device__ __forceinline__ int blockAt(int slice, int j) {
        return kNeighbours * slice + j % kNeighbours + j / kNeighbours * kStride;
    }
    static __device__ __forceinline__ int rowOfPair(int i) {
        const int r = kBlocks == 8 ? lane() / 8 : lane() / 8 + lane() / 4 % 2 * 4;
        return r + i * (32 / kBlocks);
    }

    // --- places in shared memory

    static __device__ __forceinline__ int nextStage(int stage) {
        return stage == (kStages - 1) * kStageBytes ? 0 : stage + kStageBytes;
    }
    static __device__ __forceinline__ uint32_t chunkOffset(int row, int half, int block) {
        return static_cast<uint32_t>(row * kRowBytes + ((half * kBlocks + block) ^ (row & 7)) * 16);
    }
    static __device__ __forceinline__ uint32_t endOffset(int column, int block) {
        return static_cast<uint32_t>(kTiles * kTileBytes + (column / kMmaColumns * kBlocks + block) * kEndBytes +
                                     column % kMmaColumns * 4);
    }
    // The place of `row` + `more` from that of `row`. `more` is a multiple of a power of two up to 8 that is above row.
    static __device__ __forceinline__ uint32_t moved(uint32_t at, int more) {
        return (at ^ (more & 7) * 16) + more * kRowBytes;
    }
    static __device__ __forceinline__ uint32_t sumOffset(int value) {
        return static_cast<uint32_t>((value * 32 + lane()) * kNeighbours * 4);
    }
};

}  // namespace sharpi::cuda
