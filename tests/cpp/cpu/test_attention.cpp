// Paged causal attention against a double-precision reference; the same bits from every table, in any chunks.
// Everything that a query may not see is NaN, and so is all memory that no query sees.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/half.h"
#include "core/portable.h"
#include "cpu/kernels.h"
#include "kernel_tables.h"
#include "seed.h"

namespace {

using sharpi::AttentionReach;
using sharpi::KvType;
using sharpi::cpu::AttentionArgs;
using sharpi::cpu::Kernels;

const float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Shape {
    KvType type;
    int32_t heads, kvHeads, headDim, pageTokens;
};

// What attention does besides softmax(scale * q k) v.
struct Rule {
    AttentionReach reach;
    float softcap = 0;
    bool sinks = false;
};

// One sequence with random keys and values, rounded to the cache's type, in shuffled pages.
class Sequence {
public:
    Sequence(const Shape& shape, int64_t tokens, unsigned seed, const Rule& rule = {})
        : _shape(shape), _rule(rule), _tokens(tokens) {
        std::mt19937 engine(sharpi::testSeed(seed));
        std::normal_distribution<float> normal;
        const int64_t pages = (tokens + shape.pageTokens - 1) / shape.pageTokens;
        for (int64_t i = 0; i < pages; i++) _pageTable.push_back(static_cast<int32_t>(i + 2));
        std::shuffle(_pageTable.begin(), _pageTable.end(), engine);
        const int64_t elements = (pages + 3) * shape.kvHeads * shape.pageTokens * shape.headDim;
        _k.assign(elements * 4, 0xff);  // NaN in all three types
        _v = _k;
        _keys.resize(tokens * shape.kvHeads * shape.headDim);
        _values.resize(_keys.size());
        for (size_t i = 0; i < _keys.size(); i++) {
            _keys[i] = normal(engine);
            _values[i] = normal(engine);
        }
        const int64_t width = static_cast<int64_t>(shape.heads) * shape.headDim;
        rowStride = width + 3;
        query.assign(tokens * rowStride, kNaN);
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t i = 0; i < width; i++) query[t * rowStride + i] = normal(engine);
        for (int64_t t = 0; t < tokens; t++) positions.push_back(static_cast<int32_t>(t));
        for (int32_t h = 0; h < shape.heads; h++) _sinks.push_back(normal(engine));
    }

    // Writes the keys and values of the positions [begin, end) into their pages.
    void append(const Kernels& table, int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            for (int32_t h = 0; h < _shape.kvHeads; h++) {
                const int64_t page = _pageTable[t / _shape.pageTokens];
                const int64_t line = (page * _shape.kvHeads + h) * _shape.pageTokens + t % _shape.pageTokens;
                const int64_t at = line * _shape.headDim * (_shape.type == KvType::F32 ? 4 : 2);
                const int64_t from = (t * _shape.kvHeads + h) * _shape.headDim;
                table.storeKv(&_keys[from], _shape.headDim, _shape.type, &_k[at]);
                table.storeKv(&_values[from], _shape.headDim, _shape.type, &_v[at]);
            }
        }
    }

    // The entries of pages that end before position `first` become numbers of pages that do not exist: to read one of
    // those crashes.
    void giveBackBefore(int32_t first) {
        for (int32_t page = 0; page < first / _shape.pageTokens; page++) _pageTable[page] = 1 << 28;
    }

    // Stores the keys as values too.
    void valuesAreKeys() { _values = _keys; }

    // Attention of the rows [begin, end), for all heads. prefix: values are the first so many elements of the keys, and
    // out has rows of outStride floats.
    void attend(const Kernels& table, int64_t begin, int64_t end, std::vector<float>& out, int32_t prefix = 0,
                int64_t outStride = 0) {
        AttentionArgs args;
        args.q = query.data();
        args.out = out.data();
        args.rowStride = rowStride;
        args.outStride = prefix ? outStride : rowStride;
        args.positions = positions.data();
        args.heads = _shape.heads;
        args.scale = scale();
        args.reach = _rule.reach;
        args.softcap = _rule.softcap;
        args.sinks = _rule.sinks ? _sinks.data() : nullptr;
        args.pages = {_shape.type, _shape.kvHeads, _shape.headDim, _shape.pageTokens, _k.data(), _v.data()};
        if (prefix) args.pages.valuePrefix = prefix, args.pages.v = nullptr;
        args.pageTable = _pageTable.data();
        const size_t bytes =
            sharpi::cpu::attentionScratchBytes(_shape.heads, _shape.kvHeads, _shape.headDim, _shape.pageTokens);
        constexpr uint32_t kGuard = 0x7fc0beef;  // a NaN
        std::vector<uint32_t> scratch(bytes / 4 + 64, kGuard);
        const size_t skip = (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64 / 4;
        for (int32_t h = 0; h < _shape.kvHeads; h++) table.attention(args, h, begin, end, scratch.data() + skip);
        for (size_t i = skip + (bytes + 3) / 4; i < scratch.size(); i++) ASSERT_EQ(scratch[i], kGuard) << "overrun";
    }

    std::vector<double> reference(int64_t row) const {
        std::vector<double> out(static_cast<size_t>(_shape.heads) * _shape.headDim, 0.0);
        for (int32_t h = 0; h < _shape.heads; h++) {
            const int32_t kvHead = h / (_shape.heads / _shape.kvHeads);
            const float* q = &query[row * rowStride + static_cast<int64_t>(h) * _shape.headDim];
            std::vector<double> weights;
            double sum = 0, top = _rule.sinks ? _sinks[h] : -1e300;
            for (int32_t j = 0; j <= positions[row]; j++) {
                double dot = 0;
                for (int32_t d = 0; d < _shape.headDim; d++)
                    dot += static_cast<double>(q[d]) * stored(_keys, j, kvHead, d);
                dot *= scale();
                if (_rule.softcap > 0) dot = _rule.softcap * std::tanh(dot / _rule.softcap);
                weights.push_back(sees(positions[row], j) ? dot : -1e300);
                top = std::max(top, weights.back());
            }
            for (double& weight : weights) sum += weight = std::exp(weight - top);
            if (_rule.sinks) sum += std::exp(_sinks[h] - top);
            for (int32_t d = 0; d < _shape.headDim; d++)
                for (size_t j = 0; j < weights.size(); j++)
                    out[h * _shape.headDim + d] += weights[j] / sum * stored(_values, j, kvHead, d);
        }
        return out;
    }

    // One row and head exactly as attention.cpp's opening comment defines it, in plain loops.
    std::vector<float> defined(int64_t row, int32_t h) const {
        const int32_t kvHead = h / (_shape.heads / _shape.kvHeads), dim = _shape.headDim;
        const float* q = &query[row * rowStride + static_cast<int64_t>(h) * dim];
        Joined whole(dim), segment(dim);
        for (int32_t first = 0; first <= positions[row]; first += _shape.pageTokens) {
            const int32_t n = std::min(_shape.pageTokens, positions[row] + 1 - first);
            int32_t begin = 0;
            while (begin < n && !sees(positions[row], first + begin)) begin++;
            const int32_t next = first + _shape.pageTokens;
            if (begin < n) addPage(segment, q, kvHead, first, begin, n);
            const bool isLast = next / _shape.pageTokens % sharpi::kSegmentPages == 0 || next > positions[row];
            if (!isLast || segment.l == 0) continue;
            whole.add(segment.m, segment.l, segment.o);
            segment = Joined(dim);
        }
        if (_rule.sinks) whole.addSink(_sinks[h]);
        for (float& value : whole.o) value /= whole.l;
        return whole.o;
    }

    std::vector<float> poisoned() const { return std::vector<float>(_tokens * rowStride, kNaN); }
    int64_t tokens() const { return _tokens; }

    std::vector<float> query;
    std::vector<int32_t> positions;
    int64_t rowStride = 0;

private:
    struct Joined {
        float m = -std::numeric_limits<float>::infinity(), l = 0;
        std::vector<float> o;

        explicit Joined(int32_t dim) : o(dim, 0.0f) {}
        void add(float mp, float lp, const std::vector<float>& op) {
            const float joined = std::max(m, mp);
            const float a = sharpi::portableExp(m - joined), c = sharpi::portableExp(mp - joined);
            m = joined;
            l = std::fma(lp, c, l * a);
            for (size_t d = 0; d < o.size(); d++) o[d] = std::fma(op[d], c, o[d] * a);
        }
        void addSink(float sink) {
            const float joined = std::max(m, sink), a = sharpi::portableExp(m - joined);
            l = l * a + sharpi::portableExp(sink - joined);
            for (float& x : o) x *= a;
        }
    };

    bool sees(int32_t position, int32_t key) const {
        const AttentionReach& reach = _rule.reach;
        return key <= position && (reach.window == 0 || position - key < reach.window) &&
               (reach.chunk == 0 || position / reach.chunk == key / reach.chunk);
    }
    // The keys [begin, n) of the page at position `first`.
    void addPage(Joined& segment, const float* q, int32_t kvHead, int32_t first, int32_t begin, int32_t n) const {
        const int32_t dim = _shape.headDim;
        std::vector<float> p(n, -std::numeric_limits<float>::infinity()), op(dim, 0.0f);
        for (int32_t j = begin; j < n; j++) {
            float dot = 0;
            for (int32_t d = 0; d < dim; d++) dot = std::fma(q[d], stored(_keys, first + j, kvHead, d), dot);
            p[j] = dot * scale();
            if (_rule.softcap > 0) p[j] = sharpi::portableSoftcap(p[j], _rule.softcap);
        }
        const float mp = *std::max_element(p.begin(), p.end());
        float sums[32] = {};
        for (int32_t j = begin; j < n; j++) sums[j % 32] += p[j] = sharpi::portableExp(p[j] - mp);
        for (int width = 16; width > 0; width /= 2)
            for (int i = 0; i < width; i++) sums[i] += sums[i + width];
        for (int32_t d = 0; d < dim; d++)
            for (int32_t j = begin; j < n; j++) op[d] = std::fma(p[j], stored(_values, first + j, kvHead, d), op[d]);
        segment.add(mp, sums[0], op);
    }

    float scale() const { return 1.0f / std::sqrt(static_cast<float>(_shape.headDim)); }
    float stored(const std::vector<float>& from, int64_t token, int32_t head, int32_t d) const {
        const float value = from[(token * _shape.kvHeads + head) * _shape.headDim + d];
        switch (_shape.type) {
        case KvType::BF16: return sharpi::floatFromBf16(sharpi::bf16FromFloat(value));
        case KvType::F16: return sharpi::floatFromF16(sharpi::f16FromFloat(value));
        default: return value;
        }
    }

    Shape _shape;
    Rule _rule;
    int64_t _tokens;
    std::vector<float> _sinks;
    std::vector<int32_t> _pageTable;
    std::vector<uint8_t> _k, _v;
    std::vector<float> _keys, _values;
};

void expectSameBits(const std::vector<float>& got, const std::vector<float>& expected, const std::string& what) {
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); i++)
        ASSERT_EQ(sharpi::bitsFromFloat(got[i]), sharpi::bitsFromFloat(expected[i]))
            << what << " differs at " << i << ": " << got[i] << " and " << expected[i];
}

std::string nameOf(const Rule& r) {
    return "window " + std::to_string(r.reach.window) + ", chunk " + std::to_string(r.reach.chunk) + ", softcap " +
           std::to_string(r.softcap) + (r.sinks ? ", sinks" : "");
}

std::string nameOf(const Shape& s) {
    return "type " + std::to_string(static_cast<int>(s.type)) + ", heads " + std::to_string(s.heads) + "/" +
           std::to_string(s.kvHeads) + ", dim " + std::to_string(s.headDim) + ", page " + std::to_string(s.pageTokens);
}

const std::vector<Shape> kShapes = {
    {KvType::F32, 4, 2, 64, 16},   {KvType::BF16, 4, 2, 64, 32}, {KvType::F16, 6, 2, 80, 32},
    {KvType::BF16, 8, 1, 128, 64}, {KvType::F32, 3, 3, 96, 7},   {KvType::F16, 2, 1, 256, 16},
    {KvType::BF16, 5, 1, 2, 1},    {KvType::F16, 9, 3, 34, 33},  {KvType::BF16, 2, 2, 32, 48},
    {KvType::BF16, 3, 1, 512, 16}, {KvType::F32, 2, 2, 504, 7},  {KvType::F16, 12, 1, 96, 24},
    {KvType::BF16, 2, 1, 33, 8},
};

// One number off in a window or a chunk is another result; so is a window at a page's border.
const std::vector<Rule> kRules = {
    {{1, 0}},  {{2, 0}},  {{15, 0}}, {{16, 0}},  {{17, 0}},     {{33, 0}, 0, true},    {{200, 0}},         {{0, 1}},
    {{0, 16}}, {{0, 20}}, {{0, 64}}, {{}, 1.5f}, {{}, 0, true}, {{24, 0}, 0.7f, true}, {{0, 32}, 3, true},
};

TEST(Attention, MatchesTheReferenceAndAllTablesAgree) {
    for (const Shape& shape : kShapes) {
        std::vector<float> first;
        for (const Kernels* table : tables()) {
            Sequence sequence(shape, 75, 1);
            sequence.append(*table, 0, 75);
            std::vector<float> out = sequence.poisoned();
            sequence.attend(*table, 0, 75, out);
            const int64_t width = static_cast<int64_t>(shape.heads) * shape.headDim;
            for (int64_t row = 0; row < 75; row++) {
                const std::vector<double> expected = sequence.reference(row);
                for (int64_t i = 0; i < width; i++)
                    ASSERT_NEAR(out[row * sequence.rowStride + i], expected[i], 4e-6)
                        << table->name << ", " << nameOf(shape) << ", row " << row << ", element " << i;
                for (int64_t i = width; i < sequence.rowStride; i++)
                    ASSERT_TRUE(std::isnan(out[row * sequence.rowStride + i])) << "wrote between rows";
            }
            if (first.empty()) first = out;
            expectSameBits(out, first, std::string(table->name) + ", " + nameOf(shape));
        }
    }
}

// Bit by bit; the GPU's decode kernel is held to the same definition.
TEST(Attention, FollowsItsWrittenDefinition) {
    for (const Shape& shape : kShapes) {
        for (const Kernels* table : tables()) {
            Sequence sequence(shape, 75, 7);
            sequence.append(*table, 0, 75);
            // All rows at once, then few at a time, for which pages are converted in another way.
            for (const int64_t together : {75, 3, 1}) {
                std::vector<float> out = sequence.poisoned();
                for (int64_t row = 0; row < 75; row += together) sequence.attend(*table, row, row + together, out);
                for (int64_t row = 0; row < 75; row++)
                    for (int32_t h = 0; h < shape.heads; h++) {
                        const float* from = &out[row * sequence.rowStride + static_cast<int64_t>(h) * shape.headDim];
                        expectSameBits(std::vector<float>(from, from + shape.headDim), sequence.defined(row, h),
                                       std::string(table->name) + ", " + nameOf(shape) + ", " +
                                           std::to_string(together) + " rows");
                    }
            }
        }
    }
}

TEST(Attention, ValuesMayBeTheBeginningsOfKeys) {
    constexpr int64_t kTokens = 75, kGap = 5;
    std::vector<Shape> shapes = kShapes;
    shapes.push_back({KvType::BF16, 5, 1, 576, 64});
    for (const Shape& shape : shapes) {
        for (const Kernels* table : tables()) {
            Sequence sequence(shape, kTokens, 9);
            sequence.valuesAreKeys();
            sequence.append(*table, 0, kTokens);
            std::vector<float> whole = sequence.poisoned();
            sequence.attend(*table, 0, kTokens, whole);
            const int32_t vectors = std::max(1, shape.headDim / 16 * 16);
            for (const int32_t prefix : {1, shape.headDim / 2, shape.headDim - shape.headDim / 9, vectors}) {
                const int64_t stride = int64_t{shape.heads} * prefix + kGap;
                std::vector<float> out(static_cast<size_t>(kTokens * stride), kNaN), expected = out, apart = out;
                sequence.attend(*table, 0, kTokens, out, prefix, stride);
                for (int64_t row = 0; row < kTokens; row++)
                    sequence.attend(*table, row, row + 1, apart, prefix, stride);
                for (int64_t row = 0; row < kTokens; row++)
                    for (int64_t h = 0; h < shape.heads; h++)
                        for (int64_t d = 0; d < prefix; d++)
                            expected[row * stride + h * prefix + d] =
                                whole[row * sequence.rowStride + h * shape.headDim + d];
                const std::string what =
                    std::string(table->name) + ", " + nameOf(shape) + ", prefix " + std::to_string(prefix);
                expectSameBits(out, expected, what);
                expectSameBits(apart, expected, what + ", row by row");
            }
        }
    }
}

// Keys are written only as far as each chunk has come; the rest of every page is NaN.
TEST(Attention, AnyChunksGiveTheBitsOfOnePrefill) {
    for (const Shape& shape : kShapes) {
        for (const Kernels* table : tables()) {
            Sequence whole(shape, 70, 2);
            std::vector<float> expected = whole.poisoned();
            whole.append(*table, 0, 70);
            whole.attend(*table, 0, 70, expected);
            for (const unsigned longest : {1u, 5u, 33u}) {
                std::mt19937 engine(sharpi::testSeed(static_cast<uint32_t>(longest)));
                Sequence parts(shape, 70, 2);
                std::vector<float> out = parts.poisoned();
                for (int64_t begin = 0, end; begin < 70; begin = end) {
                    end = std::min<int64_t>(70, begin + 1 + engine() % longest);
                    parts.append(*table, begin, end);
                    parts.attend(*table, begin, end, out);
                }
                expectSameBits(out, expected, std::string(table->name) + ", " + nameOf(shape));
            }
        }
    }
}

TEST(AttentionRules, MatchTheReferenceAndAllTablesAgree) {
    for (const Shape& shape : kShapes) {
        for (const Rule& rule : kRules) {
            std::vector<float> first;
            for (const Kernels* table : tables()) {
                Sequence sequence(shape, 75, 8, rule);
                sequence.append(*table, 0, 75);
                std::vector<float> out = sequence.poisoned();
                sequence.attend(*table, 0, 75, out);
                if (!first.empty()) {
                    expectSameBits(out, first, std::string(table->name) + ", " + nameOf(shape) + ", " + nameOf(rule));
                    continue;
                }
                first = out;
                for (int64_t row = 0; row < 75; row++) {
                    const std::vector<double> expected = sequence.reference(row);
                    for (size_t i = 0; i < expected.size(); i++)
                        ASSERT_NEAR(out[row * sequence.rowStride + i], expected[i], 4e-6)
                            << nameOf(shape) << ", " << nameOf(rule) << ", row " << row << ", element " << i;
                }
            }
        }
    }
}

TEST(AttentionRules, FollowTheirWrittenDefinition) {
    const Kernels* table = tables().back();
    for (const Shape& shape : kShapes) {
        for (const Rule& rule : kRules) {
            Sequence sequence(shape, 75, 9, rule);
            sequence.append(*table, 0, 75);
            std::vector<float> out = sequence.poisoned();
            sequence.attend(*table, 0, 75, out);
            for (int64_t row = 0; row < 75; row++)
                for (int32_t h = 0; h < shape.heads; h++) {
                    const float* from = &out[row * sequence.rowStride + static_cast<int64_t>(h) * shape.headDim];
                    expectSameBits(std::vector<float>(from, from + shape.headDim), sequence.defined(row, h),
                                   nameOf(shape) + ", " + nameOf(rule) + ", row " + std::to_string(row));
                }
        }
    }
}

// As a prompt is cut, the pages that no row sees any more are given back.
TEST(AttentionRules, AnyChunksGiveTheBitsOfOnePrefill) {
    for (const Shape& shape : kShapes) {
        for (const Rule& rule : kRules) {
            for (const Kernels* table : tables()) {
                Sequence whole(shape, 70, 2, rule), parts(shape, 70, 2, rule);
                std::vector<float> expected = whole.poisoned(), out = expected;
                whole.append(*table, 0, 70);
                whole.attend(*table, 0, 70, expected);
                std::mt19937 engine(sharpi::testSeed(9));
                for (int64_t begin = 0, end; begin < 70; begin = end) {
                    end = std::min<int64_t>(70, begin + 1 + engine() % 9);
                    parts.append(*table, begin, end);
                    parts.giveBackBefore(rule.reach.first(static_cast<int32_t>(begin)));
                    parts.attend(*table, begin, end, out);
                }
                expectSameBits(out, expected, std::string(table->name) + ", " + nameOf(shape) + ", " + nameOf(rule));
            }
        }
    }
}

// A key that no row sees is NaN, and so is its value.
TEST(AttentionRules, KeysOutOfReachNeverReachARow) {
    const Shape shape = {KvType::BF16, 4, 1, 64, 32};
    for (const Rule& rule : {Rule{{37, 0}}, Rule{{37, 0}, 2, true}, Rule{{0, 75}}}) {
        for (const Kernels* table : tables()) {
            Sequence clean(shape, 150, 3, rule), poisoned(shape, 150, 3, rule);
            std::vector<float> expected = clean.poisoned(), out = expected;
            clean.append(*table, 0, 150);
            clean.attend(*table, 140, 150, expected);
            const int32_t first = rule.reach.first(140);
            EXPECT_EQ(first, rule.reach.window ? 104 : 75);
            poisoned.append(*table, first, 150);
            poisoned.attend(*table, 140, 150, out);
            expectSameBits(out, expected, std::string(table->name) + ", " + nameOf(rule));
            std::vector<float> few = clean.poisoned();
            for (int64_t row = 140; row < 150; row += 2) poisoned.attend(*table, row, row + 2, few);
            expectSameBits(few, expected, std::string(table->name) + ", " + nameOf(rule) + ", two rows at a time");
            EXPECT_FALSE(std::isnan(out[140 * clean.rowStride]));
        }
    }
}

// A later key that is NaN must not reach a row of the same call that does not see it.
TEST(Attention, KeysBeyondARowsPositionNeverReachIt) {
    const Shape shape = {KvType::BF16, 3, 1, 64, 32};
    for (const Kernels* table : tables()) {
        Sequence clean(shape, 60, 3), poisoned(shape, 60, 3);
        std::vector<float> expected = clean.poisoned();
        clean.append(*table, 0, 60);
        clean.attend(*table, 0, 60, expected);
        poisoned.append(*table, 0, 41);  // keys 41.. stay NaN
        // Of two rows at a time, the last one that sees no NaN is multiplied with one that does.
        for (const int64_t together : {60, 2}) {
            std::vector<float> out = poisoned.poisoned();
            for (int64_t row = 0; row < 60; row += together) poisoned.attend(*table, row, row + together, out);
            for (int64_t row = 0; row < 60; row++)
                for (int64_t i = 0; i < 192; i++) {
                    const float got = out[row * clean.rowStride + i];
                    const float wanted = expected[row * clean.rowStride + i];
                    if (row > 40) {
                        ASSERT_TRUE(std::isnan(got));
                    } else {
                        ASSERT_EQ(sharpi::bitsFromFloat(got), sharpi::bitsFromFloat(wanted))
                            << table->name << " " << row;
                    }
                }
        }
    }
}

// Rows of one call need not be neighbours or in order, and the scratch's contents do not matter.
TEST(Attention, PositionsMayComeInAnyOrder) {
    const Shape shape = {KvType::F16, 6, 2, 48, 16};
    for (const Kernels* table : tables()) {
        Sequence sequence(shape, 90, 4);
        sequence.append(*table, 0, 90);
        std::mt19937 engine(sharpi::testSeed(6));
        std::shuffle(sequence.positions.begin(), sequence.positions.end(), engine);
        std::vector<float> together = sequence.poisoned(), apart = together;
        sequence.attend(*table, 0, 90, together);
        for (int64_t row = 89; row >= 0; row--) sequence.attend(*table, row, row + 1, apart);
        expectSameBits(together, apart, table->name);
        std::vector<float> few = sequence.poisoned();
        for (int64_t row = 0; row < 90; row += 5) sequence.attend(*table, row, row + 5, few);
        expectSameBits(few, together, std::string(table->name) + ", five rows at a time");
        for (int64_t row = 0; row < 90; row += 13) {
            const std::vector<double> expected = sequence.reference(row);
            for (size_t i = 0; i < expected.size(); i++)
                ASSERT_NEAR(together[row * sequence.rowStride + i], expected[i], 4e-6);
        }
    }
}

// Scores far apart: the running maximum must carry over pages, also when a later page holds the largest score.
TEST(Attention, LargeScoresDoNotOverflow) {
    const Shape shape = {KvType::F32, 2, 1, 64, 16};
    for (const Kernels* table : tables()) {
        Sequence sequence(shape, 64, 5);
        for (float& value : sequence.query) value *= 60.0f;
        sequence.append(*table, 0, 64);
        std::vector<float> out = sequence.poisoned();
        sequence.attend(*table, 0, 64, out);
        for (int64_t row = 0; row < 64; row++) {
            const std::vector<double> expected = sequence.reference(row);
            for (size_t i = 0; i < expected.size(); i++)  // scores of some hundreds: float dots err by 1e-4 there
                ASSERT_NEAR(out[row * sequence.rowStride + i], expected[i], 1e-3) << table->name << " row " << row;
        }
    }
}

}  // namespace
