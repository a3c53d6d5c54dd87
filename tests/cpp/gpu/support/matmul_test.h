// What the tests of the tensor cores' products share: weights of every type, packed on the device, activations in
// halves, and running both with and without Hopper's own instructions.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>

#include "core/half.h"
#include "cpu/kernels.h"
#include "gpu_test.h"
#include "kernels/formats/packed.h"
#include "kernels/matmul/matmul.h"
#include "reference_matmul.h"

namespace sharpi::cuda {

// A matrix as floats, as in the file, and packed on the device.
struct Weights {
    Matrix packed;
    std::vector<float> values;  // [rows, cols]
    std::unique_ptr<DeviceArray<uint8_t>> bytes;
};

// The kernels' input, and the values that it represents.
struct Activations {
    std::vector<float> values;  // hi, or hi + lo as the original floats in split form
    std::unique_ptr<DeviceArray<uint16_t>> hi, lo;
    HalfRows rows() const { return {hi->get(), lo ? lo->get() : nullptr}; }
};

inline std::vector<uint8_t> fileWeights(DType type, int64_t rows, int64_t cols, std::mt19937& random) {
    if (!info(type).isFloat) return reference::randomWeights(type, rows, cols, reference::Fill::Random, random);
    std::normal_distribution<float> normal;
    std::vector<uint8_t> bytes(static_cast<size_t>(rows) * rowBytes(type, cols));
    for (size_t i = 0; i < static_cast<size_t>(rows * cols); ++i) {
        const float value = normal(random);
        const uint16_t half = type == DType::F16 ? f16FromFloat(value) : bf16FromFloat(value);
        if (type == DType::F32) std::memcpy(&bytes[i * 4], &value, 4);
        else std::memcpy(&bytes[i * 2], &half, 2);
    }
    return bytes;
}

inline std::vector<float> dequantize(DType type, const std::vector<uint8_t>& file, int64_t rows, int64_t cols) {
    std::vector<float> values(static_cast<size_t>(rows * cols));
    const size_t row = rowBytes(type, cols);
    for (int64_t r = 0; r < rows; ++r)
        cpu::kernels().dequantizeRow(type, file.data() + static_cast<size_t>(r) * row, cols, values.data() + r * cols);
    return values;
}

// The columns of this many blocks: `large` blocks of 256 elements, or `small` blocks of fewer.
inline int64_t blocks(DType type, int64_t large, int64_t small) {
    const int64_t elements = info(type).blockElements;
    return elements * (elements == 256 ? large : small);
}

inline std::string describe(DType type, int64_t rows, int64_t outputs, int64_t cols) {
    return std::string(info(type).name) + ", " + std::to_string(rows) + " rows, " + std::to_string(outputs) + " x " +
           std::to_string(cols);
}

// Every test runs with Hopper's own instructions (if the device has them) and without.
class MatmulTest : public GpuTest, public ::testing::WithParamInterface<const char*> {
protected:
    void SetUp() override {
        setenv("SHARPI_CUDA_WGMMA", GetParam(), 1);
        GpuTest::SetUp();
    }
    void TearDown() override { unsetenv("SHARPI_CUDA_WGMMA"); }

    Weights weights(DType type, int64_t outputs, int64_t cols) {
        return weights(type, outputs, cols, fileWeights(type, outputs, cols, random()));
    }
    Weights weights(DType type, int64_t outputs, int64_t cols, const std::vector<uint8_t>& file) {
        Weights w;
        w.values = dequantize(type, file, outputs, cols);
        w.bytes = std::make_unique<DeviceArray<uint8_t>>(packedBytes(type, outputs, cols));
        w.packed = {type, outputs, cols, w.bytes->get()};
        const DeviceArray<uint8_t> onDevice(file);
        packRows(stream(), w.packed, 0, outputs, onDevice.get());
        stream().synchronize();
        return w;
    }

    Activations activations(int64_t rows, int64_t cols, bool split) {
        Activations x;
        x.values = randomFloats(static_cast<size_t>(rows * cols));
        const bool bf16 = stream().device().major >= 8;
        std::vector<uint16_t> hi, lo;
        for (float& value : x.values) {
            const auto round = [&](float v) { return bf16 ? bf16FromFloat(v) : f16FromFloat(v); };
            const auto widen = [&](uint16_t v) { return bf16 ? floatFromBf16(v) : floatFromF16(v); };
            hi.push_back(round(value));
            lo.push_back(round(value - widen(hi.back())));
            if (!split) value = widen(hi.back());
        }
        x.hi = std::make_unique<DeviceArray<uint16_t>>(hi);
        if (split) x.lo = std::make_unique<DeviceArray<uint16_t>>(lo);
        return x;
    }

    // Experts of random weights, and their values as floats.
    std::unique_ptr<DeviceArray<uint8_t>> stack(DType type, size_t experts, int64_t outputs, int64_t cols,
                                                std::vector<std::vector<float>>& values) {
        const size_t stride = packedBytes(type, outputs, cols);
        auto packed = std::make_unique<DeviceArray<uint8_t>>(stride * experts);
        for (size_t e = 0; e < experts; ++e) {
            const std::vector<uint8_t> file = fileWeights(type, outputs, cols, random());
            values.push_back(dequantize(type, file, outputs, cols));
            const DeviceArray<uint8_t> onDevice(file);
            packRows(stream(), {type, outputs, cols, packed->get() + e * stride}, 0, outputs, onDevice.get());
            stream().synchronize();
        }
        return packed;
    }
};

inline const auto kBothWays = ::testing::Values("1", "0");
inline const auto nameOfWay = [](const ::testing::TestParamInfo<const char*>& way) {
    return *way.param == '1' ? "Warpgroups" : "Warps";
};
inline constexpr DType kFloats[] = {DType::F32, DType::F16, DType::BF16};

}  // namespace sharpi::cuda
