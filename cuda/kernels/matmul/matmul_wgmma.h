// The matrix products of prefill on Hopper (matmul_wgmma.cuh), as matmul.cu calls them.
#pragma once

#include <cstdint>

#include "device/stream.h"

namespace sharpi::cuda {

struct MatmulCall;

// Whether Hopper's instructions can do the product in its plain form. They cannot on another device, in a build without
// them (the "a" in the architecture 90a), for F32 weights, for rows that are not whole 16-byte words, or with
// SHARPI_CUDA_WGMMA=0.
bool takesWarpgroups(const Stream& stream, const MatmulCall& call);
void matmulByWarpgroups(Stream& stream, const MatmulCall& call);

// Whether the product has so few rows that loading and expanding its weights takes most of the time. Such products have
// a kernel of their own (matmul_few.cuh), with the same bits.
bool hasFewRows(const MatmulCall& call);
void matmulOfFewRows(Stream& stream, const MatmulCall& call);
constexpr int kMostFewItems = 256;  // tiles of up to 64 rows that a block can note down

// The most pairs of an expert's tile for these kernels, and whether they are the ones that run on the device.
constexpr int kWarpgroupExpertTile = 160;
bool runsByWarpgroups(const DeviceInfo& device);

// --- what matmulByWarpgroups alone calls ---

// The same bits in tiles of 64 outputs and 128 rows (matmul_small_wgmma.cu).
void matmulInSmallTiles(Stream& stream, const MatmulCall& call);

}  // namespace sharpi::cuda
