// Gated DeltaNet's delta rule for many rows, a chunk of up to 64 at a time, on tensor cores (the WY form of Yang et
// al., 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", with the decays of Gated
// DeltaNet).
//
// A chunk has rows 0 .. C - 1, state S before it, decays a and steps b. Let ratio(t, s) = a[s + 1] * .. * a[t] and
// gain(t) = a[0] * .. * a[t]. The rule adds d[t] to the state by key k[t]. These d solve a triangular system:
//   d[t] = b[t] (v[t] - gain(t) S' k[t] - sum over s < t of ratio(t, s) (k[t] . k[s]) d[s])
// Its solution is linear in S: D = U - W S, where U and W are the solutions for the values and for b[t] gain(t) k[t].
// Then
//   o[t] = gain(t) S' q[t] + sum over s <= t of ratio(t, s) (q[t] . k[s]) d[s]
//   S    = gain(C - 1) S + sum over s of ratio(C - 1, s) k[s] d[s]'
//
// There are three launches. The first needs no state and takes all chunks at once. A block makes the products of a
// chunk's keys and queries on tensor cores, inverts the 16 x 16 blocks on the system's diagonal in floats, and then
// solves the system 16 rows at a time. That is products again, always in split form: a warp has 16 columns of U and of
// W in registers, transposed like the state below. (With one thread for each column in plain floats, every element of
// the matrix would go to every warp, and shared memory would be the bottleneck.) Ratios are products, not quotients or
// differences of logarithms, so that they stay exact if a decay is close to zero.
//
// The second launch goes through a sequence's chunks. The chain of steps within a chunk decides how long it takes. A
// warp has 16 columns of a head's state in registers, transposed (S', as accumulators of m16n8k16), which is the layout
// of the next product's left operand, so the state never leaves the registers. In large heads, two warps have half of
// the lines each, so that one warp's loads hide behind the other's products. They add up their parts of W S and S' q
// through shared memory, once for each chunk. W, keys, queries and the weights of D pass through shared memory too.
// What D and S' q of the next chunk need is loaded while the rest of this chunk is computed. The third launch norms and
// gates.
//
// In split form every operand is the sum of two 16-bit numbers, and a product is hi hi + hi lo + lo hi, which keeps
// about 16 bits of each factor. Sums and state are floats in both forms.
#include "kernels/delta/gated_delta_chunks.cuh"
#include "kernels/delta/gated_delta_system.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kStateGroups =
    4;  // groups of 16 columns of a state for each block; if that leaves most of a device idle:
constexpr int kNarrowGroups = 2;

// --- the second kernel -----------------------------------------------------------------------------------------------

// kAhead: shared memory has room for everything that the kernel uses of a chunk. On a device with less of it, keys and
// the weights of D take the place of W and queries once those have been used, and two warps never split lines.
template <int kDim, bool kSplit, bool kAhead_, int kMaxGroups> struct StateChunks : Chunks<kDim, kSplit> {
    using Base = Chunks<kDim, kSplit>;
    static constexpr bool kAhead = kAhead_;
    static constexpr int kGroups = kDim / 16 < kMaxGroups ? kDim / 16 : kMaxGroups;
    static constexpr int kParties = kAhead && kDim >= 128 ? 2 : 1;  // warps that split the lines of a group's columns
    static constexpr int kLines = kDim / kParties;                  // lines of a warp
    static constexpr int kOwnTiles =
        kChunk / 8 / kParties;  // groups of eight rows of the chunk whose output is the warp's
    static constexpr int kThreads = kGroups * kParties * 32;
    static constexpr int kFirstBytes = Base::kParts * 2 * Base::kTileBytes;
    static constexpr int kSecondBytes = Base::kParts * (Base::kTileBytes + Base::kWeightBytes);
    static constexpr int kSecondAt = kAhead ? kFirstBytes : 0;
    static constexpr int kGainsAt = kAhead                       ? kFirstBytes + kSecondBytes
                                    : kFirstBytes > kSecondBytes ? kFirstBytes
                                                                 : kSecondBytes;
    static constexpr int kGainBytes = 2 * kChunk * 4;
    // What a warp passes to its partner: all of its D and the outputs that are the partner's, a quad for each lane.
    static constexpr int kSharedTiles = kChunk / 8 + kOwnTiles;
    static constexpr int kSharedAt = kGainsAt + kGainBytes;
    static constexpr int kStateBytes = kSharedAt + (kParties > 1 ? kThreads * kSharedTiles * 16 : 0);
};

struct Tile {
    int64_t begin;
    int index, count;

    __device__ __forceinline__ Tile(const ChunkWork& work, int64_t begin) : begin(begin) {
        const int2 at = work.tileAt[begin];
        index = at.x;
        count = static_cast<int>(at.y - begin);
    }
};

template <class C> struct StateBlock {
    uint32_t w, queries, keys, weights, gains;
    const float *gain, *last;
    float4* shared;

    __device__ __forceinline__ explicit StateBlock(uint8_t* memory)
        : w(sharedAddress(memory)),
          queries(w + C::kParts * C::kTileBytes),
          keys(w + C::kSecondAt),
          weights(keys + C::kParts * C::kTileBytes),
          gains(w + C::kGainsAt),
          gain(reinterpret_cast<const float*>(memory + C::kGainsAt)),
          last(gain + kChunk),
          shared(reinterpret_cast<float4*>(memory + C::kSharedAt)) {}

    static __device__ __forceinline__ const uint8_t* left(const ChunkWork& work, const Tile& tile) {
        return work.left + (int64_t{tile.index} * work.valueHeads + blockIdx.x) * C::kLeftBytes;
    }

    // Copies W and queries, as one group.
    __device__ __forceinline__ void copyFirst(const ChunkWork& work, const Tile& tile) const {
        copyRows<C::kThreads, C::kRowBytes, C::kParts * kChunk>(w, left(work, tile), threadIdx.x);
        copyHead<C, C::kThreads>(work, queries, tile.begin, tile.count, work.keyChannel(blockIdx.x));
        closeCopies();
    }

    // Copies the weights of D, gains, last ratios and keys, as another group.
    __device__ __forceinline__ void copySecond(const ChunkWork& work, const Tile& tile) const {
        const uint8_t* from = left(work, tile) + C::kParts * C::kTileBytes;
        copyRows<C::kThreads, 2 * kChunk, C::kParts * kChunk>(weights, from, threadIdx.x);
        const uint8_t* numbers = from + C::kParts * C::kWeightBytes;
        for (int i = threadIdx.x; i < C::kGainBytes / 16; i += C::kThreads)
            copyChunk(gains + i * 16, numbers + i * 16, true);
        copyHead<C, C::kThreads>(work, keys, tile.begin, tile.count, work.keyWidth() + work.keyChannel(blockIdx.x));
        closeCopies();
    }
};

// A warp's part of 16 columns of a head's state, transposed: state[n][2 h + i] is column lane / 4 + 8 h and line
// 8 n + 2 (lane % 4) + i of the party's lines. D and the output of a chunk have the same layout, with rows of the chunk
// instead of lines.
template <class C> struct StateColumns {
    using Rows = float[kChunk / 8][4];       // all rows of a chunk
    using OwnRows = float[C::kOwnTiles][4];  // the rows whose output is the warp's

    float state[C::kLines / 8][4];
    int party, column, line;  // column and line: those of state[0][0]

    __device__ __forceinline__ StateColumns()
        : party(threadIdx.x / (C::kGroups * 32)),
          column((blockIdx.y * C::kGroups + (threadIdx.x >> 5) % C::kGroups) * 16 + (threadIdx.x & 31) / 4),
          line(threadIdx.x % 4 * 2) {}

    // Calls each(value, line, column) for every element that exists. The party's part of `values` lies behind the other
    // party's.
    template <int kCount, typename Each>
    __device__ __forceinline__ void forEach(float (&values)[kCount][4], int lines, int columns, Each each) const {
#pragma unroll
        for (int n = 0; n < kCount; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int l = (party * kCount + n) * 8 + line + (i & 1), c = column + (i >> 1) * 8;
                if (l < lines && c < columns) each(values[n][i], l, c);
            }
    }

    // Computes the party's part of minusD = W S - U and of out = S' q. u: the rows whose output is the party's.
    __device__ __forceinline__ void recall(const StateBlock<C>& block, const OwnRows& u, Rows& minusD,
                                           Rows& out) const {
#pragma unroll
        for (int n = 0; n < kChunk / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                minusD[n][i] = n / C::kOwnTiles == party ? -u[n % C::kOwnTiles][i] : 0.0f;
                out[n][i] = 0.0f;
            }
#pragma unroll
        for (int k = 0; k < C::kLines / 16; k++) {
            const LeftOperand<C::kSplit> a(state[2 * k], state[2 * k + 1]);
            const auto load = [&](uint32_t (&b)[4], uint32_t tile, int p) {
                loadRight<C::kRowBytes>(b, tile, p * 16, party * C::kLines + k * 16);
            };
            multiplyPairs<C::kSplit, 0, kPairs>(minusD, kPairs, a.hi, a.lo, block.w, C::kTileBytes, load);
            multiplyPairs<C::kSplit, 0, kPairs>(out, kPairs, a.hi, a.lo, block.queries, C::kTileBytes, load);
        }
    }

    // tell() comes before a barrier and hear() after it. The parties' results become D and `own`, which is S' q of the
    // warp's own rows.
    __device__ __forceinline__ void tell(const StateBlock<C>& block, const Rows& minusD, const Rows& out) const {
        if constexpr (C::kParties == 1) return;
        float4* to = block.shared + threadIdx.x;
#pragma unroll
        for (int n = 0; n < kChunk / 8; n++, to += C::kThreads) *to = quad(minusD[n]);
#pragma unroll
        for (int n = 0; n < C::kOwnTiles; n++, to += C::kThreads)
            *to = party == 0 ? quad(out[kChunk / 8 - C::kOwnTiles + n]) : quad(out[n]);
    }
    __device__ __forceinline__ void hear(const StateBlock<C>& block, Rows& d, const Rows& out, OwnRows& own) const {
#pragma unroll
        for (int n = 0; n < C::kOwnTiles; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) own[n][i] = party == 0 ? out[n][i] : out[kChunk / 8 - C::kOwnTiles + n][i];
        if constexpr (C::kParties > 1) {
            const float4* from = block.shared + (threadIdx.x + C::kThreads / 2) % C::kThreads;
#pragma unroll
            for (int n = 0; n < kChunk / 8; n++, from += C::kThreads) add(d[n], *from);
#pragma unroll
            for (int n = 0; n < C::kOwnTiles; n++, from += C::kThreads) add(own[n], *from);
        }
#pragma unroll
        for (int n = 0; n < kChunk / 8; n++)
            d[n][0] = -d[n][0], d[n][1] = -d[n][1], d[n][2] = -d[n][2], d[n][3] = -d[n][3];
    }

    // own = gain * own + weights D.
    __device__ __forceinline__ void answer(const StateBlock<C>& block, const Rows& d, OwnRows& own) const {
#pragma unroll
        for (int n = 0; n < C::kOwnTiles; n++) {
            const float2 gain = *reinterpret_cast<const float2*>(block.gain + (party * C::kOwnTiles + n) * 8 + line);
            own[n][0] *= gain.x, own[n][1] *= gain.y, own[n][2] *= gain.x, own[n][3] *= gain.y;
        }
        if (party == 0) addWeighted<0>(block, d, own);
        else addWeighted<C::kParties - 1>(block, d, own);
    }

    // state = gain * state + (ratios * D) keys. Changes d.
    __device__ __forceinline__ void update(const StateBlock<C>& block, Rows& d) {
        const float gain = block.gain[kChunk - 1];
#pragma unroll
        for (int n = 0; n < C::kLines / 8; n++) {
            state[n][0] *= gain, state[n][1] *= gain, state[n][2] *= gain, state[n][3] *= gain;
        }
#pragma unroll
        for (int n = 0; n < kChunk / 8; n++) {
            const float2 ratio = *reinterpret_cast<const float2*>(block.last + n * 8 + line);
            d[n][0] *= ratio.x, d[n][1] *= ratio.y, d[n][2] *= ratio.x, d[n][3] *= ratio.y;
        }
#pragma unroll
        for (int k = 0; k < kChunk / 16; k++) {
            const LeftOperand<C::kSplit> a(d[2 * k], d[2 * k + 1]);
            const auto load = [&](uint32_t (&b)[4], uint32_t tile, int p) {
                loadRightTurned<C::kRowBytes>(b, tile, k * 16, party * C::kLines + p * 16);
            };
            constexpr int kStatePairs = C::kLines / 16, kAtOnce = kStatePairs < 4 ? kStatePairs : 4;
            multiplyPairs<C::kSplit, 0, kAtOnce>(state, kAtOnce, a.hi, a.lo, block.keys, C::kTileBytes, load);
            if constexpr (kStatePairs > 4) {
                multiplyPairs<C::kSplit, 4, kStatePairs>(state, kStatePairs, a.hi, a.lo, block.keys, C::kTileBytes,
                                                         load);
            }
        }
    }

private:
    static constexpr int kPairs = kChunk / 16, kOwnPairs = kPairs / C::kParties;

    static __device__ __forceinline__ float4 quad(const float (&x)[4]) { return make_float4(x[0], x[1], x[2], x[3]); }
    static __device__ __forceinline__ void add(float (&to)[4], float4 x) {
        to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;
    }

    // Row s of D has no weight in the rows before s.
    template <int kParty>
    __device__ __forceinline__ void addWeighted(const StateBlock<C>& block, const Rows& d, OwnRows& own) const {
        addStep<kParty, 0>(block, d, own);
        addStep<kParty, 1>(block, d, own);
        addStep<kParty, 2>(block, d, own);
        addStep<kParty, 3>(block, d, own);
    }

    // own += the part of rows 16 kStep .. 16 kStep + 15 of D.
    template <int kParty, int kStep>
    __device__ __forceinline__ void addStep(const StateBlock<C>& block, const Rows& d, OwnRows& own) const {
        constexpr int kBefore = kParty * kOwnPairs, kFirst = kStep > kBefore ? kStep - kBefore : 0;
        if constexpr (kFirst < kOwnPairs) {
            const LeftOperand<C::kSplit> a(d[2 * kStep], d[2 * kStep + 1]);
            const auto load = [&](uint32_t (&b)[4], uint32_t tile, int p) {
                loadRight<2 * kChunk>(b, tile, (kBefore + p) * 16, kStep * 16);
            };
            multiplyPairs<C::kSplit, kFirst, kOwnPairs>(own, kOwnPairs, a.hi, a.lo, block.weights, C::kWeightBytes,
                                                        load);
        }
    }
};

// Reads U of the rows whose output is the warp's, and 0 past the end of the chunk.
template <class C>
__device__ __forceinline__ void readValues(const ChunkWork& work, const StateColumns<C>& columns, const Tile& tile,
                                           typename StateColumns<C>::OwnRows& u) {
    const int channels = static_cast<int>(work.channels());
    const float* from =
        work.mixed + tile.begin * work.channels() + 2 * work.keyWidth() + int64_t{blockIdx.x} * work.dim;
#pragma unroll
    for (auto& quad : u) quad[0] = quad[1] = quad[2] = quad[3] = 0.0f;
    columns.forEach(u, tile.count, work.dim, [&](float& x, int row, int column) { x = from[row * channels + column]; });
}

// Takes value head blockIdx.x and the columns of blockIdx.y through the chunks of sequence blockIdx.z.
template <class C> __global__ void __launch_bounds__(C::kThreads) stateKernel(ChunkWork work) {
    extern __shared__ __align__(128) uint8_t memory[];
    allowNext();
    const int64_t begin = work.sequences.begin[blockIdx.z], end = work.sequences.end[blockIdx.z];
    if (begin >= end) return waitForPrevious();
    const int head = blockIdx.x, dim = work.dim, width = work.valueHeads * dim;
    const int64_t matrix = int64_t{dim} * dim, stateFloats = matrix * work.valueHeads;
    float* states = work.states + head * matrix;
    const int from = work.from[begin];
    const StateBlock<C> block(memory);
    StateColumns<C> columns;
    columns.forEach(columns.state, C::kDim, C::kDim, [&](float& x, int line, int column) {
        x = from >= 0 && line < dim && column < dim ? states[from * stateFloats + (line * dim + column)] : 0.0f;
    });
    waitForPrevious();

    Tile tile(work, begin);
    block.copyFirst(work, tile);
    if (C::kAhead) block.copySecond(work, tile);
    typename StateColumns<C>::OwnRows u;
    readValues(work, columns, tile, u);
    while (true) {
        const int64_t next = tile.begin + tile.count;
        const Tile following(work, next < end ? next : tile.begin);
        typename StateColumns<C>::Rows d, out;
        typename StateColumns<C>::OwnRows own;
        waitForCopies<C::kAhead ? 1 : 0>();
        __syncthreads();
        columns.recall(block, u, d, out);
        columns.tell(block, d, out);
        // From here on, what recall() read may be overwritten, and what the rest of the step reads has arrived.
        if (!C::kAhead) {
            __syncthreads();
            block.copySecond(work, tile);
        }
        waitForCopies<0>();
        __syncthreads();

        if (next < end) {
            if (C::kAhead) block.copyFirst(work, following);
            readValues(work, columns, following, u);
        }
        columns.hear(block, d, out, own);
        columns.answer(block, d, own);
        float* answers = work.out + tile.begin * width + int64_t{head} * dim;
        columns.forEach(own, tile.count, dim,
                        [&](float& x, int row, int column) { answers[row * width + column] = x; });
        columns.update(block, d);
        const int to = work.to[next - 1];
        if (to >= 0) {
            float* kept = states + to * stateFloats;
            columns.forEach(columns.state, dim, dim,
                            [&](float& x, int line, int column) { kept[line * dim + column] = x; });
        }
        if (next >= end) return;
        __syncthreads();
        if (C::kAhead) block.copySecond(work, following);
        else block.copyFirst(work, following);
        tile = following;
    }
}

template <class C> void launchState(Stream& stream, const ChunkWork& work) {
    allowShared(stateKernel<C>, C::kStateBytes);
    const auto columns = static_cast<unsigned>((work.dim + 16 * C::kGroups - 1) / (16 * C::kGroups));
    const dim3 grid(static_cast<unsigned>(work.valueHeads), columns, static_cast<unsigned>(work.sequences.count));
    launch(stream, stateKernel<C>, grid, dim3(C::kThreads), C::kStateBytes, work);
}

// Returns false and launches nothing if the device has too little shared memory.
template <int kDim, bool kSplit> bool launchChunks(Stream& stream, const ChunkWork& work) {
    using System = Chunks<kDim, kSplit>;
    using Ahead = StateChunks<kDim, kSplit, true, kStateGroups>;
    using Narrow = StateChunks<kDim, kSplit, true, kDim >= 128 ? kNarrowGroups : kStateGroups>;
    using Least = StateChunks<kDim, kSplit, Ahead::kStateBytes <= System::kSystemBytes, kStateGroups>;
    const size_t shared = stream.device().sharedPerBlock;
    if (shared < System::kSystemBytes || shared < Least::kStateBytes) return false;
    allowShared(systemKernel<System>, System::kSystemBytes);
    const dim3 grid(static_cast<unsigned>(work.valueHeads), static_cast<unsigned>(work.tiles.count));
    launch(stream, systemKernel<System>, grid, dim3(System::kThreads), System::kSystemBytes, work);
    const int64_t narrowBlocks = kDim / 16 / Narrow::kGroups * work.valueHeads * work.sequences.count;
    if (shared < Ahead::kStateBytes) launchState<Least>(stream, work);
    else if (narrowBlocks <= stream.device().multiprocessors) launchState<Narrow>(stream, work);
    else launchState<Ahead>(stream, work);
    return true;
}

template <bool kSplit> bool launchSize(Stream& stream, const ChunkWork& work) {
    if (work.dim <= 16) return launchChunks<16, kSplit>(stream, work);
    if (work.dim <= 32) return launchChunks<32, kSplit>(stream, work);
    if (work.dim <= 64) return launchChunks<64, kSplit>(stream, work);
    return launchChunks<128, kSplit>(stream, work);
}

}  // namespace

void deltaRuleInChunks(Stream& stream, const DeltaInputs& in, const HalfRows& queriesAndKeys,
                       const DeltaParameters& parameters, const DeltaShape& shape, const DeltaStates& states,
                       const DeltaBatch& batch, const RowRanges& tiles, void* scratch, float* attended,
                       const RowOutputs& out) {
    requireDelta(shape);
    auto* bytes = static_cast<uint8_t*>(scratch);
    const ChunkWork work = {in.mixed,
                            in.alpha,
                            in.beta,
                            queriesAndKeys,
                            shape.keyHeads,
                            shape.valueHeads,
                            shape.headsPerKey(),
                            shape.dim,
                            states.matrix,
                            batch.from,
                            batch.to,
                            batch.sequences,
                            tiles,
                            reinterpret_cast<int2*>(bytes),
                            bytes + deltaTileListBytes(batch.rows),
                            attended};
    const bool fits = queriesAndKeys.lo ? launchSize<true>(stream, work) : launchSize<false>(stream, work);
    if (!fits)
        deltaRule(stream, {in.mixed, in.alpha, in.beta, nullptr}, DeltaParameters(), shape, states, batch,
                  {attended, {}, {}});
    gatedNorm(stream, attended, in.gate, parameters, shape, batch.rows, out);
}

}  // namespace sharpi::cuda
