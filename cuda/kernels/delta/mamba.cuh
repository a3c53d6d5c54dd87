// Mamba 2's scan for every kernel that goes row after row, bit for bit as in cpu/kernels/scan.cpp. Columns of a head's
// matrix do not interact, so a block takes some columns of a head through the rows of a sequence, with the matrix in
// registers.
#pragma once

#include <type_traits>

#include "core/rules/mamba.h"
#include "kernels/delta/gated_delta.cuh"
#include "kernels/delta/mamba.h"

namespace sharpi::cuda {

constexpr int kScanRows = 8;  // rows that are staged together
static_assert(kScanRows == kSums && kDeltaStepRows <= kSums, "each accumulator's lanes finish one row");

struct MambaWork {
    MambaInputs in;
    MambaParameters parameters;
    MambaShape shape;
    DeltaStates states;
    DeltaBatch batch;
    void* scratch;  // each kernel's own
};

// A row in shared memory, as far as the block's columns need it. B and C lie in the order of the lanes: element n + 8 m
// at n * pitch + m. The pitch puts the eight n into different banks.
template <int kLines, int kColumns> struct ScanRow {
    static constexpr int kPitch = kLines + 4;
    float b[kSums * kPitch], c[kSums * kPitch], x[kColumns], gate[kColumns];
    float step, decay;
    int32_t to, unused;
    __device__ __forceinline__ static int placeOf(int element) { return element % kSums * kPitch + element / kSums; }
};

// The block's head, and its columns of that head: kColumns from `first` on, of which the last ones may not exist.
template <int kColumns> struct ScanPlace {
    int head, group, first;
    __device__ __forceinline__ explicit ScanPlace(const MambaShape& shape) {
        const int pieces = (shape.headDim + kColumns - 1) / kColumns;
        head = static_cast<int>(blockIdx.x) / pieces;
        first = static_cast<int>(blockIdx.x) % pieces * kColumns;
        group = head / shape.headsPerGroup();
    }
    // The first channels of x, B and C.
    __device__ __forceinline__ int x(const MambaShape& shape) const { return head * shape.headDim + first; }
    __device__ __forceinline__ int b(const MambaShape& shape) const {
        return shape.heads * shape.headDim + group * shape.stateDim;
    }
    __device__ __forceinline__ int c(const MambaShape& shape) const { return b(shape) + shape.groups * shape.stateDim; }
};

// kVec neighbouring floats.
template <int kVec> __device__ __forceinline__ void readVec(float (&to)[kVec], const float* from) {
    using Vec = std::conditional_t<kVec == 4, float4, float2>;
    const Vec v = *reinterpret_cast<const Vec*>(from);
#pragma unroll
    for (int i = 0; i < kVec; i++) to[i] = reinterpret_cast<const float*>(&v)[i];
}
template <int kVec> __device__ __forceinline__ void writeVec(float* to, const float (&from)[kVec]) {
    using Vec = std::conditional_t<kVec == 4, float4, float2>;
    Vec v;
#pragma unroll
    for (int i = 0; i < kVec; i++) reinterpret_cast<float*>(&v)[i] = from[i];
    *reinterpret_cast<Vec*>(to) = v;
}

// The lane's part of a head's matrix [stateDim, headDim]. Lane 4 n + c of a warp has columns c * kVec .. of lines n,
// n + 8, ..., which belong to accumulator n of the sums. kWhole: there are 8 * kLines lines; else fewer.
template <int kLines, bool kWhole, int kVec> struct ScanPart {
    static constexpr int kColumns = 4 * kVec;  // of a warp
    float lines[kLines][kVec];
    int n, count, local, column;  // local: the lane's first column among the block's; column: among the head's
    bool exists;                  // whether the head has the columns

    template <int kBlockColumns>
    __device__ __forceinline__ ScanPart(const MambaShape& shape, const ScanPlace<kBlockColumns>& place)
        : n((threadIdx.x & 31) >> 2),
          count((shape.stateDim - n + kSums - 1) / kSums),
          local((threadIdx.x >> 5) * kColumns + (threadIdx.x & 3) * kVec),
          column(place.first + local),
          exists(column < shape.headDim) {}

    __device__ __forceinline__ bool has(int m) const { return kWhole || m < count; }
    __device__ __forceinline__ void read(const float* matrix, int headDim) {
#pragma unroll
        for (int m = 0; m < kLines; m++) {
#pragma unroll
            for (int i = 0; i < kVec; i++) lines[m][i] = 0.0f;
            if (matrix && exists && has(m)) readVec(lines[m], matrix + (n + kSums * m) * headDim + column);
        }
    }
    __device__ __forceinline__ void write(float* matrix, int headDim) const {
#pragma unroll
        for (int m = 0; m < kLines; m++)
            if (exists && has(m)) writeVec(matrix + (n + kSums * m) * headDim + column, lines[m]);
    }

    // Advances the state by one staged row; `sums` become the lane's accumulators of its columns.
    template <typename Row> __device__ __forceinline__ void advance(const Row& row, float (&sums)[kVec]) {
        const float *b = row.b + n * Row::kPitch, *c = row.c + n * Row::kPitch, decay = row.decay;
        float input[kVec];
        readVec(input, row.x + local);
#pragma unroll
        for (int i = 0; i < kVec; i++) input[i] = __fmul_rn(input[i], row.step);
#pragma unroll
        for (int i = 0; i < kVec; i++) sums[i] = 0.0f;
#pragma unroll
        for (int m = 0; m < kLines; m += 4) {
            float ofB[4], ofC[4];
            readVec(ofB, b + m), readVec(ofC, c + m);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                if (!has(m + k)) continue;
#pragma unroll
                for (int i = 0; i < kVec; i++) {
                    float& element = lines[m + k][i];
                    element = fmaf(ofB[k], input[i], __fmul_rn(element, decay));
                    sums[i] = fmaf(element, ofC[k], sums[i]);
                }
            }
        }
    }
};

// The sums end with acc[n] += acc[n + 4], then + 2, + 1. Every lane gets the totals of its columns.
template <int kVec> __device__ __forceinline__ void scanTotals(float (&sums)[kVec]) {
#pragma unroll
    for (int width = 16; width >= 4; width /= 2)
#pragma unroll
        for (int i = 0; i < kVec; i++) sums[i] = __fadd_rn(sums[i], __shfl_xor_sync(kWholeWarp, sums[i], width));
}

// The same for eight rows, of which lane 4 n + c gets the totals of row n in sums[0].
template <int kVec> __device__ __forceinline__ void scanTotals(int n, float (&sums)[kSums][kVec]) {
#pragma unroll
    for (int half = kSums / 2; half >= 1; half /= 2) {
        const bool upper = n & half;
#pragma unroll
        for (int row = 0; row < half; row++) {
#pragma unroll
            for (int i = 0; i < kVec; i++) {
                const float low = sums[row][i], high = sums[row + half][i];
                sums[row][i] = __fadd_rn(upper ? high : low, __shfl_xor_sync(kWholeWarp, upper ? low : high, 4 * half));
            }
        }
    }
}

// Takes the lane's columns through `count` staged rows, the first of which is row `begin` of the batch; writes their
// gated answers and the states that are kept. Without a branch between rows, the sums of one overlap the next row's:
// that is worth its code if there are many (kMany).
template <bool kMany, int kLines, bool kWhole, int kVec, int kColumns>
__device__ __forceinline__ void scanRows(const MambaWork& work, const ScanPlace<kColumns>& place,
                                         ScanPart<kLines, kWhole, kVec>& part, const ScanRow<kLines, kColumns>* rows,
                                         int64_t begin, int count, float skip) {
    const MambaShape& shape = work.shape;
    float* const states = work.states.matrix + int64_t{place.head} * shape.stateDim * shape.headDim;
    float own[kVec] = {};
    const int lane = threadIdx.x & 31;
    if (kMany && count == kScanRows &&
        !__any_sync(kWholeWarp, lane + 1 < kScanRows && rows[lane % kScanRows].to >= 0)) {
        float sums[kScanRows][kVec];
#pragma unroll
        for (int row = 0; row < kScanRows; row++) part.advance(rows[row], sums[row]);
        scanTotals(part.n, sums);
#pragma unroll
        for (int i = 0; i < kVec; i++) own[i] = sums[0][i];
    } else {
#pragma unroll 1
        for (int row = 0; row < count; row++) {
            float sums[kVec];
            part.advance(rows[row], sums);
            scanTotals(sums);
#pragma unroll
            for (int i = 0; i < kVec; i++) own[i] = row == part.n ? sums[i] : own[i];
            if (row + 1 < count && rows[row].to >= 0)
                part.write(states + rows[row].to * shape.matrixFloats(), shape.headDim);
        }
    }
    // Each lane finishes another row.
    if (part.n < count && part.exists) {
        float x[kVec], gate[kVec];
        readVec(x, rows[part.n].x + part.local);
        readVec(gate, rows[part.n].gate + part.local);
        siluOfAll(gate);
#pragma unroll
        for (int i = 0; i < kVec; i++) own[i] = __fmul_rn(gate[i], fmaf(skip, x[i], own[i]));
        writeVec(work.in.gate + (begin + part.n) * shape.width() + place.head * shape.headDim + part.column, own);
    }
    const int last = rows[count - 1].to;
    if (last >= 0) part.write(states + last * shape.matrixFloats(), shape.headDim);
}

// Calls launch(kLines, kWhole) with room for a state of that many lines.
template <typename Launch> void withLines(int32_t stateDim, const Launch& launch) {
    if (stateDim <= 64) launch(std::integral_constant<int, 8>(), std::false_type());
    else if (stateDim == 128) launch(std::integral_constant<int, 16>(), std::true_type());
    else if (stateDim < 128) launch(std::integral_constant<int, 16>(), std::false_type());
    else if (stateDim == 256) launch(std::integral_constant<int, 32>(), std::true_type());
    else launch(std::integral_constant<int, 32>(), std::false_type());
}

}  // namespace sharpi::cuda
