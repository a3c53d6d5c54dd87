// Gated DeltaNet's kernels against double precision; the same bits from every instruction set, and however rows and
// columns are cut. Also the portable functions that they use.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/portable.h"
#include "cpu/kernels.h"
#include "kernel_tables.h"
#include "seed.h"

namespace {

using namespace sharpi;
using cpu::Kernels;

const float kPoison = std::numeric_limits<float>::quiet_NaN();

std::vector<float> randomFloats(int64_t n, unsigned seed, float spread = 1.0f) {
    std::mt19937 engine(sharpi::testSeed(seed));
    std::normal_distribution<float> normal(0.0f, spread);
    std::vector<float> values(static_cast<size_t>(n));
    for (float& value : values) value = normal(engine);
    return values;
}

void expectSameBits(const std::vector<float>& got, const std::vector<float>& expected, const std::string& what) {
    ASSERT_EQ(got.size(), expected.size());
    ASSERT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)), 0) << what;
}

void expectClose(const std::vector<float>& got, const std::vector<double>& expected, double tolerance,
                 const std::string& what) {
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i)
        ASSERT_NEAR(got[i], expected[i], tolerance * std::max(1.0, std::abs(expected[i]))) << what << " at " << i;
}

// Computes rows from a state, in pieces. Returns the output and the state after them.
struct Result {
    std::vector<float> out, state;
};

struct Conv {
    int64_t rows, channels;
    int32_t width;
    std::vector<float> x, weight, state, bias;  // bias: empty: none

    Conv(int64_t rows, int64_t channels, int32_t width, unsigned seed, bool biased)
        : rows(rows),
          channels(channels),
          width(width),
          x(randomFloats(rows * channels, seed, 2.0f)),
          weight(randomFloats(width * channels, seed + 1)),
          state(randomFloats((width - 1) * channels, seed + 2)),
          bias(randomFloats(biased ? channels : 0, seed + 3)) {}

    Result run(const Kernels& table, const std::vector<int64_t>& pieces, int64_t grain, bool fresh) const {
        Result result{x, fresh ? std::vector<float>(state.size(), kPoison) : state};
        int64_t done = 0;
        for (const int64_t count : pieces) {
            cpu::ConvArgs args;
            args.x = result.out.data() + done * channels;
            args.rows = count;
            args.channels = channels;
            args.weight = weight.data();
            args.bias = bias.empty() ? nullptr : bias.data();
            args.width = width;
            args.from = fresh && done == 0 ? nullptr : result.state.data();
            args.to = result.state.data();
            for (int64_t begin = 0; begin < channels; begin += grain)
                table.convSilu(args, begin, std::min(begin + grain, channels));
            done += count;
        }
        return result;
    }

    std::vector<double> reference(bool fresh) const {
        std::vector<double> out;
        for (int64_t t = 0; t < rows; ++t) {
            for (int64_t c = 0; c < channels; ++c) {
                double sum = bias.empty() ? 0.0 : bias[static_cast<size_t>(c)];
                for (int32_t w = 0; w < width; ++w) {
                    const int64_t from = t - width + 1 + w;
                    const double before = fresh      ? 0.0
                                          : from < 0 ? state[static_cast<size_t>((from + width - 1) * channels + c)]
                                                     : 0.0;
                    sum += weight[static_cast<size_t>(w * channels + c)] *
                           (from < 0 ? before : x[static_cast<size_t>(from * channels + c)]);
                }
                out.push_back(sum / (1 + std::exp(-sum)));
            }
        }
        return out;
    }
};

TEST(ConvSilu, IsRightAndTheSameHoweverItIsCut) {
    unsigned seed = 0;
    for (const int32_t width : {2, 4, 7}) {
        for (const int64_t channels : {1, 16, 53, 96}) {
            const Conv conv(11, channels, width, seed += 10, channels % 2 != 0);
            for (const bool fresh : {true, false}) {
                const Result first = conv.run(*tables()[0], {11}, channels, fresh);
                expectClose(first.out, conv.reference(fresh), 2e-6, "conv");
                // The state: the last inputs, oldest first.
                if (width - 1 <= 11) {
                    expectSameBits(first.state, std::vector<float>(conv.x.end() - (width - 1) * channels, conv.x.end()),
                                   "state");
                }
                for (const Kernels* table : tables()) {
                    for (const std::vector<int64_t>& pieces :
                         {std::vector<int64_t>{11}, std::vector<int64_t>(11, 1), std::vector<int64_t>{2, 1, 5, 3}}) {
                        const Result got = conv.run(*table, pieces, 32, fresh);
                        expectSameBits(got.out, first.out, std::string(table->name) + " out");
                        expectSameBits(got.state, first.state, std::string(table->name) + " state");
                    }
                }
            }
        }
    }
}

struct Delta {
    int64_t rows;
    int32_t dim;
    std::vector<float> q, k, v, decay, step, state;
    static constexpr int64_t kGap = 3;  // between rows, so that strides matter

    Delta(int64_t rows, int32_t dim, unsigned seed)
        : rows(rows),
          dim(dim),
          q(randomFloats(rows * (dim + kGap), seed)),
          k(randomFloats(rows * (dim + kGap), seed + 1)),
          v(randomFloats(rows * (dim + kGap), seed + 2)),
          decay(randomFloats(2 * rows, seed + 3)),
          step(randomFloats(2 * rows, seed + 4)),
          state(randomFloats(int64_t{dim} * dim, seed + 5)) {
        const float length = std::sqrt(static_cast<float>(dim));
        for (float& value : k) value /= length;
        for (float& value : decay) value = portableSigmoid(value);
        for (float& value : step) value = portableSigmoid(value);
    }

    Result run(const Kernels& table, const std::vector<int64_t>& pieces, int32_t grain, bool fresh) const {
        Result result{std::vector<float>(static_cast<size_t>(rows * dim), kPoison),
                      fresh ? std::vector<float>(state.size(), kPoison) : state};
        std::vector<float> scratch(cpu::stateScratchBytes(dim) / sizeof(float) + 16, kPoison);
        auto* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
        int64_t done = 0;
        for (const int64_t count : pieces) {
            cpu::DeltaArgs args;
            args.rowStride = dim + kGap;
            args.q = q.data() + done * args.rowStride;
            args.k = k.data() + done * args.rowStride;
            args.v = v.data() + done * args.rowStride;
            args.decay = decay.data() + 2 * done;
            args.step = step.data() + 2 * done;
            args.stepStride = 2;
            args.out = result.out.data() + done * dim;
            args.outStride = dim;
            args.rows = count;
            args.dim = dim;
            args.from = fresh && done == 0 ? nullptr : result.state.data();
            args.to = result.state.data();
            for (int32_t begin = 0; begin < dim; begin += grain)
                table.deltaRule(args, begin, std::min(begin + grain, dim), aligned);
            done += count;
        }
        return result;
    }

    std::vector<double> reference(bool fresh, std::vector<double>& s) const {
        s.assign(state.begin(), state.end());
        if (fresh) s.assign(state.size(), 0.0);
        std::vector<double> out;
        const auto at = [&](int64_t i, int64_t j) -> double& { return s[static_cast<size_t>(i * dim + j)]; };
        for (int64_t t = 0; t < rows; ++t) {
            const float *key = &k[t * (dim + kGap)], *query = &q[t * (dim + kGap)], *value = &v[t * (dim + kGap)];
            for (int64_t j = 0; j < dim; ++j) {
                double recalled = 0, sum = 0;
                for (int64_t i = 0; i < dim; ++i) recalled += (at(i, j) *= decay[2 * t]) * key[i];
                for (int64_t i = 0; i < dim; ++i)
                    sum += (at(i, j) += key[i] * (value[j] - recalled) * step[2 * t]) * query[i];
                out.push_back(sum);
            }
        }
        return out;
    }
};

TEST(DeltaRule, IsRightAndTheSameHoweverItIsCut) {
    unsigned seed = 1000;
    for (const int32_t dim : {1, 5, 16, 20, 64, 128}) {
        const Delta delta(13, dim, seed += 10);
        for (const bool fresh : {true, false}) {
            const Result first = delta.run(*tables()[0], {13}, dim, fresh);
            std::vector<double> state;
            const std::vector<double> expected = delta.reference(fresh, state);
            expectClose(first.out, expected, 1e-5, "out");
            expectClose(first.state, state, 1e-5, "state");
            for (const Kernels* table : tables()) {
                for (const std::vector<int64_t>& pieces :
                     {std::vector<int64_t>{13}, std::vector<int64_t>(13, 1), std::vector<int64_t>{6, 1, 6}}) {
                    const Result got = delta.run(*table, pieces, 48, fresh);
                    expectSameBits(got.out, first.out, std::string(table->name) + " out");
                    expectSameBits(got.state, first.state, std::string(table->name) + " state");
                }
            }
        }
    }
}

// The order of the sums, as the kernel's opening comment defines it; a GPU follows it to the bit.
TEST(DeltaRule, SumsInTheOrderThatIsWritten) {
    const Delta delta(1, 37, 5);
    const Result got = delta.run(*tables().back(), {1}, 37, false);
    const auto sum = [&](const std::vector<float>& column, const float* x) {
        float acc[8] = {};
        for (int i = 0; i < 37; ++i) acc[i % 8] = std::fmaf(column[static_cast<size_t>(i)], x[i], acc[i % 8]);
        for (const int width : {4, 2, 1})
            for (int n = 0; n < width; ++n) acc[n] = acc[n] + acc[n + width];
        return acc[0];
    };
    for (int j = 0; j < 37; ++j) {
        std::vector<float> column(37);
        for (int i = 0; i < 37; ++i)
            column[static_cast<size_t>(i)] = delta.state[static_cast<size_t>(i * 37 + j)] * delta.decay[0];
        const float change = (delta.v[static_cast<size_t>(j)] - sum(column, delta.k.data())) * delta.step[0];
        for (int i = 0; i < 37; ++i)
            column[static_cast<size_t>(i)] =
                std::fmaf(delta.k[static_cast<size_t>(i)], change, column[static_cast<size_t>(i)]);
        ASSERT_EQ(got.out[static_cast<size_t>(j)], sum(column, delta.q.data())) << "column " << j;
        for (int i = 0; i < 37; ++i)
            ASSERT_EQ(got.state[static_cast<size_t>(i * 37 + j)], column[static_cast<size_t>(i)]);
    }
}

TEST(L2Norm, IsRightOnEveryTable) {
    for (const int64_t n : {1, 16, 20, 64, 131}) {
        const std::vector<float> x = randomFloats(n, static_cast<unsigned>(n));
        double squares = 0;
        for (const float value : x) squares += double{value} * value;
        std::vector<double> expected;
        for (const float value : x) expected.push_back(value / std::sqrt(squares + 1e-2) * 0.25);
        std::vector<float> first;
        for (const Kernels* table : tables()) {
            std::vector<float> got = x;
            table->l2Norm(got.data(), 1e-2f, 0.25f, n);
            expectClose(got, expected, 1e-6, table->name);
            if (first.empty()) first = got;
            expectSameBits(got, first, table->name);
        }
    }
}

TEST(SigmoidMul, IsRightOnEveryTable) {
    std::vector<float> gate = randomFloats(77, 3, 6.0f);
    gate[0] = 200.0f;
    gate[1] = -200.0f;
    const std::vector<float> x = randomFloats(77, 4);
    std::vector<double> expected;
    for (size_t i = 0; i < x.size(); ++i) expected.push_back(x[i] / (1 + std::exp(-double{gate[i]})));
    std::vector<float> first;
    for (const Kernels* table : tables()) {
        std::vector<float> got = x;
        table->sigmoidMul(got.data(), gate.data(), 77);
        expectClose(got, expected, 1e-6, table->name);
        if (first.empty()) first = got;
        expectSameBits(got, first, table->name);
    }
}

TEST(Portable, SoftplusAndSigmoid) {
    for (double x = -110; x < 110; x += 0.0137) {
        const auto value = static_cast<float>(x);
        const double softplus = std::max(double{value}, 0.0) + std::log1p(std::exp(-std::abs(double{value})));
        ASSERT_NEAR(portableSoftplus(value), softplus, 4e-7 * softplus + 1e-37) << x;
        const double sigmoid = 1 / (1 + std::exp(-double{value}));
        ASSERT_NEAR(portableSigmoid(value), sigmoid, 4e-7 * sigmoid + 1e-37) << x;
    }
    EXPECT_TRUE(std::isnan(portableSoftplus(kPoison)));
    EXPECT_TRUE(std::isnan(portableSigmoid(kPoison)));
}

}  // namespace
