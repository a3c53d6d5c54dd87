// Chooses the experts of each token, and sums up their answers.
#pragma once

#include "core/rules/routing_rule.h"
#include "kernels/matmul/matmul.h"

namespace sharpi::cuda {

// The shared expert's scale of each row t, which the routing kernel computes too: y[t] = weight . x[t, :], with the
// bits of the contract's float products. If x is null, there is none.
struct SharedScale {
    const float *x = nullptr, *weight = nullptr;  // [rows, cols], [cols]
    int64_t cols = 0;
    float* y = nullptr;  // [rows]
};

constexpr int32_t kMostRouted = 1024;  // experts of a layer: 32 for each lane

// The rule of core/rules/routing_rule.h. RoutingSpec says what the members mean.
struct RouteRule {
    int32_t experts = 0, used = 0;
    bool renormalize = true;
    float weightScale = 1.0f;
    Gating gating = Gating::Softmax;
    int32_t groups = 1, groupsUsed = 1;
    const float *choiceBias = nullptr, *outputScale = nullptr;
    // [vocab, used]: the experts of each token, by rank; null: the scores choose. tokens: of the rows.
    const float* tokenChoices = nullptr;
    const int32_t* tokens = nullptr;
};
constexpr int32_t kMostGroups = 32;

// Chooses each row's experts by rank, and weighs them, with the CPU's bits. chosen, weight: [rows, used]. If uses
// ([experts]) is not null, each choice adds 1 to its expert's count. At most kMostRouted experts and kMostGroups
// groups.
void route(Stream& stream, const float* logits, int64_t rows, const RouteRule& rule, int32_t* chosen, float* weight,
           uint32_t* uses = nullptr, const SharedScale& scale = {});

// Groups the pairs of `chosen` by expert, and by ascending row for each expert, and cuts the groups into tiles.
// pairOf[t, k]: the new place of pair (t, k); pairAt: the pair at each place. counts is scratch. All
// maxExpertTiles(rows * used, experts) tiles are written. Returns the groups; without pairs there are none.
struct ExpertGrouping {
    int32_t *begin = nullptr, *pairToken = nullptr, *pairOf = nullptr, *tileExpert = nullptr, *tileBegin = nullptr;
    int32_t *counts = nullptr, *pairAt = nullptr;
};
constexpr int64_t kMaxPairSegments = 64;  // counts: [kMaxPairSegments, experts]
size_t expertGroupingBytes(int64_t rows, int32_t used, int32_t experts);
ExpertGrouping expertGroupingOver(void* buffer, int64_t rows, int32_t used, int32_t experts);  // 256-byte aligned
ExpertGroups groupExperts(Stream& stream, const int32_t* chosen, int64_t rows, int32_t used, int32_t experts,
                          const ExpertGrouping& to);

// to[t, :] += sum over ascending ranks k of weight[t, k] * (y[pairOf[t, k], :] + bias), starting at +0, by fma; then
// the shared answer. If pairOf is null, y is in the order of the pairs: pair (t, k) is at t * used + k. If weight is
// null, weights are 1.
void combineExperts(Stream& stream, const float* y, const int32_t* pairOf, const float* weight, int64_t rows,
                    int32_t used, int64_t cols, float* to, const SharedAnswer& shared = {},
                    const AnswerTerms& terms = {});

}  // namespace sharpi::cuda
