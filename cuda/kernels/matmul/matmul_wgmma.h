// Where prefill's matrix products go on Hopper (matmul_wgmma.cuh), for matmul.cu.
#pragma once

#include "core/dtype.h"
#include "device/stream.h"

namespace sharpi::cuda {

struct MatmulCall;

// The plain form of the product. False, with nothing launched, where it cannot be done so: another device, a build
// without Hopper's own instructions (the "a" in the architecture 90a), F32, rows that are not whole 16-byte words, or
// SHARPI_CUDA_WGMMA=0.
bool matmulByWarpgroups(Stream& stream, const MatmulCall& call, DType type);
// Its part for so few rows that weights are what takes time (matmul_few_wgmma.cu), with the same bits. False where
// there are more.
bool matmulOfFewRows(Stream& stream, const MatmulCall& call, DType type);

}  // namespace sharpi::cuda
