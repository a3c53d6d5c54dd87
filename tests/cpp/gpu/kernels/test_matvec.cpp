// The matrix-vector kernels against the CPU's and against the plain reference, bit for bit: every type and every number
// of rows, with shapes that do not divide a warp's work evenly.
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include "column_test.h"
#include "core/portable.h"
#include "cpu/kernels.h"
#include "gpu_test.h"
#include "kernels/experts/expert_down.h"
#include "kernels/formats/packed.h"
#include "kernels/matvec/matvec.h"
#include "reference_matmul.h"

namespace sharpi::cuda {
namespace {

using reference::Fill;

// Each number of rows up to a tile of the tensor cores, and those around the sizes of larger kernels.
constexpr int64_t kRowCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130};
static_assert(kMmaFromRows == 5 && WideColumns::kBundle == 32);

std::vector<DType> allTypes() {
    std::vector<DType> types = reference::quantizedTypes();
    types.insert(types.end(), {DType::F32, DType::F16, DType::BF16});
    return types;
}

// A matrix, with the file's bytes on the host and packed on the device; or a contiguous stack of matrices.
struct Weights {
    DType type;
    int64_t rows, cols, count;
    std::vector<uint8_t> file;
    std::unique_ptr<DeviceArray<uint8_t>> fileOnDevice, packed;

    size_t fileBytes() const { return static_cast<size_t>(rows) * rowBytes(type, cols); }
    Matrix host(int64_t expert = 0) const {
        return {type, rows, cols, file.data() + static_cast<size_t>(expert) * fileBytes()};
    }
    Matrix unpacked() const { return {type, rows, cols, fileOnDevice->get()}; }
    Matrix device() const { return {type, rows, cols, packed->get()}; }
    ExpertStack stack() const { return {device(), packedBytes(type, rows, cols), static_cast<int32_t>(count)}; }
};

// Activations on the host, and on the device in the form that a type reads.
struct Inputs {
    int64_t rows, cols;
    std::vector<float> x;
    std::unique_ptr<DeviceArray<float>> floats;
    std::unique_ptr<DeviceArray<uint8_t>> buffer;
    MatvecInput input() const {
        MatvecInput in;
        if (floats) in.floats = floats->get();
        if (buffer) in.quantized = quantizedRowsOver(buffer->get(), rows, cols);
        return in;
    }
};

struct CpuRows {
    std::vector<uint8_t> memory;
    cpu::QuantizedRows rows;
};

CpuRows quantizeOnCpu(const std::vector<float>& x, int64_t rows, int64_t cols) {
    CpuRows made;
    made.memory.resize(cpu::quantizedRowsBytes(rows, cols) + 64);
    const size_t skip = (64 - reinterpret_cast<uintptr_t>(made.memory.data()) % 64) % 64;
    made.rows = cpu::quantizedRowsOver(made.memory.data() + skip, rows, cols);
    for (int64_t t = 0; t < rows; ++t)
        cpu::kernels().quantizeRow(&x[static_cast<size_t>(t * cols)], cols, made.rows.q + t * made.rows.qStride,
                                   made.rows.scale + t * made.rows.scaleStride,
                                   made.rows.sums + t * made.rows.sumStride);
    return made;
}

// The device's layout of quantized rows: halves of blocks apart, sums as pairs.
struct DeviceLayout {
    std::vector<int8_t> q;
    std::vector<float> scale;
    std::vector<int32_t> sums;
};

DeviceLayout layoutOf(const cpu::QuantizedRows& from) {
    const int64_t blocks = from.cols / 32;
    DeviceLayout to;
    to.q.resize(static_cast<size_t>(from.rows * from.cols));
    for (int64_t t = 0; t < from.rows; ++t) {
        for (int64_t i = 0; i < from.cols; ++i)
            to.q[static_cast<size_t>(((t * 2 + i % 32 / 16) * blocks + i / 32) * 16 + i % 16)] =
                from.q[t * from.qStride + i];
        for (int64_t b = 0; b < blocks; ++b) {
            const int16_t* sums = from.sums + t * from.sumStride + 2 * b;
            to.scale.push_back(from.scale[t * from.scaleStride + b]);
            to.sums.push_back(static_cast<int32_t>(static_cast<uint16_t>(sums[0]) |
                                                   static_cast<uint32_t>(static_cast<uint16_t>(sums[1])) << 16));
        }
    }
    return to;
}

template <typename T> std::vector<T> readBack(const T* device, size_t count) {
    std::vector<T> values(count);
    require(cudaDeviceSynchronize());
    require(cudaMemcpy(values.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
}

template <typename T> void put(T* device, const std::vector<T>& values) {
    require(cudaMemcpy(device, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
}

// y[t, r] of all rows on the CPU.
std::vector<float> product(const Matrix& w, const std::vector<float>& x, int64_t rows, const float* bias = nullptr) {
    std::vector<float> y(static_cast<size_t>(rows * w.rows), -1.0f);
    CpuRows quantized;
    cpu::MatmulArgs args;
    args.w = w;
    args.xFloat = x.data();
    if (!info(w.type).isFloat) {
        quantized = quantizeOnCpu(x, rows, w.cols);
        args.xQuant = &quantized.rows;
    }
    args.count = rows;
    args.bias = bias;
    args.y = y.data();
    args.yStride = w.rows;
    std::vector<uint8_t> scratch(cpu::matmulScratchBytes(w.cols) + 64);
    const size_t skip = (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
    cpu::kernels().matmul(args, 0, w.rows, scratch.data() + skip);
    return y;
}

std::vector<float> gatedProduct(const Matrix& gate, const Matrix& up, const std::vector<float>& x, int64_t rows) {
    std::vector<float> g = product(gate, x, rows);
    const std::vector<float> u = product(up, x, rows);
    for (int64_t t = 0; t < rows; ++t)  // row by row, as the engine calls it
        cpu::kernels().gatedActivation(
            {}, {&g[static_cast<size_t>(t * gate.rows)], &u[static_cast<size_t>(t * gate.rows)]}, gate.rows);
    return g;
}

std::vector<float> rowOf(const std::vector<float>& x, int64_t row, int64_t cols) {
    return {x.begin() + row * cols, x.begin() + (row + 1) * cols};
}

class MatvecTest : public GpuTest {
protected:
    // Copies w.file to the device and packs it.
    void pack(Weights& w) {
        w.fileOnDevice = std::make_unique<DeviceArray<uint8_t>>(w.file);
        const size_t stride = packedBytes(w.type, w.rows, w.cols);
        w.packed = std::make_unique<DeviceArray<uint8_t>>(stride * static_cast<size_t>(w.count));
        for (int64_t e = 0; e < w.count; ++e) {
            Matrix to = w.device();
            to.data += static_cast<size_t>(e) * stride;
            packRows(stream(), to, 0, w.rows, w.fileOnDevice->get() + static_cast<size_t>(e) * w.fileBytes());
        }
    }

    Weights weights(DType type, int64_t rows, int64_t cols, int64_t count = 1, Fill fill = Fill::Random) {
        Weights w{type, rows, cols, count, {}, nullptr, nullptr};
        if (info(type).isFloat) {
            w.file.resize(w.fileBytes() * static_cast<size_t>(count));
            const std::vector<float> values = randomFloats(static_cast<size_t>(rows * cols * count));
            for (size_t i = 0; i < values.size(); ++i) {
                const uint16_t half = type == DType::F16 ? f16FromFloat(values[i]) : bf16FromFloat(values[i]);
                if (type == DType::F32) std::memcpy(&w.file[4 * i], &values[i], 4);
                else std::memcpy(&w.file[2 * i], &half, 2);
            }
        } else {
            w.file = reference::randomWeights(type, rows * count, cols, fill, random());
        }
        pack(w);
        return w;
    }

    Inputs inputs(std::vector<float> x, int64_t rows, int64_t cols, bool isFloat) {
        Inputs in{rows, cols, std::move(x), nullptr, nullptr};
        if (isFloat) {
            in.floats = std::make_unique<DeviceArray<float>>(in.x);
            return in;
        }
        in.buffer = std::make_unique<DeviceArray<uint8_t>>(quantizedRowsBytes(rows, cols));
        const CpuRows quantized = quantizeOnCpu(in.x, rows, cols);
        const DeviceLayout layout = layoutOf(quantized.rows);
        const QuantizedRows to = in.input().quantized;
        put(to.q, layout.q);
        put(to.scale, layout.scale);
        put(to.sums, layout.sums);
        return in;
    }
    Inputs inputs(int64_t rows, int64_t cols, bool isFloat) {
        return inputs(randomFloats(static_cast<size_t>(rows * cols)), rows, cols, isFloat);
    }

    // Quantized inputs whose columns were written with them. Products that read their rows get poison.
    Inputs inputsInColumns(int64_t rows, int64_t cols) {
        Inputs in{rows, cols, randomFloats(static_cast<size_t>(rows * cols)), nullptr, nullptr};
        in.buffer = std::make_unique<DeviceArray<uint8_t>>(quantizedRowsBytes(rows, cols));
        const DeviceArray<float> x(in.x);
        convertRows(stream(), x.get(), rows, cols, {nullptr, rowsWithColumns(*in.buffer, rows, cols), {}});
        require(cudaDeviceSynchronize());
        require(cudaMemset(in.buffer->get(), 0xff, static_cast<size_t>(rows * cols)));
        require(cudaDeviceSynchronize());
        return in;
    }

    // matvecGated with each number of rows against the CPU, its results as blocks. Defined after expectForms.
    void checkGated(DType type, int64_t hidden, int64_t cols, const std::vector<int64_t>& rowCounts);

    // matvec of one matrix against the CPU and the reference kernel.
    void checkProduct(const Weights& w, const Inputs& in, const std::vector<float>& bias) {
        SCOPED_TRACE(std::string(info(w.type).name) + " " + std::to_string(w.rows) + " x " + std::to_string(w.cols) +
                     ", rows " + std::to_string(in.rows));
        std::unique_ptr<DeviceArray<float>> biasOnDevice;
        if (!bias.empty()) biasOnDevice = std::make_unique<DeviceArray<float>>(bias);
        const float* deviceBias = biasOnDevice ? biasOnDevice->get() : nullptr;
        const size_t count = static_cast<size_t>(in.rows * w.rows);
        const DeviceArray<float> y(count), plain(count);
        matvec(stream(), in.input(), static_cast<int>(in.rows), {{w.device(), deviceBias, y.get()}});
        matvecReference(stream(), in.input(), static_cast<int>(in.rows), w.unpacked(), deviceBias, plain.get());
        const std::vector<float> got = y.read();
        EXPECT_TRUE(sameBits(product(w.host(), in.x, in.rows, bias.empty() ? nullptr : bias.data()), got));
        EXPECT_TRUE(sameBits(plain.read(), got));
    }
};

struct Shape {
    int64_t rows, cols;
};

// One block, less than a warp of blocks, more than a warp, and more than the steps in flight; one row, prime numbers of
// rows, and several thread blocks.
std::vector<Shape> shapesOf(DType type) {
    if (info(type).isFloat) return {{1, 1}, {5, 33}, {19, 300}, {67, 768}, {3, 2049}};
    std::vector<Shape> shapes = {{1, 256}, {19, 768}, {67, 1280}, {3, 4096 + 256}};
    const int64_t block = info(type).blockElements;
    if (block < 256) shapes.insert(shapes.end(), {{1, block}, {2, 3 * block}, {17, 35 * block}});
    return shapes;
}

TEST_F(MatvecTest, EveryTypeAndNumberOfRowsHasTheCpusBits) {
    for (const DType type : allTypes()) {
        for (const Shape shape : shapesOf(type)) {
            const Weights w = weights(type, shape.rows, shape.cols);
            for (const int64_t rows : kRowCounts)
                checkProduct(w, inputs(rows, shape.cols, info(type).isFloat),
                             rows % 2 ? randomFloats(static_cast<size_t>(shape.rows)) : std::vector<float>());
        }
    }
}

// All bits of the codes and scales are set, or none, and activations are +-127: the largest possible integers.
TEST_F(MatvecTest, ExtremesHaveTheCpusBits) {
    for (const DType type : reference::quantizedTypes()) {
        for (const Fill fill : {Fill::AllOnes, Fill::AllZeros}) {
            const Weights w = weights(type, 5, 512, 1, fill);
            for (const int64_t rows : {1, 3, 12, 20}) {
                std::vector<float> x(static_cast<size_t>(rows * 512));
                for (size_t i = 0; i < x.size(); ++i) x[i] = i / 64 % 2 ? 3.0f : (i % 2 ? -3.0f : 3.0f);
                std::fill_n(x.begin() + 32, 32, -3.0f);
                std::fill_n(x.begin() + 64, 32, 0.0f);
                checkProduct(w, inputs(x, rows, 512, false), {});
            }
        }
    }
}

// Blocks of every size that leaves sums finite, from those that count as zero on.
TEST_F(MatvecTest, ScalesOfEverySizeHaveTheCpusBits) {
    for (const DType type : reference::quantizedTypes()) {
        const Weights w = weights(type, 5, 1280);
        for (const int64_t rows : {1, 2, 4, 8, 20}) {
            std::vector<float> x = randomFloats(static_cast<size_t>(rows * 1280));
            for (size_t i = 0; i < x.size(); ++i) {
                const int block = static_cast<int>(i / 32), size = i < x.size() / 2 ? 41 : 141;
                x[i] = std::ldexp(x[i], block * 7 % size - 100);
            }
            checkProduct(w, inputs(x, rows, 1280, false), {});
        }
    }
}

// A row does not depend on the rest of its call.
TEST_F(MatvecTest, BitsDoNotDependOnTheNumberOfRows) {
    for (const DType type : {DType::Q4_K, DType::Q6_K, DType::BF16}) {
        const Weights w = weights(type, 33, 2304);
        const bool isFloat = info(type).isFloat;
        const int rows = kMaxMatvecRows;
        const std::vector<float> x = randomFloats(rows * 2304);
        const Inputs all = inputs(x, rows, 2304, isFloat);
        const DeviceArray<float> together(rows * 33), alone(33);
        matvec(stream(), all.input(), rows, {{w.device(), nullptr, together.get()}});
        const std::vector<float> expected = together.read();
        for (int64_t t = 0; t < rows; ++t) {
            const Inputs one = inputs(rowOf(x, t, 2304), 1, 2304, isFloat);
            matvec(stream(), one.input(), 1, {{w.device(), nullptr, alone.get()}});
            EXPECT_TRUE(sameBits(rowOf(expected, t, 33), alone.read()));
        }
    }
}

// Enough rows that a warp has several pairs of them.
TEST_F(MatvecTest, ManyRowsHaveTheCpusBits) {
    for (const DType type : {DType::Q4_K, DType::Q6_K, DType::Q8_0, DType::F32}) {
        const Weights w = weights(type, 50021, 256);
        for (const int64_t rows : {1, 4, 40})
            checkProduct(w, inputs(rows, 256, info(type).isFloat), randomFloats(50021));
    }
}

// So many weight rows that blocks of 32, 64 or 128 of them fill the device once.
TEST_F(MatvecTest, WholeDevicesOfBlocksHaveTheCpusBits) {
    const int64_t blocks = stream().device().multiprocessors;
    for (const DType type : {DType::Q4_K, DType::Q6_K, DType::Q8_0, DType::Q2_K, DType::MXFP4})
        for (const int64_t tile : {32, 64, 128})
            for (const int64_t cols : {512, 2048 + 256}) {
                const Weights w = weights(type, blocks * tile - 5, cols);
                for (const int64_t rows : {17, 24, 32, 48, 64, 100})
                    checkProduct(w, inputs(rows, cols, false), randomFloats(static_cast<size_t>(w.rows)));
            }
}

// Rows of whole steps: columns that all fit in shared memory, and columns that do not; one item for each block, and
// several.
TEST_F(MatvecTest, StreamTilesHaveTheCpusBits) {
    for (const DType type : reference::quantizedTypes())
        for (const int64_t cols : {1024, 3072}) {
            const Weights w = weights(type, 71, cols);
            for (const int64_t rows : {5, 8, 16, 33})
                checkProduct(w, inputs(rows, cols, false), randomFloats(static_cast<size_t>(w.rows)));
        }
    for (const DType type : {DType::Q4_K, DType::Q6_K, DType::Q2_K, DType::Q8_0})
        for (const int64_t cols : {8 * 1024, 13 * 1024, 25 * 1024}) {
            const Weights w = weights(type, 83, cols);
            for (const int64_t rows : {7, 9, 32}) checkProduct(w, inputs(rows, cols, false), {});
        }
    const int64_t blocks = stream().device().multiprocessors;
    for (const DType type : {DType::Q4_K, DType::Q6_K})
        for (const int64_t cols : {1024, 4096, 13 * 1024}) {
            const Weights w = weights(type, blocks * 32 * (cols > 4096 ? 2 : 3) - 5, cols);
            for (const int64_t rows : {6, 15, 40})
                checkProduct(w, inputs(rows, cols, false), randomFloats(static_cast<size_t>(w.rows)));
        }
}

// Of rows that came with columns. Those past the last row are poison.
TEST_F(MatvecTest, ReadsTheColumnsThatCameWithRows) {
    const int64_t blocks = stream().device().multiprocessors;
    for (const DType type : {DType::Q4_K, DType::Q6_K, DType::Q8_0, DType::Q2_K})
        // Of the last one, tiles of 24 columns would take 64 rows in one round of blocks. But there are no 72 columns.
        for (const int64_t outputs : {int64_t{70}, blocks * 64 - 5, blocks / 3 * 32}) {
            const Weights w = weights(type, outputs, 512);
            for (const int64_t rows : {5, 9, 17, 32, 33, 64, 65}) {
                if (!readsColumns(stream(), type, rows)) continue;
                SCOPED_TRACE(std::string(info(type).name) + ", " + std::to_string(rows) + " rows");
                const Inputs in = inputsInColumns(rows, 512);
                MatvecInput x;
                x.quantized = rowsWithColumns(*in.buffer, rows, 512);
                const DeviceArray<float> y(static_cast<size_t>(rows * outputs));
                const int64_t before = stream().launches();
                matvec(stream(), x, static_cast<int>(rows), {{w.device(), nullptr, y.get()}});
                EXPECT_EQ(stream().launches() - before, 1);
                EXPECT_TRUE(sameBits(product(w.host(), in.x, rows), y.read()));
            }
        }
}

TEST_F(MatvecTest, ColumnsAreReadByFiveRowsAndMore) {
    const bool any = stream().device().codeVersion >= 80;
    for (const int64_t rows : {1, 4, 5, 16, 512, 513})
        EXPECT_EQ(readsColumns(stream(), DType::Q4_K, rows), any && rows > 4 && rows <= 512) << rows;
    EXPECT_FALSE(readsColumns(stream(), DType::F32, 64));
    EXPECT_FALSE(readsColumns(stream(), DType::BF16, 64));
}

// The most rows of one call.
TEST_F(MatvecTest, TakesItsMostRowsWithTheCpusBits) {
    for (const DType type : {DType::Q4_K, DType::Q5_0, DType::IQ3_S})
        checkProduct(weights(type, 97, 1024), inputs(kMaxMatvecRows, 1024, false), {});
}

// Blocks of 32 that are not a whole run of a tile's.
TEST_F(MatvecTest, OddNumbersOfBlocksHaveTheCpusBits) {
    for (const DType type : {DType::Q4_0, DType::Q8_0, DType::MXFP4})
        for (const int64_t blocks : {1, 2, 3, 4, 12, 31, 36, 68, 90})
            for (const int64_t rows : {20, 64})
                checkProduct(weights(type, 70, 32 * blocks), inputs(rows, 32 * blocks, false), {});
}

// Activations that do not fit in shared memory.
TEST_F(MatvecTest, LongRowsHaveTheCpusBits) {
    for (const DType type : {DType::Q4_0, DType::Q8_0, DType::F16}) {
        const Weights w = weights(type, 5, 32 * 1301);
        for (const int64_t rows : {1, 2, 8, 19}) checkProduct(w, inputs(rows, 32 * 1301, info(type).isFloat), {});
    }
}

// Rows of whole chunks, rows that end within a chunk or within a warp, and one output more than is narrow.
TEST_F(MatvecTest, NarrowMatricesHaveTheCpusBits) {
    for (const Shape& shape : std::vector<Shape>{
             {24, 16384}, {64, 2048}, {3, 4}, {33, 36}, {8, 1024}, {260, 1300}, {512, 132}, {513, 132}}) {
        const Weights w = weights(DType::F32, shape.rows, shape.cols);
        const std::vector<float> bias = randomFloats(static_cast<size_t>(shape.rows));
        for (const int64_t rows : {1, 2, 4, 5, 8, 9, 16, 40, 64, 300})
            checkProduct(w, inputs(rows, shape.cols, true), rows % 2 ? bias : std::vector<float>{});
    }
}

TEST_F(MatvecTest, ManyOutputsInOneCall) {
    const int64_t cols = 512;
    const std::vector<DType> types = {DType::Q4_K, DType::Q6_K, DType::Q4_K, DType::Q4_K,
                                      DType::F32,  DType::Q4_K, DType::Q4_K, DType::Q6_K};
    const std::vector<int64_t> sizes = {64, 17, 16, 1, 9, 33, 2, 128};
    for (const int64_t rows : {1, 3, 11}) {
        const std::vector<float> x = randomFloats(static_cast<size_t>(rows * cols));
        const Inputs floats = inputs(x, rows, cols, true), quantized = inputs(x, rows, cols, false);
        MatvecInput in = quantized.input();
        in.floats = floats.input().floats;
        std::vector<Weights> w;
        std::vector<std::vector<float>> bias;
        std::vector<std::unique_ptr<DeviceArray<float>>> biasOnDevice, y;
        std::vector<MatvecOutput> outputs;
        for (size_t i = 0; i < types.size(); ++i) {
            w.push_back(weights(types[i], sizes[i], cols));
            bias.push_back(randomFloats(static_cast<size_t>(sizes[i])));
            biasOnDevice.push_back(std::make_unique<DeviceArray<float>>(bias[i]));
            y.push_back(std::make_unique<DeviceArray<float>>(static_cast<size_t>(rows * sizes[i])));
            outputs.push_back({w[i].device(), i % 2 ? biasOnDevice[i]->get() : nullptr, y[i]->get()});
        }
        const int64_t before = stream().launches();
        matvec(stream(), in, static_cast<int>(rows), outputs);
        // Five matrices of Q4_K are one more than fit in a launch. Columns that have not come with the rows are
        // arranged once for all.
        if (rows <= 8 || stream().device().codeVersion >= 80) {
            EXPECT_EQ(stream().launches() - before, rows < kMmaFromRows ? 4 : 5);
        }
        for (size_t i = 0; i < types.size(); ++i) {
            SCOPED_TRACE(i);
            EXPECT_TRUE(sameBits(product(w[i].host(), x, rows, i % 2 ? bias[i].data() : nullptr), y[i]->read()));
        }
    }
}

// Products by several types overlap (Together), and still come after what made their input, and before what reads any
// of their outputs. A small matrix behind a large one is done before it.
TEST_F(MatvecTest, ProductsOfSeveralTypesKeepTheirPlaceAmongKernels) {
    constexpr int64_t kCols = 4096, kRounds = 20;
    const std::vector<Weights> w = [&] {
        std::vector<Weights> made;
        made.push_back(weights(DType::Q4_K, 4096, kCols));
        made.push_back(weights(DType::Q6_K, 64, kCols));
        made.push_back(weights(DType::Q8_0, 32, kCols));
        return made;
    }();
    for (const int64_t rows : {1, 8, 16, 40}) {
        SCOPED_TRACE(rows);
        const Inputs in[] = {inputs(rows, kCols, false), inputs(rows, kCols, false)};
        const Inputs made = inputs(rows, kCols, false);
        const DeviceArray<float> x[] = {DeviceArray<float>(in[0].x), DeviceArray<float>(in[1].x)};
        std::vector<std::unique_ptr<DeviceArray<float>>> y, copies;
        std::vector<MatvecOutput> outputs;
        for (const Weights& one : w) {
            y.push_back(std::make_unique<DeviceArray<float>>(static_cast<size_t>(rows * one.rows)));
            outputs.push_back({one.device(), nullptr, y.back()->get()});
        }
        for (int64_t round = 0; round < kRounds; ++round) {
            const QuantizedRows quantized = rowsWithColumns(*made.buffer, rows, kCols);
            convertRows(stream(), x[round % 2].get(), rows, kCols, {nullptr, quantized, {}});
            matvec(stream(), {nullptr, quantized}, static_cast<int>(rows), outputs);
            for (size_t i = 0; i < w.size(); ++i) {
                copies.push_back(std::make_unique<DeviceArray<float>>(static_cast<size_t>(rows * w[i].rows)));
                RowOutputs floats;
                floats.floats = copies.back()->get();
                convertRows(stream(), y[i]->get(), rows, w[i].rows, floats);
            }
        }
        for (size_t i = 0; i < w.size(); ++i) {
            SCOPED_TRACE(i);
            const std::vector<float> expected[] = {product(w[i].host(), in[0].x, rows),
                                                   product(w[i].host(), in[1].x, rows)};
            for (int64_t round = 0; round < kRounds; ++round)
                ASSERT_TRUE(sameBits(expected[round % 2], copies[static_cast<size_t>(round) * w.size() + i]->read()))
                    << "round " << round;
        }
    }
}

TEST_F(MatvecTest, AddingHasTheCpusBits) {
    for (const DType type : allTypes()) {
        SCOPED_TRACE(info(type).name);
        const Weights w = weights(type, 37, 768);
        for (const int64_t rows : kRowCounts) {
            const Inputs in = inputs(rows, 768, info(type).isFloat);
            const std::vector<float> bias = randomFloats(37), residual = randomFloats(static_cast<size_t>(rows * 37));
            const DeviceArray<float> biasOnDevice(bias), y(residual);
            matvecAdd(stream(), in.input(), static_cast<int>(rows), w.device(), rows % 3 ? biasOnDevice.get() : nullptr,
                      y.get());
            std::vector<float> expected = residual;
            const std::vector<float> sum = product(w.host(), in.x, rows, rows % 3 ? bias.data() : nullptr);
            cpu::kernels().add(expected.data(), sum.data(), rows * 37);
            EXPECT_TRUE(sameBits(expected, y.read()));
        }
    }
    // Several pairs of rows for each warp.
    const Weights w = weights(DType::Q4_K, 40009, 256);
    const Inputs in = inputs(1, 256, false);
    const std::vector<float> residual = randomFloats(40009);
    const DeviceArray<float> y(residual);
    matvecAdd(stream(), in.input(), 1, w.device(), nullptr, y.get());
    std::vector<float> expected = residual;
    cpu::kernels().add(expected.data(), product(w.host(), in.x, 1).data(), 40009);
    EXPECT_TRUE(sameBits(expected, y.read()));
}

// Compares a gated kernel's results with the CPU's values, as floats and as blocks.
void expectForms(const std::vector<float>& expected, int64_t rows, int64_t hidden, const float* floats,
                 const QuantizedRows& quantized) {
    if (floats) {
        EXPECT_TRUE(sameBits(expected, readBack(floats, expected.size())));
    }
    if (!quantized.q) return;
    const CpuRows onCpu = quantizeOnCpu(expected, rows, hidden);
    const DeviceLayout want = layoutOf(onCpu.rows);
    EXPECT_EQ(want.q, readBack(quantized.q, want.q.size()));
    EXPECT_TRUE(sameBits(want.scale, readBack(quantized.scale, want.scale.size())));
    EXPECT_EQ(want.sums, readBack(quantized.sums, want.sums.size()));
}

// The same of rows that came with columns.
void expectForms(const std::vector<float>& expected, int64_t rows, int64_t hidden, const float* floats,
                 const DeviceArray<uint8_t>& buffer) {
    expectForms(expected, rows, hidden, floats, quantizedRowsOver(buffer.get(), rows, hidden));
    EXPECT_TRUE(hasItsColumns(buffer, rows, hidden));
}

TEST_F(MatvecTest, GatedHasTheCpusBits) {
    for (const DType type : allTypes()) {
        for (const Shape shape : {Shape{96, 768}, Shape{32, 2304}}) {
            const Weights gate = weights(type, shape.rows, shape.cols), up = weights(type, shape.rows, shape.cols);
            for (const int64_t rows : kRowCounts) {
                SCOPED_TRACE(std::string(info(type).name) + " rows " + std::to_string(rows));
                // Small, so that the sigmoid is not all 0 and 1.
                const Inputs in = inputs(randomFloats(static_cast<size_t>(rows * shape.cols), 0.002f), rows, shape.cols,
                                         info(type).isFloat);
                const DeviceArray<float> floats(static_cast<size_t>(rows * shape.rows));
                const DeviceArray<uint8_t> buffer(quantizedRowsBytes(rows, shape.rows));
                RowOutputs out;
                if (rows % 4 != 1) out.floats = floats.get();
                out.quantized = rowsWithColumns(buffer, rows, shape.rows);
                matvecGated(stream(), in.input(), static_cast<int>(rows), gate.device(), up.device(), out);
                expectForms(gatedProduct(gate.host(), up.host(), in.x, rows), rows, shape.rows, out.floats, buffer);
            }
        }
        // Not whole blocks: floats only.
        const Weights gate = weights(type, 45, 256), up = weights(type, 45, 256);
        for (const int64_t rows : {1, 2, 5, 11, 33}) {
            const Inputs in =
                inputs(randomFloats(static_cast<size_t>(rows * 256), 0.01f), rows, 256, info(type).isFloat);
            const DeviceArray<float> floats(static_cast<size_t>(rows * 45));
            RowOutputs out;
            out.floats = floats.get();
            matvecGated(stream(), in.input(), static_cast<int>(rows), gate.device(), up.device(), out);
            expectForms(gatedProduct(gate.host(), up.host(), in.x, rows), rows, 45, out.floats, {});
        }
    }
}

void MatvecTest::checkGated(DType type, int64_t hidden, int64_t cols, const std::vector<int64_t>& rowCounts) {
    const Weights gate = weights(type, hidden, cols), up = weights(type, hidden, cols);
    for (const int64_t rows : rowCounts) {
        SCOPED_TRACE(std::string(info(type).name) + " rows " + std::to_string(rows));
        const Inputs in =
            inputs(randomFloats(static_cast<size_t>(rows * cols), 0.002f), rows, cols, info(type).isFloat);
        const DeviceArray<uint8_t> buffer(quantizedRowsBytes(rows, hidden));
        RowOutputs out;
        out.quantized = rowsWithColumns(buffer, rows, hidden);
        matvecGated(stream(), in.input(), static_cast<int>(rows), gate.device(), up.device(), out);
        expectForms(gatedProduct(gate.host(), up.host(), in.x, rows), rows, hidden, nullptr, buffer);
    }
}

// As WholeDevicesOfBlocksHaveTheCpusBits.
TEST_F(MatvecTest, GatedWholeDevicesOfBlocksHaveTheCpusBits) {
    const int64_t blocks = stream().device().multiprocessors, cols = 2048 + 256;
    for (const DType type : {DType::Q4_K, DType::Q6_K})
        for (const int64_t hidden : {16 * blocks, 32 * blocks}) checkGated(type, hidden, cols, {20, 64});
}

// The stream tiles, as in StreamTilesHaveTheCpusBits.
TEST_F(MatvecTest, GatedStreamTilesHaveTheCpusBits) {
    const int64_t blocks = stream().device().multiprocessors;
    for (const DType type : {DType::Q4_K, DType::Q6_K, DType::Q8_0, DType::Q2_K})
        for (const auto& [hidden, cols] : std::vector<std::pair<int64_t, int64_t>>{
                 {96, 1024}, {32, 13 * 1024}, {64 * blocks + 32, 2048}, {16 * blocks, 4096}})
            checkGated(type, hidden, cols, {5, 16, 40});
}

constexpr Activation kOtherActivations[] = {{ActivationKind::Gelu},
                                            {ActivationKind::ClampedSwiglu, 0.8f},
                                            {ActivationKind::ClampedSilu, 0.8f},
                                            {ActivationKind::ReluSquared}};

// Other activations, with biases; a part of the rows has its part of the biases.
TEST_F(MatvecTest, GatedWithBiasesHasTheCpusBits) {
    const int64_t hidden = 96;
    const auto gateBias = randomFloats(hidden), upBias = randomFloats(hidden);
    const DeviceArray<float> gateBiasOnDevice(gateBias), upBiasOnDevice(upBias);
    for (const DType type : {DType::Q4_K, DType::Q8_0, DType::MXFP4, DType::F32, DType::BF16}) {
        const Weights gate = weights(type, hidden, 768), up = weights(type, hidden, 768);
        for (const Activation& activation : kOtherActivations) {
            for (const int64_t rows : kRowCounts) {
                SCOPED_TRACE(std::string(info(type).name) + " rows " + std::to_string(rows));
                const Inputs in =
                    inputs(randomFloats(static_cast<size_t>(rows * 768), 0.002f), rows, 768, info(type).isFloat);
                std::vector<float> expected = product(gate.host(), in.x, rows, gateBias.data());
                const std::vector<float> u = product(up.host(), in.x, rows, upBias.data());
                cpu::kernels().gatedActivation(activation, {expected.data(), u.data()}, rows * hidden);
                const DeviceArray<float> floats(static_cast<size_t>(rows * hidden));
                const DeviceArray<uint8_t> buffer(quantizedRowsBytes(rows, hidden));
                RowOutputs out;
                out.floats = floats.get();
                out.quantized = quantizedRowsOver(buffer.get(), rows, hidden);
                matvecGated(stream(), in.input(), static_cast<int>(rows), gate.device(), up.device(), out, 0, 0,
                            {activation, gateBiasOnDevice.get(), upBiasOnDevice.get()});
                expectForms(expected, rows, hidden, out.floats, out.quantized);
            }
        }
    }
}

// Values at the limits of exp, and products that are NaN.
TEST_F(MatvecTest, GatedExtremesHaveTheCpusBits) {
    const Weights gate = weights(DType::F32, 32, 32), up = weights(DType::F32, 32, 32);
    for (const float scale : {100.0f, 1e-30f, 1e-38f, 0.0f}) {
        const Inputs in = inputs(randomFloats(32, scale), 1, 32, true);
        const DeviceArray<float> floats(32);
        const DeviceArray<uint8_t> buffer(quantizedRowsBytes(1, 32));
        RowOutputs out;
        out.floats = floats.get();
        out.quantized = quantizedRowsOver(buffer.get(), 1, 32);
        matvecGated(stream(), in.input(), 1, gate.device(), up.device(), out);
        expectForms(gatedProduct(gate.host(), up.host(), in.x, 1), 1, 32, out.floats, out.quantized);
    }
}

// Parts of a matrix, each packed on its own, that write their columns of wider rows.
class MatvecPartTest : public MatvecTest {
protected:
    // Rows [begin, begin + rows) of w.
    Weights part(const Weights& w, int64_t begin, int64_t rows) {
        const size_t row = rowBytes(w.type, w.cols);
        Weights p{w.type, rows, w.cols, 1, {}, nullptr, nullptr};
        p.file.assign(w.file.begin() + begin * static_cast<int64_t>(row),
                      w.file.begin() + (begin + rows) * static_cast<int64_t>(row));
        pack(p);
        return p;
    }
};

const std::vector<DType> kPartTypes = {DType::Q4_K, DType::Q6_K, DType::Q8_0, DType::F32, DType::F16};

TEST_F(MatvecPartTest, PartsHaveTheBitsOfTheWhole) {
    const std::vector<int64_t> sizes = {37, 1, 64, 6};  // with gaps of `gap` between them
    const int64_t total = 108, gap = 3, stride = total + gap * 4;
    for (const DType type : kPartTypes) {
        const Weights whole = weights(type, total, 768);
        const std::vector<float> bias = randomFloats(static_cast<size_t>(total));
        const DeviceArray<float> biasOnDevice(bias);
        for (const int64_t rows : {1, 2, 5, 8}) {
            SCOPED_TRACE(std::string(info(type).name) + " rows " + std::to_string(rows));
            const Inputs in = inputs(rows, 768, info(type).isFloat);
            const std::vector<float> before = randomFloats(static_cast<size_t>(rows * stride));
            const DeviceArray<float> y(static_cast<size_t>(rows * stride)), residual(before);
            const std::vector<float> product = ::sharpi::cuda::product(whole.host(), in.x, rows, bias.data());
            std::vector<float> written = y.read(), added = before;
            std::vector<Weights> parts;
            std::vector<MatvecOutput> outputs;
            int64_t begin = 0, column = 0;
            for (const int64_t size : sizes) {
                parts.push_back(part(whole, begin, size));
                outputs.push_back({parts.back().device(), biasOnDevice.get() + begin, y.get() + column, stride});
                matvecAdd(stream(), in.input(), static_cast<int>(rows), parts.back().device(),
                          biasOnDevice.get() + begin, residual.get() + column, stride);
                for (int64_t t = 0; t < rows; ++t) {
                    const float* from = &product[static_cast<size_t>(t * total + begin)];
                    std::copy_n(from, size, &written[static_cast<size_t>(t * stride + column)]);
                    cpu::kernels().add(&added[static_cast<size_t>(t * stride + column)], from, size);
                }
                begin += size;
                column += size + gap;
            }
            matvec(stream(), in.input(), static_cast<int>(rows), outputs);
            EXPECT_TRUE(sameBits(written, y.read()));
            EXPECT_TRUE(sameBits(added, residual.read()));
        }
    }
}

TEST_F(MatvecPartTest, GatedPartsHaveTheBitsOfTheWhole) {
    const std::vector<int64_t> sizes = {32, 96, 160};
    const int64_t hidden = 288;
    for (const DType type : kPartTypes) {
        const Weights gate = weights(type, hidden, 512), up = weights(type, hidden, 512);
        for (const int64_t rows : {1, 2, 5, 8, 20}) {
            SCOPED_TRACE(std::string(info(type).name) + " rows " + std::to_string(rows));
            const Inputs in =
                inputs(randomFloats(static_cast<size_t>(rows * 512), 0.002f), rows, 512, info(type).isFloat);
            const std::vector<float> expected = gatedProduct(gate.host(), up.host(), in.x, rows);
            const DeviceArray<float> floats(static_cast<size_t>(rows * hidden));
            const DeviceArray<uint8_t> buffer(quantizedRowsBytes(rows, hidden));
            RowOutputs out;
            out.floats = floats.get();
            out.quantized = rowsWithColumns(buffer, rows, hidden);
            int64_t begin = hidden;  // from the last one on: each part leaves the others unchanged
            for (size_t i = sizes.size(); i-- > 0;) {
                begin -= sizes[i];
                const std::vector<float> untouched = floats.read();
                const Weights someGate = part(gate, begin, sizes[i]), someUp = part(up, begin, sizes[i]);
                matvecGated(stream(), in.input(), static_cast<int>(rows), someGate.device(), someUp.device(), out,
                            begin, hidden);
                const std::vector<float> got = floats.read();
                for (int64_t t = 0; t < rows; ++t)
                    ASSERT_TRUE(sameBits({untouched.begin() + t * hidden, untouched.begin() + t * hidden + begin},
                                         {got.begin() + t * hidden, got.begin() + t * hidden + begin}));
            }
            expectForms(expected, rows, hidden, out.floats, buffer);
        }
    }
    // A part of rows that are not whole blocks: floats only.
    const Weights gate = weights(DType::Q8_0, 13, 256), up = weights(DType::Q8_0, 13, 256);
    const Inputs in = inputs(randomFloats(2 * 256, 0.01f), 2, 256, false);
    const DeviceArray<float> floats(2 * 45);
    RowOutputs out;
    out.floats = floats.get();
    std::vector<float> expected = floats.read();
    const std::vector<float> values = gatedProduct(gate.host(), up.host(), in.x, 2);
    for (size_t t = 0; t < 2; ++t) std::copy_n(&values[t * 13], 13, &expected[t * 45 + 32]);
    matvecGated(stream(), in.input(), 2, gate.device(), up.device(), out, 32, 45);
    EXPECT_TRUE(sameBits(expected, floats.read()));
}

class ExpertMatvecTest : public MatvecTest {
protected:
    // Distinct experts for every row.
    std::vector<int32_t> choose(int64_t rows, int32_t used, int32_t experts) {
        std::vector<int32_t> chosen, all(static_cast<size_t>(experts));
        std::iota(all.begin(), all.end(), 0);
        for (int64_t t = 0; t < rows; ++t) {
            std::shuffle(all.begin(), all.end(), random());
            chosen.insert(chosen.end(), all.begin(), all.begin() + used);
        }
        return chosen;
    }
};

TEST_F(ExpertMatvecTest, GatedHasTheCpusBits) {
    for (const DType type : allTypes()) {
        const Weights gate = weights(type, 64, 768, 5), up = weights(type, 64, 768, 5);
        for (const int64_t rows : {1, 3, 8}) {
            const int32_t used = rows == 3 ? 5 : 2;
            SCOPED_TRACE(std::string(info(type).name) + " rows " + std::to_string(rows));
            const Inputs in =
                inputs(randomFloats(static_cast<size_t>(rows * 768), 0.002f), rows, 768, info(type).isFloat);
            const std::vector<int32_t> chosen = choose(rows, used, 5);
            const DeviceArray<int32_t> chosenOnDevice(chosen);
            const int64_t pairs = rows * used;
            const DeviceArray<float> floats(static_cast<size_t>(pairs * 64));
            const DeviceArray<uint8_t> buffer(quantizedRowsBytes(pairs, 64));
            RowOutputs out;
            out.floats = floats.get();
            out.quantized = quantizedRowsOver(buffer.get(), pairs, 64);
            expertGated(stream(), in.input(), static_cast<int>(rows), gate.stack(), up.stack(), chosenOnDevice.get(),
                        used, out);
            std::vector<float> expected;
            for (int64_t p = 0; p < pairs; ++p) {
                const int32_t expert = chosen[static_cast<size_t>(p)];
                const std::vector<float> values =
                    gatedProduct(gate.host(expert), up.host(expert), rowOf(in.x, p / used, 768), 1);
                expected.insert(expected.end(), values.begin(), values.end());
            }
            expectForms(expected, pairs, 64, out.floats, out.quantized);
        }
    }
}

// Other activations, the biases of each pair's expert, and weights of the inputs. Stacks may hold experts at other
// places than their numbers.
TEST_F(ExpertMatvecTest, GatedWithBiasesAndWeightsHasTheCpusBits) {
    const int32_t used = 3, experts = 5;
    const int64_t hidden = 64;
    const auto gateBias = randomFloats(experts * hidden), upBias = randomFloats(experts * hidden);
    const DeviceArray<float> gateBiasOnDevice(gateBias), upBiasOnDevice(upBias);
    for (const DType type : {DType::Q4_K, DType::MXFP4, DType::F32}) {
        const Weights gate = weights(type, hidden, 768, experts), up = weights(type, hidden, 768, experts);
        for (const int64_t rows : {1, 3, 8}) {
            for (int variant = 0; variant < 8; ++variant) {
                SCOPED_TRACE(std::string(info(type).name) + " rows " + std::to_string(rows) + ", variant " +
                             std::to_string(variant));
                const Activation activation = kOtherActivations[variant & 1];
                const bool biased = variant & 2, weighted = variant & 4;
                const int64_t pairs = rows * used;
                const Inputs in =
                    inputs(randomFloats(static_cast<size_t>(rows * 768), 0.002f), rows, 768, info(type).isFloat);
                const std::vector<int32_t> expert = choose(rows, used, experts);
                std::vector<int32_t> place;
                for (const int32_t e : expert) place.push_back((e + 2) % experts);
                const std::vector<float> weight = randomFloats(static_cast<size_t>(pairs));
                std::vector<float> expected;
                for (int64_t p = 0; p < pairs; ++p) {
                    const auto x = rowOf(in.x, p / used, 768);
                    std::vector<float> g = product(gate.host(place[static_cast<size_t>(p)]), x, 1);
                    const std::vector<float> u = product(up.host(place[static_cast<size_t>(p)]), x, 1);
                    cpu::GatedRow row{g.data(), u.data()};
                    const int64_t of = expert[static_cast<size_t>(p)] * hidden;
                    if (biased) row.gateBias = &gateBias[of], row.upBias = &upBias[of];
                    if (weighted) row.factor = weight[static_cast<size_t>(p)];
                    cpu::kernels().gatedActivation(activation, row, hidden);
                    expected.insert(expected.end(), g.begin(), g.end());
                }
                const DeviceArray<int32_t> placeOnDevice(place), expertOnDevice(expert);
                const DeviceArray<float> weightOnDevice(weight), floats(static_cast<size_t>(pairs * hidden));
                const DeviceArray<uint8_t> buffer(quantizedRowsBytes(pairs, hidden));
                RowOutputs out;
                out.floats = floats.get();
                out.quantized = quantizedRowsOver(buffer.get(), pairs, hidden);
                GatedJoin join{activation};
                if (biased) join.gateBias = gateBiasOnDevice.get(), join.upBias = upBiasOnDevice.get();
                join.expert = expertOnDevice.get();
                if (weighted) join.weight = weightOnDevice.get();
                expertGated(stream(), in.input(), static_cast<int>(rows), gate.stack(), up.stack(), placeOnDevice.get(),
                            used, out, join);
                expectForms(expected, pairs, hidden, out.floats, out.quantized);
            }
        }
    }
}

// Down's bias, weights of 1, a shared answer without a scale, and rows that are replaced.
TEST_F(ExpertMatvecTest, DownWithBiasesHasTheCpusBits) {
    const int64_t rows = 3, outputs = 37, hidden = 512;
    const int32_t used = 4, experts = 6;
    for (const DType type : {DType::Q6_K, DType::MXFP4, DType::F16}) {
        const Weights w = weights(type, outputs, hidden, experts);
        const Inputs in = inputs(rows * used, hidden, info(type).isFloat);
        const std::vector<int32_t> chosen = choose(rows, used, experts);
        const auto bias = randomFloats(experts * outputs), weight = randomFloats(rows * used),
                   before = randomFloats(rows * outputs), shared = randomFloats(rows * outputs);
        const DeviceArray<int32_t> chosenOnDevice(chosen);
        const DeviceArray<float> biasOnDevice(bias), weightOnDevice(weight), sharedOnDevice(shared);
        for (int variant = 0; variant < 8; ++variant) {
            SCOPED_TRACE(std::string(info(type).name) + ", variant " + std::to_string(variant));
            const bool biased = variant & 1, weighted = variant & 2, adds = variant & 4;
            std::vector<float> expected = before;
            for (int64_t t = 0; t < rows; ++t) {
                std::vector<float> sum(static_cast<size_t>(outputs), 0.0f);
                for (int64_t p = t * used; p < (t + 1) * used; ++p) {
                    const int32_t e = chosen[static_cast<size_t>(p)];
                    std::vector<float> y = product(w.host(e), rowOf(in.x, p, hidden), 1);
                    if (biased) cpu::kernels().add(y.data(), &bias[static_cast<size_t>(e * outputs)], outputs);
                    cpu::kernels().addScaled(sum.data(), y.data(), weighted ? weight[static_cast<size_t>(p)] : 1.0f,
                                             outputs);
                }
                cpu::kernels().addScaled(sum.data(), &shared[static_cast<size_t>(t * outputs)], 1.0f, outputs);
                float* const to = &expected[static_cast<size_t>(t * outputs)];
                if (adds) cpu::kernels().add(to, sum.data(), outputs);
                else std::copy(sum.begin(), sum.end(), to);
            }
            const DeviceArray<float> to(before);
            expertDownAdd(stream(), in.input(), static_cast<int>(rows), w.stack(), chosenOnDevice.get(),
                          weighted ? weightOnDevice.get() : nullptr, used, to.get(), {sharedOnDevice.get(), nullptr},
                          {biased ? biasOnDevice.get() : nullptr, nullptr, adds});
            EXPECT_TRUE(sameBits(expected, to.read()));
        }
    }
}

TEST_F(ExpertMatvecTest, ProductsHaveTheCpusBits) {
    for (const DType type : allTypes()) {
        const Weights w = weights(type, 37, 1280, 5);
        for (const bool rowPerPair : {false, true}) {
            SCOPED_TRACE(std::string(info(type).name) + (rowPerPair ? " row per pair" : ""));
            const int64_t rows = 3, used = 4, pairs = rows * used;
            const Inputs in = inputs(rowPerPair ? pairs : rows, 1280, info(type).isFloat);
            const std::vector<int32_t> chosen = choose(rows, used, 5);
            const DeviceArray<int32_t> chosenOnDevice(chosen);
            const DeviceArray<float> y(static_cast<size_t>(pairs * 37));
            expertMatvec(stream(), in.input(), rows, w.stack(), chosenOnDevice.get(), used, rowPerPair, y.get());
            std::vector<float> expected;
            for (int64_t p = 0; p < pairs; ++p) {
                const std::vector<float> values =
                    product(w.host(chosen[static_cast<size_t>(p)]), rowOf(in.x, rowPerPair ? p : p / used, 1280), 1);
                expected.insert(expected.end(), values.begin(), values.end());
            }
            EXPECT_TRUE(sameBits(expected, y.read()));
        }
    }
}

TEST_F(ExpertMatvecTest, DownHasTheCpusBits) {
    struct Case {
        int64_t rows, outputs, hidden;
        int32_t used, experts;
    };
    // One expert, a few, more than there are warps; activations beyond shared memory; rows that do not fill a block.
    const std::vector<Case> cases = {
        {1, 37, 768, 8, 9}, {3, 64, 256, 1, 2}, {2, 5, 512, 11, 12}, {8, 8, 1280, 2, 4}, {1, 9, 6144, 8, 8}};
    for (const DType type : allTypes()) {
        for (const Case& c : cases) {
            SCOPED_TRACE(std::string(info(type).name) + " hidden " + std::to_string(c.hidden));
            const Weights w = weights(type, c.outputs, c.hidden, c.experts);
            const int64_t pairs = c.rows * c.used;
            const Inputs in = inputs(pairs, c.hidden, info(type).isFloat);
            const std::vector<int32_t> chosen = choose(c.rows, c.used, c.experts);
            const std::vector<float> weight = randomFloats(static_cast<size_t>(pairs)),
                                     before = randomFloats(static_cast<size_t>(c.rows * c.outputs));
            const std::vector<float> answer = randomFloats(before.size()),
                                     scale = randomFloats(static_cast<size_t>(c.rows), 20.0f);
            const DeviceArray<int32_t> chosenOnDevice(chosen);
            const DeviceArray<float> weightOnDevice(weight), residual(before), sharedResidual(before),
                answerOnDevice(answer), scaleOnDevice(scale);
            expertDownAdd(stream(), in.input(), static_cast<int>(c.rows), w.stack(), chosenOnDevice.get(),
                          weightOnDevice.get(), c.used, residual.get());
            expertDownAdd(stream(), in.input(), static_cast<int>(c.rows), w.stack(), chosenOnDevice.get(),
                          weightOnDevice.get(), c.used, sharedResidual.get(),
                          {answerOnDevice.get(), scaleOnDevice.get()});
            std::vector<float> expected = before, withShared = before;
            for (int64_t t = 0; t < c.rows; ++t) {
                std::vector<float> sum(static_cast<size_t>(c.outputs), 0.0f);
                for (int64_t p = t * c.used; p < (t + 1) * c.used; ++p) {
                    const std::vector<float> y =
                        product(w.host(chosen[static_cast<size_t>(p)]), rowOf(in.x, p, c.hidden), 1);
                    cpu::kernels().addScaled(sum.data(), y.data(), weight[static_cast<size_t>(p)], c.outputs);
                }
                cpu::kernels().add(&expected[static_cast<size_t>(t * c.outputs)], sum.data(), c.outputs);
                cpu::kernels().addScaled(sum.data(), &answer[static_cast<size_t>(t * c.outputs)],
                                         portableSigmoid(scale[static_cast<size_t>(t)]), c.outputs);
                cpu::kernels().add(&withShared[static_cast<size_t>(t * c.outputs)], sum.data(), c.outputs);
            }
            EXPECT_TRUE(sameBits(expected, residual.read()));
            EXPECT_TRUE(sameBits(withShared, sharedResidual.read()));
        }
    }
}

TEST_F(MatvecTest, RefusesWhatItCannotDo) {
    const Weights w = weights(DType::Q4_K, 45, 256), other = weights(DType::Q6_K, 45, 256);
    const Inputs in = inputs(1, 256, false);
    const DeviceArray<float> y(9 * 45);
    EXPECT_THROW(matvec(stream(), in.input(), kMaxMatvecRows + 1, {{w.device(), nullptr, y.get()}}), Error);
    RowOutputs out;
    out.floats = y.get();
    EXPECT_THROW(matvecGated(stream(), in.input(), 1, w.device(), other.device(), out), Error);
    out.quantized.q = reinterpret_cast<int8_t*>(y.get());
    EXPECT_THROW(matvecGated(stream(), in.input(), 1, w.device(), w.device(), out), Error);
    out.quantized.q = nullptr;
    EXPECT_THROW(matvecGated(stream(), in.input(), 1, w.device(), w.device(), out, 16, 96), Error);
    EXPECT_THROW(matvecGated(stream(), in.input(), 1, w.device(), w.device(), out, 32, 64), Error);
    EXPECT_THROW(matvec(stream(), in.input(), 1, {{w.device(), nullptr, y.get(), 44}}), Error);
    EXPECT_THROW(matvecAdd(stream(), in.input(), 1, w.device(), nullptr, y.get(), 44), Error);
}

}  // namespace
}  // namespace sharpi::cuda
