// The decode kernels for many segments. See attention_decode.cu.
#pragma once

#include "kernels/attention/decode/join.cuh"
#include "kernels/attention/decode/stream.cuh"

namespace sharpi::cuda::decode {

// Blocks of a multiprocessor: what registers and shared memory suffice for.
constexpr int kDeepBlocks = 3;

// A warp's shared memory: its stream's ring, the queries of a tile, and the weights of a page. In bytes.
template <class K> struct WarpLayout {
    static constexpr int kDim = 32 * K::kWidth;
    static constexpr int kQueries = PageStream<K>::kRing * PageStream<K>::kChunk,
                         kWeights = kQueries + K::kTile * kDim * 4, kTotal = kWeights + K::kTile * kPageTokens * 4;
};

// The results of a segment's pages as they are joined, in their order. Lane i has the maximum and the sum of query i,
// and every lane its dimensions of all queries.
template <int kCount, int kWidth> struct SegmentResults {
    float m, l, o[kCount][kWidth];

    __device__ __forceinline__ void clear() {
        m = __int_as_float(0xff800000), l = 0.0f;
#pragma unroll
        for (int i = 0; i < kCount; i++) {
#pragma unroll
            for (int x = 0; x < kWidth; x++) o[i][x] = 0.0f;
        }
    }
    // Adds a page of which query i sees the keys [begin[i], end[i]).
    __device__ __forceinline__ void add(const float2 (&top)[kCount], const float (&outputs)[kCount][kWidth],
                                        const int (&begin)[kCount], const int (&end)[kCount], int lane) {
        float2 own = {m, 0.0f};
        bool sees = false;
#pragma unroll
        for (int i = 0; i < kCount; i++)
            if (lane == i && begin[i] < end[i]) own = top[i], sees = true;
        const float largest = fmaxf(m, own.x);
        const float kept = portableExp(__fsub_rn(m, largest)), added = portableExp(__fsub_rn(own.x, largest));
        // Before a query's first page, the factors are NaN.
        if (sees) l = fmaf(own.y, added, __fmul_rn(l, kept)), m = largest;
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            const float k = __shfl_sync(kWholeWarp, kept, i), a = __shfl_sync(kWholeWarp, added, i);
            if (begin[i] >= end[i]) continue;
#pragma unroll
            for (int x = 0; x < kWidth; x++) o[i][x] = fmaf(outputs[i][x], a, __fmul_rn(o[i][x], k));
        }
    }
};

// The pages of a piece.
struct PagesOfPiece {
    int first, count, keys;
    int64_t ownStart = 0;  // where this lane's page begins

    __device__ PagesOfPiece(const Args& args, const Piece& piece, int lane)
        : first(piece.beginPage()), count(max(0, piece.endPage() - first)), keys(piece.run.keys) {
        if (lane >= count) return;
        ownStart = piece.startOf(args, first + lane);
    }
    __device__ Page operator[](int number) const {
        return {__shfl_sync(kWholeWarp, ownStart, number), min(kPageTokens, keys - (first + number) * kPageTokens)};
    }
};

// What a warp computes.
template <class K> struct DeepWork {
    static constexpr int kWidth = K::kWidth, kTile = K::kTile, kDim = WarpLayout<K>::kDim;
    using Pages = PageStream<K>;

    const Args& args;
    const Block& block;
    Pages& stream;
    float *queries, *weights;

    __device__ DeepWork(const Args& a, const Block& b, Pages& s, uint8_t* memory)
        : args(a),
          block(b),
          stream(s),
          queries(reinterpret_cast<float*>(memory + WarpLayout<K>::kQueries)),
          weights(reinterpret_cast<float*>(memory + WarpLayout<K>::kWeights)) {}

    // Computes the piece. The stream is at its first page, and afterwards at the one that follow() sets.
    template <class Follow>
    __device__ __forceinline__ void run(const Piece& piece, const PagesOfPiece& pages, const Follow& follow) const {
#pragma unroll 1
        for (Tile tile = {piece.firstQuery, 0}; tile.first < piece.endQuery; tile.first += kTile) {
            tile.count = min(kTile, piece.endQuery - tile.first);
            const auto next = [&] {
                if (tile.first + kTile < piece.endQuery) stream.setNext(pages[0]);
                else follow();
            };
            if (tile.count <= kTile / 4) attend<kTile / 4>(piece, pages, tile, next);
            else if (tile.count <= kTile / 2) attend<kTile / 2>(piece, pages, tile, next);
            else if (tile.count <= kTile * 3 / 4) attend<kTile * 3 / 4>(piece, pages, tile, next);
            else attend<kTile>(piece, pages, tile, next);
        }
    }

private:
    __device__ __forceinline__ void loadQueries(const Piece& piece, const Tile& tile) const {
        constexpr int kQuads = kDim / 4;
#pragma unroll 1
        for (int query = 0; query < tile.count; query++) {
            const Head head(args, piece, tile.first + query);
            const auto* from = reinterpret_cast<const float4*>(args.q) +
                               (static_cast<int64_t>(head.row) * args.shape.heads + head.head) * kQuads;
            auto* to = reinterpret_cast<float4*>(queries) + query;
#pragma unroll
            for (int quad = block.lane; quad < kQuads; quad += 32) to[quad * kTile] = from[quad];
        }
        __syncwarp();
    }

    // Computes a tile against all pages of the piece, of which there is at least one.
    template <int kCount, class Follow>
    __device__ __forceinline__ void attend(const Piece& piece, const PagesOfPiece& pages, const Tile& tile,
                                           const Follow& follow) const {
        SegmentResults<kCount, kWidth> segment;
        segment.clear();
        loadQueries(piece, tile);
#pragma unroll 1
        for (int number = 0; number < pages.count; number++) {
            if (number + 1 < pages.count) stream.setNext(pages[number + 1]);
            else follow();
            float2 dots[kCount], top[kCount];
            float acc[kCount][kWidth];
            int begin[kCount], end[kCount];
            addDots(dots);
#pragma unroll
            for (int i = 0; i < kCount; i++) {
                const int2 row = block.rows()[piece.run.row + args.rowOf(tile.first + min(i, tile.count - 1))];
                const Span span(row, pages.first + number);
                begin[i] = span.empty() ? 0 : span.begin, end[i] = span.empty() ? 0 : span.end;
            }
            weighScores(dots, begin, end, args.rule, block.lane, weights, top);
            __syncwarp();
            addValues(begin, end, acc);
            stream.advance();
            segment.add(top, acc, begin, end, block.lane);
        }
        const Columns<kWidth> columns(0, block.lane, kDim);
        const int slot = (piece.run.firstSegment() + piece.index) & (args.ring.slots - 1);
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            if (i >= tile.count) continue;
            Joined<kWidth> so;
            so.m = __shfl_sync(kWholeWarp, segment.m, i), so.l = __shfl_sync(kWholeWarp, segment.l, i);
#pragma unroll
            for (int x = 0; x < kWidth; x++) so.o[x] = segment.o[i][x];
            writeSlot<K>(args, Head(args, piece, tile.first + i).first + slot, so, columns, block.lane == 0);
        }
        __syncwarp();  // the queries may be written again
    }

    // The dot products of the page's keys with the queries.
    template <int kCount> __device__ __forceinline__ void addDots(float2 (&dots)[kCount]) const {
#pragma unroll
        for (int i = 0; i < kCount; i++) dots[i] = {0.0f, 0.0f};
        const float* query = queries;
#pragma unroll 1
        for (int chunk = 0; chunk < Pages::kKeyChunks; chunk++) {
            addDotProducts<K::kType, kTile, kCount, Pages::kLine>(stream.take() + block.lane * Pages::kLine,
                                                                  Pages::kLine / 16, query, block.lane, dots);
            stream.release(chunk);
            query += Pages::kLine / kKvBytes<K::kType> * kTile;
        }
    }

    // acc[i][..] = sum over the page's keys that query i sees of weight * value, in ascending order.
    template <int kCount>
    __device__ __forceinline__ void addValues(const int (&begin)[kCount], const int (&end)[kCount],
                                              float (&acc)[kCount][kWidth]) const {
        int allBegin = begin[0], allEnd = end[0];
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            allBegin = max(allBegin, begin[i]), allEnd = min(allEnd, end[i]);
#pragma unroll
            for (int x = 0; x < kWidth; x++) acc[i][x] = 0.0f;
        }
#pragma unroll 1
        for (int chunk = 0; chunk < Pages::kValueChunks; chunk++) {
            const int key = chunk * Pages::kValueKeys;
            const uint8_t* values = stream.take() + block.lane * kWidth * kKvBytes<K::kType>;
            if (key >= allBegin && key + Pages::kValueKeys <= allEnd) addAll(values, weights + key, acc);
            else addSeen(values, key, begin, end, acc);
            stream.release(Pages::kKeyChunks + chunk);
        }
    }
    // Adds a chunk's values, which all queries see.
    template <int kCount>
    __device__ __forceinline__ void addAll(const uint8_t* values, const float* weight,
                                           float (&acc)[kCount][kWidth]) const {
        constexpr int kQuad = 4;
#pragma unroll(kCount <= 4 ? 2 : 1)
        for (int key = 0; key < Pages::kValueKeys; key += kQuad) {
            float value[kQuad][kWidth];
#pragma unroll
            for (int j = 0; j < kQuad; j++) readValue(values + (key + j) * Pages::kRowBytes, value[j]);
            addValuesOfAll(value, weight + key, acc);
        }
    }
    // Adds the values of a chunk from key `first` on, each to the queries that see it.
    template <int kCount>
    __device__ __forceinline__ void addSeen(const uint8_t* values, int first, const int (&begin)[kCount],
                                            const int (&end)[kCount], float (&acc)[kCount][kWidth]) const {
#pragma unroll 1
        for (int key = first; key < first + Pages::kValueKeys; key++) {
            float value[kWidth];
            readValue(values + (key - first) * Pages::kRowBytes, value);
            addValueOfSome(value, weights, key, begin, end, acc);
        }
    }
    __device__ __forceinline__ static void readValue(const uint8_t* at, float (&value)[kWidth]) {
        RawRun<K::kType, kWidth> run;
        run.read(at);
        run.floats(value);
    }
};

// Warps take segments by ticket and leave their results in slots. No warp waits for another.
template <class K> __global__ void __launch_bounds__(kThreads, kDeepBlocks) attendSegments(const Args args) {
    allowNext();
    extern __shared__ __align__(128) uint8_t shared[];
    const Block block(shared, args.layout);
    uint32_t* taken = args.partials.counters;
    if (block.warp == 0) findRuns(args, block);
    __syncthreads();
    const Parts parts(args);
    const int all = block.flags().pieces * args.shape.kvHeads, warps = static_cast<int>(gridDim.x) * kWarps;
    uint8_t* memory = shared + block.warp * WarpLayout<K>::kTotal;
    PageStream<K> stream(args.pages, memory, block.lane);
    const DeepWork<K> work(args, block, stream, memory);
    const auto take = [&] {
        const int ticket = block.lane == 0 ? warps + static_cast<int>(atomicAdd(taken, 1u)) : 0;
        return __shfl_sync(kWholeWarp, ticket, 0);
    };
    waitForPrevious();
    // The first segments are spread over the multiprocessors.
    int present = static_cast<int>(blockIdx.x) + block.warp * static_cast<int>(gridDim.x);
    bool begins = true;
#pragma unroll 1
    while (present < all) {
        const Piece piece(args, block, parts, present);
        const PagesOfPiece pages(args, piece, block.lane);
        if (pages.count == 0) {  // a row that sees no key
            present = take(), begins = true;
            continue;
        }
        if (begins) stream.begin(pages[0]);
        begins = false;
        work.run(piece, pages, [&] {
            present = take();
            if (present >= all) return stream.setNext({});
            const Piece next(args, block, parts, present);
            stream.setNext(PagesOfPiece(args, next, block.lane)[0]);
        });
    }
    // The tickets end with one too many for each warp. The last of them leaves the counter ready for the next launch.
    if (block.lane == 0 && present == all + warps - 1) *taken = 0;
}

// Joins the segments of this round to the earlier ones: a block those of a head of a row, a thread one dimension.
template <int kDim> struct SegmentJoin {
    static constexpr int kDims = kDim;
    const Args& args;
    int lane, head, row;
    int64_t first;    // the head's first slot
    int2 seen;        // the first key, and how many keys end with the row's own
    int begin, end;   // the segments
    int from, until;  // those of this round

    __device__ explicit SegmentJoin(const Args& a) : args(a), lane(threadIdx.x % 32) {
        const int number = static_cast<int>(blockIdx.x);
        row = number / args.shape.heads, head = number - row * args.shape.heads;
        first = static_cast<int64_t>(number) * (args.ring.slots + 1);
        const int position = args.batch.positions[row];
        seen = {position < 0 ? 0 : args.rule.reach.first(position), max(0, position + 1)};
        constexpr int kTokens = kPageTokens * kSegmentPages;
        begin = seen.x / kTokens, end = (seen.y + kTokens - 1) / kTokens;
        const bool isOnly = args.round.isOnly;
        from = isOnly ? begin : max(begin, args.round.first);
        until = isOnly ? end : min(end, args.round.first + args.ring.slots);
    }

    // What kSize segments left. Lane i has the maximum and the sum of segment i. All are read at once.
    template <int kSize> struct Group {
        float maximum, sum, outputs[kSize];
    };
    // Up to kFew segments are read wherever they are. Else a group is 32 neighbouring slots, which the first and the
    // last group do not use all.
    static constexpr int kFew = 16, kMany = 32;

    template <int kSize> __device__ __forceinline__ void load(int segment, Group<kSize>& group) const {
        const int mask = args.ring.slots - 1, own = segment + lane;
        const bool exists = lane < kSize && own >= from && own < until;
        const int64_t slot = first + (own & mask);
        group.maximum = exists ? __ldcg(args.partials.maxima + slot) : __int_as_float(0xff800000);
        group.sum = exists ? __ldcg(args.partials.sums + slot) : 0.0f;
        const float* outputs = args.partials.outputs + first * kDim + threadIdx.x;
#pragma unroll
        for (int i = 0; i < kSize; i++) {
            if (kSize == kMany) group.outputs[i] = __ldcg(outputs + (segment & mask) * kDim + i * kDim);
            else if (segment + i < until) group.outputs[i] = __ldcg(outputs + (segment + i & mask) * kDim);
        }
    }
    // Joins those of the group's segments that are of this round.
    template <int kSize>
    __device__ __forceinline__ void add(const Group<kSize>& group, int segment, Joined<1>& so) const {
        Factors factors = {};
        factors.make<1>(group.maximum, so.m, lane);
        const int begins = from - segment, ends = until - segment;
        const auto addOne = [&](int i) {
            const float output[1] = {group.outputs[i]};
            so.add(__shfl_sync(kWholeWarp, group.sum, i), output, __shfl_sync(kWholeWarp, factors.segmentKept, i),
                   __shfl_sync(kWholeWarp, factors.segmentAdded, i));
        };
        if (begins <= 0 && ends >= kSize) {
#pragma unroll
            for (int i = 0; i < kSize; i++) addOne(i);
            return;
        }
#pragma unroll
        for (int i = 0; i < kSize; i++)
            if (i >= begins && i < ends) addOne(i);
    }

    template <int kSize> __device__ __forceinline__ void run() const {
        if (from >= until && !(begin == end && args.round.first == 0)) return;
        const int64_t kept = first + args.ring.slots;
        Group<kSize> group;
        int segment = kSize == kMany ? from & -kMany : from;
        load(segment, group);
        Joined<1> so;
        so.clear();
        if (from > begin) {
            so.m = __ldcg(args.partials.maxima + kept), so.l = __ldcg(args.partials.sums + kept);
            so.o[0] = __ldcg(args.partials.outputs + kept * kDim + threadIdx.x);
        }
        __syncthreads();  // all warps have read what the first one may write below
        if (kSize == kFew) add(group, segment, so);
#pragma unroll 1
        for (; kSize == kMany && segment < until; segment += kSize) {
            Group<kSize> next;
            load(segment + kSize, next);
            add(group, segment, so);
            group = next;
        }
        if (until == end) return write(so);
        if (threadIdx.x == 0) args.partials.maxima[kept] = so.m, args.partials.sums[kept] = so.l;
        args.partials.outputs[kept * kDim + threadIdx.x] = so.o[0];
    }
    __device__ __forceinline__ void write(Joined<1>& so) const {
        const bool seesKeys = seen.x < seen.y;
        if (args.rule.sinks && seesKeys) so.addSink(args.rule.sinks[head]);
        const float x = seesKeys ? __fdiv_rn(so.o[0], so.l) : 0.0f;
        const int64_t cols = static_cast<int64_t>(args.shape.heads) * kDim,
                      column = static_cast<int64_t>(head) * kDim + threadIdx.x;
        if (args.out.floats) args.out.floats[row * cols + column] = x;
        if (args.out.quantized.q)
            quantizeLane(args.out.quantized, row, cols / kContractBlock, column / kContractBlock, x);
    }
};

// kSize: kFew, if no row has more segments in this round, or kMany, of which the ring's slots are a multiple.
template <int kDim, int kSize> __global__ void __launch_bounds__(kDim) joinSegments(const Args args) {
    allowNext();
    const SegmentJoin<kDim> join(args);
    waitForPrevious();
    join.template run<kSize>();
}

// --- launching ---------------------------------------------------------------------------------------------------

template <class K> Layout deepLayout() {
    Layout layout;
    layout.rows = kWarps * WarpLayout<K>::kTotal;
    layout.placeRows();
    return layout;
}

// The blocks of a multiprocessor.
template <class K> int deepBlocks(const DeviceInfo& device) {
    const int bytes = deepLayout<K>().total;
    if (bytes > static_cast<int>(device.sharedPerBlock)) return 0;
    return std::min(kDeepBlocks, static_cast<int>(device.sharedPerMultiprocessor) / (bytes + kReservedShared));
}

// The rounds that the segments of these rows take.
inline int64_t deepRounds(const Args& args) {
    if (args.rule.reach.limited()) return 1;
    const int64_t pages = std::min(args.batch.depth.deepest, args.batch.listPages);
    const int64_t segments = (pages + kSegmentPages - 1) / kSegmentPages;
    return (segments + args.ring.slots - 1) / args.ring.slots;
}

// Whether there are enough segments for each warp to take its own.
template <class K> bool isDeep(const DeviceInfo& device, const Args& args) {
    const BatchRows& batch = args.batch;
    const AttentionReach& reach = args.rule.reach;
    if (batch.depth.deepest == 0) return false;
    // With one block, a multiprocessor would have too few warps to hide what memory takes.
    const int64_t blocks = deepBlocks<K>(device);
    if (blocks < 2) return false;
    const int64_t texts = std::max<int64_t>(1, batch.rows / batch.depth.rowsOfText);
    const int64_t seen = pagesSeen(reach, batch.depth.deepest), pages = std::min(batch.depth.all, texts * seen);
    // A limited reach has one round, whose slots suffice for the segments that neighbouring rows see.
    if (reach.limited() && seen + 3 * kSegmentPages > args.ring.slots * kSegmentPages) return false;
    const int64_t perProcessor =
        pages * args.shape.kvHeads / (kSegmentPages * deepRounds(args) * device.multiprocessors);
    // Rows of one text share its pages, and their queries may take several turns. Then what counts is the arithmetic,
    // and that all warps have as much of it.
    if (args.group * std::min<int64_t>(batch.depth.rowsOfText, kRunRows) > K::kTile)
        return perProcessor >= 2 * blocks * kWarps;
    // Blocks take long to join many segments: warps are faster as soon as blocks would take a second one.
    const bool isLong = pages >= texts * 32 * kSegmentPages;
    return perProcessor >= (isLong ? kDeepBlocks : blocks * kWarps);
}

template <class K> void launchDeep(Stream& stream, Args args) {
    const auto kernel = attendSegments<K>;
    args.layout = deepLayout<K>();
    args.shortPages = -1;
    const auto bytes = static_cast<size_t>(args.layout.total);
    if (bytes > 48 * 1024) allowShared(kernel, bytes);
    const auto blocks = static_cast<unsigned>(deepBlocks<K>(stream.device()) * stream.device().multiprocessors);
    using Join = SegmentJoin<WarpLayout<K>::kDim>;
    const int64_t rounds = deepRounds(args), most = pagesSeen(args.rule.reach, args.batch.depth.deepest);
    const bool few = std::min<int64_t>(most / kSegmentPages + 2, args.ring.slots) <= Join::kFew;
    const auto join = few ? joinSegments<Join::kDims, Join::kFew> : joinSegments<Join::kDims, Join::kMany>;
    const auto heads = static_cast<unsigned>(args.batch.rows * args.shape.heads);
    args.round.isOnly = rounds == 1;
    for (int64_t round = 0; round < rounds; round++, args.round.first += args.ring.slots) {
        launch(stream, kernel, dim3(blocks), dim3(kThreads), bytes, args);
        launch(stream, join, dim3(heads), dim3(Join::kDims), 0, args);
    }
}

}  // namespace sharpi::cuda::decode
