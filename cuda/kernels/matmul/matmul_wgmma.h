// The matrix products of prefill on Hopper (matmul_wgmma.cuh), as matmul.cu calls them.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/stream.h"

namespace sharpi::cuda {

struct MatmulCall;

// Launches the product in its plain form. Returns false and launches nothing if Hopper's instructions cannot do it: on
// another device, in a build without them (the "a" in the architecture 90a), for F32 weights, for rows that are not
// whole 16-byte words, or with SHARPI_CUDA_WGMMA=0.
bool matmulByWarpgroups(Stream& stream, const MatmulCall& call, DType type);

// The most pairs of an expert's tile for these kernels, and whether they are the ones that run on the device.
constexpr int kWarpgroupExpertTile = 160;
bool runsByWarpgroups(const DeviceInfo& device);

// --- what matmulByWarpgroups alone calls ---

// The same bits for up to 16 rows, where reading the weights takes the time (matmul_few_wgmma.cu). Returns false and
// launches nothing for more rows.
bool matmulOfFewRows(Stream& stream, const MatmulCall& call, DType type);
// The same bits in tiles of 64 outputs and 64 or 128 rows (matmul_small_wgmma.cu).
void matmulInSmallTiles(Stream& stream, const MatmulCall& call, DType type, int tileRows);

// The outputs and the rows of the tiles in which `rows` rows are multiplied soonest by `matrices` matrices with
// `outputs` rows each.
struct MatmulTile {
    int outputs, rows;
};
MatmulTile chooseTile(int64_t rows, int64_t outputs, int64_t matrices, int multiprocessors);

}  // namespace sharpi::cuda
