// The work between the projections and attention, in one launch: it norms and rotates the queries in place, norms and
// rotates the keys on their way to the cache, and appends the values.
//
// A warp takes one head of one row. Lane i sums the squares of elements i, i + 32, ..., which is the order of the CPU's
// norm, so the bits are the same. The normed head stays in shared memory for the rotation, which combines elements of
// different lanes. There is little to compute and much to wait for, so every load is issued as soon as it may be: norm
// weights, the row's position, its page and its angles before the kernel's turn, and then only the head. A norm over
// the whole row (FullRow) reads queries that other warps of the row overwrite, so a block takes all query heads of a
// row, and every warp has its sum before any of them writes.
#include "kernels/heads/heads.cuh"

namespace sharpi::cuda {

using namespace heads;

namespace {

constexpr int kWarps = 4;
constexpr int kFullRowWarps = 8;

__device__ __forceinline__ void appendValues(const float* x, int64_t at, const KvPages& pages, int lane) {
    for (int e = 2 * lane; e < pages.headDim; e += 64) {
        const float2 pair = *reinterpret_cast<const float2*>(x + e);
        storePair(pages.v, pages.type, at + e, pair.x, pair.y);
    }
}

// The units of a row are its query heads, key heads and value heads. Each has a warp; blocks are (row, units).
template <int kSteps, bool kAdjacent>
__global__ void __launch_bounds__(32 * kWarps)
    prepareByHead(const Inputs in, const HeadShape shape, const HeadPreparation how, const BatchRows batch,
                  const KvPages pages) {
    allowNext();
    extern __shared__ float buffers[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = shape.headDim;
    const int unit = blockIdx.y * kWarps + warp, keyHead = unit - shape.heads, valueHead = keyHead - shape.kvHeads;
    const int64_t row = blockIdx.x;
    const bool isQuery = keyHead < 0, isNormed = how.norm == HeadNorm::PerHead;
    if (valueHead >= shape.kvHeads) return;
    float weight[2 * kSteps], x[2 * kSteps];
    if (isNormed && valueHead < 0) readStrided(isQuery ? how.qNorm : how.kNorm, dim, lane, weight);
    const int64_t at = isQuery ? (row * shape.heads + unit) * dim
                               : (row * shape.kvHeads + (valueHead < 0 ? keyHead : valueHead)) * dim;
    const Place place(batch, row);
    if (valueHead >= 0) {
        const int64_t cached = place.inCache(batch, pages, valueHead);
        waitForPrevious();
        return appendValues(in.v + at, cached, pages, lane);
    }
    const Destination to = {isQuery ? nullptr : pages.k, isQuery ? at : place.inCache(batch, pages, keyHead)};
    Rotation<kSteps, kAdjacent> rotation;
    rotation.read(how, place.position, lane);
    waitForPrevious();
    readStrided((isQuery ? in.q : in.k) + at, dim, lane, x);
    float inverse = 1.0f;
    if (isNormed) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * kSteps; i++)
            sum = fmaf(x[i], x[i], sum);  // past the end x is 0, which leaves sum unchanged
        inverse = inverseNorm(contractTree(sum), dim, how.eps);
    }
    float* buffer = buffers + warp * dim;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; i++)
        if (lane + 32 * i < dim)
            buffer[lane + 32 * i] = isNormed ? __fmul_rn(__fmul_rn(x[i], inverse), weight[i]) : x[i];
    writeRotated<false>(buffer, dim, how.ropeDims, rotation, in, to, pages.type, lane);
}

// Rotates the head in `buffer`, which this warp wrote, in place.
template <int kSteps, bool kAdjacent>
__device__ __forceinline__ void rotate(float* buffer, int dim, int ropeDims,
                                       const Rotation<kSteps, kAdjacent>& rotation, int lane) {
    float turned[2 * kSteps];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2 * kSteps; i++) {
        const int e = 2 * lane + i / 2 * 64 + i % 2;
        if (e < dim) turned[i] = rotation.turned(buffer, e, i, ropeDims);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2 * kSteps; i++) {
        const int e = 2 * lane + i / 2 * 64 + i % 2;
        if (e < dim) buffer[e] = turned[i];
    }
    __syncwarp();
}

// prepareByHead for everything that it leaves out: a value is a head like the others, a norm may have no weights or
// follow the rotation, queries may be scaled, and there may be no keys and values.
template <int kSteps, bool kAdjacent>
__global__ void __launch_bounds__(32 * kWarps)
    prepareAnyHead(const Inputs in, const HeadShape shape, const HeadPreparation how, const BatchRows batch,
                   const KvPages pages) {
    allowNext();
    extern __shared__ float buffers[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = shape.headDim;
    const int unit = blockIdx.y * kWarps + warp, keyHead = unit - shape.heads, valueHead = keyHead - shape.kvHeads;
    if (how.appends ? valueHead >= shape.kvHeads : keyHead >= 0) return;
    const int64_t row = blockIdx.x;
    const bool isQuery = keyHead < 0, isValue = valueHead >= 0;
    const int kvHead = isValue ? valueHead : keyHead;
    const int64_t at = (isQuery ? row * shape.heads + unit : row * shape.kvHeads + kvHead) * dim;
    const Place place(batch, row);
    const Destination to = {isQuery   ? nullptr
                            : isValue ? pages.v
                                      : pages.k,
                            isQuery ? at : place.inCache(batch, pages, kvHead)};
    const int ropeDims = isValue ? 0 : how.ropeDims;
    Rotation<kSteps, kAdjacent> rotation;
    if (ropeDims > 0) rotation.read(how, place.position, lane);
    waitForPrevious();
    float x[2 * kSteps];
    readStrided((isQuery ? in.q : isValue && !how.valuesAreKeys ? in.v : in.k) + at, dim, lane, x);

    const bool isNormed = isValue ? how.valueNorm : how.norm == HeadNorm::PerHead;
    const bool isLate = how.normAfterRotation && !isValue;
    const float* const weight = isValue ? nullptr : isQuery ? how.qNorm : how.kNorm;
    float* const buffer = buffers + warp * dim;
    if (isNormed && !isLate) normalize(x, weight, dim, how.eps, lane);
    writeStrided(x, dim, lane, buffer);
    if (isNormed && isLate) {
        rotate(buffer, dim, ropeDims, rotation, lane);
        readStrided(buffer, dim, lane, x);
        normalize(x, weight, dim, how.eps, lane);
        writeStrided(x, dim, lane, buffer);
    }
    const float factor = isQuery && how.queryScale ? how.queryScale[place.position] : 1.0f;
    writeRotated<true>(buffer, dim, isLate && isNormed ? 0 : ropeDims, rotation, in, to, pages.type, lane, factor);
}

// Block (row, 0) takes the row's queries, (row, 1) its keys and (row, 2) its values.
template <bool kScaled, int kSteps, bool kAdjacent>
__global__ void __launch_bounds__(32 * kFullRowWarps)
    prepareByRow(Inputs in, HeadShape shape, HeadPreparation how, BatchRows batch, KvPages pages) {
    allowNext();
    waitForPrevious();
    extern __shared__ float buffers[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = shape.headDim;
    const int64_t row = blockIdx.x;
    const Place place(batch, row);
    if (blockIdx.y == 2) {
        for (int head = warp; head < shape.kvHeads; head += kFullRowWarps)
            appendValues(in.v + (row * shape.kvHeads + head) * dim, place.inCache(batch, pages, head), pages, lane);
        return;
    }
    const bool isQuery = blockIdx.y == 0;
    const int heads = isQuery ? shape.heads : shape.kvHeads;
    const int64_t rowAt = row * heads * dim;
    const float* x = (isQuery ? in.q : in.k) + rowAt;
    const float* weight = isQuery ? how.qNorm : how.kNorm;
    Rotation<kSteps, kAdjacent> rotation;
    rotation.read(how, place.position, lane);
    const float inverse = inverseNorm(sumOfSquares(x, heads * dim, lane), heads * dim, how.eps);
    __syncthreads();
    float factor = 1.0f;
    if constexpr (kScaled)
        if (isQuery && how.queryScale) factor = how.queryScale[place.position];
    float* buffer = buffers + warp * dim;
    for (int head = warp; head < heads; head += kFullRowWarps) {
        for (int i = lane; i < dim; i += 32)
            buffer[i] = __fmul_rn(__fmul_rn(x[head * dim + i], inverse), weight[head * dim + i]);
        const Destination to = {isQuery ? nullptr : pages.k,
                                isQuery ? rowAt + head * dim : place.inCache(batch, pages, head)};
        writeRotated<kScaled>(buffer, dim, how.ropeDims, rotation, in, to, pages.type, lane, factor);
        __syncwarp();
    }
}

// kPlain: what prepareByHead does is enough.
template <bool kPlain, int kSteps, bool kAdjacent>
void launchHeads(Stream& stream, const Inputs& in, const HeadShape& shape, const HeadPreparation& how,
                 const BatchRows& batch, const KvPages& pages) {
    const size_t headBytes = sizeof(float) * static_cast<size_t>(shape.headDim);
    const auto rows = static_cast<unsigned>(batch.rows);
    if (how.norm == HeadNorm::FullRow) {
        launch(stream, prepareByRow<!kPlain, kSteps, kAdjacent>, dim3(rows, how.appends ? 3 : 1),
               dim3(32 * kFullRowWarps), kFullRowWarps * headBytes, in, shape, how, batch, pages);
        return;
    }
    const int units = shape.heads + (how.appends ? 2 * shape.kvHeads : 0);
    const dim3 blocks(rows, static_cast<unsigned>((units + kWarps - 1) / kWarps)), threads(32 * kWarps);
    if constexpr (kPlain)
        launch(stream, prepareByHead<kSteps, kAdjacent>, blocks, threads, kWarps * headBytes, in, shape, how, batch,
               pages);
    else
        launch(stream, prepareAnyHead<kSteps, kAdjacent>, blocks, threads, kWarps * headBytes, in, shape, how, batch,
               pages);
}

template <bool kPlain, int kSteps>
void choosePairs(Stream& stream, const Inputs& in, const HeadShape& shape, const HeadPreparation& how,
                 const BatchRows& batch, const KvPages& pages) {
    how.adjacent ? launchHeads<kPlain, kSteps, true>(stream, in, shape, how, batch, pages)
                 : launchHeads<kPlain, kSteps, false>(stream, in, shape, how, batch, pages);
}

bool isPlain(const HeadPreparation& how) {
    const bool weighted = how.norm != HeadNorm::PerHead || (how.qNorm && how.kNorm);
    return weighted && !how.normAfterRotation && !how.valueNorm && how.appends && !how.valuesAreKeys && !how.queryScale;
}

}  // namespace

void prepareHeads(Stream& stream, float* q, float* k, const float* v, const HeadShape& shape,
                  const HeadPreparation& how, const BatchRows& batch, const KvPages& pages, const HalfRows& qHalf) {
    if (shape.headDim % 2 != 0 || shape.headDim > kMaxHeadDim) {
        throw Error(ErrorKind::InvalidArgument,
                    "attention heads of " + std::to_string(shape.headDim) + " elements cannot run on the GPU");
    }
    if (pages.pageTokens != kAttentionPage)
        throw Error(ErrorKind::Internal, "prepareHeads cannot write pages of this size");
    if (how.norm == HeadNorm::FullRow && (how.normAfterRotation || how.valueNorm || how.valuesAreKeys))
        throw Error(ErrorKind::Internal, "prepareHeads cannot combine a norm of whole rows with this");
    const Inputs in = {q, k, v, qHalf};
    const int dim = shape.headDim;
    const auto choose = dim > 256      ? choosePairs<false, 8>
                        : isPlain(how) ? (dim <= 64    ? choosePairs<true, 1>
                                          : dim <= 128 ? choosePairs<true, 2>
                                                       : choosePairs<true, 4>)
                                       : (dim <= 64    ? choosePairs<false, 1>
                                          : dim <= 128 ? choosePairs<false, 2>
                                                       : choosePairs<false, 4>);
    choose(stream, in, shape, how, batch, pages);
}

}  // namespace sharpi::cuda
