// The allocator over the GPU's memory, checked against the free memory that the device reports.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "device/cuda_memory.h"
#include "gpu_test.h"
#include "memory/allocator.h"

namespace sharpi::cuda {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
// The driver keeps tables of its own for mapped memory.
constexpr size_t kSlack = 4 * kMiB;

class CudaMemoryTest : public GpuTest {
protected:
    static size_t difference(size_t a, size_t b) { return a > b ? a - b : b - a; }
    static std::vector<uint8_t> read(CudaMemory& memory, const void* address, size_t bytes) {
        std::vector<uint8_t> values(bytes);
        memory.download(values.data(), address, bytes);
        return values;
    }
    std::vector<uint8_t> randomBytes(size_t count) {
        std::vector<uint8_t> values(count);
        for (uint8_t& v : values) v = static_cast<uint8_t>(1 + random()() % 255);
        return values;
    }
    // The driver keeps what it sets up with the first mapping.
    static void warmUp(CudaMemory& memory) {
        Allocator allocator(memory);
        Buffer(allocator, 64 * kMiB, "warming up");
    }
};

TEST_F(CudaMemoryTest, GranularityIsAPowerOfTwo) {
    CudaMemory memory(stream());
    ASSERT_GE(memory.granularity(), 4096u);
    EXPECT_EQ(memory.granularity() & (memory.granularity() - 1), 0u);
    EXPECT_GT(memory.freeBytes(), memory.granularity());
}

TEST_F(CudaMemoryTest, ExactAllocationsTakeWhatTheyAskFor) {
    CudaMemory memory(stream());
    warmUp(memory);
    const size_t bytes = 17 * kMiB + 12345;
    if (memory.freeBytes() < 65 * bytes) GTEST_SKIP() << "too little free memory";
    const size_t before = memory.freeBytes();
    {
        Allocator allocator(memory);
        std::vector<Buffer> tensors;
        for (int i = 0; i < 64; ++i) tensors.emplace_back(allocator, bytes, "a tensor");
        EXPECT_LE(allocator.taken(), 64 * bytes + memory.granularity());
        const size_t took = before - memory.freeBytes();
        EXPECT_GE(took, 64 * bytes);
        EXPECT_LE(took, allocator.taken() + kSlack);
        for (size_t i = 0; i < tensors.size(); i += 2) tensors[i] = Buffer();
        EXPECT_LE(difference(before - memory.freeBytes(), allocator.taken()), kSlack);
        EXPECT_LE(allocator.taken(), 32 * bytes + 33 * 2 * memory.granularity());
    }
    EXPECT_LE(difference(before, memory.freeBytes()), kSlack);
}

TEST_F(CudaMemoryTest, ContentsAreZeroedAndStayApart) {
    CudaMemory memory(stream());
    Allocator allocator(memory);
    const std::vector<size_t> sizes = {1, 255, 256, 257, 5000, 2 * kMiB - 256, 2 * kMiB, 3 * kMiB + 7, 100};
    for (int round = 0; round < 3; ++round) {  // later rounds get memory that was used before
        std::vector<Buffer> buffers;
        std::vector<std::vector<uint8_t>> sent;
        for (const size_t bytes : sizes) {
            buffers.emplace_back(allocator, bytes, "a test");
            EXPECT_EQ(read(memory, buffers.back().as<void>(), bytes), std::vector<uint8_t>(bytes, 0))
                << bytes << " bytes";
            sent.push_back(randomBytes(bytes));
            memory.upload(buffers.back().as<void>(), sent.back().data(), bytes);
        }
        for (size_t i = 1; i < sizes.size(); i += 3) buffers[i] = Buffer();
        for (size_t i = 0; i < sizes.size(); ++i) {
            if (i % 3 == 1) continue;
            EXPECT_EQ(read(memory, buffers[i].as<void>(), sizes[i]), sent[i]) << "buffer " << i;
        }
        memory.zero(buffers[5].as<uint8_t>() + 100, 50);
        std::fill(sent[5].begin() + 100, sent[5].begin() + 150, uint8_t{0});
        EXPECT_EQ(read(memory, buffers[5].as<void>(), sizes[5]), sent[5]);
    }
    EXPECT_EQ(allocator.taken(), 0u);
}

TEST_F(CudaMemoryTest, OutOfMemoryTakesNothing) {
    CudaMemory memory(stream());
    warmUp(memory);
    Allocator allocator(memory);
    Buffer kept(allocator, 1000, "kept");
    const size_t before = memory.freeBytes();
    try {
        allocator.allocate(memory.freeBytes() + 256 * kMiB, "a giant");
        FAIL() << "it gave more memory than there is";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::OutOfMemory) << error.what();
        EXPECT_NE(std::string(error.what()).find("on the GPU: 'a giant' needs"), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find("held: 'kept' 1000 bytes"), std::string::npos) << error.what();
    }
    EXPECT_EQ(allocator.held(), 1000u);
    EXPECT_LE(difference(before, memory.freeBytes()), kSlack);
    Buffer more(allocator, 8 * kMiB, "more");  // the device still works
    EXPECT_EQ(read(memory, more.as<uint8_t>() + 8 * kMiB - 100, 100), std::vector<uint8_t>(100, 0));
}

TEST_F(CudaMemoryTest, ManyRoundsLeakNothing) {
    CudaMemory memory(stream());
    warmUp(memory);
    const size_t before = memory.freeBytes();
    for (int round = 0; round < 1000; ++round) {
        Allocator allocator(memory);
        Buffer a(allocator, 100, "a"), b(allocator, 3 * kMiB, "b");
        allocator.free(allocator.allocate(5000, "c"));
    }
    EXPECT_LE(difference(before, memory.freeBytes()), kSlack);
}

TEST_F(CudaMemoryTest, FreeingWaitsForTheStream) {
    CudaMemory memory(stream());
    Allocator allocator(memory);
    for (int round = 0; round < 20; ++round) {
        Buffer buffer(allocator, 256 * kMiB, "a large one");
        for (int i = 0; i < 10; ++i)
            memory.zero(buffer.as<void>(), buffer.bytes());  // still running when the buffer is freed
    }
    EXPECT_NO_THROW(stream().synchronize());
    EXPECT_EQ(allocator.taken(), 0u);
}

TEST_F(CudaMemoryTest, AnyThreadMayAllocate) {
    CudaMemory memory(stream());
    Allocator allocator(memory);
    std::vector<uint8_t> values;
    std::thread([&] {
        Buffer buffer(allocator, 3 * kMiB, "of another thread");
        const std::vector<uint8_t> sent(1000, 42);
        memory.upload(buffer.as<uint8_t>() + 2 * kMiB, sent.data(), sent.size());
        values = read(memory, buffer.as<uint8_t>() + 2 * kMiB, 1000);
    }).join();
    EXPECT_EQ(values, std::vector<uint8_t>(1000, 42));
    EXPECT_EQ(allocator.taken(), 0u);
}

}  // namespace
}  // namespace sharpi::cuda
