// See tensor_finder.h.
#include "model/tensor_finder.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace sharpi {

namespace {

[[noreturn]] void bad(const std::string& what) { throw Error(ErrorKind::BadModel, what); }

// Some writers keep trailing ones, others do not: [n, 1] is a vector of n.
std::vector<int64_t> withoutTrailingOnes(std::vector<int64_t> shape) {
    while (shape.size() > 1 && shape.back() == 1) shape.pop_back();
    return shape;
}

std::string show(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

}  // namespace

WeightSlice rowsOf(const WeightSlice& whole, int64_t begin, int64_t rows) {
    WeightSlice part = whole;
    part.rowBegin = begin;
    part.rows = rows;
    return part;
}

WeightSlice columnsOf(const WeightSlice& whole, int64_t begin, int64_t cols) {
    WeightSlice part = whole;
    part.colBegin = begin;
    part.cols = cols;
    return part;
}

WeightSlice TensorFinder::optional(const std::string& name, const std::vector<int64_t>& shape) {
    const TensorInfo* t = _tensors.find(name);
    if (!t) return {};
    if (info(t->type).isInteger) bad("tensor '" + name + "' holds integers where numbers are expected");
    return slice(*t, shape);
}

WeightSlice TensorFinder::slice(const TensorInfo& found, const std::vector<int64_t>& shape) {
    const TensorInfo* t = &found;
    if (withoutTrailingOnes(t->shape) != withoutTrailingOnes(shape))
        bad("tensor '" + t->name + "' has shape " + show(t->shape) + ", expected " + show(shape));
    WeightSlice slice;
    slice.tensor = static_cast<int32_t>(t - _tensors.all().data());
    slice.cols = shape[0];
    slice.rows = shape.size() > 1 ? shape[1] : 1;
    slice.experts = shape.size() > 2 ? shape[2] : 1;
    slice.expertStride = slice.rows;
    _used[static_cast<size_t>(slice.tensor)] = true;
    return slice;
}

WeightSlice TensorFinder::required(const std::string& name, const std::vector<int64_t>& shape) {
    const WeightSlice slice = optional(name, shape);
    if (!slice) bad("tensor '" + name + "' is missing");
    return slice;
}

WeightSlice TensorFinder::requiredIntegers(const std::string& name, const std::vector<int64_t>& shape) {
    const TensorInfo* t = _tensors.find(name);
    if (!t) bad("tensor '" + name + "' is missing");
    if (!info(t->type).isInteger) bad("tensor '" + name + "' must be I32");
    return slice(*t, shape);
}

WeightSlice TensorFinder::optionalFloats(const std::string& name, const std::vector<int64_t>& shape) {
    return floatsOnly(optional(name, shape), name);
}

WeightSlice TensorFinder::requiredFloats(const std::string& name, const std::vector<int64_t>& shape) {
    return floatsOnly(required(name, shape), name);
}

WeightSlice TensorFinder::floatsOnly(WeightSlice slice, const std::string& name) const {
    if (slice && !info(_tensors.all()[static_cast<size_t>(slice.tensor)].type).isFloat)
        bad("tensor '" + name + "' must be F32, F16 or BF16");
    return slice;
}

int64_t TensorFinder::columns(const std::string& name, int64_t most) const {
    const TensorInfo* t = _tensors.find(name);
    if (!t) bad("tensor '" + name + "' is missing");
    if (t->shape[0] > most) bad("tensor '" + name + "' has an impossible shape");
    return t->shape[0];
}

bool TensorFinder::hasAny(const std::string& prefix) const {
    const auto begins = [&](const TensorInfo& t) { return t.name.rfind(prefix, 0) == 0; };
    return std::any_of(_tensors.all().begin(), _tensors.all().end(), begins);
}

void TensorFinder::unused(const std::string& name) {
    if (const TensorInfo* t = _tensors.find(name)) _used[static_cast<size_t>(t - _tensors.all().data())] = true;
}

void TensorFinder::unusedAll(const std::string& prefix) {
    for (size_t i = 0; i < _used.size(); ++i)
        if (_tensors.all()[i].name.rfind(prefix, 0) == 0) _used[i] = true;
}

// NVFP4 files may have one more scale for a whole matrix, beside it. Returns the matrix's name if this is such a scale.
static std::string scaledMatrix(const TensorTable& tensors, const std::string& name) {
    for (const char* ending : {".weight.scale", ".weight.input_scale", ".scale", ".input_scale"}) {
        const size_t length = std::strlen(ending);
        if (name.size() <= length || name.compare(name.size() - length, length, ending) != 0) continue;
        const std::string matrix = name.substr(0, name.size() - length) + ".weight";
        const TensorInfo* found = tensors.find(matrix);
        if (found && found->type == DType::NVFP4) return matrix;
    }
    return "";
}

void TensorFinder::requireAllUsed(const std::string& architecture) const {
    for (size_t i = 0; i < _used.size(); ++i) {
        if (!_used[i]) {
            const std::string matrix = scaledMatrix(_tensors, _tensors.all()[i].name);
            if (!matrix.empty())
                bad("tensor '" + _tensors.all()[i].name + "' scales the whole NVFP4 matrix '" + matrix +
                    "', which Sharpi cannot do yet: take a file of another type");
            bad("tensor '" + _tensors.all()[i].name + "' has no place in the architecture '" + architecture +
                "': running without it would give wrong answers");
        }
    }
}

}  // namespace sharpi
