// A model file's metadata and tensor table, as Python read them from the container. The core knows keys and
// values, not how a GGUF file stores them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "core/dtype.h"

namespace sharpi {

// An array is there to be recognized as one; one of strings is empty.
using MetadataValue = std::variant<bool, int64_t, double, std::string, std::vector<double>>;

// Key → value with typed look-ups. All throw Error(BadModel) naming the key when it is missing (and there is no
// fallback), has another type, or is outside the range that is asked for.
class Metadata {
public:
    Metadata() = default;
    explicit Metadata(std::map<std::string, MetadataValue> values) : _values(std::move(values)) {}

    bool has(const std::string& key) const { return _values.count(key) != 0; }
    int64_t integer(const std::string& key, int64_t low, int64_t high) const;
    int64_t integerOr(const std::string& key, int64_t low, int64_t high, int64_t fallback) const;
    // The element `index` of an array, or the value of a key that holds one number for all.
    int64_t integerAt(const std::string& key, size_t index, int64_t low, int64_t high) const;
    double numberAt(const std::string& key, size_t index) const;  // finite
    bool flagAt(const std::string& key, size_t index) const;
    double number(const std::string& key) const;  // finite
    double numberOr(const std::string& key, double fallback) const;
    bool flagOr(const std::string& key, bool fallback) const;
    std::string text(const std::string& key) const;
    std::string textOr(const std::string& key, const std::string& fallback) const;

private:
    const MetadataValue& get(const std::string& key) const;
    double element(const std::string& key, const std::vector<double>& array, size_t index) const;
    std::map<std::string, MetadataValue> _values;
};

struct TensorInfo {
    std::string name;
    DType type = DType::F32;
    std::vector<int64_t> shape;  // innermost first: shape[0] = columns
    int32_t file = 0;            // index into the list of files
    uint64_t offset = 0;         // bytes from the start of that file
    uint64_t bytes = 0;
};

// Tensors by name. Throws Error(BadModel) on a name that stands twice or a size that its shape and type do not give.
class TensorTable {
public:
    TensorTable() = default;
    explicit TensorTable(std::vector<TensorInfo> tensors);

    const TensorInfo* find(const std::string& name) const;  // nullptr when absent
    const std::vector<TensorInfo>& all() const { return _tensors; }

private:
    std::vector<TensorInfo> _tensors;
    std::unordered_map<std::string, size_t> _byName;
};

}  // namespace sharpi
