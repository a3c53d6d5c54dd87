// Element types: sizes, dequantization on every table, and the 16-bit floats.
// tests/python/engine/test_dequantize.py compares the same function with the format's published reference.
#include <gtest/gtest.h>

#include <cmath>
#include <iterator>
#include <limits>
#include <string>

#include "core/error.h"
#include "kernel_tables.h"
#include "reference_matmul.h"
#include "seed.h"

using namespace sharpi;
using namespace sharpi::cpu;

namespace {

class Dequantize : public testing::TestWithParam<DType> {};

TEST_P(Dequantize, GivesEachElementItsValueOnEveryTable) {
    const DType type = GetParam();
    std::mt19937 random(sharpi::testSeed(3));
    for (const int64_t cols : {256, 768, 32 * 11, 64 * 5, 128 * 3}) {
        if (cols % info(type).blockElements != 0) continue;
        const auto bytes = reference::randomWeights(type, 1, cols, reference::Fill::Random, random);
        for (const Kernels* table : tables()) {
            std::vector<float> out(static_cast<size_t>(cols) + 1, 99.0f);
            table->dequantizeRow(type, bytes.data(), cols, out.data());
            for (int64_t i = 0; i < cols; ++i) {
                const reference::Element e = reference::element(type, bytes.data(), i);
                const float scale = e.d * static_cast<float>(e.sub);
                const float product = scale * static_cast<float>(e.quant);
                const float min = e.m * static_cast<float>(e.min);
                const float want = reference::hasMin(type) ? product + min : product;
                ASSERT_EQ(bitsFromFloat(want), bitsFromFloat(out[static_cast<size_t>(i)]))
                    << table->name << " element " << i << ": " << out[static_cast<size_t>(i)] << " instead of " << want;
            }
            EXPECT_EQ(out.back(), 99.0f);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Types, Dequantize, testing::ValuesIn(reference::quantizedTypes()), [](const auto& test) {
    return std::string(sharpi::findDType(static_cast<uint32_t>(test.param))->name);
});

TEST(Dequantize, KnowsFloatTypes) {
    const float values[4] = {1.5f, -0.0f, 65504.0f, 5.9604644775390625e-8f};
    for (const Kernels* table : tables()) {
        float out[4];
        table->dequantizeRow(DType::F32, values, 4, out);
        EXPECT_EQ(0, std::memcmp(values, out, sizeof values));
        uint16_t stored[4];
        for (int i = 0; i < 4; ++i) stored[i] = f16FromFloat(values[i]);
        table->dequantizeRow(DType::F16, stored, 4, out);
        EXPECT_EQ(0, std::memcmp(values, out, sizeof values));
        for (int i = 0; i < 4; ++i) stored[i] = bf16FromFloat(values[i]);
        table->dequantizeRow(DType::BF16, stored, 4, out);
        EXPECT_EQ(out[0], 1.5f);
        EXPECT_TRUE(out[1] == 0.0f && std::signbit(out[1]));
        EXPECT_EQ(out[2], 65536.0f);
    }
}

TEST(Half, RoundTripsEveryF16) {
    for (uint32_t h = 0; h < 0x10000; ++h) {
        const float value = floatFromF16(static_cast<uint16_t>(h));
        const int exponent = static_cast<int>(h >> 10 & 31), fraction = static_cast<int>(h & 1023);
        if (exponent == 31) {
            EXPECT_EQ(std::isnan(value), fraction != 0);
            if (fraction != 0) continue;
        } else {
            const double want = std::ldexp(exponent ? 1024 + fraction : fraction, (exponent ? exponent : 1) - 25);
            ASSERT_EQ(value, h & 0x8000 ? -want : want);
        }
        ASSERT_EQ(f16FromFloat(value), h);
    }
}

TEST(Half, RoundsToNearestEven) {
    for (uint32_t h = 0; h < 0x7c00; ++h) {  // between each two neighbours; above the largest lies infinity
        const float low = floatFromF16(static_cast<uint16_t>(h));
        const float high = h + 1 == 0x7c00 ? 65536.0f : floatFromF16(static_cast<uint16_t>(h + 1));
        const float middle = (low + high) / 2;
        ASSERT_EQ(f16FromFloat(middle), h % 2 ? h + 1 : h);
        ASSERT_EQ(f16FromFloat(std::nextafter(middle, 0.0f)), h);
        ASSERT_EQ(f16FromFloat(-std::nextafter(middle, 1e9f)), 0x8000 + h + 1);
    }
    EXPECT_EQ(f16FromFloat(3e38f), 0x7c00);
    EXPECT_EQ(f16FromFloat(1e-30f), 0);
    EXPECT_EQ(bf16FromFloat(floatFromBits(0x3f808000)), 0x3f80);
    EXPECT_EQ(bf16FromFloat(floatFromBits(0x3f818000)), 0x3f82);
    EXPECT_EQ(bf16FromFloat(floatFromBits(0x3f808001)), 0x3f81);
    EXPECT_TRUE(std::isnan(floatFromBf16(bf16FromFloat(std::numeric_limits<float>::quiet_NaN()))));
}

TEST(Half, KnowsEveryUe4m3) {
    for (int byte = 0; byte < 256; ++byte)
        EXPECT_EQ(halfFromUe4m3(static_cast<uint8_t>(byte)), reference::halfOfUe4m3(byte)) << byte;
}

TEST(Half, KnowsEveryE8m0) {
    for (int e = 0; e < 256; ++e) EXPECT_EQ(halfFromE8m0(static_cast<uint8_t>(e)), std::ldexp(1.0, e - 128));
}

// As GGUF files have them: number, name, elements and bytes of a block, floats or codes.
TEST(DTypes, AreThoseOfTheFormat) {
    struct Known {
        uint32_t number;
        const char* name;
        int64_t elements;
        size_t bytes;
        bool isFloat;
    };
    const Known types[] = {
        {0, "F32", 1, 4, true},        {1, "F16", 1, 2, true},          {2, "Q4_0", 32, 18, false},
        {3, "Q4_1", 32, 20, false},    {6, "Q5_0", 32, 22, false},      {7, "Q5_1", 32, 24, false},
        {8, "Q8_0", 32, 34, false},    {10, "Q2_K", 256, 84, false},    {11, "Q3_K", 256, 110, false},
        {12, "Q4_K", 256, 144, false}, {13, "Q5_K", 256, 176, false},   {14, "Q6_K", 256, 210, false},
        {20, "IQ4_NL", 32, 18, false}, {23, "IQ4_XS", 256, 136, false}, {30, "BF16", 1, 2, true},
        {39, "MXFP4", 32, 17, false},  {16, "IQ2_XXS", 256, 66, false}, {17, "IQ2_XS", 256, 74, false},
        {22, "IQ2_S", 256, 82, false}, {18, "IQ3_XXS", 256, 98, false}, {21, "IQ3_S", 256, 110, false},
        {19, "IQ1_S", 256, 50, false}, {29, "IQ1_M", 256, 56, false},   {34, "TQ1_0", 256, 54, false},
        {35, "TQ2_0", 256, 66, false}, {40, "NVFP4", 64, 36, false},    {41, "Q1_0", 128, 18, false},
        {26, "I32", 1, 4, false}};
    size_t found = 0;
    for (uint32_t number = 0; number < 100; ++number) found += findDType(number) != nullptr;
    EXPECT_EQ(found, std::size(types));
    for (const Known& known : types) {
        const DTypeInfo* type = findDType(known.number);
        ASSERT_NE(type, nullptr) << known.name;
        EXPECT_STREQ(type->name, known.name);
        EXPECT_EQ(type->blockElements, known.elements) << known.name;
        EXPECT_EQ(type->blockBytes, known.bytes) << known.name;
        EXPECT_EQ(type->isFloat, known.isFloat) << known.name;
    }
}

TEST(DTypes, AreFoundByNumberAndMeasured) {
    EXPECT_EQ(findDType(12), &info(DType::Q4_K));
    EXPECT_EQ(findDType(4), nullptr);
    EXPECT_EQ(rowBytes(DType::Q4_K, 512), 288u);
    EXPECT_EQ(rowBytes(DType::Q8_0, 96), 102u);
    EXPECT_EQ(rowBytes(DType::BF16, 7), 14u);
    EXPECT_THROW(rowBytes(DType::Q6_K, 128), Error);
    EXPECT_THROW(rowBytes(DType::F32, -1), Error);
    EXPECT_THROW(info(static_cast<DType>(999)), Error);
}

}  // namespace
