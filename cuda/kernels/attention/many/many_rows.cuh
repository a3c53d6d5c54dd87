// The kernel of attentionManyRows: see attention_many.cu.
#pragma once

#include <type_traits>

#include "kernels/attention/attention.cuh"
#include "kernels/attention/decode/page.cuh"

namespace sharpi::cuda::many {

using decode::kPageTokens;
using decode::RawRun;
using decode::Span;

// A thread's part of a product: 8 x 8 values.
constexpr int kOwn = 8;

// What the kernel is compiled for: heads of up to kDim elements, 64, 128 or 256. A block takes kKeys keys at once,
// which are kPages pages, against kQueries queries. Keys and values are converted to float on their way through shared
// memory, in chunks: kChunk dimensions of all these keys, or the values of kChunk keys.
template <KvType type, int dim, int threads> struct Kind {
    static constexpr KvType kType = type;
    static constexpr int kDim = dim, kThreads = threads, kKeys = dim, kPages = kKeys / kPageTokens;
    static constexpr int kQueries = kThreads * kOwn * kOwn / kKeys;
    static constexpr int kChunk = (dim == 256 ? 8 : 16) * (threads / 128);
    static constexpr int kRuns = kKeys * kChunk / kOwn / kThreads;  // of kOwn elements, which a thread copies at once
    static constexpr int kBlocks = 256 / threads;                   // of a multiprocessor, at most
    static_assert(kRuns * kOwn * kThreads == kKeys * kChunk && kDim == kKeys, "a thread copies whole runs");

    // Shared memory, in floats. Lines are padded so that 8 lines of keys, or 4 of queries or of weights, use all banks.
    static constexpr int kQueryLine = kDim + 4, kWeightLine = kKeys + 8, kKeyLine = kChunk + 4;
    static constexpr int kStage = kKeys * kKeyLine;  // no less than kChunk lines of values
    static constexpr int kWeights = kQueries * kQueryLine, kStages = kWeights + kQueries * kWeightLine,
                         kTops = kStages + 2 * kStage, kFactors = kTops + 2 * kPages * kQueries,
                         kJoins = kFactors + 2 * kPages * kQueries, kSeen = kJoins + 2 * kQueries,
                         kStarts = kSeen + 2 * kQueries, kBytes = 4 * (kStarts + 2 * 2 * kPages);
    static_assert(kDim * kChunk <= kStage);
};

struct Args {
    const float* q;
    HeadShape shape;
    AttentionRule rule;
    BatchRows batch;
    QueryTiles tiles;
    KvPages pages;
    RowOutputs out;
    float* sums;  // [rows, heads * headDim]: of the segments that have been joined
    int group;    // heads of a kv head
};

// Up to kQueries queries of a tile, which count its rows and the heads of each.
struct Place {
    int firstRow, firstQuery, queries, kvHead;
    int firstPosition, lastPosition, firstKey, firstKeyOfLast;  // of the first and the last row
    const int32_t* table;

    template <class K> __device__ static Place find(const Args& args) {
        Place place = {};
        const int tile = static_cast<int>(args.tiles.count) - 1 - static_cast<int>(blockIdx.y);
        place.firstRow = args.tiles.begin[tile];
        place.kvHead = static_cast<int>(blockIdx.x);
        place.firstQuery = static_cast<int>(blockIdx.z) * K::kQueries;
        place.queries = min(K::kQueries, (args.tiles.end[tile] - place.firstRow) * args.group - place.firstQuery);
        if (place.queries <= 0) return place;
        place.firstPosition = args.batch.positions[place.rowOf(args, 0)];
        place.lastPosition = args.batch.positions[place.rowOf(args, place.queries - 1)];
        place.firstKey = args.rule.reach.first(place.firstPosition);
        place.firstKeyOfLast = args.rule.reach.first(place.lastPosition);
        place.table = args.batch.pageTables + args.batch.sequence[place.firstRow] * args.batch.pagesPerTable;
        return place;
    }
    __device__ int rowOf(const Args& args, int query) const { return firstRow + (firstQuery + query) / args.group; }
    __device__ int headOf(const Args& args, int query) const {
        return kvHead * args.group + (firstQuery + query) % args.group;
    }
    __device__ int firstPage() const { return firstKey / kPageTokens; }
    __device__ int endPage() const { return lastPosition / kPageTokens + 1; }
    __device__ bool has(int page) const { return page >= firstPage() && page < endPage(); }
    // Whether all queries see all keys of the page.
    __device__ bool allSee(int page) const {
        return page * kPageTokens >= firstKeyOfLast && (page + 1) * kPageTokens <= firstPosition + 1;
    }
};

// The steps of kPages pages: first the chunks of their keys, then those of their values. While a step is computed, the
// next one's elements are on their way to registers.
template <class K> struct Feed {
    static constexpr int kElement = kKvBytes<K::kType>;
    using Run = RawRun<K::kType, kOwn>;

    const KvPages& pages;
    float* stages;
    int dim;
    Run run[K::kRuns];

    // The run's line and its first element.
    template <bool kOfKeys> __device__ __forceinline__ static int2 placeOf(int run) {
        constexpr int kRunsOfLine = (kOfKeys ? K::kChunk : K::kDim) / kOwn;
        const int at = static_cast<int>(threadIdx.x) + run * K::kThreads;
        return {at / kRunsOfLine, at % kRunsOfLine * kOwn};
    }
    // starts: where the pages begin, in elements of the cache; -1: nobody sees anything of it.
    __device__ __forceinline__ void loadKeys(const int64_t* starts, int chunk) {
#pragma unroll
        for (int i = 0; i < K::kRuns; i++) {
            const int2 at = placeOf<true>(i);
            const int64_t start = starts[at.x / kPageTokens];
            if (start >= 0)
                run[i].read(pages.k + (start + at.x % kPageTokens * dim + chunk * K::kChunk + at.y) * kElement);
        }
    }
    __device__ __forceinline__ void loadValues(const int64_t* starts, int chunk) {
        const int64_t start = starts[chunk * K::kChunk / kPageTokens];
#pragma unroll
        for (int i = 0; i < K::kRuns; i++) {
            const int2 at = placeOf<false>(i);
            if (start >= 0 && at.y < dim)
                run[i].read(pages.v + (start + (chunk * K::kChunk % kPageTokens + at.x) * dim + at.y) * kElement);
        }
    }
    template <bool kOfKeys> __device__ __forceinline__ void store(int stage) const {
        constexpr int kLine = kOfKeys ? K::kKeyLine : K::kDim;
#pragma unroll
        for (int i = 0; i < K::kRuns; i++) {
            const int2 at = placeOf<kOfKeys>(i);
            float values[kOwn];
            run[i].floats(values);
            writeFloats<kOwn>(stages + stage * K::kStage + at.x * kLine + at.y, values);
        }
    }
};

// What has been joined for one query, by the thread of its number.
struct Maximum {
    float m, l;

    __device__ __forceinline__ Maximum() { clear(); }
    __device__ __forceinline__ void clear() { m = __int_as_float(0xff800000), l = 0.0f; }
    // Returns the factors of what there was and of what comes.
    __device__ __forceinline__ float2 join(float2 next) {
        const float largest = fmaxf(m, next.x);
        const float2 factors = {portableExp(__fsub_rn(m, largest)), portableExp(__fsub_rn(next.x, largest))};
        l = fmaf(next.y, factors.y, __fmul_rn(l, factors.x));
        m = largest;
        return factors;
    }
};
__device__ __forceinline__ uint32_t bitsBelow(int n) { return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1; }

// Factors of what a query does not see: no exponential is negative.
constexpr float kUnseen = -1.0f;

template <class K> struct Work {
    static constexpr int kDim = K::kDim, kPages = K::kPages, kQueries = K::kQueries, kChunk = K::kChunk;
    static constexpr int kThreads = K::kThreads;
    // A thread has every kQueryThreads-th query. Four times eight threads are a warp: in products with keys, each of
    // the eight has every eighth key of a page, and in those with values 4 of every 32 dimensions. The warps divide the
    // queries, and the pages or the runs of 64 dimensions.
    static constexpr int kQueryThreads = kQueries / kOwn, kQueryWarps = kQueryThreads / 4;

    const Args& args;
    const Place& place;
    float* shared;
    int dim, column, part, firstQuery;

    __device__ Work(const Args& a, const Place& p, float* memory) : args(a), place(p), shared(memory) {
        const int thread = threadIdx.x, warp = thread / 32;
        dim = args.shape.headDim;
        column = thread % 8, part = warp / kQueryWarps;
        firstQuery = thread / 8 % 4 + 4 * (warp % kQueryWarps);
    }
    __device__ float* queries(int query) const { return shared + query * K::kQueryLine; }
    __device__ float* weights(int query) const { return shared + K::kWeights + query * K::kWeightLine; }
    __device__ float2* tops(int page) const { return reinterpret_cast<float2*>(shared + K::kTops) + page * kQueries; }
    __device__ float2* factors(int page) const {
        return reinterpret_cast<float2*>(shared + K::kFactors) + page * kQueries;
    }
    __device__ float2* joins() const { return reinterpret_cast<float2*>(shared + K::kJoins); }
    __device__ int2* seen() const { return reinterpret_cast<int2*>(shared + K::kSeen); }
    __device__ int64_t* starts(int turn) const {
        return reinterpret_cast<int64_t*>(shared + K::kStarts) + turn * kPages;
    }
    __device__ static int queryOf(int i, int first) { return first + i * kQueryThreads; }

    // Queries that do not exist are the last one again.
    __device__ __forceinline__ void loadQueries() const {
        const int quads = dim / 4;
#pragma unroll 1
        for (int i = threadIdx.x; i < kQueries * quads; i += kThreads) {
            const int query = min(i / quads, place.queries - 1), quad = i % quads;
            const int64_t from =
                static_cast<int64_t>(place.rowOf(args, query)) * args.shape.heads + place.headOf(args, query);
            reinterpret_cast<float4*>(queries(i / quads))[quad] =
                reinterpret_cast<const float4*>(args.q)[from * quads + quad];
        }
    }
    __device__ __forceinline__ void findSeen() const {
#pragma unroll 1
        for (int query = threadIdx.x; query < kQueries; query += kThreads) {
            const int position = args.batch.positions[place.rowOf(args, min(query, place.queries - 1))];
            seen()[query] = {args.rule.reach.first(position), position + 1};
        }
    }
    __device__ __forceinline__ void findStarts(int firstPage, int turn) const {
        if (threadIdx.x >= kPages) return;
        const int page = firstPage + static_cast<int>(threadIdx.x);
        int64_t start = -1;
        if (place.has(page))
            start = (static_cast<int64_t>(place.table[page]) * args.pages.kvHeads + place.kvHead) * kPageTokens * dim;
        starts(turn)[threadIdx.x] = start;
    }

    // acc[i][j] += query i . key column + 8 j of page `part`, over a chunk of the dimensions.
    __device__ __forceinline__ void addKeys(const float* stage, int chunk, float (&acc)[kOwn][kOwn]) const {
        const float* query = queries(firstQuery) + chunk * kChunk;
        const float* key = stage + (part * kPageTokens + column) * K::kKeyLine;
#pragma unroll
        for (int d = 0; d < kChunk; d += 4) {
            float q[kOwn][4];
#pragma unroll
            for (int i = 0; i < kOwn; i++) readFloats<4>(query + i * kQueryThreads * K::kQueryLine + d, q[i]);
#pragma unroll
            for (int j = 0; j < kOwn; j++) {
                float k[4];
                readFloats<4>(key + j * 8 * K::kKeyLine + d, k);
#pragma unroll
                for (int x = 0; x < 4; x++) {
#pragma unroll
                    for (int i = 0; i < kOwn; i++) acc[i][j] = fmaf(q[i][x], k[x], acc[i][j]);
                }
            }
        }
    }

    // Turns dot products into weights, in shared memory, with their maximum and sum. The eight threads of a query have
    // its keys of the page; keys that it does not see get weights of 0. The queries take each step together, because
    // the steps of one would wait for each other.
    __device__ __forceinline__ void weigh(int page, float (&s)[kOwn][kOwn]) const {
#pragma unroll
        for (int i = 0; i < kOwn; i++) {
#pragma unroll
            for (int j = 0; j < kOwn; j++) s[i][j] = __fmul_rn(s[i][j], args.rule.scale);
        }
        if (args.rule.softcap > 0.0f) {
#pragma unroll
            for (int i = 0; i < kOwn; i++) {
#pragma unroll
                for (int j = 0; j < kOwn; j++) s[i][j] = portableSoftcap(s[i][j], args.rule.softcap);
            }
        }
        if (!place.allSee(page)) {
#pragma unroll
            for (int i = 0; i < kOwn; i++) {
                const Span span(seen()[queryOf(i, firstQuery)], page);
#pragma unroll
                for (int j = 0; j < kOwn; j++) {
                    const int key = column + 8 * j;
                    if (key < span.begin || key >= span.end) s[i][j] = __int_as_float(0xff800000);
                }
            }
        }
        float top[kOwn], sum[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; i++) {
            top[i] = s[i][0];
#pragma unroll
            for (int j = 1; j < kOwn; j++) top[i] = fmaxf(top[i], s[i][j]);
        }
#pragma unroll
        for (int width = 1; width < 8; width *= 2) {
#pragma unroll
            for (int i = 0; i < kOwn; i++) top[i] = fmaxf(top[i], __shfl_xor_sync(kWholeWarp, top[i], width));
        }
#pragma unroll
        for (int i = 0; i < kOwn; i++) {
            float* to = weights(queryOf(i, firstQuery)) + part * kPageTokens + column;
#pragma unroll
            for (int j = 0; j < kOwn; j++) {
                s[i][j] = portableExp(__fsub_rn(s[i][j], top[i]));
                to[8 * j] = s[i][j];
            }
            // contractTree: its first levels join keys that are 32, 16 and 8 apart.
#pragma unroll
            for (int width = kOwn / 2; width > 0; width /= 2) {
#pragma unroll
                for (int j = 0; j < width; j++) s[i][j] = __fadd_rn(s[i][j], s[i][j + width]);
            }
            sum[i] = s[i][0];
        }
#pragma unroll
        for (int width = 4; width > 0; width /= 2) {
#pragma unroll
            for (int i = 0; i < kOwn; i++) sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(kWholeWarp, sum[i], width));
        }
        if (column > 0) return;
#pragma unroll
        for (int i = 0; i < kOwn; i++) tops(part)[queryOf(i, firstQuery)] = {top[i], sum[i]};
    }

    // The factors by which the pages from `first` on are joined, and those of their segment if it ends with them.
    __device__ __forceinline__ void findFactors(int first, bool ends, Maximum& segment, Maximum& all) const {
        const int query = threadIdx.x;
        if (query >= kQueries) return;
        const int2 row = seen()[query];
#pragma unroll
        for (int page = 0; page < kPages; page++) {
            const bool sees = place.has(first + page) && !Span(row, first + page).empty();
            factors(page)[query] = sees ? segment.join(tops(page)[query]) : float2{kUnseen, 0.0f};
        }
        if (!ends) return;
        joins()[query] = segment.l != 0.0f ? all.join({segment.m, segment.l}) : float2{kUnseen, 0.0f};
        segment.clear();
    }

    // acc[i][..] += weight * value, over the keys of a chunk in their order.
    template <bool kMasked>
    __device__ __forceinline__ void addValues(const float* stage, int chunk, int page, float (&acc)[kOwn][kOwn]) const {
        const float* weight = weights(firstQuery) + chunk * kChunk;
        const float* value = stage + part * 64 + column * 4;
        uint32_t mask[kOwn];
        if (kMasked) {
#pragma unroll
            for (int i = 0; i < kOwn; i++) {
                const Span span(seen()[queryOf(i, firstQuery)], page);
                const int key = chunk * kChunk % kPageTokens;
                mask[i] = bitsBelow(span.end - key) & ~bitsBelow(span.begin - key);
            }
        }
#pragma unroll
        for (int key = 0; key < kChunk; key += 4) {
            float w[kOwn][4];
#pragma unroll
            for (int i = 0; i < kOwn; i++) readFloats<4>(weight + i * kQueryThreads * K::kWeightLine + key, w[i]);
#pragma unroll
            for (int y = 0; y < 4; y++) {
                float v[2][4];
                readFloats<4>(value + (key + y) * kDim, v[0]);
                readFloats<4>(value + (key + y) * kDim + 32, v[1]);
#pragma unroll
                for (int i = 0; i < kOwn; i++) {
                    if (kMasked && !(mask[i] >> (key + y) & 1)) continue;
#pragma unroll
                    for (int x = 0; x < kOwn; x++) acc[i][x] = fmaf(w[i][y], v[x / 4][x % 4], acc[i][x]);
                }
            }
        }
    }

    __device__ __forceinline__ void join(const float2* by, const float (&from)[kOwn][kOwn],
                                         float (&to)[kOwn][kOwn]) const {
#pragma unroll
        for (int i = 0; i < kOwn; i++) {
            const float2 factor = by[queryOf(i, firstQuery)];
            if (factor.x < 0.0f) continue;  // kUnseen
#pragma unroll
            for (int x = 0; x < kOwn; x++) to[i][x] = fmaf(from[i][x], factor.y, __fmul_rn(to[i][x], factor.x));
        }
    }
    // The thread's sums of a query: four neighbours, and four that are 32 further. nullptr: the query does not exist.
    __device__ __forceinline__ float* sumsOf(int query) const {
        if (query >= place.queries) return nullptr;
        const int64_t head =
            static_cast<int64_t>(place.rowOf(args, query)) * args.shape.heads + place.headOf(args, query);
        return args.sums + head * dim + part * 64 + column * 4;
    }
    __device__ __forceinline__ bool hasDims(int half) const { return part * 64 + column * 4 + half * 32 < dim; }
    // The same for what has been joined of a query, in memory: there is one segment for each four pages.
    __device__ __forceinline__ void joinSegment(const float (&from)[kOwn][kOwn], bool isFirst) const {
#pragma unroll
        for (int i = 0; i < kOwn; i++) {
            const int query = queryOf(i, firstQuery);
            const float2 factor = joins()[query];
            float* to = sumsOf(query);
            const bool sees = !(factor.x < 0.0f);
            if (!to || !(sees || isFirst)) continue;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (!hasDims(half)) continue;
                float sums[4] = {};
                if (!isFirst) readFloats<4>(to + half * 32, sums);
#pragma unroll
                for (int x = 0; x < 4; x++)
                    if (sees) sums[x] = fmaf(from[i][half * 4 + x], factor.y, __fmul_rn(sums[x], factor.x));
                writeFloats<4>(to + half * 32, sums);
            }
        }
    }

    // Divides and writes the results, a warp a block of the contract at a time. The queries are not needed any more.
    __device__ __forceinline__ void write(Maximum all) const {
        const int thread = threadIdx.x, lane = thread % 32;
        if (thread < kQueries) {
            float kept = 1.0f;
            const int query = min(thread, place.queries - 1);
            if (args.rule.sinks) {
                const float sink = args.rule.sinks[place.headOf(args, query)], top = fmaxf(all.m, sink);
                kept = portableExp(__fsub_rn(all.m, top));
                all.l = __fadd_rn(__fmul_rn(all.l, kept), portableExp(__fsub_rn(sink, top)));
            }
            joins()[thread] = {kept, all.l};
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kOwn; i++) {
            const int query = queryOf(i, firstQuery);
            const float2 by = joins()[query];
            const float* from = sumsOf(query);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (!from || !hasDims(half)) continue;
                float sums[4];
                readFloats<4>(from + half * 32, sums);
#pragma unroll
                for (int x = 0; x < 4; x++) sums[x] = __fdiv_rn(__fmul_rn(sums[x], by.x), by.y);
                writeFloats<4>(queries(query) + part * 64 + column * 4 + half * 32, sums);
            }
        }
        __syncthreads();
        const int blocks = (dim + 31) / 32;
        const int64_t cols = static_cast<int64_t>(args.shape.heads) * dim;
#pragma unroll 1
        for (int i = thread / 32; i < place.queries * blocks; i += kThreads / 32) {
            const int query = i / blocks, block = i % blocks;
            const int64_t row = place.rowOf(args, query), column = place.headOf(args, query) * dim + block * 32;
            const float x = queries(query)[block * 32 + lane];
            if (args.out.floats && block * 32 + lane < dim) args.out.floats[row * cols + column + lane] = x;
            if (args.out.quantized.q)
                quantizeLane(args.out.quantized, row, cols / kContractBlock, column / kContractBlock, x);
        }
    }

    __device__ __forceinline__ void run() const {
        Feed<K> feed{args.pages, shared + K::kStages, dim, {}};
        const int keyChunks = dim / kChunk;
        constexpr int kValueChunks = K::kKeys / kChunk, kOfPage = kPageTokens / kChunk;
        float acc[kOwn][kOwn], segment[kOwn][kOwn] = {};
        Maximum ofSegment, ofAll;
        int first = place.firstPage() / kPages * kPages, turn = 0, stage = 0;
        bool isFirst = true;  // segment
        findSeen();
        findStarts(first, turn);
        loadQueries();
        __syncthreads();
        feed.loadKeys(starts(turn), 0);
        feed.template store<true>(stage);
        __syncthreads();
#pragma unroll 1
        for (; first < place.endPage(); first += kPages, turn ^= 1) {
            const bool isLast = first + kPages >= place.endPage();
            const bool ends = isLast || (first + kPages) % kSegmentPages == 0;
#pragma unroll
            for (int i = 0; i < kOwn; i++) {
#pragma unroll
                for (int j = 0; j < kOwn; j++) acc[i][j] = 0.0f;
            }
#pragma unroll 1
            for (int chunk = 0; chunk < keyChunks; chunk++, stage ^= 1) {
                const bool isEnd = chunk + 1 == keyChunks;
                if (isEnd) feed.loadValues(starts(turn), 0);
                else feed.loadKeys(starts(turn), chunk + 1);
                addKeys(feed.stages + stage * K::kStage, chunk, acc);
                if (isEnd) weigh(first + part, acc), feed.template store<false>(stage ^ 1);
                else feed.template store<true>(stage ^ 1);
                __syncthreads();
            }
            findFactors(first, ends, ofSegment, ofAll);
            findStarts(first + kPages, turn ^ 1);
#pragma unroll 1
            for (int chunk = 0; chunk < kValueChunks; chunk++, stage ^= 1) {
                const bool isEnd = chunk + 1 == kValueChunks;
                if (!isEnd) feed.loadValues(starts(turn), chunk + 1);
                else if (!isLast) feed.loadKeys(starts(turn ^ 1), 0);
                const int number = chunk / kOfPage, page = first + number;
                if (place.has(page)) {
                    if (chunk % kOfPage == 0) {
#pragma unroll
                        for (int i = 0; i < kOwn; i++) {
#pragma unroll
                            for (int j = 0; j < kOwn; j++) acc[i][j] = 0.0f;
                        }
                    }
                    const float* values = feed.stages + stage * K::kStage;
                    if (place.allSee(page)) addValues<false>(values, chunk, page, acc);
                    else addValues<true>(values, chunk, page, acc);
                    if (chunk % kOfPage == kOfPage - 1) join(factors(number), acc, segment);
                }
                if (!isEnd) feed.template store<false>(stage ^ 1);
                else if (!isLast) feed.template store<true>(stage ^ 1);
                __syncthreads();
            }
            if (!ends) continue;
            joinSegment(segment, isFirst);
            isFirst = false;
#pragma unroll
            for (int i = 0; i < kOwn; i++) {
#pragma unroll
                for (int j = 0; j < kOwn; j++) segment[i][j] = 0.0f;
            }
        }
        __syncthreads();
        write(ofAll);
    }
};

template <class K>
__global__ void __launch_bounds__(K::kThreads, K::kBlocks) attendManyRows(const __grid_constant__ Args args) {
    allowNext();
    extern __shared__ __align__(128) float memory[];
    const Place place = Place::find<K>(args);
    if (place.queries <= 0) return;
    waitForPrevious();
    Work<K>(args, place, memory).run();
}

// --- launching ---------------------------------------------------------------------------------------------------

// Calls f(Kind{}) for the kind of these heads: that with the smallest dimensions, of 256 threads if the device has the
// shared memory for it. Returns what f returns, or false if the device has no room for any.
template <KvType kType, typename F> bool withKind(const DeviceInfo& device, int32_t headDim, const F& f) {
    const auto ofDim = [&](auto dim) {
        constexpr int kDim = decltype(dim)::value;
        using Large = Kind<kType, kDim, 256>;
        using Small = Kind<kType, kDim, 128>;
        if (headDim % Large::kChunk == 0 && Large::kBytes <= device.sharedPerBlock) return f(Large());
        if (headDim % Small::kChunk == 0 && Small::kBytes <= device.sharedPerBlock) return f(Small());
        return false;
    };
    if (headDim <= 64) return ofDim(std::integral_constant<int, 64>());
    if (headDim <= 128) return ofDim(std::integral_constant<int, 128>());
    return headDim <= 256 && ofDim(std::integral_constant<int, 256>());
}

// False: there is no kernel.
template <KvType kType> bool chooseKind(Stream& stream, const Args& args) {
    return withKind<kType>(stream.device(), args.shape.headDim, [&](auto kind) {
        using K = decltype(kind);
        const auto blocks = static_cast<unsigned>((kManyRowsTile * args.group + K::kQueries - 1) / K::kQueries);
        const dim3 grid(static_cast<unsigned>(args.shape.kvHeads), static_cast<unsigned>(args.tiles.count), blocks);
        allowShared(attendManyRows<K>, K::kBytes);
        launch(stream, attendManyRows<K>, grid, dim3(K::kThreads), K::kBytes, args);
        return true;
    });
}

// Each in a source of its own.
bool launchF32(Stream& stream, const Args& args);
bool launchF16(Stream& stream, const Args& args);
bool launchBf16(Stream& stream, const Args& args);

}  // namespace sharpi::cuda::many
