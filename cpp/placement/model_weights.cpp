// See model_weights.h.
#include "placement/model_weights.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "cpu/kernels.h"

namespace sharpi {

namespace {

bool sameRotation(const RopeSpec& a, const RopeSpec& b) {
    return a.pairing == b.pairing && a.dims == b.dims && a.base == b.base && a.frequencyScale == b.frequencyScale &&
           a.extrapolation == b.extrapolation && a.magnitude == b.magnitude && a.betaFast == b.betaFast &&
           a.betaSlow == b.betaSlow && a.originalContext == b.originalContext && a.factors.tensor == b.factors.tensor;
}

// Radians per position of each pair. YaRN blends the stretched and the original frequency by how many turns a pair
// makes over the original context (Peng et al., 2023, section 3.2).
std::vector<double> frequencies(const RopeSpec& rope, const std::vector<float>& factors) {
    const double pi = 3.14159265358979323846;
    const auto pairOfTurns = [&](double turns) {
        return rope.dims * std::log(rope.originalContext / (turns * 2 * pi)) / (2 * std::log(rope.base));
    };
    const double low = std::max(0.0, std::floor(pairOfTurns(rope.betaFast)));
    const double high = std::min(rope.dims - 1.0, std::ceil(pairOfTurns(rope.betaSlow)));
    std::vector<double> result(rope.dims / 2);
    for (size_t i = 0; i < result.size(); ++i) {
        double plain = std::pow(rope.base, -2.0 * i / rope.dims);
        if (!factors.empty()) plain /= factors[i];
        const double ramp = std::clamp((i - low) / std::max(0.001, high - low), 0.0, 1.0);
        const double keep = (1.0 - ramp) * rope.extrapolation;
        result[i] = plain * rope.frequencyScale * (1.0 - keep) + plain * keep;
    }
    return result;
}

}  // namespace

ModelWeights::ModelWeights(const ModelSpec& spec, const Weights& files, Placer& placer, const Homes& homes,
                           size_t expertSlotBytes, int64_t context, LoadTrace& trace)
    : _files(files), _placer(placer), _homes(homes), _context(context) {
    for (const LayerSpec* layer : spec.loadedLayers()) {
        if (layer->experts)
            _expertsResident &=
                resident(layer->experts->gate) && resident(layer->experts->up) && resident(layer->experts->down);
    }
    embedding = _placer.table(inFile(spec.tokenEmbedding));
    trace.note("token embedding");
    for (size_t i = 0; i < spec.layers.size(); ++i) {
        const std::string name = "layer " + std::to_string(i);
        layers.push_back(loadLayer(spec.layers[i], name));
        trace.note(name);
    }
    if (!spec.predictions.empty()) {
        _placer.startPrediction();
        prediction = loadPrediction(spec.predictions[0], "prediction layer");
        trace.note("prediction layer");
    }
    _placer.startHead();
    head.norm = vector(spec.outputNorm);
    const bool tied =
        spec.output.tensor == spec.tokenEmbedding.tensor && spec.output.rowBegin == spec.tokenEmbedding.rowBegin;
    head.output = tied && embedding.resident() ? embedding : weight(spec.output, true);
    if (prediction) {
        prediction->head.output = head.output;
        if (!prediction->head.norm) prediction->head.norm = head.norm;
    }
    trace.note("output head");
    const ExpertWeights* next = nullptr;  // the prediction layer's come in passes of their own
    for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
        if (!layer->experts) continue;
        layer->experts->next = next;
        next = &*layer->experts;
    }
    _placer.finish();
    trace.note("streaming");
    _placer.takeExpertSlots(expertSlotBytes);
    trace.note("expert slots");
}

LayerWeights ModelWeights::loadLayer(const LayerSpec& from, const std::string& name) {
    LayerWeights layer;
    if (from.attention) layer.attention = attention(from, name);
    else layer.delta = gatedDelta(from);
    if (from.dense) layer.dense = dense(from);
    else layer.experts = experts(from);
    return layer;
}

// In the order of use, but for the head, which is loaded after it.
PredictionWeights ModelWeights::loadPrediction(const PredictionSpec& spec, const std::string& name) {
    PredictionWeights w;
    w.embedding = spec.embedding ? _placer.table(inFile(spec.embedding)) : embedding;
    w.norms = vectors(spec.embeddingNorm, spec.hiddenNorm);
    w.projection = weight(spec.projection);
    w.layer = loadLayer(spec.layer, name);
    w.head.norm = vector(spec.headNorm);
    return w;
}

FileMatrix ModelWeights::inFile(const WeightSlice& slice) const {
    FileMatrix f{_files.matrix(slice), {}, _files.name(slice)};
    if (!_homes.empty()) f.home = _homes.at(static_cast<size_t>(slice.tensor));
    return f;
}

Weight ModelWeights::weight(const WeightSlice& slice, bool shared) {
    FileMatrix f = inFile(slice);
    if (!shared) f.home.cpuRows = 0;
    return _placer.weights({f})[0];
}

DenseWeights ModelWeights::dense(const LayerSpec& layer) {
    DenseWeights w;
    w.norm = vector(layer.ffnNorm);
    const std::vector<Weight> first = _placer.weights({inFile(layer.dense->gate), inFile(layer.dense->up)});
    w.gate = first[0];
    w.up = first[1];
    w.down = _placer.weights({inFile(layer.dense->down)})[0];
    return w;
}

bool ModelWeights::resident(const WeightSlice& slice) const {
    return _homes.empty() || _homes.at(static_cast<size_t>(slice.tensor)).home == Home::Vram;
}

ExpertWeights ModelWeights::experts(const LayerSpec& layer) {
    const ExpertFfnSpec& f = *layer.experts;
    ExpertWeights w;
    w.norm = vector(layer.ffnNorm);
    w.router = weight(f.router);
    const ExpertStacks file{_files.stack(f.gate), _files.stack(f.up), _files.stack(f.down)};
    const PlacedExperts placed =
        _placer.experts(file, _expertsResident ? Home::Vram : Home::Slots, _files.name(f.gate));
    w.gate = placed.gate;
    w.up = placed.up;
    w.down = placed.down;
    w.row = _expertLayers++;
    w.used = f.used;
    w.renormalize = f.renormalize;
    w.weightScale = f.weightScale;
    if (f.shared) w.shared = sharedExpert(*f.shared);
    return w;
}

SharedExpertWeights ModelWeights::sharedExpert(const SharedExpertSpec& f) {
    return {vector(f.scale), weight(f.gate), weight(f.up), weight(f.down)};
}

// Norms, biases and frequency factors are a few rows: kept as floats, whatever the file holds.
std::vector<float> ModelWeights::floats(const WeightSlice& slice) const {
    const Matrix m = _files.whole(slice);
    if (!m.data) return {};
    const int64_t count = slice.rows * slice.cols;
    std::vector<float> values(static_cast<size_t>(count));
    cpu::kernels().dequantizeRow(m.type, m.data + rowBytes(m.type, slice.rowBegin), count, values.data());
    return values;
}

const float* ModelWeights::vector(const WeightSlice& slice) {
    if (!slice) return nullptr;
    const std::vector<float> values = floats(slice);
    return _placer.vector(values.empty() ? nullptr : values.data(), static_cast<size_t>(slice.cols),
                          _files.name(slice));
}

// One behind the other.
const float* ModelWeights::vectors(const WeightSlice& first, const WeightSlice& second) {
    std::vector<float> values = floats(first);
    const std::vector<float> others = floats(second);
    values.insert(values.end(), others.begin(), others.end());
    const std::string name = _files.name(first) + " and " + _files.name(second);
    return _placer.vector(values.empty() ? nullptr : values.data(), static_cast<size_t>(first.cols + second.cols),
                          name);
}

// [cols, rows]: a row for each input.
const float* ModelWeights::turnedMatrix(const WeightSlice& slice) {
    const std::vector<float> values = floats(slice);
    std::vector<float> turned(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
        const auto row = static_cast<int64_t>(i) / slice.cols, column = static_cast<int64_t>(i) % slice.cols;
        turned[static_cast<size_t>(column * slice.rows + row)] = values[i];
    }
    return _placer.vector(turned.empty() ? nullptr : turned.data(), static_cast<size_t>(slice.rows * slice.cols),
                          _files.name(slice));
}

RopeTable ModelWeights::rotation(const RopeSpec& spec, const std::string& name) {
    for (const Rotation& known : _rotations) {
        if (sameRotation(known.spec, spec)) return known.table;
    }
    const int64_t half = spec.dims / 2;
    const auto count = static_cast<size_t>(_context * half);
    std::vector<float> factors;
    if (spec.factors) factors = floats(spec.factors);
    if (!std::all_of(factors.begin(), factors.end(), [](float f) { return f > 0 && std::isfinite(f); })) {
        throw Error(ErrorKind::BadModel, "the rotary frequency factors must be positive numbers: the file is damaged");
    }
    std::vector<float> cos, sin;
    if (!_files.files().empty()) {  // not when planning
        const std::vector<double> radians = frequencies(spec, factors);
        cos.resize(count);
        sin.resize(count);
        for (int64_t p = 0; p < _context; ++p) {
            for (int64_t i = 0; i < half; ++i) {
                const double angle = p * radians[i];
                cos[p * half + i] = static_cast<float>(std::cos(angle) * spec.magnitude);
                sin[p * half + i] = static_cast<float>(std::sin(angle) * spec.magnitude);
            }
        }
    }
    RopeTable table;
    table.cos = _placer.vector(cos.empty() ? nullptr : cos.data(), count, name + "'s rotary table");
    table.sin = _placer.vector(sin.empty() ? nullptr : sin.data(), count, name + "'s rotary table");
    table.dims = spec.dims;
    table.adjacent = spec.pairing == RopeSpec::Pairing::Adjacent;
    _rotations.push_back({spec, table});
    return table;
}

AttentionWeights ModelWeights::attention(const LayerSpec& layer, const std::string& name) {
    const AttentionSpec& a = *layer.attention;
    AttentionWeights w;
    w.norm = vector(layer.mixerNorm);
    w.q = weight(a.q);
    w.k = weight(a.k);
    w.v = weight(a.v);
    w.output = weight(a.output);
    w.qBias = vector(a.qBias);
    w.kBias = vector(a.kBias);
    w.vBias = vector(a.vBias);
    w.outputBias = vector(a.outputBias);
    w.qNorm = vector(a.qNorm);
    w.kNorm = vector(a.kNorm);
    w.qkNorm = a.qkNorm;
    w.heads = a.heads;
    w.scale = a.scale;
    w.gated = a.gated;
    w.rope = rotation(a.rope, name);
    return w;
}

GatedDeltaWeights ModelWeights::gatedDelta(const LayerSpec& layer) {
    const GatedDeltaSpec& d = *layer.delta;
    GatedDeltaWeights w;
    w.norm = vector(layer.mixerNorm);
    w.qkv = weight(d.qkv);
    w.gate = weight(d.gate);
    w.alpha = weight(d.alpha);
    w.beta = weight(d.beta);
    w.output = weight(d.output);
    w.conv = turnedMatrix(d.conv);
    w.stepBias = vector(d.stepBias);
    w.decay = vector(d.decay);
    w.headNorm = vector(d.norm);
    w.keyHeads = d.keyHeads;
    w.valueHeads = d.valueHeads;
    w.headDim = d.headDim;
    w.convWidth = d.convWidth;
    return w;
}

}  // namespace sharpi
