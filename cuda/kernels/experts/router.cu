// Experts: chooses those of each token, groups the pairs by expert for the tensor cores, and sums up the answers.
//
// route: a warp takes a row and keeps all of it in registers. It waits for the logits and for no other memory, because
// at decode the kernel costs the latency of a single warp. Expert i belongs to lane i mod 32, which is also the
// accumulator that the CPU's softmax (cpu/kernels/float_ops.cpp) adds it to. So each lane's own ascending sum and the
// contract's tree give the CPU's bits. Ranks are then taken one by one. Each lane knows its best expert and looks for
// its next one while the warp compares, so that a rank costs little more than the warp's two comparisons. Meanwhile a
// second warp computes the shared expert's scale, a dot product. In a step, the warp rehearses while the kernel before
// still writes the logits: it goes through its code with other numbers, so that its instructions and what it reads of
// the rule are in the caches when it counts.
//
// groupExperts: a stable counting sort in two kernels. Each block counts its segment of the pairs by expert. Then every
// block adds up those counts again (re-reading a small table is cheaper than a third launch) and places its pairs: the
// warps in order, and within a warp by the rank among equal lanes. No atomic decides a place, so the order is fixed.
//
// combineExperts: a block for each row. Its time is that of reading the answers once.
#include "kernels/experts/router.h"

#include <algorithm>
#include <type_traits>

#include "kernels/rows/device_rows.cuh"

namespace sharpi::cuda {

namespace {

// --- route --------------------------------------------------------------------------------------------------------

constexpr int kRouteWarps = 8;  // warps of a block, half of them for the scales
constexpr float kSmallQuotient = 0x1p-90f;

// A larger key is better. NaN comes last, so that chosen indices are valid for any logits. 0 is left for experts that
// do not exist or are taken.
__device__ __forceinline__ uint32_t rankKey(float p) { return p >= 0.0f ? __float_as_uint(p) + 2 : 1; }
__device__ __forceinline__ float probabilityOf(uint32_t key) {
    return __uint_as_float(key == 1 ? 0x7fc00000u : key - 2);
}

__device__ __forceinline__ int32_t warpMin(int32_t value) {
    return static_cast<int32_t>(~warpMax(~static_cast<uint32_t>(value)));  // for values that are not negative
}

// Compares the floats as unsigned integers of the same order.
__device__ __forceinline__ float largestOfWarp(float value) {
    const uint32_t bits = __float_as_uint(value);
    const uint32_t largest = warpMax(bits >> 31 ? ~bits : bits | 0x80000000u);
    return __uint_as_float(largest >> 31 ? largest ^ 0x80000000u : ~largest);
}

// e / total, rounded once, without a division for each e. inverse is 1 / total, rounded. Two corrections turn
// e * inverse into the correctly rounded quotient (Markstein), unless it is so small that a remainder is not exact.
__device__ __forceinline__ float quotient(float e, float total, float inverse) {
    const float first = __fmul_rn(e, inverse);
    const float second = fmaf(fmaf(-total, first, e), inverse, first);
    return fmaf(fmaf(-total, second, e), inverse, second);
}

// Turns the lane's logits p into probabilities. A logit of -infinity stands for no expert.
template <int kHeld> __device__ __forceinline__ void softmaxRow(float (&p)[kHeld]) {
    float top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) top = p[i] > top ? p[i] : top;
    top = largestOfWarp(top);
    bool small = false;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        p[i] = portableExp(__fsub_rn(p[i], top));
        sum = __fadd_rn(sum, p[i]);
        small |= p[i] > 0.0f && p[i] < kSmallQuotient;
    }
    const float total = contractTree(sum), inverse = __fdiv_rn(1.0f, total);
    if (small) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) p[i] = __fdiv_rn(p[i], total);
    } else {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) p[i] = quotient(p[i], total, inverse);
    }
}

// A lane's expert 32 * held + lane.
struct Best {
    uint32_t key;
    int32_t held;
};

// The best of a lane's keys; among equals the first.
template <int kHeld> __device__ __forceinline__ Best bestOf(const uint32_t (&keys)[kHeld]) {
    Best best[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) best[i] = {keys[i], i};
#pragma unroll
    for (int width = 1; width < kHeld; width *= 2) {
#pragma unroll
        for (int i = 0; i < kHeld; i += 2 * width) {
            if (best[i + width].key > best[i].key) best[i] = best[i + width];
        }
    }
    return best[0];
}

template <int kHeld> __device__ __forceinline__ void remove(uint32_t (&keys)[kHeld], int32_t held) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) keys[i] = i == held ? 0 : keys[i];
}

// One warp computes scale.weight . row, in the contract's order.
__device__ __forceinline__ void scaleRow(const SharedScale& scale, int64_t row, int lane) {
    constexpr int kDeep = 16;
    const float* x = scale.x + row * scale.cols;
    float sum = 0.0f;
    for (int64_t begin = lane; begin < scale.cols; begin += kDeep * kContractAccumulators) {
        const int left = static_cast<int>(min(scale.cols - begin, int64_t{kDeep * kContractAccumulators}));
        float weights[kDeep], values[kDeep];
#pragma unroll
        for (int i = 0; i < kDeep; ++i) {
            const bool valid = i * kContractAccumulators < left;
            weights[i] = valid ? scale.weight[begin + i * kContractAccumulators] : 0.0f;
            values[i] = valid ? x[begin + i * kContractAccumulators] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kDeep; ++i) {
            if (i * kContractAccumulators < left) sum = fmaf(weights[i], values[i], sum);
        }
    }
    sum = contractTree(sum);
    if (lane == 0) scale.y[row] = sum;
}

// Other kinds than the plain softmax: turns the lane's logits p into scores.
template <int kHeld> __device__ __forceinline__ void scoreLogits(float (&p)[kHeld], Gating gating) {
    if (gating == Gating::Softmax) return softmaxRow(p);
    if (gating == Gating::SoftmaxOfChosen) return;
    const bool root = gating == Gating::RootSoftplus;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) p[i] = root ? __fsqrt_rn(portableSoftplus(p[i])) : portableSigmoid(p[i]);
}

// The key of a group of `size` experts from `first` on. The warp calls it, and every lane gets it.
template <int kHeld>
__device__ __forceinline__ uint32_t groupKey(const uint32_t (&keys)[kHeld], int32_t first, int32_t size, int lane) {
    uint32_t best = 0, second = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        const int32_t expert = i * 32 + lane;
        if (expert < first || expert >= first + size) continue;
        if (keys[i] > best) second = best, best = keys[i];
        else if (keys[i] > second) second = keys[i];
    }
    const uint32_t top = warpMax(best);
    if (size == 1) return top;
    const int holder = __ffs(static_cast<int>(__ballot_sync(kWholeWarp, best == top))) - 1;
    const uint32_t next = warpMax(lane == holder ? second : best);
    return scoreKey(__fadd_rn(scoreOfKey(top), scoreOfKey(next)));
}

// Takes the experts of all groups but the best ones out of the choice.
template <int kHeld>
__device__ __forceinline__ void keepBestGroups(uint32_t (&keys)[kHeld], const RouteRule& rule, int lane) {
    const int32_t size = rule.experts / rule.groups;
    uint32_t mine = 0, kept = 0;  // the key of group `lane`; a bit for each group that stays
    for (int32_t g = 0; g < rule.groups; ++g) {
        const uint32_t key = groupKey(keys, g * size, size, lane);
        if (lane == g) mine = key;
    }
    for (int32_t n = 0; n < rule.groupsUsed; ++n) {
        const uint32_t top = warpMax(mine);
        const int best = __ffs(static_cast<int>(__ballot_sync(kWholeWarp, mine == top))) - 1;
        kept |= 1u << best;
        if (lane == best) mine = 0;
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        const int32_t group = (i * 32 + lane) / size;
        if (keys[i] && !(kept >> group & 1u)) keys[i] = 0;
    }
}

// Turns the chosen scores, by rank in shared memory, into weights. weight: null in a rehearsal.
__device__ __forceinline__ void weighChosen(uint2* picks, const RouteRule& rule, int64_t row, int lane, float* weight) {
    const auto score = [&](int32_t k) { return __uint_as_float(picks[k].x); };
    const bool softmax = rule.gating == Gating::SoftmaxOfChosen;
    if (softmax) {
        float largest = -INFINITY;
        for (int32_t k = 0; k < rule.used; ++k) largest = score(k) > largest ? score(k) : largest;
        __syncwarp();
        for (int32_t k = lane; k < rule.used; k += 32)
            picks[k].x = __float_as_uint(portableExp(__fsub_rn(score(k), largest)));
        __syncwarp();
    }
    float sum = 0.0f;
    for (int32_t k = 0; k < rule.used; ++k) sum = __fadd_rn(sum, score(k));
    const float total = softmax ? sum : weightSum(sum);
    for (int32_t k = lane; k < rule.used; k += 32) {
        const float share = softmax || rule.renormalize ? __fdiv_rn(score(k), total) : score(k);
        const float scaled = __fmul_rn(share, rule.weightScale);
        const float last = rule.outputScale ? __fmul_rn(scaled, rule.outputScale[picks[k].y]) : scaled;
        if (weight) weight[row * rule.used + k] = last;
    }
}

// The best keys by rank, to shared memory: the score that counts for the weight, and the index.
template <int kHeld>
__device__ __forceinline__ void pickAll(const float (&p)[kHeld], uint32_t (&keys)[kHeld], uint2* picks, int32_t used,
                                        int lane) {
    Best mine = bestOf(keys);
    remove(keys, mine.held);
    for (int32_t k = 0; k < used; ++k) {
        const uint32_t key = warpMax(mine.key);
        const Best next = bestOf(keys);
        const int32_t index = warpMin(mine.key == key ? mine.held * 32 + lane : kMostRouted);
        const bool isMine = (index & 31) == lane;
        if (isMine) {
            float score = 0.0f;
#pragma unroll
            for (int i = 0; i < kHeld; ++i) score = i == mine.held ? p[i] : score;
            picks[k] = make_uint2(__float_as_uint(score), static_cast<uint32_t>(index));
            mine = next;
        }
        remove(keys, isMine ? next.held : kHeld);
    }
    __syncwarp();
}

// The experts with the best scores, by rank, to shared memory: as pickAll() does.
template <int kHeld>
__device__ __forceinline__ void pickByScore(const float (&p)[kHeld], uint2* picks, const RouteRule& rule, int lane) {
    uint32_t keys[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        const int32_t expert = i * 32 + lane;
        keys[i] = 0;
        if (expert < rule.experts)
            keys[i] = scoreKey(rule.choiceBias ? __fadd_rn(p[i], rule.choiceBias[expert]) : p[i]);
    }
    if (rule.groups > 1) keepBestGroups(keys, rule, lane);
    pickAll(p, keys, picks, rule.used, lane);
}

// The experts that the row's token names, by rank, to shared memory: their scores and their indices.
template <int kHeld>
__device__ __forceinline__ void pickByToken(const float (&p)[kHeld], uint2* picks, const RouteRule& rule, int64_t row,
                                            int lane) {
    const float* const named = rule.tokenChoices + int64_t{rule.tokens[row]} * rule.used;
    for (int32_t k = 0; k < rule.used; ++k) {
        const auto expert = static_cast<int32_t>(named[k]);
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            if (i * 32 + lane == expert) picks[k] = make_uint2(__float_as_uint(p[i]), static_cast<uint32_t>(expert));
    }
    __syncwarp();
}

// The most common rule: the softmax of all logits, by which experts are chosen and weighed. weight: null in a
// rehearsal.
template <int kHeld>
__device__ __forceinline__ void routePlainly(float (&p)[kHeld], uint2* picks, const RouteRule& rule, int64_t row,
                                             int lane, float* weight) {
    const int32_t experts = rule.experts, used = rule.used;
    softmaxRow(p);
    uint32_t keys[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) keys[i] = i * 32 + lane < experts ? rankKey(p[i]) : 0;

    Best mine = bestOf(keys);
    remove(keys, mine.held);
    float sum = 0.0f;
    for (int32_t k = 0; k < used; ++k) {
        const uint32_t key = warpMax(mine.key);
        const Best next = bestOf(keys);
        const int32_t index = warpMin(mine.key == key ? mine.held * 32 + lane : kMostRouted);
        const bool isMine = (index & 31) == lane;
        if (isMine) mine = next;
        remove(keys, isMine ? next.held : kHeld);
        if (lane == 0) picks[k] = make_uint2(key, index);
        sum = __fadd_rn(sum, probabilityOf(key));
    }
    __syncwarp();
    for (int32_t k = lane; k < used; k += 32) {
        const float best = probabilityOf(picks[k].x);
        const float share = rule.renormalize ? __fdiv_rn(best, sum) : best;
        const float scaled = __fmul_rn(share, rule.weightScale);
        if (weight) weight[row * used + k] = scaled;
    }
}

// kHeld: experts of a lane. The first `routers` warps of a block route a row each. If the block has as many warps
// again, these compute the rows' scales. passes: 2 with a rehearsal. It must not be unrolled, or it would warm up other
// instructions; and it reads constants of the rule alone, since nothing else has been written yet.
template <int kHeld, bool kPlain>
__global__ void __launch_bounds__(kRouteWarps * 32)
    routeKernel(const float* logits, int64_t rows, const __grid_constant__ RouteRule rule, int routers, int passes,
                int32_t* chosen, float* weight, uint32_t* uses, SharedScale scale) {
    extern __shared__ uint2 sharedPicks[];
    allowNext();
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int64_t row = int64_t{blockIdx.x} * routers + warp % routers;
    if (row >= rows) return;
    if (warp >= routers) {
        waitForPrevious();
        return scaleRow(scale, row, lane);
    }
    const int32_t experts = rule.experts, used = rule.used;
    uint2* picks = sharedPicks + warp * used;  // key or score, and index, by rank
#pragma unroll 1
    for (int pass = 2 - passes; pass < 2; ++pass) {
        const bool counts = pass == 1;
        if (counts) waitForPrevious();
        float p[kHeld];
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            p[i] = i * 32 + lane < experts ? static_cast<float>(lane) : -INFINITY;
            if (counts && i * 32 + lane < experts) p[i] = logits[row * experts + i * 32 + lane];
        }
        float* const to = counts ? weight : nullptr;
        if constexpr (kPlain) {
            routePlainly(p, picks, rule, row, lane, to);
        } else {
            scoreLogits(p, rule.gating);
            if (!rule.tokenChoices) pickByScore(p, picks, rule, lane);
            else if (counts) pickByToken(p, picks, rule, row, lane);
            else continue;
            weighChosen(picks, rule, row, lane, to);
        }
        for (int32_t k = lane; counts && k < used; k += 32) {
            chosen[row * used + k] = picks[k].y;
            if (uses) atomicAdd(&uses[picks[k].y], 1u);
        }
        __syncwarp();  // the picks are written anew
    }
}

// --- groupExperts -------------------------------------------------------------------------------------------------

constexpr int kGroupWarps = 8;
constexpr int kPairsPerBlock = 1024;  // at least
constexpr size_t kGroupShared = 48 * 1024;

// How the pairs are divided: segment s is pairs [s * length, (s + 1) * length), and each of its warps has a contiguous
// part.
struct Segments {
    int64_t length, count;
};

Segments segmentsOf(int64_t pairs) {
    const int64_t wanted = std::max<int64_t>(kPairsPerBlock, (pairs + kMaxPairSegments - 1) / kMaxPairSegments);
    const int64_t length = (wanted + kGroupWarps * 32 - 1) / (kGroupWarps * 32) * (kGroupWarps * 32);
    return {length, (pairs + length - 1) / length};
}

// Takes fewer warps if the counts of all experts would not fit in shared memory.
int groupWarps(int32_t experts) {
    int warps = kGroupWarps;
    while (warps > 1 && (size_t(warps) * experts + 2 * (size_t(experts) + 1)) * sizeof(int32_t) > kGroupShared)
        warps /= 2;
    return warps;
}

__global__ void countPairsKernel(const int32_t* chosen, int64_t pairs, int64_t segment, int32_t experts,
                                 int32_t* counts) {
    extern __shared__ int32_t sharedCounts[];
    allowNext();
    for (int32_t e = threadIdx.x; e < experts; e += blockDim.x) sharedCounts[e] = 0;
    waitForPrevious();
    __syncthreads();
    const int64_t begin = blockIdx.x * segment, end = min(begin + segment, pairs);
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) atomicAdd(&sharedCounts[chosen[i]], 1);
    __syncthreads();
    for (int32_t e = threadIdx.x; e < experts; e += blockDim.x)
        counts[int64_t{blockIdx.x} * experts + e] = sharedCounts[e];
}

__device__ __forceinline__ int32_t scanOfWarp(int32_t value, int lane) {  // inclusive
#pragma unroll
    for (int width = 1; width < 32; width *= 2) {
        const int32_t lower = __shfl_up_sync(kWholeWarp, value, width);
        if (lane >= width) value += lower;
    }
    return value;
}

// One warp turns the counts by expert (begin[e]) into the first pair and the first tile of each expert.
__device__ void scanExperts(int32_t* begin, int32_t* tileStart, int32_t experts, int32_t tilePairs, int lane) {
    int32_t pairsBefore = 0, tilesBefore = 0;
    for (int32_t first = 0; first < experts; first += 32) {
        const int32_t e = first + lane;
        const int32_t count = e < experts ? begin[e] : 0;
        const int32_t tiles = (count + tilePairs - 1) / tilePairs;
        const int32_t throughPairs = scanOfWarp(count, lane), throughTiles = scanOfWarp(tiles, lane);
        if (e < experts) {
            begin[e] = pairsBefore + throughPairs - count;
            tileStart[e] = tilesBefore + throughTiles - tiles;
        }
        pairsBefore += __shfl_sync(kWholeWarp, throughPairs, 31);
        tilesBefore += __shfl_sync(kWholeWarp, throughTiles, 31);
    }
    if (lane == 0) {
        begin[experts] = pairsBefore;
        tileStart[experts] = tilesBefore;
    }
}

// Writes the tiles of all experts, and -1 for the unused entries behind them. The whole grid shares the work.
__device__ void writeTiles(const int32_t* begin, const int32_t* tileStart, int32_t experts, int64_t tiles,
                           int32_t tilePairs, const ExpertGrouping& to) {
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < tiles; i += int64_t{gridDim.x} * blockDim.x) {
        if (i >= tileStart[experts]) {
            to.tileExpert[i] = -1;
            to.tileBegin[i] = begin[experts];
            continue;
        }
        int32_t low = 0, high = experts;  // finds the last expert whose tiles begin at or before i; it has at least one
        while (high - low > 1) {
            const int32_t middle = (low + high) / 2;
            (tileStart[middle] <= i ? low : high) = middle;
        }
        to.tileExpert[i] = low;
        to.tileBegin[i] = begin[low] + static_cast<int32_t>(i - tileStart[low]) * tilePairs;
    }
}

__global__ void placePairsKernel(const int32_t* chosen, int64_t pairs, int64_t segment, int32_t used, int32_t experts,
                                 int64_t tiles, int32_t tilePairs, ExpertGrouping to) {
    extern __shared__ int32_t sharedCounts[];
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int32_t* begin = sharedCounts;             // [experts + 1]
    int32_t* tileStart = begin + experts + 1;  // [experts + 1]
    int32_t* next = tileStart + experts + 1;   // [warps][experts]: a warp's counts, then its next places
    int32_t* mine = next + int64_t{warp} * experts;
    allowNext();
    for (int64_t i = threadIdx.x; i < int64_t{warps} * experts; i += blockDim.x) next[i] = 0;
    waitForPrevious();
    __syncthreads();

    const int64_t part = segment / warps;
    const int64_t partBegin = blockIdx.x * segment + warp * part, partEnd = min(partBegin + part, pairs);
    for (int64_t i = partBegin + lane; i < partEnd; i += 32) atomicAdd(&mine[chosen[i]], 1);
    __syncthreads();
    // An expert's pairs come after those of earlier segments and, within the segment, after those of earlier warps.
    for (int32_t e = threadIdx.x; e < experts; e += blockDim.x) {
        int32_t total = 0, before = 0;
#pragma unroll 16
        for (int64_t s = 0; s < gridDim.x; ++s) {
            const int32_t count = to.counts[s * experts + e];
            total += count;
            before += s < blockIdx.x ? count : 0;
        }
        begin[e] = total;
        for (int w = 0; w < warps; ++w) {
            const int32_t count = next[int64_t{w} * experts + e];
            next[int64_t{w} * experts + e] = before;
            before += count;
        }
    }
    __syncthreads();
    if (warp == 0) scanExperts(begin, tileStart, experts, tilePairs, lane);
    __syncthreads();
    writeTiles(begin, tileStart, experts, tiles, tilePairs, to);
    if (blockIdx.x == 0) {
        for (int32_t e = threadIdx.x; e <= experts; e += blockDim.x) to.begin[e] = begin[e];
    }

    for (int64_t first = partBegin; first < partEnd; first += 32) {
        const int64_t i = first + lane;
        const int32_t expert = i < partEnd ? chosen[i] : -1;
        const unsigned equals = __match_any_sync(kWholeWarp, expert);
        const unsigned earlier = equals & ((1u << lane) - 1u);
        int32_t place = 0;
        if (expert >= 0) place = begin[expert] + mine[expert] + __popc(earlier);
        __syncwarp();
        if (expert >= 0) {
            if (earlier == 0) mine[expert] += __popc(equals);
            to.pairOf[i] = place;
            to.pairAt[place] = static_cast<int32_t>(i);
            to.pairToken[place] = static_cast<int32_t>(i / used);
        }
        __syncwarp();
    }
}

// --- combineExperts -----------------------------------------------------------------------------------------------

constexpr int kCombineThreads = 256;

__global__ void __launch_bounds__(kCombineThreads)
    combineKernel(const float* y, const int32_t* pairOf, const float* weight, int32_t used, int64_t cols, bool whole,
                  SharedAnswer shared, AnswerTerms terms, float* out) {
    allowNext();
    waitForPrevious();
    const int64_t row = blockIdx.x;
    const int64_t column = (int64_t{blockIdx.y} * kCombineThreads + threadIdx.x) * 4;
    const int64_t left = cols - column;
    if (left <= 0) return;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    // The loop does not ask for a bias, so that loads of several ranks are in flight.
    const auto sumUp = [&](auto biased) {
#pragma unroll 4
        for (int32_t k = 0; k < used; ++k) {
            const float factor = weight ? weight[row * used + k] : 1.0f;
            const int64_t pair = pairOf ? int64_t{pairOf[row * used + k]} : row * used + k;
            float4 answer = loadQuad(y + pair * cols + column, whole, left);
            if constexpr (decltype(biased)::value) {
                const float4 bias = loadQuad(terms.bias + terms.expert[row * used + k] * cols + column, whole, left);
                answer = make_float4(__fadd_rn(answer.x, bias.x), __fadd_rn(answer.y, bias.y),
                                     __fadd_rn(answer.z, bias.z), __fadd_rn(answer.w, bias.w));
            }
            sum.x = fmaf(factor, answer.x, sum.x);
            sum.y = fmaf(factor, answer.y, sum.y);
            sum.z = fmaf(factor, answer.z, sum.z);
            sum.w = fmaf(factor, answer.w, sum.w);
        }
    };
    if (terms.bias) sumUp(std::true_type());
    else sumUp(std::false_type());
    if (shared.y) {
        const float factor = shared.scale ? portableSigmoid(shared.scale[row]) : 1.0f;
        const float4 answer = loadQuad(shared.y + row * cols + column, whole, left);
        sum = make_float4(fmaf(factor, answer.x, sum.x), fmaf(factor, answer.y, sum.y), fmaf(factor, answer.z, sum.z),
                          fmaf(factor, answer.w, sum.w));
    }
    float* to = out + row * cols + column;
    if (!terms.adds) return storeQuad(to, sum, whole, left);
    const float4 old = loadQuad(to, whole, left);
    storeQuad(
        to,
        make_float4(__fadd_rn(old.x, sum.x), __fadd_rn(old.y, sum.y), __fadd_rn(old.z, sum.z), __fadd_rn(old.w, sum.w)),
        whole, left);
}

bool isAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

void refuseExperts(int32_t experts) {
    throw Error(ErrorKind::InvalidArgument,
                std::to_string(experts) + " experts in a layer are more than the GPU can route");
}

}  // namespace

void route(Stream& stream, const float* logits, int64_t rows, const RouteRule& rule, int32_t* chosen, float* weight,
           uint32_t* uses, const SharedScale& scale) {
    if (rows == 0) return;
    if (rule.experts > kMostRouted) refuseExperts(rule.experts);
    if (rule.groups < 1 || rule.groups > kMostGroups || rule.experts % rule.groups != 0 ||
        rule.groupsUsed > rule.groups || int64_t{rule.experts} / rule.groups * rule.groupsUsed < rule.used) {
        throw Error(ErrorKind::InvalidArgument, std::to_string(rule.groupsUsed) + " of " + std::to_string(rule.groups) +
                                                    " groups of experts cannot be routed on the GPU");
    }
    const bool isStep = rows <= 64;
    const int routers = isStep ? 1 : kRouteWarps / 2, passes = isStep ? 2 : 1;
    const bool plain = rule.gating == Gating::Softmax && rule.groups == 1 && !rule.choiceBias && !rule.outputScale &&
                       !rule.tokenChoices;
    const auto kernel = rule.experts <= 128   ? plain ? routeKernel<4, true> : routeKernel<4, false>
                          : rule.experts <= 256 ? plain ? routeKernel<8, true> : routeKernel<8, false>
                          : rule.experts <= 512 ? plain ? routeKernel<16, true> : routeKernel<16, false>
                          : plain ? routeKernel<32, true>
                                              : routeKernel<32, false>;
    launch(stream, kernel, dim3(static_cast<unsigned>((rows + routers - 1) / routers)),
           dim3((scale.x ? 2 : 1) * routers * 32), size_t(routers) * rule.used * sizeof(uint2), logits, rows, rule,
           routers, passes, chosen, weight, uses, scale);
}

ExpertGroups groupExperts(Stream& stream, const int32_t* chosen, int64_t rows, int32_t used, int32_t experts,
                          const ExpertGrouping& to) {
    const int64_t pairs = rows * used;
    if (pairs == 0) return {};
    const int64_t tiles = maxExpertTiles(pairs, experts);
    const int32_t tilePairs = expertTilePairs(stream.device());
    const Segments segments = segmentsOf(pairs);
    const dim3 grid(static_cast<unsigned>(segments.count));
    const int warps = groupWarps(experts);
    const size_t shared = (size_t(warps) * experts + 2 * (size_t(experts) + 1)) * sizeof(int32_t);
    if (shared > kGroupShared) refuseExperts(experts);
    launch(stream, countPairsKernel, grid, dim3(kGroupWarps * 32), sizeof(int32_t) * experts, chosen, pairs,
           segments.length, experts, to.counts);
    launch(stream, placePairsKernel, grid, dim3(warps * 32), shared, chosen, pairs, segments.length, used, experts,
           tiles, tilePairs, to);
    return {to.begin, to.pairToken, to.tileExpert, to.tileBegin, pairs, tiles, tilePairs};
}

void combineExperts(Stream& stream, const float* y, const int32_t* pairOf, const float* weight, int64_t rows,
                    int32_t used, int64_t cols, float* to, const SharedAnswer& shared, const AnswerTerms& terms) {
    if (rows == 0 || cols == 0) return;
    const bool whole = cols % 4 == 0 && isAligned(y) && isAligned(shared.y) && isAligned(to) && isAligned(terms.bias);
    const int64_t pieces = (cols + 4 * kCombineThreads - 1) / (4 * kCombineThreads);
    launch(stream, combineKernel, dim3(static_cast<unsigned>(rows), static_cast<unsigned>(pieces)),
           dim3(kCombineThreads), 0, y, pairOf, weight, used, cols, whole, shared, terms, to);
}

}  // namespace sharpi::cuda
