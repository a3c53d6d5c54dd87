// What the GPU tests share: a stream on the device there is, arrays on it, and skipping with the reason where there
// is none. Arrays are separate device allocations, so that a memory checker sees accesses past their end.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/error.h"
#include "device/stream.h"

namespace sharpi::cuda {

inline void require(cudaError_t status) {
    if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

template <typename T> class DeviceArray {
public:
    // Poisoned: every byte 0xff (NaN as floats, -1 as integers).
    explicit DeviceArray(size_t count) : _count(count) {
        require(cudaMalloc(reinterpret_cast<void**>(&_data), bytes()));
        require(cudaMemset(_data, 0xff, bytes()));
        require(cudaDeviceSynchronize());  // the tests' stream does not wait for the default one
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

class GpuTest : public ::testing::Test {
protected:
    void SetUp() override {
        try {
            _stream = std::make_unique<Stream>(findDevice());
        } catch (const Error& error) {
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

private:
    std::unique_ptr<Stream> _stream;
    std::mt19937 _random{std::random_device{}()};
};

inline ::testing::AssertionResult sameBits(const std::vector<float>& expected, const std::vector<float>& actual) {
    if (expected.size() != actual.size()) return ::testing::AssertionFailure() << "sizes " << expected.size() << " and " << actual.size();
    size_t differing = 0, first = 0;
    for (size_t i = expected.size(); i-- > 0;) {
        if (std::memcmp(&expected[i], &actual[i], sizeof(float)) != 0) ++differing, first = i;
    }
    if (!differing) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << differing << " of " << expected.size() << " differ, the first at " << first << ": expected "
                                         << expected[first] << ", got " << actual[first];
}

}  // namespace sharpi::cuda
