// Pairs grouped by expert: against a plain count on the host, with even and skewed choices and pairs without an expert.
#include "kernels/rows/pair_groups.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "gpu_test.h"

namespace sharpi::cuda {
namespace {

struct Expected {
    int32_t element;
    std::vector<int32_t> pairs;
};

std::vector<Expected> groupsOf(const std::vector<int32_t>& element, int32_t elements, int most) {
    std::vector<Expected> groups;
    for (int32_t e = 0; e < elements; ++e) {
        bool open = false;
        for (size_t p = 0; p < element.size(); ++p) {
            if (element[p] != e) continue;
            if (!open || groups.back().pairs.size() == static_cast<size_t>(most)) groups.push_back({e, {}});
            open = true;
            groups.back().pairs.push_back(static_cast<int32_t>(p));
        }
    }
    return groups;
}

class PairGroupsTest : public GpuTest {
protected:
    void check(const std::vector<int32_t>& element, int32_t elements, int32_t distinct = 0) {
        if (!distinct) distinct = elements;
        const auto pairs = static_cast<int64_t>(element.size());
        const DeviceArray<int32_t> onDevice(element);
        const DeviceArray<uint8_t> memory(pairGroupsBytes(pairs, distinct) + sizeof(PairGroup));
        const PairGroups made = groupPairs(stream(), onDevice.get(), pairs, elements, distinct, memory.get());
        const std::vector<Expected> expected = groupsOf(element, elements, made.most);
        ASSERT_EQ(maxPairGroups(pairs, distinct, made.most), made.count);
        ASSERT_EQ(pairs >= 8 * distinct ? 16 : 8, made.most);
        ASSERT_LE(expected.size(), static_cast<size_t>(made.count));
        const std::vector<uint8_t> bytes = memory.read();
        for (int64_t g = 0; g <= made.count; ++g) {
            PairGroup group;
            std::memcpy(&group, &bytes[sizeof group * static_cast<size_t>(g)], sizeof group);
            const bool exists = static_cast<size_t>(g) < expected.size();
            ASSERT_EQ(exists ? expected[static_cast<size_t>(g)].element : -1, group.element) << g;
            if (g < made.count) {
                ASSERT_EQ(exists ? expected[static_cast<size_t>(g)].pairs.size() : 0, static_cast<size_t>(group.count));
            }
            if (!exists) continue;
            const std::vector<int32_t>& own = expected[static_cast<size_t>(g)].pairs;
            ASSERT_EQ(own, std::vector<int32_t>(group.pair, group.pair + group.count)) << g;
        }
    }
    // power: 1 chooses evenly; the higher, the more often the first elements. missing: the share without an element.
    std::vector<int32_t> choose(int64_t pairs, int32_t elements, double power, double missing) {
        std::uniform_real_distribution<double> uniform(0, 1);
        std::vector<int32_t> chosen(static_cast<size_t>(pairs));
        for (int32_t& e : chosen) {
            e = std::min(elements - 1, static_cast<int32_t>(elements * std::pow(uniform(random()), power)));
            if (uniform(random()) < missing) e = -1;
        }
        return chosen;
    }
};

TEST_F(PairGroupsTest, AreStableAndCompleteForAnyChoice) {
    for (const int32_t elements : {1, 5, 32, 128, 256, 1024, 2000})
        for (const int64_t pairs : {1, 2, 16, 17, 31, 64, 255, 256, 257, 512, 1408})
            for (const double power : {1.0, 6.0})
                for (const double missing : {0.0, 0.6, 1.0}) {
                    SCOPED_TRACE(std::to_string(pairs) + " pairs of " + std::to_string(elements));
                    ASSERT_NO_FATAL_FAILURE(check(choose(pairs, elements, power, missing), elements));
                }
}

TEST_F(PairGroupsTest, TakeEveryGroupThatTheyMayNeed) {
    // Each element has one pair more than fills its groups.
    for (const int32_t elements : {7, 100})
        for (const int32_t each : {1, kPairGroup + 1}) {
            std::vector<int32_t> chosen;
            for (int32_t i = 0; i < elements * each; ++i) chosen.push_back(i % elements);
            ASSERT_NO_FATAL_FAILURE(check(chosen, elements));
        }
}

// A layer's experts may be in any of many slots.
TEST_F(PairGroupsTest, NeedNoMoreRoomForMoreSlotsThanExperts) {
    for (const int32_t slots : {9, 64, 700}) {
        std::vector<int32_t> slotOf(static_cast<size_t>(slots));
        std::iota(slotOf.begin(), slotOf.end(), 0);
        std::shuffle(slotOf.begin(), slotOf.end(), random());
        for (const int64_t pairs : {1, 24, 256}) {
            std::vector<int32_t> chosen = choose(pairs, 8, 1.0, 0.2);
            for (int32_t& e : chosen) e = e < 0 ? e : slotOf[static_cast<size_t>(e)];
            ASSERT_NO_FATAL_FAILURE(check(chosen, slots, 8));
        }
    }
}

TEST_F(PairGroupsTest, RefuseWhatDoesNotFit) {
    EXPECT_THROW(groupPairs(stream(), nullptr, 4, 20000, 4, nullptr), Error);
    EXPECT_THROW(groupPairs(stream(), nullptr, -1, 4, 4, nullptr), Error);
    EXPECT_EQ(0, groupPairs(stream(), nullptr, 0, 4, 4, nullptr).count);
}

}  // namespace
}  // namespace sharpi::cuda
