// A model's weights as backends take them: each with the place where its processor finds it.
#pragma once

#include <cstdint>

#include "core/matrix.h"

namespace sharpi {

// A matrix: resident (data is where the processor reads it), or in the file, from where memory/stream/weight_stream.h
// brings it.
struct Weight : Matrix {
    int32_t group = -1;             // in the weight stream; -1: it needs no stream
    int32_t member = 0;             // among the matrices of the group
    const uint8_t* file = nullptr;  // its rows in the mapped file; nullptr when only planning
    int64_t cpuRows = 0;            // its last rows, which the CPU computes in steps
    bool resident() const { return data != nullptr; }
    Matrix inFile() const { return {type, rows, cols, file}; }
    int64_t deviceRows() const { return rows - cpuRows; }
};

// A layer's experts: resident, or in the file. The stacks of all layers are resident together, or none is.
struct WeightStack : MatrixStack {
    int32_t group = -1;
    MatrixStack file;  // in the mapped file; null addresses when only planning
    bool resident() const { return first.data != nullptr; }
};

// Cosines and sines of the angles by which heads are rotated.
struct RopeTable {
    const float* cos = nullptr;  // [context, dims / 2]
    const float* sin = nullptr;
    int32_t dims = 0;  // leading elements of a head that are rotated; 0: none
    bool adjacent = false;
    bool last = false;  // the last elements instead
    // The first element that is rotated of a head of `size`.
    int64_t begin(int64_t size) const { return last ? size - dims : 0; }
};

}  // namespace sharpi
