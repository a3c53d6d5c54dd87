// The activations of gated feed-forward parts, as data. The CPU and the GPU compute them to the same bits.
#pragma once

#include <cstdint>

namespace sharpi {

enum class ActivationKind : uint8_t {
    Silu,           // gate * sigmoid(gate) * up
    Gelu,           // gelu(gate) * up, by the tanh approximation (Hendrycks and Gimpel, 2016)
    ClampedSwiglu,  // g = min(gate, limit), u = clamp(up, -limit, limit): g * sigmoid(1.702 g) * (u + 1)
};

struct Activation {
    ActivationKind kind = ActivationKind::Silu;
    float limit = 0;  // of ClampedSwiglu
};

}  // namespace sharpi
