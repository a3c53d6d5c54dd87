// The allocator on the fake device: nothing is lost to rounding, everything is given back, and a refusal or failure
// changes nothing. test_allocator_random.cpp has the same for random orders of calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

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

uint8_t* allocate(Allocator& allocator, size_t bytes, const std::string& name = "a test") {
    return static_cast<uint8_t*>(allocator.allocate(bytes, name));
}

bool filledWith(const uint8_t* data, size_t bytes, uint8_t value) {
    return bytes == 0 || (data[0] == value && std::memcmp(data, data + 1, bytes - 1) == 0);
}

template <typename Call> std::string errorOf(ErrorKind kind, const Call& call) {
    try {
        call();
    } catch (const Error& e) {
        EXPECT_EQ(e.kind(), kind) << e.what();
        return e.what();
    }
    ADD_FAILURE() << "no error";
    return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(Allocator, LosesNothingToRounding) {
    FakeDevice device(2048 * kMiB);
    Allocator allocator(device);
    const size_t bytes = 17 * kMiB + 12345;
    std::vector<uint8_t*> tensors;
    for (int i = 0; i < 64; ++i) tensors.push_back(allocate(allocator, bytes));
    EXPECT_EQ(allocator.held(), 64 * bytes);
    EXPECT_LE(allocator.taken(), 64 * bytes + 2 * kMiB);
    EXPECT_EQ(device.freeBytes(), 2048 * kMiB - allocator.taken());
    for (uint8_t* tensor : tensors) allocator.free(tensor);
    EXPECT_EQ(device.freeBytes(), 2048 * kMiB);
}

TEST(Allocator, SmallOnesShareAGranule) {
    FakeDevice device(64 * kMiB);
    Allocator allocator(device);
    std::vector<uint8_t*> all;
    for (int i = 0; i < 2000; ++i) all.push_back(allocate(allocator, 100));
    EXPECT_EQ(allocator.held(), 200000u);
    EXPECT_EQ(allocator.taken(), 2 * kMiB);
    EXPECT_EQ(device.commits(), 1);
    for (uint8_t* data : all) allocator.free(data);
    EXPECT_EQ(device.freeBytes(), 64 * kMiB);
}

TEST(Allocator, EmptyAllocationsHaveAddressesOfTheirOwn) {
    FakeDevice device(4 * kMiB);
    Allocator allocator(device);
    uint8_t* const a = allocate(allocator, 0);
    uint8_t* const b = allocate(allocator, 0);
    EXPECT_NE(a, nullptr);
    EXPECT_NE(a, b);
    EXPECT_EQ(allocator.held(), 0u);
    allocator.free(a);
    allocator.free(b);
    allocator.free(nullptr);
    EXPECT_EQ(allocator.taken(), 0u);
}

TEST(Allocator, ReusedMemoryIsZeroed) {
    for (const bool poisoned : {false, true}) {
        FakeDevice device(4 * kMiB);
        if (poisoned) device.poisonCommits();
        Allocator allocator(device);
        allocate(allocator, 300);  // keeps the granule
        uint8_t* const first = allocate(allocator, 5000);
        EXPECT_TRUE(filledWith(first, 5000, 0));
        std::memset(first, 7, 5000);
        allocator.free(first);
        uint8_t* const second = allocate(allocator, 4900);
        EXPECT_EQ(second, first) << "nothing was reused, so nothing is tested";
        EXPECT_TRUE(filledWith(second, 4900, 0));
    }
}

TEST(Allocator, PrefersWhatIsTakenAlready) {
    FakeDevice device(64 * kMiB);
    Allocator allocator(device);
    uint8_t* const large = allocate(allocator, 8 * kMiB);
    uint8_t* const small = allocate(allocator, 1 * kMiB);
    allocator.free(large);  // a hole without memory, at a lower address than the rest of the small one's granule
    EXPECT_EQ(allocator.taken(), 2 * kMiB);
    uint8_t* const next = allocate(allocator, 1 * kMiB);
    EXPECT_EQ(allocator.taken(), 2 * kMiB);
    EXPECT_EQ(next, small + kMiB);
}

TEST(Allocator, NamesWhatDoesNotFit) {
    FakeDevice device(64 * kMiB);
    {
        Allocator allocator(device);
        allocate(allocator, 50 * kMiB);
        const auto tooMuch = [&] { allocate(allocator, 45 * kMiB, "blk.3.ffn_up.weight"); };
        EXPECT_EQ(errorOf(ErrorKind::OutOfMemory, tooMuch),
                  "out of memory on the fake device: 'blk.3.ffn_up.weight' needs 45.0 MiB, 14.0 MiB are free; "
                  "held: 'a test' 50.0 MiB");
        EXPECT_EQ(allocator.available(), 14 * kMiB);
        for (const size_t bytes :
             {size_t{1} << 40, size_t{1} << 59, (size_t{1} << 60) + 1, SIZE_MAX / 2 + 2, SIZE_MAX - 255, SIZE_MAX}) {
            errorOf(ErrorKind::OutOfMemory, [&] { allocate(allocator, bytes); });
            EXPECT_EQ(allocator.held(), 50 * kMiB);
            EXPECT_EQ(allocator.taken(), 50 * kMiB);
        }
        allocate(allocator, 14 * kMiB);
    }
    EXPECT_EQ(device.reserved(), 0u);
}

TEST(Allocator, TakesNoMoreThanItsBudget) {
    FakeDevice device(64 * kMiB);
    Allocator allocator(device, 9 * kMiB);  // four granules fit, a fifth does not
    EXPECT_EQ(allocator.available(), 9 * kMiB);
    uint8_t* const a = allocate(allocator, 7 * kMiB);
    EXPECT_EQ(allocator.taken(), 8 * kMiB);
    EXPECT_EQ(allocator.available(), 1 * kMiB);
    EXPECT_EQ(errorOf(ErrorKind::OutOfMemory, [&] { allocate(allocator, 1536 * kKiB, "x"); }),
              "out of memory on the fake device: 'x' needs 1.5 MiB, 1.0 MiB are free within the budget of 9.0 MiB; "
              "held: 'a test' 7.0 MiB");
    EXPECT_EQ(allocator.taken(), 8 * kMiB);
    allocate(allocator, 1 * kMiB);
    EXPECT_EQ(allocator.taken(), 8 * kMiB);
    allocator.free(a);
    EXPECT_EQ(allocator.taken(), 2 * kMiB);
    allocate(allocator, 6 * kMiB);
    EXPECT_LE(allocator.taken(), 9 * kMiB);
}

TEST(Allocator, FreeingWhatIsNotHeldIsAnError) {
    FakeDevice device(64 * kMiB);
    Allocator allocator(device), other(device);
    uint8_t* const kept = allocate(allocator, 5000, "kept");
    uint8_t* const next = allocate(allocator, 5000, "short-lived");
    uint8_t* const foreign = allocate(other, 5000);
    uint8_t* const gone = allocate(allocator, 3 * kMiB);
    allocator.free(gone);
    int local = 0;
    EXPECT_TRUE(contains(errorOf(ErrorKind::Internal, [&] { allocator.free(gone); }), "freed before"));
    EXPECT_TRUE(contains(errorOf(ErrorKind::Internal, [&] { allocator.free(kept + 256); }), "256 bytes inside 'kept'"));
    EXPECT_TRUE(
        contains(errorOf(ErrorKind::Internal, [&] { allocator.free(next + 1); }), "1 bytes inside 'short-lived'"));
    EXPECT_TRUE(contains(errorOf(ErrorKind::Internal, [&] { allocator.free(foreign); }), "not allocated here"));
    EXPECT_TRUE(contains(errorOf(ErrorKind::Internal, [&] { allocator.free(&local); }), "not allocated here"));
    EXPECT_EQ(allocator.held(), 10000u);
    allocator.free(next);
    EXPECT_TRUE(contains(errorOf(ErrorKind::Internal, [&] { allocator.free(next); }), "freed before"));
    allocator.free(kept);
    EXPECT_TRUE(contains(errorOf(ErrorKind::Internal, [&] { allocator.free(kept); }), "freed before"));
    EXPECT_EQ(allocator.taken(), 0u);
    other.free(foreign);
}

TEST(Allocator, SaysWhoHoldsWhat) {
    FakeDevice device(64 * kMiB);
    Allocator allocator(device);
    EXPECT_TRUE(allocator.holdings().empty());
    allocate(allocator, 100, "norms");
    allocate(allocator, 5000, "scratch");
    allocate(allocator, 4000, "weights");
    uint8_t* const more = allocate(allocator, 3000, "weights");
    auto holdings = allocator.holdings();
    ASSERT_EQ(holdings.size(), 3u);
    EXPECT_EQ(holdings[0].name, "weights");
    EXPECT_EQ(holdings[0].bytes, 7000u);
    EXPECT_EQ(holdings[1].name, "scratch");
    EXPECT_EQ(holdings[1].bytes, 5000u);
    EXPECT_EQ(holdings[2].name, "norms");
    EXPECT_EQ(holdings[2].bytes, 100u);
    allocator.free(more);
    holdings = allocator.holdings();
    ASSERT_EQ(holdings.size(), 3u);
    EXPECT_EQ(holdings[0].name, "scratch");
    EXPECT_EQ(holdings[1].bytes, 4000u);
}

TEST(Allocator, ARefusalNamesTheLargestHolders) {
    FakeDevice device(64 * kMiB);
    Allocator allocator(device);
    const auto held = [&] {
        const std::string text = errorOf(ErrorKind::OutOfMemory, [&] { allocate(allocator, 65 * kMiB, "much"); });
        EXPECT_FALSE(contains(text, "\n")) << text;
        return text.substr(text.find(" are free") + 9);
    };
    EXPECT_EQ(held(), "") << "nothing is held";
    allocate(allocator, 0, "empty");
    EXPECT_EQ(held(), "");
    allocate(allocator, 2 * kMiB, "KV cache");
    EXPECT_EQ(held(), "; held: 'KV cache' 2.0 MiB");
    allocate(allocator, 3 * kMiB, "slots");
    allocate(allocator, 3 * kMiB, "slots");
    EXPECT_EQ(held(), "; held: 'slots' 6.0 MiB, 'KV cache' 2.0 MiB");
    allocate(allocator, 512 * kKiB, "norms");
    EXPECT_EQ(held(), "; held: 'slots' 6.0 MiB, 'KV cache' 2.0 MiB, 'norms' 512.0 KiB");
    allocate(allocator, 256 * kKiB, "gates");
    EXPECT_EQ(held(), "; held: 'slots' 6.0 MiB, 'KV cache' 2.0 MiB, 'norms' 512.0 KiB and 1 more with 256.0 KiB");
    allocate(allocator, 768 * kKiB, "biases");
    EXPECT_EQ(held(), "; held: 'slots' 6.0 MiB, 'KV cache' 2.0 MiB, 'biases' 768.0 KiB and 2 more with 768.0 KiB");
}

// Takes what a model takes, while the n-th commit is refused. Returns false if there were fewer than n.
bool loadWithFailureAt(int n) {
    FakeDevice device(64 * kMiB);
    device.poisonCommits();
    Allocator allocator(device);
    device.failCommit(n);
    bool failed = false;
    std::map<std::string, std::pair<uint8_t*, size_t>> live;
    const auto unharmed = [&] {
        for (const auto& [name, one] : live)
            EXPECT_TRUE(filledWith(one.first, one.second, static_cast<uint8_t>(name[0]))) << name;
    };
    const auto take = [&](const std::string& name, size_t bytes) {
        const size_t held = allocator.held(), taken = allocator.taken(), holders = allocator.holdings().size();
        uint8_t* data = nullptr;
        try {
            data = allocate(allocator, bytes, name);
        } catch (const Error& e) {
            EXPECT_FALSE(failed) << "one refusal was asked for";
            failed = true;
            EXPECT_EQ(e.kind(), ErrorKind::OutOfMemory);
            EXPECT_TRUE(contains(e.what(), "'" + name + "'")) << e.what();
            EXPECT_EQ(allocator.held(), held);
            EXPECT_EQ(allocator.taken(), taken);
            EXPECT_EQ(allocator.holdings().size(), holders);
            EXPECT_EQ(device.freeBytes(), 64 * kMiB - taken);
            unharmed();
            data = allocate(allocator, bytes, name);  // succeeds at the second try
        }
        std::memset(data, name[0], bytes);
        live[name] = {data, bytes};
    };
    const auto drop = [&](const std::string& name) {
        allocator.free(live[name].first);
        live.erase(name);
    };
    take("embedding", 5 * kMiB + 300);
    take("norm", 700);
    take("a staging buffer", 1 * kMiB);
    take("up", 3 * kMiB + 1);
    drop("embedding");
    take("down", 2 * kMiB);
    take("gate", 9 * kMiB);
    take("b staging buffer", 4 * kMiB);
    drop("norm");
    take("head", 6 * kMiB - 256);
    unharmed();
    const bool reached = failed;
    while (!live.empty()) drop(live.begin()->first);
    EXPECT_EQ(allocator.held(), 0u);
    EXPECT_EQ(device.freeBytes(), 64 * kMiB);
    return reached;
}

TEST(Allocator, ARefusalAnywhereLosesNothing) {
    int n = 1;
    while (loadWithFailureAt(n)) ++n;
    EXPECT_GT(n, 10) << "the script asks for memory more often than that";
}

// A device that fails for another reason than a lack of memory.
class BrokenDevice : public FakeDevice {
public:
    using FakeDevice::FakeDevice;
    int commitsUntilError = 0, zeroesUntilError = 0;
    bool commit(void* address, size_t bytes) override {
        if (commitsUntilError > 0 && --commitsUntilError == 0) throw Error(ErrorKind::Internal, "the device is lost");
        return FakeDevice::commit(address, bytes);
    }
    void zero(void* address, size_t bytes) override {
        if (zeroesUntilError > 0 && --zeroesUntilError == 0) throw Error(ErrorKind::Internal, "the device is lost");
        FakeDevice::zero(address, bytes);
    }
};

TEST(Allocator, AnErrorOfTheDeviceLosesNothing) {
    BrokenDevice device(64 * kMiB);
    device.poisonCommits();
    {
        Allocator allocator(device);
        uint8_t* const kept = allocate(allocator, 3 * kMiB);
        std::memset(kept, 5, 3 * kMiB);
        for (int n = 1; n <= 2; ++n) {  // the granules that it fills alone, and the one in which it ends
            device.commitsUntilError = n;
            EXPECT_EQ(errorOf(ErrorKind::Internal, [&] { allocate(allocator, 8 * kMiB); }), "the device is lost");
            EXPECT_EQ(allocator.held(), 3 * kMiB);
            EXPECT_EQ(allocator.taken(), 4 * kMiB);
        }
        device.zeroesUntilError = 1;
        EXPECT_EQ(errorOf(ErrorKind::Internal, [&] { allocate(allocator, 3 * kMiB); }), "the device is lost");
        EXPECT_EQ(allocator.held(), 3 * kMiB);
        EXPECT_EQ(allocator.taken(), 4 * kMiB);
        EXPECT_TRUE(filledWith(kept, 3 * kMiB, 5));
        allocator.free(kept);
        EXPECT_EQ(device.freeBytes(), 64 * kMiB);
    }
    EXPECT_EQ(device.reserved(), 0u);
}

TEST(Allocator, WithoutAddressesItIsOutOfMemory) {
    FakeDevice device(64 * kMiB);
    device.setLargestReserve(8 * kMiB);
    Allocator allocator(device);
    errorOf(ErrorKind::OutOfMemory, [&] { allocate(allocator, 9 * kMiB); });
    EXPECT_EQ(device.reserved(), 0u);
    uint8_t* const a = allocate(allocator, 5 * kMiB);
    uint8_t* const b = allocate(allocator, 5 * kMiB);
    EXPECT_EQ(device.reserved(), 12 * kMiB);
    allocator.free(b);
    EXPECT_EQ(device.reserved(), 6 * kMiB) << "unused addresses are kept";
    EXPECT_EQ(allocate(allocator, 1 * kMiB), a + 5 * kMiB);
    EXPECT_EQ(device.reserved(), 6 * kMiB);
}

TEST(Allocator, AddressesOfARefusedAllocationAreNotKept) {
    FakeDevice device(64 * kMiB);
    device.setLargestReserve(256 * kMiB);
    Allocator allocator(device);
    allocate(allocator, 5 * kMiB);
    EXPECT_EQ(device.reserved(), 6 * kMiB);
    errorOf(ErrorKind::OutOfMemory, [&] { allocate(allocator, 100 * kMiB); });
    EXPECT_EQ(device.reserved(), 6 * kMiB);
}

// Hands out ranges of addresses without gaps between them, as a device may. No allocation may lie across two ranges.
class AdjacentRanges : public FakeDevice {
public:
    AdjacentRanges() : FakeDevice(64 * kMiB), _base(static_cast<uint8_t*>(FakeDevice::reserve(64 * kMiB))) {}
    ~AdjacentRanges() override { FakeDevice::release(_base, 64 * kMiB); }
    void* reserve(size_t bytes) override {
        if (bytes > 4 * kMiB) throw Error(ErrorKind::OutOfMemory, "too many addresses");
        uint8_t* const start = _base + _used;
        _starts.insert(start);
        _used += bytes;
        return start;
    }
    void release(void*, size_t) noexcept override {}
    bool commit(void* address, size_t bytes) override {
        auto* const start = static_cast<uint8_t*>(address);
        EXPECT_EQ(_starts.upper_bound(start), _starts.lower_bound(start + bytes)) << "a commit across two ranges";
        return FakeDevice::commit(address, bytes);
    }

private:
    uint8_t* const _base;
    size_t _used = 0;
    std::set<uint8_t*> _starts;
};

TEST(Allocator, NothingLiesAcrossTwoRanges) {
    for (const bool lowFirst : {false, true}) {
        AdjacentRanges device;
        Allocator allocator(device);
        uint8_t* const lowKept = allocate(allocator, 1 * kMiB);
        uint8_t* const low = allocate(allocator, 1 * kMiB);
        uint8_t* const high = allocate(allocator, 1 * kMiB);
        ASSERT_EQ(allocate(allocator, 1 * kMiB), high + 1 * kMiB);
        ASSERT_EQ(high, low + 1 * kMiB);
        allocator.free(lowFirst ? low : high);
        allocator.free(lowFirst ? high : low);
        uint8_t* const next = allocate(allocator, 2 * kMiB);
        EXPECT_NE(next, low) << "it begins in one range and ends in the next";
        EXPECT_EQ(allocate(allocator, 1 * kMiB), lowKept + 1 * kMiB);
    }
}

TEST(Allocator, DestructionGivesEverythingBack) {
    FakeDevice device(64 * kMiB);
    {
        Allocator allocator(device);
        allocate(allocator, 5 * kMiB);
        allocate(allocator, 100);
        allocator.free(allocate(allocator, 3 * kMiB));
        EXPECT_GT(device.reserved(), 0u);
    }
    EXPECT_EQ(device.freeBytes(), 64 * kMiB);
    EXPECT_EQ(device.reserved(), 0u);
}

TEST(Allocator, SeveralThreadsAtOnce) {
    FakeDevice device(64 * kMiB, 64 * kKiB);
    device.poisonCommits();
    Allocator allocator(device);
    const auto work = [&](unsigned seed) {
        std::mt19937 random(sharpi::testSeed(seed));
        std::vector<std::pair<uint8_t*, size_t>> mine;
        const auto value = static_cast<uint8_t>(seed);
        const auto free = [&](size_t index) {
            std::swap(mine[index], mine.back());
            EXPECT_TRUE(filledWith(mine.back().first, mine.back().second, value));
            allocator.free(mine.back().first);
            mine.pop_back();
        };
        for (int round = 0; round < 1500; ++round) {
            if (mine.size() < 40 && random() % 3) {
                const size_t bytes = 1 + random() % (100 * kKiB);
                uint8_t* const data = allocate(allocator, bytes);
                EXPECT_TRUE(filledWith(data, bytes, 0));
                std::memset(data, value, bytes);
                mine.emplace_back(data, bytes);
            } else if (!mine.empty()) {
                free(random() % mine.size());
            }
            EXPECT_LE(allocator.available(), 64 * kMiB);
        }
        while (!mine.empty()) free(0);
    };
    std::vector<std::thread> threads;
    for (unsigned i = 1; i <= 4; ++i) threads.emplace_back(work, i);
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(allocator.held(), 0u);
    EXPECT_EQ(device.freeBytes(), 64 * kMiB);
}

TEST(Allocator, SaysWhoHoldsWhatWhileOthersTakeAndFree) {
    FakeDevice device(64 * kMiB, 64 * kKiB);
    Allocator allocator(device);
    const std::string kept = "what stays all the time", taken = "what comes and goes meanwhile";
    constexpr size_t kCount = 40;
    for (size_t i = 0; i < kCount; ++i) allocate(allocator, 3000, kept);
    std::atomic<int> working{2};
    const auto work = [&] {
        for (int round = 0; round < 400; ++round) {
            std::vector<uint8_t*> mine;
            for (size_t i = 0; i < kCount; ++i) mine.push_back(allocate(allocator, 100, taken));
            for (uint8_t* data : mine) allocator.free(data);
        }
        --working;
    };
    std::thread first(work), second(work);
    while (working > 0) {
        for (const sharpi::Holding& holding : allocator.holdings()) {
            if (holding.name == kept) {
                EXPECT_EQ(holding.bytes, kCount * 3000);
            } else {
                EXPECT_EQ(holding.name, taken);
                EXPECT_TRUE(holding.bytes % 100 == 0 && holding.bytes <= 2 * kCount * 100) << holding.bytes;
            }
        }
    }
    first.join();
    second.join();
}

}  // namespace
