// The entries of the recurrent state: whatever happens to several sequences, a step begins from the state of exactly
// the sequence's tokens, and truncate() reports what it could not keep. Each entry is filled with a signature of the
// tokens that it covers.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "fake_device.h"
#include "memory/host_memory.h"
#include "memory/kv_cache.h"
#include "seed.h"
#include "state_marks.h"

namespace {

using namespace sharpi;

const std::vector<RecurrentShape> kLayers = {{3, 5}, {0, 0}, {2, 7}};

template <typename Call> void expectError(ErrorKind kind, const Call& call) {
    try {
        call();
        FAIL() << "no error";
    } catch (const Error& e) {
        EXPECT_EQ(e.kind(), kind) << e.what();
    }
}

// A cache with room for many tokens and few states, and steps that write a sum over the tokens into every float of a
// state.
class World {
public:
    explicit World(int32_t entries, int64_t tokens = 4096)
        : _allocator(_memory),
          cache(_allocator, {{0, 0}, {1, 4}, {0, 0}}, KvType::F32, tokens,
                RecurrentState(_allocator, kLayers, entries)) {}

    // The value of all floats of a state after these tokens, exact in a float.
    static float signature(const std::vector<int>& tokens) {
        uint32_t sum = 1;
        for (const int token : tokens) sum = (sum * 31 + static_cast<uint32_t>(token)) % 1000003;
        return static_cast<float>(sum);
    }

    int32_t create() {
        const int32_t handle = cache.createSequence();
        texts[handle] = {};
        return handle;
    }

    // Extends the sequence by some tokens, and keeps the states before the last `snapshots` of them.
    void step(int32_t handle, const std::vector<int>& more, int32_t snapshots, bool fails) {
        const auto begin = static_cast<int64_t>(texts[handle].size());
        stepTo(handle, more, tiny::lastMarks(begin, begin + static_cast<int64_t>(more.size()), snapshots), fails);
    }

    // Extends the sequence by some tokens. A failing step leaves rubbish in the entries that it was to write.
    void stepTo(int32_t handle, const std::vector<int>& more, const std::vector<int64_t>& marks, bool fails) {
        std::vector<int>& text = texts[handle];
        const auto promised = std::min<int64_t>(static_cast<int64_t>(marks.size()), cache.snapshotRoom(handle));
        cache.extend(handle, static_cast<int64_t>(more.size()), marks);
        const std::vector<StateStep> steps = cache.states().steps(handle);
        ASSERT_GE(static_cast<int64_t>(steps.size()), 1 + promised);
        for (size_t i = 1; i < steps.size(); ++i) {  // those nearest the end
            ASSERT_EQ(static_cast<int64_t>(text.size()) + steps[steps.size() - 1 - i].end, marks.at(marks.size() - i));
        }
        std::vector<int> so_far = text;
        int64_t at = 0;
        for (const StateStep& s : steps) {
            ASSERT_EQ(s.begin, at);
            ASSERT_LT(s.begin, s.end);
            if (!fails || at == 0) check(s.from, so_far);
            so_far.insert(so_far.end(), more.begin() + s.begin, more.begin() + s.end);
            write(s.to, fails ? -1.0f : signature(so_far));
            at = s.end;
        }
        ASSERT_EQ(at, static_cast<int64_t>(more.size()));
        if (fails) {
            text.resize(static_cast<size_t>(cache.truncate(handle, static_cast<int64_t>(text.size()))));
        } else {
            cache.commit(handle);
            text = so_far;
        }
    }

    int64_t truncate(int32_t handle, int64_t tokens) {
        const int64_t kept = cache.truncate(handle, tokens);
        EXPECT_LE(kept, tokens);
        EXPECT_EQ(kept, cache.length(handle));
        texts[handle].resize(static_cast<size_t>(kept));
        return kept;
    }

private:
    void check(int32_t entry, const std::vector<int>& text) {
        if (entry < 0) {
            ASSERT_TRUE(text.empty()) << "begins from nothing after " << text.size() << " tokens";
            return;
        }
        for (const float* value : floats(entry)) ASSERT_EQ(*value, signature(text)) << "not the state of its tokens";
    }
    void write(int32_t entry, float value) {
        for (float* at : floats(entry)) *at = value;
    }
    std::vector<float*> floats(int32_t entry) const {
        std::vector<float*> all;
        for (size_t i = 0; i < kLayers.size(); ++i) {
            const RecurrentLayer& layer = cache.states().layer(i);
            for (int64_t f = 0; f < kLayers[i].convFloats; ++f) all.push_back(layer.convOf(entry) + f);
            for (int64_t f = 0; f < kLayers[i].matrixFloats; ++f) all.push_back(layer.matrixOf(entry) + f);
        }
        return all;
    }

    HostMemory _memory;
    Allocator _allocator;

public:
    KvCache cache;
    std::map<int32_t, std::vector<int>> texts;
};

std::vector<int> someTokens(std::mt19937& random, int most) {
    std::vector<int> tokens(1 + random() % static_cast<unsigned>(most));
    for (int& token : tokens) token = static_cast<int>(random() % 1000);
    return tokens;
}

TEST(RecurrentState, IsThatOfTheTokensUnderRandomUse) {
    for (unsigned seed = 0; seed < 30; ++seed) {
        std::mt19937 random(sharpi::testSeed(seed));
        const int32_t entries = 1 + static_cast<int32_t>(random() % 6);
        World world(entries, 1 << 20);
        int refused = 0, cutShort = 0;
        for (int round = 0; round < 800; ++round) {
            const unsigned action = random() % 12;
            if (world.texts.empty() || (action == 0 && world.texts.size() < 8)) {
                world.create();
                continue;
            }
            const int32_t handle = std::next(world.texts.begin(), random() % world.texts.size())->first;
            std::vector<int>& text = world.texts[handle];
            if (action <= 7) {
                try {
                    const auto more = someTokens(random, 9);
                    std::vector<int64_t> marks;
                    for (size_t length = text.size() + 1; length < text.size() + more.size(); ++length) {
                        if (random() % 3 == 0) marks.push_back(static_cast<int64_t>(length));
                    }
                    world.stepTo(handle, more, marks, action == 7);
                } catch (const Error& e) {
                    ASSERT_EQ(e.kind(), ErrorKind::OutOfMemory) << e.what();
                    ASSERT_TRUE(text.empty()) << "a sequence that has a state can always be extended";
                    ++refused;
                }
            } else if (action <= 9) {
                const auto wanted = static_cast<int64_t>(random() % (text.size() + 1));
                cutShort += world.truncate(handle, wanted) < wanted;
            } else if (action == 10) {
                world.cache.keepState(handle, static_cast<int64_t>(random() % (text.size() + 1)));
            } else {
                world.cache.releaseSequence(handle);
                world.texts.erase(handle);
            }
            if (::testing::Test::HasFatalFailure()) FAIL() << "seed " << seed << " round " << round;
        }
        if (entries < 4) {
            EXPECT_GT(refused, 0);
        }
        EXPECT_GT(cutShort, 0);
        for (const auto& [handle, text] : world.texts) world.cache.releaseSequence(handle);
        EXPECT_EQ(world.cache.states().freeEntries(), entries) << "an entry was lost";
    }
}

TEST(RecurrentState, ThereIsRoomForAsManySequencesAsSlots) {
    World world(3);
    const int32_t handles[] = {world.create(), world.create(), world.create(), world.create()};
    for (int round = 0; round < 3; ++round) {
        for (int i = 0; i < 3; ++i) world.step(handles[i], {round, i}, 0, false);
    }
    expectError(ErrorKind::OutOfMemory, [&] { world.cache.extend(handles[3], 1); });
    EXPECT_EQ(world.cache.length(handles[3]), 0);
    EXPECT_EQ(world.truncate(handles[1], 0), 0);
    world.step(handles[3], {7}, 0, false);
    EXPECT_EQ(world.texts[handles[0]], (std::vector<int>{0, 0, 1, 0, 2, 0}));
}

TEST(RecurrentState, AFailedStepCostsNothingWhileThereIsRoom) {
    World world(2);
    const int32_t a = world.create();
    world.step(a, {1, 2, 3}, 0, false);
    world.step(a, {4, 5}, 0, true);
    EXPECT_EQ(world.texts[a], (std::vector<int>{1, 2, 3}));
    const int32_t b = world.create();
    world.step(b, {9}, 0, false);
    world.step(a, {4, 5}, 0, true);  // in place, so the old state is gone
    EXPECT_EQ(world.texts[a], (std::vector<int>()));
    world.step(a, {1}, 0, false);
}

TEST(RecurrentState, SnapshotsLetASequenceBeCutBack) {
    World world(4);
    const int32_t a = world.create();
    world.step(a, {1, 2, 3, 4, 5}, 3, false);
    for (const int64_t tokens : {4, 3, 2}) EXPECT_EQ(world.truncate(a, tokens), tokens);
    EXPECT_EQ(world.truncate(a, 1), 0);
    world.step(a, {1, 2, 3, 4, 5}, 9, false);  // more than there is room for, so the last ones are kept
    EXPECT_EQ(world.truncate(a, 2), 2);
    EXPECT_EQ(world.truncate(a, 1), 0);
}

TEST(RecurrentState, StatesAreHadWhereTheyAreWanted) {
    World world(4);
    const int32_t a = world.create();
    world.stepTo(a, {1, 2, 3, 4, 5, 6, 7, 8}, {2, 5}, false);
    EXPECT_EQ(world.truncate(a, 7), 5);
    EXPECT_EQ(world.truncate(a, 4), 2);
    // There is one entry besides the last state's: the later mark gets it.
    World small(2);
    const int32_t b = small.create();
    small.stepTo(b, {1, 2, 3, 4, 5, 6, 7, 8}, {2, 5}, false);
    EXPECT_EQ(small.truncate(b, 7), 5);
    EXPECT_EQ(small.truncate(b, 4), 0);
}

TEST(RecurrentState, ImpossibleMarksAreRefusedAndChangeNothing) {
    World world(4);
    const int32_t a = world.create();
    world.step(a, {1, 2, 3}, 0, false);
    for (const std::vector<int64_t>& marks :
         std::vector<std::vector<int64_t>>{{3}, {8}, {2}, {9}, {5, 5}, {6, 5}, {4, 8}}) {
        expectError(ErrorKind::Internal, [&] { world.cache.extend(a, 5, marks); });
        EXPECT_EQ(world.cache.length(a), 3);
        EXPECT_EQ(world.cache.states().freeEntries(), 3);
    }
    world.stepTo(a, {4, 5, 6, 7, 8}, {4, 7}, false);
}

TEST(RecurrentState, WhatShallBeKeptGoesLast) {
    World world(3);
    const int32_t a = world.create();
    world.step(a, {1, 2, 3}, 0, false);
    world.cache.keepState(a, 3);
    for (int token = 4; token < 9; ++token) world.step(a, {token}, 0, false);
    EXPECT_EQ(world.truncate(a, 6), 3);
    world.step(a, {4}, 0, false);
    const int32_t b = world.create();
    world.step(b, {1}, 0, false);
    world.step(b, {2}, 0, false);  // takes the entry that was kept
    EXPECT_EQ(world.truncate(a, 3), 0);
}

TEST(RecurrentState, SnapshotsWithinTheRoomTakeNothingThatShallBeKept) {
    for (const int32_t entries : {1, 2, 3, 4, 6}) {
        World world(entries);
        const int32_t a = world.create();
        EXPECT_EQ(world.cache.snapshotRoom(a), entries - 1);
        world.step(a, {1, 2, 3}, 0, false);
        world.cache.keepState(a, 3);
        EXPECT_EQ(world.cache.snapshotRoom(a), std::max(entries - 2, 0));
        world.step(a, {4}, 0, false);
        // The kept state stays; the states of the step's rows take the place of the one that the step began from. If
        // the step fails, only the kept state is left.
        const int32_t room = world.cache.snapshotRoom(a);
        EXPECT_EQ(room, std::max(entries - 2, 0));
        if (entries < 3) continue;  // the step before evicted it
        for (int round = 0; round < 3; ++round) {
            ASSERT_EQ(world.cache.snapshotRoom(a), room);
            world.step(a, {5, 6, 7, 8, 9, 10, 11}, room, false);
            const int64_t end = world.cache.length(a);
            for (int64_t tokens = end - 1; tokens >= end - room; --tokens) EXPECT_EQ(world.truncate(a, tokens), tokens);
        }
        const int32_t b = world.create();
        EXPECT_EQ(world.cache.snapshotRoom(b), entries - 3) << "another sequence's present and kept states stay";
        const int64_t length = world.cache.length(a);
        world.step(a, {5, 6, 7, 8, 9, 10, 11}, room, true);
        EXPECT_EQ(world.cache.length(a), 3) << "there was no room for the state of " << length << " tokens too";
    }
}

TEST(RecurrentState, AStateThatShallBeKeptIsNotOverwrittenForASnapshot) {
    World world(2);
    const int32_t a = world.create();
    world.step(a, {1, 2, 3}, 0, false);
    world.cache.keepState(a, 3);
    EXPECT_EQ(world.cache.snapshotRoom(a), 0);
    world.step(a, {4, 5}, 1, true);
    EXPECT_EQ(world.texts[a], (std::vector<int>{1, 2, 3}));
}

TEST(RecurrentState, OfASequenceOneStateIsKept) {
    World world(4);
    const int32_t a = world.create(), b = world.create();
    world.step(b, {9}, 0, false);
    for (int turn = 1; turn <= 5; ++turn) {
        world.step(a, {turn, turn, turn}, 0, false);
        world.cache.keepState(a, 3 * turn);
        EXPECT_EQ(world.cache.snapshotRoom(a), 1) << "turn " << turn;
    }
    world.step(a, {6}, 0, false);
    world.cache.keepState(a, 4);  // there is no such state
    EXPECT_EQ(world.cache.snapshotRoom(a), 1);
    for (int token = 7; token < 12; ++token) world.step(a, {token}, 0, false);
    EXPECT_EQ(world.truncate(a, 15), 15);
    EXPECT_EQ(world.truncate(a, 14), 0);
}

TEST(RecurrentState, RefusesStepsFromElsewhere) {
    World world(4);
    const int32_t a = world.create();
    world.cache.extend(a, 2);
    expectError(ErrorKind::Internal, [&] { world.cache.extend(a, 2); });  // a step is under way
    EXPECT_EQ(world.cache.length(a), 2);
    world.cache.commit(a);
    world.cache.extend(a, 2);
    EXPECT_EQ(world.cache.truncate(a, 2), 2);
    EXPECT_TRUE(world.cache.states().steps(a).empty());
}

TEST(RecurrentState, TakesTheBytesItPredicts) {
    FakeDevice memory(1 << 20, 1 << 12);
    Allocator allocator(memory);
    for (const int32_t entries : {1, 5, 64}) {
        const RecurrentState states(allocator, kLayers, entries);
        EXPECT_EQ(states.bytes(), RecurrentState::bytesFor(kLayers, entries));
        EXPECT_EQ(allocator.held(), states.bytes());
        EXPECT_GE(states.bytes(), sizeof(float) * (3 + 5 + 2 + 7) * static_cast<size_t>(entries));
        EXPECT_EQ(states.freeEntries(), entries);
    }
    EXPECT_EQ(allocator.held(), 0u);
    EXPECT_EQ(RecurrentState::bytesFor({{0, 0}, {0, 0}}, 9), 0u);
    EXPECT_FALSE(RecurrentState(allocator, {{0, 0}}, 9).any());
    expectError(ErrorKind::OutOfMemory, [&] { RecurrentState(allocator, {{1 << 20, 0}}, 1); });
    EXPECT_EQ(allocator.held(), 0u);
}

// Marks leave an entry to each step that is to begin with this one, so that none overwrites what it begins from.
TEST(RecurrentState, MarksLeaveRoomForOtherSteps) {
    HostMemory memory;
    Allocator allocator(memory);
    RecurrentState states(allocator, kLayers, 5);
    EXPECT_EQ(states.stepRoom(), 5);
    states.extend(0, 0, 100, {10, 20, 30});
    states.commit(0);
    EXPECT_EQ(states.stepRoom(), 4) << "all but its present state";
    states.extend(0, 100, 200, {110, 120, 130}, 2);
    EXPECT_EQ(states.steps(0).size(), 2u) << "a mark has room";
    EXPECT_EQ(states.stepRoom(), 2);
    for (const int32_t sequence : {1, 2}) states.extend(sequence, 0, 50, {7}, 2 - sequence);
    for (const int32_t sequence : {1, 2}) EXPECT_EQ(states.steps(sequence).size(), 1u);
    EXPECT_EQ(states.stepRoom(), 0);
    EXPECT_EQ(states.truncate(0, 100), 100) << "a step that fails leaves what it began from";
}

}  // namespace
