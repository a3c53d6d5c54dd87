// The marks with which tests ask for the states of a step to be kept.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tiny {

// The last `count` lengths before `end` that a step from `begin` passes through.
inline std::vector<int64_t> lastMarks(int64_t begin, int64_t end, int64_t count) {
    std::vector<int64_t> marks;
    for (int64_t length = std::max(begin + 1, end - count); length < end; ++length) marks.push_back(length);
    return marks;
}

}  // namespace tiny
