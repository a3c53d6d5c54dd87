// Operations of the CPU that models of several families share, each called by itself on small random matrices of
// floats, against the same written down in doubles.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/operations/cpu_operations.h"
#include "seed.h"

using namespace sharpi;

namespace {

constexpr int64_t kRows = 5, kWidth = 24, kHidden = 40;
constexpr int32_t kExperts = 6, kUsed = 3;

using Values = std::vector<float>;
using Doubles = std::vector<double>;

// The `up` of a part without a gate: the last factor is 1.
double absentUp(Activation a) { return a.kind == ActivationKind::ClampedSwiglu ? 0.0 : 1.0; }

double activated(Activation a, double gate, double up) {
    switch (a.kind) {
    case ActivationKind::Silu: return gate / (1.0 + std::exp(-gate)) * up;
    case ActivationKind::Gelu:
        return 0.5 * gate * (1.0 + std::tanh(0.7978845608 * (gate + 0.044715 * gate * gate * gate))) * up;
    case ActivationKind::ClampedSwiglu: {
        const double limit = a.limit, g = std::min(gate, limit), u = std::clamp(up, -limit, limit);
        return g / (1.0 + std::exp(-1.702 * g)) * (u + 1.0);
    }
    case ActivationKind::ClampedSilu: {
        const double limit = a.limit, g = std::min(gate, limit), u = std::clamp(up, -limit, limit);
        return g / (1.0 + std::exp(-g)) * u;
    }
    case ActivationKind::ReluSquared: return gate > 0 ? gate * gate * up : 0.0;
    }
    return NAN;
}

Weight weightOf(const Values& values, int64_t rows, int64_t cols) {
    Weight w;
    w.type = DType::F32;
    w.rows = rows;
    w.cols = cols;
    w.data = reinterpret_cast<const uint8_t*>(values.data());
    return w;
}

WeightStack stackOf(const Values& values, int64_t rows, int64_t cols) {
    WeightStack stack;
    stack.first = weightOf(values, rows, cols);
    stack.stride = sizeof(float) * static_cast<size_t>(rows * cols);
    stack.count = kExperts;
    return stack;
}

// w x + bias for matrix `element` of w.
Doubles product(const Values& w, int64_t element, int64_t rows, const Doubles& x, const Values& bias) {
    const auto cols = static_cast<int64_t>(x.size());
    Doubles y(static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; ++r) {
        double sum = 0;
        for (int64_t c = 0; c < cols; ++c) sum += x[c] * w[(element * rows + r) * cols + c];
        y[r] = sum + (bias.empty() ? 0.0 : bias[element * rows + r]);
    }
    return y;
}

class CpuOperationsTest : public ::testing::Test {
protected:
    CpuOperationsTest() {
        limits.maxRows = kRows;
        limits.embedding = kWidth;
        limits.maxCols = 64;
        limits.denseHidden = limits.expertHidden = limits.sharedHidden = kHidden;
        limits.experts = kExperts;
        limits.expertsUsed = kUsed;
        limits.expertLayers = {{0, kExperts}};
        limits.partOuts = limits.parallelParts = true;
        limits.deltaChannels = 2 * 2 * 8 + 6 * 8;
        limits.deltaWidth = 6 * 8;
        limits.deltaHeads = 6;
        limits.deltaDim = 8;
        const size_t bytes = CpuScratch(2, limits).total;
        _memory.reset(static_cast<uint8_t*>(::operator new(bytes, std::align_val_t{64})));
        std::fill_n(_memory.get(), bytes, uint8_t{0x7f});  // NaN-like, so that nothing unwritten goes unnoticed
        work.takeBuffers(limits, _memory.get());
        for (int32_t t = 0; t < kRows; ++t) batch.add(RowKind::Decode, t, t, 0, false);
        work.batch = &batch;
        ops.expertWork().profiler().addLayer(0, kExperts);
        residual = random(kRows * kWidth, 1.0f);
        std::copy(residual.begin(), residual.end(), work.at(RowBuffer::Residual));
    }

    Values random(int64_t count, float spread) {
        std::normal_distribution<float> normal(0.0f, spread);
        Values values(static_cast<size_t>(count));
        for (float& v : values) v = normal(_random);
        return values;
    }
    // Normed becomes Residual by weights of 1.
    Doubles normed(int64_t row) {
        const Values ones(kWidth, 1.0f);
        if (row == 0) ops.norm({}, {NormKind::Rms, ones.data()}, {}, true);
        const float* const x = work.floats(work.scratch().normed) + row * kWidth;
        return {x, x + kWidth};
    }
    void expectRows(RowBuffer buffer, const std::vector<Doubles>& expected) {
        const float* const got = work.at(buffer);
        for (size_t t = 0; t < expected.size(); ++t) {
            for (size_t i = 0; i < expected[t].size(); ++i) {
                ASSERT_NEAR(got[t * expected[t].size() + i], expected[t][i], 2e-5 * (1.0 + std::abs(expected[t][i])))
                    << "row " << t << ", " << i;
            }
        }
    }

    StepLimits limits;
    HostClock clock;
    CpuWork work{2, clock};
    CpuOperations ops{work};
    Batch batch;
    Values residual;

private:
    struct Release {
        void operator()(uint8_t* bytes) const { ::operator delete(bytes, std::align_val_t{64}); }
    };
    std::mt19937 _random{testSeed(51)};
    std::unique_ptr<uint8_t, Release> _memory;
};

// In double precision.
Doubles rmsNormed(const Doubles& x, const Values& weight, double eps) {
    double squares = 0;
    for (const double v : x) squares += v * v;
    Doubles y(x.size());
    for (size_t i = 0; i < x.size(); ++i)
        y[i] = x[i] / std::sqrt(squares / static_cast<double>(x.size()) + eps) * weight[i];
    return y;
}

TEST_F(CpuOperationsTest, PartsAreAddedAsTheyAreDescribed) {
    const Values norm = random(kWidth, 1.0f), ofY = random(kWidth, 1.0f), ofSide = random(kWidth, 1.0f);
    const float scale = 1.7f;
    for (int variant = 0; variant < 16; ++variant) {
        PartCall part;
        if (variant & 1) part.norm = norm.data();
        if (variant & 2) part.sideNorms = {ofY.data(), ofSide.data()};
        if (variant & 4) part.factor = 0.3f;
        if (variant & 8) part.scale = &scale;
        part.eps = 0.1f;
        const Values y = random(kRows * kWidth, 2.0f), side = random(kRows * kWidth, 2.0f);
        std::copy(y.begin(), y.end(), work.at(RowBuffer::PartOut));
        std::copy(side.begin(), side.end(), work.at(RowBuffer::SideOut));
        std::copy(residual.begin(), residual.end(), work.at(RowBuffer::Residual));
        std::vector<Doubles> expected;
        for (int64_t t = 0; t < kRows; ++t) {
            const auto row = [&](const Values& of) {
                return Doubles(of.begin() + t * kWidth, of.begin() + (t + 1) * kWidth);
            };
            Doubles added = row(y);
            if (variant & 2) {
                added = rmsNormed(added, ofY, 0.1);
                const Doubles other = rmsNormed(row(side), ofSide, 0.1);
                for (int64_t i = 0; i < kWidth; ++i) added[i] += other[i];
            }
            if (variant & 1) added = rmsNormed(added, norm, 0.1);
            Doubles x = row(residual);
            for (int64_t i = 0; i < kWidth; ++i)
                x[i] = (x[i] + (variant & 4 ? 0.3 : 1.0) * added[i]) * (variant & 8 ? 1.7 : 1.0);
            expected.push_back(x);
        }
        ops.addPart(part);
        expectRows(RowBuffer::Residual, expected);
        // The same with a norm behind it.
        const Values once(work.at(RowBuffer::Residual), work.at(RowBuffer::Residual) + kRows * kWidth);
        std::copy(y.begin(), y.end(), work.at(RowBuffer::PartOut));
        std::copy(side.begin(), side.end(), work.at(RowBuffer::SideOut));
        std::copy(residual.begin(), residual.end(), work.at(RowBuffer::Residual));
        ops.norm(part, {NormKind::Rms, norm.data(), nullptr, 0.1f}, {}, false);
        EXPECT_EQ(once, Values(work.at(RowBuffer::Residual), work.at(RowBuffer::Residual) + kRows * kWidth));
        const Doubles after = rmsNormed(expected.back(), norm, 0.1);
        for (int64_t i = 0; i < kWidth; ++i)
            EXPECT_NEAR(work.floats(work.scratch().normed)[(kRows - 1) * kWidth + i], after[i], 1e-5) << variant;
    }
}

const Activation kActivations[] = {{ActivationKind::Silu},
                                   {ActivationKind::Gelu},
                                   {ActivationKind::ClampedSwiglu, 1.5f},
                                   {ActivationKind::ClampedSilu, 1.25f},
                                   {ActivationKind::ReluSquared}};

TEST_F(CpuOperationsTest, GatedLinearTakesBiasesAndActivations) {
    const Values gate = random(kHidden * kWidth, 0.3f), up = random(kHidden * kWidth, 0.3f),
                 gateBias = random(kHidden, 1.0f), upBias = random(kHidden, 1.0f);
    const Weight gateW = weightOf(gate, kHidden, kWidth), upW = weightOf(up, kHidden, kWidth),
                 reader = weightOf(gate, kWidth, kHidden);
    for (const Activation& activation : kActivations) {
        for (const int variant : {0, 1, 2, 3}) {
            const bool biased = variant & 1, gated = variant & 2;
            std::vector<Doubles> expected;
            for (int64_t t = 0; t < kRows; ++t) {
                const Doubles x = normed(t);
                Doubles g = product(gate, 0, kHidden, x, biased ? gateBias : Values());
                Doubles u = product(up, 0, kHidden, x, biased ? upBias : Values());
                if (!gated) std::fill(u.begin(), u.end(), absentUp(activation));
                for (size_t i = 0; i < g.size(); ++i) g[i] = activated(activation, g[i], u[i]);
                expected.push_back(g);
            }
            const Weight none;
            GatedProduct call{gateW, gated ? upW : none};
            if (biased) call.gateBias = gateBias.data(), call.upBias = upBias.data();
            call.activation = activation;
            ops.gatedLinear(RowInput::Normed, call, reader);
            expectRows(RowBuffer::Gate, expected);
        }
    }
}

// What one layer of experts may have.
struct Kind {
    bool biases = false, weightsInput = false, shared = false, sharedScale = false;
    Activation activation;
    RowBuffer to = RowBuffer::Residual;
    bool gated = true;
};

class CpuMixture : public CpuOperationsTest {
protected:
    Doubles answer(const Kind& kind, int32_t expert, double weight, const Doubles& x) const {
        Doubles weighted = x;
        for (double& v : weighted) v *= kind.weightsInput ? weight : 1.0;
        const Values none;
        Doubles g = product(gate, expert, kHidden, weighted, kind.biases ? gateBias : none);
        Doubles u = product(up, expert, kHidden, weighted, kind.biases ? upBias : none);
        if (!kind.gated) std::fill(u.begin(), u.end(), absentUp(kind.activation));
        for (size_t i = 0; i < g.size(); ++i) g[i] = activated(kind.activation, g[i], u[i]);
        Doubles y = product(down, expert, kWidth, g, kind.biases ? downBias : none);
        for (double& v : y) v *= kind.weightsInput ? 1.0 : weight;
        return y;
    }
    // Gating by the softmax of the chosen.
    Doubles rowOf(const Kind& kind, int64_t t, const Doubles& x) const {
        std::vector<int32_t> order;
        for (int32_t e = 0; e < kExperts; ++e) order.push_back(e);
        const auto logit = [&](int32_t e) { return logits[t * kExperts + e]; };
        std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logit(a) > logit(b); });
        double sum = 0;
        for (int32_t k = 0; k < kUsed; ++k) sum += std::exp(static_cast<double>(logit(order[k])));
        Doubles y(kWidth);
        for (int32_t k = 0; k < kUsed; ++k) {
            const double weight = std::exp(static_cast<double>(logit(order[k]))) / sum;
            const Doubles of = answer(kind, order[k], weight, x);
            for (size_t i = 0; i < y.size(); ++i) y[i] += of[i];
        }
        double factor = 1.0;
        if (kind.sharedScale) {
            double dot = 0;
            for (size_t i = 0; i < x.size(); ++i) dot += x[i] * sharedScale[i];
            factor = 1.0 / (1.0 + std::exp(-dot));
        }
        for (size_t i = 0; i < y.size(); ++i) {
            if (kind.shared) y[i] += factor * sharedOut[t * kWidth + i];
            if (kind.to == RowBuffer::Residual) y[i] += residual[t * kWidth + i];
        }
        return y;
    }
    void check(const Kind& kind) {
        std::copy(residual.begin(), residual.end(), work.at(RowBuffer::Residual));
        std::vector<Doubles> expected;
        for (int64_t t = 0; t < kRows; ++t) expected.push_back(rowOf(kind, t, normed(t)));
        const WeightStack ups = kind.gated ? stackOf(up, kHidden, kWidth) : WeightStack();
        ExpertCall call{{}, stackOf(gate, kHidden, kWidth), ups, stackOf(down, kWidth, kHidden)};
        call.routing.count = kExperts;
        call.routing.used = kUsed;
        call.routing.gating = Gating::SoftmaxOfChosen;
        call.routing.weightsInput = kind.weightsInput;
        if (kind.biases) call.gateBias = gateBias.data(), call.upBias = upBias.data(), call.downBias = downBias.data();
        call.activation = kind.activation;
        call.to = kind.to;
        call.shared = kind.shared;
        if (kind.sharedScale) call.sharedScale = sharedScale.data();
        std::copy(logits.begin(), logits.end(), work.at(RowBuffer::RouterLogits));
        ops.route(call);
        std::copy(sharedOut.begin(), sharedOut.end(), work.at(RowBuffer::SharedOut));
        ops.experts(call);
        expectRows(kind.to, expected);
    }

    Values gate = random(kExperts * kHidden * kWidth, 0.3f), up = random(kExperts * kHidden * kWidth, 0.3f),
           down = random(kExperts * kHidden * kWidth, 0.3f), gateBias = random(kExperts * kHidden, 1.0f),
           upBias = random(kExperts * kHidden, 1.0f), downBias = random(kExperts * kWidth, 1.0f),
           sharedOut = random(kRows * kWidth, 1.0f), sharedScale = random(kWidth, 0.3f),
           logits = random(kRows * kExperts, 1.0f);
};

TEST_F(CpuMixture, Plain) { check({}); }
TEST_F(CpuMixture, ActivationsAndBiases) {
    for (const Activation& activation : kActivations) {
        for (const int variant : {0, 1, 2, 3}) {
            Kind kind;
            kind.activation = activation;
            kind.biases = variant & 1;
            kind.gated = variant & 2;
            check(kind);
            if (HasFatalFailure()) return;
        }
    }
}
TEST_F(CpuMixture, WeightedInputs) {
    Kind kind;
    kind.weightsInput = true;
    check(kind);
    kind.biases = true;  // not weighted
    kind.activation = kActivations[2];
    check(kind);
}
TEST_F(CpuMixture, SharedExpertWithAndWithoutScale) {
    Kind kind;
    kind.shared = true;
    check(kind);
    kind.sharedScale = true;
    check(kind);
}
TEST_F(CpuMixture, OtherBuffersAreOverwritten) {
    Kind kind;
    kind.to = RowBuffer::PartOut;
    kind.shared = true;
    std::fill_n(work.at(RowBuffer::PartOut), kRows * kWidth, 1000.0f);
    check(kind);
    EXPECT_TRUE(std::equal(residual.begin(), residual.end(), work.at(RowBuffer::Residual)));
}

// A layer whose value heads read key heads in groups, and the same layer with its value heads in the other order.
class CpuDelta : public CpuOperationsTest {
protected:
    static constexpr int32_t kKeyHeads = 2, kValueHeads = 6, kDim = 8;

    // Head h of the result is what value head order[h] gives.
    Values run(bool consecutive, const std::vector<int32_t>& order) {
        const int64_t keys = int64_t{2} * kKeyHeads * kDim, values = kValueHeads * kDim, channels = keys + values;
        const auto place = [&](const Values& from, int64_t before, int64_t size, float* to) {
            const int64_t width = before + kValueHeads * size, rows = static_cast<int64_t>(from.size()) / width;
            for (int64_t t = 0; t < rows; ++t) {
                std::copy_n(&from[t * width], before, to + t * width);
                for (int64_t h = 0; h < kValueHeads; ++h)
                    std::copy_n(&from[t * width + before + order[h] * size], size, to + t * width + before + h * size);
            }
        };
        Values convWeights(conv.size()), bias(kValueHeads), decays(kValueHeads);
        place(conv, keys, kDim, convWeights.data());
        place(stepBias, 0, 1, bias.data());
        place(decay, 0, 1, decays.data());
        place(mixed, keys, kDim, work.at(RowBuffer::DeltaMixed));
        place(alpha, 0, 1, work.at(RowBuffer::DeltaAlpha));
        place(beta, 0, 1, work.at(RowBuffer::DeltaBeta));
        place(gate, 0, kDim, work.at(RowBuffer::DeltaGate));
        Values convState(static_cast<size_t>(3 * channels)), matrixState(static_cast<size_t>(values * kDim));
        const RecurrentLayer state{{3 * channels, values * kDim}, convState.data(), matrixState.data()};
        work.sequences = {{0, kRows, {}, {{0, kRows, -1, 0}}}};
        DeltaCall call{kKeyHeads, kValueHeads, kDim, 4, convWeights.data(), bias.data(), decays.data(), norm.data()};
        call.eps = 1e-6f;
        call.consecutiveHeads = consecutive;
        ops.deltaRule(call, state, Weight());
        const float* const got = work.at(RowBuffer::DeltaGate);
        Values inOrder(static_cast<size_t>(kRows * values));
        for (int64_t t = 0; t < kRows; ++t) {
            for (int64_t h = 0; h < kValueHeads; ++h)
                std::copy_n(got + t * values + h * kDim, kDim, &inOrder[t * values + order[h] * kDim]);
        }
        return inOrder;
    }

    const int64_t keys = int64_t{2} * kKeyHeads * kDim, values = kValueHeads * kDim;
    Values conv = random(4 * (keys + values), 0.5f), stepBias = random(kValueHeads, 0.5f),
           decay = Values(kValueHeads, -1.0f), norm = Values(kDim, 1.0f), mixed = random(kRows * (keys + values), 1.0f),
           alpha = random(kRows * kValueHeads, 1.0f), beta = random(kRows * kValueHeads, 1.0f),
           gate = random(kRows * values, 1.0f);
};

// Consecutive heads 0 to 2 read key head 0, heads 3 to 5 key head 1; by turns, heads 0, 2, 4 read key head 0.
TEST_F(CpuDelta, ConsecutiveHeadsReadOneKeyHead) {
    const Values consecutive = run(true, {0, 1, 2, 3, 4, 5});
    EXPECT_EQ(consecutive, run(false, {0, 3, 1, 4, 2, 5}));
    EXPECT_NE(consecutive, run(false, {0, 1, 2, 3, 4, 5}));
}

}  // namespace
