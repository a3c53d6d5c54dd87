// Mamba 2 for few rows in one launch: convolution, steps, scan and gates, with the bits of the CPU.
//
// A step reads and writes each state once, and with many sequences that is all that takes time. A block takes some
// columns of a head through the rows of a sequence. What does not depend on this step (the block's part of the state,
// which nothing in the same pass writes, weights, and the convolution's last inputs) is fetched before the kernel's
// turn and waits in registers. Each thread convolves a few channels: those of the block's columns, and the B and C that
// its group of heads shares, which every block of the group computes for itself: that is cheaper than another launch.
//
// The inputs that the convolution needs next may overwrite those that this step begins from, and all blocks of a group
// read those of B and C. So the blocks count themselves when they have read them, and the last one writes.
#include "kernels/delta/mamba.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kTaps = kMaxDeltaConv;  // of the convolution; shorter ones lack the first
constexpr int kPast = kTaps - 1;
constexpr int kVec = 4;

template <int kLines, int kColumns> struct StepMemory {
    ScanRow<kLines, kColumns> rows[kDeltaStepRows];
    bool last;  // all blocks of the group have read the inputs before this step
};

// The channels that a thread convolves.
template <int kLines, int kColumns, int kThreads> struct Channels {
    using Row = ScanRow<kLines, kColumns>;
    static constexpr int kState = kSums * kLines;
    static constexpr int kCount = (kColumns + 2 * kState + kThreads - 1) / kThreads;
    int channel[kCount], place[kCount];  // its number, or -1; its place in a ScanRow, in floats
    float weight[kCount][kTaps], bias[kCount], past[kCount][kPast];
    float window[kCount][kTaps];  // the inputs of the last row

    __device__ __forceinline__ Channels(const MambaShape& shape, const ScanPlace<kColumns>& at) {
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            const int index = threadIdx.x + i * kThreads, shared = index - kColumns, element = shared % kState;
            channel[i] = -1;
            if (shared < 0) {
                place[i] = offsetof(Row, x) / sizeof(float) + index;
                if (at.first + index < shape.headDim) channel[i] = at.x(shape) + index;
            } else if (shared < 2 * kState) {
                const bool isC = shared >= kState;
                place[i] = (isC ? offsetof(Row, c) : offsetof(Row, b)) / sizeof(float) + Row::placeOf(element);
                if (element < shape.stateDim) channel[i] = (isC ? at.c(shape) : at.b(shape)) + element;
            }
        }
    }

    // Whether no other block reads the channel.
    __device__ __forceinline__ bool own(int i) const { return i == 0 && threadIdx.x < kColumns; }

    __device__ __forceinline__ void read(const MambaWork& work, int from) {
        const int64_t channels = work.shape.channels();
        const int none = kTaps - work.shape.convWidth;
        const float* state = from < 0 ? nullptr : work.states.conv + from * work.shape.convFloats();
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            const bool is = channel[i] >= 0;
#pragma unroll
            for (int w = 0; w < kTaps; w++)
                weight[i][w] = is && w >= none ? work.parameters.conv[(w - none) * channels + channel[i]] : 0.0f;
#pragma unroll
            for (int w = 0; w < kPast; w++)
                past[i][w] = is && state && w >= none ? state[(w - none) * channels + channel[i]] : 0.0f;
            bias[i] = is && work.parameters.convBias ? work.parameters.convBias[channel[i]] : 0.0f;
        }
    }

    // Convolves rows begin .. begin + count - 1 and stages them.
    __device__ __forceinline__ void convolve(const MambaWork& work, int64_t begin, int count, Row* rows) {
        const int none = kTaps - work.shape.convWidth;
        const float* in = work.in.mixed + begin * work.shape.channels();
        float next[kCount];
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            next[i] = channel[i] >= 0 ? in[channel[i]] : 0.0f;
#pragma unroll
            for (int w = 0; w < kPast; w++) window[i][w + 1] = past[i][w];
        }
        for (int row = 0; row < count; row++) {
            float y[kCount];
            if (row + 1 < count) in += work.shape.channels();
#pragma unroll
            for (int i = 0; i < kCount; i++) {
#pragma unroll
                for (int w = 0; w < kPast; w++) window[i][w] = window[i][w + 1];
                window[i][kPast] = next[i];
                if (row + 1 < count) next[i] = channel[i] >= 0 ? in[channel[i]] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < kCount; i++) {
                y[i] = bias[i];
#pragma unroll
                for (int w = 0; w < kTaps; w++)
                    if (w >= none) y[i] = fmaf(weight[i][w], window[i][w], y[i]);
            }
            siluOfAll(y);
#pragma unroll
            for (int i = 0; i < kCount; i++)
                if (channel[i] >= 0) reinterpret_cast<float*>(rows + row)[place[i]] = y[i];
        }
    }

    // Writes, for each row that keeps its state, the inputs that come before the next row. last: also those of B and C.
    __device__ __forceinline__ void keep(const MambaWork& work, int64_t begin, int count, const Row* rows,
                                         bool last) const {
        const int64_t channels = work.shape.channels();
        const int none = kTaps - work.shape.convWidth;
        const float* in = work.in.mixed + begin * channels;
        for (int row = 0; row < count; row++) {
            if (rows[row].to < 0) continue;
            float* to = work.states.conv + rows[row].to * work.shape.convFloats();
#pragma unroll
            for (int i = 0; i < kCount; i++) {
                if (channel[i] < 0 || !(last || own(i))) continue;
#pragma unroll
                for (int w = 0; w < kPast; w++) {
                    const int at = row + 1 + w;
                    const float x = row + 1 == count ? window[i][w + 1]
                                    : at >= kPast    ? in[(at - kPast) * channels + channel[i]]
                                    : at == 1        ? past[i][1]
                                                     : past[i][2];
                    if (w >= none) to[(w - none) * channels + channel[i]] = x;
                }
            }
        }
    }
};

// Counts the block as one that has read the inputs of B and C. Returns whether it is the group's last.
__device__ __forceinline__ bool isLastReader(const MambaWork& work, int group) {
    __threadfence();
    const uint32_t blocks = gridDim.x / work.shape.groups;
    return atomicInc(static_cast<uint32_t*>(work.scratch) + blockIdx.y * work.shape.groups + group, blocks - 1) + 1 ==
           blocks;
}

// A block takes columns of a head, 16 with each of kWarps warps, through the rows of sequence blockIdx.y.
template <int kLines, bool kWhole, int kWarps, int kThreads>
__global__ void __launch_bounds__(kThreads, kLines <= 16 ? 512 / kThreads : 1) mambaStepKernel(const MambaWork work) {
    using Part = ScanPart<kLines, kWhole, kVec>;
    constexpr int kColumns = kWarps * Part::kColumns;
    __shared__ StepMemory<kLines, kColumns> memory;
    allowNext();
    const MambaShape& shape = work.shape;
    const int64_t begin = work.batch.sequences.begin[blockIdx.y];
    const int count = static_cast<int>(work.batch.sequences.end[blockIdx.y] - begin);
    if (count <= 0) return waitForPrevious();
    const ScanPlace<kColumns> place(shape);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, from = work.batch.from[begin];
    Part part(shape, place);
    if (warp < kWarps) {
        const float* states = work.states.matrix + int64_t{place.head} * shape.stateDim * shape.headDim;
        part.read(from < 0 ? nullptr : states + from * shape.matrixFloats(), shape.headDim);
    }
    Channels<kLines, kColumns, kThreads> channels(shape, place);
    channels.read(work, from);
    const float stepBias = work.parameters.stepBias[place.head], rate = work.parameters.rate[place.head],
                skip = work.parameters.skip[place.head];
    if (threadIdx.x < count) memory.rows[threadIdx.x].to = work.batch.to[begin + threadIdx.x];
    waitForPrevious();

    if (warp == kThreads / 32 - 1 && lane < count) {
        const float step = mambaStep(work.in.steps[(begin + lane) * shape.heads + place.head], stepBias);
        memory.rows[lane].step = step;
        memory.rows[lane].decay = mambaDecay(step, rate);
    }
    if (threadIdx.x < kColumns && place.first + static_cast<int>(threadIdx.x) < shape.headDim) {
        const float* gate = work.in.gate + begin * shape.width() + place.x(shape) + threadIdx.x;
        for (int row = 0; row < count; row++) memory.rows[row].gate[threadIdx.x] = gate[row * shape.width()];
    }
    channels.convolve(work, begin, count, memory.rows);
    __syncthreads();
    if (threadIdx.x == kThreads - 1) memory.last = isLastReader(work, place.group);
    if (warp < kWarps) scanRows<false>(work, place, part, memory.rows, begin, count, skip);
    __syncthreads();
    if (memory.last) __threadfence();
    channels.keep(work, begin, count, memory.rows, memory.last);
}

}  // namespace

void stepMamba(Stream& stream, const MambaInputs& in, const MambaParameters& parameters, const MambaShape& shape,
               const DeltaStates& states, const DeltaBatch& batch, void* scratch) {
    requireMamba(shape);
    if (batch.rows > kDeltaStepRows * batch.sequences.count)
        throw Error(ErrorKind::Internal, "stepMamba cannot take this number of rows");
    const MambaWork work = {in, parameters, shape, states, batch, scratch};
    const auto sequences = static_cast<unsigned>(batch.sequences.count);
    // Few heads are spread over more blocks, as long as all of them run at once.
    const bool many = 2 * shape.heads * batch.sequences.count > 3 * int64_t{stream.device().multiprocessors};
    withLines(shape.stateDim, [&](auto lines, auto whole) {
        const auto start = [&](auto warps, auto threads) {
            constexpr int kLines = decltype(lines)::value, kWarps = decltype(warps)::value,
                          kColumns = kWarps * 4 * kVec, kThreads = decltype(threads)::value;
            const int pieces = (shape.headDim + kColumns - 1) / kColumns;
            launch(stream, mambaStepKernel<kLines, decltype(whole)::value, kWarps, kThreads>,
                   dim3(static_cast<unsigned>(shape.heads * pieces), sequences), dim3(kThreads), 0, work);
        };
        if (many) start(std::integral_constant<int, 4>(), std::integral_constant<int, 128>());
        else start(std::integral_constant<int, 2>(), std::integral_constant<int, 160>());
    });
}

}  // namespace sharpi::cuda
