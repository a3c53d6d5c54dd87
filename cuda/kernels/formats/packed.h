// Weights in device memory: a file's rows rearranged into planes that a warp reads in whole words. The numbers are the
// file's, only their places change, so every product keeps its bits.
#pragma once

#include "core/matrix.h"
#include "device/stream.h"
#include "kernels/formats/packed_shape.h"  // packedBytes

namespace sharpi::cuda {

// Rearranges `rows` file rows at `file` (device memory, any alignment) into the places of rows [rowBegin, rowBegin +
// rows) of the packed matrix `to` (its data is device memory of packedBytes(type, to.rows, to.cols), 256-byte aligned;
// in a stack, 128-byte).
void packRows(Stream& stream, const Matrix& to, int64_t rowBegin, int64_t rows, const uint8_t* file);

// out[t, :] = row index[t] of the packed table as floats, the bits of the CPU's dequantizeRow. out is 16-byte aligned.
void embed(Stream& stream, const Matrix& table, const int32_t* index, int64_t count, float* out);
// The same from a table as it lies in the file (any alignment), in memory that the device can read: its own, or pinned
// pages of the host's, of which only the rows asked for cross, in whole aligned pieces of 16 bytes.
void embedFromFile(Stream& stream, const Matrix& table, const int32_t* index, int64_t count, float* out);

}  // namespace sharpi::cuda
