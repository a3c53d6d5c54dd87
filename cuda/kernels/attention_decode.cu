// Attention of few rows over a long cache, bit for bit as cpu/kernels/attention.cpp defines it.
//
// That definition computes every page by itself, so the pages of a sequence are spread over the GPU: a block takes one
// page of one kv head of one row, for all query heads of the group, so that keys and values are read once. A second
// kernel joins the pages of each head in their order. The grids follow from the batch's shape and the table's width alone;
// how many pages there are is read from the positions on the device, so that a captured step serves every length.
//
// Inside a block: keys and values are copied to shared memory, the values while the scores are made. The order of the
// dot product is one chain over the dimensions, so a thread makes whole dot products: two keys times kHeads
// heads, which reads each key once and each query element (a broadcast) once for two keys. Key rows are an odd number of 16-byte units
// apart, so that eight threads reading eight keys meet eight different banks. For the outputs a thread owns kWidth
// neighbouring dimensions of kHeads heads and runs over the keys. Each warp has its own kHeads heads, so only the copies need barriers.
// Where the shared memory of a device cannot hold a page, the same code reads it from where it lies.
//
// The joining kernel has a warp for 32 dimensions of a head. The running maximum of 32 pages is a prefix
// maximum over the lanes, so the exponentials of 32 pages are made at once; only the chain itself runs page by page.
#include <algorithm>

#include "kernels/attention.cuh"
#include "kernels/mma.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kPageTokens = kAttentionPage;
constexpr int kJoinWarps = 4;

// What a page gave: [rows][heads][pages of the table], and outputs with headDim floats for each of them. Their size is
// decodeAttentionBytes, in workspace.cpp.
struct Partials {
    float *maxima, *sums, *outputs;
};

size_t roundUp(size_t bytes) { return (bytes + 255) / 256 * 256; }

Partials partialsOver(void* scratch, int64_t rows, int32_t heads, int64_t pages) {
    const size_t each = roundUp(sizeof(float) * static_cast<size_t>(rows * heads * pages));
    auto* bytes = static_cast<uint8_t*>(scratch);
    return {reinterpret_cast<float*>(bytes), reinterpret_cast<float*>(bytes + each), reinterpret_cast<float*>(bytes + 2 * each)};
}

// Pages that a row at this position sees; none below zero.
__device__ __forceinline__ int pagesOf(int position) { return (position + kPageTokens) / kPageTokens; }

// --- elements ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float2 halvesToFloats(uint32_t word, KvType type) {
    if (type == KvType::BF16) return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

// kCount neighbouring elements; `at` aligned to their size (16 bytes at most).
template <KvType kType, int kCount> __device__ __forceinline__ void readElements(const uint8_t* at, float (&out)[kCount]) {
    if constexpr (kType == KvType::F32) {
        if constexpr (kCount == 2) {
            const float2 v = *reinterpret_cast<const float2*>(at);
            out[0] = v.x, out[1] = v.y;
        } else {
#pragma unroll
            for (int i = 0; i < kCount; i += 4) {
                const float4 v = reinterpret_cast<const float4*>(at)[i / 4];
                out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
            }
        }
    } else {
        uint32_t words[kCount / 2];
        if constexpr (kCount == 2) {
            words[0] = *reinterpret_cast<const uint32_t*>(at);
        } else if constexpr (kCount == 4) {
            const uint2 v = *reinterpret_cast<const uint2*>(at);
            words[0] = v.x, words[1] = v.y;
        } else {
            const uint4 v = *reinterpret_cast<const uint4*>(at);
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        }
#pragma unroll
        for (int i = 0; i < kCount / 2; i++) {
            const float2 pair = halvesToFloats(words[i], kType);
            out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
        }
    }
}

// kCount floats of which kCount * 4 bytes are aligned.
template <int kCount> __device__ __forceinline__ void readFloats(const float* at, float (&out)[kCount]) {
    if constexpr (kCount == 1) {
        out[0] = *at;
    } else {
        readElements<KvType::F32, kCount>(reinterpret_cast<const uint8_t*>(at), out);
    }
}

template <int kCount> __device__ __forceinline__ void writeFloats(float* to, const float (&values)[kCount]) {
    if constexpr (kCount == 1) {
        *to = values[0];
    } else if constexpr (kCount == 2) {
        *reinterpret_cast<float2*>(to) = {values[0], values[1]};
    } else {
#pragma unroll
        for (int i = 0; i < kCount; i += 4)
            reinterpret_cast<float4*>(to)[i / 4] = {values[i], values[i + 1], values[i + 2], values[i + 3]};
    }
}

// --- one page ----------------------------------------------------------------------------------------------------

// Where things lie in shared memory, in bytes; key and value rows only where a page is copied.
struct PageLayout {
    int rowBytes, keyStride, values, queries, weights, total;

    __host__ __device__ PageLayout(KvType type, int headDim, int heads, bool staged) {
        rowBytes = headDim * (type == KvType::F32 ? 4 : 2);
        keyStride = staged ? (rowBytes / 16 | 1) * 16 : rowBytes;
        values = staged ? kPageTokens * keyStride : 0;
        queries = values + (staged ? kPageTokens * rowBytes : 0);
        weights = queries + heads * headDim * 4;
        total = weights + heads * kPageTokens * 4;
    }
};

struct PageArgs {
    const float* q;
    HeadShape shape;
    float scale;
    BatchRows batch;
    KvPages pages;
    Partials partials;
};

// `rows` rows of rowBytes, contiguous at `from`, to rows `stride` bytes apart.
__device__ __forceinline__ void copyRows(uint32_t to, int stride, const uint8_t* from, int rows, int rowBytes) {
    const int units = rowBytes / 16, threads = blockDim.x;
    const int rowStep = threads / units, unitStep = threads - rowStep * units;
    int row = threadIdx.x / units, unit = threadIdx.x - row * units;
    while (row < rows) {
        copyChunk(to + row * stride + unit * 16, from + row * rowBytes + unit * 16, true);
        row += rowStep, unit += unitStep;
        if (unit >= units) unit -= units, row++;
    }
}

// Dot products of two keys with kHeads queries.
template <KvType kType, int kHeads>
__device__ __forceinline__ void dotProducts(const uint8_t* first, const uint8_t* second, const float* queries, int headDim,
                                            float (&dots)[2][kHeads]) {
    constexpr int kStep = kType == KvType::F32 ? 4 : 8;
#pragma unroll
    for (int h = 0; h < kHeads; h++) dots[0][h] = dots[1][h] = 0.0f;
#pragma unroll 4
    for (int d = 0; d < headDim; d += kStep) {
        float keys[2][kStep];
        readElements<kType, kStep>(first, keys[0]);
        readElements<kType, kStep>(second, keys[1]);
        first += 16, second += 16;
#pragma unroll
        for (int h = 0; h < kHeads; h++) {
            float query[kStep];
            readFloats<kStep>(queries + h * headDim + d, query);
#pragma unroll
            for (int i = 0; i < kStep; i++) {
                dots[0][h] = fmaf(query[i], keys[0][i], dots[0][h]);
                dots[1][h] = fmaf(query[i], keys[1][i], dots[1][h]);
            }
        }
    }
}

__device__ __forceinline__ float largestOfWarp(float x) {
    for (int width = 16; width > 0; width >>= 1) x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, width));
    return x;
}

// The page's weights of kHeads heads into `weights` [key][kHeads]; maxima and sums of the heads that there are, to
// partials at firstPartial + h * pagesPerTable.
template <int kHeads>
__device__ __forceinline__ void weighScores(const float (&dots)[2][kHeads], int n, const PageArgs& args, int heads, int64_t firstPartial,
                                            float* weights, int lane) {
    const float low = __int_as_float(0xff800000);
    float p[2][kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; h++) {
        const float first = lane < n ? __fmul_rn(dots[0][h], args.scale) : low;
        const float second = lane + 32 < n ? __fmul_rn(dots[1][h], args.scale) : low;
        const float top = largestOfWarp(fmaxf(first, second));
        p[0][h] = portableExp(__fsub_rn(first, top));
        p[1][h] = portableExp(__fsub_rn(second, top));
        const float sum = contractTree(__fadd_rn(p[0][h], p[1][h]));
        if (lane == 0 && h < heads) {
            const int64_t at = firstPartial + h * args.batch.pagesPerTable;
            args.partials.maxima[at] = top;
            args.partials.sums[at] = sum;
        }
    }
    writeFloats<kHeads>(weights + lane * kHeads, p[0]);
    writeFloats<kHeads>(weights + (lane + 32) * kHeads, p[1]);
}

// acc[h][i] = sum over the n keys of weight * value, keys ascending.
template <KvType kType, int kHeads, int kWidth>
__device__ __forceinline__ void weighValues(const uint8_t* values, int rowBytes, const float* weights, int n,
                                            float (&acc)[kHeads][kWidth]) {
#pragma unroll
    for (int h = 0; h < kHeads; h++)
#pragma unroll
        for (int i = 0; i < kWidth; i++) acc[h][i] = 0.0f;
#pragma unroll 8
    for (int j = 0; j < n; j++) {
        float value[kWidth], weight[kHeads];
        readElements<kType, kWidth>(values, value);
        readFloats<kHeads>(weights + j * kHeads, weight);
        values += rowBytes;
#pragma unroll
        for (int h = 0; h < kHeads; h++)
#pragma unroll
            for (int i = 0; i < kWidth; i++) acc[h][i] = fmaf(weight[h], value[i], acc[h][i]);
    }
}

// One page of one kv head against the group's queries of one row.
template <KvType kType, int kHeads, int kWidth, bool kStaged>
__device__ __forceinline__ void attendPage(const PageArgs& args, int row, int kvHead, int64_t pageId, int page, int n) {
    extern __shared__ __align__(16) uint8_t shared[];
    const int dim = args.shape.headDim, group = args.shape.heads / args.shape.kvHeads;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, allHeads = blockDim.x / 32 * kHeads;
    const PageLayout layout(kType, dim, allHeads, kStaged);
    const int64_t place = (pageId * args.shape.kvHeads + kvHead) * kPageTokens * layout.rowBytes;
    const uint8_t *keys = args.pages.k + place, *values = args.pages.v + place;
    if constexpr (kStaged) {
        const uint32_t to = sharedAddress(shared);
        copyRows(to, layout.keyStride, keys, n, layout.rowBytes);
        closeCopies();
        copyRows(to + layout.values, layout.rowBytes, values, n, layout.rowBytes);
        closeCopies();
        keys = shared, values = shared + layout.values;
    }
    auto* queries = reinterpret_cast<float*>(shared + layout.queries);
    const float* q = args.q + (static_cast<int64_t>(row) * args.shape.heads + kvHead * group) * dim;
    for (int i = threadIdx.x; i < allHeads * dim; i += blockDim.x) queries[i] = i < group * dim ? q[i] : 0.0f;
    if constexpr (kStaged) waitForCopies<1>();
    __syncthreads();

    const int head = warp * kHeads, heads = group - head < kHeads ? group - head : kHeads;
    const int64_t firstHead = static_cast<int64_t>(row) * args.shape.heads + kvHead * group + head;
    const int64_t firstPartial = firstHead * args.batch.pagesPerTable + page;
    float* weights = reinterpret_cast<float*>(shared + layout.weights) + head * kPageTokens;
    {
        // Keys past the last one are any that may be read; their scores are not used.
        const int first = lane < n ? lane : n - 1, second = lane + 32 < n ? lane + 32 : n - 1;
        float dots[2][kHeads];
        dotProducts<kType, kHeads>(keys + first * layout.keyStride, keys + second * layout.keyStride, queries + head * dim, dim, dots);
        weighScores<kHeads>(dots, n, args, heads, firstPartial, weights, lane);
    }
    if constexpr (kStaged) {
        waitForCopies<0>();
        __syncthreads();
    } else {
        __syncwarp();
    }
    const int column = lane * kWidth;
    if (column < dim) {
        float acc[kHeads][kWidth];
        weighValues<kType, kHeads, kWidth>(values + column * (layout.rowBytes / dim), layout.rowBytes, weights, n, acc);
#pragma unroll
        for (int h = 0; h < kHeads; h++) {
            const int64_t partial = firstPartial + h * args.batch.pagesPerTable;
            if (h < heads) writeFloats<kWidth>(args.partials.outputs + partial * dim + column, acc[h]);
        }
    }
    __syncthreads();  // the next page overwrites what other warps may still read
}

// Work items: for each row its pages, for each page the kv heads.
template <KvType kType, int kHeads, int kWidth, bool kStaged> __global__ void attendPages(PageArgs args) {
    allowNext();
    waitForPrevious();
    int64_t item = blockIdx.x;
    for (int row = 0; row < static_cast<int>(args.batch.rows); row++) {
        const int position = args.batch.positions[row], kvHeads = args.shape.kvHeads;
        const int32_t* table = args.batch.pageTables + args.batch.sequence[row] * args.batch.pagesPerTable;
        const int64_t items = static_cast<int64_t>(pagesOf(position)) * kvHeads;
        for (; item < items; item += gridDim.x) {
            const int page = static_cast<int>(item / kvHeads), left = position + 1 - page * kPageTokens;
            attendPage<kType, kHeads, kWidth, kStaged>(args, row, static_cast<int>(item % kvHeads), table[page], page,
                                                       left < kPageTokens ? left : kPageTokens);
        }
        item -= items;
    }
}

// --- the join ----------------------------------------------------------------------------------------------------

struct JoinArgs {
    HeadShape shape;
    BatchRows batch;
    Partials partials;
    RowOutputs out;
};

// What has been joined so far: the same m and l in every lane, a lane's own o.
struct Joined {
    float m, l, o;
};

// 32 pages as a warp holds them: lane i the maximum and the sum of the i-th, every lane its element of all outputs.
struct Pages {
    float maximum, sum, outputs[32];
};

__device__ __forceinline__ void readPages(Pages& pages, const JoinArgs& args, int64_t first, int count, int column) {
    const int lane = threadIdx.x % 32, dim = args.shape.headDim;
    pages.maximum = lane < count ? args.partials.maxima[first + lane] : __int_as_float(0xff800000);
    pages.sum = lane < count ? args.partials.sums[first + lane] : 0.0f;
    const float* from = args.partials.outputs + first * dim + column;
#pragma unroll
    for (int i = 0; i < 32; i++) pages.outputs[i] = i < count ? from[i * dim] : 0.0f;
}

__device__ __forceinline__ void joinPages(Joined& so, const Pages& pages, int count) {
    const int lane = threadIdx.x % 32;
    float top = pages.maximum;
#pragma unroll
    for (int width = 1; width < 32; width <<= 1) {
        const float before = __shfl_up_sync(kWholeWarp, top, width);
        if (lane >= width) top = fmaxf(top, before);
    }
    top = fmaxf(top, so.m);
    float before = __shfl_up_sync(kWholeWarp, top, 1);
    if (lane == 0) before = so.m;
    const float kept = portableExp(__fsub_rn(before, top)), added = portableExp(__fsub_rn(pages.maximum, top));
    so.m = __shfl_sync(kWholeWarp, top, 31);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        if (i >= count) break;
        const float a = __shfl_sync(kWholeWarp, kept, i), c = __shfl_sync(kWholeWarp, added, i);
        so.l = fmaf(__shfl_sync(kWholeWarp, pages.sum, i), c, __fmul_rn(so.l, a));
        so.o = fmaf(pages.outputs[i], c, __fmul_rn(so.o, a));
    }
}

__global__ void __launch_bounds__(32 * kJoinWarps) joinAllPages(JoinArgs args) {
    allowNext();
    waitForPrevious();
    const int lane = threadIdx.x % 32, dim = args.shape.headDim, chunks = (dim + 31) / 32;
    const int64_t item = static_cast<int64_t>(blockIdx.x) * kJoinWarps + threadIdx.x / 32;
    const int64_t head = item / chunks, row = head / args.shape.heads;  // head: of all rows
    if (row >= args.batch.rows) return;
    const int chunk = static_cast<int>(item % chunks), column = chunk * 32 + lane, readable = column < dim ? column : dim - 1;
    const int pages = pagesOf(args.batch.positions[row]);
    const int64_t first = head * args.batch.pagesPerTable;
    Joined so = {__int_as_float(0xff800000), 0.0f, 0.0f};
    Pages next;
    if (pages > 0) readPages(next, args, first, min(pages, 32), readable);
    for (int page = 0; page < pages; page += 32) {
        const Pages now = next;
        if (page + 32 < pages) readPages(next, args, first + page + 32, min(pages - page - 32, 32), readable);
        joinPages(so, now, min(pages - page, 32));
    }
    const float result = pages > 0 ? __fdiv_rn(so.o, so.l) : 0.0f;
    if (args.out.floats && column < dim) args.out.floats[head * dim + column] = result;
    if (args.out.quantized.q) {
        const int blocks = args.shape.heads * chunks;
        quantizeLane(args.out.quantized, row, blocks, (head - row * args.shape.heads) * chunks + chunk, result);
    }
}

// --- launching ---------------------------------------------------------------------------------------------------

template <KvType kType, int kHeads, int kWidth, bool kStaged> void launchPages(Stream& stream, const PageArgs& args, int warps) {
    const int bytes = PageLayout(kType, args.shape.headDim, warps * kHeads, kStaged).total;
    const auto kernel = attendPages<kType, kHeads, kWidth, kStaged>;
    if (bytes > 48 * 1024) allowShared(kernel, static_cast<size_t>(bytes));
    // As many blocks as the device can hold, or as there can be items: a block goes from item to item.
    const int room = deviceAttribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / (bytes + 1024);  // 1 KiB is the system's
    const int64_t perProcessor = std::max(1, std::min(16, room));
    const int64_t items = args.batch.rows * args.batch.pagesPerTable * args.shape.kvHeads;
    const int64_t blocks = std::min(items, perProcessor * stream.device().multiprocessors);
    const dim3 grid(static_cast<unsigned>(blocks)), block(static_cast<unsigned>(32 * warps));
    launch(stream, kernel, grid, block, static_cast<size_t>(bytes), args);
}

// kWidth: the fewest dimensions a lane with which 32 lanes have them all.
template <KvType kType, int kHeads, bool kStaged> void choosePageWidth(Stream& stream, const PageArgs& args, int warps) {
    if (args.shape.headDim <= 64) {
        launchPages<kType, kHeads, 2, kStaged>(stream, args, warps);
    } else if (args.shape.headDim <= 128) {
        launchPages<kType, kHeads, 4, kStaged>(stream, args, warps);
    } else {
        launchPages<kType, kHeads, 8, kStaged>(stream, args, warps);
    }
}

// kHeads: few enough that a group has several warps, which shortens a page; more heads a warp read a key for more of them.
template <KvType kType> void choosePageHeads(Stream& stream, const PageArgs& args) {
    const int group = args.shape.heads / args.shape.kvHeads;
    const int heads = group == 1 ? 1 : group <= 4 ? 2 : 4;
    const int warps = (group + heads - 1) / heads;
    if (PageLayout(kType, args.shape.headDim, warps * heads, true).total > sharedBytesPerBlock()) {
        choosePageWidth<kType, 1, false>(stream, args, group);
    } else if (heads == 1) {
        choosePageWidth<kType, 1, true>(stream, args, warps);
    } else if (heads == 2) {
        choosePageWidth<kType, 2, true>(stream, args, warps);
    } else {
        choosePageWidth<kType, 4, true>(stream, args, warps);
    }
}

}  // namespace

void attentionDecode(Stream& stream, const float* q, const HeadShape& shape, float scale, const BatchRows& batch, const KvPages& pages,
                     void* scratch, const RowOutputs& out) {
    requireAttendable(shape, pages);
    if (out.half.hi || (out.quantized.q && shape.headDim % kContractBlock != 0)) {
        throw Error(ErrorKind::Internal, "attentionDecode asked for outputs that it does not have");
    }
    const Partials partials = partialsOver(scratch, batch.rows, shape.heads, batch.pagesPerTable);
    const PageArgs args = {q, shape, scale, batch, pages, partials};
    switch (pages.type) {
        case KvType::F32: choosePageHeads<KvType::F32>(stream, args); break;
        case KvType::BF16: choosePageHeads<KvType::BF16>(stream, args); break;
        case KvType::F16: choosePageHeads<KvType::F16>(stream, args); break;
    }
    const int64_t warps = batch.rows * shape.heads * ((shape.headDim + 31) / 32);
    launch(stream, joinAllPages, dim3(static_cast<unsigned>((warps + kJoinWarps - 1) / kJoinWarps)), dim3(32 * kJoinWarps), 0,
           JoinArgs{shape, batch, partials, out});
}

}  // namespace sharpi::cuda
