// Decode's attention with windows, chunks, sinks, softcaps and wide heads, bit for bit against the CPU's kernel.
#include "attention_test.h"

namespace sharpi::cuda {
namespace {

struct Rule {
    AttentionReach reach;
    float softcap = 0;
    bool sinks = false;
};

std::string nameOf(const Rule& r) {
    return "window " + std::to_string(r.reach.window) + ", chunk " + std::to_string(r.reach.chunk) + ", softcap " +
           std::to_string(r.softcap) + (r.sinks ? ", sinks" : "");
}

class DecodeRules : public GpuTest {
protected:
    // What no row sees is NaN, and whole pages of it are given back.
    void compare(const Shape& shape, const std::vector<Row>& rows, int64_t pagesPerTable, const Rule& rule) {
        std::vector<int32_t> lengths, first;
        for (const Row& row : rows) {
            if (row.sequence >= static_cast<int32_t>(lengths.size()))
                lengths.resize(row.sequence + 1, 0), first.resize(row.sequence + 1, row.position);
            lengths[row.sequence] = std::max(lengths[row.sequence], row.position + 1);
            first[row.sequence] = std::min(first[row.sequence], rule.reach.first(row.position));
        }
        Cache cache(shape, lengths, pagesPerTable, 11);
        for (size_t s = 0; s < lengths.size(); s++)
            if (first[s] > 0) cache.giveBack(static_cast<int32_t>(s), first[s]);
        const size_t width = static_cast<size_t>(shape.heads) * shape.headDim;
        const std::vector<float> q = randomFloats(rows.size() * width), sinks = randomFloats(shape.heads);
        const DeviceArray<float> deviceQ(q), deviceSinks(sinks), out(q.size());
        const DeviceRows on(rows, cache);
        const HeadShape heads = {shape.heads, shape.kvHeads, shape.headDim};
        const DecodeScratch scratch(on.batch.rows, heads);
        const auto with = [&](const float* sinksAt) {
            return AttentionRule{scaleOf(shape), rule.reach, rule.softcap, rule.sinks ? sinksAt : nullptr};
        };
        attentionDecode(stream(), deviceQ.get(), heads, with(deviceSinks.get()), on.batch, cache.onDevice(),
                        scratch.get(), {out.get(), {}, {}});
        EXPECT_TRUE(sameBits(cache.attendOnCpu(q, rows, with(sinks.data())), out.read()))
            << sharpi::cuda::nameOf(shape) << ", " << nameOf(rule);
        EXPECT_TRUE(scratch.isReady());
    }
};

const std::vector<Shape> kShapes = {
    {KvType::BF16, 8, 2, 128}, {KvType::F16, 8, 1, 64},   {KvType::F32, 3, 3, 96},
    {KvType::BF16, 4, 2, 16},  {KvType::BF16, 4, 1, 256}, {KvType::BF16, 8, 1, 512},
    {KvType::F16, 2, 2, 504},  {KvType::F32, 4, 2, 512},  {KvType::F32, 2, 1, 264},
};

// Positions around every border of a page and of the two halves of its 64 keys.
const std::vector<Row> kRows = {{0, 511}, {1, 64}, {2, 63}, {0, 300}, {1, 127}, {2, 0}, {3, 200}, {0, 95}, {0, 32}};

TEST_F(DecodeRules, WindowsHaveTheBitsOfTheCpu) {
    for (const Shape& shape : kShapes)
        for (const int32_t window : {1, 2, 31, 32, 33, 63, 64, 65, 66, 127, 128, 129, 250, 1000}) {
            compare(shape, kRows, 8, {{window, 0}});
            compare(shape, {{0, 500}, {1, 447}}, 8, {{window, 0}});
        }
}

TEST_F(DecodeRules, ChunksHaveTheBitsOfTheCpu) {
    for (const Shape& shape : kShapes)
        for (const int32_t chunk : {1, 2, 33, 64, 100, 128, 256, 1000}) {
            compare(shape, kRows, 8, {{0, chunk}});
            compare(shape, {{0, 500}, {1, 447}}, 8, {{0, chunk}});
        }
}

TEST_F(DecodeRules, SinksAndSoftcapsHaveTheBitsOfTheCpu) {
    for (const Shape& shape : kShapes) {
        for (const Rule& rule : std::vector<Rule>{
                 {}, {{}, 0, true}, {{}, 0.8f}, {{}, 30.0f, true}, {{70, 0}, 0.8f, true}, {{0, 150}, 3.0f, true}})
            compare(shape, kRows, 8, rule);
    }
}

// One row alone is cut at pages. The first page that it sees is any of its segment's four.
TEST_F(DecodeRules, SegmentsBeginAtAbsolutePages) {
    for (const Rule& rule : std::vector<Rule>{{{500, 0}}, {{500, 0}, 2.0f, true}, {{0, 64 * 5}}})
        for (int32_t position = 1000; position < 1000 + 64 * 5; position += 64)
            compare({KvType::BF16, 4, 2, 64}, {{0, position}}, 40, rule);
}

// More pages than lanes. Once few enough to be cut at pages, and once more.
TEST_F(DecodeRules, JoinsManyPages) {
    const int32_t most = 2 * stream().device().multiprocessors;
    for (const int32_t pages : {31, 32, 33, 100, most, most + 1, most + 35})
        for (int32_t before = 1; before < 5; before++)
            compare({KvType::BF16, 2, 1, 16}, {{0, (pages + before) * 64 - 5}}, pages + 8,
                    {{pages * 64 - 20, 0}, 0, true});
    compare({KvType::F32, 2, 1, 512}, {{0, 4000}}, 64, {{3000, 0}, 5.0f, true});
    compare({KvType::BF16, 8, 1, 512}, {{0, 4000}, {1, 130}}, 64, {});
}

TEST_F(DecodeRules, GroupsMayBeLarge) {
    for (const Shape& shape : std::vector<Shape>{{KvType::BF16, 64, 1, 128},
                                                 {KvType::F32, 64, 1, 256},
                                                 {KvType::BF16, 71, 1, 64},
                                                 {KvType::BF16, 32, 1, 512}})
        for (const Rule& rule : std::vector<Rule>{{}, {{100, 0}, 0, true}})
            compare(shape, {{0, 300}, {1, 70}}, 6, rule);
}

// A captured call serves other positions, whose pages begin elsewhere.
TEST_F(DecodeRules, ReplaysWithOtherPositions) {
    const Shape shape = {KvType::BF16, 8, 2, 128};
    const AttentionReach reach = {150, 0};
    const std::vector<std::vector<Row>> steps = {{{0, 0}, {1, 63}}, {{0, 599}, {1, 213}}, {{1, 299}, {0, 400}}};
    const std::vector<float> q = randomFloats(2 * 8 * 128);
    Cache cache(shape, {600, 300}, 10, 5);
    const DeviceArray<float> deviceQ(q), out(q.size());
    const DeviceRows on(steps[0], cache);
    const HeadShape heads = {shape.heads, shape.kvHeads, shape.headDim};
    const DecodeScratch scratch(2, heads);
    const AttentionRule rule = {scaleOf(shape), reach};
    const auto call = [&] {
        attentionDecode(stream(), deviceQ.get(), heads, rule, on.batch, cache.onDevice(), scratch.get(),
                        {out.get(), {}, {}});
    };
    call();
    const auto graph = stream().capture(call);
    for (const std::vector<Row>& rows : steps) {
        stream().upload(on.positions.get(), DeviceRows::positionsOf(rows).data(), 8);
        stream().upload(on.sequences.get(), DeviceRows::sequencesOf(rows).data(), 8);
        stream().replay(*graph);
        EXPECT_TRUE(sameBits(cache.attendOnCpu(q, rows, rule), out.read()));
    }
}

}  // namespace
}  // namespace sharpi::cuda
