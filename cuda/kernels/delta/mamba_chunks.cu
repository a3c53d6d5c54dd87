// Mamba 2's scan for many rows, a chunk of up to 64 at a time, on tensor cores (the SSD form of Dao & Gu, 2024,
// "Transformers are SSMs").
//
// A chunk has rows 0 .. C - 1, state S [lines, columns] before it, decays a and steps b. Let
// ratio(t, s) = a[s + 1] * .. * a[t] and gain(t) = a[0] * .. * a[t]. With B and C of the head's group and
// d[s] = b[s] x[s]:
//   y[t] = gain(t) S' C[t] + sum over s <= t of ratio(t, s) (C[t] . B[s]) d[s] + skip x[t]
//   S    = gain(C - 1) S + sum over s of ratio(C - 1, s) B[s] d[s]'
//
// There are two launches. The first (mamba_products.cuh) needs no state and takes all chunks at once. For each group it
// makes the halves of B and C and the products C[t] . B[s], once for all heads of the group; for each head the tables
// that ratios are made from. Ratios are products, not quotients or differences of logarithms, so that they stay exact
// if a decay is close to zero. Rows t and s < t lie in neighbouring blocks of 2^l rows, where l is the highest bit in
// which t and s differ. So ratio(t, s) is the product of the decays from the beginning of t's block to t, and of those
// after s to the end of s's block: one multiplication of two numbers from tables of 64 for each l. Those of each eight
// rows stand in a table.
//
// The second launch goes through a sequence's chunks, like that of the delta rule (gated_delta_chunks.cu). Two warps
// have 16 columns of a head's state in registers, transposed, each half of the lines. They add up their parts of S' C
// through shared memory, once for each chunk. Other warps copy the next chunk to shared memory meanwhile, if a device
// has room for two, and make the weights of d out of this chunk's products, in their place. Gates are read at a chunk's
// beginning, to be there at its end.
//
// All products are in split form: every operand is the sum of two 16-bit numbers, and a product is hi hi + hi lo +
// lo hi, which keeps about 16 bits of each factor. Sums and state are floats.
#include "kernels/delta/mamba_products.cuh"

namespace sharpi::cuda {

using namespace mamba;

namespace {

constexpr int kHelpers = 128;  // threads of a block that copy and make weights

// kGroups: groups of 16 columns of a state for each block. kStages: chunks in shared memory.
template <int kDim, int kGroups_, int kStages_> struct ScanChunks : MambaChunks<kDim> {
    using Base = MambaChunks<kDim>;
    static constexpr int kGroups = kGroups_, kStages = kStages_;
    static constexpr int kColumns = 16 * kGroups;
    static constexpr int kPitch = kColumns + 4;  // floats of a row of x; a quad of lanes reads rows in different banks
    static constexpr int kLines = kDim / 2;      // of a warp
    static constexpr int kThreads = kGroups * 2 * 32;  // that have columns
    static constexpr int kTablesAt = Base::kGroupBytes;
    static constexpr int kInputsAt = kTablesAt + kTableFloats * 4;
    static constexpr int kStageBytes = kInputsAt + kChunk * kPitch * 4;
    // What a warp passes to its partner: its part of the partner's rows, a quad for each lane and eight of these.
    static constexpr int kOwnTiles = kChunk / 8 / 2;
    static constexpr int kSharedAt = kStages * kStageBytes;
    static constexpr int kScanBytes = kSharedAt + kThreads * kOwnTiles * 16;
};

struct ScanTile {
    int64_t begin, end;
    int index;

    __device__ __forceinline__ ScanTile(const MambaChunkWork& work, int64_t first) : begin(first) {
        const int2 at = work.tileAt[first];
        index = at.x;
        end = at.y;
    }
    __device__ __forceinline__ int count() const { return static_cast<int>(end - begin); }
};

// A chunk in shared memory.
template <class C> struct ScanStage {
    uint8_t* memory;
    uint32_t b, c, weights;
    ScanTables tables;
    float* x;  // [kChunk, kPitch]

    __device__ __forceinline__ explicit ScanStage(uint8_t* at)
        : memory(at),
          b(sharedAddress(at)),
          c(b + 2 * C::kTileBytes),
          weights(b + 4 * C::kTileBytes),
          tables{reinterpret_cast<float*>(at + C::kTablesAt)},
          x(reinterpret_cast<float*>(at + C::kInputsAt)) {}

    // Starts the copies of a chunk, as one group. helper: the thread's number among kHelpers, which do this.
    __device__ __forceinline__ void copy(const MambaChunkWork& work, const ScanTile& tile, int helper) const {
        const MambaShape& shape = work.shape;
        const int head = blockIdx.x;
        const uint8_t* left =
            work.groups + (int64_t{tile.index} * shape.groups + head / shape.headsPerGroup()) * C::kGroupBytes;
        copyRows<kHelpers, C::kRowBytes, 4 * kChunk>(b, left, helper);
        copyRows<kHelpers, 4 * kChunk, kChunk>(weights, left + 4 * C::kTileBytes, helper);
        const float* from = work.tables + (int64_t{tile.index} * shape.heads + head) * kTableFloats;
        for (int i = helper; i < kTableFloats / 4; i += kHelpers)
            copyChunk(b + C::kTablesAt + i * 16, from + i * 4, true);
        copyInputs(shape, work.in.mixed + tile.begin * shape.channels() + head * shape.headDim, tile.count(), helper);
        closeCopies();
    }

    // Replaces the products by the weights of d, up to the diagonal's blocks of 16 x 16. A helper has a row of eight:
    // those of a warp are in 32 rows, so they are in different banks.
    __device__ __forceinline__ void makeWeights(int helper) const {
#pragma unroll
        for (int first = 0; first < kChunk * kChunk / 8; first += kHelpers) {
            const int t = helper % kChunk, eight = (first + helper) / kChunk;
            if (eight > t / 16 * 2 + 1) continue;
            uint8_t* at = memory + 4 * C::kTileBytes + chunkAt<4 * kChunk>(t, eight);
            const bool isNear = eight >= t / 8;
            const int level = isNear ? kFirstLevel : 31 - __clz(t ^ eight * 8);
            const float before = !isNear ? tables.prefix(level)[t] : eight == t / 8 ? 1.0f : 0.0f;
            float w[8], ratio[8];
            const float* after = isNear ? tables.near(t) : tables.suffix(level) + eight * 8;
            read(ratio, after, after + 4);
            read(w, reinterpret_cast<const float*>(at), reinterpret_cast<const float*>(at + 2 * kChunk));
            uint32_t hi[4], lo[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float x = w[2 * k] * (ratio[2 * k] * before), y = w[2 * k + 1] * (ratio[2 * k + 1] * before);
                hi[k] = packPair(x, y);
                const float2 kept = unpackPair(hi[k]);
                lo[k] = packPair(x - kept.x, y - kept.y);
            }
            *reinterpret_cast<uint4*>(at) = {hi[0], hi[1], hi[2], hi[3]};
            *reinterpret_cast<uint4*>(at + 2 * kChunk) = {lo[0], lo[1], lo[2], lo[3]};
        }
    }

private:
    // from: the row of the head's first column.
    __device__ __forceinline__ void copyInputs(const MambaShape& shape, const float* from, int count,
                                               int helper) const {
        const int first = blockIdx.y * C::kColumns, channels = static_cast<int>(shape.channels());
        const int columns = min(C::kColumns, shape.headDim - first);
        from += first;
        if (channels % 4 == 0) {
#pragma unroll
            for (int quad = 0; quad < kChunk * C::kColumns / 4; quad += kHelpers) {
                const int i = quad + helper;
                const int row = i / (C::kColumns / 4), column = i % (C::kColumns / 4) * 4;
                const bool valid = row < count && column < columns;
                copyChunk(sharedAddress(x + row * C::kPitch + column), valid ? from + row * channels + column : from,
                          valid);
            }
            return;
        }
        for (int i = helper; i < kChunk * C::kColumns; i += kHelpers) {
            const int row = i / C::kColumns, column = i % C::kColumns;
            float* to = x + row * C::kPitch + column;
            if (row < count && column < columns) copyToShared<4>(to, from + row * channels + column);
            else *to = 0.0f;
        }
    }
    static __device__ __forceinline__ void read(float (&to)[8], const float* first, const float* second) {
        const float4 a = *reinterpret_cast<const float4*>(first), b = *reinterpret_cast<const float4*>(second);
        to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
    }
};

// A warp's part of 16 columns of a head's state, transposed: state[n][2 h + i] is column lane / 4 + 8 h and line
// 8 n + 2 (lane % 4) + i of the party's lines. S' C of a chunk has the same layout, with rows of the chunk instead of
// lines. The answers of rows 0 .. 15 and 48 .. 63 are party 0's, those between them party 1's: so both sum as much.
template <class C> struct ScanColumns {
    using Rows = float[kChunk / 8][4];       // all rows of a chunk
    using OwnRows = float[C::kOwnTiles][4];  // the rows whose answers are the warp's

    float state[C::kLines / 8][4];
    int party, local, column, line;  // local: column among the block's; column and line: those of state[0][0]

    __device__ __forceinline__ ScanColumns()
        : party(threadIdx.x / (C::kGroups * 32)),
          local((threadIdx.x >> 5) % C::kGroups * 16 + (threadIdx.x & 31) / 4),
          column(blockIdx.y * C::kColumns + local),
          line(threadIdx.x % 4 * 2) {}

    // Calls each(value, line, column) for every element of the state that exists.
    template <typename Each> __device__ __forceinline__ void forState(const MambaShape& shape, Each each) {
#pragma unroll
        for (int n = 0; n < C::kLines / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int l = party * C::kLines + n * 8 + line + (i & 1), c = column + (i >> 1) * 8;
                if (l < shape.stateDim && c < shape.headDim) each(state[n][i], l, c);
            }
    }
    // The first row of a group of eight of the warp's rows.
    __device__ __forceinline__ int ownRow(int n) const { return (n < 2 ? party : 3 - party) * 16 + n % 2 * 8; }
    // Calls each(n, i, row, c, place) for every answer that exists; c counts from `column`, and place is where row and
    // c are in rows of `stride` floats that begin at `column`.
    template <typename Each>
    __device__ __forceinline__ void forOwn(int count, int headDim, float* from, int stride, Each each) const {
#pragma unroll
        for (int n = 0; n < C::kOwnTiles; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = ownRow(n - n % 2) + line + n % 2 * 8 + i;
                float* const place = from + row * stride;
                if (row < count && column < headDim) each(n, i, row, 0, place);
                if (row < count && column + 8 < headDim) each(n, i + 2, row, 8, place + 8);
            }
    }

    // Computes the party's part of S' C.
    __device__ __forceinline__ void recall(const ScanStage<C>& stage, Rows& out) const {
#pragma unroll
        for (auto& quad : out) quad[0] = quad[1] = quad[2] = quad[3] = 0.0f;
#pragma unroll
        for (int k = 0; k < C::kLines / 16; k++) {
            const LeftOperand<true> a(state[2 * k], state[2 * k + 1]);
            const auto load = [&](uint32_t (&b)[4], uint32_t tile, int p) {
                loadRight<C::kRowBytes>(b, tile, p * 16, party * C::kLines + k * 16);
            };
            multiplyPairs<true, 0, kChunk / 16>(out, kChunk / 16, a.hi, a.lo, stage.c, C::kTileBytes, load);
        }
    }

    // tell() comes before a barrier and hear() after it: own becomes S' C of the warp's rows.
    __device__ __forceinline__ void tell(float4* shared, const Rows& out) const {
#pragma unroll
        for (int n = 0; n < C::kOwnTiles; n++) {
            const float (&theirs)[4] = out[n < 2 ? n : 4 + n], (&ours)[4] = out[2 + n];
            float4 quad;
            quad.x = party == 0 ? ours[0] : theirs[0], quad.y = party == 0 ? ours[1] : theirs[1];
            quad.z = party == 0 ? ours[2] : theirs[2], quad.w = party == 0 ? ours[3] : theirs[3];
            shared[n * C::kThreads + threadIdx.x] = quad;
        }
    }
    __device__ __forceinline__ void hear(const float4* shared, const Rows& out, OwnRows& own) const {
        const int partner = (threadIdx.x + C::kThreads / 2) % C::kThreads;
#pragma unroll
        for (int n = 0; n < C::kOwnTiles; n++) {
            const float4 heard = shared[n * C::kThreads + partner];
#pragma unroll
            for (int i = 0; i < 4; i++) own[n][i] = party == 0 ? out[n < 2 ? n : 4 + n][i] : out[2 + n][i];
            own[n][0] += heard.x, own[n][1] += heard.y, own[n][2] += heard.z, own[n][3] += heard.w;
        }
    }

    // own = gain * own + weights d, state = gain * state + (ratios * d) B.
    __device__ __forceinline__ void advance(const ScanStage<C>& stage, OwnRows& own) {
#pragma unroll
        for (int n = 0; n < C::kOwnTiles; n++) {
            const float2 gain = *reinterpret_cast<const float2*>(stage.tables.gain() + ownRow(n) + line);
            own[n][0] *= gain.x, own[n][1] *= gain.y, own[n][2] *= gain.x, own[n][3] *= gain.y;
        }
        const float gain = stage.tables.gain()[kChunk - 1];
#pragma unroll
        for (auto& quad : state) quad[0] *= gain, quad[1] *= gain, quad[2] *= gain, quad[3] *= gain;
        if (party == 0) addAll<0>(stage, own);
        else addAll<1>(stage, own);
    }

private:
    template <int kParty> __device__ __forceinline__ void addAll(const ScanStage<C>& stage, OwnRows& own) {
        addRows<kParty, 0>(stage, own);
        addRows<kParty, 1>(stage, own);
        addRows<kParty, 2>(stage, own);
        addRows<kParty, 3>(stage, own);
    }

    // The part of rows 16 kStep .. 16 kStep + 15 of d.
    template <int kParty, int kStep> __device__ __forceinline__ void addRows(const ScanStage<C>& stage, OwnRows& own) {
        float d[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int row = kStep * 16 + n * 8 + line;
            const float2 step = *reinterpret_cast<const float2*>(stage.tables.step() + row);
            const float* x = stage.x + row * C::kPitch + local;
            d[n][0] = x[0] * step.x, d[n][1] = x[C::kPitch] * step.y;
            d[n][2] = x[8] * step.x, d[n][3] = x[C::kPitch + 8] * step.y;
        }
        // They have no weight in the rows before them.
        if constexpr (kStep <= 3 - kParty) {
            const LeftOperand<true> a(d[0], d[1]);
            const auto load = [&](uint32_t (&b)[4], uint32_t tile, int p) {
                loadRight<4 * kChunk>(b, tile, (p == 0 ? kParty : 3 - kParty) * 16, kStep * 16);
            };
            constexpr int kFirst = kStep <= kParty ? 0 : 1;
            multiplyPairs<true, kFirst, 2>(own, 2, a.hi, a.lo, stage.weights, 2 * kChunk, load);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const float2 ratio = *reinterpret_cast<const float2*>(stage.tables.last() + kStep * 16 + n * 8 + line);
            d[n][0] *= ratio.x, d[n][1] *= ratio.y, d[n][2] *= ratio.x, d[n][3] *= ratio.y;
        }
        const LeftOperand<true> a(d[0], d[1]);
        const auto load = [&](uint32_t (&b)[4], uint32_t tile, int p) {
            loadRightTurned<C::kRowBytes>(b, tile, kStep * 16, kParty * C::kLines + p * 16);
        };
        constexpr int kPairs = C::kLines / 16, kAtOnce = kPairs < 4 ? kPairs : 4;
        multiplyPairs<true, 0, kAtOnce>(state, kAtOnce, a.hi, a.lo, stage.b, C::kTileBytes, load);
        if constexpr (kPairs > 4)
            multiplyPairs<true, 4, kPairs>(state, kPairs, a.hi, a.lo, stage.b, C::kTileBytes, load);
    }
};

// What the helpers do. Which chunk is the next but one is looked up early, because a chunk's copies wait for it.
template <class C>
__device__ __forceinline__ void helpScan(const MambaChunkWork& work, uint8_t* memory, int64_t begin, int64_t end) {
    const int helper = static_cast<int>(threadIdx.x) - C::kThreads;
    ScanTile tile(work, begin), following(work, tile.end < end ? tile.end : begin);
    int at = 0;
    ScanStage<C>(memory).copy(work, tile, helper);
    while (true) {
        const ScanStage<C> stage(memory + at * C::kStageBytes);
        const ScanTile later(work, following.end < end ? following.end : begin);
        const bool more = tile.end < end;
        waitForCopies<0>();
        __syncthreads();  // the chunk has come, and no warp is in the one before it any more
        at = C::kStages - 1 - at;
        if (C::kStages > 1 && more) ScanStage<C>(memory + at * C::kStageBytes).copy(work, following, helper);
        stage.makeWeights(helper);
        __syncthreads();
        if (!more) return;
        if (C::kStages == 1) {
            __syncthreads();
            stage.copy(work, following, helper);
        }
        tile = following, following = later;
    }
}

__device__ __forceinline__ float nearSilu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Takes head blockIdx.x and the columns of blockIdx.y through the chunks of sequence blockIdx.z.
template <class C>
__global__ void __launch_bounds__(C::kThreads + kHelpers) mambaChunksKernel(const MambaChunkWork work) {
    extern __shared__ __align__(128) uint8_t memory[];
    allowNext();
    const int64_t begin = work.sequences.begin[blockIdx.z], end = work.sequences.end[blockIdx.z];
    if (begin >= end) return waitForPrevious();
    if (threadIdx.x >= C::kThreads) {
        waitForPrevious();
        return helpScan<C>(work, memory, begin, end);
    }
    const MambaShape& shape = work.shape;
    const int head = blockIdx.x, headDim = shape.headDim, width = static_cast<int>(shape.width());
    float* states = work.states + int64_t{head} * shape.stateDim * headDim;
    const int from = work.from[begin];
    const float skip = work.skip[head];
    ScanColumns<C> columns;
#pragma unroll
    for (auto& quad : columns.state) quad[0] = quad[1] = quad[2] = quad[3] = 0.0f;
    if (from >= 0) {
        const float* kept = states + from * shape.matrixFloats();
        columns.forState(shape, [&](float& x, int line, int column) { x = kept[line * headDim + column]; });
    }
    waitForPrevious();

    auto* const shared = reinterpret_cast<float4*>(memory + C::kSharedAt);
    int at = 0;
    int64_t first = begin, last = work.tileAt[begin].y;
    while (true) {
        const ScanStage<C> stage(memory + at * C::kStageBytes);
        const bool more = last < end;
        const int64_t later = work.tileAt[more ? last : begin].y;
        const int count = static_cast<int>(last - first), to = work.to[last - 1];
        float* answers = work.in.gate + first * width + head * headDim + columns.column;
        typename ScanColumns<C>::OwnRows gate = {}, own;
        columns.forOwn(count, headDim, answers, width,
                       [&](int n, int i, int, int, const float* place) { gate[n][i] = *place; });
        __syncthreads();  // see helpScan()
        typename ScanColumns<C>::Rows out;
        columns.recall(stage, out);
        columns.tell(shared, out);
        __syncthreads();
        columns.hear(shared, out, own);
        columns.advance(stage, own);
        columns.forOwn(count, headDim, answers, width, [&](int n, int i, int row, int c, float* place) {
            const float x = stage.x[row * C::kPitch + columns.local + c];
            *place = nearSilu(gate[n][i]) * fmaf(skip, x, own[n][i]);
        });
        if (to >= 0) {
            float* kept = states + to * shape.matrixFloats();
            columns.forState(shape, [&](float& x, int line, int column) { kept[line * headDim + column] = x; });
        }
        if (!more) return;
        at = C::kStages - 1 - at;
        if (C::kStages == 1) __syncthreads();
        first = last, last = later;
    }
}

template <class C> void launchScan(Stream& stream, const MambaChunkWork& work) {
    allowShared(mambaChunksKernel<C>, C::kScanBytes);
    const auto columns = static_cast<unsigned>((work.shape.headDim + C::kColumns - 1) / C::kColumns);
    const dim3 grid(static_cast<unsigned>(work.shape.heads), columns, static_cast<unsigned>(work.sequences.count));
    launch(stream, mambaChunksKernel<C>, grid, dim3(C::kThreads + kHelpers), C::kScanBytes, work);
}

// Returns false and launches nothing if the device has too little shared memory.
template <int kDim, int kGroups> bool launchGroups(Stream& stream, const MambaChunkWork& work) {
    using One = ScanChunks<kDim, kGroups, 1>;
    using Two = ScanChunks<kDim, kGroups, kDim == 128 ? 2 : 1>;
    const size_t shared = stream.device().sharedPerBlock;
    if (shared >= Two::kScanBytes) launchScan<Two>(stream, work);
    else if (shared >= One::kScanBytes) launchScan<One>(stream, work);
    else return false;
    return true;
}

template <int kDim> void launchProducts(Stream& stream, const MambaChunkWork& work) {
    using C = MambaChunks<kDim>;
    allowShared(mambaProductsKernel<C>, 4 * C::kTileBytes);
    const int blocks = work.shape.groups + (work.shape.heads + kFirstHeads - 1) / kFirstHeads;
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(work.tiles.count));
    launch(stream, mambaProductsKernel<C>, grid, dim3(kFirstThreads), 4 * C::kTileBytes, work);
}

// The same. Narrow blocks have half of a large head's columns: if there are few, most of a device would idle otherwise.
template <int kDim> bool launchChunks(Stream& stream, const MambaChunkWork& work) {
    if (stream.device().sharedPerBlock < ScanChunks<kDim, 2, 1>::kScanBytes) return false;
    launchProducts<kDim>(stream, work);
    const int64_t narrowBlocks = (work.shape.headDim + 31) / 32 * work.shape.heads * work.sequences.count;
    const bool narrow = narrowBlocks <= stream.device().multiprocessors;
    return (!narrow && launchGroups<kDim, 4>(stream, work)) || launchGroups<kDim, 2>(stream, work);
}

bool launchSize(Stream& stream, const MambaChunkWork& work) {
    if (work.shape.stateDim <= 64) return launchChunks<64>(stream, work);
    if (work.shape.stateDim <= 128) return launchChunks<128>(stream, work);
    return launchChunks<256>(stream, work);
}

}  // namespace

void scanMambaInChunks(Stream& stream, const MambaInputs& in, const MambaParameters& parameters,
                       const MambaShape& shape, const DeltaStates& states, const DeltaBatch& batch,
                       const RowRanges& tiles, void* scratch) {
    requireMamba(shape);
    auto* const list = static_cast<uint8_t*>(scratch);
    auto* const tables = reinterpret_cast<float*>(list + deltaTileListBytes(batch.rows));
    const MambaChunkWork work = {in,
                                 parameters.skip,
                                 shape,
                                 states.matrix,
                                 batch.from,
                                 batch.to,
                                 batch.sequences,
                                 tiles,
                                 reinterpret_cast<int2*>(list),
                                 tables,
                                 reinterpret_cast<uint8_t*>(tables + tiles.count * shape.heads * kTableFloats)};
    if (!launchSize(stream, work)) scanMamba(stream, in, parameters, shape, states, batch);
}

}  // namespace sharpi::cuda
