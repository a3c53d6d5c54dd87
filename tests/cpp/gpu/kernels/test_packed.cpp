// Packed weights, for every type: the planes give back what was packed, and the reference product is the CPU's.
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include "gpu_test.h"
#include "kernels/formats/packed.h"
#include "kernels/matvec/matvec.h"
#include "reference_matmul.h"

namespace sharpi::cuda {
namespace {

using reference::Fill;

struct Shape {
    int64_t rows, cols;
};

std::vector<DType> allTypes() {
    std::vector<DType> types = reference::quantizedTypes();
    types.insert(types.end(), {DType::F32, DType::F16, DType::BF16});
    return types;
}

// Shapes that the type allows: whole, odd, more blocks than a warp has lanes, more rows than a thread block.
std::vector<Shape> shapesOf(DType type) {
    std::vector<Shape> shapes = {{1, 256}, {5, 768}, {130, 256}, {3, 256 * 9}, {7, 256 * 33}};
    const int64_t block = info(type).isFloat ? 32 : info(type).blockElements;
    if (block < 256) shapes.insert(shapes.end(), {{1, block}, {7, 3 * block}, {9, 37 * block}});
    return shapes;
}

class PackedTest : public GpuTest {
protected:
    std::vector<uint8_t> weights(DType type, Shape shape, Fill fill) {
        if (!info(type).isFloat) return reference::randomWeights(type, shape.rows, shape.cols, fill, random());
        std::vector<uint8_t> bytes(static_cast<size_t>(shape.rows) * rowBytes(type, shape.cols));
        const std::vector<float> values = randomFloats(static_cast<size_t>(shape.rows * shape.cols));
        for (size_t i = 0; i < values.size(); ++i) {
            const uint16_t half = type == DType::F16 ? f16FromFloat(values[i]) : bf16FromFloat(values[i]);
            if (type == DType::F32) std::memcpy(&bytes[4 * i], &values[i], 4);
            else std::memcpy(&bytes[2 * i], &half, 2);
        }
        return bytes;
    }
};

std::vector<float> dequantized(DType type, const std::vector<uint8_t>& file, Shape shape,
                               const std::vector<int32_t>& index) {
    std::vector<float> values(index.size() * static_cast<size_t>(shape.cols));
    for (size_t t = 0; t < index.size(); ++t)
        cpu::kernels().dequantizeRow(type, &file[static_cast<size_t>(index[t]) * rowBytes(type, shape.cols)],
                                     shape.cols, &values[t * static_cast<size_t>(shape.cols)]);
    return values;
}

TEST_F(PackedTest, RowsComeOutAsTheCpuHasThem) {
    for (const DType type : allTypes()) {
        for (const Shape shape : shapesOf(type)) {
            for (const Fill fill : {Fill::Random, Fill::AllOnes, Fill::AllZeros}) {
                SCOPED_TRACE(std::string(info(type).name) + " " + std::to_string(shape.rows) + " x " +
                             std::to_string(shape.cols));
                const std::vector<uint8_t> file = weights(type, shape, fill);
                const size_t row = rowBytes(type, shape.cols), packed = packedBytes(type, shape.rows, shape.cols);
                // The file is at an odd address, as it may be in a staging buffer.
                std::vector<uint8_t> shifted(1, 0);
                shifted.insert(shifted.end(), file.begin(), file.end());
                const DeviceArray<uint8_t> source(shifted), planes(packed);
                const Matrix matrix{type, shape.rows, shape.cols, planes.get()};
                const int64_t cut = shape.rows / 3;  // in two pieces, the later one first
                packRows(stream(), matrix, cut, shape.rows - cut, source.get() + 1 + static_cast<size_t>(cut) * row);
                packRows(stream(), matrix, 0, cut, source.get() + 1);
                std::vector<int32_t> index(static_cast<size_t>(shape.rows) + 1, 0);
                for (size_t r = 0; r + 1 < index.size(); ++r) index[r] = static_cast<int32_t>(index.size() - 2 - r);
                const DeviceArray<int32_t> rows(index);
                const DeviceArray<float> out(index.size() * static_cast<size_t>(shape.cols));
                embed(stream(), matrix, rows.get(), static_cast<int64_t>(index.size()), out.get());
                ASSERT_TRUE(sameBits(dequantized(type, file, shape, index), out.read()));
            }
        }
    }
}

// Rows as in the file, at any address, are those of the packed table.
TEST_F(PackedTest, RowsOfAFileComeOutTheSame) {
    for (const DType type : allTypes()) {
        std::vector<Shape> shapes = shapesOf(type);
        shapes.push_back({4, 256 * 100});  // several thread blocks for each row
        if (info(type).isFloat) shapes.push_back({5, 67});
        for (const Shape shape : shapes) {
            const std::vector<uint8_t> file = weights(type, shape, Fill::Random);
            std::vector<int32_t> index(static_cast<size_t>(shape.rows));
            std::iota(index.begin(), index.end(), 0);
            const std::vector<float> expected = dequantized(type, file, shape, index);
            for (const size_t skip : {0, 1, 2, 7, 8, 15}) {
                SCOPED_TRACE(std::string(info(type).name) + " " + std::to_string(shape.rows) + " x " +
                             std::to_string(shape.cols) + " at " + std::to_string(skip));
                std::vector<uint8_t> shifted(skip, 0xff);
                shifted.insert(shifted.end(), file.begin(), file.end());
                shifted.resize((shifted.size() + 15) / 16 * 16, 0xff);  // the last row's last piece of 16 bytes is read
                const DeviceArray<uint8_t> table(shifted);
                const DeviceArray<float> out(index.size() * static_cast<size_t>(shape.cols) + 16);
                expandRows(stream(), {type, shape.rows, shape.cols, table.get() + skip}, out.get());
                std::vector<float> got = out.read();
                for (size_t i = expected.size(); i < got.size(); ++i)
                    ASSERT_TRUE(std::isnan(got[i])) << "wrote past the end";
                got.resize(expected.size());
                ASSERT_TRUE(sameBits(expected, got));
            }
        }
    }
}

// As in a run: the rows are in the host's pinned memory.
TEST_F(PackedTest, RowsOfAPinnedFileComeOutTheSame) {
    const Shape shape{300, 4096};
    for (const DType type : {DType::Q4_K, DType::Q6_K, DType::Q8_0, DType::F16}) {
        const std::vector<uint8_t> file = weights(type, shape, Fill::Random);
        void* pinned = nullptr;
        require(cudaHostAlloc(&pinned, file.size() + 64, cudaHostAllocDefault));
        const std::unique_ptr<void, cudaError_t (*)(void*)> owner(pinned, cudaFreeHost);
        uint8_t* table = static_cast<uint8_t*>(pinned) + 33;
        std::copy(file.begin(), file.end(), table);
        std::vector<int32_t> index(static_cast<size_t>(shape.rows));
        std::iota(index.begin(), index.end(), 0);
        const DeviceArray<float> out(index.size() * static_cast<size_t>(shape.cols));
        expandRows(stream(), {type, shape.rows, shape.cols, table}, out.get());
        EXPECT_TRUE(sameBits(dequantized(type, file, shape, index), out.read())) << info(type).name;
    }
}

// Packing some rows does not change the bytes of the others.
TEST_F(PackedTest, RowsArePackedInPlace) {
    for (const DType type : allTypes()) {
        SCOPED_TRACE(info(type).name);
        const Shape shape{9, 768};
        const std::vector<uint8_t> file = weights(type, shape, Fill::Random),
                                   other = weights(type, shape, Fill::Random);
        const size_t row = rowBytes(type, shape.cols), packed = packedBytes(type, shape.rows, shape.cols);
        const DeviceArray<uint8_t> source(file), changed(other), whole(packed), parts(packed);
        packRows(stream(), {type, shape.rows, shape.cols, whole.get()}, 0, shape.rows, source.get());
        const Matrix matrix{type, shape.rows, shape.cols, parts.get()};
        packRows(stream(), matrix, 0, shape.rows, source.get());
        packRows(stream(), matrix, 2, 4, changed.get() + 2 * row);
        EXPECT_NE(whole.read(), parts.read());
        packRows(stream(), matrix, 2, 4, source.get() + 2 * row);
        EXPECT_EQ(whole.read(), parts.read());
        EXPECT_THROW(packRows(stream(), matrix, 6, 4, source.get()), Error);
    }
}

// Inputs of a product in the forms of both processors, made by the CPU.
struct Inputs {
    Inputs(const std::vector<float>& x, int64_t rows, int64_t cols)
        : floats(x),
          hostBuffer(cpu::quantizedRowsBytes(rows, cols) + 64),
          q(static_cast<size_t>(rows * cols)),
          scale(static_cast<size_t>(rows * cols / 32)),
          sums(static_cast<size_t>(rows * cols / 32)) {
        void* start = hostBuffer.data();
        size_t room = hostBuffer.size();
        host = cpu::quantizedRowsOver(std::align(64, room - 64, start, room), rows, cols);
        const int64_t blocks = cols / 32;
        std::vector<int8_t> codes(static_cast<size_t>(rows * cols));
        std::vector<float> scales(static_cast<size_t>(rows * blocks));
        std::vector<int32_t> both(static_cast<size_t>(rows * blocks));
        for (int64_t t = 0; t < rows; ++t) {
            int8_t* hostQ = host.q + t * host.qStride;
            float* hostScale = host.scale + t * host.scaleStride;
            int16_t* hostSums = host.sums + t * host.sumStride;
            cpu::kernels().quantizeRow(&x[static_cast<size_t>(t * cols)], cols, hostQ, hostScale, hostSums);
            for (int64_t i = 0; i < cols; ++i)
                codes[static_cast<size_t>(((t * 2 + i % 32 / 16) * blocks + i / 32) * 16 + i % 16)] = hostQ[i];
            for (int64_t b = 0; b < blocks; ++b) {
                scales[static_cast<size_t>(t * blocks + b)] = hostScale[b];
                const uint32_t low = static_cast<uint16_t>(hostSums[2 * b]),
                               high = static_cast<uint16_t>(hostSums[2 * b + 1]);
                both[static_cast<size_t>(t * blocks + b)] = static_cast<int32_t>(low | high << 16);
            }
        }
        require(cudaMemcpy(q.get(), codes.data(), codes.size(), cudaMemcpyHostToDevice));
        require(cudaMemcpy(scale.get(), scales.data(), scales.size() * sizeof(float), cudaMemcpyHostToDevice));
        require(cudaMemcpy(sums.get(), both.data(), both.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
    }
    MatvecInput device() const {
        MatvecInput input;
        input.floats = floats.get();
        input.quantized = {q.get(), scale.get(), sums.get()};
        return input;
    }

    DeviceArray<float> floats;
    std::vector<uint8_t> hostBuffer;
    cpu::QuantizedRows host;
    DeviceArray<int8_t> q;
    DeviceArray<float> scale;
    DeviceArray<int32_t> sums;
};

std::vector<float> cpuProduct(const Matrix& w, const std::vector<float>& x, const cpu::QuantizedRows* quantized,
                              int64_t count, const float* bias) {
    std::vector<float> y(static_cast<size_t>(count * w.rows));
    std::vector<uint8_t> scratch(cpu::matmulScratchBytes(w.cols) + 64);
    void* aligned = scratch.data();
    size_t room = scratch.size();
    std::align(64, room - 64, aligned, room);
    cpu::MatmulArgs args;
    args.w = w;
    args.xFloat = x.data();
    args.xQuant = quantized;
    args.count = count;
    args.bias = bias;
    args.y = y.data();
    args.yStride = w.rows;
    cpu::kernels().matmul(args, 0, w.rows, aligned);
    return y;
}

TEST_F(PackedTest, ReferenceProductIsTheCpus) {
    constexpr int kRows = 64;
    for (const DType type : allTypes()) {
        for (const Shape shape : shapesOf(type)) {
            const std::vector<uint8_t> file = weights(type, shape, Fill::Random);
            const DeviceArray<uint8_t> source(file);
            std::vector<float> x = randomFloats(static_cast<size_t>(kRows * shape.cols));
            std::fill_n(x.begin(), 32, 0.0f);
            const Inputs in(x, kRows, shape.cols);
            const std::vector<float> bias = randomFloats(static_cast<size_t>(shape.rows));
            const DeviceArray<float> deviceBias(bias);
            for (int count = 1; count <= kRows; count += 9) {
                SCOPED_TRACE(std::string(info(type).name) + " " + std::to_string(shape.rows) + " x " +
                             std::to_string(shape.cols) + ", " + std::to_string(count) + " rows");
                const bool biased = count % 2 == 1;
                const DeviceArray<float> y(static_cast<size_t>(count * shape.rows));
                matvecReference(stream(), in.device(), count, {type, shape.rows, shape.cols, source.get()},
                                biased ? deviceBias.get() : nullptr, y.get());
                const Matrix w{type, shape.rows, shape.cols, file.data()};
                ASSERT_TRUE(sameBits(cpuProduct(w, x, &in.host, count, biased ? bias.data() : nullptr), y.read()));
            }
        }
    }
}

// Float rows may have any length.
TEST_F(PackedTest, OddFloatRowsAreTheCpus) {
    for (const DType type : {DType::F32, DType::F16, DType::BF16}) {
        SCOPED_TRACE(info(type).name);
        const Shape shape{5, 67};
        const std::vector<uint8_t> file = weights(type, shape, Fill::Random);
        const DeviceArray<uint8_t> source(file), packed(packedBytes(type, shape.rows, shape.cols));
        const Matrix matrix{type, shape.rows, shape.cols, packed.get()},
            host{type, shape.rows, shape.cols, file.data()};
        packRows(stream(), matrix, 0, shape.rows, source.get());
        const DeviceArray<int32_t> rows(std::vector<int32_t>{4, 0});
        const DeviceArray<float> out(static_cast<size_t>(2 * shape.cols)), y(static_cast<size_t>(3 * shape.rows));
        embed(stream(), matrix, rows.get(), 2, out.get());
        EXPECT_TRUE(sameBits(dequantized(type, file, shape, {4, 0}), out.read()));

        const std::vector<float> x = randomFloats(static_cast<size_t>(3 * shape.cols));
        const DeviceArray<float> deviceX(x);
        MatvecInput input;
        input.floats = deviceX.get();
        matvecReference(stream(), input, 3, matrix, nullptr, y.get());
        EXPECT_TRUE(sameBits(cpuProduct(host, x, nullptr, 3, nullptr), y.read()));
    }
}

// Every f16 scale, subnormal or not, and every exponent byte gives the CPU's float.
TEST_F(PackedTest, ScalesOfEverySizeAreExact) {
    constexpr int64_t kCols = 32;
    for (const DType type : {DType::Q8_0, DType::MXFP4}) {
        const int64_t rows = type == DType::Q8_0 ? 0x7c00 : 255;
        std::vector<uint8_t> file = weights(type, {rows, kCols}, Fill::Random);
        const size_t row = rowBytes(type, kCols);
        for (int64_t r = 0; r < rows; ++r)
            std::memcpy(&file[static_cast<size_t>(r) * row], &r, type == DType::Q8_0 ? 2 : 1);
        const DeviceArray<uint8_t> source(file), planes(packedBytes(type, rows, kCols));
        const Matrix matrix{type, rows, kCols, planes.get()};
        packRows(stream(), matrix, 0, rows, source.get());
        std::vector<int32_t> index(static_cast<size_t>(rows));
        for (size_t i = 0; i < index.size(); ++i) index[i] = static_cast<int32_t>(i);
        const DeviceArray<int32_t> deviceIndex(index);
        const DeviceArray<float> out(index.size() * kCols);
        embed(stream(), matrix, deviceIndex.get(), rows, out.get());
        EXPECT_TRUE(sameBits(dequantized(type, file, {rows, kCols}, index), out.read())) << info(type).name;
    }
}

}  // namespace
}  // namespace sharpi::cuda
