// Gated DeltaNet row after row, in two launches for each layer, with the bits of the CPU (cpu/kernels/delta.cpp has the
// order of every sum). The few rows of a step go through gated_delta_step.cu instead.
//
// The convolution: a warp takes a head's channels through the rows of a sequence and keeps the last inputs in
// registers. So the head's length, which norms queries and keys, is a sum over the warp in the order that all norms
// have.
//
// The delta rule: a block takes a value head through the rows of a sequence. A warp holds 16 columns of the head's
// matrix in registers for all rows: lane 4 n + c has columns 4 c .. 4 c + 3 of lines n, n + 8, n + 16, ... Those lines
// belong to accumulator n of the sums, so a sum ends with three exchanges. A step reads and writes each state once,
// 64 KiB for each head. It issues these reads before the kernel's turn, since nothing in the same pass writes the state
// that it begins from. Columns do not interact before the norm over the head's output, so the outputs of a few rows are
// kept in shared memory until then.
#include "kernels/delta/gated_delta.h"

#include <cmath>

#include "kernels/delta/gated_delta.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kConvWarps = 4;
constexpr int kAhead = 4;  // rows of the convolution's inputs that are loaded together
constexpr int kStagedRows = 8;
constexpr int kNormWarps = 8;
constexpr int kElementThreads = 256;
constexpr int kStepBlocks = 4;  // blocks of a tile that compute its decays and steps

// --- convolution ---------------------------------------------------------------------------------------------------

struct ConvWork {
    float *mixed, *alpha, *beta;
    const float* steps;  // see DeltaInputs
    int32_t headsPerKey;
    const float *weight, *stepBias, *decay;
    float eps, queryScale;
    int32_t keyHeads, valueHeads, dim;
    int64_t channels;
    float* states;   // entries of [width - 1, channels]
    float* windows;  // [ranges, width - 1, channels]: the inputs before each range, if it is a tile
    const int32_t *from, *to;
    RowRanges ranges;
    HalfRows halves;  // [rows, 2 * keyHeads * dim], or null
};

// The channels of a head that belong to a lane: lane, lane + 32, ...
template <int kPer, int kWidth> struct ConvHead {
    int64_t first;  // the lane's first channel
    int count;      // the number of the lane's channels
    float weight[kPer][kWidth], window[kPer][kWidth];

    __device__ __forceinline__ ConvHead(int head, int dim)
        : first(int64_t{head} * dim + (threadIdx.x & 31)),
          count((dim - static_cast<int>(threadIdx.x & 31) + 31) / 32) {}

    __device__ __forceinline__ void readWeights(const ConvWork& work) {
#pragma unroll
        for (int p = 0; p < kPer; p++)
#pragma unroll
            for (int w = 0; w < kWidth; w++)
                weight[p][w] = p < count ? work.weight[w * work.channels + first + 32 * p] : 0.0f;
    }
    // Reads window[..][1 ..] from [width - 1, channels] at `at`. writeWindow writes window[..][0 ..] there.
    __device__ __forceinline__ void readWindow(const float* at, int64_t channels) {
#pragma unroll
        for (int p = 0; p < kPer; p++)
#pragma unroll
            for (int w = 1; w < kWidth; w++)
                window[p][w] = at && p < count ? at[(w - 1) * channels + first + 32 * p] : 0.0f;
    }
    __device__ __forceinline__ void writeWindow(float* at, int64_t channels) const {
#pragma unroll
        for (int p = 0; p < kPer; p++)
#pragma unroll
            for (int w = 1; w < kWidth; w++)
                if (p < count) at[(w - 1) * channels + first + 32 * p] = window[p][w];
    }
    // Reads the inputs and the state entries of the rows from `row` on that come before `last`.
    __device__ __forceinline__ void readRows(const ConvWork& work, int64_t row, int64_t last, float (&x)[kAhead][kPer],
                                             int (&to)[kAhead]) const {
        const float* in = work.mixed + row * work.channels + first;
#pragma unroll
        for (int r = 0; r < kAhead; r++, in += work.channels) {
            const bool exists = row + r < last;
            to[r] = exists ? work.to[row + r] : -1;
#pragma unroll
            for (int p = 0; p < kPer; p++) x[r][p] = exists && p < count ? in[32 * p] : 0.0f;
        }
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

// Convolves the head's input x of row t and writes the result to memory.
template <int kPer, int kWidth>
__device__ __forceinline__ void convolveRow(const ConvWork& work, ConvHead<kPer, kWidth>& head, int index, int64_t t,
                                            const float (&x)[kPer]) {
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

// Makes the decay and the step of head i % valueHeads of row begin + i / valueHeads.
__device__ __forceinline__ void makeStep(const ConvWork& work, int64_t begin, int i) {
    const int h = i % work.valueHeads;
    const int64_t at = begin * work.valueHeads + i;
    const float *alpha = work.alpha + at, *beta = work.beta + at;
    if (work.steps) {
        beta = work.steps + betaAt(begin + i / work.valueHeads, h, work.valueHeads, work.headsPerKey);
        alpha = beta + work.headsPerKey;
    }
    const float step = portableSigmoid(*beta);
    work.alpha[at] = portableExp(__fmul_rn(work.decay[h], portableSoftplus(__fadd_rn(*alpha, work.stepBias[h]))));
    work.beta[at] = step;
}

// A warp for each head of range blockIdx.y, and one more warp for the decays and steps.
template <int kPer, int kWidth> __global__ void __launch_bounds__(kConvWarps * 32) convKernel(ConvWork work) {
    allowNext();
    const int index = blockIdx.x * kConvWarps + (threadIdx.x >> 5);
    const int heads = 2 * work.keyHeads + work.valueHeads;
    const int64_t begin = work.ranges.begin[blockIdx.y], end = work.ranges.end[blockIdx.y];
    if (begin >= end || index > heads) return waitForPrevious();
    if (index == heads) {
        waitForPrevious();
        const int count = static_cast<int>(end - begin) * work.valueHeads;
        for (int i = threadIdx.x & 31; i < count; i += 32) makeStep(work, begin, i);
        return;
    }
    ConvHead<kPer, kWidth> head(index, work.dim);
    head.readWeights(work);
    const int64_t past = (kWidth - 1) * work.channels;
    const int from = work.from[begin];
    head.readWindow(from < 0 ? nullptr : work.states + from * past, work.channels);
    waitForPrevious();

    for (int64_t first = begin; first < end; first += kAhead) {
        float x[kAhead][kPer];
        int to[kAhead];
        head.readRows(work, first, end, x, to);
#pragma unroll
        for (int r = 0; r < kAhead; r++) {
            if (first + r >= end) break;
            convolveRow(work, head, index, first + r, x[r]);
            if (to[r] >= 0) head.writeWindow(work.states + to[r] * past, work.channels);
        }
    }
}

// The first `channelBlocks` blocks of a range save the inputs before it, because the convolution overwrites inputs and
// the states that it begins from. The other blocks make the range's decays and steps.
__global__ void __launch_bounds__(kElementThreads) windowsKernel(ConvWork work, int width, int channelBlocks) {
    allowNext();
    waitForPrevious();
    const int64_t begin = work.ranges.begin[blockIdx.y], end = work.ranges.end[blockIdx.y], past = width - 1;
    if (static_cast<int>(blockIdx.x) >= channelBlocks) {
        const int count = static_cast<int>(end - begin) * work.valueHeads, stride = kStepBlocks * kElementThreads;
        for (int i = (blockIdx.x - channelBlocks) * kElementThreads + threadIdx.x; i < count; i += stride) {
            makeStep(work, begin, i);
        }
        return;
    }
    const int64_t channel = int64_t{blockIdx.x} * kElementThreads + threadIdx.x;
    if (channel >= work.channels || begin >= end) return;
    float* window = work.windows + blockIdx.y * past * work.channels + channel;
    int64_t row = begin;
    for (int64_t w = past - 1; w >= 0; w--) {
        const int from = work.from[row];
        if (from == kStateIsOfRowBefore) {
            row--;
            window[w * work.channels] = work.mixed[row * work.channels + channel];
        } else {
            // The newest inputs of the state, as many as the batch itself does not have.
            const int64_t entry = w + begin - row;
            window[w * work.channels] = from < 0 ? 0.0f : work.states[(from * past + entry) * work.channels + channel];
        }
    }
}

// Head blockIdx.x of range blockIdx.y. Each warp takes a part of the rows, since many short loops keep memory busy.
// kWhole: heads have 32 * kPer elements.
template <int kPer, int kWidth, bool kWhole>
__global__ void __launch_bounds__(kConvWarps * 32, 6) convTilesKernel(ConvWork work) {
    allowNext();
    const int64_t begin = work.ranges.begin[blockIdx.y], end = work.ranges.end[blockIdx.y];
    if (begin >= end) return waitForPrevious();
    ConvHead<kPer, kWidth> head(blockIdx.x, kWhole ? 32 * kPer : work.dim);
    if (kWhole) head.count = kPer;
    head.readWeights(work);
    waitForPrevious();

    const int64_t past = (kWidth - 1) * work.channels, rows = (end - begin + kConvWarps - 1) / kConvWarps;
    const int64_t first = begin + (threadIdx.x >> 5) * rows, last = min(first + rows, end);
    // The inputs before the first row may belong to another warp, which overwrites them once all warps have read.
#pragma unroll
    for (int w = 1; w < kWidth; w++) {
        const int64_t row = first - kWidth + w;
        const float* at = row >= begin ? work.mixed + row * work.channels
                                       : work.windows + blockIdx.y * past + (row - begin + kWidth - 1) * work.channels;
#pragma unroll
        for (int p = 0; p < kPer; p++)
            head.window[p][w] = first < last && p < head.count ? at[head.first + 32 * p] : 0.0f;
    }
    float x[kAhead][kPer];
    int to[kAhead];
    head.readRows(work, first, last, x, to);
    __syncthreads();
    for (int64_t row = first; row < last; row += kAhead) {
#pragma unroll
        for (int r = 0; r < kAhead; r++) {
            if (row + r >= last) return;
            convolveRow(work, head, blockIdx.x, row + r, x[r]);
            if (to[r] >= 0) head.writeWindow(work.states + to[r] * past, work.channels);
        }
        head.readRows(work, row + kAhead, last, x, to);
    }
}

// --- delta rule ----------------------------------------------------------------------------------------------------

struct DeltaWork {
    const float *mixed, *decay, *step, *gate;
    int32_t keyHeads, valueHeads, headsPerKey, dim;
    float* states;  // entries of [valueHeads, dim, dim]
    const int32_t *from, *to;
    RowRanges sequences;
};

// Shared memory of a block. Keys and queries lie in the order of the lanes: element n + 8 m at n * pitch + m. The pitch
// puts the eight n into different banks.
template <int kLines> struct Staged {
    static constexpr int kPitch = kLines + 4;
    static constexpr int kPermuted = kSums * kPitch;
    float q[kStagedRows][kPermuted], k[kStagedRows][kPermuted];
    float v[kStagedRows][kSums * kLines], gate[kStagedRows][kSums * kLines], out[kStagedRows][kSums * kLines];
    float decay[kStagedRows], step[kStagedRows];
    int32_t to[kStagedRows];
};

// Stages rows first .. first + count - 1 of the head. Each warp copies a part of a row.
template <int kLines>
__device__ __forceinline__ void stageRows(const DeltaWork& work, Staged<kLines>& staged, int64_t first, int count) {
    const int head = blockIdx.x, keyHead = keyHeadOf(head, work.keyHeads, work.headsPerKey), dim = work.dim;
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5, e = lane * 4;
    const int64_t keyWidth = int64_t{work.keyHeads} * dim, valueWidth = int64_t{work.valueHeads} * dim,
                  channels = 2 * keyWidth + valueWidth;
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

struct NormWork {
    const float* weight;
    float eps;
    int32_t valueHeads, dim;
};

// A warp norms a head's output o of row t, gates it and writes it. Without a weight it neither norms nor gates. o may
// be the place of the floats that it writes.
__device__ __forceinline__ void writeGated(const NormWork& work, const float* o, const float* gate, int64_t t, int head,
                                           const RowOutputs& out) {
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
        if (out.quantized.q)
            quantizeLane(out.quantized, t, cols / kContractBlock, (first + e - lane) / kContractBlock, y);
        if (!valid) continue;
        if (out.floats) out.floats[at] = y;
        if (out.half.hi) {
            const HalfPair pair = splitHalf(y);
            out.half.hi[at] = pair.hi;
            if (out.half.lo) out.half.lo[at] = pair.lo;
        }
    }
}

// Takes value head blockIdx.x through the rows of sequence blockIdx.y, with a warp for each 16 columns.
template <int kLines, bool kWhole>
__global__ void __launch_bounds__(kLines* kSums / kWarpColumns * 32)
    deltaKernel(DeltaWork work, NormWork norm, RowOutputs out) {
    extern __shared__ float4 stagedQuads[];
    allowNext();
    auto& staged = *reinterpret_cast<Staged<kLines>*>(stagedQuads);
    const int64_t begin = work.sequences.begin[blockIdx.y], end = work.sequences.end[blockIdx.y];
    if (begin >= end) return waitForPrevious();
    const int dim = work.dim, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int64_t matrix = int64_t{dim} * dim, stateFloats = matrix * work.valueHeads;
    float* states = work.states + blockIdx.x * matrix;
    const int from = work.from[begin];
    MatrixPart<kLines, kWhole> part(dim);
    part.read(from < 0 ? nullptr : states + from * stateFloats, dim);
    waitForPrevious();

    for (int64_t first = begin; first < end; first += kStagedRows) {
        const int count = static_cast<int>(min(int64_t{kStagedRows}, end - first));
        stageRows(work, staged, first, count);
        __syncthreads();
        for (int row = 0; row < count; row++) {
            const int lane = part.n * Staged<kLines>::kPitch;
            const float4 v = *reinterpret_cast<const float4*>(staged.v[row] + part.column);
            const float4 o =
                part.advance(staged.k[row] + lane, staged.q[row] + lane, v, staged.decay[row], staged.step[row]);
            if (part.n == 0) *reinterpret_cast<float4*>(staged.out[row] + part.column) = o;
            const int to = staged.to[row];
            if (to >= 0) part.write(states + to * stateFloats, dim);
        }
        __syncthreads();
        for (int row = warp; row < count; row += warps)
            writeGated(norm, staged.out[row], staged.gate[row], first + row, blockIdx.x, out);
        __syncthreads();
    }
}

// Writes what writeGated writes, for value head blockIdx.y of rows kNormWarps * blockIdx.x and on, with a warp for each
// row. A lane has four neighbouring elements, and all loads are issued before the first use.
__global__ void __launch_bounds__(kNormWarps * 32)
    gatedNormKernel(const float* x, const float* gate, int64_t rows, NormWork norm, RowOutputs out) {
    allowNext();
    const int lane = threadIdx.x & 31, dim = norm.dim, e = lane * 4;
    const int64_t row = int64_t{blockIdx.x} * kNormWarps + (threadIdx.x >> 5);
    const bool valid = e < dim;
    const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float4 weight = valid ? *reinterpret_cast<const float4*>(norm.weight + e) : none;
    waitForPrevious();
    if (row >= rows) return;
    const int64_t cols = int64_t{norm.valueHeads} * dim, column = int64_t{blockIdx.y} * dim + e;
    const float* head = x + row * cols + (column - e);
    float each[kMaxDeltaDim / 32];  // in the order of the sum: a lane's elements are 32 apart
#pragma unroll
    for (int p = 0; p < kMaxDeltaDim / 32; p++) each[p] = lane + 32 * p < dim ? head[lane + 32 * p] : 0.0f;
    float4 y = valid ? *reinterpret_cast<const float4*>(head + e) : none;
    const float4 by = valid ? *reinterpret_cast<const float4*>(gate + row * cols + column) : none;
    float squares = 0.0f;
#pragma unroll
    for (int p = 0; p < kMaxDeltaDim / 32; p++) squares = fmaf(each[p], each[p], squares);
    const float mean = __fdiv_rn(contractTree(squares), static_cast<float>(dim));
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, norm.eps)));
    y.x = siluTimes(by.x, __fmul_rn(__fmul_rn(y.x, inverse), weight.x));
    y.y = siluTimes(by.y, __fmul_rn(__fmul_rn(y.y, inverse), weight.y));
    y.z = siluTimes(by.z, __fmul_rn(__fmul_rn(y.z, inverse), weight.z));
    y.w = siluTimes(by.w, __fmul_rn(__fmul_rn(y.w, inverse), weight.w));
    if (valid && out.floats) *reinterpret_cast<float4*>(out.floats + row * cols + column) = y;
    storeForms(out, row, cols, column, y, valid);
}

// --- gated attention -------------------------------------------------------------------------------------------------

// A thread takes four elements of row blockIdx.x. gated: [rows, heads, 2, headDim], headDim a multiple of 4. If x is
// null, the queries go to out.floats.
__global__ void __launch_bounds__(kElementThreads)
    gatedHeadsKernel(const float* x, const float* gated, int64_t cols, int headDim, RowOutputs out) {
    allowNext();
    waitForPrevious();
    const int64_t row = blockIdx.x, column = (int64_t{blockIdx.y} * kElementThreads + threadIdx.x) * 4;
    const bool valid = column < cols;
    float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (valid) {
        const float4 g = *reinterpret_cast<const float4*>(gated + row * 2 * cols + column +
                                                          (column / headDim + (x ? 1 : 0)) * headDim);
        y = g;
        if (x) {
            const float4 v = *reinterpret_cast<const float4*>(x + row * cols + column);
            const auto gate = [](float value, float by) {
                return __fdiv_rn(value, __fadd_rn(1.0f, portableExp(__fsub_rn(0.0f, by))));
            };
            y = make_float4(gate(v.x, g.x), gate(v.y, g.y), gate(v.z, g.z), gate(v.w, g.w));
        }
        if (out.floats) *reinterpret_cast<float4*>(out.floats + row * cols + column) = y;
    }
    storeForms(out, row, cols, column, y, valid);
}

void launchGatedHeads(Stream& stream, const float* x, const float* gated, int64_t rows, int32_t heads, int32_t headDim,
                      const RowOutputs& out) {
    const int64_t cols = int64_t{heads} * headDim;
    if (rows == 0 || cols == 0) return;
    if (headDim % 4 != 0 || (out.quantized.q && cols % kContractBlock != 0)) {
        throw Error(ErrorKind::Internal,
                    "no kernel gates " + std::to_string(heads) + " heads of " + std::to_string(headDim) + " elements");
    }
    const dim3 grid(static_cast<unsigned>(rows),
                    static_cast<unsigned>((cols + 4 * kElementThreads - 1) / (4 * kElementThreads)));
    launch(stream, gatedHeadsKernel, grid, dim3(kElementThreads), 0, x, gated, cols, headDim, out);
}

ConvWork convWork(const DeltaInputs& in, const DeltaParameters& p, const DeltaShape& s, const DeltaStates& states,
                  const DeltaBatch& batch, const RowRanges& ranges, void* windows, const HalfRows& halves) {
    const auto queryScale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.dim)));
    return {in.mixed,        in.alpha,     in.beta,     in.steps,
            s.headsPerKey(), p.conv,       p.stepBias,  p.decay,
            p.eps,           queryScale,   s.keyHeads,  s.valueHeads,
            s.dim,           s.channels(), states.conv, static_cast<float*>(windows),
            batch.from,      batch.to,     ranges,      halves};
}

using ConvKernel = void (*)(ConvWork);

template <int kPer> ConvKernel convKernelFor(int width) {
    return width == 2 ? convKernel<kPer, 2> : width == 3 ? convKernel<kPer, 3> : convKernel<kPer, 4>;
}

// For ranges that are whole sequences.
void launchConv(Stream& stream, const ConvWork& work, int width) {
    const int warps = 2 * work.keyHeads + work.valueHeads + 1;  // the last one makes decays and steps
    const dim3 grid(static_cast<unsigned>((warps + kConvWarps - 1) / kConvWarps),
                    static_cast<unsigned>(work.ranges.count));
    const ConvKernel kernel = work.dim <= 32   ? convKernelFor<1>(width)
                              : work.dim <= 64 ? convKernelFor<2>(width)
                                               : convKernelFor<4>(width);
    launch(stream, kernel, grid, dim3(kConvWarps * 32), 0, work);
}

template <int kPer> ConvKernel convTilesKernelFor(int width, int dim) {
    if (dim != 32 * kPer) {
        return width == 2   ? convTilesKernel<kPer, 2, false>
               : width == 3 ? convTilesKernel<kPer, 3, false>
                            : convTilesKernel<kPer, 4, false>;
    }
    return width == 2   ? convTilesKernel<kPer, 2, true>
           : width == 3 ? convTilesKernel<kPer, 3, true>
                        : convTilesKernel<kPer, 4, true>;
}

void launchConvTiles(Stream& stream, const ConvWork& work, int width) {
    const int channelBlocks = static_cast<int>((work.channels + kElementThreads - 1) / kElementThreads);
    const auto tiles = static_cast<unsigned>(work.ranges.count);
    launch(stream, windowsKernel, dim3(channelBlocks + kStepBlocks, tiles), dim3(kElementThreads), 0, work, width,
           channelBlocks);
    const ConvKernel kernel = work.dim <= 32   ? convTilesKernelFor<1>(width, work.dim)
                              : work.dim <= 64 ? convTilesKernelFor<2>(width, work.dim)
                                               : convTilesKernelFor<4>(width, work.dim);
    launch(stream, kernel, dim3(2 * work.keyHeads + work.valueHeads, tiles), dim3(kConvWarps * 32), 0, work);
}

template <int kLines>
void launchDelta(Stream& stream, const DeltaWork& work, const NormWork& norm, const RowOutputs& out) {
    const dim3 grid(static_cast<unsigned>(work.valueHeads), static_cast<unsigned>(work.sequences.count));
    const auto kernel = work.dim == kLines * kSums ? deltaKernel<kLines, true> : deltaKernel<kLines, false>;
    launch(stream, kernel, grid, dim3(kLines * kSums / kWarpColumns * 32), sizeof(Staged<kLines>), work, norm, out);
}

}  // namespace

void prepareDelta(Stream& stream, const DeltaInputs& in, const DeltaParameters& parameters, const DeltaShape& shape,
                  const DeltaStates& states, const DeltaBatch& batch) {
    requireDelta(shape);
    launchConv(stream, convWork(in, parameters, shape, states, batch, batch.sequences, nullptr, {}), shape.convWidth);
}

void prepareDelta(Stream& stream, const DeltaInputs& in, const DeltaParameters& parameters, const DeltaShape& shape,
                  const DeltaStates& states, const DeltaBatch& batch, const RowRanges& tiles, void* windows,
                  const HalfRows& queriesAndKeys) {
    requireDelta(shape);
    launchConvTiles(stream, convWork(in, parameters, shape, states, batch, tiles, windows, queriesAndKeys),
                    shape.convWidth);
}

void deltaRule(Stream& stream, const DeltaInputs& in, const DeltaParameters& parameters, const DeltaShape& shape,
               const DeltaStates& states, const DeltaBatch& batch, const RowOutputs& out) {
    requireDelta(shape);
    const DeltaWork work = {
        in.mixed,  in.alpha,      in.beta,    in.gate,  shape.keyHeads, shape.valueHeads, shape.headsPerKey(),
        shape.dim, states.matrix, batch.from, batch.to, batch.sequences};
    const NormWork norm = {parameters.headNorm, parameters.eps, shape.valueHeads, shape.dim};
    withForms(stream, shape, batch.rows, out, [&](const RowOutputs& direct) {
        if (shape.dim <= 32) launchDelta<4>(stream, work, norm, direct);
        else if (shape.dim <= 64) launchDelta<8>(stream, work, norm, direct);
        else launchDelta<16>(stream, work, norm, direct);
    });
}

void gatedNorm(Stream& stream, const float* x, const float* gate, const DeltaParameters& parameters,
               const DeltaShape& shape, int64_t rows, const RowOutputs& out) {
    const NormWork norm = {parameters.headNorm, parameters.eps, shape.valueHeads, shape.dim};
    const dim3 grid(static_cast<unsigned>((rows + kNormWarps - 1) / kNormWarps),
                    static_cast<unsigned>(shape.valueHeads));
    withForms(stream, shape, rows, out, [&](const RowOutputs& direct) {
        launch(stream, gatedNormKernel, grid, dim3(kNormWarps * 32), 0, x, gate, rows, norm, direct);
    });
}

void splitGatedQueries(Stream& stream, const float* gated, int64_t rows, int32_t heads, int32_t headDim, float* q) {
    launchGatedHeads(stream, nullptr, gated, rows, heads, headDim, {q, {}, {}});
}

void gateHeads(Stream& stream, const float* x, const float* gated, int64_t rows, int32_t heads, int32_t headDim,
               const RowOutputs& out) {
    launchGatedHeads(stream, x, gated, rows, heads, headDim, out);
}

}  // namespace sharpi::cuda
