// Opening devices by their index, and launches on each of several devices in one process.
#include <string>

#include "core/half.h"
#include "device/launch.cuh"
#include "gpu_test.h"
#include "kernels/matmul/matmul.h"

namespace sharpi::cuda {

namespace {

class Devices : public GpuTest {
protected:
    static int count() {
        int devices = 0;
        require(cudaGetDeviceCount(&devices));
        return devices;
    }
    static int attribute(cudaDeviceAttr which, int device) {
        int value = 0;
        require(cudaDeviceGetAttribute(&value, which, device));
        return value;
    }
    void TearDown() override { cudaSetDevice(0); }
};

// Other errors leave the device usable.
TEST_F(Devices, AreLostByErrorsThatStay) {
    const auto kindOf = [](cudaError_t status) {
        try {
            check(status, "a step");
        } catch (const Error& error) {
            EXPECT_NE(std::string(error.what()).find("CUDA: a step: "), std::string::npos) << error.what();
            return error.kind();
        }
        ADD_FAILURE() << "it did not throw";
        return ErrorKind::Internal;
    };
    for (const cudaError_t status : {cudaErrorIllegalAddress, cudaErrorECCUncorrectable, cudaErrorLaunchTimeout})
        EXPECT_EQ(kindOf(status), ErrorKind::DeviceLost);
    EXPECT_EQ(kindOf(cudaErrorMemoryAllocation), ErrorKind::OutOfMemory);
    for (const cudaError_t status : {cudaErrorInvalidValue, cudaErrorInvalidConfiguration, cudaErrorNotReady})
        EXPECT_EQ(kindOf(status), ErrorKind::Internal);
}

TEST_F(Devices, AreOpenedByTheirIndex) {
    for (int i = 0; i < count(); ++i) {
        const DeviceInfo info = findDevice(i);
        int current = -1;
        require(cudaGetDevice(&current));
        EXPECT_EQ(current, i);
        EXPECT_EQ(info.index, i);
        EXPECT_EQ(info.major, attribute(cudaDevAttrComputeCapabilityMajor, i));
        EXPECT_GE(info.codeVersion, 75);
        EXPECT_LE(info.codeVersion, info.major * 10 + info.minor);
        EXPECT_EQ(info.sharedPerBlock, static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, i)));
        EXPECT_EQ(info.sharedPerMultiprocessor,
                  static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, i)));
    }
}

TEST_F(Devices, ThatDoNotExistAreNamed) {
    for (const int index : {-1, count()}) {
        try {
            findDevice(index);
            ADD_FAILURE() << "device " << index << " was opened";
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::InvalidArgument);
            EXPECT_NE(std::string(error.what()).find("device " + std::to_string(index) + " does not exist"),
                      std::string::npos)
                << error.what();
        }
    }
}

// These kernels need more shared memory than a device grants unasked, and the limit is each device's own.
TEST_F(Devices, HaveTheirOwnLimitsOfSharedMemory) {
    if (count() < 2) GTEST_SKIP() << "there is one device";
    constexpr int64_t kRows = 200, kOutputs = 256, kCols = 512;
    const std::vector<float> x = randomFloats(kRows * kCols), w = randomFloats(kOutputs * kCols);
    std::vector<uint16_t> hi, lo, narrow;
    for (const float v : x) {
        hi.push_back(bf16FromFloat(v));
        lo.push_back(bf16FromFloat(v - floatFromBf16(hi.back())));
    }
    for (const float v : w) narrow.push_back(bf16FromFloat(v));
    const auto run = [&](int device, DType type) {
        Stream stream(findDevice(device));
        const DeviceArray<uint16_t> deviceHi(hi), deviceLo(lo), deviceNarrow(narrow);
        const DeviceArray<float> deviceWide(w), y(kRows * kOutputs);
        const bool isWide = type == DType::F32;
        const void* data = isWide ? static_cast<const void*>(deviceWide.get()) : deviceNarrow.get();
        const Matrix matrix = {type, kOutputs, kCols, static_cast<const uint8_t*>(data)};
        matmul(stream, matrix, {deviceHi.get(), isWide ? deviceLo.get() : nullptr}, kRows, nullptr, y.get(),
               Store::Write);
        return y.read();
    };
    for (const DType type : {DType::F32, DType::BF16}) {
        const std::vector<float> first = run(0, type);
        for (int device = 1; device < count(); ++device) {
            const DeviceInfo one = findDevice(0), other = findDevice(device);
            if (one.major != other.major) continue;  // they round differently
            EXPECT_TRUE(sameBits(first, run(device, type))) << info(type).name << " on device " << device;
        }
    }
}

}  // namespace

}  // namespace sharpi::cuda
