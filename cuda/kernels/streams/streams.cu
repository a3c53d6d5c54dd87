// Hyper-connections: what a part reads of a row's streams, and what they become of its answer. See streams.h.
//
// The work on rows is a few fused multiply-adds an element, so these kernels are bound by reading the streams. The mix
// is the exception: Sinkhorn's iterations are some forty passes over count x count numbers, each of which waits for the
// one before. A block of its own makes it while the others sum up the part's input. A thread has one number, adds up
// its line in the rule's order and divides; two buffers take turns, so that a pass meets only once. Up to 5 streams fit
// in a warp.
#include "kernels/streams/streams.h"

#include "kernels/rows/device_rows.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kMostMixed = kMostStreams * kMostStreams;
static_assert(kMostMixed <= kThreads, "a thread has one number of the mix");

__device__ __forceinline__ float4 scaledSum(float factor, float4 y, float4 x) {
    return make_float4(fmaf(factor, y.x, x.x), fmaf(factor, y.y, x.y), fmaf(factor, y.z, x.z), fmaf(factor, y.w, x.w));
}

// The column of the thread's quad, of piece blockIdx.y of a row.
__device__ __forceinline__ int64_t columnOf() { return (int64_t{blockIdx.y} * kThreads + threadIdx.x) * 4; }

__device__ __forceinline__ float4 quadAt(const float* x) { return *reinterpret_cast<const float4*>(x); }

__global__ void __launch_bounds__(kThreads) beginKernel(const StreamRule rule, const float* x, float* streams) {
    allowNext();
    waitForPrevious();
    const int64_t column = columnOf(), row = blockIdx.x;
    if (column >= rule.width) return;
    const float4 quad = quadAt(x + row * rule.width + column);
    for (int a = 0; a < rule.count; ++a)
        *reinterpret_cast<float4*>(streams + (row * rule.count + a) * rule.width + column) = quad;
}

// The sum of a row's streams, weighed by their inputs. m: the row's products. The whole block calls it.
__device__ __forceinline__ void sumStreams(const StreamRule& rule, const float* streams, const float* m, float* x) {
    __shared__ float inputs[kMostStreams];
    const int a = threadIdx.x;
    if (a < rule.count) inputs[a] = streamInput(m[a], rule.scale[0], rule.base[a], rule.epsilon);
    __syncthreads();
    const int64_t column = columnOf(), row = blockIdx.x;
    if (column >= rule.width) return;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = 0; i < rule.count; ++i)
        sum = scaledSum(inputs[i], quadAt(streams + (row * rule.count + i) * rule.width + column), sum);
    *reinterpret_cast<float4*>(x + row * rule.width + column) = sum;
}

// Makes the answers' weights and the mix from the row's products, in place. Number i is at row a and column b.
__device__ void mixRow(const StreamRule& rule, float* m) {
    __shared__ float buffers[2][kMostMixed];
    const int n = rule.count, numbers = n * n, i = threadIdx.x;
    const bool oneWarp = numbers <= 32;
    const auto meet = [&] {
        if (oneWarp) __syncwarp();
        else __syncthreads();
    };
    if (i < n) m[n + i] = 2.0f * streamInput(m[n + i], rule.scale[1], rule.base[n + i], 0.0f);
    if (oneWarp && i >= 32) return;
    const bool mine = i < numbers;
    const int at = mine ? i : 0, a = at / n, b = at - a * n;
    int turn = 0;
    // Calls body(number) for the line of numbers that begins at `first`, in order, once everyone has written his own.
    const auto overLine = [&](float own, int first, int step, const auto& body) {
        if (mine) buffers[turn][i] = own;
        meet();
        for (int k = 0; k < n; ++k) body(buffers[turn][first + k * step]);
        turn ^= 1;
    };
    const int toB = 2 * n + at;
    float number = fmaf(m[toB], rule.scale[2], rule.base[toB]), largest = -INFINITY, sum = 0.0f;
    overLine(number, a * n, 1, [&](float other) { largest = other > largest ? other : largest; });
    number = portableExp(number - largest);
    overLine(number, a * n, 1, [&](float other) { sum = sum + other; });
    number = number / sum + rule.epsilon;
    const auto normalize = [&](int first, int step) {
        float total = 0.0f;
        overLine(number, first, step, [&](float other) { total = total + other; });
        number = number / (total + rule.epsilon);
    };
    normalize(b, n);
    for (int pass = 1; pass < rule.iterations; ++pass) {
        normalize(a * n, 1);
        normalize(b, n);
    }
    if (mine) m[toB] = number;
}

// The last block of a row makes the mix, the others a piece of x each.
__global__ void __launch_bounds__(kThreads)
    enterKernel(const StreamRule rule, const float* streams, float* mix, float* x) {
    allowNext();
    waitForPrevious();
    float* const m = mix + int64_t{blockIdx.x} * rule.count * (2 + rule.count);
    if (blockIdx.y + 1 == gridDim.y) mixRow(rule, m);
    else sumStreams(rule, streams, m, x);
}

__global__ void __launch_bounds__(kThreads)
    endKernel(const StreamRule rule, const float* streams, const float* mix, float* x) {
    allowNext();
    waitForPrevious();
    sumStreams(rule, streams, mix + int64_t{blockIdx.x} * rule.count, x);
}

// kMost: the most streams. A thread has a quad of each.
template <int kMost>
__global__ void __launch_bounds__(kThreads)
    leaveKernel(const StreamRule rule, const float* mix, const float* part, float* streams) {
    allowNext();
    waitForPrevious();
    const int n = rule.count;
    const int64_t column = columnOf(), row = blockIdx.x;
    if (column >= rule.width) return;
    const float* const m = mix + row * n * (2 + n);
    float* const first = streams + row * n * rule.width + column;
    const float4 added = quadAt(part + row * rule.width + column);
    float4 before[kMost];
#pragma unroll
    for (int a = 0; a < kMost; ++a)
        if (a < n) before[a] = quadAt(first + a * rule.width);
    for (int b = 0; b < n; ++b) {
        float4 after = scaledSum(m[n + b], added, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
#pragma unroll
        for (int a = 0; a < kMost; ++a)
            if (a < n) after = scaledSum(m[2 * n + a * n + b], before[a], after);
        *reinterpret_cast<float4*>(first + b * rule.width) = after;
    }
}

dim3 gridOf(const StreamRule& rule, int64_t rows, int more = 0) {
    if (rule.count < 1 || rule.count > kMostStreams || rule.width % 4 != 0) {
        throw Error(ErrorKind::InvalidArgument, std::to_string(rule.count) + " streams of " +
                                                    std::to_string(rule.width) + " elements cannot run on the GPU");
    }
    const int64_t pieces = (rule.width + 4 * kThreads - 1) / (4 * kThreads);
    return dim3(static_cast<unsigned>(rows), static_cast<unsigned>(pieces + more));
}

}  // namespace

void beginStreams(Stream& stream, const StreamRule& rule, const float* x, int64_t rows, float* streams) {
    launch(stream, beginKernel, gridOf(rule, rows), dim3(kThreads), 0, rule, x, streams);
}

void enterStreams(Stream& stream, const StreamRule& rule, const float* streams, float* mix, int64_t rows, float* x) {
    launch(stream, enterKernel, gridOf(rule, rows, 1), dim3(kThreads), 0, rule, streams, mix, x);
}

void leaveStreams(Stream& stream, const StreamRule& rule, const float* mix, const float* part, int64_t rows,
                  float* streams) {
    const auto kernel = rule.count <= 4 ? leaveKernel<4> : leaveKernel<kMostStreams>;
    launch(stream, kernel, gridOf(rule, rows), dim3(kThreads), 0, rule, mix, part, streams);
}

void endStreams(Stream& stream, const StreamRule& rule, const float* streams, const float* mix, int64_t rows,
                float* x) {
    launch(stream, endKernel, gridOf(rule, rows), dim3(kThreads), 0, rule, streams, mix, x);
}

}  // namespace sharpi::cuda
