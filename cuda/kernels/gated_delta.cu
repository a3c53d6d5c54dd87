// Gated DeltaNet row after row, bit for bit the CPU's (cpu/kernels/delta.cpp has the order of every sum), in two launches a layer.
//
// The convolution: a warp takes a head's channels through the rows of a sequence, the last inputs in registers, so that the
// head's length, which norms queries and keys, is a sum over the warp in the order that all norms have.
//
// The delta rule: a block takes a value head through the rows of a sequence. A warp holds 16 columns of the head's
// matrix in registers for all rows: lane 4 n + c has columns 4 c .. 4 c + 3 of lines n, n + 8, n + 16, ..., which is
// accumulator n of the sums, so a sum ends with three exchanges. A step then reads and writes each state once, 64 KiB a
// head, and these reads are asked for before the kernel's turn: nothing in the same pass writes what it begins from.
// Columns do not meet before the norm over the head's output, for which the outputs of a few rows wait in shared memory.
#include "kernels/gated_delta.h"

#include <cmath>

#include "kernels/device_rows.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kConvWarps = 4;
constexpr int kAhead = 4;         // rows of the convolution's inputs that are asked for together
constexpr int kSums = 8;          // accumulators of a column's sums
constexpr int kWarpColumns = 16;
constexpr int kStagedRows = 8;
constexpr int kNormWarps = 8;
constexpr int kElementThreads = 256;

__device__ __forceinline__ float silu(float x) { return __fdiv_rn(x, __fadd_rn(1.0f, portableExp(__fsub_rn(0.0f, x)))); }

// --- convolution ---------------------------------------------------------------------------------------------------

struct ConvWork {
    float *mixed, *alpha, *beta;
    const float *weight, *stepBias, *decay;
    float eps, queryScale;
    int32_t keyHeads, valueHeads, dim;
    int64_t channels;
    float* states;   // slots of [width - 1, channels]
    float* windows;  // [ranges, width - 1, channels]: the inputs before each range; nullptr: those of its state
    const int32_t *from, *to;
    RowRanges ranges;
    HalfRows halves;  // [rows, 2 * keyHeads * dim], where not null
};

// The channels of a head that a lane has: lane, lane + 32, ..
template <int kPer, int kWidth> struct ConvHead {
    int64_t first;  // the lane's first channel
    int count;      // of the lane's channels
    float weight[kPer][kWidth], window[kPer][kWidth];

    __device__ __forceinline__ ConvHead(int head, int dim)
        : first(int64_t{head} * dim + (threadIdx.x & 31)), count((dim - static_cast<int>(threadIdx.x & 31) + 31) / 32) {}

    // window[..][1 ..] from, and [0 ..] to, [width - 1, channels] at `at`.
    __device__ __forceinline__ void readWindow(const float* at, int64_t channels) {
#pragma unroll
        for (int p = 0; p < kPer; p++)
#pragma unroll
            for (int w = 1; w < kWidth; w++) window[p][w] = at && p < count ? at[(w - 1) * channels + first + 32 * p] : 0.0f;
    }
    __device__ __forceinline__ void writeWindow(float* at, int64_t channels) const {
#pragma unroll
        for (int p = 0; p < kPer; p++)
#pragma unroll
            for (int w = 1; w < kWidth; w++)
                if (p < count) at[(w - 1) * channels + first + 32 * p] = window[p][w];
    }
    __device__ __forceinline__ float advance(int p, float x) {
#pragma unroll
        for (int w = 1; w < kWidth; w++) window[p][w - 1] = window[p][w];
        window[p][kWidth - 1] = x;
        float y = 0.0f;
#pragma unroll
        for (int w = 0; w < kWidth; w++) y = fmaf(weight[p][w], window[p][w], y);
        return silu(y);
    }
};

// Row t's input x of the head: its answer to memory.
template <int kPer, int kWidth>
__device__ __forceinline__ void convolveRow(const ConvWork& work, ConvHead<kPer, kWidth>& head, int index, int64_t t, const float (&x)[kPer]) {
    float y[kPer], squares = 0.0f;
#pragma unroll
    for (int p = 0; p < kPer; p++) {
        y[p] = head.advance(p, x[p]);
        if (p < head.count) squares = fmaf(y[p], y[p], squares);
    }
    if (index < 2 * work.keyHeads) {
        const float scale = index < work.keyHeads ? work.queryScale : 1.0f;
        const float inverse = __fdiv_rn(scale, __fsqrt_rn(__fadd_rn(contractTree(squares), work.eps)));
#pragma unroll
        for (int p = 0; p < kPer; p++) y[p] = __fmul_rn(y[p], inverse);
    }
    float* out = work.mixed + t * work.channels + head.first;
    const bool halves = work.halves.hi && index < 2 * work.keyHeads;
#pragma unroll
    for (int p = 0; p < kPer; p++) {
        if (p >= head.count) break;
        out[32 * p] = y[p];
        if (!halves) continue;
        const int64_t at = t * 2 * work.keyHeads * work.dim + head.first + 32 * p;
        const HalfPair pair = splitHalf(y[p]);
        work.halves.hi[at] = pair.hi;
        if (work.halves.lo) work.halves.lo[at] = pair.lo;
    }
}

// The decays and steps of rows [begin, end), by one warp.
__device__ __forceinline__ void makeSteps(const ConvWork& work, int64_t begin, int64_t end) {
    const int64_t last = end * work.valueHeads;
    for (int64_t i = begin * work.valueHeads + (threadIdx.x & 31); i < last; i += 32) {
        const int h = static_cast<int>(i % work.valueHeads);
        const float alpha = __fadd_rn(work.alpha[i], work.stepBias[h]);
        work.alpha[i] = portableExp(__fmul_rn(work.decay[h], portableSoftplus(alpha)));
        work.beta[i] = portableSigmoid(work.beta[i]);
    }
}

// A warp a head of the range blockIdx.y, and one more warp for its decays and steps.
template <int kPer, int kWidth> __global__ void __launch_bounds__(kConvWarps * 32) convKernel(ConvWork work) {
    allowNext();
    const int index = blockIdx.x * kConvWarps + (threadIdx.x >> 5);
    const int heads = 2 * work.keyHeads + work.valueHeads;
    const int64_t begin = work.ranges.begin[blockIdx.y], end = work.ranges.end[blockIdx.y];
    if (begin >= end || index > heads) return waitForPrevious();
    if (index == heads) {
        waitForPrevious();
        return makeSteps(work, begin, end);
    }
    ConvHead<kPer, kWidth> head(index, work.dim);
#pragma unroll
    for (int p = 0; p < kPer; p++)
#pragma unroll
        for (int w = 0; w < kWidth; w++) head.weight[p][w] = p < head.count ? work.weight[w * work.channels + head.first + 32 * p] : 0.0f;
    const int64_t past = (kWidth - 1) * work.channels;
    const int from = work.from[begin];
    if (!work.windows) head.readWindow(from < 0 ? nullptr : work.states + from * past, work.channels);
    waitForPrevious();
    if (work.windows) head.readWindow(work.windows + blockIdx.y * past, work.channels);

    for (int64_t first = begin; first < end; first += kAhead) {
        float x[kAhead][kPer];
        int to[kAhead];
#pragma unroll
        for (int r = 0; r < kAhead; r++) {
            const bool exists = first + r < end;
            to[r] = exists ? work.to[first + r] : -1;
            const float* in = work.mixed + (first + r) * work.channels + head.first;
#pragma unroll
            for (int p = 0; p < kPer; p++) x[r][p] = exists && p < head.count ? in[32 * p] : 0.0f;
        }
#pragma unroll
        for (int r = 0; r < kAhead; r++) {
            if (first + r >= end) break;
            convolveRow(work, head, index, first + r, x[r]);
            if (to[r] >= 0) head.writeWindow(work.states + to[r] * past, work.channels);
        }
    }
}

// Puts aside the inputs before each range: the convolution overwrites inputs, and states that it begins from.
__global__ void __launch_bounds__(kElementThreads) windowsKernel(ConvWork work, int width) {
    allowNext();
    waitForPrevious();
    const int64_t channel = int64_t{blockIdx.x} * kElementThreads + threadIdx.x;
    const int64_t begin = work.ranges.begin[blockIdx.y], past = width - 1;
    if (channel >= work.channels || begin >= work.ranges.end[blockIdx.y]) return;
    float* window = work.windows + blockIdx.y * past * work.channels + channel;
    int64_t row = begin;
    for (int64_t w = past - 1; w >= 0; w--) {
        const int from = work.from[row];
        if (from == kStateIsOfRowBefore) {
            row--;
            window[w * work.channels] = work.mixed[row * work.channels + channel];
        } else {
            // Of the state, as many of the newest inputs as are not in the batch.
            const int64_t entry = w + begin - row;
            window[w * work.channels] = from < 0 ? 0.0f : work.states[(from * past + entry) * work.channels + channel];
        }
    }
}

// --- delta rule ----------------------------------------------------------------------------------------------------

struct DeltaWork {
    const float *mixed, *decay, *step, *gate;
    int32_t keyHeads, valueHeads, dim;
    float* states;  // slots of [valueHeads, dim, dim]
    const int32_t *from, *to;
    RowRanges sequences;
};

// Shared memory of a block. Keys and queries lie as the lanes want them: element n + 8 m at n * pitch + m, the pitch such
// that the eight n fall into different banks.
template <int kLines> struct Staged {
    static constexpr int kPitch = kLines + 4;
    static constexpr int kPermuted = kSums * kPitch;
    float q[kStagedRows][kPermuted], k[kStagedRows][kPermuted];
    float v[kStagedRows][kSums * kLines], gate[kStagedRows][kSums * kLines], out[kStagedRows][kSums * kLines];
    float decay[kStagedRows], step[kStagedRows];
    int32_t to[kStagedRows];
};

// Rows first .. first + count - 1 of the head, a warp a part of a row.
template <int kLines> __device__ __forceinline__ void stageRows(const DeltaWork& work, Staged<kLines>& staged, int64_t first, int count) {
    const int head = blockIdx.x, keyHead = head % work.keyHeads, dim = work.dim;
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5, e = lane * 4;
    const int64_t keyWidth = int64_t{work.keyHeads} * dim, valueWidth = int64_t{work.valueHeads} * dim, channels = 2 * keyWidth + valueWidth;
    for (int item = threadIdx.x >> 5; item < 4 * count; item += warps) {
        const int row = item >> 2, part = item & 3;
        const float* mixed = work.mixed + (first + row) * channels;
        if (e >= dim || (part == 3 && !work.gate)) continue;
        const float* from = part == 0   ? mixed + keyHead * dim
                            : part == 1 ? mixed + keyWidth + keyHead * dim
                            : part == 2 ? mixed + 2 * keyWidth + int64_t{head} * dim
                                        : work.gate + (first + row) * valueWidth + int64_t{head} * dim;
        const float4 x = *reinterpret_cast<const float4*>(from + e);
        if (part >= 2) {
            *reinterpret_cast<float4*>((part == 2 ? staged.v[row] : staged.gate[row]) + e) = x;
            continue;
        }
        float* to = (part == 0 ? staged.q[row] : staged.k[row]) + (e % kSums) * Staged<kLines>::kPitch + e / kSums;
        to[0] = x.x;
        to[Staged<kLines>::kPitch] = x.y;
        to[2 * Staged<kLines>::kPitch] = x.z;
        to[3 * Staged<kLines>::kPitch] = x.w;
    }
    if (threadIdx.x < count) {
        const int64_t at = (first + threadIdx.x) * work.valueHeads + head;
        staged.decay[threadIdx.x] = work.decay[at];
        staged.step[threadIdx.x] = work.step[at];
        staged.to[threadIdx.x] = work.to[first + threadIdx.x];
    }
}

// The ends of four columns' sums: acc[n] += acc[n + 4], then + 2, + 1. Every lane gets its columns'.
__device__ __forceinline__ float4 columnTotals(float4 a) {
#pragma unroll
    for (int width = 16; width >= 4; width /= 2) {
        a.x = __fadd_rn(a.x, __shfl_xor_sync(kWholeWarp, a.x, width));
        a.y = __fadd_rn(a.y, __shfl_xor_sync(kWholeWarp, a.y, width));
        a.z = __fadd_rn(a.z, __shfl_xor_sync(kWholeWarp, a.z, width));
        a.w = __fadd_rn(a.w, __shfl_xor_sync(kWholeWarp, a.w, width));
    }
    return a;
}

__device__ __forceinline__ float4 times(float4 a, float b) {
    return make_float4(__fmul_rn(a.x, b), __fmul_rn(a.y, b), __fmul_rn(a.z, b), __fmul_rn(a.w, b));
}

// a * b + c
__device__ __forceinline__ float4 timesPlus(float4 a, float b, float4 c) {
    return make_float4(fmaf(a.x, b, c.x), fmaf(a.y, b, c.y), fmaf(a.z, b, c.z), fmaf(a.w, b, c.w));
}

// The lane's part of a head's matrix. kWhole: dim is 8 * kLines, else less.
template <int kLines, bool kWhole> struct MatrixPart {
    float4 lines[kLines];
    int count, n, column;
    bool exists;  // the column

    __device__ __forceinline__ explicit MatrixPart(int dim)
        : count(dim / kSums), n((threadIdx.x & 31) >> 2), column((threadIdx.x >> 5) * kWarpColumns + (threadIdx.x & 3) * 4),
          exists(column < dim) {}

    __device__ __forceinline__ bool has(int m) const { return kWhole || m < count; }
    __device__ __forceinline__ void read(const float* matrix, int dim) {
#pragma unroll
        for (int m = 0; m < kLines; m++) {
            lines[m] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (matrix && exists && has(m)) lines[m] = *reinterpret_cast<const float4*>(matrix + (n + kSums * m) * dim + column);
        }
    }
    __device__ __forceinline__ void write(float* matrix, int dim) const {
#pragma unroll
        for (int m = 0; m < kLines; m++)
            if (exists && has(m)) *reinterpret_cast<float4*>(matrix + (n + kSums * m) * dim + column) = lines[m];
    }

    // One row; what it gives for the lane's columns. k, q: this lane's elements, in shared memory. v: of its columns.
    __device__ __forceinline__ float4 advance(const float* k, const float* q, float4 v, float decay, float step) {
        float4 recalled = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        forEachLine(k, [&](float4& line, float key) {
            line = times(line, decay);
            recalled = timesPlus(line, key, recalled);
        });
        recalled = columnTotals(recalled);
        const float4 delta = make_float4(__fmul_rn(__fsub_rn(v.x, recalled.x), step), __fmul_rn(__fsub_rn(v.y, recalled.y), step),
                                         __fmul_rn(__fsub_rn(v.z, recalled.z), step), __fmul_rn(__fsub_rn(v.w, recalled.w), step));
        float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        forEachLine(k, [&](float4& line, float key) { line = timesPlus(delta, key, line); });
        forEachLine(q, [&](float4& line, float query) { out = timesPlus(line, query, out); });
        return columnTotals(out);
    }

private:
    // each(line, its element of x), lines ascending.
    template <typename Each> __device__ __forceinline__ void forEachLine(const float* x, Each each) {
#pragma unroll
        for (int m = 0; m < kLines; m += 4) {
            const float4 four = *reinterpret_cast<const float4*>(x + m);
            const float elements[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (has(m + i)) each(lines[m + i], elements[i]);
        }
    }
};

struct NormWork {
    const float* weight;
    float eps;
    int32_t valueHeads, dim;
};

// A warp norms a head's output o of row t, gates it (neither without a weight) and writes it. o may be where the floats go.
__device__ __forceinline__ void writeGated(const NormWork& work, const float* o, const float* gate, int64_t t, int head, const RowOutputs& out) {
    const int lane = threadIdx.x & 31, dim = work.dim;
    const int64_t cols = int64_t{work.valueHeads} * dim, first = int64_t{head} * dim;
    float squares = 0.0f;
    for (int e = lane; e < dim; e += 32) squares = fmaf(o[e], o[e], squares);
    const float mean = __fdiv_rn(contractTree(squares), static_cast<float>(dim));
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, work.eps)));
    for (int e = lane; e - lane < dim; e += 32) {
        const bool valid = e < dim;
        float y = valid ? o[e] : 0.0f;
        if (valid && work.weight) y = siluTimes(gate[e], __fmul_rn(__fmul_rn(y, inverse), work.weight[e]));
        const int64_t at = t * cols + first + e;
        if (out.quantized.q) quantizeLane(out.quantized, t, cols / kContractBlock, (first + e - lane) / kContractBlock, y);
        if (!valid) continue;
        if (out.floats) out.floats[at] = y;
        if (out.half.hi) {
            const HalfPair pair = splitHalf(y);
            out.half.hi[at] = pair.hi;
            if (out.half.lo) out.half.lo[at] = pair.lo;
        }
    }
}

// Value head blockIdx.x through the rows of sequence blockIdx.y, a warp for each 16 columns.
template <int kLines, bool kWhole>
__global__ void __launch_bounds__(kLines * kSums / kWarpColumns * 32) deltaKernel(DeltaWork work, NormWork norm, RowOutputs out) {
    extern __shared__ float4 stagedQuads[];
    allowNext();
    auto& staged = *reinterpret_cast<Staged<kLines>*>(stagedQuads);
    const int64_t begin = work.sequences.begin[blockIdx.y], end = work.sequences.end[blockIdx.y];
    if (begin >= end) return waitForPrevious();
    const int dim = work.dim, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int64_t matrix = int64_t{dim} * dim, slot = matrix * work.valueHeads;
    float* states = work.states + blockIdx.x * matrix;
    const int from = work.from[begin];
    MatrixPart<kLines, kWhole> part(dim);
    part.read(from < 0 ? nullptr : states + from * slot, dim);
    waitForPrevious();

    for (int64_t first = begin; first < end; first += kStagedRows) {
        const int count = static_cast<int>(min(int64_t{kStagedRows}, end - first));
        stageRows(work, staged, first, count);
        __syncthreads();
        for (int row = 0; row < count; row++) {
            const int lane = part.n * Staged<kLines>::kPitch;
            const float4 v = *reinterpret_cast<const float4*>(staged.v[row] + part.column);
            const float4 o = part.advance(staged.k[row] + lane, staged.q[row] + lane, v, staged.decay[row], staged.step[row]);
            if (part.n == 0) *reinterpret_cast<float4*>(staged.out[row] + part.column) = o;
            const int to = staged.to[row];
            if (to >= 0) part.write(states + to * slot, dim);
        }
        __syncthreads();
        for (int row = warp; row < count; row += warps) writeGated(norm, staged.out[row], staged.gate[row], first + row, blockIdx.x, out);
        __syncthreads();
    }
}

// Value head blockIdx.y of rows kNormWarps * blockIdx.x and on, a warp a row.
__global__ void __launch_bounds__(kNormWarps * 32) gatedNormKernel(const float* x, const float* gate, int64_t rows, NormWork norm,
                                                                   RowOutputs out) {
    allowNext();
    waitForPrevious();
    const int64_t row = int64_t{blockIdx.x} * kNormWarps + (threadIdx.x >> 5);
    if (row >= rows) return;
    const int64_t at = (row * norm.valueHeads + blockIdx.y) * norm.dim;
    writeGated(norm, x + at, gate + at, row, blockIdx.y, out);
}

// --- gated attention -------------------------------------------------------------------------------------------------

// Four elements a thread of row blockIdx.x. gated: [rows, heads, 2, headDim], headDim a multiple of 4. x == nullptr: the queries to
// out.floats.
__global__ void __launch_bounds__(kElementThreads) gatedHeadsKernel(const float* x, const float* gated, int64_t cols, int headDim,
                                                                    RowOutputs out) {
    allowNext();
    waitForPrevious();
    const int64_t row = blockIdx.x, column = (int64_t{blockIdx.y} * kElementThreads + threadIdx.x) * 4;
    const bool valid = column < cols;
    float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (valid) {
        const float4 g = *reinterpret_cast<const float4*>(gated + row * 2 * cols + column + (column / headDim + (x ? 1 : 0)) * headDim);
        y = g;
        if (x) {
            const float4 v = *reinterpret_cast<const float4*>(x + row * cols + column);
            const auto gate = [](float value, float by) { return __fdiv_rn(value, __fadd_rn(1.0f, portableExp(__fsub_rn(0.0f, by)))); };
            y = make_float4(gate(v.x, g.x), gate(v.y, g.y), gate(v.z, g.z), gate(v.w, g.w));
        }
        if (out.floats) *reinterpret_cast<float4*>(out.floats + row * cols + column) = y;
    }
    storeForms(out, row, cols, column, y, valid);
}

void launchGatedHeads(Stream& stream, const float* x, const float* gated, int64_t rows, int32_t heads, int32_t headDim, const RowOutputs& out) {
    const int64_t cols = int64_t{heads} * headDim;
    if (rows == 0 || cols == 0) return;
    if (headDim % 4 != 0 || (out.quantized.q && cols % kContractBlock != 0)) {
        throw Error(ErrorKind::Internal, "gated heads of " + std::to_string(headDim) + " elements");
    }
    const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>((cols + 4 * kElementThreads - 1) / (4 * kElementThreads)));
    launch(stream, gatedHeadsKernel, grid, dim3(kElementThreads), 0, x, gated, cols, headDim, out);
}

ConvWork convWork(const DeltaInputs& in, const DeltaParameters& p, const DeltaShape& s, const DeltaStates& states, const DeltaBatch& batch,
                  const RowRanges& ranges, void* windows, const HalfRows& halves) {
    const auto queryScale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.dim)));
    return {in.mixed, in.alpha, in.beta, p.conv, p.stepBias, p.decay, p.eps, queryScale, s.keyHeads, s.valueHeads, s.dim, s.channels(),
            states.conv, static_cast<float*>(windows), batch.from, batch.to, ranges, halves};
}

using ConvKernel = void (*)(ConvWork);

template <int kPer> ConvKernel convKernelFor(int width) {
    return width == 2 ? convKernel<kPer, 2> : width == 3 ? convKernel<kPer, 3> : convKernel<kPer, 4>;
}

void launchConv(Stream& stream, const ConvWork& work, int width) {
    const int warps = 2 * work.keyHeads + work.valueHeads + 1;  // the last makes decays and steps
    const dim3 grid(static_cast<unsigned>((warps + kConvWarps - 1) / kConvWarps), static_cast<unsigned>(work.ranges.count));
    const ConvKernel kernel = work.dim <= 32 ? convKernelFor<1>(width) : work.dim <= 64 ? convKernelFor<2>(width) : convKernelFor<4>(width);
    launch(stream, kernel, grid, dim3(kConvWarps * 32), 0, work);
}

template <int kLines> void launchDelta(Stream& stream, const DeltaWork& work, const NormWork& norm, const RowOutputs& out) {
    const dim3 grid(static_cast<unsigned>(work.valueHeads), static_cast<unsigned>(work.sequences.count));
    const auto kernel = work.dim == kLines * kSums ? deltaKernel<kLines, true> : deltaKernel<kLines, false>;
    launch(stream, kernel, grid, dim3(kLines * kSums / kWarpColumns * 32), sizeof(Staged<kLines>), work, norm, out);
}

// body(outputs), without what a head alone cannot write: blocks of 32 that lie in two heads, which are then made from the floats.
template <typename Body> void withForms(Stream& stream, const DeltaShape& shape, int64_t rows, const RowOutputs& out, Body body) {
    const bool apart = shape.dim % kContractBlock != 0 && out.quantized.q;
    if (apart && !out.floats) throw Error(ErrorKind::Internal, "heads of " + std::to_string(shape.dim) + " elements are quantized from floats");
    body(RowOutputs{out.floats, apart ? QuantizedRows() : out.quantized, out.half});
    if (apart) convertRows(stream, out.floats, rows, shape.valueWidth(), {nullptr, out.quantized, {}});
}

}  // namespace

void prepareDelta(Stream& stream, const DeltaInputs& in, const DeltaParameters& parameters, const DeltaShape& shape, const DeltaStates& states,
                  const DeltaBatch& batch) {
    requireDelta(shape);
    launchConv(stream, convWork(in, parameters, shape, states, batch, batch.sequences, nullptr, {}), shape.convWidth);
}

void prepareDelta(Stream& stream, const DeltaInputs& in, const DeltaParameters& parameters, const DeltaShape& shape, const DeltaStates& states,
                  const DeltaBatch& batch, const RowRanges& tiles, void* windows, const HalfRows& queriesAndKeys) {
    requireDelta(shape);
    const ConvWork work = convWork(in, parameters, shape, states, batch, tiles, windows, queriesAndKeys);
    const dim3 grid(static_cast<unsigned>((work.channels + kElementThreads - 1) / kElementThreads), static_cast<unsigned>(tiles.count));
    launch(stream, windowsKernel, grid, dim3(kElementThreads), 0, work, shape.convWidth);
    launchConv(stream, work, shape.convWidth);
}

void deltaRule(Stream& stream, const DeltaInputs& in, const DeltaParameters& parameters, const DeltaShape& shape, const DeltaStates& states,
               const DeltaBatch& batch, const RowOutputs& out) {
    requireDelta(shape);
    const DeltaWork work = {in.mixed, in.alpha, in.beta, in.gate, shape.keyHeads, shape.valueHeads, shape.dim, states.matrix,
                            batch.from, batch.to, batch.sequences};
    const NormWork norm = {parameters.headNorm, parameters.eps, shape.valueHeads, shape.dim};
    withForms(stream, shape, batch.rows, out, [&](const RowOutputs& direct) {
        if (shape.dim <= 32) launchDelta<4>(stream, work, norm, direct);
        else if (shape.dim <= 64) launchDelta<8>(stream, work, norm, direct);
        else launchDelta<16>(stream, work, norm, direct);
    });
}

void gatedNorm(Stream& stream, const float* x, const float* gate, const DeltaParameters& parameters, const DeltaShape& shape, int64_t rows,
               const RowOutputs& out) {
    const NormWork norm = {parameters.headNorm, parameters.eps, shape.valueHeads, shape.dim};
    const dim3 grid(static_cast<unsigned>((rows + kNormWarps - 1) / kNormWarps), static_cast<unsigned>(shape.valueHeads));
    withForms(stream, shape, rows, out, [&](const RowOutputs& direct) {
        launch(stream, gatedNormKernel, grid, dim3(kNormWarps * 32), 0, x, gate, rows, norm, direct);
    });
}

void splitGatedQueries(Stream& stream, const float* gated, int64_t rows, int32_t heads, int32_t headDim, float* q) {
    launchGatedHeads(stream, nullptr, gated, rows, heads, headDim, {q, {}, {}});
}

void gateHeads(Stream& stream, const float* x, const float* gated, int64_t rows, int32_t heads, int32_t headDim, const RowOutputs& out) {
    launchGatedHeads(stream, x, gated, rows, heads, headDim, out);
}

}  // namespace sharpi::cuda
