// Quantized matmul: every table gives the contract's bits, for every type, count, row range and choice of rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>

#include "kernel_tables.h"
#include "reference_matmul.h"
#include "seed.h"

#if defined(SHARPI_TEST_PLAIN_AMX)
namespace sharpi::cpu::plainamx {
void matmul(const MatmulArgs& args, int64_t rowBegin, int64_t rowEnd, void* scratch);
}
#endif

using namespace sharpi;
using namespace sharpi::cpu;
using reference::Fill;

namespace {

// The tables of this machine, and AMX's products with their instructions in plain code if the machine can run the rest.
std::vector<const Kernels*> testedTables() {
    std::vector<const Kernels*> found = tables();
#if defined(SHARPI_TEST_PLAIN_AMX)
    if (const Kernels* avx512 = kernelsFor("avx512")) {
        static Kernels plain = *avx512;
        plain.name = "plain amx";
        plain.matmul = plainamx::matmul;
        found.push_back(&plain);
    }
#endif
    return found;
}

struct Free {
    void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<void, Free>;
Buffer aligned(size_t bytes) {
    const size_t rounded = (bytes + 63) / 64 * 64;
    void* p = std::aligned_alloc(64, rounded);
    std::memset(p, 0xa5, rounded);
    return Buffer(p);
}

uint32_t bitsOf(float value) { return std::isnan(value) ? 0x7fc00000u : bitsFromFloat(value); }

struct Inputs {
    std::vector<float> x;
    Buffer buffer;
    QuantizedRows rows;
};

enum class Activations { Normal, Largest };

Inputs makeInputs(const Kernels& table, int64_t rows, int64_t cols, Activations kind, std::mt19937& random) {
    Inputs in;
    std::normal_distribution<float> normal;
    in.x.resize(static_cast<size_t>(rows * cols));
    for (float& v : in.x) v = kind == Activations::Normal ? normal(random) : (random() % 8 ? 3.0f : -3.0f);
    if (kind == Activations::Normal) std::fill_n(in.x.begin() + (rows - 1) * cols, 32, 0.0f);  // one block of zeros
    in.buffer = aligned(quantizedRowsBytes(rows, cols));
    in.rows = quantizedRowsOver(in.buffer.get(), rows, cols);
    for (int64_t t = 0; t < rows; ++t)
        table.quantizeRow(&in.x[static_cast<size_t>(t * cols)], cols, in.rows.q + t * in.rows.qStride,
                          in.rows.scale + t * in.rows.scaleStride, in.rows.sums + t * in.rows.sumStride);
    return in;
}

struct Case {
    int64_t rows, cols, count;
    Fill fill = Fill::Random;
    Activations activations = Activations::Normal;
};

std::vector<float> expectedOutput(DType type, const Case& c, const std::vector<uint8_t>& w, const Inputs& in,
                                  const std::vector<int32_t>* index, const float* bias, int64_t* largest) {
    std::vector<float> y(static_cast<size_t>(c.count * c.rows));
    for (int64_t i = 0; i < c.count; ++i) {
        const int64_t row = index ? (*index)[static_cast<size_t>(i)] : i;
        for (int64_t r = 0; r < c.rows; ++r)
            y[static_cast<size_t>(i * c.rows + r)] = reference::dot(
                type, &w[static_cast<size_t>(r) * rowBytes(type, c.cols)], c.cols, in.rows.q + row * in.rows.qStride,
                in.rows.scale + row * in.rows.scaleStride, bias ? bias + r : nullptr, largest);
    }
    return y;
}

// Runs the rows in the given ranges and compares everything, including what must not have been written.
void checkTable(const Kernels& table, DType type, const Case& c, const std::vector<uint8_t>& w, const Inputs& in,
                const std::vector<int32_t>* index, const float* bias, const std::vector<float>& expected,
                const std::vector<std::pair<int64_t, int64_t>>& ranges) {
    const int64_t stride = c.rows + 3;
    const float poison = 12345.5f;
    std::vector<float> y(static_cast<size_t>(c.count * stride), poison);
    // A copy of the exact size, so that a sanitizer sees reads past the matrix.
    std::unique_ptr<uint8_t[]> exact(new uint8_t[w.size()]);
    std::memcpy(exact.get(), w.data(), w.size());
    Buffer scratch = aligned(matmulScratchBytes(c.cols));
    MatmulArgs args;
    args.w = {type, c.rows, c.cols, exact.get()};
    args.xQuant = &in.rows;
    args.rowIndex = index ? index->data() : nullptr;
    args.count = c.count;
    args.bias = bias;
    args.y = y.data();
    args.yStride = stride;
    std::vector<bool> covered(static_cast<size_t>(c.rows));
    for (const auto& [begin, end] : ranges) {
        table.matmul(args, begin, end, scratch.get());
        for (int64_t r = begin; r < end; ++r) covered[static_cast<size_t>(r)] = true;
    }
    int wrong = 0;
    for (int64_t i = 0; i < c.count; ++i)
        for (int64_t r = 0; r < stride; ++r) {
            const bool written = r < c.rows && covered[static_cast<size_t>(r)];
            const float want = written ? expected[static_cast<size_t>(i * c.rows + r)] : poison;
            const float got = y[static_cast<size_t>(i * stride + r)];
            if (bitsOf(want) != bitsOf(got) && wrong++ < 3)
                ADD_FAILURE() << table.name << " " << info(type).name << " cols " << c.cols << " count " << c.count
                              << " token " << i << " row " << r << ": " << got << " instead of " << want;
        }
    EXPECT_EQ(wrong, 0);
}

std::vector<int64_t> colsFor(DType type) {
    if (info(type).blockElements == 32) return {32, 64, 256, 288, 480, 768, 1024 + 96};
    if (info(type).blockElements == 64) return {64, 128, 192, 256, 320, 768, 1024 + 192};
    if (info(type).blockElements == 128) return {128, 256, 384, 768, 1024 + 128};
    return {256, 512, 768, 1280};
}

class QuantizedMatmul : public testing::TestWithParam<DType> {};

TEST_P(QuantizedMatmul, HasTheContractsBitsForEveryShape) {
    std::mt19937 random(sharpi::testSeed(7 + static_cast<unsigned>(GetParam())));
    for (const int64_t cols : colsFor(GetParam())) {
        for (const int64_t count : {1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 17}) {
            const Case c{19, cols, count};
            const auto w = reference::randomWeights(GetParam(), c.rows, cols, c.fill, random);
            const Inputs in = makeInputs(*tables()[0], count, cols, c.activations, random);
            const auto expected = expectedOutput(GetParam(), c, w, in, nullptr, nullptr, nullptr);
            for (const Kernels* table : testedTables())
                checkTable(*table, GetParam(), c, w, in, nullptr, nullptr, expected, {{0, 16}, {16, 19}});
        }
    }
}

TEST_P(QuantizedMatmul, HasTheContractsBitsForLongRowsAndManyTokens) {
    std::mt19937 random(sharpi::testSeed(11));
    for (const Case& c : {Case{3, 4096 + 256, 1}, Case{17, 4096 + 256, 6}, Case{5, 512, 64}, Case{3, 256, 512}}) {
        const auto w = reference::randomWeights(GetParam(), c.rows, c.cols, c.fill, random);
        const Inputs in = makeInputs(*tables()[0], c.count, c.cols, c.activations, random);
        const auto expected = expectedOutput(GetParam(), c, w, in, nullptr, nullptr, nullptr);
        for (const Kernels* table : testedTables())
            checkTable(*table, GetParam(), c, w, in, nullptr, nullptr, expected, {{0, c.rows}});
    }
}

// All bits of the quants and sub-scales are set, or none, with activations of +-127: 16-bit sums could overflow here.
TEST_P(QuantizedMatmul, SurvivesExtremeQuants) {
    std::mt19937 random(sharpi::testSeed(13));
    int64_t largest = 0;
    for (const Fill fill : {Fill::AllOnes, Fill::AllZeros}) {
        for (const int64_t count : {1, 2, 8}) {
            const Case c{18, 512, count, fill, Activations::Largest};
            const auto w = reference::randomWeights(GetParam(), c.rows, c.cols, fill, random);
            Inputs in = makeInputs(*tables()[0], count, c.cols, c.activations, random);
            for (int64_t i = 0; i < 64; ++i) in.x[static_cast<size_t>(i)] = i < 32 ? 3.0f : -3.0f;
            tables()[0]->quantizeRow(in.x.data(), c.cols, in.rows.q, in.rows.scale, in.rows.sums);
            const auto expected = expectedOutput(GetParam(), c, w, in, nullptr, nullptr, &largest);
            for (const Kernels* table : testedTables())
                checkTable(*table, GetParam(), c, w, in, nullptr, nullptr, expected, {{0, c.rows}});
        }
    }
    EXPECT_LT(largest, 1 << 22);  // or they would not fit a GPU's biased floats
}

TEST_P(QuantizedMatmul, SelectsRowsAddsBiasAndKeepsToItsRange) {
    std::mt19937 random(sharpi::testSeed(17));
    for (const int64_t count : {3, 9}) {
        const Case c{40, 768, count};
        const auto w = reference::randomWeights(GetParam(), c.rows, c.cols, c.fill, random);
        const Inputs in = makeInputs(*tables()[0], 6, c.cols, c.activations, random);
        std::vector<int32_t> index;
        for (int64_t i = 0; i < count; ++i) index.push_back(static_cast<int32_t>(random() % 6));
        std::vector<float> bias;
        for (int64_t r = 0; r < c.rows; ++r) bias.push_back(static_cast<float>(random() % 100) / 7.0f);
        const auto expected = expectedOutput(GetParam(), c, w, in, &index, bias.data(), nullptr);
        for (const Kernels* table : testedTables()) {
            checkTable(*table, GetParam(), c, w, in, &index, bias.data(), expected, {{3, 4}, {7, 29}});
            checkTable(*table, GetParam(), c, w, in, &index, bias.data(), expected, {{5, 5}, {39, 40}});
        }
    }
}

// Only the activations are rounded: by at most half a step, s / 2, each. So |y - exact| <= sum over blocks of
// (s / 2) * sum |w|. The rounding of inverse = 1 / s and of the float products and sums adds a little; the bound's
// factor 1.001 and the term with |w| |x| cover it (an accumulator sees cols / 1024 fmas, then 5 additions).
TEST_P(QuantizedMatmul, IsCloseToTheExactProduct) {
    std::mt19937 random(sharpi::testSeed(19));
    const int64_t rows = 20, cols = 1024;
    const auto w = reference::randomWeights(GetParam(), rows, cols, Fill::Random, random);
    for (const Kernels* table : testedTables()) {
        const Inputs in = makeInputs(*table, 6, cols, Activations::Normal, random);
        Buffer scratch = aligned(matmulScratchBytes(cols));
        std::vector<float> y(6 * rows, NAN), weights(cols);
        MatmulArgs args;
        args.w = {GetParam(), rows, cols, w.data()};
        args.xQuant = &in.rows;
        args.count = 6;
        args.y = y.data();
        args.yStride = rows;
        table->matmul(args, 0, rows, scratch.get());
        for (int64_t r = 0; r < rows; ++r) {
            table->dequantizeRow(GetParam(), &w[static_cast<size_t>(r) * rowBytes(GetParam(), cols)], cols,
                                 weights.data());
            for (int64_t t = 0; t < 6; ++t) {
                double exact = 0, bound = 0, magnitude = 0;
                for (int64_t i = 0; i < cols; ++i) {
                    const double wi = weights[static_cast<size_t>(i)], xi = in.x[static_cast<size_t>(t * cols + i)];
                    exact += wi * xi;
                    bound += std::fabs(wi) * in.rows.scale[t * in.rows.scaleStride + i / 32] / 2;
                    // Types with a minimum add d * q and m separately, and each may be larger than their sum.
                    const reference::Element e =
                        reference::element(GetParam(), &w[static_cast<size_t>(r) * rowBytes(GetParam(), cols)], i);
                    magnitude +=
                        (std::fabs(double(e.d) * e.sub * e.quant) + std::fabs(double(e.m) * e.min)) * std::fabs(xi);
                }
                ASSERT_NEAR(y[static_cast<size_t>(t * rows + r)], exact, 1.001 * bound + 2e-6 * magnitude)
                    << table->name << " row " << r;
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Types, QuantizedMatmul, testing::ValuesIn(reference::quantizedTypes()), [](const auto& test) {
    return std::string(sharpi::findDType(static_cast<uint32_t>(test.param))->name);
});

TEST(QuantizeRow, FollowsTheContractOnEveryTable) {
    std::mt19937 random(sharpi::testSeed(23));
    std::normal_distribution<float> normal;
    const int64_t cols = 32 * 21;
    std::vector<float> x(cols);
    for (int64_t i = 0; i < cols; ++i) x[i] = std::ldexp(normal(random), static_cast<int>(i / 32) * 9 - 126);
    x[32 * 3 + 5] = INFINITY;
    x[32 * 4 + 6] = -NAN;
    std::fill_n(x.begin() + 32 * 5, 32, -0.0f);
    for (int i = 0; i < 32; ++i)
        x[32 * 6 + i] = static_cast<float>(i % 2 ? 127 : i) + 0.5f - static_cast<float>(i % 2) * 0.5f;  // ties
    x[32 * 7] = 3.4e38f;
    std::fill_n(x.begin() + 32 * 8, 32, std::ldexp(1.0f, -100));
    std::fill_n(x.begin() + 32 * 9, 32, std::nextafter(std::ldexp(1.0f, -100), 0.0f));
    for (const Kernels* table : tables()) {
        const int64_t padded = 32 * 24;
        std::vector<int8_t> q(padded, 77);
        std::vector<float> scale(padded / 32, 77);
        std::vector<int16_t> sums(padded / 16, 77);
        table->quantizeRow(x.data(), cols, q.data(), scale.data(), sums.data());
        for (int64_t b = 0; b < padded / 32; ++b) {
            int8_t wantQ[32] = {};
            float wantScale = 0;
            int16_t wantSums[2] = {};
            if (b < cols / 32) reference::quantizeBlock(&x[b * 32], wantQ, &wantScale, wantSums);
            EXPECT_EQ(bitsOf(scale[b]), bitsOf(wantScale)) << table->name << " block " << b;
            EXPECT_EQ(0, std::memcmp(wantQ, &q[b * 32], 32)) << table->name << " block " << b;
            EXPECT_EQ(0, std::memcmp(wantSums, &sums[b * 2], 4)) << table->name << " block " << b;
        }
    }
}

// A block whose largest magnitude is `absmax`, quantized. The other elements would be ties if the scale were absmax /
// 127.
struct OneBlock {
    std::vector<float> x;
    int8_t q[256];
    float scale[8];
    int16_t sums[16];
};
OneBlock blockWith(const Kernels& table, float absmax) {
    OneBlock block;
    for (int i = 0; i < 31; ++i)
        block.x.push_back((i % 2 ? -absmax : absmax) * ((4 * static_cast<float>(i) + 1.5f) / 127));
    block.x.push_back(-absmax);
    table.quantizeRow(block.x.data(), 32, block.q, block.scale, block.sums);
    return block;
}

// Of every size, with fractions of ones and zeros at both ends, and random ones.
std::vector<float> blockMaxima() {
    std::mt19937 random(sharpi::testSeed(29));
    std::vector<float> maxima = {std::ldexp(1.0f, -100), 127, std::nextafter(127.0f, 128.0f),
                                 std::nextafter(127.0f, 0.0f), std::nextafter(std::ldexp(1.0f, 100), 0.0f)};
    for (int exponent = -99; exponent < 100; ++exponent)
        for (int n = 0; n < 100; ++n) {
            const int bits = static_cast<int>(random() % 24), fraction = static_cast<int>(random() >> 9);
            const int ends[] = {fraction, (1 << bits) - 1, (1 << 23) - (1 << bits)};
            maxima.push_back(std::ldexp(1.0f + std::ldexp(static_cast<float>(ends[n % 3] % (1 << 23)), -23), exponent));
        }
    return maxima;
}

TEST(QuantizeRow, RoundsScalesUpTo16Bits) {
    for (const Kernels* table : tables()) {
        for (const float absmax : blockMaxima()) {
            const OneBlock block = blockWith(*table, absmax);
            const float scale = block.scale[0], least = absmax / 127.0f;
            ASSERT_TRUE(std::isfinite(scale)) << absmax;
            ASSERT_EQ(bitsFromFloat(scale) & 0xff, 0u) << absmax;
            ASSERT_GE(scale, least);
            ASSERT_LT(bitsFromFloat(scale) - bitsFromFloat(least), 0x100u) << absmax;
            for (int i = 0; i < 32; ++i) ASSERT_LE(std::abs(block.q[i]), 127) << absmax;
            ASSERT_EQ(block.q[31], -127) << absmax;
            OneBlock want;
            reference::quantizeBlock(block.x.data(), want.q, want.scale, want.sums);
            ASSERT_EQ(bitsOf(scale), bitsOf(want.scale[0])) << absmax;
            ASSERT_EQ(0, std::memcmp(block.q, want.q, 32)) << absmax;
        }
        // 0x1.fffe02p+0 is rounded up to the next power of two.
        EXPECT_EQ(blockWith(*table, 127 * 0x1.fffe02p+0f).scale[0], 2.0f);
        EXPECT_EQ(blockWith(*table, 127 * 0x1.fffep+0f).scale[0], 0x1.fffep+0f);
        for (const float huge : {std::ldexp(1.0f, 100), std::numeric_limits<float>::max()}) {
            EXPECT_TRUE(std::isnan(blockWith(*table, huge).scale[0])) << huge;
            EXPECT_EQ(blockWith(*table, huge).q[31], 0) << huge;
        }
    }
}

// What 16 bits are for: see section 1 of the contract.
TEST(QuantizeRow, ScalesMultiplyBiasedIntegersExactly) {
    std::mt19937 random(sharpi::testSeed(31));
    for (const float absmax : blockMaxima()) {
        const float scale = blockWith(*tables()[0], absmax).scale[0];
        for (int n = 0; n < 10; ++n) {
            const int32_t integer = static_cast<int32_t>(random() % (1 << 23)) - (1 << 22) + (n == 0);
            const float biased = floatFromBits(static_cast<uint32_t>(0x4b400000 + integer));
            const float product = std::fma(scale, biased, -(scale * 12582912.0f));
            ASSERT_EQ(bitsOf(product), bitsOf(scale * static_cast<float>(integer))) << scale << " * " << integer;
        }
    }
}

TEST(KernelTables, AreFoundByName) {
    ASSERT_NE(kernelsFor("scalar"), nullptr);
    EXPECT_EQ(kernelsFor("none"), nullptr);
    for (const Kernels* table : tables()) EXPECT_EQ(kernelsFor(table->name), table);
}

}  // namespace
