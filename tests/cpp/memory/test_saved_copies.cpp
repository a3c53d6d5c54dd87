// Copies of recurrent states: the bytes come back as they were, and there are never more than is allowed.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "fake_device.h"
#include "memory/allocator.h"
#include "memory/kv_cache.h"
#include "memory/kv_sharing.h"
#include "memory/pages/saved_copies.h"

namespace {

using namespace sharpi;

constexpr int64_t kPage = KvCache::kPageTokens;

PageName nameOf(uint8_t number) { return {number}; }
CopiedBytes copyOf(size_t bytes, uint8_t value) { return std::make_shared<const CopyVector>(bytes, value); }

// The numbers of those that left, in order.
std::vector<int> left(const SavedCopies::Entries& entries) {
    std::vector<int> numbers;
    for (const auto& [name, copy] : entries) {
        EXPECT_EQ(copy->front(), name[0]);
        numbers.push_back(name[0]);
    }
    return numbers;
}

TEST(SavedCopies, ThoseUsedLongestAgoGoFirst) {
    using Numbers = std::vector<int>;
    SavedCopies copies(300);
    for (uint8_t i = 1; i <= 3; ++i) EXPECT_EQ(left(copies.add(nameOf(i), copyOf(100, i))), Numbers());
    ASSERT_TRUE(copies.find(nameOf(1)));
    EXPECT_EQ(left(copies.add(nameOf(4), copyOf(100, 4))), Numbers{2});
    EXPECT_FALSE(copies.find(nameOf(2)));
    EXPECT_EQ(copies.bytes(), 300U);
    EXPECT_EQ(left(copies.add(nameOf(5), copyOf(150, 5))), (Numbers{3, 1}));
    for (const uint8_t gone : {3, 1}) EXPECT_FALSE(copies.has(nameOf(gone))) << int{gone};
    EXPECT_EQ(*copies.find(nameOf(4)), *copyOf(100, 4));
    EXPECT_EQ(*copies.find(nameOf(5)), *copyOf(150, 5));
    EXPECT_EQ(left(copies.add(nameOf(6), copyOf(301, 6))), Numbers{6}) << "larger than all that is allowed";
    EXPECT_EQ(copies.bytes(), 250U);
    EXPECT_EQ(left(copies.add(nameOf(4), copyOf(100, 9))), Numbers());
    EXPECT_EQ(*copies.find(nameOf(4)), *copyOf(100, 4)) << "it is there already";
    EXPECT_EQ(copies.bytes(), 250U);
    EXPECT_EQ(left(copies.setBudget(100)), Numbers{5});
    EXPECT_EQ(*copies.take(nameOf(4)), *copyOf(100, 4));
    EXPECT_FALSE(copies.take(nameOf(4)));
    EXPECT_EQ(copies.bytes(), 0U);
    copies.add(nameOf(7), copyOf(50, 7));
    copies.add(nameOf(8), copyOf(50, 8));
    EXPECT_EQ(left(copies.clear()), (Numbers{7, 8}));
    EXPECT_EQ(copies.bytes(), 0U);
    EXPECT_FALSE(copies.find(nameOf(7)));
}

// A cache with three layers, of which two have states, and sequences that write their number into these.
class CopiedStates : public testing::Test {
protected:
    CopiedStates()
        : allocator(device),
          kv(allocator, {{1, 4}, {}, {}}, KvType::F32, 20 * kPage,
             RecurrentState(allocator, {{}, {5, 70}, {3, 0}}, 4)) {
        store = KvSharing(kv).openStore({0, 1 << 20});
    }
    void write(int32_t sequence, float value) {
        const int32_t entry = kv.states().steps(sequence).back().to;
        for (size_t layer = 1; layer < 3; ++layer) {
            const RecurrentLayer& state = kv.states().layer(layer);
            std::fill_n(state.convOf(entry), state.shape.convFloats, value + static_cast<float>(layer));
            std::fill_n(state.matrixOf(entry), state.shape.matrixFloats, -value - static_cast<float>(layer));
        }
    }
    // The next step of the sequence begins from what write() wrote with this value.
    void expectBeginsFrom(int32_t sequence, float value) {
        kv.extend(sequence, 1);
        const int32_t entry = kv.states().steps(sequence).front().from;
        ASSERT_GE(entry, 0);
        for (size_t layer = 1; layer < 3; ++layer) {
            const RecurrentLayer& state = kv.states().layer(layer);
            for (int64_t i = 0; i < state.shape.convFloats; ++i)
                ASSERT_EQ(state.convOf(entry)[i], value + static_cast<float>(layer));
            for (int64_t i = 0; i < state.shape.matrixFloats; ++i)
                ASSERT_EQ(state.matrixOf(entry)[i], -value - static_cast<float>(layer));
        }
    }
    // A sequence that computes pages of these tokens, each with a state of its own.
    int32_t computed(const std::vector<int32_t>& pages) {
        const int32_t sequence = kv.createSequence();
        std::vector<int32_t> text;
        for (const int32_t page : pages) {
            kv.extend(sequence, kPage);
            write(sequence, static_cast<float>(10 * page));
            kv.commit(sequence);
            text.insert(text.end(), kPage, page);
            const auto length = static_cast<int64_t>(text.size());
            KvSharing(kv).share(sequence, {salt, text.data(), length}, {length});
        }
        return sequence;
    }
    int64_t adopt(int32_t sequence, const std::vector<int32_t>& pages) {
        std::vector<int32_t> text;
        for (const int32_t page : pages) text.insert(text.end(), kPage, page);
        return KvSharing(kv).adopt(sequence, {salt, text.data(), static_cast<int64_t>(text.size())});
    }

    const std::string salt;
    FakeDevice device{size_t{1} << 20, 1 << 12};
    Allocator allocator;
    KvCache kv;
    uint64_t store = 0;
};

TEST_F(CopiedStates, ComeBackAsTheyWere) {
    const int32_t a = computed({1, 2, 3});
    EXPECT_EQ(kv.states().stateBytes(), sizeof(float) * (5 + 70 + 3));
    EXPECT_EQ(KvSharing(kv).storeCounts().statesBytes, 3 * kv.states().stateBytes());
    kv.releaseSequence(a);
    for (int32_t i = 0; i < 3; ++i) computed({7 + i});  // other states take the entries
    const int32_t b = kv.createSequence();
    EXPECT_EQ(adopt(b, {1, 2, 9}), 2 * kPage);
    EXPECT_EQ(kv.length(b), 2 * kPage);
    expectBeginsFrom(b, 20);
}

TEST_F(CopiedStates, PagesBehindTheLastCopyAreNotAdopted) {
    const int32_t a = kv.createSequence();
    std::vector<int32_t> text(3 * kPage, 1);
    kv.extend(a, 3 * kPage, {kPage});
    write(a, 3);
    kv.commit(a);
    KvSharing(kv).share(a, {salt, text.data(), 3 * kPage}, {kPage, 2 * kPage});
    EXPECT_EQ(KvSharing(kv).storeCounts().statesBytes, kv.states().stateBytes()) << "that after two pages is not held";
    const int32_t b = kv.createSequence();
    EXPECT_EQ(adopt(b, {1, 1, 1}), kPage);
    EXPECT_EQ(adopt(b, {1, 1, 1}), kPage) << "nothing more is there";
}

// Other tokens in the same page have no copy yet.
TEST_F(CopiedStates, OfAnEvictedPageIsNotFoundAgain) {
    kv.releaseSequence(computed({1}));
    const int32_t all = kv.createSequence();
    kv.extend(all, 20 * kPage);
    kv.commit(all);
    const std::vector<int32_t> text(20 * kPage, 2);
    KvSharing(kv).share(all, {salt, text.data(), 20 * kPage});
    kv.releaseSequence(all);
    EXPECT_EQ(KvSharing(kv).pages(), 20);
    const int32_t b = kv.createSequence();
    EXPECT_EQ(adopt(b, {1}), 0);
    EXPECT_EQ(adopt(b, std::vector<int32_t>(20, 2)), 0);
}

TEST_F(CopiedStates, WithoutAnEntryASequenceAdoptsNothing) {
    for (int32_t i = 0; i < 4; ++i) computed({i});  // each holds an entry
    const int32_t e = kv.createSequence();
    EXPECT_EQ(adopt(e, {2}), 0);
    EXPECT_EQ(kv.length(e), 0);
    EXPECT_EQ(kv.freePages(), 16);
}

TEST_F(CopiedStates, EndWithWhatIsShared) {
    kv.releaseSequence(computed({1, 2}));
    KvSharing(kv).forget(store);
    EXPECT_EQ(KvSharing(kv).storeCounts().statesBytes, 0U);
    EXPECT_EQ(kv.freePages(), 20);
    EXPECT_EQ(kv.states().freeEntries(), 4);
    EXPECT_EQ(adopt(kv.createSequence(), {1, 2}), 0);
}

}  // namespace
