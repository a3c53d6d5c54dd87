// What lies between the projections and attention, in one launch: norm and rotation of the queries in place, norm,
// rotation and append of the keys (which stay as they are), append of the values.
//
// A warp takes one head of one row: lane i sums the squares of elements i, i + 32, ..., which is the order of
// the CPU's norm, so the bits are the same whoever ran it; the normed head waits in shared memory for the rotation,
// which wants two elements that lie in different lanes. A norm over the whole row (FullRow) reads queries that other
// warps of the row overwrite: there a block takes all query heads of a row, and every warp has its sum before any writes.
#include "kernels/attention.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kWarps = 4;
constexpr int kFullRowWarps = 8;

struct Inputs {
    float* q;
    const float *k, *v;
    HalfRows qHalf;
};

__device__ __forceinline__ float sumOfSquares(const float* x, int n, int lane) {
    float sum = 0.0f;
    for (int i = lane; i < n; i += 32) sum = fmaf(x[i], x[i], sum);
    return contractTree(sum);
}

__device__ __forceinline__ float inverseNorm(float sum, int n, float eps) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, static_cast<float>(n)), eps)));
}

// Element e of the head at `x` (normed, in shared memory) after rotation.
__device__ __forceinline__ float rotated(const float* x, int e, const HeadPreparation& how, const float* cos, const float* sin) {
    if (e >= how.ropeDims) return x[e];
    const int half = how.ropeDims / 2;
    const int pair = how.adjacent ? e >> 1 : e < half ? e : e - half;
    const bool isFirst = how.adjacent ? (e & 1) == 0 : e < half;
    const float a = x[how.adjacent ? 2 * pair : pair], b = x[how.adjacent ? 2 * pair + 1 : pair + half];
    return isFirst ? fmaf(a, cos[pair], -__fmul_rn(b, sin[pair])) : fmaf(a, sin[pair], __fmul_rn(b, cos[pair]));
}

// Two elements that lie side by side in the cache, at element `at`.
__device__ __forceinline__ void storePair(uint8_t* base, KvType type, int64_t at, float first, float second) {
    if (type == KvType::F32) {
        reinterpret_cast<float2*>(base)[at / 2] = {first, second};
    } else if (type == KvType::BF16) {
        reinterpret_cast<__nv_bfloat162*>(base)[at / 2] = __floats2bfloat162_rn(first, second);
    } else {
        reinterpret_cast<__half2*>(base)[at / 2] = __floats2half2_rn(first, second);
    }
}

__device__ __forceinline__ void storeQuery(const Inputs& in, int64_t at, float first, float second) {
    reinterpret_cast<float2*>(in.q)[at / 2] = {first, second};
    if (in.qHalf.hi) storeHalfPair(in.qHalf, at, first, second);
}

// Where a row's head begins in the cache, in elements.
__device__ __forceinline__ int64_t cacheOffset(const BatchRows& batch, const KvPages& pages, int64_t row, int head) {
    const int position = batch.positions[row];
    const int64_t page = batch.pageTables[batch.sequence[row] * batch.pagesPerTable + position / pages.pageTokens];
    return ((page * pages.kvHeads + head) * pages.pageTokens + position % pages.pageTokens) * pages.headDim;
}

// A head of queries (to == nullptr) or keys: normed into `buffer`, rotated, written. inverse: of the norm, if any.
__device__ void finishHead(const float* x, float* buffer, float inverse, const float* weight, const HeadShape& shape,
                           const HeadPreparation& how, int64_t position, const Inputs& in, int64_t queryAt, uint8_t* to, KvType type,
                           int64_t cacheAt, int lane) {
    for (int i = lane; i < shape.headDim; i += 32)
        buffer[i] = weight ? __fmul_rn(__fmul_rn(x[i], inverse), weight[i]) : x[i];
    __syncwarp();
    const float *cos = how.cos + position * (how.ropeDims / 2), *sin = how.sin + position * (how.ropeDims / 2);
    for (int e = 2 * lane; e < shape.headDim; e += 64) {
        const float first = rotated(buffer, e, how, cos, sin), second = rotated(buffer, e + 1, how, cos, sin);
        if (to) {
            storePair(to, type, cacheAt + e, first, second);
        } else {
            storeQuery(in, queryAt + e, first, second);
        }
    }
}

__device__ __forceinline__ void appendValues(const float* x, int64_t at, const KvPages& pages, int lane) {
    for (int e = 2 * lane; e < pages.headDim; e += 64) {
        const float2 pair = *reinterpret_cast<const float2*>(x + e);
        storePair(pages.v, pages.type, at + e, pair.x, pair.y);
    }
}

// Units of a row: its query heads, key heads, value heads. One warp each.
__global__ void __launch_bounds__(32 * kWarps)
    prepareByHead(Inputs in, HeadShape shape, HeadPreparation how, BatchRows batch, KvPages pages) {
    allowNext();
    waitForPrevious();
    extern __shared__ float buffers[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int dim = shape.headDim, units = shape.heads + 2 * shape.kvHeads;
    const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
    const int64_t row = item / units;
    if (row >= batch.rows) return;
    int unit = static_cast<int>(item % units);
    float* buffer = buffers + warp * dim;
    const bool isNormed = how.norm == HeadNorm::PerHead;
    if (unit < shape.heads) {
        const int64_t at = (row * shape.heads + unit) * dim;
        const float inverse = isNormed ? inverseNorm(sumOfSquares(in.q + at, dim, lane), dim, how.eps) : 1.0f;
        finishHead(in.q + at, buffer, inverse, isNormed ? how.qNorm : nullptr, shape, how, batch.positions[row], in, at, nullptr,
                   pages.type, 0, lane);
        return;
    }
    unit -= shape.heads;
    const int head = unit % shape.kvHeads;
    const int64_t at = (row * shape.kvHeads + head) * dim, cacheAt = cacheOffset(batch, pages, row, head);
    if (unit >= shape.kvHeads) return appendValues(in.v + at, cacheAt, pages, lane);
    const float inverse = isNormed ? inverseNorm(sumOfSquares(in.k + at, dim, lane), dim, how.eps) : 1.0f;
    finishHead(in.k + at, buffer, inverse, isNormed ? how.kNorm : nullptr, shape, how, batch.positions[row], in, 0, pages.k, pages.type,
               cacheAt, lane);
}

// Block (row, 0) takes the row's queries, (row, 1) its keys, (row, 2) its values.
__global__ void __launch_bounds__(32 * kFullRowWarps)
    prepareByRow(Inputs in, HeadShape shape, HeadPreparation how, BatchRows batch, KvPages pages) {
    allowNext();
    waitForPrevious();
    extern __shared__ float buffers[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = shape.headDim;
    const int64_t row = blockIdx.x;
    if (blockIdx.y == 2) {
        for (int head = warp; head < shape.kvHeads; head += kFullRowWarps)
            appendValues(in.v + (row * shape.kvHeads + head) * dim, cacheOffset(batch, pages, row, head), pages, lane);
        return;
    }
    const bool isQuery = blockIdx.y == 0;
    const int heads = isQuery ? shape.heads : shape.kvHeads;
    const int64_t rowAt = row * heads * dim;
    const float* x = (isQuery ? in.q : in.k) + rowAt;
    const float* weight = isQuery ? how.qNorm : how.kNorm;
    const float inverse = inverseNorm(sumOfSquares(x, heads * dim, lane), heads * dim, how.eps);
    __syncthreads();
    for (int head = warp; head < heads; head += kFullRowWarps) {
        finishHead(x + head * dim, buffers + warp * dim, inverse, weight + head * dim, shape, how, batch.positions[row], in,
                   rowAt + head * dim, isQuery ? nullptr : pages.k, pages.type,
                   isQuery ? 0 : cacheOffset(batch, pages, row, head), lane);
        __syncwarp();
    }
}

}  // namespace

void prepareHeads(Stream& stream, float* q, float* k, const float* v, const HeadShape& shape, const HeadPreparation& how,
                  const BatchRows& batch, const KvPages& pages, const HalfRows& qHalf) {
    if (shape.headDim % 2 != 0 || shape.headDim > 1024) {
        throw Error(ErrorKind::InvalidArgument, "attention heads of " + std::to_string(shape.headDim) + " elements cannot run on the GPU");
    }
    const Inputs in = {q, k, v, qHalf};
    const size_t headBytes = sizeof(float) * static_cast<size_t>(shape.headDim);
    if (how.norm == HeadNorm::FullRow) {
        launch(stream, prepareByRow, dim3(static_cast<unsigned>(batch.rows), 3), dim3(32 * kFullRowWarps), kFullRowWarps * headBytes, in,
               shape, how, batch, pages);
        return;
    }
    const int64_t units = batch.rows * (shape.heads + 2 * int64_t{shape.kvHeads});
    launch(stream, prepareByHead, dim3(static_cast<unsigned>((units + kWarps - 1) / kWarps)), dim3(32 * kWarps), kWarps * headBytes, in,
           shape, how, batch, pages);
}

}  // namespace sharpi::cuda
