// The matrix products of prefill on Hopper (matmul_wgmma.cuh), as matmul.cu calls them.
#pragma once

#include "core/dtype.h"
#include "device/stream.h"

namespace sharpi::cuda {

struct MatmulCall;

// Launches the product in its plain form. Returns false and launches nothing if Hopper's instructions cannot do it: on
// another device, in a build without them (the "a" in the architecture 90a), for F32 weights, for rows that are not
// whole 16-byte words, or with SHARPI_CUDA_WGMMA=0.
bool matmulByWarpgroups(Stream& stream, const MatmulCall& call, DType type);
// The same bits for up to 16 rows, where reading the weights takes the time (matmul_few_wgmma.cu). Returns false and
// launches nothing for more rows. Asked by matmulByWarpgroups alone.
bool matmulOfFewRows(Stream& stream, const MatmulCall& call, DType type);

}  // namespace sharpi::cuda
