// A row of the tensor cores' products has the same bits alone, in short and long tiles, at any place of a tile, among
// rows of NaN, and however a batch was cut. The expected bits are those of one long batch.
#include <cmath>

#include "kernels/experts/router.h"
#include "kernels/matmul/matmul_tiles.h"
#include "matmul_test.h"
#include "row_cuts.h"

namespace sharpi::cuda {
namespace {

constexpr uint16_t kNotANumber = 0x7fc0;  // as bf16 and as f16

class MatmulRows : public MatmulTest {
protected:
    // A product, and the tile in which it is computed.
    struct TiledShape {
        int64_t rows, outputs;
        MatmulTile tile;
    };

    // Unlike the first rows of a batch, these rows come after others.
    std::vector<float> product(const Weights& w, const HalfRows& x, const RowCut& cut, const std::vector<float>& before,
                               const float* bias) {
        const int64_t outputs = w.packed.rows;
        const DeviceArray<float> y(
            std::vector<float>(before.begin() + cut.begin * outputs, before.begin() + cut.end * outputs));
        matmul(stream(), w.packed, rowsFrom(x, cut.begin, w.packed.cols), cut.rows(), bias, y.get(),
               bias ? Store::Add : Store::Write);
        return y.read();
    }

    void expectIndependent(DType type, int64_t rows, int64_t outputs, int64_t cols, bool split, int turns) {
        SCOPED_TRACE(describe(type, rows, outputs, cols) + (split ? ", split" : ""));
        const Weights w = weights(type, outputs, cols);
        const Activations x = activations(rows, cols, split);
        const std::vector<float> before = randomFloats(static_cast<size_t>(rows * outputs)),
                                 bias = randomFloats(static_cast<size_t>(outputs));
        const DeviceArray<float> biasOnDevice(bias);
        for (const float* with : {static_cast<const float*>(nullptr), static_cast<const float*>(biasOnDevice.get())}) {
            const std::vector<float> whole = product(w, x.rows(), {0, rows}, before, with);
            for (int turn = 0; turn < turns; ++turn) {
                std::vector<float> cut;
                for (const RowCut& piece : randomCuts(rows, random())) {
                    const std::vector<float> part = product(w, x.rows(), piece, before, with);
                    cut.insert(cut.end(), part.begin(), part.end());
                }
                ASSERT_TRUE(sameBits(whole, cut));
            }
            for (const int64_t alone : {int64_t{0}, rows / 2 + 3, rows - 1}) {
                const RowCut one = {alone, alone + 1};
                const std::vector<float> expected(whole.begin() + alone * outputs,
                                                  whole.begin() + (alone + 1) * outputs);
                ASSERT_TRUE(sameBits(expected, product(w, x.rows(), one, before, with))) << "row " << alone;
            }
        }
        expectIndependentOfCompany(w, x, rows);
    }

    // Rows in another order, at other places, and between rows of NaN.
    void expectIndependentOfCompany(const Weights& w, const Activations& x, int64_t rows) {
        const int64_t outputs = w.packed.rows, cols = w.packed.cols;
        const std::vector<float> poison(static_cast<size_t>(rows * outputs), NAN),
            whole = product(w, x.rows(), {0, rows}, poison, nullptr);
        const std::vector<uint16_t> hi = x.hi->read(), lo = x.lo ? x.lo->read() : std::vector<uint16_t>();
        for (const int64_t count : {int64_t{5}, int64_t{64}, int64_t{90}, rows}) {
            std::vector<int64_t> source;
            std::vector<uint16_t> mixedHi, mixedLo;
            for (int64_t t = 0; t < count; ++t) {
                source.push_back(random()() % 4 == 0 ? -1
                                                     : static_cast<int64_t>(random()() % static_cast<uint32_t>(rows)));
                const int64_t from = std::max<int64_t>(source.back(), 0) * cols;
                mixedHi.insert(mixedHi.end(), hi.begin() + from, hi.begin() + from + cols);
                if (x.lo) mixedLo.insert(mixedLo.end(), lo.begin() + from, lo.begin() + from + cols);
                if (source.back() < 0) std::fill(mixedHi.end() - cols, mixedHi.end(), kNotANumber);
            }
            const DeviceArray<uint16_t> onDeviceHi(mixedHi), onDeviceLo(mixedLo);
            const HalfRows mixed = {onDeviceHi.get(), x.lo ? onDeviceLo.get() : nullptr};
            const std::vector<float> got = product(w, mixed, {0, count}, poison, nullptr);
            for (int64_t t = 0; t < count; ++t) {
                if (source[static_cast<size_t>(t)] < 0) continue;
                const auto expected = whole.begin() + source[static_cast<size_t>(t)] * outputs;
                ASSERT_TRUE(sameBits({expected, expected + outputs},
                                     {got.begin() + t * outputs, got.begin() + (t + 1) * outputs}))
                    << "row " << t << " of " << count;
            }
        }
    }
};

INSTANTIATE_TEST_SUITE_P(Product, MatmulRows, kBothWays, nameOfWay);

TEST_P(MatmulRows, OfQuantizedWeights) {
    for (const DType type : reference::quantizedTypes())
        expectIndependent(type, 330, 134, blocks(type, 3, 9), false, 2);
}

TEST_P(MatmulRows, OfFloatWeights) {
    for (const DType type : kFloats) {
        for (const int64_t cols :
             {int64_t{320}, int64_t{100}, int64_t{33}}) {  // aligned rows, and rows that begin anywhere
            expectIndependent(type, 330, 134, cols, true, 2);
            if (type != DType::F32) expectIndependent(type, 330, 134, cols, false, 2);
        }
    }
}

// Matrices with many tiles and steps.
TEST_P(MatmulRows, OfLargeMatrices) {
    const int64_t outputs = stream().device().multiprocessors / 2 * 128;
    for (const DType type : {DType::Q4_K, DType::Q8_0, DType::BF16})
        expectIndependent(type, 300, outputs, 512, false, 1);
    expectIndependent(DType::Q6_K, 300, 130, 4096, false, 2);  // many steps
}

// Hopper's tiles, whole and cut short in every dimension: odd numbers of steps, a last step of one block, strides that
// the last step does not fill.
TEST_P(MatmulRows, InHoppersTilesOfEverySize) {
    if (stream().device().major != 9 || *GetParam() == '0') GTEST_SKIP() << "without Hopper's own instructions";
    const int processors = stream().device().multiprocessors;
    for (const TiledShape& shape : {TiledShape{189, 190, {64, 128}},
                                    {255, processors / 2 * 64 - 3, {64, 128}},
                                    {1021, processors / 4 * 128 - 3, {128, 256}},
                                    {380, processors / 2 * 128 - 3, {128, 256}}}) {
        const MatmulTile tile = chooseTile(shape.rows, shape.outputs, 1, processors);
        ASSERT_EQ(tile.outputs, shape.tile.outputs);
        ASSERT_EQ(tile.rows, shape.tile.rows);
        for (const int64_t cols : {32, 96, 160, 1056})
            expectIndependent(DType::Q5_0, shape.rows, shape.outputs, cols, false, 1);
        expectIndependent(DType::Q4_K, shape.rows, shape.outputs, 2304, false, 1);
        expectIndependent(DType::Q6_K, shape.rows, shape.outputs, 768, false, 1);
        expectIndependent(DType::IQ2_XXS, shape.rows, shape.outputs, 768, false, 1);
        for (const int64_t cols : {72, 200}) expectIndependent(DType::BF16, shape.rows, shape.outputs, cols, false, 1);
    }
}

// The same for the tiles that a device without Hopper's instructions has.
TEST_P(MatmulRows, InWarpsTilesOfEverySize) {
    if (*GetParam() == '1') GTEST_SKIP() << "with Hopper's own instructions";
    const int processors = stream().device().multiprocessors;
    for (const TiledShape& shape :
         {TiledShape{189, 190, {64, 128}}, TiledShape{121, 2 * processors * 128 - 3, {128, 128}}}) {
        const MatmulTile tile = chooseTileOfWarps(shape.rows, shape.outputs, 1, stream().device());
        ASSERT_EQ(tile.outputs, shape.tile.outputs);
        ASSERT_EQ(tile.rows, shape.tile.rows);
        for (const int64_t cols : {32, 160}) expectIndependent(DType::Q5_0, shape.rows, shape.outputs, cols, false, 1);
        expectIndependent(DType::Q4_K, shape.rows, shape.outputs, 768, false, 1);
        for (const DType type : reference::quantizedTypes())
            expectIndependent(type, shape.rows, shape.outputs, blocks(type, 1, 3), false, 1);
        for (const DType type : kFloats) {
            for (const int64_t cols : {72, 33}) {
                expectIndependent(type, shape.rows, shape.outputs, cols, true, 1);
                if (type != DType::F32) expectIndependent(type, shape.rows, shape.outputs, cols, false, 1);
            }
        }
    }
}

// Every number of rows that the kernel for few rows tells apart, with rows of w that end within a step, after half a
// stride and after a whole one. In the last cases a block has several tiles, and strides of one team are of different
// ones.
TEST_P(MatmulRows, OfFewRows) {
    struct Shape {
        DType type;
        int64_t outputs, cols;
    };
    constexpr int64_t kRows = 300;
    const int64_t many = stream().device().multiprocessors * 64 * 2 + 70;
    for (const Shape& shape : {Shape{DType::Q5_0, 190, 32},
                               {DType::Q5_0, 190, 96},
                               {DType::Q5_0, 190, 160},
                               {DType::Q5_0, 190, 1056},
                               {DType::Q4_K, 190, 2304},
                               {DType::Q6_K, 190, 768},
                               {DType::Q8_0, 190, 1024},
                               {DType::IQ2_XXS, 190, 768},
                               {DType::BF16, 190, 72},
                               {DType::F16, 190, 200},
                               {DType::Q5_0, many, 160},
                               {DType::Q4_0, many, 1056},
                               {DType::F16, many, 200}}) {
        SCOPED_TRACE(describe(shape.type, kRows, shape.outputs, shape.cols));
        const Weights w = weights(shape.type, shape.outputs, shape.cols);
        const Activations x = activations(kRows, shape.cols, false);
        const std::vector<float> before = randomFloats(static_cast<size_t>(kRows * shape.outputs));
        const DeviceArray<float> bias(randomFloats(static_cast<size_t>(shape.outputs)));
        for (const float* with : {static_cast<const float*>(nullptr), static_cast<const float*>(bias.get())}) {
            const std::vector<float> whole = product(w, x.rows(), {0, kRows}, before, with);
            for (const int64_t count : {1, 15, 16, 17, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129}) {
                const int64_t begin = (kRows - count) / 2;
                const auto expected = whole.begin() + begin * shape.outputs;
                EXPECT_TRUE(sameBits({expected, expected + count * shape.outputs},
                                     product(w, x.rows(), {begin, begin + count}, before, with)))
                    << count << " rows";
            }
        }
    }
}

TEST_P(MatmulRows, RefusesRowsThatAreNotAligned) {
    const Weights w = weights(DType::BF16, 64, 64);
    const Activations x = activations(3, 64, true);
    const DeviceArray<float> y(2 * 64);
    const HalfRows rows = x.rows();
    for (const HalfRows& crooked : {HalfRows{rows.hi + 4, nullptr}, HalfRows{rows.hi, rows.lo + 1}})
        EXPECT_THROW(matmul(stream(), w.packed, crooked, 2, nullptr, y.get(), Store::Write), Error);
    EXPECT_NO_THROW(matmul(stream(), w.packed, {rows.hi + 8, nullptr}, 2, nullptr, y.get(), Store::Write));
    stream().synchronize();
}

// Turing's multiprocessor has room for one large tile, to the byte.
TEST(MatmulTiles, AreChosenForAMultiprocessorThatHoldsOne) {
    DeviceInfo device;
    device.major = 7, device.minor = 5;
    device.multiprocessors = 40;
    device.sharedPerBlock = device.sharedPerMultiprocessor = 64 * 1024;
    EXPECT_EQ(chooseTileOfWarps(128, 128 * 40, 1, device).outputs, 128);
    EXPECT_EQ(chooseTileOfWarps(128, 128 * 41, 1, device).outputs, 64);
}

// One large tile or two halves, as on GeForce. A tile for every other multiprocessor leaves half of them idle.
TEST(MatmulTiles, AreChosenForAMultiprocessorThatHoldsTwoHalves) {
    DeviceInfo device;
    device.major = 8, device.minor = 9;
    device.multiprocessors = 60;
    device.sharedPerBlock = 99 * 1024, device.sharedPerMultiprocessor = 100 * 1024;
    EXPECT_EQ(chooseTileOfWarps(128, 128 * 30, 1, device).outputs, 64);
    EXPECT_EQ(chooseTileOfWarps(128, 128 * 60, 1, device).outputs, 128);
    EXPECT_EQ(chooseTileOfWarps(2048, 4096, 1, device).outputs, 128);
}

// A layer of experts as prefill computes it, from the router's logits to the sum.
class ExpertRows : public MatmulTest {
protected:
    static constexpr int64_t kCols = 256, kHidden = 256;
    static constexpr int32_t kExperts = 24, kUsed = 2;

    struct Layer {
        std::unique_ptr<DeviceArray<uint8_t>> gate, up, down;
        DType gateType, downType;
        bool split = false;
        Activations x;
        std::unique_ptr<DeviceArray<float>> logits, shared, scale;
        ExpertStack of(const DeviceArray<uint8_t>& bytes, DType type, int64_t outputs, int64_t cols) const {
            return {{type, outputs, cols, bytes.get()}, packedBytes(type, outputs, cols), kExperts};
        }
    };

    Layer layer(DType gate, DType down, int64_t rows) {
        Layer l;
        std::vector<std::vector<float>> values;
        l.gateType = gate, l.downType = down;
        l.split = gate == DType::F32;
        l.gate = stack(gate, kExperts, kHidden, kCols, values);
        l.up = stack(gate, kExperts, kHidden, kCols, values);
        l.down = stack(down, kExperts, kCols, kHidden, values);
        l.x = activations(rows, kCols, l.split);
        std::vector<float> logits = randomFloats(static_cast<size_t>(rows * kExperts));
        for (int64_t t = 0; t < rows; ++t)
            logits[static_cast<size_t>(t * kExperts)] += 5.0f, logits[static_cast<size_t>(t * kExperts + 4)] -= 50.0f;
        l.logits = std::make_unique<DeviceArray<float>>(logits);
        l.shared = std::make_unique<DeviceArray<float>>(randomFloats(static_cast<size_t>(rows * kCols)));
        l.scale = std::make_unique<DeviceArray<float>>(randomFloats(static_cast<size_t>(rows)));
        return l;
    }

    // Runs the layer on these rows, with these residuals.
    std::vector<float> run(const Layer& l, const RowCut& cut, const std::vector<float>& before) {
        const int64_t rows = cut.rows(), pairs = rows * kUsed;
        const auto floats = [](int64_t count) {
            return std::make_unique<DeviceArray<float>>(static_cast<size_t>(count));
        };
        const DeviceArray<int32_t> chosen(static_cast<size_t>(pairs));
        const auto weight = floats(pairs), gate = floats(pairs * kHidden), up = floats(pairs * kHidden),
                   y = floats(pairs * kCols);
        const DeviceArray<uint8_t> buffer(expertGroupingBytes(rows, kUsed, kExperts));
        const DeviceArray<uint16_t> hi(static_cast<size_t>(pairs * kHidden)), lo(hi.size());
        const DeviceArray<float> residual(
            std::vector<float>(before.begin() + cut.begin * kCols, before.begin() + cut.end * kCols));
        route(stream(), l.logits->get() + cut.begin * kExperts, rows, {kExperts, kUsed}, chosen.get(), weight->get());
        const ExpertGrouping at = expertGroupingOver(buffer.get(), rows, kUsed, kExperts);
        const ExpertGroups groups = groupExperts(stream(), chosen.get(), rows, kUsed, kExperts, at);
        const HalfRows x = rowsFrom(l.x.rows(), cut.begin, kCols), hidden = {hi.get(), l.split ? lo.get() : nullptr};
        matmulExperts(stream(), l.of(*l.gate, l.gateType, kHidden, kCols), x, groups, true, gate->get());
        matmulExperts(stream(), l.of(*l.up, l.gateType, kHidden, kCols), x, groups, true, up->get());
        gatedActivation(stream(), {}, gate->get(), up->get(), pairs, kHidden, {nullptr, {}, hidden});
        matmulExperts(stream(), l.of(*l.down, l.downType, kCols, kHidden), hidden, groups, false, y->get());
        combineExperts(stream(), y->get(), at.pairOf, weight->get(), rows, kUsed, kCols, residual.get(),
                       rowsFrom(SharedAnswer{l.shared->get(), l.scale->get()}, cut.begin, kCols));
        return residual.read();
    }
};

INSTANTIATE_TEST_SUITE_P(Product, ExpertRows, kBothWays, nameOfWay);

TEST_P(ExpertRows, OfALayerOfExperts) {
    const int64_t rows = 820;  // one expert has nearly all of them, in several tiles, one has none
    for (const auto& [gate, down] : {std::pair{DType::Q4_K, DType::Q6_K},
                                     {DType::Q8_0, DType::Q5_0},
                                     {DType::MXFP4, DType::IQ4_NL},
                                     {DType::IQ2_XXS, DType::IQ3_S},
                                     {DType::NVFP4, DType::IQ1_M},
                                     {DType::BF16, DType::BF16},
                                     {DType::F16, DType::F16},
                                     {DType::F32, DType::F32}}) {
        SCOPED_TRACE(std::string(info(gate).name) + " and " + info(down).name);
        const Layer l = layer(gate, down, rows);
        const std::vector<float> before = randomFloats(static_cast<size_t>(rows * kCols)),
                                 whole = run(l, {0, rows}, before);
        ASSERT_TRUE(std::none_of(whole.begin(), whole.end(), [](float v) { return std::isnan(v); }));
        for (int turn = 0; turn < 3; ++turn) {
            std::vector<float> cut;
            for (const RowCut& piece : randomCuts(rows, random())) {
                const std::vector<float> part = run(l, piece, before);
                cut.insert(cut.end(), part.begin(), part.end());
            }
            ASSERT_TRUE(sameBits(whole, cut));
        }
        for (const int64_t alone : {int64_t{0}, int64_t{77}, rows - 1}) {
            const std::vector<float> expected(whole.begin() + alone * kCols, whole.begin() + (alone + 1) * kCols);
            ASSERT_TRUE(sameBits(expected, run(l, {alone, alone + 1}, before))) << "row " << alone;
        }
    }
}

}  // namespace
}  // namespace sharpi::cuda
