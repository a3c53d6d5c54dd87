// A model's weights as backends take them: each with where its processor finds it.
#pragma once

#include <vector>

#include "core/matrix.h"
#include "model/model_spec.h"

namespace sharpi {

// A matrix: resident (data is where the processor reads it), or in the file, from where memory/weight_stream.h brings
// it.
struct Weight : Matrix {
    int32_t group = -1;             // in the weight stream; -1: there from the beginning
    int32_t member = 0;             // among the matrices of the group
    const uint8_t* file = nullptr;  // its rows in the mapped file; nullptr when only planning
    int64_t cpuRows = 0;            // its last rows that the CPU computes in steps
    bool resident() const { return data != nullptr; }
    Matrix inFile() const { return {type, rows, cols, file}; }
    int64_t deviceRows() const { return rows - cpuRows; }
};

// A layer's experts: resident, or in the file. Of all layers' stacks all are here, or all there.
struct WeightStack : MatrixStack {
    int32_t group = -1;
    MatrixStack file;  // in the mapped file; null addresses when only planning
    bool resident() const { return first.data != nullptr; }
};

struct RopeTable {
    const float* cos = nullptr;  // [context, dims / 2]
    const float* sin = nullptr;
    int32_t dims = 0;
    bool adjacent = false;
};

struct AttentionWeights {
    const float* norm = nullptr;
    Weight q, k, v, output;
    const float *qBias = nullptr, *kBias = nullptr, *vBias = nullptr, *outputBias = nullptr;  // may be absent
    const float *qNorm = nullptr, *kNorm = nullptr;
    AttentionSpec::QkNorm qkNorm = AttentionSpec::QkNorm::None;
    int32_t heads = 0;
    float scale = 1.0f;
    bool gated = false;  // q's rows are, for each head, its query's and then its gate's
    RopeTable rope;
};

struct GatedDeltaWeights {
    const float* norm = nullptr;
    Weight qkv, gate, alpha, beta, output;
    const float* conv = nullptr;                        // [convWidth, channels]: turned around from the file's
    const float *stepBias = nullptr, *decay = nullptr;  // [value heads]
    const float* headNorm = nullptr;                    // [headDim]
    int32_t keyHeads = 0, valueHeads = 0, headDim = 0, convWidth = 0;
};

struct DenseWeights {
    const float* norm = nullptr;
    Weight gate, up, down;
};

struct SharedExpertWeights {
    const float* scale = nullptr;  // [embedding]
    Weight gate, up, down;
};

struct ExpertWeights {
    const float* norm = nullptr;
    Weight router;
    WeightStack gate, up, down;
    int32_t row = 0;  // this layer's number among those with experts: in statistics, and in the cache of single experts
    int32_t used = 0;
    bool renormalize = true;
    float weightScale = 1.0f;
    std::optional<SharedExpertWeights> shared;
    const ExpertWeights* next = nullptr;  // of the next layer with experts
    ExpertStacks inFile() const { return {gate.file, up.file, down.file}; }
};

struct LayerWeights {
    std::optional<AttentionWeights> attention;  // exactly one of the two
    std::optional<GatedDeltaWeights> delta;
    std::optional<DenseWeights> dense;  // exactly one of the two
    std::optional<ExpertWeights> experts;
};

struct HeadWeights {
    const float* norm = nullptr;
    Weight output;
};

// See PredictionSpec.
struct PredictionWeights {
    Weight embedding;
    const float* norms = nullptr;  // [2, embedding]: of the token's embedding, and of the row gone on from
    Weight projection;
    LayerWeights layer;
    HeadWeights head;
};

}  // namespace sharpi
