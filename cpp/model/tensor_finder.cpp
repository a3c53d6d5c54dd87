// See tensor_finder.h.
#include "model/tensor_finder.h"

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

WeightSlice TensorFinder::optional(const std::string& name, const std::vector<int64_t>& shape) {
    const TensorInfo* t = _tensors.find(name);
    if (!t) return {};
    if (withoutTrailingOnes(t->shape) != withoutTrailingOnes(shape))
        bad("tensor '" + name + "' has shape " + show(t->shape) + ", expected " + show(shape));
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

void TensorFinder::unused(const std::string& name) {
    if (const TensorInfo* t = _tensors.find(name)) _used[static_cast<size_t>(t - _tensors.all().data())] = true;
}

void TensorFinder::requireAllUsed(const std::string& architecture) const {
    for (size_t i = 0; i < _used.size(); ++i) {
        if (!_used[i]) {
            bad("tensor '" + _tensors.all()[i].name + "' has no place in the architecture '" + architecture +
                "': running without it would give wrong answers");
        }
    }
}

}  // namespace sharpi
