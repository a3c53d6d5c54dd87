// The rows of blocks: a block of threads takes a row of the batch, keeps its key and gate in the cache, and, if the
// row ends a block of tokens, makes that block's row. What the block needs of tokens of the same batch is read from the
// batch, because other thread blocks are writing it to the cache meanwhile; what came before is read from the cache.
#include "kernels/blocks/device_blocks.cuh"
#include "kernels/rows/device_norms.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kMostSpan = 2 * kMostBlockTokens;

struct Work {
    BlockRule rule;
    const float *keys, *gates;
    BatchRows batch;
    PagedRows pending, rows;
};

// The tokens that a row of blocks is made of: key, gate and the gate's offset of each.
struct Tokens {
    const float *keys[kMostSpan], *gates[kMostSpan], *offsets[kMostSpan];
};

// The block whose last token is row `row` at `position`. Each thread finds some of its tokens.
__device__ int findTokens(const Work& work, int64_t row, int position, Tokens& tokens) {
    const BlockRule& rule = work.rule;
    const int size = rule.blockTokens, dim = work.rows.pages.headDim, width = work.pending.pages.headDim;
    const bool both = rule.overlaps && position >= size;  // the first block has none before it
    const int count = both ? 2 * size : size, first = position + 1 - count;
    const int32_t* const table = tableOf(work.pending, work.batch, row);
    for (int j = threadIdx.x; j < count; j += kThreads) {
        const int half = rule.overlaps && !(both && j < size) ? dim : 0, token = j % size;
        const int64_t other = row - (position - first - j);
        const bool inBatch = other >= 0 && work.batch.sequence[other] == work.batch.sequence[row];
        const int64_t at = (inBatch ? other * width : work.pending.pages.rowAt(table, first + j)) + half;
        tokens.keys[j] = (inBatch ? work.keys : reinterpret_cast<const float*>(work.pending.pages.k)) + at;
        tokens.gates[j] = (inBatch ? work.gates : reinterpret_cast<const float*>(work.pending.pages.v)) + at;
        tokens.offsets[j] = rule.gateOffsets + int64_t{token} * width + half;
    }
    return count;
}

// Element d of a block, before its norm.
__device__ __forceinline__ float poolElement(const Tokens& tokens, int count, int d) {
    const auto gate = [&](int j) { return __fadd_rn(tokens.gates[j][d], tokens.offsets[j][d]); };
    float top = -INFINITY, sum = 0.0f, all = 0.0f;
#pragma unroll 8
    for (int j = 0; j < count; ++j) {
        const float g = gate(j);
        top = top > g ? top : g;
    }
#pragma unroll 4
    for (int j = 0; j < count; ++j) {
        const float weight = portableExp(__fsub_rn(gate(j), top));
        sum = __fadd_rn(sum, weight);
        all = fmaf(weight, tokens.keys[j][d], all);
    }
    return __fdiv_rn(all, sum);
}

__global__ void __launch_bounds__(kThreads) compressKernel(const __grid_constant__ Work work) {
    __shared__ Tokens tokens;
    __shared__ float x[kMostBlockDim];
    __shared__ float sharedInverse;
    allowNext();
    waitForPrevious();
    const int64_t row = blockIdx.x;
    const int position = work.batch.positions[row], size = work.rule.blockTokens;
    const KvPages &pending = work.pending.pages, &rows = work.rows.pages;
    const int width = pending.headDim, dim = rows.headDim;
    const int64_t to = pending.rowAt(tableOf(work.pending, work.batch, row), position);
    for (int d = threadIdx.x; d < width; d += kThreads) {
        reinterpret_cast<float*>(pending.k)[to + d] = work.keys[row * width + d];
        reinterpret_cast<float*>(pending.v)[to + d] = work.gates[row * width + d];
    }
    if ((position + 1) % size != 0) return;

    const int count = findTokens(work, row, position, tokens);
    __syncthreads();
    for (int d = threadIdx.x; d < dim; d += kThreads) x[d] = poolElement(tokens, count, d);
    __syncthreads();
    if (threadIdx.x < 32) {
        const float inverse = inverseNorm(addUp(x, dim, 0.0f, Squares()), work.rule.eps, static_cast<float>(dim));
        if (threadIdx.x == 0) sharedInverse = inverse;
    }
    __syncthreads();
    for (int d = threadIdx.x; d < dim; d += kThreads)
        x[d] = __fmul_rn(__fmul_rn(x[d], sharedInverse), work.rule.norm[d]);
    __syncthreads();
    const int64_t at = rows.rowAt(tableOf(work.rows, work.batch, row), position / size);
    for (int d = threadIdx.x; d < dim; d += kThreads)
        storeCached(rows.k, rows.type, at + d, rotatedElement(x, d, work.rule.rope, position + 1 - size));
}

}  // namespace

void compressBlocks(Stream& stream, const BlockRule& rule, const float* keys, const float* gates,
                    const BatchRows& batch, const PagedRows& pending, const PagedRows& rows) {
    if (rows.pages.headDim > kMostBlockDim || rule.blockTokens > kMostBlockTokens || pending.pages.type != KvType::F32)
        throw Error(ErrorKind::Internal, "compressBlocks cannot make these rows");
    launch(stream, compressKernel, dim3(static_cast<unsigned>(batch.rows)), dim3(kThreads), 0,
           Work{rule, keys, gates, batch, pending, rows});
}

}  // namespace sharpi::cuda
