// The largest sizes that are read from a file: far beyond any model, and small enough that no product of them overflows
// when memory is counted.
#pragma once

#include <cstdint>

namespace sharpi {

constexpr int64_t kMaxDim = int64_t{1} << 31;
constexpr int64_t kMaxContext = int64_t{1} << 27, kMaxWidth = int64_t{1} << 20, kMaxHidden = int64_t{1} << 24;

}  // namespace sharpi
