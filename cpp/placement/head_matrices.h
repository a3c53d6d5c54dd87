// Matrices of heads that are made when they are loaded. Older files of latent attention have one matrix for the keys
// and values of all heads, in which the rows of both alternate by head; see WeightForm::HeadRows.
#pragma once

#include <cstdint>
#include <vector>

#include "core/matrix.h"
#include "model/weight_registry.h"

namespace sharpi {

// Type and shape of the matrix that a slice with one of these forms gives; its data is null. whole: the slice's tensor.
Matrix headMatrix(const ListedWeight& weight, const Matrix& whole);
// Its bytes, row by row. whole.data: where the tensor's bytes start. toFloats: cpu::Kernels::dequantizeRow.
using ToFloats = void (*)(DType type, const void* row, int64_t cols, float* out);
std::vector<uint8_t> headMatrixBytes(const ListedWeight& weight, const Matrix& whole, ToFloats toFloats);

}  // namespace sharpi
