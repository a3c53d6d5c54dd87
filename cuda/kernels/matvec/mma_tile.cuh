// Products of quantized weights with up to 8, 16 or 32 rows of activations on the int8 tensor cores (compute capability
// 8.0 and above), bit for bit as core/contract.h defines them.
//
// One mma.sync multiplies one block (32 elements) of 16 weight rows by the same block of 8 rows of activations
// ("columns" here). Its sums are integers, so they are exact in any order. They start at the bits of 1.5 * 2^23, so
// that they are floats without a conversion; no type's sum over a block reaches 2^22. The rest of a block is what the
// contract says, in float, with one accumulator for each of its 32.
//
// The 32 accumulators of a value are divided among the warps of a *group*, which owns 16 weight rows. A group has a
// warp for each *slice* of kBlocks neighbouring blocks: slice s has blocks kBlocks * s + j + 32 * step, which are those
// of accumulators kBlocks * s + j. At the end, the warps meet in shared memory, and each adds up a part of the values
// by the contract's tree. A thread block has kGroups groups. The warps of one slice form a *team*, because they read
// the same blocks of the activations:
//
// - Weights: a lane loads a few blocks as Format<D> defines, one step ahead, in registers. It unpacks them and writes
//   signed bytes and float scales to the warp's own shared memory, which ldmatrix reads as fragments.
// - Activations: a team copies the blocks of all columns to its stages in shared memory. The layout of QuantizedRows is
//   already what ldmatrix needs. If the stages of all steps fit (a *resident* tile), the team copies everything once,
//   and the block has many items with the same columns. Otherwise there are a few stages, and copies are some steps
//   ahead.
//
// Nothing but a team's barrier stands in the main loop, and not even that in a resident tile. Steps run on from one
// item (16 weight rows for each group, and their columns) to the next, so that loads are always in flight.
//
// How to use it: a kernel of MmaTile::kThreads threads and sharedBytes() of dynamic shared memory (aligned to 128
// bytes) makes an MmaTile, calls start() before waitForPrevious() and run() after it. Its callables say where each
// item's rows lie and which rows of activations are its columns. run() calls done(item, round) when the sums of an
// item, or a part of them, are ready. There, forValues() visits the thread's share of them, and sumOf() returns one, of
// its own or any other group.
#pragma once

#include "kernels/matvec/matvec_kernel.cuh"

namespace sharpi::cuda {

constexpr int kMmaRows = 16;    // weight rows of a tile
constexpr int kMmaColumns = 8;  // rows of activations of a tile

// --- instructions ---------------------------------------------------------------------------------------------------

// Shared memory is read and written by address throughout, so that the order of these instructions is the program's.

__device__ __forceinline__ void loadFragments(uint32_t (&out)[4], uint32_t at) {
#if __CUDA_ARCH__ >= 750
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at));
#endif
}

// The sums over a block, or over one half of it, as floats that kIntegerBias was added to.
__device__ __forceinline__ void multiplyBlock(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    int out[4];
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, "
        "%10, %10};"
        : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(kIntegerBiasBits));
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[c] = __int_as_float(out[c]);
#endif
}
__device__ __forceinline__ void multiplyHalf(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t b) {
#if __CUDA_ARCH__ >= 800
    int out[4];
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(kIntegerBiasBits));
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[c] = __int_as_float(out[c]);
#endif
}

// 1, 2 or 4 words, or 8 as two times 4.
template <int kCount> __device__ __forceinline__ void readShared(uint32_t at, float (&v)[kCount]) {
    if constexpr (kCount == 1) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v[0]) : "r"(at));
    if constexpr (kCount == 2) asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(at));
    if constexpr (kCount >= 4)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                     : "r"(at));
    if constexpr (kCount == 8)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4 + 16];"
                     : "=f"(v[4]), "=f"(v[5]), "=f"(v[6]), "=f"(v[7])
                     : "r"(at));
}
// The same in loads of at most two words.
template <int kCount> __device__ __forceinline__ void readPairs(uint32_t at, float (&v)[kCount]) {
    if constexpr (kCount == 1) readShared(at, v);
#pragma unroll
    for (int i = 0; i + 1 < kCount; i += 2) {
        float pair[2];
        readShared(at + 4 * i, pair);
        v[i] = pair[0];
        v[i + 1] = pair[1];
    }
}
template <int kCount> __device__ __forceinline__ void writeShared(uint32_t at, const float (&v)[kCount]) {
    if constexpr (kCount == 1) asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v[0]) : "memory");
    if constexpr (kCount == 2)
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(v[0]), "f"(v[1]) : "memory");
    if constexpr (kCount >= 4)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                     : "memory");
    if constexpr (kCount == 8)
        asm volatile("st.shared.v4.f32 [%0 + 16], {%1, %2, %3, %4};" ::"r"(at), "f"(v[4]), "f"(v[5]), "f"(v[6]),
                     "f"(v[7])
                     : "memory");
}
__device__ __forceinline__ void writeShared4(uint32_t at, const uint32_t* v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

// Copies through the L1 cache: other blocks of the multiprocessor read the same activations.
template <int kBytes> __device__ __forceinline__ void copyAsync(uint32_t to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "n"(kBytes)
                 : "memory");
#endif
}
// Ends a group of the thread's copies.
__device__ __forceinline__ void endCopies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits for all groups of the thread's copies but the last kPending.
template <int kPending> __device__ __forceinline__ void waitForCopies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}
template <int kThreads> __device__ __forceinline__ void meet(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// --- a type's numbers -----------------------------------------------------------------------------------------------

// Which of a block's factors a type has. They lie in shared memory in the order dot0, dot1, min0, min1, without those
// that it lacks.
template <DType D> struct MmaNumbers {
    using F = Format<D>;
    static constexpr bool kHalves = F::kTwoScales || F::kTwoFloats;
    static constexpr int kCount = 1 + kHalves + F::kHasMin * (1 + F::kTwoScales);
    static constexpr int kFields = kCount <= 2 ? kCount : 4;  // floats for each block
    // Of each column's block: its scale, then that times its sum, or times its two halves' sums and a gap.
    static constexpr int kColumnFields = !F::kHasMin ? 1 : F::kTwoScales ? 4 : 2;

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
    static __device__ __forceinline__ Columns readColumns(uint32_t at) {
        Columns x = {};
        // Not as one load: 16 bytes a lane take four times as long as 8, even if lanes read the same.
        float v[2 * kColumnFields];
        readPairs(at, v);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            x.scale[c] = v[c * kColumnFields];
            x.unbias[c] = __fmul_rn(x.scale[c], -kIntegerBias);
            if constexpr (kColumnFields > 1) x.sum0[c] = v[c * kColumnFields + 1];
            if constexpr (kColumnFields > 2) x.sum1[c] = v[c * kColumnFields + 2];
        }
        return x;
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
        if constexpr (F::kOffset != 0) {
#pragma unroll
            for (int k = 0; k < 8; ++k) q[k] = (q[k] + (128u - F::kOffset) * 0x01010101u) ^ 0x80808080u;
        }
    }
};

// --- the tile -------------------------------------------------------------------------------------------------------

// 16 rows of a matrix from `row` on. Those past `last` repeat it: they are computed, and nobody asks for their sums.
template <DType D> struct MmaRows {
    typename Steps<D>::Base base;
    int row, last;
};

// kTiles: tiles of 8 columns. The more there are, the fewer accumulators a warp can have for each value.
// isResident: all activations stay in shared memory, and all items have the columns of the first.
template <DType D, int kTiles, bool isResident = false> class MmaTile {
public:
    using Numbers = MmaNumbers<D>;
    using Weights = Steps<D>;
    static constexpr int kBlocks = kTiles == 1 ? 8 : 4;
    static constexpr int kSlices = kContractAccumulators / kBlocks;
    static constexpr int kGroups = 2;
    static constexpr bool kResident = isResident;
    static constexpr int kThreads = 32 * kSlices * kGroups;
    static constexpr int kItemsAhead = 2;  // that a resident tile prefetches into the L2 cache
    static constexpr int kColumns = kMmaColumns * kTiles;
    // The sums of an item are joined in rounds of at most two tiles, to save shared memory. The activations of a large
    // resident tile leave room for one.
    static constexpr int kRoundTiles = kTiles == 1 || (kTiles == 4 && kResident) ? 1 : 2;
    static constexpr int kRounds = kTiles / kRoundTiles;
    static_assert(kRounds * kRoundTiles == kTiles);

private:
    using F = Format<D>;
    using Raw = typename F::Raw;
    static constexpr int kPairs = kMmaRows * kBlocks / 32;  // blocks that a lane loads in a step
    static constexpr int kTeam = 32 * kGroups;
    // Codes are rows of 2 * kBlocks chunks of 16 bytes: the first halves of all blocks, then the second. Chunks are
    // swizzled by the row's number, so that ldmatrix finds eight rows in different banks.
    static constexpr int kRowBytes = kBlocks * 32;
    // Numbers of block j: those of all rows. The gap keeps the lanes that write in different banks.
    static constexpr int kNumberBytes = (kMmaRows * Numbers::kFields + 4) * 4;
    static constexpr int kCodeBytes = kMmaRows * kRowBytes;
    static constexpr int kStagedBytes = kCodeBytes + kBlocks * kNumberBytes;
    static constexpr int kSumBytes = kRoundTiles * 4 * kBlocks * 32 * 4;  // a warp's accumulators of a round
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

public:
    static __host__ __device__ constexpr int stages(int cols) {
        return kResident ? (cols / kContractBlock + kContractAccumulators - 1) / kContractAccumulators : kStages;
    }
    static constexpr int64_t sharedBytes(int cols) {
        return kGroups * kSlices * kWarpBytes + int64_t{kSlices} * kStageBytes * stages(cols);
    }

    // shared: sharedBytes(cols), aligned to 128 bytes.
    __device__ __forceinline__ MmaTile(uint8_t* shared, int cols, int items)
        : _units(cols / kContractBlock), _items(items), _shared(sharedAddress(shared)) {
        const int begin = slice() * kBlocks;
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

    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int slice() { return threadIdx.x / 32 % kSlices; }
    static __device__ __forceinline__ int group() { return threadIdx.x / (32 * kSlices); }

    // Issues the first loads of weights. place(item) returns the MmaRows of this warp's group.
    template <typename Place> __device__ __forceinline__ void start(const Place& place) {
        if (_items <= 0 || _steps == 0) return;
        findRows(place(0));
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
            for (int ahead = 1; ahead < kStages; ++ahead) copyNext(x, rowOf);
        }
        int stage = 0;  // bytes
        for (int item = 0; item < _items; ++item) {
            if constexpr (kResident) fetchToCacheAhead(place, item + kItemsAhead);
            float acc[kTiles][kBlocks][4] = {};
            for (int step = 0; step < _steps; ++step) {
                unpack(step);
                fetch(place);
                if constexpr (kResident) {
                    __syncwarp();  // the unpacked weights are written
                } else {
                    finishColumns(stage);  // also orders the warp's own writes before its reads
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

    // Calls f(row, column, value) for this thread's share of its group's sums in a round. sumOf() takes `value`.
    template <typename Visit> static __device__ __forceinline__ void forValues(int round, const Visit& f) {
#pragma unroll
        for (int i = 0; i < (kRoundTiles * 4 + kSlices - 1) / kSlices; ++i) {
            const int value = i * kSlices + slice();
            if (kRoundTiles * 4 < kSlices && value >= kRoundTiles * 4) return;
            const int tile = round * kRoundTiles + value / 4;
            f(lane() / 4 + value % 4 / 2 * 8, tile * kMmaColumns + lane() % 4 * 2 + value % 2, value);
        }
    }
    // The finished sum of this row and column in any group.
    __device__ __forceinline__ float sumOf(int group, int value) const {
        float v[kContractAccumulators];
#pragma unroll
        for (int i = 0; i < kContractAccumulators; i += 4) {
            float quad[4];
            readShared(_shared + (group * kSlices + i / kBlocks) * kWarpBytes + sumOffset(value, i % kBlocks), quad);
#pragma unroll
            for (int k = 0; k < 4; ++k) v[i + k] = quad[k];
        }
        return tree<kContractAccumulators / 2>(v);
    }

private:
    template <int kWidth> static __device__ __forceinline__ float tree(float (&v)[kContractAccumulators]) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) v[i] = __fadd_rn(v[i], v[i + kWidth]);
        if constexpr (kWidth > 1) return tree<kWidth / 2>(v);
        return v[0];
    }

    // --- places in shared memory

    static __device__ __forceinline__ uint32_t chunkOffset(int row, int half, int block) {
        return static_cast<uint32_t>(row * kRowBytes + ((half * kBlocks + block) ^ (row & 7)) * 16);
    }
    static __device__ __forceinline__ uint32_t endOffset(int column, int block) {
        return static_cast<uint32_t>(kTiles * kTileBytes + (column / kMmaColumns * kBlocks + block) * kEndBytes +
                                     column % kMmaColumns * Numbers::kColumnFields * 4);
    }
    // The place of `row` + `more` from that of `row`. `more` is a multiple of a power of two up to 8 that is above row.
    static __device__ __forceinline__ uint32_t moved(uint32_t at, int more) {
        return (at ^ (more & 7) * 16) + more * kRowBytes;
    }
    static __device__ __forceinline__ uint32_t sumOffset(int value, int block) {
        return static_cast<uint32_t>(((value * kBlocks + block) / 4 * 32 + lane()) * 16);
    }

    // --- weights

    // The lane's block within the slice, and its rows. Lanes 4 .. 7 of eight have row 4 if a row has only four blocks
    // in a slice: the swizzle puts that into other banks than row 0.
    static __device__ __forceinline__ int block() { return lane() % kBlocks; }
    static __device__ __forceinline__ int rowOfPair(int i) {
        const int r = kBlocks == 8 ? lane() / 8 : lane() / 8 + lane() / 4 % 2 * 4;
        return r + i * (32 / kBlocks);
    }

    __device__ __forceinline__ void findRows(const MmaRows<D>& rows) {
        _base = rows.base;
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
            _first[i] = static_cast<uint32_t>(min(rows.row + rowOfPair(i), rows.last)) * static_cast<uint32_t>(_units);
    }
    // Loads the next step's weights, of this item or the following one.
    template <typename Place> __device__ __forceinline__ void fetch(const Place& place) {
        if (_nextItem >= _items) return;
        const int at = slice() * kBlocks + block(), b = _nextStep * kContractAccumulators + at;
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
            _raw[i] = F::loadAt(PlanesOf<D>::at(_base, _first[i] + min(b, _units - 1)), at % 8);
        if (++_nextStep < _steps) return;
        _nextStep = 0;
        if (++_nextItem < _items) findRows(place(_nextItem));
    }
    // Prefetches an item's rows into the L2 cache, one lane for each row, because one step ahead is too late for
    // memory.
    template <typename Place> __device__ __forceinline__ void fetchToCacheAhead(const Place& place, int item) const {
        if (item >= _items || slice() != 0 || lane() >= kMmaRows) return;
        const auto rows = place(item);
        const uint32_t row = static_cast<uint32_t>(min(rows.row + lane(), rows.last));
        Weights::fetchAhead(rows.base, row * static_cast<uint32_t>(_units), _units);
    }
    // Writes the loaded weights to shared memory. Blocks past the row's end get factors of 0, which add nothing.
    __device__ __forceinline__ void unpack(int step) {
        const uint32_t numbers = _staged + kCodeBytes + block() * kNumberBytes + rowOfPair(0) * Numbers::kFields * 4;
        const int at = slice() * kBlocks + block();
        const bool whole = (step + 1) * kContractAccumulators <= _units;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            uint32_t q[8];
            Numbers::codes(_raw[i], q);
            const uint32_t to = kBlocks == 8 ? moved(_unpacked, 4 * i) : moved(_unpacked, 8 * i);
            writeShared4(to, q);
            writeShared4(kBlocks == 8 ? to + 128 : to ^ 64, q + 4);
            BlockFactors factors = blockFactors<D>(floatScales<D>(_raw[i], at % 8));
            if (!whole && step * kContractAccumulators + at >= _units) factors = {};
            Numbers::write(numbers + i * (32 / kBlocks) * Numbers::kFields * 4, factors);
        }
    }

    // --- activations

    static __device__ __forceinline__ int member() { return group() * 32 + lane(); }

    template <typename RowOf> __device__ __forceinline__ void findColumns(int item, const RowOf& rowOf) {
        const int half = member() / kBlocks % 2, block = member() % kBlocks;
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
            _chunk[i] = static_cast<uint32_t>(
                (rowOf(item, member() / (2 * kBlocks) + i * kChunkColumns) * 2 + half) * _units + block);
#pragma unroll
        for (int i = 0; i < kEnds; ++i)
            _end[i] = static_cast<uint32_t>(rowOf(item, member() / kBlocks + i * 2 * kChunkColumns) * _units + block);
    }
    static __device__ __forceinline__ int nextStage(int stage) {
        return stage == (kStages - 1) * kStageBytes ? 0 : stage + kStageBytes;
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
        endCopies();
        _copyStage = nextStage(_copyStage);
    }
    __device__ __forceinline__ void copyColumns(const QuantizedRows& x, int stage, int step) const {
        // Blocks past the row's end repeat its last one.
        const int b = min(step * kContractAccumulators + slice() * kBlocks, _units - 1 - member() % kBlocks);
        const uint32_t to = _copied + stage, toEnd = _copiedEnd + stage;
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
            copyAsync<16>(moved(to, i * kChunkColumns),
                          reinterpret_cast<const uint4*>(x.q) + (_chunk[i] + static_cast<uint32_t>(b)));
#pragma unroll
        for (int i = 0; i < kEnds; ++i) {
            const uint32_t from = _end[i] + static_cast<uint32_t>(b);
            copyAsync<4>(toEnd + i * kEndStep, x.scale + from);
            if (F::kHasMin) copyAsync<4>(toEnd + i * kEndStep + 4, x.sums + from);
        }
    }
    // Waits for the team's copies.
    __device__ __forceinline__ void finishColumns(int stage) const {
        waitForCopies<kStages - 2>();
        scaleSums(stage);
        meet<kTeam>(1 + slice());
    }
    __device__ __forceinline__ void copyAllColumns(const QuantizedRows& x) const {
        for (int step = 0; step < _steps; ++step) copyColumns(x, step * kStageBytes, step);
        endCopies();
        waitForCopies<0>();
        for (int step = 0; step < _steps; ++step) scaleSums(step * kStageBytes);
        meet<kTeam>(1 + slice());
    }
    // A thread multiplies the sums that it copied by their scales.
    __device__ __forceinline__ void scaleSums(int stage) const {
        if constexpr (F::kHasMin) {
#pragma unroll
            for (int i = 0; i < kEnds; ++i) {
                const uint32_t at = _copiedEnd + stage + i * kEndStep;
                float stored[2];  // the scale, and the bits of the sums
                readShared(at, stored);
                const auto part = [&](int first, int second) {
                    const int sum = addPair(__float_as_int(stored[1]), first, second, kIntegerBiasBits);
                    return scaled(stored[0], __int_as_float(sum));
                };
                const float sum[1] = {F::kTwoScales ? part(1, 0) : part(1, 1)}, rest[1] = {part(0, 1)};
                writeShared(at + 4, sum);
                if (F::kTwoScales) writeShared(at + 8, rest);
            }
        }
    }

    // --- sums

    // What one unit of work reads: the weights of a block, or of two, and two fragments of columns.
    struct WeightFragment {
        uint32_t a[kPairBlocks][4];
        BlockFactors rows[kPairBlocks][2];
    };
    struct ColumnFragment {
        uint32_t b[4];
        typename Numbers::Columns ends[2];
    };
    // Loads run a unit ahead of the arithmetic; with four tiles, those of weights would take too many registers.
    __device__ __forceinline__ void multiply(int stage, float (&acc)[kTiles][kBlocks][4]) const {
        constexpr int kInner = kTiles * kPairBlocks / 2, kUnits = kBlocks / kPairBlocks * kInner;
        constexpr int kHeld = kTiles == 4 ? 1 : 2;  // fragments of weights
        WeightFragment weights[kHeld];
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
            const WeightFragment& w = weights[first / kPairBlocks % kHeld];
            const ColumnFragment& x = columns[unit % 2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const int n = kPairBlocks == 2 ? tile : tile + k, j = kPairBlocks == 2 ? k : 0;
                addBlock(w.a[j], x.b[2 * k], x.b[2 * k + 1], w.rows[j], x.ends[k], acc[n][first + j]);
            }
        }
    }
    __device__ __forceinline__ void loadWeights(int first, WeightFragment& w) const {
        const int l = lane();
        // A's four matrices: rows 0 .. 7 and 8 .. 15 of the first half, then of the second. The number of a block is
        // XORed into the address.
        const uint32_t codesAt = _staged + chunkOffset(l % 16, l / 16, 0);
        const uint32_t numbersAt = _staged + kCodeBytes + l / 4 * Numbers::kFields * 4;
#pragma unroll
        for (int k = 0; k < kPairBlocks; ++k) {
            loadFragments(w.a[k], codesAt ^ (first + k) * 16);
#pragma unroll
            for (int r = 0; r < 2; ++r)
                w.rows[k][r] = Numbers::read(numbersAt + (first + k) * kNumberBytes + r * 8 * Numbers::kFields * 4);
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
    static __device__ __forceinline__ void addBlock(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                                    const BlockFactors (&rows)[2], const typename Numbers::Columns& x,
                                                    float (&acc)[4]) {
        float first[4], second[4] = {};
        if constexpr (Numbers::kHalves) {
            multiplyHalf(first, a[0], a[1], b0);
            multiplyHalf(second, a[2], a[3], b1);
        } else {
            multiplyBlock(first, a, b0, b1);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[c] = Numbers::add(first[c], second[c], rows[c / 2], x, c % 2, acc[c]);
    }
    __device__ __forceinline__ void keepSums(const float (&acc)[kTiles][kBlocks][4], int round) const {
#pragma unroll
        for (int i = 0; i < kRoundTiles; ++i) {
            const int n = round * kRoundTiles + i;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
#pragma unroll
                for (int j = 0; j < kBlocks; j += 4) {
                    const float quad[4] = {acc[n][j][c], acc[n][j + 1][c], acc[n][j + 2][c], acc[n][j + 3][c]};
                    writeShared(_staged + sumOffset(i * 4 + c, j), quad);
                }
            }
        }
    }

    const int _units, _items;
    const uint32_t _shared;
    int _steps;
    uint32_t _staged;                               // the warp's own shared memory
    uint32_t _unpacked;                             // where the lane writes its first block's codes
    uint32_t _copied, _copiedEnd, _columns, _ends;  // in the first stage: what the thread copies, and what it reads
    typename Weights::Base _base;
    Raw _raw[kPairs];
    uint32_t _first[kPairs];  // the first blocks of the lane's rows
    uint32_t _chunk[kChunks], _end[kEnds];
    int _nextItem = 0, _nextStep = 0;                  // the weights to load next
    int _copyItem = 0, _copyStep = 0, _copyStage = 0;  // the activations to copy next, and where to
};

}  // namespace sharpi::cuda
