// Attention of many rows of a sequence, bit for bit against the CPU's kernel. What no row sees is NaN, and whole pages
// of it are given back.
#include "attention_test.h"
#include "column_test.h"

namespace sharpi::cuda {
namespace {

struct Rule {
    AttentionReach reach = {};
    float softcap = 0;
    bool sinks = false;
};

// Neighbouring rows of a sequence.
struct Stretch {
    int32_t sequence, begin, end;  // positions
};

class ManyRows : public GpuTest {
protected:
    // Of a device that is said to have the shared memory of compute capability 8.6 and 8.9: blocks are smaller.
    Stream& little() {
        if (!_little) {
            DeviceInfo device = stream().device();
            device.sharedPerBlock = std::min<size_t>(device.sharedPerBlock, 99 << 10);
            _little = std::make_unique<Stream>(device);
        }
        return *_little;
    }

    // A call and what it needs. `idle` rows that belong to no tile come first.
    struct Problem {
        Shape shape;
        Rule rule;
        std::vector<Row> rows;
        std::vector<int32_t> begin, end, lengths;

        Problem(const Shape& of, const std::vector<Stretch>& runs, const Rule& by, int32_t idle = 0)
            : shape(of), rule(by) {
            for (int32_t i = 0; i < idle; i++) rows.push_back({runs[0].sequence, runs[0].begin});
            for (const Stretch& run : runs) {
                const auto needed = static_cast<size_t>(run.sequence) + 1;
                if (lengths.size() < needed) lengths.resize(needed, 0);
                lengths[run.sequence] = std::max(lengths[run.sequence], run.end);
                for (int32_t at = run.begin; at < run.end; at += kManyRowsTile) {
                    begin.push_back(static_cast<int32_t>(rows.size()));
                    for (int32_t t = at; t < std::min<int32_t>(run.end, at + kManyRowsTile); t++)
                        rows.push_back({run.sequence, t});
                    end.push_back(static_cast<int32_t>(rows.size()));
                }
            }
        }
        HeadShape heads() const { return {shape.heads, shape.kvHeads, shape.headDim}; }
        int64_t width() const { return int64_t{shape.heads} * shape.headDim; }
        AttentionRule with(const float* sinks) const {
            return {scaleOf(shape), rule.reach, rule.softcap, rule.sinks ? sinks : nullptr};
        }
        Cache cache() const {
            Cache cache(shape, lengths, (*std::max_element(lengths.begin(), lengths.end()) + 63) / 64, 11);
            std::vector<int32_t> first(lengths);
            for (const Row& row : rows)
                first[row.sequence] = std::min(first[row.sequence], rule.reach.first(row.position));
            for (size_t s = 0; s < lengths.size(); s++)
                if (first[s] > 0) cache.giveBack(static_cast<int32_t>(s), first[s]);
            return cache;
        }
    };

    // sums: nullptr: an array of their own.
    void attend(Stream& on, const Problem& problem, const Cache& cache, const float* q, const float* sinks,
                const RowOutputs& out, float* sums = nullptr) {
        const DeviceRows rows(problem.rows, cache);
        const DeviceArray<int32_t> begin(problem.begin), end(problem.end);
        const DeviceArray<float> own(problem.rows.size() * problem.width());
        attentionManyRows(on, q, problem.heads(), problem.with(sinks), rows.batch,
                          {begin.get(), end.get(), static_cast<int64_t>(problem.begin.size())}, cache.onDevice(),
                          sums ? sums : own.get(), out);
        require(cudaDeviceSynchronize());
    }

    void compare(const Shape& shape, const std::vector<Stretch>& runs, const Rule& rule = {}, float queryScale = 1.0f) {
        SCOPED_TRACE(nameOf(shape) + ", window " + std::to_string(rule.reach.window) + ", chunk " +
                     std::to_string(rule.reach.chunk) + ", rows " + std::to_string(runs[0].begin) + " to " +
                     std::to_string(runs[0].end));
        const Problem problem(shape, runs, rule);
        Cache cache = problem.cache();
        const std::vector<float> q = randomFloats(problem.rows.size() * problem.width(), queryScale),
                                 sinks = randomFloats(shape.heads);
        const std::vector<float> expected = cache.attendOnCpu(q, problem.rows, problem.with(sinks.data()));
        for (Stream* on : {&stream(), &little()}) {
            const DeviceArray<float> deviceQ(q), deviceSinks(sinks), out(q.size());
            attend(*on, problem, cache, deviceQ.get(), deviceSinks.get(), {out.get(), {}, {}}, out.get());
            EXPECT_TRUE(sameBits(expected, out.read())) << on->device().sharedPerBlock;
        }
    }

private:
    std::unique_ptr<Stream> _little;
};

// Heads that fill a kernel's dimensions and such that do not, in groups that fill a block and such that do not.
const std::vector<Shape> kShapes = {
    {KvType::BF16, 8, 2, 128}, {KvType::F16, 3, 3, 128}, {KvType::F32, 5, 1, 128},  {KvType::BF16, 3, 3, 64},
    {KvType::F16, 16, 2, 64},  {KvType::F32, 4, 1, 64},  {KvType::BF16, 6, 2, 256}, {KvType::F16, 2, 2, 256},
    {KvType::F32, 7, 1, 256},  {KvType::BF16, 4, 2, 16}, {KvType::F16, 6, 2, 80},   {KvType::F32, 2, 1, 136},
    {KvType::BF16, 4, 2, 32},  {KvType::F16, 6, 2, 96},  {KvType::BF16, 4, 2, 192},
};

// Rows around the borders of tiles, of pages and of segments.
TEST_F(ManyRows, HaveTheBitsOfTheCpu) {
    for (const Shape& shape : kShapes) {
        for (const Stretch& run :
             std::vector<Stretch>{{0, 0, 1}, {0, 0, 64}, {0, 0, 65}, {0, 0, 129}, {0, 63, 130}, {0, 200, 300}})
            compare(shape, {run});
        compare(shape, {{0, 490, 530}});
    }
}

TEST_F(ManyRows, TakeSeveralSequences) {
    for (const Shape& shape : kShapes) compare(shape, {{2, 0, 40}, {0, 130, 135}, {1, 60, 190}, {3, 0, 1}});
}

TEST_F(ManyRows, FollowRules) {
    for (const Shape& shape : {kShapes[0], kShapes[4], kShapes[8], kShapes[10]})
        for (const Rule& rule : std::vector<Rule>{{{}, 0, true},
                                                  {{}, 3.0f},
                                                  {{1, 0}},
                                                  {{33, 0}},
                                                  {{64, 0}},
                                                  {{100, 0}, 5.0f, true},
                                                  {{0, 64}},
                                                  {{0, 100}, 0, true},
                                                  {{0, 256}}})
            compare(shape, {{0, 180, 330}, {1, 0, 70}, {2, 255, 258}}, rule);
}

// Many segments, whose first ones some rows do not see.
TEST_F(ManyRows, JoinSegments) {
    for (const Shape& shape : {kShapes[0], kShapes[3], kShapes[6]}) {
        compare(shape, {{0, 1275, 1300}});
        for (int32_t page = 16; page < 20; page++) compare(shape, {{0, 64 * page - 3, 64 * page + 4}}, {{800, 0}});
    }
}

// Scores of several hundred: whole pages and segments weigh nothing, both before and after the largest score.
TEST_F(ManyRows, CarryTheMaximum) {
    compare({KvType::F32, 4, 1, 64}, {{0, 690, 720}}, {}, 60.0f);
    compare({KvType::BF16, 4, 4, 128}, {{0, 1100, 1120}}, {}, 60.0f);
}

// Also for rows that are none of the first: those outside the tiles stay as they are.
TEST_F(ManyRows, QuantizeAsTheContractSays) {
    constexpr int32_t kIdle = 37;
    for (const Shape& shape : {kShapes[0], kShapes[3], kShapes[8]}) {
        const Problem problem(shape, {{0, 30, 130}, {1, 0, 40}}, {}, kIdle);
        Cache cache = problem.cache();
        const auto count = static_cast<int64_t>(problem.rows.size());
        const std::vector<float> q = randomFloats(count * problem.width());
        const DeviceArray<float> deviceQ(q), expected(cache.attendOnCpu(q, problem.rows, problem.with(nullptr))),
            floats(q.size());
        const DeviceArray<uint8_t> got(quantizedRowsBytes(count, problem.width())), wanted(got.size());
        const auto outputs = [&](const DeviceArray<uint8_t>& at, float* to) {
            return RowOutputs{to, rowsWithColumns(at, count, problem.width()), {}};
        };
        attend(stream(), problem, cache, deviceQ.get(), nullptr, outputs(got, floats.get()));
        const RowOutputs to = outputs(wanted, nullptr);
        convertRows(stream(), expected.get() + kIdle * problem.width(), count - kIdle, problem.width(),
                    rowsFrom(to, kIdle, problem.width()));
        EXPECT_EQ(wanted.read(), got.read()) << nameOf(shape);
        std::vector<float> all = expected.read(), poison(kIdle * problem.width());
        std::memset(poison.data(), 0xff, poison.size() * sizeof(float));
        std::copy(poison.begin(), poison.end(), all.begin());
        EXPECT_TRUE(sameBits(all, floats.read())) << nameOf(shape);
    }
}

TEST_F(ManyRows, AreForHeadsThatFit) {
    DeviceInfo device = stream().device();
    const auto has = [&](int32_t headDim, int32_t valuePrefix = 0) {
        KvPages pages;
        pages.valuePrefix = valuePrefix;
        return manyRowsPay(device, {8, 2, headDim}, pages, 1000, 100000);
    };
    for (const int32_t headDim : {16, 64, 80, 128, 136, 256}) EXPECT_TRUE(has(headDim)) << headDim;
    for (const int32_t headDim : {8, 72, 264, 512}) EXPECT_FALSE(has(headDim)) << headDim;
    EXPECT_FALSE(has(64, 32));
    device.sharedPerBlock = 99 << 10;  // of compute capability 8.6 and 8.9
    EXPECT_TRUE(has(64) && has(128) && has(256));
    device.sharedPerBlock = 64 << 10;
    EXPECT_FALSE(has(64) || has(128) || has(256));
    const Problem problem({KvType::F32, 2, 2, 24}, {{0, 0, 4}}, {});
    const Cache cache = problem.cache();
    const DeviceArray<float> q(problem.rows.size() * problem.width()), out(q.size());
    EXPECT_THROW(attend(stream(), problem, cache, q.get(), nullptr, {out.get(), {}, {}}), Error);
}

// A block for every second multiprocessor: of 128 queries, or of 64 if there is little shared memory.
TEST_F(ManyRows, PayIfTheyFillTheDevice) {
    DeviceInfo device = stream().device();
    const auto fewest = [&](int multiprocessors, size_t sharedPerBlock) {
        device.multiprocessors = multiprocessors, device.sharedPerBlock = sharedPerBlock;
        int64_t rows = 1;
        while (rows < 10000 && !manyRowsPay(device, {32, 8, 128}, {}, (rows + 127) / 128, rows)) ++rows;
        return rows;
    };
    EXPECT_EQ(fewest(132, 227 << 10), 264);
    EXPECT_EQ(fewest(60, 99 << 10), 60);
    EXPECT_EQ(fewest(60, 64 << 10), 10000);
}

// Tiles of 32 rows and a single head fill a quarter of a block.
TEST_F(ManyRows, DoNotPayInTilesThatAreMostlyEmpty) {
    DeviceInfo device = stream().device();
    device.multiprocessors = 132, device.sharedPerBlock = 227 << 10;
    EXPECT_FALSE(manyRowsPay(device, {32, 32, 128}, {}, 64, 64 * 32));
    EXPECT_TRUE(manyRowsPay(device, {32, 32, 128}, {}, 64, 64 * 64));
    EXPECT_TRUE(manyRowsPay(device, {32, 8, 128}, {}, 64, 64 * 32));
}

}  // namespace
}  // namespace sharpi::cuda
