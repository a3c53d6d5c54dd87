// See model_weights.h.
#include "placement/model_weights.h"

#include <cstring>

#include "core/error.h"
#include "cpu/kernels.h"
#include "placement/head_matrices.h"
#include "placement/rope_table.h"

namespace sharpi {

namespace {

std::string traceName(const ListedWeight& weight) {
    if (weight.part == ModelPart::Head) return "output head";
    if (weight.part == ModelPart::Prediction) return "prediction layer";
    return weight.layer < 0 ? "token embedding" : "layer " + std::to_string(weight.layer);
}

}  // namespace

ModelWeights::ModelWeights(const ModelSpec& spec, const Weights& files, Placer& placer, const Homes& homes,
                           const SlotBudget& slots, int64_t context, LoadTrace& trace)
    : _spec(spec),
      _files(files),
      _placer(placer),
      _homes(homes),
      _context(context),
      _placed(spec.weights.size()),
      _ropes(spec.ropes.size() + 1),
      _queryScales(spec.queryScales.size()) {
    for (const ListedWeight& weight : spec.weights) {
        if (weight.role == WeightRole::Experts && !homes.empty())
            _expertsResident &= homes.at(static_cast<size_t>(weight.slice().tensor)).home == Home::Vram;
    }
    loadPart(ModelPart::Body, trace);
    if (!spec.predictions.empty()) {
        _placer.startPrediction();
        loadPart(ModelPart::Prediction, trace);
    }
    _placer.startHead();
    loadPart(ModelPart::Head, trace);
    _placer.finish();
    trace.note("streaming");
    _placer.takeExpertSlots(slots);
    trace.note("expert slots");
}

// A layer's entries are consecutive, so the first entry with another number ends the layer.
void ModelWeights::loadPart(ModelPart part, LoadTrace& trace) {
    const std::vector<const LayerSpec*> layers = _spec.loadedLayers();
    std::vector<int32_t> order;
    for (size_t i = 0; i < _spec.weights.size(); ++i) {
        if (_spec.weights[i].part == part) order.push_back(static_cast<int32_t>(i));
    }
    for (size_t i = 0; i < order.size(); ++i) {
        const ListedWeight& weight = listed(order[i]);
        place(order[i]);
        if (i + 1 < order.size() && listed(order[i + 1]).layer == weight.layer) continue;
        if (weight.layer >= 0) loadTables(*layers[static_cast<size_t>(weight.layer)], weight.layer);
        trace.note(traceName(weight));
    }
}

void ModelWeights::place(int32_t index) {
    const ListedWeight& weight = listed(index);
    Placed& placed = _placed[static_cast<size_t>(index)];
    if (weight.sameAs >= 0 && at(weight.sameAs).matrix.resident()) {
        placed = at(weight.sameAs);
        return;
    }
    if (weight.unit != index) return;  // placed with the unit's first entry
    switch (weight.form) {
    case WeightForm::Matrix: return placeUnit(index);
    case WeightForm::Table: placed.matrix = _placer.table(inFile(weight)); return;
    case WeightForm::Stack: return placeExperts(index);
    case WeightForm::HeadRows:
    case WeightForm::HeadColumns: return placeByHead(weight, placed);
    case WeightForm::Parameters: return;
    case WeightForm::Vector:
    case WeightForm::Transposed: return placeVector(weight, placed);
    }
}

void ModelWeights::placeByHead(const ListedWeight& weight, Placed& placed) {
    const Matrix whole = _files.whole(weight.slice());
    std::vector<uint8_t> bytes;
    if (whole.data) bytes = headMatrixBytes(weight, whole, cpu::kernels().dequantizeRow);
    placed.matrix = _placer.made(headMatrix(weight, whole), std::move(bytes), name(weight));
}

// The host reads a vector in the file if the very same floats lie there, else in a copy.
void ModelWeights::placeVector(const ListedWeight& weight, Placed& placed) {
    size_t count = 0;
    for (const WeightSlice& slice : weight.slices) count += static_cast<size_t>(slice.rows * slice.cols);
    std::vector<float> values = floats(weight);
    placed.vector = placeFloats(values, count, name(weight));
    if (values.empty()) return;
    const Matrix file = _files.whole(weight.slice());
    const uint8_t* const begin = file.data + rowBytes(file.type, weight.slice().colBegin);
    if (weight.slices.size() == 1 && file.type == DType::F32 &&
        reinterpret_cast<uintptr_t>(begin) % alignof(float) == 0 &&
        std::memcmp(begin, values.data(), sizeof(float) * values.size()) == 0) {
        placed.hostVector = reinterpret_cast<const float*>(begin);
    } else {
        _hostCopies.push_back(std::move(values));
        placed.hostVector = _hostCopies.back().data();
    }
}

std::vector<int32_t> ModelWeights::unitOf(int32_t index) const {
    std::vector<int32_t> unit;
    for (size_t i = static_cast<size_t>(index); i < _spec.weights.size() && _spec.weights[i].unit == index; ++i)
        unit.push_back(static_cast<int32_t>(i));
    return unit;
}

void ModelWeights::placeUnit(int32_t index) {
    const std::vector<int32_t> unit = unitOf(index);
    std::vector<FileMatrix> files;
    for (const int32_t member : unit) files.push_back(inFile(listed(member)));
    const std::vector<Weight> placed = _placer.weights(files);
    for (size_t i = 0; i < unit.size(); ++i) _placed[static_cast<size_t>(unit[i])].matrix = placed[i];
}

// A layer's stacks are gate, up and down, or gate and down.
void ModelWeights::placeExperts(int32_t index) {
    const std::vector<int32_t> unit = unitOf(index);
    const bool gated = unit.size() == 3;
    const auto stack = [&](int32_t member) { return _files.stack(listed(member).slice()); };
    const ExpertStacks files{stack(unit.front()), gated ? stack(unit[1]) : MatrixStack(), stack(unit.back())};
    const PlacedExperts placed =
        _placer.experts(files, _expertsResident ? Home::Vram : Home::Slots, name(listed(index)));
    _placed[static_cast<size_t>(unit.front())].stack = placed.gate;
    if (gated) _placed[static_cast<size_t>(unit[1])].stack = placed.up;
    _placed[static_cast<size_t>(unit.back())].stack = placed.down;
}

FileMatrix ModelWeights::inFile(const ListedWeight& weight) const {
    FileMatrix file{_files.matrix(weight.slice()), {}, name(weight)};
    if (!_homes.empty()) file.home = _homes.at(static_cast<size_t>(weight.slice().tensor));
    if (!sharesRows(weight.role)) file.home.cpuRows = 0;
    return file;
}

std::string ModelWeights::name(const ListedWeight& weight) const {
    std::string joined;
    for (const WeightSlice& slice : weight.slices) joined += (joined.empty() ? "" : " and ") + _files.name(slice);
    return joined;
}

// Vectors are small: they are kept as floats, whatever the file holds. Empty when only planning.
std::vector<float> ModelWeights::floats(const ListedWeight& weight) const {
    std::vector<float> values;
    for (const WeightSlice& slice : weight.slices) {
        const Matrix m = _files.whole(slice);
        if (!m.data) return {};
        // Rows that are taken whole follow each other.
        const bool whole = slice.cols == m.cols;
        const int64_t runs = whole ? 1 : slice.rows, count = whole ? slice.rows * slice.cols : slice.cols;
        const size_t before = values.size();
        values.resize(before + static_cast<size_t>(runs * count));
        float* const to = values.data() + before;
        for (int64_t r = 0; r < runs; ++r) {
            const uint8_t* const begin = m.data + rowBytes(m.type, r * m.cols + slice.colBegin);
            cpu::kernels().dequantizeRow(m.type, begin, count, to + r * count);
        }
    }
    for (size_t i = 0; weight.below > 0 && i < values.size(); ++i) {
        if (values[i] >= 0 && values[i] < static_cast<float>(weight.below)) continue;
        throw Error(ErrorKind::BadModel, "tensor '" + name(weight) + "' holds a number outside 0 to " +
                                             std::to_string(weight.below - 1) + ": the file is damaged");
    }
    if (weight.factor != 1.0) {
        for (float& value : values) value = static_cast<float>(value * weight.factor);
    }
    if (weight.form != WeightForm::Transposed) return values;
    const auto rows = static_cast<size_t>(weight.slice().rows), cols = static_cast<size_t>(weight.slice().cols);
    std::vector<float> transposed(values.size());
    for (size_t i = 0; i < values.size(); ++i) transposed[i % cols * rows + i / cols] = values[i];
    return transposed;
}

const float* ModelWeights::placeFloats(const std::vector<float>& values, size_t count, const std::string& name) {
    return _placer.vector(values.empty() ? nullptr : values.data(), count, name);
}

// A table of positions is loaded with the first layer that uses it.
void ModelWeights::loadTables(const LayerSpec& layer, int32_t number) {
    if (!layer.attention) return;
    const AttentionSpec& a = *layer.attention;
    if (a.rope >= 0) {
        RopeTable& table = _ropes[static_cast<size_t>(a.rope) + 1];
        if (!table.cos) loadRope(_spec.ropes[static_cast<size_t>(a.rope)], table, number);
    }
    if (a.queryScale < 0) return;
    const float*& scales = _queryScales[static_cast<size_t>(a.queryScale)];
    if (scales) return;
    std::vector<float> values;
    if (!_files.files().empty()) values = queryScales(_spec.queryScales[static_cast<size_t>(a.queryScale)], _context);
    scales =
        placeFloats(values, static_cast<size_t>(_context), "layer " + std::to_string(number) + "'s factors of queries");
}

void ModelWeights::loadRope(const RopeSpec& rope, RopeTable& table, int32_t number) {
    RopeAngles angles;
    if (!_files.files().empty()) {  // not when planning
        const bool isLong = rope.isLong(_context);
        const VectorId used = isLong ? rope.longFactors : rope.factors;
        const std::vector<float> factors = used ? floats(listed(used.index)) : std::vector<float>();
        angles = ropeAngles(rope, factors, _context);
    }
    const auto count = static_cast<size_t>(_context * (rope.dims / 2));
    const std::string name = "layer " + std::to_string(number) + "'s rotary table";
    table.cos = placeFloats(angles.cos, count, name);
    table.sin = placeFloats(angles.sin, count, name);
    table.dims = rope.dims;
    table.last = rope.last;
    table.adjacent = rope.pairing == RopeSpec::Pairing::Adjacent;
}

}  // namespace sharpi
