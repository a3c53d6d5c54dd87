// Gated DeltaNet's rows. In tiles at multiples of 64, a row's bits depend neither on the multiple at which a prompt was
// cut, nor on the length of the last tile, nor on the other rows. Row after row, a step's rows have the CPU's bits with
// any number of rows and sequences.
#include "delta_test.h"

namespace sharpi::cuda {
namespace {

// The products of all rows of a sequence.
struct Text {
    int64_t rows;
    std::vector<float> mixed, alpha, beta, gate;
};

// States of a layer on the host, entry after entry.
struct StateEntries {
    std::vector<float> conv, matrix;
};

// Rows [begin, end) of a text, from a state (-1: none). The state after row `snapshot` (0: none) and that after the
// last row are kept.
struct Stretch {
    size_t text;
    int64_t begin, end;
    int32_t from, to;
    int64_t snapshot = 0;
    int32_t snapshotTo = -1;
};

class DeltaChunkRows : public GatedDeltaTest {
protected:
    void begin(const DeltaShape& shape, const std::vector<int64_t>& lengths) {
        _layer = world({shape, {{-1, {{1, 0}}}}});
        if (shape.valueHeads > 2)
            _layer.decay[0] = -1000.0f,
            _layer.decay[1] = 0.0f;  // one head forgets everything at each row, one never forgets
        _texts.clear();
        for (const int64_t rows : lengths) {
            _texts.push_back({rows, randomFloats(rows * shape.channels(), 2.0f),
                              randomFloats(rows * shape.valueHeads, 3.0f), randomFloats(rows * shape.valueHeads, 3.0f),
                              randomFloats(rows * shape.valueWidth(), 3.0f)});
        }
    }
    StateEntries none() const { return {_layer.convStates, _layer.matrixStates}; }

    // Runs these stretches in one call, in tiles at multiples of 64, and returns the outputs by stretch. Updates
    // `states`.
    std::vector<std::vector<float>> run(const std::vector<Stretch>& stretches, StateEntries& states, bool split) {
        const World w = worldOf(stretches, states);
        const DeviceWorld device(w);
        std::vector<int32_t> begin, end;
        for (size_t s = 0, row = 0; s < stretches.size(); ++s) {
            const Stretch& stretch = stretches[s];
            for (int64_t at = stretch.begin; at < stretch.end;) {
                const int64_t until = std::min(stretch.end, (at / kDeltaChunk + 1) * kDeltaChunk);
                begin.push_back(static_cast<int32_t>(row));
                row += static_cast<size_t>(until - at);
                end.push_back(static_cast<int32_t>(row));
                at = until;
            }
        }
        begin.push_back(0), end.push_back(0);
        const DeviceArray<int32_t> deviceBegin(begin), deviceEnd(end);
        const RowRanges tiles = {deviceBegin.get(), deviceEnd.get(), static_cast<int64_t>(begin.size())};
        const DeviceArray<uint8_t> windows(prepareDeltaBytes(tiles.count, w.shape)),
            scratch(deltaChunkBytes(w.rows, tiles.count, w.shape, split));
        const auto size = static_cast<size_t>(w.rows * w.shape.valueWidth());
        const DeviceArray<uint16_t> hi(w.rows * 2 * w.shape.keyWidth()), lo(hi.size());
        const DeviceArray<float> attended(size), floats(size);
        const HalfRows keys = {hi.get(), split ? lo.get() : nullptr};
        prepareDelta(stream(), device.inputs(), device.parameters(), w.shape, device.states(), device.batch, tiles,
                     windows.get(), keys);
        deltaRuleInChunks(stream(), device.inputs(), keys, device.parameters(), w.shape, device.states(), device.batch,
                          tiles, scratch.get(), attended.get(), {floats.get(), {}, {}});
        states = {device.convStates.read(), device.matrixStates.read()};
        const std::vector<float> got = attended.read(), gated = floats.read();
        std::vector<std::vector<float>> parts;
        int64_t row = 0;
        for (const Stretch& stretch : stretches) {
            const int64_t first = row * w.shape.valueWidth(),
                          last = first + (stretch.end - stretch.begin) * w.shape.valueWidth();
            parts.emplace_back(got.begin() + first, got.begin() + last);
            parts.back().insert(parts.back().end(), gated.begin() + first, gated.begin() + last);
            row += stretch.end - stretch.begin;
        }
        return parts;
    }

    // The outputs of rows [begin, end), out of those that run() returned for a stretch of `rows` rows.
    std::vector<float> rowsOf(const std::vector<float>& part, int64_t rows, int64_t begin, int64_t end) const {
        const int64_t width = _layer.shape.valueWidth();
        std::vector<float> some(part.begin() + begin * width, part.begin() + end * width);
        some.insert(some.end(), part.begin() + (rows + begin) * width, part.begin() + (rows + end) * width);
        return some;
    }

    ::testing::AssertionResult sameEntry(const StateEntries& expected, int32_t entry, const StateEntries& got,
                                         int32_t gotEntry) const {
        const auto of = [](const std::vector<float>& all, int64_t size, int32_t at) {
            return std::vector<float>(all.begin() + at * size, all.begin() + (at + 1) * size);
        };
        const int64_t conv = _layer.shape.convFloats(), matrix = _layer.shape.matrixFloats();
        const auto result = sameBits(of(expected.conv, conv, entry), of(got.conv, conv, gotEntry));
        return result ? sameBits(of(expected.matrix, matrix, entry), of(got.matrix, matrix, gotEntry)) : result;
    }

private:
    World worldOf(const std::vector<Stretch>& stretches, const StateEntries& states) {
        Case c = {_layer.shape, {}};
        for (const Stretch& s : stretches) {
            Part part = {s.from, {}};
            if (s.snapshot > 0) part.kept.emplace_back(s.snapshot - s.begin, s.snapshotTo);
            part.kept.emplace_back(s.end - s.begin, s.to);
            c.parts.push_back(part);
        }
        World w = world(c);
        w.conv = _layer.conv, w.stepBias = _layer.stepBias, w.decay = _layer.decay, w.headNorm = _layer.headNorm;
        w.convStates = states.conv, w.matrixStates = states.matrix;
        int64_t row = 0;
        for (const Stretch& s : stretches) {
            const Text& text = _texts[s.text];
            const auto put = [&](std::vector<float>& to, const std::vector<float>& from, int64_t width) {
                std::copy(from.begin() + s.begin * width, from.begin() + s.end * width, to.begin() + row * width);
            };
            put(w.mixed, text.mixed, w.shape.channels());
            put(w.alpha, text.alpha, w.shape.valueHeads);
            put(w.beta, text.beta, w.shape.valueHeads);
            put(w.gate, text.gate, w.shape.valueWidth());
            row += s.end - s.begin;
        }
        return w;
    }

    World _layer;
    std::vector<Text> _texts;
};

// The last one has enough heads that a block takes more columns of each when there are other sequences.
const std::vector<DeltaShape> kShapes = {{2, 3, 16, 4},  {1, 2, 32, 3}, {2, 3, 64, 4}, {1, 1, 40, 2},
                                         {1, 3, 128, 4}, {1, 1, 96, 4}, {2, 8, 128, 4}};

TEST_F(DeltaChunkRows, AShortPromptIsTheBeginningOfALongOne) {
    for (const bool split : {true, false}) {
        for (const DeltaShape& shape : kShapes) {
            SCOPED_TRACE("heads of " + std::to_string(shape.dim) + (split ? ", split" : ""));
            begin(shape, {320});
            StateEntries states = none();
            const std::vector<float> whole = run({{0, 0, 320, -1, 0}}, states, split)[0];
            for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130, 300}) {
                StateEntries other = none();
                const std::vector<float> some = run({{0, 0, rows, -1, 1}}, other, split)[0];
                ASSERT_TRUE(sameBits(rowsOf(whole, 320, 0, rows), some)) << rows << " rows";
            }
        }
    }
}

// Through several state entries, in place and not, with a snapshot in between.
TEST_F(DeltaChunkRows, CutAtMultiplesOfATile) {
    for (const bool split : {true, false}) {
        for (const DeltaShape& shape : kShapes) {
            for (const int64_t rows : {65, 130, 300, 449}) {
                SCOPED_TRACE("heads of " + std::to_string(shape.dim) + ", " + std::to_string(rows) + " rows" +
                             (split ? ", split" : ""));
                begin(shape, {rows});
                const int64_t snapshot = (rows - 1) / kDeltaChunk * kDeltaChunk;
                StateEntries states = none();
                const std::vector<float> whole = run({{0, 0, rows, -1, 0, snapshot, 1}}, states, split)[0];
                for (const bool inPlace : {true, false}) {
                    StateEntries cut = none();
                    std::vector<float> tail;
                    int32_t entry = -1;
                    for (int64_t at = 0; at < rows;) {
                        const int64_t tiles = 1 + static_cast<int64_t>(random()() % 3),
                                      end = std::min(rows, at + tiles * kDeltaChunk);
                        const int32_t to = inPlace ? 2 : entry == 2 ? 3 : 2;
                        const std::vector<float> part = run({{0, at, end, entry, to}}, cut, split)[0];
                        ASSERT_TRUE(sameBits(rowsOf(whole, rows, at, end), part)) << "from " << at << " to " << end;
                        entry = to;
                        at = end;
                    }
                    EXPECT_TRUE(sameEntry(states, 0, cut, entry));
                }
                // Continues from the snapshot: the tail is computed again.
                StateEntries again = states;
                const std::vector<float> tail = run({{0, snapshot, rows, 1, 4}}, again, split)[0];
                EXPECT_TRUE(sameBits(rowsOf(whole, rows, snapshot, rows), tail));
                EXPECT_TRUE(sameEntry(states, 0, again, 4));
            }
        }
    }
}

TEST_F(DeltaChunkRows, InCompany) {
    const std::vector<int64_t> lengths = {150, 9, 64, 65};
    for (const bool split : {true, false}) {
        for (const DeltaShape& shape : kShapes) {
            SCOPED_TRACE("heads of " + std::to_string(shape.dim) + (split ? ", split" : ""));
            begin(shape, lengths);
            StateEntries alone = none(), together = none();
            std::vector<Stretch> all;
            std::vector<std::vector<float>> expected;
            for (size_t s = 0; s < lengths.size(); ++s) {
                all.push_back({s, 0, lengths[s], -1, static_cast<int32_t>(2 * s)});
                expected.push_back(run({all.back()}, alone, split)[0]);
            }
            const std::vector<std::vector<float>> got = run(all, together, split);
            for (size_t s = 0; s < lengths.size(); ++s) {
                EXPECT_TRUE(sameBits(expected[s], got[s])) << lengths[s] << " rows";
                EXPECT_TRUE(sameEntry(alone, all[s].to, together, all[s].to)) << lengths[s] << " rows";
            }
        }
    }
}

// --- row after row --------------------------------------------------------------------------------------------------

class DeltaManyRows : public GatedDeltaTest {
protected:
    // Sequences of up to 8 rows, `rows` in all, fresh and not, in place and not, some of which keep the state of every
    // row.
    Case manyRows(const DeltaShape& shape, int64_t rows) {
        Case c = {shape, {}};
        int32_t entries = 0;
        for (int64_t left = rows; left > 0;) {
            const int64_t count = std::min<int64_t>(left, 1 + static_cast<int64_t>(random()() % kDeltaStepRows));
            Part part = {random()() % 4 == 0 ? -1 : entries++, {}};
            const bool drafted = random()() % 2 == 0;
            for (int64_t t = 1; drafted && t < count; ++t) part.kept.emplace_back(t, entries++);
            part.kept.emplace_back(count, part.from >= 0 && random()() % 2 ? part.from : entries++);
            c.parts.push_back(part);
            left -= count;
        }
        return c;
    }

    void expectSteps(const World& expected, const DeviceWorld& device, const DeviceArray<float>& floats,
                     const char* how) {
        ASSERT_TRUE(sameBits(expected.gated(expected.out), floats.read())) << nameOf(expected) << ", " << how;
        EXPECT_TRUE(sameBits(expected.convStates, device.convStates.read())) << nameOf(expected) << ", " << how;
        EXPECT_TRUE(sameBits(expected.matrixStates, device.matrixStates.read())) << nameOf(expected) << ", " << how;
    }

    // Runs all sequences in one step, in steps of a few sequences, and in two launches, each of them captured.
    void compare(const DeltaShape& shape, int64_t rows) {
        World w = world(manyRows(shape, rows));
        const DeviceWorld one(w), slices(w), captured(w);
        const auto size = static_cast<size_t>(rows * shape.valueWidth());
        const DeviceArray<float> ofOne(size), ofSlices(size), ofCaptured(size);
        const auto sequences = static_cast<int64_t>(w.begin.size());
        const DeviceArray<uint8_t> scratch(std::vector<uint8_t>(deltaStepBytes(sequences, shape), 0));
        deltaStep(stream(), one.inputs(), one.parameters(), shape, one.states(), one.batch, scratch.get(),
                  {ofOne.get(), {}, {}});
        for (int64_t first = 0; first < sequences;) {
            const int64_t count = std::min<int64_t>(sequences - first, 1 + static_cast<int64_t>(random()() % 5));
            DeltaBatch batch = slices.batch;
            batch.sequences.begin += first, batch.sequences.end += first, batch.sequences.count = count;
            batch.rows = 0;
            for (int64_t s = first; s < first + count; ++s)
                batch.rows += w.end[static_cast<size_t>(s)] - w.begin[static_cast<size_t>(s)];
            deltaStep(stream(), slices.inputs(), slices.parameters(), shape, slices.states(), batch, scratch.get(),
                      {ofSlices.get(), {}, {}});
            first += count;
        }
        stream().synchronize();
        // A list with more room than there are sequences, as in a captured step.
        std::vector<int32_t> begin = w.begin, end = w.end;
        begin.resize(begin.size() + 5, 0), end.resize(begin.size(), 0);
        const DeviceArray<int32_t> paddedBegin(begin), paddedEnd(end);
        DeltaBatch batch = captured.batch;
        batch.sequences = {paddedBegin.get(), paddedEnd.get(), static_cast<int64_t>(begin.size())};
        const auto graph = stream().capture([&] {
            prepareDelta(stream(), captured.inputs(), captured.parameters(), shape, captured.states(), batch);
            deltaRule(stream(), captured.inputs(), captured.parameters(), shape, captured.states(), batch,
                      {ofCaptured.get(), {}, {}});
        });
        stream().replay(*graph);
        stream().synchronize();
        w.useCpu();
        expectSteps(w, one, ofOne, "one step");
        expectSteps(w, slices, ofSlices, "several steps");
        expectSteps(w, captured, ofCaptured, "captured");
    }
};

TEST_F(DeltaManyRows, HaveTheBitsOfTheCpu) {
    for (const DeltaShape& shape : std::vector<DeltaShape>{
             {2, 4, 16, 4}, {3, 5, 32, 3}, {2, 6, 64, 4}, {1, 2, 72, 2}, {1, 3, 128, 4}, {4, 8, 128, 4}})
        for (const int64_t rows : {1, 9, 17, 40, 64}) ASSERT_NO_FATAL_FAILURE(compare(shape, rows));
}

TEST_F(DeltaManyRows, AreNotMoreThanAStepHasRoomFor) {
    const World w = world({{1, 2, 16, 4}, {{-1, {{kDeltaStepRows, 0}}}}});
    const DeviceWorld device(w);
    DeltaBatch batch = device.batch;
    batch.rows = kDeltaStepRows * batch.sequences.count + 1;
    const DeviceArray<uint8_t> scratch(std::vector<uint8_t>(deltaStepBytes(batch.sequences.count, w.shape), 0));
    const DeviceArray<float> floats(static_cast<size_t>(batch.rows * w.shape.valueWidth()));
    EXPECT_THROW(deltaStep(stream(), device.inputs(), device.parameters(), w.shape, device.states(), batch,
                           scratch.get(), {floats.get(), {}, {}}),
                 Error);
}

}  // namespace
}  // namespace sharpi::cuda
