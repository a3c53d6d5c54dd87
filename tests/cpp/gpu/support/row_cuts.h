// How tests cut rows: into pieces, in any order, whose lengths are those at which kernels change their path.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace sharpi::cuda {

struct RowCut {
    int64_t begin, end;
    int64_t rows() const { return end - begin; }
};

inline std::vector<RowCut> randomCuts(int64_t rows, std::mt19937& random) {
    static constexpr int64_t kLengths[] = {1,  2,  3,  5,   7,   8,   9,   16,  17,  31,  33,
                                           63, 64, 65, 100, 127, 128, 129, 130, 255, 256, 257};
    std::vector<RowCut> cuts;
    for (int64_t begin = 0; begin < rows;) {
        const int64_t length = kLengths[random() % std::size(kLengths)];
        cuts.push_back({begin, std::min(rows, begin + length)});
        begin = cuts.back().end;
    }
    return cuts;
}

}  // namespace sharpi::cuda
