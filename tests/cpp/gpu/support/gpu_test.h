// What the GPU tests share: a stream on the device, arrays on it, and skipping with the reason if there is no GPU.
// Arrays are separate device allocations, so that a memory checker sees accesses past their end. SHARPI_REQUIRE_GPU=1:
// tests fail without a GPU instead. SHARPI_TEST_SEED: the seed of random(). A test that fails prints its seed.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/half.h"
#include "device/stream.h"

namespace sharpi::cuda {

inline void require(cudaError_t status) {
    if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

template <typename T> class DeviceArray {
public:
    // Poisoned: every byte is 0xff (NaN as a float, -1 as an integer).
    explicit DeviceArray(size_t count) : _count(count) {
        require(cudaMalloc(reinterpret_cast<void**>(&_data), bytes()));
        require(cudaMemset(_data, 0xff, bytes()));
        require(cudaDeviceSynchronize());  // the tests' stream does not wait for the default stream
    }
    explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
        if (_count) require(cudaMemcpy(_data, values.data(), bytes(), cudaMemcpyHostToDevice));
        require(cudaDeviceSynchronize());
    }
    ~DeviceArray() { cudaFree(_data); }
    DeviceArray(const DeviceArray&) = delete;
    DeviceArray& operator=(const DeviceArray&) = delete;

    T* get() const { return _data; }
    size_t size() const { return _count; }
    // Waits for all work of the device.
    std::vector<T> read() const {
        std::vector<T> values(_count);
        require(cudaDeviceSynchronize());
        if (_count) require(cudaMemcpy(values.data(), _data, bytes(), cudaMemcpyDeviceToHost));
        return values;
    }

private:
    size_t bytes() const { return (_count ? _count : 1) * sizeof(T); }
    T* _data = nullptr;
    size_t _count;
};

// SHARPI_REQUIRE_GPU is set to something other than 0.
inline bool gpuIsRequired() {
    const char* value = std::getenv("SHARPI_REQUIRE_GPU");
    return value && *value && std::strcmp(value, "0") != 0;
}

inline uint32_t testSeed() {
    const char* value = std::getenv("SHARPI_TEST_SEED");
    return value && *value ? static_cast<uint32_t>(std::strtoul(value, nullptr, 10)) : std::random_device{}();
}

class GpuTest : public ::testing::Test {
protected:
    // Here and not in TearDown, which tests override.
    ~GpuTest() override {
        if (HasFailure()) std::cout << "SHARPI_TEST_SEED=" << _seed << " draws these numbers again" << std::endl;
    }
    void SetUp() override {
        try {
            _stream = std::make_unique<Stream>(findDevice(0));
        } catch (const Error& error) {
            // Rethrown, the error also ends the SetUp of a test that calls this one.
            if (error.kind() != ErrorKind::InvalidArgument || gpuIsRequired()) throw;
            GTEST_SKIP() << "no GPU: " << error.what();
        }
    }
    Stream& stream() { return *_stream; }
    std::mt19937& random() { return _random; }
    std::vector<float> randomFloats(size_t count, float scale = 1.0f) {
        std::normal_distribution<float> normal(0.0f, scale);
        std::vector<float> values(count);
        for (float& v : values) v = normal(_random);
        return values;
    }
    // The 16-bit type that the device's tensor cores multiply.
    uint16_t toHalf(float x) { return stream().device().major >= 8 ? bf16FromFloat(x) : f16FromFloat(x); }
    float fromHalf(uint16_t x) { return stream().device().major >= 8 ? floatFromBf16(x) : floatFromF16(x); }

private:
    std::unique_ptr<Stream> _stream;
    const uint32_t _seed = testSeed();
    std::mt19937 _random{_seed};
};

inline ::testing::AssertionResult sameBits(const std::vector<float>& expected, const std::vector<float>& actual) {
    if (expected.size() != actual.size())
        return ::testing::AssertionFailure() << "sizes " << expected.size() << " and " << actual.size();
    size_t differing = 0, first = 0;
    for (size_t i = expected.size(); i-- > 0;) {
        if (std::memcmp(&expected[i], &actual[i], sizeof(float)) != 0) ++differing, first = i;
    }
    if (!differing) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << differing << " of " << expected.size() << " differ, the first at " << first
                                         << ": expected " << expected[first] << ", got " << actual[first];
}

}  // namespace sharpi::cuda
