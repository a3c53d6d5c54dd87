// What is brought into slots ahead of its use, in which order, and when it waits; and how good the guesses were. Over
// the real slots in a fake device's memory, with loads that arrive when the test says so.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "expert_world.h"
#include "experts/expert_prefetcher.h"
#include "experts/expert_slots.h"
#include "memory/allocator.h"
#include "memory/fake_device.h"
#include "seed.h"

namespace {

using namespace sharpi;
using Expert = std::pair<int32_t, int32_t>;  // layer, expert
using Experts = std::vector<Expert>;

// Notes what is loaded, and says that it has arrived when it is told to.
class NotedLoads : public ExpertLoads {
public:
    int most = 3;
    int failAfter = -1;                 // starts that still succeed; -1: all
    std::vector<const uint8_t*> files;  // of what was started: where the gate's bytes are
    uint64_t arrived = 0;

    int depth() const override { return most; }
    uint64_t start(const std::array<StreamPart, 3>& parts) override {
        if (failAfter == 0) {
            failAfter = -1;
            throw Error(ErrorKind::Internal, "a load that fails");
        }
        if (failAfter > 0) --failAfter;
        EXPECT_LT(files.size() - arrived, static_cast<size_t>(most)) << "more loads at once than may be";
        files.push_back(parts[0].file);
        return files.size();
    }
    uint64_t finished() override { return arrived; }
    void settle() override { arrived = files.size(); }
};

// Layers of experts, and slots for some of them: what `budgetExperts` of the largest take. A layer's experts are of
// `rows` rows; those of another size have slots of their own.
class World {
public:
    World(const std::vector<int64_t>& rows, int32_t experts, int64_t budgetExperts, Prefetch mode)
        : device(size_t{1} << 30), allocator(device), slots(allocator, layout()) {
        for (const int64_t r : rows) {
            const size_t bytes = rowBytes(DType::F32, kCols) * static_cast<size_t>(r);
            _files.emplace_back(std::make_unique<std::vector<uint8_t>>(3 * bytes * static_cast<size_t>(experts)));
            const auto stack = [&](int which) {
                const uint8_t* data =
                    _files.back()->data() + static_cast<size_t>(which) * bytes * static_cast<size_t>(experts);
                return MatrixStack{{DType::F32, r, kCols, data}, bytes, experts};
            };
            const int32_t layer = slots.addLayer({stack(0), stack(1), stack(2)});
            for (int32_t e = 0; e < experts; ++e) _experts[stack(0).at(e).data] = {layer, e};
        }
        const auto slotBytes = [](int64_t r) {
            return 3 * Allocator::aligned(rowBytes(DType::F32, kCols) * static_cast<size_t>(r));
        };
        const size_t largest = slotBytes(*std::max_element(rows.begin(), rows.end()));
        slots.take(slotted::budgetLeaving(slots, largest * static_cast<size_t>(budgetExperts)), nullptr);
        slots.setLoads(&loads);
        prefetcher = std::make_unique<ExpertPrefetcher>(slots, profiler, mode);
    }
    // Everything on its way arrives; then the next pass begins, after one that fetched so much. What was started is
    // returned.
    Experts next(int64_t fetched = 0) {
        loads.settle();
        return nextBefore(fetched);
    }
    // The same while what is on its way stays there.
    Experts nextBefore(int64_t fetched = 0) {
        const size_t before = loads.files.size();
        prefetcher->pump(fetched);
        slots.beginPass();
        return startedSince(before);
    }
    Experts startedSince(size_t before) const {
        Experts started;
        for (size_t i = before; i < loads.files.size(); ++i) started.push_back(_experts.at(loads.files[i]));
        return started;
    }
    void missed(int32_t layer, const std::vector<int32_t>& experts) {
        const auto count = static_cast<int32_t>(experts.size());
        prefetcher->chosen(layer, experts.data(), count, experts.data(), count);
    }

    FakeDevice device;
    Allocator allocator;
    ExpertAccessProfiler profiler;
    NotedLoads loads;
    ExpertSlotManager slots;
    std::unique_ptr<ExpertPrefetcher> prefetcher;

private:
    static constexpr int64_t kCols = 32;
    static DeviceLayout layout() {
        DeviceLayout made;
        made.bytes = [](const Matrix& m) { return rowBytes(m.type, m.cols) * static_cast<size_t>(m.rows); };
        return made;
    }
    std::vector<std::unique_ptr<std::vector<uint8_t>>> _files;
    std::map<const uint8_t*, Expert> _experts;
};

Experts shuffled(int32_t layers, int32_t experts, std::mt19937& random) {
    Experts all;
    for (int32_t l = 0; l < layers; ++l)
        for (int32_t e = 0; e < experts; ++e) all.emplace_back(l, e);
    std::shuffle(all.begin(), all.end(), random);
    return all;
}

Experts some(const Experts& all, size_t begin, size_t end) {
    return Experts(all.begin() + static_cast<std::ptrdiff_t>(begin), all.begin() + static_cast<std::ptrdiff_t>(end));
}

std::vector<int32_t> numbers(int32_t begin, int32_t end) {
    std::vector<int32_t> all(static_cast<size_t>(end - begin));
    std::iota(all.begin(), all.end(), begin);
    return all;
}

// --- what is to be there from the beginning -------------------------------------------------------------------------

TEST(ExpertPrefetcher, FillsInOrderUntilNoMoreFits) {
    std::mt19937 random(sharpi::testSeed(1));
    World world({4, 4, 4}, 20, 25, Prefetch::Off);
    const auto capacity = static_cast<size_t>(world.slots.capacity());
    ASSERT_EQ(capacity, 25u);
    const Experts order = shuffled(3, 20, random);
    Experts repeated;  // naming one twice loads it once
    for (const Expert& expert : order) repeated.insert(repeated.end(), 2, expert);
    EXPECT_FALSE(world.prefetcher->filling());
    world.prefetcher->fill(repeated);
    for (size_t begin = 0; begin < capacity; begin += 3) {
        EXPECT_TRUE(world.prefetcher->filling());
        EXPECT_EQ(world.next(), some(order, begin, std::min(begin + 3, capacity)));
    }
    EXPECT_EQ(world.next(), Experts());
    EXPECT_FALSE(world.prefetcher->filling());
    EXPECT_EQ(world.slots.resident(), 25);
    for (size_t i = 0; i < order.size(); ++i)
        EXPECT_EQ(world.slots.tryGet(order[i].first, order[i].second) >= 0, i < capacity) << i;
}

TEST(ExpertPrefetcher, FillingWaitsWhileNoMoreMayBeOnTheirWay) {
    std::mt19937 random(sharpi::testSeed(2));
    World world({4, 4}, 10, 20, Prefetch::Off);
    const Experts order = shuffled(2, 10, random);
    world.prefetcher->fill(order);
    EXPECT_EQ(world.nextBefore(), some(order, 0, 3));
    EXPECT_EQ(world.nextBefore(), Experts());
    world.loads.arrived = 2;
    EXPECT_EQ(world.nextBefore(), some(order, 3, 5));
    EXPECT_TRUE(world.prefetcher->filling());
}

// Passes that fetch themselves slow it down, and do not stop it.
TEST(ExpertPrefetcher, FillingGoesOnSlowlyBesidePassesThatFetch) {
    std::mt19937 random(sharpi::testSeed(3));
    World world({4, 4}, 20, 40, Prefetch::Off);
    world.loads.most = 11;
    const Experts order = shuffled(2, 20, random);
    world.prefetcher->fill(order);
    EXPECT_EQ(world.next(), some(order, 0, 11));
    EXPECT_EQ(world.next(1), some(order, 11, 11 + ExpertPrefetcher::kLoadsPerPass));
    EXPECT_EQ(world.next(100), some(order, 15, 15 + ExpertPrefetcher::kLoadsPerPass));
    EXPECT_EQ(world.next(), some(order, 19, 30));
    EXPECT_EQ(world.next(), some(order, 30, 40));
    EXPECT_FALSE(world.prefetcher->filling());
}

TEST(ExpertPrefetcher, AFullPoolDoesNotEndTheFillingOfOthers) {
    World world({4, 64}, 16, 8, Prefetch::Off);
    world.loads.most = 100;
    Experts order;  // all of one, then all of the other
    for (const int32_t layer : {1, 0})
        for (int32_t e = 0; e < 16; ++e) order.emplace_back(layer, e);
    world.prefetcher->fill(order);
    const Experts started = world.next();
    std::map<int32_t, int> count;
    for (const Expert& expert : started) EXPECT_EQ(expert.second, count[expert.first]++);
    EXPECT_EQ(static_cast<int64_t>(started.size()), world.slots.capacity());
    EXPECT_GT(count[0], 0);
    EXPECT_GT(count[1], 0);
    EXPECT_LT(count[1], 16) << "a pool that holds everything is not full";
    EXPECT_FALSE(world.prefetcher->filling());
}

TEST(ExpertPrefetcher, RefusesToFillWhatThereIsNot) {
    World world({4, 4}, 10, 20, Prefetch::Off);
    for (const Expert& wrong : {Expert{-1, 0}, Expert{2, 0}, Expert{0, -1}, Expert{1, 10}}) {
        try {
            world.prefetcher->fill({{0, 0}, wrong});
            ADD_FAILURE() << "no error";
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::InvalidArgument) << error.what();
        }
    }
    EXPECT_FALSE(world.prefetcher->filling());
}

TEST(ExpertPrefetcher, ALoadThatFailsIsTriedAgain) {
    World world({4}, 10, 10, Prefetch::NextToken);
    world.prefetcher->fill({{0, 4}, {0, 5}});
    world.loads.failAfter = 1;
    EXPECT_THROW(world.next(), Error);
    EXPECT_EQ(world.startedSince(0), (Experts{{0, 4}}));
    EXPECT_TRUE(world.prefetcher->filling());
    EXPECT_EQ(world.next(), (Experts{{0, 5}}));
    world.missed(0, {7});
    world.loads.failAfter = 0;
    EXPECT_THROW(world.next(), Error);
    EXPECT_EQ(world.prefetcher->hints(), 1u);
    EXPECT_EQ(world.next(), (Experts{{0, 7}}));
    EXPECT_EQ(world.prefetcher->hints(), 0u);
}

// --- hints ----------------------------------------------------------------------------------------------------------

TEST(ExpertPrefetcher, QueuesWhatWasMissedOnceAndInOrder) {
    World world({4, 4}, 20, 40, Prefetch::NextToken);
    world.loads.most = 100;
    const std::vector<int32_t> chosen = {9, 3, 3, 12, 1, 9}, missed = {3, 3, 12};
    world.prefetcher->chosen(1, chosen.data(), 6, missed.data(), 3);
    world.missed(0, {3, 7, 2, 11});
    world.prefetcher->chosen(1, chosen.data(), 6, missed.data(), 3);
    EXPECT_EQ(world.prefetcher->hints(), 6u);
    const Experts queued = {{1, 3}, {1, 12}, {0, 3}, {0, 7}, {0, 2}, {0, 11}};
    EXPECT_EQ(world.next(), some(queued, 0, ExpertPrefetcher::kLoadsPerPass));
    EXPECT_EQ(world.next(), some(queued, ExpertPrefetcher::kLoadsPerPass, 6));
    EXPECT_EQ(world.next(), Experts());
    // What has come in meanwhile, or is on its way, is passed over; what left the queue may come into it again.
    world.missed(1, {3, 15, 12});
    EXPECT_EQ(world.prefetcher->hints(), 3u);
    EXPECT_EQ(world.nextBefore(), (Experts{{1, 15}}));
    EXPECT_EQ(world.prefetcher->hints(), 0u);
}

TEST(ExpertPrefetcher, OnlyItsModeQueues) {
    for (const Prefetch mode : {Prefetch::Off, Prefetch::Count, Prefetch::NextLayer}) {
        World world({4, 4}, 20, 40, mode);
        const std::vector<int32_t> predicted = {5, 6};
        world.prefetcher->predicted(1, predicted.data(), 2);
        world.missed(0, {3, 7});
        world.missed(1, {3, 7});
        EXPECT_EQ(world.prefetcher->hints(), 0u);
        EXPECT_EQ(world.next(), Experts());
        EXPECT_EQ(world.profiler.counts().predictors.size(), 1u) << "guesses are counted in every mode";
    }
}

TEST(ExpertPrefetcher, TheOldestHintsAreForgotten) {
    constexpr int32_t kExperts = 100, kAll = 4 * kExperts, kKept = static_cast<int32_t>(ExpertPrefetcher::kQueue);
    World world({4, 4, 4, 4}, kExperts, kAll, Prefetch::NextToken);
    world.loads.most = 1000;
    Experts queued;
    for (int32_t layer = 0; layer < 4; ++layer) {
        world.missed(layer, numbers(0, kExperts));
        for (int32_t e = 0; e < kExperts; ++e) queued.emplace_back(layer, e);
    }
    EXPECT_EQ(world.prefetcher->hints(), ExpertPrefetcher::kQueue);
    Experts started;
    while (world.prefetcher->hints() > 0) {
        const Experts more = world.next();
        ASSERT_EQ(more.size(), static_cast<size_t>(ExpertPrefetcher::kLoadsPerPass));
        started.insert(started.end(), more.begin(), more.end());
    }
    EXPECT_EQ(started, some(queued, kAll - kKept, kAll));
    // A forgotten one may be queued again.
    world.missed(0, {0});
    EXPECT_EQ(world.next(), (Experts{{0, 0}}));
}

TEST(ExpertPrefetcher, HintsComeAfterTheFilling) {
    World world({4, 4}, 10, 20, Prefetch::NextToken);
    world.missed(0, {1});
    world.prefetcher->fill({{1, 0}, {1, 1}, {1, 2}, {1, 3}, {1, 4}});
    EXPECT_EQ(world.next(), (Experts{{1, 0}, {1, 1}, {1, 2}}));
    EXPECT_EQ(world.next(), (Experts{{1, 3}, {1, 4}, {0, 1}}));
}

TEST(ExpertPrefetcher, HintsWaitForAFillingThatIsSlow) {
    World world({4, 4}, 40, 80, Prefetch::NextToken);
    world.loads.most = 100;
    Experts order;
    for (int32_t e = 0; e < 40; ++e) order.emplace_back(1, e);
    world.missed(0, {1});
    world.prefetcher->fill(order);
    for (size_t begin = 0; begin < 40; begin += ExpertPrefetcher::kLoadsPerPass)
        EXPECT_EQ(world.next(1), some(order, begin, begin + ExpertPrefetcher::kLoadsPerPass));
    EXPECT_EQ(world.next(), (Experts{{0, 1}}));
}

// Waiting for passes that fetch, but not for ever.
TEST(ExpertPrefetcher, HintsYieldToPassesThatFetch) {
    World world({4, 4}, 20, 40, Prefetch::NextToken);
    world.loads.most = 100;
    for (int i = 0; i < 3; ++i) world.next(8);  // without hints nobody waits
    world.missed(0, numbers(0, 16));
    int32_t started = 0;
    for (int turn = 0; turn < 3; ++turn) {
        for (int i = 0; i < ExpertPrefetcher::kPatience; ++i)
            EXPECT_EQ(world.next(8), Experts()) << "turn " << turn << ", pass " << i;
        EXPECT_EQ(world.next(1), (Experts{{0, started}}));
        ++started;
    }
    world.next(8);
    EXPECT_EQ(world.next(), (Experts{{0, 3}, {0, 4}, {0, 5}, {0, 6}})) << "the bus is free";
    for (int i = 0; i < ExpertPrefetcher::kPatience; ++i)
        EXPECT_EQ(world.next(8), Experts()) << "they have waited before, pass " << i;
    EXPECT_EQ(world.next(8), (Experts{{0, 7}}));
}

// Where the cache is full, something has to leave: what the last pass used may, what the next one looks for then may
// not.
TEST(ExpertPrefetcher, AHintReplacesWhatIsUsedLess) {
    World world({4, 4}, 20, 6, Prefetch::NextToken);
    world.prefetcher->fill({{0, 0}, {0, 1}, {0, 2}, {1, 0}, {1, 1}, {1, 2}});
    world.next();
    world.next();
    world.next();
    ASSERT_EQ(world.slots.resident(), world.slots.capacity());
    const auto pass = [&](int32_t missing) {
        for (int32_t layer = 0; layer < 2; ++layer) {
            const std::vector<int32_t> chosen = {0, missing};
            world.slots.reached(layer, chosen.data(), 2);
            world.slots.used(layer, chosen.data(), 2);
            world.prefetcher->chosen(layer, chosen.data(), 2, &chosen[1], 1);
        }
    };
    pass(7);
    EXPECT_EQ(world.next(), (Experts{{0, 7}, {1, 7}}));
    EXPECT_EQ(world.slots.resident(), 4) << "two have left, for those on their way";
    for (int32_t layer = 0; layer < 2; ++layer) EXPECT_GE(world.slots.tryGet(layer, 0), 0) << "what was used stays";
    world.next();
    EXPECT_EQ(world.slots.resident(), 6);
    for (int32_t layer = 0; layer < 2; ++layer) EXPECT_GE(world.slots.tryGet(layer, 7), 0);
}

TEST(ExpertPrefetcher, LooksAtFewHintsBeforeAPass) {
    World world({4}, 60, 60, Prefetch::NextToken);
    world.loads.most = 100;
    Experts order;
    for (int32_t e = 0; e < 40; ++e) order.emplace_back(0, e);
    world.prefetcher->fill(order);
    world.next();
    world.missed(0, numbers(0, 41));  // 40 of them are there
    for (int32_t left = 41 - ExpertPrefetcher::kTriesPerPass; left > 0; left -= ExpertPrefetcher::kTriesPerPass) {
        EXPECT_EQ(world.next(), Experts());
        EXPECT_EQ(world.prefetcher->hints(), static_cast<size_t>(left));
    }
    EXPECT_EQ(world.next(), (Experts{{0, 40}}));
}

// --- how good guesses are -------------------------------------------------------------------------------------------

struct Counted {
    uint64_t named = 0, used = 0, wanted = 0;
    void add(const std::set<int32_t>& guess, const std::set<int32_t>& truth) {
        named += guess.size();
        wanted += truth.size();
        for (const int32_t expert : guess) used += truth.count(expert);
    }
};

TEST(ExpertPrefetcher, CountsHowOftenGuessesAreRight) {
    std::mt19937 random(sharpi::testSeed(7));
    World world({4, 4, 4}, 16, 0, Prefetch::Count);
    const auto draw = [&] {
        std::vector<int32_t> experts(1 + random() % 12);  // rows times ranks, with repetitions
        for (int32_t& expert : experts) expert = static_cast<int32_t>(random() % 16);
        return experts;
    };
    const auto setOf = [](const std::vector<int32_t>& experts) {
        return std::set<int32_t>(experts.begin(), experts.end());
    };
    std::map<std::string, Counted> expected;
    std::map<int32_t, std::set<int32_t>> last;
    for (int step = 0; step < 200; ++step) {
        std::set<int32_t> guess;
        for (int32_t layer = 0; layer < 3; ++layer) {
            if (random() % 5 == 0)
                world.prefetcher->chosen(layer, nullptr, 0, nullptr, 0);  // a step of no rows tells nothing
            const std::vector<int32_t> chosen = draw();
            world.prefetcher->chosen(layer, chosen.data(), static_cast<int32_t>(chosen.size()), chosen.data(), 0);
            if (last.count(layer)) expected["next-token"].add(last[layer], setOf(chosen));
            if (!guess.empty()) expected["next-layer"].add(guess, setOf(chosen));
            last[layer] = setOf(chosen);
            guess.clear();
            if (layer == 2 || random() % 4 == 0)
                continue;  // then nothing is guessed, and an older guess is not counted again
            const std::vector<int32_t> predicted = draw();
            world.prefetcher->predicted(layer + 1, predicted.data(), static_cast<int32_t>(predicted.size()));
            guess = setOf(predicted);
        }
    }
    const ExpertCounts counts = world.profiler.counts();
    ASSERT_EQ(counts.predictors.size(), 2u);
    for (const PredictorCounts& predictor : counts.predictors) {
        SCOPED_TRACE(predictor.name);
        ASSERT_TRUE(expected.count(predictor.name));
        const Counted& counted = expected[predictor.name];
        EXPECT_EQ(predictor.named, counted.named);
        EXPECT_EQ(predictor.used, counted.used);
        EXPECT_EQ(predictor.wanted, counted.wanted);
        EXPECT_GT(predictor.used, 0u);
    }
}

// --- the switch -----------------------------------------------------------------------------------------------------

class Switch {
public:
    explicit Switch(const char* value) { ::setenv("SHARPI_EXPERT_PREFETCH", value, 1); }
    ~Switch() { ::unsetenv("SHARPI_EXPERT_PREFETCH"); }
};

TEST(PrefetchWanted, IsReadFromTheEnvironment) {
    ::unsetenv("SHARPI_EXPERT_PREFETCH");
    EXPECT_EQ(prefetchWanted(), Prefetch::Off);
    const std::vector<std::pair<const char*, Prefetch>> known = {{"", Prefetch::Off},
                                                                 {"off", Prefetch::Off},
                                                                 {"count", Prefetch::Count},
                                                                 {"next-token", Prefetch::NextToken},
                                                                 {"next-layer", Prefetch::NextLayer}};
    for (const auto& [value, wanted] : known) {
        const Switch set(value);
        EXPECT_EQ(prefetchWanted(), wanted) << value;
    }
    const Switch set("next-week");
    try {
        prefetchWanted();
        ADD_FAILURE() << "no error";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::InvalidArgument);
        EXPECT_NE(std::string(error.what()).find("next-week"), std::string::npos) << error.what();
    }
}

}  // namespace
