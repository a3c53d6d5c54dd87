// Mamba 2 row after row, in two launches for each layer and a norm, with the bits of the CPU. The few rows of a step go
// through mamba_step.cu instead.
//
// The convolution: a thread takes a channel through the rows of a sequence, or of a tile if there are many, and keeps
// the last inputs in registers. It works in place, so the inputs before each tile are saved first.
//
// The scan: a block takes some columns of a head through the rows of a sequence. Two of its warps copy the next rows to
// shared memory while the others compute.
#include <algorithm>

#include "kernels/delta/mamba.cuh"
#include "kernels/matmul/mma.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kConvThreads = 64;
constexpr int kConvAhead = 8;   // rows whose inputs are loaded together
constexpr int kStepBlocks = 4;  // blocks of a tile that compute its steps and decays
constexpr int kScanWarps = 4, kCopyWarps = 2;

// --- convolution ---------------------------------------------------------------------------------------------------

// Rows of a sequence: all of them, or tile blockIdx.z. Where the inputs before a tile are saved: windows are numbered
// by the tile's first row and its sequence, so that no two tiles of a batch share one.
struct ConvTile {
    int64_t begin, end, first, window;  // first: the sequence's first row
    __device__ __forceinline__ ConvTile(const MambaWork& work, bool tiled)
        : begin(work.batch.sequences.begin[blockIdx.y]),
          end(work.batch.sequences.end[blockIdx.y]),
          first(begin),
          window(0) {
        if (!tiled) return;
        begin += int64_t{blockIdx.z} * kMambaTile;
        end = min(end, begin + kMambaTile);
        window = begin / kMambaTile + blockIdx.y;
    }
    __device__ __forceinline__ bool empty() const { return begin >= end; }
    __device__ __forceinline__ float* windowOf(const MambaWork& work) const {
        return static_cast<float*>(work.scratch) + window * work.shape.convFloats();
    }
};

// Block `block` of kStepBlocks makes the tile's steps and decays.
__device__ __forceinline__ void makeSteps(const MambaWork& work, const ConvTile& tile, int block) {
    const int64_t heads = work.shape.heads;
    for (int64_t i = tile.begin * heads + block * kConvThreads + threadIdx.x; i < tile.end * heads;
         i += kStepBlocks * kConvThreads) {
        const float step = mambaStep(work.in.steps[i], work.parameters.stepBias[i % heads]);
        work.in.steps[i] = step;
        work.in.decays[i] = mambaDecay(step, work.parameters.rate[i % heads]);
    }
}

// A thread's channel.
template <int kWidth> struct ConvChannel {
    float weight[kWidth], window[kWidth], bias;

    // before: [width - 1, channels], the inputs before the first row, or null
    __device__ __forceinline__ void read(const MambaWork& work, int64_t channel, const float* before) {
        const int64_t channels = work.shape.channels();
#pragma unroll
        for (int w = 0; w < kWidth; w++) {
            weight[w] = work.parameters.conv[w * channels + channel];
            window[w] = w > 0 && before ? before[(w - 1) * channels + channel] : 0.0f;
        }
        bias = work.parameters.convBias ? work.parameters.convBias[channel] : 0.0f;
    }
    __device__ __forceinline__ float advance(float x) {
#pragma unroll
        for (int w = 1; w < kWidth; w++) window[w - 1] = window[w];
        window[kWidth - 1] = x;
        float y = bias;
#pragma unroll
        for (int w = 0; w < kWidth; w++) y = fmaf(weight[w], window[w], y);
        return y;
    }
    __device__ __forceinline__ void write(const MambaWork& work, int64_t channel, int to) const {
        float* state = work.states.conv + to * work.shape.convFloats() + channel;
#pragma unroll
        for (int w = 1; w < kWidth; w++) state[(w - 1) * work.shape.channels()] = window[w];
    }
};

// Reads the inputs and the state entries of the rows from `row` on that come before `end`.
__device__ __forceinline__ void readAhead(const MambaWork& work, const float* in, int64_t row, int64_t end,
                                          float (&x)[kConvAhead], int (&to)[kConvAhead]) {
#pragma unroll
    for (int r = 0; r < kConvAhead; r++) {
        const bool exists = row + r < end;
        x[r] = exists ? in[(row + r) * work.shape.channels()] : 0.0f;
        to[r] = exists ? work.batch.to[row + r] : -1;
    }
}

// The inputs before a sequence's first row, or null.
__device__ __forceinline__ const float* inputsBefore(const MambaWork& work, int64_t first) {
    const int from = work.batch.from[first];
    return from < 0 ? nullptr : work.states.conv + from * work.shape.convFloats();
}

// The first `channelBlocks` blocks of a tile save the inputs before it, because the convolution overwrites inputs and
// perhaps the state that it begins from. The other blocks make its steps and decays.
__global__ void __launch_bounds__(kConvThreads) mambaWindowsKernel(const MambaWork work, int channelBlocks) {
    allowNext();
    waitForPrevious();
    const ConvTile tile(work, true);
    if (tile.empty()) return;
    if (static_cast<int>(blockIdx.x) >= channelBlocks) return makeSteps(work, tile, blockIdx.x - channelBlocks);
    const int64_t channels = work.shape.channels(), channel = int64_t{blockIdx.x} * kConvThreads + threadIdx.x;
    if (channel >= channels) return;
    float* const window = tile.windowOf(work) + channel;
    const float* const before = inputsBefore(work, tile.first);
    const int past = work.shape.convWidth - 1;
    for (int w = 0; w < past; w++) {
        if (tile.begin == tile.first) window[w * channels] = before ? before[w * channels + channel] : 0.0f;
        else window[w * channels] = work.in.mixed[(tile.begin - past + w) * channels + channel];
    }
}

// A thread takes a channel through the rows of a sequence or, if kTiled, of a tile whose inputs before it are saved.
// Without tiles, the blocks after the first `channelBlocks` make steps and decays.
template <int kWidth, bool kTiled>
__global__ void __launch_bounds__(kConvThreads) mambaConvKernel(const MambaWork work, int channelBlocks) {
    allowNext();
    const ConvTile tile(work, kTiled);
    if (tile.empty()) return waitForPrevious();
    if (!kTiled && static_cast<int>(blockIdx.x) >= channelBlocks) {
        waitForPrevious();
        return makeSteps(work, tile, blockIdx.x - channelBlocks);
    }
    const int64_t channel = int64_t{blockIdx.x} * kConvThreads + threadIdx.x;
    if (channel >= work.shape.channels()) return waitForPrevious();
    ConvChannel<kWidth> own;
    if (kTiled) waitForPrevious();
    own.read(work, channel, kTiled ? tile.windowOf(work) : inputsBefore(work, tile.first));
    if (!kTiled) waitForPrevious();

    float* const in = work.in.mixed + channel;
    float x[kConvAhead];
    int to[kConvAhead];
    readAhead(work, in, tile.begin, tile.end, x, to);
    for (int64_t row = tile.begin; row < tile.end; row += kConvAhead) {
        float y[kConvAhead], following[kConvAhead];
        int followingTo[kConvAhead];
        readAhead(work, in, row + kConvAhead, tile.end, following, followingTo);
#pragma unroll
        for (int r = 0; r < kConvAhead; r++) {
            y[r] = own.advance(x[r]);
            if (to[r] >= 0) own.write(work, channel, to[r]);
        }
        siluOfAll(y);
#pragma unroll
        for (int r = 0; r < kConvAhead; r++) {
            if (row + r < tile.end) in[(row + r) * work.shape.channels()] = y[r];
            x[r] = following[r];
            to[r] = followingTo[r];
        }
    }
}

template <bool kTiled> auto convKernelFor(int width) {
    return width == 2   ? mambaConvKernel<2, kTiled>
           : width == 3 ? mambaConvKernel<3, kTiled>
                        : mambaConvKernel<4, kTiled>;
}

// --- scan ----------------------------------------------------------------------------------------------------------

// Copies what the block needs of rows begin .. begin + count - 1; warp `warp` of kCopyWarps.
template <int kLines, bool kWhole, int kColumns>
__device__ __forceinline__ void stageRows(const MambaWork& work, const ScanPlace<kColumns>& place,
                                          ScanRow<kLines, kColumns>* rows, int64_t begin, int count, int warp) {
    using Row = ScanRow<kLines, kColumns>;
    const MambaShape& shape = work.shape;
    const int lane = threadIdx.x & 31, lines = kWhole ? kSums * kLines : shape.stateDim;
    for (int row = warp; row < count; row += kCopyWarps) {
        const int64_t t = begin + row;
        const float *mixed = work.in.mixed + t * shape.channels(), *b = mixed + place.b(shape),
                    *c = mixed + place.c(shape), *x = mixed + place.x(shape);
        const float* gate = work.in.gate + t * shape.width() + place.x(shape);
#pragma unroll
        for (int i = lane; i < kSums * kLines; i += 32) {
            if (i >= lines) break;
            copyToShared<4>(rows[row].b + Row::placeOf(i), b + i);
            copyToShared<4>(rows[row].c + Row::placeOf(i), c + i);
        }
#pragma unroll
        for (int i = lane; i < kColumns; i += 32) {
            if (place.first + i >= shape.headDim) break;
            copyToShared<4>(rows[row].x + i, x + i);
            copyToShared<4>(rows[row].gate + i, gate + i);
        }
        const int64_t step = t * shape.heads + place.head;
        if (lane == 0) copyToShared<4>(&rows[row].step, work.in.steps + step);
        if (lane == 1) copyToShared<4>(&rows[row].decay, work.in.decays + step);
        if (lane == 2) copyToShared<4>(&rows[row].to, work.batch.to + t);
    }
}

// A block takes columns of a head, 4 * kVec with each of kScanWarps warps, through the rows of sequence blockIdx.y.
template <int kLines, bool kWhole, int kVec>
__global__ void __launch_bounds__((kScanWarps + kCopyWarps) * 32) mambaScanKernel(const MambaWork work) {
    using Part = ScanPart<kLines, kWhole, kVec>;
    constexpr int kColumns = kScanWarps * Part::kColumns;
    constexpr int kBuffers = kLines <= 16 ? 3 : 2;
    __shared__ ScanRow<kLines, kColumns> rows[kBuffers][kScanRows];
    allowNext();
    const MambaShape& shape = work.shape;
    const int64_t begin = work.batch.sequences.begin[blockIdx.y], end = work.batch.sequences.end[blockIdx.y];
    if (begin >= end) return waitForPrevious();
    const ScanPlace<kColumns> place(shape);
    const int warp = threadIdx.x >> 5, from = work.batch.from[begin];
    const bool copies = warp >= kScanWarps;
    Part part(shape, place);
    if (!copies) {
        const float* states = work.states.matrix + int64_t{place.head} * shape.stateDim * shape.headDim;
        part.read(from < 0 ? nullptr : states + from * shape.matrixFloats(), shape.headDim);
    }
    const float skip = work.parameters.skip[place.head];
    waitForPrevious();

    const auto countFrom = [&](int64_t first) { return static_cast<int>(min(int64_t{kScanRows}, end - first)); };
    // A group of copies for each buffer, empty past the end.
    const auto copy = [&](int64_t first, int buffer) {
        if (first < end)
            stageRows<kLines, kWhole>(work, place, rows[buffer], first, countFrom(first), warp - kScanWarps);
        closeCopies();
    };
    if (copies) {
#pragma unroll
        for (int i = 0; i + 1 < kBuffers; i++) copy(begin + i * kScanRows, i);
    }
    int buffer = 0;
    for (int64_t first = begin; first < end; first += kScanRows) {
        const int free = buffer == 0 ? kBuffers - 1 : buffer - 1;
        if (copies) waitForCopies<kBuffers - 2>();
        __syncthreads();  // these rows have come, and nobody reads the buffer before them any more
        if (copies) copy(first + (kBuffers - 1) * kScanRows, free);
        else scanRows<true>(work, place, part, rows[buffer], first, countFrom(first), skip);
        buffer = buffer + 1 == kBuffers ? 0 : buffer + 1;
    }
}

}  // namespace

void prepareMamba(Stream& stream, const MambaInputs& in, const MambaParameters& parameters, const MambaShape& shape,
                  const DeltaStates& states, const DeltaBatch& batch, int64_t longest, void* windows) {
    requireMamba(shape);
    const MambaWork work = {in, parameters, shape, states, batch, windows};
    const int channelBlocks = static_cast<int>((shape.channels() + kConvThreads - 1) / kConvThreads);
    const auto all = static_cast<unsigned>(channelBlocks + kStepBlocks),
               sequences = static_cast<unsigned>(batch.sequences.count);
    if (longest <= kMambaTile) {
        return launch(stream, convKernelFor<false>(shape.convWidth), dim3(all, sequences), dim3(kConvThreads), 0, work,
                      channelBlocks);
    }
    const auto tiles = static_cast<unsigned>((longest + kMambaTile - 1) / kMambaTile);
    launch(stream, mambaWindowsKernel, dim3(all, sequences, tiles), dim3(kConvThreads), 0, work, channelBlocks);
    launch(stream, convKernelFor<true>(shape.convWidth), dim3(static_cast<unsigned>(channelBlocks), sequences, tiles),
           dim3(kConvThreads), 0, work, channelBlocks);
}

void scanMamba(Stream& stream, const MambaInputs& in, const MambaParameters& parameters, const MambaShape& shape,
               const DeltaStates& states, const DeltaBatch& batch) {
    requireMamba(shape);
    const MambaWork work = {in, parameters, shape, states, batch, nullptr};
    // Lanes with four columns each read less of B and C; those with two are more warps.
    const bool many = shape.width() * batch.sequences.count >= 48 * int64_t{stream.device().multiprocessors};
    withLines(shape.stateDim, [&](auto lines, auto whole) {
        const auto start = [&](auto vec) {
            constexpr int kColumns = kScanWarps * 4 * decltype(vec)::value;
            const dim3 grid(static_cast<unsigned>(shape.heads * ((shape.headDim + kColumns - 1) / kColumns)),
                            static_cast<unsigned>(batch.sequences.count));
            launch(stream, mambaScanKernel<decltype(lines)::value, decltype(whole)::value, decltype(vec)::value>, grid,
                   dim3((kScanWarps + kCopyWarps) * 32), 0, work);
        };
        if (many) start(std::integral_constant<int, 4>());
        else start(std::integral_constant<int, 2>());
    });
}

void normMamba(Stream& stream, const float* x, const MambaParameters& parameters, const MambaShape& shape, int64_t rows,
               const RowOutputs& out) {
    if (!parameters.norm) return convertRows(stream, x, rows, shape.width(), out);
    const int64_t group = shape.width() / shape.groups;
    RowOutputs direct = out;
    const bool apart = out.quantized.q && group % kContractBlock != 0;
    if (apart) {
        if (!out.floats)
            throw Error(ErrorKind::Internal,
                        "groups of " + std::to_string(group) + " elements can only be quantized from floats");
        direct.quantized = {};
    }
    rmsNorm(stream, x, nullptr, parameters.norm, parameters.eps, rows * shape.groups, group, direct, shape.groups);
    if (apart) convertRows(stream, out.floats, rows, shape.width(), {nullptr, out.quantized, {}});
}

}  // namespace sharpi::cuda
