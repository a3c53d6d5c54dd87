// Norm, rotation and cache append on the GPU, bit for bit against the CPU's kernels.
#include <string>
#include <vector>

#include "core/half.h"
#include "cpu/kernels.h"
#include "gpu_test.h"
#include "kernels/attention/attention.h"

namespace sharpi::cuda {
namespace {

constexpr int32_t kPageTokens = 64, kContext = 260, kPagesPerTable = 5;

struct Case {
    int32_t heads, kvHeads, headDim, ropeDims;
    HeadNorm norm;
    bool adjacent;
    KvType type;
    bool normAfterRotation = false, valueNorm = false, valuesAreKeys = false, appends = true;
    bool weighted = true, scaled = false;  // norms have weights; queries have factors
};

std::string nameOf(const Case& c) {
    return "heads " + std::to_string(c.heads) + "/" + std::to_string(c.kvHeads) + ", dim " + std::to_string(c.headDim) +
           ", rope " + std::to_string(c.ropeDims) + ", norm " + std::to_string(static_cast<int>(c.norm)) +
           (c.adjacent ? ", adjacent" : ", halves") + ", type " + std::to_string(static_cast<int>(c.type)) +
           (c.normAfterRotation ? ", rotation first" : "") + (c.valueNorm ? ", norm of values" : "") +
           (c.valuesAreKeys ? ", values are keys" : "") + (c.appends ? "" : ", queries alone") +
           (c.weighted ? "" : ", no weights") + (c.scaled ? ", scaled" : "");
}

// Rows of three sequences: page borders, and two rows of one page.
const std::vector<int32_t> kPositions = {0, 63, 64, 127, 128, 259, 5, 6, 64};
const std::vector<int32_t> kSequences = {0, 0, 0, 1, 1, 1, 2, 2, 2};
const std::vector<int32_t> kTables = {7, 3, 12, 0, 9, 14, 1, 5, 2, 10, 4, 13, 6, 11, 8};
constexpr size_t kPages = 15;

struct Result {
    std::vector<float> q;
    std::vector<uint8_t> k, v;
};

class Heads : public GpuTest {
protected:
    void SetUp() override {
        GpuTest::SetUp();
        if (IsSkipped()) return;
        _cos = randomFloats(kContext * 256), _sin = randomFloats(kContext * 256);
        _scales = randomFloats(kContext);
        _weights = randomFloats(16 * 256);
    }

    HeadPreparation preparation(const Case& c, const float* weights, const float* cos, const float* sin,
                                const float* scales) const {
        HeadPreparation how;
        how.norm = c.norm;
        how.normAfterRotation = c.normAfterRotation, how.valueNorm = c.valueNorm;
        how.valuesAreKeys = c.valuesAreKeys, how.appends = c.appends;
        if (c.scaled) how.queryScale = scales;
        if (c.norm != HeadNorm::None && c.weighted) how.qNorm = weights, how.kNorm = weights + 3;
        how.eps = 1e-6f;
        if (c.ropeDims) how.cos = cos, how.sin = sin;
        how.ropeDims = c.ropeDims;
        how.adjacent = c.adjacent;
        return how;
    }

    // What the CPU does with x [heads * headDim] of one row.
    static void prepareOnCpu(const Case& c, const HeadPreparation& how, const float* norm, int32_t heads,
                             int64_t position, float* x) {
        const cpu::Kernels& kernels = cpu::kernels();
        if (how.norm == HeadNorm::FullRow) kernels.rmsNorm(x, norm, how.eps, int64_t{heads} * c.headDim, x);
        const bool perHead = how.norm == HeadNorm::PerHead;
        for (int32_t h = 0; h < heads; h++, x += c.headDim) {
            if (perHead && !c.normAfterRotation) kernels.rmsNorm(x, norm, how.eps, c.headDim, x);
            if (c.ropeDims) {
                const int64_t at = position * (c.ropeDims / 2);
                kernels.rope(x, how.cos + at, how.sin + at, c.ropeDims, c.adjacent);
            }
            if (perHead && c.normAfterRotation) kernels.rmsNorm(x, norm, how.eps, c.headDim, x);
        }
    }

    Result onCpu(const Case& c, std::vector<float> q, std::vector<float> k, std::vector<float> v) const {
        const HeadPreparation how = preparation(c, _weights.data(), _cos.data(), _sin.data(), _scales.data());
        if (c.valuesAreKeys) v = k;
        const size_t headBytes = c.headDim * kvElementBytes(c.type);
        Result result;
        result.k.assign(kPages * c.kvHeads * kPageTokens * headBytes, 0xff);
        result.v = result.k;
        for (size_t t = 0; t < kPositions.size(); t++) {
            const int32_t position = kPositions[t];
            prepareOnCpu(c, how, how.qNorm, c.heads, position, &q[t * c.heads * c.headDim]);
            for (int64_t i = 0; i < int64_t{c.heads} * c.headDim && c.scaled; i++)
                q[t * c.heads * c.headDim + i] *= _scales[position];
            if (!c.appends) continue;
            prepareOnCpu(c, how, how.kNorm, c.kvHeads, position, &k[t * c.kvHeads * c.headDim]);
            const size_t page = kTables[kSequences[t] * kPagesPerTable + position / kPageTokens];
            for (int32_t h = 0; h < c.kvHeads; h++) {
                const size_t at = ((page * c.kvHeads + h) * kPageTokens + position % kPageTokens) * headBytes;
                const size_t from = (t * c.kvHeads + h) * c.headDim;
                if (c.valueNorm) cpu::kernels().rmsNorm(&v[from], nullptr, how.eps, c.headDim, &v[from]);
                cpu::kernels().storeKv(&k[from], c.headDim, c.type, &result.k[at]);
                cpu::kernels().storeKv(&v[from], c.headDim, c.type, &result.v[at]);
            }
        }
        result.q = std::move(q);
        return result;
    }

    void compare(const Case& c) {
        const size_t rows = kPositions.size();
        const std::vector<float> q = randomFloats(rows * c.heads * c.headDim),
                                 k = randomFloats(rows * c.kvHeads * c.headDim, 3.0f), v = randomFloats(k.size());
        const Result expected = onCpu(c, q, k, v);
        const DeviceArray<float> deviceQ(q), deviceK(k), deviceV(v), cos(_cos), sin(_sin), weights(_weights),
            scales(_scales);
        const DeviceArray<uint8_t> cacheK(expected.k.size()), cacheV(expected.v.size());
        const DeviceArray<int32_t> positions(kPositions), sequences(kSequences), tables(kTables);
        const DeviceArray<uint16_t> hi(q.size()), lo(q.size());
        const BatchRows batch = {static_cast<int64_t>(rows), positions.get(), sequences.get(), tables.get(),
                                 kPagesPerTable};
        const KvPages pages = {c.type, c.kvHeads, c.headDim, kPageTokens, cacheK.get(), cacheV.get()};
        // What is not there must not be read.
        float* const values = c.appends && !c.valuesAreKeys ? deviceV.get() : nullptr;
        prepareHeads(stream(), deviceQ.get(), c.appends ? deviceK.get() : nullptr, values,
                     {c.heads, c.kvHeads, c.headDim}, preparation(c, weights.get(), cos.get(), sin.get(), scales.get()),
                     batch, pages, {hi.get(), lo.get()});
        EXPECT_TRUE(sameBits(expected.q, deviceQ.read())) << "queries, " << nameOf(c);
        EXPECT_EQ(expected.k, cacheK.read()) << "keys, " << nameOf(c);
        EXPECT_EQ(expected.v, cacheV.read()) << "values, " << nameOf(c);
        const std::vector<uint16_t> gotHi = hi.read(), gotLo = lo.read();
        for (size_t i = 0; i < q.size(); i++) {
            ASSERT_EQ(gotHi[i], toHalf(expected.q[i])) << nameOf(c) << ", element " << i;
            ASSERT_EQ(gotLo[i], toHalf(expected.q[i] - fromHalf(gotHi[i]))) << nameOf(c) << ", element " << i;
        }
    }

    std::vector<float> _cos, _sin, _weights, _scales;
};

const std::vector<Case> kCases = {
    {8, 2, 128, 128, HeadNorm::PerHead, false, KvType::BF16},  {8, 2, 128, 128, HeadNorm::None, true, KvType::F16},
    {6, 3, 64, 64, HeadNorm::FullRow, false, KvType::F32},     {4, 4, 8, 8, HeadNorm::None, true, KvType::F32},
    {4, 1, 16, 6, HeadNorm::PerHead, true, KvType::BF16},      {5, 5, 80, 20, HeadNorm::FullRow, true, KvType::BF16},
    {3, 1, 256, 64, HeadNorm::PerHead, false, KvType::F16},    {7, 1, 72, 34, HeadNorm::PerHead, false, KvType::F32},
    {16, 16, 128, 128, HeadNorm::FullRow, false, KvType::F16}, {2, 1, 96, 0, HeadNorm::PerHead, false, KvType::BF16},
    {1, 1, 8, 2, HeadNorm::None, false, KvType::F16},
};

TEST_F(Heads, HaveTheBitsOfTheCpu) {
    for (const Case& c : kCases) compare(c);
}

// Each of the further steps alone and with the others, for heads of every width.
TEST_F(Heads, TakeFurtherStepsWithTheBitsOfTheCpu) {
    for (const int32_t dim : {8, 64, 80, 128, 256, 264, 512}) {
        for (const HeadNorm norm : {HeadNorm::PerHead, HeadNorm::None}) {
            for (const bool adjacent : {false, true}) {
                Case plain = {6, 3, dim, dim == 80 ? 20 : dim, norm, adjacent, KvType::BF16};
                if (dim == 64) plain.ropeDims = 0;
                Case late = plain, values = plain, keys = plain, queries = plain, bare = plain, scaled = plain;
                late.normAfterRotation = true;
                values.valueNorm = true;
                keys.valuesAreKeys = true;
                queries.appends = false;
                bare.weighted = false;
                scaled.scaled = true;
                Case all = {5, 1, dim, plain.ropeDims, norm, adjacent, KvType::F32, true, true, true};
                all.weighted = false, all.scaled = true;
                Case alone = all;
                alone.appends = false;
                for (const Case& c : {plain, late, values, keys, queries, bare, scaled, all, alone}) compare(c);
            }
        }
    }
}

// A norm of whole rows goes with fewer of them.
TEST_F(Heads, NormalizeWholeRowsOfQueriesAlone) {
    for (const int32_t dim : {64, 512}) {
        Case c = {6, 3, dim, dim, HeadNorm::FullRow, false, KvType::BF16};
        c.scaled = true;
        compare(c);
        c.appends = false;
        compare(c);
    }
}

// Halfway cases, subnormals and overflows, for each type of the cache.
TEST_F(Heads, RoundValuesToNearestEven) {
    std::vector<float> v;
    for (const uint32_t bits :
         {0x3f808000u, 0x3f818000u, 0x3f808001u, 0x3f801000u, 0x3f803000u, 0x00000001u, 0x33000000u, 0x33000001u,
          0x33800000u, 0x387fe000u, 0x387ff000u, 0x477fefffu, 0x477ff000u, 0x7f7fffffu, 0x80000000u, 0xff800000u})
        v.push_back(floatFromBits(bits));
    for (const KvType type : {KvType::F32, KvType::BF16, KvType::F16}) {
        const DeviceArray<float> q(v), k(v), deviceV(v);
        const DeviceArray<int32_t> zero(std::vector<int32_t>{0});
        const size_t bytes = kPageTokens * 16 * kvElementBytes(type);
        const DeviceArray<uint8_t> cacheK(bytes), cacheV(bytes);
        prepareHeads(stream(), q.get(), k.get(), deviceV.get(), {1, 1, 16}, HeadPreparation(),
                     {1, zero.get(), zero.get(), zero.get(), 1}, {type, 1, 16, kPageTokens, cacheK.get(), cacheV.get()},
                     HalfRows());
        std::vector<uint8_t> expected(bytes, 0xff);
        cpu::kernels().storeKv(v.data(), 16, type, expected.data());
        EXPECT_EQ(expected, cacheK.read());
        EXPECT_EQ(expected, cacheV.read());
        EXPECT_TRUE(sameBits(v, q.read()));
    }
}

}  // namespace
}  // namespace sharpi::cuda
