// Rows of blocks, the choice among them, and attention over them and a window: the bits of the CPU's operations.
#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "cpu/operations/cpu_operations.h"
#include "gpu_test.h"
#include "kernels/blocks/blocks.h"

namespace sharpi::cuda {
namespace {

constexpr int32_t kPageTokens = 64, kPages = 20, kContext = kPages * kPageTokens;
constexpr int32_t kLists = 3;  // of pages in a sequence's table on the device, of which the first is in use

// Rows [first, first + count) of a sequence.
struct Stretch {
    int32_t first, count;
};

// Pages of one list, the same on both processors. Sequence s has the pages that its table names.
class PagedCache {
public:
    PagedCache(const KvPages& shape, int64_t sequences, std::mt19937& random) : _shape(shape) {
        const auto pages = static_cast<size_t>(sequences * kPages);
        tables.resize(pages);
        std::iota(tables.begin(), tables.end(), 0);
        std::shuffle(tables.begin(), tables.end(), random);
        const size_t bytes =
            pages * static_cast<size_t>(shape.rowsOfPage() * shape.headDim) * kvElementBytes(shape.type);
        k.assign(bytes, 0xff);
        v.assign(shape.valuePrefix > 0 ? 0 : bytes, 0xff);
    }
    // Random elements everywhere.
    template <typename Draw> void fill(const Draw& draw) {
        const size_t element = kvElementBytes(_shape.type);
        for (std::vector<uint8_t>* of : {&k, &v}) {
            for (size_t at = 0; at < of->size(); at += element) {
                const float x = draw();
                cpu::kernels().storeKv(&x, 1, _shape.type, of->data() + at);
            }
        }
    }
    void upload() {
        deviceK = std::make_unique<DeviceArray<uint8_t>>(k);
        deviceV = std::make_unique<DeviceArray<uint8_t>>(v);
        std::vector<int32_t> all(tables.size() * kLists, -1);
        for (size_t i = 0; i < tables.size(); ++i) all[i / kPages * kPages * kLists + i % kPages] = tables[i];
        deviceTables = std::make_unique<DeviceArray<int32_t>>(all);
    }
    KvPages onHost() { return with(k.data(), v.data()); }
    KvPages onDevice() const { return with(deviceK->get(), deviceV->get()); }
    PagedRows paged() const { return {onDevice(), deviceTables->get()}; }
    const int32_t* table(int64_t sequence) const { return tables.data() + sequence * kPages; }

    std::vector<uint8_t> k, v;
    std::vector<int32_t> tables;
    std::unique_ptr<DeviceArray<uint8_t>> deviceK, deviceV;
    std::unique_ptr<DeviceArray<int32_t>> deviceTables;

private:
    KvPages with(uint8_t* keys, uint8_t* values) const {
        KvPages pages = _shape;
        pages.k = keys;
        pages.v = _shape.valuePrefix > 0 ? nullptr : values;
        return pages;
    }
    KvPages _shape;
};

KvPages shapeOf(KvType type, int32_t headDim, int32_t list, int32_t valuePrefix, int32_t rowTokens = 1) {
    return {type, 1, headDim, kPageTokens, nullptr, nullptr, list, valuePrefix, rowTokens};
}

// Angles of a rotation: any numbers do.
struct Angles {
    std::vector<float> cos, sin;
    DeviceArray<float> deviceCos, deviceSin;
    int32_t dims;
    bool adjacent, last;

    Angles(std::vector<float> c, std::vector<float> s, int32_t turned, bool neighbours, bool atEnd)
        : cos(std::move(c)),
          sin(std::move(s)),
          deviceCos(cos),
          deviceSin(sin),
          dims(turned),
          adjacent(neighbours),
          last(atEnd) {}
    RopeTable onHost() const { return {cos.data(), sin.data(), dims, adjacent, last}; }
    RotatedPart onDevice(int32_t headDim) const {
        return {deviceCos.get(), deviceSin.get(), dims, static_cast<int32_t>(onHost().begin(headDim)), adjacent};
    }
};

class Blocks : public GpuTest {
protected:
    // The CPU's operations over these rows. limits: all but the number of rows.
    void begin(const std::vector<Stretch>& runs, StepLimits limits) {
        _batch = {};
        for (size_t s = 0; s < runs.size(); ++s)
            for (int32_t i = 0; i < runs[s].count; ++i)
                _batch.add(RowKind::Decode, 0, runs[s].first + i, static_cast<int32_t>(s), false);
        limits.maxRows = _batch.size();
        limits.context = kContext;
        limits.pageTokens = kPageTokens;
        limits.blocks = kContext;
        _memory.assign(CpuScratch(2, limits).total + 64, 0x7f);
        const auto at = reinterpret_cast<uintptr_t>(_memory.data());
        _work.takeBuffers(limits, _memory.data() + (64 - at % 64) % 64);
        _work.batch = &_batch;
        _positions = std::make_unique<DeviceArray<int32_t>>(_batch.positions);
        _sequences = std::make_unique<DeviceArray<int32_t>>(_batch.sequences);
    }
    // The lists of pages of the sequences, in their order.
    void useTables(const std::vector<const PagedCache*>& lists) {
        _work.sequences.clear();
        _batch.forSequences([&](int64_t first, int64_t end) {
            SequenceRows rows;
            rows.begin = first;
            rows.end = end;
            for (const PagedCache* list : lists)
                rows.pageTables.push_back(list->table(_batch.sequences[static_cast<size_t>(first)]));
            _work.sequences.push_back(rows);
        });
    }
    BatchRows rows(const PagedCache& of) const {
        return {_batch.size(), _positions->get(), _sequences->get(), of.deviceTables->get(), kPages * kLists, kPages};
    }
    std::unique_ptr<Angles> angles(int32_t dims, bool adjacent, bool last) {
        const auto count = static_cast<size_t>(kContext) * dims / 2;
        return std::make_unique<Angles>(randomFloats(count), randomFloats(count), dims, adjacent, last);
    }
    std::vector<float> written(RowBuffer buffer, int64_t count, float scale = 1.0f) {
        const auto values = randomFloats(static_cast<size_t>(count), scale);
        std::copy(values.begin(), values.end(), _work.at(buffer));
        return values;
    }
    float normal() { return _normal(random()); }

    HostClock _clock;
    CpuWork _work{2, _clock};
    CpuOperations _ops{_work};
    Batch _batch;
    std::vector<uint8_t> _memory;
    std::unique_ptr<DeviceArray<int32_t>> _positions, _sequences;
    std::normal_distribution<float> _normal;
};

// Of sequences that begin, end blocks, begin within one and go over several, and take single rows.
const std::vector<Stretch> kRuns = {{0, 9}, {5, 1}, {127, 1}, {100, 60},   {254, 3}, {255, 1},
                                    {3, 1}, {0, 4}, {64, 64}, {1020, 200}, {0, 1},   {7, 130}};

struct CompressCase {
    int32_t blockTokens, headDim, rotated;
    bool overlaps, adjacent, last;
    KvType type;
};

TEST_F(Blocks, AreCompressedToTheBitsOfTheCpu) {
    for (const CompressCase& c : {CompressCase{4, 64, 16, true, true, true, KvType::F32},
                                  CompressCase{4, 512, 64, true, true, true, KvType::BF16},
                                  CompressCase{128, 512, 64, false, true, true, KvType::F16},
                                  CompressCase{128, 40, 8, false, false, false, KvType::BF16},
                                  CompressCase{2, 24, 24, true, false, true, KvType::F32},
                                  CompressCase{1, 8, 4, false, true, true, KvType::F16},
                                  CompressCase{64, 128, 32, true, true, true, KvType::BF16}}) {
        SCOPED_TRACE(std::to_string(c.blockTokens) + " tokens, " + std::to_string(c.headDim) + " elements");
        const int32_t width = (c.overlaps ? 2 : 1) * c.headDim;
        StepLimits limits;
        limits.compressorWidth = width;
        limits.compressorDim = c.headDim;
        begin(kRuns, limits);
        const auto sequences = static_cast<int64_t>(kRuns.size());
        PagedCache pending(shapeOf(KvType::F32, width, 0, 0), sequences, random());
        PagedCache made(shapeOf(c.type, c.headDim, 1, c.headDim, c.blockTokens), sequences, random());
        pending.fill([&] { return normal(); });
        pending.upload();
        made.upload();
        useTables({&pending, &made});
        const auto rope = angles(c.rotated, c.adjacent, c.last);
        const auto offsets = randomFloats(static_cast<size_t>(c.blockTokens) * width), norm = randomFloats(c.headDim);
        const DeviceArray<float> deviceOffsets(offsets), deviceNorm(norm);
        const DeviceArray<float> keys(written(RowBuffer::CompressorKeys, _batch.size() * width)),
            gates(written(RowBuffer::CompressorGates, _batch.size() * width, 3.0f));
        const KvPages hostPending = pending.onHost(), hostRows = made.onHost();
        _ops.blocks().compress(
            {c.blockTokens, c.overlaps, offsets.data(), norm.data(), 1e-6f, rope->onHost(), hostPending, hostRows});
        compressBlocks(
            stream(),
            {c.blockTokens, c.overlaps, deviceOffsets.get(), deviceNorm.get(), 1e-6f, rope->onDevice(c.headDim)},
            keys.get(), gates.get(), rows(pending), pending.paged(), made.paged());
        ASSERT_EQ(pending.k, pending.deviceK->read());
        ASSERT_EQ(pending.v, pending.deviceV->read());
        ASSERT_EQ(made.k, made.deviceK->read());
    }
}

struct ChooseCase {
    int32_t heads, headDim, rotated, topK, blockTokens;
    KvType type;
    int values;  // the number of different elements; 0: any
};

TEST_F(Blocks, AreChosenAsTheCpuDoes) {
    for (const ChooseCase& c :
         {ChooseCase{16, 64, 16, 8, 4, KvType::F32, 0}, ChooseCase{64, 128, 64, 100, 4, KvType::BF16, 0},
          ChooseCase{5, 64, 0, 3, 2, KvType::F16, 2}, ChooseCase{70, 256, 64, 50, 4, KvType::BF16, 3},
          ChooseCase{130, 32, 8, 1, 1, KvType::F32, 2}, ChooseCase{8, 4, 0, 290, 4, KvType::F32, 1},
          ChooseCase{64, 128, 64, 512, 4, KvType::BF16, 0}}) {
        SCOPED_TRACE(std::to_string(c.heads) + " heads, the best " + std::to_string(c.topK));
        StepLimits limits;
        limits.indexHeads = c.heads;
        limits.indexWidth = int64_t{c.heads} * c.headDim;
        limits.compressorDim = c.headDim;
        limits.topK = c.topK;
        begin(kRuns, limits);
        PagedCache blocks(shapeOf(c.type, c.headDim, 0, c.headDim, c.blockTokens), static_cast<int64_t>(kRuns.size()),
                          random());
        const auto drawn = [&] { return c.values ? static_cast<float>(random()() % c.values) - 1.0f : normal(); };
        blocks.fill(drawn);
        blocks.upload();
        useTables({&blocks});
        const auto rope = angles(c.rotated, true, true);
        auto queries = randomFloats(_batch.size() * limits.indexWidth), weights = randomFloats(_batch.size() * c.heads);
        for (float& q : queries) q = c.values ? drawn() : q;
        std::copy(queries.begin(), queries.end(), _work.at(RowBuffer::IndexQueries));
        std::copy(weights.begin(), weights.end(), _work.at(RowBuffer::IndexWeights));
        const DeviceArray<float> deviceQueries(queries), deviceWeights(weights);
        const DeviceArray<int32_t> chosen(_batch.size() * c.topK);
        const size_t bytes = indexScoreBytes(_batch.size(), kContext / c.blockTokens);
        const DeviceArray<uint8_t> scratch(bytes);
        const KvPages onHost = blocks.onHost();
        _ops.blocks().choose({c.heads, c.topK, 0.37f, rope->onHost(), onHost});
        chooseBlocks(stream(), {c.heads, c.topK, 0.37f, rope->onDevice(c.headDim)}, deviceQueries.get(),
                     deviceWeights.get(), rows(blocks), blocks.paged(), scratch.get(), bytes, chosen.get());
        const auto* const expected = reinterpret_cast<const int32_t*>(_work.at(RowBuffer::ChosenBlocks));
        const std::vector<int32_t> found = chosen.read();
        for (int64_t t = 0; t < _batch.size(); ++t) {
            const int64_t count = std::min((_batch.positions[t] + 1) / c.blockTokens, c.topK), at = t * c.topK;
            ASSERT_EQ(std::vector<int32_t>(expected + at, expected + at + count),
                      std::vector<int32_t>(found.begin() + at, found.begin() + at + count))
                << "row " << t << " at " << _batch.positions[t];
        }
    }
}

struct AttendCase {
    int32_t heads, headDim, rotated, window, blockTokens, topK;  // blockTokens: 0: none; topK: 0: all
    KvType type;
    bool sinks;
    int64_t scratchRows;  // that there is room for
};

// The relative distance, by norm, of `count` numbers from `first` on.
double distance(const std::vector<float>& got, const std::vector<float>& expected, int64_t first, int64_t count) {
    double apart = 0, norm = 0;
    for (int64_t i = first; i < first + count; ++i) {
        apart += std::pow(double{got[i]} - expected[i], 2);
        norm += std::pow(double{expected[i]}, 2);
    }
    return std::sqrt(apart / norm);
}

class AttendBlocks : public Blocks, public ::testing::WithParamInterface<AttendCase> {
protected:
    // Ascending, different numbers of blocks for each row.
    std::vector<int32_t> anyChoice(const AttendCase& c) {
        std::vector<int32_t> all(static_cast<size_t>(_batch.size()) * c.topK, -1), numbers;
        for (int64_t t = 0; t < _batch.size(); ++t) {
            numbers.resize((_batch.positions[t] + 1) / c.blockTokens);
            std::iota(numbers.begin(), numbers.end(), 0);
            std::shuffle(numbers.begin(), numbers.end(), random());
            numbers.resize(std::min<size_t>(numbers.size(), c.topK));
            std::sort(numbers.begin(), numbers.end());
            std::copy(numbers.begin(), numbers.end(), all.begin() + t * c.topK);
        }
        return all;
    }
    StepLimits limits() const {
        const AttendCase c = GetParam();
        StepLimits limits;
        limits.heads = c.heads;
        limits.headDim = limits.compressorDim = c.headDim;
        limits.queryWidth = int64_t{c.heads} * c.headDim;
        limits.kvWidth = c.headDim;
        limits.topK = std::max(1, c.topK);
        return limits;
    }
};

TEST_P(AttendBlocks, GivesTheBitsOfTheCpu) {
    const AttendCase c = GetParam();
    begin(kRuns, limits());
    const auto sequences = static_cast<int64_t>(kRuns.size());
    const HeadShape shape{c.heads, 1, c.headDim};
    PagedCache keys(shapeOf(c.type, c.headDim, 0, c.headDim), sequences, random());
    PagedCache blocks(shapeOf(c.type, c.headDim, 1, c.headDim, std::max(1, c.blockTokens)), sequences, random());
    for (PagedCache* cache : {&keys, &blocks}) {
        cache->fill([&] { return normal(); });
        cache->upload();
    }
    useTables({&keys, &blocks});
    const auto rope = angles(c.rotated, true, true);
    const auto sinks = randomFloats(c.heads), norm = randomFloats(c.headDim);
    const DeviceArray<float> deviceSinks(sinks), deviceNorm(norm);
    const DeviceArray<float> q(written(RowBuffer::Queries, _batch.size() * shape.heads * shape.headDim)),
        k(written(RowBuffer::Keys, _batch.size() * shape.headDim));
    const DeviceArray<uint16_t> hi(q.size()), lo(q.size());
    const KvPages hostKeys = keys.onHost(), hostBlocks = blocks.onHost();

    HeadsCall call;
    call.heads = c.heads;
    call.scale = 0.11f;
    call.qkNorm = AttentionSpec::QkNorm::PerHead;
    call.kNorm = norm.data();
    call.eps = 1e-6f;
    call.rope = rope->onHost();
    call.reach.window = c.window;
    call.sinks = c.sinks ? sinks.data() : nullptr;
    call.rotatesBack = true;
    _ops.prepareHeads(call, hostKeys);
    prepareBlockHeads(stream(), q.get(), k.get(), shape, {nullptr, deviceNorm.get(), 1e-6f, rope->onDevice(c.headDim)},
                      rows(keys), keys.onDevice(), {hi.get(), lo.get()});
    const int64_t width = int64_t{c.heads} * c.headDim, count = _batch.size() * width;
    const float* const queries = _work.at(RowBuffer::Queries);
    ASSERT_TRUE(sameBits({queries, queries + count}, q.read()));
    ASSERT_EQ(keys.k, keys.deviceK->read());

    SeenBlocks seen;
    std::unique_ptr<DeviceArray<int32_t>> chosen;
    if (c.blockTokens > 0) call.blocks = &hostBlocks, seen.rows = blocks.paged();
    if (c.topK > 0) {
        const auto choice = anyChoice(c);
        std::copy(choice.begin(), choice.end(), reinterpret_cast<int32_t*>(_work.at(RowBuffer::ChosenBlocks)));
        chosen = std::make_unique<DeviceArray<int32_t>>(choice);
        call.topK = seen.topK = c.topK;
        seen.chosen = chosen->get();
    }
    const int64_t mostBlocks = c.blockTokens ? kContext / c.blockTokens : 0;
    const size_t bytes = blockAttentionBytes(c.scratchRows, shape, blockSegments(mostBlocks, call.reach, kPages));
    const DeviceArray<uint8_t> scratch(bytes);
    _ops.attend(call, hostKeys, {});
    attendBlocks(stream(), q.get(), shape, {call.scale, call.reach, 0, c.sinks ? deviceSinks.get() : nullptr},
                 rows(keys), keys.onDevice(), seen, rope->onDevice(c.headDim), scratch.get(), bytes, q.get());
    const float* const attended = _work.floats(_work.scratch().attended);
    const std::vector<float> expected(attended, attended + count);
    EXPECT_TRUE(sameBits(expected, q.read()));

    // In split form factors keep 16 bits, whatever the cache has. Else queries and weights are rounded to 8 bits, each
    // by at most 2^-9, in random directions.
    for (const bool split : {true, false}) {
        if (!split && c.type != KvType::BF16) continue;
        const DeviceArray<float> near(expected.size());
        prefillBlocks(stream(), {hi.get(), split ? lo.get() : nullptr}, shape,
                      {call.scale, call.reach, 0, c.sinks ? deviceSinks.get() : nullptr}, rows(keys), keys.onDevice(),
                      seen, rope->onDevice(c.headDim), near.get());
        const std::vector<float> got = near.read();
        for (int64_t t = 0; t < _batch.size(); ++t)
            ASSERT_LT(distance(got, expected, t * width, width), split ? 1e-4 : 1e-2) << "row " << t;
    }
}

INSTANTIATE_TEST_SUITE_P(Layers, AttendBlocks,
                         ::testing::Values(AttendCase{8, 64, 16, 16, 0, 0, KvType::F32, true, 100},
                                           AttendCase{8, 64, 16, 16, 4, 8, KvType::BF16, true, 1000},
                                           AttendCase{64, 512, 64, 128, 4, 100, KvType::BF16, true, 9},
                                           AttendCase{64, 512, 64, 128, 128, 0, KvType::BF16, true, 1000},
                                           AttendCase{64, 512, 64, 128, 4, 290, KvType::F32, false, 1},
                                           AttendCase{3, 24, 8, 100, 1, 0, KvType::F16, false, 7},
                                           AttendCase{20, 72, 32, 300, 2, 600, KvType::F32, true, 50},
                                           AttendCase{1, 8, 4, 1, 64, 0, KvType::F16, true, 3}));

}  // namespace
}  // namespace sharpi::cuda
