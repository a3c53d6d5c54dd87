// Buffers for copies of a device's memory: what is given back serves again, few are kept, and where the device's kind
// of host memory ends the system's is taken.
#include "memory/copy_buffers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "memory/host_memory.h"

namespace sharpi {
namespace {

int taken = 0, most = 0;

void* takePage(size_t bytes) noexcept {
    if (taken == most) return nullptr;
    ++taken;
    return ::operator new(bytes, std::nothrow);
}

void givePage(void* memory, size_t) noexcept {
    --taken;
    ::operator delete(memory);
}

class CopyBuffersTest : public ::testing::Test {
protected:
    CopyBuffersTest() {
        taken = 0;
        most = 100;
    }
    ~CopyBuffersTest() override { EXPECT_EQ(taken, 0); }
    HostPages pages() const { return {takePage, givePage}; }
};

TEST_F(CopyBuffersTest, WhatIsGivenBackServesTheNextCopyOfItsSize) {
    CopyBuffers buffers(pages());
    void* const first = buffers.take(1000);
    void* const second = buffers.take(1000);
    EXPECT_NE(first, second);
    buffers.give(first, 1000);
    void* const other = buffers.take(2000);
    EXPECT_EQ(taken, 3);
    EXPECT_EQ(buffers.take(1000), first);
    EXPECT_EQ(taken, 3);
    buffers.give(first, 1000);
    buffers.give(second, 1000);
    buffers.give(other, 2000);
}

TEST_F(CopyBuffersTest, FewAreKept) {
    CopyBuffers buffers(pages());
    std::vector<void*> all;
    for (size_t i = 0; i < 10; ++i) all.push_back(buffers.take(100));
    for (void* const memory : all) buffers.give(memory, 100);
    EXPECT_EQ(taken, static_cast<int>(CopyBuffers::kMostFree));
}

TEST_F(CopyBuffersTest, TheSystemsMemoryTakesTheRest) {
    most = 2;
    CopyBuffers buffers(pages());
    std::vector<void*> all;
    for (size_t i = 0; i < 6; ++i) {
        all.push_back(buffers.take(100));
        std::memset(all.back(), 1, 100);
    }
    EXPECT_EQ(taken, 2);
    for (void* const memory : all) buffers.give(memory, 100);
}

TEST_F(CopyBuffersTest, HostMemoryNeedsNoOther) {
    CopyBuffers buffers(HostMemory().hostPages());
    buffers.give(buffers.take(100), 100);
}

TEST_F(CopyBuffersTest, VectorsKeepTheirBuffersBytes) {
    const auto buffers = std::make_shared<CopyBuffers>(pages());
    CopyVector vector(CopyAllocator<uint8_t>{buffers});
    vector.resize(100);
    std::fill(vector.begin(), vector.end(), uint8_t{7});
    const uint8_t* const at = vector.data();
    const CopyVector moved = std::move(vector);
    EXPECT_EQ(moved.data(), at);
    EXPECT_EQ(moved, CopyVector(100, 7));
    EXPECT_EQ(taken, 1);
}

}  // namespace
}  // namespace sharpi
