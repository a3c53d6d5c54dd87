// What depends on positions: the angles of rotary embedding, and factors of queries.
#pragma once

#include <vector>

#include "model/model_spec.h"

namespace sharpi {

// [positions, dims / 2], row-major.
struct RopeAngles {
    std::vector<float> cos, sin;
};

// factors: [dims / 2], or empty. Both results are multiplied by the rope's magnitude. Throws Error(BadModel) for
// factors that are not positive numbers.
RopeAngles ropeAngles(const RopeSpec& rope, const std::vector<float>& factors, int64_t positions);

// The factor of the queries at each position: [positions].
std::vector<float> queryScales(const QueryScaleSpec& spec, int64_t positions);

}  // namespace sharpi
