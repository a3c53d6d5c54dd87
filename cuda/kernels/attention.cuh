// What the attention kernels share: the page they are built for, what the device can hold, and pairs of halves.
#pragma once

#include <string>

#include "core/error.h"
#include "kernels/attention.h"
#include "kernels/device_rows.cuh"

namespace sharpi::cuda {

// Tokens of a page: two keys a lane in decode, one tile of keys in prefill.
constexpr int kAttentionPage = 64;
constexpr int kMaxHeadDim = 256;

inline int deviceAttribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    check(cudaGetDevice(&device), "the current device");
    check(cudaDeviceGetAttribute(&value, attribute, device), "a device attribute");
    return value;
}

inline int sharedBytesPerBlock() { return deviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

inline void requireAttendable(const HeadShape& shape, const KvPages& pages) {
    if (shape.headDim % 8 != 0 || shape.headDim <= 0 || shape.headDim > kMaxHeadDim || shape.heads % shape.kvHeads != 0 ||
        shape.heads / shape.kvHeads > 32) {
        throw Error(ErrorKind::InvalidArgument, "attention with " + std::to_string(shape.heads) + " heads over " +
                                                    std::to_string(shape.kvHeads) + " of " + std::to_string(shape.headDim) +
                                                    " elements cannot run on the GPU: heads of 8, 16, .. 256 elements, groups of up to 32");
    }
    if (pages.pageTokens != kAttentionPage) throw Error(ErrorKind::Internal, "attention kernels asked for pages of another size");
}

// Two neighbouring elements at `at` (even) of the flat arrays.
__device__ __forceinline__ void storeHalfPair(const HalfRows& to, int64_t at, float first, float second) {
    const HalfPair a = splitHalf(first), b = splitHalf(second);
    reinterpret_cast<uint32_t*>(to.hi)[at / 2] = static_cast<uint32_t>(a.hi) | static_cast<uint32_t>(b.hi) << 16;
    if (to.lo) reinterpret_cast<uint32_t*>(to.lo)[at / 2] = static_cast<uint32_t>(a.lo) | static_cast<uint32_t>(b.lo) << 16;
}

}  // namespace sharpi::cuda
