// What file_formats.cuh and file_grids.cuh share.
#pragma once

#include "kernels/formats/format_parts.cuh"

namespace sharpi::cuda {

__device__ __forceinline__ int nibbleOf(const uint8_t* quants, int i) { return quants[i & 15] >> (i >> 4) * 4 & 15; }

// Bit j of byte i, and bits 2 j, 2 j + 1.
__device__ __forceinline__ int bitOf(const uint8_t* bytes, int i, int j) { return bytes[i] >> j & 1; }
__device__ __forceinline__ int pairOf(const uint8_t* bytes, int i, int j) { return bytes[i] >> 2 * j & 3; }

// code() is element i (0 .. 31) of the block's 32-block j (0 if the type's blocks have 32 elements), as stored: the
// offset is not subtracted, a table type has its index rather than the value, and Q8_0's byte is unsigned.
template <DType T> struct FileFormat;

}  // namespace sharpi::cuda
