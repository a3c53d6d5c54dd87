// RMS norm, SiLU and the forms of activations on the GPU, bit for bit against the CPU's kernels.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "column_test.h"
#include "core/contract.h"
#include "core/half.h"
#include "cpu/kernels.h"
#include "gpu_test.h"
#include "kernels/rows/rows.h"

namespace sharpi::cuda {
namespace {

const int64_t kBlockWidths[] = {32, 64, 96, 128, 768, 1024, 2048, 2560, 4096, 5120, 8192, 8224, 12288};
const int64_t kOddWidths[] = {1, 2, 31, 33, 60, 100, 127, 130, 1000, 4097, 8191, 8193, 20002};

// Rows that take every branch of section 1 of the contract.
std::vector<float> difficultRow(int64_t cols, std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<float> row(cols);
    for (int64_t b = 0; b < cols / 32; ++b) {
        float* x = row.data() + b * 32;
        for (int i = 0; i < 32; ++i) x[i] = normal(random);
        const int at = random() % 32;
        switch (b % 15) {
        case 0: x[at] = INFINITY; break;
        case 1: x[at] = -INFINITY; break;
        case 2: x[at] = NAN; break;
        case 3: std::fill(x, x + 32, 0.0f); break;
        case 4: std::fill(x, x + 32, -0.0f); break;
        case 5:
            for (int i = 0; i < 32; ++i) x[i] *= 1e-38f;
            break;
        case 6:
            for (int i = 0; i < 32; ++i) x[i] *= 1e38f;
            x[at] = 3.4e38f;
            break;
        case 7:
            for (int i = 0; i < 32; ++i) x[i] = (i - 16) + 0.5f;
            x[at] = 127.0f;
            break;  // ties to even
        case 8:
            std::fill(x, x + 32, 0.0f);
            x[at] = -7.888609e-31f;
            break;  // 2^-100 itself
        case 9:
            std::fill(x, x + 32, 0.0f);
            x[at] = 7.8886086e-31f;
            break;                                    // just below it
        case 10: std::fill(x, x + 32, -5.0f); break;  // sums at their limit
        case 11: x[at] = kHugeActivation; break;      // counts as infinite
        case 12: x[at] = std::nextafter(-kHugeActivation, 0.0f); break;
        case 13: x[at] = 127 * 0x1.fffe02p+0f; break;  // its scale is rounded up to the next power of two
        default: break;
        }
    }
    return row;
}

class Rows : public GpuTest {
protected:
    const cpu::Kernels& _cpu = cpu::kernels();

    // With columns, if there is room.
    void expectQuantized(const std::vector<float>& x, int64_t rows, int64_t cols, const DeviceArray<uint8_t>& buffer) {
        ASSERT_TRUE(hasItsColumns(buffer, rows, cols));
        const std::vector<uint8_t> bytes = buffer.read();
        const QuantizedRows at = quantizedRowsOver(const_cast<uint8_t*>(bytes.data()), rows, cols);
        const int64_t blocks = cols / 32, padded = (blocks + 7) / 8 * 8;
        std::vector<int8_t> q(padded * 32);
        std::vector<float> scale(padded);
        std::vector<int16_t> sums(padded * 2);
        for (int64_t r = 0; r < rows; ++r) {
            _cpu.quantizeRow(x.data() + r * cols, cols, q.data(), scale.data(), sums.data());
            for (int64_t b = 0; b < blocks; ++b) {
                uint32_t expectedScale, actualScale;
                std::memcpy(&expectedScale, &scale[b], 4);
                std::memcpy(&actualScale, at.scale + r * blocks + b, 4);
                ASSERT_EQ(expectedScale, actualScale) << "scale of row " << r << " block " << b << " of " << cols;
                const int32_t packed = at.sums[r * blocks + b];
                ASSERT_EQ(sums[b * 2], static_cast<int16_t>(packed & 0xffff)) << "row " << r << " block " << b;
                ASSERT_EQ(sums[b * 2 + 1], static_cast<int16_t>(packed >> 16)) << "row " << r << " block " << b;
                for (int i = 0; i < 32; ++i) {
                    ASSERT_EQ(q[b * 32 + i], at.q[((r * 2 + i / 16) * blocks + b) * 16 + i % 16])
                        << "row " << r << " block " << b << " element " << i << " of " << cols;
                }
            }
        }
    }

    // As the kernels round to f16, which bounds what is too large.
    uint16_t half(float x) {
        const bool bounded = stream().device().major < 8 && std::fabs(x) > 65504.0f;
        return toHalf(bounded ? std::copysign(65504.0f, x) : x);
    }

    void expectHalves(const std::vector<float>& x, const std::vector<uint16_t>& hi, const std::vector<uint16_t>* lo) {
        for (size_t i = 0; i < x.size(); ++i) {
            const float high = fromHalf(half(x[i]));
            if (std::isnan(x[i])) {
                ASSERT_TRUE(std::isnan(fromHalf(hi[i]))) << i;
                continue;
            }
            ASSERT_EQ(half(x[i]), hi[i]) << i << ": " << x[i];
            if (!lo) continue;
            ASSERT_EQ(std::isfinite(high) ? half(x[i] - high) : 0, (*lo)[i]) << i << ": " << x[i];
        }
    }
};

TEST_F(Rows, NormIsTheCpusInEveryForm) {
    for (const int64_t cols : kBlockWidths) {
        for (const int64_t rows : {1, 3, 8, 9, 16, 40, 64, 133}) {
            const auto x = randomFloats(rows * cols, 3.0f), weight = randomFloats(cols);
            std::vector<float> expected(rows * cols);
            for (int64_t r = 0; r < rows; ++r)
                _cpu.rmsNorm(x.data() + r * cols, weight.data(), 1e-5f, cols, expected.data() + r * cols);
            const DeviceArray<float> deviceX(x), deviceWeight(weight), floats(rows * cols);
            const DeviceArray<uint8_t> quantized(quantizedRowsBytes(rows, cols));
            const DeviceArray<uint16_t> hi(rows * cols), lo(rows * cols);
            const RowOutputs out = {floats.get(), rowsWithColumns(quantized, rows, cols), {hi.get(), lo.get()}};
            rmsNorm(stream(), deviceX.get(), nullptr, deviceWeight.get(), 1e-5f, rows, cols, out);
            ASSERT_TRUE(sameBits(expected, floats.read())) << rows << " rows of " << cols;
            expectQuantized(expected, rows, cols, quantized);
            const auto low = lo.read();
            expectHalves(expected, hi.read(), &low);
            ASSERT_TRUE(sameBits(x, deviceX.read()));
        }
    }
}

TEST_F(Rows, NormOfAnyWidthAndInPlace) {
    for (const int64_t cols : kOddWidths) {
        const int64_t rows = 5;
        const auto x = randomFloats(rows * cols), weight = randomFloats(cols);
        std::vector<float> expected(rows * cols);
        for (int64_t r = 0; r < rows; ++r)
            _cpu.rmsNorm(x.data() + r * cols, weight.data(), 1e-6f, cols, expected.data() + r * cols);
        const DeviceArray<float> deviceX(x), deviceWeight(weight), apart(rows * cols);
        rmsNorm(stream(), deviceX.get(), nullptr, deviceWeight.get(), 1e-6f, rows, cols, {apart.get(), {}, {}});
        ASSERT_TRUE(sameBits(expected, apart.read())) << cols;
        rmsNorm(stream(), deviceX.get(), nullptr, deviceWeight.get(), 1e-6f, rows, cols, {deviceX.get(), {}, {}});
        ASSERT_TRUE(sameBits(expected, deviceX.read())) << cols;
    }
}

TEST_F(Rows, NormReadsTheRowsItIsTold) {
    const int64_t cols = 160, rows = 7;
    const auto x = randomFloats(20 * cols), weight = randomFloats(cols);
    const std::vector<int32_t> index = {19, 0, 3, 3, 12, 1, 19};
    std::vector<float> expected(rows * cols);
    for (int64_t r = 0; r < rows; ++r)
        _cpu.rmsNorm(x.data() + index[r] * cols, weight.data(), 1e-5f, cols, expected.data() + r * cols);
    const DeviceArray<float> deviceX(x), deviceWeight(weight), floats(rows * cols);
    const DeviceArray<int32_t> deviceIndex(index);
    const DeviceArray<uint16_t> hi(rows * cols);
    rmsNorm(stream(), deviceX.get(), deviceIndex.get(), deviceWeight.get(), 1e-5f, rows, cols,
            {floats.get(), {}, {hi.get(), nullptr}});
    EXPECT_TRUE(sameBits(expected, floats.read()));
    expectHalves(expected, hi.read(), nullptr);
}

// Rows of each kind in turn. Each kind has its own weights, and one row of each is a row of blocks.
TEST_F(Rows, NormTakesItsWeightsInTurn) {
    for (const int64_t cols : {1, 31, 33, 100, 160, 1024, 4097, 8224, 20002}) {
        for (const int32_t kinds : {2, 3}) {
            for (const size_t skip : {0, 1}) {  // floats before the weights
                SCOPED_TRACE(std::to_string(cols) + " columns, " + std::to_string(kinds) + " kinds, skip " +
                             std::to_string(skip));
                const bool blocks = cols % 32 == 0;
                const int64_t rows = kinds * 5 - (blocks ? 0 : 1);
                const auto x = randomFloats(rows * cols), weights = randomFloats(skip + kinds * cols);
                std::vector<int32_t> index(rows);
                for (int64_t r = 0; r < rows; ++r) index[r] = static_cast<int32_t>((r * 3 + 1) % rows);
                std::vector<float> expected(rows * cols);
                for (int64_t r = 0; r < rows; ++r)
                    _cpu.rmsNorm(x.data() + index[r] * cols, weights.data() + skip + r % kinds * cols, 1e-5f, cols,
                                 expected.data() + r * cols);
                const DeviceArray<float> deviceX(x), deviceWeights(weights), floats(rows * cols);
                const DeviceArray<int32_t> deviceIndex(index);
                const DeviceArray<uint8_t> quantized(blocks ? quantizedRowsBytes(rows / kinds, cols * kinds) : 0);
                const DeviceArray<uint16_t> hi(rows * cols), lo(rows * cols);
                RowOutputs out{floats.get(), {}, {}};
                if (blocks) {
                    out.quantized = rowsWithColumns(quantized, rows / kinds, cols * kinds);
                    out.half = {hi.get(), lo.get()};
                }
                rmsNorm(stream(), deviceX.get(), deviceIndex.get(), deviceWeights.get() + skip, 1e-5f, rows, cols, out,
                        kinds);
                ASSERT_TRUE(sameBits(expected, floats.read()));
                if (!blocks) continue;
                expectQuantized(expected, rows / kinds, cols * kinds, quantized);
                const auto low = lo.read();
                expectHalves(expected, hi.read(), &low);
            }
        }
    }
}

TEST_F(Rows, DotsAreTheCpusProducts) {
    for (const int64_t cols : {1, 2, 31, 32, 33, 100, 2048, 4097, 20002}) {
        for (const int64_t rows : {1, 7, 8, 9, 300}) {
            for (const size_t skip : {0, 1}) {  // floats before each array
                const auto x = randomFloats(skip + rows * cols), weight = randomFloats(skip + cols);
                std::vector<float> expected(skip + rows + 1);
                std::memset(expected.data(), 0xff, expected.size() * sizeof(float));
                cpu::MatmulArgs args;
                args.w = {DType::F32, 1, cols, reinterpret_cast<const uint8_t*>(weight.data() + skip)};
                args.xFloat = x.data() + skip;
                args.count = rows;
                args.y = expected.data() + skip;
                args.yStride = 1;
                _cpu.matmul(args, 0, 1, nullptr);  // floats need no scratch
                const DeviceArray<float> deviceX(x), deviceWeight(weight), y(expected.size());
                rowDots(stream(), deviceX.get() + skip, deviceWeight.get() + skip, rows, cols, y.get() + skip);
                ASSERT_TRUE(sameBits(expected, y.read())) << rows << " rows of " << cols;
            }
        }
    }
}

TEST_F(Rows, QuantizesDifficultBlocksAsTheCpuDoes) {
    for (const auto& [cols, rows] :
         std::vector<std::pair<int64_t, int64_t>>{{32, 9}, {384, 9}, {1056, 9}, {4096, 9}, {32, 17}, {1056, 70}}) {
        std::vector<float> x;
        for (int64_t r = 0; r < rows; ++r) {
            const auto row = difficultRow(cols, random());
            x.insert(x.end(), row.begin(), row.end());
        }
        std::rotate(x.begin(), x.begin() + 32 * (random()() % 15 % (cols / 32)),
                    x.end());  // so that narrow rows have every kind of value too
        const DeviceArray<float> deviceX(x);
        const DeviceArray<uint8_t> quantized(quantizedRowsBytes(rows, cols));
        const DeviceArray<uint16_t> hi(rows * cols), lo(rows * cols);
        convertRows(stream(), deviceX.get(), rows, cols,
                    {nullptr, rowsWithColumns(quantized, rows, cols), {hi.get(), lo.get()}});
        expectQuantized(x, rows, cols, quantized);
        const auto low = lo.read();
        expectHalves(x, hi.read(), &low);
        ASSERT_TRUE(sameBits(x, deviceX.read()));
    }
}

TEST_F(Rows, SiluIsTheCpusInEveryForm) {
    for (const auto& [cols, rows] :
         std::vector<std::pair<int64_t, int64_t>>{{32, 6}, {96, 6}, {768, 6}, {1056, 6}, {6144, 6}, {96, 33}}) {
        auto gate = randomFloats(rows * cols, 5.0f);
        const auto up = randomFloats(rows * cols);
        const float edges[] = {0.0f,   -0.0f,   87.0f, -87.0f, 88.0f,  -88.0f,
                               100.0f, -100.0f, 1e30f, -1e30f, 1e-40f, INFINITY};
        for (size_t i = 0; i < std::size(edges); ++i) gate[i] = edges[i];
        std::vector<float> expected = gate;
        _cpu.gatedActivation({}, {expected.data(), up.data()}, rows * cols);
        const DeviceArray<float> deviceGate(gate), deviceUp(up), floats(rows * cols);
        const DeviceArray<uint8_t> quantized(quantizedRowsBytes(rows, cols));
        const DeviceArray<uint16_t> hi(rows * cols), lo(rows * cols);
        const RowOutputs out = {floats.get(), rowsWithColumns(quantized, rows, cols), {hi.get(), lo.get()}};
        gatedActivation(stream(), {}, deviceGate.get(), deviceUp.get(), rows, cols, out);
        ASSERT_TRUE(sameBits(expected, floats.read())) << cols;
        expectQuantized(expected, rows, cols, quantized);
        const auto low = lo.read();
        expectHalves(expected, hi.read(), &low);
        ASSERT_TRUE(sameBits(gate, deviceGate.read()));
    }
}

TEST_F(Rows, SiluOfAnyWidthAndInPlace) {
    for (const int64_t cols : kOddWidths) {
        const int64_t rows = 3;
        const auto gate = randomFloats(rows * cols, 4.0f), up = randomFloats(rows * cols);
        std::vector<float> expected = gate;
        _cpu.gatedActivation({}, {expected.data(), up.data()}, rows * cols);
        const DeviceArray<float> deviceGate(gate), deviceUp(up);
        gatedActivation(stream(), {}, deviceGate.get(), deviceUp.get(), rows, cols, {deviceGate.get(), {}, {}});
        ASSERT_TRUE(sameBits(expected, deviceGate.read())) << cols;
    }
}

// Every kind, by pairs in another order, with the biases of their experts and the weights of their inputs.
TEST_F(Rows, ActivationsOfPairsAreTheCpus) {
    const Activation kinds[] = {{ActivationKind::Silu},
                                {ActivationKind::Gelu},
                                {ActivationKind::ClampedSwiglu, 2.0f},
                                {ActivationKind::ClampedSilu, 2.0f},
                                {ActivationKind::ReluSquared}};
    const int64_t rows = 7;
    const int32_t experts = 3;
    for (const int64_t cols : {1, 32, 37, 96, 1056}) {
        for (int variant = 0; variant < 80; ++variant) {
            const Activation activation = kinds[variant / 16];
            const bool biased = variant & 1, weighted = variant & 2, ordered = variant & 4, gated = variant & 8;
            SCOPED_TRACE(std::to_string(cols) + " columns, variant " + std::to_string(variant));
            auto gate = randomFloats(rows * cols, 3.0f), up = randomFloats(rows * cols, 3.0f);
            const float edges[] = {0.0f, -0.0f, 88.0f, -88.0f, 1e30f, -1e30f, 1e-40f, INFINITY, -INFINITY};
            for (size_t i = 0; i < std::size(edges) && i < gate.size(); ++i) gate[i] = edges[i];
            if (up.size() > 20) up[18] = INFINITY, up[19] = -INFINITY;
            const auto gateBias = randomFloats(experts * cols), upBias = randomFloats(experts * cols),
                       weight = randomFloats(rows);
            std::vector<int32_t> expert(rows), pairAt(rows);
            std::iota(pairAt.begin(), pairAt.end(), 0);
            if (ordered) std::shuffle(pairAt.begin(), pairAt.end(), random());
            for (int32_t& e : expert) e = static_cast<int32_t>(random()() % experts);
            std::vector<float> expected = gate;
            for (int64_t r = 0; r < rows; ++r) {
                const int32_t pair = pairAt[r];
                cpu::GatedRow row{&expected[r * cols], gated ? &up[r * cols] : nullptr};
                if (biased) row.gateBias = &gateBias[expert[pair] * cols], row.upBias = &upBias[expert[pair] * cols];
                if (weighted) row.factor = weight[pair];
                _cpu.gatedActivation(activation, row, cols);
            }
            const DeviceArray<float> deviceGate(gate), deviceUp(up), deviceGateBias(gateBias), deviceUpBias(upBias),
                deviceWeight(weight), floats(rows * cols);
            const DeviceArray<int32_t> deviceExpert(expert), devicePairAt(pairAt);
            GatedJoin join{activation};
            join.gated = gated;
            if (biased) join.gateBias = deviceGateBias.get(), join.upBias = deviceUpBias.get();
            join.expert = deviceExpert.get();
            if (weighted) join.weight = deviceWeight.get();
            if (ordered) join.pairAt = devicePairAt.get();
            gatedActivation(stream(), join, deviceGate.get(), deviceUp.get(), rows, cols, {floats.get(), {}, {}});
            const auto got = floats.read();
            for (size_t i = 0; i < got.size(); ++i) {
                if (std::isnan(expected[i])) {
                    ASSERT_TRUE(std::isnan(got[i])) << i;
                } else {
                    ASSERT_EQ(bitsFromFloat(got[i]), bitsFromFloat(expected[i])) << i;
                }
            }
        }
    }
}

TEST_F(Rows, RefusesBlocksThatAreNotWhole) {
    const DeviceArray<float> x(100);
    const DeviceArray<uint8_t> quantized(quantizedRowsBytes(1, 128));
    EXPECT_THROW(convertRows(stream(), x.get(), 1, 100, {nullptr, quantizedRowsOver(quantized.get(), 1, 128), {}}),
                 Error);
}

}  // namespace
}  // namespace sharpi::cuda
