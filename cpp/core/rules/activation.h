// The activations of feed-forward parts, as data. The CPU and the GPU compute them to the same bits: every operation
// below rounds to nearest even, exp is cpu/kernels/exp.h's, and a NaN stays a NaN.
//
//   Silu            (gate / (1 + exp(0 - gate))) * up
//   Gelu            square = gate * gate; p = fma(square, 0.044715, 1); e = exp((gate * p) * -1.5957691216)
//                   (gate / (1 + e)) * up
//                   By 0.5 x (1 + tanh(y)) = x / (1 + exp(-2 y)) with y = 0.7978845608 (x + 0.044715 x^3).
//   ClampedSwiglu   g = min(gate, limit); u = max(min(up, limit), 0 - limit); e = exp(g * -1.702)
//                   (g / (1 + e)) * (u + 1)
//   ClampedSilu     g = min(gate, limit); u = max(min(up, limit), 0 - limit)
//                   (g / (1 + exp(0 - g))) * u
//   ReluSquared     r = max(gate, 0); (r * r) * up
//
// A part without a gate has one product before the activation. That product takes gate's place, and the last factor,
// up, u or (u + 1), is left out.
//
// What comes before: each of gate and up is a finished product. It is multiplied by the row's weight if the layer
// weighs inputs (W (w n) = w (W n)), then the bias is added, then the activation is taken.
#pragma once

#include <cstdint>

namespace sharpi {

enum class ActivationKind : uint8_t {
    Silu,
    Gelu,  // by the tanh approximation (Hendrycks and Gimpel, 2016)
    ClampedSwiglu,
    ClampedSilu,
    ReluSquared,
};

struct Activation {
    ActivationKind kind = ActivationKind::Silu;
    float limit = 0;  // of ClampedSwiglu and ClampedSilu
};

constexpr float kGeluCubic = 0.044715f;
constexpr float kGeluExponent = -1.5957691216057308f;  // -2 sqrt(2 / pi)
constexpr float kSwigluExponent = -1.702f;

}  // namespace sharpi
