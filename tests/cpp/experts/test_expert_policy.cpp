// Which expert is evicted, and for which other: compared with a plain model of the policy in lists. And the policy's
// purpose: popular experts stay, those that no longer are leave, and experts that are used equally often do not replace
// each other.
#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "experts/cache/expert_policy.h"
#include "seed.h"

namespace {

using sharpi::Error;
using sharpi::ErrorKind;
using sharpi::ExpertPolicy;

constexpr auto kAny = [](int32_t) { return true; };

class PlainPolicy {
public:
    PlainPolicy(int32_t count, int32_t capacity) : _capacity(capacity), _frequency(static_cast<size_t>(count)) {}

    void used(int32_t expert, float weight) {
        _frequency[static_cast<size_t>(expert)] += weight;
        if (++_uses % std::max<int64_t>(16 * _capacity, 4 * static_cast<int64_t>(_frequency.size())) == 0) {
            for (float& f : _frequency) f /= 2;
        }
        if (isIn(_protected, expert)) {
            _protected.remove(expert);
            _protected.push_back(expert);
        } else if (isIn(_probation, expert)) {
            _probation.remove(expert);
            if (!_usedHere.insert(expert).second) _protected.push_back(expert);
            else _probation.push_back(expert);
        }
        if (static_cast<double>(_protected.size()) > 0.8 * _capacity) {
            _probation.push_back(_protected.front());
            _protected.pop_front();
        }
    }
    void inserted(int32_t expert) {
        _probation.push_back(expert);
        _usedHere.erase(expert);
    }
    void removed(int32_t expert) {
        _probation.remove(expert);
        _protected.remove(expert);
    }
    bool holds(int32_t expert) const { return isIn(_probation, expert) || isIn(_protected, expert); }
    // In the order of eviction.
    std::vector<int32_t> order() const {
        std::vector<int32_t> all(_probation.begin(), _probation.end());
        all.insert(all.end(), _protected.begin(), _protected.end());
        return all;
    }
    float frequency(int32_t expert) const { return _frequency[static_cast<size_t>(expert)]; }

private:
    static bool isIn(const std::list<int32_t>& list, int32_t expert) {
        return std::find(list.begin(), list.end(), expert) != list.end();
    }

    int32_t _capacity;
    int64_t _uses = 0;
    std::list<int32_t> _probation, _protected;  // the oldest first
    std::set<int32_t> _usedHere;
    std::vector<float> _frequency;
};

std::vector<int32_t> orderOf(const ExpertPolicy& policy) {
    std::vector<int32_t> order;
    std::set<int32_t> gone;
    for (int32_t e; (e = policy.victim([&](int32_t x) { return gone.count(x) == 0; })) >= 0;) {
        order.push_back(e);
        gone.insert(e);
    }
    return order;
}

// A cache that does what the policy says. Returns whether the expert had to be loaded.
bool use(ExpertPolicy& policy, int32_t& held, int32_t capacity, int32_t expert) {
    bool loads = false;
    if (!policy.holds(expert)) {
        const int32_t victim = held < capacity ? -1 : policy.victim(kAny);
        loads = victim < 0 || policy.admits(expert, victim);
        if (loads && victim >= 0) policy.removed(victim);
        else if (loads) ++held;
        if (loads) policy.inserted(expert);
    }
    policy.used(expert);
    return loads;
}

TEST(ExpertPolicy, DoesWhatTheWrittenOutModelDoes) {
    for (unsigned seed = 0; seed < 40; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        std::mt19937 random(sharpi::testSeed(seed));
        const int32_t count = 1 + static_cast<int32_t>(random() % 60),
                      capacity = static_cast<int32_t>(random() % (static_cast<unsigned>(count) + 1));
        ExpertPolicy policy(count, capacity);
        PlainPolicy plain(count, capacity);
        int32_t held = 0;
        for (int step = 0; step < 3000; ++step) {
            // Some experts are used more often than others.
            const auto expert = static_cast<int32_t>(
                std::min(random() % static_cast<unsigned>(count), random() % static_cast<unsigned>(count)));
            const unsigned action = random() % 10;
            if (action < 7) {
                const float weight = action ? 1.0f : 0.25f * static_cast<float>(random() % 40);
                policy.used(expert, weight);
                plain.used(expert, weight);
            } else if (policy.holds(expert) ? action == 7 : held < capacity) {
                held += policy.holds(expert) ? -1 : 1;
                if (policy.holds(expert)) {
                    policy.removed(expert);
                    plain.removed(expert);
                } else {
                    policy.inserted(expert);
                    plain.inserted(expert);
                }
            }
            const unsigned stays = random() % 5;
            const auto may = [&](int32_t e) { return static_cast<unsigned>(e) % 5 >= stays; };
            const std::vector<int32_t> order = plain.order();
            const auto first = std::find_if(order.begin(), order.end(), may);
            ASSERT_EQ(policy.victim(may), first == order.end() ? -1 : *first) << "step " << step;
            ASSERT_EQ(policy.frequency(expert), plain.frequency(expert)) << "step " << step;
            const auto other = static_cast<int32_t>(random() % static_cast<unsigned>(count));
            ASSERT_EQ(policy.admits(expert, other), plain.frequency(expert) > plain.frequency(other));
            ASSERT_EQ(policy.holds(other), plain.holds(other));
            if (step % 20 == 0) {
                ASSERT_EQ(orderOf(policy), order) << "step " << step;
            }
        }
    }
}

TEST(ExpertPolicy, ProtectsWhatIsUsedASecondTimeSinceItCame) {
    ExpertPolicy policy(10, 5);
    for (int32_t e = 0; e < 5; ++e) policy.inserted(e);
    EXPECT_EQ(orderOf(policy), (std::vector<int32_t>{0, 1, 2, 3, 4}));
    policy.used(1);  // still on probation, as the youngest
    policy.used(0);
    EXPECT_EQ(orderOf(policy), (std::vector<int32_t>{2, 3, 4, 1, 0}));
    policy.used(1);
    policy.used(3);
    EXPECT_EQ(orderOf(policy), (std::vector<int32_t>{2, 4, 0, 3, 1}));
    policy.removed(1);  // when it comes again, its earlier state does not count
    policy.inserted(1);
    policy.used(1);
    policy.used(2);
    EXPECT_EQ(orderOf(policy), (std::vector<int32_t>{4, 0, 3, 1, 2}));
}

TEST(ExpertPolicy, ProtectsFourFifthsAndNoMore) {
    ExpertPolicy policy(10, 10);
    for (int32_t e = 0; e < 10; ++e) policy.inserted(e);
    for (int round = 0; round < 2; ++round) {
        for (int32_t e = 0; e < 9; ++e) policy.used(e);
    }
    // Nine became protected, one too many: the first is on probation again, younger than the one that was never used.
    EXPECT_EQ(orderOf(policy), (std::vector<int32_t>{9, 0, 1, 2, 3, 4, 5, 6, 7, 8}));
    policy.used(0);
    EXPECT_EQ(orderOf(policy), (std::vector<int32_t>{9, 1, 2, 3, 4, 5, 6, 7, 8, 0}))
        << "one use protects it again, and puts the next on probation";
    EXPECT_EQ(policy.victim([](int32_t e) { return e != 9 && e != 1; }), 2);
}

TEST(ExpertPolicy, KeepsItsPlaceForWhatIsUsedMoreOften) {
    ExpertPolicy policy(4, 1);
    policy.inserted(0);
    EXPECT_FALSE(policy.admits(1, 0)) << "neither was ever used";
    policy.used(1);
    EXPECT_TRUE(policy.admits(1, 0));
    policy.used(0);
    EXPECT_FALSE(policy.admits(1, 0)) << "equally often used: a copy would gain nothing";
    policy.used(0, 0.5f);
    EXPECT_FALSE(policy.admits(1, 0));
    policy.used(1);
    EXPECT_TRUE(policy.admits(1, 0));
}

TEST(ExpertPolicy, AgesByUsesAndNotByTheirWeight) {
    ExpertPolicy policy(3, 2);
    policy.used(0, 1000);
    for (int i = 0; i < 31; ++i) {
        EXPECT_EQ(policy.frequency(0), 1000) << "after " << i + 1 << " uses";
        policy.used(1);
    }
    EXPECT_EQ(policy.frequency(0), 500);
    EXPECT_EQ(policy.frequency(1), 15.5f);
    EXPECT_EQ(policy.frequency(2), 0);
    for (int i = 0; i < 32 * 400; ++i) policy.used(2);
    EXPECT_EQ(policy.frequency(0), 0) << "long forgotten";
    policy.used(0);
    EXPECT_EQ(policy.frequency(0), 1);
}

// Otherwise experts that are used now and then could not be told apart.
TEST(ExpertPolicy, AgesMoreSlowlyWhereACacheHoldsFewOfMany) {
    ExpertPolicy policy(100, 2);
    for (int i = 0; i < 399; ++i) policy.used(i % 7);
    EXPECT_EQ(policy.frequency(0), 57);
    policy.used(0);
    EXPECT_EQ(policy.frequency(0), 29);
    EXPECT_EQ(policy.frequency(6), 28.5f);
}

TEST(ExpertPolicy, AsksOnlySoOften) {
    const int32_t count = 3 * ExpertPolicy::kMostAsked;
    ExpertPolicy policy(count, count);
    for (int32_t e = 0; e < count; ++e) policy.inserted(e);
    for (int32_t first : {0, 5, ExpertPolicy::kMostAsked - 1, ExpertPolicy::kMostAsked, count - 1}) {
        int asked = 0;
        const int32_t victim = policy.victim([&](int32_t e) {
            ++asked;
            return e >= first;
        });
        EXPECT_EQ(victim, first < ExpertPolicy::kMostAsked ? first : -1);
        EXPECT_EQ(asked, std::min(first + 1, ExpertPolicy::kMostAsked));
    }
    for (int round = 0; round < 2; ++round) {
        for (int32_t e = 0; e < 2 * ExpertPolicy::kMostAsked; ++e) policy.used(e);
    }
    int asked = 0;
    policy.victim([&](int32_t) { return ++asked < 0; });
    EXPECT_EQ(asked, ExpertPolicy::kMostAsked) << "over both segments";
}

TEST(ExpertPolicy, OneUseOfEverythingDoesNotPushOutWhatIsUsedAgain) {
    ExpertPolicy policy(1000, 10);
    int32_t held = 0;
    for (int round = 0; round < 3; ++round) {
        for (int32_t e = 0; e < 8; ++e) use(policy, held, 10, e);
    }
    for (int32_t e = 8; e < 120; ++e) use(policy, held, 10, e);
    for (int32_t e = 0; e < 8; ++e) EXPECT_TRUE(policy.holds(e)) << e;
}

TEST(ExpertPolicy, ExpertsThatTakeTurnsStayWhereTheyAre) {
    constexpr int32_t kCount = 96, kCapacity = 24;
    ExpertPolicy policy(kCount, kCapacity);
    int32_t held = 0;
    std::mt19937 random(sharpi::testSeed(3));
    std::vector<int32_t> order(kCount);
    std::iota(order.begin(), order.end(), 0);
    int loads = 0;
    for (int round = 0; round < 200; ++round) {
        std::shuffle(order.begin(), order.end(), random);
        for (const int32_t e : order) loads += use(policy, held, kCapacity, e);
        if (round == 0) {
            EXPECT_EQ(loads, kCapacity);
        }
    }
    // In each round every expert is used once, in random order: pure LRU would load three in four of them.
    EXPECT_LT(loads, kCapacity + 200 * kCount / 20);
}

TEST(ExpertPolicy, WhatIsPopularIsHeldAndWhatWasIsForgotten) {
    constexpr int32_t kCount = 400, kCapacity = 40;
    ExpertPolicy policy(kCount, kCapacity);
    int32_t held = 0;
    std::mt19937 random(sharpi::testSeed(5));
    // Half of all uses go to 30 experts, the others to all experts evenly; then half go to another 30.
    for (const int32_t popular : {0, 200}) {
        int hits = 0;
        for (int i = 0; i < 30 * 16 * kCapacity; ++i) {
            const auto e =
                static_cast<int32_t>(random() % 2 ? static_cast<unsigned>(popular) + random() % 30 : random() % kCount);
            hits += !use(policy, held, kCapacity, e) && policy.holds(e) && i >= 15 * 16 * kCapacity;
        }
        int32_t kept = 0;
        for (int32_t e = popular; e < popular + 30; ++e) kept += policy.holds(e);
        EXPECT_GE(kept, 28);
        EXPECT_GT(hits, 15 * 16 * kCapacity / 2) << "of as many uses";
    }
}

TEST(ExpertPolicy, RefusesWhatCannotBe) {
    const auto expectInternal = [](const auto& call) {
        try {
            call();
            ADD_FAILURE() << "no error";
        } catch (const Error& e) {
            EXPECT_EQ(e.kind(), ErrorKind::Internal);
        }
    };
    ExpertPolicy policy(4, 2);
    policy.inserted(3);
    expectInternal([&] { policy.inserted(3); });
    expectInternal([&] { policy.removed(2); });
    policy.inserted(2);
    expectInternal([&] { policy.inserted(1); });
    policy.removed(3);
    expectInternal([&] { policy.removed(3); });
    policy.inserted(1);
    EXPECT_EQ(orderOf(policy), (std::vector<int32_t>{2, 1}));
    EXPECT_ANY_THROW(policy.used(4));
    EXPECT_ANY_THROW(policy.used(-1));
    EXPECT_EQ(ExpertPolicy(3, 0).victim(kAny), -1);
}

// If what leaves has to be read from the disk again, it leaves only for what is used far more often.
TEST(ExpertPolicy, MayBeReluctant) {
    ExpertPolicy policy(3, 1);
    policy.inserted(0);
    policy.used(0, 3);
    policy.used(1, 4);
    EXPECT_TRUE(policy.admits(1, 0));
    policy.setReluctant();
    EXPECT_FALSE(policy.admits(1, 0));
    policy.used(1, 6);
    EXPECT_FALSE(policy.admits(1, 0)) << "10 is not more than 2 x 3 + 4";
    policy.used(1, 1);
    EXPECT_TRUE(policy.admits(1, 0));
}

}  // namespace
