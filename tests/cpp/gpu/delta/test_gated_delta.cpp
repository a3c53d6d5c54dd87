// Gated DeltaNet and the gates of attention on the GPU: row after row bit for bit against the CPU's kernels, in chunks
// against double precision.
#include "delta_test.h"

namespace sharpi::cuda {
namespace {

class GatedDelta : public GatedDeltaTest {
protected:
    void expectPrepared(const World& expected, const DeviceWorld& device, const std::string& what) {
        EXPECT_TRUE(sameBits(expected.mixed, device.mixed.read())) << what << ", convolution";
        EXPECT_TRUE(sameBits(expected.alpha, device.alpha.read())) << what << ", decays";
        EXPECT_TRUE(sameBits(expected.beta, device.beta.read())) << what << ", steps";
        EXPECT_TRUE(sameBits(expected.convStates, device.convStates.read())) << what << ", states of the convolution";
    }

    // Queries and keys, which are neighbours in a row of `mixed`, must be what convertRows makes of them.
    void expectHalves(const World& w, const std::vector<uint16_t>& hi, const std::vector<uint16_t>& lo) {
        const int64_t width = 2 * w.shape.keyWidth();
        std::vector<float> x;
        for (int64_t t = 0; t < w.rows; ++t)
            x.insert(x.end(), &w.mixed[t * w.shape.channels()], &w.mixed[t * w.shape.channels()] + width);
        const DeviceArray<float> floats(x);
        const DeviceArray<uint16_t> otherHi(x.size()), otherLo(x.size());
        convertRows(stream(), floats.get(), w.rows, width, {nullptr, {}, {otherHi.get(), otherLo.get()}});
        EXPECT_EQ(otherHi.read(), hi);
        EXPECT_EQ(otherLo.read(), lo);
    }

    // Every form must be what convertRows, which has its own tests, makes of the floats.
    void expectForms(const World& w, const std::vector<float>& floats, const DeviceArray<uint8_t>* quantized,
                     const DeviceArray<uint16_t>& hi, const DeviceArray<uint16_t>& lo) {
        const int64_t cols = w.shape.valueWidth();
        const DeviceArray<float> x(floats);
        const DeviceArray<uint8_t> otherQuantized(quantized ? quantized->size() : 0);
        const DeviceArray<uint16_t> otherHi(floats.size()), otherLo(floats.size());
        const QuantizedRows rows = quantized ? rowsWithColumns(otherQuantized, w.rows, cols) : QuantizedRows();
        convertRows(stream(), x.get(), w.rows, cols, {nullptr, rows, {otherHi.get(), otherLo.get()}});
        if (quantized) {
            EXPECT_EQ(otherQuantized.read(), quantized->read());
        }
        EXPECT_EQ(otherHi.read(), hi.read());
        EXPECT_EQ(otherLo.read(), lo.read());
    }
};

// Fresh and not, in place and not, with states kept in between. The last one has more rows than a block stages at once.
const std::vector<Part> kParts = {
    {-1, {{1, 0}}}, {1, {{2, 2}}}, {3, {{1, 4}, {2, 5}, {3, 3}}}, {6, {{21, 6}}}, {-1, {{3, 7}, {9, 8}}}};
const std::vector<Part> kOneRowEach = {{4, {{1, 4}}}, {-1, {{1, 0}}}, {2, {{1, 3}}}};

const std::vector<Case> kCases = {
    {{2, 6, 64, 4}, kParts},         {{2, 4, 16, 4}, kParts},       {{1, 3, 128, 4}, kParts},
    {{1, 4, 16, 2}, kOneRowEach},    {{3, 5, 32, 3}, kParts},       {{2, 2, 8, 4}, kOneRowEach},
    {{1, 2, 40, 3}, kOneRowEach},    {{2, 5, 96, 4}, kOneRowEach},  {{1, 2, 72, 2}, kParts},
    {{16, 48, 128, 4}, kOneRowEach}, {{2, 6, 64, 4, true}, kParts}, {{3, 6, 32, 3, true}, kOneRowEach},
};

// Each case, and those with consecutive heads once more, with alphas and betas in one array.
std::vector<std::pair<Case, bool>> withFusedSteps(const std::vector<Case>& cases) {
    std::vector<std::pair<Case, bool>> all;
    for (const Case& c : cases) {
        all.emplace_back(c, false);
        if (c.shape.consecutive) all.emplace_back(c, true);
    }
    return all;
}

TEST_F(GatedDelta, PreparesWithTheBitsOfTheCpu) {
    for (const auto& [c, fused] : withFusedSteps(kCases)) {
        World w = world(c);
        const DeviceWorld device(w, fused);
        prepareDelta(stream(), device.inputs(), device.parameters(), w.shape, device.states(), device.batch);
        w.useCpu();
        expectPrepared(w, device, nameOf(w));
    }
}

// Tiles shorter than the convolution too, in any order, and long ones.
TEST_F(GatedDelta, PreparesInTilesCutAnywhere) {
    std::vector<Case> cases = kCases;
    for (const Case& c : kCases) cases.push_back({c.shape, {{-1, {{150, 0}}}, {1, {{64, 2}, {65, 3}, {101, 1}}}}});
    for (const auto& [c, fused] : withFusedSteps(cases)) {
        World w = world(c);
        const DeviceWorld device(w, fused);
        const int longest = w.rows > 100 ? 70 : 7;
        std::vector<std::pair<int32_t, int32_t>> tiles = {{0, 0}};
        for (size_t s = 0; s < w.begin.size(); ++s) {
            for (int32_t at = w.begin[s]; at < w.end[s];) {
                const int32_t until = std::min<int32_t>(w.end[s], at + 1 + static_cast<int32_t>(random()() % longest));
                tiles.emplace_back(at, until);
                at = until;
            }
        }
        std::shuffle(tiles.begin(), tiles.end(), random());
        std::vector<int32_t> begin, end;
        for (const auto& [b, e] : tiles) begin.push_back(b), end.push_back(e);
        const DeviceArray<int32_t> deviceBegin(begin), deviceEnd(end);
        const auto count = static_cast<int64_t>(tiles.size());
        const DeviceArray<uint8_t> windows(prepareDeltaBytes(count, w.shape));
        const DeviceArray<uint16_t> hi(w.rows * 2 * w.shape.keyWidth()), lo(hi.size());
        prepareDelta(stream(), device.inputs(), device.parameters(), w.shape, device.states(), device.batch,
                     {deviceBegin.get(), deviceEnd.get(), count}, windows.get(), {hi.get(), lo.get()});
        w.useCpu();
        expectHalves(w, hi.read(), lo.read());
        expectPrepared(w, device, nameOf(w));
    }
}

TEST_F(GatedDelta, RunsTheDeltaRuleWithTheBitsOfTheCpu) {
    for (const Case& c : kCases) {
        World w = world(c);
        const DeviceWorld device(w);
        const auto size = static_cast<size_t>(w.rows * w.shape.valueWidth());
        const DeviceArray<float> floats(size);
        const DeviceArray<uint16_t> hi(size), lo(size);
        const bool blocks = w.shape.valueWidth() % 32 == 0;
        const DeviceArray<uint8_t> quantized(blocks ? quantizedRowsBytes(w.rows, w.shape.valueWidth()) : 0);
        const QuantizedRows rows = blocks ? rowsWithColumns(quantized, w.rows, w.shape.valueWidth()) : QuantizedRows();
        prepareDelta(stream(), device.inputs(), device.parameters(), w.shape, device.states(), device.batch);
        deltaRule(stream(), device.inputs(), device.parameters(), w.shape, device.states(), device.batch,
                  {floats.get(), rows, {hi.get(), lo.get()}});
        w.useCpu();
        const std::vector<float> expected = w.gated(w.out);
        ASSERT_TRUE(sameBits(expected, floats.read())) << nameOf(w);
        EXPECT_TRUE(sameBits(w.matrixStates, device.matrixStates.read())) << nameOf(w) << ", states";
        EXPECT_TRUE(sameBits(w.gate, device.gate.read()));
        expectForms(w, expected, blocks ? &quantized : nullptr, hi, lo);
    }
}

// Few rows: fresh and not, in place and not, with states kept in between.
const std::vector<Part> kFewParts = {{-1, {{1, 0}}}, {1, {{2, 2}}}, {3, {{1, 4}, {2, 5}, {3, 3}}}, {6, {{2, 6}}}};
const std::vector<Part> kDraftedInPlace = {{2, {{1, 0}, {2, 1}, {3, 3}, {4, 4}, {5, 5}, {6, 6}, {7, 7}, {8, 2}}}};

const std::vector<Case> kFewCases = {
    {{1, 3, 128, 4}, kFewParts},
    {{2, 6, 64, 4}, kFewParts},
    {{2, 4, 16, 4}, kFewParts},
    {{3, 5, 32, 3}, kFewParts},
    {{1, 2, 72, 2}, kFewParts},
    {{2, 5, 96, 4}, kFewParts},
    {{2, 2, 8, 4}, kOneRowEach},
    {{1, 2, 40, 3}, kOneRowEach},
    {{2, 5, 128, 2}, kOneRowEach},
    {{16, 48, 128, 4}, kOneRowEach},
    {{1, 4, 16, 2}, kDraftedInPlace},
    {{2, 4, 128, 4}, kDraftedInPlace},
    {{2, 3, 48, 3}, kDraftedInPlace},
    {{1, 2, 128, 4}, {{-1, {{7, 3}}}}},
    {{2, 6, 64, 4, true}, kFewParts},
    {{16, 32, 128, 4, true}, kOneRowEach},
    {{2, 4, 16, 4, true}, kDraftedInPlace},
};

TEST_F(GatedDelta, StepsWithTheBitsOfTheCpu) {
    for (const auto& [c, fused] : withFusedSteps(kFewCases)) {
        World w = world(c);
        const DeviceWorld device(w, fused);
        const auto size = static_cast<size_t>(w.rows * w.shape.valueWidth());
        const DeviceArray<float> floats(size);
        const DeviceArray<uint16_t> hi(size), lo(size);
        const bool blocks = w.shape.valueWidth() % 32 == 0;
        const DeviceArray<uint8_t> quantized(blocks ? quantizedRowsBytes(w.rows, w.shape.valueWidth()) : 0);
        const QuantizedRows rows = blocks ? rowsWithColumns(quantized, w.rows, w.shape.valueWidth()) : QuantizedRows();
        const std::vector<uint8_t> none(deltaStepBytes(device.batch.sequences.count, w.shape), 0);
        const DeviceArray<uint8_t> scratch(none);
        deltaStep(stream(), device.inputs(), device.parameters(), w.shape, device.states(), device.batch, scratch.get(),
                  {floats.get(), rows, {hi.get(), lo.get()}});
        EXPECT_TRUE(sameBits(w.mixed, device.mixed.read()));
        if (!fused) {
            EXPECT_TRUE(sameBits(w.alpha, device.alpha.read()));
            EXPECT_TRUE(sameBits(w.beta, device.beta.read()));
        }
        EXPECT_EQ(none, scratch.read()) << nameOf(w);
        w.useCpu();
        const std::vector<float> expected = w.gated(w.out);
        ASSERT_TRUE(sameBits(expected, floats.read())) << nameOf(w);
        EXPECT_TRUE(sameBits(w.convStates, device.convStates.read())) << nameOf(w) << ", states of the convolution";
        EXPECT_TRUE(sameBits(w.matrixStates, device.matrixStates.read())) << nameOf(w) << ", states";
        expectForms(w, expected, blocks ? &quantized : nullptr, hi, lo);
    }
}

// Layers in close succession, with states that every pass overwrites. A block that starts late must not read what
// another one has written, and all layers use the same counters.
TEST_F(GatedDelta, StepsLayerAfterLayerInPlace) {
    const DeltaShape shape = {2, 16, 128, 4};
    const size_t layers = 6, passes = 8;
    std::vector<World> worlds(layers);
    std::vector<std::unique_ptr<DeviceWorld>> devices(layers);
    const DeviceArray<uint8_t> scratch(std::vector<uint8_t>(deltaStepBytes(2, shape), 0));
    const auto size = static_cast<size_t>(shape.valueWidth());
    const DeviceArray<float> floats(layers * size);
    for (size_t pass = 0; pass < passes; ++pass) {
        for (size_t layer = 0; layer < layers; ++layer) {
            World w = world({shape, {{1, {{1, 1}}}}});
            if (pass > 0) w.convStates = worlds[layer].convStates, w.matrixStates = worlds[layer].matrixStates;
            worlds[layer] = w;
            devices[layer] = std::make_unique<DeviceWorld>(w);
        }
        for (size_t layer = 0; layer < layers; ++layer) {
            const DeviceWorld& d = *devices[layer];
            deltaStep(stream(), d.inputs(), d.parameters(), shape, d.states(), d.batch, scratch.get(),
                      {floats.get() + layer * size, {}, {}});
        }
        std::vector<float> expected;
        for (World& w : worlds) {
            w.useCpu();
            const std::vector<float> gated = w.gated(w.out);
            expected.insert(expected.end(), gated.begin(), gated.end());
        }
        ASSERT_TRUE(sameBits(expected, floats.read())) << pass;
        for (size_t layer = 0; layer < layers; ++layer) {
            ASSERT_TRUE(sameBits(worlds[layer].convStates, devices[layer]->convStates.read())) << pass;
            ASSERT_TRUE(sameBits(worlds[layer].matrixStates, devices[layer]->matrixStates.read())) << pass;
        }
    }
}

class GatedDeltaChunks : public GatedDelta {
protected:
    void compare(const Case& c, bool whole, bool split) {
        World w = world(c);
        if (w.shape.valueHeads > 2) {
            w.decay[0] = -1000.0f, w.decay[1] = 0.0f;  // one head forgets everything at each row, one never forgets
            // All keys are equal and steps are 1, so each row overwrites what the rows before it wrote.
            for (int64_t t = 1; t < w.rows; ++t) {
                const auto keys = w.mixed.begin() + w.shape.keyWidth();
                std::copy_n(keys, w.shape.dim, keys + t * w.shape.channels());
                w.beta[t * w.shape.valueHeads + 1] = w.beta[t * w.shape.valueHeads + 2] = 20.0f;
            }
        }
        const DeviceWorld device(w);
        std::vector<float> states = w.matrixStates;
        const auto tiles = tilesOf(w, random(), whole);
        std::vector<int32_t> begin, end;
        for (const auto& [b, e] : tiles) begin.push_back(b), end.push_back(e);
        const DeviceArray<int32_t> deviceBegin(begin), deviceEnd(end);
        const RowRanges ranges = {deviceBegin.get(), deviceEnd.get(), static_cast<int64_t>(tiles.size())};
        const DeviceArray<uint8_t> windows(prepareDeltaBytes(ranges.count, w.shape));
        const DeviceArray<uint8_t> scratch(deltaChunkBytes(w.rows, ranges.count, w.shape, split));
        const auto size = static_cast<size_t>(w.rows * w.shape.valueWidth());
        const DeviceArray<uint16_t> keysHi(w.rows * 2 * w.shape.keyWidth()), keysLo(keysHi.size()), hi(size), lo(size);
        const DeviceArray<float> attended(size), floats(size);
        const HalfRows keys = {keysHi.get(), split ? keysLo.get() : nullptr};
        const bool blocks = w.shape.valueWidth() % 32 == 0;
        const DeviceArray<uint8_t> quantized(blocks ? quantizedRowsBytes(w.rows, w.shape.valueWidth()) : 0);
        const QuantizedRows rows = blocks ? rowsWithColumns(quantized, w.rows, w.shape.valueWidth()) : QuantizedRows();
        prepareDelta(stream(), device.inputs(), device.parameters(), w.shape, device.states(), device.batch, ranges,
                     windows.get(), keys);
        deltaRuleInChunks(stream(), device.inputs(), keys, device.parameters(), w.shape, device.states(), device.batch,
                          ranges, scratch.get(), attended.get(), {floats.get(), rows, {hi.get(), lo.get()}});
        w.useCpu();
        const std::vector<double> expected = w.inDouble(states);
        const std::vector<float> got = attended.read();
        const double bound = split ? 5e-5 : 2e-2;
        const size_t matrix = static_cast<size_t>(w.shape.dim) * w.shape.dim;
        const std::string name = nameOf(w) + (split ? ", split" : "");
        EXPECT_LT(errorOf(expected, got, w.shape.valueHeads, w.shape.dim), bound) << name;
        EXPECT_LT(errorOf({states.begin(), states.end()}, device.matrixStates.read(), w.shape.valueHeads, matrix),
                  bound)
            << name << ", states";
        const std::vector<float> gated = w.gated(got);
        EXPECT_TRUE(sameBits(gated, floats.read())) << name;
        expectForms(w, gated, blocks ? &quantized : nullptr, hi, lo);
    }
};

const std::vector<Part> kLongParts = {
    {-1, {{150, 0}}}, {1, {{64, 2}}}, {3, {{70, 4}, {71, 5}, {130, 3}}}, {6, {{3, 6}}}, {-1, {{1, 7}, {65, 8}}}};

const std::vector<DeltaShape> kChunkShapes = {{2, 3, 16, 4},  {1, 2, 32, 3}, {2, 3, 64, 4},       {1, 1, 40, 2},
                                              {1, 3, 128, 4}, {1, 1, 96, 4}, {2, 6, 64, 4, true}, {2, 4, 128, 4, true}};

TEST_F(GatedDeltaChunks, AreNearDoublePrecision) {
    for (const bool split : {true, false}) {
        for (const DeltaShape& shape : kChunkShapes) {
            compare({shape, kLongParts}, true, split);
            compare({shape, kLongParts}, false, split);
        }
        // Enough heads that a block takes more columns of each.
        compare({{2, 24, 128, 4}, {{-1, {{150, 0}}}, {1, {{64, 2}, {70, 1}}}}}, true, split);
    }
}

// Requests only the form that decode's next product reads.
TEST_F(GatedDelta, WritesNoFormThatIsNotAskedFor) {
    World w = world({{1, 2, 64, 4}, kOneRowEach});
    const DeviceWorld device(w);
    const DeviceArray<uint8_t> quantized(quantizedRowsBytes(w.rows, w.shape.valueWidth())), expected(quantized.size());
    prepareDelta(stream(), device.inputs(), device.parameters(), w.shape, device.states(), device.batch);
    deltaRule(stream(), device.inputs(), device.parameters(), w.shape, device.states(), device.batch,
              {nullptr, rowsWithColumns(quantized, w.rows, w.shape.valueWidth()), {}});
    w.useCpu();
    const DeviceArray<float> floats(w.gated(w.out));
    convertRows(stream(), floats.get(), w.rows, w.shape.valueWidth(),
                {nullptr, rowsWithColumns(expected, w.rows, w.shape.valueWidth()), {}});
    EXPECT_EQ(expected.read(), quantized.read());
}

TEST_F(GatedDelta, RefusesWhatItHasNoKernelsFor) {
    EXPECT_NO_THROW(requireDelta({16, 48, 128, 4}));
    for (const DeltaShape& shape :
         {DeltaShape{2, 2, 256, 4}, {2, 2, 20, 4}, {2, 2, 64, 5}, {2, 2, 64, 1}, {0, 2, 64, 4}}) {
        try {
            requireDelta(shape);
            FAIL() << shape.dim;
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::InvalidArgument);
        }
    }
    const World w = world({{1, 1, 16, 4}, kOneRowEach});
    const DeviceWorld device(w);
    const DeviceArray<uint8_t> quantized(quantizedRowsBytes(w.rows, 32));
    EXPECT_THROW(deltaRule(stream(), device.inputs(), device.parameters(), w.shape, device.states(), device.batch,
                           {nullptr, quantizedRowsOver(quantized.get(), w.rows, 32), {}}),
                 Error);
}

TEST_F(GatedDelta, GatesAttentionWithTheBitsOfTheCpu) {
    for (const auto& [heads, headDim] : {std::pair{24, 256}, {2, 16}, {3, 32}, {4, 8}}) {
        const int64_t rows = 18, cols = heads * headDim;
        std::vector<float> gated = randomFloats(2 * rows * cols, 5.0f);
        const float edges[] = {0.0f, -0.0f, 87.5f, -87.5f, 100.0f, -100.0f, INFINITY, -INFINITY};
        std::copy(std::begin(edges), std::end(edges), gated.begin() + headDim);  // the first gate
        std::vector<float> q(rows * cols), gates(rows * cols), x = randomFloats(rows * cols);
        for (int64_t h = 0; h < rows * heads; ++h) {
            std::copy_n(&gated[2 * h * headDim], headDim, &q[h * headDim]);
            std::copy_n(&gated[(2 * h + 1) * headDim], headDim, &gates[h * headDim]);
        }
        const DeviceArray<float> deviceGated(gated), deviceX(x), deviceQ(q.size());
        const DeviceArray<uint8_t> quantized(quantizedRowsBytes(rows, cols)), expected(quantized.size());
        splitGatedQueries(stream(), deviceGated.get(), rows, heads, headDim, deviceQ.get());
        EXPECT_TRUE(sameBits(q, deviceQ.read()));
        cpu::kernels().sigmoidMul(x.data(), gates.data(), rows * cols);
        gateHeads(stream(), deviceX.get(), deviceGated.get(), rows, heads, headDim,
                  {deviceX.get(), rowsWithColumns(quantized, rows, cols), {}});
        EXPECT_TRUE(sameBits(x, deviceX.read())) << headDim;
        convertRows(stream(), deviceX.get(), rows, cols, {nullptr, rowsWithColumns(expected, rows, cols), {}});
        EXPECT_EQ(expected.read(), quantized.read());
    }
}

}  // namespace
}  // namespace sharpi::cuda
