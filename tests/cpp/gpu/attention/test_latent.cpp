// What latent attention does between its products, bit for bit against the CPU's kernels: pieces of rows, the rest of
// queries and the cache's row, and attention whose values are the beginnings of keys.
#include "attention_test.h"
#include "kernels/heads/latent.h"

namespace sharpi::cuda {
namespace {

struct Case {
    KvType type;
    LatentShape shape;
    bool adjacent = true, scaled = false;
};

std::string nameOf(const Case& c) {
    return "type " + std::to_string(static_cast<int>(c.type)) + ", heads " + std::to_string(c.shape.heads) + ", rank " +
           std::to_string(c.shape.rank) + " + " + std::to_string(c.shape.rotated) + ", plain " +
           std::to_string(c.shape.plainDim) + (c.adjacent ? ", adjacent" : ", halves") + (c.scaled ? ", scaled" : "");
}

// Sizes of models, then those of tiny ones.
const std::vector<Case> kCases = {
    {KvType::BF16, {20, 512, 64, 192}}, {KvType::F16, {16, 512, 64, 128}, true, true},
    {KvType::F32, {5, 512, 64, 128}},   {KvType::BF16, {4, 32, 16, 32}},
    {KvType::F32, {3, 20, 12, 7}},      {KvType::F16, {2, 24, 8, 18}, false, true},
    {KvType::BF16, {1, 128, 128, 1}},   {KvType::F32, {33, 136, 8, 30}, false},
    {KvType::BF16, {9, 4, 4, 3}},       {KvType::F16, {6, 256, 32, 64}},
};

class Latent : public GpuTest {
protected:
    static Shape shapeOf(const Case& c) { return {c.type, c.shape.heads, 1, c.shape.rowDim(), c.shape.rank}; }

    void prepare(const Case& c) {
        SCOPED_TRACE(nameOf(c));
        constexpr int32_t kContext = 300;
        const std::vector<Row> rows = {{0, 0}, {0, 63}, {0, 64}, {1, 127}, {1, 128}, {1, 259}, {2, 5}, {2, 6}, {2, 64}};
        const LatentShape& s = c.shape;
        const auto count = static_cast<int64_t>(rows.size());
        const int64_t dim = s.rowDim(), half = s.rotated / 2, plain = s.plainDim + s.rotated;
        const std::vector<float> cos = randomFloats(kContext * half), sin = randomFloats(kContext * half),
                                 scales = randomFloats(kContext), norm = randomFloats(s.rank),
                                 headQueries = randomFloats(count * s.heads * plain),
                                 keys = randomFloats(count * dim, 3.0f);
        std::vector<float> q = randomFloats(count * s.heads * dim);
        Cache cache(shapeOf(c), {0, 0, 0}, 5, 9);
        const DeviceArray<float> deviceQ(q), deviceHead(headQueries), deviceKeys(keys), deviceCos(cos), deviceSin(sin),
            deviceScales(scales), deviceNorm(norm);
        const DeviceRows on(rows, cache);
        const LatentPreparation how{deviceNorm.get(), 1e-6f,      deviceCos.get(),
                                    deviceSin.get(),  c.adjacent, c.scaled ? deviceScales.get() : nullptr};
        const DeviceArray<uint16_t> hi(q.size()), lo(q.size());
        for (const HalfRows& half : {HalfRows{hi.get(), lo.get()}, HalfRows{}})
            prepareLatent(stream(), deviceQ.get(), deviceHead.get(), deviceKeys.get(), s, how, on.batch,
                          cache.onDevice(), half);

        std::vector<uint8_t> expected(cache.deviceK->size(), 0xff);
        const cpu::Kernels& kernels = cpu::kernels();
        for (int64_t t = 0; t < count; t++) {
            const Row& row = rows[t];
            const float *const rowCos = &cos[row.position * half], *const rowSin = &sin[row.position * half];
            for (int64_t h = t * s.heads; h < (t + 1) * s.heads; h++) {
                float* const last = &q[h * dim + s.rank];
                std::copy_n(&headQueries[h * plain + s.plainDim], s.rotated, last);
                kernels.rope(last, rowCos, rowSin, s.rotated, c.adjacent);
                for (int64_t i = h * dim; i < (h + 1) * dim && c.scaled; i++) q[i] *= scales[row.position];
            }
            std::vector<float> key(keys.begin() + t * dim, keys.begin() + (t + 1) * dim);
            kernels.rmsNorm(key.data(), norm.data(), how.eps, s.rank, key.data());
            kernels.rope(key.data() + s.rank, rowCos, rowSin, s.rotated, c.adjacent);
            kernels.storeKv(key.data(), dim, c.type, expected.data() + cache.offset(row.sequence, row.position, 0));
        }
        EXPECT_TRUE(sameBits(q, deviceQ.read())) << "queries";
        EXPECT_EQ(expected, cache.deviceK->read()) << "keys";
        EXPECT_TRUE(sameBits(keys, deviceKeys.read())) << "keys as they were";
        const std::vector<uint16_t> gotHi = hi.read(), gotLo = lo.read();
        for (size_t i = 0; i < q.size(); i++) {
            ASSERT_EQ(gotHi[i], toHalf(q[i])) << i;
            ASSERT_EQ(gotLo[i], toHalf(q[i] - fromHalf(gotHi[i]))) << i;
        }
    }

    void attend(const Case& c, const std::vector<Row>& rows, int64_t pagesPerTable, const AttentionReach& reach = {}) {
        attendOn(stream(), c, rows, pagesPerTable, {1, reach});
    }
    // rule: without a scale, and with sinks on the host.
    void attendOn(Stream& stream, const Case& c, const std::vector<Row>& rows, int64_t pagesPerTable,
                  AttentionRule rule) {
        SCOPED_TRACE(nameOf(c) + ", " + std::to_string(rows.size()) + " rows, the first at " +
                     std::to_string(rows[0].position) + ", " + std::to_string(stream.device().multiprocessors) +
                     " processors, " + std::to_string(stream.device().sharedPerBlock) + " bytes shared");
        std::vector<int32_t> lengths;
        for (const Row& row : rows) {
            if (row.sequence >= static_cast<int32_t>(lengths.size())) lengths.resize(row.sequence + 1, 0);
            lengths[row.sequence] = std::max(lengths[row.sequence], row.position + 1);
        }
        const Shape shape = shapeOf(c);
        Cache cache(shape, lengths, pagesPerTable, 11);
        const std::vector<float> q = randomFloats(rows.size() * c.shape.heads * c.shape.rowDim());
        const DeviceArray<float> deviceQ(q), out(rows.size() * c.shape.heads * c.shape.rank);
        const DeviceRows on(rows, cache);
        const DeviceArray<uint8_t> scratch(latentAttentionBytes(on.batch.rows, c.shape));
        require(cudaMemset(scratch.get(), 0, kDecodeCounterBytes));
        require(cudaDeviceSynchronize());
        rule.scale = scaleOf(shape);
        const std::vector<float> expected = cache.attendOnCpu(q, rows, rule);
        const DeviceArray<float> sinks(std::vector<float>(rule.sinks, rule.sinks + (rule.sinks ? shape.heads : 0)));
        if (rule.sinks) rule.sinks = sinks.get();
        RowOutputs outputs;
        outputs.floats = out.get();
        attentionDecode(stream, deviceQ.get(), {shape.heads, 1, shape.headDim}, rule, on.batch, cache.onDevice(),
                        scratch.get(), outputs);
        EXPECT_TRUE(sameBits(expected, out.read()));
        const std::vector<uint8_t> bytes = scratch.read();
        EXPECT_TRUE(std::all_of(bytes.begin(), bytes.begin() + kDecodeCounterBytes, [](uint8_t b) { return b == 0; }));
    }

    // The int8 blocks of each head against those of the CPU's floats.
    void quantize(const Case& c, const std::vector<Row>& rows) {
        SCOPED_TRACE(nameOf(c));
        Cache cache(shapeOf(c), {1501, 301}, 24, 5);
        const auto count = static_cast<int64_t>(rows.size());
        const int64_t heads = c.shape.heads, rank = c.shape.rank, pieces = count * heads;
        const std::vector<float> q = randomFloats(pieces * c.shape.rowDim());
        const DeviceArray<float> deviceQ(q);
        const DeviceRows on(rows, cache);
        const DeviceArray<uint8_t> scratch(latentAttentionBytes(count, c.shape)), got(quantizedRowsBytes(pieces, rank)),
            wanted(got.size());
        require(cudaMemset(scratch.get(), 0, kDecodeCounterBytes));
        require(cudaMemset(got.get(), 0, got.size()));
        require(cudaMemset(wanted.get(), 0, got.size()));
        require(cudaDeviceSynchronize());
        const AttentionRule rule{scaleOf(shapeOf(c)), {}};
        attentionDecode(stream(), deviceQ.get(), {c.shape.heads, 1, c.shape.rowDim()}, rule, on.batch, cache.onDevice(),
                        scratch.get(), {nullptr, quantizedRowsOver(got.get(), pieces, rank), {}});
        const DeviceArray<float> expected(cache.attendOnCpu(q, rows, rule));
        convertRows(stream(), expected.get(), pieces, rank,
                    {nullptr, quantizedRowsOver(wanted.get(), pieces, rank), {}});
        EXPECT_EQ(wanted.read(), got.read());
    }
};

TEST_F(Latent, FinishesQueriesAndKeys) {
    for (const Case& c : kCases) prepare(c);
}

TEST_F(Latent, AttendsAtBordersOfPages) {
    for (const Case& c : kCases)
        for (const int32_t position : {0, 1, 31, 32, 63, 64, 127, 128, 300}) attend(c, {{0, position}}, 8);
}

TEST_F(Latent, AttendsForRowsOfSeveralSequences) {
    for (const Case& c : kCases) {
        attend(c, {{1, 63}, {0, 0}, {2, 200}, {3, 64}, {1, 5}, {2, 201}, {2, 202}, {0, 100}}, 5);
        std::vector<Row> drafts = {{1, 40}};
        for (int32_t i = 0; i < 21; i++) drafts.push_back({0, 1021 + i});
        attend(c, drafts, 24);
    }
}

// From one row to more than a launch takes, each of its own sequence.
TEST_F(Latent, AttendsForManyRows) {
    for (const Case& c : std::vector<Case>{kCases[0], kCases[4], kCases[8]})
        for (const int32_t rows : {2, 31, 33, 64, 65, 130}) {
            std::vector<Row> batch;
            for (int32_t i = 0; i < rows; i++) batch.push_back({i, i * 37 % 400 + (i % 5 ? 0 : 300)});
            attend(c, batch, 12);
        }
    // With many heads a launch takes fewer rows.
    std::vector<Row> batch;
    for (int32_t i = 0; i < 40; i++) batch.push_back({i / 20, 250 + i % 20});
    attend({KvType::BF16, {128, 512, 64, 128}}, batch, 5);
}

// More segments than a batch of them, and rows that are cut at pages.
TEST_F(Latent, AttendsToLongTexts) {
    for (const int32_t pages : {100, 270, 300, 700}) {
        attend({KvType::BF16, {20, 512, 64, 192}}, {{0, pages * 64 - 7}}, pages);
        attend({KvType::BF16, {2, 24, 8, 7}}, {{0, pages * 64 - 7}, {1, 90}}, pages);
    }
}

// So many heads that the ring is short: several batches of segments, whose places are used again.
TEST_F(Latent, JoinsManyBatches) {
    for (const int32_t pages : {33, 64, 65, 100, 270})
        attend({KvType::BF16, {520, 8, 8, 8}}, {{0, pages * 64 - 7}}, pages);
    std::vector<Row> rows;
    for (int32_t i = 0; i < 26; i++) rows.push_back({i % 3, 64 * 64 + i * 317});
    attend({KvType::BF16, {20, 32, 8, 8}}, rows, 200);
}

// How a batch is divided depends on the device: pages or segments, for few heads or for many; two pages in shared
// memory, one, or none.
TEST_F(Latent, AttendsWhateverTheDevice) {
    for (const auto& [processors, shared] : std::vector<std::pair<int, size_t>>{
             {132, 227}, {1, 227}, {4, 227}, {30, 227}, {108, 163}, {4, 163}, {24, 99}, {3, 99}, {40, 64}, {2, 64}}) {
        DeviceInfo device = stream().device();
        device.multiprocessors = processors;
        device.sharedPerBlock = std::min(device.sharedPerBlock, shared * 1024);
        Stream on(device);
        for (const KvType type : {KvType::BF16, KvType::F32}) {
            attendOn(on, {type, {20, 512, 64, 192}}, {{0, 1600}, {0, 1601}, {1, 63}, {1, 64}, {2, 0}}, 26, {});
            attendOn(on, {type, {24, 512, 64, 192}}, {{0, 700}}, 11, {});
        }
        attendOn(on, {KvType::F16, {7, 512, 64, 192}}, {{0, 300}, {1, 800}}, 13, {});
    }
}

TEST_F(Latent, AttendsAtBordersOfSegmentsAndHeads) {
    for (const int32_t heads : {1, 4, 5, 8, 9, 16, 20, 24, 25, 128})
        for (const int32_t tokens : {1, 63, 64, 65, 255, 256, 257, 513}) {
            const Case c = {KvType::BF16, {heads, 512, 64, 128}};
            attend(c, {{0, tokens - 1}}, 9);
            if (heads == 20) attend(c, {{0, tokens - 1}, {1, 512}, {1, -1}}, 9);
        }
}

TEST_F(Latent, AttendsByAnyRule) {
    const Case& c = kCases[2];
    const std::vector<float> sinks = randomFloats(c.shape.heads);
    for (const int32_t position : {5, 400})
        attendOn(stream(), c, {{0, position}, {1, 70}, {1, -1}}, 7, {1, {}, 0.7f, sinks.data()});
}

TEST_F(Latent, AttendsWithinAWindow) {
    for (const int32_t window : {1, 64, 65, 300})
        attend(kCases[0], {{0, 700}, {0, 767}, {0, 768}, {1, 3}, {2, 1200}}, 20, {window, 0});
    attend(kCases[4], {{0, 700}, {1, 3}}, 12, {0, 128});
    for (const Case& c : {kCases[0], kCases[4]}) attend(c, {{0, 700}, {0, 701}, {1, 3}}, 12, {100, 0});
}

// A captured call serves texts whose pages have blocks of their own and texts that are divided by tickets.
TEST_F(Latent, ReplaysWithOtherPositions) {
    const Case c = {KvType::BF16, {20, 512, 64, 192}};
    const Shape shape = shapeOf(c);
    Cache cache(shape, {20000, 3000}, 320, 5);
    const std::vector<float> q = randomFloats(2 * c.shape.heads * c.shape.rowDim());
    const DeviceArray<float> deviceQ(q), out(2 * c.shape.heads * c.shape.rank);
    const DeviceRows on({{0, 0}, {1, 63}}, cache);
    const DeviceArray<uint8_t> scratch(latentAttentionBytes(2, c.shape));
    require(cudaMemset(scratch.get(), 0, kDecodeCounterBytes));
    require(cudaDeviceSynchronize());
    const AttentionRule rule{scaleOf(shape), {}};
    RowOutputs outputs;
    outputs.floats = out.get();
    const auto call = [&] {
        attentionDecode(stream(), deviceQ.get(), {c.shape.heads, 1, shape.headDim}, rule, on.batch, cache.onDevice(),
                        scratch.get(), outputs);
    };
    call();
    const auto graph = stream().capture(call);
    for (const std::vector<Row>& rows : std::vector<std::vector<Row>>{{{0, 0}, {1, 63}},
                                                                      {{0, 300}, {1, 64}},
                                                                      {{0, 19999}, {1, 5}},
                                                                      {{1, 400}, {0, 1023}},
                                                                      {{1, 2999}, {0, 70}},
                                                                      {{0, 1}, {0, 2}}}) {
        stream().upload(on.positions.get(), DeviceRows::positionsOf(rows).data(), 8);
        stream().upload(on.sequences.get(), DeviceRows::sequencesOf(rows).data(), 8);
        stream().replay(*graph);
        EXPECT_TRUE(sameBits(cache.attendOnCpu(q, rows, rule), out.read())) << rows[0].position;
    }
}

// Each head's result is a row of int8 blocks of its own.
TEST_F(Latent, QuantizesEachHead) {
    for (const Case& c : std::vector<Case>{
             {KvType::BF16, {5, 96, 32, 64}}, {KvType::F16, {20, 512, 64, 192}}, {KvType::F32, {9, 160, 16, 32}}}) {
        quantize(c, {{0, 70}, {1, 3}, {0, 71}});
        quantize(c, {{0, 1500}, {1, 300}});
    }
}

// Against convertRows of the same pieces, copied on the host.
TEST_F(Latent, TakesPieces) {
    for (const auto& [cols, stride] : std::vector<std::pair<int64_t, int64_t>>{
             {192, 256}, {128, 192}, {32, 48}, {64, 64}, {7, 9}, {20, 32}, {18, 26}, {416, 417}}) {
        for (const int64_t pieces : {1, 3, 4, 5, 640}) {
            SCOPED_TRACE(std::to_string(pieces) + " pieces of " + std::to_string(cols) + " of " +
                         std::to_string(stride));
            const std::vector<float> x = randomFloats(pieces * stride);
            std::vector<float> taken;
            for (int64_t i = 0; i < pieces; i++)
                taken.insert(taken.end(), x.begin() + i * stride, x.begin() + i * stride + cols);
            const DeviceArray<float> from(x), host(taken), floats(taken.size());
            takePieces(stream(), from.get(), stride, pieces, cols, {floats.get(), {}, {}});
            EXPECT_TRUE(sameBits(taken, floats.read()));
            if (cols % 32 != 0) continue;
            const DeviceArray<uint8_t> got(quantizedRowsBytes(pieces, cols)), wanted(got.size());
            takePieces(stream(), from.get(), stride, pieces, cols,
                       {nullptr, quantizedRowsOver(got.get(), pieces, cols), {}});
            convertRows(stream(), host.get(), pieces, cols,
                        {nullptr, quantizedRowsOver(wanted.get(), pieces, cols), {}});
            EXPECT_EQ(wanted.read(), got.read());
        }
    }
}

TEST(LatentShapes, KernelsKnowOrRefuseThem) {
    for (const Case& c : kCases) EXPECT_NO_THROW(requireLatent(c.shape)) << nameOf(c);
    for (const LatentShape& shape : std::vector<LatentShape>{
             {0, 512, 64, 128}, {4, 520, 64, 128}, {4, 512, 130, 128}, {4, 132, 4, 128}, {4, 30, 2, 8}, {4, 32, 12, 8}})
        EXPECT_THROW(requireLatent(shape), Error);
}

}  // namespace
}  // namespace sharpi::cuda
