// How the CPU chooses experts and weighs them, against the rule as one would write it down in doubles.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "cpu/operations/cpu_router.h"
#include "seed.h"

using namespace sharpi;

namespace {

struct Choice {
    std::vector<int32_t> experts;
    std::vector<double> weights;
};

std::vector<double> scoresOf(const RouterCall& call, const std::vector<float>& logits) {
    std::vector<double> scores(logits.begin(), logits.end());
    if (call.gating == Gating::Sigmoid) {
        for (double& s : scores) s = 1.0 / (1.0 + std::exp(-s));
    } else if (call.gating == Gating::Softmax) {
        double sum = 0;
        for (double& s : scores) sum += s = std::exp(s);
        for (double& s : scores) s /= sum;
    }
    return scores;
}

// The experts that a choice by `ranked` may take.
std::vector<bool> allowedBy(const RouterCall& call, const std::vector<double>& ranked) {
    const int32_t size = call.count / call.groups;
    std::vector<std::pair<double, int32_t>> groups;
    for (int32_t g = 0; g < call.groups; ++g) {
        std::vector<double> of(ranked.begin() + g * size, ranked.begin() + (g + 1) * size);
        std::sort(of.rbegin(), of.rend());
        groups.emplace_back(-(of[0] + (size > 1 ? of[1] : 0.0)), g);
    }
    std::sort(groups.begin(), groups.end());
    std::vector<bool> allowed(ranked.size());
    for (int32_t i = 0; i < call.groupsUsed; ++i)
        std::fill_n(allowed.begin() + groups[static_cast<size_t>(i)].second * size, size, true);
    return allowed;
}

Choice plain(const RouterCall& call, const std::vector<float>& logits) {
    const std::vector<double> scores = scoresOf(call, logits);
    std::vector<double> ranked = scores;
    for (size_t e = 0; call.choiceBias && e < ranked.size(); ++e) ranked[e] += call.choiceBias[e];
    const std::vector<bool> allowed = allowedBy(call, ranked);
    Choice choice;
    std::vector<int32_t> order;
    for (int32_t e = 0; e < call.count; ++e)
        if (allowed[static_cast<size_t>(e)]) order.push_back(e);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return ranked[static_cast<size_t>(a)] > ranked[static_cast<size_t>(b)];
    });
    double sum = 0;
    for (int32_t k = 0; k < call.used; ++k) {
        const int32_t e = order[static_cast<size_t>(k)];
        const double score = scores[static_cast<size_t>(e)];
        choice.experts.push_back(e);
        choice.weights.push_back(call.gating == Gating::SoftmaxOfChosen ? std::exp(score) : score);
        sum += choice.weights.back();
    }
    for (size_t k = 0; k < choice.weights.size(); ++k) {
        double& weight = choice.weights[k];
        if (call.gating == Gating::SoftmaxOfChosen) weight /= sum;
        else if (call.renormalize) weight /= std::max(sum, 0x1p-14);
        weight *= static_cast<double>(call.weightScale);
        if (call.outputScale) weight *= static_cast<double>(call.outputScale[choice.experts[k]]);
    }
    return choice;
}

Choice routed(const RouterCall& call, std::vector<float> logits) {
    Choice choice;
    choice.experts.resize(static_cast<size_t>(call.used), -1);
    std::vector<float> weights(static_cast<size_t>(call.used), NAN);
    CpuRouter(cpu::kernels(), call).route(logits.data(), choice.experts.data(), weights.data());
    choice.weights.assign(weights.begin(), weights.end());
    return choice;
}

void expectSame(const Choice& got, const Choice& expected) {
    ASSERT_EQ(got.experts, expected.experts);
    for (size_t k = 0; k < got.weights.size(); ++k)
        ASSERT_NEAR(got.weights[k], expected.weights[k], 4e-6 * std::abs(expected.weights[k]) + 1e-12) << "rank " << k;
}

struct Shape {
    int32_t count, used, groups, groupsUsed;
};

TEST(CpuRouter, EveryKindIsThePlainRule) {
    std::mt19937 random(testSeed(41));
    std::normal_distribution<float> normal;
    for (const Shape& s :
         {Shape{8, 2, 1, 1}, {128, 8, 1, 1}, {40, 6, 5, 2}, {64, 8, 8, 4}, {6, 1, 6, 2}, {1, 1, 1, 1}}) {
        std::vector<float> choiceBias(static_cast<size_t>(s.count)), outputScale(choiceBias.size());
        for (float& v : choiceBias) v = normal(random) * 0.2f;
        for (float& v : outputScale) v = 1.0f + 0.3f * normal(random);
        for (const Gating gating : {Gating::Softmax, Gating::Sigmoid, Gating::SoftmaxOfChosen}) {
            for (int variant = 0; variant < 8; ++variant) {
                RouterCall call;
                call.count = s.count;
                call.used = s.used;
                call.groups = s.groups;
                call.groupsUsed = s.groupsUsed;
                call.gating = gating;
                call.renormalize = variant & 1;
                call.choiceBias = variant & 2 ? choiceBias.data() : nullptr;
                call.outputScale = variant & 4 ? outputScale.data() : nullptr;
                call.weightScale = variant & 4 ? 2.5f : 1.0f;
                for (int round = 0; round < 20; ++round) {
                    SCOPED_TRACE(std::to_string(s.count) + " experts, gating " +
                                 std::to_string(static_cast<int>(gating)) + ", variant " + std::to_string(variant));
                    std::vector<float> logits(static_cast<size_t>(s.count));
                    for (float& v : logits) v = 2.0f * normal(random);
                    expectSame(routed(call, logits), plain(call, logits));
                    if (HasFatalFailure()) return;
                }
            }
        }
    }
}

RouterCall callOf(Gating gating, int32_t count, int32_t used) {
    RouterCall call;
    call.gating = gating;
    call.count = count;
    call.used = used;
    return call;
}

TEST(CpuRouter, EqualScoresGoToTheLowerIndexAndZerosAreEqual) {
    const std::vector<float> logits = {-0.0f, 1.0f, 0.0f, 1.0f, -1.0f};
    EXPECT_EQ(routed(callOf(Gating::SoftmaxOfChosen, 5, 4), logits).experts, (std::vector<int32_t>{1, 3, 0, 2}));
    EXPECT_EQ(routed(callOf(Gating::Sigmoid, 5, 4), logits).experts, (std::vector<int32_t>{1, 3, 0, 2}));
}

TEST(CpuRouter, EqualGroupsGoToTheLowerIndex) {
    RouterCall call = callOf(Gating::Sigmoid, 6, 2);
    call.groups = 3;
    call.groupsUsed = 1;
    EXPECT_EQ(routed(call, {0.5f, 1.0f, 1.0f, 0.5f, 0.75f, 0.5f}).experts, (std::vector<int32_t>{1, 0}));
}

TEST(CpuRouter, ChoicesAreValidWhateverTheLogits) {
    for (const Gating gating : {Gating::Softmax, Gating::Sigmoid, Gating::SoftmaxOfChosen}) {
        const std::vector<float> logits = {NAN, -INFINITY, NAN, 1.0f};
        std::vector<int32_t> experts = routed(callOf(gating, 4, 4), logits).experts;
        if (gating != Gating::Softmax) {
            EXPECT_EQ(experts, (std::vector<int32_t>{3, 1, 0, 2}));
        }
        std::sort(experts.begin(), experts.end());
        EXPECT_EQ(experts, (std::vector<int32_t>{0, 1, 2, 3}));
    }
}

TEST(CpuRouter, TinySumsDoNotBlowWeightsUp) {
    const Choice choice = routed(callOf(Gating::Sigmoid, 3, 2), {-30.0f, -31.0f, -40.0f});
    EXPECT_NEAR(choice.weights[0], std::exp(-30.0) * 0x1p14, 1e-14);
}

// A bias of the choice may prefer a group whose scores are lower, and a biased sum may be negative.
TEST(CpuRouter, GroupsGoByBiasedScores) {
    RouterCall call = callOf(Gating::Sigmoid, 4, 2);
    call.groups = 2;
    call.groupsUsed = 1;
    const float bias[] = {-2.0f, -2.0f, 0.0f, 0.0f};
    call.choiceBias = bias;
    const Choice choice = routed(call, {3.0f, 3.0f, -3.0f, -2.0f});
    EXPECT_EQ(choice.experts, (std::vector<int32_t>{3, 2}));
    EXPECT_NEAR(choice.weights[0] + choice.weights[1], 1.0, 1e-6);
}

}  // namespace
