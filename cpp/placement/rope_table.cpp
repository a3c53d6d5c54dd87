// See rope_table.h.
#include "placement/rope_table.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace sharpi {

namespace {

// Radians per position of each pair. YaRN blends the stretched and the original frequency by how many turns a pair
// makes over the original context (Peng et al., 2023, section 3.2).
std::vector<double> frequencies(const RopeSpec& rope, const std::vector<float>& factors) {
    const double pi = 3.14159265358979323846;
    const auto pairOfTurns = [&](double turns) {
        const double scaled = static_cast<double>(rope.originalContext) / (turns * 2 * pi);
        return rope.dims * std::log(scaled) / (2 * std::log(rope.base));
    };
    const double low = std::max(0.0, std::floor(pairOfTurns(rope.betaFast)));
    const double high = std::min(rope.dims - 1.0, std::ceil(pairOfTurns(rope.betaSlow)));
    std::vector<double> result(static_cast<size_t>(rope.dims / 2));
    for (size_t i = 0; i < result.size(); ++i) {
        const auto pair = static_cast<double>(i);
        double plain = std::pow(rope.base, -2.0 * pair / rope.dims);
        if (!factors.empty()) plain /= static_cast<double>(factors[i]);
        const double ramp = std::clamp((pair - low) / std::max(0.001, high - low), 0.0, 1.0);
        const double keep = (1.0 - ramp) * rope.extrapolation;
        result[i] = plain * rope.frequencyScale * (1.0 - keep) + plain * keep;
    }
    return result;
}

}  // namespace

RopeAngles ropeAngles(const RopeSpec& rope, const std::vector<float>& factors, int64_t positions) {
    if (!std::all_of(factors.begin(), factors.end(), [](float f) { return f > 0 && std::isfinite(f); }))
        throw Error(ErrorKind::BadModel, "the rotary frequency factors must be positive numbers: the file is damaged");
    const std::vector<double> radians = frequencies(rope, factors);
    RopeAngles angles;
    for (std::vector<float>* table : {&angles.cos, &angles.sin})
        table->reserve(static_cast<size_t>(positions) * radians.size());
    for (int64_t p = 0; p < positions; ++p) {
        for (const double step : radians) {
            const double angle = static_cast<double>(p) * step;
            angles.cos.push_back(static_cast<float>(std::cos(angle) * rope.magnitude));
            angles.sin.push_back(static_cast<float>(std::sin(angle) * rope.magnitude));
        }
    }
    return angles;
}

std::vector<float> queryScales(const QueryScaleSpec& spec, int64_t positions) {
    std::vector<float> factors(static_cast<size_t>(positions));
    for (int64_t p = 0; p < positions; ++p) {
        const auto steps = static_cast<double>((p + spec.offset) / spec.length);
        factors[static_cast<size_t>(p)] = static_cast<float>(1.0 + spec.slope * std::log(steps + 1.0));
    }
    return factors;
}

}  // namespace sharpi
