// Attention over the keys of a window and rows of blocks of tokens, bit for bit as cpu/kernels/attention.cpp defines
// it.
//
// There is one key for all heads, and it is the value too. So a page is brought to shared memory once for a group of
// heads, as it lies in the cache, and read twice from there. A block of threads takes one segment of one row for
// kHeads heads, page after page: scores, the page's softmax, and its outputs. A dot product is one chain over the
// elements, so a lane computes whole ones: those of its key with some of the heads, whose queries all lanes read at one
// address. For the outputs a thread owns two neighbouring elements of all heads and runs over the keys. What a segment
// gives goes to device memory, and a second kernel joins the segments of each head in their order, adds the sink,
// divides, and rotates the result back.
//
// The rows of blocks come first, in segments of their own, then the window's keys in segments at absolute multiples.
// The grid has room for the most segments that a row may see; those that a row does not see end at once. So a captured
// step serves every length.
#include "kernels/blocks/device_blocks.cuh"
#include "kernels/matmul/mma.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kPage = kAttentionPage;
constexpr int kJoinThreads = 128;
constexpr int kPadding =
    16;  // bytes between lines of a page in shared memory: lanes that read their keys use all banks

struct Work {
    const float* q;
    HeadShape shape;
    AttentionRule rule;
    BatchRows batch;
    KvPages pages;
    SeenBlocks seen;
    RotatedPart back;
    int segments;                    // places for a row's results of segments
    float *maxima, *sums, *outputs;  // [rows, segments, heads], and headDim of each
    float* out;
};

// What a row sees, cut into segments: first those of blocks.
struct Seen : SeenKeys {
    int ofBlocks, firstSegment, segments;

    __device__ __forceinline__ Seen(const Work& work, int64_t row)
        : SeenKeys(work.batch, work.rule.reach, work.seen, row) {
        constexpr int kSegment = kSegmentPages * kPage;
        ofBlocks = (blocks + kSegment - 1) / kSegment;
        firstSegment = first / kSegment;
        segments = ofBlocks + position / kSegment - firstSegment + 1;
    }
    // The keys or blocks [begin, end) of a segment.
    __device__ __forceinline__ int2 span(int segment) const {
        constexpr int kSegment = kSegmentPages * kPage;
        if (segment < ofBlocks) return {segment * kSegment, min(blocks, (segment + 1) * kSegment)};
        const int begin = (firstSegment + segment - ofBlocks) * kSegment;
        return {max(begin, first), min(position + 1, begin + kSegment)};
    }
};

// Shared memory, in bytes.
struct Places {
    int line, queries, scores, factors, lines, total;
    __host__ __device__ Places(int headDim, int elementBytes, int heads)
        : line(headDim * elementBytes + kPadding),
          queries(kPage * line),
          scores(queries + heads * headDim * 4),
          factors(scores + heads * kPage * 4),
          lines(factors + heads * 8),
          total(lines + kPage * 8) {}
};

// Copies the lines [begin, end) of a page to their places. A thread finds where a line is; then a warp copies it, every
// lane 16 bytes at a time.
template <int kBytes>
__device__ __forceinline__ void loadPage(const Work& work, const Seen& seen, int64_t row, bool ofBlocks, int page,
                                         int begin, int end, uint8_t* to, const Places& places) {
    const KvPages& pages = ofBlocks ? work.seen.rows.pages : work.pages;
    auto* const lines = reinterpret_cast<int64_t*>(to + places.lines);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (thread >= begin && thread < end) {
        const int32_t* const table = ofBlocks
                                         ? tableOf(work.seen.rows, work.batch, row)
                                         : work.batch.pageTables + work.batch.sequence[row] * work.batch.pagesPerTable;
        const int number = page * kPage + thread;
        const bool isChosen = ofBlocks && work.seen.chosen;
        lines[thread] =
            pages.rowAt(table, isChosen ? work.seen.chosen[row * work.seen.topK + number] : number) * kBytes;
    }
    __syncthreads();
    const int bytes = work.shape.headDim * kBytes;
    for (int j = begin + warp; j < end; j += kWarps) {
        const uint8_t* const from = pages.k + lines[j];
        const uint32_t line = sharedAddress(to + j * places.line);
        for (int i = lane * 16; i < bytes; i += 32 * 16) copyChunk(line + i, from + i, true);
    }
    closeCopies();
    waitForCopies<0>();
}

// Eight elements of a line as floats.
template <KvType kType> __device__ __forceinline__ void readEight(const uint8_t* at, float (&out)[8]) {
    readElements<kType, 8>(at, out);
}

// The scores of the page's keys with all heads of the group. Keys outside [begin, end) count as -infinity.
template <KvType kType, int kHeads>
__device__ __forceinline__ void scorePage(const Work& work, const Places& places, const uint8_t* shared, float* scores,
                                          int begin, int end) {
    constexpr int kOwn = kHeads / (kWarps / 2);  // heads of a warp, which has half of the keys
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = work.shape.headDim;
    const int key = warp % 2 * 32 + lane, head = warp / 2 * kOwn;
    const uint8_t* const line = shared + key * places.line;
    const float* const q = reinterpret_cast<const float*>(shared + places.queries) + head * dim;
    const bool isSeen = key >= begin && key < end;
    float dot[kOwn] = {};
    if (isSeen) {
#pragma unroll 2
        for (int d = 0; d < dim; d += 8) {
            float k[8];
            readEight<kType>(line + d * kKvBytes<kType>, k);
#pragma unroll
            for (int h = 0; h < kOwn; ++h) {
                const float4 low = *reinterpret_cast<const float4*>(q + h * dim + d),
                             high = *reinterpret_cast<const float4*>(q + h * dim + d + 4);
                float sum = dot[h];
                sum = fmaf(low.x, k[0], sum), sum = fmaf(low.y, k[1], sum);
                sum = fmaf(low.z, k[2], sum), sum = fmaf(low.w, k[3], sum);
                sum = fmaf(high.x, k[4], sum), sum = fmaf(high.y, k[5], sum);
                sum = fmaf(high.z, k[6], sum), sum = fmaf(high.w, k[7], sum);
                dot[h] = sum;
            }
        }
    }
#pragma unroll
    for (int h = 0; h < kOwn; ++h) {
        float score = __fmul_rn(dot[h], work.rule.scale);
        if (work.rule.softcap > 0) score = portableSoftcap(score, work.rule.softcap);
        scores[(head + h) * kPage + key] = isSeen ? score : -INFINITY;
    }
}

// The factors of the outputs when two parts are joined.
struct Factors {
    float kept, added;
};

__device__ __forceinline__ Factors joinParts(float& largest, float& sum, float partLargest, float partSum) {
    const float joined = largest > partLargest ? largest : partLargest;
    const Factors factors = {portableExp(__fsub_rn(largest, joined)), portableExp(__fsub_rn(partLargest, joined))};
    sum = fmaf(partSum, factors.added, __fmul_rn(sum, factors.kept));
    largest = joined;
    return factors;
}

// Turns a head's scores into weights, and joins the page to the segment. A warp has the head.
__device__ __forceinline__ Factors weighScores(float* scores, float& largest, float& sum, int lane) {
    const float low = scores[lane], high = scores[lane + 32];
    float top = low > high ? low : high;
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
        const float other = __shfl_xor_sync(kWholeWarp, top, width);
        top = top > other ? top : other;
    }
    const float first = portableExp(__fsub_rn(low, top)), second = portableExp(__fsub_rn(high, top));
    scores[lane] = first;
    scores[lane + 32] = second;
    return joinParts(largest, sum, top, contractTree(__fadd_rn(first, second)));
}

// Adds the page's outputs to the segment's. A thread has two elements of each head.
template <KvType kType, int kHeads>
__device__ __forceinline__ void weighValues(const Places& places, const uint8_t* shared, int column, int begin, int end,
                                            float2 (&outputs)[kHeads]) {
    const float* const weights = reinterpret_cast<const float*>(shared + places.scores);
    const auto* const factors = reinterpret_cast<const Factors*>(shared + places.factors);
    float2 page[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) page[h] = {0.0f, 0.0f};
#pragma unroll 2
    for (int j = begin; j < end; ++j) {
        float v[2];
        readElements<kType, 2>(shared + j * places.line + column * kKvBytes<kType>, v);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            const float weight = weights[h * kPage + j];
            page[h] = {fmaf(weight, v[0], page[h].x), fmaf(weight, v[1], page[h].y)};
        }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
        const Factors f = factors[h];
        outputs[h] = {fmaf(page[h].x, f.added, __fmul_rn(outputs[h].x, f.kept)),
                      fmaf(page[h].y, f.added, __fmul_rn(outputs[h].y, f.kept))};
    }
}

// Grid: groups of kHeads heads, segments, rows.
template <KvType kType, int kHeads>
__global__ void __launch_bounds__(kThreads) segmentKernel(const __grid_constant__ Work work) {
    extern __shared__ __align__(128) uint8_t shared[];
    constexpr int kHeadsOfWarp = kHeads / kWarps;
    allowNext();
    waitForPrevious();
    const int64_t row = blockIdx.z;
    const int segment = blockIdx.y, firstHead = blockIdx.x * kHeads;
    const Seen seen(work, row);
    if (segment >= seen.segments) return;
    const int dim = work.shape.headDim, heads = min(kHeads, work.shape.heads - firstHead);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = 2 * threadIdx.x;
    const Places places(dim, kKvBytes<kType>, kHeads);
    auto* const queries = reinterpret_cast<float*>(shared + places.queries);
    auto* const scores = reinterpret_cast<float*>(shared + places.scores);
    auto* const factors = reinterpret_cast<Factors*>(shared + places.factors);
    const float* const q = work.q + (row * work.shape.heads + firstHead) * dim;
    for (int i = threadIdx.x; i < kHeads * dim; i += kThreads) queries[i] = i < heads * dim ? q[i] : 0.0f;

    float largest[kHeadsOfWarp], sum[kHeadsOfWarp];
    float2 outputs[kHeads];
#pragma unroll
    for (int i = 0; i < kHeadsOfWarp; ++i) largest[i] = -INFINITY, sum[i] = 0.0f;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) outputs[h] = {0.0f, 0.0f};
    const int2 span = seen.span(segment);
    for (int page = span.x / kPage; page * kPage < span.y; ++page) {
        const int begin = max(0, span.x - page * kPage), end = min(kPage, span.y - page * kPage);
        loadPage<kKvBytes<kType>>(work, seen, row, segment < seen.ofBlocks, page, begin, end, shared, places);
        __syncthreads();
        scorePage<kType, kHeads>(work, places, shared, scores, begin, end);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kHeadsOfWarp; ++i) {
            const int head = warp * kHeadsOfWarp + i;
            const Factors f = weighScores(scores + head * kPage, largest[i], sum[i], lane);
            if (lane == 0) factors[head] = f;
        }
        __syncthreads();
        if (column < dim) weighValues<kType, kHeads>(places, shared, column, begin, end, outputs);
        __syncthreads();
    }
    const int64_t first = (row * work.segments + segment) * work.shape.heads + firstHead;
#pragma unroll
    for (int i = 0; i < kHeadsOfWarp; ++i) {
        const int head = warp * kHeadsOfWarp + i;
        if (lane == 0 && head < heads) work.maxima[first + head] = largest[i], work.sums[first + head] = sum[i];
    }
    if (column >= dim) return;
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
        if (h < heads) *reinterpret_cast<float2*>(work.outputs + (first + h) * dim + column) = outputs[h];
}

// Grid: heads, rows.
__global__ void __launch_bounds__(kJoinThreads) joinKernel(const __grid_constant__ Work work) {
    extern __shared__ float line[];
    allowNext();
    waitForPrevious();
    const int head = blockIdx.x, heads = work.shape.heads, dim = work.shape.headDim;
    const int64_t row = blockIdx.y;
    const Seen seen(work, row);
    for (int d = threadIdx.x; d < dim; d += kJoinThreads) {
        float largest = -INFINITY, sum = 0.0f, all = 0.0f;
        for (int segment = 0; segment < seen.segments; ++segment) {
            const int64_t at = (row * work.segments + segment) * heads + head;
            const float part = work.outputs[at * dim + d];
            if (segment == 0) {
                largest = work.maxima[at], sum = work.sums[at], all = __fadd_rn(part, 0.0f);
                continue;
            }
            const Factors f = joinParts(largest, sum, work.maxima[at], work.sums[at]);
            all = fmaf(part, f.added, __fmul_rn(all, f.kept));
        }
        if (work.rule.sinks) {
            const float sink = work.rule.sinks[head], joined = largest > sink ? largest : sink;
            const float kept = portableExp(__fsub_rn(largest, joined));
            sum = __fadd_rn(__fmul_rn(sum, kept), portableExp(__fsub_rn(sink, joined)));
            all = __fmul_rn(all, kept);
        }
        line[d] = __fdiv_rn(all, sum);
    }
    __syncthreads();
    float* const to = work.out + (row * heads + head) * dim;
    for (int d = threadIdx.x; d < dim; d += kJoinThreads)
        to[d] = rotatedElement(line, d, work.back, seen.position, -1.0f);
}

size_t sharedBytes(const Work& work, int heads) {
    const auto element = static_cast<int>(kvElementBytes(work.pages.type));
    return static_cast<size_t>(Places(work.shape.headDim, element, heads).total);
}

template <int kHeads> void launchSegments(Stream& stream, const Work& work) {
    const dim3 grid(static_cast<unsigned>((work.shape.heads + kHeads - 1) / kHeads),
                    static_cast<unsigned>(work.segments), static_cast<unsigned>(work.batch.rows));
    const size_t bytes = sharedBytes(work, kHeads);
    withKvType(work.pages.type, [&](auto tag) {
        constexpr KvType kType = decltype(tag)::kType;
        const auto kernel = segmentKernel<kType, kHeads>;
        if (bytes > 48 * 1024) allowShared(kernel, bytes);
        launch(stream, kernel, grid, dim3(kThreads), bytes, work);
    });
}

// Groups of more heads read a page less often, but leave multiprocessors idle if there are few rows.
void launchAll(Stream& stream, const Work& work) {
    const size_t most = stream.device().sharedPerBlock;
    if (sharedBytes(work, 8) > most) {
        throw Error(ErrorKind::InvalidArgument,
                    "attention over blocks with heads of " + std::to_string(work.shape.headDim) +
                        " elements does not fit in this GPU's shared memory; a KV cache of 16 bits takes half of it");
    }
    const int64_t heads = work.batch.rows * work.segments * work.shape.heads;
    const bool many = heads >= 2 * 16 * int64_t{stream.device().multiprocessors};
    if (many && sharedBytes(work, 16) <= most) launchSegments<16>(stream, work);
    else launchSegments<8>(stream, work);
}

}  // namespace

void attendBlocks(Stream& stream, const float* q, const HeadShape& shape, const AttentionRule& rule,
                  const BatchRows& batch, const KvPages& pages, const SeenBlocks& seen, const RotatedPart& back,
                  void* scratch, size_t scratchBytes, float* out) {
    requireSeen(shape, pages, seen);
    const int64_t all = batch.listPages * kPage, width = int64_t{shape.heads} * shape.headDim;
    int64_t blocks = seen.rows.pages.k ? all / seen.rows.pages.rowTokens : 0;
    if (seen.chosen) blocks = std::min<int64_t>(blocks, seen.topK);
    const int64_t segments = blockSegments(blocks, rule.reach, batch.listPages);
    int64_t held = batch.rows;  // rows whose results there is room for
    while (held > 1 && blockAttentionBytes(held, shape, segments) > scratchBytes) held = (held + 1) / 2;
    if (blockAttentionBytes(held, shape, segments) > scratchBytes)
        throw Error(ErrorKind::Internal, "attendBlocks has too little scratch");
    const int64_t places = held * segments * shape.heads;
    for (int64_t first = 0; first < batch.rows; first += held) {
        const int64_t rows = std::min(held, batch.rows - first);
        auto* const maxima = static_cast<float*>(scratch);
        Work work{q + first * width,
                  shape,
                  rule,
                  batch.from(first, rows),
                  pages,
                  seen,
                  back,
                  static_cast<int>(segments),
                  maxima,
                  maxima + places,
                  maxima + 2 * places,
                  out + first * width};
        if (seen.chosen) work.seen.chosen += first * seen.topK;
        launchAll(stream, work);
        launch(stream, joinKernel, dim3(static_cast<unsigned>(shape.heads), static_cast<unsigned>(rows)),
               dim3(kJoinThreads), sizeof(float) * static_cast<size_t>(shape.headDim), work);
    }
}

}  // namespace sharpi::cuda
