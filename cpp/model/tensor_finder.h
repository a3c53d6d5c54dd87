// Finds a model's tensors by name, checks their shapes, and knows which ones no reader has asked for.
#pragma once

#include <string>
#include <vector>

#include "model/metadata.h"
#include "model/weight_registry.h"

namespace sharpi {

// All of its methods throw Error(BadModel) naming the tensor if it has another shape than `shape` (innermost first;
// ones at the end say nothing), or another type than is needed.
class TensorFinder {
public:
    explicit TensorFinder(const TensorTable& tensors) : _tensors(tensors), _used(tensors.all().size(), false) {}

    bool has(const std::string& name) const { return _tensors.find(name) != nullptr; }
    bool hasAny(const std::string& prefix) const;
    // Empty if there is no such tensor.
    WeightSlice optional(const std::string& name, const std::vector<int64_t>& shape);
    // Throws Error(BadModel) if there is no such tensor.
    WeightSlice required(const std::string& name, const std::vector<int64_t>& shape);
    // The same for tensors that are read as floats: norms, biases, small parameters.
    WeightSlice optionalFloats(const std::string& name, const std::vector<int64_t>& shape);
    WeightSlice requiredFloats(const std::string& name, const std::vector<int64_t>& shape);
    // A tensor of integers (I32), which no other method finds.
    WeightSlice requiredIntegers(const std::string& name, const std::vector<int64_t>& shape);
    // Columns of a tensor from which a reader learns a width. Throws Error(BadModel) if it is missing, or above `most`.
    int64_t columns(const std::string& name, int64_t most) const;
    // A tensor that files of the architecture may hold and that running the model does not need.
    void unused(const std::string& name);
    // All whose names begin so.
    void unusedAll(const std::string& prefix);

    // Throws Error(BadModel) for the first tensor that was neither found nor named as unused.
    void requireAllUsed(const std::string& architecture) const;

private:
    WeightSlice slice(const TensorInfo& found, const std::vector<int64_t>& shape);
    WeightSlice floatsOnly(WeightSlice slice, const std::string& name) const;
    const TensorTable& _tensors;
    std::vector<bool> _used;
};

// Rows [begin, begin + rows) of a slice.
WeightSlice rowsOf(const WeightSlice& whole, int64_t begin, int64_t rows);
// Columns [begin, begin + cols) of a slice of floats.
WeightSlice columnsOf(const WeightSlice& whole, int64_t begin, int64_t cols);

}  // namespace sharpi
