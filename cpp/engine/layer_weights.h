// A model's weights as backends take them: each where its processor reads it.
#pragma once

#include <vector>

#include "core/matrix.h"
#include "model/model_spec.h"

namespace sharpi {

struct RopeTable {
    const float* cos = nullptr;  // [context, dims / 2]
    const float* sin = nullptr;
    int32_t dims = 0;
    bool adjacent = false;
};

struct AttentionWeights {
    const float* norm = nullptr;
    Matrix q, k, v, output;
    const float *qBias = nullptr, *kBias = nullptr, *vBias = nullptr, *outputBias = nullptr;  // may be absent
    const float *qNorm = nullptr, *kNorm = nullptr;
    AttentionSpec::QkNorm qkNorm = AttentionSpec::QkNorm::None;
    int32_t heads = 0;
    float scale = 1.0f;
    RopeTable rope;
};

struct DenseWeights {
    const float* norm = nullptr;
    Matrix gate, up, down;
};

struct ExpertWeights {
    const float* norm = nullptr;
    Matrix router;
    MatrixStack gate, up, down;
    int32_t used = 0;
    bool renormalize = true;
    float weightScale = 1.0f;
};

struct LayerWeights {
    AttentionWeights attention;
    std::optional<DenseWeights> dense;  // exactly one of the two
    std::optional<ExpertWeights> experts;
};

struct HeadWeights {
    const float* norm = nullptr;
    Matrix output;
};

}  // namespace sharpi
