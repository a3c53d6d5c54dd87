// Matrices of heads that are made when they are loaded, against the tensor's elements.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "core/half.h"
#include "cpu/kernels.h"
#include "placement/head_matrices.h"
#include "seed.h"

namespace {

using namespace sharpi;

constexpr int64_t kHeads = 3, kKeyRows = 5, kValueRows = 7, kCols = 64;

std::vector<float> floatsOf(const Matrix& m) {
    std::vector<float> floats(static_cast<size_t>(m.rows * m.cols));
    cpu::kernels().dequantizeRow(m.type, m.data, m.rows * m.cols, floats.data());
    return floats;
}

// A tensor in which each head has kKeyRows rows, and then kValueRows.
struct Tensor {
    explicit Tensor(DType type) {
        whole.type = type;
        whole.rows = kHeads * (kKeyRows + kValueRows);
        whole.cols = kCols;
        bytes.resize(static_cast<size_t>(whole.rows) * rowBytes(type, kCols));
        std::mt19937 random(sharpi::testSeed(11));
        for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
        // Whatever the type is, a 16-bit number at a multiple of the block's bytes is an ordinary one.
        const size_t block = info(type).isFloat ? sizeof(uint16_t) : info(type).blockBytes;
        for (size_t at = 0; at + 1 < bytes.size(); at += block) {
            const uint16_t scale = f16FromFloat(0.25f + static_cast<float>(random() % 100) / 128);
            bytes[at] = static_cast<uint8_t>(scale), bytes[at + 1] = static_cast<uint8_t>(scale >> 8);
        }
        whole.data = bytes.data();
    }
    ListedWeight part(WeightForm form, int64_t begin, int64_t rows) const {
        WeightSlice slice;
        slice.tensor = 0;
        slice.rowBegin = begin;
        slice.rows = rows;
        slice.cols = kCols;
        slice.experts = kHeads;
        slice.expertStride = kKeyRows + kValueRows;
        ListedWeight weight;
        weight.slices = {slice};
        weight.form = form;
        return weight;
    }
    Matrix whole;
    std::vector<uint8_t> bytes;
};

// What is made of a part, and its elements.
struct Made {
    Made(const Tensor& tensor, const ListedWeight& weight)
        : bytes(headMatrixBytes(weight, tensor.whole, cpu::kernels().dequantizeRow)) {
        matrix = headMatrix(weight, tensor.whole);
        EXPECT_EQ(matrix.data, nullptr);
        EXPECT_EQ(bytes.size(), static_cast<size_t>(matrix.rows) * rowBytes(matrix.type, matrix.cols));
        matrix.data = bytes.data();
        floats = floatsOf(matrix);
    }
    std::vector<uint8_t> bytes;
    Matrix matrix;
    std::vector<float> floats;
};

const std::vector<DType> kTypes = {DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0};

TEST(HeadMatrices, RowsStayAsTheyAre) {
    for (const DType type : kTypes) {
        SCOPED_TRACE(info(type).name);
        const Tensor tensor(type);
        const std::vector<float> all = floatsOf(tensor.whole);
        const Made made(tensor, tensor.part(WeightForm::HeadRows, kKeyRows, kValueRows));
        ASSERT_EQ(made.matrix.type, type);
        ASSERT_EQ(made.matrix.rows, kHeads * kValueRows);
        ASSERT_EQ(made.matrix.cols, kCols);
        for (int64_t i = 0; i < made.matrix.rows * kCols; ++i) {
            const int64_t row = i / kCols, head = row / kValueRows;
            const int64_t from = head * (kKeyRows + kValueRows) + kKeyRows + row % kValueRows;
            ASSERT_EQ(bitsFromFloat(made.floats[static_cast<size_t>(i)]),
                      bitsFromFloat(all[static_cast<size_t>(from * kCols + i % kCols)]));
        }
    }
}

TEST(HeadMatrices, ColumnsOfQuantizedTypesAreHalves) {
    for (const DType type : kTypes) {
        SCOPED_TRACE(info(type).name);
        const Tensor tensor(type);
        const std::vector<float> all = floatsOf(tensor.whole);
        const Made made(tensor, tensor.part(WeightForm::HeadColumns, 0, kKeyRows));
        const bool isFloat = info(type).isFloat;
        ASSERT_EQ(made.matrix.type, isFloat ? type : DType::F16);
        ASSERT_EQ(made.matrix.rows, kHeads * kCols);
        ASSERT_EQ(made.matrix.cols, kKeyRows);
        for (int64_t head = 0; head < kHeads; ++head) {
            for (int64_t row = 0; row < kKeyRows; ++row) {
                for (int64_t col = 0; col < kCols; ++col) {
                    const float from = all[static_cast<size_t>((head * (kKeyRows + kValueRows) + row) * kCols + col)];
                    const float to = made.floats[static_cast<size_t>((head * kCols + col) * kKeyRows + row)];
                    ASSERT_EQ(bitsFromFloat(to), bitsFromFloat(isFloat ? from : floatFromF16(f16FromFloat(from))));
                }
            }
        }
    }
}

}  // namespace
