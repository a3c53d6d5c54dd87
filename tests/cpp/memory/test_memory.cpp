// The memories under the allocator. The host's memory is zero, is not touched until it is used, and is refused with an
// error. The fake device has a set capacity, fails on demand and ends the test at any misuse. Buffer owns an
// allocation.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "fake_device.h"
#include "memory/allocator.h"
#include "memory/host_memory.h"

namespace {

using sharpi::Allocator;
using sharpi::Buffer;
using sharpi::Error;
using sharpi::ErrorKind;
using sharpi::FakeDevice;
using sharpi::HostMemory;

constexpr size_t kMiB = size_t{1} << 20;

// The number of pages in the range that have memory.
size_t residentPages(void* address, size_t bytes) {
    const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    std::vector<unsigned char> resident((bytes + page - 1) / page);
    EXPECT_EQ(::mincore(address, bytes, resident.data()), 0);
    return static_cast<size_t>(std::count_if(resident.begin(), resident.end(), [](unsigned char r) { return r & 1; }));
}

bool allZero(const uint8_t* data, size_t bytes) {
    return std::all_of(data, data + bytes, [](uint8_t b) { return b == 0; });
}

TEST(HostMemory, GivesZeroedMemoryToReservedAddresses) {
    HostMemory memory;
    const size_t granule = memory.granularity();
    ASSERT_GT(granule, 0u);
    ASSERT_EQ(granule & (granule - 1), 0u);
    ASSERT_TRUE(memory.commitsZeroes());
    auto* base = static_cast<uint8_t*>(memory.reserve(16 * granule));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(base) % granule, 0u);
    for (int round = 0; round < 3; ++round) {  // memory that is taken again must not show its old contents
        uint8_t* const part = base + granule * 5;
        ASSERT_TRUE(memory.commit(part, 3 * granule));
        EXPECT_TRUE(allZero(part, 3 * granule));
        std::memset(part, 0xa5, 3 * granule);
        memory.decommit(part, 3 * granule);
    }
    memory.release(base, 16 * granule);
}

TEST(HostMemory, AddressesWithoutMemoryFault) {
    ::testing::FLAGS_gtest_death_test_style = "threadsafe";
    HostMemory memory;
    const size_t granule = memory.granularity();
    auto* base = static_cast<volatile uint8_t*>(memory.reserve(2 * granule));
    EXPECT_DEATH(base[0] = 1, "");
    ASSERT_TRUE(memory.commit(const_cast<uint8_t*>(base), granule));
    base[0] = 1;
    memory.decommit(const_cast<uint8_t*>(base), granule);
    EXPECT_DEATH(base[0] = 1, "");
    memory.release(const_cast<uint8_t*>(base), 2 * granule);
}

TEST(HostMemory, CopiesAndClears) {
    HostMemory memory;
    const size_t granule = memory.granularity();
    auto* base = static_cast<uint8_t*>(memory.reserve(granule));
    ASSERT_TRUE(memory.commit(base, granule));
    const std::vector<uint8_t> sent = {1, 2, 3, 4, 5};
    memory.upload(base + 7, sent.data(), sent.size());
    std::vector<uint8_t> back(7);
    memory.download(back.data(), base + 6, 7);
    EXPECT_EQ(back, (std::vector<uint8_t>{0, 1, 2, 3, 4, 5, 0}));
    memory.zero(base + 8, 2);
    memory.download(back.data(), base + 6, 7);
    EXPECT_EQ(back, (std::vector<uint8_t>{0, 1, 0, 0, 4, 5, 0}));
    memory.decommit(base, granule);
    memory.release(base, granule);
}

TEST(HostMemory, RefusesMoreAddressesThanThereAre) {
    HostMemory memory;
    try {
        memory.reserve(size_t{1} << 60);
        FAIL() << "the system gave 2^60 addresses";
    } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::OutOfMemory);
    }
}

TEST(HostMemory, SaysWhatIsFree) {
    HostMemory memory;
    EXPECT_GT(memory.freeBytes(), kMiB);
    EXPECT_LT(memory.freeBytes(), size_t{1} << 50);
}

TEST(HostMemory, AllocationsStayLazy) {
    HostMemory memory;
    Allocator allocator(memory);
    const size_t bytes = 512 * kMiB;
    Buffer before(allocator, 100, "a neighbour in the first page");
    Buffer cache(allocator, bytes, "a long context");
    const size_t page = memory.granularity();
    auto* const data =
        reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(cache.as<uint8_t>()) + page - 1) / page * page);
    const size_t whole = bytes - 2 * page;
    EXPECT_EQ(residentPages(data, whole), 0u) << "clearing touched memory that is zero already";
    data[whole / 2] = 1;
    EXPECT_GE(residentPages(data, whole), 1u);
}

TEST(FakeDevice, HoldsToItsCapacity) {
    FakeDevice device(8 * kMiB);
    EXPECT_EQ(device.granularity(), 2 * kMiB);
    EXPECT_EQ(device.freeBytes(), 8 * kMiB);
    auto* base = static_cast<uint8_t*>(device.reserve(64 * kMiB));  // addresses are not memory
    EXPECT_EQ(device.reserved(), 64 * kMiB);
    EXPECT_TRUE(device.commit(base, 6 * kMiB));
    EXPECT_EQ(device.freeBytes(), 2 * kMiB);
    EXPECT_FALSE(device.commit(base + 10 * kMiB, 4 * kMiB));
    EXPECT_EQ(device.freeBytes(), 2 * kMiB);
    EXPECT_TRUE(device.commit(base + 10 * kMiB, 2 * kMiB));
    EXPECT_EQ(device.freeBytes(), 0u);
    device.decommit(base, 6 * kMiB);
    EXPECT_EQ(device.freeBytes(), 6 * kMiB);
    device.decommit(base + 10 * kMiB, 2 * kMiB);
    device.release(base, 64 * kMiB);
    EXPECT_EQ(device.reserved(), 0u);
}

TEST(FakeDevice, FailsWhenTold) {
    FakeDevice device(64 * kMiB);
    auto* base = static_cast<uint8_t*>(device.reserve(64 * kMiB));
    device.failCommit(3);
    for (size_t i = 0; i < 5; ++i) EXPECT_EQ(device.commit(base + i * 2 * kMiB, 2 * kMiB), i != 2) << i;
    EXPECT_EQ(device.commits(), 5);
    for (size_t i = 0; i < 5; ++i) {
        if (i != 2) device.decommit(base + i * 2 * kMiB, 2 * kMiB);
    }
    device.release(base, 64 * kMiB);
    device.setLargestReserve(4 * kMiB);
    EXPECT_THROW(device.reserve(6 * kMiB), Error);
    device.release(device.reserve(4 * kMiB), 4 * kMiB);
}

TEST(FakeDevice, PoisonsWhenTold) {
    FakeDevice device(4 * kMiB);
    device.poisonCommits();
    EXPECT_FALSE(device.commitsZeroes());
    auto* base = static_cast<uint8_t*>(device.reserve(2 * kMiB));
    ASSERT_TRUE(device.commit(base, 2 * kMiB));
    EXPECT_NE(base[0], 0);
    EXPECT_NE(base[2 * kMiB - 1], 0);
    device.decommit(base, 2 * kMiB);
    device.release(base, 2 * kMiB);
}

TEST(FakeDevice, EndsTheTestOnMisuse) {
    ::testing::FLAGS_gtest_death_test_style = "threadsafe";
    FakeDevice device(64 * kMiB);
    auto* base = static_cast<uint8_t*>(device.reserve(16 * kMiB));
    ASSERT_TRUE(device.commit(base + 4 * kMiB, 4 * kMiB));
    EXPECT_DEATH(device.commit(base + 6 * kMiB, 4 * kMiB), "over another");
    EXPECT_DEATH(device.commit(base + 2 * kMiB, 8 * kMiB), "over another");
    EXPECT_DEATH(device.commit(base + 14 * kMiB, 4 * kMiB), "outside");
    EXPECT_DEATH(device.commit(base + kMiB, 2 * kMiB), "granules");
    EXPECT_DEATH(device.decommit(base + 4 * kMiB, 2 * kMiB), "one commit");
    EXPECT_DEATH(device.decommit(base, 4 * kMiB), "one commit");
    EXPECT_DEATH(device.release(base, 16 * kMiB), "still behind");
    EXPECT_DEATH(device.release(base, 8 * kMiB), "not reserved so");
    device.decommit(base + 4 * kMiB, 4 * kMiB);
    EXPECT_DEATH(device.decommit(base + 4 * kMiB, 4 * kMiB), "one commit");
    device.release(base, 16 * kMiB);
}

TEST(Buffer, FreesOnceThroughMovesAndAssignments) {
    HostMemory memory;
    Allocator allocator(memory);
    {
        Buffer empty;
        EXPECT_EQ(empty.bytes(), 0u);
        EXPECT_EQ(empty.as<void>(), nullptr);

        Buffer a(allocator, 100, "a");
        uint8_t* const data = a.as<uint8_t>();
        data[99] = 42;
        EXPECT_EQ(allocator.held(), 100u);

        Buffer b(std::move(a));
        EXPECT_EQ(b.as<uint8_t>(), data);
        EXPECT_EQ(b.bytes(), 100u);
        EXPECT_EQ(b.as<uint8_t>()[99], 42);
        EXPECT_EQ(allocator.held(), 100u);

        b = Buffer(allocator, 30, "b");  // the temporary frees the old hundred bytes
        EXPECT_EQ(allocator.held(), 30u);
        EXPECT_EQ(b.bytes(), 30u);

        empty = std::move(b);
        EXPECT_EQ(empty.bytes(), 30u);
        EXPECT_EQ(allocator.held(), 30u);

        std::vector<Buffer> many;
        for (size_t i = 1; i <= 20; ++i) many.emplace_back(allocator, i, "one of many");  // moves as the vector grows
        EXPECT_EQ(allocator.held(), 30u + 210u);
        for (size_t i = 1; i <= 20; ++i) EXPECT_EQ(many[i - 1].bytes(), i);
    }
    EXPECT_EQ(allocator.held(), 0u);
    EXPECT_EQ(allocator.taken(), 0u);
}

TEST(Buffer, AFailedAllocationLeavesNothingBehind) {
    FakeDevice device(4 * kMiB);
    Allocator allocator(device);
    EXPECT_THROW(Buffer(allocator, 5 * kMiB, "too much"), Error);
    EXPECT_EQ(allocator.held(), 0u);
    Buffer kept(allocator, 3 * kMiB, "kept");
    kept.as<uint8_t>()[3 * kMiB - 1] = 9;
    EXPECT_THROW(kept = Buffer(allocator, 2 * kMiB, "too much"), Error);
    EXPECT_EQ(kept.bytes(), 3 * kMiB);
    EXPECT_EQ(kept.as<uint8_t>()[3 * kMiB - 1], 9);
    EXPECT_EQ(allocator.held(), 3 * kMiB);
}

}  // namespace
