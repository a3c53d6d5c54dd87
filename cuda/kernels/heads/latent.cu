// What latent attention does between its products: the pieces of queries that the first product by head reads, and what
// comes before attention. A warp has one head of one row, or the row of the cache, as in heads.cu, whose norm and
// rotation these are.
#include "kernels/heads/heads.cuh"
#include "kernels/heads/latent.h"

namespace sharpi::cuda {

using namespace heads;

namespace {

constexpr int kWarps = 4;
constexpr int kSteps = kMaxLatentRotated / 64, kNormed = kMaxLatentRank / 32;

struct Latents {
    float* q;
    const float *headQueries, *k;
    LatentShape shape;
    HeadPreparation how;  // kNorm: of latents
    HalfRows qHalf;
};

// The units of a row are its heads and the row of the cache. Each has a warp; blocks are (row, units). Whatever does
// not come from another kernel is loaded before the kernel's turn: it would be waited for link by link afterwards.
// Loops are hardly unrolled: in a step of one row their code has to come from the L2 cache, and runs once.
template <bool kAdjacent>
__global__ void __launch_bounds__(32 * kWarps)
    prepareLatents(const __grid_constant__ Latents p, const BatchRows batch, const KvPages pages) {
    allowNext();
    extern __shared__ float buffers[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, unit = blockIdx.y * kWarps + warp;
    const int rank = p.shape.rank, rotated = p.shape.rotated, dim = rank + rotated, heads = p.shape.heads;
    if (unit > heads) return;
    const int64_t row = blockIdx.x;
    float* const buffer = buffers + warp * dim;
    float weight[kNormed];
    if (unit == heads) readStrided(p.how.kNorm, rank, lane, weight);
    const Place place(batch, row);
    Rotation<kSteps, kAdjacent> rotation;
    rotation.read(p.how, place.position, lane);
    if (unit < heads) {
        const float factor = p.how.queryScale ? p.how.queryScale[place.position] : 1.0f;
        waitForPrevious();
        const int64_t at = (row * heads + unit) * dim;
        const float* const from =
            p.headQueries + (row * heads + unit) * (p.shape.plainDim + rotated) + p.shape.plainDim;
#pragma unroll 2
        for (int i = lane; i < rotated; i += 32) buffer[i] = from[i];
        const Inputs in = {p.qHalf.hi ? nullptr : p.q, nullptr, nullptr, p.qHalf};
        if (p.how.queryScale || p.qHalf.hi) {
#pragma unroll 2
            for (int i = 2 * lane; i < rank; i += 64)
                storeQuery(in, at + i, __fmul_rn(p.q[at + i], factor), __fmul_rn(p.q[at + i + 1], factor));
        }
        return writeRotated<true>(buffer, rotated, rotated, rotation, in, {nullptr, at + rank}, pages.type, lane,
                                  factor);
    }
    const int64_t at = place.inCache(batch, pages, 0);
    waitForPrevious();
    const float* const key = p.k + row * dim;
    float x[kNormed];
    readStrided(key, rank, lane, x);
#pragma unroll 2
    for (int i = lane; i < rotated; i += 32) buffer[rank + i] = key[rank + i];
    normalize(x, nullptr, rank, p.how.eps, lane);
#pragma unroll
    for (int i = 0; i < kNormed; i++) x[i] = __fmul_rn(x[i], weight[i]);
    writeStrided(x, rank, lane, buffer);
    writeRotated<false>(buffer + rank, rotated, rotated, rotation, {}, {pages.k, at + rank}, pages.type, lane);
#pragma unroll 2
    for (int e = 2 * lane; e < rank; e += 64) storePair(pages.k, pages.type, at + e, buffer[e], buffer[e + 1]);
}

// A warp has 128 columns of a piece; blocks are (pieces / kWarps, columns / 128).
__global__ void __launch_bounds__(32 * kWarps)
    takePiecesKernel(const float* x, int64_t stride, int64_t pieces, int64_t cols, const RowOutputs out) {
    allowNext();
    waitForPrevious();
    const int64_t piece = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (piece >= pieces) return;
    const int64_t column = static_cast<int64_t>(blockIdx.y) * 128 + threadIdx.x % 32 * 4;
    const bool valid = column < cols;
    const float* const from = x + piece * stride + column;
    const int64_t count = valid ? cols - column : 0;
    const float4 quad = loadQuad(from, valid && cols % 4 == 0 && stride % 4 == 0, count);
    storeForms(out, piece, cols, column, quad, valid);
    if (out.floats) storeQuad(out.floats + piece * cols + column, quad, valid && cols % 4 == 0, count);
}

}  // namespace

void prepareLatent(Stream& stream, float* q, const float* headQueries, const float* k, const LatentShape& shape,
                   const LatentPreparation& how, const BatchRows& batch, const KvPages& pages, const HalfRows& qHalf) {
    requireLatent(shape);
    if (pages.pageTokens != kAttentionPage || pages.kvHeads != 1 || pages.valuePrefix != shape.rank ||
        pages.headDim != shape.rowDim())
        throw Error(ErrorKind::Internal, "prepareLatent cannot write these pages");
    if (batch.rows == 0) return;
    Latents p = {q, headQueries, k, shape, {}, qHalf};
    p.how.kNorm = how.norm;
    p.how.queryScale = how.queryScale;
    p.how.eps = how.eps;
    p.how.cos = how.cos;
    p.how.sin = how.sin;
    p.how.ropeDims = shape.rotated;
    p.how.adjacent = how.adjacent;
    const dim3 blocks(static_cast<unsigned>(batch.rows), static_cast<unsigned>(shape.heads / kWarps + 1));
    const size_t bytes = kWarps * sizeof(float) * static_cast<size_t>(shape.rowDim());
    const auto kernel = how.adjacent ? prepareLatents<true> : prepareLatents<false>;
    launch(stream, kernel, blocks, dim3(32 * kWarps), bytes, p, batch, pages);
}

void takePieces(Stream& stream, const float* x, int64_t stride, int64_t pieces, int64_t cols, const RowOutputs& out) {
    if (pieces == 0) return;
    if (out.quantized.q && cols % kContractBlock != 0)
        throw Error(ErrorKind::Internal, "takePieces cannot quantize rows of " + std::to_string(cols) + " elements");
    const dim3 blocks(static_cast<unsigned>((pieces + kWarps - 1) / kWarps), static_cast<unsigned>((cols + 127) / 128));
    launch(stream, takePiecesKernel, blocks, dim3(32 * kWarps), 0, x, stride, pieces, cols, out);
}

}  // namespace sharpi::cuda
