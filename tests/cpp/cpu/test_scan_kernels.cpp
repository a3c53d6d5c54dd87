// Mamba 2's scan against double precision, in the order that core/rules/mamba.h writes; the same bits from every
// instruction set, and however rows and columns are cut.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/rules/mamba.h"
#include "cpu/kernels.h"
#include "kernel_tables.h"
#include "seed.h"

namespace {

using namespace sharpi;
using cpu::Kernels;

std::vector<float> randomFloats(int64_t n, unsigned seed) {
    std::mt19937 engine(sharpi::testSeed(seed));
    std::normal_distribution<float> normal(0.0f, 1.0f);
    std::vector<float> values(static_cast<size_t>(n));
    for (float& value : values) value = normal(engine);
    return values;
}

bool sameBits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct Result {
    std::vector<float> out, state;
};

// One head of size `dim` with states of size `states`. A row is x, B, C and a gap, so that strides matter.
struct Scan {
    int64_t rows;
    int32_t dim, states;
    int64_t stride;
    std::vector<float> mixed, decay, step, state;
    float skip = 0.75f;

    Scan(int64_t rows, int32_t dim, int32_t states, unsigned seed)
        : rows(rows),
          dim(dim),
          states(states),
          stride(dim + 2 * states + 3),
          mixed(randomFloats(rows * stride, seed)),
          decay(randomFloats(2 * rows, seed + 1)),
          step(randomFloats(2 * rows, seed + 2)),
          state(randomFloats(int64_t{dim} * states, seed + 3)) {
        for (size_t i = 0; i < step.size(); ++i) {
            step[i] = mambaStep(step[i], -0.5f);
            decay[i] = mambaDecay(step[i], -std::abs(decay[i]));
        }
    }

    Result run(const Kernels& table, const std::vector<int64_t>& pieces, int32_t grain, bool fresh) const {
        const float poison = std::numeric_limits<float>::quiet_NaN();
        Result result{std::vector<float>(static_cast<size_t>(rows * dim), poison),
                      fresh ? std::vector<float>(state.size(), poison) : state};
        std::vector<float> scratch(cpu::stateScratchBytes(states) / sizeof(float) + 16, poison);
        auto* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
        int64_t done = 0;
        for (const int64_t count : pieces) {
            cpu::ScanArgs args;
            args.rowStride = stride;
            args.x = mixed.data() + done * stride;
            args.b = args.x + dim;
            args.c = args.b + states;
            args.decay = decay.data() + 2 * done;
            args.step = step.data() + 2 * done;
            args.stepStride = 2;
            args.skip = skip;
            args.out = result.out.data() + done * dim;
            args.outStride = dim;
            args.rows = count;
            args.stateDim = states;
            args.headDim = dim;
            args.from = fresh && done == 0 ? nullptr : result.state.data();
            args.to = result.state.data();
            for (int32_t begin = 0; begin < dim; begin += grain)
                table.scan(args, begin, std::min(begin + grain, dim), aligned);
            done += count;
        }
        return result;
    }

    void expectReference(const Result& got, bool fresh) const {
        std::vector<double> s(state.begin(), state.end());
        if (fresh) s.assign(state.size(), 0.0);
        for (int64_t t = 0; t < rows; ++t) {
            const float *x = &mixed[static_cast<size_t>(t * stride)], *b = x + dim, *c = b + states;
            const auto now = static_cast<size_t>(2 * t);
            for (int64_t p = 0; p < dim; ++p) {
                double y = double{skip} * x[p];
                for (int64_t n = 0; n < states; ++n) {
                    double& element = s[static_cast<size_t>(n * dim + p)];
                    element = element * decay[now] + double{x[p]} * step[now] * b[n];
                    y += element * c[n];
                }
                ASSERT_NEAR(got.out[static_cast<size_t>(t * dim + p)], y, 1e-5 * std::max(1.0, std::abs(y)));
            }
        }
        for (size_t i = 0; i < s.size(); ++i) ASSERT_NEAR(got.state[i], s[i], 1e-5 * std::max(1.0, std::abs(s[i])));
    }
};

TEST(Scan, IsRightAndTheSameHoweverItIsCut) {
    unsigned seed = 0;
    for (const auto& [dim, states] : std::vector<std::pair<int32_t, int32_t>>{{1, 1}, {5, 20}, {20, 5}, {64, 128}}) {
        const Scan scan(13, dim, states, seed += 10);
        for (const bool fresh : {true, false}) {
            const Result first = scan.run(*tables()[0], {13}, dim, fresh);
            scan.expectReference(first, fresh);
            for (const Kernels* table : tables()) {
                for (const std::vector<int64_t>& pieces :
                     {std::vector<int64_t>{13}, std::vector<int64_t>(13, 1), std::vector<int64_t>{6, 1, 6}}) {
                    const Result got = scan.run(*table, pieces, 48, fresh);
                    EXPECT_TRUE(sameBits(got.out, first.out)) << table->name << " out";
                    EXPECT_TRUE(sameBits(got.state, first.state)) << table->name << " state";
                }
            }
        }
    }
}

// A GPU follows this order to the bit.
TEST(Scan, UpdatesAndSumsInTheOrderThatIsWritten) {
    constexpr int kDim = 19, kStates = 37;
    const Scan scan(1, kDim, kStates, 7);
    const Result got = scan.run(*tables().back(), {1}, kDim, false);
    const float *x = scan.mixed.data(), *b = x + kDim, *c = b + kStates;
    for (int p = 0; p < kDim; ++p) {
        float acc[8] = {};
        const float u = x[p] * scan.step[0];
        for (int n = 0; n < kStates; ++n) {
            const auto at = static_cast<size_t>(n * kDim + p);
            const float decayed = scan.state[at] * scan.decay[0], element = std::fmaf(b[n], u, decayed);
            ASSERT_EQ(got.state[at], element);
            acc[n % 8] = std::fmaf(element, c[n], acc[n % 8]);
        }
        for (const int width : {4, 2, 1})
            for (int i = 0; i < width; ++i) acc[i] = acc[i] + acc[i + width];
        ASSERT_EQ(got.out[static_cast<size_t>(p)], std::fmaf(scan.skip, x[p], acc[0])) << "column " << p;
    }
}

}  // namespace
