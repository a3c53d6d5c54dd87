// RAM that is page-locked as it is taken: the device reads it, and it is ordinary memory again, or gone, afterwards.
#include "device/pinned_memory.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <vector>

#include "gpu_test.h"
#include "memory/allocator.h"

namespace sharpi::cuda {
namespace {

class PinnedMemoryTest : public GpuTest {
protected:
    static bool isPinned(void* host) {
        void* device = nullptr;
        const bool pinned = cudaHostGetDevicePointer(&device, host, 0) == cudaSuccess;
        cudaGetLastError();
        return pinned;
    }
    // Whether the device gets what is written there.
    void expectRead(uint8_t* host, size_t bytes) {
        for (size_t i = 0; i < bytes; i += 997) host[i] = static_cast<uint8_t>(random()());
        void* device = nullptr;
        require(cudaMalloc(&device, bytes));
        require(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
        std::vector<uint8_t> back(bytes);
        require(cudaMemcpy(back.data(), device, bytes, cudaMemcpyDeviceToHost));
        require(cudaFree(device));
        EXPECT_EQ(std::memcmp(back.data(), host, bytes), 0);
    }
};

// An allocator takes memory in pieces, across whose borders copies go.
TEST_F(PinnedMemoryTest, ARangeIsPinnedAsAWholeWhileItIsHeld) {
    HugePages memory;
    Allocator allocator(memory);
    const Buffer buffer(allocator, (size_t{5} << 20) + 300, "a buffer");
    auto* const begin = buffer.as<uint8_t>();
    EXPECT_FALSE(isPinned(begin));
    {
        const PinnedRange range(stream().device(), begin, buffer.bytes());
        EXPECT_TRUE(range.refusal().empty());
        EXPECT_TRUE(isPinned(begin));
        expectRead(begin, buffer.bytes());
        expectRead(begin + (size_t{4} << 20) - 100, 200);
        EXPECT_NE(range.reachable(begin, buffer.bytes()), nullptr);
        EXPECT_EQ(range.reachable(begin + 7, 1) - range.reachable(begin, 1), 7);
        EXPECT_EQ(range.reachable(begin, buffer.bytes() + 1), nullptr);
        EXPECT_EQ(range.reachable(begin - 1, 1), nullptr);
        // What is locked already is not locked again.
        const PinnedRange again(stream().device(), begin, buffer.bytes());
        EXPECT_FALSE(again.refusal().empty());
        EXPECT_EQ(again.reachable(begin, 1), nullptr);
    }
    EXPECT_FALSE(isPinned(begin));
}

TEST_F(PinnedMemoryTest, MorePagesThanThereAreAreRefused) {
    HugePages memory;
    Allocator allocator(memory);
    EXPECT_THROW(Buffer(allocator, memory.freeBytes() + (size_t{1} << 30), "too much"), Error);
    const Buffer afterwards(allocator, 1000, "a little");
    EXPECT_NE(afterwards.as<void>(), nullptr);
}

TEST_F(PinnedMemoryTest, SingleBuffersOfAnySize) {
    const HostPages pages = pinnedPages();
    for (const size_t bytes : {size_t{1}, size_t{4096}, size_t{4097}, size_t{2} << 20, (size_t{9} << 20) + 12345}) {
        auto* const memory = static_cast<uint8_t*>(pages.take(bytes));
        ASSERT_NE(memory, nullptr) << bytes;
        if (bytes >= size_t{2} << 20) {
            EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % (size_t{2} << 20), 0u) << "a huge page's beginning";
        }
        EXPECT_TRUE(isPinned(memory));
        expectRead(memory, bytes);
        pages.give(memory, bytes);
        EXPECT_FALSE(isPinned(memory));
    }
    EXPECT_EQ(pages.take(SIZE_MAX / 4), nullptr);
}

}  // namespace
}  // namespace sharpi::cuda
