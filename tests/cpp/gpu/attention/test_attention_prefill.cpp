// Prefill's attention against sums in double precision. Everything that a query must not see is NaN, and so is all
// memory that no query sees. What lies before the first key that a call sees is given back.
#include "attention_test.h"

namespace sharpi::cuda {
namespace {

// A sequence's chunk in a prefill: the rows at positions [begin, end).
struct Chunk {
    int32_t sequence, begin, end;
};

// sinks: some below all scores, some among them, some far above.
struct Rule {
    AttentionReach reach = {};
    float softcap = 0;
    bool sinks = false;

    AttentionRule over(const Shape& shape, const float* deviceSinks) const {
        return {scaleOf(shape), reach, softcap, sinks ? deviceSinks : nullptr};
    }
    std::vector<float> sinksOf(int32_t heads) const {
        static constexpr float kSinks[] = {0.5f, 3.0f, -20.0f, 9.0f, 1.5f};
        std::vector<float> values;
        for (int32_t h = 0; sinks && h < heads; h++) values.push_back(kSinks[h % std::size(kSinks)]);
        return values;
    }
};

std::string nameOf(const Rule& rule) {
    return "window " + std::to_string(rule.reach.window) + ", chunk " + std::to_string(rule.reach.chunk) +
           ", softcap " + std::to_string(rule.softcap) + (rule.sinks ? ", sinks" : "");
}

AttentionReach window(int32_t tokens) { return {tokens, 0}; }
AttentionReach chunk(int32_t tokens) { return {0, tokens}; }

class Prefill : public GpuTest {
protected:
    // tolerance: the largest relative distance (by norm) of a row.
    void compare(const Shape& shape, const std::vector<Chunk>& chunks, bool split, double tolerance,
                 const Rule& rule = {}) {
        SCOPED_TRACE(nameOf(shape) + ", " + nameOf(rule));
        std::vector<int32_t> lengths(chunks.size()), begin, end;
        std::vector<Row> rows;
        for (const Chunk& chunk : chunks) {
            lengths[chunk.sequence] = chunk.end;
            for (int32_t p = chunk.begin; p < chunk.end; p += kQueryTile) {
                begin.push_back(static_cast<int32_t>(rows.size()));
                for (int32_t i = p; i < std::min(chunk.end, p + kQueryTile); i++) rows.push_back({chunk.sequence, i});
                end.push_back(static_cast<int32_t>(rows.size()));
            }
        }
        Cache cache(shape, lengths, *std::max_element(lengths.begin(), lengths.end()) / kPageTokens + 2, 23);
        for (const Chunk& chunk : chunks) cache.giveBack(chunk.sequence, rule.reach.first(chunk.begin));
        const size_t width = static_cast<size_t>(shape.heads) * shape.headDim,
                     outputs = rows.size() * shape.heads * shape.valueDim();
        std::vector<uint16_t> hi, lo;
        std::vector<double> exact;
        for (const float x : randomFloats(rows.size() * width)) {
            hi.push_back(toHalf(x));
            lo.push_back(toHalf(x - fromHalf(hi.back())));
            exact.push_back(split ? x : fromHalf(hi.back()));
        }
        const std::vector<float> sinks = rule.sinksOf(shape.heads);
        const DeviceArray<uint16_t> deviceHi(hi), deviceLo(lo), outHi(outputs), outLo(outputs);
        const DeviceArray<int32_t> tileBegin(begin), tileEnd(end);
        const DeviceArray<float> out(outputs), deviceSinks(sinks);
        const DeviceRows on(rows, cache);
        const RowOutputs to = {out.get(), {}, {outHi.get(), outLo.get()}};
        const AttentionRule deviceRule = rule.over(shape, deviceSinks.get());
        attentionPrefill(stream(), {deviceHi.get(), split ? deviceLo.get() : nullptr},
                         {shape.heads, shape.kvHeads, shape.headDim}, deviceRule, on.batch,
                         {tileBegin.get(), tileEnd.get(), static_cast<int64_t>(begin.size())}, cache.onDevice(), to);
        const std::vector<float> got = out.read();
        ASSERT_NO_FATAL_FAILURE(check(cache, shape, rows, exact, got, tolerance, deviceRule, sinks));
        const std::vector<uint16_t> gotHi = outHi.read(), gotLo = outLo.read();
        for (size_t i = 0; i < got.size(); i++) {
            ASSERT_EQ(gotHi[i], toHalf(got[i])) << i;
            ASSERT_EQ(gotLo[i], toHalf(got[i] - fromHalf(gotHi[i]))) << i;
        }
    }

    void check(const Cache& cache, const Shape& shape, const std::vector<Row>& rows, const std::vector<double>& q,
               const std::vector<float>& got, double tolerance, const AttentionRule& rule,
               const std::vector<float>& sinks) {
        double worst = 0;
        for (size_t t = 0; t < rows.size(); t++) {
            double distance = 0, norm = 0;
            for (int32_t h = 0; h < shape.heads; h++) {
                const size_t head = t * shape.heads + h, at = head * shape.valueDim();
                const std::vector<double> expected =
                    cache.attendExactly(q.data() + head * shape.headDim, rows[t], h, rule, sinks);
                for (int32_t d = 0; d < shape.valueDim(); d++) {
                    distance += (got[at + d] - expected[d]) * (got[at + d] - expected[d]);
                    norm += expected[d] * expected[d];
                }
            }
            const double relative = std::sqrt(distance / norm);
            ASSERT_LT(relative, tolerance) << "position " << rows[t].position;
            worst = std::max(worst, relative);
        }
        RecordProperty("worst", std::to_string(worst));
    }
};

// Queries, keys and values are exact, and products are summed in float. Only the weights are rounded, to the 8 bits of
// bf16: each by at most 2^-9, in random directions, against a sum of values that partly cancel.
constexpr double kBf16 = 5e-3;
// Factors keep 16 bits, and products of two low halves are left out. Both errors are about 2^-17, and scores about 1.
constexpr double kSplit = 4e-5;

const std::vector<Chunk> kChunks = {{0, 0, 150}, {1, 100, 101}, {2, 63, 129}, {3, 130, 230}, {4, 0, 1}};

TEST_F(Prefill, Bf16IsNearTheExactResult) {
    for (const Shape& shape : std::vector<Shape>{{KvType::BF16, 4, 2, 128},
                                                 {KvType::BF16, 2, 1, 64},
                                                 {KvType::BF16, 3, 3, 8},
                                                 {KvType::BF16, 4, 1, 16},
                                                 {KvType::BF16, 2, 2, 80},
                                                 {KvType::BF16, 2, 1, 256},
                                                 {KvType::BF16, 2, 2, 32},
                                                 {KvType::BF16, 1, 1, 192},
                                                 {KvType::BF16, 3, 1, 512},
                                                 {KvType::BF16, 2, 2, 320},
                                                 {KvType::BF16, 1, 1, 264}})
        ASSERT_NO_FATAL_FAILURE(compare(shape, kChunks, false, kBf16));
}

TEST_F(Prefill, SplitFormKeepsSixteenBits) {
    for (const KvType type : {KvType::F32, KvType::F16, KvType::BF16})
        for (const int32_t headDim : {8, 16, 32, 64, 72, 128, 256, 320, 512})
            ASSERT_NO_FATAL_FAILURE(compare({type, 4, 2, headDim}, kChunks, true, kSplit));
}

// A chunk after many cached pages, and tiles whose heights differ from the kernels'.
TEST_F(Prefill, ContinuesALongSequence) {
    compare({KvType::BF16, 2, 1, 128}, {{0, 1000, 1100}}, false, kBf16);
    compare({KvType::F32, 2, 1, 64}, {{0, 1017, 1040}}, true, kSplit);
    compare({KvType::BF16, 2, 1, 512}, {{0, 1000, 1100}}, false, kBf16);
}

TEST_F(Prefill, TakesGroupsOfAnySize) {
    for (const int32_t headDim : {64, 512})
        for (const int32_t group : {1, 2, 3, 5, 8, 15, 16, 32}) {
            ASSERT_NO_FATAL_FAILURE(compare({KvType::BF16, 2 * group, 2, headDim}, {{0, 40, 100}}, false, kBf16));
            ASSERT_NO_FATAL_FAILURE(
                compare({KvType::BF16, 2 * group, 2, headDim}, {{0, 40, 100}}, false, kBf16, {window(33), 0, true}));
        }
}

// Chunks of prompts that begin and end at, before and after borders of pages, windows and chunks of attention.
const std::vector<Chunk> kReachChunks = {{0, 0, 200},   {1, 63, 65},   {2, 64, 192}, {3, 127, 300},
                                         {4, 199, 330}, {5, 299, 301}, {6, 128, 129}};

TEST_F(Prefill, SeesOnlyTheWindow) {
    for (const int32_t tokens : {1, 2, 31, 63, 64, 65, 100, 127, 128, 129, 200, 1000})
        for (const int32_t headDim : {64, 128, 256, 512})
            ASSERT_NO_FATAL_FAILURE(
                compare({KvType::BF16, 2, 1, headDim}, kReachChunks, false, kBf16, {window(tokens)}));
}

TEST_F(Prefill, SeesOnlyTheChunk) {
    for (const int32_t tokens : {1, 33, 64, 100, 128, 192, 1000})
        for (const int32_t headDim : {64, 128, 256, 512})
            ASSERT_NO_FATAL_FAILURE(
                compare({KvType::BF16, 2, 1, headDim}, kReachChunks, false, kBf16, {chunk(tokens)}));
}

// Split form rounds far less, so that a key too many or too few is noticed in long windows too.
TEST_F(Prefill, SplitFormSeesOnlyItsReach) {
    for (const KvType type : {KvType::F32, KvType::F16, KvType::BF16})
        for (const int32_t headDim : {32, 64, 128, 256, 320, 512})
            for (const AttentionReach& reach : {window(65), window(100), chunk(100)})
                ASSERT_NO_FATAL_FAILURE(compare({type, 3, 1, headDim}, kReachChunks, true, kSplit, {reach, 0, true}));
}

TEST_F(Prefill, SinksJoinTheSum) {
    for (const int32_t headDim : {32, 64, 128, 256, 512})
        for (const AttentionReach& reach : {AttentionReach{}, window(128)})
            for (const int32_t heads : {5, 10}) {
                const Shape shape = {KvType::BF16, heads, 5, headDim};
                ASSERT_NO_FATAL_FAILURE(compare(shape, kChunks, false, kBf16, {reach, 0, true}));
                ASSERT_NO_FATAL_FAILURE(compare(shape, kChunks, true, kSplit, {reach, 0, true}));
            }
}

// Scores are about 1: a cap of 1 bends all of them, and one of 50 nearly none.
TEST_F(Prefill, SoftcapBoundsScores) {
    for (const float cap : {1.0f, 3.0f, 50.0f})
        for (const int32_t headDim : {64, 128, 256, 512}) {
            const Shape shape = {KvType::BF16, 2, 1, headDim};
            ASSERT_NO_FATAL_FAILURE(compare(shape, kChunks, false, kBf16, {{}, cap}));
            ASSERT_NO_FATAL_FAILURE(compare(shape, kChunks, true, kSplit, {{}, cap}));
            ASSERT_NO_FATAL_FAILURE(compare(shape, kChunks, true, kSplit, {window(70), cap, true}));
        }
}

// Sizes of models, then those of tiny ones, whose outputs end within a fragment of eight columns.
const std::vector<Shape> kLatents = {{KvType::BF16, 3, 1, 576, 512}, {KvType::BF16, 2, 1, 640, 512},
                                     {KvType::BF16, 5, 1, 48, 32},   {KvType::BF16, 2, 1, 32, 20},
                                     {KvType::BF16, 3, 1, 8, 4},     {KvType::BF16, 1, 1, 352, 256}};

TEST_F(Prefill, LatentsAreNearTheExactResult) {
    for (const Shape& shape : kLatents) {
        ASSERT_NO_FATAL_FAILURE(compare(shape, kChunks, false, kBf16));
        for (const KvType type : {KvType::F32, KvType::F16, KvType::BF16})
            ASSERT_NO_FATAL_FAILURE(compare({type, 2, 1, shape.headDim, shape.valuePrefix}, kChunks, true, kSplit));
    }
}

TEST_F(Prefill, LatentsTakeEveryRule) {
    for (const Shape& shape : {kLatents[0], kLatents[3]}) {
        ASSERT_NO_FATAL_FAILURE(compare(shape, {{0, 1000, 1100}}, false, kBf16));
        ASSERT_NO_FATAL_FAILURE(compare(shape, kReachChunks, false, kBf16, {window(100)}));
        ASSERT_NO_FATAL_FAILURE(compare(shape, kReachChunks, true, kSplit, {chunk(100), 3.0f, true}));
    }
}

}  // namespace
}  // namespace sharpi::cuda
