// What the CPU does to queries, keys and values before attention, against the same in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/operations/cpu_operations.h"
#include "seed.h"

namespace {

using namespace sharpi;
using QkNorm = AttentionSpec::QkNorm;

constexpr int32_t kHeads = 6, kKvHeads = 2, kDim = 24, kRopeDims = 16, kPageTokens = 16, kPage = 1;
constexpr int64_t kRows = 3, kContext = 32;
constexpr float kEps = 1e-5f;
const std::vector<int32_t> kPositions = {4, 5, 6};

using Rows = std::vector<float>;

class PrepareHeads : public testing::Test {
protected:
    PrepareHeads() : _work(2, _clock), _operations(_work) {
        StepLimits limits;
        limits.maxRows = kRows;
        limits.context = kContext;
        limits.heads = kHeads, limits.kvHeads = kKvHeads, limits.headDim = kDim, limits.pageTokens = kPageTokens;
        limits.queryWidth = kHeads * kDim, limits.kvWidth = kKvHeads * kDim;
        _memory.resize(CpuScratch(_work.pool.threads(), limits).total + 64);
        const size_t skip = (64 - reinterpret_cast<uintptr_t>(_memory.data()) % 64) % 64;
        _work.takeBuffers(limits, _memory.data() + skip);
        _batch.tokens = {1, 1, 1};
        _batch.positions = kPositions;
        _batch.sequences = {0, 0, 0};
        _work.batch = &_batch;
        _work.sequences = {{0, kRows, {&_pageTable}, {}}};
        q = random(kRows * kHeads * kDim), k = random(kRows * kKvHeads * kDim), v = random(k.size());
        qWeight = random(kHeads * kDim), kWeight = random(kHeads * kDim);
        cos = random(kContext * kRopeDims / 2), sin = random(cos.size()), scales = random(kContext);
    }

    Rows random(size_t n) {
        std::normal_distribution<float> normal;
        Rows out(n);
        for (float& x : out) x = normal(_engine);
        return out;
    }

    // All that a test does not change.
    HeadsCall call() const {
        HeadsCall call;
        call.heads = kHeads;
        call.eps = kEps;
        call.qkNorm = QkNorm::PerHead;
        call.qNorm = qWeight.data(), call.kNorm = kWeight.data();
        call.rope.cos = cos.data(), call.rope.sin = sin.data();
        call.rope.dims = kRopeDims;
        return call;
    }

    // Normalizes each part of `width`.
    static void norm(std::vector<double>& x, const float* weight, size_t width) {
        for (size_t begin = 0; begin < x.size(); begin += width) {
            double sum = 0;
            for (size_t i = 0; i < width; i++) sum += x[begin + i] * x[begin + i];
            for (size_t i = 0; i < width; i++)
                x[begin + i] *= (weight ? weight[i] : 1.0) / std::sqrt(sum / static_cast<double>(width) + kEps);
        }
    }
    void rotate(std::vector<double>& x, int32_t position) const {
        constexpr int32_t half = kRopeDims / 2;
        for (size_t begin = 0; begin < x.size(); begin += kDim)
            for (int32_t i = 0; i < half; i++) {
                double &a = x[begin + i], &b = x[begin + half + i];
                const double c = cos[position * half + i], s = sin[position * half + i], first = a;
                a = first * c - b * s;
                b = first * s + b * c;
            }
    }
    // What becomes of queries or keys.
    std::vector<double> expected(const Rows& rows, const float* weight, const HeadsCall& how, bool scaled) const {
        std::vector<double> all;
        const size_t width = rows.size() / kRows;
        const size_t part = how.qkNorm == QkNorm::PerHead ? kDim : width;
        for (size_t t = 0; t < kRows; t++) {
            std::vector<double> x(rows.begin() + t * width, rows.begin() + (t + 1) * width);
            if (how.qkNorm != QkNorm::None && !how.normAfterRotation) norm(x, weight, part);
            if (how.rope.dims) rotate(x, kPositions[t]);
            if (how.qkNorm != QkNorm::None && how.normAfterRotation) norm(x, weight, part);
            for (double& value : x) value *= scaled ? how.queryScale[kPositions[t]] : 1.0;
            all.insert(all.end(), x.begin(), x.end());
        }
        return all;
    }

    // Runs the operation, and compares all that it writes.
    void compare(const HeadsCall& how) {
        const float nan = std::numeric_limits<float>::quiet_NaN();
        std::copy(q.begin(), q.end(), _work.at(RowBuffer::Queries));
        std::copy(k.begin(), k.end(), _work.at(RowBuffer::Keys));
        std::copy(v.begin(), v.end(), _work.at(RowBuffer::Values));
        if (how.valuesAreKeys) std::fill_n(_work.at(RowBuffer::Values), v.size(), nan);
        Rows keys(2 * kKvHeads * kPageTokens * kDim, nan), values = keys;
        const KvPages pages = {KvType::F32,
                               kKvHeads,
                               kDim,
                               kPageTokens,
                               reinterpret_cast<uint8_t*>(keys.data()),
                               reinterpret_cast<uint8_t*>(values.data())};
        _operations.prepareHeads(how, pages);
        const float* const queries = _work.at(RowBuffer::Queries);
        near(Rows(queries, queries + q.size()), expected(q, how.qNorm, how, how.queryScale), "queries");
        if (!how.appends) {
            for (size_t i = 0; i < keys.size(); i++) ASSERT_TRUE(std::isnan(keys[i]) && std::isnan(values[i]));
            return;
        }
        near(stored(keys), expected(k, how.kNorm, how, false), "keys");
        const Rows& from = how.valuesAreKeys ? k : v;
        std::vector<double> wanted(from.begin(), from.end());
        if (how.valueNorm) norm(wanted, nullptr, kDim);
        near(stored(values), wanted, "values");
    }

    Rows q, k, v, qWeight, kWeight, cos, sin, scales;

private:
    // The rows' elements in the cache, in the order of Keys and Values.
    static Rows stored(const Rows& cache) {
        Rows out;
        for (const int32_t position : kPositions)
            for (int32_t h = 0; h < kKvHeads; h++) {
                const auto at = cache.begin() + ((kPage * kKvHeads + h) * kPageTokens + position) * kDim;
                out.insert(out.end(), at, at + kDim);
            }
        return out;
    }
    static void near(const Rows& got, const std::vector<double>& wanted, const std::string& what) {
        ASSERT_EQ(got.size(), wanted.size());
        // A few roundings of numbers of up to about ten.
        for (size_t i = 0; i < got.size(); i++) ASSERT_NEAR(got[i], wanted[i], 5e-6) << what << ", element " << i;
    }

    HostClock _clock;
    CpuWork _work;
    CpuOperations _operations;
    std::vector<uint8_t> _memory;
    Batch _batch;
    int32_t _pageTable = kPage;
    std::mt19937 _engine{testSeed(31)};
};

TEST_F(PrepareHeads, NormalizesThenRotates) {
    HeadsCall how = call();
    compare(how);
    how.qkNorm = QkNorm::FullRow;
    compare(how);
    how.qkNorm = QkNorm::None;
    compare(how);
}

TEST_F(PrepareHeads, NormalizesWithoutWeights) {
    HeadsCall how = call();
    how.qNorm = how.kNorm = nullptr;
    compare(how);
}

TEST_F(PrepareHeads, NormalizesAfterTheRotation) {
    HeadsCall how = call();
    how.normAfterRotation = true;
    compare(how);
    how.qNorm = how.kNorm = nullptr;
    compare(how);
}

TEST_F(PrepareHeads, RotatesNothingWithoutARope) {
    HeadsCall how = call();
    how.rope = RopeTable();
    compare(how);
    how.normAfterRotation = true;
    compare(how);
}

TEST_F(PrepareHeads, NormalizesValues) {
    HeadsCall how = call();
    how.valueNorm = true;
    compare(how);
}

TEST_F(PrepareHeads, TakesValuesFromKeysBeforeTheirNorm) {
    HeadsCall how = call();
    how.valuesAreKeys = true;
    compare(how);
    how.valueNorm = true;
    compare(how);
}

TEST_F(PrepareHeads, PreparesQueriesAloneIfNothingIsAppended) {
    HeadsCall how = call();
    how.appends = false;
    compare(how);
    how.valueNorm = how.normAfterRotation = true;
    compare(how);
}

TEST_F(PrepareHeads, ScalesQueriesLast) {
    HeadsCall how = call();
    how.queryScale = scales.data();
    compare(how);
    how.normAfterRotation = true;
    compare(how);
    how.appends = false;
    compare(how);
}

}  // namespace
