// Float kernels against double-precision references; the same bits from the tables of all instruction sets.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/half.h"
#include "core/portable.h"
#include "cpu/kernels.h"
#include "kernel_tables.h"
#include "seed.h"

namespace {

using sharpi::Activation;
using sharpi::ActivationKind;
using sharpi::DType;
using sharpi::KvType;
using sharpi::cpu::Kernels;
using sharpi::cpu::MatmulArgs;

const float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<float> randomFloats(int64_t n, unsigned seed, float spread = 1.0f) {
    std::mt19937 engine(sharpi::testSeed(seed));
    std::normal_distribution<float> normal(0.0f, spread);
    std::vector<float> values(n);
    for (float& value : values) value = normal(engine);
    return values;
}

void expectSameBits(const std::vector<float>& got, const std::vector<float>& expected, const std::string& what) {
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); i++)
        ASSERT_EQ(sharpi::bitsFromFloat(got[i]), sharpi::bitsFromFloat(expected[i]))
            << what << " differs at " << i << ": " << got[i] << " and " << expected[i];
}

void expectClose(const std::vector<float>& got, const std::vector<double>& expected, double tolerance,
                 const std::string& what) {
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); i++)
        ASSERT_LE(std::abs(got[i] - expected[i]), tolerance * std::max(1.0, std::abs(expected[i])))
            << what << " at " << i << ": " << got[i] << " instead of " << expected[i];
}

// Runs `kernel` on every table; each result must be near the reference and have the bits of the first table's.
template <class Kernel>
void checkTables(Kernel kernel, const std::vector<double>& reference, double tolerance, const std::string& what) {
    std::vector<float> first;
    for (const Kernels* table : tables()) {
        const std::vector<float> got = kernel(*table);
        expectClose(got, reference, tolerance, what + " " + table->name);
        if (first.empty()) first = got;
        expectSameBits(got, first, what + " " + table->name);
    }
}

const std::vector<int64_t> kLengths = {1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 100, 129, 1000, 4096};

TEST(FloatKernels, ThisBuildHasAScalarTable) { ASSERT_NE(sharpi::cpu::kernelsFor("scalar"), nullptr); }

TEST(FloatKernels, RmsNorm) {
    for (const int64_t n : kLengths) {
        const std::vector<float> x = randomFloats(n, 1, 3.0f), weight = randomFloats(n, 2);
        double squares = 0;
        for (const float value : x) squares += static_cast<double>(value) * value;
        std::vector<double> expected(n);
        for (int64_t i = 0; i < n; i++) expected[i] = x[i] / std::sqrt(squares / n + 1e-5) * weight[i];
        checkTables(
            [&](const Kernels& table) {
                std::vector<float> y(n, kNaN), inPlace = x;
                table.rmsNorm(x.data(), weight.data(), 1e-5f, n, y.data());
                table.rmsNorm(inPlace.data(), weight.data(), 1e-5f, n, inPlace.data());
                expectSameBits(inPlace, y, "in place");
                return y;
            },
            expected, 2e-6, "rmsNorm of " + std::to_string(n));
    }
}

// Other processors rely on the order of the sum, so it is written out here once more.
TEST(FloatKernels, RmsNormSumsInTheDocumentedOrder) {
    for (const int64_t n : kLengths) {
        const std::vector<float> x = randomFloats(n, 3), ones(n, 1.0f);
        float acc[32] = {};
        for (int64_t i = 0; i < n; i++) acc[i % 32] = std::fmaf(x[i], x[i], acc[i % 32]);
        for (int half = 16; half >= 1; half /= 2)
            for (int i = 0; i < half; i++) acc[i] += acc[i + half];
        const float inverse = 1.0f / std::sqrt(acc[0] / static_cast<float>(n) + 1e-6f);
        std::vector<float> expected(n), got(n, kNaN);
        for (int64_t i = 0; i < n; i++) expected[i] = x[i] * inverse;
        sharpi::cpu::kernels().rmsNorm(x.data(), ones.data(), 1e-6f, n, got.data());
        expectSameBits(got, expected, "n = " + std::to_string(n));
        for (const Kernels* table : tables()) {
            table->rmsNorm(x.data(), nullptr, 1e-6f, n, got.data());
            expectSameBits(got, expected, std::string(table->name) + ", no weights, n = " + std::to_string(n));
        }
    }
}

TEST(FloatKernels, LayerNorm) {
    for (const int64_t n : kLengths) {
        std::vector<float> x = randomFloats(n, 6);
        for (float& v : x) v += 3.0f;
        const std::vector<float> weight = randomFloats(n, 7), bias = randomFloats(n, 8);
        for (const bool biased : {false, true}) {
            double mean = 0, squares = 0;
            for (const float v : x) mean += v / static_cast<double>(n);
            for (const float v : x) squares += (v - mean) * (v - mean) / static_cast<double>(n);
            std::vector<double> expected(n);
            for (int64_t i = 0; i < n; i++)
                expected[i] = (x[i] - mean) / std::sqrt(squares + 1e-2) * weight[i] + (biased ? bias[i] : 0.0f);
            checkTables(
                [&](const Kernels& table) {
                    std::vector<float> y(n, kNaN), inPlace = x;
                    const float* const added = biased ? bias.data() : nullptr;
                    table.layerNorm(x.data(), weight.data(), added, 1e-2f, n, y.data());
                    table.layerNorm(inPlace.data(), weight.data(), added, 1e-2f, n, inPlace.data());
                    expectSameBits(inPlace, y, "in place");
                    return y;
                },
                expected, 1e-5, "layerNorm of " + std::to_string(n));
        }
    }
}

// As core/rules/norm.h says, written out here once more for other processors.
TEST(FloatKernels, LayerNormSumsInTheDocumentedOrder) {
    for (const int64_t n : kLengths) {
        const std::vector<float> x = randomFloats(n, 3), weight = randomFloats(n, 4), bias = randomFloats(n, 5);
        const auto total = [](float (&acc)[32]) {
            for (int half = 16; half >= 1; half /= 2)
                for (int i = 0; i < half; i++) acc[i] += acc[i + half];
            return acc[0];
        };
        float sums[32] = {}, squares[32] = {};
        for (int64_t i = 0; i < n; i++) sums[i % 32] += x[i];
        const float mean = total(sums) / static_cast<float>(n);
        for (int64_t i = 0; i < n; i++) squares[i % 32] = std::fmaf(x[i] - mean, x[i] - mean, squares[i % 32]);
        const float inverse = 1.0f / std::sqrt(total(squares) / static_cast<float>(n) + 1e-6f);
        std::vector<float> expected(n), got(n, kNaN);
        for (int64_t i = 0; i < n; i++) expected[i] = (x[i] - mean) * inverse * weight[i] + bias[i];
        for (const Kernels* table : tables()) {
            table->layerNorm(x.data(), weight.data(), bias.data(), 1e-6f, n, got.data());
            expectSameBits(got, expected, std::string(table->name) + ", n = " + std::to_string(n));
        }
    }
}

TEST(FloatKernels, AddAndAddScaled) {
    for (const int64_t n : kLengths) {
        const std::vector<float> x = randomFloats(n, 4), y = randomFloats(n, 5);
        std::vector<double> sum(n), scaled(n);
        for (int64_t i = 0; i < n; i++) {
            sum[i] = static_cast<double>(x[i]) + y[i];
            scaled[i] = x[i] + 0.37f * static_cast<double>(y[i]);
        }
        checkTables(
            [&](const Kernels& t) {
                auto z = x;
                t.add(z.data(), y.data(), n);
                return z;
            },
            sum, 1e-7, "add");
        checkTables(
            [&](const Kernels& t) {
                auto z = x;
                t.addScaled(z.data(), y.data(), 0.37f, n);
                return z;
            },
            scaled, 1e-7, "addScaled");
    }
}

const Activation kActivations[] = {{ActivationKind::Silu},
                                   {ActivationKind::Gelu},
                                   {ActivationKind::ClampedSwiglu, 2.5f},
                                   {ActivationKind::ReluSquared}};

double activated(const Activation& a, double gate) {
    switch (a.kind) {
    case ActivationKind::Silu: return gate / (1.0 + std::exp(-gate));
    case ActivationKind::Gelu:
        return 0.5 * gate * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (gate + 0.044715 * gate * gate * gate)));
    case ActivationKind::ClampedSwiglu: {
        const double g = std::min<double>(gate, a.limit);
        return g / (1.0 + std::exp(-1.702 * g));
    }
    case ActivationKind::ReluSquared: return gate > 0 ? gate * gate : 0.0;
    }
    return kNaN;
}

double lastFactor(const Activation& a, double up) {
    return a.kind == ActivationKind::ClampedSwiglu ? std::clamp<double>(up, -a.limit, a.limit) + 1.0 : up;
}

// With and without biases, a gate and a weight.
TEST(FloatKernels, GatedActivation) {
    for (const Activation& activation : kActivations) {
        for (const int64_t n : kLengths) {
            const std::vector<float> gate = randomFloats(n, 6, 4.0f), up = randomFloats(n, 7, 2.0f),
                                     gateBias = randomFloats(n, 8), upBias = randomFloats(n, 9);
            for (int variant = 0; variant < 8; ++variant) {
                const bool biased = variant & 1, gated = variant & 2;
                const float factor = variant & 4 ? 0.37f : 1.0f;
                std::vector<double> expected(n);
                for (int64_t i = 0; i < n; i++) {
                    const double g = static_cast<double>(gate[i]) * factor + (biased ? gateBias[i] : 0.0f),
                                 u = static_cast<double>(up[i]) * factor + (biased ? upBias[i] : 0.0f);
                    expected[i] = activated(activation, g) * (gated ? lastFactor(activation, u) : 1.0);
                }
                checkTables(
                    [&](const Kernels& t) {
                        auto z = gate;
                        sharpi::cpu::GatedRow row{z.data(), gated ? up.data() : nullptr, nullptr, nullptr, factor};
                        if (biased) row.gateBias = gateBias.data(), row.upBias = upBias.data();
                        t.gatedActivation(activation, row, n);
                        return z;
                    },
                    expected, 2e-6, "activation " + std::to_string(static_cast<int>(activation.kind)));
            }
        }
    }
}

// Other processors rely on the order of the operations, so it is written out here once more.
TEST(FloatKernels, GatedActivationRoundsInTheDocumentedOrder) {
    constexpr int64_t kCount = 1000;
    const std::vector<float> gate = randomFloats(kCount, 6, 6.0f), up = randomFloats(kCount, 7, 3.0f),
                             gateBias = randomFloats(kCount, 8), upBias = randomFloats(kCount, 9);
    for (const Activation& a : kActivations) {
        std::vector<float> expected(kCount), got = gate;
        for (int64_t i = 0; i < kCount; i++) {
            const float g = gate[i] * 0.37f + gateBias[i], u = up[i] * 0.37f + upBias[i];
            if (a.kind == ActivationKind::ClampedSwiglu) {
                const float low = std::min(g, a.limit), between = std::max(std::min(u, a.limit), -a.limit);
                expected[i] = low / (1.0f + sharpi::portableExp(low * -1.702f)) * (between + 1.0f);
            } else if (a.kind == ActivationKind::Gelu) {
                const float square = g * g, p = std::fmaf(square, 0.044715f, 1.0f), inner = g * p;
                expected[i] = g / (1.0f + sharpi::portableExp(inner * -1.5957691216f)) * u;
            } else if (a.kind == ActivationKind::ReluSquared) {
                const float r = std::max(g, 0.0f);
                expected[i] = r * r * u;
            } else {
                expected[i] = g / (1.0f + sharpi::portableExp(0.0f - g)) * u;
            }
        }
        sharpi::cpu::kernels().gatedActivation(a, {got.data(), up.data(), gateBias.data(), upBias.data(), 0.37f},
                                               kCount);
        expectSameBits(got, expected, "activation " + std::to_string(static_cast<int>(a.kind)));
    }
}

TEST(FloatKernels, ActivationsOfExtremes) {
    const float infinity = std::numeric_limits<float>::infinity();
    for (const Kernels* table : tables()) {
        float gelu[5] = {kNaN, infinity, -1000.0f, 1000.0f, 0.0f}, clamped[5] = {kNaN, infinity, 9.0f, -1000.0f, 0.0f};
        float ups[5] = {1.0f, 1.0f, 1.0f, 1.0f, kNaN}, wide[5] = {1.0f, infinity, -infinity, 1.0f, kNaN};
        table->gatedActivation({ActivationKind::Gelu}, {gelu, ups}, 5);
        EXPECT_TRUE(std::isnan(gelu[0]));
        EXPECT_EQ(gelu[1], infinity);
        EXPECT_NEAR(gelu[2], 0.0f, 1e-30f);
        EXPECT_EQ(gelu[3], 1000.0f);
        EXPECT_TRUE(std::isnan(gelu[4]));
        table->gatedActivation({ActivationKind::ClampedSwiglu, 7.0f}, {clamped, wide}, 5);
        EXPECT_TRUE(std::isnan(clamped[0]));
        EXPECT_NEAR(clamped[1], 56.0f, 1e-3f);
        EXPECT_NEAR(clamped[2], -42.0f, 1e-3f);
        EXPECT_NEAR(clamped[3], 0.0f, 1e-30f);
        EXPECT_TRUE(std::isnan(clamped[4]));
        float squared[5] = {kNaN, infinity, -infinity, 1e30f, -0.0f};
        table->gatedActivation({ActivationKind::ReluSquared}, {squared, nullptr}, 5);
        EXPECT_TRUE(std::isnan(squared[0]));
        EXPECT_EQ(squared[1], infinity);
        EXPECT_EQ(squared[2], 0.0f);
        EXPECT_EQ(squared[3], infinity);
        EXPECT_EQ(squared[4], 0.0f);
    }
}

TEST(FloatKernels, ExponentialIsAccurateAndSaturates) {
    for (const Kernels* table : tables()) {
        // softmax divides by a sum that the single 0 dominates exactly: 1 + exp(x) rounds to 1 below -17.4.
        for (double x = -86.9; x < -17.5; x += 0.0137) {
            float pair[2] = {0.0f, static_cast<float>(x)};
            table->softmax(pair, 2);
            const double exact = std::exp(static_cast<double>(static_cast<float>(x)));
            ASSERT_EQ(pair[0], 1.0f);
            ASSERT_NEAR(pair[1] / exact, 1.0, 1.5 * std::ldexp(1.0, -23)) << table->name << " exp(" << x << ")";
        }
        float far[3] = {0.0f, -87.5f, -std::numeric_limits<float>::infinity()};
        table->softmax(far, 3);
        EXPECT_EQ(far[0], 1.0f);
        EXPECT_EQ(far[1], 0.0f);
        EXPECT_EQ(far[2], 0.0f);
        float gate[4] = {-1000.0f, 1000.0f, 0.0f, kNaN}, up[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        table->gatedActivation({}, {gate, up}, 4);
        EXPECT_NEAR(gate[0], 0.0f, 1e-30f);
        EXPECT_EQ(gate[1], 1000.0f);
        EXPECT_EQ(gate[2], 0.0f);
        EXPECT_TRUE(std::isnan(gate[3]));
    }
}

// At any number of elements: vectors end with the portable rule's bits too.
TEST(FloatKernels, SoftcapHasThePortableBits) {
    for (const Kernels* table : tables()) {
        SCOPED_TRACE(table->name);
        for (const int64_t n : {1, 7, 16, 33, 100}) {
            std::vector<float> x = randomFloats(n, 77, 40.0f), expected = x;
            for (float& value : expected) value = sharpi::portableSoftcap(value, 30.0f);
            table->softcap(x.data(), 30.0f, n);
            EXPECT_EQ(std::memcmp(x.data(), expected.data(), sizeof(float) * x.size()), 0) << n;
        }
    }
}

TEST(FloatKernels, Softmax) {
    for (const int64_t n : kLengths) {
        const std::vector<float> x = randomFloats(n, 8, 5.0f);
        const double top = *std::max_element(x.begin(), x.end());
        double sum = 0;
        std::vector<double> expected(n);
        for (int64_t i = 0; i < n; i++) sum += expected[i] = std::exp(x[i] - top);
        for (double& value : expected) value /= sum;
        checkTables(
            [&](const Kernels& t) {
                auto z = x;
                t.softmax(z.data(), n);
                return z;
            },
            expected, 3e-7, "softmax");
    }
}

TEST(FloatKernels, Rope) {
    for (const int32_t dims : {2, 6, 32, 34, 64, 80, 128}) {
        for (const bool adjacent : {false, true}) {
            const std::vector<float> head = randomFloats(dims + 5, 9);
            std::vector<float> cosines(dims / 2), sines(dims / 2);
            std::vector<double> expected(head.begin(), head.end());
            for (int32_t i = 0; i < dims / 2; i++) {
                cosines[i] = static_cast<float>(std::cos(1.7 * i + 0.3));
                sines[i] = static_cast<float>(std::sin(1.7 * i + 0.3));
                const int32_t a = adjacent ? 2 * i : i, b = adjacent ? 2 * i + 1 : i + dims / 2;
                expected[a] = static_cast<double>(head[a]) * cosines[i] - static_cast<double>(head[b]) * sines[i];
                expected[b] = static_cast<double>(head[a]) * sines[i] + static_cast<double>(head[b]) * cosines[i];
            }
            checkTables(
                [&](const Kernels& t) {
                    auto z = head;
                    t.rope(z.data(), cosines.data(), sines.data(), dims, adjacent);
                    return z;
                },
                expected, 3e-7, "rope of " + std::to_string(dims));
        }
    }
}

TEST(FloatKernels, StoreKvRoundsToNearestEven) {
    const struct {
        float value;
        uint16_t bf16, f16;
    } cases[] = {
        {1.0f, 0x3f80, 0x3c00},
        {-0.0f, 0x8000, 0x8000},
        {sharpi::floatFromBits(0x3f808000u), 0x3f80, 0x3c04},  // a tie in bf16, down to even
        {sharpi::floatFromBits(0x3f818000u), 0x3f82, 0x3c0c},  // a tie in bf16, up to even
        {1.0f + 1.0f / 2048, 0x3f80, 0x3c00},                  // a tie in f16, down to even
        {1.0f + 3.0f / 2048, 0x3f80, 0x3c02},                  // a tie in f16, up to even
        {65504.0f, 0x4780, 0x7bff},
        {65520.0f, 0x4780, 0x7c00},
        {std::ldexp(1.0f, -24), 0x3380, 0x0001},
        {std::ldexp(1.0f, -25), 0x3300, 0x0000},
        {std::ldexp(3.0f, -25), 0x33c0, 0x0002},
        {std::ldexp(1.0f, -130), 0x0008, 0x0000},
        {std::numeric_limits<float>::infinity(), 0x7f80, 0x7c00},
    };
    for (const Kernels* table : tables()) {
        for (const auto& c : cases) {
            uint16_t bf16 = 0xdead, f16 = 0xdead;
            float f32 = kNaN;
            table->storeKv(&c.value, 1, KvType::BF16, &bf16);
            table->storeKv(&c.value, 1, KvType::F16, &f16);
            table->storeKv(&c.value, 1, KvType::F32, &f32);
            EXPECT_EQ(bf16, c.bf16) << table->name << " " << c.value;
            EXPECT_EQ(f16, c.f16) << table->name << " " << c.value;
            EXPECT_EQ(sharpi::bitsFromFloat(f32), sharpi::bitsFromFloat(c.value));
        }
        const float nan = sharpi::floatFromBits(0x7f800001u);
        uint16_t half = 0;
        table->storeKv(&nan, 1, KvType::BF16, &half);
        EXPECT_TRUE(std::isnan(sharpi::floatFromBf16(half)));
        table->storeKv(&nan, 1, KvType::F16, &half);
        EXPECT_TRUE(std::isnan(sharpi::floatFromF16(half)));
    }
}

TEST(FloatKernels, StoreKvOfManyIsNearest) {
    std::mt19937 engine(sharpi::testSeed(11));
    std::vector<float> x(5003);
    std::uniform_real_distribution<float> uniform(-2, 2);
    for (float& value : x) value = std::ldexp(uniform(engine), static_cast<int>(engine() % 40) - 24);
    for (const Kernels* table : tables()) {
        std::vector<uint16_t> bf16(x.size() + 1, 0xdead), f16 = bf16;
        table->storeKv(x.data(), x.size(), KvType::BF16, bf16.data());
        table->storeKv(x.data(), x.size(), KvType::F16, f16.data());
        for (size_t i = 0; i < x.size(); i++) {
            for (const int step : {-1, 1}) {  // no neighbour is nearer
                const double error = std::abs(double(sharpi::floatFromBf16(bf16[i])) - x[i]);
                ASSERT_LE(error, std::abs(double(sharpi::floatFromBf16(uint16_t(bf16[i] + step))) - x[i]));
                const double errorF16 = std::abs(double(sharpi::floatFromF16(f16[i])) - x[i]);
                if ((f16[i] & 0x7fff) > 0 && (f16[i] & 0x7fff) < 0x7bff) {
                    ASSERT_LE(errorF16, std::abs(double(sharpi::floatFromF16(uint16_t(f16[i] + step))) - x[i]));
                }
            }
        }
        EXPECT_EQ(bf16.back(), 0xdead);
        EXPECT_EQ(f16.back(), 0xdead);
    }
}

// --- matmul with float weights ---

struct MatmulCase {
    DType type;
    int64_t rows, cols, count, inputs;
    std::vector<uint8_t> w;
    std::vector<double> exactW;
    std::vector<float> x, bias;
    std::vector<int32_t> rowIndex;

    MatmulCase(DType type, int64_t rows, int64_t cols, int64_t count)
        : type(type), rows(rows), cols(cols), count(count), inputs(count + 3) {
        const std::vector<float> values = randomFloats(rows * cols, 21);
        w.resize(values.size() * (type == DType::F32 ? 4 : 2));
        for (size_t i = 0; i < values.size(); i++) {
            if (type == DType::F32) {
                std::memcpy(&w[4 * i], &values[i], 4);
                exactW.push_back(values[i]);
            } else {
                const bool bf16 = type == DType::BF16;
                const uint16_t half = bf16 ? sharpi::bf16FromFloat(values[i]) : sharpi::f16FromFloat(values[i]);
                std::memcpy(&w[2 * i], &half, 2);
                exactW.push_back(bf16 ? sharpi::floatFromBf16(half) : sharpi::floatFromF16(half));
            }
        }
        x = randomFloats(inputs * cols, 22);
        bias = randomFloats(rows, 23);
        for (int64_t i = 0; i < count; i++) rowIndex.push_back(static_cast<int32_t>((i * 2 + 1) % inputs));
    }

    MatmulArgs args(float* y, bool gather, bool withBias) const {
        MatmulArgs a;
        a.w = {type, rows, cols, w.data()};
        a.xFloat = x.data();
        a.rowIndex = gather ? rowIndex.data() : nullptr;
        a.count = count;
        a.bias = withBias ? bias.data() : nullptr;
        a.y = y;
        a.yStride = rows + 2;
        return a;
    }
};

struct Scratch {
    std::vector<float> memory;
    explicit Scratch(size_t bytes) : memory(bytes / 4 + 32, kNaN) {}
    void* aligned() { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64); }
};

TEST(FloatMatmul, MatchesTheReferenceAndAllTablesAgree) {
    for (const DType type : {DType::F32, DType::F16, DType::BF16}) {
        for (const int64_t cols : {1, 5, 16, 31, 32, 33, 47, 64, 100, 576}) {
            for (const int64_t count : {1, 2, 3, 4, 7, 40}) {
                const MatmulCase c(type, 11, cols, count);
                for (const bool flag : {false, true}) {
                    std::vector<float> first;
                    for (const Kernels* table : tables()) {
                        std::vector<float> y(count * 13, kNaN);
                        Scratch scratch(sharpi::cpu::matmulScratchBytes(cols));
                        table->matmul(c.args(y.data(), flag, flag), 0, 11, scratch.aligned());
                        for (int64_t i = 0; i < count; i++) {
                            const int64_t from = flag ? c.rowIndex[i] : i;
                            for (int64_t r = 0; r < 11; r++) {
                                double sum = flag ? c.bias[r] : 0.0, size = 1.0;
                                for (int64_t k = 0; k < cols; k++) {
                                    sum += c.exactW[r * cols + k] * c.x[from * cols + k];
                                    size += std::abs(c.exactW[r * cols + k] * c.x[from * cols + k]);
                                }
                                ASSERT_NEAR(y[i * 13 + r], sum, 3e-7 * size) << table->name << " " << cols;
                            }
                            ASSERT_TRUE(std::isnan(y[i * 13 + 11]) && std::isnan(y[i * 13 + 12]));
                        }
                        if (first.empty()) first = y;
                        expectSameBits(y, first, table->name);
                    }
                }
            }
        }
    }
}

TEST(FloatMatmul, BatchesAndRowSplitsDoNotChangeABit) {
    const int64_t rows = 23, cols = 333, count = 29;
    const MatmulCase c(DType::BF16, rows, cols, count);
    for (const Kernels* table : tables()) {
        Scratch scratch(sharpi::cpu::matmulScratchBytes(cols));
        std::vector<float> whole(count * (rows + 2), kNaN), parts = whole;
        table->matmul(c.args(whole.data(), false, true), 0, rows, scratch.aligned());
        std::mt19937 engine(sharpi::testSeed(5));
        for (int64_t begin = 0, end; begin < rows; begin = end) {
            end = std::min<int64_t>(rows, begin + 1 + engine() % 6);
            for (int64_t first = 0, last; first < count; first = last) {
                last = std::min<int64_t>(count, first + 1 + engine() % 7);
                MatmulArgs a = c.args(parts.data() + first * (rows + 2), false, true);
                a.xFloat += first * cols;
                a.count = last - first;
                table->matmul(a, begin, end, scratch.aligned());
            }
        }
        expectSameBits(parts, whole, table->name);
    }
}

}  // namespace
