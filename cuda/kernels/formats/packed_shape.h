// Where the planes of a packed matrix lie, and how many bytes they take. This is plain arithmetic, so that planning
// needs neither a GPU nor its compiler.
//
// A packed matrix is a few contiguous planes: one holds the codes of all blocks, another their extra bits, another
// their scales. Blocks of 32 elements have the numbers n = row * (cols / 32) + block, and superblocks of 256 elements n
// / 8. A plane has the same number of bytes for each of them. formats.cuh says what the bytes mean.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace sharpi::cuda {

struct PackedShape {
    static constexpr int kPlanes = 4;
    int64_t rows = 0, cols = 0;
    int64_t plane[kPlanes] = {};  // bytes from the matrix's data, multiples of 16
    int64_t bytes = 0;
};

// Bytes of a plane for each block (blocks = 1), superblock (blocks = 8) or block of the file (blocks = 4, those of
// Q1_0). 0 bytes: there is no such plane.
struct PlaneSize {
    int bytes = 0, blocks = 1;
};
struct PlaneSizes {
    PlaneSize plane[PackedShape::kPlanes];
};

constexpr PlaneSizes planeSizes(DType type) {
    switch (type) {
    case DType::Q4_0:
    case DType::IQ4_NL: return {{{16, 1}, {2, 1}}};
    case DType::Q4_1: return {{{16, 1}, {4, 1}}};
    case DType::Q5_0: return {{{16, 1}, {4, 1}, {2, 1}}};
    case DType::Q5_1: return {{{16, 1}, {4, 1}, {4, 1}}};
    case DType::Q8_0: return {{{16, 1}, {16, 1}, {2, 1}}};
    case DType::MXFP4: return {{{16, 1}, {1, 1}}};
    case DType::Q2_K: return {{{8, 1}, {2, 1}, {4, 8}}};
    case DType::Q3_K: return {{{8, 1}, {4, 1}, {12, 8}, {2, 8}}};
    case DType::Q4_K: return {{{16, 1}, {16, 8}}};
    case DType::Q5_K: return {{{16, 1}, {4, 1}, {16, 8}}};
    case DType::Q6_K: return {{{16, 1}, {8, 1}, {2, 1}, {2, 8}}};
    case DType::IQ4_XS: return {{{16, 1}, {8, 8}}};
    case DType::IQ2_XXS: return {{{8, 1}, {2, 8}}};
    case DType::IQ2_XS: return {{{8, 1}, {1, 1}, {2, 8}}};
    case DType::IQ2_S: return {{{8, 1}, {2, 1}, {2, 8}}};
    case DType::IQ3_XXS: return {{{8, 1}, {4, 1}, {2, 8}}};
    case DType::IQ3_S: return {{{8, 1}, {4, 1}, {1, 1}, {6, 8}}};
    case DType::IQ1_S: return {{{4, 1}, {2, 1}, {2, 8}}};
    case DType::IQ1_M: return {{{4, 1}, {2, 1}, {8, 8}}};
    case DType::TQ1_0: return {{{4, 1}, {20, 8}, {2, 8}}};
    case DType::TQ2_0: return {{{8, 1}, {2, 8}}};
    case DType::NVFP4: return {{{16, 1}, {2, 1}}};
    case DType::Q1_0: return {{{4, 1}, {2, 4}}};
    case DType::F32:
    case DType::F16:
    case DType::BF16:
    case DType::I32: return {};  // rows as they are in the file
    }
    return {};
}

// Throws Error(InvalidArgument) if cols is not a whole number of the type's blocks.
inline PackedShape packedShape(DType type, int64_t rows, int64_t cols) {
    const auto roundUp = [](int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; };
    PackedShape shape;
    shape.rows = rows;
    shape.cols = cols;
    const int64_t fileBytes = rows * static_cast<int64_t>(rowBytes(type, cols));
    const PlaneSizes sizes = planeSizes(type);
    int64_t end = info(type).isFloat ? fileBytes : 0;
    for (int p = 0; p < PackedShape::kPlanes; ++p) {
        const PlaneSize& size = sizes.plane[p];
        shape.plane[p] = size.bytes == 0 ? 0 : roundUp(end, 16);
        if (size.bytes != 0) end = shape.plane[p] + rows * (cols / 32) / size.blocks * size.bytes;
    }
    // Whole cache lines, so that every matrix of a stack is aligned like the first.
    shape.bytes = roundUp(end, 128);
    return shape;
}

// Bytes of a packed matrix: at most 1 % (or 256 bytes) more than in the file.
inline size_t packedBytes(DType type, int64_t rows, int64_t cols) {
    return static_cast<size_t>(packedShape(type, rows, cols).bytes);
}

}  // namespace sharpi::cuda
