// See forward_pass.h.
#include "engine/forward_pass.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "cpu/kernels.h"

namespace sharpi {

namespace {

// The widest of each buffer over all layers, in floats a row.
struct Widths {
    int64_t q = 0, kv = 0, hidden = 0;
};

Widths widths(const ModelSpec& spec) {
    Widths w;
    for (const LayerSpec& layer : spec.layers) {
        w.q = std::max(w.q, int64_t{layer.attention.heads} * layer.attention.headDim);
        w.kv = std::max(w.kv, int64_t{layer.attention.kvHeads} * layer.attention.headDim);
        if (layer.dense) w.hidden = std::max(w.hidden, layer.dense->hidden());
    }
    return w;
}

bool sameRotation(const RopeSpec& a, const RopeSpec& b) {
    return a.pairing == b.pairing && a.dims == b.dims && a.base == b.base && a.frequencyScale == b.frequencyScale &&
           a.extrapolation == b.extrapolation && a.magnitude == b.magnitude && a.betaFast == b.betaFast &&
           a.betaSlow == b.betaSlow && a.originalContext == b.originalContext && a.factors.tensor == b.factors.tensor;
}

// Radians per position of each pair. YaRN blends the stretched and the original frequency by how many turns a pair
// makes over the original context (Peng et al., 2023, section 3.2).
std::vector<double> frequencies(const RopeSpec& rope, const float* factors) {
    const double pi = 3.14159265358979323846;
    const auto pairOfTurns = [&](double turns) {
        return rope.dims * std::log(rope.originalContext / (turns * 2 * pi)) / (2 * std::log(rope.base));
    };
    const double low = std::max(0.0, std::floor(pairOfTurns(rope.betaFast)));
    const double high = std::min(rope.dims - 1.0, std::ceil(pairOfTurns(rope.betaSlow)));
    std::vector<double> result(rope.dims / 2);
    for (size_t i = 0; i < result.size(); ++i) {
        double plain = std::pow(rope.base, -2.0 * i / rope.dims);
        if (factors) plain /= factors[i];
        const double ramp = std::clamp((i - low) / std::max(0.001, high - low), 0.0, 1.0);
        const double keep = (1.0 - ramp) * rope.extrapolation;
        result[i] = plain * rope.frequencyScale * (1.0 - keep) + plain * keep;
    }
    return result;
}

// Where consecutive rows of one sequence begin and end.
std::vector<SequenceRows> sequencesOf(const Batch& batch, const KvCache& kv) {
    std::vector<SequenceRows> result;
    for (int64_t t = 0; t < batch.size(); ++t) {
        if (t == 0 || batch.sequences[t] != batch.sequences[t - 1]) {
            result.push_back({t, t, kv.pageTable(batch.sequences[t])});
        }
        result.back().end = t + 1;
    }
    return result;
}

}  // namespace

size_t ForwardPass::scratchBytes(const ModelSpec& spec, int64_t maxRows, int64_t context) {
    const Widths w = widths(spec);
    const int64_t perRow = 3 * spec.embedding + 2 * w.q + 2 * w.kv + 2 * w.hidden;
    int64_t floats = maxRows * perRow + spec.outputNorm.cols;
    std::vector<const RopeSpec*> rotations;
    for (const LayerSpec& layer : spec.layers) {
        const AttentionSpec& a = layer.attention;
        for (const WeightSlice* vector : {&layer.mixerNorm, &layer.ffnNorm, &a.qNorm, &a.kNorm, &a.qBias, &a.kBias,
                                          &a.vBias, &a.outputBias}) {
            floats += vector->cols;  // 0 for one that is absent
        }
        if (std::any_of(rotations.begin(), rotations.end(), [&](const RopeSpec* r) { return sameRotation(*r, a.rope); })) continue;
        rotations.push_back(&a.rope);
        floats += context * a.rope.dims + a.rope.factors.cols;
    }
    return sizeof(float) * floats;
}

ForwardPass::ForwardPass(const ModelSpec& spec, const Weights& weights, Backend& backend, KvCache& kv, int64_t maxRows,
                         int64_t context)
    : _spec(spec), _weights(weights), _backend(backend), _kv(kv), _maxRows(maxRows), _context(context) {
    const Widths w = widths(spec);
    const auto take = [&](int64_t width, const char* what) {
        return width ? Buffer(backend.memory(), sizeof(float) * maxRows * width, what) : Buffer();
    };
    _x = take(spec.embedding, "activations");
    _normed = take(spec.embedding, "activations");
    _block = take(spec.embedding, "activations");
    _q = take(w.q, "queries");
    _attended = take(w.q, "attention output");
    _k = take(w.kv, "keys");
    _v = take(w.kv, "values");
    _gate = take(w.hidden, "feed-forward activations");
    _up = take(w.hidden, "feed-forward activations");
    _outputNorm = vector(spec.outputNorm);
    for (const LayerSpec& s : spec.layers) {
        Layer l = {};
        l.mixerNorm = vector(s.mixerNorm);
        l.ffnNorm = vector(s.ffnNorm);
        const AttentionSpec& a = s.attention;
        l.qNorm = vector(a.qNorm);
        l.kNorm = vector(a.kNorm);
        l.q = weights.matrix(a.q);
        l.k = weights.matrix(a.k);
        l.v = weights.matrix(a.v);
        l.output = weights.matrix(a.output);
        l.qBias = vector(a.qBias);
        l.kBias = vector(a.kBias);
        l.vBias = vector(a.vBias);
        l.outputBias = vector(a.outputBias);
        l.rope = rotation(a.rope);
        if (s.dense) {
            l.gate = weights.matrix(s.dense->gate);
            l.up = weights.matrix(s.dense->up);
            l.down = weights.matrix(s.dense->down);
        } else {
            const ExpertFfnSpec& f = *s.experts;
            l.experts.router = weights.matrix(f.router);
            l.experts.used = f.used;
            l.experts.renormalize = f.renormalize;
            l.experts.weightScale = f.weightScale;
            for (int32_t e = 0; e < f.count; ++e) {
                l.experts.gate.push_back(weights.matrix(f.gate, e));
                l.experts.up.push_back(weights.matrix(f.up, e));
                l.experts.down.push_back(weights.matrix(f.down, e));
            }
        }
        _layers.push_back(std::move(l));
    }
}

// Norms and biases are a few rows: kept as floats, whatever the file holds.
const float* ForwardPass::vector(const WeightSlice& slice) {
    if (!slice) return nullptr;
    const Matrix m = _weights.whole(slice);
    _vectors.emplace_back(_backend.memory(), sizeof(float) * slice.cols, "a norm or bias");
    auto* out = _vectors.back().as<float>();
    cpu::kernels().dequantizeRow(m.type, m.data + slice.rowBegin * rowBytes(m.type, 1), slice.cols, out);
    return out;
}

RopeTable ForwardPass::rotation(const RopeSpec& spec) {
    auto it = std::find_if(_rotations.begin(), _rotations.end(), [&](const auto& r) { return sameRotation(r->spec, spec); });
    if (it == _rotations.end()) {
        const int64_t half = spec.dims / 2;
        auto made = std::make_unique<Rotation>();
        made->spec = spec;
        made->cos = Buffer(_backend.memory(), sizeof(float) * _context * half, "rotary table");
        made->sin = Buffer(_backend.memory(), sizeof(float) * _context * half, "rotary table");
        const float* factors = vector(spec.factors);
        if (factors && !std::all_of(factors, factors + half, [](float f) { return f > 0 && std::isfinite(f); })) {
            throw Error(ErrorKind::BadModel, "the rotary frequency factors must be positive numbers: the file is damaged");
        }
        const std::vector<double> radians = frequencies(spec, factors);
        for (int64_t p = 0; p < _context; ++p) {
            for (int64_t i = 0; i < half; ++i) {
                const double angle = p * radians[i];
                made->cos.as<float>()[p * half + i] = static_cast<float>(std::cos(angle) * spec.magnitude);
                made->sin.as<float>()[p * half + i] = static_cast<float>(std::sin(angle) * spec.magnitude);
            }
        }
        _rotations.push_back(std::move(made));
        it = _rotations.end() - 1;
    }
    return {(*it)->cos.as<float>(), (*it)->sin.as<float>(), spec.dims, spec.pairing == RopeSpec::Pairing::Adjacent};
}

void ForwardPass::attention(const LayerSpec& spec, const Layer& layer, size_t index, const Batch& batch,
                            const std::vector<SequenceRows>& sequences) {
    const AttentionSpec& a = spec.attention;
    const int64_t rows = batch.size();
    const int32_t* positions = batch.positions.data();
    auto *q = _q.as<float>(), *k = _k.as<float>(), *v = _v.as<float>();
    _backend.linear(_normed.as<float>(), rows,
                    {{layer.q, layer.qBias, q}, {layer.k, layer.kBias, k}, {layer.v, layer.vBias, v}});
    if (a.qkNorm == AttentionSpec::QkNorm::PerHead) {
        _backend.rmsNorm(q, layer.qNorm, _spec.normEpsilon, rows * a.heads, a.headDim, q);
        _backend.rmsNorm(k, layer.kNorm, _spec.normEpsilon, rows * a.kvHeads, a.headDim, k);
    } else if (a.qkNorm == AttentionSpec::QkNorm::FullRow) {
        _backend.rmsNorm(q, layer.qNorm, _spec.normEpsilon, rows, int64_t{a.heads} * a.headDim, q);
        _backend.rmsNorm(k, layer.kNorm, _spec.normEpsilon, rows, int64_t{a.kvHeads} * a.headDim, k);
    }
    _backend.rope(q, positions, rows, a.heads, a.headDim, layer.rope);
    _backend.rope(k, positions, rows, a.kvHeads, a.headDim, layer.rope);
    for (const SequenceRows& s : sequences) _backend.storeKv(k, v, positions, s, _kv.layer(index));
    _backend.attention(q, positions, sequences, a.heads, a.scale, _kv.layer(index), _attended.as<float>());
    _backend.linear(_attended.as<float>(), rows, {{layer.output, layer.outputBias, _block.as<float>()}});
}

void ForwardPass::feedForward(const LayerSpec& spec, const Layer& layer, int64_t rows) {
    if (spec.experts) {
        _backend.experts(_normed.as<float>(), rows, layer.experts, _block.as<float>());
        return;
    }
    auto *gate = _gate.as<float>(), *up = _up.as<float>();
    _backend.linear(_normed.as<float>(), rows, {{layer.gate, nullptr, gate}, {layer.up, nullptr, up}});
    _backend.siluMul(gate, up, rows * layer.gate.rows);
    _backend.linear(gate, rows, {{layer.down, nullptr, _block.as<float>()}});
}

void ForwardPass::run(const Batch& batch, float* logits) {
    const int64_t rows = batch.size(), width = _spec.embedding;
    if (rows == 0) return;
    if (rows > _maxRows) {
        throw Error(ErrorKind::Internal, "a batch of " + std::to_string(rows) + " rows, scratch holds " + std::to_string(_maxRows));
    }
    for (int64_t t = 0; t < rows; ++t) {
        if (batch.tokens[t] < 0 || batch.tokens[t] >= _spec.vocabSize) {
            throw Error(ErrorKind::InvalidArgument, "token " + std::to_string(batch.tokens[t]) +
                                                        " is outside the vocabulary of " + std::to_string(_spec.vocabSize));
        }
        if (batch.positions[t] < 0 || batch.positions[t] >= _context) {
            throw Error(ErrorKind::Internal, "position " + std::to_string(batch.positions[t]) + " is outside the context");
        }
    }
    const std::vector<SequenceRows> sequences = sequencesOf(batch, _kv);
    auto *x = _x.as<float>(), *normed = _normed.as<float>(), *block = _block.as<float>();
    _backend.embed(_weights.matrix(_spec.tokenEmbedding), batch.tokens.data(), rows, x);
    for (size_t i = 0; i < _layers.size(); ++i) {
        _backend.rmsNorm(x, _layers[i].mixerNorm, _spec.normEpsilon, rows, width, normed);
        attention(_spec.layers[i], _layers[i], i, batch, sequences);
        _backend.add(x, block, rows * width);
        _backend.rmsNorm(x, _layers[i].ffnNorm, _spec.normEpsilon, rows, width, normed);
        feedForward(_spec.layers[i], _layers[i], rows);
        _backend.add(x, block, rows * width);
    }
    if (batch.logitRows.empty()) return;
    const auto wanted = static_cast<int64_t>(batch.logitRows.size());
    for (int64_t i = 0; i < wanted; ++i) {
        _backend.rmsNorm(x + batch.logitRows[i] * width, _outputNorm, _spec.normEpsilon, 1, width, normed + i * width);
    }
    _backend.linear(normed, wanted, {{_weights.matrix(_spec.output), nullptr, logits}});
}

}  // namespace sharpi
