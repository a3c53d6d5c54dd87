// The heads of attention over blocks on their way from the projections: see prepareBlockHeads. A warp takes one head of
// one row, or the row's key. Lane i sums the squares of elements i, i + 32, ..., which is the order of the CPU's norm.
#include "kernels/blocks/device_blocks.cuh"
#include "kernels/rows/device_norms.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kWarps = 8;

struct Work {
    float* q;
    const float* k;
    HeadShape shape;
    BlockHeads how;
    BatchRows batch;
    KvPages pages;
    HalfRows qHalf;
};

__global__ void __launch_bounds__(32 * kWarps) headsKernel(const __grid_constant__ Work work) {
    extern __shared__ float buffers[];
    allowNext();
    waitForPrevious();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = work.shape.headDim, heads = work.shape.heads;
    const int head = blockIdx.y * kWarps + warp;
    const int64_t row = blockIdx.x;
    if (head > heads) return;
    const bool isKey = head == heads;
    const int position = work.batch.positions[row];
    const float* const from = isKey ? work.k + row * dim : work.q + (row * heads + head) * dim;
    const float* const weight = isKey ? work.how.kNorm : work.how.qNorm;
    float* const x = buffers + warp * dim;
    float sum = 0.0f;
    for (int d = lane; d < dim; d += 32) {
        x[d] = from[d];
        sum = fmaf(x[d], x[d], sum);
    }
    const float inverse = inverseNorm(sum, work.how.eps, static_cast<float>(dim));
    for (int d = lane; d < dim; d += 32) {
        const float y = __fmul_rn(x[d], inverse);
        x[d] = weight ? __fmul_rn(y, weight[d]) : y;
    }
    __syncwarp();
    const KvPages& pages = work.pages;
    const int32_t* const table = work.batch.pageTables + work.batch.sequence[row] * work.batch.pagesPerTable;
    const int64_t to = isKey ? pages.rowAt(table, position) : 0;
    for (int d = lane; d < dim; d += 32) {
        const float y = rotatedElement(x, d, work.how.rope, position);
        const int64_t at = (row * heads + head) * dim + d;
        if (isKey) storeCached(pages.k, pages.type, to + d, y);
        else work.q[at] = y;
        if (!isKey && work.qHalf.hi) {
            const HalfPair halves = splitHalf(y);
            work.qHalf.hi[at] = halves.hi;
            if (work.qHalf.lo) work.qHalf.lo[at] = halves.lo;
        }
    }
}

}  // namespace

void prepareBlockHeads(Stream& stream, float* q, const float* k, const HeadShape& shape, const BlockHeads& how,
                       const BatchRows& batch, const KvPages& pages, const HalfRows& qHalf) {
    if (batch.rows == 0) return;
    if (shape.kvHeads != 1 || pages.pageTokens != kAttentionPage || pages.rowTokens != 1)
        throw Error(ErrorKind::Internal, "prepareBlockHeads cannot write these pages");
    const dim3 blocks(static_cast<unsigned>(batch.rows), static_cast<unsigned>((shape.heads + kWarps) / kWarps));
    launch(stream, headsKernel, blocks, dim3(32 * kWarps), sizeof(float) * kWarps * static_cast<size_t>(shape.headDim),
           Work{q, k, shape, how, batch, pages, qHalf});
}

}  // namespace sharpi::cuda
