// What a part adds to the residual, and the norm of the sum, on the GPU: bit for bit against the CPU's kernels.
#include <cstring>

#include "column_test.h"
#include "cpu/kernels.h"
#include "gpu_test.h"
#include "kernels/rows/residual.h"

namespace sharpi::cuda {
namespace {

constexpr float kPartEps = 1e-5f, kNextEps = 1e-6f;

// Which of the terms of PartTerms there are.
struct Terms {
    bool part = true, norm = false, side = false, factor = false, scale = false;
};

const Terms kTerms[] = {
    {true, true},
    {true, true, false, false, true},
    {true, true, true},
    {true, true, true, true, true},
    {true, false, true},
    {true, false, false, true},
    {true, false, false, false, true},
    {true},
    {false},
};

class Residual : public GpuTest {
protected:
    const cpu::Kernels& _cpu = cpu::kernels();

    // Rows of `cols`; skip: floats before each array, so that it is not aligned.
    struct World {
        int64_t rows, cols;
        size_t skip;
        std::vector<float> x, y, side, norm, yNorm, sideNorm, weight, bias, scale;
    };
    World world(int64_t rows, int64_t cols, size_t skip) {
        const auto all = skip + static_cast<size_t>(rows * cols), one = skip + static_cast<size_t>(cols);
        return {rows,
                cols,
                skip,
                randomFloats(all),
                randomFloats(all, 3.0f),
                randomFloats(all, 2.0f),
                randomFloats(one),
                randomFloats(one),
                randomFloats(one),
                randomFloats(one),
                randomFloats(one),
                randomFloats(1)};
    }

    // x after the part.
    void addOnCpu(World& w, const Terms& terms) {
        for (int64_t r = 0; r < w.rows && terms.part; ++r) {
            float* const x = w.x.data() + w.skip + r * w.cols;
            float* const y = w.y.data() + w.skip + r * w.cols;
            float* const side = w.side.data() + w.skip + r * w.cols;
            if (terms.side) {
                _cpu.rmsNorm(y, w.yNorm.data() + w.skip, kPartEps, w.cols, y);
                _cpu.rmsNorm(side, w.sideNorm.data() + w.skip, kPartEps, w.cols, side);
                _cpu.add(y, side, w.cols);
            }
            if (terms.norm) _cpu.rmsNorm(y, w.norm.data() + w.skip, kPartEps, w.cols, y);
            for (int64_t i = 0; terms.factor && i < w.cols; ++i) y[i] *= 0.37f;
            _cpu.add(x, y, w.cols);
            for (int64_t i = 0; terms.scale && i < w.cols; ++i) x[i] *= w.scale[0];
        }
    }
    std::vector<float> nextOnCpu(const World& w, NextRows::Kind kind, bool biased) {
        std::vector<float> next(w.x.size());
        for (int64_t r = 0; r < w.rows; ++r) {
            const float* const x = w.x.data() + w.skip + r * w.cols;
            float* const to = next.data() + w.skip + r * w.cols;
            const float *const weight = w.weight.data() + w.skip, *const bias =
                                                                      biased ? w.bias.data() + w.skip : nullptr;
            if (kind == NextRows::Kind::Copy) std::copy(x, x + w.cols, to);
            else if (kind == NextRows::Kind::Rms) _cpu.rmsNorm(x, weight, kNextEps, w.cols, to);
            else _cpu.layerNorm(x, weight, bias, kNextEps, w.cols, to);
        }
        return std::vector<float>(next.begin() + static_cast<std::ptrdiff_t>(w.skip), next.end());
    }

    void expectCpusBits(World w, const Terms& terms, NextRows::Kind kind, bool biased) {
        SCOPED_TRACE(std::to_string(w.rows) + " rows of " + std::to_string(w.cols) + ", kind " +
                     std::to_string(static_cast<int>(kind)) + ", terms " + std::to_string(&terms - kTerms));
        const DeviceArray<float> x(w.x), y(w.y), side(w.side), norm(w.norm), yNorm(w.yNorm), sideNorm(w.sideNorm),
            weight(w.weight), bias(w.bias), scale(w.scale), floats(static_cast<size_t>(w.rows * w.cols));
        const bool blocks = w.cols % 32 == 0;
        const DeviceArray<uint8_t> quantized(blocks ? quantizedRowsBytes(w.rows, w.cols) : 0),
            otherQuantized(quantized.size());
        const DeviceArray<uint16_t> hi(floats.size()), lo(floats.size()), otherHi(floats.size()),
            otherLo(floats.size());
        PartTerms part;
        if (terms.part) part.y = y.get() + w.skip;
        if (terms.norm) part.norm = norm.get() + w.skip;
        if (terms.side) {
            part.side = side.get() + w.skip;
            part.yNorm = yNorm.get() + w.skip;
            part.sideNorm = sideNorm.get() + w.skip;
        }
        part.eps = kPartEps;
        if (terms.factor) part.factor = 0.37f;
        if (terms.scale) part.scale = scale.get();
        NextRows next{kind, nullptr, nullptr, kNextEps};
        if (kind == NextRows::Kind::Rms || kind == NextRows::Kind::Layer) next.weight = weight.get() + w.skip;
        if (biased) next.bias = bias.get() + w.skip;
        const auto forms = [&](const DeviceArray<uint8_t>& q, const DeviceArray<uint16_t>& high,
                               const DeviceArray<uint16_t>& low) {
            RowOutputs out;
            if (blocks) out.quantized = rowsWithColumns(q, w.rows, w.cols);
            out.half = {high.get(), low.get()};
            return out;
        };
        RowOutputs out = forms(quantized, hi, lo);
        out.floats = floats.get();
        const bool written = kind != NextRows::Kind::None;
        addPart(stream(), part, x.get() + w.skip, nullptr, next, w.rows, w.cols, written ? out : RowOutputs());
        addOnCpu(w, terms);
        ASSERT_TRUE(sameBits(w.x, x.read()));
        if (!written) return;
        const std::vector<float> expected = nextOnCpu(w, kind, biased);
        ASSERT_TRUE(sameBits(expected, floats.read()));
        // The other forms are what convertRows, which has its own tests, makes of the floats.
        const DeviceArray<float> same(expected);
        convertRows(stream(), same.get(), w.rows, w.cols, forms(otherQuantized, otherHi, otherLo));
        ASSERT_EQ(otherHi.read(), hi.read());
        ASSERT_EQ(otherLo.read(), lo.read());
        ASSERT_EQ(otherQuantized.read(), quantized.read());
    }
};

TEST_F(Residual, PartsAndNormsAreTheCpus) {
    using Kind = NextRows::Kind;
    for (const int64_t cols : {32, 96, 256, 1056, 2816, 5376, 8192}) {
        for (const int64_t rows : {1, 2, 40}) {
            for (const Terms& terms : kTerms) {
                for (const Kind kind : {Kind::None, Kind::Copy, Kind::Rms})
                    expectCpusBits(world(rows, cols, 0), terms, kind, false);
                for (const bool biased : {false, true})
                    expectCpusBits(world(rows, cols, 0), terms, Kind::Layer, biased);
            }
        }
    }
}

// Rows that are no whole quads, are not aligned, or are too long for shared memory.
TEST_F(Residual, RowsOfAnyWidthAnywhere) {
    using Kind = NextRows::Kind;
    for (const int64_t cols : {1, 2, 31, 33, 130, 1000, 4097, 8224, 12288, 15361, 20002, 30720}) {
        for (const size_t skip : {0, 1}) {
            for (const Terms& terms : kTerms) {
                expectCpusBits(world(3, cols, skip), terms, Kind::Rms, false);
                expectCpusBits(world(3, cols, skip), terms, Kind::Layer, true);
            }
        }
    }
}

TEST_F(Residual, ReadsTheRowsItIsTold) {
    const int64_t cols = 160;
    const World all = world(20, cols, 0);
    const std::vector<int32_t> index = {19, 0, 3, 3, 12, 1, 19};
    World wanted = all;
    wanted.rows = static_cast<int64_t>(index.size());
    for (size_t r = 0; r < index.size(); ++r)
        std::copy_n(all.x.begin() + index[r] * cols, cols, wanted.x.begin() + static_cast<int64_t>(r) * cols);
    wanted.x.resize(index.size() * cols);
    const DeviceArray<float> x(all.x), weight(all.weight), floats(index.size() * cols);
    const DeviceArray<int32_t> deviceIndex(index);
    const NextRows next{NextRows::Kind::Layer, weight.get(), nullptr, kNextEps};
    addPart(stream(), {}, x.get(), deviceIndex.get(), next, wanted.rows, cols, {floats.get(), {}, {}});
    EXPECT_TRUE(sameBits(nextOnCpu(wanted, next.kind, false), floats.read()));
    EXPECT_TRUE(sameBits(all.x, x.read()));
}

// Layers in close succession over the same rows: no launch reads what the one before has yet to write, or writes what
// it still reads.
TEST_F(Residual, LaunchesThatOverlap) {
    World w = world(2, 2816, 0);
    const DeviceArray<float> x(w.x), norm(w.norm), weight(w.weight), y(w.x.size());
    for (int round = 0; round < 40; ++round) {
        PartTerms part{y.get(), norm.get()};
        part.eps = kPartEps;
        const NextRows next{NextRows::Kind::Rms, weight.get(), nullptr, kNextEps};
        convertRows(stream(), x.get(), w.rows, w.cols, {y.get(), {}, {}});
        addPart(stream(), part, x.get(), nullptr, next, w.rows, w.cols, {y.get(), {}, {}});
        w.y = w.x;
        addOnCpu(w, {true, true});
    }
    EXPECT_TRUE(sameBits(w.x, x.read()));
    EXPECT_TRUE(sameBits(nextOnCpu(w, NextRows::Kind::Rms, false), y.read()));
}

}  // namespace
}  // namespace sharpi::cuda
