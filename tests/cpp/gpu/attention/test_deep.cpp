// Decode's attention over long texts, whose segments warps take by themselves: bit for bit against the CPU's kernel.
// What no row sees is NaN. The device is said to be small, so that short texts count as long.
#include "attention_test.h"
#include "column_test.h"

namespace sharpi::cuda {
namespace {

class DeepDecode : public GpuTest {
protected:
    // Of a device with one multiprocessor.
    Stream& small() {
        if (!_small) {
            DeviceInfo device = stream().device();
            device.multiprocessors = 1;
            _small = std::make_unique<Stream>(device);
        }
        return *_small;
    }

    struct Rule {
        AttentionReach reach = {};
        float softcap = 0;
        bool sinks = false;
    };

    static std::vector<int32_t> lengthsOf(const std::vector<Row>& rows) {
        std::vector<int32_t> lengths;
        for (const Row& row : rows) {
            if (row.sequence >= static_cast<int32_t>(lengths.size())) lengths.resize(row.sequence + 1, 0);
            lengths[row.sequence] = std::max(lengths[row.sequence], row.position + 1);
        }
        return lengths;
    }
    static BatchDepth depthOf(const std::vector<int32_t>& lengths, int64_t rowsOfText = 1) {
        BatchDepth depth;
        depth.rowsOfText = rowsOfText;
        for (const int32_t length : lengths) {
            const int64_t pages = (length + kPageTokens - 1) / kPageTokens;
            depth.deepest = std::max(depth.deepest, pages), depth.all += pages;
        }
        return depth;
    }

    // rounds: of the segments, whose places are used again.
    void compare(const Shape& shape, const std::vector<Row>& rows, const Rule& rule, int rounds = 1,
                 float queryScale = 1.0f) {
        SCOPED_TRACE(nameOf(shape) + ", window " + std::to_string(rule.reach.window) + ", chunk " +
                     std::to_string(rule.reach.chunk) + ", first row at " + std::to_string(rows[0].position));
        const std::vector<int32_t> lengths = lengthsOf(rows);
        std::vector<int64_t> counts(lengths.size());
        for (const Row& row : rows) ++counts[row.sequence];
        const BatchDepth depth = depthOf(lengths, *std::max_element(counts.begin(), counts.end()));
        Cache cache(shape, lengths, depth.deepest, 11);
        std::vector<int32_t> first(lengths);
        for (const Row& row : rows)
            if (row.position >= 0) first[row.sequence] = std::min(first[row.sequence], rule.reach.first(row.position));
        for (size_t s = 0; s < lengths.size(); s++)
            if (first[s] > 0) cache.giveBack(static_cast<int32_t>(s), first[s]);
        const std::vector<float> q = randomFloats(rows.size() * shape.heads * shape.headDim, queryScale),
                                 sinks = randomFloats(shape.heads);
        const DeviceArray<float> deviceQ(q), deviceSinks(sinks), out(q.size());
        DeviceRows on(rows, cache);
        on.batch.depth = depth;
        const HeadShape heads = {shape.heads, shape.kvHeads, shape.headDim};
        const DecodeScratch scratch(on.batch.rows, heads);
        const auto with = [&](const float* sinksAt) {
            return AttentionRule{scaleOf(shape), rule.reach, rule.softcap, rule.sinks ? sinksAt : nullptr};
        };
        const int64_t before = small().launches();
        attentionDecode(small(), deviceQ.get(), heads, with(deviceSinks.get()), on.batch, cache.onDevice(),
                        scratch.get(), {out.get(), {}, {}});
        EXPECT_EQ(small().launches() - before, 2 * rounds);
        EXPECT_TRUE(sameBits(cache.attendOnCpu(q, rows, with(sinks.data())), out.read()));
        EXPECT_TRUE(scratch.isReady());
    }

private:
    std::unique_ptr<Stream> _small;
};

const std::vector<Shape> kShapes = {
    {KvType::BF16, 8, 2, 128}, {KvType::F16, 6, 2, 128},   {KvType::F32, 8, 2, 128},  {KvType::BF16, 3, 3, 64},
    {KvType::F16, 16, 2, 64},  {KvType::F32, 4, 4, 64},    {KvType::BF16, 6, 2, 256}, {KvType::F16, 4, 4, 256},
    {KvType::F32, 7, 1, 256},  {KvType::BF16, 11, 1, 128},
};

// Positions around the borders of pages and segments, and of the two halves of a page's keys.
TEST_F(DeepDecode, HasTheBitsOfTheCpu) {
    for (const Shape& shape : kShapes)
        for (const int32_t position : {6150, 6207, 6335, 6336, 6399, 6400}) compare(shape, {{0, position}}, {});
}

// One row has more segments than a group of 32, and the last group may be full or not.
TEST_F(DeepDecode, JoinsManySegments) {
    for (const int32_t segments : {17, 31, 32, 33, 64, 70})
        compare({KvType::BF16, 4, 2, 64}, {{0, segments * 256 - 1}}, {});
    compare({KvType::F32, 2, 1, 256}, {{0, 40 * 256 + 3}}, {});
}

TEST_F(DeepDecode, TakesRowsOfSeveralSequences) {
    for (const Shape& shape : kShapes)
        compare(shape, {{1, 63}, {0, 0}, {2, 2000}, {3, 3064}, {1, 5000}, {4, -1}, {2, 2001}, {2, 2002}, {0, 1000}},
                {});
}

// Drafts, and more rows than are computed together.
TEST_F(DeepDecode, SharesPagesAmongRowsOfASequence) {
    for (const Shape& shape : {kShapes[0], kShapes[5], kShapes[6]})
        for (const int32_t position : {6205, 6398})
            for (const int32_t rows : {2, 8, 21}) {
                std::vector<Row> batch = {{1, 400}};
                for (int32_t i = 0; i < rows; i++) batch.push_back({0, position + i});
                batch.push_back({2, 3000});
                compare(shape, batch, {});
            }
}

TEST_F(DeepDecode, FollowsRules) {
    for (const Shape& shape : {kShapes[0], kShapes[4], kShapes[6], kShapes[8]})
        for (const Rule& rule : std::vector<Rule>{
                 {{}, 0, true}, {{}, 3.0f}, {{2300, 0}}, {{4100, 0}, 5.0f, true}, {{0, 3000}, 0, true}, {{0, 2048}}})
            compare(shape, {{0, 6400}, {0, 6401}, {1, 2900}, {2, 6143}, {2, 6144}, {3, 8000}, {4, 7}}, rule);
}

// Rows that are computed together begin at different pages: some see no key of the first page of their segment.
TEST_F(DeepDecode, RowsOfASequenceBeginAtDifferentPages) {
    for (const Shape& shape : {kShapes[0], kShapes[5], kShapes[6]})
        for (int32_t page = 60; page < 64; page++)
            for (const Rule& rule : std::vector<Rule>{{{3800, 0}}, {{0, 64 * page}, 0, true}}) {
                const int32_t last = rule.reach.window > 0 ? 64 * page + 3799 : 64 * page;
                compare(shape, {{0, last - 2}, {0, last - 1}, {0, last}, {0, last + 1}, {1, 5000}}, rule);
            }
}

// More rows than one launch takes.
TEST_F(DeepDecode, TakesManyRows) {
    std::vector<Row> rows;
    for (int32_t i = 0; i < 130; i++) rows.push_back({i, 700 + i * 37 % 500});
    compare({KvType::BF16, 8, 2, 64}, rows, {}, 3);
}

// Both kernels use the same scratch in turn.
TEST_F(DeepDecode, LeavesTheScratchToTheOtherKernel) {
    const Shape shape = {KvType::BF16, 8, 2, 128};
    const std::vector<Row> rows = {{0, 6500}};
    Cache cache(shape, {6501}, 102, 5);
    const std::vector<float> q = randomFloats(8 * 128), expected = cache.attendOnCpu(q, rows, scaleOf(shape));
    const DeviceArray<float> deviceQ(q);
    DeviceRows on(rows, cache);
    const HeadShape heads = {shape.heads, shape.kvHeads, shape.headDim};
    const DecodeScratch scratch(1, heads);
    for (const bool deep : {true, false, true, true, false}) {
        const DeviceArray<float> out(q.size());
        on.batch.depth = deep ? BatchDepth{128, 102, 1} : BatchDepth{};
        const int64_t before = small().launches();
        attentionDecode(small(), deviceQ.get(), heads, {scaleOf(shape), {}}, on.batch, cache.onDevice(), scratch.get(),
                        {out.get(), {}, {}});
        EXPECT_EQ(small().launches() - before, deep ? 2 : 1);
        EXPECT_TRUE(sameBits(expected, out.read()));
    }
}

// With this number of rows and heads a row has 16 slots, and one text needs them several times.
TEST_F(DeepDecode, TakesRounds) {
    const Shape shape = {KvType::BF16, 16, 16, 64};
    for (const int32_t segments : {16, 17, 32, 33, 50}) {
        std::vector<Row> rows;
        for (int32_t i = 0; i < 64; i++) rows.push_back({i, i == 40 ? segments * 256 - 1 : i == 41 ? 4200 : 20 * i});
        compare(shape, rows, {{}, 0, true}, std::max(2, (segments + 15) / 16));
    }
}

// A block of the other kernel computes what is short or of an unknown length, and heads of other sizes.
TEST_F(DeepDecode, IsForManySegmentsOfUsualHeads) {
    const auto launchesOf = [&](const Shape& shape, const BatchDepth& depth) {
        Cache cache(shape, {6000}, 94, 5);
        const DeviceArray<float> q(randomFloats(static_cast<size_t>(shape.heads) * shape.headDim)), out(q.size());
        DeviceRows on({{0, 5999}}, cache);
        on.batch.depth = depth;
        const HeadShape heads = {shape.heads, shape.kvHeads, shape.headDim};
        const DecodeScratch scratch(1, heads);
        const int64_t before = small().launches();
        attentionDecode(small(), q.get(), heads, {scaleOf(shape), {}}, on.batch, cache.onDevice(), scratch.get(),
                        {out.get(), {}, {}});
        return small().launches() - before;
    };
    EXPECT_EQ(launchesOf({KvType::BF16, 8, 2, 64}, {128, 94, 1}), 2);
    EXPECT_EQ(launchesOf({KvType::BF16, 8, 2, 64}, {}), 1);
    EXPECT_EQ(launchesOf({KvType::BF16, 8, 2, 64}, {128, 20, 1}), 1);
    EXPECT_EQ(launchesOf({KvType::BF16, 8, 2, 96}, {128, 94, 1}), 1);
    // Drafts that take several turns: each warp would need two segments.
    EXPECT_EQ(launchesOf({KvType::BF16, 8, 1, 64}, {128, 94, 4}), 1);
}

// Scores of several hundred: whole segments weigh nothing, both before and after the largest score.
TEST_F(DeepDecode, CarriesTheMaximumOverSegments) {
    compare({KvType::F32, 4, 1, 64}, {{0, 9000}}, {}, 1, 60.0f);
    compare({KvType::BF16, 4, 4, 128}, {{0, 6000}}, {}, 1, 60.0f);
}

TEST_F(DeepDecode, QuantizesAsTheContractSays) {
    for (const Shape& shape : {kShapes[0], kShapes[3], kShapes[6]})
        for (const int32_t count : {1, 20}) {
            std::vector<Row> rows;
            for (int32_t i = 0; i < count; i++) rows.push_back({i, i == 0 ? 6500 : 400 + i * 37});
            const std::vector<int32_t> lengths = lengthsOf(rows);
            Cache cache(shape, lengths, depthOf(lengths).deepest, 5);
            const int64_t cols = int64_t{shape.heads} * shape.headDim;
            const std::vector<float> q = randomFloats(rows.size() * cols);
            const DeviceArray<float> deviceQ(q), expected(cache.attendOnCpu(q, rows, scaleOf(shape)));
            DeviceRows on(rows, cache);
            on.batch.depth = depthOf(lengths);
            const HeadShape heads = {shape.heads, shape.kvHeads, shape.headDim};
            const DecodeScratch scratch(count, heads);
            const DeviceArray<uint8_t> got(quantizedRowsBytes(count, cols)), wanted(got.size());
            const int64_t before = small().launches();
            attentionDecode(small(), deviceQ.get(), heads, {scaleOf(shape), {}}, on.batch, cache.onDevice(),
                            scratch.get(), {nullptr, rowsWithColumns(got, count, cols), {}});
            EXPECT_EQ(small().launches() - before, 2);
            convertRows(small(), expected.get(), count, cols, {nullptr, rowsWithColumns(wanted, count, cols), {}});
            EXPECT_EQ(wanted.read(), got.read()) << nameOf(shape) << ", rows " << count;
        }
}

// A captured call serves other lengths, up to the depth that it was captured for.
TEST_F(DeepDecode, ReplaysWithOtherPositions) {
    const Shape shape = {KvType::BF16, 8, 2, 128};
    Cache cache(shape, {7000, 4000}, 128, 5);
    const std::vector<std::vector<Row>> steps = {{{0, 5000}, {1, 3999}}, {{0, 0}, {1, 64}}, {{1, 3000}, {0, 6999}}};
    const std::vector<float> q = randomFloats(2 * 8 * 128);
    const DeviceArray<float> deviceQ(q), out(q.size());
    DeviceRows on(steps[0], cache);
    on.batch.depth = {128, 128, 1};
    const HeadShape heads = {shape.heads, shape.kvHeads, shape.headDim};
    const DecodeScratch scratch(2, heads);
    const auto call = [&] {
        attentionDecode(small(), deviceQ.get(), heads, {scaleOf(shape), {}}, on.batch, cache.onDevice(), scratch.get(),
                        {out.get(), {}, {}});
    };
    const int64_t before = small().launches();
    call();
    EXPECT_EQ(small().launches() - before, 2);
    const auto graph = small().capture(call);
    for (const std::vector<Row>& rows : steps) {
        small().upload(on.positions.get(), DeviceRows::positionsOf(rows).data(), 8);
        small().upload(on.sequences.get(), DeviceRows::sequencesOf(rows).data(), 8);
        small().replay(*graph);
        EXPECT_TRUE(sameBits(cache.attendOnCpu(q, rows, scaleOf(shape)), out.read()));
    }
}

}  // namespace
}  // namespace sharpi::cuda
