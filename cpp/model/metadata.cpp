// Typed look-ups of metadata; see metadata.h.
#include "model/metadata.h"

#include <cmath>
#include <iterator>

#include "core/error.h"

namespace sharpi {

namespace {

[[noreturn]] void bad(const std::string& what) { throw Error(ErrorKind::BadModel, what); }

// In the order of MetadataValue's alternatives.
constexpr const char* kKinds[] = {"a bool", "an integer", "a float", "a string", "an array"};
static_assert(std::size(kKinds) == std::variant_size_v<MetadataValue>);

[[noreturn]] void mistyped(const std::string& key, const MetadataValue& value, const char* wanted) {
    bad("metadata key '" + key + "' is " + kKinds[value.index()] + ", not " + wanted);
}

int64_t inRange(const std::string& key, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return value;
    bad("metadata key '" + key + "' is " + std::to_string(value) + ", expected " + std::to_string(low) + " to " +
        std::to_string(high));
}

}  // namespace

const MetadataValue& Metadata::get(const std::string& key) const {
    const auto it = _values.find(key);
    if (it == _values.end()) bad("metadata key '" + key + "' is missing");
    return it->second;
}

int64_t Metadata::integer(const std::string& key, int64_t low, int64_t high) const {
    const MetadataValue& found = get(key);
    const auto* value = std::get_if<int64_t>(&found);
    if (!value) mistyped(key, found, "a whole number of 64 bits");
    return inRange(key, *value, low, high);
}

int64_t Metadata::integerAt(const std::string& key, size_t index, int64_t low, int64_t high) const {
    const auto* array = std::get_if<std::vector<double>>(&get(key));
    if (!array) return integer(key, low, high);
    const double value = element(key, *array, index);
    if (value != std::floor(value) || std::abs(value) > 9e15)
        bad("metadata key '" + key + "' has element " + std::to_string(index) + ", which is not a whole number");
    return inRange(key, static_cast<int64_t>(value), low, high);
}

double Metadata::numberAt(const std::string& key, size_t index) const {
    const auto* array = std::get_if<std::vector<double>>(&get(key));
    const double value = array ? element(key, *array, index) : number(key);
    if (!std::isfinite(value)) bad("metadata key '" + key + "' has an element that is not finite");
    return value;
}

bool Metadata::flagAt(const std::string& key, size_t index) const {
    const auto* array = std::get_if<std::vector<double>>(&get(key));
    return array ? element(key, *array, index) != 0 : flagOr(key, false);
}

double Metadata::element(const std::string& key, const std::vector<double>& array, size_t index) const {
    if (index >= array.size()) {
        bad("metadata key '" + key + "' has " + std::to_string(array.size()) +
            " elements, one for each layer is needed");
    }
    return array[index];
}

int64_t Metadata::integerOr(const std::string& key, int64_t low, int64_t high, int64_t fallback) const {
    return has(key) ? integer(key, low, high) : fallback;
}

double Metadata::number(const std::string& key) const {
    const MetadataValue& value = get(key);
    double result = 0;
    if (const auto* real = std::get_if<double>(&value)) result = *real;
    else if (const auto* whole = std::get_if<int64_t>(&value)) result = static_cast<double>(*whole);
    else mistyped(key, value, "a number");
    if (!std::isfinite(result)) bad("metadata key '" + key + "' is not finite");
    return result;
}

double Metadata::numberOr(const std::string& key, double fallback) const { return has(key) ? number(key) : fallback; }

bool Metadata::flagOr(const std::string& key, bool fallback) const {
    if (!has(key)) return fallback;
    const MetadataValue& found = get(key);
    const auto* value = std::get_if<bool>(&found);
    if (!value) mistyped(key, found, "a bool");
    return *value;
}

std::string Metadata::text(const std::string& key) const {
    const MetadataValue& found = get(key);
    const auto* value = std::get_if<std::string>(&found);
    if (!value) mistyped(key, found, "a string");
    return *value;
}

std::string Metadata::textOr(const std::string& key, const std::string& fallback) const {
    return has(key) ? text(key) : fallback;
}

TensorTable::TensorTable(std::vector<TensorInfo> tensors) : _tensors(std::move(tensors)) {
    for (size_t i = 0; i < _tensors.size(); ++i) {
        const TensorInfo& t = _tensors[i];
        if (!_byName.emplace(t.name, i).second) bad("tensor '" + t.name + "' stands twice in the table");
        if (t.shape.empty()) bad("tensor '" + t.name + "' has no dimensions");
        if (t.shape[0] <= 0 || t.shape[0] % info(t.type).blockElements != 0) {
            bad("tensor '" + t.name + "' has rows of " + std::to_string(t.shape[0]) + " elements, not a multiple of " +
                std::to_string(info(t.type).blockElements) + " as " + info(t.type).name + " needs");
        }
        uint64_t bytes = rowBytes(t.type, t.shape[0]);
        for (size_t d = 1; d < t.shape.size(); ++d) {
            const auto extent = static_cast<uint64_t>(t.shape[d]);
            if (t.shape[d] <= 0 || bytes > (uint64_t{1} << 62) / extent)
                bad("tensor '" + t.name + "' has an impossible shape");
            bytes *= extent;
        }
        if (bytes != t.bytes)
            bad("tensor '" + t.name + "' has " + std::to_string(t.bytes) + " bytes, its shape and type give " +
                std::to_string(bytes));
    }
}

const TensorInfo* TensorTable::find(const std::string& name) const {
    const auto it = _byName.find(name);
    return it == _byName.end() ? nullptr : &_tensors[it->second];
}

}  // namespace sharpi
