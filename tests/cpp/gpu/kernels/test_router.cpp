// Routing, grouping and summing of experts on the GPU, against plain host copies of the same rules.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>

#include "core/half.h"
#include "core/portable.h"
#include "cpu/kernels.h"
#include "cpu/operations/cpu_router.h"
#include "gpu_test.h"
#include "kernels/experts/router.h"

namespace sharpi::cuda {
namespace {

class Router : public GpuTest {
protected:
    // Rows of `used` different experts. `skew` makes experts with low numbers more likely.
    std::vector<int32_t> randomChoice(int64_t rows, int32_t used, int32_t experts, double skew) {
        std::vector<int32_t> chosen;
        std::uniform_real_distribution<double> uniform(0, 1);
        for (int64_t t = 0; t < rows; ++t) {
            std::set<int32_t> taken;
            while (static_cast<int32_t>(taken.size()) < used) {
                const auto e =
                    std::min<int32_t>(experts - 1, static_cast<int32_t>(experts * std::pow(uniform(random()), skew)));
                if (taken.insert(e).second) chosen.push_back(e);
            }
        }
        return chosen;
    }
};

TEST_F(Router, RoutesAsTheCpuDoes) {
    struct Case {
        int64_t rows;
        int32_t experts, used;
        bool renormalize;
        float scale;
        int distinct;  // the number of different logits; 0: any
    };
    const Case cases[] = {{1, 8, 2, true, 1, 0},       {5, 64, 8, false, 1, 0},   {100, 128, 8, true, 2.5f, 0},
                          {513, 128, 8, true, 1, 3},   {70, 60, 4, true, 1, 2},   {33, 256, 8, true, 1, 0},
                          {9, 1000, 40, true, 1, 50},  {3, 1024, 1, false, 1, 0}, {65, 512, 10, true, 16, 0},
                          {4, 7, 7, true, 1, 1},       {1, 1, 1, true, 1, 0},     {300, 33, 32, false, 0.5f, 4},
                          {1, 129, 8, true, 1, 0},     {8, 257, 8, true, 1, 3},   {2, 513, 33, true, 1, 0},
                          {7, 1024, 1024, true, 1, 9}, {1, 256, 8, true, 1, 1}};
    for (const Case& c : cases) {
        auto logits = randomFloats(c.rows * c.experts, 3.0f);
        if (c.distinct) {
            for (float& l : logits) l = static_cast<float>(random()() % c.distinct);
        }
        std::vector<int32_t> expectedChosen;
        std::vector<float> expectedWeight;
        std::vector<int32_t> order(c.experts);
        for (int64_t t = 0; t < c.rows; ++t) {
            std::vector<float> p(logits.begin() + t * c.experts, logits.begin() + (t + 1) * c.experts);
            cpu::kernels().softmax(p.data(), c.experts);
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return p[a] > p[b]; });
            float sum = 0;
            for (int32_t k = 0; k < c.used; ++k) sum += p[order[k]];
            for (int32_t k = 0; k < c.used; ++k) {
                const float share = c.renormalize ? p[order[k]] / sum : p[order[k]];
                expectedChosen.push_back(order[k]);
                expectedWeight.push_back(share * c.scale);
            }
        }
        const DeviceArray<float> deviceLogits(logits), weight(c.rows * c.used);
        const DeviceArray<int32_t> chosen(c.rows * c.used);
        route(stream(), deviceLogits.get(), c.rows, {c.experts, c.used, c.renormalize, c.scale}, chosen.get(),
              weight.get());
        ASSERT_EQ(expectedChosen, chosen.read()) << c.experts << " experts";
        ASSERT_TRUE(sameBits(expectedWeight, weight.read())) << c.experts << " experts";
    }
}

// Kinds of gating, biases of the choice, groups and scales, in every number of experts of a lane.
TEST_F(Router, RoutesByEveryRuleAsTheCpuDoes) {
    struct Case {
        int32_t experts, used, groups, groupsUsed;
    };
    for (const Case& c : {Case{8, 2, 1, 1}, Case{128, 8, 8, 4}, Case{60, 6, 5, 2}, Case{256, 8, 8, 3},
                          Case{33, 4, 1, 1}, Case{512, 10, 32, 7}, Case{6, 1, 6, 1}, Case{1000, 40, 4, 2}}) {
        const auto choiceBias = randomFloats(c.experts, 0.3f), outputScale = randomFloats(c.experts, 2.0f);
        const DeviceArray<float> deviceBias(choiceBias), deviceScale(outputScale);
        for (const Gating gating : {Gating::Softmax, Gating::Sigmoid, Gating::SoftmaxOfChosen, Gating::RootSoftplus}) {
            for (int variant = 0; variant < 16; ++variant) {
                SCOPED_TRACE(std::to_string(c.experts) + " experts, gating " +
                             std::to_string(static_cast<int>(gating)) + ", variant " + std::to_string(variant));
                const int64_t rows = variant % 2 ? 3 : 70;
                auto logits = randomFloats(rows * c.experts, 3.0f);
                if (variant & 8) {
                    for (float& l : logits) l = static_cast<float>(random()() % 5) - 2.0f;  // equals, and zeros
                    logits[0] = -0.0f;
                    logits[1 % logits.size()] = NAN;
                }
                RouterCall call;
                call.count = c.experts;
                call.used = c.used;
                call.gating = gating;
                call.groups = c.groups;
                call.groupsUsed = c.groupsUsed;
                call.renormalize = variant & 1;
                call.weightScale = 2.5f;
                if (variant & 2) call.choiceBias = choiceBias.data();
                if (variant & 4) call.outputScale = outputScale.data();
                std::vector<int32_t> expectedChosen(rows * c.used);
                std::vector<float> expectedWeight(rows * c.used), row;
                CpuRouter cpu(cpu::kernels(), call);
                for (int64_t t = 0; t < rows; ++t) {
                    row.assign(logits.begin() + t * c.experts, logits.begin() + (t + 1) * c.experts);
                    cpu.route(row.data(), &expectedChosen[t * c.used], &expectedWeight[t * c.used]);
                }
                RouteRule rule{c.experts, c.used, call.renormalize, 2.5f, gating, c.groups, c.groupsUsed};
                if (variant & 2) rule.choiceBias = deviceBias.get();
                if (variant & 4) rule.outputScale = deviceScale.get();
                const DeviceArray<float> deviceLogits(logits), weight(rows * c.used);
                const DeviceArray<int32_t> chosen(rows * c.used);
                const DeviceArray<uint32_t> uses(std::vector<uint32_t>(c.experts, 0));
                route(stream(), deviceLogits.get(), rows, rule, chosen.get(), weight.get(), uses.get());
                ASSERT_EQ(expectedChosen, chosen.read());
                // NaN has no defined bits.
                const auto got = weight.read();
                for (size_t i = 0; i < got.size(); ++i) {
                    if (std::isnan(expectedWeight[i])) {
                        ASSERT_TRUE(std::isnan(got[i])) << i;
                    } else {
                        ASSERT_EQ(bitsFromFloat(got[i]), bitsFromFloat(expectedWeight[i])) << i;
                    }
                }
                std::vector<uint32_t> counted(c.experts, 0);
                for (const int32_t e : expectedChosen) ++counted[e];
                ASSERT_EQ(counted, uses.read());
            }
        }
    }
}

// A table names each token's experts; the scores still weigh them.
TEST_F(Router, TokensNameTheirExperts) {
    constexpr int32_t kVocab = 50;
    for (const int32_t experts : {6, 200, 256, 1024}) {
        for (const int64_t rows : {int64_t{1}, int64_t{130}}) {
            RouterCall call;
            call.count = experts;
            call.used = 6;
            call.gating = Gating::RootSoftplus;
            call.weightScale = 1.5f;
            const std::vector<int32_t> named = randomChoice(kVocab, call.used, experts, 1.0);
            const std::vector<float> table(named.begin(), named.end());
            call.tokenChoices = table.data();
            std::vector<int32_t> tokens(rows), expectedChosen(rows * call.used);
            for (int32_t& token : tokens) token = static_cast<int32_t>(random()() % kVocab);
            const auto logits = randomFloats(rows * experts, 3.0f);
            std::vector<float> expectedWeight(rows * call.used), row;
            CpuRouter cpu(cpu::kernels(), call);
            for (int64_t t = 0; t < rows; ++t) {
                row.assign(logits.begin() + t * experts, logits.begin() + (t + 1) * experts);
                cpu.route(row.data(), &expectedChosen[t * call.used], &expectedWeight[t * call.used], tokens[t]);
            }
            const DeviceArray<float> deviceLogits(logits), deviceTable(table), weight(rows * call.used);
            const DeviceArray<int32_t> deviceTokens(tokens), chosen(rows * call.used);
            RouteRule rule{experts, call.used, true, 1.5f, Gating::RootSoftplus};
            rule.tokenChoices = deviceTable.get();
            rule.tokens = deviceTokens.get();
            route(stream(), deviceLogits.get(), rows, rule, chosen.get(), weight.get());
            ASSERT_EQ(expectedChosen, chosen.read()) << experts << " experts";
            ASSERT_TRUE(sameBits(expectedWeight, weight.read())) << experts << " experts";
        }
    }
}

TEST_F(Router, RefusesGroupsThatAreTooFew) {
    const DeviceArray<float> logits(12), weight(12);
    const DeviceArray<int32_t> chosen(12);
    for (const RouteRule& rule :
         {RouteRule{12, 5, true, 1.0f, Gating::Sigmoid, 3, 1}, RouteRule{12, 2, true, 1.0f, Gating::Sigmoid, 5, 2},
          RouteRule{12, 2, true, 1.0f, Gating::Sigmoid, 3, 4}, RouteRule{12, 2, true, 1.0f, Gating::Sigmoid, 0, 0}})
        EXPECT_THROW(route(stream(), logits.get(), 1, rule, chosen.get(), weight.get()), Error);
}

// Down to quotients that are subnormal or zero.
TEST_F(Router, RoutesProbabilitiesOfAnySize) {
    for (const float spread : {10.0f, 40.0f, 60.0f, 80.0f, 100.0f, 1000.0f}) {
        for (const int32_t experts : {60, 256, 384, 1000}) {
            SCOPED_TRACE(std::to_string(experts) + " experts, logits over " + std::to_string(spread));
            const int64_t rows = 5;
            std::uniform_real_distribution<float> uniform(-spread, 0.0f);
            std::vector<float> logits(rows * experts), expected;
            for (float& l : logits) l = uniform(random());
            std::vector<int32_t> expectedChosen;
            for (int64_t t = 0; t < rows; ++t) {
                std::vector<float> p(logits.begin() + t * experts, logits.begin() + (t + 1) * experts);
                std::vector<int32_t> order(experts);
                cpu::kernels().softmax(p.data(), experts);
                std::iota(order.begin(), order.end(), 0);
                std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return p[a] > p[b]; });
                expectedChosen.insert(expectedChosen.end(), order.begin(), order.end());
                for (const int32_t e : order) expected.push_back(p[e]);
            }
            const DeviceArray<float> deviceLogits(logits), weight(rows * experts);
            const DeviceArray<int32_t> chosen(rows * experts);
            route(stream(), deviceLogits.get(), rows, {experts, experts, false}, chosen.get(), weight.get());
            ASSERT_EQ(expectedChosen, chosen.read());
            ASSERT_TRUE(sameBits(expected, weight.read()));
        }
    }
}

// The scale is the contract's product, and it does not change the routing.
TEST_F(Router, FormsTheSharedScaleBesideIt) {
    for (const int64_t cols : {1, 31, 100, 511, 512, 2048, 4128}) {
        for (const int64_t rows : {1, 8, 65, 261}) {
            for (const size_t skip : {0, 1}) {  // floats before each array
                SCOPED_TRACE(std::to_string(rows) + " rows of " + std::to_string(cols) + ", skip " +
                             std::to_string(skip));
                const int32_t experts = 70, used = 5;
                const auto logits = randomFloats(rows * experts, 2.0f), x = randomFloats(skip + rows * cols),
                           vector = randomFloats(skip + cols);
                std::vector<float> expected(skip + rows + 1);
                std::memset(expected.data(), 0xff, expected.size() * sizeof(float));
                cpu::MatmulArgs args;
                args.w = {DType::F32, 1, cols, reinterpret_cast<const uint8_t*>(vector.data() + skip)};
                args.xFloat = x.data() + skip;
                args.count = rows;
                args.y = expected.data() + skip;
                args.yStride = 1;
                cpu::kernels().matmul(args, 0, 1, nullptr);  // floats need no scratch
                const DeviceArray<float> deviceLogits(logits), deviceX(x), deviceVector(vector), y(expected.size());
                const DeviceArray<float> weight(rows * used), plainWeight(rows * used);
                const DeviceArray<int32_t> chosen(rows * used), plainChosen(rows * used);
                route(stream(), deviceLogits.get(), rows, {experts, used}, plainChosen.get(), plainWeight.get());
                route(stream(), deviceLogits.get(), rows, {experts, used}, chosen.get(), weight.get(), nullptr,
                      {deviceX.get() + skip, deviceVector.get() + skip, cols, y.get() + skip});
                ASSERT_TRUE(sameBits(expected, y.read()));
                ASSERT_EQ(plainChosen.read(), chosen.read());
                ASSERT_TRUE(sameBits(plainWeight.read(), weight.read()));
            }
        }
    }
}

TEST_F(Router, RefusesMoreExpertsThanALaneHolds) {
    const DeviceArray<float> logits(1025), weight(1);
    const DeviceArray<int32_t> chosen(1);
    EXPECT_THROW(route(stream(), logits.get(), 1, {1025, 1}, chosen.get(), weight.get()), Error);
}

// Counts add up over calls, and counting does not change the routing.
TEST_F(Router, CountsWhatItChooses) {
    for (const int64_t rows : {1, 7, 300}) {
        const int32_t experts = 100, used = 6;
        std::vector<uint32_t> expected(experts + 1, 5);  // earlier counts, and a word behind them that must not change
        const DeviceArray<uint32_t> uses(expected);
        for (int call = 0; call < 2; ++call) {
            const DeviceArray<float> logits(randomFloats(rows * experts, 2.0f)), weight(rows * used),
                plainWeight(rows * used);
            const DeviceArray<int32_t> chosen(rows * used), plainChosen(rows * used);
            route(stream(), logits.get(), rows, {experts, used}, plainChosen.get(), plainWeight.get());
            route(stream(), logits.get(), rows, {experts, used}, chosen.get(), weight.get(), uses.get());
            ASSERT_EQ(plainChosen.read(), chosen.read());
            ASSERT_TRUE(sameBits(plainWeight.read(), weight.read()));
            for (const int32_t e : chosen.read()) ++expected[e];
        }
        EXPECT_EQ(expected, uses.read());
    }
}

TEST_F(Router, BadLogitsStillChooseExpertsThatExist) {
    const int32_t experts = 100, used = 9;
    auto logits = randomFloats(4 * experts);
    std::fill(logits.begin(), logits.begin() + experts, NAN);
    std::fill(logits.begin() + experts, logits.begin() + 2 * experts, -INFINITY);
    logits[2 * experts + 5] = NAN;
    logits[3 * experts + 5] = INFINITY;
    const DeviceArray<float> deviceLogits(logits), weight(4 * used);
    const DeviceArray<int32_t> chosen(4 * used);
    route(stream(), deviceLogits.get(), 4, {experts, used}, chosen.get(), weight.get());
    const auto result = chosen.read();
    for (int row = 0; row < 4; ++row) {
        const std::set<int32_t> distinct(result.begin() + row * used, result.begin() + (row + 1) * used);
        EXPECT_EQ(distinct.size(), static_cast<size_t>(used)) << row;
        EXPECT_GE(*distinct.begin(), 0);
        EXPECT_LT(*distinct.rbegin(), experts);
    }
}

TEST_F(Router, GroupsPairsStablyAndCutsTiles) {
    struct Case {
        int64_t rows;
        int32_t used, experts;
        double skew;
    };
    const Case cases[] = {{1, 1, 1, 1},       {1, 8, 128, 1},   {3, 2, 8, 1},      {64, 1, 4, 1},
                          {63, 8, 8, 1},      {100, 8, 128, 1}, {2048, 8, 128, 1}, {2048, 8, 128, 6},
                          {2048, 2, 1000, 1}, {9000, 8, 64, 2}, {20000, 1, 2, 3},  {777, 10, 1500, 1},
                          {17000, 8, 2000, 1}};
    for (const Case& c : cases) {
        SCOPED_TRACE(std::to_string(c.rows) + " rows, " + std::to_string(c.used) + " of " + std::to_string(c.experts));
        const int64_t pairs = c.rows * c.used, tiles = maxExpertTiles(pairs, c.experts);
        const auto chosen = randomChoice(c.rows, c.used, c.experts, c.skew);
        const DeviceArray<int32_t> deviceChosen(chosen);
        const DeviceArray<uint8_t> buffer(expertGroupingBytes(c.rows, c.used, c.experts));
        const ExpertGroups groups = groupExperts(stream(), deviceChosen.get(), c.rows, c.used, c.experts,
                                                 expertGroupingOver(buffer.get(), c.rows, c.used, c.experts));
        ASSERT_EQ(groups.tiles, tiles);
        ASSERT_GE(groups.tilePairs, kSmallExpertTile);

        auto bytes = buffer.read();
        const ExpertGrouping at = expertGroupingOver(bytes.data(), c.rows, c.used, c.experts);
        std::vector<int32_t> begin(c.experts + 1, 0), pairToken(pairs), pairOf(pairs), pairAt(pairs), tileExpert,
            tileBegin;
        for (const int32_t e : chosen) ++begin[e + 1];
        for (int32_t e = 0; e < c.experts; ++e) begin[e + 1] += begin[e];
        auto next = begin;
        for (int64_t i = 0; i < pairs; ++i) {
            pairOf[i] = next[chosen[i]]++;
            pairToken[pairOf[i]] = static_cast<int32_t>(i / c.used);
            pairAt[pairOf[i]] = static_cast<int32_t>(i);
        }
        for (int32_t e = 0; e < c.experts; ++e) {
            for (int32_t first = begin[e]; first < begin[e + 1]; first += groups.tilePairs) {
                tileExpert.push_back(e);
                tileBegin.push_back(first);
            }
        }
        ASSERT_LE(static_cast<int64_t>(tileExpert.size()), tiles);
        ASSERT_EQ(begin, std::vector<int32_t>(at.begin, at.begin + c.experts + 1));
        ASSERT_EQ(pairOf, std::vector<int32_t>(at.pairOf, at.pairOf + pairs));
        ASSERT_EQ(pairToken, std::vector<int32_t>(at.pairToken, at.pairToken + pairs));
        ASSERT_EQ(pairAt, std::vector<int32_t>(at.pairAt, at.pairAt + pairs));
        ASSERT_EQ(tileBegin, std::vector<int32_t>(at.tileBegin, at.tileBegin + tileBegin.size()));
        tileExpert.resize(tiles, -1);
        ASSERT_EQ(tileExpert, std::vector<int32_t>(at.tileExpert, at.tileExpert + tiles));
    }
}

TEST_F(Router, CombinesByRank) {
    for (const int64_t cols : {1, 32, 99, 130, 1028, 2048}) {
        const int64_t rows = 21;
        const int32_t used = 6;
        const auto y = randomFloats(rows * used * cols), weight = randomFloats(rows * used),
                   residual = randomFloats(rows * cols);
        std::vector<int32_t> pairOf(rows * used);
        std::iota(pairOf.begin(), pairOf.end(), 0);
        std::shuffle(pairOf.begin(), pairOf.end(), random());
        std::vector<float> expected(rows * cols);
        for (int64_t i = 0; i < rows * cols; ++i) {
            const int64_t t = i / cols;
            float sum = 0;
            for (int32_t k = 0; k < used; ++k)
                sum = std::fma(weight[t * used + k], y[pairOf[t * used + k] * cols + i % cols], sum);
            expected[i] = residual[i] + sum;
        }
        const DeviceArray<float> deviceY(y), deviceWeight(weight), deviceResidual(residual);
        const DeviceArray<int32_t> devicePairs(pairOf);
        combineExperts(stream(), deviceY.get(), devicePairs.get(), deviceWeight.get(), rows, used, cols,
                       deviceResidual.get());
        ASSERT_TRUE(sameBits(expected, deviceResidual.read())) << cols;

        // The same answers in the order of the pairs.
        std::vector<float> inOrder;
        for (const int32_t pair : pairOf)
            inOrder.insert(inOrder.end(), y.begin() + pair * cols, y.begin() + (pair + 1) * cols);
        const DeviceArray<float> deviceInOrder(inOrder), again(residual);
        combineExperts(stream(), deviceInOrder.get(), nullptr, deviceWeight.get(), rows, used, cols, again.get());
        ASSERT_TRUE(sameBits(expected, again.read())) << cols << ", in order";
    }
}

// Biases of the answers, weights of 1, a shared answer without a scale, and rows that are replaced.
TEST_F(Router, CombinesWithBiasesAndWithoutWeights) {
    for (const int64_t cols : {1, 99, 130, 1028}) {
        for (int variant = 0; variant < 8; ++variant) {
            SCOPED_TRACE(std::to_string(cols) + " columns, variant " + std::to_string(variant));
            const int64_t rows = 9;
            const int32_t used = 5, experts = 7;
            const auto y = randomFloats(rows * used * cols), bias = randomFloats(experts * cols),
                       shared = randomFloats(rows * cols), weight = randomFloats(rows * used),
                       before = randomFloats(rows * cols);
            std::vector<int32_t> expert(rows * used);
            for (int32_t& e : expert) e = static_cast<int32_t>(random()() % experts);
            const bool biased = variant & 1, weighted = variant & 2, adds = variant & 4;
            std::vector<float> expected = before;
            for (int64_t t = 0; t < rows; ++t) {
                std::vector<float> sum(cols, 0.0f);
                for (int64_t p = t * used; p < (t + 1) * used; ++p) {
                    std::vector<float> answer(y.begin() + p * cols, y.begin() + (p + 1) * cols);
                    if (biased) cpu::kernels().add(answer.data(), &bias[expert[p] * cols], cols);
                    cpu::kernels().addScaled(sum.data(), answer.data(), weighted ? weight[p] : 1.0f, cols);
                }
                cpu::kernels().addScaled(sum.data(), &shared[t * cols], 1.0f, cols);
                if (adds) cpu::kernels().add(&expected[t * cols], sum.data(), cols);
                else std::copy(sum.begin(), sum.end(), expected.begin() + t * cols);
            }
            const DeviceArray<float> deviceY(y), deviceBias(bias), deviceShared(shared), deviceWeight(weight),
                to(before);
            const DeviceArray<int32_t> deviceExpert(expert);
            combineExperts(stream(), deviceY.get(), nullptr, weighted ? deviceWeight.get() : nullptr, rows, used, cols,
                           to.get(), {deviceShared.get(), nullptr},
                           {biased ? deviceBias.get() : nullptr, deviceExpert.get(), adds});
            ASSERT_TRUE(sameBits(expected, to.read()));
        }
    }
}

TEST_F(Router, CombinesTheSharedAnswerLast) {
    for (const int64_t cols : {1, 32, 99, 130, 1028, 2048}) {
        for (int crooked = 0; crooked < 4; ++crooked) {  // none of the arrays is unaligned, or one of them is
            for (const bool isThere : {true, false}) {
                SCOPED_TRACE(std::to_string(cols) + " columns, " + std::to_string(crooked) +
                             (isThere ? "" : ", not there"));
                const int64_t rows = 9, ofY = crooked == 1, ofShared = crooked == 2, ofResidual = crooked == 3;
                const int32_t used = 5;
                const auto y = randomFloats(ofY + rows * used * cols), shared = randomFloats(ofShared + rows * cols);
                const auto weight = randomFloats(rows * used), scale = randomFloats(rows, 20.0f),
                           residual = randomFloats(ofResidual + rows * cols);
                std::vector<int32_t> pairOf(rows * used);
                std::iota(pairOf.begin(), pairOf.end(), 0);
                std::shuffle(pairOf.begin(), pairOf.end(), random());
                std::vector<float> expected = residual;
                for (int64_t t = 0; t < rows; ++t) {
                    std::vector<float> sum(cols, 0.0f);
                    for (int64_t i = t * used; i < (t + 1) * used; ++i)
                        cpu::kernels().addScaled(sum.data(), y.data() + ofY + pairOf[i] * cols, weight[i], cols);
                    if (isThere)
                        cpu::kernels().addScaled(sum.data(), shared.data() + ofShared + t * cols,
                                                 portableSigmoid(scale[t]), cols);
                    cpu::kernels().add(expected.data() + ofResidual + t * cols, sum.data(), cols);
                }
                const DeviceArray<float> deviceY(y), deviceShared(shared), deviceWeight(weight), deviceScale(scale),
                    deviceResidual(residual);
                const DeviceArray<int32_t> devicePairs(pairOf);
                combineExperts(stream(), deviceY.get() + ofY, devicePairs.get(), deviceWeight.get(), rows, used, cols,
                               deviceResidual.get() + ofResidual,
                               {isThere ? deviceShared.get() + ofShared : nullptr, deviceScale.get()});
                ASSERT_TRUE(sameBits(expected, deviceResidual.read()));
            }
        }
    }
}

}  // namespace
}  // namespace sharpi::cuda
