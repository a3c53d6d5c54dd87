// The GPU's part of measuring the machine: markers, copies that end when told to, rates that are positive numbers. It
// takes no more memory than is free, and gives all of it back.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <utility>

#include "device/cuda_memory.h"
#include "device/cuda_probe.h"
#include "device/marker.h"
#include "gpu_test.h"

namespace sharpi::cuda {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kProbeBytes = size_t{1} << 30;  // several times the size of any cache

using CudaProbeTest = GpuTest;

TEST_F(CudaProbeTest, AMarkerIsReachedAfterTheWorkBeforeIt) {
    const size_t bytes = 256 * kMiB;
    DeviceArray<uint8_t> device(bytes);
    PinnedBuffer host(bytes);
    Marker marker;
    marker.wait();  // never set: returns at once
    for (int round = 0; round < 3; ++round) {
        const auto value = static_cast<uint8_t>(1 + random()() % 255);
        std::memset(host.as<uint8_t>(), 0, bytes);
        require(cudaMemsetAsync(device.get(), value, bytes, stream().handle()));
        stream().downloadPinned(host.as<uint8_t>(), device.get(), bytes);
        marker.set(stream());
        marker.wait();
        EXPECT_EQ(host.as<uint8_t>()[0], value);
        EXPECT_EQ(host.as<uint8_t>()[bytes - 1], value);
    }
}

TEST_F(CudaProbeTest, CopiesEndWhenTold) {
    CudaProbe probe(stream().device(), 32 * kMiB);
    int asked = 0;
    const std::vector<Span> spans = probe.copies([&] { return ++asked == 5; });
    EXPECT_EQ(asked, 5) << "it asks until the answer is yes, and not again";
    ASSERT_GE(spans.size(), 5u);
    for (size_t i = 0; i < spans.size(); ++i) {
        EXPECT_GT(spans[i].bytes, 0);
        EXPECT_GT(spans[i].end, spans[i].begin);
        if (i > 0) {
            EXPECT_EQ(spans[i].begin, spans[i - 1].end) << "spans must be consecutive";
        }
    }
    EXPECT_GE(probe.copies([] { return true; }).size(), 1u);
}

TEST_F(CudaProbeTest, GivesFinitePositiveRates) {
    CudaProbe probe(stream().device(), 32 * kMiB);
    const std::vector<std::pair<const char*, double>> rates = {{"PCIe", probe.pcieBytesPerSecond()},
                                                               {"VRAM", probe.vramBytesPerSecond()},
                                                               {"kernel", probe.kernelSeconds()},
                                                               {"arithmetic", probe.flops()}};
    for (const auto& [name, rate] : rates) {
        EXPECT_TRUE(std::isfinite(rate)) << name;
        EXPECT_GT(rate, 0) << name;
    }
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(CudaProbeTest, GivesItsMemoryBack) {
    CudaMemory memory(stream());
    const auto measure = [this] { CudaProbe(stream().device(), 64 * kMiB).vramBytesPerSecond(); };
    measure();  // the driver keeps what it sets up with the first use
    const size_t before = memory.freeBytes();
    measure();
    EXPECT_LE(before, memory.freeBytes() + 4 * kMiB);
}

// Holds all but `left` bytes of the GPU's memory while it lives.
class Crowd {
public:
    explicit Crowd(CudaMemory& memory, size_t left) : _allocator(memory) {
        for (size_t piece = size_t{1} << 36; piece >= 2 * kMiB; piece /= 2) {
            while (memory.freeBytes() > left + piece) _pieces.emplace_back(_allocator, piece, "a crowd");
        }
    }

private:
    Allocator _allocator;
    std::vector<Buffer> _pieces;
};

TEST_F(CudaProbeTest, MakesDoWithLittleMemory) {
    CudaMemory memory(stream());
    const Crowd crowd(memory, 256 * kMiB);
    EXPECT_GT(CudaProbe(stream().device(), kProbeBytes).vramBytesPerSecond(), 0);
}

TEST_F(CudaProbeTest, SaysSoWhereThereIsNoMemory) {
    CudaMemory memory(stream());
    const Crowd crowd(memory, 40 * kMiB);
    try {
        CudaProbe probe(stream().device(), kProbeBytes);
        ADD_FAILURE() << "it found enough memory";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::OutOfMemory) << error.what();
    }
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace sharpi::cuda
