// Asynchronous copies into shared memory (cp.async, since compute capability 8.0). Earlier devices copy at once.
#pragma once

#include <cstdint>

namespace sharpi::cuda {

__device__ __forceinline__ uint32_t sharedAddress(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies kBytes, 4, 8 or 16, between addresses that are aligned to them, through the L1 cache.
template <int kBytes> __device__ __forceinline__ void copyToShared(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(sharedAddress(to)),
                 "l"(__cvta_generic_to_global(from)), "n"(kBytes)
                 : "memory");
#else
    if (kBytes == 16) *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
    else if (kBytes == 8) *static_cast<uint2*>(to) = *static_cast<const uint2*>(from);
    else *static_cast<uint32_t*>(to) = *static_cast<const uint32_t*>(from);
#endif
}

// Closes the group of the copies that this thread has started since the last call.
__device__ __forceinline__ void closeCopies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of this thread's groups are in flight.
template <int kPending> __device__ __forceinline__ void waitForCopies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace sharpi::cuda
