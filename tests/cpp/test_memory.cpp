// Host memory as the engine takes it: zeroed, aligned, counted to the byte, refused at the capacity with a message
// that says what did not fit; and Buffer, which owns one allocation.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "memory/device_memory.h"

namespace {

using sharpi::Buffer;
using sharpi::Error;
using sharpi::ErrorKind;
using sharpi::HostMemory;

// Checks that each byte is given back once, with the size it was taken with.
class CheckedMemory : public sharpi::DeviceMemory {
public:
    void* allocate(size_t bytes, const char*) override {
        auto* data = new uint8_t[bytes + 1]();
        _sizes[data] = bytes;
        return data;
    }
    void free(void* data, size_t bytes) noexcept override {
        const auto it = _sizes.find(data);
        EXPECT_TRUE(it != _sizes.end()) << "freed twice, or never taken";
        if (it == _sizes.end()) return;
        EXPECT_EQ(it->second, bytes);
        _sizes.erase(it);
        delete[] static_cast<uint8_t*>(data);
    }
    size_t held() const override {
        size_t total = 0;
        for (const auto& [data, bytes] : _sizes) total += bytes;
        return total;
    }

private:
    std::map<void*, size_t> _sizes;
};

TEST(HostMemory, IsZeroedAlignedAndCounted) {
    HostMemory memory;
    std::mt19937 random(3);
    std::vector<std::pair<void*, size_t>> taken;
    size_t held = 0;
    for (int round = 0; round < 400; ++round) {
        if (taken.empty() || random() % 3 != 0) {
            const size_t bytes = 1 + random() % 50000;
            auto* data = static_cast<uint8_t*>(memory.allocate(bytes, "a test"));
            EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0u);
            for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(data[i], 0) << "byte " << i << " of " << bytes;
            std::memset(data, 0xa5, bytes);  // so that reuse without clearing would show
            taken.emplace_back(data, bytes);
            held += bytes;
        } else {
            std::swap(taken[random() % taken.size()], taken.back());
            memory.free(taken.back().first, taken.back().second);
            held -= taken.back().second;
            taken.pop_back();
        }
        ASSERT_EQ(memory.held(), held);
    }
    for (const auto& [data, bytes] : taken) memory.free(data, bytes);
    EXPECT_EQ(memory.held(), 0u);
}

TEST(HostMemory, RefusesBeyondItsCapacity) {
    HostMemory memory(10000);
    void* first = memory.allocate(6000, "the first part");
    for (const size_t bytes : {size_t{4001}, size_t{10001}, SIZE_MAX, SIZE_MAX - 5999}) {
        try {
            memory.allocate(bytes, "the second part");
            FAIL() << bytes << " bytes were given";
        } catch (const Error& e) {
            EXPECT_EQ(e.kind(), ErrorKind::OutOfMemory);
            EXPECT_NE(std::string(e.what()).find("the second part"), std::string::npos) << e.what();
            EXPECT_NE(std::string(e.what()).find(std::to_string(bytes)), std::string::npos) << e.what();
        }
        EXPECT_EQ(memory.held(), 6000u);
    }
    void* second = memory.allocate(4000, "the second part");  // exactly what is left
    EXPECT_EQ(memory.held(), 10000u);
    EXPECT_THROW(memory.allocate(1, "one byte"), Error);
    memory.free(first, 6000);
    first = memory.allocate(6000, "the first part again");
    memory.free(first, 6000);
    memory.free(second, 4000);
    EXPECT_EQ(memory.held(), 0u);
}

TEST(HostMemory, ReportsWhatTheSystemRefuses) {
    HostMemory memory;
    try {
        memory.allocate(size_t{1} << 62, "everything");
        FAIL() << "the system gave 2^62 bytes";
    } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::OutOfMemory);
    }
    EXPECT_EQ(memory.held(), 0u);
}

TEST(HostMemory, AnEmptyAllocationCanBeFreed) {
    HostMemory memory;
    void* data = memory.allocate(0, "nothing");
    EXPECT_NE(data, nullptr);
    memory.free(data, 0);
    EXPECT_EQ(memory.held(), 0u);
}

TEST(Buffer, FreesOnceThroughMovesAndAssignments) {
    CheckedMemory memory;
    {
        Buffer empty;
        EXPECT_EQ(empty.bytes(), 0u);
        EXPECT_EQ(empty.as<void>(), nullptr);

        Buffer a(memory, 100, "a");
        uint8_t* const data = a.as<uint8_t>();
        data[99] = 42;
        EXPECT_EQ(memory.held(), 100u);

        Buffer b(std::move(a));
        EXPECT_EQ(b.as<uint8_t>(), data);
        EXPECT_EQ(b.bytes(), 100u);
        EXPECT_EQ(b.as<uint8_t>()[99], 42);
        EXPECT_EQ(memory.held(), 100u);

        b = Buffer(memory, 30, "b");  // the old hundred go with the temporary
        EXPECT_EQ(memory.held(), 30u);
        EXPECT_EQ(b.bytes(), 30u);

        empty = std::move(b);
        EXPECT_EQ(empty.bytes(), 30u);
        EXPECT_EQ(memory.held(), 30u);

        std::vector<Buffer> many;
        for (size_t i = 1; i <= 20; ++i) many.emplace_back(memory, i, "one of many");  // moves as the vector grows
        EXPECT_EQ(memory.held(), 30u + 210u);
        for (size_t i = 1; i <= 20; ++i) EXPECT_EQ(many[i - 1].bytes(), i);
    }
    EXPECT_EQ(memory.held(), 0u);
}

TEST(Buffer, AFailedAllocationLeavesNothingBehind) {
    HostMemory memory(100);
    EXPECT_THROW(Buffer(memory, 101, "too much"), Error);
    EXPECT_EQ(memory.held(), 0u);
    Buffer kept(memory, 60, "kept");
    EXPECT_THROW(kept = Buffer(memory, 60, "too much"), Error);
    EXPECT_EQ(kept.bytes(), 60u);
    EXPECT_EQ(memory.held(), 60u);
}

}  // namespace
