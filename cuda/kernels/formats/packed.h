// Weights in device memory: a file's rows, rearranged into planes that a warp reads in whole words. Only the places of
// the numbers change, so every product keeps its bits.
#pragma once

#include "core/matrix.h"
#include "device/stream.h"
#include "kernels/formats/packed_shape.h"  // packedBytes

namespace sharpi::cuda {

// Packs `rows` rows of a file at `file` (device memory, any alignment) as rows [rowBegin, rowBegin + rows) of the
// matrix `to`. Its data is device memory of packedBytes(type, to.rows, to.cols), 256-byte aligned, or 128-byte in a
// stack.
void packRows(Stream& stream, const Matrix& to, int64_t rowBegin, int64_t rows, const uint8_t* file);

// out[t, :] = row index[t] of the packed table as floats, the bits of the CPU's dequantizeRow. out is 16-byte aligned.
void embed(Stream& stream, const Matrix& table, const int32_t* index, int64_t count, float* out);
// out[t, :] = row t of rows as they lie in the file (any alignment), as floats, with the same bits. They are in memory
// that the device can read: its own, or pinned memory of the host's. They cross PCIe once, in whole aligned pieces of
// 16 bytes.
void expandRows(Stream& stream, const Matrix& rows, float* out);

}  // namespace sharpi::cuda
