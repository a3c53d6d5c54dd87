// Products by head against the CPU's kernels, bit for bit: every type, rows of one launch and of many blocks, heads
// whose rows divide no tile, and parts of a matrix that cut heads.
#include <algorithm>
#include <vector>

#include "core/half.h"
#include "cpu/kernels.h"
#include "gpu_test.h"
#include "kernels/formats/packed.h"
#include "kernels/matvec/by_head.h"
#include "reference_matmul.h"

namespace sharpi::cuda {
namespace {

constexpr int64_t kRowCounts[] = {1, 2, 3, 4, 5, 8, 9, 16, 31, 33, 64, 70};

std::vector<DType> allTypes() {
    std::vector<DType> types = reference::quantizedTypes();
    types.insert(types.end(), {DType::F32, DType::F16, DType::BF16});
    return types;
}

struct Shape {
    int32_t heads;
    int64_t rowsOfHead, cols, stride;
};

class ByHead : public GpuTest {
protected:
    std::vector<uint8_t> weights(DType type, int64_t rows, int64_t cols) {
        if (!info(type).isFloat) return reference::randomWeights(type, rows, cols, reference::Fill::Random, random());
        std::vector<uint8_t> file(static_cast<size_t>(rows) * rowBytes(type, cols));
        const std::vector<float> values = randomFloats(static_cast<size_t>(rows * cols));
        for (size_t i = 0; i < values.size(); ++i) {
            const uint16_t half = type == DType::F16 ? f16FromFloat(values[i]) : bf16FromFloat(values[i]);
            if (type == DType::F32) std::memcpy(&file[4 * i], &values[i], 4);
            else std::memcpy(&file[2 * i], &half, 2);
        }
        return file;
    }

    // Of all rows and heads; what is between the heads' products stays NaN.
    static std::vector<float> onCpu(const Matrix& w, const Shape& s, const std::vector<float>& x, int64_t rows) {
        std::vector<uint8_t> memory(cpu::quantizedRowsBytes(rows * s.heads, s.cols) + 64),
            scratch(cpu::matmulScratchBytes(s.cols) + 64);
        const auto aligned = [](std::vector<uint8_t>& bytes) {
            return bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64) % 64;
        };
        cpu::QuantizedRows quantized;
        if (!info(w.type).isFloat) {
            quantized = cpu::quantizedRowsOver(aligned(memory), rows * s.heads, s.cols);
            for (int64_t i = 0; i < rows * s.heads; ++i)
                cpu::kernels().quantizeRow(
                    &x[static_cast<size_t>(i * s.cols)], s.cols, quantized.q + i * quantized.qStride,
                    quantized.scale + i * quantized.scaleStride, quantized.sums + i * quantized.sumStride);
        }
        std::vector<float> y(static_cast<size_t>(rows * s.heads * s.stride));
        std::memset(y.data(), 0xff, y.size() * sizeof(float));
        for (int64_t head = 0; head < s.heads; ++head) {
            std::vector<int32_t> pieces;
            for (int64_t t = 0; t < rows; ++t) pieces.push_back(static_cast<int32_t>(t * s.heads + head));
            cpu::MatmulArgs args;
            args.w = w;
            args.w.rows = s.rowsOfHead;
            args.w.data += static_cast<size_t>(head * s.rowsOfHead) * rowBytes(w.type, s.cols);
            args.xFloat = x.data();
            args.xQuant = &quantized;
            args.rowIndex = pieces.data();
            args.count = rows;
            args.y = y.data() + head * s.stride;
            args.yStride = s.heads * s.stride;
            cpu::kernels().matmul(args, 0, s.rowsOfHead, aligned(scratch));
        }
        return y;
    }

    // cuts: where the parts of the matrix begin, besides 0.
    void compare(DType type, const Shape& s, int64_t rows, std::vector<int64_t> cuts = {}) {
        SCOPED_TRACE(std::string(info(type).name) + ", " + std::to_string(s.heads) + " heads of " +
                     std::to_string(s.rowsOfHead) + " x " + std::to_string(s.cols) + ", rows " + std::to_string(rows) +
                     ", parts " + std::to_string(cuts.size() + 1));
        const int64_t all = s.heads * s.rowsOfHead, pieces = rows * s.heads;
        const std::vector<uint8_t> file = weights(type, all, s.cols);
        const std::vector<float> x = randomFloats(static_cast<size_t>(pieces * s.cols));
        const DeviceArray<float> floats(x), y(static_cast<size_t>(pieces * s.stride));
        const DeviceArray<uint8_t> onDevice(file);
        const DeviceArray<uint8_t> buffer(info(type).isFloat ? 1 : quantizedRowsBytes(pieces, s.cols));
        MatvecInput input;
        if (info(type).isFloat) {
            input.floats = floats.get();
        } else {
            input.quantized = quantizedRowsOver(buffer.get(), pieces, s.cols);
            convertRows(stream(), floats.get(), pieces, s.cols, {nullptr, input.quantized, {}});
        }
        cuts.insert(cuts.begin(), 0);
        cuts.push_back(all);
        for (size_t i = 0; i + 1 < cuts.size(); ++i) {
            const int64_t count = cuts[i + 1] - cuts[i];
            const DeviceArray<uint8_t> packed(packedBytes(type, count, s.cols));
            const Matrix part = {type, count, s.cols, packed.get()};
            packRows(stream(), part, 0, count, onDevice.get() + static_cast<size_t>(cuts[i]) * rowBytes(type, s.cols));
            matvecByHead(stream(), input, rows, {part, cuts[i], s.rowsOfHead, s.heads, s.stride}, y.get());
            require(cudaDeviceSynchronize());
        }
        EXPECT_TRUE(sameBits(onCpu({type, all, s.cols, file.data()}, s, x, rows), y.read()));
    }
};

TEST_F(ByHead, EveryTypeHasTheBitsOfTheCpu) {
    for (const DType type : allTypes())
        for (const int64_t rows : kRowCounts) ASSERT_NO_FATAL_FAILURE(compare(type, {3, 40, 256, 48}, rows));
}

// Sizes of models, and sizes that divide nothing. Float rows may have any number of columns.
TEST_F(ByHead, TakesHeadsOfAnySize) {
    for (const int64_t rows : {1, 4, 7, 33, 64}) {
        for (const DType type : {DType::Q8_0, DType::Q4_0, DType::Q5_1, DType::NVFP4}) {
            compare(type, {20, 512, 192, 576}, rows);
            compare(type, {20, 256, 512, 256}, rows);
            compare(type, {1, 1, 64, 1}, rows);
            compare(type, {7, 17, 64, 19}, rows);
            compare(type, {5, 33, 1088, 40}, rows);
        }
        compare(DType::Q4_K, {16, 128, 2304, 128}, rows);
        for (const DType type : {DType::F32, DType::F16, DType::BF16}) {
            compare(type, {20, 512, 192, 576}, rows);
            compare(type, {3, 21, 20, 30}, rows);
            compare(type, {2, 5, 7, 5}, rows);
        }
    }
}

TEST_F(ByHead, TakesPartsThatCutHeads) {
    const Shape shape = {4, 40, 256, 44};
    for (const DType type : {DType::Q8_0, DType::Q6_K, DType::IQ3_S, DType::F16})
        for (const int64_t rows : {1, 3, 12, 40}) {
            compare(type, shape, rows, {40, 80});
            compare(type, shape, rows, {1, 39, 41, 100, 159});
            compare(type, shape, rows, {33});
        }
}

// More rows than a step has: those of a prompt.
TEST_F(ByHead, TakesManyRows) {
    for (const DType type : {DType::Q8_0, DType::F16, DType::IQ4_XS}) compare(type, {3, 24, 256, 24}, 1000);
}

}  // namespace
}  // namespace sharpi::cuda
