// The allocator under thousands of random calls, compared with a model that counts the granules which live allocations
// reach into: contents never change, nothing overlaps, and exactly those granules are taken from the device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <set>

#include "core/error.h"
#include "fake_device.h"
#include "memory/allocator.h"
#include "seed.h"

namespace {

using sharpi::Allocator;
using sharpi::Error;
using sharpi::ErrorKind;
using sharpi::FakeDevice;

constexpr size_t kKiB = 1024, kMiB = 1024 * kKiB;

bool filledWith(const uint8_t* data, size_t bytes, uint8_t value) {
    return bytes == 0 || (data[0] == value && std::memcmp(data, data + 1, bytes - 1) == 0);
}

size_t roomFor(size_t bytes) { return (std::max<size_t>(bytes, 1) + 255) / 256 * 256; }

// The live allocations as the caller sees them; each is filled with its own byte value.
class Model {
public:
    Model(Allocator& allocator, FakeDevice& device)
        : _allocator(allocator), _device(device), _capacity(device.freeBytes()) {}

    size_t count() const { return _live.size(); }
    size_t held() const {
        size_t total = 0;
        for (const auto& [data, one] : _live) total += one.bytes;
        return total;
    }
    // The bytes that must be taken from the device.
    size_t touched() const {
        const size_t granule = _device.granularity();
        std::set<uintptr_t> granules;
        for (const auto& [data, one] : _live) {
            const auto begin = reinterpret_cast<uintptr_t>(data);
            for (uintptr_t g = begin / granule; g <= (begin + one.room - 1) / granule; ++g) granules.insert(g);
        }
        return granules.size() * granule;
    }
    void allocate(size_t bytes) {
        auto* data = static_cast<uint8_t*>(_allocator.allocate(bytes, "random"));
        ASSERT_EQ(reinterpret_cast<uintptr_t>(data) % Allocator::kAlignment, 0u);
        const size_t room = roomFor(bytes);
        const auto next = _live.upper_bound(data);
        ASSERT_TRUE(next == _live.end() || data + room <= next->first) << "overlaps the allocation after it";
        ASSERT_TRUE(next == _live.begin() || std::prev(next)->first + std::prev(next)->second.room <= data)
            << "overlaps the one before";
        ASSERT_TRUE(filledWith(data, bytes, 0)) << "not zeroed";
        const uint8_t value = static_cast<uint8_t>(1 + _next++ % 255);
        std::memset(data, value, bytes);
        _live[data] = {bytes, room, value};
    }
    void free(size_t index) {
        const auto it = std::next(_live.begin(), static_cast<std::ptrdiff_t>(index));
        ASSERT_TRUE(filledWith(it->first, it->second.bytes, it->second.value)) << "contents changed";
        _allocator.free(it->first);
        _live.erase(it);
    }
    void check() const {
        ASSERT_EQ(_allocator.held(), held());
        ASSERT_EQ(_device.freeBytes(), _capacity - _allocator.taken());
        ASSERT_EQ(_allocator.taken(), touched());
    }
    void checkContents() const {
        for (const auto& [data, one] : _live) ASSERT_TRUE(filledWith(data, one.bytes, one.value)) << "contents changed";
    }

private:
    struct One {
        size_t bytes, room;
        uint8_t value;
    };
    Allocator& _allocator;
    FakeDevice& _device;
    size_t _capacity;
    std::map<uint8_t*, One> _live;
    unsigned _next = 0;
};

size_t randomSize(std::mt19937& random) {
    switch (random() % 8) {
    case 0: return random() % 3;
    case 1: return 64 * kKiB * (random() % 4);
    case 2: return random() % (2 * kMiB);
    case 3: return random() % (200 * kKiB);
    default: return random() % (4 * kKiB);
    }
}

void randomRounds(unsigned seed, bool poisoned, size_t largestReserve) {
    std::mt19937 random(sharpi::testSeed(seed));
    FakeDevice device(8 * kMiB, 64 * kKiB);
    device.setLargestReserve(largestReserve);
    if (poisoned) device.poisonCommits();
    Allocator allocator(device);
    Model model(allocator, device);
    int refused = 0;
    for (int round = 0; round < 2400; ++round) {
        // Mostly allocates, then mostly frees, and again.
        if (model.count() == 0 || random() % 100 < (round / 300 % 2 ? 35u : 60u)) {
            const size_t bytes = randomSize(random);
            const size_t takenBefore = allocator.taken();
            try {
                model.allocate(bytes);
            } catch (const Error& e) {
                ++refused;
                ASSERT_EQ(e.kind(), ErrorKind::OutOfMemory);
                ASSERT_EQ(allocator.taken(), takenBefore);
                const size_t granules = (roomFor(bytes) + 64 * kKiB - 1) / (64 * kKiB);
                ASSERT_LT(device.freeBytes(), granules * 64 * kKiB) << "it would have fitted";
            }
        } else {
            model.free(random() % model.count());
        }
        if (::testing::Test::HasFatalFailure()) return;
        model.check();
        if (round % 100 == 0) model.checkContents();
        if (::testing::Test::HasFatalFailure()) return;
    }
    EXPECT_GT(refused, 0) << "the device was never full";
    while (model.count() > 0) model.free(random() % model.count());
    EXPECT_EQ(allocator.held(), 0u);
    EXPECT_EQ(allocator.taken(), 0u);
    EXPECT_EQ(device.freeBytes(), 8 * kMiB);
}

TEST(AllocatorAtRandom, GivesBackExactlyWhatNothingReachesInto) {
    for (unsigned seed = 0; seed < 6; ++seed) {
        randomRounds(seed, seed % 2 == 0, SIZE_MAX);
        if (HasFatalFailure()) return;
    }
}

TEST(AllocatorAtRandom, DoesWithoutALargeRangeOfAddresses) {
    for (unsigned seed = 200; seed < 204; ++seed) {
        randomRounds(seed, seed % 2 == 0, 8 * kMiB);
        if (HasFatalFailure()) return;
    }
}

}  // namespace
