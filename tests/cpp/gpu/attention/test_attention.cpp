// Decode's attention bit for bit against the CPU's kernel.
// Everything that a query must not see is NaN, and so is all memory that no query sees.
#include <limits>

#include "attention_test.h"
#include "column_test.h"

namespace sharpi::cuda {
namespace {

class Decode : public GpuTest {
protected:
    void compare(const Shape& shape, const std::vector<Row>& rows, int64_t pagesPerTable, float queryScale = 1.0f) {
        compareOn(stream(), shape, rows, pagesPerTable, queryScale);
    }
    void compareOn(Stream& stream, const Shape& shape, const std::vector<Row>& rows, int64_t pagesPerTable,
                   float queryScale = 1.0f) {
        std::vector<int32_t> lengths;
        for (const Row& row : rows) {
            if (row.sequence >= static_cast<int32_t>(lengths.size())) lengths.resize(row.sequence + 1, 0);
            lengths[row.sequence] = std::max(lengths[row.sequence], row.position + 1);
        }
        Cache cache(shape, lengths, pagesPerTable, 11);
        const size_t width = static_cast<size_t>(shape.heads) * shape.headDim;
        const std::vector<float> q = randomFloats(rows.size() * width, queryScale);
        const DeviceArray<float> deviceQ(q);
        const DeviceRows on(rows, cache);
        const HeadShape heads = {shape.heads, shape.kvHeads, shape.headDim};
        const DecodeScratch scratch(on.batch.rows, heads);
        const DeviceArray<float> out(q.size());
        RowOutputs outputs;
        outputs.floats = out.get();
        attentionDecode(stream, deviceQ.get(), heads, {scaleOf(shape), {}}, on.batch, cache.onDevice(), scratch.get(),
                        outputs);
        EXPECT_TRUE(sameBits(cache.attendOnCpu(q, rows, scaleOf(shape)), out.read())) << nameOf(shape);
        EXPECT_TRUE(scratch.isReady()) << nameOf(shape);
    }
};

const std::vector<Shape> kShapes = {
    {KvType::BF16, 8, 2, 128},  {KvType::F16, 8, 2, 128}, {KvType::F32, 8, 2, 128},   {KvType::BF16, 3, 3, 64},
    {KvType::F32, 2, 2, 8},     {KvType::BF16, 4, 2, 16}, {KvType::F16, 6, 2, 80},    {KvType::F32, 5, 1, 96},
    {KvType::BF16, 16, 1, 128}, {KvType::F32, 7, 1, 256}, {KvType::BF16, 16, 2, 256}, {KvType::F16, 12, 4, 256},
    {KvType::BF16, 10, 2, 72},  {KvType::F32, 16, 1, 32}, {KvType::F16, 2, 1, 8},
};

// Positions around every border of a page and of the two halves of its 64 keys.
TEST_F(Decode, HasTheBitsOfTheCpu) {
    for (const Shape& shape : kShapes) {
        for (const int32_t position : {0, 1, 30, 31, 32, 62, 63, 64, 65, 127, 128, 300})
            compare(shape, {{0, position}}, 8);
    }
}

TEST_F(Decode, TakesRowsOfSeveralSequences) {
    for (const Shape& shape : kShapes) {
        compare(shape, {{1, 63}, {0, 0}, {2, 200}, {3, 64}, {1, 5}, {2, 201}, {2, 202}, {0, 100}}, 5);
        compare(shape, {{0, 90}, {1, 130}, {2, 12}}, 3);
    }
}

// Each row has its own sequence and length. The last are more than one launch takes.
TEST_F(Decode, TakesManyRows) {
    for (const Shape& shape :
         std::vector<Shape>{{KvType::BF16, 8, 2, 128}, {KvType::F16, 3, 3, 64}, {KvType::F32, 2, 1, 8}})
        for (const int32_t rows : {1, 2, 9, 17, 31, 32, 33, 63, 64, 65, 130}) {
            std::vector<Row> batch;
            for (int32_t i = 0; i < rows; i++) batch.push_back({i, i * 37 % 700 + (i % 5 ? 0 : 300)});
            compare(shape, batch, 16);
        }
}

// Parts of four heads, of eight, or all of a group, by how many pages there are for how many blocks.
TEST_F(Decode, DividesLargeGroups) {
    for (const int processors : {132, 20, 8, 3, 1}) {
        DeviceInfo device = stream().device();
        device.multiprocessors = processors;
        Stream on(device);
        SCOPED_TRACE(std::to_string(processors) + " processors");
        for (const Shape& shape : std::vector<Shape>{{KvType::BF16, 32, 2, 128},
                                                     {KvType::F16, 13, 1, 128},
                                                     {KvType::F32, 7, 1, 64},
                                                     {KvType::BF16, 22, 2, 72},
                                                     {KvType::BF16, 16, 1, 256}}) {
            for (const int32_t position : {0, 40, 63, 299, 700}) compareOn(on, shape, {{0, position}}, 12);
            for (const int32_t position : {1100, 3000}) compareOn(on, shape, {{0, position}}, 48);
            compareOn(on, shape, {{0, 299}, {1, 3}, {2, 130}}, 12);
            compareOn(on, shape, {{0, 2998}, {0, 2999}, {0, 3000}}, 48);
            compareOn(on, shape, {{0, 299}, {0, 300}, {1, 3000}, {0, 301}}, 48);
        }
    }
}

// Neighbouring rows of a sequence share its pages: drafts, around the borders of pages and segments, and more rows than
// are computed together. The sequence before and after is another.
TEST_F(Decode, SharesPagesAmongRowsOfASequence) {
    for (const Shape& shape : kShapes)
        for (const int32_t position : {0, 61, 190, 254, 1021, 1500})
            for (const int32_t rows : {2, 5, 8, 21}) {
                std::vector<Row> batch = {{1, 40}};
                for (int32_t i = 0; i < rows; i++) batch.push_back({0, position + i});
                batch.push_back({2, 700});
                compare(shape, batch, 24);
            }
    compare({KvType::BF16, 8, 2, 64}, {{0, 900}, {0, 100}, {0, 901}, {0, 3}, {0, 902}, {0, 1400}}, 24);
}

// With this number of rows and heads the ring of results has the fewest slots, and the cache has more segments.
TEST_F(Decode, UsesSlotsAgain) {
    const Shape shape = {KvType::BF16, 16, 16, 8};
    for (const int32_t segments : {8, 9, 16, 17, 40}) {
        std::vector<Row> batch;
        for (int32_t i = 0; i < 64; i++) batch.push_back({i / 32, segments * 256 - 33 + i % 32});
        compare(shape, batch, segments * 4);
    }
}

// One row alone has the most slots; it needs more batches than one from here on.
TEST_F(Decode, JoinsManyBatches) {
    for (const int32_t pages : {256, 257, 520, 4 * 1024 + 300})
        compare({KvType::BF16, 4, 2, 8}, {{0, pages * 64 - 7}}, pages);
    // Heads that a warp joins in two rounds, in three batches.
    compare({KvType::BF16, 4, 2, 512}, {{0, 600 * 64 - 7}}, 600);
}

// More pages than lanes, and not a multiple of 32. Once few enough to be cut at pages, and once more.
TEST_F(Decode, JoinsManyPages) {
    const int32_t most = 2 * stream().device().multiprocessors;
    for (const int32_t pages : {31, 32, 33, 100, most, most + 1, most + 35})
        compare({KvType::BF16, 2, 1, 16}, {{0, pages * 64 - 5}}, pages);
    for (const int32_t pages : {most / 8 + 1, most / 4, most})
        compare({KvType::F16, 4, 2, 72}, {{0, pages * 64 - 1}, {1, 40}, {0, pages * 16}}, pages);
    compare({KvType::BF16, 8, 2, 128}, {{0, 32 * 64 - 1}, {1, 32 * 64}, {2, 71 * 64 + 7}}, 80);
    compare({KvType::F32, 2, 1, 64}, {{0, 4000}}, 64);
}

// Scores of several hundred: whole pages weigh nothing, both before and after the largest score.
TEST_F(Decode, CarriesTheMaximumOverPages) {
    compare({KvType::F32, 4, 1, 64}, {{0, 700}, {1, 64}}, 16, 60.0f);
    compare({KvType::BF16, 4, 4, 128}, {{0, 3000}}, 64, 60.0f);
}

// A captured call serves other lengths, pages and sequences.
TEST_F(Decode, ReplaysWithOtherPositions) {
    const Shape shape = {KvType::BF16, 8, 2, 128};
    Cache cache(shape, {600, 300}, 10, 5);
    const std::vector<std::vector<Row>> steps = {{{0, 0}, {1, 63}}, {{0, 599}, {1, 64}}, {{1, 299}, {0, 128}}};
    const std::vector<float> q = randomFloats(2 * 8 * 128);
    const DeviceArray<float> deviceQ(q), out(q.size());
    const DeviceRows on(steps[0], cache);
    const HeadShape heads = {shape.heads, shape.kvHeads, shape.headDim};
    const DecodeScratch scratch(2, heads);
    RowOutputs outputs;
    outputs.floats = out.get();
    const auto call = [&] {
        attentionDecode(stream(), deviceQ.get(), heads, {scaleOf(shape), {}}, on.batch, cache.onDevice(), scratch.get(),
                        outputs);
    };
    call();
    const auto graph = stream().capture(call);
    for (const std::vector<Row>& rows : steps) {
        stream().upload(on.positions.get(), DeviceRows::positionsOf(rows).data(), 8);
        stream().upload(on.sequences.get(), DeviceRows::sequencesOf(rows).data(), 8);
        stream().replay(*graph);
        EXPECT_TRUE(sameBits(cache.attendOnCpu(q, rows, scaleOf(shape)), out.read()));
    }
}

TEST_F(Decode, QuantizesAsTheContractSays) {
    const Shape shape = {KvType::BF16, 6, 2, 96};
    const std::vector<Row> rows = {{0, 70}, {1, 3}, {0, 71}};
    Cache cache(shape, {72, 4}, 2, 5);
    const int64_t cols = 6 * 96, blocks = cols / 32;
    const std::vector<float> q = randomFloats(rows.size() * cols);
    const DeviceArray<float> deviceQ(q);
    const DeviceRows on(rows, cache);
    const HeadShape heads = {shape.heads, shape.kvHeads, shape.headDim};
    const DecodeScratch scratch(3, heads);
    const DeviceArray<int8_t> codes(3 * cols);
    const DeviceArray<float> scales(3 * blocks);
    const DeviceArray<int32_t> sums(3 * blocks);
    RowOutputs outputs;
    outputs.quantized = {codes.get(), scales.get(), sums.get()};
    attentionDecode(stream(), deviceQ.get(), heads, {scaleOf(shape), {}}, on.batch, cache.onDevice(), scratch.get(),
                    outputs);

    const std::vector<float> expected = cache.attendOnCpu(q, rows, scaleOf(shape));
    const std::vector<int8_t> gotCodes = codes.read();
    const std::vector<float> gotScales = scales.read();
    const std::vector<int32_t> gotSums = sums.read();
    for (size_t t = 0; t < rows.size(); t++) {
        std::vector<int8_t> rowCodes(cols + 256);
        std::vector<float> rowScales(blocks + 8);
        std::vector<int16_t> rowSums(2 * blocks + 16);
        cpu::kernels().quantizeRow(expected.data() + t * cols, cols, rowCodes.data(), rowScales.data(), rowSums.data());
        for (int64_t i = 0; i < cols; i++) {
            const int64_t at = (t * 2 + i % 32 / 16) * blocks * 16 + i / 32 * 16 + i % 16;
            ASSERT_EQ(gotCodes[at], rowCodes[i]) << "row " << t << ", element " << i;
        }
        for (int64_t b = 0; b < blocks; b++) {
            ASSERT_EQ(gotScales[t * blocks + b], rowScales[b]);
            const auto packed = static_cast<uint32_t>(gotSums[t * blocks + b]);
            ASSERT_EQ(static_cast<int16_t>(packed & 0xffff), rowSums[2 * b]);
            ASSERT_EQ(static_cast<int16_t>(packed >> 16), rowSums[2 * b + 1]);
        }
    }
}

// Against convertRows of the CPU's floats.
TEST_F(Decode, WritesColumnsWithManyRows) {
    const Shape shape = {KvType::BF16, 6, 2, 96};
    for (const int32_t count : {17, 33, 64}) {
        std::vector<Row> rows;
        for (int32_t i = 0; i < count; i++) rows.push_back({i % 3, i * 37 % 150});
        Cache cache(shape, {150, 150, 150}, 3, 5);
        const int64_t cols = 6 * 96;
        const std::vector<float> q = randomFloats(rows.size() * cols);
        const DeviceArray<float> deviceQ(q), expected(cache.attendOnCpu(q, rows, scaleOf(shape)));
        const DeviceRows on(rows, cache);
        const HeadShape heads = {shape.heads, shape.kvHeads, shape.headDim};
        const DecodeScratch scratch(count, heads);
        const DeviceArray<uint8_t> got(quantizedRowsBytes(count, cols)), wanted(got.size());
        attentionDecode(stream(), deviceQ.get(), heads, {scaleOf(shape), {}}, on.batch, cache.onDevice(), scratch.get(),
                        {nullptr, rowsWithColumns(got, count, cols), {}});
        convertRows(stream(), expected.get(), count, cols, {nullptr, rowsWithColumns(wanted, count, cols), {}});
        EXPECT_EQ(wanted.read(), got.read()) << count;
    }
}

}  // namespace
}  // namespace sharpi::cuda
