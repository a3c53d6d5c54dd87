// Gated DeltaNet for few rows in one launch: convolution, decays and steps, delta rule and gated norm, with the bits of
// the CPU.
//
// A step is bound by latency here, not by bandwidth. So everything that does not depend on this step is loaded before
// the kernel's turn (weights, and the states, which nothing in the same pass writes), and the rest is spread over
// warps. A block takes a value head through the rows of a sequence. Its matrix is in registers, laid out as in
// gated_delta.cu. The results of the convolution go to shared memory: one warp computes the query, the key or the value
// of a row, and one computes decay, step and gate. Value heads that share a key head each compute its convolution
// again, which is cheaper than another launch.
//
// One more warp keeps the inputs that the convolution will need next. It may overwrite the state that the step begins
// from, and several blocks read the state of a key head. So the blocks count themselves when they have read it, and the
// last one writes.
//
// A head's matrix has 64 KiB. Reading it takes one multiprocessor longer than everything else, and there are fewer
// heads than multiprocessors. So on devices with clusters, two blocks have half of the columns each and exchange their
// outputs, since the norm is over the whole head.
#include <cmath>

#include "kernels/delta/cluster.cuh"
#include "kernels/delta/gated_delta.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kTaps = kMaxDeltaConv;  // of the convolution; shorter ones are padded with zeros in front
constexpr int kPast = kTaps - 1;
constexpr int kParts = 3;  // query, key, value

struct StepWork {
    DeltaInputs in;
    DeltaParameters parameters;
    DeltaShape shape;
    DeltaStates states;
    DeltaBatch batch;
    uint32_t* readers;  // [sequences, keyHeads]: blocks that have read the convolution's state; zero between launches
    float queryScale;
};

// Shared memory of a block. Keys and queries lie in the order of the lanes: element n + 8 m at n * pitch + m. The pitch
// puts the eight n into different banks.
template <int kLines> struct StepMemory {
    static constexpr int kDim = kSums * kLines, kPitch = kLines + 4;
    float q[kDeltaStepRows][kSums * kPitch], k[kDeltaStepRows][kSums * kPitch];
    float v[kDeltaStepRows][kDim], gate[kDeltaStepRows][kDim], out[kDeltaStepRows][kDim];  // gate: its silu
    float weight[kParts][kTaps][kDim], past[kParts][kPast][kDim], norm[kDim];
    float decay[kDeltaStepRows], step[kDeltaStepRows];
    int32_t to[kDeltaStepRows];
};

// The block's value head, and its columns of that head.
template <int kLines, int kSplit> struct Place {
    static constexpr int kColumns = kSums * kLines / kSplit;
    int head, keyHead, piece, dim;
    int64_t channels;

    __device__ __forceinline__ Place(const DeltaShape& shape, bool whole)
        : head(blockIdx.x / kSplit),
          keyHead(keyHeadOf(head, shape.keyHeads, shape.headsPerKey())),
          piece(blockIdx.x % kSplit),
          dim(whole ? kSums * kLines : shape.dim),
          channels(shape.channels()) {}

    // The first channel of a part (query, key or value).
    __device__ __forceinline__ int first(const DeltaShape& shape, int part) const {
        return (part == 0 ? keyHead : part == 1 ? shape.keyHeads + keyHead : 2 * shape.keyHeads + head) * dim;
    }
    // Only the block that owns an element of the value reads and writes its past.
    __device__ __forceinline__ bool has(int part, int element) const {
        return element < dim && (kSplit == 1 || part < 2 || element / kColumns == piece);
    }
};

// Copies kCount lines of up to 128 floats to shared memory, a warp for each line. It works in two halves, loading and
// storing, so that all loads are in flight before the first is waited for. from(line, element), to(line, element): four
// floats; null stands for zeros.
template <int kCount, int kWarps> struct LineCopy {
    static constexpr int kOwn = (kCount + kWarps - 1) / kWarps;
    float4 held[kOwn];

    template <typename From> __device__ __forceinline__ void load(From from) {
#pragma unroll
        for (int i = 0; i < kOwn; i++) {
            const int line = (threadIdx.x >> 5) + i * kWarps;
            const float* at = line < kCount ? from(line, static_cast<int>(threadIdx.x & 31) * 4) : nullptr;
            held[i] = at ? *reinterpret_cast<const float4*>(at) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
    template <typename To> __device__ __forceinline__ void store(int dim, To to) const {
#pragma unroll
        for (int i = 0; i < kOwn; i++) {
            const int line = (threadIdx.x >> 5) + i * kWarps, element = static_cast<int>(threadIdx.x & 31) * 4;
            if (line < kCount && element < dim) *reinterpret_cast<float4*>(to(line) + element) = held[i];
        }
    }
};

// Convolves a part of row `row`, counted from the sequence's first, and stores the result.
template <int kLines, int kSplit>
__device__ __forceinline__ void convolve(const StepWork& work, StepMemory<kLines>& memory,
                                         const Place<kLines, kSplit>& place, int64_t begin, int row, int part) {
    constexpr int kPer = (kSums * kLines + 31) / 32;
    const int lane = threadIdx.x & 31, none = kTaps - work.shape.convWidth;
    const float* in = work.in.mixed + begin * place.channels + place.first(work.shape, part);
    float x[kTaps][kPer], y[kPer] = {}, squares = 0.0f;
#pragma unroll
    for (int w = 0; w < kTaps; w++) {
        const bool isPast = row + w < kPast;
#pragma unroll
        for (int p = 0; p < kPer; p++) {
            const int element = lane + 32 * p;
            x[w][p] = element >= place.dim ? 0.0f
                      : isPast             ? memory.past[part][row + w][element]
                                           : in[(row + w - kPast) * place.channels + element];
        }
    }
#pragma unroll
    for (int w = 0; w < kTaps; w++) {
        if (w < none) continue;
#pragma unroll
        for (int p = 0; p < kPer; p++) {
            const int element = lane + 32 * p;
            if (element < place.dim) y[p] = fmaf(memory.weight[part][w][element], x[w][p], y[p]);
        }
    }
    siluOfAll(y);
#pragma unroll
    for (int p = 0; p < kPer; p++)
        if (lane + 32 * p < place.dim) squares = fmaf(y[p], y[p], squares);
    float length = 1.0f;
    if (part < 2)
        length = __fdiv_rn(part == 0 ? work.queryScale : 1.0f,
                           __fsqrt_rn(__fadd_rn(contractTree(squares), work.parameters.eps)));
#pragma unroll
    for (int p = 0; p < kPer; p++) {
        const int element = lane + 32 * p;
        if (element >= place.dim) break;
        if (part == 2) memory.v[row][element] = y[p];
        else
            (part == 0 ? memory.q[row]
                       : memory.k[row])[element % kSums * StepMemory<kLines>::kPitch + element / kSums] =
                __fmul_rn(y[p], length);
    }
}

// Stores the silu of row `row`'s gate.
template <int kLines, int kSplit>
__device__ __forceinline__ void openGate(const StepWork& work, StepMemory<kLines>& memory,
                                         const Place<kLines, kSplit>& place, int64_t begin, int row) {
    constexpr int kPer = (kSums * kLines + 31) / 32;
    const int lane = threadIdx.x & 31;
    const float* in = work.in.gate + ((begin + row) * work.shape.valueHeads + place.head) * place.dim;
    float gate[kPer];
#pragma unroll
    for (int p = 0; p < kPer; p++) gate[p] = lane + 32 * p < place.dim ? in[lane + 32 * p] : 0.0f;
    siluOfAll(gate);
#pragma unroll
    for (int p = 0; p < kPer; p++)
        if (lane + 32 * p < place.dim) memory.gate[row][lane + 32 * p] = gate[p];
}

// One warp writes, after each row that keeps its state, the inputs that come before the next row. last: all blocks have
// read those of queries and keys.
template <int kLines, int kSplit>
__device__ __forceinline__ void keepInputs(const StepWork& work, const StepMemory<kLines>& memory,
                                           const Place<kLines, kSplit>& place, int64_t begin, int count, bool last) {
    const int element = static_cast<int>(threadIdx.x & 31) * 4, none = kTaps - work.shape.convWidth;
    const float* in = work.in.mixed + begin * place.channels + element;
    for (int row = 0; row < count; row++) {
        if (memory.to[row] < 0) continue;
        float4 x[kParts][kPast];
#pragma unroll
        for (int i = 0; i < kParts * kPast; i++) {
            const int part = i / kPast, at = row + 1 + i % kPast;
            if (!place.has(part, element)) continue;
            x[part][i % kPast] = *reinterpret_cast<const float4*>(at < kPast ? &memory.past[part][at][element]
                                                                             : in + (at - kPast) * place.channels +
                                                                                   place.first(work.shape, part));
        }
        float* to = work.states.conv + memory.to[row] * work.shape.convFloats() + element;
#pragma unroll
        for (int i = 0; i < kParts * kPast; i++) {
            const int part = i / kPast, w = i % kPast - none;
            if (w < 0 || !place.has(part, element) || (part < 2 && !last)) continue;
            *reinterpret_cast<float4*>(to + w * place.channels + place.first(work.shape, part)) = x[part][i % kPast];
        }
    }
}

// A warp norms and gates 32 elements of the head's output of row `row` and writes them.
template <int kLines, int kSplit>
__device__ __forceinline__ void writeGroup(const StepWork& work, const StepMemory<kLines>& memory,
                                           const Place<kLines, kSplit>& place, int64_t begin, int row, int group,
                                           const RowOutputs& out) {
    const int lane = threadIdx.x & 31, dim = place.dim, element = group * 32 + lane;
    float squares = 0.0f;
#pragma unroll
    for (int e = lane; e < kSums * kLines; e += 32)
        if (e < dim) squares = fmaf(memory.out[row][e], memory.out[row][e], squares);
    const float mean = __fdiv_rn(contractTree(squares), static_cast<float>(dim));
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, work.parameters.eps)));
    const bool valid = element < dim;
    const float o = valid ? __fmul_rn(memory.gate[row][element],
                                      __fmul_rn(__fmul_rn(memory.out[row][element], inverse), memory.norm[element]))
                          : 0.0f;
    const int64_t t = begin + row, cols = work.shape.valueWidth(), column = int64_t{place.head} * dim + element;
    if (out.quantized.q) quantizeLane(out.quantized, t, cols / kContractBlock, (column - lane) / kContractBlock, o);
    if (!valid) return;
    if (out.floats) out.floats[t * cols + column] = o;
    if (out.half.hi) {
        const HalfPair pair = splitHalf(o);
        out.half.hi[t * cols + column] = pair.hi;
        if (out.half.lo) out.half.lo[t * cols + column] = pair.lo;
    }
}

// kWarps warps compute everything that the delta rule and the norm need of the rows.
template <int kLines, int kSplit, int kWarps>
__device__ __forceinline__ void prepareRows(const StepWork& work, StepMemory<kLines>& memory,
                                            const Place<kLines, kSplit>& place, int64_t begin, int count,
                                            float stepBias, float decay) {
    for (int item = threadIdx.x >> 5; item < (kParts + 2) * count; item += kWarps) {
        const int row = item / (kParts + 2), what = item % (kParts + 2);
        if (what < kParts) {
            convolve(work, memory, place, begin, row, what);
        } else if (what == kParts) {
            openGate(work, memory, place, begin, row);
        } else {
            // Volatile, so that both loads are issued before the first is used.
            const int heads = work.shape.valueHeads, group = work.shape.headsPerKey();
            const int64_t at = (begin + row) * heads + place.head;
            const float *betaOf = work.in.beta + at, *alphaOf = work.in.alpha + at;
            if (work.in.steps) {
                betaOf = work.in.steps + betaAt(begin + row, place.head, heads, group);
                alphaOf = betaOf + group;
            }
            const float alpha = *static_cast<const volatile float*>(alphaOf),
                        beta = *static_cast<const volatile float*>(betaOf);
            memory.decay[row] = portableExp(__fmul_rn(decay, portableSoftplus(__fadd_rn(alpha, stepBias))));
            memory.step[row] = portableSigmoid(beta);
        }
    }
}

// The number of blocks that read the past of a key head.
template <int kSplit> __device__ __forceinline__ uint32_t readersOf(const DeltaShape& shape, int keyHead) {
    const int heads =
        shape.consecutive ? shape.headsPerKey() : (shape.valueHeads - keyHead + shape.keyHeads - 1) / shape.keyHeads;
    return heads * kSplit;
}

// Counts the block as one that has read it. Returns how many had before.
template <int kSplit> __device__ __forceinline__ uint32_t countReader(const StepWork& work, int keyHead) {
    __threadfence();
    return atomicInc(work.readers + blockIdx.y * work.shape.keyHeads + keyHead,
                     readersOf<kSplit>(work.shape, keyHead) - 1);
}

// Waits for the other block of the same head, if there is one. Afterwards what it wrote to this block's memory is
// visible.
template <int kSplit> __device__ __forceinline__ void waitForBlocks() {
    if constexpr (kSplit == 1) __syncthreads();
    else arriveAtCluster(), waitForCluster();
}

// Takes the value head and columns of blockIdx.x through the rows of sequence blockIdx.y. There is a warp for each 16
// columns, one that helps them prepare rows, and one that keeps inputs.
template <int kLines, bool kWhole, int kSplit>
__global__ void __launch_bounds__(kLines* kSums / kWarpColumns / kSplit * 32 + 64, 1)
    deltaStepKernel(const StepWork work, const RowOutputs out) {
    constexpr int kWarps = kLines * kSums / kWarpColumns / kSplit, kColumns = Place<kLines, kSplit>::kColumns;
    extern __shared__ float4 stepQuads[];
    allowNext();
    auto& memory = *reinterpret_cast<StepMemory<kLines>*>(stepQuads);
    const Place<kLines, kSplit> place(work.shape, kWhole);
    const int dim = place.dim, warp = threadIdx.x >> 5, none = kTaps - work.shape.convWidth;
    LineCopy<kParts * kTaps + 1, kWarps + 2> weights;
    weights.load([&](int line, int element) -> const float* {
        if (element >= dim) return nullptr;
        if (line == kParts * kTaps) return work.parameters.headNorm + element;
        const int tap = line % kTaps - none;
        return tap < 0 ? nullptr
                       : work.parameters.conv + tap * place.channels + place.first(work.shape, line / kTaps) + element;
    });
    const float stepBias = work.parameters.stepBias[place.head], decay = work.parameters.decay[place.head];
    const int64_t begin = work.batch.sequences.begin[blockIdx.y];
    const int count = static_cast<int>(work.batch.sequences.end[blockIdx.y] - begin);
    if (count <= 0) return waitForPrevious();
    if constexpr (kSplit > 1) arriveAtClusterSilently();
    const int from = work.batch.from[begin];
    LineCopy<kParts * kPast, kWarps + 2> past;
    past.load([&](int line, int element) -> const float* {
        const int part = line / kPast, at = line % kPast - none;
        if (from < 0 || at < 0 || !place.has(part, element)) return nullptr;
        return work.states.conv + from * work.shape.convFloats() + at * place.channels + place.first(work.shape, part) +
               element;
    });
    const int64_t stateFloats = work.shape.matrixFloats();
    float* states = work.states.matrix + int64_t{place.head} * dim * dim;
    MatrixPart<kLines, kWhole> part(dim, place.piece * kColumns);
    if (warp < kWarps) part.read(from < 0 ? nullptr : states + from * stateFloats, dim);
    if (threadIdx.x < count) memory.to[threadIdx.x] = work.batch.to[begin + threadIdx.x];
    weights.store(dim, [&](int line) {
        return line == kParts * kTaps ? memory.norm : memory.weight[line / kTaps][line % kTaps];
    });
    past.store(dim, [&](int line) { return memory.past[line / kPast][line % kPast]; });
    __syncthreads();
    waitForPrevious();

    uint32_t readers = 0;
    if (warp <= kWarps) prepareRows<kLines, kSplit, kWarps + 1>(work, memory, place, begin, count, stepBias, decay);
    else if (threadIdx.x % 32 == 0) readers = countReader<kSplit>(work, place.keyHead);
    if constexpr (kSplit > 1) waitForCluster();  // the other block has begun: its memory may be written
    __syncthreads();
    for (int row = 0; warp < kWarps && row < count; row++) {
        const int lane = part.n * StepMemory<kLines>::kPitch;
        const float4 v = *reinterpret_cast<const float4*>(memory.v[row] + part.column);
        const float4 o =
            part.advance(memory.k[row] + lane, memory.q[row] + lane, v, memory.decay[row], memory.step[row]);
        float4* to = reinterpret_cast<float4*>(memory.out[row] + part.column);
        if constexpr (kSplit == 1) {
            if (part.n == 0) *to = o;
        } else {
            if (part.n < kSplit) storeInCluster(to, part.n, o);
        }
        if (row + 1 < count && memory.to[row] >= 0) part.write(states + memory.to[row] * stateFloats, dim);
    }
    waitForBlocks<kSplit>();
    if (warp == kWarps + 1) {
        const bool last = __shfl_sync(kWholeWarp, readers, 0) + 1 == readersOf<kSplit>(work.shape, place.keyHead);
        if (last) __threadfence();
        keepInputs(work, memory, place, begin, count, last);
    }
    if (warp >= kWarps) return;
    // The norm comes before the last state is written, so that it does not wait behind that write.
    constexpr int kGroups = (kColumns + 31) / 32;
    for (int item = warp; item < kGroups * count; item += kWarps) {
        const int group = place.piece * kGroups + item % kGroups;
        if (group * 32 < dim) writeGroup(work, memory, place, begin, item / kGroups, group, out);
    }
    if (memory.to[count - 1] >= 0) part.write(states + memory.to[count - 1] * stateFloats, dim);
}

template <int kLines, bool kWhole, int kSplit>
void launchStep(Stream& stream, const StepWork& work, const RowOutputs& out) {
    const dim3 grid(static_cast<unsigned>(work.shape.valueHeads * kSplit),
                    static_cast<unsigned>(work.batch.sequences.count));
    const dim3 block(kLines * kSums / kWarpColumns / kSplit * 32 + 64);
    launchClusters(stream, deltaStepKernel<kLines, kWhole, kSplit>, kSplit, grid, block, sizeof(StepMemory<kLines>),
                   work, out);
}

template <int kLines> void launchStep(Stream& stream, const StepWork& work, const RowOutputs& out) {
    if (work.shape.dim != kLines * kSums) return launchStep<kLines, false, 1>(stream, work, out);
    if constexpr (kLines == 16) {
        if (stream.device().major >= 9 && stream.device().codeVersion >= 90)
            return launchStep<kLines, true, 2>(stream, work, out);
    }
    launchStep<kLines, true, 1>(stream, work, out);
}

}  // namespace

void deltaStep(Stream& stream, const DeltaInputs& in, const DeltaParameters& parameters, const DeltaShape& shape,
               const DeltaStates& states, const DeltaBatch& batch, void* scratch, const RowOutputs& out) {
    requireDelta(shape);
    if (batch.rows > kDeltaStepRows * batch.sequences.count || shape.valueHeads < shape.keyHeads)
        throw Error(ErrorKind::Internal, "deltaStep cannot take this number of rows or heads");
    const auto queryScale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape.dim)));
    const StepWork work = {in, parameters, shape, states, batch, static_cast<uint32_t*>(scratch), queryScale};
    withForms(stream, shape, batch.rows, out, [&](const RowOutputs& direct) {
        if (shape.dim <= 32) launchStep<4>(stream, work, direct);
        else if (shape.dim <= 64) launchStep<8>(stream, work, direct);
        else launchStep<16>(stream, work, direct);
    });
}

}  // namespace sharpi::cuda
