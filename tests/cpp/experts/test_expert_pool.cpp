// The states of a pool's slots: each change is one call, and a call in the wrong state is refused and changes nothing.
#include "experts/cache/expert_pool.h"

#include <gtest/gtest.h>

#include <string>

#include "core/error.h"

namespace {

using namespace sharpi;

const auto kMay = [](int32_t) { return true; };
const auto kMayNot = [](int32_t) { return false; };

template <typename Call> void expectInternal(const std::string& part, const Call& call) {
    try {
        call();
        ADD_FAILURE() << "no error";
    } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::Internal) << e.what();
        EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
}

// Claims a slot for an expert and places it there.
int32_t bring(ExpertPool& pool, int32_t key) {
    const auto claim = pool.claim(key, kMay);
    if (!claim) return -1;
    pool.place(key, claim->slot);
    return claim->slot;
}

TEST(ExpertPool, AClaimedSlotIsNobodyElses) {
    ExpertPool pool(8, 3, 1);
    const auto first = pool.claim(0, kMay), second = pool.claim(1, kMay), third = pool.claim(2, kMay);
    ASSERT_TRUE(first && second && third);
    EXPECT_NE(first->slot, second->slot);
    EXPECT_NE(first->slot, third->slot);
    EXPECT_NE(second->slot, third->slot);
    EXPECT_EQ(first->evicted, -1);
    EXPECT_FALSE(pool.claim(3, kMay)) << "nothing is held that could leave";
    EXPECT_EQ(pool.slotOf(0), -1) << "nobody finds an expert in a claimed slot";

    pool.place(2, third->slot);  // in another order than they were claimed
    pool.giveBack(first->slot);
    pool.place(1, second->slot);
    EXPECT_EQ(pool.slotOf(1), second->slot);
    EXPECT_EQ(pool.slotOf(2), third->slot);
    const auto again = pool.claim(3, kMayNot);
    ASSERT_TRUE(again);
    EXPECT_EQ(again->slot, first->slot);
}

TEST(ExpertPool, AClaimEvictsTheExpertWhoseSlotItGives) {
    ExpertPool pool(8, 2, 1);
    const int32_t slot = bring(pool, 0);
    ASSERT_GE(bring(pool, 1), 0);
    pool.policy().used(1);
    pool.policy().used(1);
    EXPECT_FALSE(pool.claim(2, kMay)) << "it was used no more than the others";
    pool.policy().used(2);
    EXPECT_FALSE(pool.claim(2, kMayNot));
    const auto claim = pool.claim(2, kMay);
    ASSERT_TRUE(claim);
    EXPECT_EQ(claim->evicted, 0);
    EXPECT_EQ(claim->slot, slot);
    EXPECT_EQ(pool.slotOf(0), -1);
    EXPECT_FALSE(pool.policy().holds(0));
    pool.place(2, claim->slot);
    EXPECT_EQ(pool.slotOf(2), slot);
}

TEST(ExpertPool, ACallInTheWrongStateIsRefused) {
    ExpertPool pool(8, 2, 1);
    for (const int32_t slot : {0, 1, 2, -1}) {
        expectInternal("not claimed", [&] { pool.place(0, slot); });
        expectInternal("not claimed", [&] { pool.giveBack(slot); });
    }
    const auto claim = pool.claim(0, kMay);
    ASSERT_TRUE(claim);
    pool.place(0, claim->slot);
    expectInternal("not claimed", [&] { pool.place(1, claim->slot); });
    expectInternal("not claimed", [&] { pool.giveBack(claim->slot); });
    expectInternal("not the expert's", [&] { pool.evict(1); });

    const auto other = pool.claim(1, kMay);
    ASSERT_TRUE(other);
    expectInternal("", [&] { pool.place(0, other->slot); });  // the expert is in another slot
    EXPECT_EQ(pool.slotOf(0), claim->slot);
    pool.giveBack(other->slot);
    expectInternal("not claimed", [&] { pool.giveBack(other->slot); });

    pool.evict(0);
    expectInternal("not the expert's", [&] { pool.evict(0); });
    for (const int32_t key : {3, 4}) EXPECT_GE(bring(pool, key), 0);
    EXPECT_NE(pool.slotOf(3), pool.slotOf(4)) << "a refused call gave a slot out twice";
    EXPECT_FALSE(pool.claim(5, kMayNot));
}

TEST(ExpertPool, LandingSlotsLieBehindTheOthersAndAreHandedOutOnceALayer) {
    ExpertPool pool(8, 3, 2);
    EXPECT_EQ(pool.landedAt(5), -1);
    EXPECT_EQ(pool.land(5), 3);
    EXPECT_EQ(pool.land(6), 4);
    EXPECT_EQ(pool.land(7), -1);
    EXPECT_EQ(pool.landedAt(6), 4);
    pool.clearLanding();
    EXPECT_EQ(pool.landedAt(6), -1);
    EXPECT_EQ(pool.land(7), 3);
}

}  // namespace
