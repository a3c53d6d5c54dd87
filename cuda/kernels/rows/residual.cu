// See residual.h.
//
// A block takes a row. Each norm needs a sum over the whole row that the step before has made, and the contract makes
// that sum a chain of cols / 32 additions in one warp, so the block alternates: all warps change the row, one warp adds
// it up. Several blocks for a row would have to meet between these steps, or each make the whole row; with one block,
// the row stays in shared memory and only the first loads come from far away. Norms' weights are fetched while the
// kernel before still runs.
//
// A row too long for shared memory is read again from where it was written: y and side are overwritten in place.
#include "kernels/rows/residual.h"

#include <algorithm>

#include "kernels/rows/device_norms.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kMostThreads = 1024;
constexpr int kManyThreads = 256;       // with more, several blocks share one
constexpr int kFewRows = 64;            // up to this number of rows, a block may have the multiprocessor to itself
constexpr int kAhead = 2;               // quads of a thread that are fetched ahead
constexpr int64_t kHeldFloats = 15360;  // 60 KiB of shared memory

struct RowWork {
    PartTerms part;
    NextRows next;
    float* x;
    const int32_t* rowIndex;
    int cols;
    float width;       // cols
    bool whole, held;  // whole: rows are whole quads, aligned; held: rows stay in shared memory
    RowOutputs out;
};

// A row in global or in shared memory.
struct Place {
    float* at;
    int cols;
    bool whole;
    __device__ __forceinline__ float4 load(int q) const { return loadQuad(at + q * 4, whole, cols - q * 4); }
    __device__ __forceinline__ void store(int q, float4 x) const { storeQuad(at + q * 4, x, whole, cols - q * 4); }
};

__device__ __forceinline__ float4 loadWeights(const float* weights, const RowWork& work, int q) {
    return loadQuad(weights + q * 4, work.whole, work.cols - q * 4);
}

// Calls body(q, valid, ahead) for the thread's quads: ahead is their number among those that are fetched ahead, or -1.
// Whole warps make each call.
template <typename Body> __device__ __forceinline__ void forQuads(int quads, const Body& body) {
    const int thread = static_cast<int>(threadIdx.x), warpFirst = thread & ~31;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
        const int skipped = j * blockDim.x;
        if (warpFirst + skipped < quads) body(thread + skipped, thread + skipped < quads, j);
    }
    for (int skipped = kAhead * blockDim.x; warpFirst + skipped < quads; skipped += blockDim.x)
        body(thread + skipped, thread + skipped < quads, -1);
}

// A weight's quads, of which the first were fetched ahead.
struct Weights {
    const float* from;  // null: none
    float4 ahead[kAhead];

    __device__ __forceinline__ void fetch(const RowWork& work, int quads) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int q = static_cast<int>(threadIdx.x + j * blockDim.x);
            ahead[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (from && q < quads) ahead[j] = loadWeights(from, work, q);
        }
    }
    __device__ __forceinline__ float4 quad(const RowWork& work, int q, int j) const {
        return j >= 0 ? ahead[j] : loadWeights(from, work, q);
    }
};

// The sum over a row that the block has just written, for every thread. result: in shared memory.
template <typename Add>
__device__ __forceinline__ float blockSum(const float* row, int cols, const Add& add, float* result) {
    __syncthreads();
    if (threadIdx.x < 32) {
        const float total = contractTree(addUp(row, cols, 0.0f, add));
        if (threadIdx.x == 0) *result = total;
    }
    __syncthreads();
    return *result;
}

// y = yNorm(y) + sideNorm(side). Two warps sum at the same time, if there are two.
__device__ __forceinline__ void joinSides(const RowWork& work, int quads, const Place& y, const Place& side,
                                          float (&results)[2]) {
    const PartTerms& part = work.part;
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x / 32), warps = static_cast<int>(blockDim.x / 32);
    for (int which = warp; which < 2; which += warps) {
        const float total = contractTree(addUp(which ? side.at : y.at, work.cols, 0.0f, Squares()));
        if ((threadIdx.x & 31) == 0) results[which] = total;
    }
    __syncthreads();
    const float ofY = inverseRoot(results[0], part.eps, work.width),
                ofSide = inverseRoot(results[1], part.eps, work.width);
    forQuads(quads, [&](int q, bool valid, int) {
        if (!valid) return;
        const float4 one = product(product(y.load(q), ofY), loadWeights(part.yNorm, work, q));
        const float4 other = product(product(side.load(q), ofSide), loadWeights(part.sideNorm, work, q));
        y.store(q, sum(one, other));
    });
}

// Adds the part to x. sum: where the changed row goes besides, which may be y.
__device__ __forceinline__ void addRow(const RowWork& work, int quads, const Weights& norm, const Place& x,
                                       const Place& to, float* held, float (&results)[2]) {
    const PartTerms& part = work.part;
    const int64_t at = int64_t{blockIdx.x} * work.cols;
    const Place y{part.y + at, work.cols, work.whole}, side{part.side + at, work.cols, work.whole};
    const Place ownY = work.held ? Place{held, work.cols, true} : y,
                ownSide = work.held ? Place{held + quads * 4, work.cols, true} : side;
    float4 before[kAhead];
    forQuads(quads, [&](int q, bool valid, int j) {
        if (!valid) return;
        if (j >= 0) before[j] = x.load(q);
        if (!work.held) return;
        ownY.store(q, y.load(q));
        if (part.side) ownSide.store(q, side.load(q));
    });
    if (part.side) joinSides(work, quads, ownY, ownSide, results);
    float inverse = 1.0f;
    if (part.norm) inverse = inverseRoot(blockSum(ownY.at, work.cols, Squares(), &results[0]), part.eps, work.width);
    const float scale = part.scale ? *part.scale : 1.0f;
    forQuads(quads, [&](int q, bool valid, int j) {
        if (!valid) return;
        float4 added = ownY.load(q);
        if (part.norm) added = product(product(added, inverse), norm.quad(work, q, j));
        if (part.factor != 1.0f) added = product(added, part.factor);
        float4 after = sum(j >= 0 ? before[j] : x.load(q), added);
        if (part.scale) after = product(after, scale);
        x.store(q, after);
        if (work.held) to.store(q, after);
    });
}

__global__ void __launch_bounds__(kMostThreads) residualKernel(const RowWork work) {
    extern __shared__ float4 heldQuads[];
    __shared__ float results[2], means[2];
    allowNext();
    const int cols = work.cols, quads = (cols + 3) / 4;
    const int64_t row = blockIdx.x;
    const bool normed = work.next.kind == NextRows::Kind::Rms || work.next.kind == NextRows::Kind::Layer;
    Weights partNorm{work.part.norm}, nextNorm{work.next.weight};
    partNorm.fetch(work, quads);
    nextNorm.fetch(work, quads);
    waitForPrevious();

    float* const held = reinterpret_cast<float*>(heldQuads);
    const Place x{work.x + (work.rowIndex ? int64_t{work.rowIndex[row]} : row) * cols, cols, work.whole};
    const Place own = work.held ? Place{held, cols, true} : x;
    if (work.part.y) {
        addRow(work, quads, partNorm, x, own, held, results);
    } else if (work.held) {
        forQuads(quads, [&](int q, bool valid, int) {
            if (valid) own.store(q, x.load(q));
        });
    }
    if (work.next.kind == NextRows::Kind::None) return;

    const bool layer = work.next.kind == NextRows::Kind::Layer;
    float mean = 0.0f, inverse = 1.0f;
    if (layer) {
        mean = __fdiv_rn(blockSum(own.at, cols, Sums(), &means[0]), work.width);
        inverse = inverseRoot(blockSum(own.at, cols, Deviations{mean}, &means[1]), work.next.eps, work.width);
    } else if (normed) {
        inverse = inverseRoot(blockSum(own.at, cols, Squares(), &means[0]), work.next.eps, work.width);
    }
    forQuads(quads, [&](int q, bool valid, int j) {
        float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (valid) {
            y = own.load(q);
            if (layer) y = difference(y, mean);
            if (normed) y = product(product(y, inverse), nextNorm.quad(work, q, j));
            if (work.next.bias) y = sum(y, loadWeights(work.next.bias, work, q));
        }
        storeAll(work.out, row, cols, q * 4, work.whole, valid, y);
    });
}

bool isAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

void addPart(Stream& stream, const PartTerms& part, float* x, const int32_t* rowIndex, const NextRows& next,
             int64_t rows, int64_t cols, const RowOutputs& out) {
    if (rows == 0 || cols == 0) return;
    if ((part.y && rowIndex) || (out.quantized.q && cols % kContractBlock != 0))
        throw Error(ErrorKind::Internal, "rows of " + std::to_string(cols) + " elements cannot be normed as asked");
    RowWork work{part, next, x, rowIndex, static_cast<int>(cols), static_cast<float>(cols), cols % 4 == 0, false, out};
    for (const float* p :
         {static_cast<const float*>(part.y), part.norm, static_cast<const float*>(part.side), part.yNorm, part.sideNorm,
          next.weight, next.bias, static_cast<const float*>(x), static_cast<const float*>(out.floats)})
        work.whole = work.whole && isAligned(p);
    const int64_t quads = (cols + 3) / 4, floats = quads * 4 * (part.side ? 2 : 1);
    work.held = floats <= kHeldFloats;
    const size_t shared = work.held ? static_cast<size_t>(floats) * sizeof(float) : 0;
    if (shared > 48 * 1024 - sizeof(float4)) allowShared(residualKernel, shared);
    const int64_t most = rows <= kFewRows ? kMostThreads : kManyThreads;
    const auto threads = static_cast<unsigned>(std::min<int64_t>((quads + 31) / 32 * 32, most));
    launch(stream, residualKernel, dim3(static_cast<unsigned>(rows)), dim3(threads), shared, work);
}

}  // namespace sharpi::cuda
