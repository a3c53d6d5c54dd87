// RMS norm, activations and the changes of form between kernels: small work on rows of activations, with the bits of
// the CPU (cpu/kernels/float_ops.cpp and quantize.cpp).
//
// These kernels run between the large products. At decode they are bound by latency, not by bandwidth. The norm's sum
// of squares has the same order on every processor (32 accumulators, one for each lane, then the tree), so it contains
// a serial chain of cols / 32 fmas. Everything around it is kept short. The norm writes every form that its readers
// need, so int8 blocks and halves take no launch of their own. It fetches its weights while the kernel before still
// runs.
//
// With few rows, a row is spread over blocks of 128 threads, because one multiprocessor would spend longer on issuing
// the work on thousands of elements than on the chain. Each block computes the whole sum: one warp reads the row's
// beginning straight into registers and adds it up, while the other three fetch the rest into shared memory. Meanwhile
// each thread fetches the one quad that it will norm. With many rows, a block takes a row and fetches it into shared
// memory once, and one warp computes the sum from there. Several blocks share a multiprocessor, so that the sum of one
// hides behind the loads of another.
#include "kernels/rows/rows.h"

#include <algorithm>

#include "kernels/rows/device_norms.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kSegment = 8192;  // elements of a row that are staged at once
constexpr int kHeld = 2;        // quads of the norm's weights that a thread fetches ahead
constexpr int kFewRows = 64;    // up to this number of rows, a block may have the multiprocessor to itself
// A row is spread over blocks of kSpreadThreads threads if there are up to kSpreadRows rows, or if each block has a
// multiprocessor to itself.
constexpr int kSpreadRows = 8;
constexpr int kSpreadThreads = 128;
constexpr int kFetched = 32;  // elements of a row that a lane of these blocks fetches at once
constexpr int kGroup = kFetched * kContractAccumulators;
constexpr int kElementThreads = 256;
constexpr int kDotRows = 8;  // rows of a block

// Fetches `count` elements to shared memory. A thread issues kDeep loads of quads before it waits for the first.
template <int kDeep>
__device__ __forceinline__ void stage(float4* staged, const float* from, int count, bool whole, int thread,
                                      int threads) {
    const int quads = (count + 3) / 4;
    for (int first = thread; first < quads; first += kDeep * threads) {
        float4 fetched[kDeep];
#pragma unroll
        for (int j = 0; j < kDeep; ++j) {
            const int q = first + j * threads;
            if (q < quads) fetched[j] = loadQuad(from + q * 4, whole, count - q * 4);
        }
#pragma unroll
        for (int j = 0; j < kDeep; ++j) {
            const int q = first + j * threads;
            if (q < quads) staged[q] = fetched[j];
        }
    }
}

// Fetches the group at `begin` of a row to a lane's registers. Elements past the row's end read as 0, which changes no
// sum of squares.
__device__ __forceinline__ void fetchGroup(float (&to)[kFetched], const float* row, int64_t begin, int64_t cols) {
    const float* from = row + begin + (threadIdx.x & 31);
    if (begin + kGroup <= cols) {
#pragma unroll
        for (int i = 0; i < kFetched; ++i) to[i] = from[i * kContractAccumulators];
    } else {
        const int64_t left = row + cols - from;
#pragma unroll
        for (int i = 0; i < kFetched; ++i)
            to[i] = i * kContractAccumulators < left ? from[i * kContractAccumulators] : 0.0f;
    }
}

__device__ __forceinline__ float addGroup(const float (&values)[kFetched], float accumulator) {
#pragma unroll
    for (int i = 0; i < kFetched; ++i) accumulator = fmaf(values[i], values[i], accumulator);
    return accumulator;
}

// The lane's accumulator over the first two groups of a row in global memory.
__device__ __forceinline__ float squaresOfGroups(const float* row, int64_t cols) {
    float first[kFetched], second[kFetched];
    const bool two = cols > kGroup;
    fetchGroup(first, row, 0, cols);
    if (two) fetchGroup(second, row, kGroup, cols);
    const float accumulator = addGroup(first, 0.0f);
    return two ? addGroup(second, accumulator) : accumulator;
}

// A quad of the norm's weights; without weights they are 1.
__device__ __forceinline__ float4 weightQuad(const float* weights, int64_t at, bool whole, int64_t count) {
    return weights ? loadQuad(weights + at, whole, count) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
}
// Where normed row blockIdx.x lies in the outputs. Each weightRows of them are one row of int8 blocks; other forms lie
// alike either way.
struct WideRow {
    int64_t row, cols, first;
    __device__ __forceinline__ WideRow(const RowOutputs& out, int32_t weightRows, int64_t of) {
        const unsigned rows = out.quantized.q ? static_cast<unsigned>(weightRows) : 1;
        row = blockIdx.x / rows;
        cols = of * rows;
        first = blockIdx.x % rows * of;
    }
};

// Row blockIdx.x, quads from blockIdx.y * kSpreadThreads on. Other blocks may still read the row while this one writes.
__global__ void __launch_bounds__(kSpreadThreads)
    spreadNormKernel(const float* x, const int32_t* rowIndex, const float* weights, float eps, int64_t cols,
                     float width, bool whole, RowOutputs out, int32_t weightRows) {
    extern __shared__ float4 stagedQuads[];
    __shared__ float sharedInverse;
    allowNext();
    const int64_t row = blockIdx.x;
    const int64_t column = (int64_t{blockIdx.y} * kSpreadThreads + threadIdx.x) * 4, left = cols - column;
    const bool valid = left > 0;
    float4 w = make_float4(0.0f, 0.0f, 0.0f, 0.0f), y = w;
    if (valid) w = weightQuad(weights, int64_t{blockIdx.x % weightRows} * cols + column, whole, left);
    waitForPrevious();
    const float* in = x + (rowIndex ? int64_t{rowIndex[row]} : row) * cols;
    if (valid) y = loadQuad(in + column, whole, left);
    const int thread =
        static_cast<int>(threadIdx.x) - 32;  // the number among those that stage; negative in the warp that adds
    float accumulator = thread < 0 ? squaresOfGroups(in, cols) : 0.0f;
    for (int64_t begin = 2 * kGroup; begin < cols; begin += kSegment) {
        const int count = static_cast<int>(min(int64_t{kSegment}, cols - begin));
        if (begin > 2 * kGroup) __syncthreads();
        if (thread >= 0) stage<8>(stagedQuads, in + begin, count, whole, thread, kSpreadThreads - 32);
        __syncthreads();
        if (thread < 0) accumulator = addUp(reinterpret_cast<const float*>(stagedQuads), count, accumulator, Squares());
    }
    if (thread < 0) {
        const float inverse = inverseNorm(accumulator, eps, width);
        if (threadIdx.x == 0) sharedInverse = inverse;
    }
    __syncthreads();
    const WideRow to(out, weightRows, cols);
    storeNormed(out, to.row, to.cols, to.first + column, whole, valid, y, sharedInverse, w);
}

// whole: cols is a multiple of 4, and all float pointers are 16-byte aligned. width: cols.
__global__ void __launch_bounds__(512, 2)
    rmsNormKernel(const float* x, const int32_t* rowIndex, const float* weights, float eps, int64_t cols, float width,
                  bool whole, RowOutputs out, int32_t weightRows) {
    extern __shared__ float4 stagedQuads[];
    __shared__ float sharedInverse;
    allowNext();
    float* staged = reinterpret_cast<float*>(stagedQuads);
    const int64_t quads = (cols + 3) / 4;
    const int64_t weightsAt = int64_t{blockIdx.x % weightRows} * cols;
    float4 held[kHeld];
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
        const int64_t q = threadIdx.x + int64_t{j} * blockDim.x;
        held[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (q < quads) held[j] = weightQuad(weights, weightsAt + q * 4, whole, cols - q * 4);
    }
    waitForPrevious();

    const int64_t row = blockIdx.x;
    const float* in = x + (rowIndex ? int64_t{rowIndex[row]} : row) * cols;
    float accumulator = 0.0f;
    for (int64_t begin = 0; begin < cols; begin += kSegment) {
        const int count = static_cast<int>(min(int64_t{kSegment}, cols - begin));
        if (begin > 0) __syncthreads();
        stage<4>(stagedQuads, in + begin, count, whole, threadIdx.x, blockDim.x);
        __syncthreads();
        if (threadIdx.x < 32) accumulator = addUp(staged, count, accumulator, Squares());
    }
    if (threadIdx.x < 32) {
        const float inverse = inverseNorm(accumulator, eps, width);
        if (threadIdx.x == 0) sharedInverse = inverse;
    }
    __syncthreads();

    const float inverse = sharedInverse;
    const bool isStaged = cols <= kSegment;
    const WideRow to(out, weightRows, cols);
    const auto finish = [&](int64_t q, float4 w) {
        const bool valid = q < quads;
        const int64_t column = q * 4, left = cols - column;
        float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (valid) y = isStaged ? stagedQuads[q] : loadQuad(in + column, whole, left);
        storeNormed(out, to.row, to.cols, to.first + column, whole, valid, y, inverse, w);
    };
    // Storing the forms takes whole warps, so a lane past the end stays as long as its warp's first lane has work.
    const int64_t warpFirst = threadIdx.x & ~31u;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
        const int64_t ahead = int64_t{j} * blockDim.x;
        if (warpFirst + ahead < quads) finish(threadIdx.x + ahead, held[j]);
    }
    for (int64_t ahead = int64_t{kHeld} * blockDim.x; warpFirst + ahead < quads; ahead += blockDim.x) {
        const int64_t q = threadIdx.x + ahead;
        float4 w = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (q < quads) w = weightQuad(weights, weightsAt + q * 4, whole, cols - q * 4);
        finish(q, w);
    }
}

// A warp for each row; each lane is an accumulator.
__global__ void __launch_bounds__(kDotRows * 32)
    rowDotsKernel(const float* x, const float* weight, int64_t rows, int64_t cols, float* y) {
    allowNext();
    waitForPrevious();
    const int64_t row = int64_t{blockIdx.x} * kDotRows + threadIdx.x / 32;
    if (row >= rows) return;
    const int lane = static_cast<int>(threadIdx.x % 32);
    float sum = 0.0f;
    for (int64_t i = lane; i < cols; i += kContractAccumulators) sum = fmaf(weight[i], x[row * cols + i], sum);
    sum = contractTree(sum);
    if (lane == 0) y[row] = sum;
}

// Row blockIdx.x, quads from blockIdx.y * kElementThreads on. Without `up`, gate is only converted to other forms,
// unless the join says that there is no gate.
__global__ void __launch_bounds__(kElementThreads)
    elementsKernel(const GatedJoin join, const float* gate, const float* up, int64_t cols, bool whole, RowOutputs out) {
    allowNext();
    waitForPrevious();
    const int64_t row = blockIdx.x;
    const int64_t column = (int64_t{blockIdx.y} * kElementThreads + threadIdx.x) * 4;
    const int64_t left = cols - column, at = row * cols + column;
    const bool valid = left > 0;
    float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (valid) y = loadQuad(gate + at, whole, left);
    if (up || !join.gated) {
        float4 u = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (valid && up) u = loadQuad(up + (join.upStride ? row * join.upStride + column : at), whole, left);
        if (join.weight || join.gateBias || join.upBias) {
            const GatedTerms terms(join, join.pairAt ? join.pairAt[row] : row, cols);
            float *const gates = &y.x, *const ups = &u.x;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (i >= left) break;
                gates[i] = terms.gate(gates[i], column + i);
                ups[i] = terms.up(ups[i], column + i);
            }
        }
        const auto value = [&](float gate, float upper) {
            return up ? gatedValue(join.activation, gate, upper) : activated(join.activation, gate);
        };
        y = make_float4(value(y.x, u.x), value(y.y, u.y), value(y.z, u.z), value(y.w, u.w));
    }
    if (out.floats && valid) storeQuad(out.floats + at, y, whole, left);
    storeForms(out, row, cols, column, y, valid);
}

// Calls change(element) for n elements in place.
template <typename Change> __device__ __forceinline__ void changeEach(float* x, int64_t n, const Change& change) {
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x)
        x[i] = change(x[i]);
}

__global__ void __launch_bounds__(kElementThreads) scaleKernel(float* x, int64_t n, float factor) {
    allowNext();
    waitForPrevious();
    changeEach(x, n, [&](float value) { return __fmul_rn(value, factor); });
}

__global__ void __launch_bounds__(kElementThreads) softcapKernel(float* x, int64_t n, float cap) {
    allowNext();
    waitForPrevious();
    changeEach(x, n, [&](float value) { return portableSoftcap(value, cap); });
}

dim3 elementBlocks(int64_t n) {
    return dim3(static_cast<unsigned>(std::min<int64_t>((n + kElementThreads - 1) / kElementThreads, 1024)));
}

bool isAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

void requireBlocks(int64_t cols, const RowOutputs& out) {
    if (out.quantized.q && cols % kContractBlock != 0) {
        throw Error(ErrorKind::Internal, "rows of " + std::to_string(cols) + " elements are not whole blocks of 32");
    }
}

void launchElements(Stream& stream, const GatedJoin& join, const float* gate, const float* up, int64_t rows,
                    int64_t cols, const RowOutputs& out) {
    if (rows == 0 || cols == 0) return;
    requireBlocks(cols, out);
    const bool whole =
        cols % 4 == 0 && join.upStride % 4 == 0 && isAligned(gate) && isAligned(up) && isAligned(out.floats);
    const int64_t pieces = (cols + 4 * kElementThreads - 1) / (4 * kElementThreads);
    const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(pieces));
    launch(stream, elementsKernel, grid, dim3(kElementThreads), 0, join, gate, up, cols, whole, out);
}

}  // namespace

void rmsNorm(Stream& stream, const float* x, const int32_t* rowIndex, const float* weight, float eps, int64_t rows,
             int64_t cols, const RowOutputs& out, int32_t weightRows) {
    if (rows == 0 || cols == 0) return;
    requireBlocks(cols, out);
    const bool whole = cols % 4 == 0 && isAligned(x) && isAligned(weight) && isAligned(out.floats);
    const int64_t quads = (cols + 3) / 4, blocks = (quads + kSpreadThreads - 1) / kSpreadThreads;
    const bool spread = rows <= kSpreadRows || rows * blocks <= stream.device().multiprocessors;
    if (spread && (blocks == 1 || out.floats != x)) {
        const int64_t staged = std::clamp<int64_t>(quads - 2 * kGroup / 4, 0, kSegment / 4);
        const size_t shared = static_cast<size_t>(staged) * sizeof(float4);
        const auto threads = static_cast<unsigned>(std::min<int64_t>((quads + 31) / 32 * 32, kSpreadThreads));
        return launch(stream, spreadNormKernel, dim3(static_cast<unsigned>(rows), static_cast<unsigned>(blocks)),
                      dim3(threads), shared, x, rowIndex, weight, eps, cols, static_cast<float>(cols), whole, out,
                      weightRows);
    }
    const int64_t warps = std::min<int64_t>((quads + 31) / 32, rows <= kFewRows ? 16 : 8);
    const size_t shared = static_cast<size_t>(std::min<int64_t>(quads, kSegment / 4)) * sizeof(float4);
    launch(stream, rmsNormKernel, dim3(static_cast<unsigned>(rows)), dim3(static_cast<unsigned>(warps * 32)), shared, x,
           rowIndex, weight, eps, cols, static_cast<float>(cols), whole, out, weightRows);
}

void rowDots(Stream& stream, const float* x, const float* weight, int64_t rows, int64_t cols, float* y) {
    if (rows == 0) return;
    launch(stream, rowDotsKernel, dim3(static_cast<unsigned>((rows + kDotRows - 1) / kDotRows)), dim3(kDotRows * 32), 0,
           x, weight, rows, cols, y);
}

void scaleRows(Stream& stream, float* x, int64_t n, float factor) {
    if (n > 0) launch(stream, scaleKernel, elementBlocks(n), dim3(kElementThreads), 0, x, n, factor);
}

void softcap(Stream& stream, float* x, int64_t n, float cap) {
    if (n > 0) launch(stream, softcapKernel, elementBlocks(n), dim3(kElementThreads), 0, x, n, cap);
}

void convertRows(Stream& stream, const float* x, int64_t rows, int64_t cols, const RowOutputs& out) {
    launchElements(stream, {}, x, nullptr, rows, cols, out);
}

void gatedActivation(Stream& stream, const GatedJoin& join, const float* gate, const float* up, int64_t rows,
                     int64_t cols, const RowOutputs& out) {
    launchElements(stream, join, gate, join.gated ? up : nullptr, rows, cols, out);
}

}  // namespace sharpi::cuda
