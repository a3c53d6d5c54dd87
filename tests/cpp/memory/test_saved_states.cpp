// Copies of recurrent states: the bytes come back as they were, and there are never more than is allowed.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "fake_device.h"
#include "memory/allocator.h"
#include "memory/kv_cache.h"
#include "memory/kv_sharing.h"
#include "memory/pages/saved_states.h"

namespace {

using namespace sharpi;

constexpr int64_t kPage = KvCache::kPageTokens;

TEST(SavedStates, ThoseUsedLongestAgoGoFirst) {
    SavedStates states(300);
    for (uint8_t key = 1; key <= 3; ++key) states.add(key, SavedStates::Bytes(100, key));
    ASSERT_TRUE(states.find(1));
    states.add(4, SavedStates::Bytes(100, 4));
    EXPECT_FALSE(states.find(2));
    EXPECT_EQ(states.bytes(), 300U);
    states.add(5, SavedStates::Bytes(150, 5));
    for (const uint64_t gone : {3, 1}) EXPECT_FALSE(states.find(gone)) << gone;
    EXPECT_EQ(*states.find(4), SavedStates::Bytes(100, 4));
    EXPECT_EQ(*states.find(5), SavedStates::Bytes(150, 5));
    states.add(6, SavedStates::Bytes(301, 6));
    EXPECT_FALSE(states.find(6)) << "larger than all that is allowed";
    EXPECT_EQ(states.bytes(), 250U);
    states.add(4, SavedStates::Bytes(100, 9));
    EXPECT_EQ(*states.find(4), SavedStates::Bytes(100, 4)) << "it is there already";
    EXPECT_EQ(states.bytes(), 250U);
    states.setBudget(100);
    EXPECT_EQ(states.bytes(), 100U);
    states.clear();
    EXPECT_EQ(states.bytes(), 0U);
    EXPECT_FALSE(states.find(4));
}

// A cache with three layers, of which two have states, and sequences that write their number into these.
class CopiedStates : public testing::Test {
protected:
    CopiedStates()
        : allocator(device),
          kv(allocator, {{1, 4}, {}, {}}, KvType::F32, 20 * kPage,
             RecurrentState(allocator, {{}, {5, 70}, {3, 0}}, 4)) {
        KvSharing(kv).setCopiedStates(1 << 20);
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
};

TEST_F(CopiedStates, ComeBackAsTheyWere) {
    const int32_t a = computed({1, 2, 3});
    EXPECT_EQ(kv.states().stateBytes(), sizeof(float) * (5 + 70 + 3));
    EXPECT_EQ(KvSharing(kv).copiedStates(), 3 * kv.states().stateBytes());
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
    EXPECT_EQ(KvSharing(kv).copiedStates(), kv.states().stateBytes()) << "that after two pages is not held";
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
    KvSharing(kv).forget();
    EXPECT_EQ(KvSharing(kv).copiedStates(), 0U);
    EXPECT_EQ(kv.freePages(), 20);
    EXPECT_EQ(kv.states().freeEntries(), 4);
    EXPECT_EQ(adopt(kv.createSequence(), {1, 2}), 0);
}

}  // namespace
