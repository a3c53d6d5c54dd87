// Chooses a token on the device, bit for bit by core/rules/sampling_rule.h.
//
// A candidate is one 64-bit number. Its high half is the logit as an integer of the same order, and its low half is the
// inverted id. All candidates differ and a larger one is better, so the set of "the best k" does not depend on the
// order of the work.
//   - Greedy: the best of each tile of the vocabulary, then the best of those. Two launches.
//   - top-k up to kFewCandidates (the default is 40): each tile finds its best k by a binary search for the k-th
//   largest
//     number. All candidates are in registers, each bit takes one barrier, and the search stops as soon as exactly k
//     are left. Then one block finds the best k of those in the same way, ranks and weighs them, and draws. Two
//     launches.
//   - Otherwise: a stable radix sort (CUB's), then the sums of the rule's 1024 chunks with a thread for each, and one
//     block that finds the chunk in which each bound falls and goes through that chunk only.
// The block whose tile holds a token applies its penalties and biases, before it reads the tile.
//
// Rows that are chosen from in one of the first two ways share the two launches: blockIdx.y is the row. What a row
// needs comes with the kernel's parameters, so no copy precedes the launch. The sort needs 16 bytes of memory for each
// token of the vocabulary, so rows that need it take turns.
#include "kernels/sampling/sampling.h"

#include <algorithm>
#include <cub/device/device_radix_sort.cuh>
#include <type_traits>

#include "kernels/rows/device_rows.cuh"
#include "kernels/sampling/candidates.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kTileThreads = 256;
constexpr int kTileItems = 8;
constexpr int kTile = kTileThreads * kTileItems;
constexpr int kMergeThreads = 1024;
constexpr int kMaxMergeItems = 16;
static_assert(kTile == kSamplingTile);

// --- tiles --------------------------------------------------------------------------------------------------------

// A number that exactly `wanted` of the block's items reach: the wanted-th largest, or another one found sooner. Items
// of 0 do not count, and at least `wanted` others must exist. idBits: the number of low bits that can differ between
// ids.
template <int kThreads, int kItems>
__device__ __forceinline__ uint64_t thresholdOf(const uint64_t (&items)[kItems], int wanted, int idBits) {
    constexpr int kWarps = kThreads / 32;
    __shared__ int32_t ofWarp[2][kWarps];  // used in turn, so that one barrier for each round is enough
    const int lane = threadIdx.x % 32;
    uint64_t threshold = 0;
    int turn = 0;
    for (int bit = 63; bit >= 0; --bit, turn ^= 1) {
        if (bit == 31) {  // all inverted ids have the bits above idBits set
            threshold |= 0xffffffffull >> idBits << idBits;
            bit = idBits - 1;
            if (bit < 0) break;
        }
        const uint64_t trial = threshold | 1ull << bit;
        int32_t count = 0;
#pragma unroll
        for (int i = 0; i < kItems; ++i) count += items[i] >= trial;
        count = warpSum(count);
        if (lane == 0) ofWarp[turn][threadIdx.x / 32] = count;
        __syncthreads();
        count = warpSum(lane < kWarps ? ofWarp[turn][lane] : 0);
        if (count >= wanted) threshold = trial;
        if (count == wanted) break;
    }
    return threshold;
}

// Applies the adjustments of tokens [begin, end). Afterwards the whole block sees them.
__device__ __forceinline__ void adjustTile(float* logits, int64_t begin, int64_t end,
                                           const TokenAdjustment* adjustments, int32_t count,
                                           const SamplingRule& rule) {
    if (count == 0) return;
    for (int32_t i = threadIdx.x; i < count; i += blockDim.x) {
        const TokenAdjustment change = adjustments[i];
        if (change.token >= begin && change.token < end)
            logits[change.token] = adjustedLogit(logits[change.token], change, rule);
    }
    __syncthreads();
}

// What a launch chooses from, and its rows. Kernels for few rows exist because all parameters are copied at a launch.
template <int kMost> struct Rows {
    float* logits;
    int64_t vocab;
    const TokenAdjustment* adjustments;
    RowChoice choice[kMost];
};
static_assert(sizeof(Rows<kMostSampledRows>) < 4000, "the parameters of a kernel have at most 4 KiB");

struct TileInput {
    float* logits;
    int64_t vocab;
    const TokenAdjustment* adjustments;
    int32_t count;
};

template <int kMost> __device__ __forceinline__ TileInput inputOf(const Rows<kMost>& rows, const RowChoice& choice) {
    return {rows.logits + choice.row * rows.vocab, rows.vocab, rows.adjustments + choice.firstAdjustment,
            choice.adjustments};
}

// Loads this block's tile, adjusted, as candidates. Those past the vocabulary's end are 0.
__device__ __forceinline__ void loadTile(const TileInput& in, const SamplingRule& rule, uint64_t (&items)[kTileItems]) {
    const int64_t begin = int64_t{blockIdx.x} * kTile, end = min(begin + kTile, in.vocab);
    adjustTile(in.logits, begin, end, in.adjustments, in.count, rule);
#pragma unroll
    for (int i = 0; i < kTileItems; ++i) {
        const int64_t id = begin + i * kTileThreads + threadIdx.x;
        items[i] = id < end ? candidateOf(in.logits[id], id) : 0;
    }
}

// --- greedy -------------------------------------------------------------------------------------------------------

// best: [rows][tiles]
template <int kMost>
__global__ void __launch_bounds__(kTileThreads)
    bestOfTileKernel(const __grid_constant__ Rows<kMost> rows, uint64_t* best) {
    allowNext();
    waitForPrevious();
    const RowChoice& choice = rows.choice[blockIdx.y];
    uint64_t items[kTileItems];
    loadTile(inputOf(rows, choice), choice.rule, items);
    uint64_t mine = items[0];
#pragma unroll
    for (int i = 1; i < kTileItems; ++i) mine = larger(mine, items[i]);
    mine = blockMax<kTileThreads>(mine);
    if (threadIdx.x == 0) best[int64_t{blockIdx.y} * gridDim.x + blockIdx.x] = mine;
}

template <int kMost>
__global__ void __launch_bounds__(kTileThreads)
    bestOfAllKernel(const __grid_constant__ Rows<kMost> rows, const uint64_t* best, int32_t tiles, int32_t* tokens) {
    allowNext();
    waitForPrevious();
    best += int64_t{blockIdx.y} * tiles;
    uint64_t mine = 0;
    for (int32_t i = threadIdx.x; i < tiles; i += kTileThreads) mine = larger(mine, best[i]);
    mine = blockMax<kTileThreads>(mine);
    if (threadIdx.x == 0) tokens[rows.choice[blockIdx.y].token] = keyOf(mine) == kNothing ? -1 : idOf(mine);
}

// --- few candidates -----------------------------------------------------------------------------------------------

__host__ __device__ __forceinline__ int32_t keptOf(const SamplingRule& rule, int64_t vocab) {
    return static_cast<int32_t>(rule.topK > 0 && rule.topK < vocab ? rule.topK : vocab);
}

// candidates: [rows][tiles][most], of which a row fills [tiles][keep]: the best of each tile in any order, then 0 if it
// has fewer.
template <int kMost>
__global__ void __launch_bounds__(kTileThreads)
    bestFewOfTileKernel(const __grid_constant__ Rows<kMost> rows, int32_t most, int idBits, uint64_t* candidates) {
    __shared__ int32_t taken;
    allowNext();
    waitForPrevious();
    if (threadIdx.x == 0) taken = 0;
    const RowChoice& choice = rows.choice[blockIdx.y];
    const int32_t keep = keptOf(choice.rule, rows.vocab);
    uint64_t items[kTileItems];
    loadTile(inputOf(rows, choice), choice.rule, items);
    const int64_t left = rows.vocab - int64_t{blockIdx.x} * kTile;
    const int32_t wanted = static_cast<int32_t>(min(int64_t{keep}, left));
    const uint64_t threshold = thresholdOf<kTileThreads, kTileItems>(items, wanted, idBits);  // has a barrier
    uint64_t* to = candidates + int64_t{blockIdx.y} * gridDim.x * most + int64_t{blockIdx.x} * keep;
#pragma unroll
    for (int i = 0; i < kTileItems; ++i) {
        if (items[i] >= threshold) to[atomicAdd(&taken, 1)] = items[i];
    }
    for (int32_t i = wanted + threadIdx.x; i < keep; i += kTileThreads) to[i] = 0;
}

// Filters the sorted logits of keep <= kFewCandidates candidates and draws one. Each is a chunk of its own.
__device__ int32_t drawFew(const float* logits, int32_t keep, const SamplingRule& rule, double draw) {
    __shared__ double weight[kFewCandidates];  // before temperature
    __shared__ double before[kFewCandidates + 1],
        beforeDrawn[kFewCandidates + 1];  // the sums of the weights before each, then the total
    __shared__ int32_t kept, chosen;
    const int32_t i = threadIdx.x;
    if (i == 0) kept = keep;
    if (i < keep) {
        weight[i] = samplingWeight(logits[i], logits[0], 1.0f);
        beforeDrawn[i + 1] = samplingWeight(logits[i], logits[0], rule.temperature);
        before[i + 1] = weight[i];
    }
    __syncthreads();
    if (i == 0 || i == 32) {  // two warps, so that both sums run at once
        double* sums = i == 0 ? before : beforeDrawn;
        double sum = 0.0;
        sums[0] = 0.0;
        for (int32_t j = 1; j <= keep; ++j) sums[j] = sum = __dadd_rn(sum, sums[j]);
    }
    __syncthreads();
    if (i > 0 && i < keep) {
        const double most = __dmul_rn(rule.topP, before[keep]);
        if (before[i] >= most || weight[i] < rule.minP) atomicMin(&kept, i);
    }
    __syncthreads();
    if (i == 0) chosen = kept - 1;
    __syncthreads();
    if (i < kept && beforeDrawn[i + 1] > __dmul_rn(draw, beforeDrawn[kept])) atomicMin(&chosen, i);
    __syncthreads();
    return chosen;
}

template <int kItems, int kMost>
__global__ void __launch_bounds__(kMergeThreads)
    drawFewKernel(const __grid_constant__ Rows<kMost> rows, const uint64_t* candidates, int32_t tiles, int32_t most,
                  int idBits, int32_t* tokens) {
    __shared__ int32_t taken;
    __shared__ uint64_t unordered[kFewCandidates], ordered[kFewCandidates];
    __shared__ float logits[kFewCandidates];
    allowNext();
    waitForPrevious();
    if (threadIdx.x == 0) taken = 0;
    const RowChoice& choice = rows.choice[blockIdx.y];
    const int32_t keep = keptOf(choice.rule, rows.vocab), count = tiles * keep;
    candidates += int64_t{blockIdx.y} * tiles * most;
    uint64_t items[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
        const int32_t at = i * kMergeThreads + threadIdx.x;
        items[i] = at < count ? candidates[at] : 0;
    }
    const uint64_t threshold = thresholdOf<kMergeThreads, kItems>(items, keep, idBits);  // has a barrier
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
        if (items[i] >= threshold) unordered[atomicAdd(&taken, 1)] = items[i];
    }
    __syncthreads();
    // A candidate's rank is the number of better ones. Eight threads count for each candidate.
    const int32_t i = threadIdx.x / 8;
    int32_t rank = 0;
    const uint64_t mine = i < keep ? unordered[i] : 0;
    for (int32_t j = threadIdx.x % 8; j < keep; j += 8) rank += unordered[j] > mine;
    for (int width = 4; width > 0; width /= 2) rank += __shfl_xor_sync(kWholeWarp, rank, width);
    if (i < keep && threadIdx.x % 8 == 0) {
        ordered[rank] = mine;
        logits[rank] = logitOf(keyOf(mine));
    }
    __syncthreads();
    int32_t chosen = 0;
    if (!isinf(logits[0])) chosen = drawFew(logits, keep, choice.rule, choice.draw);
    if (threadIdx.x == 0) tokens[choice.token] = keyOf(ordered[0]) == kNothing ? -1 : idOf(ordered[chosen]);
}

// --- many candidates ----------------------------------------------------------------------------------------------

// Writes the input of the sort. Keys are inverted, so that the best comes first and equals keep the order of their ids.
__global__ void __launch_bounds__(kTileThreads)
    sortKeysKernel(TileInput in, SamplingRule rule, uint32_t* keys, int32_t* ids) {
    allowNext();
    waitForPrevious();
    const int64_t begin = int64_t{blockIdx.x} * kTile, end = min(begin + kTile, in.vocab);
    adjustTile(in.logits, begin, end, in.adjustments, in.count, rule);
    for (int64_t id = begin + threadIdx.x; id < end; id += kTileThreads) {
        keys[id] = ~keyOf(in.logits[id]);
        ids[id] = static_cast<int32_t>(id);
    }
}

struct Sorted {
    const uint32_t* keys;  // inverted
    int32_t keep;
    int32_t chunk;  // candidates in a chunk

    __device__ __forceinline__ float logit(int32_t i) const { return logitOf(~keys[i]); }
    __host__ __device__ __forceinline__ int32_t chunks() const { return (keep + chunk - 1) / chunk; }
};

struct ChunkSums {
    double *weight, *drawn;  // before and after temperature
    int32_t* unlikely;       // the chunk's first candidate below min-p, or keep
};

__global__ void __launch_bounds__(32) chunkSumsKernel(Sorted sorted, SamplingRule rule, ChunkSums to) {
    allowNext();
    waitForPrevious();
    const int32_t c = blockIdx.x * 32 + threadIdx.x;
    if (c >= sorted.chunks()) return;
    const float highest = sorted.logit(0);
    const int32_t begin = c * sorted.chunk, end = min(begin + sorted.chunk, sorted.keep);
    double weights = 0.0, drawn = 0.0;
    int32_t unlikely = sorted.keep;
#pragma unroll 4
    for (int32_t i = begin; i < end; ++i) {
        const float logit = sorted.logit(i);
        const double weight = samplingWeight(logit, highest, 1.0f);
        weights = __dadd_rn(weights, weight);
        drawn = __dadd_rn(drawn, samplingWeight(logit, highest, rule.temperature));
        if (i > 0 && weight < rule.minP) unlikely = min(unlikely, i);
    }
    to.weight[c] = weights;
    to.drawn[c] = drawn;
    to.unlikely[c] = unlikely;
}

enum class Reach { AtLeast, MoreThan, Never };

struct Walk {
    int32_t index;  // the first candidate through which base + sum reaches the bound, or end
    double inside;  // the sum up to and with it, or of all
};

// Goes through candidates [begin, end) of one chunk and adds up their weights in order. The whole block calls it.
__device__ Walk walkChunk(const Sorted& sorted, int32_t begin, int32_t end, float temperature, double base,
                          double bound, Reach reach) {
    __shared__ double weights[kMergeThreads];
    __shared__ Walk result;
    const float highest = sorted.logit(0);
    bool reached = false;
    if (threadIdx.x == 0) result = {end, 0.0};
    for (int32_t first = begin; first < end; first += kMergeThreads) {
        const int32_t count = min(kMergeThreads, end - first);
        __syncthreads();
        if (threadIdx.x < count)
            weights[threadIdx.x] = samplingWeight(sorted.logit(first + threadIdx.x), highest, temperature);
        __syncthreads();
        if (threadIdx.x != 0 || reached) continue;
        double inside = result.inside;
        for (int32_t i = 0; i < count && !reached; ++i) {
            inside = __dadd_rn(inside, weights[i]);
            const double through = __dadd_rn(base, inside);
            reached = reach == Reach::MoreThan ? through > bound : reach == Reach::AtLeast && through >= bound;
            if (reached) result.index = first + i;
        }
        result.inside = inside;
    }
    __syncthreads();
    const Walk found = result;
    __syncthreads();  // the next call overwrites it
    return found;
}

__global__ void __launch_bounds__(kMergeThreads)
    drawManyKernel(Sorted sorted, const int32_t* ids, SamplingRule rule, double draw, ChunkSums sums, int32_t* token) {
    static_assert(kMergeThreads == kSamplingChunks, "one thread for each chunk");
    __shared__ double base[kSamplingChunks + 1], baseDrawn[kSamplingChunks + 1];
    __shared__ int32_t unlikely, chunk;
    allowNext();
    waitForPrevious();
    const int32_t c = threadIdx.x, chunks = sorted.chunks();
    const float highest = sorted.logit(0);
    if (isinf(highest)) {
        if (c == 0) *token = highest > 0 ? ids[0] : -1;
        return;
    }
    if (c == 0) unlikely = sorted.keep;
    __syncthreads();
    if (c < chunks) {
        base[c + 1] = sums.weight[c];
        baseDrawn[c + 1] = sums.drawn[c];
        atomicMin(&unlikely, sums.unlikely[c]);
    }
    __syncthreads();
    if (c == 0 || c == 32) {
        double* all = c == 0 ? base : baseDrawn;
        double sum = 0.0;
        all[0] = 0.0;
        for (int32_t j = 1; j <= chunks; ++j) all[j] = sum = __dadd_rn(sum, all[j]);
    }
    __syncthreads();

    // Finds the chunk in which the sum reaches top-p's share, then the place in it.
    const double most = __dmul_rn(rule.topP, base[chunks]);
    if (c < chunks && base[c] < most && base[c + 1] >= most) chunk = c;
    __syncthreads();
    int32_t begin = chunk * sorted.chunk, end = min(begin + sorted.chunk, sorted.keep);
    const int32_t filled = walkChunk(sorted, begin, end, 1.0f, base[chunk], most, Reach::AtLeast).index + 1;
    const int32_t kept = min(min(filled, sorted.keep), unlikely);

    // Takes what is left, after temperature, and finds the draw's place in it.
    const int32_t last = (kept - 1) / sorted.chunk;
    const double rest = walkChunk(sorted, last * sorted.chunk, kept, rule.temperature, 0.0, 0.0, Reach::Never).inside;
    const double target = __dmul_rn(draw, __dadd_rn(baseDrawn[last], rest));
    if (c == 0) chunk = last;
    __syncthreads();
    if (c < last && baseDrawn[c + 1] > target) atomicMin(&chunk, c);
    __syncthreads();
    begin = chunk * sorted.chunk;
    end = min(begin + sorted.chunk, kept);
    const int32_t found =
        walkChunk(sorted, begin, end, rule.temperature, baseDrawn[chunk], target, Reach::MoreThan).index;
    if (c == 0) *token = ids[min(found, kept - 1)];
}

// --- launching ----------------------------------------------------------------------------------------------------

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

int64_t tilesOf(int64_t vocab) { return (vocab + kTile - 1) / kTile; }

// Whether the path for few candidates can be taken: the last block must hold the best of every tile.
bool isFew(int64_t vocab, int64_t keep) {
    return keep <= kFewCandidates && tilesOf(vocab) * keep <= int64_t{kMergeThreads} * kMaxMergeItems;
}

// CUB's convention: if memory is null, the call only sets `bytes`.
void sortCandidates(void* memory, size_t& bytes, const uint32_t* keys, uint32_t* sortedKeys, const int32_t* ids,
                    int32_t* sortedIds, int64_t vocab, CUstream_st* stream) {
    check(cub::DeviceRadixSort::SortPairs(memory, bytes, keys, sortedKeys, ids, sortedIds, static_cast<int>(vocab), 0,
                                          32, stream),
          "sorting the candidates");
}

size_t sortBytes(int64_t vocab) {
    size_t bytes = 0;
    sortCandidates(nullptr, bytes, nullptr, nullptr, nullptr, nullptr, vocab, nullptr);
    return bytes;
}

// What rows that are sorted take turns to use. It begins where the candidates of the other rows are: no two launches
// are under way at once.
struct Scratch {
    uint32_t *keys, *sortedKeys;
    int32_t *ids, *sortedIds;
    ChunkSums sums;
    void* sort;        // the rest: sortBytes
    size_t bytes = 0;  // bytes of everything but `sort`

    Scratch(void* buffer, int64_t vocab) {
        const auto take = [&](auto*& pointer, size_t size) {
            pointer =
                reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(static_cast<uint8_t*>(buffer) + bytes);
            bytes += aligned(size);
        };
        take(keys, vocab * sizeof(uint32_t));
        take(sortedKeys, vocab * sizeof(uint32_t));
        take(ids, vocab * sizeof(int32_t));
        take(sortedIds, vocab * sizeof(int32_t));
        take(sums.weight, kSamplingChunks * sizeof(double));
        take(sums.drawn, kSamplingChunks * sizeof(double));
        take(sums.unlikely, kSamplingChunks * sizeof(int32_t));
        sort = static_cast<uint8_t*>(buffer) + bytes;
    }
};

// The rows of one launch.
struct Group {
    float* logits;
    int64_t vocab;
    const TokenAdjustment* adjustments;
    std::vector<RowChoice> choices;

    dim3 grid(int64_t tiles) const { return dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(choices.size())); }
};

// Calls body(rows) with the group as parameters of a kernel.
template <typename Body> void withRows(const Group& group, const Body& body) {
    const auto call = [&](auto rows) {
        rows.logits = group.logits;
        rows.vocab = group.vocab;
        rows.adjustments = group.adjustments;
        std::copy(group.choices.begin(), group.choices.end(), rows.choice);
        body(rows);
    };
    if (group.choices.size() == 1) call(Rows<1>{});
    else if (group.choices.size() <= 8) call(Rows<8>{});
    else call(Rows<kMostSampledRows>{});
}

template <int kMost>
void takeBest(Stream& stream, const Rows<kMost>& rows, const Group& group, uint64_t* best, int32_t* tokens) {
    const int64_t tiles = tilesOf(group.vocab);
    launch(stream, bestOfTileKernel<kMost>, group.grid(tiles), dim3(kTileThreads), 0, rows, best);
    launch(stream, bestOfAllKernel<kMost>, group.grid(1), dim3(kTileThreads), 0, rows, best,
           static_cast<int32_t>(tiles), tokens);
}

template <int kMost>
void sampleFew(Stream& stream, const Rows<kMost>& rows, const Group& group, uint64_t* candidates, int32_t* tokens) {
    int idBits = 0;
    while (int64_t{1} << idBits < group.vocab) ++idBits;
    int32_t most = 0;
    for (const RowChoice& choice : group.choices) most = std::max(most, keptOf(choice.rule, group.vocab));
    const int64_t tiles = tilesOf(group.vocab), count = tiles * most;
    launch(stream, bestFewOfTileKernel<kMost>, group.grid(tiles), dim3(kTileThreads), 0, rows, most, idBits,
           candidates);
    const auto merge = count <= 4 * kMergeThreads   ? drawFewKernel<4, kMost>
                       : count <= 8 * kMergeThreads ? drawFewKernel<8, kMost>
                                                    : drawFewKernel<kMaxMergeItems, kMost>;
    launch(stream, merge, group.grid(1), dim3(kMergeThreads), 0, rows, candidates, static_cast<int32_t>(tiles), most,
           idBits, tokens);
}

void sampleMany(Stream& stream, const TileInput& in, const RowChoice& choice, void* memory, int32_t* tokens) {
    const Scratch scratch(memory, in.vocab);
    const dim3 tiles(static_cast<unsigned>(tilesOf(in.vocab)));
    launch(stream, sortKeysKernel, tiles, dim3(kTileThreads), 0, in, choice.rule, scratch.keys, scratch.ids);
    size_t room = sortBytes(in.vocab);
    if (scratch.bytes + room > samplingScratchBytes(in.vocab))
        throw Error(ErrorKind::Internal, "sampling needs more scratch than was planned");
    sortCandidates(scratch.sort, room, scratch.keys, scratch.sortedKeys, scratch.ids, scratch.sortedIds, in.vocab,
                   stream.handle());
    const int32_t keep = keptOf(choice.rule, in.vocab);
    const Sorted sorted = {scratch.sortedKeys, keep, static_cast<int32_t>(samplingChunk(keep))};
    launch(stream, chunkSumsKernel, dim3((sorted.chunks() + 31) / 32), dim3(32), 0, sorted, choice.rule, scratch.sums);
    launch(stream, drawManyKernel, dim3(1), dim3(kMergeThreads), 0, sorted, scratch.sortedIds, choice.rule, choice.draw,
           scratch.sums, tokens + choice.token);
}

}  // namespace

void sampleTokens(Stream& stream, float* logits, int64_t vocab, const std::vector<RowChoice>& choices,
                  const TokenAdjustment* adjustments, void* scratch, int32_t* tokens) {
    if (vocab <= 0 || vocab >= INT32_MAX)
        throw Error(ErrorKind::Internal, "no kernel samples from " + std::to_string(vocab) + " logits");
    auto* const candidates = static_cast<uint64_t*>(scratch);
    Group best{logits, vocab, adjustments, {}}, few = best;
    const auto flush = [&](Group& group, const auto& choose) {
        if (!group.choices.empty()) withRows(group, choose);
        group.choices.clear();
    };
    const auto takeBestOf = [&](const auto& rows) { takeBest(stream, rows, best, candidates, tokens); };
    const auto sampleFewOf = [&](const auto& rows) { sampleFew(stream, rows, few, candidates, tokens); };
    for (const RowChoice& choice : choices) {
        const bool greedy = choice.rule.temperature == 0;
        if (!greedy && !isFew(vocab, keptOf(choice.rule, vocab))) {
            const TileInput in{logits + choice.row * vocab, vocab, adjustments + choice.firstAdjustment,
                               choice.adjustments};
            sampleMany(stream, in, choice, scratch, tokens);
            continue;
        }
        Group& group = greedy ? best : few;
        group.choices.push_back(choice);
        if (group.choices.size() < kMostSampledRows) continue;
        if (greedy) flush(best, takeBestOf);
        else flush(few, sampleFewOf);
    }
    flush(best, takeBestOf);
    flush(few, sampleFewOf);
}

}  // namespace sharpi::cuda
