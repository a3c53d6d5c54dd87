// What the tests of recurrent layers share: the rows of a batch. And of Gated DeltaNet: a layer's weights, states and
// rows, the CPU's results for them, and their copy on the device.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>

#include "column_test.h"
#include "core/half.h"
#include "core/portable.h"
#include "cpu/kernels.h"
#include "gpu_test.h"
#include "kernels/delta/gated_delta.h"

namespace sharpi::cuda {

inline constexpr float kEps = 1e-6f;
inline constexpr int32_t kEntries = 9;  // at least

// Rows of one sequence. They begin from a state entry (or from nothing), and the states after some of them are kept.
struct Part {
    int32_t from;
    std::vector<std::pair<int64_t, int32_t>> kept;  // {number of rows, entry}; the last one is after all rows
    int64_t rows() const { return kept.back().first; }
};

// A batch of such rows.
struct PartRows {
    int64_t rows = 0;
    int32_t entries = kEntries;
    std::vector<int32_t> from, to, begin, end;

    explicit PartRows(const std::vector<Part>& parts) {
        for (const Part& part : parts) {
            begin.push_back(static_cast<int32_t>(rows));
            from.push_back(part.from < 0 ? kStateIsZero : part.from);
            from.resize(static_cast<size_t>(rows + part.rows()), kStateIsOfRowBefore);
            to.resize(from.size(), -1);
            for (const auto& [until, entry] : part.kept) {
                to[static_cast<size_t>(rows + until - 1)] = entry;
                entries = std::max({entries, entry + 1, part.from + 1});
            }
            rows += part.rows();
            end.push_back(static_cast<int32_t>(rows));
        }
        // An empty range, like the padding of a captured launch.
        begin.insert(begin.begin() + 1, 0);
        end.insert(end.begin() + 1, 0);
    }
};

// Each sequence's rows, cut wherever a state is kept, and otherwise at random or after 64 rows; in any order. Rows: a
// World or PartRows.
template <typename Rows>
std::vector<std::pair<int32_t, int32_t>> tilesOf(const Rows& rows, std::mt19937& random, bool whole) {
    std::vector<std::pair<int32_t, int32_t>> tiles = {{0, 0}};
    for (size_t s = 0; s < rows.begin.size(); ++s) {
        for (int32_t at = rows.begin[s]; at < rows.end[s];) {
            const int32_t most = whole ? kDeltaChunk : 1 + static_cast<int32_t>(random() % kDeltaChunk);
            int32_t until = std::min(rows.end[s], at + most);
            for (int32_t t = at; t < until; ++t)
                if (rows.to[static_cast<size_t>(t)] >= 0) until = t + 1;
            tiles.emplace_back(at, until);
            at = until;
        }
    }
    std::shuffle(tiles.begin(), tiles.end(), random);
    return tiles;
}

// The largest error, relative to the largest number of the same head. Numbers are [.., heads, group].
inline double errorOf(const std::vector<double>& expected, const std::vector<float>& got, size_t heads, size_t group) {
    double error = 0;
    for (size_t head = 0; head < heads; ++head) {
        double largest = 1e-30, difference = 0;
        for (size_t first = head * group; first < expected.size(); first += heads * group) {
            for (size_t i = first; i < first + group; ++i) {
                if (std::isnan(expected[i]) && std::isnan(got[i])) continue;  // an entry that is not used
                largest = std::max(largest, std::abs(expected[i]));
                const double d = std::abs(expected[i] - got[i]);
                difference = std::isnan(d) ? INFINITY : std::max(difference, d);
            }
        }
        error = std::max(error, difference / largest);
    }
    return error;
}

struct Case {
    DeltaShape shape;
    std::vector<Part> parts;
};

// States and products of a batch on the host, and the CPU's results for them.
struct World {
    DeltaShape shape;
    std::vector<Part> parts;
    int64_t rows = 0;
    std::vector<float> conv, stepBias, decay, headNorm;  // weights
    std::vector<float> convStates, matrixStates;
    std::vector<float> mixed, alpha, beta, gate, out;
    std::vector<int32_t> from, to, begin, end;

    void useCpu() {
        const cpu::Kernels& k = cpu::kernels();
        int64_t row = 0;
        out.assign(static_cast<size_t>(rows * shape.valueWidth()), NAN);
        for (const Part& part : parts) {
            int32_t entry = part.from;
            int64_t done = 0;
            for (const auto& [until, next] : part.kept) {
                convolve(k, row + done, until - done, entry, next);
                prepare(k, row + done, until - done);
                deltaRule(k, row + done, until - done, entry, next);
                entry = next;
                done = until;
            }
            row += part.rows();
        }
    }

    std::vector<float> gated(const std::vector<float>& attended) const {
        std::vector<float> y = gate, normed = attended;
        for (size_t h = 0; h < normed.size(); h += shape.dim) {
            cpu::kernels().rmsNorm(&attended[h], headNorm.data(), kEps, shape.dim, &normed[h]);
        }
        cpu::kernels().gatedActivation({}, {y.data(), normed.data()}, static_cast<int64_t>(y.size()));
        return y;
    }

    // The delta rule in double precision for what useCpu prepared. It begins from `states` and updates them. Returns
    // [rows, valueWidth].
    std::vector<double> inDouble(std::vector<float>& states) const {
        std::vector<double> answers(static_cast<size_t>(rows * shape.valueWidth()));
        int64_t row = 0;
        for (const Part& part : parts) {
            for (int32_t h = 0; h < shape.valueHeads; ++h) headInDouble(part, row, h, states, answers);
            row += part.rows();
        }
        return answers;
    }

private:
    void headInDouble(const Part& part, int64_t row, int32_t head, std::vector<float>& states,
                      std::vector<double>& answers) const {
        const int64_t dim = shape.dim;
        const auto matrix = [&](int32_t entry) { return &states[entry * shape.matrixFloats() + head * dim * dim]; };
        std::vector<double> s(static_cast<size_t>(dim * dim));
        if (part.from >= 0) std::copy_n(matrix(part.from), dim * dim, s.begin());
        auto kept = part.kept.begin();
        for (int64_t t = row; t < row + part.rows(); ++t) {
            const int32_t keyHead = keyHeadOf(head, shape.keyHeads, shape.headsPerKey());
            const float* q = &mixed[t * shape.channels() + keyHead * dim];
            const float *k = q + shape.keyWidth(),
                        *v = &mixed[t * shape.channels() + 2 * shape.keyWidth() + head * dim];
            for (double& x : s) x *= alpha[t * shape.valueHeads + head];
            for (int64_t j = 0; j < dim; ++j) {
                double recalled = 0, answer = 0;
                for (int64_t i = 0; i < dim; ++i) recalled += s[i * dim + j] * k[i];
                const double delta = (v[j] - recalled) * beta[t * shape.valueHeads + head];
                for (int64_t i = 0; i < dim; ++i) answer += (s[i * dim + j] += delta * k[i]) * q[i];
                answers[t * shape.valueWidth() + head * dim + j] = answer;
            }
            if (t - row + 1 != kept->first) continue;
            std::copy(s.begin(), s.end(), matrix(kept->second));
            ++kept;
        }
    }

    void convolve(const cpu::Kernels& k, int64_t row, int64_t count, int32_t entry, int32_t next) {
        cpu::ConvArgs args;
        args.x = &mixed[row * shape.channels()];
        args.rows = count;
        args.channels = shape.channels();
        args.weight = conv.data();
        args.width = shape.convWidth;
        args.from = entry < 0 ? nullptr : &convStates[entry * shape.convFloats()];
        args.to = &convStates[next * shape.convFloats()];
        k.convSilu(args, 0, shape.channels());
    }

    void prepare(const cpu::Kernels& k, int64_t row, int64_t count) {
        const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape.dim)));
        for (int64_t t = row; t < row + count; ++t) {
            for (int32_t h = 0; h < 2 * shape.keyHeads; ++h) {
                k.l2Norm(&mixed[t * shape.channels() + h * shape.dim], kEps, h < shape.keyHeads ? scale : 1.0f,
                         shape.dim);
            }
            for (int32_t h = 0; h < shape.valueHeads; ++h) {
                float &a = alpha[t * shape.valueHeads + h], &b = beta[t * shape.valueHeads + h];
                a = portableExp(decay[h] * portableSoftplus(a + stepBias[h]));
                b = portableSigmoid(b);
            }
        }
    }

    void deltaRule(const cpu::Kernels& k, int64_t row, int64_t count, int32_t entry, int32_t next) {
        std::vector<float> scratch(cpu::stateScratchBytes(shape.dim) / sizeof(float) + 16);
        auto* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
        for (int32_t h = 0; h < shape.valueHeads; ++h) {
            const int64_t matrix = int64_t{h} * shape.dim * shape.dim;
            cpu::DeltaArgs args;
            args.q = &mixed[row * shape.channels() + keyHeadOf(h, shape.keyHeads, shape.headsPerKey()) * shape.dim];
            args.k = args.q + shape.keyWidth();
            args.v = &mixed[row * shape.channels() + 2 * shape.keyWidth() + h * shape.dim];
            args.rowStride = shape.channels();
            args.decay = &alpha[row * shape.valueHeads + h];
            args.step = &beta[row * shape.valueHeads + h];
            args.stepStride = shape.valueHeads;
            args.out = &out[row * shape.valueWidth() + h * shape.dim];
            args.outStride = shape.valueWidth();
            args.rows = count;
            args.dim = shape.dim;
            args.from = entry < 0 ? nullptr : &matrixStates[entry * shape.matrixFloats() + matrix];
            args.to = &matrixStates[next * shape.matrixFloats() + matrix];
            k.deltaRule(args, 0, shape.dim, aligned);
        }
    }
};

// The copy of a World on the device.
struct DeviceWorld {
    DeviceArray<float> conv, stepBias, decay, headNorm, convStates, matrixStates, mixed, alpha, beta, gate, steps;
    DeviceArray<int32_t> from, to, begin, end;
    DeltaBatch batch;

    // fused: alphas and betas are in `steps`, and alpha and beta hold nothing.
    explicit DeviceWorld(const World& w, bool fused = false)
        : conv(w.conv),
          stepBias(w.stepBias),
          decay(w.decay),
          headNorm(w.headNorm),
          convStates(w.convStates),
          matrixStates(w.matrixStates),
          mixed(w.mixed),
          alpha(orNone(w.alpha, fused)),
          beta(orNone(w.beta, fused)),
          gate(w.gate),
          steps(stepsOf(w, fused)),
          from(w.from),
          to(w.to),
          begin(w.begin),
          end(w.end),
          batch{w.rows, from.get(), to.get(), {begin.get(), end.get(), static_cast<int64_t>(w.begin.size())}} {}

    DeltaInputs inputs() const {
        return {mixed.get(), alpha.get(), beta.get(), gate.get(), steps.size() ? steps.get() : nullptr};
    }
    DeltaParameters parameters() const { return {conv.get(), stepBias.get(), decay.get(), headNorm.get(), kEps}; }
    DeltaStates states() const { return {convStates.get(), matrixStates.get()}; }

private:
    static std::vector<float> orNone(std::vector<float> values, bool none) {
        if (none) std::fill(values.begin(), values.end(), NAN);
        return values;
    }
    // Key head by key head: the betas of its value heads, then their alphas.
    static std::vector<float> stepsOf(const World& w, bool fused) {
        if (!fused) return {};
        const int32_t group = w.shape.headsPerKey();
        std::vector<float> steps(2 * w.beta.size());
        for (size_t i = 0; i < w.beta.size(); ++i) {
            const size_t member = i % static_cast<size_t>(group), at = 2 * i - member;
            steps[at] = w.beta[i];
            steps[at + static_cast<size_t>(group)] = w.alpha[i];
        }
        return steps;
    }
};

class GatedDeltaTest : public GpuTest {
protected:
    World world(const Case& c) {
        World w;
        w.shape = c.shape;
        w.parts = c.parts;
        const PartRows rows(c.parts);
        w.rows = rows.rows;
        w.from = rows.from, w.to = rows.to, w.begin = rows.begin, w.end = rows.end;
        const DeltaShape& s = w.shape;
        w.conv = randomFloats(s.convWidth * s.channels(), 0.5f);
        w.stepBias = randomFloats(s.valueHeads);
        w.decay = randomFloats(s.valueHeads);
        for (float& a : w.decay) a = -std::exp(0.5f * a - 1.0f);
        w.headNorm = randomFloats(s.dim);
        w.convStates.assign(static_cast<size_t>(rows.entries * s.convFloats()), NAN);
        w.matrixStates.assign(static_cast<size_t>(rows.entries * s.matrixFloats()), NAN);
        for (const Part& part : c.parts) {
            if (part.from < 0) continue;
            const auto conv = randomFloats(s.convFloats()), matrix = randomFloats(s.matrixFloats());
            std::copy(conv.begin(), conv.end(), w.convStates.begin() + part.from * s.convFloats());
            std::copy(matrix.begin(), matrix.end(), w.matrixStates.begin() + part.from * s.matrixFloats());
        }
        w.mixed = randomFloats(w.rows * s.channels(), 2.0f);
        w.alpha = randomFloats(w.rows * s.valueHeads, 3.0f);
        w.beta = randomFloats(w.rows * s.valueHeads, 3.0f);
        w.gate = randomFloats(w.rows * s.valueWidth(), 3.0f);
        return w;
    }

    std::string nameOf(const World& w) {
        return std::to_string(w.shape.keyHeads) + " and " + std::to_string(w.shape.valueHeads) + " heads of " +
               std::to_string(w.shape.dim) + (w.shape.consecutive ? " in a row, " : ", ") + std::to_string(w.rows) +
               " rows";
    }
};

}  // namespace sharpi::cuda
