// Scores tokens on the device, bit for bit by core/rules/log_softmax.h, and applies masks.
//
// A block of 1024 threads scores a row: thread j has the rule's lane j, so neighbouring threads read neighbouring
// logits. Each thread remembers the best of its own candidates; a round finds the best of all threads, whose thread
// then looks for its next one. There are as many rounds as likeliest tokens are wanted, and at least one.
//
// The token of a row is known only once it is chosen, and its logit may then have been adjusted. So rows that are
// scored are adjusted before they are sampled, by a kernel that keeps the logits in the list of adjustments.
#include "kernels/sampling/scores.h"

#include <algorithm>

#include "kernels/sampling/candidates.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kMaskThreads = 256, kAdjustThreads = 128;

template <typename Row> struct RowList {
    Row row[kMostSampledRows];
};
static_assert(sizeof(RowList<RowChoice>) < 4000, "the parameters of a kernel have at most 4 KiB");

// --- scores -------------------------------------------------------------------------------------------------------

// The best candidate of this thread's lane that is worse than `limit`; 0 if there is none.
__device__ __forceinline__ uint64_t bestBelow(const float* logits, int32_t vocab, uint64_t limit) {
    uint64_t best = 0;
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < vocab; i += kScoreLanes) {
        const uint64_t candidate = candidateOf(logits[i], i);
        if (candidate < limit) best = larger(best, candidate);
    }
    return best;
}

// The sum of exp(logit - highest) over this thread's lane.
__device__ __forceinline__ double laneSum(const float* logits, int32_t vocab, float highest) {
    double sum = 0.0;
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < vocab; i += kScoreLanes) {
        const float logit = logits[i];
        const float weight = isnan(logit) ? 0.0f : portableExp(__fsub_rn(logit, highest));
        sum = __dadd_rn(sum, static_cast<double>(weight));
    }
    return sum;
}

__global__ void __launch_bounds__(kScoreLanes) scoreRowsKernel(const __grid_constant__ RowList<ScoredRow> rows,
                                                               const float* logits, int32_t vocab, RowScore* scores) {
    __shared__ uint64_t found[kMostBest];
    __shared__ double lanes[kScoreLanes];
    __shared__ double logOfTotal;
    allowNext();
    waitForPrevious();
    const ScoredRow& row = rows.row[blockIdx.x];
    logits += int64_t{row.row} * vocab;
    const int32_t wanted = max(row.best, 1);
    uint64_t mine = bestBelow(logits, vocab, ~uint64_t{0});
    for (int32_t k = 0; k < wanted; ++k) {
        const uint64_t best = blockMax<kScoreLanes>(mine);  // in thread 0; its barrier ends the reads of found[k - 1]
        if (threadIdx.x == 0) found[k] = best;
        __syncthreads();
        // All candidates differ: at most one thread has it.
        if (mine == found[k] && k + 1 < wanted) mine = bestBelow(logits, vocab, mine);
    }
    const float highest = logitOf(keyOf(found[0]));
    lanes[threadIdx.x] = isinf(highest) ? 0.0 : laneSum(logits, vocab, highest);
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0.0;
#pragma unroll 8
        for (int32_t j = 0; j < kScoreLanes; ++j) total = __dadd_rn(total, lanes[j]);
        logOfTotal = isinf(highest) ? 0.0 : portableLog(total);
    }
    __syncthreads();
    RowScore& to = scores[row.slot];
    if (threadIdx.x == 0) {
        to.logOfTotal = logOfTotal;
        to.highest = highest;
    }
    if (threadIdx.x < row.best) {
        const uint64_t best = found[threadIdx.x];
        to.best[threadIdx.x] = idOf(best);
        to.bestLogProbability[threadIdx.x] = logProbability(logitOf(keyOf(best)), highest, logOfTotal);
    }
}

__global__ void __launch_bounds__(kAdjustThreads)
    scoreChosenKernel(const __grid_constant__ RowList<RowChoice> rows, const float* logits, int64_t vocab,
                      const TokenAdjustment* adjustments, const int32_t* tokens, RowScore* scores) {
    __shared__ float logit;
    allowNext();
    waitForPrevious();
    const RowChoice& choice = rows.row[blockIdx.x];
    const int32_t token = tokens[choice.token];
    if (threadIdx.x == 0) logit = token < 0 ? -INFINITY : logits[int64_t{choice.row} * vocab + token];
    __syncthreads();
    for (int32_t i = threadIdx.x; i < choice.adjustments; i += kAdjustThreads) {
        const TokenAdjustment& change = adjustments[choice.firstAdjustment + i];
        if (change.token == token) logit = change.bias;  // a list names a token once
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    RowScore& score = scores[choice.token];
    score.logProbability = logProbability(logit, score.highest, score.logOfTotal);
}

// --- what comes before sampling -----------------------------------------------------------------------------------

__global__ void __launch_bounds__(kAdjustThreads)
    adjustScoredKernel(const __grid_constant__ RowList<RowChoice> rows, float* logits, int64_t vocab,
                       TokenAdjustment* adjustments) {
    allowNext();
    waitForPrevious();
    const RowChoice& choice = rows.row[blockIdx.x];
    float* const row = logits + int64_t{choice.row} * vocab;
    for (int32_t i = threadIdx.x; i < choice.adjustments; i += kAdjustThreads) {
        TokenAdjustment& change = adjustments[choice.firstAdjustment + i];
        const float logit = row[change.token];
        row[change.token] = adjustedLogit(logit, change, choice.rule);
        change.bias = logit;
    }
}

__global__ void __launch_bounds__(kMaskThreads)
    maskRowsKernel(const __grid_constant__ RowList<int16_t> rows, float* logits, int64_t vocab, const uint32_t* words) {
    allowNext();
    waitForPrevious();
    const int64_t id = int64_t{blockIdx.x} * kMaskThreads + threadIdx.x;
    if (id >= vocab) return;
    words += blockIdx.y * maskWords(vocab);
    if (!maskAllows(words, id)) logits[int64_t{rows.row[blockIdx.y]} * vocab + id] = -INFINITY;
}

// Calls body(list, first, count) for groups of as many rows as a launch takes.
template <typename Row, typename Body> void forGroups(const std::vector<Row>& rows, const Body& body) {
    for (size_t first = 0; first < rows.size(); first += kMostSampledRows) {
        const size_t count = std::min<size_t>(kMostSampledRows, rows.size() - first);
        RowList<Row> list{};
        std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(first), count, list.row);
        body(list, first, static_cast<unsigned>(count));
    }
}

}  // namespace

void scoreRows(Stream& stream, const float* logits, int64_t vocab, const std::vector<ScoredRow>& rows,
               RowScore* scores) {
    for (const ScoredRow& row : rows) {
        if (row.best < 0 || row.best > std::min<int64_t>(kMostBest, vocab))
            throw Error(ErrorKind::Internal, "a score cannot name " + std::to_string(row.best) + " tokens");
    }
    forGroups(rows, [&](const auto& list, size_t, unsigned count) {
        launch(stream, scoreRowsKernel, dim3(count), dim3(kScoreLanes), 0, list, logits, static_cast<int32_t>(vocab),
               scores);
    });
}

void scoreChosen(Stream& stream, const float* logits, int64_t vocab, const std::vector<RowChoice>& choices,
                 const TokenAdjustment* adjustments, const int32_t* tokens, RowScore* scores) {
    forGroups(choices, [&](const auto& list, size_t, unsigned count) {
        launch(stream, scoreChosenKernel, dim3(count), dim3(kAdjustThreads), 0, list, logits, vocab, adjustments,
               tokens, scores);
    });
}

void adjustScored(Stream& stream, float* logits, int64_t vocab, const std::vector<RowChoice>& choices,
                  TokenAdjustment* adjustments) {
    forGroups(choices, [&](const auto& list, size_t, unsigned count) {
        launch(stream, adjustScoredKernel, dim3(count), dim3(kAdjustThreads), 0, list, logits, vocab, adjustments);
    });
}

void maskRows(Stream& stream, float* logits, int64_t vocab, const std::vector<int16_t>& rows, const uint32_t* words) {
    const auto blocks = static_cast<unsigned>((vocab + kMaskThreads - 1) / kMaskThreads);
    forGroups(rows, [&](const auto& list, size_t first, unsigned count) {
        launch(stream, maskRowsKernel, dim3(blocks, count), dim3(kMaskThreads), 0, list, logits, vocab,
               words + first * static_cast<size_t>(maskWords(vocab)));
    });
}

}  // namespace sharpi::cuda
