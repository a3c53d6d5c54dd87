// Prefill's matrix products against double-precision products on the host. Those take the weights from the CPU's
// dequantizeRow, and the activations that the tensor cores get.
//
// The tolerances are relative to the root of the summed squares of an output's terms, which is the size of an error if
// each term has its own:
// - Plain form: weights are rounded to bf16, each by at most 2^-9, and by 1.1e-3 in the mean. A whole result may be
//   off by 4e-3, which leaves room, and an element by 4 times that. That is 14 standard deviations, but less than the
//   effect of a block that is missing or taken twice.
// - Split form: weights and activations keep 16 or 17 bits, and the product of the two low halves is left out. That is
//   about 2^-17 in all. f32 sums, which the tensor cores truncate, add about as much: 2e-5.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/matmul/matmul_wgmma.h"
#include "matmul_test.h"

namespace sharpi::cuda {

namespace {

constexpr double kPlainTolerance = 4e-3, kSplitTolerance = 2e-5;
constexpr int64_t kGuard = 64;  // floats past the end of y that must not change

struct Expected {
    std::vector<double> y, size;  // the product, and the root of the summed squares of its terms
};

Expected multiply(const float* w, int64_t outputs, int64_t cols, const std::vector<const float*>& rows) {
    Expected result;
    for (const float* x : rows) {
        for (int64_t n = 0; n < outputs; ++n) {
            double sum = 0, squares = 0;
            for (int64_t k = 0; k < cols; ++k) {
                const double term = static_cast<double>(w[n * cols + k]) * x[k];
                sum += term;
                squares += term * term;
            }
            result.y.push_back(sum);
            result.size.push_back(std::sqrt(squares));
        }
    }
    return result;
}

void expectClose(const Expected& expected, const std::vector<float>& y, double tolerance, const std::string& what) {
    double error = 0, size = 0;
    for (size_t i = 0; i < expected.y.size(); ++i) {
        const double difference = std::fabs(y[i] - expected.y[i]);
        // Not "difference > bound": a NaN must fail.
        ASSERT_TRUE(difference <= 4 * tolerance * expected.size[i] + 1e-30)
            << what << ": element " << i << " is " << y[i] << ", expected " << expected.y[i] << ", terms "
            << expected.size[i];
        error += difference * difference;
        size += expected.size[i] * expected.size[i];
    }
    // A few elements are too few for a mean: weights that share a scale are rounded alike, so one element may be off by
    // more.
    if (expected.y.size() >= 64) {
        EXPECT_LE(std::sqrt(error), tolerance * std::sqrt(size)) << what;
    }
    for (size_t i = expected.y.size(); i < y.size(); ++i)
        ASSERT_TRUE(std::isnan(y[i])) << what << ": wrote past the end of y";
}

class Matmul : public MatmulTest {
protected:
    static std::vector<const float*> rowsOf(const Activations& x, int64_t rows, int64_t cols) {
        std::vector<const float*> result;
        for (int64_t t = 0; t < rows; ++t) result.push_back(x.values.data() + t * cols);
        return result;
    }

    void check(DType type, int64_t rows, int64_t outputs, int64_t cols, bool split) {
        const Weights w = weights(type, outputs, cols);
        const Activations x = activations(rows, cols, split);
        const DeviceArray<float> y(static_cast<size_t>(rows * outputs + kGuard));
        matmul(stream(), w.packed, x.rows(), rows, nullptr, y.get(), Store::Write);
        expectClose(multiply(w.values.data(), outputs, cols, rowsOf(x, rows, cols)), y.read(),
                    split ? kSplitTolerance : kPlainTolerance, describe(type, rows, outputs, cols));
    }
};

INSTANTIATE_TEST_SUITE_P(Product, Matmul, kBothWays, nameOfWay);

TEST_P(Matmul, EveryQuantizedType) {
    for (const DType type : reference::quantizedTypes()) {
        // With 9 blocks, the last step along k has one. With 3 superblocks, blocks have all places within a superblock.
        check(type, 150, 200, blocks(type, 3, 9), false);
        check(type, 20, 130, blocks(type, 1, 1), false);
    }
}

TEST_P(Matmul, FloatTypesPlainAndSplit) {
    for (const DType type : kFloats) {
        check(type, 150, 200, 320, true);
        if (type != DType::F32) check(type, 150, 200, 320, false);
    }
}

TEST_P(Matmul, TailsInEveryDimension) {
    for (const int64_t rows : {1, 9, 16, 17, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511})
        for (const int64_t outputs : {1, 2, 63, 129, 256}) check(DType::Q4_K, rows, outputs, 256, false);
}

// As many tiles as one wave of blocks can list, and more.
TEST_P(Matmul, ManyOutputs) {
    const int64_t most = int64_t{stream().device().multiprocessors} * kMostFewItems * 64;
    check(DType::Q8_0, 3, most, 32, false);
    check(DType::Q8_0, 1, most + 70, 32, false);
}

TEST_P(Matmul, AnyNumberOfColumnsWithFloatWeights) {
    for (const int64_t cols : {1, 7, 8, 12, 33, 63, 65, 72, 100, 132, 260}) {
        for (const DType type : kFloats) {
            check(type, 70, 37, cols, true);
            if (type != DType::F32) check(type, 70, 37, cols, false);
        }
    }
}

TEST_P(Matmul, SplitWeightsWithoutLowActivations) {
    const int64_t rows = 40, outputs = 50, cols = 128;
    const Weights w = weights(DType::F32, outputs, cols);
    const Activations x = activations(rows, cols, false);
    const DeviceArray<float> y(static_cast<size_t>(rows * outputs + kGuard));
    matmul(stream(), w.packed, x.rows(), rows, nullptr, y.get(), Store::Write);
    expectClose(multiply(w.values.data(), outputs, cols, rowsOf(x, rows, cols)), y.read(), kSplitTolerance,
                "exact activations");
}

TEST_P(Matmul, LowHalvesDoNotTouchQuantizedWeights) {
    const int64_t rows = 40, outputs = 50, cols = 256;
    const Weights w = weights(DType::Q6_K, outputs, cols);
    const Activations x = activations(rows, cols, true);
    const DeviceArray<float> with(static_cast<size_t>(rows * outputs)), without(static_cast<size_t>(rows * outputs));
    matmul(stream(), w.packed, x.rows(), rows, nullptr, with.get(), Store::Write);
    matmul(stream(), w.packed, {x.rows().hi, nullptr}, rows, nullptr, without.get(), Store::Write);
    EXPECT_TRUE(sameBits(without.read(), with.read()));
}

TEST_P(Matmul, BiasAndAdding) {
    for (const int64_t outputs : {64, 131}) {
        const int64_t rows = 77, cols = 512;
        const Weights w = weights(DType::Q5_K, outputs, cols);
        const Activations x = activations(rows, cols, false);
        const std::vector<float> bias = randomFloats(static_cast<size_t>(outputs)),
                                 old = randomFloats(static_cast<size_t>(rows * outputs));
        const DeviceArray<float> onDevice(bias), written(static_cast<size_t>(rows * outputs + kGuard)), added(old),
            plain(old);
        Expected expected = multiply(w.values.data(), outputs, cols, rowsOf(x, rows, cols));
        matmul(stream(), w.packed, x.rows(), rows, nullptr, plain.get(), Store::Add);
        matmul(stream(), w.packed, x.rows(), rows, onDevice.get(), written.get(), Store::Write);
        matmul(stream(), w.packed, x.rows(), rows, onDevice.get(), added.get(), Store::Add);
        const auto shifted = [&](bool withBias, bool withOld) {
            Expected e = expected;
            for (size_t i = 0; i < e.y.size(); ++i)
                e.y[i] += (withBias ? bias[i % static_cast<size_t>(outputs)] : 0.0f) + (withOld ? old[i] : 0.0f);
            return e;
        };
        expectClose(shifted(false, true), plain.read(), kPlainTolerance, "added");
        expectClose(shifted(true, false), written.read(), kPlainTolerance, "with bias");
        expectClose(shifted(true, true), added.read(), kPlainTolerance, "with bias, added");
    }
}

// Parts of a matrix, each packed on its own, write their columns of wider rows and nothing else.
TEST_P(Matmul, PartsHaveTheBitsOfTheWhole) {
    const int64_t cols = 512, gap = 4;
    for (const DType type : {DType::Q4_K, DType::Q6_K, DType::BF16, DType::F32}) {
        for (const int64_t odd : {0, 3}) {  // with and without alignment of the first part's rows
            const std::vector<int64_t> sizes = {64, 1 + odd, 128, 55};
            const int64_t total = 248 + odd, stride = total + gap * 4;
            const std::vector<uint8_t> file = fileWeights(type, total, cols, random());
            const Weights whole = weights(type, total, cols, file);
            const std::vector<float> bias = randomFloats(static_cast<size_t>(total));
            const DeviceArray<float> biasOnDevice(bias);
            for (const int64_t rows : {1, 70, 200}) {
                SCOPED_TRACE(describe(type, rows, total, cols));
                const Activations x = activations(rows, cols, type == DType::F32);
                const std::vector<float> before = randomFloats(static_cast<size_t>(rows * stride));
                const DeviceArray<float> all(static_cast<size_t>(rows * total)), y(static_cast<size_t>(rows * stride)),
                    sum(before);
                matmul(stream(), whole.packed, x.rows(), rows, biasOnDevice.get(), all.get(), Store::Write);
                const std::vector<float> product = all.read();
                std::vector<float> written = y.read(), added = before;
                int64_t begin = 0, column = 0;
                for (const int64_t size : sizes) {
                    const auto first = file.begin() + begin * static_cast<int64_t>(rowBytes(type, cols));
                    const Weights part =
                        weights(type, size, cols, {first, first + size * static_cast<int64_t>(rowBytes(type, cols))});
                    matmul(stream(), part.packed, x.rows(), rows, biasOnDevice.get() + begin, y.get() + column,
                           Store::Write, stride);
                    matmul(stream(), part.packed, x.rows(), rows, nullptr, sum.get() + column, Store::Add, stride);
                    stream().synchronize();  // before the part is freed
                    for (int64_t t = 0; t < rows; ++t)
                        std::copy_n(&product[static_cast<size_t>(t * total + begin)], size,
                                    &written[static_cast<size_t>(t * stride + column)]);
                    begin += size;
                    column += size + gap;
                }
                ASSERT_EQ(begin, total);
                EXPECT_TRUE(sameBits(written, y.read()));
                matmul(stream(), whole.packed, x.rows(), rows, nullptr, all.get(), Store::Write);
                const std::vector<float> plain = all.read();
                begin = column = 0;
                for (const int64_t size : sizes) {
                    for (int64_t t = 0; t < rows; ++t)
                        for (int64_t i = 0; i < size; ++i)
                            added[static_cast<size_t>(t * stride + column + i)] +=
                                plain[static_cast<size_t>(t * total + begin + i)];
                    begin += size;
                    column += size + gap;
                }
                EXPECT_TRUE(sameBits(added, sum.read()));
            }
        }
    }
    const Weights w = weights(DType::Q8_0, 64, 32);
    const Activations x = activations(1, 32, false);
    const DeviceArray<float> y(64);
    EXPECT_THROW(matmul(stream(), w.packed, x.rows(), 1, nullptr, y.get(), Store::Write, 63), Error);
}

// A row's bits do not depend on the rest of the call, because tiles of all sizes sum in one order.
TEST_P(Matmul, ARowDoesNotDependOnTheOthers) {
    const int64_t rows = 200, outputs = 300, cols = 1024;
    const Weights w = weights(DType::Q4_K, outputs, cols);
    const Activations x = activations(rows, cols, false);
    const DeviceArray<float> all(static_cast<size_t>(rows * outputs));
    matmul(stream(), w.packed, x.rows(), rows, nullptr, all.get(), Store::Write);
    const std::vector<float> expected = all.read();
    for (const int64_t some : {1, 30, 64, 65, 199}) {
        const DeviceArray<float> y(static_cast<size_t>(some * outputs));
        matmul(stream(), w.packed, x.rows(), some, nullptr, y.get(), Store::Write);
        EXPECT_TRUE(sameBits(std::vector<float>(expected.begin(), expected.begin() + some * outputs), y.read()))
            << some << " rows";
    }
}

// Heads whose rows divide no tile, parts that cut heads, and outputs that are apart.
TEST_P(Matmul, ProductsByHeadAreCloseToTheExactOnes) {
    constexpr int64_t kHeads = 3, kRowsOfHead = 140, kStride = 150, kAll = kHeads * kRowsOfHead;
    for (const DType type : {DType::Q4_K, DType::Q5_0, DType::Q8_0, DType::BF16, DType::F16, DType::F32})
        for (const int64_t rows : {1, 16, 17, 64, 65, 128, 150, 300}) {
            const bool split = type == DType::F32;
            const int64_t cols = blocks(type, 1, 6) + (info(type).isFloat ? 100 : 0);
            const std::vector<uint8_t> file = fileWeights(type, kAll, cols, random());
            const std::vector<float> values = dequantize(type, file, kAll, cols);
            const Activations x = activations(rows * kHeads, cols, split);
            const std::vector<int64_t> cuts = {0, 33, 280, 401, kAll};
            const std::vector<float> before(static_cast<size_t>(rows * kHeads * kStride), -7.0f);
            const DeviceArray<float> y(before);
            for (size_t i = 0; i + 1 < cuts.size(); ++i) {
                const size_t rowBytesOf = rowBytes(type, cols);
                const Weights part =
                    weights(type, cuts[i + 1] - cuts[i], cols,
                            {file.begin() + cuts[i] * rowBytesOf, file.begin() + cuts[i + 1] * rowBytesOf});
                matmulByHead(stream(), {part.packed, cuts[i], kRowsOfHead, kHeads, kStride}, x.rows(), rows, y.get());
                stream().synchronize();
            }
            const std::vector<float> got = y.read();
            const Weights whole = weights(type, kAll, cols, file);
            const DeviceArray<float> atOnce(before);
            matmulByHead(stream(), {whole.packed, 0, kRowsOfHead, kHeads, kStride}, x.rows(), rows, atOnce.get());
            ASSERT_TRUE(sameBits(got, atOnce.read()));
            for (int64_t head = 0; head < kHeads; ++head) {
                std::vector<const float*> pieces;
                std::vector<float> ofHead;
                for (int64_t t = 0; t < rows; ++t) {
                    const int64_t piece = t * kHeads + head;
                    pieces.push_back(&x.values[piece * cols]);
                    const auto at = got.begin() + piece * kStride;
                    ofHead.insert(ofHead.end(), at, at + kRowsOfHead);
                    ASSERT_TRUE(std::all_of(at + kRowsOfHead, at + kStride, [](float v) { return v == -7.0f; }));
                }
                const Expected expected = multiply(&values[head * kRowsOfHead * cols], kRowsOfHead, cols, pieces);
                ASSERT_NO_FATAL_FAILURE(expectClose(expected, ofHead, split ? kSplitTolerance : kPlainTolerance,
                                                    describe(type, rows, kRowsOfHead, cols)));
            }
        }
}

// A part of a large matrix is no narrow matrix, and rows of any number of them have the same bits.
TEST_P(Matmul, F32RowsDoNotDependOnThePartNorOnTheOthers) {
    constexpr int64_t kRows = 300, kCols = 264;
    for (const int64_t outputs : {24, 512, 600}) {
        const std::vector<uint8_t> file = fileWeights(DType::F32, outputs, kCols, random());
        const Weights whole = weights(DType::F32, outputs, kCols, file);
        const Activations x = activations(kRows, kCols, false);
        const DeviceArray<float> all(static_cast<size_t>(kRows * outputs)), y(all.size());
        matmul(stream(), whole.packed, x.rows(), kRows, nullptr, all.get(), Store::Write);
        const std::vector<float> expected = all.read();
        const int64_t cut = outputs / 2, bytes = kCols * 4;
        const std::vector<uint8_t> first(file.begin(), file.begin() + cut * bytes),
            rest(file.begin() + cut * bytes, file.end());
        const Weights a = weights(DType::F32, cut, kCols, first), b = weights(DType::F32, outputs - cut, kCols, rest);
        matmul(stream(), a.packed, x.rows(), kRows, nullptr, y.get(), Store::Write, outputs);
        matmul(stream(), b.packed, x.rows(), kRows, nullptr, y.get() + cut, Store::Write, outputs);
        EXPECT_TRUE(sameBits(expected, y.read())) << outputs << " outputs in parts";
        for (const int64_t some : {1, 4, 5, 30}) {
            const DeviceArray<float> few(static_cast<size_t>(some * outputs));
            matmul(stream(), whole.packed, x.rows(), some, nullptr, few.get(), Store::Write);
            EXPECT_TRUE(sameBits({expected.begin(), expected.begin() + some * outputs}, few.read()))
                << outputs << " outputs, " << some << " rows";
        }
    }
}

// As narrow as the parameters of hyper-connections, and a router.
TEST_P(Matmul, NarrowProductsAreCloseToTheExactOnes) {
    for (const auto& [outputs, cols] :
         std::vector<std::pair<int64_t, int64_t>>{{24, 16384}, {64, 2048}, {1, 8}, {260, 1000}})
        for (const int64_t rows : {1, 3, 17, 64, 700})
            for (const bool split : {false, true}) {
                const Weights w = weights(DType::F32, outputs, cols);
                const Activations x = activations(rows, cols, split);
                const std::vector<float> bias = randomFloats(static_cast<size_t>(outputs));
                const DeviceArray<float> y(static_cast<size_t>(rows * outputs)), deviceBias(bias);
                matmul(stream(), w.packed, x.rows(), rows, deviceBias.get(), y.get(), Store::Write);
                std::vector<const float*> pieces;
                for (int64_t t = 0; t < rows; ++t) pieces.push_back(&x.values[t * cols]);
                Expected expected = multiply(w.values.data(), outputs, cols, pieces);
                for (size_t i = 0; i < expected.y.size(); ++i) expected.y[i] += bias[i % bias.size()];
                ASSERT_NO_FATAL_FAILURE(
                    expectClose(expected, y.read(), kSplitTolerance, describe(DType::F32, rows, outputs, cols)));
            }
}

// The launches of a step follow each other without waiting: a product must see what the launch before it wrote, and the
// launch after products that run together must see all that they wrote. One of them takes longest and leaves a few
// multiprocessors to the others, whether they come before or after it.
TEST_P(Matmul, ReadsWhatThePreviousLaunchWrote) {
    const int64_t width = 1024, outputs = std::max(16, stream().device().multiprocessors - 8) * 64;
    const Weights large = weights(DType::IQ2_XXS, outputs, width), small = weights(DType::Q8_0, 64, width),
                  other = weights(DType::Q6_K, 64, width), next = weights(DType::Q4_0, width, width);
    for (const int64_t rows : {1, 40, 128, 256, 400}) {
        const std::vector<float> start = randomFloats(static_cast<size_t>(rows * width), 0.1f);
        const auto run = [&](bool waiting, size_t place) {
            const DeviceArray<float> x(start), ofLarge(static_cast<size_t>(rows * outputs)),
                ofSmall(static_cast<size_t>(rows * 64)), ofOther(static_cast<size_t>(rows * 64));
            const DeviceArray<uint16_t> half(static_cast<size_t>(rows * width));
            const auto pause = [&] {
                if (waiting) stream().synchronize();
            };
            const auto convert = [&](const float* from) {
                RowOutputs out;
                out.half.hi = half.get();
                convertRows(stream(), from, rows, width, out);
                pause();
            };
            std::vector<MatvecOutput> all = {{large.packed, nullptr, ofLarge.get(), 0},
                                             {small.packed, nullptr, ofSmall.get(), 0},
                                             {other.packed, nullptr, ofOther.get(), 0}};
            std::swap(all[0], all[place]);
            for (int i = 0; i < 8; ++i) {
                convert(x.get());
                if (!waiting) matmul(stream(), {half.get(), nullptr}, rows, all, Store::Write);
                for (size_t one = 0; waiting && one < all.size(); ++one) {
                    matmul(stream(), {half.get(), nullptr}, rows, {all[one]}, Store::Write);
                    pause();
                }
                // The last outputs of the large one, as the next product's input.
                convert(ofLarge.get() + rows * (outputs - width));
                matmul(stream(), next.packed, {half.get(), nullptr}, rows, nullptr, x.get(), Store::Write);
                pause();
            }
            std::vector<float> seen = ofSmall.read();
            for (const DeviceArray<float>* more : {&ofOther, &x}) {
                const std::vector<float> values = more->read();
                seen.insert(seen.end(), values.begin(), values.end());
            }
            return seen;
        };
        for (const size_t place : {0, 1, 2})
            EXPECT_TRUE(sameBits(run(true, place), run(false, place)))
                << rows << " rows, the large one in place " << place;
    }
}

// Matrices of several types and sizes, whose products may run together.
TEST_P(Matmul, SeveralHaveTheBitsOfEach) {
    const int64_t cols = 768;
    std::vector<Weights> all;
    for (const auto& [type, outputs] :
         {std::pair{DType::Q4_K, 700}, {DType::Q6_K, 64}, {DType::F16, 1}, {DType::Q8_0, 130}, {DType::Q4_K, 65}})
        all.push_back(weights(type, outputs, cols));
    all.push_back(weights(DType::BF16, 40, cols));
    const DeviceArray<float> bias(randomFloats(700));
    for (const int64_t rows : {1, 17, 64, 65, 128, 129, 300}) {
        // With low halves, the 16-bit floats are multiplied by another kernel.
        const Activations x = activations(rows, cols, rows == 17);
        for (const Store store : {Store::Write, Store::Add}) {
            std::vector<std::unique_ptr<DeviceArray<float>>> one, together;
            std::vector<MatvecOutput> outputs;
            for (const Weights& w : all) {
                const std::vector<float> before = randomFloats(static_cast<size_t>(rows * w.packed.rows));
                for (auto* to : {&one, &together}) to->push_back(std::make_unique<DeviceArray<float>>(before));
                const float* with = outputs.size() % 2 ? nullptr : bias.get();
                outputs.push_back({w.packed, with, together.back()->get(), 0});
                matmul(stream(), w.packed, x.rows(), rows, with, one.back()->get(), store);
            }
            Matrix empty = all[0].packed;
            empty.rows = 0;
            outputs.insert(outputs.begin() + 1, {empty, nullptr, nullptr, 0});
            matmul(stream(), x.rows(), rows, outputs, store);
            for (size_t i = 0; i < all.size(); ++i)
                EXPECT_TRUE(sameBits(one[i]->read(), together[i]->read())) << "matrix " << i << ", " << rows << " rows";
        }
    }
}

// Pairs, grouped by expert: counts[e] of them go to expert e, each with a random row of x.
struct Pairs {
    Pairs(const DeviceInfo& device, const std::vector<int32_t>& counts, int64_t tokens, std::mt19937& random) {
        std::vector<int32_t> tileExpert, tileBegin;
        groups.tilePairs = expertTilePairs(device);
        for (size_t e = 0; e < counts.size(); ++e) {
            begin.push_back(begin.back() + counts[e]);
            for (int32_t p = begin[e]; p < begin[e + 1]; p += groups.tilePairs)
                tileExpert.push_back(static_cast<int32_t>(e)), tileBegin.push_back(p);
        }
        for (int64_t p = 0; p < count(); ++p)
            token.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(tokens)));
        groups.pairs = count();
        groups.tiles = maxExpertTiles(count(), static_cast<int64_t>(counts.size()));
        EXPECT_LE(static_cast<int64_t>(tileExpert.size()), groups.tiles);
        tileExpert.resize(static_cast<size_t>(groups.tiles), -1);
        tileBegin.resize(static_cast<size_t>(groups.tiles), -1);
        groups.begin = put(begin), groups.pairToken = put(token);
        groups.tileExpert = put(tileExpert), groups.tileBegin = put(tileBegin);
    }
    int64_t count() const { return begin.back(); }

    std::vector<int32_t> begin{0}, token;
    ExpertGroups groups;

private:
    const int32_t* put(const std::vector<int32_t>& values) {
        _arrays.push_back(std::make_unique<DeviceArray<int32_t>>(values));
        return _arrays.back()->get();
    }
    std::vector<std::unique_ptr<DeviceArray<int32_t>>> _arrays;
};

struct Range {
    int32_t first, end;
};

// Few for each of nine experts, but for one.
const std::vector<int32_t> kFewPairs = {5, 0, 70, 1, 20, 0, 0, 40, 3};

class MatmulExperts : public Matmul {
protected:
    void check(DType type, const std::vector<int32_t>& counts, int64_t tokens, int64_t outputs, int64_t cols,
               bool gather, bool split) {
        const Pairs pairs(stream().device(), counts, tokens, random());
        std::vector<std::vector<float>> values;
        const auto w = stack(type, counts.size(), outputs, cols, values);
        const Activations x = activations(gather ? tokens : pairs.count(), cols, split);
        const DeviceArray<float> y(static_cast<size_t>(pairs.count() * outputs + kGuard));
        const ExpertStack experts{
            {type, outputs, cols, w->get()}, packedBytes(type, outputs, cols), static_cast<int32_t>(counts.size())};
        matmulExperts(stream(), experts, x.rows(), pairs.groups, gather, y.get());

        Expected expected;
        for (size_t e = 0; e < counts.size(); ++e) {
            std::vector<const float*> rows;
            for (int32_t p = pairs.begin[e]; p < pairs.begin[e + 1]; ++p)
                rows.push_back(x.values.data() + (gather ? pairs.token[static_cast<size_t>(p)] : p) * cols);
            const Expected part = multiply(values[e].data(), outputs, cols, rows);
            expected.y.insert(expected.y.end(), part.y.begin(), part.y.end());
            expected.size.insert(expected.size.end(), part.size.begin(), part.size.end());
        }
        expectClose(
            expected, y.read(), split ? kSplitTolerance : kPlainTolerance,
            describe(type, pairs.count(), outputs, cols) + (gather ? ", gathered" : "") + (split ? ", split" : ""));
    }

    // The stack comes in pieces. Each is alone in its memory, with gaps that the whole stack does not have. After each
    // call, the rows of the experts seen so far are those of the whole product, and the others are still poison. order:
    // the experts of the elements, which the call learns from an index; empty: all experts in their own order.
    void checkRanges(DType type, const std::vector<int32_t>& counts, std::vector<Range> ranges, bool gather,
                     std::vector<int32_t> order = {}) {
        const int64_t tokens = 50, outputs = 134, cols = type == DType::F32 ? 100 : 256;
        SCOPED_TRACE(describe(type, std::accumulate(counts.begin(), counts.end(), 0), outputs, cols));
        const Pairs pairs(stream().device(), counts, tokens, random());
        std::vector<std::vector<float>> values;
        const auto w = stack(type, counts.size(), outputs, cols, values);
        const std::vector<uint8_t> packed = w->read();
        const size_t bytes = packedBytes(type, outputs, cols), stride = bytes + 512;
        const Activations x = activations(gather ? tokens : pairs.count(), cols, type == DType::F32);
        const DeviceArray<float> whole(static_cast<size_t>(pairs.count() * outputs)), y(whole.size() + kGuard);
        const ExpertStack all{{type, outputs, cols, w->get()}, bytes, static_cast<int32_t>(counts.size())};
        matmulExperts(stream(), all, x.rows(), pairs.groups, gather, whole.get());
        const std::vector<float> product = whole.read();
        ASSERT_TRUE(std::none_of(product.begin(), product.end(), [](float v) { return std::isnan(v); }));
        std::vector<float> expected = y.read();

        // An expert without an element gets a number that no element has.
        std::vector<int32_t> places(counts.size());
        for (int32_t& place : places) place = random()() % 2 ? -1 : static_cast<int32_t>(order.size());
        for (size_t i = 0; i < order.size(); ++i) places[static_cast<size_t>(order[i])] = static_cast<int32_t>(i);
        const DeviceArray<int32_t> index(places);
        const bool indexed = !order.empty();
        if (!indexed) {
            order.resize(counts.size());
            std::iota(order.begin(), order.end(), 0);
        }
        std::shuffle(ranges.begin(), ranges.end(), random());
        for (const Range& range : ranges) {
            const size_t held = static_cast<size_t>(range.end - range.first);
            std::vector<uint8_t> piece(held * stride, 0xff);
            for (size_t i = 0; i < held; ++i)
                std::copy_n(packed.begin() + order[static_cast<size_t>(range.first) + i] * static_cast<int64_t>(bytes),
                            bytes, piece.begin() + static_cast<int64_t>(i * stride));
            const DeviceArray<uint8_t> onDevice(piece);
            const ExpertStack part{{type, outputs, cols, onDevice.get()}, stride, static_cast<int32_t>(held)};
            matmulExperts(stream(), part, x.rows(), pairs.groups, gather, y.get(),
                          {indexed ? index.get() : nullptr, range.first, range.end});
            for (int32_t i = range.first; i < range.end; ++i) {
                const auto e = static_cast<size_t>(order[static_cast<size_t>(i)]);
                std::copy(product.begin() + pairs.begin[e] * outputs, product.begin() + pairs.begin[e + 1] * outputs,
                          expected.begin() + pairs.begin[e] * outputs);
            }
            ASSERT_TRUE(sameBits(expected, y.read())) << "after elements " << range.first << " to " << range.end;
        }
    }
};

INSTANTIATE_TEST_SUITE_P(Product, MatmulExperts, kBothWays, nameOfWay);

TEST_P(MatmulExperts, EveryType) {
    for (const std::vector<int32_t>& counts : {std::vector<int32_t>{5, 0, 70, 1}, {165, 100}}) {  // few pairs, and many
        for (const DType type : reference::quantizedTypes())
            check(type, counts, 33, 150, blocks(type, 2, 3), true, false);
        for (const DType type : kFloats) check(type, counts, 33, 150, 100, true, true);
    }
}

TEST_P(MatmulExperts, GatheredOrNotAndUnevenlyShared) {
    const std::vector<std::vector<int32_t>> shares = {
        {0, 0, 0, 300, 0, 0},                  // one expert has all
        {64, 128, 63, 65, 1, 127},             // on and beside the tiles' borders
        {96, 97, 129, 160, 161, 95, 321},      // those of Hopper's
        {0, 3, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0},  // most have none, including the first and the last
        {1, 0, 2, 161, 0, 1, 3, 0, 1, 1, 65, 0, 2, 1, 4, 1, 0, 1, 2, 1},  // few for most
        {1},
    };
    for (const std::vector<int32_t>& counts : shares)
        for (const bool gather : {false, true}) check(DType::Q4_K, counts, 40, 130, 256, gather, false);
}

TEST_P(MatmulExperts, PiecesOfAStackHaveTheBitsOfTheWhole) {
    const std::vector<int32_t> counts = {5, 0, 230, 1, 64, 0, 0, 357, 3};
    const std::vector<std::vector<Range>> cuts = {
        {{0, 9}},
        {{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 5}, {5, 6}, {6, 7}, {7, 8}, {8, 9}},
        {{0, 2}, {2, 5}, {5, 7}, {7, 9}},  // one range has no pair
        {{0, 3}, {3, 3}, {3, 8}, {8, 9}},  // one range is empty
    };
    for (const DType type : {DType::Q4_K, DType::Q6_K, DType::BF16, DType::F32})
        for (const std::vector<Range>& ranges : cuts) checkRanges(type, counts, ranges, random()() % 2 == 0);
    for (const bool gather : {false, true})
        checkRanges(DType::Q4_K, counts, {{0, 4}, {6, 9}}, gather);  // experts that never come
    for (const DType type : {DType::Q4_K, DType::IQ3_S, DType::F16})
        for (const std::vector<Range>& ranges : cuts) checkRanges(type, kFewPairs, ranges, random()() % 2 == 0);
}

// The elements of a stack are in the order of a cache's slots, or they are only the wanted experts.
TEST_P(MatmulExperts, AnIndexSaysWhichElementIsAnExperts) {
    const std::vector<int32_t> many = {5, 0, 230, 1, 64, 0, 0, 357, 3};
    for (const DType type : {DType::Q4_K, DType::Q6_K, DType::BF16, DType::F32}) {
        for (int turn = 0; turn < 8; ++turn) {
            const std::vector<int32_t>& counts = turn < 4 ? many : kFewPairs;
            std::vector<int32_t> order(counts.size());
            std::iota(order.begin(), order.end(), 0);
            std::shuffle(order.begin(), order.end(), random());
            if (turn % 4 > 0) order.resize(1 + random()() % order.size());
            if (turn % 2) std::sort(order.begin(), order.end());
            std::vector<Range> ranges;
            for (int32_t first = 0; first < static_cast<int32_t>(order.size());) {
                const int32_t end = turn % 4 == 0 ? 9
                                                  : std::min(static_cast<int32_t>(order.size()),
                                                             first + 1 + static_cast<int32_t>(random()() % 4));
                ranges.push_back({first, end});
                first = end;
            }
            checkRanges(type, counts, ranges, random()() % 2 == 0, order);
        }
    }
}

TEST_P(MatmulExperts, RefusesExpertsThatAStackHasNot) {
    const Pairs pairs(stream().device(), {1, 1, 1}, 1, random());
    const DeviceArray<uint8_t> w(2 * packedBytes(DType::Q8_0, 32, 32));
    const Activations x = activations(1, 32, false);
    const DeviceArray<float> y(3 * 32);
    const ExpertStack two{{DType::Q8_0, 32, 32, w.get()}, packedBytes(DType::Q8_0, 32, 32), 2};
    for (const Range& range : {Range{-1, 1}, Range{2, 1}, Range{0, 3}, Range{1, 4}})
        EXPECT_THROW(
            matmulExperts(stream(), two, x.rows(), pairs.groups, true, y.get(), {nullptr, range.first, range.end}),
            Error)
            << range.first;
    stream().synchronize();
}

TEST_P(MatmulExperts, NoPairs) { check(DType::Q6_K, {0, 0, 0}, 4, 130, 256, false, false); }

}  // namespace

}  // namespace sharpi::cuda
